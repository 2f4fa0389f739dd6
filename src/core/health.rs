//! Which hosts may be chosen, and what the end of a job does to that.
//!
//! ```text
//!                  consecutive failures, or slow windows in a row
//!   ┌─────────┐    (never the last serving host; at most max_ejected_percent)      ┌─────────┐
//!   │ serving │ ──────────────────────────────────────────────────────────────────►│ ejected │
//!   └─────────┘                                                                    └─────────┘
//!     ▲  │  ▲                                                                        │     ▲
//!     │  │  │ its trial succeeds: counts start afresh            the time is over,   │     │ its trial fails:
//!     │  │  │                                                    or no other serves  ▼     │ longer than before
//!     │  │  │                                                                      ┌─────────┐
//!     │  │  └──────────────────────────────────────────────────────────────────────│ probing │◄─┐
//!     │  │                                                                         └─────────┘  │ its trial ends without a word,
//!     │  │ 429, 503 with Retry-After: not a fault, and no ejection                        └─────┘ or is overdue: another one
//!     │  └──► busy, until the pause is over ──┐
//!     └───────────────────────────────────────┘        unhealthy (probes, Envoy) and draining stand above all these, beside them
//! ```
//!
//! **A trial** is one job, the next that comes: the first name in its header is the probing host, followed by sound ones, so that a client whose
//! request may be repeated notices nothing. It belongs to one ejection, so that the end of an older one says nothing about a newer.
//!
//! **Old news.** A job that was begun before its host was re-admitted says nothing about the host as it is now: fifty jobs that hung on it would
//! otherwise eject it again, one by one. So after a re-admission it takes exactly as many failures as the first time.
//!
//! **How long.** `base_ejection_ms × 2^(n−1)`, at most `max_ejection_ms`, times 1.0 to 1.1, so that hosts that failed together do not come back
//! together. `n` falls by one for each `base_ejection_ms` that the host has served since, as Envoy's outlier detection does it with its interval.

mod oversight;

use std::time::Duration;

pub use oversight::{Longest, oversee};

use super::address::Address;
use super::outcome::Outcome;
use super::penalty::{self, Fade};
use super::random::Random;
use super::record::{EJECTED, FAILS_ENVOY, FAILS_PROBES, Header, Host, RESTS, Record, SLOW, STRANGER, TRIAL};
use super::time::Instant;
use crate::config::{Breaker, Failure, Pool};

/// An ejection is longer by up to this part.
const JITTER: f64 = 0.1;

/// Where jobs wait, a failure that came sooner than this frees its slot for the next one at once, and hosts that refuse every connection would go through the whole
/// queue in a moment. So such a host rests for a while, twice as long with each failure in a row: a fleet that restarts costs a few jobs, not all that wait.
const FAST: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_millis(250);
const LONGEST_REST: Duration = Duration::from_secs(4);

/// What a host is to the choice. Shown by precedence, the last first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It takes jobs.
    Serving,
    /// It asked us to wait.
    Busy,
    /// It takes one job at a time, to see whether it is well again.
    Probing,
    /// It takes no jobs for a time.
    Ejected,
    /// Probes, or Envoy, say that it is not well.
    Unhealthy,
    /// It was told to take no new jobs.
    Draining,
}

/// Why a host was ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Failures in a row.
    Failures,
    /// Slow windows in a row.
    Latency,
    /// Envoy does not know it: see [`super::stranger`].
    Unknown,
}

/// Who says that a host is not well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watcher {
    /// Our own probes.
    Probes,
    /// Envoy's health checks, outlier detection or discovery.
    Envoy,
}

/// A job that is to show whether its host is well again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Which ejection it belongs to.
    ejection: u32,
    /// When it is overdue.
    until: u64,
}

/// How a job, or an attempt at it, ended for its host.
#[derive(Clone, Copy, Debug)]
pub struct Evidence {
    /// How.
    pub outcome: Outcome,
    /// Whether the time that it took counts.
    pub is_timed: bool,
    /// How long it took, where that is known. Where it counts and is not known, it was fast.
    pub latency: Option<Duration>,
    /// When the job was begun.
    pub begun: Instant,
    /// If it was a trial.
    pub trial: Option<Trial>,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Serving, Self::Busy, Self::Probing, Self::Ejected, Self::Unhealthy, Self::Draining];

    /// The word in the status, logs and metrics.
    pub fn word(self) -> &'static str {
        match self {
            State::Serving => "serving",
            State::Busy => "busy",
            State::Probing => "probing",
            State::Ejected => "ejected",
            State::Unhealthy => "unhealthy",
            State::Draining => "draining",
        }
    }
}

