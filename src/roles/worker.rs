//! One VM instance and its books: every transaction on a pool's record goes through here.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::roots::{Pools, Roots};
use super::shared::{self, Kept};
use crate::config::{self, Pool};
use crate::core::address::Address;
use crate::core::book::{Book, Declared};
use crate::core::choice::{self, Decision, Kind};
use crate::core::lease::{Lease, Settlement, Whereabouts};
use crate::core::random::Random;
use crate::core::record::{Record, Seat};
use crate::core::roster::Roster;
use crate::core::time::Instant;
use crate::host::{Fault, Host, Level, number};

/// How often each root ticks.
pub const TICK: Duration = Duration::from_millis(100);

/// Ticks of several roots in one VM that are closer together than this are one tick of the worker.
const SAME_TICK: Duration = Duration::from_millis(50);

/// The fault of a transaction that lost too often; no status of the ABI.
const CONTENDED: Fault = Fault(u32::MAX);

/// How a transaction's change ends.
enum Change<T> {
    /// The record changed: store it.
    Store(T),
    /// Nothing changed.
    Leave(T),
}

/// Whether a transaction may start from the record that was stored last, which a store confirms.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    IfNeedBe,
    Always,
}

struct PoolBook {
    key: String,
    book: Book,
    kept: Kept,
}

/// What the streams and roots of one VM share.
pub struct Worker<H> {
    host: H,
    id: u64,
    random: Random,
    books: BTreeMap<Rc<str>, PoolBook>,
    roots: Roots,
    ticked: Instant,
    said: BTreeMap<&'static str, (Instant, u64)>,
}

impl<H: Host> Worker<H> {
    /// A worker without books.
    pub fn new(host: H) -> Self {
        // An id of 0 is as good as any other; two equal ones in one process have a chance of 2⁻⁶⁴.
        let (id, random) = (host.random(), Random::new(host.random()));
        Self {
            host,
            id,
            random,
            books: BTreeMap::new(),
            roots: Roots::default(),
            ticked: Instant::default(),
            said: BTreeMap::new(),
        }
    }

    /// Notes that a root was configured: only that it is there.
    pub fn root_made(&mut self, root: u32, instance: &Rc<str>, pools: &Pools) {
        self.roots.configured(root, instance, pools);
    }

    /// Notes that a root ticks, and ticks if none has within [`SAME_TICK`].
    pub fn root_ticks(&mut self, root: u32, instance: &Rc<str>, pools: &Pools) {
        if self.roots.ticked(root, instance, pools) {
            self.declare();
        }
        self.tick();
    }

    /// Notes that a stream starts under a root, whose configuration is live from now on.
    pub fn stream_starts(&mut self, root: u32, instance: &Rc<str>, pools: &Pools) {
        if self.roots.streams(root, instance, pools) {
            self.declare();
        }
    }

    /// Forgets a root that Envoy deletes.
    pub fn root_ends(&mut self, root: u32) {
        if self.roots.ended(root) {
            self.declare();
        }
        if self.roots.is_empty() {
            // No tick will come any more: whoever stayed in the records now would be declared dead.
            self.keep_all_books();
        }
    }

    /// Tells each book what the live configurations say of its pool; where two name the same host differently, the newer one's word stands.
    fn declare(&mut self) {
        let mut pools: BTreeMap<Rc<str>, Declared> = self.books.keys().map(|name| (name.clone(), Declared::default())).collect();
        for (name, pool) in self.roots.pools() {
            let declared = pools.entry(name.clone()).or_default();
            if declared.hosts.is_empty() {
                (declared.score, declared.time_constant) = (pool.score, pool.time_constant);
            }
            let known: BTreeSet<Address> = declared.hosts.iter().map(|host| host.address).collect();
            let more = pool.hosts.iter().map(config::Host::named).filter(|host| !known.contains(&host.address));
            declared.hosts.extend(more);
        }
        for (name, declared) in pools {
            let books = self.books.entry(name.clone()).or_insert_with(|| {
                shared::publish(&self.host, &name);
                PoolBook { key: shared::key(&name), book: Book::new(self.id), kept: Kept::default() }
            });
            books.book.declare(declared);
        }
    }

