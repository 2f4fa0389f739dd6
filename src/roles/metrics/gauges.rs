//! What the leader shows of a pool's record, once a second.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Family, Metrics, Of, text};
use crate::core::address::Address;
use crate::core::health::State;
use crate::core::learning;
use crate::core::lease::Elsewhere;
use crate::core::lookout;
use crate::core::queue::Priority;
use crate::core::recent::Point;
use crate::core::record::{Host as Entry, Record};
use crate::core::score;
use crate::core::time::{Instant, millis};
use crate::host::Host;
use crate::roles::reply::Verdict;

/// How often gauges are looked after.
const PERIOD: Duration = Duration::from_secs(1);

/// After so many looks all are set again: should a worker that lost the lead have had the last word, it has no longer.
const AFRESH: u32 = 10;

/// Most metrics of hosts that are made in one look, the next of which then comes at the next tick: Envoy matches each name with all of its tags' expressions.
const MOST_MADE: usize = 128;

/// The gauges of a host; the last two only where they are known.
const OF_HOST: [Family; 7] =
    [Family::InFlight, Family::MaxInFlight, Family::EwmaMs, Family::Score, Family::State, Family::Speed, Family::TelemetryAgeMs];

/// Their values, in the same order.
type Values = [Option<u64>; OF_HOST.len()];

/// Of those that have gone.
const GONE: Values = [Some(0), Some(0), Some(0), Some(0), Some(0), None, None];

/// The same in a pool whose hosts had all of them at some time.
const ALL_GONE: Values = [Some(0); OF_HOST.len()];

/// What [`Metrics::kinds`] says of pools.
const INSIGHTS: &str = "insights";
const DISCOVERY: &str = "discovery";
const OTHERS: &str = "others";

/// Counters that begin with 0, not with their first event, so that a rate has it.
const FROM_0: [Family; 6] =
    [Family::Unleased, Family::BeyondSlots, Family::CasRetries, Family::DeadWorkers, Family::BadReports, Family::Left];

/// What a leader has shown of a pool.
#[derive(Default)]
pub struct Shown {
    hosts: BTreeMap<Address, Row>,
    pool: BTreeMap<(Family, Of), u64>,
    at: Instant,
    looks: u32,
    /// Whether hosts have, or ever had, a learned speed and an age of what they told.
    had_insights: bool,
}

/// What is shown of a host. A thousand hosts are looked at in a worker that has requests to serve: so their metrics' ids are kept here.
struct Row {
    /// Whether it has metrics of its own.
    is_own: bool,
    shown: [Option<(u32, u64)>; OF_HOST.len()],
    now: Values,
    seen: u32,
}

impl Row {
    fn new(is_own: bool) -> Self {
        Self { is_own, shown: [None; OF_HOST.len()], now: GONE, seen: 0 }
    }

    /// Whether all is shown that there is to show.
    fn is_whole(&self) -> bool {
        self.now.iter().zip(&self.shown).all(|(now, shown)| now.is_none() || shown.is_some())
    }

    /// One of the host's entries. It has two where it came back while jobs of before still run: these are its own, and all else is said of the new one.
    fn look(&mut self, look: u32, values: Values, is_retired: bool) {
        let is_second = std::mem::replace(&mut self.seen, look) == look;
        let ([jobs, ..], [more, ..]) = (self.now, values);
        if !is_second || !is_retired {
            self.now = values;
        }
        if let (true, [sum, ..]) = (is_second, &mut self.now) {
            *sum = Some(jobs.unwrap_or(0).saturating_add(more.unwrap_or(0)));
        }
    }
}

impl Shown {
    fn is_due(&self, now: Instant) -> bool {
        self.at == Instant::default() || !(self.at..self.at + PERIOD).contains(&now)
    }

    /// There is something that nobody should wait for.
    pub fn hurry(&mut self) {
        self.at = Instant::default();
    }
}

