//! What one worker alone knows of one pool: its leases, and how far it is in step with the shared record.
//!
//! ```text
//!               join                       own transactions, ticks
//!   (outside) ────────► in step ◄────────────────────────────────┐
//!       ▲                  │                                     │
//!       │                  ├── another died: the epoch rose ─────┤ join: moves its own share from pending to in_flight
//!       │                  ├── configuration: other names ───────┤ join: adds hosts; the last worker retires the unnamed
//!       │                  ├── the record was lost ──────────────┤ join: writes back all that it holds
//!       └── leave ─────────┴── declared dead, but lives ─────────┘ join: registers again, writes back what was dropped
//! ```
//!
//! Every change of counts needs a book that is in step; a book that is not joins first, in a transaction of its own.

mod waiting;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::address::Address;
use super::lease::Lease;
use super::newcomer;
use super::queue::Waiting;
use super::record::{Named, Record, Seat, Worker};
use super::time::Instant;
use crate::config::{Policy, Score};

/// How many of its own ticks an observer sees a beat unchanged before it declares the worker dead. With ticks of 100 ms that is 8 s:
/// within 10 s, with room for late ticks. Own ticks, not time: when the whole process was
/// stopped, the observer's ticks stopped too, and nobody dies of it.
pub const TICKS_TO_DEATH: u32 = 80;

/// The same for a worker that lags behind the epoch: whoever lives joins it with its next tick, and as long as one has not, what others held who
/// died is not given back. 0.8 s: shorter than Envoy's back-off before it loads a trapped VM anew, so that traps one after another heal, too.
pub const TICKS_TO_DEATH_OF_A_LAGGARD: u32 = 8;

/// What the live configurations of a worker say of a pool, as far as all workers must agree on it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Declared {
    /// Whether any of them has the pool; it may have no host yet.
    pub has_pool: bool,
    /// The hosts, each address once.
    pub hosts: Vec<Named>,
    /// How hosts are chosen.
    pub policy: Policy,
    /// See [`crate::config::Pool::most_at_once`].
    pub most_at_once: Option<u32>,
    /// See [`crate::config::Pool::patience`].
    pub patience: Duration,
    /// Whether hosts are to be known by more than their jobs and latencies.
    pub wants_insight: bool,
    /// The score's parameters.
    pub score: Score,
    /// The EWMA's time constant.
    pub time_constant: Duration,
    /// How long a newcomer's weight takes to be whole.
    pub slow_start: Duration,
    /// Whether the hosts are those of Envoy's cluster.
    pub discovers: bool,
    /// Most jobs that may wait; 0: there is no queue.
    pub max_length: u32,
    /// How long the oldest job of a priority waits until that gets its part of the slots.
    pub ageing: Duration,
}

impl Declared {
    /// Hash of which hosts there are, in whatever order. What is said of them is left out: two workers that disagree on a weight still agree
    /// that a host has gone.
    fn names(&self) -> u64 {
        let mut addresses: Vec<Address> = self.hosts.iter().map(|host| host.address).collect();
        addresses.sort_unstable();
        let mut hasher = DefaultHasher::new();
        addresses.hash(&mut hasher);
        hasher.finish()
    }

    /// Hash of everything.
    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for host in &self.hosts {
            (host.address, host.weight.to_bits(), host.max_in_flight, host.drain, host.is_reserve).hash(&mut hasher);
        }
        let Score { in_flight_weight, latency_weight, target_latency } = self.score;
        (in_flight_weight.to_bits(), latency_weight.to_bits(), target_latency).hash(&mut hasher);
        (format!("{:?}", self.policy), self.most_at_once, self.patience, self.wants_insight).hash(&mut hasher);
        (self.has_pool, self.time_constant, self.slow_start, self.discovers, self.max_length, self.ageing).hash(&mut hasher);
        hasher.finish()
    }
}

/// How far a book and the record agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    incarnation: u64,
    epoch: u32,
    row: usize,
    fingerprint: u64,
}

/// What [`Book::join`] found, for [`Book::joined`].
#[derive(Clone, Debug)]
pub struct Joined {
    step: Step,
    seats: Vec<(u32, Seat)>,
}

