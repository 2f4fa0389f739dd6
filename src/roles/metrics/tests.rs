use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::config::{Pool, Role};
use crate::core::fixture::{at, pool_of, record_of};
use crate::core::record::Record;
use crate::core::time::Instant;
use crate::roles::fake::{Call, Fake, Process};
use crate::roles::roots::Pools;
use crate::roles::worker::{TICK, Worker};

fn address(host: usize) -> Address {
    Address::parse(format!("10.0.{}.{}:80", host / 250, host % 250).as_bytes()).unwrap()
}

/// A pool, its record, and a worker that shows it.
struct Bench {
    host: Fake,
    metrics: Metrics,
    shown: Shown,
    pool: Rc<Pool>,
    record: Record,
    now: Instant,
}

impl Bench {
    fn new(process: &Arc<Process>, hosts: usize) -> Self {
        let pool = pool_of(hosts, "");
        let record = record_of(&pool);
        Self { host: Fake::new(process), metrics: Metrics::default(), shown: Shown::default(), pool, record, now: at(100.0) }
    }

    /// A second passes.
    fn show(&mut self) {
        self.now = self.now + Duration::from_secs(1);
        self.metrics.show(&self.host, ("gpu", Duration::from_secs(30)), &self.record, self.now, &mut self.shown);
    }

    fn value(&self, name: &str) -> Option<u64> {
        self.host.value_of(&format!("plimsoll.{name}"))
    }

    fn of_host(&self, family: &str, host: usize) -> Option<u64> {
        self.value(&format!("{family};pool=gpu;host={}", self.pool.hosts[host].address))
    }

    fn retire(&mut self, host: usize) {
        let slot = self.record.seat_at(self.pool.hosts[host].address).unwrap().slot;
        self.record.retire(slot);
        self.record.drop_retired();
    }
}

#[test]
fn the_table_in_the_readme_is_the_code_s() {
    let readme = include_str!("../../../README.md");
    let rows = readme.lines().filter(|line| line.starts_with("| plimsoll_"));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.trim_matches('|').split(" | ").map(str::trim).collect()).collect();
    let listed: Vec<[String; 3]> = rows.iter().map(|row| [0, 1, 2].map(|column| row[column].to_owned())).collect();
    let row = |family: &Family| {
        let kind = format!("{:?}", family.kind()).to_lowercase();
        [format!("plimsoll_{}", family.name()), kind, family.labels().join(", ")]
    };
    assert_eq!(listed, Family::ALL.iter().map(row).collect::<Vec<_>>());
    assert!(rows.iter().all(|row| row.len() == 5 && row.iter().all(|cell| !cell.is_empty())), "a row says nothing of something");
}

#[test]
fn our_envoy_files_have_a_tag_for_each_label() {
    let files = [
        ("http1", include_str!("../../../envoy/http1.yaml")),
        ("http2", include_str!("../../../envoy/http2.yaml")),
        ("dynamic", include_str!("../../../envoy/dynamic.yaml")),
        ("classify", include_str!("../../../envoy/classify.yaml")),
        ("istio", include_str!("../../../envoy/kubernetes/istio.yaml")),
        ("envoy-gateway", include_str!("../../../envoy/kubernetes/envoy-gateway.yaml")),
    ];
    for label in Family::ALL.iter().flat_map(|family| family.labels()) {
        let tag = format!(r"- {{ tag_name: {label}, regex: '^wasmcustom\.plimsoll\..*?(;{label}=([^;]*))' }}");
        for (name, file) in files {
            assert!(file.contains(&tag), "{name}.yaml lacks {tag}");
        }
    }
}

#[test]
fn names_carry_the_labels_and_whatever_a_value_is_it_ends_none() {
    let mut bench = Bench::new(&Process::new(1), 1);
    let (host, metrics) = (&bench.host, &mut bench.metrics);
    metrics.add(host, Family::Jobs, "gpu", Of::HostAnd(Some(address(1)), "success"), 2);
    metrics.add(host, Family::Jobs, "gpu", Of::HostAnd(None, "busy"), 1);
    metrics.add(host, Family::Alerts, "", Of::Word("sent"), 1);
    metrics.record(host, Family::ServiceMs, "a;b\n\"", Of::class(Label::of(b"x;host=evil\x1b\"\xff").name), 5);
    metrics.record(host, Family::ServiceMs, "gpu", Of::class(Label::of(b"1024x1024, sdxl").name), 5);
    let mut names = bench.host.metrics();
    names.sort();
    assert_eq!(
        names,
        [
            "plimsoll.alerts;outcome=sent",
            "plimsoll.jobs;pool=gpu;host=10.0.0.1:80;outcome=success",
            "plimsoll.jobs;pool=gpu;host=other;outcome=busy",
            "plimsoll.service_ms;pool=a_b_\";class=x_host=evil___",
            "plimsoll.service_ms;pool=gpu;class=1024x1024, sdxl",
        ]
    );
    assert_eq!(bench.value("jobs;pool=gpu;host=10.0.0.1:80;outcome=success"), Some(2));
}

