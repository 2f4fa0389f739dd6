mod counted;
mod held;
mod queue;

use super::*;
use crate::config::Role;
use crate::core::fixture::{address, pool_of};
use crate::core::health::State;
use crate::core::record::{Host as Entry, Record, VERSION};
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

/// What a root runs: a pool of so many hosts.
fn plan(root: u32, hosts: usize, whole: &str, keys: &str) -> Rc<Plan> {
    let hosts: Vec<String> = pool_of(hosts, "").hosts.iter().map(|host| format!(r#"{{"address": "{}"}}"#, host.text)).collect();
    let json = format!(r#"{{{whole}"pools": {{"gpu": {{"hosts": [{}]{keys}}}}}}}"#, hosts.join(","));
    let Ok(Role::Balancer(config)) = Role::parse(json.as_bytes()) else {
        panic!("{json}");
    };
    Rc::new(Plan::new(root, "plimsoll", config))
}

impl Bench {
    fn new(keys: &str) -> Self {
        Self::with("", keys)
    }

    /// With keys of the whole configuration, and of the pool.
    fn with(whole: &str, keys: &str) -> Self {
        let host = Fake::new(&Process::new(1));
        let worker = Rc::new(RefCell::new(Worker::new(host.clone())));
        Self { host, worker, plan: plan(1, 2, whole, keys), streams: 1 }
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
            stream.maps.insert((Map::Response as u8, ":status".to_owned()), code.to_string().into());
            stream.properties.insert("response\0code_details", b"via_upstream".to_vec());
            stream.properties.insert("response\0backend_latency", (millis * 1_000_000).to_le_bytes().into());
        });
        self.host.make_current(id);
        stream.response();
        stream.trailers();
        stream.done();
        self.host.forget(id);
    }

    fn entries(&self) -> Vec<Entry> {
        let record = Record::parse(self.host.process.value(&format!("plimsoll.{VERSION}.pool.gpu")).unwrap()).unwrap();
        (0..2).map(|host| record.host(record.seat_at(address(host)).unwrap().slot).unwrap()).collect()
    }

    /// Load, failures and average latency of each host.
    fn hosts(&self) -> Vec<(u32, u64, f32)> {
        self.entries().into_iter().map(|host| (host.load(), host.failures, host.ewma().millis)).collect()
    }

    /// A job that ends with these headers (`true`: trailers) in its response; gives the entry of its host afterwards.
    fn answered(&mut self, request: &[(&str, &str)], code: u64, response: &[(bool, &str, &str)]) -> Entry {
        let (id, mut stream, _) = self.request("gpu", request);
        let named = self.named(id);
        self.attempt(id, &named[0], 1);
        self.host.stream(id, |stream| {
            for (is_trailer, name, value) in response {
                let map = if *is_trailer { Map::Trailers } else { Map::Response };
                stream.maps.insert((map as u8, (*name).to_owned()), (*value).into());
            }
        });
        self.end(id, &mut stream, code, 10);
        self.entries().into_iter().find(|entry| entry.address().to_string() == named[0]).unwrap()
    }
}

#[test]
fn a_host_that_asks_us_to_wait_is_busy_for_as_long_as_it_says() {
    let date = (false, "date", "Sun, 29 Nov 2026 12:00:00 GMT");
    for (code, response, seconds) in [
        (429, vec![], 1.0),
        (429, vec![(false, "retry-after", "9")], 9.0),
        (503, vec![(false, "retry-after", "4000")], 60.0),
        (503, vec![(false, "retry-after", "Sun, 29 Nov 2026 12:00:20 GMT"), date], 20.0),
    ] {
        let mut bench = Bench::new("");
        let host = bench.answered(&[], code, &response);
        let busy_for = host.busy_for(bench.host.now()).as_secs_f64();
        assert_eq!((busy_for, host.failures, host.load()), (seconds, 0, 0), "{code} {response:?}");
        let (id, ..) = bench.request("gpu", &[]);
        assert_eq!(bench.named(id).len(), 1, "a busy host is not an alternate either");
    }
    assert_eq!(Bench::new("").answered(&[], 503, &[]).failures, 1);
}

#[test]
fn when_all_are_busy_the_answer_says_when_one_is_not() {
    let mut bench = Bench::new("");
    for _ in 0..2 {
        bench.answered(&[], 429, &[(false, "retry-after", "30")]);
    }
    let (id, _, flow) = bench.request("gpu", &[]);
    let (_, headers) = bench.seen(id).replied.unwrap();
    assert_eq!(
        (flow, headers["x-plimsoll-verdict"].as_str(), headers["retry-after"].as_str()),
        (Flow::Answered, "no_host", "30")
    );
    bench.host.process.pass(Duration::from_secs(31));
    assert_eq!(bench.request("gpu", &[]).2, Flow::Continue);
}

#[test]
fn a_grpc_call_is_judged_by_its_status_in_trailers_and_in_headers() {
    let call = [("content-type", "application/grpc")];
    let with_deadline = [("content-type", "application/grpc+proto"), ("grpc-timeout", "5S")];
    for is_trailer in [true, false] {
        let failures = |request: &[(&str, &str)], status: &str| {
            Bench::new("").answered(request, 200, &[(is_trailer, "grpc-status", status)]).failures
        };
        assert_eq!([0, 3, 5, 7, 12].map(|status| failures(&call, &status.to_string())), [0; 5]);
        assert_eq!([2, 4, 13, 14, 15].map(|status| failures(&call, &status.to_string())), [1; 5]);
        assert_eq!([failures(&with_deadline, "4"), failures(&with_deadline, "14")], [0, 1]);
        assert_eq!(["", "x", "-1", "99999999999"].map(|status| failures(&call, status)), [0; 4], "a status that is none");
        let mut bench = Bench::new("");
        let busy = bench.answered(&call, 200, &[(is_trailer, "grpc-status", "8")]);
        assert_eq!((busy.state(bench.host.now()), busy.failures), (State::Busy, 0));
        let plain = Bench::new("").answered(&[("content-type", "application/json")], 200, &[(is_trailer, "grpc-status", "14")]);
        assert_eq!(plain.failures, 0, "no gRPC call");
    }
}

#[test]
fn a_response_says_who_served_and_why_where_the_pool_explains_itself() {
    for (explain, in_log, in_headers) in [("off", false, false), ("log", true, false), ("header", true, true)] {
        let mut bench = Bench::new(&format!(r#", "explain": "{explain}""#));
        let (id, mut stream, _) = bench.request("gpu", &[("x-plimsoll-why", "forged")]);
        let named = bench.named(id);
        bench.attempt(id, &named[1], 2);
        bench.host.make_current(id);
        stream.response();
        let seen = bench.seen(id);
        let header = |name: &str| {
            seen.maps.get(&(Map::Response as u8, name.to_owned())).map(|value| String::from_utf8_lossy(value).into_owned())
        };
        let why = format!(
            "policy=least_score kind=job score=0.700 jobs=0.700 latency=0.000 penalty=1.000 runner_up={} runner_up_score=0.700 waited_ms=0 \
             attempt=2",
            named[1]
        );
        let (host, why) = (Some(named[1].clone()), Some(why));
        let expected = |is_there: bool| if is_there { (host.clone(), why.clone()) } else { (None, None) };
        assert_eq!((header("x-plimsoll-host"), header("x-plimsoll-why")), expected(in_headers), "{explain}");
        let state = |name: &str| seen.filter_state.get(name).cloned();
        assert_eq!((state("plimsoll.host"), state("plimsoll.why")), expected(in_log), "{explain}");
        bench.end(id, &mut stream, 200, 10);
    }
}

#[test]
fn our_own_answers_and_envoys_choices_are_explained_too() {
    let mut bench = Bench::new(r#", "explain": "header", "max_in_flight": 1"#);
    let mut held: Vec<_> = (0..2).map(|_| bench.request("gpu", &[])).collect();
    let (id, mut stream, _) = bench.request("gpu", &[]);
    bench.host.make_current(id);
    stream.response();
    assert_eq!(bench.seen(id).filter_state["plimsoll.why"], "policy=least_score verdict=full waited_ms=0");
    let mut bench = Bench::new(r#", "explain": "log""#);
    // One for the list of pools, one for the record.
    bench.host.refuse(Call::Load, 2);
    let (id, mut stream, _) = bench.request("gpu", &[]);
    bench.host.make_current(id);
    stream.response();
    assert_eq!(bench.seen(id).filter_state["plimsoll.why"], "policy=envoy");
    held.clear();
}

#[test]
fn when_the_response_begins_the_lease_is_where_it_is_served_and_is_not_looked_for_any_more() {
    let mut bench = Bench::new("");
    let (id, mut stream, _) = bench.request("gpu", &[]);
    let named = bench.named(id);
    // A retry that no tick has seen, right before the response.
    bench.attempt(id, &named[1], 2);
    bench.host.make_current(id);
    stream.response();
    let second = usize::from(named[1] != address(0).to_string());
    assert_eq!((bench.hosts()[second].0, bench.hosts()[1 - second].0), (1, 0));
    assert_eq!((bench.hosts()[second].1, bench.hosts()[1 - second].1), (0, 1), "the first is blamed");
    bench.attempt(id, &named[0], 3);
    bench.tick();
    assert_eq!(bench.hosts()[second].0, 1, "Envoy does not retry a job whose response has begun");
    bench.end(id, &mut stream, 200, 70);
    assert!(bench.hosts().iter().all(|(load, ..)| *load == 0));
}

#[test]
fn a_move_that_could_not_be_stored_when_the_response_began_is_made_at_the_end() {
    let mut bench = Bench::new("");
    let (id, mut stream, _) = bench.request("gpu", &[]);
    let named = bench.named(id);
    bench.attempt(id, &named[1], 2);
    bench.host.refuse(Call::Store, 1);
    bench.host.make_current(id);
    stream.response();
    bench.end(id, &mut stream, 200, 70);
    let second = usize::from(named[1] != address(0).to_string());
    assert_eq!((bench.hosts()[second], bench.hosts()[1 - second]), ((0, 0, 70.0), (0, 1, 0.0)));
}

#[test]
fn a_stream_that_is_settled_twice_is_settled_once() {
    let mut bench = Bench::new("");
    let (id, mut stream, _) = bench.request("gpu", &[]);
    bench.end(id, &mut stream, 200, 70);
    stream.done();
    assert!(bench.hosts().iter().all(|(load, ..)| *load == 0));
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

#[test]
fn a_retry_that_the_client_ordered_blames_nobody() {
    let mut bench = Bench::new("");
    let (id, mut stream, _) =
        bench.request("gpu", &[("x-envoy-retry-on", "retriable-status-codes"), ("x-envoy-retriable-status-codes", "200")]);
    let named = bench.named(id);
    bench.attempt(id, &named[1], 2);
    bench.tick();
    bench.end(id, &mut stream, 200, 70);
    assert!(bench.hosts().iter().all(|(load, failures, _)| (*load, *failures) == (0, 0)));
}

/// A stream that Envoy ended so, without a response of the host's.
fn broken_off(request: &[(&str, &str)], status: u64, flags: u64, received: Option<u64>) -> u64 {
    let mut bench = Bench::new("");
    let (id, mut stream, _) = bench.request("gpu", request);
    let named = bench.named(id);
    bench.attempt(id, &named[0], 1);
    bench.host.stream(id, |stream| {
        stream.maps.insert((Map::Response as u8, ":status".to_owned()), status.to_string().into());
        stream.properties.insert("response\0code_details", b"upstream_reset_before_response_started".to_vec());
        stream.properties.insert("response\0flags", flags.to_le_bytes().into());
        stream.properties.extend(received.map(|received| ("request\0size", received.to_le_bytes().to_vec())));
    });
    bench.host.make_current(id);
    stream.response();
    stream.done();
    bench.hosts().iter().map(|(_, failures, _)| failures).sum()
}

#[test]
fn a_host_that_breaks_off_a_request_that_is_unfinished_or_malformed_is_not_blamed() {
    let whole = [(":authority", "gpu"), ("content-length", "1000")];
    assert_eq!(broken_off(&whole, 503, flag::CONNECTION_TERMINATION, Some(1000)), 1);
    assert_eq!(broken_off(&whole, 503, flag::CONNECTION_TERMINATION, None), 1);
    assert_eq!(broken_off(&whole, 503, flag::CONNECTION_TERMINATION, Some(999)), 0);
    assert_eq!(broken_off(&whole, 503, flag::CONNECTION_TERMINATION, Some(0)), 1, "before it had looked at the body");
    assert_eq!(broken_off(&whole, 503, flag::CONNECTION_FAILURE, Some(0)), 1, "it was never sent");
    assert_eq!(broken_off(&[(":authority", "[::1")], 502, flag::UPSTREAM_PROTOCOL_ERROR, None), 0);
    assert_eq!(broken_off(&[(":authority", "gpu")], 502, flag::UPSTREAM_PROTOCOL_ERROR, None), 1);
}

#[test]
fn a_timeout_is_the_hosts_whatever_envoys_own_answer_says_and_not_when_the_response_had_begun() {
    for status in [504, 503, 429] {
        assert_eq!(broken_off(&[], status, flag::UPSTREAM_TIMEOUT, None), 1, "{status}");
    }
    assert_eq!(broken_off(&[], 200, flag::UPSTREAM_TIMEOUT, None), 0);
    assert_eq!(broken_off(&[("x-envoy-upstream-rq-timeout-ms", "+5")], 504, flag::UPSTREAM_TIMEOUT, None), 0);
}

#[test]
fn an_upgrade_has_no_length() {
    let mut bench = Bench::new("");
    let (id, ..) = bench.request("gpu", &[("upgrade", "websocket"), ("content-length", "5")]);
    assert_eq!(bench.seen(id).header("content-length"), None);
    let (id, ..) = bench.request("gpu", &[("content-length", "5")]);
    assert_eq!(bench.seen(id).header("content-length").as_deref(), Some("5"));
}

#[test]
fn the_time_that_a_client_takes_to_send_its_request_is_not_the_hosts() {
    for length in [Some("1000"), None] {
        let mut bench = Bench::new("");
        let headers: Vec<(&str, &str)> = length.map(|length| ("content-length", length)).into_iter().collect();
        let (id, mut stream, _) = bench.request("gpu", &headers);
        let named = bench.named(id);
        bench.attempt(id, &named[0], 1);
        for received in [100u64, 400, 700, 1000, 1000] {
            bench.host.stream(id, |stream| _ = stream.properties.insert("request\0size", received.to_le_bytes().into()));
            bench.tick();
        }
        // The upload was seen to come for 300 ms (it was to end at 1000), or 400 ms (it had grown since the tick before).
        bench.end(id, &mut stream, 200, 450);
        let latencies: Vec<f32> = bench.hosts().iter().map(|(.., millis)| *millis).filter(|millis| *millis > 0.0).collect();
        assert!(matches!(latencies[..], [millis] if (45.0..=155.0).contains(&millis)), "{latencies:?}");
    }
}

#[test]
fn a_host_that_loses_its_patience_with_a_body_that_does_not_come_is_not_blamed() {
    let mut bench = Bench::new("");
    let (id, mut stream, _) = bench.request("gpu", &[("content-length", "10")]);
    let named = bench.named(id);
    bench.attempt(id, &named[0], 1);
    bench.host.stream(id, |stream| _ = stream.properties.insert("request\0size", 0u64.to_le_bytes().into()));
    bench.tick();
    bench.host.stream(id, |stream| {
        stream.properties.insert("response\0code_details", b"upstream_reset_before_response_started".to_vec());
        stream.properties.insert("response\0flags", flag::CONNECTION_TERMINATION.to_le_bytes().into());
    });
    bench.host.make_current(id);
    stream.done();
    assert!(bench.hosts().iter().all(|(load, failures, _)| (*load, *failures) == (0, 0)));
}
