//! The record's layout: what stands in its header and its entries, and where.

use std::time::Duration;

use crate::config::{Policy, Score, Weights};
use crate::core::address::Address;
use crate::core::ewma::Ewma;
use crate::core::packed::packed;
use crate::core::queue::Priority;
use crate::core::time::Instant;

/// The layout's version. It is also part of the record's key, so that two builds of the module whose layouts differ never
/// meet in one record: an upgrade starts with fresh books.
pub const VERSION: u32 = if cfg!(feature = "next-record") { u32::MAX } else { 5 };

pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"PLIM");

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
        /// Number of hosts that have a past.
        pub(in crate::core) pasts: u32,
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
        /// Changes whenever a latency is fed or a penalty changes.
        pub learned: u32,
        /// Changes whenever a host may or may not be chosen any more, but for the mere passing of time.
        pub standing: u32,
        /// The worker that watches the hosts for all, see [`crate::core::leader`].
        pub leader: u64,
        /// When the leader last said that it leads.
        pub led: u64,
        /// Jobs placed so far, wrapping.
        pub placed: u32,
        /// 1 if it was told that no host serves.
        pub(in crate::core) told_no_host: u32,
        /// Jobs whose first attempt Envoy sent to another host than the one named.
        pub overruled: u64,
        /// Until when no host is marked as one that Envoy does not know, see [`crate::core::stranger`].
        pub(in crate::core) unread_until: u64,
        /// Which of Envoy's memberships all follow, by [`crate::core::membership::Membership::digest`]; 0 if none is known.
        pub members: u32,
        /// How many hosts Envoy's cluster has.
        pub discovered: u32,
        /// When Envoy's membership was read last; 0 if it never was, or is not wanted.
        pub followed: u64,
        /// How often it could not be read.
        pub failed_polls: u64,
        /// Milliseconds; for the status page, see `in_flight_weight`.
        pub slow_start_ms: u32,
        /// 1 if the pool's hosts are those of Envoy's cluster.
        pub discovers: u32,
        /// 1 once Envoy has held any of them well.
        pub(in crate::core) seen_well: u32,
        /// Jobs that wait, by priority: together the number of their entries.
        pub(in crate::core) waiting_high: u32,
        pub(in crate::core) waiting_normal: u32,
        pub(in crate::core) waiting_low: u32,
        /// Slots that went to other priorities since this one had its last.
        pub(in crate::core) passed_normal: u32,
        pub(in crate::core) passed_low: u32,
        /// Number of entries of tenants that are ahead of others.
        pub(in crate::core) turns: u32,
        /// Most jobs that may wait, as configured last; 0 without a queue. For the status page.
        pub max_length: u32,
        /// Milliseconds; when a priority has aged, as configured last.
        pub(in crate::core) ageing_ms: u32,
        /// Jobs that waited and got their host.
        pub dequeued: u64,
        /// Jobs that were refused because too many waited.
        pub queue_full: u64,
        /// Jobs that waited too long.
        pub queue_timeout: u64,
        /// Jobs whose client left while they waited.
        pub left: u64,
        /// Jobs that came to a host without a free slot: retries, and where Envoy chose.
        pub beyond_slots: u64,
        /// 1 if there is an [`Insight`] for each host.
        pub(in crate::core) insights: u32,
        /// Number of classes.
        pub(in crate::core) classes: u32,
        /// The policy, as configured last, by its place in [`Policy::WORDS`]. For the status page.
        pub(in crate::core) policy: u32,
        /// How many jobs a host runs at once, if not as many as it has slots; else 0. For the status page, as are those below.
        pub(in crate::core) runs_at_once: u32,
        pub(in crate::core) memory_weight: f32,
        pub(in crate::core) compute_weight: f32,
        pub(in crate::core) latency_share: f32,
        /// Milliseconds; for so long what hosts tell of themselves is believed.
        pub(in crate::core) patience_ms: u32,
        /// Reports of hosts that could not be read.
        pub bad_reports: u64,
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
        /// The shared queue through which it is woken; 0 if it has none.
        pub bell: u32,
        /// When it was called to the jobs that wait there, and has not been heard of since; else 0.
        pub called: u64,
    }
}

