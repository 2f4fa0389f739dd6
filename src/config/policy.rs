//! How a pool's configuration says that a host is chosen.

use super::reader::Fields;
use super::source::Source;

/// How a host is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Policy {
    /// By jobs in flight and latency: [`crate::core::score::least_score`].
    #[default]
    LeastScore,
    /// By when the job should be done: [`crate::core::score::least_time`].
    LeastTime {
        /// How many jobs a host runs at once, if that is not its `max_in_flight`.
        runs_at_once: Option<u32>,
    },
    /// At random, by what hosts tell of themselves: [`crate::core::score::weighted`].
    Weighted(Weights),
}

/// What the parts of `weighted` count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Of the memory that is free.
    pub memory: f32,
    /// Of the compute that is free.
    pub compute: f32,
    /// Of `1 / (latency + 1 s)`.
    pub latency: f32,
}

/// Jobs that belong together, such as those of one conversation, go to one host while it does not have more than its share.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// Where the key is written.
    pub source: Source,
    /// A host takes jobs for their key up to so many times its share of the jobs in flight.
    pub bound: f32,
}

impl Policy {
    /// The words of all policies.
    pub const WORDS: [&str; 3] = ["least_score", "least_time", "weighted"];

    /// The word in configurations, the status and explanations.
    pub fn word(&self) -> &'static str {
        match self {
            Self::LeastScore => "least_score",
            Self::LeastTime { .. } => "least_time",
            Self::Weighted(_) => "weighted",
        }
    }

    /// Whether it needs to know more of hosts than their jobs and latencies.
    pub fn wants_insight(&self) -> bool {
        *self != Self::LeastScore
    }

    pub(super) fn read(fields: &mut Fields) -> Self {
        let word = fields.word("policy", &Self::WORDS, &[], "least_score");
        let runs_at_once = fields.section("least_time", |fields| {
            let runs = fields.integer("runs_at_once", 1..=1_000_000, 1) as u32;
            fields.has("runs_at_once").then_some(runs)
        });
        let weights = fields.section("weighted", Weights::read);
        match word {
            "least_time" => Self::LeastTime { runs_at_once },
            "weighted" => Self::Weighted(weights),
            _ => Self::LeastScore,
        }
    }
}

impl Weights {
    fn read(fields: &mut Fields) -> Self {
        let weights = Self {
            memory: fields.number("memory", 0.0..=1000.0, 0.4),
            compute: fields.number("compute", 0.0..=1000.0, 0.4),
            latency: fields.number("latency", 0.0..=1000.0, 0.2),
        };
        if weights.memory + weights.compute + weights.latency == 0.0 {
            fields.note("memory", "0 together with compute: 0 and latency: 0 is no probability; one of them must be above 0");
        }
        weights
    }
}

impl Session {
    pub(super) fn read(fields: &mut Fields, trusts_headers: bool) -> Option<Self> {
        let bound = fields.number("bound", 1.0..=100.0, 1.25);
        Some(Self { source: Source::read_of_job(fields, "session", trusts_headers)?, bound })
    }
}
