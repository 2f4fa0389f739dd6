//! What a choice costs: CPU time, throughput, latency, transactions that two workers take from each other.

use std::net::SocketAddr;

use crate::Effort;
use crate::figures::{Figure, Figures, Spread, Target};
use crate::rounds::{Cost, Rounds, Turns, progress, take_turns};
use crate::systems::{self, Chooser, System};
use crate::{hosts, latency};

const MANY: usize = 64;
const FEW: usize = 4;

/// Measures all of it.
pub async fn run(effort: Effort, figures: &mut Figures) {
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
    let mut systems = systems::start(&wanted, &hosts).await;
    figures.note("CPU and throughput: one worker for each Envoy (--concurrency 1 is steadier), saturated by 32 HTTP/1.1 clients");
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
    conflicts(&hosts, effort, figures).await;
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
            .target(Target::AtLeast(0.8))
    };
    figures.add(ratio("least_request", name, &theirs));
    figures.add(ratio("full_scan", "Envoy's FULL_SCAN", &scan));
}

async fn conflicts(hosts: &[SocketAddr], effort: Effort, figures: &mut Figures) {
    eprintln!("  two workers and one record");
    figures.note("lost transactions: two workers, saturated; the clients and hosts share the two cores with them");
    let mut ours = System::start(Chooser::Ours, hosts, 2, None).await;
    let requests = effort.pick(10_000, 200);
    ours.clients.saturate(requests).await;
    let (mut per_thousand, rounds) = (Vec::new(), effort.pick(9, 1));
    let mut before = books(&ours).await;
    for round in 0..rounds {
        progress(format_args!("round {} of {rounds}", round + 1));
        ours.clients.saturate(requests).await;
        let now = books(&ours).await;
        per_thousand.push((now.1 - before.1) * 1e3 / (now.0 - before.0));
        before = now;
    }
    progress(format_args!(""));
    let what = "transactions lost to the other worker and run again, per thousand choices";
    figures.add(Figure::new("conflicts_per_thousand", what, "", &per_thousand));
}

/// Requests placed and transactions run again, so far.
async fn books(system: &System) -> (f64, f64) {
    let status = system.envoy.status().await;
    let pool = &status["pools"]["gpu"];
    let requests = pool["hosts"].as_array().expect("hosts").iter().map(|host| host["requests"].as_f64().expect("a count"));
    (requests.sum(), pool["conflicts"].as_f64().expect("a count"))
}
