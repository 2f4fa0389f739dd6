//! What a worker does for all others where it leads: it probes the hosts, says what became of them, and sends alerts. What else it asks: [`super::fleet`],
//! [`super::scrape`].
//!
//! ```text
//! tick ─► what became of the hosts ─► log, metrics ─► what fires ─► one call to the sink
//!      └► who is to be asked now ─► a call to each, through the pool's own cluster ─► answer ─► the record
//! ```
//!
//! With `prewarm` every worker asks, so that it has a connection to each host; only the leader's answers count.

mod flapping;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use flapping::Flapping;

use super::metrics::{Family, Of, Shown};
use super::scrape::Scrapes;
use super::worker::{Change, Read, Worker};
use crate::config::{Alerts, Pool, Probe};
use crate::core::address::Address;
use crate::core::alerts::{self, Alerter, Subject};
use crate::core::health::{self, Reason, Watcher};
use crate::core::leader::Seen;
use crate::core::lookout::{self, Event};
use crate::core::prober::Prober;
use crate::core::record::Record;
use crate::core::report::Statement;
use crate::core::time::Instant;
use crate::host::{Host, Level, Map};

/// What a leader's tick found.
pub struct Led {
    /// The pool's record.
    pub record: Record,
    /// What became of its hosts.
    pub events: Vec<Event>,
}

/// What a worker remembers of a pool for this.
#[derive(Default)]
pub struct Watch {
    /// What was seen of the leader.
    pub leader: Seen,
    leads: bool,
    prober: Prober,
    pub(super) scrapes: Scrapes,
    flapping: Flapping,
    /// What fires, and where that is to be told.
    firing: BTreeSet<Subject>,
    /// What the gauges show.
    pub(super) shown: Shown,
    sink: Option<Rc<Alerts>>,
    /// When a point of the pool's last minutes was last looked at: see [`super::recent`].
    pub(super) noted: Instant,
}

impl Watch {
    /// Whether this worker leads.
    pub fn leads(&self) -> bool {
        self.leads
    }

    /// What hosts said of themselves since this was last called, each with the time of its answer. What a host does not say any more is `None` in its
    /// next reading; a host that says nothing at all has none, and what it said last grows old: see [`crate::config::Scrape::stale_after`].
    pub fn take_readings(&mut self) -> Vec<Statement> {
        self.scrapes.take()
    }
}

/// What it remembers of all pools together.
#[derive(Default)]
pub struct Duties {
    calls: BTreeMap<u32, Call>,
    /// By sink: instances of the filter may have different ones.
    alerters: BTreeMap<Rc<Alerts>, Alerter>,
}

/// A call of ours that has not been answered, and when it was made.
struct Call {
    made: Instant,
    purpose: Purpose,
}

/// What a call is for.
pub(super) enum Purpose {
    Probe {
        pool: Rc<str>,
        address: Address,
    },
    Alerts {
        sink: Rc<Alerts>,
    },
    Poll {
        pool: Rc<str>,
    },
    /// `page` is the place of its path in the configuration.
    Scrape {
        pool: Rc<str>,
        address: Address,
        page: usize,
    },
}

/// A call that is not answered for so long never will be: Envoy gives up all those of a root that it deletes. Above the longest timeout of any.
const LOST_AFTER: Duration = Duration::from_secs(120);

impl<H: Host> Worker<H> {
    /// Looks after a pool's hosts, if this worker leads.
    pub(super) fn watch(&mut self, name: &str, led: Option<Led>) {
        let Some((name, books)) = self.books.get_key_value(name) else {
            return;
        };
        let (name, pool) = (name.clone(), books.pool.clone());
        if led.is_none() {
            self.tell_what_is_left(&name);
        }
        if let Some(watch) = self.watch_of(&name) {
            watch.sink = pool.as_ref().and_then(|pool| pool.alerts.clone());
            if led.is_none() && std::mem::take(&mut watch.leads) {
                watch.prober.forget_runs();
                watch.scrapes.forget();
                watch.firing.clear();
                let mut shown = std::mem::take(&mut watch.shown);
                if pool.is_none() {
                    // Nobody will lead it any more. Should another worker still have its configuration, it shows all anew.
                    self.metrics.hide(&self.host, &name, &mut shown);
                }
                self.duties.alerters.values_mut().for_each(|alerter| alerter.forget(&name));
            }
        }
        let led = led.map(|Led { record, events }| {
            self.report(&name, &record, events);
            record
        });
        let leads = led.is_some();
        let discovery = self.books.get(&name).and_then(|books| books.discovery.clone());
        if leads && let Some(discovery) = discovery {
            self.poll(&name, &discovery);
        }
        if let (Some(record), Some(pool)) = (&led, &pool) {
            match pool.scrape() {
                Some(scrape) => self.scrape(&name, pool, scrape, record),
                None => self.watch_of(&name).into_iter().for_each(|watch| watch.scrapes.forget()),
            }
        }
        if let Some(pool) = pool
            && let Some(probe) = &pool.probe
            && (leads || probe.prewarm)
        {
            self.ask(&name, &pool, probe);
        }
    }

