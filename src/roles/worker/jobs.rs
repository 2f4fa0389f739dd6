//! A worker's jobs: choosing, following where Envoy sends them, settling.

use std::rc::Rc;
use std::time::Duration;

use super::{Change, Read, Worker};
use crate::config::{Policy, Pool, Queue};
use crate::core::address::Address;
use crate::core::choice::{
    self, Chosen, Claim, Decision, Forecast, Kind, Wanted, expected_wait, free_slots, is_one_due, no_host,
};
use crate::core::health::Trial;
use crate::core::learning::{self, Job};
use crate::core::lease::{Burden, Lease, Settlement, Whereabouts, is_crowded};
use crate::core::queue::{self, Called, Priority, Slots, Taken, Waiting};
use crate::core::random::Random;
use crate::core::record::{Record, Seat};
use crate::core::roster::Roster;
use crate::core::time::Instant;
use crate::host::{Fault, Host, Level, number};
use crate::roles::metrics::{Family, Of};
use crate::roles::route::Running;

/// A request, as far as the choice wants to know.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Its stream.
    pub stream: u32,
    /// Whether it takes a slot.
    pub kind: Kind,
    /// How urgent it is, if it has to wait.
    pub priority: Priority,
    /// Hash of whose it is; 0 if that is not known.
    pub tenant: u32,
    /// What is known of it.
    pub job: Job,
}

/// What may become of a request at its headers.
#[derive(Debug)]
pub enum Course {
    /// It is a job, and has its host.
    Placed(Placed),
    /// It has no slot: it needs none, or there is none.
    Decided(Decision),
    /// It waits.
    Waits(Waiting),
    /// Too many wait already; it may have a chance after this time.
    QueueFull(Duration),
}

/// A job that has its host.
#[derive(Debug)]
pub struct Placed {
    /// The host, and why.
    pub chosen: Chosen,
    seat: Seat,
    trial: Option<Trial>,
    burden: Burden,
}

impl Placed {
    /// What it takes.
    pub(super) fn taken(&self) -> Taken {
        if self.trial.is_some() { Taken::Trial } else { Taken::Slot }
    }
}

/// Chooses a host for a job and reserves its slot, in one step.
pub(super) fn place(
    record: &mut Record,
    pool: &Pool,
    roster: &mut Roster,
    now: Instant,
    random: &mut Random,
    wanted: Wanted,
) -> Result<Placed, Box<Decision>> {
    let chosen = match choice::choose(record, pool, roster, now, random, wanted) {
        Decision::Chosen(chosen) => chosen,
        other => return Err(Box::new(other)),
    };
    let Some(slot) = chosen.hosts.first().and_then(|host| roster.slot_of(*host)) else {
        return Err(Box::new(Decision::Chosen(chosen)));
    };
    let burden = Burden { work: chosen.work.map(|millis| (millis * 1e3) as u64), was_crowded: is_crowded(record, slot, pool) };
    match record.place(slot, now, chosen.trial, burden.work) {
        Some((seat, trial)) => Ok(Placed { chosen, seat, trial, burden }),
        None => Err(Box::new(Decision::Chosen(chosen))),
    }
}

/// A job that waits, or may have to.
fn entry(record: &Record, worker: u64, request: &Request, now: Instant) -> Waiting {
    let size = learning::size(record, &request.job);
    Waiting::new(worker, request.stream, request.priority, request.tenant, size, now)
}

/// A job that has just come: of all that are entitled to a slot it alone may be placed in its callback.
struct Arrival<'a> {
    worker: u64,
    stream: u32,
    pool: &'a Pool,
    roster: &'a mut Roster,
    now: Instant,
    random: &'a mut Random,
    job: &'a Job,
    claim: Prospect,
    /// Whether there is a place in the queue for it, should it be held for a host that is busy.
    may_wait: bool,
    placed: Option<Placed>,
}

/// What is in sight while jobs are drawn: see [`Forecast`].
#[derive(Default)]
pub(super) struct Prospect {
    forecast: Option<Option<Forecast>>,
    /// The host that the last job which may start is to have.
    pub preferred: Option<usize>,
}