packed! {
    /// One generation of one host. What stands from `until` on is all 0 for a host that never failed and is no newcomer: see [`Host::BASE`].
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
        /// Failures in a row.
        pub consecutive_failures: u32,
        /// Jobs placed here.
        pub requests: u64,
        /// Jobs that failed here.
        pub failures: u64,
        /// Jobs in the latency breaker's current window, and the slow ones among them.
        pub(in crate::core) seen: u16,
        pub(in crate::core) slow: u16,
        /// While ejected: when that ends, or when the trial is overdue. Otherwise: when the host was re-admitted, 0 if it never was ejected.
        pub(in crate::core) until: u64,
        /// Until when the host asked us to wait, or rests: see [`RESTS`].
        pub(in crate::core) busy_until: u64,
        /// How often it was ejected, this time included, in this entry's life: a trial belongs to one of them.
        pub ejections: u32,
        /// How many of these were told.
        pub(in crate::core) told_ejections: u32,
        /// The exponent of the next ejection's length.
        pub(in crate::core) severity: u16,
        /// Slow windows in a row.
        pub(in crate::core) slow_windows: u16,
        pub(in crate::core) failure_rate: f32,
        pub(in crate::core) rated: u64,
        /// [`Header::placed`] then.
        pub(in crate::core) rated_at: u32,
        /// When the host joined, as long as it is a newcomer; 0 if it is none: see [`crate::core::newcomer`].
        pub(in crate::core) joined: u64,
        /// [`Header::placed`] then.
        pub(in crate::core) joined_at: u32,
        /// The lower half of `requests` then.
        pub(in crate::core) joined_with: u32,
    }
}

packed! {
    /// The beginning of a [`Host`]: what a choice looks at.
    pub struct Front {
        ip: u128,
        port: u16,
        flags: u16,
        generation: u32,
        in_flight: u32,
        pending: u32,
    }
}

impl Front {
    /// Of a host's entry.
    #[inline]
    pub fn of(base: &[u8; Host::BASE]) -> Self {
        base.first_chunk().map(Self::read).unwrap_or_default()
    }

    /// Where the host listens.
    pub fn address(&self) -> Address {
        Address::from_bits(self.ip, self.port)
    }

    /// See [`Host::is_retired`].
    pub fn is_retired(&self) -> bool {
        self.flags & RETIRED != 0
    }

    /// Whether the host has a past.
    pub(super) fn has_past(&self) -> bool {
        self.flags & PAST != 0
    }

    /// See [`Host::generation`].
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// See [`Host::load`].
    #[inline]
    pub fn load(&self) -> u32 {
        self.in_flight.saturating_add(self.pending)
    }
}

/// The configuration says: no new jobs.
pub(super) const DRAIN: u16 = 1;
/// No live configuration names the host any more.
pub(super) const RETIRED: u16 = 1 << 1;
/// Ejected, until a successful trial.
pub(in crate::core) const EJECTED: u16 = 1 << 2;
/// A trial runs.
pub(in crate::core) const TRIAL: u16 = 1 << 3;
/// Ejected for its latency, not for failures.
pub(in crate::core) const SLOW: u16 = 1 << 4;
/// Our own probes say that the host is not well.
pub(in crate::core) const FAILS_PROBES: u16 = 1 << 5;
/// Envoy says that the host is not well.
pub(in crate::core) const FAILS_ENVOY: u16 = 1 << 6;

/// The configuration, or Envoy, says: only where no other host has a free slot.
pub(super) const RESERVE: u16 = 1 << 11;
/// Ejected, because Envoy does not know it.
pub(in crate::core) const STRANGER: u16 = 1 << 10;
/// What is [`Host::busy_until`] is a rest after a failure, which the host did not ask for.
pub(in crate::core) const RESTS: u16 = 1 << 12;
/// The host has a past: it stands behind the entries.
pub(super) const PAST: u16 = 1 << 9;
/// It was told that the host is ejected.
pub(in crate::core) const TOLD_EJECTED: u16 = 1 << 7;
/// It was told that the host is not well.
pub(in crate::core) const TOLD_UNHEALTHY: u16 = 1 << 8;

impl Host {
    /// The length of the part that every host has in the record. The rest, its past, stands behind all entries, and only for hosts that have one:
    /// most have none, and the record is copied twice for each job.
    pub const BASE: usize = 76;

    /// The length of a host's past.
    pub const PAST: usize = Self::BYTES - Self::BASE;

