//! Sessions: jobs of one key go to one host, which has what they need in its cache, while it has room.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use serde_json::{Value, json};
use support::{Envoy, Fleet, Gpu, Load, Pool, RunningEnvoy};

fn with_sessions(keys: Value) -> Value {
    let mut pool = json!({"session": {"header": "x-session"}, "max_in_flight": 1000, "explain": "header"});
    pool.as_object_mut().expect("an object").extend(keys.as_object().expect("a pool is an object").clone());
    pool
}

fn envoy(fleet: &Fleet, keys: Value) -> Envoy {
    Envoy::new("http2.yaml").hosts(fleet).pool(with_sessions(keys)).keys(json!({"trusted_headers": true}))
}

/// The hosts of each of so many keys, after so many jobs of each.
async fn homes(envoy: &RunningEnvoy, pool: &Pool, keys: usize, jobs: usize) -> Vec<BTreeSet<SocketAddr>> {
    let load = Load::one_by_one(keys * jobs).each(|n, shot| shot.call.add_header("x-session", format!("key {}", n % keys)));
    let report = load.over(pool).run(envoy).await;
    report.assert_served();
    let mut homes = vec![BTreeSet::new(); keys];
    for served in &report.served {
        homes[served.number % keys].insert(served.host.expect("a host"));
    }
    homes
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_key_go_to_one_host_and_one_that_drains_moves_its_own_keys_only() {
    const KEYS: usize = 120;
    let fleet = Fleet::start(4, Gpu::new().slots(100).remember(0)).await;
    let envoy = envoy(&fleet, json!({})).workers(4).live().start().await;
    let pool = envoy.pool_over_workers(8).await;
    let before = homes(&envoy, &pool, KEYS, 5).await;
    assert!(before.iter().all(|hosts| hosts.len() == 1), "{before:?}");
    // Thirty on each, give or take three times what chance does.
    let mut keys: BTreeMap<SocketAddr, usize> = BTreeMap::new();
    before.iter().flatten().for_each(|host| *keys.entry(*host).or_default() += 1);
    assert!(keys.len() == 4 && keys.values().all(|keys| (12..=50).contains(keys)), "{keys:?}");
    let reply = envoy.client().post("/prompt", "{}").header("x-session", "key 0").await;
    assert!(reply.header("x-plimsoll-why").is_some_and(|why| why.contains(" session=kept")), "{:?}", reply.headers);
    let reply = envoy.client().post("/prompt", "{}").await;
    assert!(reply.header("x-plimsoll-why").is_some_and(|why| !why.contains("session")), "{:?}", reply.headers);

    let drained = fleet[2].address();
    let host = |at: &SocketAddr| json!({"address": at.to_string(), "drain": *at == drained});
    let hosts: Vec<Value> = fleet.addresses().iter().map(host).collect();
    envoy.reload_pool(with_sessions(json!({"hosts": hosts}))).await.expect("taken up");
    envoy.until_state(2, "draining").await;
    let after = homes(&envoy, &pool, KEYS, 3).await;
    for (key, (before, after)) in before.iter().zip(&after).enumerate() {
        assert_eq!(after.len(), 1, "key {key}: {after:?}");
        assert!(!after.contains(&drained), "key {key}");
        assert!(before.contains(&drained) || before == after, "key {key} was at {before:?} and is at {after:?}");
    }
    let moved: BTreeSet<_> =
        before.iter().zip(&after).filter(|(before, _)| before.contains(&drained)).map(|(_, after)| after).collect();
    assert_eq!(moved.len(), 3, "its keys are spread over all that are left");
    envoy
        .reload_pool(with_sessions(
            json!({"hosts": fleet.addresses().iter().map(|at| json!({"address": at.to_string()})).collect::<Vec<_>>()}),
        ))
        .await
        .expect("taken up");
    envoy.until_state(2, "serving").await;
    let again = homes(&envoy, &pool, KEYS, 1).await;
    let is_back = before.iter().zip(&again).filter(|(before, again)| before == again).count();
    // It has joined anew, and gets no more than its share at first.
    assert!(is_back > KEYS * 3 / 4, "{is_back} of {KEYS} are where they were");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hot_key_fills_no_host_above_its_bound() {
    let fleet = Fleet::start(4, Gpu::new().slots(1000).remember(0)).await;
    for (bound, most) in [(json!({"header": "x-session"}), 32), (json!({"header": "x-session", "bound": 2.0}), 50)] {
        let envoy = envoy(&fleet, json!({"session": bound})).start().await;
        let pool = envoy.pool_over_workers(100).await;
        let home = homes(&envoy, &pool, 1, 3).await[0].first().copied().expect("a host");
        fleet.clear_books();
        let load = Load::burst(100).header("x-session", "key 0").header("x-sim-ms", "1200");
        let report = load.over(&pool).run(&envoy).await;
        report.assert_served();
        // bound × (all of them) / 4, rounded up.
        assert!(fleet.max_in_flight().iter().all(|jobs| *jobs <= most), "{bound}: {:?}", fleet.max_in_flight());
        let jobs = fleet.jobs();
        let own = report.hosts()[&home];
        assert!(own as u64 >= most - 3 && jobs.iter().all(|jobs| *jobs <= own as u64), "{bound}: {own} of {jobs:?}");
        envoy.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_queue_a_key_keeps_its_host_while_that_is_free_and_waits_for_no_host() {
    let fleet = Fleet::start(4, Gpu::new().remember(0)).await;
    for policy in ["least_score", "least_time"] {
        let keys = json!({"policy": policy, "queue": {}, "max_in_flight": 1, "alternates": 0});
        let envoy = envoy(&fleet, keys).start().await;
        let pool = envoy.pool_over_workers(40).await;
        let before = homes(&envoy, &pool, 24, 3).await;
        assert!(before.iter().all(|hosts| hosts.len() == 1), "{policy}: {before:?}");
        fleet.clear_books();
        let load = Load::burst(40).header("x-session", "key 0").header("x-sim-ms", "40");
        load.over(&pool).run(&envoy).await.assert_served();
        assert_eq!(fleet.max_in_flight(), [1; 4], "{policy}");
        assert!(fleet.jobs().iter().all(|jobs| *jobs >= 4), "{policy}: {:?}", fleet.jobs());
        assert_eq!(homes(&envoy, &pool, 24, 1).await, before, "{policy}");
        envoy.settled().await;
    }
}
