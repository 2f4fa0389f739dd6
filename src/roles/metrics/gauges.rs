//! What the leader shows of a pool's record, once a second.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Family, Metrics, Of};
use crate::core::health::State;
use crate::core::learning;
use crate::core::lookout;
use crate::core::queue::Priority;
use crate::core::record::Record;
use crate::core::score;
use crate::core::time::Instant;
use crate::host::Host;

/// How often gauges are looked after.
const PERIOD: Duration = Duration::from_secs(1);

/// After so many looks all are set again: should a worker that lost the lead have had the last word, it has no longer.
const AFRESH: u32 = 10;

/// What a host's gauges are at least: of those that have gone they are 0.
const OF_HOSTS: [Family; 5] = [Family::InFlight, Family::MaxInFlight, Family::EwmaMs, Family::Score, Family::State];

type Values = BTreeMap<(Family, Of), u64>;

/// What a leader has shown of a pool.
#[derive(Default)]
pub struct Shown {
    values: Values,
    at: Instant,
    looks: u32,
}

impl Shown {
    /// Whether it is time for another look.
    fn is_due(&self, now: Instant) -> bool {
        self.at == Instant::default() || !(self.at..self.at + PERIOD).contains(&now)
    }

    /// There is something that nobody should wait for.
    pub fn hurry(&mut self) {
        self.at = Instant::default();
    }
}

impl Metrics {
    /// Shows the gauges of a pool, if it is time.
    pub fn show(&mut self, host: &impl Host, pool: &str, record: &Record, now: Instant, shown: &mut Shown) {
        if !shown.is_due(now) {
            return;
        }
        let mut values = self.bound(host, pool, values(record, now));
        if shown.values.is_empty() {
            // Somebody else may have shown those that have gone since.
            let gone =
                self.known_hosts(host, pool).into_iter().flat_map(|host| OF_HOSTS.map(|family| (family, Of::Host(Some(host)))));
            gone.for_each(|gauge| _ = values.entry(gauge).or_default());
        }
        shown.values.keys().for_each(|gauge| _ = values.entry(*gauge).or_default());
        let is_afresh = shown.looks.is_multiple_of(AFRESH);
        for (gauge, value) in &values {
            if is_afresh || shown.values.get(gauge) != Some(value) {
                self.record(host, gauge.0, pool, gauge.1, *value);
            }
        }
        (shown.values, shown.at, shown.looks) = (values, now, shown.looks.wrapping_add(1));
    }

    /// Sets to 0 what was shown: nobody looks after the pool any more.
    pub fn hide(&mut self, host: &impl Host, pool: &str, shown: &mut Shown) {
        for (family, of) in std::mem::take(shown).values.into_keys() {
            self.record(host, family, pool, of, 0);
        }
    }

    /// Those of hosts without metrics of their own become two sums.
    fn bound(&mut self, host: &impl Host, pool: &str, values: Values) -> Values {
        let mut bound = Values::new();
        for ((family, of), value) in values {
            let is_own = of.host().is_none_or(|address| self.has_own(host, pool, address));
            let of = if is_own { of } else { of.other() };
            let sum = bound.entry((family, of)).or_insert(0);
            match is_own {
                true => *sum = value,
                false if matches!(family, Family::InFlight | Family::MaxInFlight) => *sum = sum.saturating_add(value),
                // Several hosts have no one state.
                false => _ = bound.remove(&(family, of)),
            }
        }
        bound
    }
}

fn values(record: &Record, now: Instant) -> Values {
    let mut values = Values::new();
    let mut states = [0; State::ALL.len()];
    for ((entry, score), slot) in record.hosts().zip(score::scores(record, now)).zip(0..) {
        let (address, state) = (entry.address(), entry.state(now));
        states.iter_mut().zip(State::ALL).filter(|(_, each)| *each == state).for_each(|(count, _)| *count += 1);
        // A host that came back while jobs of before still run has two entries: the jobs are its own, all else is said of the new one.
        let jobs = values.entry((Family::InFlight, Of::Host(Some(address)))).or_default();
        *jobs += u64::from(entry.load());
        let is_known = values.contains_key(&(Family::State, Of::Host(Some(address))));
        if is_known && entry.is_retired() {
            continue;
        }
        let mut say = |family, value| _ = values.insert((family, Of::Host(Some(address))), value);
        say(Family::MaxInFlight, entry.max_in_flight.into());
        say(Family::EwmaMs, if entry.ewma().has_history() { entry.ewma().millis.round() as u64 } else { 0 });
        say(Family::Score, (score * 1e3).round() as u64);
        say(Family::State, number(state));
        if record.has_insights() {
            let insight = record.insight(slot);
            let speed = insight.speed_if_known(now, learning::fading(record.header.time_constant()));
            say(Family::Speed, speed.map_or(0, |speed| (speed * entry.weight * 1e3).round() as u64));
            if let Some(age) = insight.ages(now).into_iter().flatten().min() {
                say(Family::TelemetryAgeMs, millis(age));
            }
        }
    }
    values.extend(State::ALL.into_iter().zip(states).map(|(state, count)| ((Family::Hosts, Of::Word(state.word())), count)));
    for class in record.classes() {
        values.insert((Family::ClassWorkMs, Of::Class(Some(class.shown()))), class.mean().map_or(0, |mean| mean.round() as u64));
    }
    let header = &record.header;
    for (priority, waiting) in Priority::ALL.into_iter().zip(record.waiting_by_priority()) {
        values.insert((Family::Waiting, Of::Word(priority.word())), waiting.into());
    }
    let mut say = |family, value| _ = values.insert((family, Of::Pool), value);
    say(Family::Eligible, record.hosts().filter(|host| host.is_eligible(now)).count() as u64);
    say(Family::NoHost, (!lookout::has_host(record, now)).into());
    say(Family::QueueMaxLength, header.max_length.into());
    say(Family::LongestWaitMs, millis(record.longest_wait(now)));
    say(Family::RecordBytes, record.size() as u64);
    say(Family::Drift, header.drift);
    say(Family::Workers, record.workers().filter(|worker| worker.served != 0).count() as u64);
    if header.discovers != 0 {
        let read = Instant(header.followed);
        say(Family::DiscoveryAgeMs, if read == Instant::default() { 0 } else { millis(now.since(read)) });
    }
    values
}

/// A state as a number: see [`Family::State`].
fn number(state: State) -> u64 {
    State::ALL.into_iter().zip(1..).find(|(each, _)| *each == state).map_or(0, |(_, number)| number)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
