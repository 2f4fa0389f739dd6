//! When a host that fails is left alone, for how long, how it comes back, and who is told.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::load::Ongoing;
use support::{Abort, Door, Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy, eventually};

/// Two hosts behind an Envoy. A job that does not end has the second one's only slot, so that every other job goes to the first one,
/// whatever its score.
pub struct Pinned {
    pub fleet: Fleet,
    pub envoy: RunningEnvoy,
    _held: Ongoing,
}

impl Pinned {
    /// With these keys in the pool.
    pub async fn start(mut keys: Value) -> Self {
        let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
        let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
        keys["hosts"] = json!([
            {"address": one.to_string()},
            {"address": two.to_string(), "weight": 1000, "max_in_flight": 1},
        ]);
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
        let held = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await;
        fleet[1].until("the heavier host has the job that holds it", |counts| counts.running == 1).await;
        Self { fleet, envoy, _held: held }
    }

    /// A job's status, and what the filter says of the first host once it is settled.
    pub async fn job(&self) -> (u16, Value) {
        let status = self.envoy.client().post("/prompt", "{}").await.status;
        (status, self.settled().await)
    }

    /// What the filter says of the first host when nothing runs there.
    pub async fn settled(&self) -> Value {
        self.envoy.until("nothing runs on the first host", |books| books[0]["in_flight"] == 0).await.swap_remove(0)
    }

    /// Lets the first host fail three times; it is well again when it is ejected.
    pub async fn eject(&self) {
        self.fleet[0].set(Fault::status(500).next(3));
        for _ in 0..3 {
            assert_eq!(self.job().await.0, 500);
        }
        self.envoy.until_state(0, "ejected").await;
    }
}

/// Lets a host of an idle pool fail until it is ejected; it is well again then. Its failures come only when all jobs have been placed, so that
/// it gets its share of them: four, if it has not failed before, or if each host has four slots.
pub async fn eject(envoy: &RunningEnvoy, fleet: &Fleet, host: usize) {
    fleet[host].set(Fault::status(500).after(Duration::from_millis(300)));
    Load::burst(4 * fleet.len()).header("x-sim-ms", "300").run(envoy).await;
    envoy.until_state(host, "ejected").await;
    fleet[host].clear();
}

