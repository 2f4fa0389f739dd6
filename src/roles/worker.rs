//! One VM instance and its books: every transaction on a pool's record goes through here. Its jobs: [`jobs`]; what it does for all
//! workers where it leads: [`super::watch`].

mod announce;
mod counted;
mod jobs;
mod queue;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

pub use jobs::{Course, Placed, Request, moved_to};
pub use queue::{Fate, Paused, QUICK_TICK, Sent};

use super::fleet::Fleet;
use super::metrics::{Family, Metrics, Of};
use super::roots::{Pools, Roots};
use super::route::Route;
use super::said::{EACH_SECOND, Said};
use super::shared::{self, Kept};
use super::watch::{Duties, Led, Watch};
use crate::config::{self, Discovery, Pool};
use crate::core::address::Address;
use crate::core::book::{Book, Declared};
use crate::core::health::{self, Longest};
use crate::core::learning;
use crate::core::lookout;
use crate::core::random::Random;
use crate::core::record::Record;
use crate::core::report;
use crate::core::time::Instant;
use crate::host::{Fault, Host, Level};

/// How often each root ticks.
pub const TICK: Duration = Duration::from_millis(100);

/// Ticks of several roots in one VM that are closer together than this are one tick of the worker.
const SAME_TICK: Duration = Duration::from_millis(90);

/// The fault of a transaction that lost too often; no status of the ABI.
const CONTENDED: Fault = Fault(u32::MAX);

/// How a transaction's change ends.
pub(super) enum Change<T> {
    /// The record changed: store it.
    Store(T),
    /// Nothing changed.
    Leave(T),
}

/// Whether a transaction may start from the record that was stored last, which a store confirms.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    IfNeedBe,
    Always,
}

pub(super) struct PoolBook {
    key: String,
    pub(super) book: Book,
    kept: Kept,
    /// What the newest live configuration says of the pool.
    pub(super) pool: Option<Rc<Pool>>,
    /// What the newest of those says that want to follow Envoy's cluster.
    pub(super) discovery: Option<Discovery>,
    pub(super) watch: Watch,
    pub(super) fleet: Fleet,
    /// The hosts that the newest of each instance's configurations name.
    hosts: Vec<config::Host>,
    /// The pool with these: by it those are placed that wait.
    all: Option<Rc<Route>>,
    /// The streams that wait.
    paused: BTreeMap<u32, Paused>,
    /// Those that have waited for too long, and are yet to be answered.
    overdue: BTreeMap<u32, Paused>,
    /// How many still waited then, in all workers.
    still_waiting: u32,
}

/// What wakes a worker when a slot is free for one of its jobs: a shared queue, of which Envoy tells the root that asked for it.
#[derive(Default)]
struct Bell {
    root: Option<u32>,
    id: u32,
    /// It has rung, and has not been heard yet.
    has_rung: bool,
}

/// What the live configurations of a worker say of one pool.
#[derive(Default)]
struct Wanted {
    declared: Declared,
    newest: Option<Rc<Pool>>,
    discovery: Option<Discovery>,
    /// The hosts of the newest of each instance, each once.
    hosts: Vec<config::Host>,
}

