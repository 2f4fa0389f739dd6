//! A host that asks to wait is left alone for so long, and is not blamed.

use std::time::{Duration, Instant, SystemTime};

use serde_json::json;
use support::wall::Utc;
use support::{Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy, eventually};

async fn no_host(envoy: &RunningEnvoy) -> Option<u64> {
    envoy.stats().await.get("wasmcustom.plimsoll.no_host;pool=gpu").copied()
}

#[tokio::test(flavor = "multi_thread")]
async fn others_take_the_jobs_of_a_host_that_asked_to_wait() {
    let fleet = Fleet::start(3, Gpu::new().slots(100).work_ms(20)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    for status in [429, 503] {
        // Every job of the burst is placed before the first answer: the host gets its share, and says more than once that it is full.
        let full = Fault::status(status).header("retry-after", "4").after(Duration::from_millis(300));
        fleet[0].set(full);
        let report = Load::burst(12).header("x-sim-ms", "300").run(&envoy).await;
        assert!(report.status(status) >= 1, "\n{report}");
        let busy = envoy.until_state(0, "busy").await;
        assert!((1..=4000).contains(&busy["busy_for_ms"].as_u64().expect("a time")), "{busy}");
        assert_eq!(envoy.status().await["pools"]["gpu"]["eligible"], 2);
        fleet.clear_books();
        Load::rate(100.0, 100).run(&envoy).await.assert_served();
        assert_eq!((fleet[0].jobs(), fleet[1].jobs() + fleet[2].jobs()), (0, 100));
        fleet[0].clear();
        let serving = envoy.until_state(0, "serving").await;
        for name in ["failures", "consecutive_failures", "ejections", "busy_for_ms"] {
            assert_eq!(serving[name], 0, "{serving}");
        }
        Load::burst(12).run(&envoy).await.assert_served();
        assert!(fleet[0].jobs() >= 1, "it takes jobs again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_one_answers_no_host_while_it_waits_and_serves_right_after() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    fleet[0].set(Fault::status(503).header("retry-after", "4").next(1));
    let began = Instant::now();
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 503);
    envoy.until_state(0, "busy").await;
    let reply = envoy.client().post("/prompt", "{}").await;
    assert_eq!((reply.status, reply.header("x-plimsoll-verdict")), (503, Some("no_host")));
    let wait: u64 = reply.header("retry-after").and_then(|wait| wait.parse().ok()).expect("seconds");
    assert!((1..=4).contains(&wait), "{wait}");
    assert_eq!(envoy.status().await["pools"]["gpu"]["eligible"], 0);
    eventually("it serves again", async || envoy.client().post("/prompt", "{}").await.status == 200).await;
    let waited = began.elapsed();
    assert!((4.0..7.0).contains(&waited.as_secs_f64()), "{waited:?}");
    assert_eq!(fleet[0].jobs(), 3, "nothing came to it meanwhile");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_all_hosts_ask_to_wait_the_gauge_and_the_log_say_that_none_is_eligible() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    assert_eq!(no_host(&envoy).await.unwrap_or(0), 0);
    fleet[0].set(Fault::status(429).header("retry-after", "5").next(1));
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 429);
    eventually("the gauge is up", async || no_host(&envoy).await == Some(1)).await;
    envoy.logged("plimsoll: pool gpu: no host is eligible").await;
    eventually("the gauge is down", async || no_host(&envoy).await == Some(0)).await;
    envoy.logged("plimsoll: pool gpu: a host is eligible again").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn seconds_and_dates_are_understood_up_to_a_minute_and_all_else_is_a_second() {
    let fleet = Fleet::start(5, Gpu::new().slots(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    let soon = Utc::from(SystemTime::now() + Duration::from_secs(40)).http();
    let waits = |status, time: &str| Fault::status(status).header("retry-after", time);
    fleet[0].set(waits(429, "100000"));
    fleet[1].set(waits(503, &soon));
    fleet[2].set(waits(429, "Fri, 31 Dec 9999 23:59:59 GMT"));
    fleet[3].set(waits(503, "in a while"));
    fleet[4].set(Fault::status(429));
    let load = Load::rate(100.0, 50).repeat(&envoy);
    let bounds = [50_000..=60_000, 20_000..=41_000, 50_000..=60_000, 1..=1000, 1..=1000];
    envoy
        .until("each waits for as long as it asked", |books| {
            bounds.iter().zip(books).all(|(bounds, host)| host["busy_for_ms"].as_u64().is_some_and(|ms| bounds.contains(&ms)))
        })
        .await;
    load.end().await;
    assert_eq!(envoy.column("failures").await, [0; 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_whose_queues_are_full_are_never_ejected() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(10)).await;
    let keys = json!({"failure": {"consecutive": 1, "max_ejected_percent": 100}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    for host in fleet.iter() {
        host.set(Fault::status(503).header("retry-after", "1").fraction(0.5));
    }
    let report = Load::poisson(200.0, 800, 5).run(&envoy).await;
    assert!(report.status(200) > 0 && report.status(503) > 0, "\n{report}");
    assert_eq!(report.status(200) + report.status(503), 800);
    for name in ["failures", "ejections"] {
        assert_eq!(envoy.column(name).await, [0; 4], "{name}");
    }
    // Shed only as long as they are full.
    fleet.iter().for_each(support::GpuHost::clear);
    envoy.until("all serve", |books| books.iter().all(|host| host["state"] == "serving")).await;
    Load::burst(40).run(&envoy).await.assert_served();
}
