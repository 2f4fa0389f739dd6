//! The score of a host: `least_score`.
//!
//! ```text
//! score = in_flight_weight × (in_flight + 1) / weight + latency_weight × latency / target_latency        lowest wins
//! ```
//!
//! The whole is multiplied by the host's [`super::penalty`], which is 1 as long as it does not fail.
//!
//! The `+ 1` is the job being placed: without it an empty host of weight 1 would beat an empty one of weight 4 as often as not, and a
//! heavy host with one job would lose to a light one with none. The latency is the host's EWMA, faded towards the pool's mean by its age
//! ([`super::ewma`]); a host without history has the mean. The mean weighs each host by the freshness of its evidence, so that a host
//! that was slow long ago does not hold up the mean towards which it is to fade.

use super::ewma::{Ewma, Fading, LONGEST_MS};
use super::penalty::{self, Fade};
use super::record::{Host, Record};
use super::time::Instant;
use crate::config::Score;

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

    /// The pool's mean latency in milliseconds; 0 if no host has a history.
    pub fn mean(&self) -> f32 {
        self.mean
    }

    /// The summand of a host with this latency; always finite, and below 10¹¹ whatever the configuration.
    pub fn of(&self, ewma: Ewma) -> f64 {
        let faded = self.mean + (ewma.millis - self.mean) * ewma.freshness(self.now, self.fading);
        // A record that holds nonsense must not make a host win or lose for ever.
        if faded.is_finite() { self.per_milli * f64::from(faded.clamp(0.0, LONGEST_MS)) } else { 0.0 }
    }
}

/// The scores of all hosts by slot, with the parameters that the record shows: for the status page.
pub fn scores(record: &Record, now: Instant) -> Vec<f64> {
    let score = record.header.score();
    let averages = record.hosts().map(|host| host.ewma());
    let fade = Fade::new(record.header.time_constant(), &record.header);
    let latency = Latency::new(&score, averages, now, Fading::new(record.header.time_constant()));
    let slow_start = record.header.slow_start();
    let weight = |host: &Host| f64::from(host.weight) * host.ramp(slow_start, now);
    let per_job = |host: &Host| f64::from(score.in_flight_weight) / weight(host);
    let of_host =
        |host: Host| (of_jobs(host.load(), per_job(&host)) + latency.of(host.ewma())) * penalty::factor(&host, now, fade);
    record.hosts().map(of_host).collect()
}
