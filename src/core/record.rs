//! The shared record of one pool: one block of bytes that all workers read, change and write back with compare-and-swap.
//!
//! ```text
//! Header | Worker × workers | Host × hosts          all little-endian, no gaps; O(hosts + workers)
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

use std::time::Duration;

use super::address::Address;
use super::ewma::Ewma;
use super::packed::packed;
use super::time::Instant;
use crate::config::{self, Score};

/// The layout's version. It is also part of the record's key, so that two builds of the module whose layouts differ never
/// meet in one record: an upgrade starts with fresh books.
pub const VERSION: u32 = if cfg!(feature = "next-record") { u32::MAX } else { 1 };

const MAGIC: u32 = u32::from_le_bytes(*b"PLIM");

packed! {
    /// What is known of the pool as a whole.
    pub struct Header {
        /// [`MAGIC`].
        pub magic: u32,
        /// [`VERSION`].
        pub version: u32,
        /// Drawn at random when the record was made: tells a record from the one that stood here before it was lost.
        pub incarnation: u64,
        /// How often a worker was declared dead.
        pub epoch: u32,
        /// The epoch of the last drop of what the dead had held.
        pub swept: u32,
        /// Changes whenever an entry comes or goes: a cached map from hosts to slots holds as long as this does.
        pub membership: u32,
        /// The generation of the newest entry.
        pub generation: u32,
        /// Number of worker entries.
        pub workers: u32,
        /// Number of host entries.
        pub hosts: u32,
        /// Requests that were spread over the pool without a lease.
        pub unleased: u64,
        /// Jobs that Envoy sent to an address that is not in the pool.
        pub elsewhere: u64,
        /// Leases given back that the record did not know: 0, or our arithmetic is wrong.
        pub drift: u64,
        /// Transactions that were run again because another worker was faster.
        pub conflicts: u64,
        /// Workers that were declared dead.
        pub deaths: u64,
        /// The score's parameters, as configured last, for the status page (the choice takes them from its own configuration).
        pub in_flight_weight: f32,
        /// See `in_flight_weight`.
        pub latency_weight: f32,
        /// Milliseconds.
        pub target_latency_ms: u32,
        /// Milliseconds.
        pub time_constant_ms: u32,
        /// Changes whenever a latency is fed.
        pub learned: u32,
        /// Jobs whose first attempt Envoy sent to another host than the one named.
        pub overruled: u64,
    }
}

packed! {
    /// One VM instance that names hosts of this pool.
    pub struct Worker {
        /// Drawn at random when the VM started.
        pub id: u64,
        /// Hash of the hosts that this worker's configurations name.
        pub names: u64,
        /// The epoch up to which its share lies in `in_flight`.
        pub epoch: u32,
        /// Rises with each transaction and tick.
        pub beat: u32,
        /// 1 once it has taken a lease.
        pub served: u32,
    }
}

packed! {
    /// One generation of one host.
    pub struct Host {
        ip: u128,
        port: u16,
        flags: u16,
        /// Unique among all entries that the record ever had; never 0.
        pub generation: u32,
        /// Leases of workers that are in step with the epoch.
        pub in_flight: u32,
        /// Leases of workers that have yet to catch up with the epoch, and of the dead.
        pub pending: u32,
        /// For the status page, see [`Header::in_flight_weight`].
        pub weight: f32,
        /// For the status page.
        pub max_in_flight: u32,
        ewma_millis: f32,
        ewma_fed: u64,
        /// Failures since the last success.
        pub consecutive_failures: u32,
        /// Jobs placed here.
        pub requests: u64,
        /// Jobs that failed here.
        pub failures: u64,
    }
}

/// The configuration says: no new jobs.
const DRAIN: u16 = 1;
/// No live configuration names the host any more.
const RETIRED: u16 = 2;

impl Host {
    /// Where the host listens.
    pub fn address(&self) -> Address {
        Address::from_bits(self.ip, self.port)
    }

    /// Jobs that run or wait on the host.
    #[inline]
    pub fn load(&self) -> u32 {
        self.in_flight.saturating_add(self.pending)
    }

    /// The host's latency.
    #[inline]
    pub fn ewma(&self) -> Ewma {
        Ewma { millis: self.ewma_millis, fed: Instant(self.ewma_fed) }
    }

    /// Sets the host's latency.
    pub fn set_ewma(&mut self, ewma: Ewma) {
        (self.ewma_millis, self.ewma_fed) = (ewma.millis, ewma.fed.0);
    }

    /// Whether the host was taken out of every live configuration; it stays until its last lease is settled.
    #[inline]
    pub fn is_retired(&self) -> bool {
        self.flags & RETIRED != 0
    }

    /// Whether the host takes no new jobs: told to drain, or retired.
    pub fn is_draining(&self) -> bool {
        self.flags & (DRAIN | RETIRED) != 0
    }

    fn set_flag(&mut self, flag: u16, on: bool) {
        self.flags = if on { self.flags | flag } else { self.flags & !flag };
    }
}

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
}

