//! What a choice costs: CPU time, throughput, latency, transactions that two workers take from each other.

use crate::Effort;
use crate::cores::Cores;
use crate::figures::{Figure, Figures, Spread, Target};
use crate::rounds::{Cost, Rounds, Turns, take_turns};
use crate::systems::{self, Chooser};
use crate::{hosts, idle, latency, two_workers};

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
        (Chooser::Everything, MANY),
        (Chooser::Everything, FEW),
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
    everything_on(&rounds, figures);
    throughput(&rounds, figures);
    let idle = [Chooser::RoundRobin, Chooser::Ours, Chooser::Everything];
    idle::run(&systems, &idle, MANY, effort, figures).await;

    // Their probes would come between the requests of the two that are compared.
    systems.retain(|system| system.chooser != Chooser::Everything);
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

/// What the keys that a pool need not have take, beside a pool that has none of them.
fn everything_on(rounds: &Rounds, figures: &mut Figures) {
    let floor = rounds.added(Chooser::Floor, MANY);
    for hosts in [MANY, FEW] {
        let (all, plain) = (rounds.added(Chooser::Everything, hosts), rounds.added(Chooser::Ours, hosts));
        let what = format!("CPU per request added by ours, everything on, {hosts} hosts");
        figures.add(Figure::new(format!("cpu_added_us.everything_on_{hosts}"), what, "µs", &all).beside("ours", &plain));
        let what = format!("added by ours, everything on, {hosts} hosts, over the floor F");
        figures.add(Figure::ratio(format!("everything_on_over_floor_{hosts}"), what, &all, &floor));
        let what = format!("added by ours, everything on, {hosts} hosts, over ours");
        figures.add(Figure::ratio(format!("everything_on_over_ours_{hosts}"), what, &all, &plain));
    }
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
    let what = "throughput of ours, everything on, over ours, 64 hosts".to_owned();
    figures.add(Figure::ratio("everything_on_throughput_over_ours".to_owned(), what, &rate(Chooser::Everything), &ours));
    // What any Wasm filter leaves of it.
    let what = "throughput of the floor filter over Envoy's least_request, 64 hosts".to_owned();
    figures.add(Figure::ratio("floor_throughput_over_least_request".to_owned(), what, &rate(Chooser::Floor), &theirs));
}
