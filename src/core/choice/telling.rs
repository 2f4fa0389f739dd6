//! Tests of choices by what hosts tell of themselves, and by sessions.

use super::*;
use crate::core::fixture::{at, pool_of, record_of, wants};
use crate::core::learning::Label;
use crate::core::reading::Reading;
use crate::core::report;

fn told(memory: f64, compute: f64) -> Reading {
    Reading::of(None, None, Some(memory), Some(compute))
}

fn jobs(running: f64, waiting: f64) -> Reading {
    Reading::of(Some(running), Some(waiting), None, None)
}

/// The hosts of so many choices, none of which is placed.
fn chosen(record: &Record, pool: &Pool, seconds: f64, choices: usize) -> Vec<usize> {
    let (mut roster, mut random) = (Roster::default(), Random::new(5));
    let mut count = vec![0; pool.hosts.len()];
    for _ in 0..choices {
        match choose(record, pool, &mut roster, at(seconds), &mut random, wants(Kind::Job)) {
            Decision::Chosen(chosen) => count[chosen.hosts[0]] += 1,
            other => panic!("{other:?}"),
        }
    }
    count
}

#[test]
fn weighted_follows_what_hosts_tell_and_takes_the_mean_for_those_that_do_not() {
    let pool = pool_of(3, r#", "policy": "weighted", "telemetry": {}"#);
    let mut record = record_of(&pool);
    report::tell(&mut record, 0, told(0.9, 0.9), at(1.0), at(1.0));
    report::tell(&mut record, 1, told(0.1, 0.1), at(1.0), at(1.0));
    // Chances of 0.28, 0.92 and, in between, 0.6.
    let parts = chosen(&record, &pool, 2.0, 18_000);
    for (part, expected) in parts.iter().zip([0.28, 0.92, 0.6]) {
        assert!((*part as f64 / 10_000.0 - expected).abs() < 0.03, "{parts:?}");
    }
}

#[test]
fn weighted_without_anything_told_or_with_what_is_stale_is_least_in_flight() {
    let pool = pool_of(3, r#", "policy": "weighted", "telemetry": {}"#);
    let mut record = record_of(&pool);
    record.reserve(0, None, at(1.0));
    let parts = chosen(&record, &pool, 2.0, 1000);
    assert!(parts[0] == 0 && parts[1] > 400 && parts[2] > 400, "{parts:?}");
    report::tell(&mut record, 0, told(0.0, 0.0), at(2.0), at(2.0));
    assert!(chosen(&record, &pool, 3.0, 1000)[0] > 0);
    assert_eq!(chosen(&record, &pool, 60.0, 1000)[0], 0, "stale");
}

#[test]
fn a_host_that_others_keep_busy_is_chosen_last_and_yet_chosen() {
    for policy in ["least_score", "least_time"] {
        let keys = format!(r#", "policy": "{policy}", "max_in_flight": 1, "telemetry": {{}}"#);
        let pool = pool_of(2, &keys);
        let mut record = record_of(&pool);
        report::tell(&mut record, 0, jobs(1.0, 4.0), at(1.0), at(1.0));
        assert_eq!(chosen(&record, &pool, 2.0, 100), [0, 100], "{policy}");
        record.reserve(1, None, at(1.0));
        assert_eq!(chosen(&record, &pool, 2.0, 100), [100, 0], "{policy}: a report fills no slot");
        record.reserve(0, None, at(1.0));
        let full = choose(&record, &pool, &mut Roster::default(), at(2.0), &mut Random::new(1), wants(Kind::Job));
        assert!(matches!(full, Decision::Full(_)), "{policy}: {full:?}");
    }
}

#[test]
fn jobs_of_a_session_go_to_one_host_while_it_has_room() {
    let pool = pool_of(4, r#", "max_in_flight": 2, "session": {"from": "classifier", "bound": 100}"#);
    let mut record = record_of(&pool);
    let job = Job { label: Label::of(b"chat"), session: Some(7), ..Job::unknown() };
    let wanted = Wanted { kind: Kind::Job, job: &job, preferred: None };
    let (mut roster, mut random, mut hosts) = (Roster::default(), Random::new(1), Vec::new());
    for _ in 0..6 {
        let Decision::Chosen(chosen) = choose(&record, &pool, &mut roster, at(1.0), &mut random, wanted) else { panic!() };
        record.reserve(chosen.hosts[0] as u32, None, at(1.0));
        assert_eq!(chosen.hosts.len(), 3, "with its alternates");
        hosts.push(chosen.hosts[0]);
    }
    assert!(hosts[0] == hosts[1] && hosts[2] == hosts[3] && hosts[4] == hosts[5], "{hosts:?}");
    assert!(hosts[0] != hosts[2] && hosts[2] != hosts[4] && hosts[0] != hosts[4], "{hosts:?}");
}
