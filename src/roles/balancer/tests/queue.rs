use super::*;
use crate::core::queue::Priority;

const QUEUE: &str = r#", "max_in_flight": 1, "explain": "header", "queue": {"max_length": 3, "timeout_ms": 1000}"#;

type Held = (u32, Stream<Fake>, Flow);

impl Bench {
    /// A pool whose two slots are taken.
    fn full(whole: &str, keys: &str) -> (Self, Vec<Held>) {
        let mut bench = Self::with(whole, &format!("{QUEUE}{keys}"));
        bench.tick();
        let held: Vec<_> = (0..2).map(|_| bench.request("gpu", &[])).collect();
        assert!(held.iter().all(|(_, _, flow)| *flow == Flow::Continue));
        (bench, held)
    }

    fn release(&mut self, (id, mut stream, _): Held) {
        self.attempt(id, &self.named(id)[0], 1);
        self.end(id, &mut stream, 200, 10);
    }

    /// Envoy tells the root that its bell was rung.
    fn hear(&self) {
        self.plan.rung(&mut self.worker.borrow_mut());
    }

    fn pass(&self, millis: u64) {
        self.host.process.pass(Duration::from_millis(millis));
    }

    fn record(&self) -> Record {
        Record::parse(self.host.process.value(&format!("plimsoll.{VERSION}.pool.gpu")).unwrap()).unwrap()
    }

    fn waiting(&self) -> Vec<Priority> {
        self.record().waiting().map(|entry| entry.priority()).collect()
    }

    fn respond(&self, (id, stream, _): &mut Held) -> Streamed {
        self.host.make_current(*id);
        stream.response();
        self.seen(*id)
    }
}

#[test]
fn a_job_without_a_slot_waits_and_gets_the_one_that_comes_free() {
    let (mut bench, mut held) = Bench::full("", "");
    let mut job = bench.request("gpu", &[]);
    assert_eq!((job.2, bench.waiting().len()), (Flow::Paused, 1));
    assert_eq!((bench.seen(job.0).resumed, bench.named(job.0)), (0, Vec::<String>::new()));
    bench.pass(250);
    let first = held.remove(0);
    let its_host = bench.named(first.0)[0].clone();
    bench.release(first);
    bench.hear();
    bench.hear();
    assert_eq!((bench.seen(job.0).resumed, bench.waiting().len()), (1, 0));
    // The other one is its alternate.
    assert_eq!(bench.named(job.0)[0], its_host);
    assert_eq!(bench.seen(job.0).header("x-envoy-max-retries"), Some("1".to_owned()));
    let why = bench.respond(&mut job).filter_state["plimsoll.why"].clone();
    assert!(why.starts_with("policy=least_score kind=job score=") && why.contains(" waited_ms=250"), "{why}");
    bench.release(job);
    held.into_iter().for_each(|held| bench.release(held));
    assert_eq!(bench.hosts().iter().map(|host| host.0).sum::<u32>(), 0);
    assert_eq!((bench.record().header.dequeued, bench.record().header.drift), (1, 0));
}

#[test]
fn a_bell_that_is_not_heard_costs_a_quick_tick() {
    let (mut bench, held) = Bench::full("", "");
    let job = bench.request("gpu", &[]);
    assert_eq!(bench.host.pace(), QUICK_TICK);
    held.into_iter().for_each(|held| bench.release(held));
    assert_eq!(bench.seen(job.0).resumed, 0);
    bench.pass(20);
    bench.plan.tick(&mut bench.worker.borrow_mut());
    assert_eq!(bench.seen(job.0).resumed, 1);
    assert_eq!(bench.host.pace(), TICK);
}

