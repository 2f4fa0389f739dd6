//! A worker's jobs that wait: see [`crate::core::queue`]. They are paused at their headers, and Envoy holds their bodies back.
//!
//! Three things let them go on: the bell that whoever frees a slot rings, the tick, which is quick while anybody waits ([`QUICK_TICK`]) and makes up for a bell that was
//! not heard and for slots that come free by themselves, and their timeout. No stream is resumed in a callback of another one.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::jobs::{Placed, Prospect, place};
use super::{Change, PoolBook, Read, Worker};
use crate::config::{Explain, Pool};
use crate::core::choice::{Kind, Wanted, expected_wait, free_slots};
use crate::core::learning::Job;
use crate::core::lease::Settlement;
use crate::core::outcome::Outcome;
use crate::core::queue::{self, Called, Priority, Slots, Taken, Waiting};
use crate::core::random::Random;
use crate::core::record::Record;
use crate::core::time::Instant;
use crate::host::{Host, Level};
use crate::roles::explain;
use crate::roles::metrics::{Family, Of};
use crate::roles::reply::Verdict;
use crate::roles::route::{Route, Running, name_hosts};

/// How often each root ticks while anybody waits in its VM: so late a job may be resumed whose wake-up was lost, and so late a timeout may be.
pub const QUICK_TICK: Duration = Duration::from_millis(20);

/// Most streams that one callback resumes or answers; the next callback follows at once. Envoy does both after the callback, one inside the other wherever a filter of
/// ours is entered on the way: with 306 answers in one callback V8's stack was at its end.
const MOST_AT_ONCE: usize = 32;

/// What becomes of a job that waits: its worker says it, its stream reads it.
#[derive(Debug, Default)]
pub enum Fate {
    /// It waits.
    #[default]
    Waits,
    /// It was resumed.
    Sent(Sent),
    /// It was answered, and why, if that is wanted.
    Answered(Option<(String, Explain)>),
}

/// A job that was resumed.
#[derive(Debug)]
pub struct Sent {
    /// The pool as it was then.
    pub pool: Rc<Pool>,
    /// The host that was named first, by its index among the pool's; `None`: Envoy chooses.
    pub to: Option<usize>,
    /// Why, and who is to learn that.
    pub why: Option<(String, Explain)>,
}

/// A stream that waits.
pub struct Paused {
    /// Its pool.
    pub route: Rc<Route>,
    /// What became of it.
    pub fate: Rc<RefCell<Fate>>,
    /// Whether a retry blames the host before it: see [`crate::core::lease::Lease::blames`].
    pub blames: bool,
    /// The length of its body, if its client says so.
    pub length: Option<u64>,
    job: Job,
    priority: Priority,
    since: Instant,
    /// If it is held for a busy host: until when at most.
    pub(super) held_until: Option<Instant>,
}

impl Paused {
    /// A stream that waits, as its entry in the queue says.
    pub fn new(route: Rc<Route>, fate: Rc<RefCell<Fate>>, job: Job, entry: &Waiting) -> Self {
        let (priority, since) = (entry.priority(), entry.since());
        Self { route, fate, blames: true, length: None, job, priority, since, held_until: None }
    }

    fn is_overdue(&self, now: Instant) -> bool {
        let timeout = self.route.configured.queue.as_ref().map_or(Duration::ZERO, |queue| queue.timeout);
        now.since(self.since) >= timeout
    }
}

/// The slots that a worker's own jobs draw.
struct Drawing<'a> {
    paused: &'a BTreeMap<u32, Paused>,
    running: &'a mut Running,
    now: Instant,
    random: &'a mut Random,
    me: u64,
    prospect: Prospect,
    /// Those of its own that are held, and until when at most.
    held: Vec<(u32, Instant)>,
    placed: Vec<(u32, Placed)>,
}

