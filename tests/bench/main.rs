//! Compares Plimsoll with what it is compared with: `scripts/bench [--quick] [OPTION…] [NAME…]`.
//!
//! ```text
//!   a scenario (overhead, …) ── starts ──▶ systems (Envoys that differ in one thing) over hosts that answer at once
//!            │                                  ▲
//!            │                                  └─ clients: closed loop (rounds) or open loop
//!            └── figures ──▶ the table, dist/bench.json
//! ```
//!
//! Only what was measured in one run is compared: the machine is shared, and its speed changes by the minute. The systems take
//! turns in short slices, each round in another order, and a figure is the median over the rounds.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a benchmark panics to say that something is wrong: a figure that is measured all the same would be worse"
)]

mod attempts;
mod choice;
mod clients;
mod contention;
mod cores;
mod discovery;
mod figures;
mod hosts;
mod idle;
mod latency;
mod measured;
mod modules;
mod native;
mod options;
mod overhead;
mod page;
mod queue;
mod rounds;
mod scale;
mod systems;
mod two_workers;

use std::process::ExitCode;

use figures::Figures;
use options::Options;

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Enough for figures that can be trusted.
    Full,
    /// Enough to see that the benchmark works.
    Quick,
}

impl Effort {
    /// The one or the other.
    pub fn pick<T>(self, full: T, quick: T) -> T {
        match self {
            Self::Full => full,
            Self::Quick => quick,
        }
    }
}

/// The comparisons by name, with what each is about, and whether it runs unasked.
const SCENARIOS: [(&str, &str, bool); 8] = [
    ("overhead", "what a choice costs: CPU time, throughput, latency, lost transactions", true),
    ("scale", "what a choice costs with 1,024 hosts: CPU time, memory, bytes", true),
    ("contention", "what workers take from each other at one record: native threads, no Envoy", true),
    ("discovery", "what it costs to follow Envoy's own membership: CPU time, bytes", true),
    (
        "queue",
        "what it is worth that jobs wait in front of the GPUs: latency, idle GPUs; beside Envoy, nginx, HAProxy, the ideal",
        true,
    ),
    (
        "choice",
        "what it is worth to learn how much work jobs are and how fast hosts: latency on cards that are equal and on such that are not",
        true,
    ),
    ("page", "what it costs the traffic that the status page is looked at: throughput, latency", true),
    ("attempts", "what a second Wasm filter would cost that sees each attempt: CPU time", false),
];

async fn run(scenario: &str, effort: Effort, options: &Options, figures: &mut Figures) {
    match scenario {
        "overhead" => overhead::run(effort, figures).await,
        "scale" => scale::run(effort, figures).await,
        "contention" => contention::run(effort, figures),
        "discovery" => discovery::run(effort, figures).await,
        "queue" => queue::run(effort, options, figures).await,
        "choice" => choice::run(effort, options, figures).await,
        "page" => page::run(effort, figures).await,
        "attempts" => attempts::run(effort, figures).await,
        _ => unreachable!("names are checked against the list"),
    }
}

/// Refuses keys that none of the comparisons named knows.
fn check(names: &[String], options: &Options) -> Result<(), String> {
    let systems = names.iter().flat_map(|name| match name.as_str() {
        "queue" => queue::keys(),
        "choice" => choice::keys(),
        _ => Vec::new(),
    });
    let [fleets, loads, parts] = choice::words();
    for (option, keys, known) in [
        ("--only", &options.only, systems.collect()),
        ("--fleet", &options.fleet, fleets),
        ("--load", &options.load, loads),
        ("--part", &options.part, parts),
    ] {
        if let Some(key) = Options::unknown(keys.as_deref(), &known) {
            return Err(format!("{option} {key}: there are {}", known.join(", ")));
        }
    }
    Ok(())
}

/// One thread for the clients and the hosts, so that on two cores the Envoy that is measured has the other one.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut effort = Effort::Full;
    let mut options = Options::default();
    let mut names = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => effort = Effort::Quick,
            "--list" => {
                SCENARIOS.iter().for_each(|(name, about, _)| println!("{name:12} {about}"));
                println!("\n{}", Options::HELP);
                return ExitCode::SUCCESS;
            }
            name if SCENARIOS.iter().any(|(known, ..)| *known == name) => names.push(argument),
            option if option.starts_with("--") => {
                if !options.take(option, arguments.next().as_deref()) {
                    eprintln!("bench: {option}: no such option, or not with this value; {}", Options::HELP);
                    return ExitCode::from(2);
                }
            }
            other => {
                eprintln!("bench: {other}: no such comparison; scripts/bench --list names them");
                return ExitCode::from(2);
            }
        }
    }
    if names.is_empty() {
        names.extend(SCENARIOS.iter().filter(|(.., unasked)| *unasked).map(|(name, ..)| (*name).to_owned()));
    }
    if let Err(line) = check(&names, &options) {
        eprintln!("bench: {line}");
        return ExitCode::from(2);
    }
    let mut figures = Figures::new(effort);
    let cores = cores::Cores::divide();
    for name in names {
        figures.begin(&name);
        run(&name, effort, &options, &mut figures).await;
        cores.for_all();
    }
    print!("{figures}");
    figures.write("dist/bench.json");
    figures.failures().iter().for_each(|failure| eprintln!("bench: {failure}"));
    if figures.failures().is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