impl config::Host {
    /// The part of it that the record shows.
    pub fn named(&self) -> Named {
        Named { address: self.address, weight: self.weight, max_in_flight: self.max_in_flight, drain: self.drain }
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

impl Record {
    /// A record without hosts.
    pub fn new(incarnation: u64) -> Self {
        let header = Header { magic: MAGIC, version: VERSION, incarnation, ..Header::default() };
        Self { header, bytes: vec![0; Header::BYTES] }
    }

    /// Takes the bytes of a record. Anything else than a whole record of this version is [`Foreign`].
    pub fn parse(bytes: Vec<u8>) -> Result<Self, Foreign> {
        let header = Header::read(bytes.first_chunk().ok_or(Foreign)?);
        let length = (header.workers as usize)
            .checked_mul(Worker::BYTES)
            .zip((header.hosts as usize).checked_mul(Host::BYTES))
            .and_then(|(workers, hosts)| workers.checked_add(hosts)?.checked_add(Header::BYTES));
        let ours = header.magic == MAGIC && header.version == VERSION && length == Some(bytes.len());
        if ours { Ok(Self { header, bytes }) } else { Err(Foreign) }
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

    /// The host entries as they lie in the record, for a scan that looks at each once: [`Host::read`] takes one apart.
    pub fn host_bytes(&self) -> &[[u8; Host::BYTES]] {
        let start = Header::BYTES + self.header.workers as usize * Worker::BYTES;
        self.bytes.get(start..).unwrap_or(&[]).as_chunks().0
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

    /// Removes a worker entry; its share of the counts stays.
    pub fn remove_worker(&mut self, row: usize) {
        let start = Header::BYTES + row * Worker::BYTES;
        self.bytes.drain(start..start + Worker::BYTES);
        self.header.workers -= 1;
    }

    /// All host entries, by slot.
    #[inline]
    pub fn hosts(&self) -> impl ExactSizeIterator<Item = Host> {
        self.host_bytes().iter().map(Host::read)
    }

    /// The host entry in this slot.
    #[inline]
    pub fn host(&self, slot: u32) -> Option<Host> {
        self.host_bytes().get(slot as usize).map(Host::read)
    }

    /// Changes the host entry in this slot, if there is one.
    pub fn with_host<T>(&mut self, slot: u32, change: impl FnOnce(&mut Host) -> T) -> Option<T> {
        let start = Header::BYTES + self.header.workers as usize * Worker::BYTES + slot as usize * Host::BYTES;
        let bytes = self.bytes.get_mut(start..)?.first_chunk_mut()?;
        let mut host = Host::read(bytes);
        let result = change(&mut host);
        host.write(bytes);
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
        let here = self.hosts().enumerate().filter(|(_, host)| host.address() == address);
        here.min_by_key(|(_, host)| host.is_retired()).map(|(slot, host)| Seat { slot: slot as u32, generation: host.generation })
    }

    /// Makes a new generation of a host, and gives its seat.
    pub fn add_host(&mut self, named: Named, retired: bool) -> Seat {
        self.header.generation = self.header.generation.wrapping_add(1).max(1);
        let generation = self.header.generation;
        let slot = self.header.hosts;
        let mut host = Host { ip: named.address.ip(), port: named.address.port(), generation, ..Host::default() };
        host.set_flag(RETIRED, retired);
        let mut bytes = [0; Host::BYTES];
        host.write(&mut bytes);
        self.bytes.extend_from_slice(&bytes);
        self.header.hosts += 1;
        self.header.membership = self.header.membership.wrapping_add(1);
        self.describe(slot, named);
        Seat { slot, generation }
    }

    /// Writes what the configuration says of a host over its entry.
    pub fn describe(&mut self, slot: u32, named: Named) {
        self.with_host(slot, |host| {
            (host.weight, host.max_in_flight) = (named.weight, named.max_in_flight);
            host.set_flag(DRAIN, named.drain);
        });
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
                let start = Header::BYTES + self.header.workers as usize * Worker::BYTES + slot as usize * Host::BYTES;
                self.bytes.drain(start..start + Host::BYTES);
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
        self.header.epoch = self.header.epoch.wrapping_add(1);
        self.header.deaths = self.header.deaths.saturating_add(1);
        for slot in 0..self.header.hosts {
            self.with_host(slot, |host| {
                host.pending = host.load();
                host.in_flight = 0;
            });
        }
        self.sweep();
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

    /// Takes one more job for a host.
    pub fn reserve(&mut self, slot: u32) {
        self.with_host(slot, |host| {
            host.in_flight = host.in_flight.saturating_add(1);
            host.requests = host.requests.saturating_add(1);
        });
    }

    /// Gives one job back. A count that would fall below 0 stays, and is counted as drift.
    pub fn release(&mut self, seat: Seat) {
        let released = self.slot_of(seat).and_then(|slot| {
            self.with_host(slot, |host| {
                let less = host.in_flight.checked_sub(1);
                host.in_flight = less.unwrap_or(0);
                less
            })?
        });
        if released.is_none() {
            self.header.drift = self.header.drift.saturating_add(1);
        }
    }
}

impl Header {
    /// Writes the score's parameters.
    pub fn describe(&mut self, score: &Score, time_constant: Duration) {
        self.in_flight_weight = score.in_flight_weight;
        self.latency_weight = score.latency_weight;
        self.target_latency_ms = millis(score.target_latency);
        self.time_constant_ms = millis(time_constant);
    }

    /// The score's parameters.
    pub fn score(&self) -> Score {
        let target_latency = Duration::from_millis(self.target_latency_ms.max(1).into());
        Score { in_flight_weight: self.in_flight_weight, latency_weight: self.latency_weight, target_latency }
    }

    /// The EWMA's time constant.
    pub fn time_constant(&self) -> Duration {
        Duration::from_millis(self.time_constant_ms.max(1).into())
    }
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