    /// Chooses a host for a request. A job gets a lease, also when its host cannot be chosen here: then it follows where Envoy sends it.
    pub fn choose(
        &mut self,
        pool_name: &str,
        stream: u32,
        pool: &Pool,
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
        let (decision, seat) = self.transact(pool_name, read, |_, record, random| {
            let decision = choice::choose(record, pool, roster, now, random, kind);
            let slot = match &decision {
                Decision::Chosen(hosts) if kind == Kind::Job => hosts.first().and_then(|host| roster.slot_of(*host)),
                _ => None,
            };
            match slot.and_then(|slot| Some((slot, record.host(slot)?.generation))) {
                Some((slot, generation)) => {
                    record.reserve(slot);
                    Change::Store((decision, Some(Seat { slot, generation })))
                }
                None => Change::Leave((decision, None)),
            }
        })?;
        if let (Decision::Chosen(hosts), Some(seat)) = (&decision, seat) {
            let named = hosts.iter().filter_map(|host| pool.hosts.get(*host)).map(|host| host.address).collect();
            self.take(pool_name, stream, Lease::new(Some(seat), named, now, pool.time_constant));
        }
        Ok(decision)
    }

    /// Takes a lease for a job whose host Envoy chooses.
    pub fn take_unplaced(&mut self, pool_name: &str, stream: u32, pool: &Pool) {
        let now = self.host.now();
        self.take(pool_name, stream, Lease::new(None, Vec::new(), now, pool.time_constant));
    }

    fn take(&mut self, pool_name: &str, stream: u32, lease: Lease) {
        if let Some(books) = self.books.get_mut(pool_name) {
            books.book.take(stream, lease);
        }
    }

    /// The host of a stream's lease; the outer `None`: it has no lease.
    pub fn leased_at(&self, pool_name: &str, stream: u32) -> Option<Option<Address>> {
        self.books.get(pool_name)?.book.lease(stream).map(|lease| lease.address)
    }

