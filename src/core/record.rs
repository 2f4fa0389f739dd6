//! The shared record of one pool: one block of bytes that all workers read, change and write back with compare-and-swap.
//!
//! ```text
//! Header | Worker × workers | Host × hosts | Insight × hosts, where wanted | (generation, past) × hosts that failed once | Class × classes
//!        | Waiting × waiting jobs | Turn × tenants
//!                                             little-endian, no gaps; O(hosts + workers), and 30 bytes for each job that waits
//! ```
//!
//! **Who counts what.** A host's load is `in_flight + pending`. Each worker's share of `in_flight` is exactly the leases that it
//! holds in its own memory. When a worker dies, its share must go, and only it: [`Record::declare_dead`] moves all counts
//! to `pending` and raises the `epoch`; every live worker then moves its own share back ([`super::book::Book::join`]); when the
//! last one has, what is left in `pending` belonged to the dead, and is dropped. The load stays exact or too high meanwhile,
//! never too low, and the record stays O(hosts), which columns of workers × hosts would not.
//!
//! **Which host is meant.** A host's entry has a `generation` that no other entry of the record ever has. A lease remembers both its
//! slot and the generation: a host that left and came back is another entry, and an old lease cannot touch it.

mod insight;
mod layout;
mod waiting;

use std::time::Duration;

use super::address::Address;
use super::health::Trial;
use super::queue::{Turn, Waiting};
use super::time::Instant;
use crate::config;

pub use insight::{Class, Insight};
use layout::{DRAIN, MAGIC, PAST, RESERVE, RETIRED};
pub(super) use layout::{EJECTED, FAILS_ENVOY, FAILS_PROBES, RESTS, SLOW, STRANGER, TOLD_EJECTED, TOLD_UNHEALTHY, TRIAL};
pub use layout::{Front, Header, Host, VERSION, Worker};

/// What the configuration says of a host, as far as the record shows it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Named {
    /// Where the host listens.
    pub address: Address,
    /// Relative capacity.
    pub weight: f32,
    /// Slots.
    pub max_in_flight: u32,
    /// No new jobs.
    pub drain: bool,
    /// Only where no other host has a free slot.
    pub is_reserve: bool,
}

impl config::Host {
    /// The part of it that the record shows.
    pub fn named(&self) -> Named {
        let Self { address, weight, max_in_flight, drain, is_reserve, .. } = *self;
        Named { address, weight, max_in_flight, drain, is_reserve }
    }
}

/// A host's place in the record. The generation decides; the slot is where to look first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Index of the host's entry.
    pub slot: u32,
    /// The entry's generation.
    pub generation: u32,
}

/// The bytes were not a record of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign;

/// The record, taken apart just enough to read and change it in place.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Written back into the bytes by [`Record::bytes`].
    pub header: Header,
    bytes: Vec<u8>,
}

/// The length of a generation, and of a past that says whose it is.
const GENERATION: usize = size_of::<u32>();
const PAST_BYTES: usize = GENERATION + Host::PAST;

impl Record {
    /// A record without hosts.
    pub fn new(incarnation: u64) -> Self {
        let header = Header { magic: MAGIC, version: VERSION, incarnation, ..Header::default() };
        Self { header, bytes: vec![0; Header::BYTES] }
    }

    /// Takes the bytes of a record. Anything else than a whole record of this version is [`Foreign`].
    pub fn parse(bytes: Vec<u8>) -> Result<Self, Foreign> {
        let header = Header::read(bytes.first_chunk().ok_or(Foreign)?);
        let insights = if header.insights == 0 { 0 } else { header.hosts };
        let entries = [
            (header.workers, Worker::BYTES),
            (header.hosts, Host::BASE),
            (insights, Insight::BYTES),
            (header.pasts, PAST_BYTES),
            (header.classes, Class::BYTES),
        ];
        let levels = [header.waiting_high, header.waiting_normal, header.waiting_low];
        let queue = levels.map(|waiting| (waiting, Waiting::BYTES)).into_iter().chain([(header.turns, Turn::BYTES)]);
        let mut parts = entries.into_iter().chain(queue);
        let length = parts.try_fold(Header::BYTES, |sum, (count, each)| sum.checked_add((count as usize).checked_mul(each)?));
        let ours = header.magic == MAGIC && header.version == VERSION && length == Some(bytes.len());
        if ours { Ok(Self { header, bytes }) } else { Err(Foreign) }
    }

