//! Classes and costs, as the operator's own stack tells them: work scales with the cost, and no name fills the memory.

use serde_json::json;
use support::{Client, Fleet, Gpu, Load};

use crate::least_time::{class, envoy, no_trap, why};

#[tokio::test(flavor = "multi_thread")]
async fn work_scales_with_the_cost_and_a_job_without_one_is_another_thing() {
    let fleet = Fleet::start(2, Gpu::new().work_ms(50)).await;
    let envoy = envoy(&fleet, json!({"cost": {"header": "x-cost"}})).start().await;
    let pool = envoy.pool_over_workers(8).await;
    // 3 ms for a cost of 1.
    let costly = Load::rate(20.0, 60).each(|n, shot| {
        let cost = [20, 40, 60][n % 3];
        shot.call.add_header("x-job-class", "film");
        shot.call.add_header("x-cost", cost.to_string());
        shot.call.add_header("x-sim-ms", (3 * cost).to_string());
    });
    costly.over(&pool).run(&envoy).await.assert_served();
    envoy.settled().await;
    let status = envoy.pool_status().await;
    let (unit, jobs) = class(&status, "film").expect("known");
    assert!((2.4..=4.0).contains(&unit) && jobs == 60, "{status:#}");
    let ask = async |cost: Option<&str>, ms: &str| {
        let mut ask = Client::http1(&envoy).post("/prompt", "{}").header("x-job-class", "film").header("x-sim-ms", ms);
        if let Some(cost) = cost {
            ask = ask.header("x-cost", cost);
        }
        why(&ask.await, "work_ms").expect("its work is known")
    };
    // Each of these jobs teaches, too: so the second digit may differ.
    let (ten, hundred) = (ask(Some("10"), "30").await, ask(Some("1e2"), "300").await);
    assert!((8.0..=12.5).contains(&(hundred / ten)), "{ten} {hundred}");
    // What is no cost is none, and a job without one is believed to be like all others at first; they are no part of what is known of jobs with a cost.
    for cost in [None, Some("much"), Some("-3"), Some("NaN"), Some("1e300"), Some("")] {
        let work = ask(cost, "120").await;
        assert!((60.0..=240.0).contains(&work), "{cost:?}: {work}");
    }
    let classes = envoy.pool_status().await["classes"].take();
    let mut jobs: Vec<u64> = classes
        .as_array()
        .expect("classes")
        .iter()
        .filter(|class| class["name"] == "film")
        .map(|class| class["jobs"].as_u64().expect("a count"))
        .collect();
    jobs.sort_unstable();
    assert_eq!(jobs, [6, 62], "{classes:#}");
}

/// Any bytes that a header may hold, and never the same twice.
fn hostile(n: usize) -> Vec<u8> {
    let mut state = (n as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let length = if n.is_multiple_of(1000) { 8000 } else { 1 + n % 60 };
    let mut bytes: Vec<u8> = n.to_string().into_bytes();
    for _ in 0..length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let byte = (state >> 32) as u8;
        bytes.push(if byte < b' ' || byte == 0x7f { b'\t' } else { byte });
    }
    bytes.push(b'.');
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_hostile_names_of_classes_are_66_and_fill_no_memory() {
    let fleet = Fleet::start(2, Gpu::new().slots(100).remember(0)).await;
    // As these hosts do: where jobs waited inside them, those that end together would say nothing of one another.
    let envoy = envoy(&fleet, json!({"least_time": {"runs_at_once": 100}})).start().await;
    let mut rss = Vec::new();
    for part in 0..5 {
        let load = Load::burst(2000).each(|n, shot| shot.call.add_header("x-job-class", hostile(part * 2000 + n)));
        load.pool(32).run(&envoy).await.assert_served();
        envoy.settled().await;
        let status = envoy.pool_status().await;
        let classes = status["classes"].as_array().expect("classes");
        assert!((60..=66).contains(&classes.len()), "{} classes", classes.len());
        // Each job taught: a class that gives its place to another one takes its own count along.
        let (_, jobs) = class(&status, "all").expect("the mean of all");
        assert_eq!(jobs, (part as u64 + 1) * 2000, "{status:#}");
        rss.push(envoy.rss());
    }
    let grown = rss[4].saturating_sub(rss[1]);
    assert!(grown < 12 << 20, "grown by {grown} bytes: {rss:?}");
    no_trap(&envoy).await;
}