#[test]
fn nothing_is_counted_where_nothing_happened() {
    let mut bench = Bench::new(&Process::new(1), 1);
    bench.metrics.add(&bench.host, Family::Unleased, "gpu", Of::Pool, 0);
    assert_eq!(bench.host.metrics(), [""; 0]);
}

#[test]
fn hosts_past_the_bound_share_one_label_in_all_workers_and_keep_none_of_their_own() {
    let process = Process::new(1);
    let (mut one, mut other) = (Bench::new(&process, 1), Bench::new(&process, 1));
    let count = |bench: &mut Bench, host: usize| {
        bench.metrics.add(&bench.host, Family::Readmissions, "gpu", Of::Host(Some(address(host))), 1)
    };
    (0..MOST_HOSTS + 200).for_each(|host| count(&mut one, host));
    (0..MOST_HOSTS + 200).rev().for_each(|host| count(&mut other, host));
    for bench in [&one, &other] {
        assert_eq!(bench.host.metrics().len(), MOST_HOSTS + 1);
        assert_eq!(bench.value("readmissions;pool=gpu;host=other"), Some(200));
        assert_eq!(bench.value(&format!("readmissions;pool=gpu;host={}", address(MOST_HOSTS - 1))), Some(1));
    }
    // Ten thousand hosts later nothing has been remembered of them.
    (2000..12_000).for_each(|host| count(&mut one, host));
    assert_eq!(one.metrics.ids.values().map(BTreeMap::len).sum::<usize>(), MOST_HOSTS + 1);
    let classes: Vec<String> = (0..MOST_CLASSES + 9).map(|class| format!("class {class}")).collect();
    for class in &classes {
        one.metrics.record(&one.host, Family::ServiceMs, "gpu", Of::class(Label::of(class.as_bytes()).name), 1);
    }
    assert_eq!(one.value("service_ms;pool=gpu;class=other"), Some(9));
}

#[test]
fn the_leader_shows_each_host_and_the_pool() {
    let mut bench = Bench::new(&Process::new(1), 3);
    (bench.record.header.in_flight_weight, bench.record.header.latency_weight) = (0.7, 0.3);
    (0..2).for_each(|_| bench.record.reserve(1, None, at(100.0)));
    bench.show();
    assert_eq!([0, 1, 2].map(|host| bench.of_host("in_flight", host)), [Some(0), Some(2), Some(0)]);
    assert_eq!(bench.of_host("max_in_flight", 1), Some(50));
    assert_eq!(bench.of_host("state", 1), Some(1));
    // 0.7 × (2 + 1), and 0.3 × (no latency yet).
    assert_eq!(bench.of_host("score_thousandths", 1), Some(2100));
    assert_eq!(bench.value("hosts;pool=gpu;state=serving"), Some(3));
    assert_eq!(bench.value("hosts;pool=gpu;state=ejected"), Some(0));
    assert_eq!((bench.value("eligible;pool=gpu"), bench.value("no_host;pool=gpu")), (Some(3), Some(0)));
    assert_eq!(bench.value("record_bytes;pool=gpu"), Some(bench.record.bytes().len() as u64));
    assert_eq!(bench.value("waiting;pool=gpu;priority=low"), Some(0));
    // Those that count what should be rare begin with 0: so their first event is a rise.
    assert_eq!((bench.value("dead_workers;pool=gpu"), bench.value("answered;pool=gpu;reason=full")), (Some(0), Some(0)));
    assert_eq!(bench.value("queue_timeout_ms;pool=gpu"), Some(30_000));
    assert_eq!(bench.value("discovery_age_ms;pool=gpu"), None);
}

#[test]
fn hosts_that_left_go_to_0_also_where_another_worker_showed_them() {
    let process = Process::new(1);
    let (mut first, mut second) = (Bench::new(&process, 3), Bench::new(&process, 3));
    first.record.reserve(0, None, at(100.0));
    first.show();
    first.retire(2);
    first.show();
    assert_eq!(["state", "max_in_flight", "in_flight"].map(|family| first.of_host(family, 2)), [Some(0); 3]);
    assert_eq!(["state", "max_in_flight"].map(|family| first.of_host(family, 0)), [Some(1), Some(50)]);
    // Another leads now, which has never seen it; and another VM's ids are its own.
    second.retire(1);
    second.retire(2);
    second.show();
    assert_eq!([0, 1, 2].map(|host| second.of_host("state", host)), [Some(1), Some(0), Some(0)]);
    first.metrics.hide(&first.host, "gpu", &mut first.shown);
    assert_eq!((first.of_host("in_flight", 0), first.value("record_bytes;pool=gpu")), (Some(0), Some(0)));
}

