//! What a failing host gets of the traffic, in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;
use crate::core::fixture::{at, pool_of, record_of, wants};
use crate::core::health::{Evidence, State, Watcher, judge, report};
use crate::core::outcome::Outcome;

/// What became of the jobs of a closed loop over four hosts.
struct Run {
    jobs: [usize; 4],
    ejections: u32,
}

/// The penalty alone: nobody is ejected.
const NO_EJECTION: &str = r#", "failure": {"consecutive": 1000}"#;

/// So many clients (fewer than the sound hosts have slots: beyond that a job has nowhere else to go) send a job each time the one before has ended: 10 ms on a sound host. The first host fails every `nth` job at once.
fn closed_loop(clients: usize, jobs: usize, nth: usize, keys: &str) -> Run {
    let pool = pool_of(4, keys);
    let (mut record, mut roster, mut random) = (record_of(&pool), Roster::default(), Random::new(clients as u64));
    let (mut ends, mut placed, mut now) = (BinaryHeap::new(), [0; 4], 1_000_000u64);
    let mut running = 0;
    while placed.iter().sum::<usize>() < jobs {
        if running == clients {
            let Reverse((due, begun, host)): Reverse<(u64, u64, usize)> = ends.pop().unwrap();
            now = due;
            let is_failed = due == begun + 100;
            let outcome = if is_failed { Outcome::Failure } else { Outcome::Success };
            let seat = record.seat_at(pool.hosts[host].address).unwrap();
            record.release(seat, None, Instant::default());
            let evidence = Evidence {
                is_timed: true,
                outcome,
                latency: Some(Duration::from_micros(due - begun)),
                begun: Instant(begun),
                trial: None,
            };
            judge(&mut record, seat.slot, evidence, &pool, Instant(now), &mut random);
            running -= 1;
        }
        let Decision::Chosen(chosen) = choose(&record, &pool, &mut roster, Instant(now), &mut random, wants(Kind::Other)) else {
            panic!("no host");
        };
        let host = chosen.hosts[0];
        record.reserve(host as u32, None, Instant::default());
        placed[host] += 1;
        let fails = host == 0 && placed[0] % nth == 0;
        ends.push(Reverse((now + if fails { 100 } else { 10_000 }, now, host)));
        running += 1;
    }
    Run { jobs: placed, ejections: record.host(0).unwrap().ejections }
}

#[test]
fn a_host_that_fails_every_second_job_at_once_gets_at_most_an_eighth_though_it_is_never_ejected() {
    for clients in [1, 2, 4, 8, 16, 64, 140] {
        let run = closed_loop(clients, 2000, 2, NO_EJECTION);
        assert_eq!(run.ejections, 0);
        assert!(run.jobs[0] <= 240, "{clients} clients: {:?}", run.jobs);
    }
}

/// Jobs that come at random, so many seconds apart in the mean, and take so long on a sound host. The first of four fails every second at once.
fn open_loop(gap: f64, work: f64, jobs: usize) -> [usize; 4] {
    let pool = pool_of(4, NO_EJECTION);
    let (mut record, mut roster, mut random) = (record_of(&pool), Roster::default(), Random::new(7));
    let mut ends: BinaryHeap<Reverse<(u64, u64, usize, bool)>> = BinaryHeap::new();
    let (mut placed, mut now) = ([0; 4], 1000.0);
    for _ in 0..jobs {
        now -= gap * (1.0 - random.unit()).ln();
        while let Some(Reverse((due, ..))) = ends.peek()
            && *due <= at(now).0
        {
            let Reverse((due, begun, host, fails)) = ends.pop().unwrap();
            let seat = record.seat_at(pool.hosts[host].address).unwrap();
            record.release(seat, None, Instant::default());
            let outcome = if fails { Outcome::Failure } else { Outcome::Success };
            let latency = Some(Duration::from_micros(due - begun)).filter(|_| !fails);
            let evidence = Evidence { is_timed: true, outcome, latency, begun: Instant(begun), trial: None };
            judge(&mut record, seat.slot, evidence, &pool, Instant(due), &mut random);
        }
        let Decision::Chosen(chosen) = choose(&record, &pool, &mut roster, at(now), &mut random, wants(Kind::Job)) else {
            panic!("no host")
        };
        let host = chosen.hosts[0];
        record.reserve(host as u32, None, Instant::default());
        placed[host] += 1;
        let fails = host == 0 && placed[0] % 2 == 0;
        ends.push(Reverse((at(now + if fails { 0.001 } else { work }).0, at(now).0, host, fails)));
    }
    placed
}

