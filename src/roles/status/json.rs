//! `/status.json`: what the shared records say, for people and programs. See the README for what each key means.
//!
//! Structs and not values, so that no key is copied: a page that many look at is written fifty times a second, by a worker that has jobs to see to.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::core::health::Reason;
use crate::core::learning;
use crate::core::penalty::{self, Fade};
use crate::core::recent::{Entry, Point, Recent};
use crate::core::record::{self, Header, Insight, Record};
use crate::core::score;
use crate::core::time::{Instant, millis};
use crate::host;
use crate::roles::{recent, shared};

/// All of it, as JSON. Nothing of a request is in it but the names of classes, which come from the operator's own part of the way: see the README.
pub fn status(host: &impl host::Host) -> String {
    let now = host.now();
    let described = |(name, record): (String, Record)| {
        let pool = pool(&record, &recent::of(host, &name), now);
        (name, pool)
    };
    let pools = shared::pools(host).into_iter().map(described).collect();
    // Numbers and text only, which can always be written.
    serde_json::to_string(&Status { version: env!("CARGO_PKG_VERSION"), pools }).unwrap_or_default()
}

#[derive(Serialize)]
struct Status {
    version: &'static str,
    pools: BTreeMap<String, Pool>,
}

#[derive(Serialize)]
struct Pool {
    policy: &'static str,
    hosts: Vec<Host>,
    discovery: Option<Discovery>,
    eligible: u32,
    in_flight: u32,
    slots: u32,
    waiting: usize,
    queue: Option<Queue>,
    workers: usize,
    unleased: u64,
    elsewhere: u64,
    overruled: u64,
    beyond_slots: u64,
    drift: u64,
    conflicts: u64,
    dead_workers: u64,
    classes: Option<Vec<Class>>,
    bad_reports: u64,
    recent: Vec<Event>,
    history: Vec<Moment>,
}

fn pool(record: &Record, lately: &Recent, now: Instant) -> Pool {
    let present = Point::of(record, now);
    let scores = score::scores(record, now);
    Pool {
        policy: record.header.policy(),
        hosts: record.hosts().zip(scores).zip(0..).map(|((entry, score), slot)| host(&entry, slot, score, record, now)).collect(),
        discovery: (record.header.discovers != 0).then(|| discovery(record, now)),
        eligible: present.eligible,
        in_flight: present.in_flight,
        slots: present.slots,
        waiting: record.count_waiting(),
        queue: (record.header.max_length > 0 || record.has_waiting()).then(|| queue(record, now)),
        workers: record.workers().filter(|worker| worker.served != 0).count(),
        unleased: record.header.unleased,
        elsewhere: record.header.elsewhere,
        overruled: record.header.overruled,
        beyond_slots: record.header.beyond_slots,
        drift: record.header.drift,
        conflicts: record.header.conflicts,
        dead_workers: record.header.deaths,
        classes: record.has_insights().then(|| record.classes().map(class).collect()),
        bad_reports: record.header.bad_reports,
        recent: lately.events().filter_map(|entry| event(entry, now)).collect(),
        history: lately.points().iter().map(|point| moment(point, now)).collect(),
    }
}

/// Something that happened to a host, or to the pool as a whole; only the keys that it has.
#[derive(Serialize)]
struct Event {
    ago_ms: u64,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failures: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    for_ms: Option<u32>,
}

fn event(entry: &Entry, now: Instant) -> Option<Event> {
    Some(Event {
        ago_ms: millis(now.since(Instant(entry.at))),
        event: entry.event()?,
        host: entry.host().map(|host| host.to_string()),
        reason: entry.reason(),
        failures: (entry.failures > 0).then_some(entry.failures),
        for_ms: entry.for_ms(),
    })
}

/// How full the pool was.
#[derive(Serialize)]
struct Moment {
    ago_ms: u64,
    in_flight: u32,
    slots: u32,
    waiting: u32,
    eligible: u32,
}

fn moment(point: &Point, now: Instant) -> Moment {
    let Point { at, in_flight, slots, waiting, eligible } = *point;
    Moment { ago_ms: millis(now.since(Instant(at))), in_flight, slots, waiting, eligible }
}

#[derive(Serialize)]
struct Discovery {
    hosts: Option<u32>,
    age_ms: Option<u64>,
    failed_polls: u64,
}