/// One worker's book of one pool.
#[derive(Debug)]
pub struct Book {
    worker: u64,
    declared: Declared,
    names: u64,
    fingerprint: u64,
    step: Option<Step>,
    /// The leases by stream.
    leases: BTreeMap<u32, Lease>,
    /// The jobs that wait, by stream.
    waiting: BTreeMap<u32, Waiting>,
    /// The shared queue through which this worker is woken; 0 if it has none.
    pub bell: u32,
    /// Beats of the other workers, and for how many ticks each has stood still.
    watch: BTreeMap<u64, (u32, u32)>,
    /// Counted here until a transaction carries it: requests without a lease.
    pub unleased: u64,
    /// Counted here until a transaction carries it: jobs that were refused because too many wait.
    pub turned_away: u64,
    /// Counted here until a transaction carries it: reports of hosts that could not be read.
    pub bad_reports: u64,
    /// Counted here until a transaction carries it: transactions that had to be run again.
    pub conflicts: u64,
    /// Whether this worker ever took a lease.
    pub served: bool,
    /// The beat that the record shows. It never starts again, also not when the worker returns to a record that had dropped its row: an
    /// observer would take it for the beat that it saw stand still before.
    beats: u32,
    beat_is_due: bool,
}

/// Where the worker's own leases are counted in a record that it is not in step with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    InFlight,
    Pending,
    Nowhere,
}

impl Book {
    /// An empty book of the worker with this id.
    pub fn new(worker: u64) -> Self {
        Self {
            worker,
            declared: Declared::default(),
            names: Declared::default().names(),
            fingerprint: Declared::default().fingerprint(),
            step: None,
            leases: BTreeMap::new(),
            waiting: BTreeMap::new(),
            bell: 0,
            watch: BTreeMap::new(),
            unleased: 0,
            turned_away: 0,
            bad_reports: 0,
            conflicts: 0,
            served: false,
            beats: 0,
            beat_is_due: true,
        }
    }

    /// Takes over what the worker's live configurations say; the next join tells the others.
    pub fn declare(&mut self, declared: Declared) {
        (self.names, self.fingerprint) = (declared.names(), declared.fingerprint());
        self.declared = declared;
    }

    /// The hosts that the worker's live configurations name.
    pub fn named(&self) -> impl Iterator<Item = Address> {
        self.declared.hosts.iter().map(|host| host.address)
    }

    /// Whether counts may be changed as they are; if not, [`Book::join`] first.
    pub fn is_in_step(&self, record: &Record) -> bool {
        self.step.is_some_and(|step| {
            let header = &record.header;
            (step.incarnation, step.epoch, step.fingerprint) == (header.incarnation, header.epoch, self.fingerprint)
                && record.worker_row(self.worker, step.row).is_some()
        })
    }

    /// Brings the record in step with this book: registers the worker, writes its share to where it belongs, adds the hosts that it names,
    /// retires those that nobody names any more, and drops what the dead had held once all have caught up.
    #[must_use]
    pub fn join(&self, record: &mut Record, now: Instant) -> Joined {
        let known = self.step.filter(|step| step.incarnation == record.header.incarnation);
        let found = record.worker_row(self.worker, known.map_or(0, |step| step.row));
        let epoch = record.header.epoch;
        let share = match known {
            None => Share::Nowhere,
            Some(step) if step.epoch == record.header.epoch && found.is_some() => Share::InFlight,
            // No row, though nobody was declared dead: the record is older than this worker's place in it.
            Some(step) if step.epoch == record.header.epoch => Share::Nowhere,
            Some(step) if record.header.swept > step.epoch => Share::Nowhere,
            Some(_) => Share::Pending,
        };
        // The hosts first: a lease whose entry has gone is to find the one that will be chosen from, so that it fills a slot there.
        self.write_names(record, known.is_none_or(|step| step.fingerprint != self.fingerprint), now);
        // Also what this worker holds is to be counted anew.
        let is_anew = share == Share::InFlight && record.header.epoch != epoch;
        let mut seats = self.write_share(record, if is_anew { Share::Pending } else { share }, known.is_some());
        seats.extend(self.seat_those_without(record, now));
        let entry = Worker {
            id: self.worker,
            names: self.names,
            epoch: record.header.epoch,
            beat: self.beats.wrapping_add(1),
            served: self.served.into(),
            bell: self.bell,
            called: 0,
        };
        let row = match found {
            Some(row) => {
                record.set_worker(row, entry);
                row
            }
            None => record.add_worker(entry),
        };
        self.write_waiting(record);
        self.retire_unnamed(record);
        record.sweep();
        record.drop_retired();
        let step =
            Step { incarnation: record.header.incarnation, epoch: record.header.epoch, row, fingerprint: self.fingerprint };
        Joined { step, seats }
    }

