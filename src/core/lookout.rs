//! What became of a pool's hosts, for the log and the metrics.

use std::time::Duration;

use super::address::Address;
use super::health::{Reason, State, Watcher};
use super::record::{FAILS_PROBES, Host, Record, TOLD_EJECTED, TOLD_UNHEALTHY};
use super::time::Instant;

/// Something that an operator wants to hear of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// A host was ejected, for so long.
    Ejected {
        /// The host.
        address: Address,
        /// Why.
        reason: Reason,
        /// Failures in a row that it had.
        failures: u32,
        /// How long from now on.
        length: Duration,
    },
    /// A host serves again.
    Readmitted(Address),
    /// A watcher says that a host is not well.
    Unhealthy(Address, Watcher),
    /// They say that it is well again.
    Healthy(Address),
    /// Envoy does not know a host of a pool that follows Envoy's cluster: the next look will say why.
    PassedOver,
    /// No host serves: all are ejected, unhealthy or draining, or have asked us to wait.
    NoHost,
    /// There is one again.
    HostAgain,
}

/// What became of the hosts since it was last told; from now on it was. The record remembers that: when another worker takes the lead,
/// nothing is lost and nothing is told twice.
pub fn look(record: &mut Record, now: Instant) -> Vec<Event> {
    let mut events = Vec::new();
    for slot in 0..record.header.hosts {
        let Some(host) = record.host(slot).filter(|host| !host.is_retired()) else {
            continue;
        };
        if awaits_a_look(record, &host) {
            if host.ejections != host.told_ejections {
                record.with_host(slot, |host| host.told_ejections = host.ejections);
                events.push(Event::PassedOver);
            }
        } else if is_news(&host, now) {
            record.with_host(slot, |host| tell(host, now, &mut events));
        }
    }
    let has_host = has_host(record, now);
    if has_host != (record.header.told_no_host == 0) {
        record.header.told_no_host = u32::from(!has_host);
        events.push(if has_host { Event::HostAgain } else { Event::NoHost });
    }
    events
}

/// Whether the next look at Envoy's cluster will say what has become of a host that Envoy did not know: it has gone as a rule, which is no event.
fn awaits_a_look(record: &Record, host: &Host) -> bool {
    record.header.discovers != 0 && host.reason() == Some(Reason::Unknown)
}

/// The hosts that are ejected or probing, as far as that is to be told.
pub fn ejected(record: &Record) -> impl Iterator<Item = Address> {
    let those = record.hosts().filter(|host| host.is_ejected() && !host.is_retired() && !awaits_a_look(record, host));
    those.map(|host| host.address())
}

fn is_news(host: &Host, now: Instant) -> bool {
    host.ejections != host.told_ejections
        || host.is_ejected() != host.has_flag(TOLD_EJECTED)
        || is_unhealthy(host, now) != host.has_flag(TOLD_UNHEALTHY)
}

/// As far as that is to be told: a host that comes has to pass Envoy's health checks first, which is no event.
fn is_unhealthy(host: &Host, now: Instant) -> bool {
    host.health(now) == State::Unhealthy && (host.requests > 0 || host.has_flag(FAILS_PROBES))
}

fn tell(host: &mut Host, now: Instant, events: &mut Vec<Event>) {
    let address = host.address();
    let was_ejected = host.has_flag(TOLD_EJECTED) || host.ejections != host.told_ejections;
    if host.ejections != host.told_ejections {
        let reason = host.reason().unwrap_or(Reason::Failures);
        let (failures, length) = (host.consecutive_failures, host.ejected_for(now));
        events.push(Event::Ejected { address, reason, failures, length });
    }
    if was_ejected && !host.is_ejected() {
        events.push(Event::Readmitted(address));
    }
    match (host.has_flag(TOLD_UNHEALTHY), is_unhealthy(host, now)) {
        (false, true) => {
            let watcher = if host.has_flag(FAILS_PROBES) { Watcher::Probes } else { Watcher::Envoy };
            events.push(Event::Unhealthy(address, watcher));
        }
        (true, false) => events.push(Event::Healthy(address)),
        _ => {}
    }
    host.told_ejections = host.ejections;
    host.set_flag(TOLD_EJECTED, host.is_ejected());
    host.set_flag(TOLD_UNHEALTHY, is_unhealthy(host, now));
}

