//! A pool that follows its cluster, endpoints from a file, through Envoy's own admin interface: hosts come, drain, leave and return.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{AdminPage, Endpoint, Envoy, Fault, Fleet, Gpu, GpuHost, Load, RunningEnvoy, eventually};

use crate::discovery::{entry, often, page_of};

/// How soon after an update of Envoy's endpoints the traffic has followed.
pub const SOON: Duration = Duration::from_secs(2);

/// An Envoy that begins with the first of the hosts; the others are there, and unknown to it.
pub async fn follow(fleet: &Fleet, first: usize, mut keys: Value) -> RunningEnvoy {
    keys["discovery"] = json!({"cluster": "envoy_admin"});
    launch(Envoy::new("http2.yaml").endpoints(fleet.addresses()[..first].to_vec()).pool(keys).admin_cluster(), first).await
}

/// Starts an Envoy whose pool follows so many hosts.
pub async fn launch(envoy: Envoy, hosts: usize) -> RunningEnvoy {
    let envoy = envoy.start().await;
    envoy.until("the cluster is known", |books| books.len() == hosts).await;
    all_workers_know().await;
    envoy
}

/// What one worker has written the others use with their next tick, and nothing tells when all have.
pub async fn all_workers_know() {
    tokio::time::sleep(Duration::from_millis(300)).await;
}

/// Jobs that came to a host later than this.
pub fn after(host: &GpuHost, time: Instant) -> usize {
    host.requests().iter().filter(|seen| seen.arrived > time).count()
}