impl Prospect {
    /// Whether a job of so many times the mean work starts now; else for how long it is held at most.
    pub fn claim(&mut self, record: &Record, pool: &Pool, roster: &Roster, size: f32, now: Instant) -> Result<(), Instant> {
        let forecast = self.forecast.get_or_insert_with(|| Forecast::new(record, pool, roster, now));
        let (preferred, claim) = match forecast.as_mut().map_or(Claim::Now(None), |forecast| forecast.claim(size)) {
            Claim::Now(preferred) => (preferred, Ok(())),
            Claim::Later(until) => (None, Err(until)),
        };
        self.preferred = preferred;
        claim
    }
}

impl Slots for Arrival<'_> {
    fn free(&mut self, record: &Record) -> usize {
        free_slots(record, self.pool, self.roster, self.now)
    }

    fn may_take(&self, stream: u32) -> Option<bool> {
        Some(stream == self.stream)
    }

    fn starts_now(&mut self, record: &Record, next: &Waiting) -> bool {
        let starts = self.claim.claim(record, self.pool, self.roster, next.size(), self.now).is_ok();
        // Rather a slow host than none.
        starts || !self.may_wait && (next.worker, next.stream) == (self.worker, self.stream)
    }

    fn take(&mut self, record: &mut Record, _: u32) -> Taken {
        let wanted = Wanted { kind: Kind::Job, job: self.job, preferred: self.claim.preferred };
        self.placed = place(record, self.pool, self.roster, self.now, self.random, wanted).ok();
        self.placed.as_ref().map_or(Taken::Nothing, Placed::taken)
    }
}

/// What becomes of a job of a pool that has a queue, and who is to be woken.
fn line_up(record: &mut Record, mut arrival: Arrival, entry: Waiting, queue: &Queue) -> Change<(Course, Vec<Called>)> {
    let (mut called, mut is_in_line) = (Vec::new(), false);
    if !record.has_waiting() {
        // The policies that never wait for a busy host need not look at all of them for that.
        let may_wait = matches!(arrival.pool.policy, Policy::LeastTime { .. });
        if !may_wait || arrival.free(record) > 0 && arrival.starts_now(record, &entry) {
            let _ = arrival.take(record, entry.stream);
        }
    } else if arrival.free(record) > 0 {
        is_in_line = true;
        record.add_waiting(entry);
        called = queue::draw(record, entry.worker, arrival.now, 1, &mut arrival);
    }
    let Arrival { roster, now, placed, .. } = arrival;
    if let Some(placed) = placed {
        return Change::Store((Course::Placed(placed), called));
    }
    if roster.serving().is_empty() && !is_one_due(roster, queue.timeout, now) {
        return Change::Leave((Course::Decided(no_host(roster, now)), Vec::new()));
    }
    let others = (record.count_waiting() - usize::from(is_in_line)) as u32;
    if others < queue.max_length {
        if !is_in_line {
            record.add_waiting(entry);
        }
        return Change::Store((Course::Waits(entry), called));
    }
    let course = Course::QueueFull(expected_wait(roster, others));
    if called.is_empty() {
        // Not a store for each that is refused: there may be many of them.
        return Change::Leave((course, called));
    }
    record.remove_waiting(entry.worker, entry.stream);
    Change::Store((course, called))
}