impl Metrics {
    /// Shows the gauges of a pool, in whose queue jobs may wait for so long, if it is time.
    pub fn show(
        &mut self,
        host: &impl Host,
        (pool, timeout): (&str, Duration),
        record: &Record,
        now: Instant,
        shown: &mut Shown,
    ) {
        if !shown.is_due(now) {
            return;
        }
        if shown.looks == 0 {
            self.take_over(host, pool, shown);
        }
        let is_afresh = shown.looks.is_multiple_of(AFRESH);
        shown.at = now;
        // Never 0, which stands for a row that was never looked at.
        shown.looks = shown.looks.wrapping_add(1).max(1);
        let mut values = of_pool(record, now);
        values.insert((Family::QueueTimeoutMs, Of::Pool), millis(timeout));
        // Those that share one metric have no one value.
        values.retain(|(_, of), _| !matches!(of, Of::Class(Some(name)) if !self.has_own_class(host, pool, name)));
        self.note_kinds(host, pool, record, shown);
        self.look_at_hosts(host, pool, record, now, shown);
        let mut places = MOST_MADE;
        for (address, row) in &mut shown.hosts {
            if row.is_own {
                self.show_row(host, pool, *address, row, is_afresh, &mut places);
            } else {
                for (family, value) in OF_HOST.into_iter().zip(row.now).take(2) {
                    let sum = values.entry((family, Of::Host(None))).or_default();
                    *sum = sum.saturating_add(value.unwrap_or(0));
                }
            }
        }
        if places == 0 {
            shown.hurry();
        }
        // What had no metrics of its own may have them now. What has gone is shown so once more at least: see `AFRESH`.
        let has_long_gone = |row: &Row| row.seen.wrapping_add(AFRESH) < shown.looks && row.is_whole();
        shown.hosts.retain(|_, row| if row.is_own { !has_long_gone(row) } else { row.seen == shown.looks && !is_afresh });
        shown.pool.keys().for_each(|gauge| _ = values.entry(*gauge).or_default());
        for ((family, of), value) in &values {
            if is_afresh || shown.pool.get(&(*family, *of)) != Some(value) {
                self.record(host, *family, pool, *of, *value);
            }
        }
        shown.pool = values;
    }

    /// What somebody else may have shown goes to 0, unless it is found again.
    fn take_over(&mut self, host: &impl Host, pool: &str, shown: &mut Shown) {
        let known = self.known_hosts(host, pool).into_iter().map(|host| (host, Row::new(true)));
        shown.hosts.extend(known);
        let kinds = self.kinds.all(host, &format!("{};", text(pool)));
        let has = |kind: &str| kinds.iter().any(|known| known == kind);
        shown.had_insights = has(INSIGHTS);
        if has(DISCOVERY) {
            shown.pool.insert((Family::DiscoveryAgeMs, Of::Pool), 0);
        }
        if has(OTHERS) {
            shown.pool.extend([Family::InFlight, Family::MaxInFlight].map(|family| ((family, Of::Host(None)), 0)));
        }
        if shown.had_insights {
            shown.pool.extend(self.known_classes(host, pool).into_iter().map(|class| ((Family::ClassWorkUs, class), 0)));
        }
        let words = Verdict::ALL.map(|verdict| (Family::Answered, Of::Word(verdict.word()))).into_iter();
        let words = words.chain(Elsewhere::ALL.map(|why| (Family::ServedByAnother, Of::Word(why.word()))));
        for (family, of) in words.chain(FROM_0.map(|family| (family, Of::Pool))) {
            self.id(host, family, pool, of);
        }
    }

    /// So that whoever leads next knows.
    fn note_kinds(&mut self, host: &impl Host, pool: &str, record: &Record, shown: &mut Shown) {
        shown.had_insights |= record.has_insights();
        let has_others = shown.hosts.values().any(|row| !row.is_own);
        let kinds = [(INSIGHTS, shown.had_insights), (DISCOVERY, record.header.discovers != 0), (OTHERS, has_others)];
        let kinds = kinds.into_iter().filter(|(_, has)| *has);
        self.kinds.admit(host, kinds.map(|(kind, _)| format!("{};{kind}", text(pool))).collect::<Vec<_>>());
    }