    fn watch_of(&mut self, name: &str) -> Option<&mut Watch> {
        self.books.get_mut(name).map(|books| &mut books.watch)
    }

    fn report(&mut self, name: &Rc<str>, record: &Record, events: Vec<Event>) {
        let now = self.host.now();
        let Some(books) = self.books.get_mut(&**name) else {
            return;
        };
        let queue = books.pool.as_ref().and_then(|pool| pool.queue.as_ref());
        let timeout = queue.map_or(Duration::ZERO, |queue| queue.timeout);
        let watch = &mut books.watch;
        watch.leads = true;
        let hosts = lookout::ejected(record).map(Some);
        let has_host = lookout::has_host(record, now);
        let no_host = (!has_host).then_some(None);
        watch.firing = hosts.chain(no_host).map(|host| Subject { pool: name.clone(), host }).collect();
        if !events.is_empty() {
            watch.shown.hurry();
        }
        self.metrics.show(&self.host, (name, timeout), record, now, &mut watch.shown);
        self.remember(name, record, &events);
        for event in events {
            self.tell(name, event);
        }
        self.tell_what_flaps(name, record, now);
    }

    fn tell(&mut self, name: &str, event: Event) {
        let (level, line) = match event {
            Event::PassedOver => {
                if let Some(books) = self.books.get_mut(name) {
                    books.fleet.hurry();
                }
                return;
            }
            Event::Ejected { address, reason, failures, length } => {
                self.count(Family::Ejections, name, Of::HostAnd(Some(address), reason.word()), 1);
                let why = match reason {
                    Reason::Failures => format!("{failures} failures in a row"),
                    Reason::Latency => "its latency was over the threshold".to_owned(),
                    Reason::Unknown => "Envoy's cluster does not have it".to_owned(),
                };
                (Level::Warn, format!("{address} is ejected for {:.1} s: {why}", length.as_secs_f64()))
            }
            Event::Readmitted(address) => {
                self.count(Family::Readmissions, name, Of::Host(Some(address)), 1);
                (Level::Info, format!("{address} serves again"))
            }
            Event::Unhealthy(address, watcher) => {
                self.count(Family::Unhealthy, name, Of::Host(Some(address)), 1);
                let why = match watcher {
                    Watcher::Probes => self.probes_failed(name),
                    Watcher::Envoy => "Envoy says so".to_owned(),
                };
                (Level::Warn, format!("{address} is unhealthy: {why}"))
            }
            Event::Healthy(address) => (Level::Info, format!("{address} is healthy again")),
            Event::NoHost | Event::HostAgain => {
                let now = self.host.now();
                if let Some(watch) = self.watch_of(name) {
                    watch.flapping.note(&event, now);
                }
                return;
            }
        };
        self.host.log(level, &format!("plimsoll: pool {name}: {line}"));
    }

    fn probes_failed(&self, name: &str) -> String {
        let probe = self.books.get(name).and_then(|books| books.pool.as_ref()?.probe.clone());
        format!("{} probes failed in a row", probe.map_or(0, |probe| probe.unhealthy_after))
    }

