//! What it is worth that jobs wait in front of the GPUs, and not inside them: latencies, and GPUs that idle while somebody
//! waits.
//!
//! ```text
//!   the record ──▶ clients ──▶ a system ──▶ eight cards that run one job at a time
//!       │           latency from when      times of each job
//!       │           a job was due                 │
//!       └──▶ the ideal (one queue, nothing lost) ─┴─▶ Account
//! ```
//!
//! The record, made once from a seed, is the same for all: when each job is due, and how long a card runs it. An open loop: a
//! job is sent when it is due, and its latency counts from then, however late it was sent. In each round every system has one
//! turn at each load; the others idle meanwhile.
//!
//! Time is scaled down, so that a run takes minutes. That is to the systems' disadvantage beside the ideal, which loses no
//! time: what a card idles between two jobs does not depend on their length. It is a good millisecond of an Envoy that has
//! little to do on two shared cores (caches are cold and threads asleep; HAProxy: a third of one), nothing beside jobs of
//! seconds, and lost for each job of some tens of milliseconds; at load 0.95 a hundredth of the cards' time is a fifth of what
//! is free. By simulation a gap of 1.5 ms raises the ideal's P99 there by 20 % if a second becomes 25 ms, by 10 % with 50 ms (6
//! to 13, as the arrivals have it), and by 4 % with 100 ms, which is what a run of less than half an hour has time for.

pub mod alarm;
pub mod cards;
pub mod clients;
mod report;
pub mod systems;
pub mod table;
pub mod turn;

use std::time::Duration;

use support::trace::{Arrival, Ran, one_queue, poisson};

use crate::Effort;
use crate::figures::Figures;
use crate::options::{Options, chosen};
use crate::rounds::progress;
use alarm::Alarm;
use cards::Cards;
use systems::{Compared, Kind};
use table::Table;
use turn::Turn;

const CARDS: usize = 8;

/// Parts of the jobs, and how many seconds a card runs each.
pub const MIX: [(f64, f64); 3] = [(0.70, 0.8), (0.25, 4.0), (0.05, 6.0)];

const LOADS: [f64; 2] = [0.85, 0.95];

/// Before the first round: as many connections to the cards as a run needs, and hot code.
const WARM_UP: (usize, usize, Duration) = (400, 64, Duration::from_millis(1));

/// Lone jobs before each turn, which are what the hop is measured with, and how long a card runs each.
const HOPS: (usize, Duration) = (24, Duration::from_millis(4));

/// How much is measured, and at which scale.
#[derive(Clone, Copy, Debug)]
struct Plan {
    second: Duration,
    rounds: usize,
    /// Of each system in each round, at each load.
    jobs: usize,
    seed: u64,
}

impl Plan {
    fn new(effort: Effort, options: &Options) -> Self {
        let (second_ms, rounds, jobs) = effort.pick((100.0, 3, 1000), (10.0, 1, 100));
        Self {
            second: Duration::from_secs_f64(options.second_ms.unwrap_or(second_ms) / 1e3),
            rounds: options.rounds.unwrap_or(rounds),
            jobs: options.jobs.unwrap_or(jobs),
            seed: options.seed.unwrap_or(6),
        }
    }

    /// One for each round.
    fn records(&self, load: f64) -> Vec<Vec<Arrival>> {
        let mix = MIX.map(|(part, seconds)| (part, self.second.mul_f64(seconds)));
        let seed = |round: usize| self.seed * 10_000 + (load * 100.0) as u64 * 100 + round as u64;
        (0..self.rounds).map(|round| poisson(&mix, load, CARDS as f64, self.jobs, seed(round))).collect()
    }
}

/// What the ideal makes of the record, if each job is answered so much later than it ends, and a card that was waited for pauses.
fn ideal(record: &[Arrival], hop: Duration, pause: Duration) -> Turn {
    Turn::simulated(&one_queue(record, &[1.0; CARDS], pause), CARDS, hop)
}

/// What one system showed at one load, round by round.
pub struct Shown {
    kind: Kind,
    turns: Vec<Turn>,
}

/// Of the systems.
pub fn keys() -> Vec<&'static str> {
    Kind::ALL.map(Kind::key).to_vec()
}