impl Slots for Drawing<'_> {
    fn free(&mut self, record: &Record) -> usize {
        free_slots(record, &self.running.pool, &mut self.running.roster, self.now)
    }

    fn may_take(&self, stream: u32) -> Option<bool> {
        self.paused.contains_key(&stream).then_some(true)
    }

    fn starts_now(&mut self, record: &Record, next: &Waiting) -> bool {
        let claim = self.prospect.claim(record, &self.running.pool, &self.running.roster, next.size(), self.now);
        let own = self.paused.get(&next.stream).filter(|_| next.worker == self.me);
        let (Err(until), Some(own)) = (claim, own) else { return claim.is_ok() };
        // What it was held for does not come: whatever is free will do.
        let is_over = own.held_until.is_some_and(|until| until <= self.now);
        if !is_over {
            self.held.push((next.stream, until));
        }
        is_over
    }

    fn take(&mut self, record: &mut Record, stream: u32) -> Taken {
        let unknown = Job::unknown();
        let job = self.paused.get(&stream).map_or(&unknown, |paused| &paused.job);
        let wanted = Wanted { kind: Kind::Job, job, preferred: self.prospect.preferred };
        let placed = place(record, &self.running.pool, &mut self.running.roster, self.now, self.random, wanted).ok();
        let taken = placed.as_ref().map_or(Taken::Nothing, Placed::taken);
        self.placed.extend(placed.map(|placed| (stream, placed)));
        taken
    }
}

impl<H: Host> Worker<H> {
    /// Whether any job waits in this worker.
    pub fn anyone_waits(&self) -> bool {
        self.books.values().any(|books| !books.paused.is_empty() || !books.overdue.is_empty())
    }

    /// A stream waits from now on.
    pub fn pause(&mut self, pool_name: &str, entry: Waiting, paused: Paused) {
        if let Some(books) = self.books.get_mut(pool_name) {
            books.book.wait(entry);
            books.paused.insert(entry.stream, paused);
        }
    }

    /// A stream that waits ends, or is answered by somebody else.
    pub fn leaves_queue(&mut self, pool_name: &str, stream: u32) {
        if self.remove_paused(pool_name, stream).is_none() {
            return;
        }
        let id = self.id;
        let left = self.transact(pool_name, Read::IfNeedBe, |_, record, _| {
            if !record.remove_waiting(id, stream) {
                return Change::Leave(());
            }
            record.header.left = record.header.left.saturating_add(1);
            Change::Store(())
        });
        self.count(Family::Left, pool_name, Of::Pool, 1);
        if let Err(fault) = left {
            // The next tick mends it.
            self.say_fault("leave the queue", fault);
        }
    }

    fn remove_paused(&mut self, pool_name: &str, stream: u32) -> Option<Paused> {
        let books = self.books.get_mut(pool_name)?;
        books.book.waits_no_more(stream);
        books.overdue.remove(&stream);
        books.paused.remove(&stream)
    }

    /// Wakes those workers.
    pub(super) fn ring(&mut self, called: &[Called]) {
        for Called { worker, bell } in called {
            let is_own = *worker == self.id;
            // One's own bell is rung once until it is heard.
            if *bell == 0 || is_own && self.bell.has_rung {
                continue;
            }
            // What is not heard costs a tick.
            let is_rung = self.host.ring(*bell).is_ok();
            self.bell.has_rung |= is_own && is_rung;
        }
    }

    /// Asks for a bell of its own, under the root whose callback this is, if any pool has a queue.
    pub(super) fn see_to_bell(&mut self, root: u32) {
        let wants_one = |books: &PoolBook| books.pool.as_ref().is_some_and(|pool| pool.queue.is_some());
        if self.bell.root.is_some() || !self.books.values().any(wants_one) {
            return;
        }
        match self.host.register_bell(&format!("plimsoll.bell.{:016x}", self.id)) {
            Ok(bell) => {
                (self.bell.root, self.bell.id, self.bell.has_rung) = (Some(root), bell, false);
                self.books.values_mut().for_each(|books| books.book.bell = bell);
            }
            // Jobs go on at ticks all the same.
            Err(fault) => self.say_fault("register a queue to be woken through", fault),
        }
    }

    /// The bell was rung; `root` is whose callback this is.
    pub fn hears_bell(&mut self, root: u32) {
        self.bell.has_rung = false;
        self.host.silence_bell(self.bell.id);
        self.tend_queues(root);
    }

