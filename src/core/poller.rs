//! When to look again at something that changes by itself.
//!
//! One question is open at a time. The interval varies by a tenth, so that several pools do not ask together, and is twice as long after a failure, at
//! most four times: whoever cannot answer is not pressed, and what it says when it can again is not long in coming.

use std::time::Duration;

use super::random::Random;
use super::time::Instant;

/// An interval is longer or shorter by up to this part.
const JITTER: f64 = 0.1;

/// How often the interval is doubled.
const MOST_DOUBLINGS: u32 = 2;

/// The shortest time from one question to the next.
const HURRIED: Duration = Duration::from_millis(200);

/// A question that is not answered within its timeout and this is lost, as with a root that Envoy deleted meanwhile.
const LOST_AFTER: Duration = Duration::from_secs(5);

/// The questions to one source.
#[derive(Clone, Copy, Debug, Default)]
pub struct Poller {
    due: Instant,
    asked: Instant,
    open: Option<Instant>,
    failures: u32,
}

impl Poller {
    /// Whether to ask now; then it must be asked: it is noted as open.
    pub fn is_due(&mut self, interval: Duration, now: Instant, random: &mut Random) -> bool {
        // A clock that stepped back must not put the next question off.
        self.due = self.due.min(now + self.spaced(interval) * 2);
        let is_lost = |open: Instant| !(open..open + LOST_AFTER).contains(&now);
        self.open = self.open.filter(|open| !is_lost(*open));
        let is_due = self.due <= now && self.open.is_none();
        if is_due {
            (self.open, self.asked) = (Some(now), now);
            self.due = now + self.spaced(interval).mul_f64(1.0 - JITTER + 2.0 * JITTER * random.unit());
        }
        is_due
    }

    /// There is reason to believe that the last answer holds no more: the next question comes earlier, unless nobody could answer the last one.
    pub fn hurry(&mut self) {
        if self.failures == 0 {
            self.due = self.due.min(self.asked + HURRIED);
        }
    }

    fn spaced(&self, interval: Duration) -> Duration {
        interval * 2u32.pow(self.failures.min(MOST_DOUBLINGS))
    }

    /// The question was answered, well or not. Gives whether the one before had failed.
    pub fn answered(&mut self, is_well: bool, interval: Duration, now: Instant) -> bool {
        self.open = None;
        let had_failed = self.failures > 0;
        self.failures = if is_well { 0 } else { self.failures.saturating_add(1) };
        if !is_well {
            self.due = now + self.spaced(interval);
        }
        had_failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::at;

    const SECOND: Duration = Duration::from_secs(1);

    /// The seconds at which it asks, in steps of 0.1 s; `answer` says for each whether it is answered well.
    fn asked(seconds: u32, answer: impl Fn(f64) -> bool) -> Vec<f64> {
        let (mut poller, mut random, mut asked) = (Poller::default(), Random::new(5), Vec::new());
        for step in 0..seconds * 10 {
            let now = 100.0 + f64::from(step) * 0.1;
            if poller.is_due(SECOND, at(now), &mut random) {
                asked.push(now - 100.0);
                poller.answered(answer(now - 100.0), SECOND, at(now));
            }
        }
        asked
    }

    #[test]
    fn it_asks_once_an_interval_and_at_once_at_first() {
        let asked = asked(100, |_| true);
        assert_eq!(asked[0], 0.0);
        assert!((88..=104).contains(&asked.len()), "{}", asked.len());
        let gaps: Vec<u32> = asked.windows(2).map(|two| ((two[1] - two[0]) * 10.0).round() as u32).collect();
        assert!(gaps.iter().all(|gap| (9..=12).contains(gap)) && gaps.iter().any(|gap| *gap != gaps[0]), "{gaps:?}");
    }

    #[test]
    fn it_asks_less_often_while_nobody_answers_and_as_before_afterwards() {
        let asked = asked(60, |second| second > 30.0);
        let until = |second: f64| asked.iter().filter(|asked| **asked < second).count();
        assert!((8..=10).contains(&until(30.0)), "{asked:?}");
        assert!(until(60.0) - until(34.5) >= 22, "{asked:?}");
    }

    #[test]
    fn one_question_is_open_at_a_time_and_one_that_is_lost_is_asked_again() {
        let (mut poller, mut random) = (Poller::default(), Random::new(1));
        assert!(poller.is_due(SECOND, at(1.0), &mut random));
        assert!((2..6).all(|second| !poller.is_due(SECOND, at(f64::from(second)), &mut random)));
        assert!(poller.is_due(SECOND, at(6.5), &mut random));
    }

    #[test]
    fn one_that_is_in_a_hurry_asks_earlier_but_does_not_press_whoever_cannot_answer() {
        let (mut poller, mut random) = (Poller::default(), Random::new(1));
        assert!(poller.is_due(SECOND, at(1.0), &mut random));
        poller.answered(true, SECOND, at(1.0));
        poller.hurry();
        assert!(!poller.is_due(SECOND, at(1.1), &mut random));
        assert!(poller.is_due(SECOND, at(1.2), &mut random));
        poller.answered(false, SECOND, at(1.2));
        poller.hurry();
        assert!(!poller.is_due(SECOND, at(2.2), &mut random));
    }

    #[test]
    fn a_clock_that_steps_back_does_not_put_the_next_question_off() {
        let (mut poller, mut random) = (Poller::default(), Random::new(1));
        assert!(poller.is_due(SECOND, at(5000.0), &mut random));
        poller.answered(true, SECOND, at(5000.0));
        let _ = poller.is_due(SECOND, at(10.0), &mut random);
        assert!(poller.is_due(SECOND, at(12.1), &mut random));
    }
}