/// Lets all take their turns.
pub async fn run(effort: Effort, options: &Options, figures: &mut Figures) {
    let plan = Plan::new(effort, options);
    let alarm = Alarm::start();
    let cards = Cards::start(&[1.0; CARDS], false, &alarm).await;
    let kinds = chosen(&Kind::ALL, Kind::key, options.only.as_deref());
    let records = LOADS.map(|load| plan.records(load));
    note(&plan, &records, figures);
    let mut systems = systems::start(&kinds, &cards.addresses, &[], figures).await;
    for system in &mut systems {
        progress(format_args!("warming up: {}", system.kind.name()));
        system.clients.warm_up(WARM_UP.0, WARM_UP.1, WARM_UP.2).await;
    }
    let mut shown =
        LOADS.map(|_| systems.iter().map(|system| Shown { kind: system.kind, turns: Vec::new() }).collect::<Vec<_>>());
    for round in 0..plan.rounds {
        for ((load, records), shown) in LOADS.iter().zip(&records).zip(&mut shown) {
            let record = &records[round];
            let ideal = table::quantile(&ideal(record, Duration::ZERO, Duration::ZERO).latencies, 0.99);
            for place in 0..systems.len() {
                // Each round another one begins.
                let index = (place + round * 3) % systems.len();
                let system = &mut systems[index];
                let hops = system.clients.hops(HOPS.0, HOPS.1).await;
                let turn = Turn { hops, ..Turn::take(system, record, &cards, &alarm).await };
                progress(format_args!(""));
                let p99 = table::quantile(&turn.latencies, 0.99);
                eprintln!(
                    "  round {} of {}, load {load}: {:20} P99 {:7.1} ms, {:5.2} of the ideal; {} errors",
                    round + 1,
                    plan.rounds,
                    system.kind.name(),
                    p99 * 1e3,
                    p99 / ideal,
                    turn.errors
                );
                shown[index].turns.push(turn);
            }
        }
    }
    for ((load, records), shown) in LOADS.into_iter().zip(&records).zip(&shown) {
        Table::new(load, records, shown).give(figures);
    }
    let errors: usize = shown.iter().flatten().flat_map(|shown| &shown.turns).map(|turn| turn.errors).sum();
    if errors > 0 {
        figures.fail(format!("{errors} jobs were not served, or twice"));
    }
    let held = |shown: &&Shown| shown.kind == Kind::Ours && shown.turns.iter().any(|turn| turn.account.most_held > 1);
    if shown.iter().flatten().any(|shown| held(&shown)) {
        figures.fail("ours, queue: a host with one slot had more than one job");
    }
}

fn note(plan: &Plan, records: &[Vec<Vec<Arrival>>; 2], figures: &mut Figures) {
    let mix: Vec<String> = MIX
        .iter()
        .map(|(part, seconds)| format!("{:.0} % × {:.1} ms", part * 100.0, plan.second.mul_f64(*seconds).as_secs_f64() * 1e3))
        .collect();
    figures.note(format!(
        "{CARDS} cards that run one job at a time; {}: {:.1} ms for each second; {} jobs for each system and load, in {} rounds",
        mix.join(", "),
        plan.second.as_secs_f64() * 1e3,
        plan.jobs * plan.rounds,
        plan.rounds
    ));
    figures.note(format!(
        "the same record for all (seed {}): Poisson arrivals, of each length exactly its part, each round stretched to its load exactly; a round begins with idle cards and ends with the last answer",
        plan.seed
    ));
    figures.note("an open loop: latency is from when a job was due to its whole answer; two workers each, HTTP/1.1, kept connections on both sides");
    figures.note("the ideal: a simulation of one first-in-first-out queue in front of the same cards on the same record, which loses no time at all: no hop, no gap");
    let waited: Vec<String> = LOADS
        .iter()
        .zip(records)
        .map(|(load, records)| {
            let jobs: Vec<Ran> = records.iter().flat_map(|record| one_queue(record, &[1.0; CARDS], Duration::ZERO)).collect();
            let waited = jobs.iter().filter(|job| job.started > job.arrived).count();
            format!("{:.0} % at {load}", waited as f64 * 100.0 / jobs.len() as f64)
        })
        .collect();
    figures.note(format!("in the ideal so many of the jobs wait: {}", waited.join(", ")));
}
