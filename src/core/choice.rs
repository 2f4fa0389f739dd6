//! The choice of a host: `least_score`.
//!
//! ```text
//! score = in_flight_weight × (in_flight + 1) / weight + latency_weight × latency / target_latency        lowest wins
//! ```
//!
//! The `+ 1` is the job being placed: without it an empty host of weight 1 would beat an empty one of weight 4 as often as not, and a
//! heavy host with one job would lose to a light one with none. The latency is the host's EWMA, faded towards the pool's mean by its age
//! ([`super::ewma`]); a host without history has the mean. The mean weighs each host by the freshness of its evidence, so that a host
//! that was slow long ago does not hold up the mean towards which it is to fade.
//!
//! Scores within 1 % of `in_flight_weight + latency_weight` of the lowest are ties, broken at random: without a band, the host
//! with the luckiest average would get every job of an idle pool.

use std::time::Duration;

use super::ewma::Fading;
use super::random::Random;
use super::record::{Host, Record};
use super::roster::Roster;
use super::time::Instant;
use crate::config::{Pool, Score};

/// Width of the tie band, as a part of the sum of the two weights.
const TIE_BAND: f32 = 0.01;

/// Added to the score of a host without a free slot, so that it is named as an alternate only after all hosts with one.
/// Far above any real score (weights up to 1,000, a million jobs), far below where adding it would lose the score's digits.
const FULL: f64 = 1e12;

/// Shortest and longest advice to a client when all slots are taken.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What to do with a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Send it to `hosts[0]`; the others are its alternates, best first. Indices into the configuration's hosts, never empty, each once.
    Chosen(Vec<usize>),
    /// Every eligible host is at its limit; a slot should be free after this time.
    Full(Duration),
    /// No host is eligible.
    NoHost,
}

/// Whether the request takes a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It occupies a GPU: only a host with a free slot will do.
    Job,
    /// It is spread like a job, but a host without a free slot will do too.
    Other,
}

/// A host that may be chosen, as far as the choice needs it.
#[derive(Clone, Copy)]
struct Candidate {
    /// Without the latency's part until [`Latency::add_to`] has added it.
    score: f64,
    millis: f32,
    freshness: f32,
    host: u32,
    full: bool,
}

/// Chooses among the pool's hosts; changes nothing.
pub fn choose(record: &Record, pool: &Pool, roster: &Roster, now: Instant, random: &mut Random, kind: Kind) -> Decision {
    let entries = record.host_bytes();
    let fading = Fading::new(pool.time_constant);
    let mut candidates = Vec::with_capacity(pool.hosts.len());
    let (mut mean, mut running, mut has_free) = (Mean::default(), 0, false);
    for ((index, named), slot) in (0..).zip(&pool.hosts).zip(roster.slots()) {
        let Some(entry) = slot.and_then(|slot| entries.get(slot as usize)).filter(|_| !named.drain) else { continue };
        let entry = Host::read(entry);
        let load = entry.load().saturating_add(roster.earlier_load(index, record));
        let candidate = Candidate::new(index, &entry, load, named.per_job, load >= named.max_in_flight, now, fading);
        mean.add(&candidate);
        running += u64::from(load);
        has_free |= !candidate.full;
        candidates.push(candidate);
    }
    if candidates.is_empty() {
        return Decision::NoHost;
    }
    if kind == Kind::Job && !has_free {
        return Decision::Full(until_a_slot_is_free(running, mean.millis()));
    }
    let latency = Latency::new(&pool.score, mean.millis());
    for candidate in &mut candidates {
        latency.add_to(candidate);
        candidate.score += if candidate.full { FULL } else { 0.0 };
    }
    Decision::Chosen(best(&mut candidates, 1 + pool.alternates, tie_band(&pool.score), random))
}

