use super::*;
use crate::core::fixture::{at, pool, record_of};
use crate::core::learning::{Job, Label, Lesson, fading, learn};
use crate::core::record::Seat;

/// A slow and a fast host of one slot each, whose speeds are known: ½ and 2. A job of the mean work is 1 s of work.
fn bench() -> (Record, std::rc::Rc<Pool>) {
    let pool = pool(
        r#""policy": "least_time", "max_in_flight": 1, "queue": {},
           "hosts": [{"address": "10.0.0.1:80"}, {"address": "10.0.0.2:80"}]"#,
    );
    let mut record = record_of(&pool);
    for job in 0..40 {
        let (slot, millis) = if job % 2 == 0 { (0, 2000) } else { (1, 500) };
        let lesson = Lesson { slot, weight: 1.0, job: &job_of(), service: Duration::from_millis(millis) };
        learn(&mut record, lesson, at(1.0), fading(pool.time_constant));
    }
    learning::pin(&mut record);
    (record, pool)
}

fn job_of() -> Job {
    Job { label: Label::of(b"image"), ..Job::unknown() }
}

fn forecast(record: &Record, pool: &Pool, seconds: f64) -> Forecast {
    let mut roster = Roster::default();
    roster.refresh(record, pool, at(seconds));
    Forecast::new(record, pool, &roster, at(seconds)).expect("something is known")
}

/// A job runs on the host in this slot.
fn run(record: &mut Record, slot: u32) -> Seat {
    let work = learning::work_of(record, &job_of()).map(|millis| (millis * 1e3) as u64);
    record.place(slot, at(1.0), None, work).expect("there is such a host").0
}

#[test]
fn a_job_waits_for_a_fast_host_that_will_be_done_with_it_before_a_slow_one_would() {
    let (mut record, pool) = bench();
    assert_eq!(forecast(&record, &pool, 1.0).claim(1.0), Claim::Now(None));
    run(&mut record, 1);
    // There it is done after 0.5 s and 0.5 s, on the slow host after 2 s: it is held for no more than 1.5 s.
    let Claim::Later(until) = forecast(&record, &pool, 1.0).claim(1.0) else { panic!("it starts") };
    assert!((1.4..1.6).contains(&until.since(at(1.0)).as_secs_f64()), "{until:?}");
}

#[test]
fn those_that_are_held_stand_before_those_that_come_after_them() {
    let (mut record, pool) = bench();
    run(&mut record, 1);
    let mut forecast = forecast(&record, &pool, 1.0);
    // Each is done there 0.5 s after the one before it; after 2 s the slow host is as good.
    let claims: Vec<bool> = (0..5).map(|_| matches!(forecast.claim(1.0), Claim::Now(_))).collect();
    assert_eq!(claims[..2], [false, false]);
    assert!(claims[2..4].contains(&true), "{claims:?}");
}

#[test]
fn where_all_hosts_are_busy_nobody_starts_and_where_nothing_is_known_nobody_waits() {
    let (mut record, pool) = bench();
    (0..2).for_each(|slot| _ = run(&mut record, slot));
    let cold = record_of(&pool);
    let mut roster = Roster::default();
    roster.refresh(&cold, &pool, at(1.0));
    assert!(Forecast::new(&cold, &pool, &roster, at(1.0)).is_none());
    // Nobody asks then; if somebody does, the choice says that there is no slot.
    assert_eq!(forecast(&record, &pool, 1.0).claim(1.0), Claim::Now(None));
}

#[test]
fn the_second_of_two_that_start_goes_to_another_host_than_the_first() {
    let (record, pool) = bench();
    let mut forecast = forecast(&record, &pool, 1.0);
    assert_eq!(forecast.claim(0.1), Claim::Now(None));
    // A long one: on the fast host, behind the short one.
    assert!(matches!(forecast.claim(10.0), Claim::Later(_)));
    // Behind that one it would be longer than on the slow one.
    assert_eq!(forecast.claim(1.0), Claim::Now(Some(0)));
}