#[test]
fn gauges_are_set_where_they_moved_once_a_second_and_all_of_them_now_and_then() {
    let mut bench = Bench::new(&Process::new(1), 2);
    bench.show();
    let overwrite = |bench: &mut Bench| {
        let host = bench.pool.hosts[0].address;
        bench.metrics.record(&bench.host, Family::InFlight, "gpu", Of::Host(Some(host)), 77);
    };
    overwrite(&mut bench);
    bench.show();
    assert_eq!(bench.of_host("in_flight", 0), Some(77), "it has not moved");
    bench.record.reserve(1, None, at(100.0));
    bench.metrics.show(
        &bench.host,
        ("gpu", Duration::ZERO),
        &bench.record,
        bench.now + Duration::from_millis(999),
        &mut bench.shown,
    );
    assert_eq!(bench.of_host("in_flight", 1), Some(0), "it is not time yet");
    bench.shown.hurry();
    bench.metrics.show(&bench.host, ("gpu", Duration::ZERO), &bench.record, bench.now, &mut bench.shown);
    assert_eq!(bench.of_host("in_flight", 1), Some(1));
    (0..10).for_each(|_| bench.show());
    assert_eq!(bench.of_host("in_flight", 0), Some(0));
    // A clock that stepped back is no reason to be silent.
    bench.record.reserve(1, None, at(1.0));
    bench.metrics.show(&bench.host, ("gpu", Duration::ZERO), &bench.record, at(1.0), &mut bench.shown);
    assert_eq!(bench.of_host("in_flight", 1), Some(2));
}

#[test]
fn of_hosts_without_metrics_of_their_own_only_sums_are_shown() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, 3);
    for host in 0..MOST_HOSTS - 1 {
        bench.metrics.add(&bench.host, Family::Readmissions, "old", Of::Host(Some(address(host + 300))), 1);
    }
    (0..3).for_each(|host| bench.record.reserve(host, None, at(100.0)));
    bench.show();
    let own = (0..3).filter(|host| bench.of_host("in_flight", *host).is_some()).count();
    assert_eq!(own, 1);
    assert_eq!(
        (bench.value("in_flight;pool=gpu;host=other"), bench.value("max_in_flight;pool=gpu;host=other")),
        (Some(2), Some(100))
    );
    assert_eq!(bench.value("state;pool=gpu;host=other"), None);
}

#[test]
fn a_metric_that_envoy_refuses_is_missing_and_said_once() {
    let mut bench = Bench::new(&Process::new(1), 2);
    bench.host.refuse(Call::Metric, 1000);
    bench.show();
    bench.metrics.add(&bench.host, Family::Unleased, "gpu", Of::Pool, 3);
    let lines = bench.host.logged();
    assert_eq!(lines.iter().filter(|line| line.contains("could not make the metric")).count(), 1, "{lines:?}");
    bench.host.heal();
    bench.metrics.add(&bench.host, Family::Polls, "gpu", Of::Word("read"), 3);
    assert_eq!(bench.value("polls;pool=gpu;outcome=read"), Some(3));
}

#[test]
fn the_metrics_of_many_hosts_are_made_over_several_looks() {
    let mut bench = Bench::new(&Process::new(1), 300);
    let made = |bench: &Bench| (0..300).filter(|host| bench.of_host("state", *host).is_some()).count();
    bench.show();
    assert!((20..30).contains(&made(&bench)), "{}", made(&bench));
    // Not a second later: at the next tick.
    for _ in 0..12 {
        bench.metrics.show(&bench.host, ("gpu", Duration::ZERO), &bench.record, bench.now, &mut bench.shown);
    }
    assert_eq!(made(&bench), 300);
    // All of them have gone when another one takes the lead.
    let mut next = Bench { host: Fake::new(&bench.host.process), metrics: Metrics::default(), shown: Shown::default(), ..bench };
    next.record = Record::new(1);
    for _ in 0..20 {
        next.metrics.show(&next.host, ("gpu", Duration::ZERO), &next.record, next.now, &mut next.shown);
    }
    assert!((0..300).all(|host| next.of_host("state", host) == Some(0)));
}

/// A worker with roots that tick.
struct Running {
    host: Fake,
    worker: Worker<Fake>,
}

