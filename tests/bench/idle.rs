//! What Envoy does while no request comes: the module's ticks and probes. The cheapest turns, which the other figures are of, are those that
//! few of them fall into.

use std::time::Duration;

use crate::Effort;
use crate::figures::{Figure, Figures};
use crate::rounds::progress;
use crate::systems::{Chooser, PROBED_EVERY, System};

/// Envoy's own count of what it has sent to the hosts: jobs, and probes.
const SENT: &str = "cluster.gpu.upstream_rq_total";

/// Measures the systems of these choosers in front of so many hosts, all at the same time.
pub async fn run(systems: &[System], choosers: &[Chooser], hosts: usize, effort: Effort, figures: &mut Figures) {
    eprintln!("  CPU time while no request comes");
    // As long as it takes until every host's turn comes again, so that each round has equally many probes.
    let length = effort.pick(PROBED_EVERY, PROBED_EVERY / 10);
    figures.note(format!(
        "idle: all systems at the same time, for {length:?} in each round; with everything on, each host is probed every {PROBED_EVERY:?}, and as often to keep the worker's connection warm"
    ));
    let of = |chooser: &Chooser| systems.iter().find(|system| (system.chooser, system.hosts) == (*chooser, hosts));
    let idle: Vec<&System> = choosers.iter().map(|chooser| of(chooser).expect("it has been started")).collect();
    let mut all = vec![(Vec::new(), Vec::new()); idle.len()];
    let rounds = effort.pick(3, 1);
    for round in 0..rounds {
        progress(format_args!("round {} of {rounds}", round + 1));
        let mut sent = Vec::new();
        for system in &idle {
            sent.push(system.envoy.stat(SENT).await);
        }
        // After the statistics, which take more time than all that is measured here.
        let before: Vec<Duration> = idle.iter().map(|system| system.envoy.cpu_time()).collect();
        tokio::time::sleep(length).await;
        let after: Vec<Duration> = idle.iter().map(|system| system.envoy.cpu_time()).collect();
        for (index, system) in idle.iter().enumerate() {
            let (cpu, probes) = &mut all[index];
            cpu.push((after[index] - before[index]).as_secs_f64() * 1e3 / length.as_secs_f64());
            probes.push((system.envoy.stat(SENT).await - sent[index]) as f64 / length.as_secs_f64());
        }
    }
    progress(format_args!(""));
    for (system, (cpu, probes)) in idle.into_iter().zip(&all) {
        let what = format!("CPU while no request comes, {}", system.name());
        figures.add(Figure::new(format!("idle_cpu_ms_per_s.{}", system.key()), what, "ms/s", cpu));
        if system.chooser == Chooser::Everything {
            let what = format!("probes while no request comes, {}", system.name());
            figures.add(Figure::new(format!("idle_probes_per_s.{}", system.key()), what, "/s", probes));
        }
    }
}
