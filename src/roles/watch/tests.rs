use std::sync::Arc;

use serde_json::Value;

use super::*;
use crate::config::Role;
use crate::core::fixture::{address, pool_of};
use crate::core::health::{Evidence, State, judge};
use crate::core::outcome::Outcome;
use crate::core::random::Random;
use crate::roles::fake::{Called, Fake, Process};
use crate::roles::roots::Pools;
use crate::roles::shared;
use crate::roles::worker::TICK;

/// The current stream of a callback for a call's answer.
const ANSWER: u32 = 900;

/// A worker with one root.
struct Bench {
    host: Fake,
    worker: Worker<Fake>,
    name: Rc<str>,
    pools: Pools,
}

impl Bench {
    fn new(process: &Arc<Process>, keys: &str) -> Self {
        let host = Fake::new(process);
        let hosts: Vec<String> = pool_of(2, "").hosts.iter().map(|host| format!(r#"{{"address": "{}"}}"#, host.text)).collect();
        let alerts = r#""alerts": {"cluster": "alertmanager"}"#;
        let json = format!(r#"{{"pools": {{"gpu": {{"hosts": [{}]{keys}}}}}, {alerts}}}"#, hosts.join(","));
        let Ok(Role::Balancer(config)) = Role::parse(json.as_bytes()) else {
            panic!("{json}");
        };
        let pools: Pools = config.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect();
        let mut bench = Self { worker: Worker::new(host.clone()), host, name: "plimsoll".into(), pools };
        bench.tick();
        bench
    }

    /// A tick passes; gives the calls that it made.
    fn tick(&mut self) -> Vec<Called> {
        self.host.process.pass(TICK);
        self.worker.root_ticks(1, &self.name, &self.pools);
        self.host.called()
    }

    fn answer(&mut self, token: u32, status: Option<&str>) {
        self.host.is_answered(ANSWER, status);
        self.worker.called_back(token, 0);
    }

    /// Ticks for so long; every probe of the host is answered so, those of others with 200. Gives how many there were of each.
    fn probe(&mut self, seconds: u64, host: usize, status: Option<&str>) -> [usize; 2] {
        let mut probes = [0; 2];
        for _ in 0..seconds * 10 {
            for call in self.tick() {
                let at = usize::from(call.headers["x-gateway-destination-endpoint"] != address(0).to_string());
                probes[at] += 1;
                self.answer(call.token, if at == host { status } else { Some("200") });
            }
        }
        probes
    }

    fn state(&self, host: usize) -> State {
        record(&self.host.process).hosts().nth(host).unwrap().state(self.host.now())
    }

    fn fail(&self, host: u32) {
        let (pool, mut record, now) = (&self.pools[0].1, record(&self.host.process), self.host.now());
        let evidence = Evidence { is_timed: true, outcome: Outcome::Failure, latency: None, begun: now, trial: None };
        (0..3).for_each(|_| judge(&mut record, host, evidence, pool, now, &mut Random::new(1)));
        self.host.process.put(&shared::key("gpu"), record.into_bytes());
    }

    fn readmit(&self, host: u32) {
        let (pool, mut record, now) = (&self.pools[0].1, record(&self.host.process), Instant(self.host.now().0));
        let trial = record.with_host(host, |entry| entry.begin_trial(now, Duration::from_secs(9)));
        let evidence = Evidence { is_timed: true, outcome: Outcome::Success, latency: None, begun: now, trial };
        judge(&mut record, host, evidence, pool, now, &mut Random::new(1));
        self.host.process.put(&shared::key("gpu"), record.into_bytes());
    }
}

fn record(process: &Process) -> Record {
    Record::parse(process.value(&shared::key("gpu")).unwrap()).unwrap()
}

const PROBE: &str = r#", "probe": {"path": "/health", "interval_ms": 1000}"#;

#[test]
fn a_probe_is_a_request_to_the_host_through_the_pools_own_cluster() {
    let mut bench = Bench::new(&Process::new(1), PROBE);
    let calls: Vec<Called> = (0..12).flat_map(|_| bench.tick()).collect();
    let header = |name: &str| calls[0].headers.get(name).cloned().unwrap_or_default();
    let to = header("x-gateway-destination-endpoint");
    assert!([address(0).to_string(), address(1).to_string()].contains(&to), "{to}");
    assert_eq!(
        (calls[0].cluster.as_str(), header(":method"), header(":path"), header(":authority")),
        ("gpu", "GET".into(), "/health".into(), to)
    );
}

#[test]
fn failed_probes_in_a_row_make_a_host_unhealthy_and_good_ones_healthy_again() {
    let mut bench = Bench::new(&Process::new(1), PROBE);
    for status in [Some("503"), Some("404"), Some("302"), Some("504"), None] {
        let probes = bench.probe(5, 0, status);
        assert!(probes.iter().all(|probes| (4..=6).contains(probes)), "{probes:?}");
        assert_eq!((bench.state(0), bench.state(1)), (State::Unhealthy, State::Serving), "{status:?}");
        bench.probe(4, 0, Some("204"));
        assert_eq!(bench.state(0), State::Serving);
    }
    let logged = bench.host.logged();
    let lines = |text: &str| logged.iter().filter(|line| line.contains(text)).count();
    assert_eq!(lines("plimsoll: pool gpu: 10.0.0.1:80 is unhealthy: 3 probes failed in a row"), 5);
    assert_eq!(lines("plimsoll: pool gpu: 10.0.0.1:80 is healthy again"), 5);
}

#[test]
fn one_worker_probes_for_all_and_another_takes_over_when_it_falls_silent() {
    let process = Process::new(1);
    let (mut first, mut second) = (Bench::new(&process, PROBE), Bench::new(&process, PROBE));
    let mut calls = [0, 0];
    for _ in 0..50 {
        process.pass(TICK / 2);
        first.worker.root_ticks(1, &first.name, &first.pools);
        process.pass(TICK / 2);
        second.worker.root_ticks(1, &second.name, &second.pools);
        for (at, bench) in [&mut first, &mut second].into_iter().enumerate() {
            let called = bench.host.called();
            calls[at] += called.len();
            called.iter().for_each(|call| bench.answer(call.token, Some("200")));
        }
    }
    assert!(calls.contains(&0) && calls.iter().sum::<usize>() >= 8, "{calls:?}");
    let survivor = if calls[0] == 0 { &mut first } else { &mut second };
    let after: usize = survivor.probe(3, 9, None).iter().sum();
    assert!(after >= 4, "{after} probes within three intervals");
}

#[test]
fn with_prewarm_every_worker_probes_and_only_the_leaders_answers_count() {
    let process = Process::new(1);
    let keys = r#", "probe": {"path": "/health", "interval_ms": 1000, "prewarm": true}"#;
    let (mut first, mut second) = (Bench::new(&process, keys), Bench::new(&process, keys));
    for _ in 0..60 {
        process.pass(TICK / 2);
        first.worker.root_ticks(1, &first.name, &first.pools);
        process.pass(TICK / 2);
        second.worker.root_ticks(1, &second.name, &second.pools);
        let calls = [first.host.called(), second.host.called()];
        calls[0].iter().for_each(|call| first.answer(call.token, Some("200")));
        calls[1].iter().for_each(|call| second.answer(call.token, Some("500")));
    }
    assert!(first.probe(3, 9, None).iter().sum::<usize>() >= 4);
    let leader = record(&process).header.leader;
    assert_ne!(leader, 0);
    assert_eq!(first.state(0), State::Serving, "the first leads, and its answers were good");
}

#[test]
fn an_ejection_and_the_return_are_a_line_a_metric_and_an_alert_each() {
    let mut bench = Bench::new(&Process::new(1), "");
    bench.fail(0);
    let calls = bench.tick();
    assert_eq!(
        (calls.len(), calls[0].cluster.as_str(), calls[0].headers[":path"].as_str()),
        (1, "alertmanager", "/api/v2/alerts")
    );
    let alerts: Value = serde_json::from_str(&calls[0].body).unwrap();
    assert_eq!(
        (&alerts[0]["labels"]["alertname"], &alerts[0]["labels"]["host"]),
        (&"PlimsollHostEjected".into(), &"10.0.0.1:80".into())
    );
    assert!(
        bench
            .host
            .logged()
            .iter()
            .any(|line| line.ends_with("is ejected for 10.0 s: 3 failures in a row") || line.contains("is ejected for 10."))
    );
    assert_eq!(bench.host.value_of("plimsoll.ejections;pool=gpu;host=10.0.0.1:80;reason=failures"), Some(1));
    bench.answer(calls[0].token, Some("200"));
    assert_eq!(bench.host.value_of("plimsoll.alerts;outcome=sent"), Some(1));
    bench.readmit(0);
    let calls = bench.tick();
    assert!(calls[0].body.contains("endsAt"));
    bench.answer(calls[0].token, Some("503"));
    assert_eq!(bench.host.value_of("plimsoll.alerts;outcome=failed"), Some(1));
    assert!(bench.host.logged().contains(&"plimsoll: pool gpu: 10.0.0.1:80 serves again".to_owned()));
    assert_eq!(bench.host.value_of("plimsoll.readmissions;pool=gpu;host=10.0.0.1:80"), Some(1));
}

#[test]
fn a_pool_without_hosts_is_told_and_so_is_its_end() {
    let mut bench = Bench::new(&Process::new(1), PROBE);
    assert_eq!(bench.host.value_of("plimsoll.no_host;pool=gpu"), Some(0));
    let unhealthy = |bench: &Bench, unhealthy: bool| {
        let mut record = record(&bench.host.process);
        (0..2).for_each(|host| _ = health::report(&mut record, address(host), Watcher::Probes, unhealthy, bench.host.now()));
        bench.host.process.put(&shared::key("gpu"), record.into_bytes());
    };
    unhealthy(&bench, true);
    let alerts: Vec<Called> = bench.tick().into_iter().filter(|call| call.cluster == "alertmanager").collect();
    assert!(alerts[0].body.contains("PlimsollNoHost"), "{}", alerts[0].body);
    bench.answer(alerts[0].token, Some("200"));
    assert_eq!(bench.host.value_of("plimsoll.no_host;pool=gpu"), Some(1));
    unhealthy(&bench, false);
    let alerts: Vec<Called> = bench.tick().into_iter().filter(|call| call.cluster == "alertmanager").collect();
    assert!(alerts[0].body.contains("endsAt"));
    assert_eq!(bench.host.value_of("plimsoll.no_host;pool=gpu"), Some(0));
    // A pool that has hosts again has to keep them for five seconds.
    (0..50).for_each(|_| _ = bench.tick());
    let logged = bench.host.logged();
    for line in ["plimsoll: pool gpu: no host is eligible", "plimsoll: pool gpu: a host is eligible again"] {
        assert!(logged.contains(&line.to_owned()), "{logged:?}");
    }
}

#[test]
fn of_hosts_that_are_busy_with_each_second_job_a_line_is_told_in_ten_seconds() {
    let mut bench = Bench::new(&Process::new(1), "");
    for _ in 0..75 {
        let (pool, mut record, now) = (&bench.pools[0].1, record(&bench.host.process), bench.host.now());
        let outcome = Outcome::Busy(Duration::from_millis(150));
        let evidence = Evidence { is_timed: false, outcome, latency: None, begun: now, trial: None };
        judge(&mut record, 0, evidence, pool, now, &mut Random::new(1));
        bench.host.process.put(&shared::key("gpu"), record.into_bytes());
        (0..2).for_each(|_| _ = bench.tick());
    }
    let busy: Vec<String> = bench.host.logged().into_iter().filter(|line| line.contains("is busy for")).collect();
    assert_eq!(busy.len(), 2, "{busy:?}");
    assert!(busy[0].starts_with("plimsoll: pool gpu: 10.0.0.1:80 is busy for 0."), "{busy:?}");
    assert!(busy[1].ends_with(" (and 49 more like it)"), "{busy:?}");
    // When it is over, a tick tells of those that no line has told of.
    (0..200).for_each(|_| _ = bench.tick());
    let busy: Vec<String> = bench.host.logged().into_iter().filter(|line| line.contains("is busy for")).collect();
    assert_eq!(busy.len(), 3, "{busy:?}");
    assert!(busy[2].ends_with(" s: it asked us to wait (said before, and 24 more like it since)"), "{busy:?}");
}

#[test]
fn an_answer_to_nothing_and_a_call_that_envoy_refuses_change_nothing() {
    let mut bench = Bench::new(&Process::new(1), PROBE);
    bench.answer(12345, Some("500"));
    bench.host.refuse(crate::roles::fake::Call::Call, 1000);
    bench.fail(0);
    (0..100).for_each(|_| _ = bench.tick());
    assert_eq!(bench.state(1), State::Serving);
    bench.host.heal();
    assert!(bench.probe(4, 9, None).iter().all(|probes| *probes >= 2));
}

#[test]
fn calls_that_are_never_answered_are_forgotten() {
    let mut bench = Bench::new(&Process::new(1), PROBE);
    // Half an hour in which Envoy deletes each root that asked before its answer comes.
    (0..18_000).for_each(|_| _ = bench.tick());
    let open = bench.worker.duties.calls.len();
    assert!((1..=60).contains(&open), "{open} calls are remembered");
}