    fn write_share(&self, record: &mut Record, share: Share, same_record: bool) -> Vec<(u32, Seat)> {
        let mut seats = Vec::new();
        if share == Share::InFlight {
            return seats;
        }
        for (stream, lease) in &self.leases {
            let (Some(seat), Some(address)) = (lease.seat, lease.address) else {
                continue;
            };
            let slot = if same_record { record.slot_of(seat) } else { None };
            let seat = match slot {
                Some(slot) => Seat { slot, ..seat },
                None => record.seat_at(address).unwrap_or_else(|| record.add_host(unnamed(address), true)),
            };
            record.with_host(seat.slot, |host| {
                if share == Share::Pending {
                    host.pending = host.pending.saturating_sub(1);
                }
                host.in_flight = host.in_flight.saturating_add(1);
            });
            record.weigh(seat.slot, lease.burden.work);
            seats.push((*stream, seat));
        }
        seats
    }

    /// A job that Envoy sent to a host before we knew of it takes its seat there once we do.
    fn seat_those_without(&self, record: &mut Record, now: Instant) -> Vec<(u32, Seat)> {
        let without = self.leases.iter().filter(|(_, lease)| lease.seat.is_none());
        let at = without.filter_map(|(stream, lease)| Some((*stream, record.seat_at(lease.address?)?)));
        let seats: Vec<(u32, Seat)> = at.collect();
        for (stream, seat) in &seats {
            let work = self.leases.get(stream).and_then(|lease| lease.burden.work);
            record.reserve(seat.slot, work, now);
        }
        seats
    }

    fn write_names(&self, record: &mut Record, news: bool, now: Instant) {
        let mut places: BTreeMap<Address, u32> =
            record.hosts().zip(0..).filter(|(host, _)| !host.is_retired()).map(|(host, slot)| (host.address(), slot)).collect();
        for named in &self.declared.hosts {
            match places.remove(&named.address) {
                Some(slot) if news => {
                    let is_back = !named.drain && record.host(slot).is_some_and(|host| host.is_draining());
                    record.describe(slot, *named);
                    if is_back {
                        newcomer::join(record, slot, now);
                    }
                }
                Some(_) => {}
                None => {
                    let seat = record.add_host(*named, false);
                    newcomer::join(record, seat.slot, now);
                }
            }
        }
        if news && self.declared.has_pool {
            record.header.describe(&self.declared.score, self.declared.time_constant);
            let Declared { policy, most_at_once, patience, .. } = &self.declared;
            record.header.describe_policy(policy, *most_at_once, *patience);
            let is_new = self.declared.wants_insight && !record.has_insights();
            record.keep_insights(self.declared.wants_insight);
            if is_new && record.hosts().any(|host| host.load() > 0) {
                // Else what jobs were counted with before would be taken off what others are counted with.
                record.count_anew();
            }
            record.header.describe_joining(self.declared.slow_start, self.declared.discovers);
            record.header.describe_queue(self.declared.max_length, self.declared.ageing);
        }
    }

    /// Whether [`Book::retire_unnamed`] would retire something.
    pub fn has_unnamed(&self, record: &Record) -> bool {
        self.all_agree(record) && record.hosts().filter(|host| !host.is_retired()).count() > self.declared.hosts.len()
    }

    /// Retires the hosts that no worker names any more.
    pub fn retire_unnamed(&self, record: &mut Record) {
        if !self.has_unnamed(record) {
            return;
        }
        let named: BTreeSet<Address> = self.declared.hosts.iter().map(|host| host.address).collect();
        for slot in 0..record.header.hosts {
            if record.host(slot).is_some_and(|host| !host.is_retired() && !named.contains(&host.address())) {
                record.retire(slot);
            }
        }
    }

    /// Another worker that has not seen the newest configuration may still name, and use, what this one does not.
    fn all_agree(&self, record: &Record) -> bool {
        record.workers().all(|worker| worker.names == self.names)
    }

    /// Takes over what [`Book::join`] found, once the record is stored.
    pub fn joined(&mut self, joined: Joined) {
        self.step = Some(joined.step);
        for (stream, seat) in joined.seats {
            if let Some(lease) = self.leases.get_mut(&stream) {
                lease.seat = Some(seat);
            }
        }
        self.has_shown_its_beat();
    }

    /// Marks a transaction in the worker's own entry, so that others see that it lives, and carries the counts that were kept here.
    pub fn beat(&self, record: &mut Record) {
        let header = &mut record.header;
        header.unleased = header.unleased.saturating_add(self.unleased);
        header.queue_full = header.queue_full.saturating_add(self.turned_away);
        header.bad_reports = header.bad_reports.saturating_add(self.bad_reports);
        header.conflicts = header.conflicts.saturating_add(self.conflicts);
        let row = self.step.and_then(|step| record.worker_row(self.worker, step.row));
        if let Some((row, mut worker)) = row.and_then(|row| Some((row, record.worker(row)?))) {
            worker.beat = self.beats.wrapping_add(1);
            worker.served = self.served.into();
            (worker.bell, worker.called) = (self.bell, 0);
            record.set_worker(row, worker);
        }
    }

