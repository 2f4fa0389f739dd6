//! What hosts told of themselves, as far as it still holds.
//!
//! A host's jobs in flight are those that we count, and those of others: what it reported less what we counted then. So with several Envoys in front of one fleet each sees the jobs of the others, and
//! what we know to have come or ended since is known at once. What is older than a pool's patience is unknown, and unknown never stops traffic.

use std::time::Duration;

use super::address::Address;
use super::reading::Reading;
use super::record::{Insight, Record};
use super::time::Instant;

const RUNNING: u32 = 1;
const WAITING: u32 = 1 << 1;
const MEMORY: u32 = 1 << 2;
const COMPUTE: u32 = 1 << 3;

impl Insight {
    /// Takes over what the host told at this time, when we counted so many jobs there. Counts and utilisations may come from different sources, each with its own age.
    pub fn tell(&mut self, reading: Reading, at: Instant, counted: u32) {
        let mut put = |flag: u32, value: Option<f32>| {
            self.tells = if value.is_some() { self.tells | flag } else { self.tells & !flag };
            value.unwrap_or(0.0)
        };
        if reading.counts_jobs() {
            (self.running, self.waiting) = (put(RUNNING, reading.running), put(WAITING, reading.waiting));
            (self.told_jobs, self.counted_then) = (at.0, counted);
        }
        if reading.memory.is_some() || reading.compute.is_some() {
            (self.memory, self.compute) = (put(MEMORY, reading.memory), put(COMPUTE, reading.compute));
            self.told_parts = at.0;
        }
    }

    /// What the host told of itself, as far as it is no older than this.
    pub fn told(&self, now: Instant, patience: Duration) -> Reading {
        let fresh = |told: u64| told != 0 && (Instant(told)..=Instant(told) + patience).contains(&now);
        self.reading(fresh(self.told_jobs), fresh(self.told_parts))
    }

    fn reading(&self, jobs: bool, parts: bool) -> Reading {
        let get = |flag: u32, value: f32, is_fresh: bool| (is_fresh && self.tells & flag != 0).then(|| f64::from(value));
        Reading::of(
            get(RUNNING, self.running, jobs),
            get(WAITING, self.waiting, jobs),
            get(MEMORY, self.memory, parts),
            get(COMPUTE, self.compute, parts),
        )
    }

    /// What the host told of itself last, however long ago.
    pub fn told_ever(&self) -> Reading {
        self.reading(self.told_jobs != 0, self.told_parts != 0)
    }

    /// How long ago it told of its jobs, in milliseconds.
    pub fn since_told(&self, now: Instant) -> f64 {
        now.since(Instant(self.told_jobs)).as_micros() as f64 / 1e3
    }

    /// How old what it told of its jobs, and of its utilisation, is.
    pub fn ages(&self, now: Instant) -> [Option<Duration>; 2] {
        [self.told_jobs, self.told_parts].map(|told| (told != 0).then(|| now.since(Instant(told))))
    }

    /// The host's jobs in flight, of which we count so many.
    #[inline]
    pub fn jobs(&self, counted: u32, now: Instant, patience: Duration) -> u32 {
        if self.told_jobs == 0 {
            return counted;
        }
        let told = self.told(now, patience);
        let reported = told.running.unwrap_or(0.0) + told.waiting.unwrap_or(0.0);
        counted.saturating_add((reported as u32).saturating_sub(self.counted_then))
    }
}

/// What a pool's hosts tell of their utilisation.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Of each host: memory and compute.
    hosts: Vec<[Option<f32>; 2]>,
    /// What counts for a host that does not say.
    means: [f32; 2],
}

impl Told {
    /// From what each says.
    pub fn new(hosts: impl Iterator<Item = Reading>) -> Self {
        let hosts: Vec<[Option<f32>; 2]> = hosts.map(|told| [told.memory, told.compute]).collect();
        let mean = |part: usize| {
            let known: Vec<f32> = hosts.iter().filter_map(|told| *told.get(part)?).collect();
            known.iter().sum::<f32>() / known.len().max(1) as f32
        };
        let means = [mean(0), mean(1)];
        Self { hosts, means }
    }

    /// Whether any says anything.
    pub fn is_any(&self) -> bool {
        self.hosts.iter().flatten().any(Option::is_some)
    }

    /// The memory and the compute that count for this one.
    pub fn of(&self, host: usize) -> [f32; 2] {
        let [memory, compute] = self.hosts.get(host).copied().unwrap_or_default();
        [memory.unwrap_or(self.means[0]), compute.unwrap_or(self.means[1])]
    }
}

/// What a host answered when it was asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statement {
    /// The host.
    pub address: Address,
    /// What it told.
    pub reading: Reading,
    /// When.
    pub at: Instant,
    /// How many of its jobs had ended when it was asked: see [`ended`].
    pub ended: u32,
}

/// How many jobs of ours have ended on a host, wrapping. What it tells is of some time after it was asked, and it is written down some time after that. To take those that
/// end meanwhile for jobs of others would make an idle host look busy until the next answer: so all that were there between are ours.
pub fn ended(record: &Record, address: Address) -> u32 {
    record.seat_at(address).map_or(0, |seat| record.insight(seat.slot).ended)
}

/// What a host told so long ago of its jobs, with an answer that has ended only now, says nothing: nobody knows how many of them have ended since.
const LATE: Duration = Duration::from_millis(100);

