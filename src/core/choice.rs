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
struct Candidate {
    host: usize,
    /// The score's first summand.
    in_flight: f64,
    millis: f32,
    freshness: f32,
    full: bool,
}

/// Chooses among the pool's hosts; changes nothing.
pub fn choose(record: &Record, pool: &Pool, roster: &Roster, now: Instant, random: &mut Random, kind: Kind) -> Decision {
    let entries = record.host_bytes();
    let (weight, fading) = (f64::from(pool.score.in_flight_weight), Fading::new(pool.time_constant));
    let mut candidates = Vec::with_capacity(pool.hosts.len());
    let (mut mean, mut running, mut has_free) = (Mean::default(), 0, false);
    for (index, (named, slot)) in pool.hosts.iter().zip(roster.slots()).enumerate() {
        let Some(entry) = slot.and_then(|slot| entries.get(slot as usize)).filter(|_| !named.drain) else { continue };
        let entry = Host::read(entry);
        let load = entry.load().saturating_add(roster.earlier_load(index, record));
        let in_flight = weight * (f64::from(load) + 1.0) / f64::from(named.weight);
        let candidate = Candidate::new(index, in_flight, &entry, load >= named.max_in_flight, now, fading);
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
    let score = |candidate: Candidate| (latency.score(&candidate) + if candidate.full { FULL } else { 0.0 }, candidate.host);
    let mut scored: Vec<(f64, usize)> = candidates.into_iter().map(score).collect();
    Decision::Chosen(best(&mut scored, 1 + pool.alternates, tie_band(&pool.score), random))
}

/// The scores of all hosts by slot, with the parameters that the record shows: for the status page.
pub fn scores(record: &Record, now: Instant) -> Vec<f64> {
    let (score, fading) = (record.header.score(), Fading::new(record.header.time_constant()));
    let mut mean = Mean::default();
    let candidate = |(slot, host): (usize, Host)| {
        let in_flight = f64::from(score.in_flight_weight) * (f64::from(host.load()) + 1.0) / f64::from(host.weight);
        Candidate::new(slot, in_flight, &host, host.load() >= host.max_in_flight, now, fading)
    };
    let candidates = record.hosts().enumerate().map(candidate).inspect(|candidate| mean.add(candidate));
    let candidates: Vec<Candidate> = candidates.collect();
    let latency = Latency::new(&score, mean.millis());
    candidates.iter().map(|candidate| latency.score(candidate)).collect()
}

impl Candidate {
    #[inline]
    fn new(host: usize, in_flight: f64, entry: &Host, full: bool, now: Instant, fading: Fading) -> Self {
        let ewma = entry.ewma();
        Self { host, in_flight, millis: ewma.millis, freshness: ewma.freshness(now, fading), full }
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
    fn score(&self, candidate: &Candidate) -> f64 {
        let latency = self.mean + (candidate.millis - self.mean) * candidate.freshness;
        candidate.in_flight + self.per_milli * f64::from(latency)
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
fn best(scored: &mut [(f64, usize)], count: usize, band: f64, random: &mut Random) -> Vec<usize> {
    let mut hosts = Vec::with_capacity(count);
    let mut rest = scored;
    while hosts.len() < count && !rest.is_empty() {
        let lowest = rest.iter().fold(f64::INFINITY, |lowest, (score, _)| lowest.min(*score));
        let mut ties = 0;
        for index in 0..rest.len() {
            if rest.get(index).is_some_and(|(score, _)| *score <= lowest + band) {
                rest.swap(index, ties);
                ties += 1;
            }
        }
        let (tied, others) = rest.split_at_mut_checked(ties.max(1)).unwrap_or((&mut [], &mut []));
        random.shuffle_front(tied, count - hosts.len());
        hosts.extend(tied.iter().take(count - hosts.len()).map(|(_, host)| *host));
        rest = others;
    }
    hosts
}

#[cfg(test)]
mod tests;
