//! Hosts are asked whether they are well, by one of us, and connections are kept warm.

use std::time::Duration;

use serde_json::{Value, json};
use support::{Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy, eventually};

use crate::ejection::eject;

fn often() -> Value {
    json!({"path": "/health", "interval_ms": 200, "timeout_ms": 1000, "unhealthy_after": 3, "healthy_after": 2})
}

async fn start(hosts: usize, keys: Value) -> (Fleet, RunningEnvoy) {
    let fleet = Fleet::start(hosts, Gpu::new().slots(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).live().start().await;
    (fleet, envoy)
}

fn checks(fleet: &Fleet) -> u64 {
    fleet.iter().map(|host| host.counts().health_checks).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_probes_fail_gets_no_job_until_they_succeed() {
    for file in ["http2.yaml", "http1.yaml"] {
        let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
        let envoy = Envoy::new(file).hosts(&fleet).pool(json!({"probe": often()})).start().await;
        let host = fleet.addresses()[1];
        // A status that is not 2xx; one that is late; nobody there.
        for round in 0..3 {
            match round {
                0 => fleet[1].set_health(Some(503)),
                1 => fleet[1].set_health(None),
                _ => fleet[1].stop().await,
            }
            envoy.until_state(1, "unhealthy").await;
            assert_eq!(envoy.status().await["pools"]["gpu"]["eligible"], 2);
            let before = fleet[1].jobs();
            let load = Load::rate(100.0, 50).repeat(&envoy);
            tokio::time::sleep(Duration::from_millis(600)).await;
            assert_eq!(fleet[1].jobs(), before, "an unhealthy host got a job");
            fleet[1].set_health(Some(200));
            fleet[1].restart().await;
            envoy.until_state(1, "serving").await;
            eventually("it gets jobs", async || fleet[1].jobs() > before).await;
            load.end().await.assert_served();
        }
        let (ill, well) = (format!("{host} is unhealthy: 3 probes failed in a row"), format!("{host} is healthy again"));
        let lines = |line: &str| envoy.log().matches(line).count();
        eventually("the log says it", async || lines(&well) == 3).await;
        assert_eq!((lines(&ill), lines(&well)), (3, 3), "once for each time");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_us_probes_and_probes_are_no_jobs() {
    let fleet = Fleet::start(2, Gpu::new()).await;
    let keys = json!({"probe": {"path": "/health", "interval_ms": 500}, "max_in_flight": 1});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).workers(4).start().await;
    // Every worker has served, so that every worker knows the pool.
    let clients = envoy.pool_over_workers(16).await;
    Load::one_by_one(32).over(&clients).run(&envoy).await.assert_served();
    eventually("they are probed", async || fleet.iter().all(|host| host.counts().health_checks > 0)).await;
    fleet.clear_books();
    for _ in 0..40 {
        assert_eq!(envoy.in_flight().await, [0, 0]);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for host in fleet.iter() {
        // Four seconds and a bit. If each of the five threads probed, there would be forty.
        let checks = host.counts().health_checks;
        assert!((4..=14).contains(&checks), "{checks} probes in 4 s, one each 0.5 s");
    }
    let requests: u64 = envoy.column("requests").await.iter().map(|count| count.as_u64().expect("a count")).sum();
    assert_eq!(requests, 32);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unhealthy_pool_answers_no_host_and_a_reload_without_probes_ends_that() {
    let (fleet, envoy) = start(2, json!({"probe": often()})).await;
    fleet.iter().for_each(|host| host.set_health(Some(500)));
    envoy.until("both are unhealthy", |books| books.iter().all(|host| host["state"] == "unhealthy")).await;
    let reply = envoy.client().post("/prompt", "{}").await;
    assert_eq!((reply.status, reply.header("x-plimsoll-verdict")), (503, Some("no_host")));
    assert!(reply.header("retry-after").is_some());
    let gauge = async || envoy.stats().await.get("wasmcustom.plimsoll.no_host;pool=gpu").copied();
    eventually("the gauge is up", async || gauge().await == Some(1)).await;
    envoy.logged("plimsoll: pool gpu: no host is eligible").await;
    envoy.reload_pool(json!({})).await.expect("accepted");
    envoy.until("both serve", |books| books.iter().all(|host| host["state"] == "serving")).await;
    Load::burst(20).run(&envoy).await.assert_served();
    eventually("the gauge is down", async || gauge().await == Some(0)).await;
    envoy.logged("plimsoll: pool gpu: a host is eligible again").await;
    // Nobody asks any more; what was under way may still come.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = checks(&fleet);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(checks(&fleet), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healed_host_that_was_ejected_gets_its_trial_at_once() {
    let keys = json!({"probe": often(), "failure": {"base_ejection_ms": 300_000}});
    let (fleet, envoy) = start(2, keys).await;
    eject(&envoy, &fleet, 0).await;
    // Probes that succeed do not end an ejection; only having been unhealthy and healed does.
    let before = fleet[0].counts().health_checks;
    fleet[0].until("it is probed", |counts| counts.health_checks > before + 4).await;
    assert_eq!(envoy.column("state").await[0], "ejected");
    fleet[0].set_health(Some(503));
    envoy.until_state(0, "unhealthy").await;
    fleet[0].set_health(Some(200));
    envoy.until_state(0, "probing").await;
    assert_eq!(envoy.client().post("/prompt", "{}").await.host(), Some(fleet[0].address()));
    envoy.until_state(0, "serving").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_probe_is_no_failed_job() {
    let (fleet, envoy) = start(2, json!({"probe": often()})).await;
    fleet[0].set_health(Some(503));
    let ill = envoy.until_state(0, "unhealthy").await;
    for name in ["failures", "consecutive_failures", "ejections"] {
        assert_eq!(ill[name], 0, "{ill}");
    }
    // And the other way round: jobs eject a host whose probes succeed.
    fleet[0].set_health(Some(200));
    envoy.until_state(0, "serving").await;
    eject(&envoy, &fleet, 1).await;
    assert_eq!(envoy.column("state").await, ["serving", "ejected"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_warm_connections_the_first_jobs_open_none() {
    for file in ["http2.yaml", "http1.yaml"] {
        let fleet = Fleet::start(4, Gpu::new()).await;
        let probe = json!({"path": "/health", "interval_ms": 2500, "prewarm": true});
        let envoy = Envoy::new(file).hosts(&fleet).pool(json!({"probe": probe})).start().await;
        eventually("both workers have a connection to each host", async || {
            fleet.iter().all(|host| host.counts().open_connections >= 2)
        })
        .await;
        let clients = envoy.pool_over_workers(8).await;
        // Longer than an idle connection of http1.yaml lives: the second round finds only what was kept warm.
        for pause in [500, 6000] {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            // A job that meets a probe on its worker's only connection to a host has to open a second one over HTTP/1.1. That takes chance, and
            // says nothing; so jobs are sent until no probe ran meanwhile.
            loop {
                let (probes, before) = (checks(&fleet), envoy.stat("cluster.gpu.upstream_cx_total").await);
                Load::one_by_one(16).over(&clients).run(&envoy).await.assert_served();
                let after = envoy.stat("cluster.gpu.upstream_cx_total").await;
                if checks(&fleet) == probes {
                    assert_eq!(after - before, 0, "{file}: {before} connections before");
                    break;
                }
            }
        }
        assert!(fleet.iter().all(|host| host.jobs() > 0), "{:?}", fleet.jobs());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_asks_for_its_path_at_the_host_that_it_is_for() {
    // Everything but /health is a job for the simulated host, which remembers it.
    let probe = json!({"path": "/ready", "interval_ms": 200});
    let (fleet, envoy) = start(2, json!({"probe": probe})).await;
    for host in fleet.iter() {
        host.until("it is asked", |counts| counts.jobs >= 3).await;
        let seen = &host.requests()[0];
        assert_eq!((seen.method.as_str(), seen.path.as_str()), ("GET", "/ready"));
        let steering = ["x-gateway-destination-endpoint", "x-envoy-max-retries", "x-plimsoll-host"];
        assert!(steering.iter().all(|name| !seen.headers.contains_key(*name)), "{seen:?}");
    }
    assert_eq!(envoy.column("requests").await, [0, 0]);
    fleet[1].set(Fault::hang());
    envoy.until_state(1, "unhealthy").await;
}
