//! Two workers at one record: what they take from each other, and what is left of the throughput.

use std::net::SocketAddr;
use std::time::Instant;

use crate::Effort;
use crate::figures::{Figure, Figures};
use crate::rounds::progress;
use crate::systems::{Chooser, System};

/// Measures ours beside Envoy's own choice.
pub async fn run(hosts: &[SocketAddr], effort: Effort, figures: &mut Figures) {
    eprintln!("  two workers and one record");
    figures.note("two workers: saturated, and so is the machine if it has two cores: the clients and hosts share them");
    let mut ours = System::start(Chooser::Ours, hosts, 2, None).await;
    let mut theirs = System::start(Chooser::TwoChoices, hosts, 2, Some(&ours.envoy)).await;
    let (rounds, turns) = effort.pick((9, 4), (1, 1));
    let requests = effort.pick(1500, 200);
    for system in [&mut ours, &mut theirs] {
        system.clients.saturate(requests * 4).await;
    }
    let (mut per_thousand, mut our_rates, mut their_rates) = (Vec::new(), Vec::new(), Vec::new());
    let mut before = books(&ours).await;
    for round in 0..rounds {
        progress(format_args!("round {} of {rounds}", round + 1));
        let (mut our_rate, mut their_rate) = (0.0_f64, 0.0_f64);
        for _ in 0..turns {
            our_rate = our_rate.max(rate(&mut ours, requests).await);
            their_rate = their_rate.max(rate(&mut theirs, requests).await);
        }
        our_rates.push(our_rate);
        their_rates.push(their_rate);
        let now = books(&ours).await;
        per_thousand.push((now.1 - before.1) * 1e3 / (now.0 - before.0));
        before = now;
    }
    progress(format_args!(""));
    let what = "transactions lost to the other worker and run again, per thousand choices";
    figures.add(Figure::new("conflicts_per_thousand", what, "", &per_thousand));
    let what = "throughput of ours over Envoy's least_request, 64 hosts, two workers";
    figures.add(Figure::ratio("throughput_over_least_request.two_workers", what, &our_rates, &their_rates));
}

async fn rate(system: &mut System, requests: usize) -> f64 {
    let start = Instant::now();
    system.clients.saturate(requests).await;
    requests as f64 / start.elapsed().as_secs_f64()
}

/// Requests placed and transactions run again, so far.
async fn books(system: &System) -> (f64, f64) {
    let status = system.envoy.status().await;
    let pool = &status["pools"]["gpu"];
    let requests = pool["hosts"].as_array().expect("hosts").iter().map(|host| host["requests"].as_f64().expect("a count"));
    (requests.sum(), pool["conflicts"].as_f64().expect("a count"))
}
