//! What a choice costs: CPU time, throughput, latency, transactions that two workers take from each other.

use crate::Effort;
use crate::cores::Cores;
use crate::figures::{Figure, Figures, Spread, Target};
use crate::rounds::{Cost, Rounds, Turns, take_turns};
use crate::systems::{self, Chooser};
use crate::{hosts, latency, two_workers};

const MANY: usize = 64;
const FEW: usize = 4;

/// Measures all of it.
pub async fn run(effort: Effort, figures: &mut Figures) {
    let cores = Cores::divide();
    let hosts = hosts::start(MANY).await;
    let wanted = [
        (Chooser::RoundRobin, MANY),
        (Chooser::Floor, MANY),
        (Chooser::Ours, MANY),
        (Chooser::FullScan, MANY),
        (Chooser::TwoChoices, MANY),
        (Chooser::RoundRobin, FEW),
        (Chooser::Ours, FEW),
        (Chooser::FullScan, FEW),
    ];
    let mut systems = systems::start(&wanted, &hosts, figures).await;
    figures.note("CPU and throughput: one worker for each Envoy (--concurrency 1 is steadier) on a core that the clients leave to it, saturated by 32 HTTP/1.1 clients");
    eprintln!("  CPU time and throughput");
    let plan = effort.pick(
        Turns { rounds: 9, turns: 10, requests: 300, warm_up: 60 },
        Turns { rounds: 2, turns: 1, requests: 100, warm_up: 20 },
    );
    let rounds = take_turns(&mut systems, plan).await;
    cpu_time(&rounds, figures);
    throughput(&rounds, figures);

    let half = 0.5 * Spread::of(&rounds.each(Chooser::Ours, MANY, |cost| cost.rate)).median;
    let [baseline, _, ours, ..] = &mut systems[..] else { unreachable!("more than three systems") };
    latency::run(baseline, ours, half, effort, figures).await;
    drop(systems);
    cores.for_all();
    two_workers::run(&hosts, effort, figures).await;
}

fn cpu_time(rounds: &Rounds, figures: &mut Figures) {
    let cpu = |cost: Cost| cost.cpu;
    for hosts in [MANY, FEW] {
        let values = rounds.each(Chooser::RoundRobin, hosts, cpu);
        let name = format!("cpu_us.no_filter_{hosts}");
        figures.add(Figure::new(name, format!("CPU per request, no filter, {hosts} hosts"), "µs", &values));
    }
    let compared = [
        (Chooser::Floor, MANY),
        (Chooser::Ours, MANY),
        (Chooser::Ours, FEW),
        (Chooser::FullScan, MANY),
        (Chooser::FullScan, FEW),
        (Chooser::TwoChoices, MANY),
    ];
    for (chooser, hosts) in compared {
        let name = format!("cpu_added_us.{}_{hosts}", chooser.key());
        let what = format!("CPU per request added by {}, {hosts} hosts", chooser.name());
        let baseline = rounds.each(Chooser::RoundRobin, hosts, cpu);
        figures.add(Figure::new(name, what, "µs", &rounds.added(chooser, hosts)).beside("no filter", &baseline));
    }
    let floor = rounds.added(Chooser::Floor, MANY);
    let ratio = |hosts: usize| {
        let what = format!("added by ours, {hosts} hosts, over the floor F");
        Figure::ratio(format!("ours_over_floor_{hosts}"), what, &rounds.added(Chooser::Ours, hosts), &floor)
    };
    figures.add(ratio(MANY).target(Target::AtMost(1.6)));
    figures.add(ratio(FEW));
}

fn throughput(rounds: &Rounds, figures: &mut Figures) {
    let rate = |chooser| rounds.each(chooser, MANY, |cost| cost.rate);
    let (ours, theirs, scan) = (rate(Chooser::Ours), rate(Chooser::TwoChoices), rate(Chooser::FullScan));
    let name = "Envoy's least_request";
    figures.add(Figure::new("requests_per_s.ours_64", "throughput of ours, 64 hosts", "/s", &ours).beside(name, &theirs));
    let ratio = |key: &str, name: &str, others: &[f64]| {
        Figure::ratio(format!("throughput_over_{key}"), format!("throughput of ours over {name}, 64 hosts"), &ours, others)
    };
    figures.add(ratio("least_request", name, &theirs).target(Target::AtLeast(0.8)));
    figures.add(ratio("full_scan", "Envoy's FULL_SCAN", &scan));
    // What any Wasm filter leaves of it.
    let what = "throughput of the floor filter over Envoy's least_request, 64 hosts".to_owned();
    figures.add(Figure::ratio("floor_throughput_over_least_request".to_owned(), what, &rate(Chooser::Floor), &theirs));
}
