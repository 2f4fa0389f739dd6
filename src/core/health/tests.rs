use super::*;
use crate::core::fixture::{at, pool_of, record_of};
use crate::core::lease::Lease;
use proptest::prelude::*;
use std::rc::Rc;

/// A pool, its record, and a clock that only the test moves.
const DISCOVERY: &str = r#", "discovery": {"cluster": "envoy_admin"}"#;

struct Bench {
    pool: Rc<Pool>,
    record: Record,
    now: f64,
    random: Random,
}

impl Bench {
    fn of(hosts: usize, keys: &str) -> Self {
        let pool = pool_of(hosts, keys);
        Self { record: record_of(&pool), pool, now: 1000.0, random: Random::new(5) }
    }

    fn host(&self, slot: u32) -> Host {
        self.record.host(slot).unwrap()
    }

    fn state(&self, slot: u32) -> State {
        self.host(slot).state(at(self.now))
    }

    fn states(&self) -> Vec<State> {
        (0..self.record.header.hosts).map(|slot| self.state(slot)).collect()
    }

    fn judge(&mut self, slot: u32, evidence: Evidence) {
        judge(&mut self.record, slot, evidence, &self.pool, at(self.now), &mut self.random);
    }

    /// A job ends so that was begun just before.
    fn ends(&mut self, slot: u32, outcome: Outcome) {
        let begun = at(self.now);
        self.judge(slot, Evidence { is_timed: true, outcome, latency: None, begun, trial: None });
    }

    fn takes(&mut self, slot: u32, millis: u64) {
        let (latency, begun) = (Some(Duration::from_millis(millis)), at(self.now));
        self.judge(slot, Evidence { is_timed: true, outcome: Outcome::Success, latency, begun, trial: None });
    }

    fn fails(&mut self, slot: u32, times: usize) {
        (0..times).for_each(|_| self.ends(slot, Outcome::Failure));
    }

    /// A trial begins, and gives how it is known.
    fn trial(&mut self, slot: u32) -> Evidence {
        assert!(self.host(slot).wants_trial(at(self.now)));
        let (now, overdue) = (at(self.now), self.pool.failure.base_ejection);
        let trial = self.record.with_host(slot, |host| host.begin_trial(now, overdue));
        Evidence { is_timed: true, outcome: Outcome::Neutral, latency: None, begun: now, trial }
    }

    fn trial_ends(&mut self, slot: u32, outcome: Outcome) {
        let trial = self.trial(slot);
        self.judge(slot, Evidence { outcome, ..trial });
    }

    fn oversee(&mut self) {
        let longest = Longest { ejection: self.pool.failure.max_ejection, slow_start: Duration::ZERO };
        oversee(&mut self.record, &self.pool, longest, at(self.now));
    }

    /// Passes the time until the host is on trial, and gives how long that was.
    fn wait(&mut self, slot: u32) -> f64 {
        let wait = self.host(slot).ejected_for(at(self.now)).as_secs_f64();
        self.now += wait + 0.001;
        assert_eq!(self.state(slot), State::Probing);
        wait
    }
}

#[test]
fn three_failures_in_a_row_eject_a_host_and_two_do_not() {
    let mut bench = Bench::of(4, "");
    bench.fails(0, 2);
    bench.ends(0, Outcome::Success);
    bench.fails(0, 2);
    assert_eq!(bench.state(0), State::Serving);
    bench.fails(0, 1);
    assert_eq!(bench.states(), [State::Ejected, State::Serving, State::Serving, State::Serving]);
    let host = bench.host(0);
    assert_eq!((host.reason(), host.ejections, host.failures), (Some(Reason::Failures), 1, 5));
    let wait = bench.wait(0);
    assert!((10.0..=11.0).contains(&wait), "{wait}");
}

