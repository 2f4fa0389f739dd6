//! A host that joins a pool at work is not swamped: it is as fast, and as sound, as nobody knows yet.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Endpoint, Envoy, Fleet, Gpu, Load, RunningEnvoy, eventually};

use crate::fleet::{all_workers_know, follow, launch};

/// Jobs of 300 to 700 ms, so that they do not all end, and begin, at the same time. A hundred of them at once are 200 a second.
fn uneven(load: Load) -> Load {
    load.each(|n, shot| shot.call.add_header("x-sim-ms", (300 + n * 77 % 400).to_string()))
}

/// Every arrival at the fleet from this moment on, in its order: of the newcomer, which is the last host, or of another.
fn arrivals(fleet: &Fleet, from: Instant) -> Vec<(Instant, bool)> {
    let mut all: Vec<(Instant, bool)> = Vec::new();
    for (n, host) in fleet.iter().enumerate() {
        all.extend(host.requests().iter().map(|seen| (seen.arrived, n + 1 == fleet.len())).filter(|(at, _)| *at >= from));
    }
    all.sort();
    all
}

/// The share of the newcomer among what arrived between these times.
fn share(arrivals: &[(Instant, bool)], from: Instant, to: Instant) -> f64 {
    let there: Vec<bool> = arrivals.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, newcomer)| *newcomer).collect();
    assert!(there.len() > 50, "{} jobs say nothing of a share", there.len());
    there.iter().filter(|newcomer| **newcomer).count() as f64 / there.len() as f64
}

/// Lets the last host join, and gives the last moment at which it was not in the books yet.
async fn join(envoy: &RunningEnvoy, endpoints: Vec<Endpoint>) -> Instant {
    let hosts = endpoints.len();
    let mut not_yet = envoy.set_endpoints(endpoints).await;
    loop {
        let now = Instant::now();
        if envoy.books().await.len() == hosts {
            return not_yet;
        }
        not_yet = now;
    }
}

/// Panics where the newcomer's first hundred jobs are more than 1.5 times its fair share of what has come since it joined.
async fn assert_fair(fleet: &Fleet, joined: Instant, share: f64) {
    fleet.last().expect("a host").until("it has had its first jobs", |counts| counts.jobs >= 150).await;
    let arrivals = arrivals(fleet, joined);
    let numbers = arrivals.iter().enumerate().filter(|(_, (_, newcomer))| *newcomer).map(|(n, _)| n + 1);
    for (of_newcomer, of_all) in (1..=100).zip(numbers) {
        // Jobs overtake each other on their way.
        let fair = 1.5 * share * of_all as f64 + 2.0;
        assert!(f64::from(of_newcomer) <= fair, "it had {of_newcomer} of the first {of_all} jobs");
    }
}

/// A fifth host joins four that have this load.
async fn joins_under(load: Load) {
    let fleet = Fleet::start(5, Gpu::new().slots(100)).await;
    let envoy = follow(&fleet, 4, json!({})).await;
    let load = uneven(load).start(&envoy);
    eventually("the load runs", async || fleet.in_flight().iter().sum::<u64>() >= 90).await;
    let joined = join(&envoy, fleet.addresses().into_iter().map(Into::into).collect()).await;
    assert_fair(&fleet, joined, 1.0 / 5.0).await;
    load.await.expect("the load ran").assert_served();
    // Later it is a host like the others.
    let all = arrivals(&fleet, joined);
    let end = all.last().expect("jobs").0;
    let later = share(&all, end - Duration::from_secs(2), end);
    assert!((0.15..=0.25).contains(&later), "its share is {later}");
    envoy.settled().await;
    assert_eq!(envoy.pool_status().await["drift"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_joins_gets_its_share_and_no_rush_where_clients_wait_for_answers() {
    joins_under(Load::burst(1800).pool(100)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_joins_gets_its_share_and_no_rush_where_clients_do_not_wait() {
    joins_under(Load::rate(200.0, 1800).pool(150)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_heavy_newcomer_has_a_heavy_share_and_no_rush() {
    let fleet = Fleet::start(4, Gpu::new().slots(200)).await;
    let keys = json!({"discovery": {"cluster": "envoy_admin"}, "max_in_flight": 200});
    let envoy = Envoy::new("http2.yaml").endpoints(fleet.addresses()[..3].to_vec()).pool(keys).admin_cluster();
    // One worker knows it at once, or not at all.
    let envoy = launch(envoy.workers(1), 3).await;
    let load = uneven(Load::burst(1200).pool(100)).start(&envoy);
    eventually("the load runs", async || fleet.in_flight().iter().sum::<u64>() >= 90).await;
    let mut endpoints: Vec<Endpoint> = fleet.addresses().into_iter().map(Into::into).collect();
    endpoints[3] = endpoints[3].weight(3);
    let joined = join(&envoy, endpoints).await;
    assert_fair(&fleet, joined, 3.0 / 6.0).await;
    load.await.expect("the load ran").assert_served();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newcomer_gets_all_that_the_others_have_no_slot_for() {
    let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
    let envoy = follow(&fleet, 2, json!({"max_in_flight": 6})).await;
    let full = Load::burst(12).header("x-sim-ms", "6000").start(&envoy);
    eventually("they are full", async || envoy.in_flight().await == [6, 6]).await;
    envoy.set_endpoints(fleet.addresses()).await;
    envoy.until("it is there", |books| books.len() == 3).await;
    all_workers_know().await;
    let report = Load::burst(8).header("x-sim-ms", "500").run(&envoy).await;
    assert_eq!((report.status(200), report.status(503), fleet[2].jobs()), (6, 2, 6), "\n{report}");
    full.await.expect("the load ran").assert_served();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_hosts_of_a_pool_are_no_newcomers() {
    let fleet = Fleet::start(4, Gpu::new().slots(100)).await;
    let envoy = follow(&fleet, 4, json!({"slow_start_ms": 60_000})).await;
    Load::burst(40).header("x-sim-ms", "300").run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [10, 10, 10, 10]);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_slow_start_a_newcomers_share_grows_with_time() {
    let fleet = Fleet::start(4, Gpu::new().slots(100)).await;
    let envoy = follow(&fleet, 3, json!({"slow_start_ms": 6000})).await;
    let load = uneven(Load::burst(2000).pool(100)).start(&envoy);
    eventually("the load runs", async || fleet.in_flight().iter().sum::<u64>() >= 90).await;
    envoy.set_endpoints(fleet.addresses()).await;
    eventually("it has jobs", async || !fleet[3].requests().is_empty()).await;
    let began = fleet[3].requests()[0].arrived;
    load.await.expect("the load ran").assert_served();
    let all = arrivals(&fleet, began);
    let at = |from: f64, to: f64| share(&all, began + Duration::from_secs_f64(from), began + Duration::from_secs_f64(to));
    // A quarter is its fair share; at a tenth and a quarter of its weight it has a thirtieth and a thirteenth.
    let (first, then, later) = (at(0.0, 1.5), at(2.5, 4.0), at(7.0, 9.0));
    assert!(first < later / 2.0, "{first}, {then}, {later}");
    assert!(then < later, "{first}, {then}, {later}");
    assert!((0.18..=0.32).contains(&later), "{first}, {then}, {later}");
    let weights: Vec<Value> = envoy.column("weight").await;
    assert_eq!(weights.iter().map(Value::as_f64).collect::<Vec<_>>(), [Some(1.0); 4], "the ramp is over");
    envoy.settled().await;
}
