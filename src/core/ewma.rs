//! A host's latency: an exponentially weighted moving average over irregular samples, which fades when no samples come.
//!
//! Update, as in Finagle's and linkerd's EWMA: `e ← w·e + (1 − w)·sample`, `w = exp(−Δt/τ)`, where `Δt` is the time since the
//! last sample and `τ` the `ewma.time_constant_ms`. Those two let an idle host's estimate decay to zero, and then send it a burst.
//! Here it decays towards the pool's mean instead: an idle host is neither punished for ever for one slow job, nor
//! taken for instant.

use std::time::Duration;

use super::time::Instant;

/// Longer than any job is waited for (a day, in milliseconds); it also keeps every score within the bounds that the choice relies on.
pub const LONGEST_MS: f32 = 86_400_000.0;

/// A host's average latency and when it was last fed. The default is "no history".
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ewma {
    /// Milliseconds.
    pub millis: f32,
    /// When the last sample came; [`Instant`] zero if none ever did.
    pub fed: Instant,
}

impl Ewma {
    /// Whether any sample ever came.
    pub fn has_history(self) -> bool {
        self.fed != Instant::default()
    }

    /// Whether a sample is worth asking for: one that comes within a thousandth of the time constant after the last weighs less than 0.1 %, and
    /// the next one weighs that much more.
    pub fn wants_sample(self, now: Instant, time_constant: Duration) -> bool {
        !(self.fed..self.fed + time_constant / 1000).contains(&now)
    }

    /// The average with one more sample. A first sample is taken as it is.
    #[must_use]
    pub fn with(self, sample: Duration, now: Instant, time_constant: Duration) -> Self {
        let sample = (sample.as_secs_f32() * 1000.0).min(LONGEST_MS);
        let fed = Instant(now.0.max(1));
        if !self.has_history() {
            return Self { millis: sample, fed };
        }
        let weight = (-now.since(self.fed).as_secs_f32() / time_constant.as_secs_f32()).exp();
        Self { millis: weight * self.millis + (1.0 - weight) * sample, fed }
    }

    /// How much of the average still stands after the time without a sample: 1 when just fed, towards 0 with age; 0 without history.
    #[inline]
    pub fn freshness(self, now: Instant, fading: Fading) -> f32 {
        if self.has_history() { fading.after(now, self.fed) } else { 0.0 }
    }
}

/// How fast averages fade, prepared for many hosts.
#[derive(Clone, Copy, Debug)]
pub struct Fading(f32);

impl Fading {
    /// With this time constant.
    pub fn new(time_constant: Duration) -> Self {
        Self(1.0 / (16.0 * time_constant.as_secs_f32() * 1e6))
    }

    /// `(1 − x/16)¹⁶` for `exp(−x)`, where `x = Δt/τ`: five multiplications instead of a library call for each host of each choice, monotone, and
    /// within 0.018 of it everywhere.
    #[inline]
    pub fn after(self, now: Instant, fed: Instant) -> f32 {
        // A signed number, which processors convert faster; it cannot be negative within 292,000 years.
        let age = now.0.saturating_sub(fed.0) as i64;
        Self::of_sixteenths(age as f32 * self.0)
    }

    /// The same for an exponent that is no time.
    pub fn by(exponent: f32) -> f32 {
        Self::of_sixteenths(exponent / 16.0)
    }

    #[inline]
    fn of_sixteenths(part: f32) -> f32 {
        let base = (1.0 - part).clamp(0.0, 1.0);
        let squared = |x: f32| x * x;
        squared(squared(squared(squared(base))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAU: Duration = Duration::from_secs(30);

    fn at(seconds: f64) -> Instant {
        Instant((seconds * 1e6) as u64)
    }

    #[test]
    fn the_first_sample_is_the_average() {
        let ewma = Ewma::default().with(Duration::from_millis(800), at(5.0), TAU);
        assert_eq!(ewma, Ewma { millis: 800.0, fed: at(5.0) });
    }

    #[test]
    fn a_sample_after_one_time_constant_counts_for_63_percent() {
        let ewma = Ewma { millis: 1000.0, fed: at(10.0) }.with(Duration::ZERO, at(40.0), TAU);
        assert!((ewma.millis - 1000.0 * (-1f32).exp()).abs() < 0.1, "{ewma:?}");
    }

    #[test]
    fn a_sample_that_would_weigh_less_than_a_thousandth_is_not_asked_for() {
        let ewma = Ewma { millis: 1000.0, fed: at(10.0) };
        assert!(!ewma.wants_sample(at(10.029), TAU));
        assert!(ewma.wants_sample(at(10.03), TAU));
        assert!(ewma.wants_sample(at(9.0), TAU), "the clock stepped back");
        assert!(Ewma::default().wants_sample(at(10.0), TAU), "no history");
    }

    #[test]
    fn a_clock_that_steps_back_costs_one_sample() {
        let before = Ewma { millis: 1000.0, fed: at(100.0) };
        let after = before.with(Duration::from_secs(9), at(50.0), TAU);
        assert_eq!(after, Ewma { millis: 1000.0, fed: at(50.0) });
        assert!(after.with(Duration::from_secs(9), at(80.0), TAU).millis > 5000.0);
        assert_eq!(before.freshness(at(50.0), Fading::new(TAU)), 1.0);
    }

    #[test]
    fn freshness_is_close_to_the_exponential_and_falls_monotonically() {
        let ewma = Ewma { millis: 1.0, fed: at(1.0) };
        let mut last = 1.0;
        for step in 0..3_000 {
            let age = f64::from(step) * 0.3;
            let fresh = ewma.freshness(at(1.0 + age), Fading::new(TAU));
            assert!((fresh - (-age as f32 / 30.0).exp()).abs() < 0.018, "after {age} s: {fresh}");
            assert!(fresh <= last, "rises after {age} s");
            last = fresh;
        }
        assert_eq!(last, 0.0);
    }
}
