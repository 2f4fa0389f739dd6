//! What it is worth to know how much work a job is and how fast a host: latencies of the same jobs on cards that are equal, and on
//! such that are not.
//!
//! ```text
//!   the record ──▶ clients ──▶ a system ──▶ eight cards, each with its speed
//!       │        name the class              tell their load: ORCA in answers, a metrics page
//!       └──▶ the limit (true lengths and speeds known, nothing lost)
//! ```
//!
//! It is done as in [`queue`](crate::queue), with the same parts: one record for all, an open loop, turns in rounds, time scaled
//! down. A card takes a job's length divided by the card's speed. The limit is no queue here but the card that is done with the
//! job first, for each job when it arrives.
//!
//! Some of what is compared learns while it works, and forgets while others have their turns. So before each turn every system
//! alike serves jobs of the record's kind that do not count, for about as long as it would take it to notice a new host. What a
//! system shows that has never seen a job is measured apart, once.

mod bursts;
mod picture;
mod points;
mod systems;
mod table;
mod two;

use std::path::Path;
use std::time::Duration;

use support::trace::{Arrival, poisson};

use crate::Effort;
use crate::figures::Figures;
use crate::options::{Options, chosen};
use crate::queue::alarm::Alarm;
use crate::queue::{MIX, turn::Turn};
use systems::Kind;

/// What the clients call the jobs of each part of the mix.
const CLASSES: [&str; 3] = ["draft", "story", "film"];

/// By the keys of the option.
const LOADS: [(&str, f64); 3] = [("0.7", 0.7), ("0.85", 0.85), ("0.95", 0.95)];

/// Where the figures have their targets.
const HEADLINE: f64 = 0.85;

/// Where jobs that do not count are sent.
const MODERATE: f64 = 0.7;

/// Eight cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fleet {
    Mixed,
    Equal,
}

impl Fleet {
    const ALL: [Self; 2] = [Self::Mixed, Self::Equal];

    fn key(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Equal => "equal",
        }
    }

    fn speeds(self) -> [f64; 8] {
        match self {
            Self::Mixed => [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0],
            Self::Equal => [1.0; 8],
        }
    }

    /// For the table.
    fn title(self) -> &'static str {
        match self {
            Self::Mixed => "mixed fleet (speeds 1, 1, 1, 1, ½, ½, 2, 2)",
            Self::Equal => "equal fleet (8 of speed 1)",
        }
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Points,
    Bursts,
    TwoEnvoys,
}

impl Part {
    const ALL: [Self; 3] = [Self::Points, Self::Bursts, Self::TwoEnvoys];

    fn key(self) -> &'static str {
        match self {
            Self::Points => "points",
            Self::Bursts => "bursts",
            Self::TwoEnvoys => "two_envoys",
        }
    }
}

/// The systems that `--only` knows.
pub fn keys() -> Vec<&'static str> {
    Kind::ALL.map(Kind::key).into_iter().chain(two::keys()).collect()
}

/// What `--fleet`, `--load` and `--part` know.
pub fn words() -> [Vec<&'static str>; 3] {
    [Fleet::ALL.map(Fleet::key).to_vec(), LOADS.map(|(key, _)| key).to_vec(), Part::ALL.map(Part::key).to_vec()]
}

/// How much is measured, and at which scale.
#[derive(Clone, Debug)]
struct Plan {
    second: Duration,
    /// At each point, if so; else as many as the point is worth.
    rounds: Option<usize>,
    /// Of each system in each round.
    jobs: usize,
    /// Before each turn, and the first that a system ever gets.
    lead: usize,
    cold: usize,
    /// Two Envoys ask their cards for reports, which takes its time: their jobs are longer by so much, and fewer.
    stretch: u32,
    jobs_of_two: usize,
    seed: u64,
    fleets: Vec<Fleet>,
    loads: Vec<f64>,
    parts: Vec<Part>,
}

impl Plan {
    fn new(effort: Effort, options: &Options) -> Self {
        let (second_ms, jobs, lead, cold) = effort.pick((50.0, 600, 60, 200), (10.0, 60, 10, 20));
        let (stretch, jobs_of_two) = effort.pick((8, 300), (1, 60));
        let loads: Vec<f64> = chosen(&LOADS, |(key, _)| key, options.load.as_deref()).into_iter().map(|(_, load)| load).collect();
        let quick = effort == Effort::Quick;
        Self {
            second: Duration::from_secs_f64(options.second_ms.unwrap_or(second_ms) / 1e3),
            rounds: options.rounds.or(quick.then_some(1)),
            jobs: options.jobs.unwrap_or(jobs),
            lead,
            cold,
            stretch,
            jobs_of_two: options.jobs.unwrap_or(jobs_of_two),
            seed: options.seed.unwrap_or(7),
            fleets: if quick && options.fleet.is_none() {
                vec![Fleet::Mixed]
            } else {
                chosen(&Fleet::ALL, Fleet::key, options.fleet.as_deref())
            },
            loads: if quick && options.load.is_none() { vec![HEADLINE] } else { loads },
            parts: chosen(&Part::ALL, Part::key, options.part.as_deref()),
        }
    }

