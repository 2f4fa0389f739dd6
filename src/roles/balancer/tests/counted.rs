//! What jobs count, in Envoy's metrics.

use super::*;

impl Bench {
    fn value(&self, name: &str) -> Option<u64> {
        self.host.value_of(&format!("plimsoll.{name}"))
    }

    /// The counters of this family that have counted, by what comes after the pool.
    fn counted(&self, family: &str) -> Vec<(String, u64)> {
        let beginning = format!("plimsoll.{family};pool=gpu");
        let of = |name: &String| {
            Some((name.strip_prefix(&beginning)?.to_owned(), self.host.value_of(name).filter(|count| *count > 0)?))
        };
        self.host.metrics().iter().filter_map(of).collect()
    }
}

#[test]
fn each_job_is_counted_once_by_host_and_outcome() {
    let mut bench = Bench::new("");
    for (code, outcome) in [(200, "success"), (404, "neutral"), (500, "failure"), (429, "busy")] {
        let (id, mut stream, _) = bench.request("gpu", &[]);
        let host = bench.named(id)[0].clone();
        bench.attempt(id, &host, 1);
        bench.end(id, &mut stream, code, 10);
        stream.done();
        assert_eq!(bench.value(&format!("jobs;pool=gpu;host={host};outcome={outcome}")), Some(1), "{code}");
    }
    assert_eq!(bench.counted("jobs").iter().map(|(_, count)| count).sum::<u64>(), 4);
    assert_eq!(bench.counted("service_ms"), [(";class=default".to_owned(), 1)]);
    assert_eq!(["retries_blamed", "served_by_another", "beyond_slots"].map(|family| bench.counted(family).len()), [0, 0, 0]);
}

#[test]
fn a_retry_is_blamed_on_the_first_host_and_served_by_another_whether_a_tick_saw_it_or_not() {
    for has_tick in [true, false] {
        let mut bench = Bench::new("");
        let (id, mut stream, _) = bench.request("gpu", &[]);
        let named = bench.named(id);
        bench.attempt(id, &named[1], 2);
        if has_tick {
            bench.tick();
        }
        bench.end(id, &mut stream, 200, 70);
        assert_eq!(bench.counted("retries_blamed"), [(format!(";host={}", named[0]), 1)]);
        assert_eq!(bench.counted("served_by_another"), [(";reason=retry".to_owned(), 1)]);
        assert_eq!(bench.counted("jobs"), [(format!(";host={};outcome=success", named[1]), 1)]);
    }
}

#[test]
fn a_job_that_envoy_sends_elsewhere_is_told_apart_from_a_retry() {
    let mut bench = Bench::new("");
    for (address, reason) in [(None, "overruled"), (Some("10.9.9.9:80"), "elsewhere")] {
        let (id, mut stream, _) = bench.request("gpu", &[]);
        let seen = address.map_or_else(|| bench.named(id)[1].clone(), str::to_owned);
        bench.attempt(id, &seen, 1);
        bench.end(id, &mut stream, 200, 70);
        assert_eq!(bench.value(&format!("served_by_another;pool=gpu;reason={reason}")), Some(1));
    }
    assert_eq!(bench.value("jobs;pool=gpu;host=other;outcome=success"), Some(1));
    assert_eq!(bench.counted("retries_blamed"), []);
}

#[test]
fn a_move_to_a_host_without_a_free_slot_is_counted() {
    let mut bench = Bench::new(r#", "max_in_flight": 1"#);
    let held: Vec<_> = (0..2).map(|_| bench.request("gpu", &[])).collect();
    let (id, other) = (held[0].0, bench.named(held[1].0)[0].clone());
    bench.attempt(id, &other, 2);
    bench.tick();
    assert_eq!(bench.value("beyond_slots;pool=gpu"), Some(1));
}

#[test]
fn answers_of_our_own_are_counted_by_verdict_and_only_if_they_were_given() {
    let mut bench = Bench::new(r#", "max_in_flight": 1"#);
    let _held: Vec<_> = (0..2).map(|_| bench.request("gpu", &[])).collect();
    (0..3).for_each(|_| _ = bench.request("gpu", &[]));
    bench.host.refuse(Call::Reply, 1);
    bench.request("gpu", &[]);
    assert_eq!(bench.counted("answered"), [(";reason=full".to_owned(), 3)]);
}

#[test]
fn requests_that_are_no_jobs_are_counted_apart() {
    let mut bench = Bench::new(r#", "jobs": {}"#);
    bench.tick();
    (0..5).for_each(|_| _ = bench.request("gpu", &[(":method", "GET"), (":path", "/view")]));
    // Whatever the worker stores next carries them.
    bench.tick();
    bench.tick();
    assert_eq!((bench.value("unleased;pool=gpu"), bench.counted("jobs")), (Some(5), vec![]));
}

#[test]
fn the_time_in_the_queue_is_that_of_all_who_got_a_host() {
    let queue = r#", "max_in_flight": 1, "queue": {"max_length": 1, "timeout_ms": 1000},
        "priority": {"header": "x-job-priority", "default": "low"}"#;
    let mut bench = Bench::with(r#""trusted_headers": true, "#, queue);
    bench.tick();
    let mut held: Vec<_> = (0..2).map(|_| bench.request("gpu", &[])).collect();
    assert_eq!(bench.counted("queue_wait_ms"), [(";priority=low".to_owned(), 2)]);
    let waits = bench.request("gpu", &[("x-job-priority", "high")]);
    assert_eq!(waits.2, Flow::Paused);
    assert_eq!(bench.request("gpu", &[]).2, Flow::Answered);
    let (id, mut stream, _) = held.remove(0);
    bench.attempt(id, &bench.named(id)[0], 1);
    bench.end(id, &mut stream, 200, 10);
    bench.plan.rung(&mut bench.worker.borrow_mut());
    assert_eq!(bench.counted("queue_wait_ms"), [(";priority=low".to_owned(), 2), (";priority=high".to_owned(), 1)]);
    let late = bench.request("gpu", &[]);
    bench.host.process.pass(Duration::from_millis(1001));
    bench.tick();
    assert!(bench.seen(late.0).replied.is_some());
    assert_eq!(bench.counted("answered"), [(";reason=queue_full".to_owned(), 1), (";reason=queue_timeout".to_owned(), 1)]);
    assert_eq!(bench.counted("queue_wait_ms").iter().map(|(_, count)| count).sum::<u64>(), 3);
}