#[test]
fn a_half_failing_host_is_held_to_an_eighth_at_the_rates_of_gpu_jobs_too() {
    for (gap, work) in [(0.01, 0.2), (0.1, 2.0), (1.0, 6.0), (1.0, 20.0), (5.0, 6.0), (5.0, 60.0), (20.0, 60.0), (60.0, 6.0)] {
        let placed = open_loop(gap, work, 2000);
        assert!(placed[0] <= 240, "every {gap} s a job of {work} s: {placed:?}");
    }
}

#[test]
fn a_host_that_fails_every_third_job_loses_traffic_long_before_it_fails_three_in_a_row() {
    for clients in [2, 8, 64, 140] {
        let run = closed_loop(clients, 2000, 3, NO_EJECTION);
        assert_eq!(run.ejections, 0);
        assert!(run.jobs[0] <= 300, "{clients} clients: {:?}", run.jobs);
    }
}

#[test]
fn a_host_that_fails_one_job_in_a_hundred_keeps_most_of_its_share() {
    for clients in [8, 64] {
        let run = closed_loop(clients, 20_000, 100, NO_EJECTION);
        assert!(run.jobs[0] >= 2500, "{clients} clients: {:?}", run.jobs);
    }
}

#[test]
fn the_penalty_works_without_any_weight_of_latency_too() {
    let run = closed_loop(8, 2000, 2, r#", "score": {"latency_weight": 0}"#);
    assert!(run.jobs[0] <= 240, "{:?}", run.jobs);
}

/// A pool of three of which the first is on trial, with these keys.
fn on_trial(keys: &str) -> (std::rc::Rc<Pool>, Record) {
    let pool = pool_of(3, keys);
    let mut record = record_of(&pool);
    let evidence = Evidence { is_timed: true, outcome: Outcome::Failure, latency: None, begun: at(1.0), trial: None };
    for _ in 0..3 {
        judge(&mut record, 0, evidence, &pool, at(1.0), &mut Random::new(1));
    }
    assert_eq!(record.host(0).unwrap().state(at(1.0)), State::Ejected);
    (pool, record)
}

fn decide(record: &Record, pool: &Pool, seconds: f64, kind: Kind) -> Decision {
    choose(record, pool, &mut Roster::default(), at(seconds), &mut Random::new(1), wants(kind))
}

#[test]
fn an_ejected_host_is_not_named_and_after_its_time_the_next_job_is_its_trial() {
    let (pool, mut record) = on_trial("");
    let Decision::Chosen(chosen) = decide(&record, &pool, 5.0, Kind::Job) else { panic!("no host") };
    assert!(!chosen.hosts.contains(&0) && chosen.hosts.len() == 2 && chosen.trial.is_none());
    let Decision::Chosen(chosen) = decide(&record, &pool, 13.0, Kind::Job) else { panic!("no host") };
    assert_eq!((chosen.hosts[0], chosen.hosts.len(), chosen.trial), (0, 3, Some(Duration::from_secs(10))));
    record.place(0, at(13.0), chosen.trial, None);
    let Decision::Chosen(chosen) = decide(&record, &pool, 13.0, Kind::Job) else { panic!("no host") };
    assert!(!chosen.hosts.contains(&0), "one trial at a time, and none as an alternate");
}

#[test]
fn a_request_without_a_lease_is_no_trial() {
    let (pool, record) = on_trial("");
    let Decision::Chosen(chosen) = decide(&record, &pool, 13.0, Kind::Other) else { panic!("no host") };
    assert!(!chosen.hosts.contains(&0) && chosen.trial.is_none());
}

#[test]
fn where_there_is_no_other_a_request_without_a_lease_goes_to_a_probing_host() {
    let (pool, mut record) = on_trial("");
    for host in 1..3 {
        assert!(report(&mut record, pool.hosts[host].address, Watcher::Envoy, true, at(1.0)));
    }
    assert!(matches!(decide(&record, &pool, 5.0, Kind::Other), Decision::NoHost(_)), "it is ejected");
    record.place(0, at(13.0), Some(Duration::from_secs(10)), None);
    let Decision::Chosen(chosen) = decide(&record, &pool, 14.0, Kind::Other) else { panic!("no host") };
    assert_eq!(chosen.hosts, [0]);
    assert!(matches!(decide(&record, &pool, 14.0, Kind::Job), Decision::NoHost(_)), "one trial at a time");
}

#[test]
fn a_trial_takes_a_slot_like_any_job() {
    let (pool, mut record) = on_trial(r#", "max_in_flight": 1"#);
    record.reserve(0, None, Instant::default());
    let Decision::Chosen(chosen) = decide(&record, &pool, 13.0, Kind::Job) else { panic!("no host") };
    assert!(!chosen.hosts.contains(&0), "what hangs on it fills its slot");
    (1..3).for_each(|slot| record.reserve(slot, None, Instant::default()));
    assert!(matches!(decide(&record, &pool, 13.0, Kind::Job), Decision::Full(_)));
}

#[test]
fn without_alternates_a_trial_is_alone() {
    let (pool, record) = on_trial(r#", "alternates": 0"#);
    let Decision::Chosen(chosen) = decide(&record, &pool, 13.0, Kind::Job) else { panic!("no host") };
    assert_eq!(chosen.hosts, [0]);
}

#[test]
fn when_all_hosts_are_busy_the_advice_is_until_the_first_is_not() {
    let pool = pool_of(2, "");
    let mut record = record_of(&pool);
    for (slot, seconds) in [(0, 30), (1, 7)] {
        let evidence = Evidence {
            is_timed: true,
            outcome: Outcome::Busy(Duration::from_secs(seconds)),
            latency: None,
            begun: at(1.0),
            trial: None,
        };
        judge(&mut record, slot, evidence, &pool, at(1.0), &mut Random::new(1));
    }
    assert_eq!(decide(&record, &pool, 2.0, Kind::Job), Decision::NoHost(Duration::from_secs(6)));
    assert!(matches!(decide(&record, &pool, 8.0, Kind::Job), Decision::Chosen(_)));
}

#[test]
fn a_roster_that_is_kept_sees_hosts_come_back_by_the_mere_passing_of_time() {
    let (pool, record) = on_trial("");
    let mut roster = Roster::default();
    let mut is_trial = |seconds: f64| {
        let decision = choose(&record, &pool, &mut roster, at(seconds), &mut Random::new(1), wants(Kind::Job));
        matches!(decision, Decision::Chosen(Chosen { trial: Some(_), .. }))
    };
    assert_eq!([2.0, 10.9, 12.1, 3.0, 13.0].map(&mut is_trial), [false, false, true, false, true]);
}

#[test]
fn a_pool_that_explains_itself_says_the_score_its_parts_and_the_runner_up() {
    let pool = pool_of(3, r#", "explain": "header""#);
    let mut record = record_of(&pool);
    record.reserve(1, None, Instant::default());
    (0..2).for_each(|_| record.reserve(2, None, Instant::default()));
    let Decision::Chosen(Chosen { why: Some(why), hosts, .. }) = decide(&record, &pool, 5.0, Kind::Job) else { panic!("no why") };
    assert_eq!(hosts, [0, 1, 2]);
    let close = |seen: f64, expected: f64| (seen - expected).abs() < 1e-6;
    let Parts::Score { jobs, latency } = why.parts else { panic!("{why:?}") };
    assert!(close(why.score, 0.7) && close(jobs, 0.7) && close(latency, 0.0) && close(why.penalty, 1.0), "{why:?}");
    assert!(why.runner_up.is_some_and(|(host, score)| host == 1 && close(score, 1.4)), "{why:?}");
    let quiet = pool_of(3, "");
    assert!(matches!(decide(&record, &quiet, 5.0, Kind::Job), Decision::Chosen(Chosen { why: None, .. })));
}
