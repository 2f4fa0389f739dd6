//! An ejected host and a pool without hosts are told to an Alertmanager, once each, and so is their end.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use support::alerts::Post;
use support::wall::Utc;
use support::{Alertmanager, Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy, eventually};

use crate::ejection::eject;

async fn start(fleet: &Fleet, alertmanager: &Alertmanager, pool: Value) -> RunningEnvoy {
    Envoy::new("http2.yaml")
        .hosts(fleet)
        .pool(pool)
        .keys(json!({"alerts": {"cluster": "alertmanager", "path": "/api/v2/alerts"}}))
        .other_cluster("alertmanager", alertmanager)
        .live()
        .start()
        .await
}

/// The posts, when there are so many.
async fn posts(alertmanager: &Alertmanager, number: usize) -> Vec<Post> {
    eventually(&format!("{number} posts have come"), async || alertmanager.posts().len() >= number).await;
    alertmanager.posts()
}

async fn count(envoy: &RunningEnvoy, outcome: &str) -> u64 {
    let stats = envoy.stats().await;
    stats.get(&format!("wasmcustom.plimsoll.alerts;outcome={outcome}")).copied().unwrap_or(0)
}

fn now() -> String {
    Utc::from(SystemTime::now()).rfc3339()
}

/// The first 19 characters of a time, `2026-01-01T00:00:00`, of which a later one is greater.
fn seconds(time: &Value) -> &str {
    let text = time.as_str().unwrap_or_else(|| panic!("{time} is no time"));
    let (seconds, zone) = text.split_at(19);
    assert!(zone.ends_with('Z') || zone.ends_with("+00:00"), "{text} is not RFC 3339 in UTC");
    seconds
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ejection_is_posted_once_a_minute_and_its_end_follows() {
    let (fleet, alertmanager) = (Fleet::start(2, Gpu::new().slots(100)).await, Alertmanager::start().await);
    let envoy = start(&fleet, &alertmanager, json!({"max_in_flight": 4, "failure": {"base_ejection_ms": 1500}})).await;
    let host = fleet.addresses()[0].to_string();
    let before = now();
    eject(&envoy, &fleet, 0).await;
    let firing = posts(&alertmanager, 1).await.swap_remove(0);
    assert_eq!(firing.line, "POST /api/v2/alerts application/json");
    let labels = ["alertname", "pool", "host"].map(|name| firing.label(name));
    assert_eq!(labels, ["PlimsollHostEjected", "gpu", host.as_str()]);
    assert!(!firing.label("severity").is_empty());
    let summary = firing.alert["annotations"]["summary"].as_str().expect("a summary");
    assert!(summary.contains(&host), "{summary}");
    assert!(!firing.resolves(), "{}", firing.alert);
    let starts = seconds(&firing.alert["startsAt"]);
    assert!(before.as_str() <= starts && starts <= now().as_str(), "{starts} is not between {before} and now");
    // It serves again.
    envoy.until_state(0, "probing").await;
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    let over = posts(&alertmanager, 2).await.swap_remove(1);
    assert!(over.resolves(), "{}", over.alert);
    assert_eq!(over.alert["labels"], firing.alert["labels"], "what is over is told by its labels");
    let ends = seconds(&over.alert["endsAt"]);
    assert!(starts <= ends && ends <= now().as_str(), "{starts} to {ends}");
    // Ejected again within the minute: nobody is woken again. Another host is another matter.
    envoy.until_state(0, "serving").await;
    eject(&envoy, &fleet, 0).await;
    envoy.until_state(0, "probing").await;
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    envoy.until_state(0, "serving").await;
    eject(&envoy, &fleet, 1).await;
    let other = fleet.addresses()[1].to_string();
    let of = |host: &str| {
        let posts = alertmanager.posts();
        posts.into_iter().filter(|post| post.label("host") == host && !post.resolves()).count()
    };
    eventually("the other host's ejection is posted", async || of(&other) == 1).await;
    assert_eq!(of(&host), 1);
    assert!(count(&envoy, "sent").await >= 3);
    assert_eq!(count(&envoy, "failed").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fires_through_reloads_is_posted_once_and_its_end_follows() {
    let (fleet, alertmanager) = (Fleet::start(2, Gpu::new().slots(100)).await, Alertmanager::start().await);
    let keys = |slots: u32| json!({"max_in_flight": slots, "failure": {"base_ejection_ms": 6000}});
    let envoy = start(&fleet, &alertmanager, keys(50)).await;
    eject(&envoy, &fleet, 0).await;
    posts(&alertmanager, 1).await;
    for slots in [51, 52, 53] {
        envoy.reload_pool(keys(slots)).await.expect("accepted");
        envoy.until("it is live", |books| books[0]["max_in_flight"] == slots).await;
        Load::burst(8).run(&envoy).await.assert_served();
    }
    envoy.until_state(0, "probing").await;
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    eventually("its end is posted", async || alertmanager.posts().iter().any(Post::resolves)).await;
    let posts = alertmanager.posts();
    assert_eq!(posts.iter().map(Post::resolves).collect::<Vec<_>>(), [false, true], "{posts:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_an_eligible_host_is_posted_until_one_is_back() {
    let (fleet, alertmanager) = (Fleet::start(2, Gpu::new()).await, Alertmanager::start().await);
    let probe = json!({"path": "/health", "interval_ms": 200});
    let envoy = start(&fleet, &alertmanager, json!({"probe": probe})).await;
    fleet.iter().for_each(|host| host.set_health(Some(503)));
    let firing = posts(&alertmanager, 1).await.swap_remove(0);
    assert_eq!((firing.label("alertname"), firing.label("pool")), ("PlimsollNoHost", "gpu"));
    assert!(!firing.label("severity").is_empty() && !firing.resolves(), "{}", firing.alert);
    assert!(firing.alert["labels"]["host"].is_null() && firing.alert["annotations"]["summary"].is_string());
    fleet[0].set_health(Some(200));
    let over = posts(&alertmanager, 2).await.swap_remove(1);
    assert!(over.resolves(), "{}", over.alert);
    assert_eq!(over.alert["labels"], firing.alert["labels"]);
    envoy.until_state(0, "serving").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alertmanager_that_is_down_or_hangs_or_fails_costs_the_traffic_nothing() {
    let (fleet, alertmanager) = (Fleet::start(6, Gpu::new().slots(100).work_ms(20)).await, Alertmanager::start().await);
    let envoy = start(&fleet, &alertmanager, json!({"failure": {"base_ejection_ms": 60_000}})).await;
    let mut failed = 0;
    for (host, trouble) in ["down", "hangs", "fails"].into_iter().enumerate() {
        match trouble {
            "down" => alertmanager.stop().await,
            "hangs" => {
                alertmanager.set(Fault::hang());
                alertmanager.restart().await;
            }
            _ => alertmanager.set(Fault::status(500)),
        }
        eject(&envoy, &fleet, host).await;
        let report = Load::rate(100.0, 100).run(&envoy).await;
        report.assert_served();
        // An alert that held its worker up would hold up every job of it.
        assert!(report.percentile(0.5) < Duration::from_secs(1), "{trouble}\n{report}");
        let before = failed;
        eventually(&format!("{trouble}: that is counted"), async || {
            failed = count(&envoy, "failed").await;
            failed > before
        })
        .await;
    }
    assert_eq!(count(&envoy, "sent").await, 0);
    envoy.settled().await;
}
