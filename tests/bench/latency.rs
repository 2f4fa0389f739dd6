//! The latency that the filter adds where nothing is saturated.

use std::time::Duration;

use crate::Effort;
use crate::clients::{self, Latencies};
use crate::figures::{Figure, Figures, Spread};
use crate::measured::Began;
use crate::rounds::progress;
use crate::systems::System;

/// Long enough for the queue in Envoy to come and go many times, short enough to be undisturbed.
const TURN: Duration = Duration::from_millis(60);

/// Sends the same arrivals to both, so many a second.
pub async fn run(baseline: &mut System, ours: &mut System, rate: f64, effort: Effort, figures: &mut Figures) {
    eprintln!("  latency at {rate:.0} requests a second");
    figures.note(format!("latency: open loop, Poisson arrivals, {rate:.0} a second to either: half of what saturates ours"));
    let (rounds, turns) = effort.pick((9, 12), (1, 2));
    let (mut none, mut with, mut disturbances) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        progress(format_args!("round {} of {rounds}", round + 1));
        let (mut of_none, mut of_ours) = (Vec::new(), Vec::new());
        for turn in 0..turns {
            let seed = round * turns + turn;
            of_none.push(take_turn(baseline, rate, seed).await);
            of_ours.push(take_turn(ours, rate, seed).await);
        }
        none.push(least_disturbed(of_none, &mut disturbances));
        with.push(least_disturbed(of_ours, &mut disturbances));
    }
    progress(format_args!(""));
    let disturbance = Spread::of(&disturbances).median * 100.0;
    figures.note(format!(
        "latency: for {disturbance:.1} % of that time other programs had a core that was wanted here; above 1 % they are what is measured"
    ));
    for (key, quantile) in [("p50", 0.5), ("p99", 0.99)] {
        let micros = |all: &[Latencies]| -> Vec<f64> {
            all.iter().map(|latencies| latencies.value_at_quantile(quantile) as f64 / 1e3).collect()
        };
        let (none, with) = (micros(&none), micros(&with));
        let added: Vec<f64> = with.iter().zip(&none).map(|(with, none)| with - none).collect();
        let what = format!("{} latency added by {}", key.to_uppercase(), ours.name());
        figures.add(Figure::new(format!("latency_added_us.{key}"), what, "µs", &added).beside("no filter", &none));
    }
}

/// How much the turn was disturbed, and what it showed.
async fn take_turn(System { envoy, clients, .. }: &mut System, rate: f64, seed: u64) -> (f64, Latencies) {
    let began = Began::now(envoy);
    let latencies = clients.arrive(rate, TURN, seed).await;
    (began.end(envoy).disturbance, latencies)
}

/// The third of the turns in which others took the least of the cores, together.
fn least_disturbed(mut turns: Vec<(f64, Latencies)>, disturbances: &mut Vec<f64>) -> Latencies {
    turns.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut all = clients::latencies();
    for (disturbance, latencies) in turns.iter().take(turns.len().div_ceil(3)) {
        all.add(latencies).expect("equal bounds");
        disturbances.push(*disturbance);
    }
    all
}
