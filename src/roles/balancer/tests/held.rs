//! Jobs that are held for a host that is busy.

use super::*;
use crate::core::learning::{Job, Lesson, fading, learn};

const KEYS: &str = r#", "max_in_flight": 1, "policy": "least_time", "queue": {"max_length": 1, "timeout_ms": 30000}"#;

/// Two hosts of which it is known that the first takes 100 ms and the second 1 s for a job.
fn taught() -> Bench {
    let bench = Bench::new(KEYS);
    bench.tick();
    let key = shared::key("gpu");
    let mut record = Record::parse(bench.host.process.value(&key).unwrap()).unwrap();
    for (host, millis) in [(0, 100), (1, 1000)].into_iter().cycle().take(40) {
        let (slot, job) = (record.seat_at(address(host)).unwrap().slot, Job::unknown());
        let lesson = Lesson { slot, weight: 1.0, job: &job, service: Duration::from_millis(millis) };
        learn(&mut record, lesson, bench.host.now(), fading(Duration::from_secs(30)));
    }
    bench.host.process.put(&key, record.bytes().to_vec());
    bench
}

#[test]
fn a_job_that_finds_no_place_to_wait_in_goes_to_a_slow_host_that_is_free() {
    let mut bench = taught();
    let (running, _stream, _) = bench.request("gpu", &[]);
    assert_eq!(bench.named(running)[0], address(0).to_string());
    let (held, _its, flow) = bench.request("gpu", &[]);
    assert_eq!((flow, bench.named(held).len()), (Flow::Paused, 0), "the fast host is done with both sooner");
    // It would be held, too, and there is no room for that.
    let (third, _others, flow) = bench.request("gpu", &[]);
    assert_eq!(bench.seen(third).replied, None);
    assert_eq!(flow, Flow::Continue);
    assert_eq!(bench.named(third)[0], address(1).to_string());
}

#[test]
fn a_clock_that_steps_back_holds_nobody_for_longer() {
    let mut bench = taught();
    let (_, _stream, _) = bench.request("gpu", &[]);
    let (held, _its, flow) = bench.request("gpu", &[]);
    assert_eq!(flow, Flow::Paused);
    bench.host.process.pass(Duration::from_millis(20));
    bench.plan.tick(&mut bench.worker.borrow_mut());
    bench.host.process.step_back(Duration::from_secs(3600));
    // What it is held for does not come: after 0.9 s the slow host would have been as good.
    for _ in 0..50 {
        bench.host.process.pass(Duration::from_millis(20));
        bench.plan.tick(&mut bench.worker.borrow_mut());
    }
    assert_eq!(bench.seen(held).resumed, 1);
    assert_eq!(bench.named(held)[0], address(1).to_string());
}
