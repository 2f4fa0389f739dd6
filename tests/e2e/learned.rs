//! What is learned of jobs and hosts, where clients and hosts say whatever they like.

use std::time::Duration;

use serde_json::json;
use support::{Envoy, Fleet, Gpu, Load, RunningEnvoy};

/// A job's class, cost and session are what these headers say.
fn keys(telemetry: bool) -> serde_json::Value {
    let mut keys = json!({
        "max_in_flight": 2, "policy": "least_time", "queue": {"max_length": 20_000, "timeout_ms": 30_000},
        "class": {"header": "x-job-class"}, "cost": {"header": "x-job-cost"}, "tenant": {"header": "x-tenant"},
        "session": {"header": "x-session"},
    });
    if telemetry {
        keys["telemetry"] = json!({"scrape": {"metrics": {"running": "jobs_running"}, "interval_ms": 200}});
    }
    keys
}

fn check(envoy: &RunningEnvoy) {
    let log = envoy.log();
    let line =
        log.lines().find(|line| line.contains("panicked") || line.contains("Function: proxy_") || line.contains("[critical]"));
    assert_eq!(line, None, "a VM trapped");
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_classes_and_hosts_that_all_report_to_be_full_stop_nobody_and_leave_nothing_behind() {
    let fleet = Fleet::start(4, Gpu::new().slots(2).work_ms(1).remember(0)).await;
    fleet.iter().for_each(|host| host.set_metrics("jobs_running 1000000\n"));
    let envoy =
        Envoy::new("http2.yaml").hosts(&fleet).pool(keys(true)).keys(json!({"trusted_headers": true})).workers(2).start().await;
    let costs = ["1", "1e12", "1e-6", "NaN", "-1", "3.5", "inf", ""];
    let mut memory = Vec::new();
    for round in 0..5 {
        let load = Load::rate(1000.0, 10_000).pool(64).each(|n, shot| {
            shot.call.add_header("x-job-class", format!("class-{}", (n * 7919 + round) % 10_000));
            shot.call.add_header("x-job-cost", costs[n % costs.len()]);
            shot.call.add_header("x-tenant", format!("tenant-{}", n % 997));
            if n % 3 == 0 {
                shot.call.add_header("x-session", if n % 2 == 0 { "hot".to_owned() } else { n.to_string() });
            }
        });
        let report = load.timeout(Duration::from_secs(60)).run(&envoy).await;
        report.assert_served();
        memory.push(envoy.rss() >> 20);
        eprintln!("round {round}: {:?} {:?} {} MiB", report.percentile(0.5), report.percentile(0.99), envoy.rss() >> 20);
    }
    envoy.settled().await;
    let pool = envoy.pool_status().await;
    assert_eq!((&pool["drift"], &pool["waiting"]), (&json!(0), &json!(0)), "{pool:#}");
    assert!(pool["classes"].as_array().is_some_and(|classes| classes.len() <= 67), "{:#}", pool["classes"]);
    assert!(memory[4] < memory[1] + 16, "memory grows: {memory:?} MiB");
    check(&envoy);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_changes_under_load_loses_nobody() {
    let fleet = Fleet::start(4, Gpu::new().slots(2).work_ms(20)).await;
    let envoy =
        Envoy::new("http2.yaml").live().hosts(&fleet).pool(keys(false)).keys(json!({"trusted_headers": true})).start().await;
    let load = Load::rate(300.0, 4_000).pool(64).each(|n, shot| {
        shot.call.add_header("x-job-class", ["draft", "film"][n % 2]);
        shot.call.add_header("x-sim-ms", ["5", "40"][n % 2]);
    });
    let load = load.start(&envoy);
    for policy in ["least_score", "weighted", "least_time"].into_iter().cycle().take(9) {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut keys = keys(policy != "least_score");
        keys["policy"] = json!(policy);
        envoy.reload_pool(keys).await.expect("it is taken");
    }
    let report = load.await.expect("the load ran");
    report.assert_served();
    envoy.settled().await;
    let pool = envoy.pool_status().await;
    assert_eq!((&pool["drift"], &pool["waiting"]), (&json!(0), &json!(0)), "{pool:#}");
    check(&envoy);
}
