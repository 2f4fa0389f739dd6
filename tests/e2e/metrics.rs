//! Envoy's `/stats/prometheus` says what the status says, what clients saw, and no more than the README lists.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};
use support::load::Ongoing;
use support::{Door, Envoy, Fault, Fleet, Gpu, Load, Pool, RunningEnvoy, eventually};

use crate::ejection::eject;
use crate::exact::module;
use crate::queue::{hold, one_slot, send, waiting};

/// A sample of the page.
#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Sample {
    /// Reads `name{label="value",…} value`; no value of ours has a quote or a backslash in it.
    fn read(line: &str) -> Self {
        let (series, value) = line.rsplit_once(' ').expect("a value");
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let labels = labels.trim_end_matches('}').split("\",").filter(|label| !label.is_empty());
        let label = |text: &str| {
            let (label, value) = text.split_once("=\"").expect("a label");
            (label.to_owned(), value.trim_end_matches('"').to_owned())
        };
        Self { name: name.to_owned(), labels: labels.map(label).collect(), value: value.parse().expect("a number") }
    }
}

/// What the page has of us.
struct Page {
    samples: Vec<Sample>,
    types: BTreeMap<String, String>,
}

impl Page {
    async fn of(envoy: &RunningEnvoy) -> Self {
        let text = envoy.prometheus().await;
        let ours = |line: &&str| line.starts_with("plimsoll_");
        let declared = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).filter(ours);
        let types =
            declared.filter_map(|line| line.split_once(' ')).map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect();
        Self { samples: text.lines().filter(ours).map(Sample::read).collect(), types }
    }

    /// The sum over all samples of this name that have these labels; `None` if there is none.
    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let is_it = |sample: &&Sample| {
            sample.name == format!("plimsoll_{name}")
                && labels.iter().all(|(label, value)| sample.labels.get(*label).is_some_and(|is| is == value))
        };
        self.samples.iter().filter(is_it).map(|sample| sample.value).reduce(|sum, value| sum + value)
    }

    fn values(&self, label: &str) -> BTreeSet<&str> {
        self.samples.iter().filter_map(|sample| sample.labels.get(label)).map(String::as_str).collect()
    }
}

/// Waits until the page says so.
async fn until(envoy: &RunningEnvoy, what: &str, so: impl Fn(&Page) -> bool) -> Page {
    let mut page = Page::of(envoy).await;
    eventually(what, async || {
        page = Page::of(envoy).await;
        so(&page)
    })
    .await;
    page
}

/// The README's table: kind and labels by name.
fn table() -> BTreeMap<&'static str, (&'static str, BTreeSet<&'static str>)> {
    let rows = include_str!("../../README.md").lines().filter(|line| line.starts_with("| plimsoll_"));
    let row = |row: &'static str| {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        (cells[0], (cells[1], cells[2].split(", ").collect()))
    };
    rows.map(row).collect()
}

/// Each sample is in the table, with its kind and its labels.
fn is_as_listed(page: &Page) {
    let table = table();
    for sample in &page.samples {
        let part = ["_bucket", "_sum", "_count"].into_iter().find_map(|part| sample.name.strip_suffix(part));
        let name = part.filter(|name| table.contains_key(name)).unwrap_or(&sample.name);
        let (kind, labels) = table.get(name).unwrap_or_else(|| panic!("{name} is not in the README"));
        assert_eq!(page.types.get(name).map(String::as_str), Some(*kind), "{name}");
        let has: BTreeSet<&str> = sample.labels.keys().map(String::as_str).filter(|label| *label != "le").collect();
        assert_eq!(has, *labels, "{sample:?}");
    }
}

