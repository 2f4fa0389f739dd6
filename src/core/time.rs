//! Points of monotonic time.

use std::time::Duration;

/// A point on the machine's monotonic clock, in microseconds. All workers of a process read the same clock.
///
/// Zero is never a real reading: it stands for "never".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(pub u64);

impl Instant {
    /// The time from `earlier` until this point; zero if `earlier` lies ahead, as after a clock that stepped back.
    pub fn since(self, earlier: Instant) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// Whole milliseconds; of times that no number holds, the most there are.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl std::ops::Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, time: Duration) -> Instant {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Instant(self.0.saturating_add(micros))
    }
}
