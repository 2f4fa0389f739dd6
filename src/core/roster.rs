//! Where the hosts of a configuration stand in the record, and what of their scores holds for a while.
//!
//! A choice looks at every host. What changes with each job is a host's load; its place in the record changes when hosts come and go, and its latency's
//! part of the score when a latency is fed, or with time. So those are worked out here once, and a choice over many hosts is short.

use std::collections::HashMap;

use super::address::Address;
use super::ewma::Fading;
use super::health::State;
use super::learning;
use super::penalty::{self, Fade};
use super::record::{Front, Host, Record};
use super::report::Told;
use super::score::least_score::Latency;
use super::score::weighted;
use super::stranger;
use super::time::Instant;
use crate::config::{Policy, Pool};

/// A host that may be chosen.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Index into the configuration's hosts.
    pub host: usize,
    /// Index into the record's hosts.
    pub slot: u32,
    /// See [`crate::config::Host::per_job`].
    pub per_job: f64,
    /// Slots.
    pub max_in_flight: u32,
    /// How many jobs it runs at once, see [`Pool::runs_at_once`].
    pub at_once: u32,
    /// The latency's part of the score.
    pub latency: f64,
    /// For `least_time`: its weight times its learned speed.
    pub speed: f64,
    /// For `weighted`: its chance.
    pub chance: f64,
    /// Its weight, of which a newcomer has a part.
    pub weight: f64,
    /// What the score is multiplied by: see [`super::penalty`].
    pub penalty: f64,
    /// What is added to the score: 0, [`BEHIND`] or [`RESERVE`].
    pub behind: f64,
}

/// Added to the score of a newcomer that has had its share: it is chosen where no other host has a free slot. Above the score of any host that is not
/// behind (see [`super::choice::FULL`]).
pub const BEHIND: f64 = 2e13;

/// Added to the score of a reserve, which comes behind those, too; and still before a host without a free slot.
pub const RESERVE: f64 = 2.0 * BEHIND;

/// A newcomer among the hosts that serve.
#[derive(Clone, Copy, Debug)]
struct Newcomer {
    /// Index into those that serve.
    at: usize,
    /// Its part of their weights.
    fair: f64,
}

/// The hosts of one configuration that may be chosen.
#[derive(Clone, Debug, Default)]
pub struct Roster {
    incarnation: u64,
    membership: u32,
    standing: u32,
    learned: u32,
    sorted: Instant,
    /// When a host's state may change by itself.
    changes: Option<Instant>,
    weighed: Instant,
    mean: f32,
    /// All that do not drain, in the configuration's order.
    known: Vec<Place>,
    /// Those of them that serve.
    serving: Vec<Place>,
    /// Those of these whose jobs are watched.
    newcomers: Vec<Newcomer>,
    /// Whether the weight of one of those that serve is yet to rise.
    is_rising: bool,
    /// Whether any of those that serve tells of its utilisation.
    tells: bool,
    /// Those of the known that are probing.
    probing: Vec<Place>,
    /// Those of these whose next job is a trial.
    on_trial: Vec<Place>,
    /// Those of the known that may be tried before their time: see [`super::stranger`].
    on_early_trial: Vec<Place>,
    /// Hosts, by the slot of their entry, and the slot of an earlier generation of each: empty but for the time after a host was removed and
    /// came back.
    earlier: Vec<(u32, u32)>,
}

impl Roster {
    /// Works out again what has changed since the last time.
    pub fn refresh(&mut self, record: &Record, pool: &Pool, now: Instant) {
        let header = &record.header;
        let is_moved = (self.incarnation, self.membership) != (header.incarnation, header.membership);
        if is_moved {
            (self.incarnation, self.membership) = (header.incarnation, header.membership);
            self.find(record, pool);
        }
        let is_due = now < self.sorted || self.changes.is_some_and(|changes| changes <= now);
        let is_sorted_anew = is_moved || is_due || self.standing != header.standing;
        if is_sorted_anew {
            (self.standing, self.sorted) = (header.standing, now);
            self.sort(record, now);
        }
        // Within a thousandth of the time constant an average fades by less than 0.1 %, and a weight rises by no more.
        let step = if self.is_rising { pool.time_constant.min(pool.slow_start) } else { pool.time_constant } / 1000;
        let holds = self.weighed..self.weighed + step;
        if is_sorted_anew || self.learned != header.learned || !holds.contains(&now) {
            (self.learned, self.weighed) = (header.learned, now);
            self.weigh(record, pool, now);
        }
        self.hold_back(record);
    }