    /// At each tick, the quick ones too: answers those that have waited for too long, and draws.
    pub(super) fn tend_queues(&mut self, root: u32) {
        let waits = |books: &PoolBook| !books.paused.is_empty() || !books.overdue.is_empty();
        let names: Vec<Rc<str>> = self.books.iter().filter(|(_, books)| waits(books)).map(|(name, _)| name.clone()).collect();
        let mut most = MOST_AT_ONCE;
        for name in &names {
            self.expire(name);
            most -= self.turn_away(name, most);
            most -= self.draw(name, most);
        }
        if most == 0 {
            self.ring(&[Called { worker: self.id, bell: self.bell.id }]);
        }
        if !names.is_empty() {
            let _ = self.host.enter(root);
        }
    }

    /// Gives this worker's jobs the slots that they are entitled to, and resumes them, no more than `most`. Gives how many.
    fn draw(&mut self, name: &str, most: usize) -> usize {
        let (id, now) = (self.id, self.host.now());
        let Some(route) = self.route_of_those_that_wait(name) else { return 0 };
        let Ok(mut running) = route.running.try_borrow_mut() else { return 0 };
        running.catch_up(&route, self);
        let Some(paused) = self.books.get_mut(name).map(|books| std::mem::take(&mut books.paused)) else {
            return 0;
        };
        let drawn = self.transact(name, Read::IfNeedBe, |_, record, random| {
            let (prospect, placed) = (Prospect::default(), Vec::new());
            let mut drawing =
                Drawing { paused: &paused, running: &mut running, now, random, me: id, prospect, held: Vec::new(), placed };
            let called = queue::draw(record, id, now, most, &mut drawing);
            let Drawing { held, placed, .. } = drawing;
            record.header.dequeued = record.header.dequeued.saturating_add(placed.len() as u64);
            let is_news = !placed.is_empty() || !called.is_empty() || queue::is_called(record, id);
            let drawn = (placed, called, held);
            if is_news { Change::Store(drawn) } else { Change::Leave(drawn) }
        });
        if let Some(books) = self.books.get_mut(name) {
            books.paused = paused;
        }
        match drawn {
            Ok((placed, mut called, held)) => {
                self.hold(name, &held);
                let count = placed.len();
                if placed.last().is_some_and(|(_, placed)| placed.taken() == Taken::Trial) {
                    // There may be more to draw.
                    called.push(Called { worker: id, bell: self.bell.id });
                }
                placed.into_iter().for_each(|(stream, placed)| self.resume(name, stream, running.pool.clone(), placed));
                self.ring(&called);
                count
            }
            Err(fault) => {
                // The next tick tries again.
                self.say_fault("draw from the queue", fault);
                0
            }
        }
    }

    /// Notes until when those are held at most: by what was seen the first time, unless the clock has stepped back since.
    fn hold(&mut self, name: &str, held: &[(u32, Instant)]) {
        let Some(books) = self.books.get_mut(name) else { return };
        for (stream, until) in held {
            if let Some(paused) = books.paused.get_mut(stream) {
                let first = *paused.held_until.get_or_insert(*until);
                paused.held_until = Some(first.min(*until));
            }
        }
    }

    /// The pool as those that wait see it: the host is chosen when there is a slot, by what the live configurations say then; where none has the pool any
    /// more, by what the first of them began with.
    fn route_of_those_that_wait(&self, name: &str) -> Option<Rc<Route>> {
        let books = self.books.get(name)?;
        let any = books.paused.values().chain(books.overdue.values()).next();
        books.all.as_ref().or_else(|| any.map(|paused| &paused.route)).cloned()
    }

