use super::*;
use crate::config::Role;
use crate::core::fixture::{address, pool_of};
use crate::core::record::{Record, VERSION};
use crate::roles::fake::{Call, Fake, Process, Streamed};
use crate::roles::shared;
use crate::roles::worker::TICK;

const OVERRIDE: &str = "x-gateway-destination-endpoint";

/// One VM with one configuration: a pool of two hosts.
struct Bench {
    host: Fake,
    worker: Rc<RefCell<Worker<Fake>>>,
    plan: Rc<Plan>,
    streams: u32,
}

impl Bench {
    fn new(keys: &str) -> Self {
        let host = Fake::new(&Process::new(1));
        let hosts: Vec<String> = pool_of(2, "").hosts.iter().map(|host| format!(r#"{{"address": "{}"}}"#, host.text)).collect();
        let json = format!(r#"{{"pools": {{"gpu": {{"hosts": [{}]{keys}}}}}}}"#, hosts.join(","));
        let Ok(Role::Balancer(config)) = Role::parse(json.as_bytes()) else {
            panic!("{json}");
        };
        let worker = Rc::new(RefCell::new(Worker::new(host.clone())));
        Self { host, worker, plan: Rc::new(Plan::new(1, "plimsoll", config)), streams: 1 }
    }

    /// A request, until Envoy goes on with it or the filter answers.
    fn request(&mut self, cluster: &str, headers: &[(&str, &str)]) -> (u32, Stream<Fake>, Flow) {
        self.streams += 1;
        let id = self.streams;
        self.host.stream(id, |stream| {
            stream.properties.insert("xds\0cluster_name", cluster.into());
            stream.headers = headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        });
        self.host.make_current(id);
        let mut stream = Stream::new(self.host.clone(), self.worker.clone(), self.plan.clone(), id);
        let flow = stream.request();
        (id, stream, flow)
    }

    fn seen(&self, id: u32) -> Streamed {
        self.host.stream(id, |stream| stream.clone())
    }

    /// The hosts that the override header of a stream names.
    fn named(&self, id: u32) -> Vec<String> {
        self.seen(id).header(OVERRIDE).map(|list| list.split(',').map(str::to_owned).collect()).unwrap_or_default()
    }

    /// Envoy's attempt of this number works at this address.
    fn attempt(&self, id: u32, address: &str, number: u64) {
        self.host.stream(id, |stream| {
            stream.properties.insert("upstream\0address", address.into());
            stream.properties.insert("upstream\0request_attempt_count", number.to_le_bytes().into());
        });
    }

    /// A tick passes.
    fn tick(&self) {
        self.host.process.pass(TICK);
        self.plan.tick(&mut self.worker.borrow_mut());
    }

    fn end(&self, id: u32, stream: &mut Stream<Fake>, code: u64, millis: u64) {
        self.host.stream(id, |stream| {
            stream.properties.insert("response\0code", code.to_le_bytes().into());
            stream.properties.insert("response\0code_details", b"via_upstream".to_vec());
            stream.properties.insert("response\0backend_latency", (millis * 1_000_000).to_le_bytes().into());
        });
        self.host.make_current(id);
        stream.done();
        self.host.forget(id);
    }

    /// Load, failures and average latency of each host.
    fn hosts(&self) -> Vec<(u32, u64, f32)> {
        let record = Record::parse(self.host.process.value(&format!("plimsoll.{VERSION}.pool.gpu")).unwrap()).unwrap();
        (0..2)
            .map(|host| record.host(record.seat_at(address(host)).unwrap().slot).unwrap())
            .map(|host| (host.load(), host.failures, host.ewma().millis))
            .collect()
    }
}

#[test]
fn a_request_to_another_cluster_passes_untouched() {
    let mut bench = Bench::new("");
    let headers = [(OVERRIDE, "1.1.1.1:1"), ("x-plimsoll-class", "mine")];
    let (id, _, flow) = bench.request("web", &headers);
    let before: Vec<(&str, &str)> = headers.to_vec();
    let seen = bench.seen(id);
    assert_eq!(flow, Flow::Continue);
    assert!(before.iter().all(|(name, value)| seen.header(name).as_deref() == Some(*value)) && seen.headers.len() == 2);
}

#[test]
fn the_host_that_served_is_credited_and_the_one_that_failed_before_it_is_blamed() {
    let mut bench = Bench::new("");
    let (id, mut stream, _) = bench.request("gpu", &[]);
    let named = bench.named(id);
    // A quick retry that no tick saw.
    bench.attempt(id, &named[1], 2);
    bench.end(id, &mut stream, 200, 70);
    let mut hosts = bench.hosts();
    if named[0] != address(0).to_string() {
        hosts.reverse();
    }
    assert_eq!(hosts, [(0, 1, 0.0), (0, 0, 70.0)]);
}

#[test]
fn the_lease_moves_at_the_tick_after_a_retry() {
    let mut bench = Bench::new("");
    let (id, mut stream, _) = bench.request("gpu", &[]);
    let named = bench.named(id);
    bench.attempt(id, &named[1], 2);
    bench.tick();
    let second = usize::from(named[1] != address(0).to_string());
    assert_eq!((bench.hosts()[second].0, bench.hosts()[1 - second].0), (1, 0));
    bench.end(id, &mut stream, 200, 70);
    assert_eq!((bench.hosts()[0].0, bench.hosts()[1].0), (0, 0));
}

#[test]
fn a_job_goes_on_without_books_and_is_counted_where_envoy_sends_it() {
    for call in [Call::Load, Call::Store] {
        let mut bench = Bench::new("");
        // The first request makes the record.
        let (first, mut stream, _) = bench.request("gpu", &[]);
        bench.end(first, &mut stream, 200, 10);
        // Another worker has written: the record has to be read.
        let (key, process) = (shared::key("gpu"), &bench.host.process);
        process.put(&key, process.value(&key).unwrap());
        bench.host.refuse(call, 1);
        let (id, mut stream, flow) = bench.request("gpu", &[]);
        assert_eq!((flow, bench.named(id).len()), (Flow::Continue, 0), "{call:?}");
        let envoys = address(1).to_string();
        bench.attempt(id, &envoys, 1);
        bench.tick();
        assert_eq!(bench.hosts()[1].0, 1);
        bench.end(id, &mut stream, 200, 10);
        assert_eq!((bench.hosts()[0].0, bench.hosts()[1].0), (0, 0));
    }
}

#[test]
fn a_job_whose_host_could_not_be_named_is_counted_where_envoy_sends_it() {
    let mut bench = Bench::new(r#", "alternates": 0"#);
    bench.host.refuse(Call::Header, 3);
    let (id, mut stream, flow) = bench.request("gpu", &[]);
    assert_eq!((flow, bench.named(id).len()), (Flow::Continue, 0));
    for host in 0..2 {
        bench.attempt(id, &address(host).to_string(), 1);
        bench.tick();
        assert_eq!((bench.hosts()[host].0, bench.hosts()[1 - host].0), (1, 0));
    }
    bench.end(id, &mut stream, 200, 10);
    assert!(bench.hosts().iter().all(|(load, failures, _)| (*load, *failures) == (0, 0)));
}

#[test]
fn a_full_pool_answers_503_with_its_verdict_and_a_refused_answer_goes_on_counted() {
    let mut bench = Bench::new(r#", "max_in_flight": 1"#);
    let mut held: Vec<_> = (0..2).map(|_| bench.request("gpu", &[])).collect();
    let (id, _, flow) = bench.request("gpu", &[]);
    let (status, headers) = bench.seen(id).replied.unwrap();
    assert_eq!((flow, status), (Flow::Answered, 503));
    assert_eq!((headers["x-plimsoll-verdict"].as_str(), headers["retry-after"].as_str()), ("full", "1"));
    bench.host.refuse(Call::Reply, 1);
    let (id, stream, flow) = bench.request("gpu", &[]);
    assert_eq!(flow, Flow::Continue);
    bench.attempt(id, &address(0).to_string(), 1);
    held.push((id, stream, flow));
    for (id, stream, _) in &mut held {
        bench.end(*id, stream, 200, 10);
    }
    assert!(bench.hosts().iter().all(|(load, ..)| *load == 0));
}

#[test]
fn a_request_that_is_no_job_is_spread_without_a_lease() {
    let mut bench = Bench::new(r#", "jobs": {}"#);
    let (id, mut stream, flow) = bench.request("gpu", &[(":method", "GET"), (":path", "/view")]);
    assert_eq!((flow, bench.named(id).len()), (Flow::Continue, 2));
    assert!(bench.hosts().iter().all(|(load, ..)| *load == 0));
    bench.end(id, &mut stream, 500, 10);
    assert!(bench.hosts().iter().all(|(load, failures, _)| (*load, *failures) == (0, 0)));
}
