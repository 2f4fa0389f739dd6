//! What the leader sees to once a tick, so that no host stays what it is for ever.

use std::time::Duration;

use super::{JITTER, State, Watcher, remaining};
use crate::config::Pool;
use crate::core::newcomer;
use crate::core::outcome::LONGEST_PAUSE;
use crate::core::record::Record;
use crate::core::time::Instant;

/// The longest times in any live configuration of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Longest {
    /// Of an ejection, without its jitter.
    pub ejection: Duration,
    /// Of a slow start.
    pub slow_start: Duration,
}

/// What the leader sees to once a tick.
///
/// - Where no host of the pool serves, an ejection protects nobody: those that could be tried are.
/// - A pool that is not probed any more has no host that fails its probes, and one that does not follow Envoy's health none that fails that.
/// - A deadline that lies further ahead than any that is ever set is of a clock that has since stepped back.
/// - A newcomer grows up.
pub fn oversee(record: &mut Record, pool: &Pool, longest: Longest, now: Instant) {
    let serves_none = !record.hosts().any(|host| matches!(host.state(now), State::Serving | State::Busy | State::Probing));
    let longest_ejection = longest.ejection.mul_f64(1.0 + JITTER);
    let header = record.header;
    let mut changed = false;
    for slot in 0..record.header.hosts {
        let Some(mut host) = record.host(slot) else { continue };
        let is_forgotten = |watcher| match watcher {
            Watcher::Probes => pool.probe.is_none(),
            Watcher::Envoy => header.discovers == 0,
        };
        let mut is_well = false;
        for watcher in [Watcher::Probes, Watcher::Envoy].into_iter().filter(|watcher| is_forgotten(*watcher)) {
            is_well |= host.set_unhealthy(watcher, false, &header, now);
        }
        let is_astray = host.is_ejected() && remaining(host.until, now) > longest_ejection;
        let is_relieved = is_astray || serves_none && host.state(now) == State::Ejected;
        if is_relieved {
            host.until = now.0;
        }
        let is_called_back = host.busy_for(now) > LONGEST_PAUSE;
        if is_called_back {
            host.busy_until = now.0;
        }
        let is_grown = newcomer::grow_up(&mut host, longest.slow_start, now);
        if is_well || is_relieved || is_called_back || is_grown {
            record.with_host(slot, |entry| *entry = host);
            changed = true;
        }
    }
    if changed {
        record.header.stands_anew();
    }
}