    fn does(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// Most where the targets are.
    fn rounds(&self, fleet: Fleet, load: f64) -> usize {
        let worth = match (fleet, load == HEADLINE) {
            (Fleet::Mixed, true) => 4,
            (Fleet::Equal, true) => 2,
            _ => 1,
        };
        self.rounds.unwrap_or(worth)
    }

    fn mix(&self) -> [(f64, Duration); 3] {
        MIX.map(|(part, seconds)| (part, self.second.mul_f64(seconds)))
    }

    /// Jobs on this fleet; each `number` gives another record.
    fn record(&self, fleet: Fleet, load: f64, jobs: usize, number: u64) -> Vec<Arrival> {
        let seed = ((self.seed * 10 + fleet as u64) * 100 + (load * 100.0) as u64) * 1_000 + number;
        poisson(&self.mix(), load, fleet.speeds().iter().sum(), jobs, seed)
    }

    /// Jobs that do not count.
    fn lead(&self, fleet: Fleet) -> Vec<Arrival> {
        self.record(fleet, MODERATE, self.lead, 998)
    }

    /// The first jobs that a system gets.
    fn cold(&self, fleet: Fleet) -> Vec<Arrival> {
        self.record(fleet, MODERATE, self.cold, 999)
    }

    /// At another scale.
    fn stretched(&self) -> Self {
        Self { second: self.second * self.stretch, jobs: self.jobs_of_two, ..self.clone() }
    }
}

/// What one system showed, turn by turn.
struct Shown<K> {
    kind: K,
    turns: Vec<Turn>,
}

/// Lets all take their turns.
pub async fn run(effort: Effort, options: &Options, figures: &mut Figures) {
    let plan = Plan::new(effort, options);
    let all: &[Kind] = if effort == Effort::Quick && options.only.is_none() { &Kind::QUICK } else { &Kind::ALL };
    let kinds = chosen(all, Kind::key, options.only.as_deref());
    note(&plan, figures);
    let alarm = Alarm::start();
    let mut points = Vec::new();
    for fleet in plan.fleets.iter().copied() {
        let has_bursts = plan.does(Part::Bursts) && fleet == Fleet::Mixed;
        if kinds.is_empty() || !(plan.does(Part::Points) || has_bursts) {
            continue;
        }
        let mut field = points::Field::start(&plan, fleet, &kinds, &alarm, figures).await;
        if plan.does(Part::Points) {
            points.extend(field.points(&plan, figures).await);
        }
        if has_bursts {
            bursts::run(&plan, &mut field, figures).await;
        }
    }
    if plan.does(Part::TwoEnvoys) {
        two::run(&plan.stretched(), effort, options.only.as_deref(), &alarm, figures).await;
    }
    if !points.is_empty() {
        picture::write(&points, options.svg.as_deref().unwrap_or(Path::new("dist/choice.svg")));
    }
}

fn note(plan: &Plan, figures: &mut Figures) {
    let scale = plan.second.as_secs_f64() * 1e3;
    let mix: Vec<String> = MIX
        .iter()
        .zip(CLASSES)
        .map(|((part, seconds), class)| format!("{:.0} % {class} × {:.1} ms", part * 100.0, seconds * scale))
        .collect();
    figures.note(format!(
        "8 cards that run one job at a time and take its length over their speed; {}: {scale:.1} ms for each second; {} jobs in a round",
        mix.join(", "),
        plan.jobs
    ));
    figures.note(format!(
        "the same records for all (seed {}): Poisson arrivals, of each length exactly its part, each round stretched to its load exactly, which is of all speeds together; a round begins with idle cards and ends with the last answer",
        plan.seed
    ));
    figures.note("an open loop: latency is from when a job was due to its whole answer; two workers each, HTTP/1.1, kept connections on both sides; each job names its class in x-job-class");
    figures.note(format!(
        "a warm-up for all alike: {} jobs of the record's kind at load {MODERATE}, once and counted apart (cold), and {} before each turn, which do not count",
        plan.cold, plan.lead
    ));
    figures.note("the limit: a simulation that gives each job, when it arrives, to the card that will be done with it first, knows true lengths and speeds, and loses no time: no hop, no gap; it is no bound, for it never lets a job overtake another: what does may be below it");
}
