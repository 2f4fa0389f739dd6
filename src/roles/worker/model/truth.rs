//! What must be true after each event.

use std::collections::{BTreeMap, BTreeSet};

use super::ADDRESSES;
use super::wanted::Wanted;
use super::world::World;
use crate::core::address::Address;
use crate::core::book::{TICKS_TO_DEATH, TICKS_TO_DEATH_OF_A_LAGGARD};
use crate::core::health::Reason;
use crate::core::record::{Record, Seat};
use crate::core::score;

/// What was last seen of a worker's beat.
pub struct Beat {
    incarnation: u64,
    epoch: u32,
    /// Whether it has served.
    served: bool,
    beat: u32,
    /// How often each VM had ticked when the beat was first seen.
    ticks: Vec<u64>,
}

impl World {
    /// Compares the record with what the workers hold.
    ///
    /// A worker with a row in the record is counted exactly, dead or alive. One without a row, which was declared dead, is
    /// counted exactly or not at all, and once the sweep is through, not at all. One that has not spoken since the record was
    /// lost is not counted.
    pub fn check(&self) {
        let Some(record) = self.record() else {
            return;
        };
        let (certain, possible) = self.held(&record);
        let header = record.header;
        let is_swept = header.swept == header.epoch;
        assert_eq!(header.drift, 0, "a lease was given back that was not taken");
        assert!(header.swept <= header.epoch);
        for host in record.hosts() {
            let (certain, possible) =
                (certain.get(&host.generation).copied().unwrap_or(0), possible.get(&host.generation).copied().unwrap_or(0));
            let load = host.load();
            assert!(load >= certain, "{} of {}: {load} counted, {certain} held", host.generation, host.address());
            assert!(load <= certain + possible, "{} of {}: {load} counted, {certain} held", host.generation, host.address());
            assert!(!is_swept || load == certain, "{load} counted after the sweep, {certain} held");
            assert!(!is_swept || host.pending == 0, "pending after the sweep");
        }
        self.check_work(&record);
        assert!(score::scores(&record, self.vms[0].borrow().now()).into_iter().all(f64::is_finite));
        check_entries(&record, self.reloaded.get());
        self.check_queue(&record);
        self.check_deaths(&record);
        let all_caught_up = record.workers().all(|worker| {
            let is_it = |vm: &&std::cell::RefCell<super::vm::Vm>| vm.borrow().id == worker.id;
            self.vms.iter().find(is_it).is_some_and(|vm| vm.borrow().caught_up == Some((header.incarnation, header.epoch)))
        });
        assert!(!all_caught_up || is_swept, "all live workers ticked, and what the dead held is still there");
        let ejected = record.hosts().filter(|host| host.is_ejected() && host.reason() != Some(Reason::Unknown)).count();
        assert!(self.reloaded.get() || ejected <= record.hosts().len() / 2, "{ejected} hosts are ejected at once");
        let failures: u64 = record.hosts().map(|host| host.failures).sum();
        assert!(failures <= self.guilty.get(), "{failures} failures blamed, {} seen", self.guilty.get());
    }

    /// The work of each host is that of its jobs, to the microsecond, once what the dead had held has been given back.
    fn check_work(&self, record: &Record) {
        let rows: BTreeSet<u64> = record.workers().map(|worker| worker.id).collect();
        for slot in 0..record.header.hosts {
            let (insight, load) = (record.insight(slot), record.host(slot).unwrap().load());
            assert!(insight.weighed <= load, "{insight:?}: {load} jobs");
            assert!(insight.weighed > 0 || insight.work == 0, "{insight:?}: work of no job");
        }
        if record.header.swept != record.header.epoch || !record.has_insights() {
            return;
        }
        let mut held: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
        let mut count = |id: u64, seats: &[(Address, Seat, Option<u64>)]| {
            let works = seats.iter().filter_map(|(_, seat, work)| Some((seat.generation, (*work)?)));
            for (generation, work) in works.filter(|_| rows.contains(&id)) {
                let (weighed, sum) = held.entry(generation).or_default();
                (*weighed, *sum) = (*weighed + 1, *sum + work);
            }
        };
        self.vms.iter().map(|vm| vm.borrow_mut()).for_each(|mut vm| count(vm.id, &vm.seats()));
        self.graves.borrow().iter().for_each(|grave| count(grave.id, &grave.seats));
        for (host, slot) in record.hosts().zip(0..) {
            let insight = record.insight(slot);
            let held = held.get(&host.generation).copied().unwrap_or_default();
            assert_eq!((insight.weighed, insight.work), held, "work of {}", host.address());
        }
    }

    /// Leases by generation: of workers that the record knows, and of those that it declared dead. Every lease of a worker that
    /// it knows sits in an entry of its own host.
    fn held(&self, record: &Record) -> (BTreeMap<u32, u32>, BTreeMap<u32, u32>) {
        let joined = self.joined.borrow();
        let (mut certain, mut possible) = (BTreeMap::new(), BTreeMap::new());
        let mut count = |id: u64, seats: &[(Address, Seat, Option<u64>)]| {
            let is_known = record.worker_row(id, 0).is_some();
            for (address, seat, _) in seats {
                if is_known {
                    *certain.entry(seat.generation).or_insert(0) += 1;
                    let entry = record.slot_of(*seat).and_then(|slot| record.host(slot));
                    assert_eq!(entry.map(|host| host.address()), Some(*address), "a lease without its host");
                } else if joined.get(&id) == Some(&record.header.incarnation) {
                    *possible.entry(seat.generation).or_insert(0) += 1;
                }
            }
        };
        for vm in &self.vms {
            let mut vm = vm.borrow_mut();
            count(vm.id, &vm.seats());
        }
        for grave in self.graves.borrow().iter() {
            count(grave.id, &grave.seats);
        }
        (certain, possible)
    }

