//! The choice of a host: the lowest [`super::score`], among those with a free slot.
//!
//! Scores within 1 % of `in_flight_weight + latency_weight` of the lowest are ties, broken at random: without a band, the host
//! with the luckiest average would get every job of an idle pool.

use std::time::Duration;

use super::random::Random;
use super::record::{Host, Record};
use super::roster::Roster;
use super::score;
use super::time::Instant;
use crate::config::Pool;

/// Width of the tie band, as a part of the sum of the two weights.
const TIE_BAND: f64 = 0.01;

/// Added to the score of a host without a free slot, so that it is named as an alternate only after all hosts with one.
/// Above the score of any host with a free slot (a million jobs at 1,000 / 0.01 each are 10¹¹, and the latency's part is less), and far below
/// where adding it would lose the score's digits.
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

/// Chooses among the pool's hosts; changes nothing but the roster, which it brings up to date.
pub fn choose(record: &Record, pool: &Pool, roster: &mut Roster, now: Instant, random: &mut Random, kind: Kind) -> Decision {
    roster.refresh(record, pool, now);
    let entries = record.host_bytes();
    let load = |slot: u32| {
        let entry = entries.get(slot as usize).map(Host::read).unwrap_or_default();
        entry.load().saturating_add(roster.earlier_load(slot, record))
    };
    let mut scores = Vec::with_capacity(roster.places().len());
    let mut lowest = f64::INFINITY;
    for place in roster.places() {
        let load = load(place.slot);
        let full = if load >= place.max_in_flight { FULL } else { 0.0 };
        let score = score::of_jobs(load, place.per_job) + place.latency + full;
        // Not `min`, which looks out for NaN: a score is always a number.
        if score < lowest {
            lowest = score;
        }
        scores.push(score);
    }
    if scores.is_empty() {
        return Decision::NoHost;
    }
    if kind == Kind::Job && lowest >= FULL {
        let running = roster.places().iter().map(|place| u64::from(load(place.slot))).sum();
        return Decision::Full(until_a_slot_is_free(running, roster.mean()));
    }
    let band = TIE_BAND * (f64::from(pool.score.in_flight_weight) + f64::from(pool.score.latency_weight));
    let best = best(&mut scores, lowest, 1 + pool.alternates, band, random);
    Decision::Chosen(best.into_iter().filter_map(|at| roster.places().get(at)).map(|place| place.host).collect())
}

/// With `n` jobs of mean length `t` running side by side, the next one ends after about `t / n`.
fn until_a_slot_is_free(running: u64, mean: f32) -> Duration {
    let expected = Duration::try_from_secs_f32(mean / 1000.0 / (running as f32).max(1.0)).unwrap_or(RETRY_AFTER.1);
    expected.clamp(RETRY_AFTER.0, RETRY_AFTER.1)
}

/// The indices of the `count` lowest scores, lowest first, ties in random order. `lowest` is the lowest of all; those that are given are taken out
/// of `scores`, unless they are enough at once.
fn best(scores: &mut [f64], mut lowest: f64, count: usize, band: f64, random: &mut Random) -> Vec<usize> {
    let mut best = Vec::with_capacity(count);
    let mut ties = Vec::with_capacity(scores.len());
    loop {
        let limit = lowest + band;
        ties.clear();
        ties.extend(scores.iter().enumerate().filter(|(_, score)| **score <= limit).map(|(index, _)| index));
        let wanted = count - best.len();
        random.shuffle_front(&mut ties, wanted);
        best.extend(ties.iter().take(wanted));
        if best.len() == count || ties.is_empty() {
            return best;
        }
        for tie in &ties {
            if let Some(score) = scores.get_mut(*tie) {
                *score = f64::INFINITY;
            }
        }
        lowest = scores.iter().fold(f64::INFINITY, |lowest, score| if *score < lowest { *score } else { lowest });
        if lowest == f64::INFINITY {
            return best;
        }
    }
}

#[cfg(test)]
mod tests;