impl Reason {
    /// The word in the status and in metrics.
    pub fn word(self) -> &'static str {
        match self {
            Reason::Failures => "failures",
            Reason::Latency => "latency",
            Reason::Unknown => "unknown",
        }
    }
}

impl Host {
    /// What the host is to the choice now.
    pub fn state(&self, now: Instant) -> State {
        if self.is_draining() { State::Draining } else { self.health(now) }
    }

    /// The same without regard to draining, of which each configuration has its own word.
    pub fn health(&self, now: Instant) -> State {
        if self.has_flag(FAILS_PROBES | FAILS_ENVOY) {
            State::Unhealthy
        } else if self.has_flag(EJECTED) {
            if self.has_flag(TRIAL) || is_over(self.until, now) { State::Probing } else { State::Ejected }
        } else if is_over(self.busy_until, now) {
            State::Serving
        } else {
            State::Busy
        }
    }

    /// Whether the next job should be the host's trial.
    pub fn wants_trial(&self, now: Instant) -> bool {
        self.health(now) == State::Probing && is_over(self.until, now) && is_over(self.busy_until, now)
    }

    /// Whether the next job may be the host's: it serves, or its trial is due.
    pub fn is_eligible(&self, now: Instant) -> bool {
        self.state(now) == State::Serving || !self.is_draining() && self.wants_trial(now)
    }

    /// The next time at which [`Host::health`] or [`Host::wants_trial`] may change by themselves; `None`: never.
    pub fn next_change(&self, now: Instant) -> Option<Instant> {
        let until = self.has_flag(EJECTED).then_some(self.until);
        let ahead = until.into_iter().chain([self.busy_until]).filter(|until| !is_over(*until, now));
        ahead.min().map(Instant)
    }

    /// How long the ejection lasts yet.
    pub fn ejected_for(&self, now: Instant) -> Duration {
        if self.has_flag(EJECTED) && !self.has_flag(TRIAL) { remaining(self.until, now) } else { Duration::ZERO }
    }

    /// How long the host asks us to wait, or rests, yet.
    pub fn busy_for(&self, now: Instant) -> Duration {
        remaining(self.busy_until, now)
    }

    /// Whether it is busy, or was, because it failed at once, and not because it asked us to wait.
    pub fn rests(&self) -> bool {
        self.has_flag(RESTS)
    }

    /// No jobs until then. The longest pause stands.
    fn pause(&mut self, until: Instant, rests: bool) {
        if until.0 > self.busy_until {
            self.busy_until = until.0;
            self.set_flag(RESTS, rests);
        }
    }

    /// Whether the host is ejected or probing.
    pub fn is_ejected(&self) -> bool {
        self.has_flag(EJECTED)
    }

    /// Why the host is ejected or probing, if it is.
    pub fn reason(&self) -> Option<Reason> {
        let reason = match (self.has_flag(SLOW), self.has_flag(STRANGER)) {
            (true, _) => Reason::Latency,
            (_, true) => Reason::Unknown,
            _ => Reason::Failures,
        };
        self.is_ejected().then_some(reason)
    }

    /// Makes the job that is about to be placed the host's trial.
    pub fn begin_trial(&mut self, now: Instant, overdue_after: Duration) -> Trial {
        self.until = (now + overdue_after).0;
        self.set_flag(TRIAL, true);
        Trial { ejection: self.ejections, until: self.until }
    }

    /// Whether it still waits for the end of this trial.
    pub(super) fn is_on(&self, trial: Trial) -> bool {
        self.is_ejected() && trial.ejection == self.ejections
    }