#[test]
fn a_job_that_waits_too_long_is_answered_and_not_resumed() {
    let (mut bench, held) = Bench::full("", "");
    let mut job = bench.request("gpu", &[]);
    bench.pass(999);
    bench.plan.tick(&mut bench.worker.borrow_mut());
    assert_eq!(bench.seen(job.0).replied, None);
    bench.pass(1);
    bench.plan.tick(&mut bench.worker.borrow_mut());
    let (status, headers) = bench.seen(job.0).replied.unwrap();
    assert_eq!((status, headers["x-plimsoll-verdict"].as_str(), headers["retry-after"].as_str()), (503, "queue_timeout", "1"));
    assert_eq!(bench.respond(&mut job).filter_state["plimsoll.why"], "policy=least_score verdict=queue_timeout waited_ms=1000");
    job.1.done();
    held.into_iter().for_each(|held| bench.release(held));
    bench.hear();
    bench.tick();
    assert_eq!((bench.seen(job.0).resumed, bench.waiting().len()), (0, 0));
    let header = bench.record().header;
    assert_eq!((header.queue_timeout, header.dequeued, header.left, header.drift), (1, 0, 0, 0));
}

#[test]
fn no_more_than_may_wait_do() {
    let (mut bench, held) = Bench::full("", "");
    let waiting: Vec<_> = (0..3).map(|_| bench.request("gpu", &[])).collect();
    let one_more = bench.request("gpu", &[]);
    assert_eq!(one_more.2, Flow::Answered);
    assert_eq!(bench.seen(one_more.0).replied.unwrap().1["x-plimsoll-verdict"], "queue_full");
    assert_eq!(bench.waiting().len(), 3);
    bench.tick();
    assert_eq!(bench.record().header.queue_full, 1);
    held.into_iter().for_each(|held| bench.release(held));
    bench.hear();
    assert_eq!(waiting.iter().map(|(id, ..)| bench.seen(*id).resumed).collect::<Vec<_>>(), [1, 1, 0]);
}

#[test]
fn whoever_comes_while_others_wait_takes_none_of_their_slots() {
    let (mut bench, mut held) = Bench::full("", "");
    let first = bench.request("gpu", &[]);
    bench.release(held.remove(0));
    // Before the bell is heard.
    let second = bench.request("gpu", &[]);
    assert_eq!(second.2, Flow::Paused);
    bench.hear();
    assert_eq!([first.0, second.0].map(|id| bench.seen(id).resumed), [1, 0]);
}

#[test]
fn a_client_that_leaves_is_gone_from_the_queue_at_once() {
    let (mut bench, held) = Bench::full("", "");
    let mut job = bench.request("gpu", &[]);
    let next = bench.request("gpu", &[]);
    bench.host.make_current(job.0);
    job.1.done();
    bench.host.forget(job.0);
    assert_eq!((bench.waiting().len(), bench.record().header.left), (1, 1));
    held.into_iter().for_each(|held| bench.release(held));
    bench.hear();
    assert_eq!(bench.seen(next.0).resumed, 1);
}

#[test]
fn what_somebody_else_answers_while_it_waits_is_not_resumed() {
    let (mut bench, held) = Bench::full("", "");
    let mut job = bench.request("gpu", &[]);
    bench.respond(&mut job);
    held.into_iter().for_each(|held| bench.release(held));
    bench.hear();
    bench.tick();
    job.1.done();
    assert_eq!((bench.seen(job.0).resumed, bench.waiting().len(), bench.record().header.left), (0, 0, 1));
}

#[test]
fn an_answer_that_envoy_refuses_lets_the_job_go_on() {
    let (mut bench, _held) = Bench::full("", "");
    let mut job = bench.request("gpu", &[]);
    bench.pass(1000);
    bench.host.refuse(Call::Reply, 1);
    bench.plan.tick(&mut bench.worker.borrow_mut());
    assert_eq!((bench.seen(job.0).replied, bench.seen(job.0).resumed), (None, 1));
    let named = address(0).to_string();
    bench.attempt(job.0, &named, 1);
    // Should its client leave now, it did not wait any more.
    assert_eq!(bench.seen(job.0).filter_state["plimsoll.why"], "policy=envoy left=host");
    assert_eq!(bench.respond(&mut job).filter_state["plimsoll.why"], "policy=envoy attempt=1");
    bench.end(job.0, &mut job.1, 200, 10);
    assert_eq!(bench.record().header.beyond_slots, 1);
}