fn discovery(record: &Record, now: Instant) -> Discovery {
    let Header { members, discovered, followed, failed_polls, .. } = record.header;
    let is_known = members != 0;
    Discovery {
        hosts: is_known.then_some(discovered),
        age_ms: is_known.then(|| millis(now.since(Instant(followed)))),
        failed_polls,
    }
}

#[derive(Serialize)]
struct Queue {
    high: u32,
    normal: u32,
    low: u32,
    longest_wait_ms: u64,
    max_length: u32,
    served: u64,
    full: u64,
    timed_out: u64,
    left: u64,
}

fn queue(record: &Record, now: Instant) -> Queue {
    let Header { max_length, dequeued, queue_full, queue_timeout, left, .. } = record.header;
    let [high, normal, low] = record.waiting_by_priority();
    Queue {
        high,
        normal,
        low,
        longest_wait_ms: millis(record.longest_wait(now)),
        max_length,
        served: dequeued,
        full: queue_full,
        timed_out: queue_timeout,
        left,
    }
}

/// What is known of the jobs of a class: the mean work, in milliseconds on a host of speed 1 (of a class with costs, for a cost of 1).
#[derive(Serialize)]
struct Class {
    name: String,
    work_ms: Option<f64>,
    of_cost: bool,
    jobs: u32,
}

fn class(class: record::Class) -> Class {
    Class { name: class.name(), work_ms: class.mean().map(f64::from), of_cost: class.is_of_cost(), jobs: class.jobs }
}

#[derive(Serialize)]
struct Host {
    address: String,
    state: &'static str,
    in_flight: u32,
    max_in_flight: u32,
    weight: f64,
    ramp: f64,
    newcomer: bool,
    reserve: bool,
    ewma_ms: Option<f64>,
    score: f64,
    consecutive_failures: u32,
    ejected_for_ms: u64,
    busy_for_ms: u64,
    ejections: u32,
    reason: Option<&'static str>,
    penalty: f64,
    requests: u64,
    failures: u64,
    speed: Option<f64>,
    work_ms: Option<f64>,
    told: Option<Told>,
}

fn host(entry: &record::Host, slot: u32, score: f64, record: &Record, now: Instant) -> Host {
    let (ewma, fade) = (entry.ewma(), Fade::new(record.header.time_constant(), &record.header));
    let insight = record.insight(slot);
    let speed = insight.speed_if_known(now, learning::fading(record.header.time_constant()));
    Host {
        address: entry.address().to_string(),
        state: entry.state(now).word(),
        in_flight: entry.load(),
        max_in_flight: entry.max_in_flight,
        weight: rounded(entry.weight.into()),
        ramp: rounded(entry.ramp(record.header.slow_start(), now)),
        newcomer: entry.is_newcomer(),
        reserve: entry.is_reserve(),
        ewma_ms: ewma.has_history().then(|| rounded(ewma.millis.into())),
        score: rounded(score),
        consecutive_failures: entry.consecutive_failures,
        ejected_for_ms: millis(entry.ejected_for(now)),
        busy_for_ms: millis(entry.busy_for(now)),
        ejections: entry.ejections,
        reason: entry.reason().map(Reason::word),
        penalty: rounded(penalty::factor(entry, now, fade)),
        requests: entry.requests,
        failures: entry.failures,
        speed: speed.map(|speed| rounded((speed * entry.weight).into())),
        work_ms: record.has_insights().then(|| rounded(insight.work_ms())),
        told: told(&insight, now),
    }
}

/// What a host told of itself last, however old.
#[derive(Serialize)]
struct Told {
    running: Option<f32>,
    waiting: Option<f32>,
    jobs_age_ms: Option<u64>,
    memory: Option<f64>,
    compute: Option<f64>,
    parts_age_ms: Option<u64>,
}

/// `None`: it never told anything.
fn told(insight: &Insight, now: Instant) -> Option<Told> {
    let [jobs_age_ms, parts_age_ms] = insight.ages(now).map(|age| age.map(millis));
    let told = insight.told_ever();
    (jobs_age_ms.is_some() || parts_age_ms.is_some()).then(|| Told {
        running: told.running,
        waiting: told.waiting,
        jobs_age_ms,
        memory: told.memory.map(|part| rounded(part.into())),
        compute: told.compute.map(|part| rounded(part.into())),
        parts_age_ms,
    })
}

/// Four digits behind the point: more would show the representation, not the value.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