    pub(super) fn eject(&mut self, reason: Reason, failure: &Failure, now: Instant, random: &mut Random) {
        if !self.is_ejected() {
            let served = now.since(Instant(self.until)).as_micros() / failure.base_ejection.as_micros().max(1);
            self.severity = self.severity.saturating_sub(u16::try_from(served).unwrap_or(u16::MAX));
        }
        let doubled = 1u32.checked_shl(self.severity.into()).unwrap_or(u32::MAX);
        let length = failure.base_ejection.saturating_mul(doubled).min(failure.max_ejection);
        self.severity = self.severity.saturating_add(1);
        self.ejections = self.ejections.wrapping_add(1);
        self.until = (now + length.mul_f64(1.0 + JITTER * random.unit())).0;
        self.set_flag(EJECTED, true);
        self.set_flag(TRIAL, false);
        self.set_flag(SLOW, reason == Reason::Latency);
        self.set_flag(STRANGER, reason == Reason::Unknown);
    }

    pub(super) fn readmit(&mut self, header: &Header, now: Instant) {
        self.join(header, now);
        self.set_flag(EJECTED | TRIAL | SLOW | STRANGER, false);
        self.until = now.0;
        self.consecutive_failures = 0;
        self.failure_rate = 0.0;
        (self.seen, self.slow, self.slow_windows) = (0, 0, 0);
    }

    /// A clock that stepped back: the host was re-admitted at a time that is yet to come.
    pub(super) fn mend_readmission(&mut self, now: Instant) {
        if !self.is_ejected() && self.until > now.0 {
            self.until = now.0;
        }
    }

    /// Whether the job was begun before the host was re-admitted.
    pub(super) fn is_old_news(&self, begun: Instant) -> bool {
        !self.is_ejected() && begun.0 < self.until
    }

    /// Counts a job in the breaker's window. Gives whether it has seen enough.
    fn is_too_slow(&mut self, breaker: &Breaker, is_slow: bool) -> bool {
        self.seen = self.seen.saturating_add(1);
        self.slow = self.slow.saturating_add(u16::from(is_slow));
        if self.seen < breaker.window {
            return false;
        }
        self.slow_windows = if self.slow > breaker.most_slow { self.slow_windows.saturating_add(1) } else { 0 };
        (self.seen, self.slow) = (0, 0);
        self.slow_windows >= breaker.consecutive_windows
    }

    /// Sets what one of the watchers says. Gives whether that is news.
    pub fn set_unhealthy(&mut self, watcher: Watcher, unhealthy: bool, header: &Header, now: Instant) -> bool {
        let flag = match watcher {
            Watcher::Probes => FAILS_PROBES,
            Watcher::Envoy => FAILS_ENVOY,
        };
        if self.has_flag(flag) == unhealthy {
            return false;
        }
        self.set_flag(flag, unhealthy);
        if !self.has_flag(FAILS_PROBES | FAILS_ENVOY) {
            self.join(header, now);
        }
        if !unhealthy && self.is_ejected() && !self.has_flag(TRIAL) {
            // It was down and has come back: that is what the ejection waits for.
            self.until = now.0;
        }
        true
    }
}

/// Takes the end of a job, or of an attempt at it, into account. The latency of a success is fed here, too.
pub fn judge(record: &mut Record, slot: u32, evidence: Evidence, pool: &Pool, now: Instant, random: &mut Random) {
    let Some(mut host) = record.host(slot) else {
        return;
    };
    let before = host;
    host.mend_readmission(now);
    let trial = evidence.trial.filter(|trial| host.is_on(*trial));
    let case = Case { record, slot, evidence, is_trial: trial.is_some(), pool, now };
    match evidence.outcome {
        Outcome::Success => case.succeed(&mut host, random),
        Outcome::Failure => case.fail(&mut host, random),
        Outcome::Busy(pause) => host.pause(now + pause, false),
        Outcome::Neutral => {}
    }
    if let Some(trial) = trial
        && host.is_ejected()
        && host.until == trial.until
    {
        // It ended without a word about the host: the next job is the next trial.
        host.until = now.0;
    }
    let stands_anew = standing(&host) != standing(&before);
    let learns = (host.failure_rate, host.rated, host.ewma()) != (before.failure_rate, before.rated, before.ewma());
    record.with_host(slot, |entry| *entry = host);
    if stands_anew {
        record.header.stands_anew();
    }
    if learns {
        record.header.learns();
    }
}

fn standing(host: &Host) -> (bool, u64, u64) {
    (host.is_ejected(), if host.is_ejected() { host.until } else { 0 }, host.busy_until)
}

