//! `weighted`: at random, by what hosts tell of themselves.

use serde_json::{Value, json};
use support::{Envoy, Fleet, Gpu, GpuHost, Load, Pool, RunningEnvoy, eventually};

async fn start(fleet: &Fleet, keys: Value) -> (RunningEnvoy, Pool) {
    let mut pool = json!({"policy": "weighted"});
    pool.as_object_mut().expect("an object").extend(keys.as_object().expect("a pool is an object").clone());
    let envoy = Envoy::new("http2.yaml").hosts(fleet).pool(pool).start().await;
    let pool = envoy.pool_over_workers(20).await;
    (envoy, pool)
}

fn tells(host: &GpuHost, memory: f64, compute: f64) {
    host.tell(&[("endpoint-load-metrics", format!("TEXT mem_utilization={memory}, application_utilization={compute}"))]);
}

/// Twenty at once, each of them 150 ms long, are five on each of four: least in-flight.
async fn is_least_in_flight(fleet: &Fleet, envoy: &RunningEnvoy, pool: &Pool) -> bool {
    fleet.clear_books();
    Load::burst(20).header("x-sim-ms", "150").over(pool).run(envoy).await.assert_served();
    fleet.jobs() == [5, 5, 5, 5]
}

/// Panics unless the shares of so many jobs are these, to within 15 %.
async fn has_shares(fleet: &Fleet, envoy: &RunningEnvoy, pool: &Pool, chances: &[f64]) {
    fleet.clear_books();
    // Of four hundred, chance alone would make a share of a seventh err by as much once in five times.
    const JOBS: usize = 5000;
    Load::burst(JOBS).over(pool).run(envoy).await.assert_served();
    let sum: f64 = chances.iter().sum();
    for (host, chance) in chances.iter().enumerate() {
        let (expected, seen) = (JOBS as f64 * chance / sum, fleet[host].jobs() as f64);
        assert!((0.85..=1.15).contains(&(seen / expected)), "host {host}: {seen}, expected {expected}: {:?}", fleet.jobs());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_follow_the_formula_and_a_host_that_tells_nothing_counts_as_the_mean() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).remember(0)).await;
    let (envoy, pool) = start(&fleet, json!({"telemetry": {}})).await;
    for _ in 0..10 {
        assert!(is_least_in_flight(&fleet, &envoy, &pool).await, "nobody tells anything: {:?}", fleet.jobs());
    }
    for (host, used) in fleet.iter().zip([[0.1, 0.1], [0.6, 0.4], [0.8, 0.7]]) {
        tells(host, used[0], used[1]);
    }
    Load::burst(40).over(&pool).run(&envoy).await.assert_served();
    envoy.until("three tell", |hosts| hosts.iter().filter(|host| host["told"].is_object()).count() == 3).await;
    let chance = |memory: f64, compute: f64| 0.4 * (1.0 - memory) + 0.4 * (1.0 - compute) + 0.2;
    // Latencies of a few milliseconds are nothing beside a second.
    let chances = [chance(0.1, 0.1), chance(0.6, 0.4), chance(0.8, 0.7), chance(0.5, 0.4)];
    has_shares(&fleet, &envoy, &pool, &chances).await;
    envoy.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_parts_count_what_the_configuration_says_and_a_host_at_its_limit_gets_nothing() {
    let fleet = Fleet::start(3, Gpu::new().slots(100).remember(0)).await;
    for (host, used) in fleet.iter().zip([[0.9, 0.0], [0.5, 1.0], [0.0, 1.0]]) {
        tells(host, used[0], used[1]);
    }
    let keys = json!({"telemetry": {}, "weighted": {"memory": 1, "compute": 0, "latency": 0}, "max_in_flight": 8});
    let (envoy, pool) = start(&fleet, keys).await;
    Load::burst(12).header("x-sim-ms", "50").over(&pool).run(&envoy).await.assert_served();
    envoy.until("all tell", |hosts| hosts.iter().all(|host| host["told"].is_object())).await;
    // One at a time, so that no host is full.
    fleet.clear_books();
    Load::one_by_one(1500).over(&pool).run(&envoy).await.assert_served();
    let jobs = fleet.jobs();
    for (host, expected) in [0.1 / 1.6, 0.5 / 1.6, 1.0 / 1.6].into_iter().enumerate() {
        let share = jobs[host] as f64 / 1500.0;
        assert!((share - expected).abs() < 0.05, "host {host}: {share}, expected {expected}: {jobs:?}");
    }
    let full = Load::burst(20).header("x-sim-ms", "400").over(&pool).run(&envoy).await;
    full.assert_served();
    assert!(fleet.max_in_flight().iter().all(|most| *most <= 8), "{:?}", fleet.max_in_flight());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_stale_is_unknown_and_jobs_go_on() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).remember(0)).await;
    let page = |used: f64| format!("memory {used}\ncompute {used}\n");
    let tell = |used: [f64; 4]| fleet.iter().zip(used).for_each(|(host, used)| host.set_page("/metrics", 200, page(used)));
    tell([1.0, 0.0, 0.0, 0.0]);
    let metrics = json!({"memory": "memory", "compute": "compute"});
    let scrape = json!({"interval_ms": 200, "timeout_ms": 200, "metrics": metrics});
    let (envoy, pool) = start(&fleet, json!({"telemetry": {"orca": false, "scrape": scrape}})).await;
    let all_are_told =
        |hosts: &[Value]| hosts.iter().all(|host| host["told"]["parts_age_ms"].as_u64().is_some_and(|age| age < 700));
    envoy.until("all are told of", all_are_told).await;
    fleet.clear_books();
    Load::burst(600).over(&pool).run(&envoy).await.assert_served();
    // 0.2 of 3.2, which is 37: and a third of the rest for each of the others.
    assert!((10..=75).contains(&fleet[0].jobs()), "{:?}", fleet.jobs());
    // Three intervals and a timeout are 0.8 s.
    fleet.iter().for_each(|host| host.set_page("/metrics", 404, "gone"));
    let are_stale = |hosts: &[Value]| hosts.iter().all(|host| host["told"]["parts_age_ms"].as_u64().is_some_and(|age| age > 800));
    let going_on = Load::rate(50.0, 100).over(&pool).start(&envoy);
    envoy.until("all of it is stale", are_stale).await;
    going_on.await.expect("the load ran").assert_served();
    for _ in 0..5 {
        assert!(is_least_in_flight(&fleet, &envoy, &pool).await, "{:?}", fleet.jobs());
    }
    tell([0.0, 1.0, 1.0, 1.0]);
    envoy.until("all are told of again", all_are_told).await;
    eventually("it counts", async || {
        fleet.clear_books();
        Load::burst(300).over(&pool).run(&envoy).await.assert_served();
        fleet[0].jobs() > 120
    })
    .await;
}