    fn find(&mut self, record: &Record, pool: &Pool) {
        let (retired, current): (Vec<(Host, u32)>, Vec<_>) = record.hosts().zip(0..).partition(|(host, _)| host.is_retired());
        let current: HashMap<Address, u32> = current.into_iter().map(|(host, slot)| (host.address(), slot)).collect();
        self.known.clear();
        self.earlier.clear();
        for (index, host) in pool.hosts.iter().enumerate().filter(|(_, host)| !host.drain) {
            let Some(&slot) = current.get(&host.address) else {
                continue;
            };
            let (per_job, max_in_flight) = (host.per_job, host.max_in_flight);
            self.known.push(Place {
                host: index,
                slot,
                per_job,
                max_in_flight,
                at_once: pool.runs_at_once(max_in_flight),
                latency: 0.0,
                speed: 1.0,
                chance: 1.0,
                weight: 1.0,
                penalty: 1.0,
                behind: 0.0,
            });
            let same_machine = retired.iter().filter(|(entry, _)| entry.address() == host.address);
            self.earlier.extend(same_machine.map(|(_, earlier)| (slot, *earlier)));
        }
    }

    fn sort(&mut self, record: &Record, now: Instant) {
        self.serving.clear();
        self.probing.clear();
        self.on_trial.clear();
        self.on_early_trial.clear();
        self.changes = None;
        for place in &self.known {
            let Some(host) = record.host(place.slot) else {
                continue;
            };
            match host.health(now) {
                State::Serving => self.serving.push(*place),
                State::Probing => self.probing.push(*place),
                _ => {}
            }
            if host.wants_trial(now) {
                self.on_trial.push(*place);
            }
            if stranger::wants_early_trial(&host, now) {
                self.on_early_trial.push(*place);
            }
            self.changes = self.changes.into_iter().chain(host.next_change(now)).min();
        }
    }

    fn weigh(&mut self, record: &Record, pool: &Pool, now: Instant) {
        let average = |place: &Place| record.host(place.slot).map(|host| host.ewma()).unwrap_or_default();
        let averages = self.serving.iter().map(average);
        let latency = Latency::new(&pool.score, averages, now, Fading::new(pool.time_constant));
        let fade = Fade::new(pool.time_constant, &record.header);
        if !self.serving.is_empty() {
            self.mean = latency.mean();
        }
        self.newcomers.clear();
        self.is_rising = false;
        let told = self.told(record, pool, now);
        let speeds = learning::fading(pool.time_constant);
        let (mut weights, mut first_choices) = (0.0, 0);
        for (at, place) in self.serving.iter_mut().enumerate() {
            let host = record.host(place.slot).unwrap_or_default();
            place.latency = latency.of(host.ewma());
            place.penalty = penalty::factor(&host, now, fade);
            let Some(configured) = pool.hosts.get(place.host) else { continue };
            let (ramp, weight) = (host.ramp(pool.slow_start, now), f64::from(configured.weight));
            place.per_job = configured.per_job / ramp;
            place.weight = weight * ramp;
            match &pool.policy {
                Policy::LeastScore => {}
                Policy::LeastTime { .. } => {
                    place.speed = place.weight * f64::from(record.insight(place.slot).speed(now, speeds));
                }
                Policy::Weighted(weights) => {
                    let [memory, compute] = told.of(at);
                    let latency = latency.faded(host.ewma());
                    place.chance = place.weight * weighted::chance(weights, memory, compute, latency) / place.penalty;
                }
            }
            // Of a newcomer that is none any more it is what held it back.
            place.behind = if configured.is_reserve { RESERVE } else { 0.0 };
            self.is_rising |= ramp < 1.0;
            if configured.is_reserve {
                continue;
            }
            (weights, first_choices) = (weights + weight, first_choices + 1);
            if host.is_newcomer() {
                self.newcomers.push(Newcomer { at, fair: weight });
            }
        }
        if self.newcomers.len() == first_choices {
            self.newcomers.clear();
        }
        self.newcomers.iter_mut().for_each(|newcomer| newcomer.fair /= weights);
    }