/// The scores of all hosts by slot, with the parameters that the record shows: for the status page.
pub fn scores(record: &Record, now: Instant) -> Vec<f64> {
    let (score, fading) = (record.header.score(), Fading::new(record.header.time_constant()));
    let mut mean = Mean::default();
    let mut candidates = Vec::with_capacity(record.hosts().len());
    for (slot, host) in (0..).zip(record.hosts()) {
        let per_job = f64::from(score.in_flight_weight) / f64::from(host.weight);
        let candidate = Candidate::new(slot, &host, host.load(), per_job, false, now, fading);
        mean.add(&candidate);
        candidates.push(candidate);
    }
    let latency = Latency::new(&score, mean.millis());
    candidates.iter_mut().for_each(|candidate| latency.add_to(candidate));
    candidates.into_iter().map(|candidate| candidate.score).collect()
}

impl Candidate {
    #[inline]
    fn new(host: u32, entry: &Host, load: u32, per_job: f64, full: bool, now: Instant, fading: Fading) -> Self {
        let ewma = entry.ewma();
        let score = per_job * (f64::from(load) + 1.0);
        Self { score, millis: ewma.millis, freshness: ewma.freshness(now, fading), host, full }
    }
}

/// The score's second summand.
struct Latency {
    mean: f32,
    per_milli: f64,
}

impl Latency {
    fn new(score: &Score, mean: f32) -> Self {
        Self { mean, per_milli: f64::from(score.latency_weight) / (score.target_latency.as_secs_f64() * 1e3) }
    }

    #[inline]
    fn add_to(&self, candidate: &mut Candidate) {
        let latency = self.mean + (candidate.millis - self.mean) * candidate.freshness;
        candidate.score += self.per_milli * f64::from(latency);
    }
}

fn tie_band(score: &Score) -> f64 {
    f64::from(TIE_BAND) * (f64::from(score.in_flight_weight) + f64::from(score.latency_weight))
}

/// Mean of the latencies, each weighed by its freshness; 0 if no host has a history.
#[derive(Default)]
struct Mean {
    sum: f32,
    weights: f32,
}

impl Mean {
    #[inline]
    fn add(&mut self, candidate: &Candidate) {
        // So small that it counts only where every host's evidence has faded: then the mean is the plain one.
        const LEAST: f32 = 1e-6;
        if candidate.millis > 0.0 {
            let weight = candidate.freshness + LEAST;
            self.sum += weight * candidate.millis;
            self.weights += weight;
        }
    }

    fn millis(&self) -> f32 {
        if self.weights > 0.0 { self.sum / self.weights } else { 0.0 }
    }
}

/// With `n` jobs of mean length `t` running side by side, the next one ends after about `t / n`.
fn until_a_slot_is_free(running: u64, mean: f32) -> Duration {
    let expected = Duration::try_from_secs_f32(mean / 1000.0 / (running as f32).max(1.0)).unwrap_or(RETRY_AFTER.1);
    expected.clamp(RETRY_AFTER.0, RETRY_AFTER.1)
}

/// The hosts of the `count` lowest scores, best first, ties in random order.
fn best(candidates: &mut [Candidate], count: usize, band: f64, random: &mut Random) -> Vec<usize> {
    let mut hosts = Vec::with_capacity(count);
    let mut rest = candidates;
    while hosts.len() < count && !rest.is_empty() {
        let lowest = rest.iter().fold(f64::INFINITY, |lowest, candidate| lowest.min(candidate.score));
        let mut ties = 0;
        for index in 0..rest.len() {
            if rest.get(index).is_some_and(|candidate| candidate.score <= lowest + band) {
                rest.swap(index, ties);
                ties += 1;
            }
        }
        let (tied, others) = rest.split_at_mut_checked(ties.max(1)).unwrap_or((&mut [], &mut []));
        random.shuffle_front(tied, count - hosts.len());
        hosts.extend(tied.iter().take(count - hosts.len()).map(|candidate| candidate.host as usize));
        rest = others;
    }
    hosts
}

#[cfg(test)]
mod tests;
