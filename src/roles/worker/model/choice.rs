//! What a request may meet, by the record that its choice left behind.

use std::collections::BTreeSet;
use std::time::Duration;

use super::POOL;
use super::vm::{Met, Vm};
use super::wanted::Slots;
use super::world::World;
use crate::core::address::Address;
use crate::core::health::State;
use crate::core::record::{Host, Record};
use crate::core::stranger::wants_early_trial;
use crate::core::time::Instant;

/// The hosts of a configuration as the record has them.
pub struct Stand<'a> {
    record: &'a Record,
    slots: &'a Slots,
    now: Instant,
}

impl<'a> Stand<'a> {
    pub fn new(record: &'a Record, slots: &'a Slots, now: Instant) -> Self {
        Self { record, slots, now }
    }

    fn those(&self, is_it: impl Fn(&Host) -> bool) -> BTreeSet<&'static str> {
        let entry = |address: &str| {
            let seat = self.record.seat_at(Address::parse(address.as_bytes()).unwrap())?;
            self.record.host(seat.slot).filter(|host| !host.is_retired())
        };
        let takes_jobs = self.slots.iter().filter(|(_, slots)| **slots > 0).map(|(address, _)| *address);
        takes_jobs.filter(|address| entry(address).is_some_and(|host| is_it(&host))).collect()
    }

    fn serving(&self) -> BTreeSet<&'static str> {
        self.those(|host| host.health(self.now) == State::Serving)
    }

    /// Those that would still take a trial: one that has just begun is not among them.
    fn on_trial(&self) -> BTreeSet<&'static str> {
        self.those(|host| host.wants_trial(self.now))
    }

    /// Those that may be tried before their time, rather than refuse a job.
    fn strangers(&self) -> BTreeSet<&'static str> {
        self.those(|host| wants_early_trial(host, self.now))
    }

    fn probing(&self) -> BTreeSet<&'static str> {
        self.those(|host| host.health(self.now) == State::Probing)
    }

    /// All jobs on the machine, also those from before its host was removed and came back.
    fn load(&self, address: &str) -> u32 {
        let address = Address::parse(address.as_bytes()).unwrap();
        self.record.hosts().filter(|host| host.address() == address).map(|host| host.load()).sum()
    }

    /// Whatever the host tells: that fills no slot.
    fn room(&self, address: &str) -> usize {
        self.slots[address].saturating_sub(self.load(address)) as usize
    }

    fn has_slot(&self, address: &str) -> bool {
        self.room(address) > 0
    }

    /// How many jobs the hosts take now.
    pub fn free(&self) -> usize {
        let trials = self.on_trial().into_iter().filter(|address| self.has_slot(address)).count();
        let free = trials + self.serving().into_iter().map(|address| self.room(address)).sum::<usize>();
        if free > 0 { free } else { self.strangers().into_iter().any(|address| self.has_slot(address)).into() }
    }

    /// Whether a host takes jobs now or may within this time.
    fn is_one_due(&self, within: Duration) -> bool {
        let is_due = |host: &Host| host.next_change(self.now).is_some_and(|change| change.since(self.now) <= within);
        [self.serving(), self.probing(), self.strangers(), self.those(is_due)].iter().any(|hosts| !hosts.is_empty())
    }
}

impl Vm {
    /// Whether any of its jobs waits, and is not held.
    pub fn waits_for_nobody(&self, may_be_held: bool) -> bool {
        let (worker, now) = (self.worker.borrow(), self.now());
        let may_be_held = may_be_held && self.live().first().is_some_and(|running| running.wanted.holds());
        let is_held = |until: Option<Instant>| until.map_or(may_be_held, |until| until > now);
        worker.books.get(POOL).is_some_and(|books| books.paused.values().any(|paused| !is_held(paused.held_until)))
    }
}

impl World {
    /// What a request met must fit the record that its choice left.
    pub fn check_choice(&self, met: &Met) {
        let Some(record) = met.record.as_ref().filter(|_| met.clean) else {
            return;
        };
        let Some(slots) = &met.slots else {
            assert_eq!(
                (&met.verdict, &met.named, met.waits),
                (&None, &None, false),
                "it is not known which hosts there are, and Envoy was not let choose"
            );
            return;
        };
        let (stand, holds) = (Stand::new(record, slots, met.now), met.running.wanted.holds());
        let (serving, on_trial, strangers) = (stand.serving(), stand.on_trial(), stand.strangers());
        let has_slot = |address: &&str| stand.has_slot(address);
        let (is_job, queue, waiting) = (met.is_job, &met.running.wanted.queue, record.waiting().len());
        match (met.verdict.as_deref(), &met.named) {
            _ if met.waits => {
                let queue = queue.expect("a job waits in a pool that has no queue");
                assert!(is_job, "a request that needs no slot waits for one");
                assert!(stand.is_one_due(queue.timeout()), "it waits though no host is due");
                assert!(waiting <= queue.max_length, "{waiting} wait, which is more than may");
                assert!(holds || stand.free() < waiting, "it waits although there are more free slots than others that wait");
            }
            (Some("queue_full"), _) => {
                let queue = queue.expect("a queue is full in a pool that has none");
                assert!(is_job, "a request that needs no slot was refused for want of one");
                assert!(stand.is_one_due(queue.timeout()), "there was no host at all");
                assert!(waiting >= queue.max_length, "only {waiting} wait");
                assert!(stand.free() <= waiting, "refused although there is a free slot");
            }
            (Some("full"), _) => {
                assert!(queue.is_none(), "it could have waited");
                assert!(is_job, "a request that needs no slot was refused for want of one");
                assert!(!serving.is_empty(), "there was no host at all");
                let all = serving.iter().chain(&on_trial).chain(&strangers);
                assert!(!all.clone().any(has_slot), "refused although there is a free slot");
            }
            (None, Some(named)) => {
                let (first, alternates) = (named[0].as_str(), met.running.wanted.alternates);
                let is_trial = !serving.contains(first);
                let probing = stand.probing();
                if !is_job && serving.is_empty() {
                    // It is no trial, but a probing host is better than none.
                    assert!(named.iter().all(|address| probing.contains(address.as_str())), "not eligible: {named:?}");
                    return;
                }
                assert!(!is_trial || is_job && probing.contains(first), "not eligible: {first}");
                assert!(
                    is_trial || !is_job || !on_trial.iter().any(has_slot),
                    "a host waits for its trial, and {first} got the job"
                );
                assert!(
                    named[1..].iter().all(|address| serving.contains(address.as_str())),
                    "not eligible: {named:?} of {serving:?}"
                );
                let most = if is_trial { 1 + serving.len().min(alternates) } else { serving.len().min(1 + alternates) };
                assert_eq!(named.len(), most, "{named:?} of {serving:?}");
                assert!(!is_job || stand.load(first) <= slots[first], "{first} has more jobs than slots by our own choice");
                assert!(holds || met.before <= stand.free(), "{} were to be served before it, and wait", met.before);
            }
            (verdict, _) => {
                assert_eq!(verdict, Some("no_host").filter(|_| !met.running.wanted.fallback));
                assert!(serving.is_empty() && (!is_job || stand.free() == 0), "refused although there are hosts");
                let timeout = queue.filter(|_| is_job).map(|queue| queue.timeout());
                assert!(!timeout.is_some_and(|timeout| stand.is_one_due(timeout)), "refused although a host is due");
            }
        }
    }
}