    /// What those that serve tell of their utilisation.
    fn told(&mut self, record: &Record, pool: &Pool, now: Instant) -> Told {
        let Some(patience) = pool.patience().filter(|_| matches!(pool.policy, Policy::Weighted(_))) else {
            self.tells = false;
            return Told::default();
        };
        let told = Told::new(self.serving.iter().map(|place| record.insight(place.slot).told(now, patience)));
        self.tells = told.is_any();
        told
    }

    /// Whether any host tells of its utilisation.
    pub fn tells(&self) -> bool {
        self.tells
    }

    /// Puts newcomers behind the others while they have had their share. The first job is none: while all others are at work it would else be they who
    /// take more jobs beside hosts that have none.
    fn hold_back(&mut self, record: &Record) {
        if self.newcomers.is_empty() {
            return;
        }
        let entries = record.host_bytes();
        let is_at_work = |slot: u32| entries.get(slot as usize).is_some_and(|entry| Front::of(entry).load() > 0);
        let mut newcomers = self.newcomers.iter().map(|newcomer| newcomer.at).peekable();
        let mut others = self.serving.iter().enumerate().filter(|(at, place)| {
            let is_newcomer = newcomers.next_if_eq(at).is_some();
            !is_newcomer && place.behind < RESERVE
        });
        let all_work = others.all(|(_, place)| is_at_work(place.slot));
        for newcomer in &self.newcomers {
            if let Some(place) = self.serving.get_mut(newcomer.at) {
                let host = record.host(place.slot).unwrap_or_default();
                let is_first = all_work && host.has_had_none();
                let has_had_its_share = host.is_newcomer() && !is_first && !host.may_take_one(&record.header, newcomer.fair);
                place.behind = if has_had_its_share { BEHIND } else { 0.0 };
            }
        }
    }

    /// The hosts that serve, in the configuration's order.
    pub fn serving(&self) -> &[Place] {
        &self.serving
    }

    /// The hosts that are probing.
    pub fn probing(&self) -> &[Place] {
        &self.probing
    }

    /// The hosts whose next job is a trial.
    pub fn on_trial(&self) -> &[Place] {
        &self.on_trial
    }

    /// The hosts whose trial may be the next job, where that would else be refused.
    pub fn on_early_trial(&self) -> &[Place] {
        &self.on_early_trial
    }

    /// When a host that is not among these may be again; `None`: not by the mere passing of time.
    pub fn changes(&self) -> Option<Instant> {
        self.changes
    }

    /// The pool's mean latency in milliseconds.
    pub fn mean(&self) -> f32 {
        self.mean
    }

    /// The slot of a host, by its index in the configuration.
    pub fn slot_of(&self, host: usize) -> Option<u32> {
        let at = self.known.binary_search_by_key(&host, |place| place.host).ok()?;
        self.known.get(at).map(|place| place.slot)
    }

    /// Jobs that still run on the machine of a host from before it was removed and came back: they are other leases on another entry, but they
    /// fill the same card.
    #[inline]
    pub fn earlier_load(&self, slot: u32, record: &Record) -> u32 {
        let entries = self.earlier.iter().filter(|(current, _)| *current == slot);
        entries.filter_map(|(_, earlier)| record.host(*earlier)).fold(0, |load, host| load.saturating_add(host.load()))
    }
}
