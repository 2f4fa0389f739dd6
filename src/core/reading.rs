//! What hosts tell of themselves.
//!
//! Hosts tell anything: a gauge that was never set is NaN, one that counts down too often is negative, one in the wrong unit is huge. What cannot be
//! true is no value, and no value is never taken for 0: a host that says nothing of use is an unknown one, not an idle one.

/// What a host told of itself; what it did not tell is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Jobs that it runs, 0 to [`MOST_JOBS`].
    pub running: Option<f32>,
    /// Jobs that wait in it, 0 to [`MOST_JOBS`].
    pub waiting: Option<f32>,
    /// The used part of its memory (of a language model's server: of its cache), 0 to 1.
    pub memory: Option<f32>,
    /// The used part of its computing power, 0 to 1.
    pub compute: Option<f32>,
}

/// More jobs than this are no count of jobs.
pub const MOST_JOBS: f64 = 1e6;

/// A part above this is no part; one between 1 and this is the whole, as of a host that works beyond what it is rated for.
const MOST_PART: f64 = 1.5;

impl Reading {
    /// A reading of the values that can be true.
    pub fn of(running: Option<f64>, waiting: Option<f64>, memory: Option<f64>, compute: Option<f64>) -> Self {
        // NaN is in no range.
        let count = |value: f64| (0.0..=MOST_JOBS).contains(&value).then_some(value as f32);
        let part = |value: f64| (0.0..=MOST_PART).contains(&value).then_some(value.min(1.0) as f32);
        Self {
            running: running.and_then(count),
            waiting: waiting.and_then(count),
            memory: memory.and_then(part),
            compute: compute.and_then(part),
        }
    }

    /// Whether nothing was told.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it says how many jobs the host has.
    pub fn counts_jobs(&self) -> bool {
        self.running.is_some() || self.waiting.is_some()
    }

    /// What this and another one say together; where both say something, this one's word stands.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            running: self.running.or(other.running),
            waiting: self.waiting.or(other.waiting),
            memory: self.memory.or(other.memory),
            compute: self.compute.or(other.compute),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_cannot_be_true_is_no_value() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, -1e-9, 1e308] {
            let reading = Reading::of(Some(value), Some(value), Some(value), Some(value));
            assert!(reading.is_empty(), "{value}: {reading:?}");
        }
        assert_eq!(Reading::of(Some(1e6), Some(1e6 + 1.0), None, None).running, Some(1e6));
        assert_eq!(Reading::of(Some(1e6), Some(1e6 + 1.0), None, None).waiting, None);
    }

    #[test]
    fn a_little_more_than_the_whole_is_the_whole_and_a_percentage_is_no_value() {
        let parts = [0.0, 0.5, 1.0, 1.2, 1.5, 1.6, 97.0].map(|part| Reading::of(None, None, Some(part), Some(part)).compute);
        assert_eq!(parts, [Some(0.0), Some(0.5), Some(1.0), Some(1.0), Some(1.0), None, None]);
    }

    #[test]
    fn two_readings_say_together_what_each_says_and_the_first_ones_word_stands() {
        let (one, other) = (Reading::of(Some(1.0), None, None, Some(0.5)), Reading::of(Some(2.0), Some(3.0), None, None));
        assert_eq!(one.and(other), Reading::of(Some(1.0), Some(3.0), None, Some(0.5)));
        assert_eq!(Reading::default().and(one), one);
        assert_eq!((one.counts_jobs(), Reading::of(None, None, Some(0.1), None).counts_jobs()), (true, false));
    }

    proptest! {
        #[test]
        fn every_value_is_in_its_range(values in any::<[Option<f64>; 4]>()) {
            let [running, waiting, memory, compute] = values;
            let reading = Reading::of(running, waiting, memory, compute);
            prop_assert!([reading.running, reading.waiting].iter().flatten().all(|count| (0.0..=1e6).contains(count)));
            prop_assert!([reading.memory, reading.compute].iter().flatten().all(|part| (0.0..=1.0).contains(part)));
        }
    }
}
