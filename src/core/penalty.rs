//! What a host's failures cost it before they are enough in a row to eject it.
//!
//! A host that fails at once has few jobs in flight and no latency worth mentioning: by its score it is the best of all. So failures raise
//! the score itself, as the load biaser of linkerd raises a failing endpoint's peak-EWMA cost, and as Finagle's peak EWMA multiplies a cost by the
//! jobs in flight: a factor works at 2 jobs in flight as at 50, where a summand would not.
//!
//! ```text
//! rate  ← rate·f + (1 − rate·f)/10      after a failure
//! rate  ← rate·f · 9/10                 after a success
//! score ← score × (1 + 16 × rate)       f = e^(−min(Δt / (τ/3), Δjobs / (60·hosts)))      τ = ewma.time_constant_ms
//! ```
//!
//! The rate is the failing part of the last ten jobs or so. A host that fails every third job settles near 1/3, and its score at six times that
//! of a sound one; a single failure in a hundred jobs is forgotten after about twenty. It fades, so that a host that nobody chooses is tried again:
//! with time, but no faster than the pool has given out 60 jobs for each host. A pool whose jobs take a minute would otherwise forget each failure
//! before the next job.

use std::time::Duration;

use super::ewma::Fading;
use super::record::{Header, Host};
use super::time::Instant;

/// What one outcome weighs.
const WEIGHT: f32 = 0.1;

/// How much the score rises with the rate.
const FACTOR: f32 = 16.0;

/// A lower rate is none: otherwise a host would be behind its peers for as long as the tie band can tell.
const NEGLIGIBLE: f32 = 0.01;

/// The jobs for each host, given out by the pool, after which the rate may have fallen to 37 %.
const JOBS: f32 = 60.0;

/// How fast it fades.
#[derive(Clone, Copy, Debug)]
pub struct Fade {
    time: Fading,
    placed: u32,
    per_job: f32,
}

impl Fade {
    /// With this time constant of the latency, in the pool of this record.
    pub fn new(time_constant: Duration, header: &Header) -> Self {
        let per_job = 1.0 / (JOBS * header.hosts.max(1) as f32);
        Self { time: Fading::new(time_constant / 3), placed: header.placed, per_job }
    }

    /// What is left of a rate.
    fn since(self, host: &Host, now: Instant) -> f32 {
        let by_jobs = Fading::by(self.placed.wrapping_sub(host.rated_at) as f32 * self.per_job);
        self.time.after(now, Instant(host.rated)).max(by_jobs)
    }
}

/// What a host's score is multiplied by: 1 for a host that does not fail.
pub fn factor(host: &Host, now: Instant, fade: Fade) -> f64 {
    if host.failure_rate == 0.0 {
        return 1.0;
    }
    let rate = faded(host, now, fade);
    if rate < NEGLIGIBLE { 1.0 } else { 1.0 + f64::from(FACTOR * rate) }
}

/// A failure raises the rate.
pub fn raise(host: &mut Host, now: Instant, fade: Fade) {
    let rate = faded(host, now, fade);
    (host.failure_rate, host.rated, host.rated_at) = (rate + WEIGHT * (1.0 - rate), now.0, fade.placed);
}

/// A success lowers the rate.
pub fn lower(host: &mut Host, now: Instant, fade: Fade) {
    // That of a sound host does not change, and so costs no other host's score its place.
    if host.failure_rate == 0.0 {
        return;
    }
    let rate = faded(host, now, fade) * (1.0 - WEIGHT);
    let rate = if rate < NEGLIGIBLE { 0.0 } else { rate };
    (host.failure_rate, host.rated, host.rated_at) = (rate, now.0, fade.placed);
}

/// The rate now; within 0..=1 whatever the record holds.
fn faded(host: &Host, now: Instant, fade: Fade) -> f32 {
    let rate = host.failure_rate * fade.since(host, now);
    if rate.is_finite() { rate.clamp(0.0, 1.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::at;

    const MOST: f64 = 1.0 + FACTOR as f64;

    /// In a pool of four that has given out so many jobs.
    fn fade_at(placed: u32) -> Fade {
        Fade::new(Duration::from_secs(30), &Header { placed, hosts: 4, ..Header::default() })
    }

    fn fade() -> Fade {
        fade_at(0)
    }

    /// The factor after so many jobs, every `nth` of which fails.
    fn settled(nth: u32) -> f64 {
        let mut host = Host::default();
        for job in 1..=100 {
            if job % nth == 0 { raise(&mut host, at(1.0), fade()) } else { lower(&mut host, at(1.0), fade()) }
        }
        factor(&host, at(1.0), fade())
    }

    #[test]
    fn a_sound_host_has_none() {
        assert_eq!(factor(&Host::default(), at(9.0), fade()), 1.0);
        let mut host = Host::default();
        lower(&mut host, at(9.0), fade());
        assert_eq!(host, Host::default());
    }

    #[test]
    fn it_grows_with_the_part_that_fails() {
        let (always, half, third, tenth) = (settled(1), settled(2), settled(3), settled(10));
        assert!(always > 16.9 && always <= MOST, "{always}");
        assert!((8.0..11.0).contains(&half), "{half}");
        assert!((5.0..9.0).contains(&third), "{third}");
        assert!((1.5..5.0).contains(&tenth), "{tenth}");
    }

    #[test]
    fn it_fades_to_nothing_with_time_and_with_successes() {
        let mut host = Host::default();
        raise(&mut host, at(1.0), fade());
        assert!(factor(&host, at(1.0), fade()) > 2.5);
        assert!(factor(&host, at(11.0), fade_at(1000)) < 1.7);
        assert_eq!(factor(&host, at(25.0), fade_at(1000)), 1.0);
        assert!(factor(&host, at(1e6), fade()) > 2.5, "the pool has had no job");
        assert!(factor(&host, at(1.0), fade_at(1000)) > 2.5, "no time has passed");
        assert!(factor(&host, at(1e6), fade_at(240)) < 1.7);
        (0..22).for_each(|_| lower(&mut host, at(1.0), fade()));
        assert_eq!(host.failure_rate, 0.0);
    }

    #[test]
    fn a_record_that_holds_nonsense_makes_no_host_win_or_lose_for_ever() {
        for failure_rate in [f32::NAN, f32::INFINITY, -3.0, 1e30] {
            let mut host = Host::default();
            (host.failure_rate, host.rated) = (failure_rate, at(1.0).0);
            let factor = factor(&host, at(1.0), fade());
            assert!((1.0..=MOST).contains(&factor), "{failure_rate}: {factor}");
        }
    }
}