fn read(pools: &str) -> Pools {
    let json = format!(r#"{{"pools": {{{pools}}}}}"#);
    let Ok(Role::Balancer(config)) = Role::parse(json.as_bytes()) else { panic!("{json}") };
    config.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect()
}

const GPU: &str = r#""gpu": {"hosts": [{"address": "10.0.0.1:80"}, {"address": "10.0.0.2:80"}], "max_in_flight": 3}"#;
const DRAINING: &str = r#""gpu": {"hosts": [{"address": "10.0.0.1:80", "drain": true}], "max_in_flight": 3}"#;
const LLM: &str = r#""llm": {"hosts": [{"address": "10.0.0.3:80"}]}"#;

impl Running {
    fn new(process: &Arc<Process>) -> Self {
        let host = Fake::new(process);
        Self { worker: Worker::new(host.clone()), host }
    }

    fn ticks(&mut self, root: u32, pools: &Pools, ticks: usize) {
        let name: Rc<str> = "plimsoll".into();
        for _ in 0..ticks {
            self.host.process.pass(TICK);
            self.worker.root_ticks(root, &name, pools);
        }
    }

    fn value(&self, name: &str) -> Option<u64> {
        self.host.value_of(&format!("plimsoll.{name}"))
    }
}

#[test]
fn gauges_of_a_pool_that_the_configuration_drops_go_to_0() {
    let process = Process::new(1);
    let mut bench = Running::new(&process);
    bench.ticks(1, &read(DRAINING), 30);
    assert_eq!((bench.value("no_host;pool=gpu"), bench.value("max_in_flight;pool=gpu;host=10.0.0.1:80")), (Some(1), Some(3)));
    bench.ticks(2, &read(LLM), 1);
    bench.worker.root_ends(1);
    bench.ticks(2, &read(LLM), 50);
    assert_eq!((bench.value("no_host;pool=gpu"), bench.value("max_in_flight;pool=gpu;host=10.0.0.1:80")), (Some(0), Some(0)));
}

#[test]
fn gauges_of_a_pool_that_is_renamed_go_to_0_and_come_back() {
    let process = Process::new(1);
    let mut bench = Running::new(&process);
    bench.ticks(1, &read(GPU), 30);
    bench.ticks(2, &read(LLM), 1);
    bench.worker.root_ends(1);
    bench.ticks(2, &read(LLM), 50);
    let state = |bench: &Running| (bench.value("state;pool=gpu;host=10.0.0.1:80"), bench.value("hosts;pool=gpu;state=serving"));
    let gone = state(&bench);
    bench.ticks(3, &read(GPU), 1);
    bench.worker.root_ends(2);
    bench.ticks(3, &read(GPU), 50);
    assert_eq!((gone, state(&bench)), ((Some(0), Some(0)), (Some(1), Some(2))));
}

#[test]
fn a_new_leader_shows_that_a_class_and_a_following_have_gone() {
    let process = Process::new(1);
    let pool = pool_of(1, r#", "policy": "least_time""#);
    let mut record = record_of(&pool);
    record.header.discovers = 1;
    record.header.followed = at(1.0).0;
    let show = |record: &Record, now: f64, host: &Fake| {
        let (mut metrics, mut shown) = (Metrics::default(), Shown::default());
        metrics.show(host, ("gpu", Duration::ZERO), record, at(now), &mut shown);
    };
    let first = Fake::new(&process);
    show(&record, 100.0, &first);
    let known = first.metrics().into_iter();
    // Another worker leads; meanwhile a configuration without discovery and least_time went live.
    let second = Fake::new(&process);
    show(&record_of(&pool_of(1, "")), 101.0, &second);
    let stale: Vec<String> = known.filter(|name| second.value_of(name).is_none()).collect();
    assert_eq!(
        stale,
        [""; 0],
        "nobody sets these any more; {:?}",
        stale.iter().map(|name| first.value_of(name)).collect::<Vec<_>>()
    );
}

#[test]
fn a_leader_that_was_overtaken_has_not_the_last_word_on_a_host_that_left() {
    let process = Process::new(1);
    let host = Fake::new(&process);
    let (before, after) = (record_of(&pool_of(2, "")), record_of(&pool_of(1, "")));
    let (mut metrics, mut old, mut new) = (Metrics::default(), Shown::default(), Shown::default());
    let mut show = |record, now, shown: &mut Shown| metrics.show(&host, ("gpu", Duration::ZERO), record, at(now), shown);
    show(&before, 100.0, &mut old);
    show(&after, 101.0, &mut new);
    // The old one, which was off its core since it read the record.
    let mut busy = before.clone();
    busy.reserve(1, None, at(100.5));
    show(&busy, 101.1, &mut old);
    for second in 0..60 {
        show(&after, 102.0 + f64::from(second), &mut new);
    }
    assert_eq!(host.value_of("plimsoll.in_flight;pool=gpu;host=10.0.0.2:80"), Some(0));
}
