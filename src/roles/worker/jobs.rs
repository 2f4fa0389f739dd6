//! A worker's jobs: choosing, following where Envoy sends them, settling.

use std::rc::Rc;
use std::time::Duration;

use super::{Change, Read, Worker};
use crate::config::Pool;
use crate::core::address::Address;
use crate::core::choice::{self, Decision, Kind};
use crate::core::lease::{Lease, Settlement, Whereabouts};
use crate::core::roster::Roster;
use crate::host::{Fault, Host, Level, number};

impl<H: Host> Worker<H> {
    /// Chooses a host for a request. A job gets a lease, also when its host cannot be chosen here: then it follows where Envoy sends it.
    pub fn choose(
        &mut self,
        pool_name: &str,
        stream: u32,
        pool: &Rc<Pool>,
        roster: &mut Roster,
        kind: Kind,
    ) -> Result<Decision, Fault> {
        let now = self.host.now();
        if let Some(books) = self.books.get_mut(pool_name) {
            match kind {
                Kind::Job => books.book.served = true,
                Kind::Other => books.book.unleased += 1,
            }
        }
        let read = if kind == Kind::Job { Read::IfNeedBe } else { Read::Always };
        let (decision, placed) = self.transact(pool_name, read, |_, record, random| {
            let decision = choice::choose(record, pool, roster, now, random, kind);
            let chosen = match &decision {
                Decision::Chosen(chosen) if kind == Kind::Job => chosen,
                _ => return Change::Leave((decision, None)),
            };
            match chosen.hosts.first().and_then(|host| roster.slot_of(*host)) {
                Some(slot) => {
                    let placed = record.place(slot, now, chosen.trial);
                    Change::Store((decision, placed))
                }
                None => Change::Leave((decision, None)),
            }
        })?;
        if let (Decision::Chosen(chosen), Some((seat, trial))) = (&decision, placed) {
            let named = chosen.hosts.iter().filter_map(|host| pool.hosts.get(*host)).map(|host| host.address).collect();
            self.take(pool_name, stream, Lease::new(Some(seat), named, now, pool.clone(), trial));
        }
        Ok(decision)
    }

    /// Takes a lease for a job whose host Envoy chooses.
    pub fn take_unplaced(&mut self, pool_name: &str, stream: u32, pool: &Rc<Pool>) {
        let now = self.host.now();
        self.take(pool_name, stream, Lease::new(None, Vec::new(), now, pool.clone(), None));
    }

    fn take(&mut self, pool_name: &str, stream: u32, lease: Lease) {
        if let Some(books) = self.books.get_mut(pool_name) {
            books.book.take(stream, lease);
        }
    }

    /// A stream's lease.
    pub fn lease(&self, pool_name: &str, stream: u32) -> Option<&Lease> {
        self.books.get(pool_name)?.book.lease(stream)
    }

    /// A stream's lease, to note what its client or its response says; its place is not changed so.
    pub fn lease_mut(&mut self, pool_name: &str, stream: u32) -> Option<&mut Lease> {
        self.books.get_mut(pool_name)?.book.lease_mut(stream)
    }

    /// Notes that a stream's response has begun, and where: from now on the job stays there. Gives the number of attempts.
    pub fn answered(&mut self, pool_name: &str, stream: u32, served_by: Option<Address>) -> Option<u64> {
        let lease = self.lease(pool_name, stream)?;
        let news = served_by.and_then(|address| whereabouts(&self.host, address, lease.address));
        let attempts = lease.attempts(news);
        if let Some(now_at) = news {
            self.follow(pool_name, stream, now_at);
        }
        let lease = self.lease_mut(pool_name, stream)?;
        lease.is_answered = news.is_none_or(|now_at| lease.address == Some(now_at.address));
        Some(attempts)
    }

