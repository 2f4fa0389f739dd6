//! `least_score`: jobs in flight and latency.
//!
//! ```text
//! score = in_flight_weight × (in_flight + 1) / weight + latency_weight × latency / target_latency        lowest wins
//! ```
//!
//! The whole is multiplied by the host's [`crate::core::penalty`], which is 1 as long as it does not fail.
//!
//! The `+ 1` is the job being placed: without it an empty host of weight 1 would beat an empty one of weight 4 as often as not, and a
//! heavy host with one job would lose to a light one with none. The latency is the host's EWMA, faded towards the pool's mean by its age
//! ([`crate::core::ewma`]); a host without history has the mean. The mean weighs each host by the freshness of its evidence, so that a host
//! that was slow long ago does not hold up the mean towards which it is to fade.

use crate::config::Score;
use crate::core::ewma::{Ewma, Fading, LONGEST_MS};
use crate::core::time::Instant;

/// The first summand, of a host with so many jobs in flight; `per_job` is `in_flight_weight / weight`.
#[inline]
pub fn of_jobs(load: u32, per_job: f64) -> f64 {
    per_job * (f64::from(load) + 1.0)
}

/// The second summand, for all hosts of a pool.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    mean: f32,
    per_milli: f64,
    now: Instant,
    fading: Fading,
}

impl Latency {
    /// Prepares it from the latencies of the pool's hosts.
    pub fn new(score: &Score, averages: impl Iterator<Item = Ewma>, now: Instant, fading: Fading) -> Self {
        // So small that it counts only where every host's evidence has faded: then the mean is the plain one.
        const LEAST: f32 = 1e-6;
        let known = averages.filter(|ewma| ewma.millis > 0.0);
        let (sum, weights) = known.fold((0.0, 0.0), |(sum, weights), ewma| {
            let weight = ewma.freshness(now, fading) + LEAST;
            (sum + weight * ewma.millis, weights + weight)
        });
        let mean = if weights > 0.0 { sum / weights } else { 0.0 };
        let per_milli = f64::from(score.latency_weight) / (score.target_latency.as_secs_f64() * 1e3);
        Self { mean, per_milli, now, fading }
    }

    /// A host's latency in milliseconds, faded towards the mean.
    pub fn faded(&self, ewma: Ewma) -> f32 {
        let faded = self.mean + (ewma.millis - self.mean) * ewma.freshness(self.now, self.fading);
        // A record that holds nonsense must not make a host win or lose for ever.
        if faded.is_finite() { faded.clamp(0.0, LONGEST_MS) } else { 0.0 }
    }

    /// The pool's mean latency in milliseconds; 0 if no host has a history.
    pub fn mean(&self) -> f32 {
        self.mean
    }

    /// The summand of a host with this latency; always finite, and below 10¹¹ whatever the configuration.
    pub fn of(&self, ewma: Ewma) -> f64 {
        self.per_milli * f64::from(self.faded(ewma))
    }
}