    /// Nobody is declared dead who was not silent for as long as it takes.
    fn check_deaths(&self, record: &Record) {
        let now = self.ticks();
        let incarnation = record.header.incarnation;
        let rows: BTreeSet<u64> = record.workers().map(|worker| worker.id).collect();
        let mut beats = self.beats.borrow_mut();
        assert_eq!(rows.len(), record.workers().count(), "a worker has two rows");
        for vm in &self.vms {
            let vm = vm.borrow();
            let Some(beat) = beats.get(&vm.id).filter(|beat| beat.incarnation == incarnation && vm.has_book()) else {
                continue;
            };
            let most = now.iter().zip(&beat.ticks).map(|(now, then)| now - then).max().unwrap_or(0);
            // The death itself is one epoch, but of one that never served; one more had begun before it, and the worker had not joined that.
            let lagged = record.header.epoch > beat.epoch + u32::from(beat.served);
            let patience = if lagged { TICKS_TO_DEATH_OF_A_LAGGARD } else { TICKS_TO_DEATH };
            assert!(rows.contains(&vm.id) || most >= u64::from(patience), "declared dead after {most} ticks of silence");
        }
        beats.retain(|id, _| rows.contains(id));
        drop(beats);
        self.watch(record);
    }

    /// Notes who is there, and whose beat has changed.
    pub fn watch(&self, record: &Record) {
        let incarnation = record.header.incarnation;
        let mut beats = self.beats.borrow_mut();
        for worker in record.workers() {
            self.joined.borrow_mut().insert(worker.id, incarnation);
            if beats.get(&worker.id).is_none_or(|seen| (seen.incarnation, seen.beat) != (incarnation, worker.beat)) {
                beats.insert(
                    worker.id,
                    Beat { incarnation, epoch: worker.epoch, beat: worker.beat, served: worker.served != 0, ticks: self.ticks() },
                );
            }
        }
    }

    fn ticks(&self) -> Vec<u64> {
        self.ticks.iter().map(|ticks| ticks.get()).collect()
    }

    /// The hosts of the pool, by this configuration.
    fn named_by(&self, wanted: &Wanted) -> Vec<String> {
        let cluster = self.cluster.borrow();
        let discovered =
            ADDRESSES.into_iter().zip(*cluster).filter(|(_, condition)| condition.is_some()).map(|(address, _)| address);
        let written = wanted.entries().map(|(address, _)| address);
        match (wanted.hosts.is_some(), wanted.discovers) {
            (true, true) => discovered.map(str::to_owned).collect(),
            _ => written.map(str::to_owned).collect(),
        }
    }

    /// Nothing is left of what was, but the hosts that the newest configurations of the VMs name.
    pub fn check_empty(&self) {
        let named: BTreeSet<String> = self.vms.iter().flat_map(|vm| self.named_by(&vm.borrow().running.wanted)).collect();
        let naming: BTreeSet<u64> =
            self.vms.iter().map(|vm| vm.borrow()).filter(|vm| vm.running.wanted.hosts.is_some()).map(|vm| vm.id).collect();
        for vm in &self.vms {
            assert_eq!(vm.borrow_mut().seats(), [], "a lease is left");
            assert!(vm.borrow().paused.is_empty(), "a stream still waits");
        }
        let Some(record) = self.record() else {
            assert!(naming.is_empty(), "the record is still lost");
            return;
        };
        let rows: BTreeSet<u64> = record.workers().map(|worker| worker.id).collect();
        let is_dead = |row: &u64| self.graves.borrow().iter().any(|grave| grave.id == *row);
        if naming.is_empty() && rows.iter().any(is_dead) {
            // The last worker of the pool died, and then the pool went: nobody reads the record any more.
            return;
        }
        let hosts: BTreeSet<String> = record.hosts().map(|host| host.address().to_string()).collect();
        assert_eq!(hosts, named, "hosts of the record and of the configurations");
        assert_eq!(record.hosts().len(), named.len(), "a host has two entries");
        assert!(record.hosts().all(|host| (host.in_flight, host.pending) == (0, 0) && !host.is_retired()), "not empty");
        assert!(
            (0..record.header.hosts).all(|slot| (record.insight(slot).work, record.insight(slot).weighed) == (0, 0)),
            "work of nobody"
        );
        assert_eq!(rows, naming, "workers of the record and live ones");
        assert_eq!(record.header.swept, record.header.epoch);
        assert_eq!((record.waiting().len(), record.turns().len()), (0, 0), "somebody waits by the record");
    }
}

/// A host has one entry; only one that was removed and added again may have old ones beside it.
fn check_entries(record: &Record, reloaded: bool) {
    let generations: BTreeSet<u32> = record.hosts().map(|host| host.generation).collect();
    assert_eq!(generations.len(), record.hosts().len(), "two entries have one generation");
    assert!(generations.iter().all(|generation| (1..=record.header.generation).contains(generation)));
    let live: Vec<Address> = record.hosts().filter(|host| !reloaded || !host.is_retired()).map(|host| host.address()).collect();
    assert_eq!(live.iter().collect::<BTreeSet<_>>().len(), live.len(), "a host is there twice");
}
