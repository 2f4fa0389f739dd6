//! One job's reservation on one host: taken at the choice, moved when Envoy retries elsewhere, settled once.
//!
//! The lease itself lives in the memory of the worker that took it ([`super::book::Book`]); the record only counts it. Each change here
//! is a function of the record and the lease that leaves the lease alone and returns what it becomes, so that it can be run
//! again on a newer record.

use std::rc::Rc;
use std::time::Duration;

use super::address::Address;
use super::health::{Evidence, Trial, judge};
use super::learning::{self, Job, Lesson};
use super::outcome::Outcome;
use super::random::Random;
use super::reading::Reading;
use super::record::{Insight, Record, Seat};
use super::report;
use super::stranger::{self, Passed};
use super::time::Instant;
use crate::config::{Policy, Pool};

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
    /// The pool in the configuration that the job began with.
    pub pool: Rc<Pool>,
    /// If the job is to show whether its host is well again.
    pub trial: Option<Trial>,
    /// What is known of the job.
    pub job: Job,
    /// What it is counted with on its host.
    pub burden: Burden,
    /// Whether a retry blames the host before it: not if the client decides what is retried.
    pub blames: bool,
    /// Whether the response has begun, and where the job is, is known: Envoy does not retry any more.
    pub is_answered: bool,
    /// How far its request has come.
    pub upload: Upload,
    /// How the job ended, while its settlement has yet to be stored.
    pub ended: Option<Settlement>,
}

/// How far a request has come, as far as ticks have seen it: the time that a client takes to send it is not the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Upload {
    /// The length of its body, if the client says so.
    pub length: Option<u64>,
    seen: Option<u64>,
    is_done: bool,
    /// The last time that more of it was to come, or had; zero if there was none.
    until: Instant,
}

impl Upload {
    /// Whether it is worth another look.
    pub fn is_watched(&self) -> bool {
        !self.is_done
    }

    /// Whether a tick has seen that more of it was to come.
    pub fn was_seen_coming(&self) -> bool {
        self.until != Instant::default()
    }

    /// At a tick so many bytes of the body have come.
    pub fn look(&mut self, received: u64, now: Instant) {
        let is_coming = match self.length {
            Some(length) => received < length,
            None => received > 0 && self.seen.is_none_or(|seen| seen != received),
        };
        if is_coming {
            self.until = now;
        }
        self.is_done = if self.length.is_some() { !is_coming } else { received == 0 };
        self.seen = Some(received);
    }
}

/// What a job is counted with on its host, for `least_time`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Burden {
    /// Its work, in microseconds on a host of speed 1, where that was known.
    pub work: Option<u64>,
    /// Whether as many jobs were there as the host runs at once.
    pub was_crowded: bool,
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
    trial: Option<Trial>,
    was_crowded: bool,
    /// Which of the names were blamed.
    guilty: (usize, usize),
    /// Whether it came to a host without a free slot.
    pub is_beyond: bool,
}

/// Why a job is not where it was sent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elsewhere {
    /// An attempt failed, and Envoy tried another host.
    Retried,
    /// Envoy sent it elsewhere from the start.
    Overruled,
    /// Its host is not in the pool.
    NotInPool,
}

impl Elsewhere {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Retried, Self::Overruled, Self::NotInPool];

    /// The word in metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Retried => "retry",
            Self::Overruled => "overruled",
            Self::NotInPool => "elsewhere",
        }
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug)]
pub struct Settlement {
    /// How it ended for the host that was last.
    pub outcome: Outcome,
    /// Whether the time that it took says something: that of an upgraded connection is its client's.
    pub is_timed: bool,
    /// The last attempt's own time, where it was wanted.
    pub latency: Option<Duration>,
    /// Where it was last, where that may be news.
    pub whereabouts: Option<Whereabouts>,
    /// What the host told of itself in its answer, and when.
    pub reading: Option<(Reading, Instant)>,
}

impl Lease {
    /// A lease on the first of `named`, which sits at `seat`; without a seat, one whose host is yet to be seen.
    pub fn new(seat: Option<Seat>, named: Vec<Address>, now: Instant, pool: Rc<Pool>, trial: Option<Trial>) -> Self {
        let address = seat.and(named.first().copied());
        Self {
            address,
            seat,
            named,
            blamed: 0,
            failed: 0,
            taken: now,
            pool,
            trial,
            job: Job::unknown(),
            burden: Burden::default(),
            blames: true,
            is_answered: false,
            upload: Upload::default(),
            ended: None,
        }
    }