    fn ask(&mut self, name: &Rc<str>, pool: &Pool, probe: &Probe) {
        let now = self.host.now();
        let Some(books) = self.books.get_mut(&**name) else {
            return;
        };
        // Of all live configurations: one that only an older one names would never be asked again.
        let hosts: Vec<Address> = books.book.named().collect();
        for address in books.watch.prober.due(&hosts, probe, now, &mut self.random) {
            let text = address.to_string();
            let headers =
                [(":method", "GET"), (":path", probe.path.as_str()), (":authority", &text), (&*pool.override_header, &text)];
            match self.host.call(name, &headers, b"", probe.timeout) {
                Ok(token) => self.calls(token, Purpose::Probe { pool: name.clone(), address }),
                Err(fault) => {
                    if let Some(watch) = self.watch_of(name) {
                        watch.prober.not_asked(address);
                    }
                    self.say_fault("probe a host", fault);
                }
            }
        }
    }

    pub(super) fn calls(&mut self, token: u32, purpose: Purpose) {
        let made = self.host.now();
        self.duties.calls.retain(|_, call| (call.made..call.made + LOST_AFTER).contains(&made));
        self.duties.calls.insert(token, Call { made, purpose });
    }

    /// A call of ours was answered, with a body of so many bytes, or failed.
    pub fn called_back(&mut self, token: u32, size: usize) {
        let status = self.host.header(Map::Call, ":status");
        let is_well = status.as_deref().is_some_and(|status| matches!(status, [b'2', _, _]));
        match self.duties.calls.remove(&token).map(|call| call.purpose) {
            Some(Purpose::Probe { pool, address }) => self.probed(&pool, address, is_well),
            Some(Purpose::Alerts { sink }) => self.alerted(&sink, is_well),
            Some(Purpose::Poll { pool }) => self.polled(&pool, status.as_deref(), size),
            Some(Purpose::Scrape { pool, address, page }) => self.scraped(&pool, (address, page), token, status.as_deref(), size),
            None => {}
        }
    }

    fn probed(&mut self, name: &str, address: Address, is_well: bool) {
        let now = self.host.now();
        let Some(books) = self.books.get_mut(name) else {
            return;
        };
        let run = books.watch.prober.answered(address, is_well);
        let probe = books.pool.as_ref().and_then(|pool| pool.probe.as_ref());
        let (Some(run), Some(probe), true) = (run, probe, books.watch.leads) else {
            return;
        };
        let unhealthy = match (run.bad >= probe.unhealthy_after, run.good >= probe.healthy_after) {
            (true, _) => true,
            (_, true) => false,
            _ => return,
        };
        let written = self.transact(name, Read::IfNeedBe, |_, record, _| {
            match health::report(record, address, Watcher::Probes, unhealthy, now) {
                true => Change::Store(()),
                false => Change::Leave(()),
            }
        });
        // The next answer says it again.
        if let Err(fault) = written {
            self.say_fault("write down a probe", fault);
        }
    }

    /// Once a tick, for all pools where this worker leads.
    pub(super) fn send_alerts(&mut self) {
        let (now, wall) = (self.host.now(), self.host.wall());
        let mut firing: BTreeMap<Rc<Alerts>, BTreeSet<Subject>> = BTreeMap::new();
        for watch in self.books.values().map(|books| &books.watch).filter(|watch| watch.leads) {
            if let Some(sink) = &watch.sink {
                firing.entry(sink.clone()).or_default().extend(watch.firing.iter().cloned());
            }
        }
        self.duties.alerters.retain(|sink, _| firing.contains_key(sink));
        for (sink, subjects) in firing {
            let Some(body) = self.duties.alerters.entry(sink.clone()).or_default().post(&subjects, now, wall) else {
                continue;
            };
            let headers = [
                (":method", "POST"),
                (":path", sink.path.as_str()),
                (":authority", sink.cluster.as_str()),
                ("content-type", "application/json"),
            ];
            match self.host.call(&sink.cluster, &headers, body.as_bytes(), alerts::TIMEOUT) {
                Ok(token) => self.calls(token, Purpose::Alerts { sink }),
                Err(_) => {
                    let cluster = &sink.cluster;
                    self.say("alert", Level::Warn, || {
                        format!("could not send an alert: Envoy has no cluster {cluster}, or cannot reach it")
                    });
                    self.alerted(&sink, false);
                }
            }
        }
    }

    fn alerted(&mut self, sink: &Alerts, is_taken: bool) {
        let outcome = if is_taken { "sent" } else { "failed" };
        self.count(Family::Alerts, "", Of::Word(outcome), 1);
        if let Some(alerter) = self.duties.alerters.get_mut(sink) {
            alerter.answered(is_taken);
        }
    }
}

#[cfg(test)]
mod tests;