/// Writes down what the host in a slot told at this time, as far as it has not told something newer.
pub fn tell(record: &mut Record, slot: u32, reading: Reading, at: Instant, now: Instant) {
    let counted = record.host(slot).map_or(0, |host| host.load());
    record.with_insight(slot, |insight| {
        let mut reading = reading;
        let is_newer = |told: u64| at < Instant(told) && Instant(told) <= now;
        if now.since(at) > LATE || is_newer(insight.told_jobs) {
            (reading.running, reading.waiting) = (None, None);
        }
        if is_newer(insight.told_parts) {
            (reading.memory, reading.compute) = (None, None);
        }
        insight.tell(reading, at, counted);
    });
    record.header.learns();
}

/// Writes down what hosts answered, each at its time.
pub fn tell_all(record: &mut Record, statements: &[Statement]) {
    for Statement { address, reading, at, ended } in statements {
        if let Some(seat) = record.seat_at(*address) {
            let counted = record.host(seat.slot).map_or(0, |host| host.load());
            record.with_insight(seat.slot, |insight| {
                let meanwhile = insight.ended.wrapping_sub(*ended);
                insight.tell(*reading, *at, counted.saturating_add(meanwhile));
            });
            record.header.learns();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::{at, seats_of};

    const PATIENCE: Duration = Duration::from_secs(3);

    fn jobs(running: f64, waiting: f64) -> Reading {
        Reading::of(Some(running), Some(waiting), None, None)
    }

    #[test]
    fn what_was_told_holds_until_it_is_stale() {
        let mut insight = Insight::default();
        assert!(insight.told(at(1.0), PATIENCE).is_empty());
        insight.tell(jobs(2.0, 5.0), at(10.0), 0);
        insight.tell(Reading::of(None, None, Some(0.5), None), at(12.0), 0);
        let told = |seconds: f64| insight.told(at(seconds), PATIENCE);
        assert_eq!(told(12.0), Reading::of(Some(2.0), Some(5.0), Some(0.5), None));
        assert_eq!(told(13.5), Reading::of(None, None, Some(0.5), None));
        assert!(told(15.1).is_empty());
        assert!(told(9.0).is_empty(), "the clock stepped back");
    }

    #[test]
    fn jobs_in_flight_are_ours_and_those_that_the_host_reported_beyond_ours() {
        let (mut record, seats) = seats_of(1);
        record.keep_insights(true);
        (0..4).for_each(|_| record.reserve(0, None, at(9.0)));
        tell(&mut record, 0, jobs(1.0, 6.0), at(10.0), at(10.0));
        let now = |record: &Record| record.insight(0).jobs(record.host(0).unwrap().load(), at(11.0), PATIENCE);
        assert_eq!(now(&record), 7);
        (0..3).for_each(|_| record.release(seats[0], None, at(10.5)));
        assert_eq!(now(&record), 4, "three of the seven have ended: one of ours and three of others are left");
        (0..9).for_each(|_| record.reserve(0, None, at(10.6)));
        assert_eq!(now(&record), 13, "nine more of ours");
        tell(&mut record, 0, jobs(2.0, 0.0), at(10.8), at(10.8));
        assert_eq!(now(&record), 10, "it tells of fewer than we count");
        assert_eq!(record.insight(0).jobs(2, at(20.0), PATIENCE), 2, "stale");
    }

    #[test]
    fn a_job_that_ends_after_its_host_was_asked_is_none_that_the_answer_counts() {
        let (mut record, seats) = seats_of(1);
        record.keep_insights(true);
        (0..2).for_each(|_| record.reserve(0, None, at(9.0)));
        // The host is asked, and answers that it has both; before that is written down, both end.
        let (address, ended) = (super::super::fixture::address(0), ended(&record, super::super::fixture::address(0)));
        (0..2).for_each(|_| record.release(seats[0], None, at(10.02)));
        tell_all(&mut record, &[Statement { address, reading: jobs(2.0, 0.0), at: at(10.0), ended }]);
        assert_eq!(record.insight(0).jobs(0, at(10.1), PATIENCE), 0, "it is idle");
    }

    #[test]
    fn what_an_answer_told_when_it_began_is_of_that_time_and_not_of_its_end() {
        let (mut record, _) = seats_of(1);
        record.keep_insights(true);
        let told = Reading::of(Some(8.0), Some(2.0), Some(0.5), None);
        tell(&mut record, 0, told, at(10.0), at(10.05));
        assert_eq!(record.insight(0).told(at(11.0), PATIENCE), told);
        // Of an answer that took a minute.
        tell(&mut record, 0, Reading::of(Some(3.0), None, Some(0.9), None), at(20.0), at(80.0));
        assert!(record.insight(0).told(at(80.0), PATIENCE).is_empty(), "it is a minute old");
        tell(&mut record, 0, Reading::of(None, None, Some(0.1), None), at(81.0), at(81.0));
        tell(&mut record, 0, Reading::of(None, None, Some(0.9), None), at(80.5), at(82.0));
        assert_eq!(record.insight(0).told(at(82.0), PATIENCE).memory, Some(0.1), "there is something newer");
        // A clock that stepped back does not keep what is told now away.
        tell(&mut record, 0, Reading::of(None, None, Some(0.2), None), at(50.0), at(50.0));
        assert_eq!(record.insight(0).told(at(50.0), PATIENCE).memory, Some(0.2));
    }

    #[test]
    fn nonsense_in_the_record_is_no_reading() {
        let mut insight = Insight::default();
        insight.tell(jobs(1.0, 1.0), at(1.0), 0);
        (insight.running, insight.waiting) = (f32::NAN, -3.0);
        assert_eq!(insight.jobs(5, at(1.0), PATIENCE), 5);
    }
}