    /// A stream that has its host goes on.
    fn resume(&mut self, name: &str, stream: u32, pool: Rc<Pool>, placed: Placed) {
        let Some(paused) = self.remove_paused(name, stream) else { return };
        self.take_placed(name, stream, &pool, &placed, paused.job);
        let chosen = placed.chosen;
        if let Some(lease) = self.lease_mut(name, stream) {
            (lease.blames, lease.upload.length) = (paused.blames, paused.length);
        }
        if self.host.enter(stream).is_err() {
            // Envoy ends a stream with a callback. Should it have forgotten one without, nothing runs, and nobody is to blame.
            let end = Settlement { outcome: Outcome::Neutral, is_timed: false, latency: None, whereabouts: None, reading: None };
            return self.settle(name, stream, end, || None);
        }
        if let Err(fault) = name_hosts(&self.host, &pool, &chosen) {
            self.say_fault("name the chosen host", fault);
        }
        let waited = self.host.now().since(paused.since);
        self.time(Family::QueueWaitMs, name, Of::Word(paused.priority.word()), waited);
        let why = explain::to_whom(&pool, || explain::chosen(&pool, &chosen, Kind::Job, waited));
        explain::foresee(&self.host, why.as_ref(), explain::first(&pool, &chosen));
        *paused.fate.borrow_mut() = Fate::Sent(Sent { pool, to: chosen.hosts.first().copied(), why });
        self.go_on();
    }

    fn go_on(&mut self) {
        if let Err(fault) = self.host.resume() {
            self.say_fault("resume a request", fault);
        }
    }

    /// Takes those out of the queue that have waited for too long.
    fn expire(&mut self, name: &str) {
        let (id, now) = (self.id, self.host.now());
        let Some(books) = self.books.get_mut(name) else { return };
        // A clock that stepped back makes nobody wait for as much longer.
        books.paused.values_mut().for_each(|paused| paused.since = paused.since.min(now));
        let overdue: BTreeMap<u32, Paused> = books.paused.extract_if(.., |_, paused| paused.is_overdue(now)).collect();
        if overdue.is_empty() {
            return;
        }
        overdue.keys().for_each(|stream| books.book.waits_no_more(*stream));
        let removed = self.transact(name, Read::IfNeedBe, |_, record, _| {
            record.remove_waiting_if(|entry| entry.worker == id && overdue.contains_key(&entry.stream));
            record.header.queue_timeout = record.header.queue_timeout.saturating_add(overdue.len() as u64);
            Change::Store(record.count_waiting() as u32)
        });
        if let Some(books) = self.books.get_mut(name) {
            books.overdue.extend(overdue);
            books.still_waiting = removed.unwrap_or(0);
        }
        if let Err(fault) = removed {
            // The next tick mends it.
            self.say_fault("leave the queue", fault);
        }
    }

    /// Answers those that have waited for too long, no more than `most`. Gives how many.
    fn turn_away(&mut self, name: &str, most: usize) -> usize {
        let Some(route) = self.route_of_those_that_wait(name) else { return 0 };
        let Ok(running) = route.running.try_borrow() else { return 0 };
        let waiting = self.books.get(name).map_or(0, |books| books.still_waiting);
        let retry_after = expected_wait(&running.roster, waiting);
        for count in 0..most {
            let Some((stream, paused)) = self.books.get_mut(name).and_then(|books| books.overdue.pop_first()) else {
                return count;
            };
            if self.host.enter(stream).is_ok() {
                self.answer_overdue(name, stream, &paused, &running.pool, retry_after);
            }
        }
        most
    }

    /// Answers the current stream.
    fn answer_overdue(&mut self, name: &str, stream: u32, paused: &Paused, pool: &Rc<Pool>, retry_after: Duration) {
        let verdict = Verdict::QueueTimeout;
        match verdict.send(&self.host, retry_after) {
            Ok(()) => {
                let waited = self.host.now().since(paused.since);
                let why = explain::to_whom(pool, || explain::answered(pool, verdict, waited));
                *paused.fate.borrow_mut() = Fate::Answered(why);
                self.count(Family::Answered, name, Of::Word(verdict.word()), 1);
                self.say(verdict.word(), Level::Warn, || format!("pool {name}: answered 503, verdict {}", verdict.word()));
            }
            Err(fault) => {
                self.say_fault("answer a request", fault);
                let why = explain::to_whom(pool, explain::left_to_envoy);
                explain::foresee(&self.host, why.as_ref(), None);
                self.take_unplaced(name, stream, pool);
                *paused.fate.borrow_mut() = Fate::Sent(Sent { pool: pool.clone(), to: None, why });
                self.go_on();
            }
        }
    }
}