impl<H: Host> Worker<H> {
    /// Chooses a host for a request. A job gets a lease, also when its host cannot be chosen here: then it follows where Envoy sends it; or it waits.
    pub fn choose(&mut self, pool_name: &str, request: Request, running: &mut Running) -> Result<Course, Fault> {
        let (id, now) = (self.id, self.host.now());
        let Request { stream, kind, ref job, .. } = request;
        let Running { pool, roster, .. } = running;
        if let Some(books) = self.books.get_mut(pool_name) {
            match kind {
                Kind::Job => books.book.served = true,
                Kind::Other => books.book.unleased += 1,
            }
        }
        let read = if kind == Kind::Job { Read::IfNeedBe } else { Read::Always };
        let (course, called) = self.transact(pool_name, read, |_, record, random| {
            if kind == Kind::Other {
                let decision = choice::choose(record, pool, roster, now, random, Wanted { kind, job, preferred: None });
                return Change::Leave((Course::Decided(decision), Vec::new()));
            }
            let Some(queue) = &pool.queue else {
                return match place(record, pool, roster, now, random, Wanted { kind, job, preferred: None }) {
                    Ok(placed) => Change::Store((Course::Placed(placed), Vec::new())),
                    Err(decision) => Change::Leave((Course::Decided(*decision), Vec::new())),
                };
            };
            let entry = entry(record, id, &request, now);
            let (claim, may_wait) = (Prospect::default(), record.count_waiting() < queue.max_length as usize);
            let arrival = Arrival { worker: id, stream, pool, roster, now, random, job, claim, may_wait, placed: None };
            line_up(record, arrival, entry, queue)
        })?;
        self.ring(&called);
        match &course {
            Course::Placed(placed) => {
                self.take_placed(pool_name, stream, pool, placed, request.job);
                if pool.queue.is_some() {
                    self.time(Family::QueueWaitMs, pool_name, Of::Word(request.priority.word()), Duration::ZERO);
                }
            }
            Course::QueueFull(_) => {
                if let Some(books) = self.books.get_mut(pool_name) {
                    books.book.turned_away += 1;
                }
            }
            Course::Decided(_) | Course::Waits(_) => {}
        }
        Ok(course)
    }

    /// Takes the lease of a job that has been placed.
    pub(super) fn take_placed(&mut self, pool_name: &str, stream: u32, pool: &Rc<Pool>, placed: &Placed, job: Job) {
        let now = self.host.now();
        let hosts = placed.chosen.hosts.iter().filter_map(|host| pool.hosts.get(*host));
        let named = hosts.map(|host| host.address).collect();
        let lease = Lease::new(Some(placed.seat), named, now, pool.clone(), placed.trial);
        self.take(pool_name, stream, Lease { job, burden: placed.burden, ..lease });
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
        let id = self.id;
        let moved = self.transact(pool_name, Read::IfNeedBe, |book, record, random| match book.lease(stream) {
            Some(lease) if lease.address != Some(now_at.address) => {
                let moved = lease.follow(record, now_at, now, random);
                Change::Store(Some((moved, queue::call(record, id, now))))
            }
            _ => Change::Leave(None),
        });
        match moved {
            Ok(Some((moved, called))) => {
                self.ring(called.as_slice());
                let guilty = self.lease_mut(pool_name, stream).map(|lease| {
                    lease.moved(moved);
                    lease.guilty(&moved).to_vec()
                });
                self.count_move(pool_name, &guilty.unwrap_or_default(), moved);
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
        let (id, now) = (self.id, self.host.now());
        let settled = self.transact(pool_name, Read::IfNeedBe, |book, record, random| {
            let Some(lease) = book.lease(stream) else { return Change::Leave(None) };
            if end.latency.is_none() && lease.wants_latency(record, &end, now) {
                end.latency = latency().map(|latency| lease.own_time(latency));
            }
            let moved = lease.settle(record, end, now, random);
            Change::Store(Some((moved, queue::call(record, id, now))))
        });
        let book = self.books.get_mut(pool_name).map(|books| &mut books.book);
        match settled {
            Ok(settled) => {
                let lease = book.and_then(|book| book.give(stream));
                let (moved, called) = settled.unwrap_or_default();
                self.ring(called.as_slice());
                if let Some(lease) = lease {
                    self.count_job(pool_name, lease, moved, &end);
                }
            }
            Err(fault) => {
                if let Some(lease) = book.and_then(|book| book.lease_mut(stream)) {
                    lease.ended = Some(end);
                }
                self.say_fault("settle a lease", fault);
            }
        }
    }

    /// A host's report of itself is none.
    pub fn cannot_read_report(&mut self, pool_name: &str, what: &str) {
        if let Some(books) = self.books.get_mut(pool_name) {
            books.book.bad_reports += 1;
        }
        self.say("report", Level::Warn, || {
            format!("pool {pool_name}: a host's load report could not be read: {what}; it counts as none")
        });
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