    /// How many bytes there are to store.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes to store.
    pub fn bytes(&mut self) -> &[u8] {
        if let Some(head) = self.bytes.first_chunk_mut() {
            self.header.write(head);
        }
        &self.bytes
    }

    fn worker_bytes(&self) -> &[[u8; Worker::BYTES]] {
        let range = Header::BYTES..Header::BYTES + self.header.workers as usize * Worker::BYTES;
        self.bytes.get(range).unwrap_or(&[]).as_chunks().0
    }

    fn hosts_start(&self) -> usize {
        Header::BYTES + self.header.workers as usize * Worker::BYTES
    }

    fn pasts_start(&self) -> usize {
        let insights = if self.has_insights() { self.header.hosts as usize } else { 0 };
        self.insights_start() + insights * Insight::BYTES
    }

    /// The host entries as they lie in the record, without their pasts, for a scan that looks at each once: [`Front::of`].
    pub fn host_bytes(&self) -> &[[u8; Host::BASE]] {
        self.bytes.get(self.hosts_start()..self.insights_start()).unwrap_or(&[]).as_chunks().0
    }

    /// Where the past of this generation is, or would be: they stand in the order of their generations.
    fn find_past(&self, generation: u32) -> Result<usize, usize> {
        let of = |past: &[u8; PAST_BYTES]| past.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        let at = |index| self.pasts_start() + index * PAST_BYTES;
        self.past_bytes().binary_search_by_key(&generation, of).map(at).map_err(at)
    }

    fn past_at(&self, generation: u32) -> Option<usize> {
        self.find_past(generation).ok()
    }

    /// A host's entry, with its past if it has one.
    fn whole(&self, base: &[u8; Host::BASE]) -> Host {
        let mut bytes = [0; Host::BYTES];
        let (front, past) = bytes.split_at_mut(Host::BASE);
        front.copy_from_slice(base);
        let host = Front::of(base);
        if host.has_past() {
            let at = self.past_at(host.generation()).map(|at| at + GENERATION);
            if let Some(stored) = at.and_then(|at| self.bytes.get(at..at + Host::PAST)) {
                past.copy_from_slice(stored);
            }
        }
        Host::read(&bytes)
    }

    fn set_past(&mut self, generation: u32, past: &[u8]) {
        let at = self.find_past(generation).unwrap_or_else(|at| {
            let mut bytes = [0; PAST_BYTES];
            bytes.first_chunk_mut().into_iter().for_each(|own: &mut [u8; GENERATION]| *own = generation.to_le_bytes());
            self.bytes.splice(at..at, bytes);
            self.header.pasts += 1;
            at
        });
        if let Some(stored) = self.bytes.get_mut(at + GENERATION..at + PAST_BYTES) {
            stored.copy_from_slice(past);
        }
    }

    fn drop_past(&mut self, generation: u32) {
        if let Some(at) = self.past_at(generation) {
            self.bytes.drain(at..at + PAST_BYTES);
            self.header.pasts -= 1;
        }
    }

    /// All worker entries.
    pub fn workers(&self) -> impl Iterator<Item = Worker> {
        self.worker_bytes().iter().map(Worker::read)
    }

    /// The row of the worker with this id, looked for at `hint` first.
    pub fn worker_row(&self, id: u64, hint: usize) -> Option<usize> {
        let rows = self.worker_bytes();
        let is_its = |bytes: &[u8; Worker::BYTES]| Worker::read(bytes).id == id;
        if rows.get(hint).is_some_and(is_its) { Some(hint) } else { rows.iter().position(is_its) }
    }

    /// The worker entry in this row.
    pub fn worker(&self, row: usize) -> Option<Worker> {
        self.worker_bytes().get(row).map(Worker::read)
    }

    /// Overwrites the worker entry in this row.
    pub fn set_worker(&mut self, row: usize, worker: Worker) {
        let start = Header::BYTES + row * Worker::BYTES;
        if let Some(bytes) = self.bytes.get_mut(start..).and_then(|b| b.first_chunk_mut()) {
            worker.write(bytes);
        }
    }