#[test]
fn what_could_not_be_stored_is_mended_at_the_next_tick() {
    let (mut bench, held) = Bench::full("", "");
    let mut job = bench.request("gpu", &[]);
    bench.host.refuse(Call::Store, 1);
    bench.host.make_current(job.0);
    job.1.done();
    assert_eq!(bench.waiting().len(), 1);
    bench.tick();
    assert_eq!(bench.waiting().len(), 0);
    let waiting = bench.request("gpu", &[]);
    bench.host.process.put(&shared::key("gpu"), b"nonsense".to_vec());
    bench.tick();
    assert_eq!(bench.waiting().len(), 1);
    held.into_iter().for_each(|held| bench.release(held));
    bench.tick();
    assert_eq!(bench.seen(waiting.0).resumed, 1);
}

#[test]
fn where_a_host_is_due_within_the_timeout_jobs_wait_for_it_and_else_they_are_refused_at_once() {
    let mut bench = Bench::with("", r#", "queue": {"timeout_ms": 5000}"#);
    bench.tick();
    let busy = |bench: &mut Bench, seconds: &str| {
        for _ in 0..2 {
            let _ = bench.answered(&[], 429, &[(false, "retry-after", seconds)]);
        }
    };
    busy(&mut bench, "4");
    let job = bench.request("gpu", &[]);
    assert_eq!(job.2, Flow::Paused);
    bench.pass(4000);
    bench.plan.tick(&mut bench.worker.borrow_mut());
    assert_eq!(bench.seen(job.0).resumed, 1);
    bench.release(job);
    busy(&mut bench, "6");
    let job = bench.request("gpu", &[]);
    assert_eq!(bench.seen(job.0).replied.unwrap().1["x-plimsoll-verdict"], "no_host");
}

#[test]
fn a_priority_is_read_where_it_is_written_and_else_takes_the_default() {
    let header = r#", "priority": {"header": "x-job-priority", "default": "low"}"#;
    let (mut bench, _held) = Bench::full(r#""trusted_headers": true, "#, header);
    let _waiting = ["High", "urgent", ""].map(|word| bench.request("gpu", &[("x-job-priority", word)]));
    assert_eq!(bench.waiting(), [Priority::High, Priority::Low, Priority::Low]);
    let claim = r#", "priority": {"jwt_claim": "tier", "metadata": "jwt_payload"}"#;
    let (mut bench, _held) = Bench::full("", claim);
    let path = "metadata\0filter_metadata\0envoy.filters.http.jwt_authn\0jwt_payload\0tier";
    bench.host.stream(bench.streams + 1, |stream| stream.properties.insert(path, b"low".to_vec()));
    let _waiting = bench.request("gpu", &[("tier", "high")]);
    assert_eq!(bench.waiting(), [Priority::Low]);
}

#[test]
fn a_tenants_single_job_is_not_behind_all_of_anothers() {
    let tenant = r#", "tenant": {"header": "x-tenant"}"#;
    let (mut bench, mut held) = Bench::full(r#""trusted_headers": true, "#, tenant);
    let [first, second, other] = ["a", "a", "b"].map(|name| bench.request("gpu", &[("x-tenant", name)]));
    bench.release(held.remove(0));
    bench.hear();
    bench.release(held.remove(0));
    bench.hear();
    assert_eq!([first.0, second.0, other.0].map(|id| bench.seen(id).resumed), [1, 0, 1]);
}

#[test]
fn a_host_that_a_new_configuration_adds_is_for_those_that_wait_too() {
    let (mut bench, _held) = Bench::full("", "");
    let job = bench.request("gpu", &[]);
    bench.plan = plan(2, 3, "", QUEUE);
    bench.plan.made(&mut bench.worker.borrow_mut());
    (0..5).for_each(|_| bench.tick());
    assert_eq!((bench.seen(job.0).resumed, bench.named(job.0)[0].clone()), (1, address(2).to_string()));
}

#[test]
fn where_the_pool_or_its_queue_is_gone_those_that_wait_are_served_or_time_out() {
    let (mut bench, mut held) = Bench::full("", "");
    let [first, second] = [0, 1].map(|_| bench.request("gpu", &[]));
    bench.plan = plan(2, 2, "", r#", "max_in_flight": 1"#);
    bench.plan.made(&mut bench.worker.borrow_mut());
    (0..5).for_each(|_| bench.tick());
    bench.release(held.remove(0));
    bench.tick();
    assert_eq!([first.0, second.0].map(|id| bench.seen(id).resumed), [1, 0]);
    (0..5).for_each(|_| bench.tick());
    assert_eq!(bench.seen(second.0).replied.unwrap().1["x-plimsoll-verdict"], "queue_timeout");
}

#[test]
fn of_many_that_are_overdue_at_once_each_callback_answers_a_few() {
    let (mut bench, _held) = Bench::full("", "");
    bench.plan = plan(1, 2, "", r#", "max_in_flight": 1, "queue": {"max_length": 1000, "timeout_ms": 1000}"#);
    let waiting: Vec<_> = (0..100).map(|_| bench.request("gpu", &[])).collect();
    let answered = |bench: &Bench| waiting.iter().filter(|(id, ..)| bench.seen(*id).replied.is_some()).count();
    bench.pass(1000);
    bench.plan.tick(&mut bench.worker.borrow_mut());
    assert_eq!((answered(&bench), bench.waiting().len(), bench.record().header.queue_timeout), (32, 0, 100));
    for answers in [64, 96, 100, 100] {
        bench.hear();
        assert_eq!(answered(&bench), answers);
    }
    // A bell leaves the pace as it is, or ticks would be put off by bells for ever.
    assert_eq!((bench.host.pace(), bench.worker.borrow().anyone_waits()), (QUICK_TICK, false));
    bench.tick();
    assert_eq!(bench.host.pace(), TICK);
}

/// A job that Envoy answers itself, with these flags.
fn fail(bench: &Bench, (id, mut stream, _): Held, flags: u64, is_sent: bool) {
    if is_sent {
        bench.attempt(id, &bench.named(id)[0], 1);
    }
    bench.host.stream(id, |stream| {
        stream.maps.insert((Map::Response as u8, ":status".to_owned()), b"503".to_vec());
        stream.properties.insert("response\0flags", flags.to_le_bytes().into());
    });
    bench.host.make_current(id);
    stream.response();
    stream.done();
    bench.host.forget(id);
}

#[test]
fn hosts_that_refuse_every_connection_or_that_envoy_does_not_use_do_not_go_through_the_queue_in_a_moment() {
    for (flags, is_sent, rests) in [(flag::CONNECTION_FAILURE, true, [250, 500]), (flag::NO_HEALTHY_HOST, false, [1000, 1000])] {
        let (mut bench, mut held) = Bench::full("", r#", "failure": {"consecutive": 9}, "alternates": 0"#);
        bench.plan = plan(1, 2, "", r#", "max_in_flight": 1, "alternates": 0, "queue": {"timeout_ms": 9000}"#);
        let mut waiting: Vec<_> = (0..6).map(|_| bench.request("gpu", &[])).collect();
        for rest in rests {
            held.drain(..).for_each(|held| fail(&bench, held, flags, is_sent));
            bench.hear();
            bench.pass(rest - 1);
            bench.plan.tick(&mut bench.worker.borrow_mut());
            assert!(waiting.iter().all(|(id, ..)| bench.seen(*id).resumed == 0), "{flags}");
            bench.pass(1);
            bench.plan.tick(&mut bench.worker.borrow_mut());
            assert_eq!(waiting.iter().filter(|(id, ..)| bench.seen(*id).resumed == 1).count(), 2, "{flags}");
            held.extend(waiting.drain(..2));
        }
    }
}