/// Each host's gauges are what the status says of it; averages and scores to within a thousandth and a half.
async fn says_what_the_status_says(envoy: &RunningEnvoy) {
    let is_near = |shown: Option<f64>, is: f64| shown.is_some_and(|shown| (shown - is).abs() <= 0.6 + is * 1e-3);
    let mut difference = String::new();
    eventually("the page says what the status says", async || {
        let (status, page) = (envoy.pool_status().await, Page::of(envoy).await);
        difference.clear();
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let states = ["serving", "busy", "probing", "ejected", "unhealthy", "draining"];
        for host in status["hosts"].as_array().expect("hosts") {
            let of = [("host", host["address"].as_str().expect("an address"))];
            let state = states.iter().position(|state| host["state"] == *state).expect("a state");
            let expected = [
                ("in_flight", number(&host["in_flight"])),
                ("max_in_flight", number(&host["max_in_flight"])),
                ("ewma_ms", number(&host["ewma_ms"])),
                ("score_thousandths", 1e3 * number(&host["score"])),
                ("state", state as f64 + 1.0),
            ];
            let wrong = expected.iter().filter(|(name, is)| !is_near(page.sum(name, &of), *is));
            wrong.for_each(|(name, is)| difference += &format!("{name} of {of:?} is {is}, not {:?}\n", page.sum(name, &of)));
        }
        for (name, key) in [("eligible", "eligible"), ("workers", "workers"), ("drift", "drift"), ("cas_retries", "conflicts")] {
            if page.sum(name, &[]).unwrap_or(0.0) != number(&status[key]) {
                difference += &format!("{name} is {:?}, not {}\n", page.sum(name, &[]), status[key]);
            }
        }
        difference.is_empty()
    })
    .await;
    assert_eq!(difference, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_job_is_counted_once_over_all_workers_and_every_gauge_is_the_statuss() {
    let fleet = Fleet::start(3, Gpu::new().work_ms(20).slots(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"failure": {"base_ejection_ms": 60000}})).start().await;
    let both = Pool::of_all(&envoy.pool_on_each_worker(4).await).await;
    fleet.iter().for_each(|host| host.set(Fault::status(404).fraction(0.25)));
    let report = Load::rate(200.0, 400).over(&both).run(&envoy).await;
    fleet.iter().for_each(|host| host.clear());
    let (good, odd) = (report.status(200) as f64, report.status(404) as f64);
    assert!(good + odd == 400.0 && odd > 0.0, "{report}");
    envoy.settled().await;
    let page = until(&envoy, "all are counted", |page| page.sum("service_ms_count", &[]) == Some(good)).await;
    let outcome = |page: &Page, outcome| page.sum("jobs", &[("pool", "gpu"), ("outcome", outcome)]);
    assert_eq!((outcome(&page, "success"), outcome(&page, "neutral")), (Some(good), Some(odd)));
    // Each host for itself.
    let books = envoy.books().await;
    for host in &books {
        let jobs = page.sum("jobs", &[("host", host["address"].as_str().expect("an address"))]);
        assert_eq!(jobs, host["requests"].as_f64(), "{host:#}");
    }
    assert!(page.sum("service_ms_bucket", &[("le", "750")]).is_some(), "the buckets are not those of our Envoy files");
    let mean = page.sum("service_ms_sum", &[("class", "default")]).expect("a sum") / good;
    assert!((15.0..500.0).contains(&mean), "{mean} ms a job");
    is_as_listed(&page);

    eject(&envoy, &fleet, 1).await;
    fleet[2].set(Fault::status(429).header("retry-after", "30"));
    eventually("the third host is busy", async || {
        Load::burst(3).over(&both).run(&envoy).await;
        envoy.column("state").await == ["serving", "ejected", "busy"]
    })
    .await;
    fleet[0].clear();
    let running: Vec<Ongoing> = {
        let mut running = Vec::new();
        for _ in 0..2 {
            running.push(envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await);
        }
        running
    };
    envoy.until("two run", |hosts| hosts[0]["in_flight"] == 2).await;
    says_what_the_status_says(&envoy).await;
    let page = Page::of(&envoy).await;
    let host = books[1]["address"].as_str().expect("an address");
    assert_eq!(page.sum("ejections", &[("host", host), ("reason", "failures")]), Some(1.0));
    let in_state = |state| page.sum("hosts", &[("state", state)]);
    assert_eq!(["serving", "busy", "ejected", "draining"].map(in_state), [1.0, 1.0, 1.0, 0.0].map(Some));
    assert!(page.sum("record_bytes", &[]) > Some(300.0), "{:?}", page.sum("record_bytes", &[]));
    assert_eq!(page.sum("no_host", &[]), Some(0.0));
    assert!(outcome(&page, "failure") >= Some(3.0) && outcome(&page, "busy") >= Some(1.0));
    is_as_listed(&page);
    drop(running);
    envoy.settled().await;
    says_what_the_status_says(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_shows_who_waits_how_long_and_who_was_turned_away() {
    let fleet = Fleet::start(2, Gpu::new().work_ms(10)).await;
    let keys = json!({"queue": {"max_length": 4, "timeout_ms": 3000}, "priority": {"header": "x-job-priority"}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).keys(json!({"trusted_headers": true})).pool(one_slot(keys)).start().await;
    let mut held = hold(&envoy, &fleet).await;
    let ask = |priority: &str| envoy.client().post("/prompt", "{}").header("x-job-priority", priority);
    let high = send(ask("high"));
    waiting(&envoy, 1).await;
    let low: Vec<_> = (0..3).map(|_| send(ask("low"))).collect();
    waiting(&envoy, 4).await;
    assert_eq!(ask("high").await.status, 503);
    let by = |page: &Page, priority| page.sum("waiting", &[("priority", priority)]);
    let page = until(&envoy, "four wait", |page| by(page, "low") == Some(3.0)).await;
    assert_eq!((by(&page, "high"), by(&page, "normal"), page.sum("queue_max_length", &[])), (Some(1.0), Some(0.0), Some(4.0)));
    assert_eq!(page.sum("queue_timeout_ms", &[]), Some(3000.0));
    until(&envoy, "the first has waited for a second", |page| page.sum("longest_wait_ms", &[]) >= Some(1000.0)).await;
    held.remove(0).abort();
    assert_eq!(high.await.expect("sent").0.status, 200);
    for low in low {
        assert_eq!(low.await.expect("sent").0.status, 200);
    }
    let late = held.len();
    let full = hold_again(&envoy, &fleet).await;
    let (reply, _) = send(ask("normal")).await.expect("sent");
    assert_eq!((reply.status, late), (503, 1));
    let page = until(&envoy, "all have been counted", |page| page.sum("queue_wait_ms_count", &[]) == Some(7.0)).await;
    let answered = |reason| page.sum("answered", &[("reason", reason)]);
    assert_eq!((answered("queue_full"), answered("queue_timeout"), answered("no_host")), (Some(1.0), Some(1.0), Some(0.0)));
    // The two that were held first, and the one of now, came to a free slot.
    let of = |part: &str, priority| page.sum(&format!("queue_wait_ms_{part}"), &[("priority", priority)]);
    assert_eq!(["high", "normal", "low"].map(|priority| of("count", priority)), [Some(1.0), Some(3.0), Some(3.0)]);
    assert!(of("sum", "high") > Some(900.0) && of("sum", "normal") < Some(100.0), "{:?}", of("sum", "high"));
    is_as_listed(&page);
    drop((held, full));
    envoy.settled().await;
    until(&envoy, "nobody waits", |page| page.sum("waiting", &[]) == Some(0.0) && page.sum("longest_wait_ms", &[]) == Some(0.0))
        .await;
}

/// A job on the slot that is free.
async fn hold_again(envoy: &RunningEnvoy, fleet: &Fleet) -> Ongoing {
    let job = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await;
    eventually("both slots are taken", async || fleet.in_flight() == [1, 1]).await;
    job
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_refuses_is_blamed_and_its_jobs_are_served_by_another() {
    let fleet = Fleet::start(2, Gpu::new().work_ms(10).slots(100)).await;
    let keys = json!({"failure": {"consecutive": 1000}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    fleet[0].door(Door::Closed).await;
    let report = Load::one_by_one(40).run(&envoy).await;
    report.assert_served();
    envoy.settled().await;
    let refused = envoy.books().await[0]["failures"].as_f64();
    let page = Page::of(&envoy).await;
    let first = fleet.addresses()[0].to_string();
    assert!(refused >= Some(1.0), "nobody was sent to the host that refuses");
    assert_eq!(page.sum("retries_blamed", &[("host", &first)]), refused);
    assert_eq!(page.sum("served_by_another", &[("reason", "retry")]), refused);
    assert_eq!((page.sum("jobs", &[("outcome", "success")]), page.sum("jobs", &[("host", &first)])), (Some(40.0), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_that_left_go_to_0_and_a_dead_worker_is_counted() {
    let fleet = Fleet::start(3, Gpu::new().work_ms(10).slots(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).module(module("plimsoll-trap.wasm")).live().start().await;
    Load::burst(30).run(&envoy).await.assert_served();
    says_what_the_status_says(&envoy).await;
    let addresses: Vec<String> = fleet.addresses().iter().map(ToString::to_string).collect();
    let hosts: Vec<Value> = addresses[..2].iter().map(|address| json!({"address": address})).collect();
    envoy.reload_pool(json!({"hosts": hosts})).await.expect("taken up");
    let gone = addresses[2].as_str();
    let page = until(&envoy, "it has gone", |page| page.sum("state", &[("host", gone)]) == Some(0.0)).await;
    let of = |name| page.sum(name, &[("host", gone)]);
    assert_eq!(["in_flight", "max_in_flight", "ewma_ms", "score_thousandths"].map(of), [Some(0.0); 4]);
    assert!(of("jobs") > Some(0.0), "what it did is not forgotten");
    assert_eq!(page.sum("state", &[("host", &addresses[0])]), Some(1.0));
    // A worker's end; whoever leads then shows the same.
    assert_eq!(envoy.client().post("/prompt", "{}").header("x-trap", "1").await.status, 503);
    until(&envoy, "its death is counted", |page| page.sum("dead_workers", &[]) == Some(1.0)).await;
    Load::burst(10).run(&envoy).await.assert_served();
    envoy.settled().await;
    says_what_the_status_says(&envoy).await;
    assert_eq!(Page::of(&envoy).await.sum("state", &[("host", gone)]), Some(0.0));
    // A pool that no configuration has any more.
    envoy.reload(json!({"pools": {"another": {"hosts": hosts}}})).await.expect("taken up");
    let gauges = ["max_in_flight", "state", "hosts", "eligible", "slots", "workers", "record_bytes"];
    until(&envoy, "the pool has gone", |page| gauges.iter().all(|name| page.sum(name, &[("pool", "gpu")]) == Some(0.0))).await;
    until(&envoy, "another is there", |page| page.sum("state", &[("pool", "another")]) == Some(2.0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn past_a_thousand_hosts_and_hundreds_of_classes_the_page_grows_no_more() {
    let fleet = Fleet::start(2, Gpu::new().work_ms(1).slots(100)).await;
    let mut addresses: Vec<String> = fleet.addresses().iter().map(ToString::to_string).collect();
    addresses.extend((0..998).map(|host| format!("10.0.{}.{}:80", host / 250, host % 250)));
    let hosts: Vec<Value> =
        addresses.iter().enumerate().map(|(n, address)| json!({"address": address, "drain": n > 1})).collect();
    // Of another pool, which shares the places.
    let others: Vec<Value> = (0..100).map(|host| json!({"address": format!("10.1.0.{host}:80"), "max_in_flight": 10})).collect();
    let keys = json!({"hosts": hosts, "max_in_flight": 10, "class": {"header": "x-job-class"}, "alternates": 0});
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .keys(json!({"trusted_headers": true, "pools": {"spare": {"hosts": others}}}))
        .pool(keys)
        .start()
        .await;
    let load = Load::burst(1000).each(|n, shot| shot.call.add_header("x-job-class", format!("class {n};host=\"x\"")));
    load.pool(32).run(&envoy).await;
    envoy.settled().await;
    let slots = |page: &Page| page.sum("max_in_flight", &[]);
    let page = until(&envoy, "all are shown", |page| slots(page) == Some(11_000.0)).await;
    // Each has one of its own, or is part of the sum.
    let hosts = page.values("host");
    assert_eq!((hosts.len(), hosts.contains("other")), (1025, true));
    assert_eq!(page.sum("max_in_flight", &[("host", "other")]), Some(760.0));
    assert_eq!((page.sum("hosts", &[("state", "draining")]), page.sum("eligible", &[])), (Some(998.0), Some(102.0)));
    let page = until(&envoy, "the times have been added up", |page| page.sum("service_ms_count", &[]).is_some()).await;
    let classes = page.values("class");
    assert!(
        classes.len() <= 257 && classes.contains("other") && classes.iter().any(|class| class.ends_with("_host=_x_")),
        "{} classes",
        classes.len()
    );
    is_as_listed(&page);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(Page::of(&envoy).await.values("host").len(), 1025);
}
