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

struct Candidate {
    host: usize,
    load: u32,
    weight: f32,
    millis: f32,
    freshness: f32,
    full: bool,
}

/// Chooses among the pool's hosts; changes nothing.
pub fn choose(record: &Record, pool: &Pool, roster: &Roster, now: Instant, random: &mut Random, kind: Kind) -> Decision {
    let candidates = candidates(record, pool, roster, now);
    let has_free = candidates.iter().any(|candidate| !candidate.full);
    if candidates.is_empty() {
        return Decision::NoHost;
    }
    let mean = mean_latency(&candidates);
    if kind == Kind::Job && !has_free {
        return Decision::Full(until_a_slot_is_free(&candidates, mean));
    }
    let mut scored: Vec<(f64, usize)> = candidates
        .iter()
        .map(|candidate| {
            let score = candidate.score(&pool.score, mean);
            (if candidate.full { score + FULL } else { score }, candidate.host)
        })
        .collect();
    Decision::Chosen(best(&mut scored, 1 + pool.alternates, tie_band(&pool.score), random))
}

/// The scores of all hosts by slot, with the parameters that the record shows: for the status page.
pub fn scores(record: &Record, now: Instant) -> Vec<f64> {
    let (score, time_constant) = (record.header.score(), record.header.time_constant());
    let hosts = record.hosts().enumerate();
    let candidates: Vec<Candidate> =
        hosts.map(|(slot, host)| Candidate::new(slot, &host, host.weight, host.max_in_flight, now, time_constant)).collect();
    let mean = mean_latency(&candidates);
    candidates.iter().map(|candidate| candidate.score(&score, mean)).collect()
}

impl Candidate {
    #[inline]
    fn new(host: usize, entry: &Host, weight: f32, slots: u32, now: Instant, time_constant: Duration) -> Self {
        let (load, ewma) = (entry.load(), entry.ewma());
        let freshness = if ewma.has_history() { ewma.freshness(now, time_constant) } else { 0.0 };
        Self { host, load, weight, millis: ewma.millis, freshness, full: load >= slots }
    }

    fn score(&self, score: &Score, mean: f32) -> f64 {
        let latency = f64::from(mean + (self.millis - mean) * self.freshness);
        let in_flight = f64::from(score.in_flight_weight) * (f64::from(self.load) + 1.0) / f64::from(self.weight);
        in_flight + f64::from(score.latency_weight) * latency / (score.target_latency.as_secs_f64() * 1e3)
    }
}

fn tie_band(score: &Score) -> f64 {
    f64::from(TIE_BAND) * (f64::from(score.in_flight_weight) + f64::from(score.latency_weight))
}

fn candidates(record: &Record, pool: &Pool, roster: &Roster, now: Instant) -> Vec<Candidate> {
    let mut candidates = Vec::with_capacity(pool.hosts.len());
    for ((index, named), slot) in pool.hosts.iter().enumerate().zip(roster.slots()) {
        let Some(host) = slot.and_then(|slot| record.host(slot)) else {
            continue;
        };
        if named.drain {
            continue;
        }
        candidates.push(Candidate::new(index, &host, named.weight, named.max_in_flight, now, pool.time_constant));
    }
    candidates
}

/// Mean of the latencies, each weighed by its freshness; 0 if no host has a history.
fn mean_latency(candidates: &[Candidate]) -> f32 {
    // So small that it counts only where every host's evidence has faded: then the mean is the plain one.
    const LEAST: f32 = 1e-6;
    let known = candidates.iter().filter(|candidate| candidate.millis > 0.0);
    let (sum, weights) = known.fold((0.0, 0.0), |(sum, weights), candidate| {
        let weight = candidate.freshness + LEAST;
        (sum + weight * candidate.millis, weights + weight)
    });
    if weights > 0.0 { sum / weights } else { 0.0 }
}

/// With `n` jobs of mean length `t` running side by side, the next one ends after about `t / n`.
fn until_a_slot_is_free(candidates: &[Candidate], mean: f32) -> Duration {
    let running: f32 = candidates.iter().map(|candidate| candidate.load as f32).sum();
    let expected = Duration::try_from_secs_f32(mean / 1000.0 / running.max(1.0)).unwrap_or(RETRY_AFTER.1);
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
