//! Systems that take turns under saturation, and what a request costs each.
//!
//! Other programs, and other machines on the same hardware, make requests dearer and never cheaper: they fill caches, and take the core. So
//! in each round every system has many short turns, in turns with the others, and the cheapest of them is what it costs; the
//! figures are medians over the rounds.

use std::fmt;
use std::io::{IsTerminal, Write};

use crate::measured::Began;
use crate::systems::{Chooser, System};

/// What one system showed in one round.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// User and system time of the whole Envoy process for each request, microseconds: in its cheapest turn.
    pub cpu: f64,
    /// Requests a second, while its only worker is saturated: in its fastest turn.
    pub rate: f64,
}

/// How the turns are taken.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// Rounds.
    pub rounds: usize,
    /// How many turns each system has in each of them.
    pub turns: usize,
    /// Requests measured in a turn.
    pub requests: usize,
    /// Requests before them, which fill caches and connections again.
    pub warm_up: usize,
}

/// See [`take_turns`].
const FIRST_WARM_UP: usize = 20;

/// All costs, by round and by system.
pub struct Rounds {
    systems: Vec<(Chooser, usize)>,
    costs: Vec<Vec<Cost>>,
}

/// Lets all systems take turns; before them each serves [`FIRST_WARM_UP`] times a turn's requests, in which V8 compiles what is hot.
pub async fn take_turns(systems: &mut [System], plan: Turns) -> Rounds {
    for system in systems.iter_mut() {
        progress(format_args!("warming up: {}", system.name()));
        system.clients.saturate(plan.requests * FIRST_WARM_UP).await;
    }
    let mut costs = Vec::new();
    for round in 0..plan.rounds {
        progress(format_args!("round {} of {}", round + 1, plan.rounds));
        let mut this = vec![Cost { cpu: f64::INFINITY, rate: 0.0 }; systems.len()];
        for turn in 0..plan.turns {
            for place in 0..systems.len() {
                // Each time another one begins, and they go the other way: whatever drifts, drifts for all.
                let forth = (turn + place) % systems.len();
                let index = if turn % 2 == 0 { forth } else { systems.len() - 1 - forth };
                let cost = take_turn(&mut systems[index], plan).await;
                this[index] = Cost { cpu: this[index].cpu.min(cost.cpu), rate: this[index].rate.max(cost.rate) };
            }
        }
        costs.push(this);
    }
    progress(format_args!(""));
    Rounds { systems: systems.iter().map(|system| (system.chooser, system.hosts)).collect(), costs }
}

async fn take_turn(System { envoy, clients, .. }: &mut System, plan: Turns) -> Cost {
    clients.saturate(plan.warm_up).await;
    let began = Began::now(envoy);
    clients.saturate(plan.requests).await;
    let measured = began.end(envoy);
    let requests = plan.requests as f64;
    Cost { cpu: measured.cpu.as_secs_f64() * 1e6 / requests, rate: requests / measured.took.as_secs_f64() }
}

/// Shows how far it is, where somebody watches; empty at the end.
pub fn progress(text: fmt::Arguments<'_>) {
    let mut out = std::io::stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K  {text}\r");
        let _ = out.flush();
    }
}

impl Rounds {
    fn index(&self, chooser: Chooser, hosts: usize) -> usize {
        let wanted = (chooser, hosts);
        self.systems.iter().position(|system| *system == wanted).unwrap_or_else(|| panic!("{wanted:?} took no turns"))
    }

    /// A value of each round.
    pub fn each(&self, chooser: Chooser, hosts: usize, value: impl Fn(Cost) -> f64) -> Vec<f64> {
        let index = self.index(chooser, hosts);
        self.costs.iter().map(|round| value(round[index])).collect()
    }

    /// CPU time for each request added to that of no filter with the same hosts in the same round, microseconds.
    pub fn added(&self, chooser: Chooser, hosts: usize) -> Vec<f64> {
        self.difference(chooser, Chooser::RoundRobin, hosts)
    }

    /// CPU time for each request added to that of another with the same hosts in the same round, microseconds.
    pub fn difference(&self, chooser: Chooser, other: Chooser, hosts: usize) -> Vec<f64> {
        let other = self.each(other, hosts, |cost| cost.cpu);
        let own = self.each(chooser, hosts, |cost| cost.cpu);
        own.iter().zip(&other).map(|(own, other)| own - other).collect()
    }
}
