//! Which hosts a pool has, where Envoy's own cluster says it: one worker asks for all, and all follow.
//!
//! ```text
//! leader's tick ─► GET /clusters of Envoy's admin ─► a membership ─► shared data ─► the record's `members` is another one
//!                        └─► anything else: counted, the last one stays                 every worker's tick ─► takes it over
//! ```
//!
//! The membership is stored before the record says which one all follow, by its digest; whoever finds another one than the record speaks of looks again.
//! So whatever was lost between the two, or overwritten by a leader that is none any more, is there again after the next look.

use std::rc::Rc;
use std::time::Duration;

use super::metrics::{Family, Of};
use super::shared;
use super::watch::Purpose;
use super::worker::{Change, Read, Worker};
use crate::config::{Discovery, Pool};
use crate::core::membership::Membership;
use crate::core::poller::Poller;
use crate::host::{Fault, Host, Level};
use crate::telemetry::clusters::{self, MOST_BYTES};

/// Envoy's admin page of the largest pool takes some hundredths of a second.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What a worker knows of a pool's membership.
#[derive(Default)]
pub struct Fleet {
    members: Option<Rc<Membership>>,
    /// Which that is, see [`Membership::digest`]; 0: none.
    digest: u32,
    poller: Poller,
}

impl Fleet {
    /// What the shared data hold of a pool that is new to this worker: it need not wait for its first tick, or for the next look.
    pub fn known(host: &impl Host, name: &str) -> Self {
        let stored = host.load(&shared::members_key(name)).ok().and_then(|shared| shared.value);
        let mut fleet = Self::default();
        if let Some(members) = stored.and_then(|bytes| Membership::decode(&bytes)) {
            fleet.take_over(members);
        }
        fleet
    }

    /// Gives whether it is another one.
    fn take_over(&mut self, members: Membership) -> bool {
        let digest = members.digest();
        let is_news = self.members.is_none() || self.digest != digest;
        if is_news {
            (self.digest, self.members) = (digest, Some(Rc::new(members)));
        }
        is_news
    }

    /// The hosts that Envoy's cluster has, if they are known.
    pub fn members(&self) -> Option<&Rc<Membership>> {
        self.members.as_ref()
    }

    /// The time between two looks: as long as nothing is known, no longer than by default.
    fn interval(&self, discovery: &Discovery) -> Duration {
        const DEFAULT: Duration = Duration::from_secs(1);
        if self.members.is_some() { discovery.interval } else { discovery.interval.min(DEFAULT) }
    }

    /// Lets the next look come earlier.
    pub fn hurry(&mut self) {
        self.poller.hurry();
    }

    /// The pool as it is run: with Envoy's hosts, where they are known and wanted.
    pub fn pool(&self, configured: &Rc<Pool>) -> Rc<Pool> {
        match self.members.as_ref().filter(|_| configured.discovery.is_some()) {
            Some(members) => Rc::new(members.pool(configured)),
            None => configured.clone(),
        }
    }
}

impl<H: Host> Worker<H> {
    /// What is known of the hosts that Envoy's cluster of this name has.
    pub fn members(&self, name: &str) -> Option<&Rc<Membership>> {
        self.books.get(name)?.fleet.members()
    }

    /// A pool as it is run now: see [`Fleet::pool`].
    pub fn pool(&self, name: &str, configured: &Rc<Pool>) -> Rc<Pool> {
        self.books.get(name).map_or_else(|| configured.clone(), |books| books.fleet.pool(configured))
    }

    /// Takes over the membership that the record speaks of, if it is another one than this worker's.
    pub(super) fn catch_up(&mut self, name: &str, digest: u32) {
        // A record that was lost knows of none: what was known last stands.
        let is_news = |fleet: &Fleet| digest != 0 && digest != fleet.digest;
        if !self.books.get(name).is_some_and(|books| is_news(&books.fleet)) {
            return;
        }
        let members = self.host.load(&shared::members_key(name)).map(|shared| Membership::decode(&shared.value?));
        match members {
            Ok(Some(members)) => {
                self.take_over(name, members);
                // At once, not at the next tick: until all have, a host that has gone keeps its entry.
                if let Err(fault) = self.transact(name, Read::IfNeedBe, |_, _, _| Change::Leave(())) {
                    self.say_fault("take over the membership", fault);
                }
            }
            // Not ours: the leader's next look mends it.
            Ok(None) => {}
            Err(fault) => self.say_fault("read the membership", fault),
        }
    }

    fn take_over(&mut self, name: &str, members: Membership) {
        if self.books.get_mut(name).is_some_and(|books| books.fleet.take_over(members)) {
            self.declare();
        }
    }

    /// Asks which hosts the pool has, if it is time. Only the leader does.
    pub(super) fn poll(&mut self, name: &Rc<str>, discovery: &Discovery) {
        let now = self.host.now();
        let Some(books) = self.books.get_mut(name) else {
            return;
        };
        let interval = books.fleet.interval(discovery);
        if !books.fleet.poller.is_due(interval, now, &mut self.random) {
            return;
        }
        let path = clusters::path(name);
        let headers = [(":method", "GET"), (":path", path.as_str()), (":authority", discovery.cluster.as_str())];
        match self.host.call(&discovery.cluster, &headers, b"", TIMEOUT) {
            Ok(token) => self.calls(token, Purpose::Poll { pool: name.clone() }),
            Err(_) => self.poll_failed(name, "there is no such cluster, or nobody answers there"),
        }
    }

