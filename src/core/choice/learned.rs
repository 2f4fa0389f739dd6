//! Choices by what is learned of hosts, and by what they tell of themselves.

use super::*;
use crate::config::Role;
use crate::core::fixture::{at, pool, pool_of, record_of, wants};
use crate::core::learning::{Job, Lesson, fading, learn};
use crate::core::reading::Reading;
use crate::core::report;
use std::rc::Rc;

fn choose_among(record: &Record, pool: &Pool, seed: u64) -> Decision {
    choose(record, pool, &mut Roster::default(), at(10.0), &mut Random::new(seed), wants(Kind::Job))
}

fn first(record: &Record, pool: &Pool, seed: u64) -> usize {
    match choose_among(record, pool, seed) {
        Decision::Chosen(chosen) => chosen.hosts[0],
        other => panic!("{other:?}"),
    }
}

/// All hosts report so many jobs.
fn reports(record: &mut Record, jobs: &[f64]) {
    for (slot, jobs) in (0..).zip(jobs) {
        report::tell(record, slot, Reading::of(Some(*jobs), None, None, None), at(9.9), at(9.9));
    }
}

#[test]
fn hosts_that_report_to_be_full_stop_nobody_as_long_as_we_count_a_free_slot() {
    let scrape = r#", "max_in_flight": 2, "telemetry": {"scrape": {"preset": "tgi"}}"#;
    for policy in ["least_score", "least_time"] {
        let pool = pool_of(2, &format!(r#"{scrape}, "policy": "{policy}", "queue": {{}}"#));
        let mut record = record_of(&pool);
        let free = |record: &Record| free_slots(record, &pool, &mut Roster::default(), at(10.0));
        reports(&mut record, &[2.0, 1.0]);
        assert_eq!((0..20).map(|seed| first(&record, &pool, seed)).max(), Some(1));
        assert_eq!((0..20).map(|seed| first(&record, &pool, seed)).min(), Some(1), "one has fewer jobs");
        assert_eq!(free(&record), 4, "what they report fills no slot");
        // Another Envoy keeps them full, or they tell nonsense.
        for jobs in [2.0, 1e6] {
            reports(&mut record, &[jobs, jobs]);
            assert!(matches!(choose_among(&record, &pool, 1), Decision::Chosen(_)), "{policy}: {jobs}");
            assert_eq!(free(&record), 4);
        }
        for slot in [0, 0, 1, 1] {
            record.reserve(slot, None, at(9.9));
        }
        assert!(matches!(choose_among(&record, &pool, 1), Decision::Full(_)), "our own jobs fill them");
    }
}

#[test]
fn among_reserves_the_one_that_is_soonest_done_is_chosen() {
    let plain = pool(
        r#""policy": "least_time", "max_in_flight": 8, "hosts": [{"address": "10.0.0.1:80"}, {"address": "10.0.0.2:80"}, {"address": "10.0.0.3:80"}]"#,
    );
    let mut hosts = plain.hosts.clone();
    hosts[1..].iter_mut().for_each(|host| host.is_reserve = true);
    let pool = Rc::new(plain.with_hosts(hosts.into_iter()));
    let mut record = record_of(&pool);
    let job = Job::unknown();
    for slot in 0..3 {
        let lesson = Lesson { slot, weight: 1.0, job: &job, service: Duration::from_secs(1) };
        learn(&mut record, lesson, at(9.0), fading(pool.time_constant));
    }
    (0..8).for_each(|_| record.reserve(0, None, at(9.5)));
    (0..6).for_each(|_| record.reserve(1, None, at(9.5)));
    let firsts: Vec<usize> = (0..20).map(|seed| first(&record, &pool, seed)).collect();
    assert_eq!(firsts, [2; 20], "the one that has no job");
}

#[test]
fn a_host_that_reports_a_million_jobs_lets_no_session_drown_another_one() {
    let keys = r#"{"trusted_headers": true, "pools": {"gpu": {"max_in_flight": 50, "session": {"header": "x-session"}, "telemetry": {},
        "hosts": [{"address": "10.0.0.1:80"}, {"address": "10.0.0.2:80"}, {"address": "10.0.0.3:80"}, {"address": "10.0.0.4:80"}]}}}"#;
    let Ok(Role::Balancer(config)) = Role::parse(keys.as_bytes()) else { panic!("{keys}") };
    let pool = config.pools["gpu"].clone();
    let mut record = record_of(&pool);
    // Not the session's own host, which would get none.
    let job = Job { session: Some(7), ..Job::unknown() };
    let wanted = Wanted { kind: Kind::Job, job: &job, preferred: None };
    let choose = |record: &Record| match choose(record, &pool, &mut Roster::default(), at(10.0), &mut Random::new(1), wanted) {
        Decision::Chosen(chosen) => chosen.hosts[0] as u32,
        other => panic!("{other:?}"),
    };
    let own = choose(&record);
    let liar = (own + 1) % 4;
    report::tell(&mut record, liar, Reading::of(Some(1e6), None, None, None), at(9.9), at(9.9));
    for _ in 0..40 {
        let host = choose(&record);
        record.reserve(host, None, at(9.9));
    }
    let loads: Vec<u32> = record.hosts().map(|host| host.load()).collect();
    // Of the 91 jobs that are counted with the liar's 50 slots, no more than 1.25 × a fourth, where it would have been all 40.
    assert!(loads.iter().all(|load| *load <= 29) && loads[liar as usize] == 0, "{loads:?}");
}
