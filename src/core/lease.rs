//! One job's reservation on one host: taken at the choice, moved when Envoy retries elsewhere, settled once.
//!
//! The lease itself lives in the memory of the worker that took it ([`super::book::Book`]); the record only counts it. Each change here
//! is a function of the record and the lease that leaves the lease alone and returns what it becomes, so that it can be run
//! again on a newer record.

use std::time::Duration;

use super::address::Address;
use super::outcome::Outcome;
use super::record::{Record, Seat};
use super::time::Instant;

/// A job's reservation. Its seat is empty while its host is unknown: Envoy has not chosen yet, or chose an address that is not in the pool.
#[derive(Clone, Debug)]
pub struct Lease {
    /// The host that works on the job, as far as we know.
    pub address: Option<Address>,
    /// That host's entry.
    pub seat: Option<Seat>,
    /// The hosts that the override header named, in order: Envoy's k-th attempt goes to the k-th that it knows.
    pub named: Vec<Address>,
    /// How many of `named` have been blamed for a failed attempt or passed over.
    pub blamed: usize,
    /// How many attempts have been seen to fail.
    pub failed: usize,
    /// When it was taken.
    pub taken: Instant,
    /// The EWMA's time constant in the configuration that the job began with.
    pub time_constant: Duration,
    /// How the job ended, while its settlement has yet to be stored.
    pub ended: Option<Settlement>,
}

/// Where a job runs, as Envoy says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// `upstream.address`: the last attempt's host.
    pub address: Address,
    /// `upstream.request_attempt_count`: 1 without a retry.
    pub attempts: u64,
}

/// A lease's new place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    address: Address,
    seat: Option<Seat>,
    blamed: usize,
    failed: usize,
}

/// How a job ended.
#[derive(Clone, Copy, Debug)]
pub struct Settlement {
    /// How it ended for the host that was last.
    pub outcome: Outcome,
    /// The last attempt's own time, where it is the job's time and was wanted.
    pub latency: Option<Duration>,
    /// Where it was last, where that may be news.
    pub whereabouts: Option<Whereabouts>,
}

impl Lease {
    /// A lease on the first of `named`, which sits at `seat`; without a seat, one whose host is yet to be seen.
    pub fn new(seat: Option<Seat>, named: Vec<Address>, now: Instant, time_constant: Duration) -> Self {
        let address = seat.and(named.first().copied());
        Self { address, seat, named, blamed: 0, failed: 0, taken: now, time_constant, ended: None }
    }

    /// Moves the lease's count to the host that works now, and blames those that failed before it. The count of requests follows, too.
    ///
    /// A changed address alone is no failure: Envoy passes over an address that it does not know.
    #[must_use]
    pub fn follow(&self, record: &mut Record, now_at: Whereabouts) -> Moved {
        let position = self.named.iter().position(|address| *address == now_at.address);
        let failed = usize::try_from(now_at.attempts.saturating_sub(1)).unwrap_or(usize::MAX);
        let until = position.unwrap_or_else(|| failed.min(self.named.len()));
        // More names passed than attempts failed: Envoy does not know some of them, and nobody can say which.
        let is_clear = until.saturating_sub(self.blamed) <= failed.saturating_sub(self.failed);
        let from = if is_clear { self.blamed } else { until };
        for address in self.named.get(from..until).unwrap_or(&[]) {
            if let Some(seat) = record.seat_at(*address) {
                judge(record, seat, Outcome::Failure);
            }
        }
        if self.is_overruled(now_at) {
            record.header.overruled = record.header.overruled.saturating_add(1);
        }
        if let Some(seat) = self.seat {
            record.release(seat);
        }
        let seat = record.seat_at(now_at.address);
        match seat {
            Some(seat) => record.reserve(seat.slot),
            None => record.header.elsewhere = record.header.elsewhere.saturating_add(1),
        }
        Moved { address: now_at.address, seat, blamed: until.max(self.blamed), failed: failed.max(self.failed) }
    }

    /// Whether Envoy did not send the job where it was told to: its cluster does not have the host, or does not read our header.
    pub fn is_overruled(&self, now_at: Whereabouts) -> bool {
        now_at.attempts <= 1 && self.address.is_some_and(|address| address != now_at.address)
    }

    /// Makes the move part of the lease, once the record that shows it is stored.
    pub fn moved(&mut self, moved: Moved) {
        (self.address, self.seat) = (Some(moved.address), moved.seat);
        (self.blamed, self.failed) = (moved.blamed, moved.failed);
    }

    /// Whether the latency of a job that ended so would count.
    pub fn wants_latency(&self, record: &Record, end: &Settlement, now: Instant) -> bool {
        let host = || record.host(record.slot_of(self.seat?)?);
        let is_wanted = || host().is_none_or(|host| host.ewma().wants_sample(now, self.time_constant));
        end.outcome == Outcome::Success && (end.whereabouts.is_some() || is_wanted())
    }

    /// Gives the lease back, and tells its host how the job ended.
    pub fn settle(&self, record: &mut Record, end: Settlement, now: Instant) {
        let news = end.whereabouts.filter(|at| Some(at.address) != self.address);
        let seat = match news {
            Some(at) => self.follow(record, at).seat,
            None => self.seat,
        };
        let Some(seat) = seat else { return };
        record.release(seat);
        judge(record, seat, end.outcome);
        if let (Outcome::Success, Some(latency)) = (end.outcome, end.latency) {
            record.header.learned = record.header.learned.wrapping_add(1);
            with_seat(record, seat, |host| host.set_ewma(host.ewma().with(latency, now, self.time_constant)));
        }
    }
}

fn judge(record: &mut Record, seat: Seat, outcome: Outcome) {
    with_seat(record, seat, |host| match outcome {
        Outcome::Success => host.consecutive_failures = 0,
        Outcome::Failure => {
            host.failures = host.failures.saturating_add(1);
            host.consecutive_failures = host.consecutive_failures.saturating_add(1);
        }
        Outcome::Neutral => {}
    });
}

fn with_seat(record: &mut Record, seat: Seat, change: impl FnOnce(&mut super::record::Host)) {
    if let Some(slot) = record.slot_of(seat) {
        record.with_host(slot, change);
    }
}

#[cfg(test)]
mod tests;