    /// Adds a worker entry and gives its row.
    pub fn add_worker(&mut self, worker: Worker) -> usize {
        let row = self.header.workers as usize;
        let at = Header::BYTES + row * Worker::BYTES;
        self.bytes.splice(at..at, [0; Worker::BYTES]);
        self.header.workers += 1;
        self.set_worker(row, worker);
        row
    }

    /// Removes a worker entry, and its jobs that wait; its share of the counts stays.
    pub fn remove_worker(&mut self, row: usize) {
        if let Some(Worker { id, .. }) = self.worker(row) {
            self.remove_waiting_if(|entry| entry.worker == id);
        }
        let start = Header::BYTES + row * Worker::BYTES;
        self.bytes.drain(start..start + Worker::BYTES);
        self.header.workers -= 1;
    }

    /// All host entries, by slot.
    #[inline]
    pub fn hosts(&self) -> impl ExactSizeIterator<Item = Host> {
        self.host_bytes().iter().map(|base| self.whole(base))
    }

    /// The host entry in this slot.
    #[inline]
    pub fn host(&self, slot: u32) -> Option<Host> {
        self.host_bytes().get(slot as usize).map(|base| self.whole(base))
    }

    /// Changes the host entry in this slot, if there is one.
    pub fn with_host<T>(&mut self, slot: u32, change: impl FnOnce(&mut Host) -> T) -> Option<T> {
        let mut host = self.host(slot)?;
        let had_past = host.has_flag(PAST);
        let result = change(&mut host);
        host.set_flag(PAST, false);
        let mut bytes = [0; Host::BYTES];
        host.write(&mut bytes);
        let has_past = bytes.iter().skip(Host::BASE).any(|byte| *byte != 0);
        if has_past {
            host.set_flag(PAST, true);
            host.write(&mut bytes);
        }
        let (base, past) = bytes.split_at(Host::BASE);
        let start = self.hosts_start() + slot as usize * Host::BASE;
        self.bytes.get_mut(start..start + Host::BASE)?.copy_from_slice(base);
        match (had_past, has_past) {
            (_, true) => self.set_past(host.generation, past),
            (true, false) => self.drop_past(host.generation),
            (false, false) => {}
        }
        Some(result)
    }

    /// The slot that now holds this seat's generation.
    pub fn slot_of(&self, seat: Seat) -> Option<u32> {
        let is_it = |host: Host| host.generation == seat.generation;
        if self.host(seat.slot).is_some_and(is_it) {
            return Some(seat.slot);
        }
        self.hosts().position(is_it).map(|slot| slot as u32)
    }

    /// The seat of the host at this address that is not retired; else of a retired one.
    pub fn seat_at(&self, address: Address) -> Option<Seat> {
        let here = self.host_bytes().iter().map(Front::of).zip(0..).filter(|(host, _)| host.address() == address);
        here.min_by_key(|(host, _)| host.is_retired()).map(|(host, slot)| Seat { slot, generation: host.generation() })
    }

    /// Makes a new generation of a host, and gives its seat.
    pub fn add_host(&mut self, named: Named, retired: bool) -> Seat {
        self.header.generation = self.header.generation.wrapping_add(1).max(1);
        let generation = self.header.generation;
        let slot = self.header.hosts;
        let mut host = Host::new(named.address, generation);
        host.set_flag(RETIRED, retired);
        let mut bytes = [0; Host::BYTES];
        host.write(&mut bytes);
        let at = self.insights_start();
        self.bytes.splice(at..at, bytes.into_iter().take(Host::BASE));
        self.header.hosts += 1;
        self.add_insight();
        self.header.membership = self.header.membership.wrapping_add(1);
        self.describe(slot, named);
        Seat { slot, generation }
    }

    /// Writes what the configuration says of a host over its entry.
    pub fn describe(&mut self, slot: u32, named: Named) {
        self.with_host(slot, |host| {
            (host.weight, host.max_in_flight) = (named.weight, named.max_in_flight);
            host.set_flag(DRAIN, named.drain);
            host.set_flag(RESERVE, named.is_reserve);
        });
        self.header.stands_anew();
    }

    /// Marks a host that no live configuration names.
    pub fn retire(&mut self, slot: u32) {
        self.with_host(slot, |host| host.set_flag(RETIRED, true));
        self.header.membership = self.header.membership.wrapping_add(1);
    }

