//! `/status.json`: what the shared records say, for people and programs. See the README for what each key means.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::core::health::Reason;
use crate::core::learning;
use crate::core::penalty::{self, Fade};
use crate::core::queue::Priority;
use crate::core::recent::{Entry, Point, Recent};
use crate::core::record::{Class, Header, Host as HostEntry, Insight, Record};
use crate::core::score;
use crate::core::time::Instant;
use crate::host::Host;
use crate::roles::{recent as kept, shared};

/// All of it. Nothing of a request is in it but the names of classes, which come from the operator's own part of the way: see the README.
pub fn status(host: &impl Host) -> Value {
    let now = host.now();
    let described = |(name, record): (String, Record)| {
        let described = pool(&record, &kept::of(host, &name), now);
        (name, described)
    };
    let pools: Map<String, Value> = shared::pools(host).into_iter().map(described).collect();
    json!({ "version": env!("CARGO_PKG_VERSION"), "pools": pools })
}

fn pool(record: &Record, lately: &Recent, now: Instant) -> Value {
    let present = Point::of(record, now);
    let scores = score::scores(record, now);
    let hosts: Vec<Value> =
        record.hosts().zip(scores).zip(0..).map(|((entry, score), slot)| host_entry(&entry, slot, score, record, now)).collect();
    json!({
        "policy": record.header.policy(),
        "hosts": hosts,
        "discovery": (record.header.discovers != 0).then(|| discovery(record, now)),
        "eligible": present.eligible,
        "in_flight": present.in_flight,
        "slots": present.slots,
        "waiting": record.count_waiting(),
        "queue": (record.header.max_length > 0 || record.has_waiting()).then(|| queue(record, now)),
        "workers": record.workers().filter(|worker| worker.served != 0).count(),
        "unleased": record.header.unleased,
        "elsewhere": record.header.elsewhere,
        "overruled": record.header.overruled,
        "beyond_slots": record.header.beyond_slots,
        "drift": record.header.drift,
        "conflicts": record.header.conflicts,
        "dead_workers": record.header.deaths,
        "classes": record.has_insights().then(|| classes(record)),
        "bad_reports": record.header.bad_reports,
        "recent": lately.events().filter_map(|entry| event(entry, now)).collect::<Vec<_>>(),
        "history": lately.points().iter().map(|point| moment(point, now)).collect::<Vec<_>>(),
    })
}

/// Something that happened to a host, or to the pool as a whole; only the keys that it has.
fn event(entry: &Entry, now: Instant) -> Option<Value> {
    let mut value = Map::new();
    value.insert("ago_ms".to_owned(), millis(now.since(Instant(entry.at))).into());
    value.insert("event".to_owned(), entry.event()?.into());
    let more = [
        ("host", entry.host().map(|host| host.to_string().into())),
        ("reason", entry.reason().map(Value::from)),
        ("failures", (entry.failures > 0).then(|| entry.failures.into())),
        ("for_ms", entry.for_ms().map(Value::from)),
    ];
    value.extend(more.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
    Some(value.into())
}

/// How full the pool was.
fn moment(point: &Point, now: Instant) -> Value {
    let Point { at, in_flight, slots, waiting, eligible } = *point;
    json!({ "ago_ms": millis(now.since(Instant(at))), "in_flight": in_flight, "slots": slots, "waiting": waiting, "eligible": eligible })
}

fn discovery(record: &Record, now: Instant) -> Value {
    let Header { members, discovered, followed, failed_polls, .. } = record.header;
    let is_known = members != 0;
    json!({
        "hosts": is_known.then_some(discovered),
        "age_ms": is_known.then(|| millis(now.since(Instant(followed)))),
        "failed_polls": failed_polls,
    })
}

fn queue(record: &Record, now: Instant) -> Value {
    let Header { max_length, dequeued, queue_full, queue_timeout, left, .. } = record.header;
    let [mut high, mut normal, mut low] = [0, 0, 0];
    for entry in record.waiting() {
        match entry.priority() {
            Priority::High => high += 1,
            Priority::Normal => normal += 1,
            Priority::Low => low += 1,
        }
    }
    let longest = record.waiting().next().map_or(Duration::ZERO, |first| now.since(first.since()));
    json!({
        "high": high,
        "normal": normal,
        "low": low,
        "longest_wait_ms": millis(longest),
        "max_length": max_length,
        "served": dequeued,
        "full": queue_full,
        "timed_out": queue_timeout,
        "left": left,
    })
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What is known of the jobs of each class: the mean work, in milliseconds on a host of speed 1 (of a class with costs, for a cost of 1).
fn classes(record: &Record) -> Vec<Value> {
    let class = |class: Class| json!({ "name": class.name(), "work_ms": class.mean().map(f64::from), "of_cost": class.is_of_cost(), "jobs": class.jobs });
    record.classes().map(class).collect()
}

fn host_entry(entry: &HostEntry, slot: u32, score: f64, record: &Record, now: Instant) -> Value {
    let (ewma, fade) = (entry.ewma(), Fade::new(record.header.time_constant(), &record.header));
    json!({
        "address": entry.address().to_string(),
        "state": entry.state(now).word(),
        "in_flight": entry.load(),
        "max_in_flight": entry.max_in_flight,
        "weight": rounded(entry.weight.into()),
        "ramp": rounded(entry.ramp(record.header.slow_start(), now)),
        "newcomer": entry.is_newcomer(),
        "reserve": entry.is_reserve(),
        "ewma_ms": ewma.has_history().then(|| rounded(ewma.millis.into())),
        "score": rounded(score),
        "consecutive_failures": entry.consecutive_failures,
        "ejected_for_ms": millis(entry.ejected_for(now)),
        "busy_for_ms": millis(entry.busy_for(now)),
        "ejections": entry.ejections,
        "reason": entry.reason().map(Reason::word),
        "penalty": rounded(penalty::factor(entry, now, fade)),
        "requests": entry.requests,
        "failures": entry.failures,
        "speed": record.insight(slot).speed_if_known(now, learning::fading(record.header.time_constant())).map(|speed| rounded((speed * entry.weight).into())),
        "work_ms": record.has_insights().then(|| rounded(record.insight(slot).work_ms())),
        "told": told(&record.insight(slot), now),
    })
}

/// What the host told of itself last, however old; `null` if it never did.
fn told(insight: &Insight, now: Instant) -> Option<Value> {
    let [jobs_age, parts_age] = insight.ages(now).map(|age| age.map(millis));
    let told = insight.told_ever();
    (jobs_age.is_some() || parts_age.is_some()).then(|| {
        json!({
            "running": told.running,
            "waiting": told.waiting,
            "jobs_age_ms": jobs_age,
            "memory": told.memory.map(|part| rounded(part.into())),
            "compute": told.compute.map(|part| rounded(part.into())),
            "parts_age_ms": parts_age,
        })
    })
}

/// Four digits behind the point: more would show the representation, not the value.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