/// Whether a host of the pool serves. One that is on trial takes one job: that is no pool. Hosts that are yet to be known are not none.
pub fn has_host(record: &Record, now: Instant) -> bool {
    record.header.awaits_hosts() || record.hosts().any(|host| host.state(now) == State::Serving)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::config::Pool;
    use crate::core::fixture::{at, pool_of, record_of};
    use crate::core::health::{Evidence, judge, report};
    use crate::core::outcome::Outcome;
    use crate::core::random::Random;

    struct Bench {
        pool: Rc<Pool>,
        record: Record,
    }

    impl Bench {
        fn new() -> Self {
            let pool = pool_of(2, "");
            let mut bench = Self { record: record_of(&pool), pool };
            (0..2).for_each(|slot| bench.record.reserve(slot, None, Instant::default()));
            assert_eq!(bench.look(), []);
            bench
        }

        fn look(&mut self) -> Vec<Event> {
            look(&mut self.record, at(5.0))
        }

        fn fail(&mut self, slot: u32) {
            let evidence = Evidence { is_timed: true, outcome: Outcome::Failure, latency: None, begun: at(5.0), trial: None };
            (0..3).for_each(|_| judge(&mut self.record, slot, evidence, &self.pool, at(5.0), &mut Random::new(1)));
        }

        fn report(&mut self, slot: usize, unhealthy: bool) {
            report(&mut self.record, self.pool.hosts[slot].address, Watcher::Envoy, unhealthy, at(5.0));
        }

        fn try_out(&mut self, slot: u32) {
            self.record.with_host(slot, |host| host.until = 0);
            let trial = self.record.with_host(slot, |host| host.begin_trial(at(5.0), Duration::from_secs(9)));
            let evidence = Evidence { is_timed: true, outcome: Outcome::Success, latency: None, begun: at(5.0), trial };
            judge(&mut self.record, slot, evidence, &self.pool, at(5.0), &mut Random::new(1));
        }
    }

    #[test]
    fn an_ejection_and_the_return_are_told_once_each() {
        let mut bench = Bench::new();
        let address = bench.pool.hosts[0].address;
        bench.fail(0);
        let events = bench.look();
        let [Event::Ejected { address: told, reason: Reason::Failures, failures: 3, length }] = events[..] else {
            panic!("{events:?}");
        };
        assert!(told == address && (10.0..=11.0).contains(&length.as_secs_f64()));
        assert_eq!(bench.look(), []);
        bench.try_out(0);
        assert_eq!(bench.look(), [Event::Readmitted(address)]);
        assert_eq!(bench.look(), []);
    }

    #[test]
    fn an_ejection_that_ended_between_two_looks_is_told_all_the_same() {
        let mut bench = Bench::new();
        bench.fail(0);
        bench.try_out(0);
        let events = bench.look();
        assert!(matches!(events[..], [Event::Ejected { .. }, Event::Readmitted(_)]), "{events:?}");
    }

    #[test]
    fn a_pool_without_hosts_is_told_when_the_last_one_goes_and_when_one_is_back() {
        let mut bench = Bench::new();
        let addresses = [bench.pool.hosts[0].address, bench.pool.hosts[1].address];
        bench.report(0, true);
        assert_eq!(bench.look(), [Event::Unhealthy(addresses[0], Watcher::Envoy)]);
        bench.report(1, true);
        assert_eq!(bench.look(), [Event::Unhealthy(addresses[1], Watcher::Envoy), Event::NoHost]);
        assert_eq!(bench.look(), []);
        bench.report(0, false);
        assert_eq!(bench.look(), [Event::Healthy(addresses[0]), Event::HostAgain]);
    }

    #[test]
    fn nothing_is_told_of_a_host_that_envoy_does_not_know_where_the_next_look_will_say_why() {
        let mut bench = Bench::new();
        bench.record.header.discovers = 1;
        let pool = bench.pool.clone();
        let eject = |host: &mut Host| host.eject(Reason::Unknown, &pool.failure, at(5.0), &mut Random::new(1));
        bench.record.with_host(0, eject);
        assert_eq!((bench.look(), ejected(&bench.record).count()), (vec![Event::PassedOver], 0));
        assert_eq!(bench.look(), []);
        assert!(crate::core::stranger::acquit(&mut bench.record, 0, at(5.0)));
        assert_eq!(bench.look(), []);
        bench.record.header.discovers = 0;
        bench.record.with_host(0, eject);
        let events = bench.look();
        assert!(matches!(events[..], [Event::Ejected { reason: Reason::Unknown, .. }]), "{events:?}");
        assert_eq!(ejected(&bench.record).collect::<Vec<_>>(), [pool.hosts[0].address]);
    }

    #[test]
    fn nothing_is_told_of_a_host_that_has_yet_to_pass_envoys_health_checks_but_of_one_that_fails_our_probes() {
        let mut bench = Bench::new();
        bench.record.with_host(0, |host| host.requests = 0);
        let address = bench.pool.hosts[0].address;
        bench.report(0, true);
        assert_eq!(bench.look(), []);
        report(&mut bench.record, address, Watcher::Probes, true, at(5.0));
        assert_eq!(bench.look(), [Event::Unhealthy(address, Watcher::Probes)]);
    }

    #[test]
    fn nothing_is_told_of_a_host_that_was_retired() {
        let mut bench = Bench::new();
        bench.fail(0);
        bench.record.retire(0);
        assert_eq!(bench.look(), []);
    }
}