    fn look_at_hosts(&mut self, host: &impl Host, pool: &str, record: &Record, now: Instant, shown: &mut Shown) {
        let is_new = |entry: &Entry| !shown.hosts.contains_key(&entry.address());
        self.admit(host, pool, record.hosts().filter(is_new).map(|entry| entry.address()));
        for ((entry, score), slot) in record.hosts().zip(score::scores(record, now)).zip(0..) {
            let row = shown.hosts.entry(entry.address()).or_insert_with(|| Row::new(self.has_own(host, pool, entry.address())));
            let mut values = of_host(record, &entry, slot, score, now);
            if shown.had_insights {
                values.iter_mut().for_each(|value| _ = value.get_or_insert(0));
            }
            row.look(shown.looks, values, entry.is_retired());
        }
        for row in shown.hosts.values_mut().filter(|row| row.seen != shown.looks) {
            row.now = if shown.had_insights { ALL_GONE } else { GONE };
        }
    }

    fn show_row(&mut self, host: &impl Host, pool: &str, address: Address, row: &mut Row, is_afresh: bool, places: &mut usize) {
        for ((family, value), shown) in OF_HOST.into_iter().zip(row.now).zip(&mut row.shown) {
            match (value.or(shown.map(|_| 0)), &shown) {
                (Some(value), Some((id, before))) if is_afresh || *before != value => {
                    host.record(*id, value);
                    *shown = Some((*id, value));
                }
                (Some(value), None) if *places > 0 => {
                    *places -= 1;
                    *shown = self.id(host, family, pool, Of::Host(Some(address))).map(|id| (id, value));
                    shown.iter().for_each(|(id, value)| host.record(*id, *value));
                }
                _ => {}
            }
        }
    }

    /// Sets to 0 what was shown: nobody looks after the pool any more.
    pub fn hide(&mut self, host: &impl Host, pool: &str, shown: &mut Shown) {
        let shown = std::mem::take(shown);
        let of_hosts = shown.hosts.into_values().flat_map(|row| row.shown);
        of_hosts.flatten().for_each(|(id, _)| host.record(id, 0));
        shown.pool.into_keys().for_each(|(family, of)| self.record(host, family, pool, of, 0));
    }
}

fn of_host(record: &Record, entry: &Entry, slot: u32, score: f64, now: Instant) -> Values {
    let ewma = entry.ewma();
    let ewma = if ewma.has_history() { ewma.millis.round() as u64 } else { 0 };
    let (mut speed, mut age) = (None, None);
    if record.has_insights() {
        let insight = record.insight(slot);
        let known = insight.speed_if_known(now, learning::fading(record.header.time_constant()));
        speed = Some(known.map_or(0, |speed| (speed * entry.weight * 1e3).round() as u64));
        age = insight.ages(now).into_iter().flatten().max().map(millis);
    }
    let (load, slots, state) = (entry.load().into(), entry.max_in_flight.into(), number(entry.state(now)));
    [Some(load), Some(slots), Some(ewma), Some((score * 1e3).round() as u64), Some(state), speed, age]
}

fn of_pool(record: &Record, now: Instant) -> BTreeMap<(Family, Of), u64> {
    let mut values = BTreeMap::new();
    let mut states = [0; State::ALL.len()];
    for entry in record.hosts() {
        let state = entry.state(now);
        states.iter_mut().zip(State::ALL).filter(|(_, each)| *each == state).for_each(|(count, _)| *count += 1);
    }
    values.extend(State::ALL.into_iter().zip(states).map(|(state, count)| ((Family::Hosts, Of::Word(state.word())), count)));
    // A class may have jobs with costs and such without, and names may begin alike: most jobs say it.
    let mut classes: Vec<_> = record.classes().collect();
    classes.sort_by_key(|class| class.jobs);
    for class in classes {
        let work = class.mean().map_or(0, |mean| (mean * 1e3).round() as u64);
        values.insert((Family::ClassWorkUs, Of::class(class.shown())), work);
    }
    for (priority, waiting) in Priority::ALL.into_iter().zip(record.waiting_by_priority()) {
        values.insert((Family::Waiting, Of::Word(priority.word())), waiting.into());
    }
    let header = &record.header;
    let Point { eligible, slots, .. } = Point::of(record, now);
    let mut say = |family, value| _ = values.insert((family, Of::Pool), value);
    say(Family::Eligible, eligible.into());
    say(Family::Slots, slots.into());
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
