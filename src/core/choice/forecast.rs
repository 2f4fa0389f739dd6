//! Which of those that wait start now, and for whom it is better to wait for a faster host: `least_time` with a queue.
//!
//! ```text
//! the queue, in its order ─► each job goes, in thought, to the host where it is done first ─► that host has a free slot: it starts there
//!                                                                                       └─► it has none: the job waits, and is in thought there
//! ```
//!
//! So a job is held for a host that is busy only while that one, with all that are to come before the job, should be done with it sooner than any host with a free slot.
//! It is looked at again each time that a slot comes free, and at each quick tick; and it is not held for longer than until it would be done at the same time on the slow
//! host: the host that it is held for may take longer than it should ([`Claim::Later`]).

use super::{Place, Roster, loads};
use crate::config::{Policy, Pool};
use crate::core::learning;
use crate::core::record::Record;
use crate::core::score::least_time::{self, Ahead};
use crate::core::time::Instant;
use std::time::Duration;

/// What becomes of a job that waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Claim {
    /// It starts now; on the host with this index, if that matters.
    Now(Option<usize>),
    /// It waits for a busy host, but no longer than until then.
    Later(Instant),
}

/// A host, with the jobs that it is to have.
struct Outlook {
    host: usize,
    /// Those of its jobs that fill its slots.
    counted: u32,
    ahead: Ahead,
    at_once: u32,
    max_in_flight: u32,
    /// With what its failures make of it.
    speed: f64,
}

impl Outlook {
    fn time(&self, work: f64) -> f64 {
        least_time::time(self.ahead, work, self.at_once, self.speed)
    }

    fn is_free(&self) -> bool {
        self.counted < self.max_in_flight
    }
}

/// The hosts, while the queue is gone through once.
pub struct Forecast {
    hosts: Vec<Outlook>,
    mean: f64,
    now: Instant,
    /// Whether a job was given a host already, of which the record does not know.
    has_given: bool,
}

impl Forecast {
    /// The hosts as they are now; `None` where there is nothing to be gained by waiting, or nothing is known.
    pub fn new(record: &Record, pool: &Pool, roster: &Roster, now: Instant) -> Option<Self> {
        let Policy::LeastTime { .. } = pool.policy else { return None };
        let mean = f64::from(learning::mean_work(record)?);
        let load = loads(record, roster, pool, now);
        let outlook = |place: &Place| {
            let load = load(place.slot);
            let ahead = record.insight(place.slot).ahead(load, mean, place.speed, now);
            let Place { host, at_once, max_in_flight, .. } = *place;
            Outlook { host, counted: load.counted, ahead, at_once, max_in_flight, speed: place.speed / place.penalty }
        };
        // Those that stand behind others are for when no other has a free slot; and a trial waits for nobody.
        let hosts: Vec<Outlook> = roster.serving().iter().filter(|place| place.behind == 0.0).map(outlook).collect();
        roster.on_trial().is_empty().then_some(Self { hosts, mean, now, has_given: false })
    }

    /// What becomes of the next job, of so many times the mean work.
    pub fn claim(&mut self, size: f32) -> Claim {
        let work = f64::from(size) * self.mean;
        let soonest = |hosts: &[Outlook], is_one: fn(&Outlook) -> bool| {
            let times = hosts.iter().enumerate().filter(|(_, host)| is_one(host)).map(|(at, host)| (at, host.time(work)));
            times.min_by(|(_, time), (_, other)| time.total_cmp(other))
        };
        let (Some(free), Some(best)) = (soonest(&self.hosts, Outlook::is_free), soonest(&self.hosts, |_| true)) else {
            return Claim::Now(None);
        };
        // Where both are equal, now is better than later.
        let at = if best.1 < free.1 { best.0 } else { free.0 };
        let Some(host) = self.hosts.get_mut(at) else { return Claim::Now(None) };
        let claim = if host.is_free() {
            // The first may as well choose among equal hosts.
            Claim::Now(std::mem::replace(&mut self.has_given, true).then_some(host.host))
        } else {
            let longest = (free.1 - work / host.speed).max(0.0) / 1e3;
            Claim::Later(self.now + Duration::try_from_secs_f64(longest).unwrap_or_default())
        };
        (host.counted, host.ahead) = (host.counted.saturating_add(1), host.ahead.with(work));
        claim
    }
}

#[cfg(test)]
mod tests;
