//! The choice of a host: the lowest [`super::score`], among those with a free slot.
//!
//! Scores that are close to the lowest are ties, broken at random (see [`scoring`]): without a band, the host with the luckiest average would get every job of an idle pool.

mod forecast;
mod scoring;

use std::time::Duration;

pub use forecast::{Claim, Forecast};
pub use scoring::Parts;

use super::learning::Job;
use super::random::Random;
use super::record::{Front, Record};
use super::roster::{Place, Roster};
use super::session::{self, Candidate};
use super::time::Instant;
use crate::config::{Explain, Pool};
use scoring::Scoring;

/// Added to the score of a host without a free slot, so that it is named as an alternate only after all hosts with one.
/// Above the score of any host with a free slot (a million jobs at 1,000 / 0.01 each are 10¹¹, ten times that while a weight rises, the latency's part is
/// less, a penalty makes at most 17 times as much of it, and a reserve has [`super::roster::RESERVE`] more), and below where adding it would lose the
/// score's digits.
pub const FULL: f64 = 1e14;

/// Shortest and longest advice to a client when no host can take its job.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A trial is overdue after so many times the pool's mean latency, but no sooner than the first ejection's length, and no later than the longest's.
const OVERDUE_AFTER: f32 = 4.0;

/// What to do with a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Send it to a host.
    Chosen(Chosen),
    /// Every eligible host is at its limit; a slot should be free after this time.
    Full(Duration),
    /// No host is eligible; one may be after this time.
    NoHost(Duration),
}

/// Where a request is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// The host, then its alternates, best first. Indices into the configuration's hosts, never empty, each once.
    pub hosts: Vec<usize>,
    /// If the request is the host's trial: after how long that is overdue.
    pub trial: Option<Duration>,
    /// For `least_time`: the work that the job is expected to be, in milliseconds on a host of speed 1, where that is known.
    pub work: Option<f64>,
    /// Why, if the pool explains itself.
    pub why: Option<Why>,
}

/// Why a host was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Why {
    /// Its score, with the penalty.
    pub score: f64,
    /// What it is made of.
    pub parts: Parts,
    /// What the failures make of it.
    pub penalty: f64,
    /// For a job of a session: whether it went to the session's host.
    pub session: Option<bool>,
    /// The next best host, by its index in the configuration, and its score, with [`super::roster::BEHIND`] or [`FULL`] where that is why it is not the
    /// best; not told of a trial, which is not chosen by its score.
    pub runner_up: Option<(usize, f64)>,
    /// How many hosts were only to be chosen where no other has a free slot.
    pub held_back: usize,
}

/// Whether the request takes a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It occupies a GPU: only a host with a free slot will do.
    Job,
    /// It is spread like a job, but a host without a free slot will do too.
    Other,
}

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Whether it takes a slot.
    pub kind: Kind,
    /// What is known of it.
    pub job: &'a Job,
    /// A host that is to have it if it can, by its index in the configuration.
    pub preferred: Option<usize>,
}

/// Chooses among the pool's hosts; changes nothing but the roster, which it brings up to date.
pub fn choose(record: &Record, pool: &Pool, roster: &mut Roster, now: Instant, random: &mut Random, wanted: Wanted) -> Decision {
    roster.refresh(record, pool, now);
    let (kind, load) = (wanted.kind, loads(record, roster, pool, now));
    let scoring = Scoring::new(record, pool, roster, wanted.job, now);
    let mut scores = Vec::with_capacity(roster.serving().len());
    let mut lowest = f64::INFINITY;
    for place in roster.serving() {
        let load = load(place.slot);
        let score = scoring.drawn(place, load, random) + behind(place, load);
        // Not `min`, which looks out for NaN: a score is always a number.
        if score < lowest {
            lowest = score;
        }
        scores.push(score);
    }
    // Nobody would hear how a request without a lease ends.
    let trial = if kind == Kind::Job { a_free_one(roster.on_trial(), load, random) } else { None };
    let is_refused = kind == Kind::Job && lowest >= FULL && trial.is_none();
    let trial = if is_refused { a_free_one(roster.on_early_trial(), load, random) } else { trial };
    if is_refused && trial.is_none() {
        if scores.is_empty() {
            return no_host(roster, now);
        }
        let running = roster.serving().iter().map(|place| u64::from(load(place.slot).counted)).sum();
        return Decision::Full(until_a_slot_is_free(running, roster.mean()));
    }
    let band = scoring.band(lowest);
    let named = 1 + pool.alternates;
    // The explanation names the runner-up, also where it is no alternate.
    let count = if pool.explain == Explain::Off { named } else { named.max(2) };
    let mut best = best(&mut scores, lowest, count, band, random);
    let first = preferred(wanted, pool, roster, load);
    if let Some((at, _)) = first {
        best.retain(|other| *other != at);
        best.insert(0, at);
        best.truncate(count);
    }
    let places: Vec<&Place> = trial.iter().chain(best.iter().filter_map(|at| roster.serving().get(*at))).collect();
    let session = first.and_then(|(_, session)| session);
    let why = if pool.explain == Explain::Off { None } else { why(&places, trial.is_some(), roster, load, &scoring, session) };
    let mut hosts: Vec<usize> = places.iter().take(named).map(|place| place.host).collect();
    if hosts.is_empty() && kind == Kind::Other {
        // Better than none, and no job.
        hosts.extend(roster.probing().iter().take(named).map(|place| place.host));
    }
    if hosts.is_empty() {
        return no_host(roster, now);
    }
    let overdue = || {
        let expected = Duration::try_from_secs_f32(OVERDUE_AFTER * roster.mean() / 1000.0).unwrap_or_default();
        expected.clamp(pool.failure.base_ejection, pool.failure.max_ejection)
    };
    Decision::Chosen(Chosen { hosts, trial: trial.map(|_| overdue()), work: scoring.work(), why })
}