/// What the streams and roots of one VM share.
pub struct Worker<H> {
    pub(super) host: H,
    pub(super) id: u64,
    pub(super) random: Random,
    pub(super) books: BTreeMap<Rc<str>, PoolBook>,
    roots: Roots,
    /// By instance: the root of which it was last said that it is live.
    announced: BTreeMap<Rc<str>, u32>,
    ticked: Instant,
    pub(super) said: Said,
    pub(super) metrics: Metrics,
    pub(super) duties: Duties,
    bell: Bell,
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
            announced: BTreeMap::new(),
            ticked: Instant::default(),
            said: Said::default(),
            metrics: Metrics::default(),
            duties: Duties::default(),
            bell: Bell::default(),
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
        self.tick(root);
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
        if self.bell.root == Some(root) {
            // Envoy would tell nobody. The next root that ticks asks for it again.
            self.bell.root = None;
        }
        if self.roots.is_empty() {
            // No tick will come any more: whoever stayed in the records now would be declared dead.
            self.keep_all_books();
        }
    }

    /// Tells each book what the live configurations say of its pool; where two name the same host differently, the newer one's word stands.
    pub(super) fn declare(&mut self) {
        for (name, pool) in self.roots.pools() {
            self.books.entry(name.clone()).or_insert_with(|| {
                shared::publish(&self.host, name);
                let fleet = if pool.discovery.is_some() { Fleet::known(&self.host, name) } else { Fleet::default() };
                let (key, mut book) = (shared::key(name), Book::new(self.id));
                book.bell = self.bell.id;
                let (kept, watch) = (Kept::default(), Watch::default());
                let (paused, overdue) = (BTreeMap::new(), BTreeMap::new());
                PoolBook {
                    key,
                    book,
                    kept,
                    pool: None,
                    discovery: None,
                    watch,
                    fleet,
                    hosts: Vec::new(),
                    all: None,
                    paused,
                    overdue,
                    still_waiting: 0,
                }
            });
        }
        let mut said: BTreeMap<Rc<str>, Wanted> = self.books.keys().map(|name| (name.clone(), Wanted::default())).collect();
        for (name, pool) in self.roots.pools() {
            let Wanted { declared, newest, discovery, .. } = said.entry(name.clone()).or_default();
            if newest.is_none() {
                (declared.score, declared.time_constant, declared.slow_start) = (pool.score, pool.time_constant, pool.slow_start);
                (declared.policy, declared.wants_insight) = (pool.policy, pool.wants_insight());
                (declared.most_at_once, declared.patience) = (pool.most_at_once(), pool.patience().unwrap_or_default());
                declared.has_pool = true;
                if let Some(queue) = &pool.queue {
                    (declared.max_length, declared.ageing) = (queue.max_length, queue.ageing);
                }
                *newest = Some(pool.clone());
            }
            if discovery.is_none() {
                discovery.clone_from(&pool.discovery);
                declared.discovers = discovery.is_some();
            }
            let fleet = self.books.get(name).map(|books| &books.fleet);
            let pool = fleet.map_or_else(|| pool.clone(), |fleet| fleet.pool(pool));
            let known: BTreeSet<Address> = declared.hosts.iter().map(|host| host.address).collect();
            let more = pool.hosts.iter().map(config::Host::named).filter(|host| !known.contains(&host.address));
            declared.hosts.extend(more);
        }
        for (name, pool) in self.roots.newest() {
            let hosts = &mut said.entry(name.clone()).or_default().hosts;
            let known: BTreeSet<Address> = hosts.iter().map(|host| host.address).collect();
            hosts.extend(pool.hosts.iter().filter(|host| !known.contains(&host.address)).cloned());
        }
        for (name, Wanted { declared, newest, discovery, hosts }) in said {
            if let Some(books) = self.books.get_mut(&name) {
                let is_same = newest.as_ref().map(Rc::as_ptr) == books.pool.as_ref().map(Rc::as_ptr) && books.hosts == hosts;
                if !is_same {
                    books.all = newest.as_ref().map(|pool| Rc::new(Route::of_all(&name, pool, hosts.clone())));
                    books.hosts = hosts;
                }
                books.book.declare(declared);
                (books.pool, books.discovery) = (newest, discovery);
            }
        }
    }

    /// Sees to those that wait, and once per [`TICK`], whichever root it comes from, to retries, to what could not be stored, to the other workers, and shows that it lives.
    fn tick(&mut self, root: u32) {
        self.tend_queues(root);
        let now = self.host.now();
        // A clock that stepped back is a new tick, not the same one.
        if (self.ticked..self.ticked + SAME_TICK).contains(&now) && self.ticked != Instant::default() {
            return;
        }
        self.ticked = now;
        // Should a bell of its own not have been heard: from now on it is rung again.
        self.bell.has_rung = false;
        self.roots.pass();
        self.announce();
        let names: Vec<Rc<str>> = self.books.keys().cloned().collect();
        for name in names {
            self.follow_retries(&name);
        }
        // Calls of ours are the root's: Envoy would take them for those of the stream that was looked at last.
        let _ = self.host.enter(root);
        self.see_to_bell(root);
        self.keep_all_books();
        self.send_alerts();
        self.said.say_what_was_left_out(&self.host);
    }

    fn keep_all_books(&mut self) {
        let names: Vec<Rc<str>> = self.books.keys().cloned().collect();
        for name in names {
            match self.keep_books(&name) {
                Ok(()) if self.books.get(&name).is_some_and(|books| books.book.is_idle() && books.overdue.is_empty()) => {
                    self.books.remove(&name);
                }
                Ok(()) => {}
                // A worker that could not leave tries again at the next tick.
                Err(fault) => self.say_fault("keep the books", fault),
            }
        }
    }

    fn keep_books(&mut self, name: &str) -> Result<(), Fault> {
        let (id, now) = (self.id, self.host.now());
        let mut suspects = None;
        let is_due = self.books.get_mut(name).is_some_and(|books| books.book.beat_is_due());
        let pool = self.books.get(name).and_then(|books| books.pool.clone());
        let mut leader = self.books.get(name).map(|books| books.watch.leader).unwrap_or_default();
        let mut has_looked = false;
        let live = self.roots.pools().into_iter().filter(|(known, _)| **known == *name);
        let longest = live.fold(Longest::default(), |longest, (_, pool)| Longest {
            ejection: longest.ejection.max(pool.failure.max_ejection),
            slow_start: longest.slow_start.max(pool.slow_start),
        });
        let readings = self.books.get_mut(name).map(|books| books.watch.take_readings()).unwrap_or_default();
        let mut members = 0;
        // The beats of others must be read, not remembered.
        let (buried, led) = self.transact(name, Read::Always, |book, record, _| {
            if book.is_idle() {
                book.leave(record);
                return Change::Store((0, None));
            }
            members = record.header.members;
            let suspects = suspects.get_or_insert_with(|| book.watch(record));
            let (gone, buried) = book.bury(record, suspects);
            if !std::mem::replace(&mut has_looked, true) {
                leader.look(record);
            }
            let led = pool.as_ref().filter(|_| leader.claim(record, id, now));
            let events = led.map(|pool| {
                health::oversee(record, pool, longest, now);
                learning::pin(record);
                report::tell_all(record, &readings);
                lookout::look(record, now)
            });
            let agrees = book.agrees_on_waiting(record);
            if is_due || events.is_some() || gone > 0 || record.has_droppable() || book.has_unnamed(record) || !agrees {
                book.write_waiting(record);
                book.retire_unnamed(record);
                record.drop_retired();
                return Change::Store((buried, events.map(|events| Led { record: record.clone(), events })));
            }
            Change::Leave((0, None))
        })?;
        if buried > 0 {
            let line = format!(
                "plimsoll: pool {name}: {buried} dead worker(s): what they held is given back once all others have answered"
            );
            self.host.log(Level::Warn, &line);
            self.count(Family::DeadWorkers, name, Of::Pool, buried as u64);
        }
        if let Some(books) = self.books.get_mut(name) {
            books.watch.leader = leader;
        }
        self.catch_up(name, members);
        self.watch(name, led);
        Ok(())
    }

    /// Reads the pool's record, joins it if need be, changes it, and stores it; again, if another worker was faster.
    pub(super) fn transact<T>(
        &mut self,
        name: &str,
        read: Read,
        mut change: impl FnMut(&mut Book, &mut Record, &mut Random) -> Change<T>,
    ) -> Result<T, Fault> {
        let Some(PoolBook { key, book, kept, .. }) = self.books.get_mut(name) else {
            return Err(CONTENDED);
        };
        let mut guess = kept.take().filter(|_| read == Read::IfNeedBe);
        for _ in 0..shared::MOST_CONFLICTS {
            let is_guess = guess.is_some();
            let (mut record, cas) = match guess.take() {
                Some(guess) => guess,
                None => {
                    let shared::Opened { record, cas, replaces } = shared::open(&self.host, key)?;
                    if replaces {
                        let line = || format!("pool {name}: the shared record is not one of ours; a new one takes its place");
                        self.said.say(&self.host, EACH_SECOND, ("record", Level::Warn), line);
                    }
                    kept.loaded(cas);
                    (record, cas)
                }
            };
            if !book.is_in_step(&record) && !book.is_idle() {
                let joined = book.join(&mut record, self.host.now());
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
                        let carried = [
                            (Family::Unleased, book.unleased),
                            (Family::BadReports, book.bad_reports),
                            (Family::CasRetries, book.conflicts),
                        ];
                        carried
                            .into_iter()
                            .for_each(|(family, count)| self.metrics.add(&self.host, family, name, Of::Pool, count));
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
        self.said.say(&self.host, EACH_SECOND, (kind, level), line);
    }

    /// The same of a line that will be tried again if this is not its turn, and so is none that is left out. Gives whether it was said.
    pub fn say_in_turn(&mut self, kind: &'static str, level: Level, line: impl FnOnce() -> String) -> bool {
        let has_turn = self.said.has_turn(&self.host, kind);
        if has_turn {
            self.say(kind, level, line);
        }
        has_turn
    }

    /// Logs a fault of Envoy's.
    pub fn say_fault(&mut self, doing: &'static str, fault: Fault) {
        self.say(doing, Level::Warn, || match fault {
            CONTENDED => format!("could not {doing}: the shared record is contended"),
            Fault(status) => format!("could not {doing}: Envoy answered with status {status}"),
        });
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests;
