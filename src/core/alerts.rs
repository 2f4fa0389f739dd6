//! Alerts in the format of Alertmanager's API, version 2: what fires is told, told again as long as it lasts, and told when it is over.
//!
//! Of one subject there is at most one firing post a minute, also when it flaps or when the post has failed, and then one that it is over. All that
//! is due goes in one post, and one post is open at a time: a sink that is down holds up nothing but the alerts.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::address::Address;
use super::time::Instant;

/// Between two firing posts of one subject.
const EACH: Duration = Duration::from_secs(60);

/// What still fires is told again after so long: Alertmanager takes it for over after 5 minutes of silence (its `resolve_timeout`).
const AGAIN: Duration = Duration::from_secs(150);

/// How long a post may take.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// Between two posts that something is over, if the first failed; and how many there are at most.
const OVER: (Duration, u32) = (Duration::from_secs(10), 5);

/// Most alerts in a post.
const MOST: usize = 100;

/// What an alert is about: a host of a pool, or the whole pool.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// The pool.
    pub pool: Rc<str>,
    /// The host, which is ejected; `None`: the pool has no host left.
    pub host: Option<Address>,
}

#[derive(Clone, Debug)]
struct Told {
    since: SystemTime,
    /// The last firing post, and whether the sink took it.
    fired: Option<(Instant, bool)>,
    /// When it ended, and how often that was posted, last when.
    over: Option<(SystemTime, u32, Instant)>,
}

/// What a sink has been told.
#[derive(Clone, Debug, Default)]
pub struct Alerter {
    told: BTreeMap<Subject, Told>,
    /// The subjects of the post that is open, and since when.
    open: Option<(Instant, Vec<Subject>)>,
}

impl Alerter {
    /// Compares what fires with what was told. Gives the body of the post that is due, if one is.
    pub fn post(&mut self, firing: &BTreeSet<Subject>, now: Instant, wall: SystemTime) -> Option<String> {
        let is_open = |since: Instant| (since..since + TIMEOUT * 2).contains(&now);
        if self.open.as_ref().is_some_and(|(since, _)| is_open(*since)) {
            return None;
        }
        for subject in firing {
            let told = self.told.entry(subject.clone()).or_insert(Told { since: wall, fired: None, over: None });
            if told.over.take().is_some() {
                told.since = wall;
                told.fired = told.fired.map(|(at, _)| (at, false));
            }
        }
        let (mut due, mut alerts) = (Vec::new(), Vec::new());
        let rests = |since: Instant, time: Duration| (since..since + time).contains(&now);
        self.told.retain(|subject, told| {
            let is_due = match (firing.contains(subject), told.fired) {
                (true, None) => true,
                (true, Some((at, was_taken))) => !rests(at, if was_taken { AGAIN } else { EACH }),
                (false, None) => return false,
                (false, Some((at, _))) => {
                    let (_, posts, last) = *told.over.get_or_insert((wall, 0, Instant::default()));
                    if posts >= OVER.1 {
                        // Kept for the minute that a next firing has to wait.
                        return rests(at, EACH);
                    }
                    posts == 0 || !rests(last, OVER.0)
                }
            };
            if is_due && due.len() < MOST {
                match &mut told.over {
                    Some((_, posts, last)) => (*posts, *last) = (*posts + 1, now),
                    None => told.fired = Some((now, false)),
                }
                alerts.push(alert(subject, told.since, told.over.map(|(over, ..)| over)));
                due.push(subject.clone());
            }
            true
        });
        if due.is_empty() {
            return None;
        }
        self.open = Some((now, due));
        Some(Value::from(alerts).to_string())
    }

    /// The sink has answered the open post, or it could not be sent.
    pub fn answered(&mut self, is_taken: bool) {
        for subject in self.open.take().map(|(_, subjects)| subjects).unwrap_or_default() {
            let Some(told) = self.told.get_mut(&subject).filter(|_| is_taken) else {
                continue;
            };
            match &mut told.over {
                Some((_, posts, _)) => *posts = OVER.1,
                None => told.fired = told.fired.map(|(at, _)| (at, true)),
            }
        }
    }

    /// Forgets a pool that another worker watches now.
    pub fn forget(&mut self, pool: &str) {
        self.told.retain(|subject, _| *subject.pool != *pool);
    }
}

fn alert(subject: &Subject, since: SystemTime, over: Option<SystemTime>) -> Value {
    let pool = &*subject.pool;
    let time = |time: SystemTime| humantime::format_rfc3339_millis(time).to_string();
    let (name, severity, summary) = match subject.host {
        Some(host) => ("PlimsollHostEjected", "warning", format!("{host} of pool {pool} fails and is left alone for a time")),
        None => ("PlimsollNoHost", "critical", format!("pool {pool} has no host left that could take a job")),
    };
    let mut alert = json!({
        "labels": { "alertname": name, "severity": severity, "pool": pool },
        "annotations": { "summary": summary },
        "startsAt": time(since),
    });
    if let (Some(host), Some(labels)) = (subject.host, alert.get_mut("labels").and_then(Value::as_object_mut)) {
        labels.insert("host".to_owned(), host.to_string().into());
    }
    if let (Some(over), Some(fields)) = (over, alert.as_object_mut()) {
        fields.insert("endsAt".to_owned(), time(over).into());
    }
    alert
}

#[cfg(test)]
mod tests;