    /// Moves the lease's count to the host that works now, and blames those that failed before it. The count of requests follows, too.
    ///
    /// A changed address alone is no failure: Envoy passes over an address that it does not know.
    #[must_use]
    pub fn follow(&self, record: &mut Record, now_at: Whereabouts, now: Instant, random: &mut Random) -> Moved {
        let position = self.named.iter().position(|address| *address == now_at.address);
        let failed = usize::try_from(now_at.attempts.saturating_sub(1)).unwrap_or(usize::MAX);
        let until = position.unwrap_or_else(|| failed.min(self.named.len()));
        // More names passed than attempts failed: Envoy does not know some of them, and nobody can say which.
        let is_clear = self.blames && until.saturating_sub(self.blamed) <= failed.saturating_sub(self.failed);
        let from = if is_clear { self.blamed } else { until };
        let beyond = record.header.beyond_slots;
        for (position, address) in self.named.iter().enumerate().take(until).skip(from) {
            if let Some(seat) = record.seat_at(*address) {
                // The trial is the first name's.
                let trial = self.trial.filter(|_| position == 0);
                let evidence = Evidence { outcome: Outcome::Failure, is_timed: false, latency: None, begun: self.taken, trial };
                judge(record, seat.slot, evidence, &self.pool, now, random);
            }
        }
        if self.is_overruled(now_at) {
            record.header.overruled = record.header.overruled.saturating_add(1);
        }
        if self.is_overruled(now_at) && record.seat_at(now_at.address).is_some() {
            let names = self.named.get(..position.unwrap_or(self.named.len())).unwrap_or_default();
            let is_clear = position.is_some();
            Passed { names, is_clear, begun: self.taken, trial: self.trial }.note(record, &self.pool, now, random);
        }
        if let Some(seat) = self.seat {
            record.release(seat, self.burden.work, now);
            lose_track(record, seat);
        }
        let seat = record.seat_at(now_at.address);
        let was_crowded = seat.is_some_and(|seat| is_crowded(record, seat.slot, &self.pool));
        match seat {
            Some(seat) => {
                stranger::serves(record, seat.slot, self.address.is_some(), now);
                record.reserve(seat.slot, self.burden.work, now);
            }
            None => record.header.elsewhere = record.header.elsewhere.saturating_add(1),
        }
        // Where nobody was blamed the trial has not been held: the host gets another when this one is overdue.
        let trial = self.trial.filter(|_| position == Some(0));
        Moved {
            address: now_at.address,
            seat,
            blamed: until.max(self.blamed),
            failed: failed.max(self.failed),
            trial,
            was_crowded,
            guilty: (from, until),
            is_beyond: record.header.beyond_slots != beyond,
        }
    }

    /// The hosts that a move blamed for a failed attempt.
    pub fn guilty(&self, moved: &Moved) -> &[Address] {
        self.named.get(moved.guilty.0..moved.guilty.1).unwrap_or_default()
    }

    /// If the job is not where it was sent first, why; `None` also where Envoy chose.
    pub fn why_another(&self) -> Option<Elsewhere> {
        let is_another = self.named.first().is_some_and(|first| Some(*first) != self.address);
        is_another.then_some(match (self.seat, self.failed) {
            (None, _) => Elsewhere::NotInPool,
            (Some(_), 0) => Elsewhere::Overruled,
            (Some(_), _) => Elsewhere::Retried,
        })
    }

    /// Whether Envoy did not send the job where it was told to: its cluster does not have the host, or does not read our header.
    pub fn is_overruled(&self, now_at: Whereabouts) -> bool {
        now_at.attempts <= 1 && self.address.is_some_and(|address| address != now_at.address)
    }

    /// How many attempts there were, the one included that serves; `news` is where that is, if it is not where the lease is.
    pub fn attempts(&self, news: Option<Whereabouts>) -> u64 {
        news.map_or((self.failed as u64).saturating_add(1), |news| news.attempts)
    }

    /// Makes the move part of the lease, once the record that shows it is stored.
    pub fn moved(&mut self, moved: Moved) {
        (self.address, self.seat) = (Some(moved.address), moved.seat);
        (self.blamed, self.failed, self.trial) = (moved.blamed, moved.failed, moved.trial);
        self.burden.was_crowded = moved.was_crowded;
    }