    /// A host of which nothing is known.
    pub(super) fn new(address: Address, generation: u32) -> Self {
        Self { ip: address.ip(), port: address.port(), generation, ..Self::default() }
    }

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
        self.has_flag(RETIRED)
    }

    /// Whether the host takes no new jobs: told to drain, or retired.
    pub fn is_draining(&self) -> bool {
        self.has_flag(DRAIN | RETIRED)
    }

    /// Whether the host is only to be chosen where no other has a free slot.
    pub fn is_reserve(&self) -> bool {
        self.has_flag(RESERVE)
    }

    pub(in crate::core) fn has_flag(&self, flags: u16) -> bool {
        self.flags & flags != 0
    }

    pub(in crate::core) fn set_flag(&mut self, flag: u16, on: bool) {
        self.flags = if on { self.flags | flag } else { self.flags & !flag };
    }
}

impl Header {
    /// Some host may or may not be chosen any more.
    pub fn stands_anew(&mut self) {
        self.standing = self.standing.wrapping_add(1);
    }

    /// Some host's score has another latency or penalty.
    pub fn learns(&mut self) {
        self.learned = self.learned.wrapping_add(1);
    }

    /// Writes the score's parameters.
    pub fn describe(&mut self, score: &Score, time_constant: Duration) {
        self.in_flight_weight = score.in_flight_weight;
        self.latency_weight = score.latency_weight;
        self.target_latency_ms = millis(score.target_latency);
        self.time_constant_ms = millis(time_constant);
    }

    /// Writes how hosts are chosen.
    pub fn describe_policy(&mut self, policy: &Policy, runs_at_once: Option<u32>, patience: Duration) {
        let place = Policy::WORDS.iter().position(|word| *word == policy.word());
        (self.policy, self.runs_at_once) = (place.unwrap_or(0) as u32, runs_at_once.unwrap_or(0));
        self.patience_ms = millis(patience);
        if let Policy::Weighted(Weights { memory, compute, latency }) = *policy {
            (self.memory_weight, self.compute_weight, self.latency_share) = (memory, compute, latency);
        }
    }

    /// The weights of `weighted`, where that is the policy.
    pub fn weights(&self) -> Weights {
        Weights { memory: self.memory_weight, compute: self.compute_weight, latency: self.latency_share }
    }

    /// How many jobs a host with so many slots is believed to run at once.
    pub fn runs_at_once(&self, max_in_flight: u32) -> u32 {
        if self.runs_at_once == 0 { max_in_flight } else { self.runs_at_once.min(max_in_flight) }
    }

    /// For how long what hosts tell of themselves is believed.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms.into())
    }

    /// The word of the policy.
    pub fn policy(&self) -> &'static str {
        Policy::WORDS.get(self.policy as usize).copied().unwrap_or(Policy::LeastScore.word())
    }

    /// Writes how hosts come to the pool.
    pub fn describe_joining(&mut self, slow_start: Duration, discovers: bool) {
        (self.slow_start_ms, self.discovers) = (millis(slow_start), discovers.into());
    }

    /// How many jobs of a priority wait.
    pub(in crate::core) fn waiting_at(&mut self, priority: Priority) -> &mut u32 {
        match priority {
            Priority::High => &mut self.waiting_high,
            Priority::Normal => &mut self.waiting_normal,
            Priority::Low => &mut self.waiting_low,
        }
    }

    /// One job of this priority waits no more. Whatever the counts were, their sum falls by one.
    pub(super) fn waits_no_more(&mut self, priority: Priority) {
        let counted = [priority].into_iter().chain(Priority::ALL).find(|priority| *self.waiting_at(*priority) > 0);
        if let Some(counted) = counted {
            *self.waiting_at(counted) -= 1;
        }
    }

    /// Writes what is said of the queue.
    pub fn describe_queue(&mut self, max_length: u32, ageing: Duration) {
        self.max_length = max_length;
        // Whoever still waits where there is no queue any more does so by what held before.
        if max_length > 0 {
            self.ageing_ms = millis(ageing);
        }
    }

    /// How long the oldest job of a priority waits until that gets its part of the slots.
    pub fn ageing(&self) -> Duration {
        Duration::from_millis(self.ageing_ms.max(1).into())
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

    /// Whether it is yet to be known which hosts there are.
    pub fn awaits_hosts(&self) -> bool {
        self.discovers != 0 && self.members == 0 && self.hosts == 0
    }

    /// How long a newcomer's weight takes to be whole.
    pub fn slow_start(&self) -> Duration {
        Duration::from_millis(self.slow_start_ms.into())
    }
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}
