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
    pub fn tell(&mut self, reading: Reading, counted: u32, at: Instant) {
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

/// Writes down what the host in a slot told.
pub fn tell(record: &mut Record, slot: u32, reading: Reading, at: Instant) {
    let counted = record.host(slot).map_or(0, |host| host.load());
    record.with_insight(slot, |insight| insight.tell(reading, counted, at));
    record.header.learns();
}

/// Writes down what hosts told, each at its time.
pub fn tell_all(record: &mut Record, readings: &[(Address, Reading, Instant)]) {
    for (address, reading, at) in readings {
        if let Some(seat) = record.seat_at(*address) {
            tell(record, seat.slot, *reading, *at);
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
        insight.tell(jobs(2.0, 5.0), 0, at(10.0));
        insight.tell(Reading::of(None, None, Some(0.5), None), 0, at(12.0));
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
        tell(&mut record, 0, jobs(1.0, 6.0), at(10.0));
        let now = |record: &Record| record.insight(0).jobs(record.host(0).unwrap().load(), at(11.0), PATIENCE);
        assert_eq!(now(&record), 7);
        (0..3).for_each(|_| record.release(seats[0], None, at(10.5)));
        assert_eq!(now(&record), 4, "three of the seven have ended: one of ours and three of others are left");
        (0..9).for_each(|_| record.reserve(0, None, at(10.6)));
        assert_eq!(now(&record), 13, "nine more of ours");
        tell(&mut record, 0, jobs(2.0, 0.0), at(10.8));
        assert_eq!(now(&record), 10, "it tells of fewer than we count");
        assert_eq!(record.insight(0).jobs(2, at(20.0), PATIENCE), 2, "stale");
    }

    #[test]
    fn nonsense_in_the_record_is_no_reading() {
        let mut insight = Insight::default();
        insight.tell(jobs(1.0, 1.0), 0, at(1.0));
        (insight.running, insight.waiting) = (f32::NAN, -3.0);
        assert_eq!(insight.jobs(5, at(1.0), PATIENCE), 5);
    }
}