/// The host that is to have the job before all others, by its place among those that serve; and of a session's job whether that is the session's own.
fn preferred(wanted: Wanted, pool: &Pool, roster: &Roster, load: impl Fn(u32) -> Load) -> Option<(usize, Option<bool>)> {
    let is_free = |place: &Place| place.behind == 0.0 && load(place.slot).counted < place.max_in_flight;
    if let (Some(session), Some(key)) = (&pool.session, wanted.job.session) {
        let candidate = |place: &Place| {
            let address = pool.hosts.get(place.host)?.address;
            // A host that reports more jobs than it has slots does not make room for more of a session's on the others.
            let load = load(place.slot).jobs.min(place.max_in_flight);
            Some(Candidate { address, weight: place.weight, load, is_free: is_free(place) })
        };
        let candidates: Vec<Candidate> = roster.serving().iter().filter_map(candidate).collect();
        return session::host_of(key, &candidates, session.bound.into()).map(|(at, is_own)| (at, Some(is_own)));
    }
    let host = wanted.preferred?;
    let at = roster.serving().iter().position(|place| place.host == host && is_free(place))?;
    Some((at, None))
}

/// A host's jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Those that we count: they fill its slots. What it reports fills none: it may be old by the time, and then a host that is free would stand idle.
    pub counted: u32,
    /// Those that it has, by what it reports, too: by them it is chosen.
    pub jobs: u32,
}

fn loads<'a>(record: &'a Record, roster: &'a Roster, pool: &Pool, now: Instant) -> impl Fn(u32) -> Load + Copy + 'a {
    let entries = record.host_bytes();
    let patience = pool.patience().filter(|_| record.has_insights());
    move |slot| {
        let entry = entries.get(slot as usize).map(Front::of).unwrap_or_default();
        let counted = entry.load().saturating_add(roster.earlier_load(slot, record));
        let jobs = patience.map_or(counted, |patience| record.insight(slot).jobs(counted, now, patience));
        Load { counted, jobs }
    }
}

/// How many jobs the pool takes now: free slots of hosts that serve, and one for each host that waits for its trial. A stranger's early trial is one only
/// where there is no other.
pub fn free_slots(record: &Record, pool: &Pool, roster: &mut Roster, now: Instant) -> usize {
    roster.refresh(record, pool, now);
    let load = loads(record, roster, pool, now);
    let free = |place: &Place| place.max_in_flight.saturating_sub(load(place.slot).counted) as usize;
    let trials = |places: &[Place]| places.iter().filter(|place| free(place) > 0).count();
    let slots = roster.serving().iter().map(free).sum::<usize>().saturating_add(trials(roster.on_trial()));
    if slots > 0 { slots } else { trials(roster.on_early_trial()).min(1) }
}

/// After how long a job that comes behind so many others should have its slot: the pool's hosts end `slots / mean latency` jobs a second. Between 1 s and a minute.
pub fn expected_wait(roster: &Roster, ahead: u32) -> Duration {
    let slots = roster.serving().iter().fold(0, |sum: u64, place| sum + u64::from(place.max_in_flight));
    let seconds = f64::from(roster.mean()) / 1000.0 * (f64::from(ahead) + 1.0) / (slots as f64).max(1.0);
    Duration::try_from_secs_f64(seconds).unwrap_or(RETRY_AFTER.1).clamp(RETRY_AFTER.0, RETRY_AFTER.1)
}

/// Whether a host that takes no job now may soon: one is being tried or may be early, or its pause or its ejection ends within this time.
pub fn is_one_due(roster: &Roster, within: Duration, now: Instant) -> bool {
    let is_tried = !roster.probing().is_empty() || !roster.on_early_trial().is_empty();
    is_tried || roster.changes().is_some_and(|changes| changes.since(now) <= within)
}

/// One of the hosts that should get the next job, whatever its score: any of them, so that one that fails each trial does not stand before the others.
fn a_free_one(places: &[Place], load: impl Fn(u32) -> Load, random: &mut Random) -> Option<Place> {
    if places.is_empty() {
        return None;
    }
    let free: Vec<&Place> = places.iter().filter(|place| load(place.slot).counted < place.max_in_flight).collect();
    free.get(random.below(free.len())).map(|place| **place)
}

/// That no host is eligible.
pub fn no_host(roster: &Roster, now: Instant) -> Decision {
    let wait = roster.changes().map_or(RETRY_AFTER.0, |changes| changes.since(now));
    Decision::NoHost(wait.clamp(RETRY_AFTER.0, RETRY_AFTER.1))
}

fn why(
    places: &[&Place],
    is_trial: bool,
    roster: &Roster,
    load: impl Fn(u32) -> Load,
    scoring: &Scoring,
    session: Option<bool>,
) -> Option<Why> {
    let chosen = places.first()?;
    let own = |place: &Place| scoring.own(place, load(place.slot));
    let runner_up = places.get(1).filter(|_| !is_trial).map(|place| (place.host, own(place) + behind(place, load(place.slot))));
    let held_back = roster.serving().iter().filter(|place| place.behind > 0.0).count();
    let parts = scoring.parts(chosen, load(chosen.slot));
    Some(Why { held_back, score: own(chosen), parts, penalty: chosen.penalty, session, runner_up })
}

/// What is added to the score of a host that is only to be chosen where no other has a free slot; [`FULL`] or more if it has none itself.
fn behind(place: &Place, load: Load) -> f64 {
    if load.counted >= place.max_in_flight { place.behind + FULL } else { place.behind }
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
mod failing;

#[cfg(test)]
mod joining;

#[cfg(test)]
mod telling;

#[cfg(test)]
mod learned;

#[cfg(test)]
mod tests;