    /// Moves a stream's lease to the host that works on it now.
    fn follow(&mut self, pool_name: &str, stream: u32, now_at: Whereabouts) {
        self.say_if_overruled(pool_name, stream, now_at);
        let now = self.host.now();
        let moved = self.transact(pool_name, Read::IfNeedBe, |book, record, random| match book.lease(stream) {
            Some(lease) if lease.address != Some(now_at.address) => {
                Change::Store(Some(lease.follow(record, now_at, now, random)))
            }
            _ => Change::Leave(None),
        });
        match moved {
            Ok(Some(moved)) => {
                if let Some(lease) = self.lease_mut(pool_name, stream) {
                    lease.moved(moved);
                }
            }
            Ok(None) => {}
            // The next tick looks again, and so does the end.
            Err(fault) => self.say_fault("follow a retry", fault),
        }
    }

    /// Gives a stream's lease back; asks for the latency only if it would count. What cannot be stored now is stored at the next tick.
    pub fn settle(&mut self, pool_name: &str, stream: u32, mut end: Settlement, latency: impl Fn() -> Option<Duration>) {
        if let Some(at) = end.whereabouts {
            self.say_if_overruled(pool_name, stream, at);
        }
        let now = self.host.now();
        let settled = self.transact(pool_name, Read::IfNeedBe, |book, record, random| {
            let Some(lease) = book.lease(stream) else { return Change::Leave(()) };
            if end.latency.is_none() && lease.wants_latency(record, &end, now) {
                end.latency = latency().map(|latency| lease.own_time(latency));
            }
            lease.settle(record, end, now, random);
            Change::Store(())
        });
        let book = self.books.get_mut(pool_name).map(|books| &mut books.book);
        match settled {
            Ok(()) => _ = book.and_then(|book| book.give(stream)),
            Err(fault) => {
                if let Some(lease) = book.and_then(|book| book.lease_mut(stream)) {
                    lease.ended = Some(end);
                }
                self.say_fault("settle a lease", fault);
            }
        }
    }

    fn say_if_overruled(&mut self, pool_name: &str, stream: u32, now_at: Whereabouts) {
        let lease = self.books.get(pool_name).and_then(|books| books.book.lease(stream));
        // Where Envoy's cluster is followed, the next look says whether the host has gone.
        let is_clear = |lease: &&Lease| lease.is_overruled(now_at) && lease.pool.discovery.is_none();
        let Some(named) = lease.filter(is_clear).and_then(|lease| lease.address) else {
            return;
        };
        self.say("overruled", Level::Warn, || {
            let seen = now_at.address;
            format!(
                "pool {pool_name}: Envoy sent a job to {seen} though {named} was named: is {named} in the cluster, and does its \
                 override_host policy read our header?"
            )
        });
    }

    /// Once a tick: moves the leases of jobs that Envoy has tried elsewhere, and stores the settlements that could not be.
    pub(super) fn follow_retries(&mut self, name: &str) {
        let Some(books) = self.books.get(name) else {
            return;
        };
        let (mut ended, mut running) = (Vec::new(), Vec::new());
        for (stream, lease) in books.book.leases() {
            match lease.ended {
                Some(end) => ended.push((stream, end)),
                None if !lease.is_answered => running.push((stream, lease.address)),
                None => {}
            }
        }
        for (stream, end) in ended {
            self.settle(name, stream, end, || None);
        }
        let now = self.host.now();
        for (stream, address) in running {
            if self.host.enter(stream).is_err() {
                continue;
            }
            if let Some(at) = moved_to(&self.host, address) {
                self.follow(name, stream, at);
            }
            let is_watched = self.lease(name, stream).is_some_and(|lease| lease.upload.is_watched());
            let received = if is_watched { number(self.host.property("request\0size")) } else { None };
            if let (Some(received), Some(lease)) = (received, self.lease_mut(name, stream)) {
                lease.upload.look(received, now);
            }
        }
    }
}

/// Where Envoy works on the current stream's job, if that is not where its lease is.
pub fn moved_to(host: &impl Host, leased_at: Option<Address>) -> Option<Whereabouts> {
    whereabouts(host, Address::parse(&host.property("upstream\0address")?)?, leased_at)
}

/// The same, where the address is known.
fn whereabouts(host: &impl Host, address: Address, leased_at: Option<Address>) -> Option<Whereabouts> {
    let attempts = || number(host.property("upstream\0request_attempt_count")).unwrap_or(1);
    (Some(address) != leased_at).then(|| Whereabouts { address, attempts: attempts() })
}
