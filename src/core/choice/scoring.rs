//! The score of each host for one job, by the pool's policy.
//!
//! | policy | ties |
//! |---|---|
//! | `least_score` | within 1 % of `in_flight_weight + latency_weight` of the lowest |
//! | `least_time` | within 5 % of the shortest time: what is learned of equal hosts differs by so much |
//! | `weighted` | none: each score is drawn at random |
//!
//! Without what it needs to know a policy is least in-flight: the number of jobs, and equal numbers are ties.

use super::Load;
use crate::config::{Policy, Pool};
use crate::core::learning::{self, Job};
use crate::core::random::Random;
use crate::core::record::{Insight, Record};
use crate::core::roster::{BEHIND, Place, Roster};
use crate::core::score::least_score;
use crate::core::score::least_time::{self, Ahead};
use crate::core::score::weighted;
use crate::core::time::Instant;

/// Width of the tie band, as a part of the sum of the two weights.
const TIE_BAND: f64 = 0.01;

/// Width of the tie band, as a part of the time.
const TIES_IN_TIME: f64 = 0.05;

/// What a score is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Parts {
    /// `least_score`: what the jobs in flight, this one included, and the latency make.
    Score {
        /// The jobs' part.
        jobs: f64,
        /// The latency's part.
        latency: f64,
    },
    /// `least_time`.
    Time {
        /// Milliseconds of work on a host of speed 1: the job's own, and that of those on the host.
        own: f64,
        /// See `own`.
        ahead: f64,
        /// How fast the host is.
        speed: f64,
    },
    /// `weighted`: its chance, before it is made part of the pool's sum.
    Chance(f64),
    /// Least in-flight, because the policy knows too little yet: the jobs there.
    Jobs(u32),
}

/// How hosts are scored for one job.
pub struct Scoring<'a> {
    insights: &'a [[u8; Insight::BYTES]],
    how: How,
    now: Instant,
}

enum How {
    Score {
        band: f64,
    },
    /// The job's work, and what counts for a job of which none is known, in milliseconds.
    Time {
        own: f64,
        mean: f64,
        /// Whether those that run are believed to make progress: where jobs wait inside the hosts, and one is like the other of its class.
        makes_progress: bool,
    },
    Chance,
    Jobs,
}

impl<'a> Scoring<'a> {
    /// For this job.
    pub fn new(record: &'a Record, pool: &Pool, roster: &Roster, job: &Job, now: Instant) -> Self {
        let how = match &pool.policy {
            Policy::LeastScore => {
                let sum = f64::from(pool.score.in_flight_weight) + f64::from(pool.score.latency_weight);
                How::Score { band: TIE_BAND * sum }
            }
            Policy::LeastTime { .. } => match learning::work_of(record, job).zip(learning::mean_work(record)) {
                Some((own, mean)) => {
                    let makes_progress = pool.queue.is_none() && learning::are_alike(record);
                    How::Time { own: own.into(), mean: mean.into(), makes_progress }
                }
                None => How::Jobs,
            },
            Policy::Weighted(_) if roster.tells() => How::Chance,
            Policy::Weighted(_) => How::Jobs,
        };
        Self { insights: record.insight_bytes(), how, now }
    }

    /// The job's work in milliseconds on a host of speed 1, where that counts and is known.
    pub fn work(&self) -> Option<f64> {
        match self.how {
            How::Time { own, .. } => Some(own),
            _ => None,
        }
    }

    /// How far a score may be above the lowest, to be as good.
    pub fn band(&self, lowest: f64) -> f64 {
        match self.how {
            How::Score { band } => band,
            // Of what is behind others only its own time.
            How::Time { .. } => TIES_IN_TIME * (lowest % BEHIND),
            How::Chance | How::Jobs => 0.0,
        }
    }

    /// The score of a host with so many jobs, by what it does alone, as it is compared.
    #[inline]
    pub fn drawn(&self, place: &Place, load: Load, random: &mut Random) -> f64 {
        match self.how {
            How::Chance => weighted::draw(place.chance, random),
            _ => self.own(place, load),
        }
    }

    /// The same as it is shown.
    #[inline]
    pub fn own(&self, place: &Place, load: Load) -> f64 {
        match self.how {
            How::Score { .. } => (least_score::of_jobs(load.jobs, place.per_job) + place.latency) * place.penalty,
            How::Time { own, .. } => least_time::time(self.ahead(place, load), own, place.at_once, place.speed) * place.penalty,
            How::Chance => place.chance,
            How::Jobs => (f64::from(load.jobs) + 1.0) * place.penalty,
        }
    }

    /// What the score of a host with so many jobs is made of.
    pub fn parts(&self, place: &Place, load: Load) -> Parts {
        match self.how {
            How::Score { .. } => Parts::Score { jobs: least_score::of_jobs(load.jobs, place.per_job), latency: place.latency },
            How::Time { own, .. } => Parts::Time { own, ahead: self.ahead(place, load).work, speed: place.speed },
            How::Chance => Parts::Chance(place.chance),
            How::Jobs => Parts::Jobs(load.jobs),
        }
    }

    /// What stands before the job on a host with so many jobs.
    fn ahead(&self, place: &Place, load: Load) -> Ahead {
        let How::Time { mean, makes_progress, .. } = self.how else { return Ahead::default() };
        let insight = self.insights.get(place.slot as usize).map(Insight::read).unwrap_or_default();
        let ahead = insight.ahead(load, mean, place.speed, self.now);
        if !makes_progress || place.at_once > 1 {
            return ahead;
        }
        ahead.progress(insight.took(self.now) * place.speed)
    }
}