    /// Whether [`Record::drop_retired`] would drop something.
    pub fn has_droppable(&self) -> bool {
        self.hosts().any(|host| host.is_retired() && host.load() == 0)
    }

    /// Drops the retired hosts that nobody leases.
    pub fn drop_retired(&mut self) {
        let mut slot = 0;
        while let Some(host) = self.host(slot) {
            if host.is_retired() && host.load() == 0 {
                self.drop_past(host.generation);
                self.drop_insight(slot);
                let start = self.hosts_start() + slot as usize * Host::BASE;
                self.bytes.drain(start..start + Host::BASE);
                self.header.hosts -= 1;
                self.header.membership = self.header.membership.wrapping_add(1);
            } else {
                slot += 1;
            }
        }
    }

    /// Takes a worker out: all counts become `pending` until each live worker has moved its own share back.
    pub fn declare_dead(&mut self, row: usize) {
        self.remove_worker(row);
        self.header.deaths = self.header.deaths.saturating_add(1);
        self.count_anew();
        self.sweep();
    }

    /// From now on each worker that lives says again what its share is, and what that weighs.
    pub fn count_anew(&mut self) {
        self.header.epoch = self.header.epoch.wrapping_add(1);
        for slot in 0..self.header.hosts {
            self.with_host(slot, |host| {
                host.pending = host.load();
                host.in_flight = 0;
            });
            // Whoever lives says again what its share weighs.
            self.with_insight(slot, |insight| (insight.work, insight.weighed) = (0, 0));
        }
    }

    /// Drops what the dead had held, if every live worker has caught up with the epoch.
    pub fn sweep(&mut self) {
        let epoch = self.header.epoch;
        if self.header.swept == epoch || self.workers().any(|worker| worker.epoch != epoch) {
            return;
        }
        self.header.swept = epoch;
        for slot in 0..self.header.hosts {
            self.with_host(slot, |host| host.pending = 0);
        }
    }

    /// Takes one more job for a host, of so many microseconds of work, if that is known.
    pub fn reserve(&mut self, slot: u32, work: Option<u64>, now: Instant) {
        self.header.placed = self.header.placed.wrapping_add(1);
        let load_and_more = self.with_host(slot, |host| {
            host.in_flight = host.in_flight.saturating_add(1);
            host.requests = host.requests.saturating_add(1);
            (host.load(), host.load() > host.max_in_flight && !host.is_retired())
        });
        let Some((load, is_beyond)) = load_and_more else { return };
        self.with_insight(slot, |insight| insight.takes(work, load.saturating_sub(1), now));
        self.header.beyond_slots = self.header.beyond_slots.saturating_add(is_beyond.into());
    }

    /// Counts the work of one of the host's jobs.
    pub fn weigh(&mut self, slot: u32, work: Option<u64>) {
        self.with_insight(slot, |insight| insight.weigh(work));
    }

    /// Places a job on the host in this slot, as a trial that is overdue after the given time if there is one. Gives where it sits.
    pub fn place(
        &mut self,
        slot: u32,
        now: Instant,
        trial: Option<Duration>,
        work: Option<u64>,
    ) -> Option<(Seat, Option<Trial>)> {
        self.reserve(slot, work, now);
        let (generation, trial) =
            self.with_host(slot, |host| (host.generation, trial.map(|overdue_after| host.begin_trial(now, overdue_after))))?;
        if trial.is_some() {
            self.header.stands_anew();
        }
        Some((Seat { slot, generation }, trial))
    }

    /// Gives one job back, and the work that it was counted with. A count that would fall below 0 stays, and is counted as drift.
    pub fn release(&mut self, seat: Seat, work: Option<u64>, now: Instant) {
        let slot = self.slot_of(seat);
        let released = slot.and_then(|slot| {
            self.with_host(slot, |host| {
                let less = host.in_flight.checked_sub(1);
                host.in_flight = less.unwrap_or(0);
                less.map(|_| host.load())
            })?
        });
        match (slot, released) {
            (Some(slot), Some(left)) => self.with_insight(slot, |insight| insight.ends(work, left, now)),
            _ => self.header.drift = self.header.drift.saturating_add(1),
        }
    }
}

#[cfg(test)]
mod tests;