    /// The record that carries the beat is stored.
    pub fn has_beaten(&mut self) {
        (self.unleased, self.turned_away, self.bad_reports, self.conflicts) = (0, 0, 0, 0);
        self.has_shown_its_beat();
    }

    fn has_shown_its_beat(&mut self) {
        self.beats = self.beats.wrapping_add(1);
        self.beat_is_due = false;
    }

    /// Once a tick: looks at the other workers' beats and gives the ids of those that have stood still for too long.
    pub fn watch(&mut self, record: &Record) -> Vec<u64> {
        let mut seen = BTreeMap::new();
        for worker in record.workers().filter(|worker| worker.id != self.worker) {
            let ticks = match self.watch.get(&worker.id) {
                Some((beat, ticks)) if *beat == worker.beat => ticks + 1,
                _ => 0,
            };
            seen.insert(worker.id, (worker.beat, ticks));
        }
        self.watch = seen;
        let laggards: BTreeSet<u64> =
            record.workers().filter(|worker| worker.epoch != record.header.epoch).map(|worker| worker.id).collect();
        let patience = |id| if laggards.contains(id) { TICKS_TO_DEATH_OF_A_LAGGARD } else { TICKS_TO_DEATH };
        self.watch.iter().filter(|(id, (_, ticks))| *ticks >= patience(*id)).map(|(id, _)| *id).collect()
    }

    /// Takes those of `suspects` out of the record whose beat is still the one that [`Book::watch`] saw. One that never served holds nothing, so that there is nothing to be repaired, and
    /// it is no death: as of Envoy's main thread, which compiles a module for seconds and then joins again. The others are declared dead. Gives how many went, and how many died.
    pub fn bury(&self, record: &mut Record, suspects: &[u64]) -> (usize, usize) {
        let (mut gone, mut dead) = (0, 0);
        for id in suspects {
            let row = record.worker_row(*id, 0);
            let still = row.and_then(|row| record.worker(row)).zip(self.watch.get(id));
            if let (Some(row), Some((worker, (beat, _)))) = (row, still)
                && worker.beat == *beat
            {
                gone += 1;
                if worker.served == 0 {
                    record.remove_worker(row);
                    record.sweep();
                } else {
                    record.declare_dead(row);
                    dead += 1;
                }
            }
        }
        (gone, dead)
    }

    /// Whether no transaction has shown since the last call that this worker lives.
    pub fn beat_is_due(&mut self) -> bool {
        std::mem::replace(&mut self.beat_is_due, true)
    }

    /// Whether this worker has nothing to do with the pool any more: its configurations do not have it, it holds no lease, and none of its jobs waits.
    pub fn is_idle(&self) -> bool {
        !self.declared.has_pool && self.leases.is_empty() && self.waiting.is_empty()
    }

    /// Takes the worker out of the record; it holds nothing, so no count changes. The last one takes the hosts along.
    pub fn leave(&self, record: &mut Record) {
        if let Some(row) = record.worker_row(self.worker, 0) {
            record.remove_worker(row);
        }
        record.sweep();
        self.retire_unnamed(record);
        record.drop_retired();
    }

    /// Puts a lease in the book.
    pub fn take(&mut self, stream: u32, lease: Lease) {
        self.leases.insert(stream, lease);
    }

    /// Takes a stream's lease out of the book: from now on nobody but the caller can settle it.
    pub fn give(&mut self, stream: u32) -> Option<Lease> {
        self.leases.remove(&stream)
    }

    /// A stream's lease.
    pub fn lease(&self, stream: u32) -> Option<&Lease> {
        self.leases.get(&stream)
    }

    /// A stream's lease, to change it.
    pub fn lease_mut(&mut self, stream: u32) -> Option<&mut Lease> {
        self.leases.get_mut(&stream)
    }

    /// All leases by stream.
    pub fn leases(&self) -> impl Iterator<Item = (u32, &Lease)> {
        self.leases.iter().map(|(stream, lease)| (*stream, lease))
    }
}

fn unnamed(address: Address) -> Named {
    Named { address, weight: 1.0, max_in_flight: 0, drain: false, is_reserve: false }
}

#[cfg(test)]
mod tests;
