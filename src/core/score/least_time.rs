//! `least_time`: when this job should be done.
//!
//! ```text
//!             ⎧ own + beside                                       a slot is free: it starts at once
//! time × speed = ⎨
//!             ⎩ own + beside + W · (n + 1 − s) / (n · s)           it waits until n + 1 − s of the n jobs there have ended
//!
//! beside = W · (s − 1) / s²
//! ```
//!
//! `own` is the job's learned work, `W` that of the `n` jobs on the host, a job of which nothing is known counting as the pool's mean, `s` how many the host runs at once.
//! A host that runs one at a time is done after `(W + own) / speed`. `beside` is for those that run several: jobs that run side by side slow each other, a full host being believed to take up to twice as long; what is
//! learned of its speed says the rest.
//!
//! Where jobs wait inside a host, which the pool has no queue for, the one that runs is believed to have made progress: [`Ahead::progress`].
//!
//! Without any history this is the number of jobs: exactly least in-flight.

/// Whatever the record holds, no time is longer: a year, in milliseconds.
const LONGEST: f64 = 3.2e10;

/// Of a job that takes longer than expected so much is believed to be left.
const LEFT: f64 = 0.2;

/// What stands before a job on a host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ahead {
    /// Jobs there.
    pub jobs: u32,
    /// Their work, in milliseconds on a host of speed 1.
    pub work: f64,
}

impl Ahead {
    /// The same with one job more.
    pub fn with(self, work: f64) -> Self {
        Self { jobs: self.jobs.saturating_add(1), work: self.work + work }
    }

    /// On a host that runs one at a time: so much work has been done of the one that runs, if it is as long as the mean of those there.
    pub fn progress(self, done: f64) -> Self {
        if self.jobs == 0 {
            return self;
        }
        let each = self.work / f64::from(self.jobs);
        let left = (each - done).max(LEFT * each.max(done));
        Self { work: (self.work - each + left).max(0.0), ..self }
    }
}

/// Milliseconds until a job of this work is done on a host of this speed that runs `at_once` jobs.
pub fn time(ahead: Ahead, own: f64, at_once: u32, speed: f64) -> f64 {
    let (jobs, slots) = (f64::from(ahead.jobs), f64::from(at_once.max(1)));
    let beside = ahead.work * (slots - 1.0) / (slots * slots);
    let waits = if jobs < slots { 0.0 } else { ahead.work * (jobs + 1.0 - slots) / (jobs * slots) };
    let time = (own + beside + waits) / speed;
    if time.is_finite() { time.clamp(0.0, LONGEST) } else { LONGEST }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(jobs: u32, work: f64, at_once: u32, speed: f64) -> f64 {
        time(Ahead { jobs, work }, 100.0, at_once, speed)
    }

    #[test]
    fn a_host_that_runs_one_at_a_time_does_all_before_it() {
        assert_eq!(on(0, 0.0, 1, 1.0), 100.0);
        assert_eq!(on(0, 0.0, 1, 2.0), 50.0);
        assert_eq!(on(1, 600.0, 1, 1.0), 700.0);
        assert_eq!(on(3, 600.0, 1, 0.5), 1400.0);
    }

    #[test]
    fn of_several_slots_the_first_to_come_free_is_waited_for() {
        assert_eq!(on(0, 0.0, 4, 1.0), 100.0);
        let [three, four, five] = [3, 4, 5].map(|jobs| on(jobs, f64::from(jobs) * 100.0, 4, 1.0));
        assert_eq!(three, 100.0 + 300.0 * 3.0 / 16.0);
        assert_eq!(four, 100.0 + 400.0 * 3.0 / 16.0 + 25.0);
        assert!(three < four && four < five);
    }

    #[test]
    fn progress_shortens_the_wait_but_never_to_nothing() {
        let two = Ahead { jobs: 2, work: 200.0 };
        assert_eq!(two.progress(30.0).work, 170.0);
        assert_eq!(two.progress(95.0).work, 120.0);
        assert_eq!(two.progress(1000.0).work, 300.0, "one that takes so long may take longer");
        assert_eq!(Ahead::default().progress(50.0), Ahead::default());
    }

    #[test]
    fn whatever_the_numbers_are_it_is_a_time() {
        for work in [f64::NAN, f64::INFINITY, -1e300, 0.0, 1e300] {
            for (jobs, at_once, speed) in [(0, 0, 0.0), (u32::MAX, 1, 1e-300), (7, u32::MAX, f64::NAN)] {
                let time = time(Ahead { jobs, work }.progress(work), work, at_once, speed);
                assert!((0.0..=LONGEST).contains(&time), "{work} {jobs} {at_once} {speed}: {time}");
            }
        }
    }
}