#[tokio::test(flavor = "multi_thread")]
async fn three_failures_in_a_row_eject_a_host_and_after_each_readmission_exactly_three_again() {
    let pinned = Pinned::start(json!({"failure": {"base_ejection_ms": 500}})).await;
    for round in 1..=3 {
        pinned.fleet[0].set(Fault::status(500));
        for failures in 1..=2 {
            let (_, host) = pinned.job().await;
            assert_eq!((&host["state"], &host["consecutive_failures"]), (&json!("serving"), &json!(failures)), "round {round}");
            assert_eq!(host["ejections"], round - 1);
            assert!(host["penalty"].as_f64() > Some(1.0), "{host}");
        }
        // A success in between starts the count afresh.
        pinned.fleet[0].clear();
        assert_eq!(pinned.job().await.1["consecutive_failures"], 0);
        pinned.fleet[0].set(Fault::status(500));
        for failures in 1..=3 {
            assert_eq!(pinned.job().await.1["failures"], (round - 1) * 5 + 2 + failures);
        }
        let host = &pinned.envoy.books().await[0];
        assert_eq!((&host["ejections"], &host["reason"]), (&json!(round), &json!("failures")));
        pinned.fleet[0].clear();
        pinned.envoy.until_state(0, "probing").await;
        let (status, host) = pinned.job().await;
        assert_eq!((status, &host["state"], &host["consecutive_failures"]), (200, &json!("serving"), &json!(0)));
        assert_eq!((&host["ejected_for_ms"], &host["reason"]), (&json!(0), &Value::Null));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trial_is_alone_and_one_that_is_aborted_or_a_bad_prompt_or_endless_wedges_nothing() {
    let pinned = Pinned::start(json!({"failure": {"base_ejection_ms": 1500}})).await;
    let host = &pinned.fleet[0];
    pinned.eject().await;
    pinned.envoy.until_state(0, "probing").await;
    host.set(Fault::hang());
    let trial = pinned.envoy.client().post("/prompt", "{}").start().await;
    host.until("the trial is there", |counts| counts.in_flight == 1).await;
    trial.abort();
    assert_eq!(pinned.settled().await["state"], "probing", "a client that left says nothing");
    host.set(Fault::status(404));
    let (status, books) = pinned.job().await;
    assert_eq!((status, &books["state"]), (404, &json!("probing")), "a bad prompt says nothing");
    host.set(Fault::status(429).header("retry-after", "2"));
    let (status, books) = pinned.job().await;
    assert_eq!((status, &books["state"]), (429, &json!("probing")), "a host that is full says nothing, but that it waits");
    pinned.envoy.until("it has waited", |books| books[0]["busy_for_ms"] == 0).await;
    // Ten jobs at once, over both workers: one is the trial, which hangs.
    host.set(Fault::hang());
    let clients = pinned.envoy.pool_over_workers(10).await;
    host.clear_books();
    let began = Instant::now();
    let leave = |_: usize, shot: &mut support::load::Shot| shot.abort = Some(Abort::After(Duration::from_secs(6)));
    let endless = Load::burst(10).over(&clients).each(leave).start(&pinned.envoy);
    host.until("the trial is there", |counts| counts.in_flight == 1).await;
    // A job is counted before its fault is looked up.
    tokio::time::sleep(Duration::from_millis(100)).await;
    // The host is well again, but the trial is not back; no other may start before its deadline, and one may after it.
    host.clear();
    eventually("another trial is started", async || pinned.envoy.client().post("/prompt", "{}").await.status == 200).await;
    assert!(began.elapsed() >= Duration::from_millis(1500), "after {:?}", began.elapsed());
    pinned.envoy.until_state(0, "serving").await;
    let report = endless.await.expect("the load ran");
    assert_eq!((report.status(503), report.aborted()), (9, 1), "\n{report}");
    assert_eq!(host.jobs(), 2);
    let books = pinned.settled().await;
    assert_eq!((&books["state"], &books["ejections"]), (&json!("serving"), &json!(1)), "the endless one's end says nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn ejections_grow_while_trials_fail_up_to_the_longest() {
    let pinned = Pinned::start(json!({"failure": {"base_ejection_ms": 700, "max_ejection_ms": 2100}})).await;
    pinned.fleet[0].set(Fault::status(500));
    for _ in 0..2 {
        pinned.job().await;
    }
    for (ejections, length) in [(1, 0.7), (2, 1.4), (3, 2.1), (4, 2.1)] {
        let began = Instant::now();
        let (status, host) = pinned.job().await;
        assert_eq!((status, &host["ejections"]), (500, &json!(ejections)));
        pinned.envoy.until_state(0, "probing").await;
        // Up to a tenth more is jitter, and a second is ours.
        let seen = began.elapsed().as_secs_f64();
        assert!((length..length * 1.1 + 1.0).contains(&seen), "ejection {ejections} lasted {seen} s");
    }
    let line = format!("plimsoll: pool gpu: {} is ejected for ", pinned.fleet[0].address());
    assert_eq!(pinned.envoy.log().matches(&line).count(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_began_before_a_readmission_say_nothing_after_it() {
    let pinned = Pinned::start(json!({"failure": {"base_ejection_ms": 500}})).await;
    let host = &pinned.fleet[0];
    host.set(Fault::status(500).after(Duration::from_secs(6)));
    let late = Load::burst(6).start(&pinned.envoy);
    host.until("six are there", |counts| counts.in_flight == 6).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    host.set(Fault::status(500));
    Load::one_by_one(3).run(&pinned.envoy).await;
    host.clear();
    pinned.envoy.until("its ejection", |books| books[0]["ejections"] == 1).await;
    pinned.envoy.until_state(0, "probing").await;
    assert_eq!(pinned.envoy.client().post("/prompt", "{}").await.status, 200);
    pinned.envoy.until_state(0, "serving").await;
    let report = late.await.expect("the load ran");
    assert_eq!(report.status(500), 6, "\n{report}");
    let books = pinned.settled().await;
    assert_eq!((&books["state"], &books["consecutive_failures"]), (&json!("serving"), &json!(0)), "{books}");
    assert_eq!(books["ejections"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_pools_of_one_two_three_and_ten_no_more_are_ejected_than_may_be_and_never_the_last() {
    for (hosts, percent, most) in [(1, 50, 0), (2, 50, 1), (3, 50, 1), (10, 50, 5), (2, 1, 1), (3, 100, 2)] {
        let fleet = Fleet::start(hosts, Gpu::new()).await;
        let failure = json!({"base_ejection_ms": 400, "max_ejection_ms": 800, "max_ejected_percent": percent});
        let keys = json!({"failure": failure});
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
        fleet.iter().for_each(|host| host.set(Fault::status(500)));
        let load = Load::rate(100.0, 50).repeat(&envoy);
        let began = Instant::now();
        let mut ejected_at_once = 0;
        // Long enough for trials, and for their failures.
        while began.elapsed() < Duration::from_secs(3) {
            let states = envoy.column("state").await;
            let out = states.iter().filter(|state| *state == "ejected" || *state == "probing").count();
            let serving = states.iter().filter(|state| *state == "serving").count();
            assert!(out <= most && serving >= 1, "{states:?}");
            ejected_at_once = ejected_at_once.max(out);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let report = load.end().await;
        assert_eq!(report.status(500), report.served.len(), "somebody is always there to be asked\n{report}");
        assert_eq!(ejected_at_once, most, "of {hosts}, at most {percent} %");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_fails_is_not_ejected_while_no_other_serves() {
    for other in ["draining", "unhealthy", "busy"] {
        let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
        let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
        let hosts = json!([{"address": one.to_string()}, {"address": two.to_string(), "drain": other == "draining"}]);
        let probe = json!({"path": "/health", "interval_ms": 200, "unhealthy_after": 1});
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"hosts": hosts, "probe": probe})).start().await;
        match other {
            "busy" => {
                fleet[1].set(Fault::status(429).header("retry-after", "60"));
                Load::burst(8).header("x-sim-ms", "300").run(&envoy).await;
            }
            "unhealthy" => fleet[1].set_health(Some(503)),
            _ => {}
        }
        envoy.until_state(1, other).await;
        fleet[0].set(Fault::status(500));
        let report = Load::one_by_one(8).run(&envoy).await;
        assert_eq!(report.status(500), 8, "the other one is {other}: this one is all that there is\n{report}");
        let books = envoy.until("its failures are counted", |books| books[0]["failures"] == 8).await;
        assert_eq!((&books[0]["state"], &books[0]["ejections"]), (&json!("serving"), &json!(0)), "the other one is {other}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_goes_to_no_ejected_or_draining_host_and_to_none_twice() {
    let fleet = Fleet::start(4, Gpu::new().slots(100)).await;
    let hosts: Vec<Value> = (0..4).map(|n| json!({"address": fleet.addresses()[n].to_string(), "drain": n == 1})).collect();
    let keys = json!({"hosts": hosts, "alternates": 8, "failure": {"base_ejection_ms": 60_000}});
    let retry = json!({"retry_on": "5xx", "num_retries": 9, "retry_back_off": {"base_interval": "0.001s"}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).route(json!({"retry_policy": retry})).start().await;
    eject(&envoy, &fleet, 0).await;
    envoy.settled().await;
    fleet.clear_books();
    for host in &fleet[2..] {
        host.set(Fault::status(500).next(2));
    }
    for _ in 0..2 {
        assert_eq!(envoy.client().post("/prompt", "{}").await.status, 500);
    }
    assert_eq!(fleet.jobs(), [0, 0, 2, 2]);
    Load::burst(20).run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs()[..2], [0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_blamed_while_the_job_that_it_failed_runs_elsewhere() {
    let fleet = Fleet::start(2, Gpu::new().slots(100).work_ms(20_000)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    // Heavy enough to be the first choice whatever the penalty.
    let hosts = json!([{"address": one.to_string(), "weight": 1000}, {"address": two.to_string()}]);
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"hosts": hosts})).start().await;
    fleet[0].door(Door::Closed).await;
    let mut jobs = Vec::new();
    for failures in 1..=3 {
        jobs.push(envoy.client().post("/prompt", "{}").start().await);
        fleet[1].until("a retry brought it", |counts| counts.in_flight == failures).await;
        envoy.until("the first is blamed", |books| books[0]["failures"] == failures).await;
    }
    let books = envoy.books().await;
    assert_eq!((&books[0]["state"], &books[1]["failures"]), (&json!("ejected"), &json!(0)));
    assert_eq!((envoy.in_flight().await, fleet[1].in_flight()), (vec![0, 3], 3), "the leases are where the jobs are");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ejection_and_its_end_are_in_the_status_the_log_and_the_metrics() {
    let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
    let keys = json!({"failure": {"base_ejection_ms": 3000}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    let host = fleet.addresses()[1].to_string();
    let eligible = async || envoy.status().await["pools"]["gpu"]["eligible"].clone();
    let metric = async |name: &str| envoy.stats().await.get(&format!("wasmcustom.plimsoll.{name}")).copied();
    eject(&envoy, &fleet, 1).await;
    let books = envoy.books().await;
    assert_eq!(eligible().await, 2);
    assert!((1..=3300).contains(&books[1]["ejected_for_ms"].as_u64().expect("a time")), "{}", books[1]);
    assert_eq!((&books[1]["ejections"], &books[1]["reason"]), (&json!(1), &json!("failures")));
    for sound in [&books[0], &books[2]] {
        assert_eq!((&sound["ejections"], &sound["reason"], &sound["busy_for_ms"]), (&json!(0), &Value::Null, &json!(0)));
        assert_eq!(sound["penalty"].as_f64(), Some(1.0));
    }
    let told = format!("plimsoll: pool gpu: {host} is ejected for ");
    envoy.logged(&told).await;
    let log = envoy.log();
    let (seconds, why) = log.split_once(&told).expect("it is there").1.split_once(" s: ").expect("a time, and why");
    // What is left of it at the leader's next tick.
    assert!((2.8..=3.3).contains(&seconds.parse().unwrap_or(0.0)), "{seconds}");
    assert!(why.starts_with("3 failures in a row"), "{why}");
    let ejections = format!("ejections;pool=gpu;host={host};reason=failures");
    eventually("the ejection is counted", async || metric(&ejections).await == Some(1)).await;
    envoy.until_state(1, "probing").await;
    assert_eq!(eligible().await, 3);
    assert_eq!(envoy.client().post("/prompt", "{}").await.host().map(|host| host.to_string()), Some(host.clone()));
    envoy.until_state(1, "serving").await;
    envoy.logged(&format!("plimsoll: pool gpu: {host} serves again")).await;
    let readmissions = format!("readmissions;pool=gpu;host={host}");
    eventually("the readmission is counted", async || metric(&readmissions).await == Some(1)).await;
    assert_eq!(metric(&ejections).await, Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ejection_by_the_very_first_jobs_is_told_as_well() {
    // Streams begin, and with them who does what among the workers is settled.
    for _ in 0..4 {
        let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
        fleet[0].set(Fault::status(500).after(Duration::from_millis(30)));
        Load::burst(16).header("x-sim-ms", "30").run(&envoy).await;
        envoy.until_state(0, "ejected").await;
        let host = fleet.addresses()[0].to_string();
        envoy.logged(&format!("plimsoll: pool gpu: {host} is ejected for ")).await;
        let metric = format!("wasmcustom.plimsoll.ejections;pool=gpu;host={host};reason=failures");
        eventually("it is counted", async || envoy.stats().await.get(&metric) == Some(&1)).await;
    }
}