#[test]
fn what_says_nothing_about_the_host_neither_counts_nor_resets() {
    let mut bench = Bench::of(4, "");
    for outcome in [Outcome::Neutral, Outcome::Busy(Duration::ZERO)] {
        bench.fails(0, 1);
        bench.ends(0, outcome);
    }
    assert_eq!((bench.state(0), bench.host(0).consecutive_failures), (State::Serving, 2));
    bench.fails(0, 1);
    assert_eq!(bench.state(0), State::Ejected);
}

#[test]
fn after_each_readmission_it_takes_exactly_as_many_failures_again() {
    let mut bench = Bench::of(4, "");
    for ejection in 1..=4 {
        bench.fails(0, 2);
        assert_eq!(bench.state(0), State::Serving, "ejection {ejection}");
        bench.fails(0, 1);
        assert_eq!((bench.state(0), bench.host(0).ejections), (State::Ejected, ejection));
        bench.wait(0);
        bench.trial_ends(0, Outcome::Success);
        assert_eq!((bench.state(0), bench.host(0).consecutive_failures), (State::Serving, 0));
    }
}

#[test]
fn each_ejection_is_twice_as_long_up_to_the_maximum_and_good_conduct_shortens_the_next() {
    let mut bench = Bench::of(4, r#", "failure": {"base_ejection_ms": 1000, "max_ejection_ms": 6000}"#);
    bench.fails(0, 3);
    for length in [1.0, 2.0, 4.0, 6.0, 6.0] {
        let wait = bench.wait(0);
        assert!((length..=length * 1.1).contains(&wait), "{wait} is not {length}");
        bench.trial_ends(0, Outcome::Failure);
    }
    bench.wait(0);
    bench.trial_ends(0, Outcome::Success);
    // It had been ejected six times; after four lengths of service the next is the third.
    bench.now += 4.5;
    bench.fails(0, 3);
    let wait = bench.wait(0);
    assert!((4.0..=4.4).contains(&wait), "{wait}");
    bench.trial_ends(0, Outcome::Success);
    bench.now += 1e6;
    bench.fails(0, 3);
    assert!((1.0..=1.1).contains(&bench.wait(0)));
}

#[test]
fn jobs_from_before_the_readmission_are_old_news() {
    let mut bench = Bench::of(4, "");
    let old = Evidence { is_timed: true, outcome: Outcome::Failure, latency: None, begun: at(bench.now), trial: None };
    bench.fails(0, 3);
    bench.wait(0);
    bench.trial_ends(0, Outcome::Success);
    (0..50).for_each(|_| bench.judge(0, old));
    assert_eq!((bench.state(0), bench.host(0).consecutive_failures), (State::Serving, 0));
    assert_eq!(bench.host(0).failures, 53, "they are counted all the same");
}

#[test]
fn what_still_runs_on_an_ejected_host_changes_nothing() {
    let mut bench = Bench::of(4, "");
    bench.fails(0, 3);
    let before = bench.host(0).ejected_for(at(bench.now));
    bench.ends(0, Outcome::Success);
    bench.fails(0, 10);
    assert_eq!((bench.state(0), bench.host(0).ejected_for(at(bench.now))), (State::Ejected, before));
    bench.wait(0);
    bench.ends(0, Outcome::Success);
    bench.fails(0, 5);
    assert_eq!(bench.state(0), State::Probing);
    assert!(bench.host(0).wants_trial(at(bench.now)));
}

#[test]
fn one_trial_at_a_time_and_one_that_ends_without_a_word_is_followed_by_another() {
    for outcome in [Outcome::Neutral, Outcome::Busy(Duration::ZERO)] {
        let mut bench = Bench::of(4, "");
        bench.fails(0, 3);
        bench.wait(0);
        let trial = bench.trial(0);
        assert_eq!(bench.state(0), State::Probing);
        assert!(!bench.host(0).wants_trial(at(bench.now)));
        bench.judge(0, Evidence { outcome, ..trial });
        assert!(bench.host(0).wants_trial(at(bench.now)), "{outcome:?}");
    }
}

#[test]
fn a_trial_that_never_ends_is_followed_by_another_and_its_late_success_counts() {
    let mut bench = Bench::of(4, "");
    bench.fails(0, 3);
    bench.wait(0);
    let first = bench.trial(0);
    bench.now += 10.1;
    let second = bench.trial(0);
    bench.judge(0, Evidence { outcome: Outcome::Neutral, ..first });
    assert!(!bench.host(0).wants_trial(at(bench.now)), "the second still runs");
    bench.judge(0, Evidence { outcome: Outcome::Success, ..first });
    assert_eq!(bench.state(0), State::Serving);
    bench.judge(0, Evidence { outcome: Outcome::Failure, ..second });
    assert_eq!(bench.state(0), State::Serving, "it was begun before the re-admission");
}

#[test]
fn a_trial_of_an_earlier_ejection_says_nothing_about_this_one() {
    let mut bench = Bench::of(4, "");
    bench.fails(0, 3);
    bench.wait(0);
    let first = bench.trial(0);
    bench.now += 10.1;
    bench.trial_ends(0, Outcome::Failure);
    bench.judge(0, Evidence { outcome: Outcome::Success, ..first });
    assert_eq!(bench.state(0), State::Ejected);
}

#[test]
fn the_limits_hold_in_pools_of_every_size() {
    for (hosts, percent, most) in [
        (1, 100, 0),
        (2, 50, 1),
        (2, 100, 1),
        (3, 50, 1),
        (3, 100, 2),
        (10, 50, 5),
        (10, 10, 1),
        (10, 5, 1),
        (10, 100, 9),
        (7, 30, 2),
    ] {
        let mut bench = Bench::of(hosts, &format!(r#", "failure": {{"max_ejected_percent": {percent}}}"#));
        (0..20).for_each(|_| (0..hosts as u32).for_each(|slot| bench.fails(slot, 1)));
        let ejected = bench.states().iter().filter(|state| **state == State::Ejected).count();
        assert_eq!(ejected, most, "{hosts} hosts, {percent} percent");
    }
}

#[test]
fn a_host_that_could_not_be_ejected_is_at_its_next_failure_once_it_may() {
    let mut bench = Bench::of(2, "");
    bench.fails(0, 3);
    bench.fails(1, 9);
    assert_eq!(bench.states(), [State::Ejected, State::Serving]);
    bench.wait(0);
    bench.fails(1, 1);
    assert_eq!(bench.states(), [State::Probing, State::Serving], "a host on trial does not carry the pool");
    bench.trial_ends(0, Outcome::Success);
    bench.fails(1, 1);
    assert_eq!(bench.states(), [State::Serving, State::Ejected]);
}

#[test]
fn the_last_host_that_serves_is_not_ejected_though_others_drain_or_are_unhealthy() {
    let mut bench = Bench::of(4, r#", "failure": {"max_ejected_percent": 100}"#);
    let drained = crate::core::record::Named { drain: true, ..bench.pool.hosts[0].named() };
    bench.record.describe(0, drained);
    assert!(report(&mut bench.record, bench.pool.hosts[1].address, Watcher::Probes, true, at(bench.now)));
    assert!(report(&mut bench.record, bench.pool.hosts[2].address, Watcher::Envoy, true, at(bench.now)));
    bench.fails(3, 9);
    assert_eq!(bench.states(), [State::Draining, State::Unhealthy, State::Unhealthy, State::Serving]);
}

#[test]
fn a_busy_host_rests_as_long_as_it_asked_and_is_not_ejected() {
    let mut bench = Bench::of(1, "");
    (0..9).for_each(|_| bench.ends(0, Outcome::Busy(Duration::from_secs(5))));
    assert_eq!(bench.state(0), State::Busy);
    bench.ends(0, Outcome::Busy(Duration::from_secs(1)));
    bench.now += 4.9;
    assert_eq!(bench.state(0), State::Busy, "the longer pause stands");
    bench.now += 0.2;
    assert_eq!((bench.state(0), bench.host(0).failures), (State::Serving, 0));
}

#[test]
fn a_host_that_is_busy_has_asked_for_it_or_failed_at_once_whichever_lasts_longer() {
    let mut bench = Bench::of(1, r#", "queue": {}"#);
    bench.ends(0, Outcome::Failure);
    assert_eq!((bench.state(0), bench.host(0).rests()), (State::Busy, true));
    bench.ends(0, Outcome::Busy(Duration::from_millis(100)));
    assert!(bench.host(0).rests(), "it asked for less than it gets");
    bench.ends(0, Outcome::Busy(Duration::from_secs(1)));
    assert!(!bench.host(0).rests());
    bench.now += 2.0;
    bench.ends(0, Outcome::Failure);
    assert_eq!((bench.state(0), bench.host(0).rests()), (State::Busy, true));
}

#[test]
fn three_slow_windows_in_a_row_trip_the_breaker_and_two_with_a_fast_one_between_do_not() {
    let keys = r#", "latency_breaker": {"window": 10, "quantile": 0.8, "threshold_ms": 100, "consecutive_windows": 3}"#;
    let mut bench = Bench::of(4, keys);
    // Nearest rank: the 8th of 10. With two slow ones it is fast, with three it is slow.
    let window = |bench: &mut Bench, slow: usize| (0..10).for_each(|job| bench.takes(0, if job < slow { 101 } else { 100 }));
    for slow in [3, 10, 2, 3, 3] {
        window(&mut bench, slow);
        assert_eq!(bench.state(0), State::Serving);
    }
    (0..9).for_each(|_| bench.takes(0, 500));
    assert_eq!(bench.state(0), State::Serving, "the third window is not full");
    bench.takes(0, 1);
    assert_eq!((bench.state(0), bench.host(0).reason()), (State::Ejected, Some(Reason::Latency)));
    bench.wait(0);
    let trial = bench.trial(0);
    bench.judge(0, Evidence { outcome: Outcome::Success, latency: Some(Duration::from_millis(101)), ..trial });
    assert_eq!((bench.state(0), bench.host(0).reason()), (State::Ejected, Some(Reason::Latency)), "still slow");
    bench.wait(0);
    let trial = bench.trial(0);
    bench.judge(0, Evidence { outcome: Outcome::Success, latency: Some(Duration::from_millis(100)), ..trial });
    assert_eq!(bench.state(0), State::Serving);
    window(&mut bench, 10);
    window(&mut bench, 10);
    assert_eq!(bench.state(0), State::Serving, "the windows start afresh");
}

#[test]
fn the_default_quantile_of_a_hundred_lets_one_slow_job_pass_and_not_two() {
    let breaker = |keys: &str| pool_of(1, &format!(r#", "latency_breaker": {{{keys}}}"#)).breaker.clone().unwrap().most_slow;
    assert_eq!(breaker(""), 1);
    assert_eq!(breaker(r#""window": 1"#), 0);
    assert_eq!(breaker(r#""window": 10, "quantile": 0.5"#), 5);
    assert_eq!(breaker(r#""window": 1000, "quantile": 0.999"#), 1);
    assert_eq!(breaker(r#""window": 100, "quantile": 1"#), 0);
    assert_eq!(breaker(r#""window": 7, "quantile": 0.57"#), 3);
}

#[test]
fn probes_say_unhealthy_and_when_they_say_healthy_an_ejected_host_is_tried_at_once() {
    let mut bench = Bench::of(4, r#", "probe": {"path": "/health"}"#);
    let address = bench.pool.hosts[0].address;
    bench.fails(0, 3);
    assert!(report(&mut bench.record, address, Watcher::Probes, true, at(bench.now)));
    assert!(!report(&mut bench.record, address, Watcher::Probes, true, at(bench.now)));
    bench.now += 60.0;
    assert_eq!(bench.state(0), State::Unhealthy);
    assert!(!bench.host(0).wants_trial(at(bench.now)));
    bench.now -= 59.0;
    assert!(report(&mut bench.record, address, Watcher::Probes, false, at(bench.now)));
    assert!(bench.host(0).wants_trial(at(bench.now)));
}

#[test]
fn a_pool_that_is_not_probed_any_more_forgets_what_probes_said_and_not_what_envoy_says() {
    let mut bench = Bench::of(2, DISCOVERY);
    report(&mut bench.record, bench.pool.hosts[0].address, Watcher::Probes, true, at(bench.now));
    report(&mut bench.record, bench.pool.hosts[1].address, Watcher::Envoy, true, at(bench.now));
    bench.oversee();
    assert_eq!(bench.states(), [State::Serving, State::Unhealthy]);
}

#[test]
fn a_pool_that_does_not_follow_envoy_any_more_forgets_what_envoy_said() {
    let mut bench = Bench::of(2, r#", "probe": {"path": "/health"}"#);
    report(&mut bench.record, bench.pool.hosts[0].address, Watcher::Probes, true, at(bench.now));
    report(&mut bench.record, bench.pool.hosts[1].address, Watcher::Envoy, true, at(bench.now));
    bench.oversee();
    assert_eq!(bench.states(), [State::Unhealthy, State::Serving]);
}

#[test]
fn where_no_host_serves_the_ejected_ones_are_tried_and_otherwise_they_wait() {
    let mut bench = Bench::of(2, DISCOVERY);
    bench.fails(0, 3);
    bench.oversee();
    assert_eq!(bench.states(), [State::Ejected, State::Serving]);
    report(&mut bench.record, bench.pool.hosts[1].address, Watcher::Envoy, true, at(bench.now));
    bench.oversee();
    assert_eq!(bench.states(), [State::Probing, State::Unhealthy]);
}

#[test]
fn a_moved_trial_is_a_failed_one_for_its_host_and_none_for_the_other() {
    let mut bench = Bench::of(4, "");
    bench.fails(0, 3);
    bench.wait(0);
    let (seat, trial) = bench.record.place(0, at(bench.now), Some(Duration::from_secs(10)), None).unwrap();
    let named = bench.pool.hosts.iter().map(|host| host.address).collect();
    let mut lease = Lease::new(Some(seat), named, at(bench.now), bench.pool.clone(), trial);
    let there = crate::core::lease::Whereabouts { address: bench.pool.hosts[1].address, attempts: 2 };
    let moved = lease.follow(&mut bench.record, there, at(bench.now), &mut bench.random);
    lease.moved(moved);
    assert_eq!((bench.states()[0], lease.trial), (State::Ejected, None));
    assert_eq!(bench.host(1).failures, 0);
}

#[test]
fn an_ejection_of_a_clock_that_has_stepped_back_ends_and_a_long_one_of_another_configuration_does_not() {
    let mut bench = Bench::of(4, r#", "failure": {"base_ejection_ms": 1000, "max_ejection_ms": 1000}"#);
    bench.fails(0, 3);
    bench.now -= 60.0;
    let longest = Longest { ejection: Duration::from_secs(300), slow_start: Duration::ZERO };
    oversee(&mut bench.record, &bench.pool, longest, at(bench.now));
    assert_eq!(bench.state(0), State::Ejected, "another live configuration may have set it");
    bench.oversee();
    assert_eq!(bench.state(0), State::Probing);
}

/// Anything that may happen to a host.
#[derive(Clone, Debug)]
enum Event {
    End { slot: u32, outcome: Outcome, millis: u64, age: u32 },
    Trial { slot: u32 },
    TrialEnd { number: usize, outcome: Outcome, millis: u64 },
    Report { slot: u32, unhealthy: bool },
    Pass { millis: u32 },
    Back { seconds: u32 },
    Oversee,
    Reload { slot: u32 },
}

fn event() -> impl Strategy<Value = Event> {
    let outcome = || {
        prop_oneof![
            3 => Just(Outcome::Success),
            6 => Just(Outcome::Failure),
            1 => Just(Outcome::Neutral),
            1 => (0..90u64).prop_map(|seconds| Outcome::Busy(Duration::from_secs(seconds.min(60)))),
        ]
    };
    prop_oneof![
        12 => (0..4u32, outcome(), 0..300u64, 0..9u32).prop_map(|(slot, outcome, millis, age)| Event::End { slot, outcome, millis, age }),
        6 => (0..4u32).prop_map(|slot| Event::Trial { slot }),
        6 => (0..9usize, outcome(), 0..300u64).prop_map(|(number, outcome, millis)| Event::TrialEnd { number, outcome, millis }),
        1 => (0..4u32, any::<bool>()).prop_map(|(slot, unhealthy)| Event::Report { slot, unhealthy }),
        8 => (0..30_000u32).prop_map(|millis| Event::Pass { millis }),
        1 => (0..4000u32).prop_map(|seconds| Event::Back { seconds }),
        2 => Just(Event::Oversee),
        1 => (0..4u32).prop_map(|slot| Event::Reload { slot }),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_the_limits_hold_and_no_host_is_lost_for_ever(events in prop::collection::vec(event(), 1..200)) {
        let breaker = r#""latency_breaker": {"window": 3, "threshold_ms": 200, "consecutive_windows": 2}"#;
        let mut bench = Bench::of(4, &format!(r#", "failure": {{"max_ejection_ms": 60000}}, "probe": {{"path": "/"}}, {breaker}"#));
        bench.now = 10_000.0;
        let mut trials: Vec<(u32, Evidence)> = Vec::new();
        for event in events {
            match event {
                Event::End { slot, outcome, millis, age } => {
                    let begun = at((bench.now - f64::from(age)).max(1.0));
                    bench.judge(slot, Evidence { is_timed: true, outcome, latency: Some(Duration::from_millis(millis)), begun, trial: None });
                }
                Event::Trial { slot } if bench.host(slot).wants_trial(at(bench.now)) => trials.push((slot, bench.trial(slot))),
                Event::Trial { .. } => {}
                Event::TrialEnd { number, outcome, millis } if !trials.is_empty() => {
                    let (slot, trial) = trials.swap_remove(number % trials.len());
                    bench.judge(slot, Evidence { outcome, latency: Some(Duration::from_millis(millis)), ..trial });
                }
                Event::TrialEnd { .. } => {}
                Event::Report { slot, unhealthy } => {
                    let address = bench.host(slot).address();
                    report(&mut bench.record, address, Watcher::Probes, unhealthy, at(bench.now));
                }
                Event::Pass { millis } => bench.now += f64::from(millis) / 1000.0,
                Event::Back { seconds } => bench.now = (bench.now - f64::from(seconds)).max(1.0),
                Event::Oversee => bench.oversee(),
                Event::Reload { slot } => bench.record.describe(slot, bench.pool.hosts[slot as usize].named()),
            }
            let ejected = (0..4).filter(|slot| bench.host(*slot).is_ejected()).count();
            prop_assert!(ejected <= 2, "{} of 4 are ejected", ejected);
            // Of its own accord it may change at a time that is told, so that a choice that was worked out holds until then.
            for slot in 0..4 {
                let (host, now) = (bench.host(slot), at(bench.now));
                let later = host.next_change(now).map_or(at(bench.now + 7200.0), |change| Instant(change.0 - 1));
                prop_assert_eq!((host.health(now), host.wants_trial(now)), (host.health(later), host.wants_trial(later)));
                prop_assert!(host.next_change(now).is_none_or(|change| change > now));
            }
        }
        // From now on the leader looks on, the probes are good, and every trial succeeds at once.
        for _ in 0..140 {
            bench.now += 1.0;
            bench.oversee();
            for slot in 0..4 {
                let address = bench.host(slot).address();
                report(&mut bench.record, address, Watcher::Probes, false, at(bench.now));
                if bench.host(slot).wants_trial(at(bench.now)) {
                    bench.trial_ends(slot, Outcome::Success);
                }
            }
        }
        prop_assert_eq!(bench.states(), [State::Serving; 4]);
    }
}
