//! A host that is slow, window after window, is left alone like one that fails.

use serde_json::{Value, json};
use support::{Envoy, Fleet, Gpu, Load, eventually};

use crate::ejection::Pinned;

/// Slow is a job of a second and a half, fast one of no time: a busy machine does not blur them.
fn keys(base_ejection_ms: u64) -> Value {
    let breaker = json!({"window": 4, "quantile": 0.99, "threshold_ms": 1000, "consecutive_windows": 3});
    json!({"latency_breaker": breaker, "failure": {"base_ejection_ms": base_ejection_ms}})
}

/// So many jobs at once on the first host, which all end before this returns.
async fn jobs(pinned: &Pinned, jobs: usize, ms: &str) -> Value {
    Load::burst(jobs).header("x-sim-ms", ms).run(&pinned.envoy).await.assert_served();
    pinned.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn three_slow_windows_in_a_row_eject_a_host_until_a_trial_is_fast() {
    let pinned = Pinned::start(keys(1000)).await;
    // Two slow windows and a fast one begin the count afresh.
    let host = jobs(&pinned, 8, "1500").await;
    assert_eq!((&host["state"], &host["ejections"]), (&json!("serving"), &json!(0)), "two windows");
    jobs(&pinned, 4, "0").await;
    let host = jobs(&pinned, 8, "1500").await;
    assert_eq!((&host["state"], &host["ejections"]), (&json!("serving"), &json!(0)), "two windows, after a fast one");
    let host = jobs(&pinned, 4, "1500").await;
    assert_eq!((&host["ejections"], &host["reason"]), (&json!(1), &json!("latency")));
    assert_eq!((&host["failures"], &host["consecutive_failures"]), (&json!(0), &json!(0)), "slow is not failed");
    let address = pinned.fleet[0].address();
    pinned.envoy.logged(&format!("plimsoll: pool gpu: {address} is ejected for ")).await;
    pinned.envoy.logged(" s: its latency was over the threshold").await;
    let metric = format!("wasmcustom.plimsoll.ejections;pool=gpu;host={address};reason=latency");
    eventually("it is counted", async || pinned.envoy.stats().await.get(&metric) == Some(&1)).await;
    // Being served is not enough to come back: it must be in time.
    pinned.envoy.until_state(0, "probing").await;
    let host = jobs(&pinned, 1, "1500").await;
    assert_eq!((&host["ejections"], &host["reason"]), (&json!(2), &json!("latency")));
    pinned.envoy.until_state(0, "probing").await;
    let host = jobs(&pinned, 1, "0").await;
    assert_eq!((&host["state"], &host["reason"]), (&json!("serving"), &Value::Null));
    // Windows start afresh, too.
    let host = jobs(&pinned, 8, "1500").await;
    assert_eq!((&host["state"], &host["ejections"]), (&json!("serving"), &json!(2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_card_that_has_become_slow_gets_no_jobs_until_it_is_fast_again() {
    let fleet = Fleet::start(3, Gpu::new().slots(100).work_ms(20)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys(4000)).start().await;
    fleet[2].set_speed(0.01);
    for _ in 0..2 {
        Load::burst(24).run(&envoy).await.assert_served();
    }
    envoy.until_state(2, "ejected").await;
    let before = fleet[2].jobs();
    Load::rate(100.0, 100).run(&envoy).await.assert_served();
    assert_eq!(fleet[2].jobs(), before);
    fleet[2].set_speed(1.0);
    let load = Load::rate(50.0, 25).repeat(&envoy);
    envoy.until_state(2, "serving").await;
    load.end().await.assert_served();
    assert_eq!(envoy.column("failures").await, [0; 3]);
    assert_eq!(envoy.column("ejections").await, [0, 0, 1]);
}