/// The states of all entries of an address, in the order of the books.
fn states(books: &[Value], address: SocketAddr) -> Vec<&str> {
    let address = address.to_string();
    books.iter().filter(|host| host["address"] == *address).map(|host| host["state"].as_str().expect("a state")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_added_gets_jobs_within_two_seconds() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(20)).await;
    let envoy = follow(&fleet, 3, json!({})).await;
    let clients = envoy.pool_over_workers(8).await;
    let load = Load::rate(100.0, 100).over(&clients).repeat(&envoy);
    eventually("the load runs", async || fleet.jobs()[..3].iter().all(|jobs| *jobs > 10)).await;
    let written = envoy.set_endpoints(fleet.addresses()).await;
    fleet[3].until("it has jobs", |counts| counts.jobs > 10).await;
    let first = fleet[3].requests()[0].arrived - written;
    assert!(first < SOON, "its first job came after {first:?}");
    let report = load.end().await;
    report.assert_served();
    envoy.settled().await;
    // Every job is in the books of the host that served it.
    let pool = envoy.pool_status().await;
    let books = pool["hosts"].as_array().expect("hosts");
    let counted: Vec<&Value> = fleet.iter().map(|host| &entry(books, host.address())["requests"]).collect();
    assert_eq!(counted, fleet.jobs().iter().collect::<Vec<_>>());
    assert_eq!(fleet.jobs().iter().sum::<u64>(), report.served.len() as u64);
    let zeros = ["drift", "overruled", "elsewhere"].map(|name| pool[name].clone());
    assert_eq!((zeros, &pool["discovery"]["hosts"]), ([json!(0), json!(0), json!(0)], &json!(4)));
    let came = format!("plimsoll: pool gpu: Envoy's cluster has 4 hosts: {} came", fleet[3].address());
    assert_eq!(envoy.log().matches(&came).count(), 1, "{came}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_drains_gets_no_job_after_two_seconds_and_ends_what_it_has() {
    let fleet = Fleet::start(3, Gpu::new().slots(100).work_ms(20)).await;
    let [one, two, three] = fleet.addresses()[..] else { unreachable!("three hosts") };
    let envoy = follow(&fleet, 3, json!({})).await;
    let clients = envoy.pool_over_workers(8).await;
    let long = Load::burst(6).header("x-sim-ms", "5000").start(&envoy);
    eventually("six run", async || envoy.in_flight().await == [2, 2, 2]).await;
    let load = Load::rate(100.0, 100).over(&clients).repeat(&envoy);
    let written = envoy.set_endpoints([Endpoint::at(one).health("DRAINING"), two.into(), three.into()]).await;
    let of = |books: &[Value]| entry(books, one).clone();
    envoy.until("it drains", |books| of(books)["state"] == "draining" && of(books)["in_flight"] == 2).await;
    envoy.until("it is empty", |books| of(books)["in_flight"] == 0).await;
    long.await.expect("the load ran").assert_served();
    assert!(written.elapsed() > SOON, "the long jobs were not long enough to show anything");
    assert_eq!(after(&fleet[0], written + SOON), 0, "jobs came to a host that drains");
    // It stays a member, and is the same host when it is well again.
    let requests = of(&envoy.books().await)["requests"].as_u64().expect("a count");
    envoy.set_endpoints([one, two, three]).await;
    envoy.until("it serves again", |books| of(books)["state"] == "serving").await;
    envoy.until("it gets jobs", |books| of(books)["requests"].as_u64() > Some(requests)).await;
    load.end().await.assert_served();
    envoy.settled().await;
    assert_eq!(envoy.pool_status().await["drift"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_removed_under_load_loses_no_job_and_is_gone_with_its_last() {
    for file in ["http2.yaml", "http1.yaml"] {
        let fleet = Fleet::start(3, Gpu::new().slots(200)).await;
        let [one, two, three] = fleet.addresses()[..] else { unreachable!("three hosts") };
        let keys = json!({"discovery": {"cluster": "envoy_admin"}, "max_in_flight": 200});
        let envoy = launch(Envoy::new(file).endpoints(fleet.addresses()).pool(keys).admin_cluster(), 3).await;
        let load = Load::rate(40.0, 320).header("x-sim-ms", "3000").http2(8).start(&envoy);
        fleet[0].until("many run", |counts| counts.running >= 25).await;
        let written = envoy.set_endpoints([two, three]).await;
        let leaving = envoy.until("it drains", |books| states(books, one) == ["draining"]).await;
        let running = entry(&leaving, one)["in_flight"].as_u64();
        assert!(running >= Some(20), "{running:?} jobs run on the host that leaves");
        envoy.until("it is gone", |books| states(books, one).is_empty()).await;
        assert_eq!(fleet[0].in_flight(), 0, "gone, and jobs run on it");
        assert_eq!(after(&fleet[0], written + SOON), 0, "jobs came to a host that was removed");
        let report = load.await.expect("the load ran");
        report.assert_served();
        assert_eq!(fleet.jobs().iter().sum::<u64>(), 320);
        envoy.settled().await;
        let pool = envoy.pool_status().await;
        assert_eq!((&pool["drift"], &pool["discovery"]["hosts"]), (&json!(0), &json!(2)));
        envoy.logged(&format!("plimsoll: pool gpu: Envoy's cluster has 2 hosts: {one} left")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_comes_back_is_another_generation() {
    let fleet = Fleet::start(2, Gpu::new().slots(50).work_ms(20)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let envoy = follow(&fleet, 2, json!({"discovery": often()})).await;
    let running = Load::burst(10).header("x-sim-ms", "8000").start(&envoy);
    eventually("ten run", async || envoy.in_flight().await == [5, 5]).await;
    envoy.set_endpoints([one]).await;
    envoy.until("the second is leaving", |books| states(books, two) == ["draining"]).await;
    assert_eq!(envoy.in_flight().await, [5, 5]);
    envoy.set_endpoints([one, two]).await;
    envoy.until("it is back, anew", |books| states(books, two) == ["draining", "serving"]).await;
    assert_eq!(envoy.in_flight().await, [5, 5, 0]);
    Load::burst(4).run(&envoy).await.assert_served();
    envoy.until("the four have ended", |books| books[2]["in_flight"] == 0 && books[1]["in_flight"] == 5).await;
    running.await.expect("the load ran").assert_served();
    envoy.until("the old one is gone", |books| states(books, two) == ["serving"]).await;
    envoy.settled().await;
    assert_eq!(envoy.pool_status().await["drift"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_was_ejected_comes_back_without_a_past() {
    let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
    let keys = json!({"discovery": often(), "failure": {"base_ejection_ms": 60_000}});
    let envoy = launch(Envoy::new("http2.yaml").endpoints(fleet.addresses()).pool(keys).admin_cluster(), 3).await;
    let host = fleet.addresses()[0];
    fleet[0].set(Fault::status(500).after(Duration::from_millis(200)));
    Load::burst(12).header("x-sim-ms", "200").run(&envoy).await;
    envoy.until("it is ejected", |books| states(books, host) == ["ejected"]).await;
    fleet[0].clear();
    envoy.set_endpoints(fleet.addresses()[1..].to_vec()).await;
    envoy.until("it is gone", |books| states(books, host).is_empty()).await;
    envoy.set_endpoints(fleet.addresses()).await;
    envoy.until("it is back", |books| states(books, host) == ["serving"]).await;
    let books = envoy.books().await;
    let past = ["ejections", "failures", "requests", "ewma_ms"].map(|name| entry(&books, host)[name].clone());
    assert_eq!(past, [json!(0), json!(0), json!(0), Value::Null]);
    eventually("it gets jobs", async || {
        Load::burst(12).run(&envoy).await.assert_served();
        entry(&envoy.books().await, host)["requests"].as_u64() > Some(0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_loaded_anew_knows_the_hosts_though_nobody_can_be_asked() {
    let (fleet, page) = (Fleet::start(3, Gpu::new().slots(100)).await, AdminPage::start().await);
    page.show(page_of(fleet.iter()));
    let module = format!("{}/../dist/plimsoll-trap.wasm", env!("CARGO_MANIFEST_DIR"));
    let envoy = Envoy::new("http2.yaml").endpoints(fleet.addresses()).pool(json!({"discovery": often()})).module(module);
    let envoy = launch(envoy.other_cluster("envoy_admin", &page), 3).await;
    page.close().await;
    for round in 1..=4 {
        // Envoy loads a VM anew at most once a second, and refuses what comes before.
        eventually("a worker's VM has died", async || {
            envoy.client().post("/prompt", "{}").header("x-trap", "1").await;
            envoy.log().matches("Function: proxy_on_request_headers failed").count() as u64 >= round
        })
        .await;
        let clients = envoy.pool_over_workers(12).await;
        eventually("it is loaded anew", async || Load::burst(12).over(&clients).run(&envoy).await.status(200) == 12).await;
        let before = fleet.jobs();
        Load::burst(12).header("x-sim-ms", "300").over(&clients).run(&envoy).await.assert_served();
        let jobs: Vec<u64> = fleet.jobs().iter().zip(before).map(|(now, before)| now - before).collect();
        // The leases of the jobs that trapped are given back only later, and weigh until then.
        assert!(jobs.iter().all(|jobs| (2..=6).contains(jobs)), "round {round}: {jobs:?}");
    }
    envoy.settled().await;
    let pool = envoy.pool_status().await;
    assert_eq!((&pool["unleased"], &pool["overruled"], &pool["discovery"]["hosts"]), (&json!(0), &json!(0), &json!(3)));
    let counted: u64 = pool["hosts"].as_array().expect("hosts").iter().filter_map(|host| host["requests"].as_u64()).sum();
    let traps = envoy.log().matches("Function: proxy_on_request_headers failed").count() as u64;
    assert_eq!(counted, fleet.jobs().iter().sum::<u64>() + traps, "every job had a lease when it was placed");
}

/// The cluster, where Envoy itself looks after its hosts' health.
fn looked_after(fleet: &Fleet, cluster: Value) -> Envoy {
    // Our own three failures eject nobody, so that what is seen is Envoy's doing.
    let keys = json!({"discovery": often(), "failure": {"consecutive": 1000}});
    Envoy::new("http2.yaml").endpoints(fleet.addresses()).pool(keys).cluster(cluster).admin_cluster()
}

/// While the first host is unhealthy: it gets no job, and when it is well again, it does.
async fn is_left_alone_until_well(envoy: &RunningEnvoy, fleet: &Fleet, heal: impl FnOnce()) {
    let host = fleet[0].address();
    envoy.until("Envoy's view is ours", |books| entry(books, host)["state"] == "unhealthy").await;
    fleet.clear_books();
    Load::burst(20).header("x-sim-ms", "200").run(envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [0, 10, 10]);
    heal();
    envoy.until("it is well again", |books| entry(books, host)["state"] == "serving").await;
    fleet.clear_books();
    // Enough for one that is penalised for its failures.
    Load::burst(90).header("x-sim-ms", "200").run(envoy).await.assert_served();
    assert!(fleet.jobs()[0] > 0, "{:?}", fleet.jobs());
    let books = envoy.books().await;
    assert_eq!(entry(&books, host)["ejections"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_fails_envoys_health_checks_is_unhealthy_until_it_passes_them() {
    let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
    let check = json!({"timeout": "1s", "interval": "0.2s", "no_traffic_interval": "0.2s", "unhealthy_threshold": 2,
        "healthy_threshold": 2, "http_health_check": {"path": "/health"}});
    let envoy = launch(looked_after(&fleet, json!({"health_checks": [check]})), 3).await;
    envoy.until("all are well", |books| books.iter().all(|host| host["state"] == "serving")).await;
    fleet[0].set_health(Some(503));
    is_left_alone_until_well(&envoy, &fleet, || fleet[0].set_health(Some(200))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_envoys_outlier_detection_ejects_is_unhealthy_until_it_is_let_in_again() {
    let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
    let outliers = json!({"consecutive_5xx": 3, "interval": "0.5s", "base_ejection_time": "3s", "max_ejection_percent": 50,
        "enforcing_success_rate": 0, "enforcing_consecutive_gateway_failure": 0});
    let envoy = launch(looked_after(&fleet, json!({"outlier_detection": outliers})), 3).await;
    fleet[0].set(Fault::status(500).after(Duration::from_millis(100)));
    let report = Load::burst(12).header("x-sim-ms", "200").run(&envoy).await;
    assert_eq!(report.status(500), 4, "\n{report}");
    fleet[0].clear();
    is_left_alone_until_well(&envoy, &fleet, || {}).await;
}
