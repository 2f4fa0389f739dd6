//! Jobs that come all at once, on top of others, and how long it takes until the last of them is answered.

use std::time::Duration;

use crate::trace::Arrival;

/// A record with bursts in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bursts {
    /// In order.
    pub arrivals: Vec<Arrival>,
    /// When each burst comes, and the numbers of its jobs.
    pub bursts: Vec<(Duration, Vec<usize>)>,
}

impl Bursts {
    /// Adds so many of these jobs at once every so often, as long as the record lasts.
    pub fn over(record: &[Arrival], every: Duration, jobs: usize, job: Arrival) -> Self {
        let last = record.last().map_or(Duration::ZERO, |arrival| arrival.at);
        let (mut arrivals, mut bursts) = (Vec::new(), Vec::new());
        let (mut left, mut at) = (record.iter().copied().peekable(), every);
        while at <= last {
            arrivals.extend(std::iter::from_fn(|| left.next_if(|arrival| arrival.at < at)));
            bursts.push((at, (arrivals.len()..arrivals.len() + jobs).collect()));
            arrivals.resize(arrivals.len() + jobs, Arrival { at, ..job });
            at += every;
        }
        arrivals.extend(left);
        Self { arrivals, bursts }
    }

    /// From each burst to the answer of its last job, if all of it were answered; `answered` is by the jobs' numbers.
    pub fn makespans(&self, answered: &[Option<Duration>]) -> Vec<Duration> {
        let makespan = |(at, jobs): &(Duration, Vec<usize>)| {
            let ends: Option<Vec<Duration>> = jobs.iter().map(|job| answered.get(*job).copied().flatten()).collect();
            Some(ends?.into_iter().max()? - *at)
        };
        self.bursts.iter().filter_map(makespan).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(at: u64, class: usize) -> Arrival {
        Arrival { at: Duration::from_millis(at), length: Duration::from_millis(5), class }
    }

    fn with_bursts() -> Bursts {
        Bursts::over(&[arrival(3, 0), arrival(10, 0), arrival(25, 0)], Duration::from_millis(10), 2, arrival(0, 7))
    }

    #[test]
    fn bursts_come_at_once_and_in_order_with_the_others() {
        let Bursts { arrivals, bursts } = with_bursts();
        let shape: Vec<_> = arrivals.iter().map(|arrival| (arrival.at.as_millis(), arrival.class)).collect();
        assert_eq!(shape, [(3, 0), (10, 7), (10, 7), (10, 0), (20, 7), (20, 7), (25, 0)]);
        assert_eq!(bursts, [(Duration::from_millis(10), vec![1, 2]), (Duration::from_millis(20), vec![4, 5])]);
    }

    #[test]
    fn a_burst_lasts_until_its_last_answer_and_one_that_was_not_answered_counts_for_nothing() {
        let at = |ms| Some(Duration::from_millis(ms));
        let answered = [at(4), at(18), at(14), at(90), at(22), None, at(91)];
        assert_eq!(with_bursts().makespans(&answered), [Duration::from_millis(8)]);
    }
}