    /// The host's own part of what its last attempt took: without the time that the client took to send the request.
    pub fn own_time(&self, latency: Duration) -> Duration {
        let is_first = self.failed == 0;
        latency.saturating_sub(if is_first { self.upload.until.since(self.taken) } else { Duration::ZERO })
    }

    /// Whether the latency of a job that ended so would count: the average wants one now and then, `least_time` all, and the breaker those that may be slow. A
    /// job that as a whole took no longer than the threshold is fast whatever its last attempt took.
    pub fn wants_latency(&self, record: &Record, end: &Settlement, now: Instant) -> bool {
        let host = || record.host(record.slot_of(self.seat?)?);
        let is_wanted = || host().is_none_or(|host| host.ewma().wants_sample(now, self.pool.time_constant));
        let may_be_slow = || self.pool.breaker.as_ref().is_some_and(|breaker| now.since(self.taken) > breaker.threshold);
        let teaches = matches!(self.pool.policy, Policy::LeastTime { .. });
        end.outcome == Outcome::Success && (teaches || end.whereabouts.is_some() || may_be_slow() || is_wanted())
    }

    /// Gives the lease back, and tells its host how the job ended. Gives its last move, if that was not known before.
    pub fn settle(&self, record: &mut Record, end: Settlement, now: Instant, random: &mut Random) -> Option<Moved> {
        let news = end.whereabouts.filter(|at| Some(at.address) != self.address);
        let moved = news.map(|at| self.follow(record, at, now, random));
        let (seat, trial, was_crowded) = match moved {
            Some(moved) => (moved.seat, moved.trial, moved.was_crowded),
            None => (self.seat, self.trial, self.burden.was_crowded),
        };
        if let Some(seat) = seat {
            self.settle_at(record, (seat, trial, was_crowded), end, now, random);
        }
        moved
    }

    fn settle_at(
        &self,
        record: &mut Record,
        (seat, trial, was_crowded): (Seat, Option<Trial>, bool),
        end: Settlement,
        now: Instant,
        random: &mut Random,
    ) {
        let has_moved = end.whereabouts.is_some_and(|at| Some(at.address) != self.address);
        let Some(slot) = record.slot_of(seat) else {
            return record.release(seat, self.burden.work, now);
        };
        // This job is one of those that it told of.
        if let Some((reading, at)) = end.reading.filter(|_| !has_moved) {
            report::tell(record, slot, reading, at, now);
        }
        // Before the host takes up the next.
        self.teach(record, slot, &end, was_crowded, now);
        record.release(seat, self.burden.work, now);
        if end.outcome != Outcome::Success {
            lose_track(record, seat);
        }
        if self.is_answered && !has_moved {
            stranger::serves(record, slot, false, now);
        }
        let is_timed = end.is_timed;
        let evidence = Evidence { outcome: end.outcome, is_timed, latency: end.latency, begun: self.taken, trial };
        judge(record, slot, evidence, &self.pool, now, random);
    }

    /// What the job's end says of its class and its host.
    fn teach(&self, record: &mut Record, slot: u32, end: &Settlement, was_crowded: bool, now: Instant) {
        let teaches = matches!(self.pool.policy, Policy::LeastTime { .. }) && record.has_insights();
        let Some((latency, host)) = end.latency.filter(|_| teaches && end.outcome == Outcome::Success).zip(record.host(slot))
        else {
            return;
        };
        let at_once = self.pool.runs_at_once(host.max_in_flight);
        let began = record.insight(slot).began();
        let Some(service) = learning::service(latency, began, now, at_once, was_crowded) else { return };
        let lesson = Lesson { slot, weight: host.weight, job: &self.job, service };
        learning::learn(record, lesson, now, learning::fading(self.pool.time_constant));
    }
}

/// A job ended here of which nobody can say whether its host had taken it up.
fn lose_track(record: &mut Record, seat: Seat) {
    if let Some(slot) = record.slot_of(seat) {
        record.with_insight(slot, Insight::loses_track);
    }
}

/// Whether a host in this slot has as many jobs as it runs at once; asked only where that teaches something.
pub fn is_crowded(record: &Record, slot: u32, pool: &Pool) -> bool {
    let teaches = matches!(pool.policy, Policy::LeastTime { .. });
    teaches && record.host(slot).is_some_and(|host| host.load() >= pool.runs_at_once(host.max_in_flight))
}

#[cfg(test)]
mod tests;
