//! What it costs to follow Envoy's own membership: Envoy's admin page, the way to the module, reading it. No request comes meanwhile.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use plimsoll::telemetry::clusters;
use serde_json::json;
use support::{Envoy, RunningEnvoy};

use crate::Effort;
use crate::figures::{Figure, Figures};
use crate::rounds::progress;

/// Envoy's count of what it has sent to its own admin.
const POLLS: &str = "cluster.envoy_admin.upstream_rq_total";

/// The pool's hosts; nobody listens there, and nobody asks them anything.
fn addresses(hosts: usize) -> Vec<SocketAddr> {
    (0..hosts).map(|host| SocketAddr::from(([127, 9, (host / 250) as u8, (host % 250 + 1) as u8], 8188))).collect()
}

async fn start(hosts: usize, follows: bool, beside: Option<&RunningEnvoy>) -> RunningEnvoy {
    let envoy = Envoy::new("http1.yaml").addresses(&addresses(hosts)).admin_cluster().workers(1);
    let envoy = if follows { envoy.keys(json!({"pools": {"gpu": {"discovery": {"cluster": "envoy_admin"}}}})) } else { envoy };
    match beside {
        Some(other) => envoy.start_beside(other).await,
        None => envoy.start().await,
    }
}

/// Measures pools of 64 and of 1,024 hosts, each beside the same Envoy that does not look.
pub async fn run(effort: Effort, figures: &mut Figures) {
    let length = effort.pick(Duration::from_secs(20), Duration::from_secs(2));
    let rounds = effort.pick(5, 1);
    figures.note(format!("both Envoys at the same time, for {length:?} in each round; one look a second"));
    for hosts in [64, 1024] {
        progress(format_args!("starting two Envoys with {hosts} hosts"));
        let still = start(hosts, false, None).await;
        let follows = start(hosts, true, Some(&still)).await;
        follows.until_pool("it follows", |pool| pool["discovery"]["hosts"] == hosts).await;
        let (mut each_poll, mut idle) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            progress(format_args!("{hosts} hosts: round {} of {rounds}", round + 1));
            let polls = follows.stat(POLLS).await;
            let before = [&still, &follows].map(RunningEnvoy::cpu_time);
            tokio::time::sleep(length).await;
            let after = [&still, &follows].map(RunningEnvoy::cpu_time);
            let polls = (follows.stat(POLLS).await - polls).max(1) as f64;
            let [still, follows] = [0, 1].map(|index| (after[index] - before[index]).as_secs_f64() * 1e3);
            each_poll.push((follows - still) / polls);
            idle.push(still / length.as_secs_f64());
        }
        progress(format_args!(""));
        let page = follows.admin(&clusters::path("gpu")).await.body;
        let parse: Vec<f64> = (0..effort.pick(50, 3))
            .map(|_| {
                let began = Instant::now();
                let membership = clusters::read(&page, "gpu").expect("Envoy's own page");
                let took = began.elapsed().as_secs_f64() * 1e3;
                assert_eq!(membership.members().len(), hosts);
                took
            })
            .collect();
        let name = |what: &str| format!("{what}.hosts_{hosts}");
        figures.add(Figure::new(name("page_bytes"), format!("Envoy's admin page, {hosts} hosts"), "B", &[page.len() as f64]));
        figures.add(Figure::new(name("parse_ms"), format!("reading it, natively, {hosts} hosts"), "ms", &parse));
        let all = format!("CPU for each look, all of it, {hosts} hosts");
        figures.add(Figure::new(name("poll_cpu_ms"), all, "ms", &each_poll).beside("one second without", &idle));
    }
}