    /// The page has come, or something else.
    pub(super) fn polled(&mut self, name: &Rc<str>, status: Option<&[u8]>, size: usize) {
        let Some(books) = self.books.get(name).filter(|books| books.watch.leads()) else {
            return;
        };
        let Some(discovery) = books.discovery.clone() else {
            return;
        };
        match self.read_page(name, status, size) {
            Ok(members) => {
                let now = self.host.now();
                let had_failed = self.books.get_mut(name).is_some_and(|books| {
                    let interval = books.fleet.interval(&discovery);
                    books.fleet.poller.answered(true, interval, now)
                });
                if had_failed {
                    self.say("poll again", Level::Info, || format!("pool {name}: its hosts are read again"));
                }
                self.count(Family::Polls, name, Of::Word("read"), 1);
                if let Err(fault) = self.publish(name, members) {
                    self.say_fault("publish the membership", fault);
                }
            }
            Err(what) => self.poll_failed(name, &what),
        }
    }

    fn read_page(&self, name: &str, status: Option<&[u8]>, size: usize) -> Result<Membership, String> {
        match status {
            Some(b"200") if size > MOST_BYTES => Err(format!("the answer has {size} bytes; at most {MOST_BYTES} are read")),
            Some(b"200") => match self.host.body(size) {
                Some(page) => clusters::read(&page, name),
                None => Err("the answer is empty".to_owned()),
            },
            Some(b"503") => Err("the answer was 503, which is Envoy's own where nobody answers there".to_owned()),
            Some(b"504") => Err(format!("no answer within {} s, or a status of 504", TIMEOUT.as_secs())),
            Some(status) => Err(format!("the answer was {}", String::from_utf8_lossy(status))),
            None => Err("the answer was cut off, or longer than Envoy keeps".to_owned()),
        }
    }

    fn poll_failed(&mut self, name: &Rc<str>, what: &str) {
        let now = self.host.now();
        let Some(books) = self.books.get_mut(name) else {
            return;
        };
        let Some(discovery) = books.discovery.clone() else {
            return;
        };
        let interval = books.fleet.interval(&discovery);
        books.fleet.poller.answered(false, interval, now);
        let stays = match books.fleet.members() {
            Some(members) => format!("the last known {} stay", members.members().len()),
            None => "none are known yet".to_owned(),
        };
        self.count(Family::Polls, name, Of::Word("failed"), 1);
        self.say("poll", Level::Warn, || {
            format!("pool {name}: could not read its hosts through {}: {what}; {stays}", discovery.cluster)
        });
        let written = self.transact(name, Read::IfNeedBe, |_, record, _| {
            record.header.failed_polls = record.header.failed_polls.saturating_add(1);
            Change::Store(())
        });
        if let Err(fault) = written {
            self.say_fault("count a failed look", fault);
        }
    }

    /// Puts what Envoy's cluster has where all workers see it, and what Envoy holds of each host into the record.
    fn publish(&mut self, name: &Rc<str>, members: Membership) -> Result<(), Fault> {
        let (key, bytes, digest) = (shared::members_key(name), members.encode(), members.digest());
        if self.host.load(&key)?.value.as_deref() != Some(bytes.as_slice()) {
            self.host.store(&key, &bytes, 0)?;
        }
        let before = self.members(name).cloned();
        // First its own hosts, so that they are in the record, with what Envoy holds of them, before anybody chooses among them.
        self.take_over(name, members.clone());
        let (now, id) = (self.host.now(), self.id);
        let followed = self.transact(name, Read::IfNeedBe, |_, record, _| {
            if record.header.leader != id {
                return Change::Leave(None);
            }
            let acquitted = members.report(record, now);
            let header = &mut record.header;
            (header.members, header.followed, header.discovered) = (digest, now.0, members.members().len() as u32);
            Change::Store(Some(acquitted))
        })?;
        let Some(acquitted) = followed else {
            return Ok(());
        };
        self.say_what_changed(name, before.as_deref(), &members);
        if let Some(address) = acquitted.first() {
            self.say("passed over", Level::Warn, || {
                format!(
                    "pool {name}: Envoy has {address}, and sent a job that was for it elsewhere: was it away for a moment? If not, does the \
                     cluster's override_host policy read our header?"
                )
            });
        }
        Ok(())
    }

    fn say_what_changed(&self, name: &str, before: Option<&Membership>, now: &Membership) {
        let changes = now.changes(before);
        if !changes.is_empty() {
            let (hosts, changes) = (now.members().len(), changes.join("; "));
            let word = if hosts == 1 { "host" } else { "hosts" };
            let line = format!("plimsoll: pool {name}: Envoy's cluster has {hosts} {word}: {changes}");
            self.host.log(Level::Info, &line);
        }
    }
}

#[cfg(test)]
mod tests;
