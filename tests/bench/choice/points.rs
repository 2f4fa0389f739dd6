//! The systems on one fleet, and their turns at each load.

use std::time::Duration;

use support::trace::{Arrival, Ran, earliest_completion, one_queue};

use super::systems::{Kind, Scaled};
use super::table::Table;
use super::{CLASSES, Fleet, HEADLINE, MODERATE, Plan, Shown};
use crate::figures::{Figure, Figures};
use crate::queue::alarm::Alarm;
use crate::queue::cards::Cards;
use crate::queue::systems::{self, Compared, System};
use crate::queue::table::{grid, quantile};
use crate::queue::turn::Turn;
use crate::rounds::progress;

/// A fleet, and what stands in front of it.
pub struct Field<'a> {
    pub fleet: Fleet,
    pub alarm: &'a Alarm,
    pub cards: Cards,
    pub systems: Vec<System<Scaled>>,
    /// Jobs before each turn that do not count.
    lead: Vec<Arrival>,
}

/// The P99 of each system over the limit's at one load, for the picture.
pub struct Point {
    pub fleet: Fleet,
    pub load: f64,
    pub over_limit: Vec<(Kind, f64)>,
}

impl<'a> Field<'a> {
    /// Starts all of them, and lets each have its first jobs.
    pub async fn start(plan: &Plan, fleet: Fleet, kinds: &[Kind], alarm: &'a Alarm, figures: &mut Figures) -> Self {
        let cards = Cards::start(&fleet.speeds(), true, alarm).await;
        let kinds: Vec<Scaled> = kinds.iter().map(|kind| Scaled { kind: *kind, second: plan.second }).collect();
        let systems = systems::start(&kinds, &cards.addresses, &CLASSES, figures).await;
        let mut field = Self { fleet, alarm, cards, systems, lead: plan.lead(fleet) };
        field.cold(&plan.cold(fleet), figures).await;
        field
    }

    /// One system serves this record, after jobs that do not count.
    pub async fn turn(&mut self, index: usize, record: &[Arrival]) -> Turn {
        take_turn(&mut self.systems[index], &self.lead, record, &self.cards, self.alarm).await
    }

    async fn cold(&mut self, record: &[Arrival], figures: &mut Figures) {
        let fleet = self.fleet;
        let limit = p99(&limit(record, fleet));
        let mut rows = Vec::new();
        for system in &mut self.systems {
            let kind = system.kind.kind;
            progress(format_args!("first jobs: {}, {}", fleet.key(), kind.name()));
            let turn = Turn::take(system, record, &self.cards, self.alarm).await;
            let over = p99(&turn) / limit;
            rows.push((kind.name(), vec![ms(p99(&turn)), format!("{over:.2}"), turn.errors.to_string()]));
            let words = format!("P99 of the first {} jobs, {}, {}, over the limit", record.len(), fleet.key(), kind.name());
            figures.add_unprinted(Figure::new(
                format!("{}.cold_p99_over_limit.{}", fleet.key(), kind.key()),
                words,
                "×",
                &[over],
            ));
            fail_on_errors(kind.name(), &turn, figures);
        }
        progress(format_args!(""));
        let corner = format!("{}, cold: the first {} jobs, load {MODERATE}", fleet.key(), record.len());
        figures.table(grid(&corner, &["P99 ms", "P99/limit", "errors"], &rows));
    }

    /// All turns at all loads.
    pub async fn points(&mut self, plan: &Plan, figures: &mut Figures) -> Vec<Point> {
        let fleet = self.fleet;
        let records: Vec<(f64, Vec<Vec<Arrival>>)> = plan
            .loads
            .iter()
            .map(|load| {
                let record = |round| plan.record(fleet, *load, plan.jobs, round as u64);
                (*load, (0..plan.rounds(fleet, *load)).map(record).collect())
            })
            .collect();
        let mut shown: Vec<Vec<Shown<Kind>>> = records
            .iter()
            .map(|_| self.systems.iter().map(|system| Shown { kind: system.kind.kind, turns: Vec::new() }).collect())
            .collect();
        let most = records.iter().map(|(_, rounds)| rounds.len()).max().unwrap_or(0);
        for round in 0..most {
            for ((load, records), shown) in records.iter().zip(&mut shown) {
                let Some(record) = records.get(round) else { continue };
                let limit = p99(&limit(record, fleet));
                for place in 0..self.systems.len() {
                    // Each round another one begins.
                    let index = (place + round * 3) % self.systems.len();
                    let name = self.systems[index].kind.name();
                    progress(format_args!("{}, load {load}, round {} of {}: {name}", fleet.key(), round + 1, records.len()));
                    let turn = self.turn(index, record).await;
                    progress(format_args!(""));
                    let p99 = p99(&turn);
                    eprintln!(
                        "  {}, load {load}, round {} of {}: {name:24} P99 {:7.1} ms, {:5.2} of the limit; {} errors; by card {:?}",
                        fleet.key(),
                        round + 1,
                        records.len(),
                        p99 * 1e3,
                        p99 / limit,
                        turn.errors,
                        turn.by_card
                    );
                    fail_on_errors(name, &turn, figures);
                    if shown[index].kind.has_slots() && turn.account.most_held > 1 {
                        figures.fail(format!("{name}: a host with one slot had more than one job"));
                    }
                    shown[index].turns.push(turn);
                }
            }
        }
        let mut points = Vec::new();
        for ((load, records), shown) in records.iter().zip(&shown) {
            let table = Table::new(fleet, *load, records, shown);
            table.give(*load == HEADLINE, figures);
            points.push(Point { fleet, load: *load, over_limit: table.over_limit() });
        }
        points
    }
}

/// A system serves this record, after jobs that do not count.
pub async fn take_turn<K>(system: &mut System<K>, lead: &[Arrival], record: &[Arrival], cards: &Cards, alarm: &Alarm) -> Turn {
    system.clients.run(lead, cards, alarm).await;
    Turn::take(system, record, cards, alarm).await
}

pub fn fail_on_errors(name: &str, turn: &Turn, figures: &mut Figures) {
    if turn.errors > 0 {
        figures.fail(format!("{name}: {} jobs were not served, or twice", turn.errors));
    }
}

/// What the limit makes of a record.
pub fn limit(record: &[Arrival], fleet: Fleet) -> Turn {
    simulated(&earliest_completion(record, &fleet.speeds()), fleet)
}

/// What one queue in front of the fleet's cards makes of it, which knows nothing of lengths and speeds.
pub fn queue(record: &[Arrival], fleet: Fleet) -> Turn {
    simulated(&one_queue(record, &fleet.speeds(), Duration::ZERO), fleet)
}

fn simulated(jobs: &[Ran], fleet: Fleet) -> Turn {
    Turn::simulated(jobs, fleet.speeds().len(), Duration::ZERO)
}

/// In seconds.
pub fn p99(turn: &Turn) -> f64 {
    quantile(&turn.latencies, 0.99)
}

fn ms(seconds: f64) -> String {
    crate::queue::table::milliseconds(seconds)
}