/// What is to be judged, and what it is judged by.
struct Case<'a> {
    record: &'a Record,
    slot: u32,
    evidence: Evidence,
    is_trial: bool,
    pool: &'a Pool,
    now: Instant,
}

impl Case<'_> {
    fn succeed(&self, host: &mut Host, random: &mut Random) {
        let Self { evidence, pool, now, .. } = *self;
        if let Some(latency) = evidence.latency
            && host.ewma().wants_sample(now, pool.time_constant)
        {
            host.set_ewma(host.ewma().with(latency, now, pool.time_constant));
        }
        let is_slow = |breaker: &Breaker| evidence.latency.is_some_and(|latency| latency > breaker.threshold);
        if self.is_trial {
            let is_still_slow = host.reason() == Some(Reason::Latency) && pool.breaker.as_ref().is_some_and(is_slow);
            if is_still_slow {
                host.eject(Reason::Latency, &pool.failure, now, random)
            } else {
                host.readmit(&self.record.header, now)
            }
            return;
        }
        if host.is_ejected() || host.is_old_news(evidence.begun) {
            return;
        }
        host.consecutive_failures = 0;
        penalty::lower(host, now, Fade::new(pool.time_constant, &self.record.header));
        if let Some(breaker) = &pool.breaker
            && evidence.is_timed
            && host.is_too_slow(breaker, is_slow(breaker))
            && self.may_eject()
        {
            host.eject(Reason::Latency, &pool.failure, now, random);
        }
    }

    fn fail(&self, host: &mut Host, random: &mut Random) {
        let Self { pool, now, .. } = *self;
        host.failures = host.failures.saturating_add(1);
        if self.is_trial {
            host.consecutive_failures = host.consecutive_failures.saturating_add(1);
            host.eject(Reason::Failures, &pool.failure, now, random);
        } else if !host.is_ejected() && !host.is_old_news(self.evidence.begun) {
            host.consecutive_failures = host.consecutive_failures.saturating_add(1);
            penalty::raise(host, now, Fade::new(pool.time_constant, &self.record.header));
            if host.consecutive_failures >= pool.failure.consecutive && self.may_eject() {
                host.eject(Reason::Failures, &pool.failure, now, random);
            } else if pool.queue.is_some() && now.since(self.evidence.begun) < FAST {
                let rest = REST.saturating_mul(1 << (host.consecutive_failures - 1).min(10)).min(LONGEST_REST);
                host.pause(now + rest, true);
            }
        }
    }

    /// Whether one more host of the pool may be ejected, namely this one: another one must serve, and those that are ejected or probing must
    /// stay within `max_ejected_percent`, which is at least one.
    fn may_eject(&self) -> bool {
        let members = || self.record.hosts().filter(|host| !host.is_retired());
        let most = self.pool.failure.most_ejected(members().count());
        let ejected = members().filter(|host| host.is_ejected() && !host.has_flag(STRANGER)).count();
        ejected < most && another_serves(self.record, self.pool, self.slot, self.now)
    }
}

/// Whether another host than the one in this slot serves, and one of this configuration's: that of another listener is of no use to this one.
pub(super) fn another_serves(record: &Record, pool: &Pool, slot: u32, now: Instant) -> bool {
    let is_named = |host: &Host| pool.hosts.iter().any(|named| named.address == host.address());
    record.hosts().zip(0..).any(|(host, other)| other != slot && host.state(now) == State::Serving && is_named(&host))
}

/// Writes down what a watcher says of the host at this address. Gives whether that was news.
pub fn report(record: &mut Record, address: Address, watcher: Watcher, unhealthy: bool, now: Instant) -> bool {
    record.seat_at(address).is_some_and(|seat| report_at(record, seat.slot, watcher, unhealthy, now))
}

/// The same of the host in this slot.
pub fn report_at(record: &mut Record, slot: u32, watcher: Watcher, unhealthy: bool, now: Instant) -> bool {
    let header = record.header;
    let is_news = record.with_host(slot, |host| host.set_unhealthy(watcher, unhealthy, &header, now)) == Some(true);
    if is_news {
        record.header.stands_anew();
    }
    is_news
}

/// Whether a deadline has passed, or is none.
fn is_over(until: u64, now: Instant) -> bool {
    until <= now.0
}

fn remaining(until: u64, now: Instant) -> Duration {
    Instant(until).since(now)
}

#[cfg(test)]
mod tests;