    /// Moves a stream's lease to the host that works on it now.
    fn follow(&mut self, pool_name: &str, stream: u32, now_at: Whereabouts) {
        self.say_if_overruled(pool_name, stream, now_at);
        let moved = self.transact(pool_name, Read::IfNeedBe, |book, record, _| match book.lease(stream) {
            Some(lease) if lease.address != Some(now_at.address) => Change::Store(Some(lease.follow(record, now_at))),
            _ => Change::Leave(None),
        });
        match moved {
            Ok(Some(moved)) => {
                if let Some(lease) = self.books.get_mut(pool_name).and_then(|books| books.book.lease_mut(stream)) {
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
        let settled = self.transact(pool_name, Read::IfNeedBe, |book, record, _| {
            let Some(lease) = book.lease(stream) else { return Change::Leave(()) };
            if end.latency.is_none() && lease.wants_latency(record, &end, now) {
                end.latency = latency();
            }
            lease.settle(record, end, now);
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
        let Some(named) = lease.filter(|lease| lease.is_overruled(now_at)).and_then(|lease| lease.address) else {
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

    /// Once per [`TICK`], whichever root it comes from: sees to retries, to what could not be stored, to the other workers, and shows that it lives.
    fn tick(&mut self) {
        let now = self.host.now();
        // A clock that stepped back is a new tick, not the same one.
        if (self.ticked..self.ticked + SAME_TICK).contains(&now) && self.ticked != Instant::default() {
            return;
        }
        self.ticked = now;
        self.roots.pass();
        let names: Vec<Rc<str>> = self.books.keys().cloned().collect();
        for name in names {
            self.follow_retries(&name, now);
        }
        self.keep_all_books();
    }

    fn keep_all_books(&mut self) {
        let names: Vec<Rc<str>> = self.books.keys().cloned().collect();
        for name in names {
            match self.keep_books(&name) {
                Ok(()) if self.books.get(&name).is_some_and(|books| books.book.is_idle()) => _ = self.books.remove(&name),
                Ok(()) => {}
                // A worker that could not leave tries again at the next tick.
                Err(fault) => self.say_fault("keep the books", fault),
            }
        }
    }

    fn follow_retries(&mut self, name: &str, now: Instant) {
        let Some(books) = self.books.get(name) else {
            return;
        };
        let (mut ended, mut running) = (Vec::new(), Vec::new());
        for (stream, lease) in books.book.leases() {
            match lease.ended {
                Some(end) => ended.push((stream, end)),
                None if !(lease.taken..lease.taken + TICK).contains(&now) => running.push((stream, lease.address)),
                None => {}
            }
        }
        for (stream, end) in ended {
            self.settle(name, stream, end, || None);
        }
        for (stream, address) in running {
            if self.host.enter(stream).is_err() {
                continue;
            }
            if let Some(at) = moved_to(&self.host, address) {
                self.follow(name, stream, at);
            }
        }
    }

    fn keep_books(&mut self, name: &str) -> Result<(), Fault> {
        let mut suspects = None;
        let is_due = self.books.get_mut(name).is_some_and(|books| books.book.beat_is_due());
        // The beats of others must be read, not remembered.
        let buried = self.transact(name, Read::Always, |book, record, _| {
            if book.is_idle() {
                book.leave(record);
                return Change::Store(0);
            }
            let suspects = suspects.get_or_insert_with(|| book.watch(record));
            let buried = book.bury(record, suspects);
            if is_due || buried > 0 || record.has_droppable() || book.has_unnamed(record) {
                book.retire_unnamed(record);
                record.drop_retired();
                return Change::Store(buried);
            }
            Change::Leave(0)
        })?;
        if buried > 0 {
            let line = format!(
                "plimsoll: pool {name}: {buried} dead worker(s): what they held is given back once all others have answered"
            );
            self.host.log(Level::Warn, &line);
        }
        Ok(())
    }

    /// Reads the pool's record, joins it if need be, changes it, and stores it; again, if another worker was faster.
    fn transact<T>(
        &mut self,
        name: &str,
        read: Read,
        mut change: impl FnMut(&mut Book, &mut Record, &mut Random) -> Change<T>,
    ) -> Result<T, Fault> {
        let Some(PoolBook { key, book, kept }) = self.books.get_mut(name) else {
            return Err(CONTENDED);
        };
        let mut guess = kept.take().filter(|_| read == Read::IfNeedBe);
        for _ in 0..shared::MOST_CONFLICTS {
            let is_guess = guess.is_some();
            let (mut record, cas) = match guess.take() {
                Some(guess) => guess,
                None => shared::open(&self.host, key, name).inspect(|(_, cas)| kept.loaded(*cas))?,
            };
            if !book.is_in_step(&record) && !book.is_idle() {
                let joined = book.join(&mut record);
                match self.host.store(key, record.bytes(), cas)? {
                    true => book.joined(joined),
                    false => book.conflicts += u64::from(!is_guess),
                }
                continue;
            }
            match change(book, &mut record, &mut self.random) {
                // Only a store confirms a guess.
                Change::Leave(_) if is_guess => {}
                Change::Leave(result) => return Ok(result),
                Change::Store(result) => {
                    book.beat(&mut record);
                    if self.host.store(key, record.bytes(), cas)? {
                        book.has_beaten();
                        kept.stored(record, cas);
                        return Ok(result);
                    }
                    book.conflicts += u64::from(!is_guess);
                }
            }
        }
        Err(CONTENDED)
    }

    /// Logs a line of this kind at most once a second, with the number of those left out.
    pub fn say(&mut self, kind: &'static str, level: Level, line: impl FnOnce() -> String) {
        let now = self.host.now();
        let (last, left_out) = self.said.entry(kind).or_default();
        if (*last..*last + Duration::from_secs(1)).contains(&now) && *last != Instant::default() {
            *left_out += 1;
            return;
        }
        let more = std::mem::take(left_out);
        *last = now;
        let tail = if more > 0 { format!(" (and {more} more like it)") } else { String::new() };
        self.host.log(level, &format!("plimsoll: {}{tail}", line()));
    }

    /// Logs a fault of Envoy's.
    pub fn say_fault(&mut self, doing: &'static str, fault: Fault) {
        self.say(doing, Level::Warn, || match fault {
            CONTENDED => format!("could not {doing}: the shared record is contended"),
            Fault(status) => format!("could not {doing}: Envoy answered with status {status}"),
        });
    }
}

/// Where Envoy works on the current stream's job, if that is not where its lease is.
pub fn moved_to(host: &impl Host, leased_at: Option<Address>) -> Option<Whereabouts> {
    let address = Address::parse(&host.property("upstream\0address")?)?;
    if Some(address) == leased_at {
        return None;
    }
    Some(Whereabouts { address, attempts: number(host.property("upstream\0request_attempt_count")).unwrap_or(1) })
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests;
