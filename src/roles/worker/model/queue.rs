//! The model's streams that wait, and the promises of the queue.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::POOL;
use super::choice::Stand;
use super::vm::{Job, Met, OVERRIDE, Vm, check_retries};
use super::wanted::{Running, Slots};
use super::world::{Grave, World};
use crate::core::address::Address;
use crate::core::membership::Membership;
use crate::core::queue::{Priority, Waiting};
use crate::core::record::{Record, Worker};
use crate::core::time::Instant;
use crate::roles::balancer::Stream;
use crate::roles::fake::{Fake, Streamed};
use crate::roles::worker::QUICK_TICK;

/// What the order knows of a job.
#[derive(Clone)]
pub struct Came {
    pub id: u32,
    pub at: Instant,
    /// `None`: Envoy did not tell the filter what the request says.
    pub rank: Option<(Priority, Option<&'static str>)>,
    pub running: Rc<Running>,
}

/// A stream that waits, and what the model knows of it.
pub struct Paused {
    pub stream: Stream<Fake>,
    pub came: Came,
    /// From when its time is counted, at the earliest and at the latest: when it came, if the clock has not stepped back since.
    pub since: (Instant, Instant),
}

/// How many jobs have left the queue, and by which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub served: u64,
    pub left: u64,
    pub timed_out: u64,
    pub full: u64,
}

/// Those that were served out of a record, or were entitled to.
struct Batch<'a> {
    record: &'a Record,
    served: &'a [Came],
    /// When, at the earliest and at the latest.
    times: [Instant; 2],
}

impl Batch<'_> {
    /// The longest that a job of this priority had waited.
    fn longest(&self, priority: Priority) -> Duration {
        let waiting = self.record.waiting().filter(|entry| entry.priority() == priority).map(|entry| entry.since());
        let served = self.served.iter().filter(|came| came.rank.is_none_or(|rank| rank.0 == priority)).map(|came| came.at);
        waiting.chain(served).map(|since| self.times[1].since(since)).max().unwrap_or_default()
    }

    /// Whether the one must be served before the other, both of one worker.
    fn is_before(&self, one: &Came, other: &Came) -> bool {
        let (Some(its), Some(others)) = (one.rank, other.rank) else {
            return false;
        };
        // A clock that stepped back changes who came first.
        let came_first = one.id < other.id && one.at <= other.at;
        let has_aged = || self.longest(others.0) >= self.record.header.ageing();
        its == others && came_first || its.0 < others.0 && !has_aged()
    }

    fn count(&self, is_it: impl Fn((Priority, Option<&'static str>)) -> bool) -> usize {
        self.served.iter().filter(|came| came.rank.is_some_and(&is_it)).count()
    }
}

impl Vm {
    /// A stream waits from now on, or from a moment ago, if the record says so: time may have passed in its callback.
    pub fn pauses(&mut self, stream: Stream<Fake>, mut came: Came, record: Option<&Record>) {
        let entry = |record: &Record| record.waiting().find(|entry| (entry.worker, entry.stream) == (self.id, came.id));
        let since = record.and_then(entry).map_or(came.at, |entry| entry.since());
        assert!((came.at..=self.now()).contains(&since) || came.at > self.now(), "it did not come at {since:?}");
        came.at = since;
        let since = (since, since);
        self.paused.insert(came.id, Paused { stream, came, since });
    }

    /// How many that wait must be served before this one.
    pub fn count_before(&self, came: &Came, record: &Record) -> usize {
        let batch = Batch { record, served: std::slice::from_ref(came), times: [came.at; 2] };
        self.paused.values().filter(|paused| batch.is_before(&paused.came, came)).count()
    }

    /// A stream that waits ends, or another filter answers it, and it ends later.
    pub fn leave(&mut self, number: usize, is_answered: bool) {
        let Some(id) = self.paused.keys().nth(number % self.paused.len().max(1)).copied() else {
            return;
        };
        let Some(mut paused) = self.paused.remove(&id) else {
            return;
        };
        self.host.make_current(id);
        self.tally.left += 1;
        if is_answered {
            self.host.stream(id, |stream| stream.replied = Some((500, BTreeMap::new())));
            paused.stream.response();
            self.jobs.insert(id, Job { answered: true, ..Job::new(paused.stream, Vec::new(), false) });
        } else {
            paused.stream.done();
            self.host.forget(id);
        }
    }

    /// The root that asked for it is told that the bell was rung. `None`: it was not.
    pub fn hear(&mut self) -> Option<Vec<Met>> {
        let root = self.host.takes_news()?;
        let Some(running) = self.roots().find(|running| running.root == root).cloned() else {
            return Some(Vec::new());
        };
        let met = self.call_root(&running, |running, vm| running.plan.rung(&mut vm.worker.borrow_mut()));
        // Since it was emptied it may have been rung by this worker, and by one that stored something in between.
        assert!(self.host.bell_holds() <= 2, "a bell fills up");
        Some(met)
    }

    /// Whether there is a root that is told: between the end of the one that was and the next tick nobody is.
    fn is_told(&self) -> bool {
        self.worker.borrow().bell.root.is_some()
    }

    /// A callback of a root, in which streams may be resumed or answered. Gives what those met that were resumed.
    pub fn call_root(&mut self, running: &Rc<Running>, callback: impl FnOnce(&Running, &Self)) -> Vec<Met> {
        let (refused, members) = (self.host.refused(), self.worker.borrow().members(POOL).cloned());
        let began = self.now();
        self.host.make_current(running.root);
        callback(running, self);
        let times = [began, self.now()];
        self.paused.values_mut().for_each(|Paused { since: (earliest, latest), .. }| {
            *earliest = times.into_iter().fold(*earliest, Instant::min);
            *latest = began.min(*latest);
        });
        let is_clean = self.host.refused() == refused;
        let placed_by = self.places_by(members.as_deref());
        let (mut resumed, mut met) = (Vec::new(), Vec::new());
        for id in self.paused.keys().copied().collect::<Vec<_>>() {
            let seen = self.host.stream(id, |stream| stream.clone());
            if self.worker.borrow().books.get(POOL).is_some_and(|books| books.paused.contains_key(&id)) {
                assert!(seen.resumed == 0 && seen.replied.is_none(), "stream {id} goes on, and still waits");
                continue;
            }
            let Some(paused) = self.paused.remove(&id) else { continue };
            match (seen.resumed, &seen.replied) {
                (0, Some(_)) => self.timed_out(paused, &seen, times),
                (0, None) => {
                    // Envoy refused to let it go on: it stays where it is until its client leaves.
                    assert!(!is_clean, "stream {id} was forgotten");
                    let has_lease = self.lease_of(id).is_some();
                    self.jobs.insert(id, Job { answered: true, ..Job::new(paused.stream, Vec::new(), has_lease) });
                }
                _ => {
                    self.tally.served += 1;
                    resumed.push(paused.came.clone());
                    let placed_by = placed_by.clone().expect("a job is resumed, and none waited");
                    met.push(self.resumed(paused, &seen, placed_by, is_clean));
                }
            }
        }
        let is_overdue = |paused: &Paused| times.into_iter().all(|now| paused.is_overdue(paused.since.1, now));
        assert!(!is_clean || !self.paused.values().any(is_overdue), "a job waits that has waited too long");
        // Where much happened in between, and the clock may have stepped, it is not known at which time a host was chosen.
        let is_brief = began <= times[1] && times[1].since(began) < QUICK_TICK;
        for Met { record, clean, now, .. } in met.iter_mut() {
            (*clean, *now) = (*clean && is_brief, began);
            let record = record.as_ref().unwrap();
            if is_brief {
                self.check_order(&Batch { record, served: &resumed, times });
            }
        }
        met
    }

    /// A stream that waited was answered; Envoy sends that through our own callbacks.
    fn timed_out(&mut self, mut paused: Paused, seen: &Streamed, times: [Instant; 2]) {
        let (status, headers) = seen.replied.as_ref().unwrap();
        assert_eq!((*status, headers["x-plimsoll-verdict"].as_str()), (503, "queue_timeout"));
        assert!((1..=60).contains(&headers["retry-after"].parse::<u64>().unwrap()), "{headers:?}");
        let is_due = times.into_iter().any(|now| paused.is_overdue(paused.since.0, now));
        assert!(is_due, "answered before its time");
        assert!(self.lease_of(paused.came.id).is_none(), "a reply of our own took a lease");
        self.tally.timed_out += 1;
        self.host.make_current(paused.came.id);
        paused.stream.response();
        paused.stream.done();
        self.host.forget(paused.came.id);
    }

    /// The live configurations that have the pool, by their roots, the newest first.
    pub fn live(&self) -> Vec<Rc<Running>> {
        let worker = self.worker.borrow();
        let pools = worker.roots.pools().into_iter().filter(|(name, _)| **name == *POOL);
        let is_its = |running: &Running, pool| running.pool.as_ref().is_some_and(|own| Rc::ptr_eq(own, pool));
        pools.filter_map(|(_, pool)| self.roots().find(|running| is_its(running, pool)).cloned()).collect()
    }

    /// By what its jobs that wait are placed, and on which hosts: by the newest configuration that is live; where none has the
    /// pool any more, by that of the first of them.
    fn places_by(&self, members: Option<&Membership>) -> Option<(Rc<Running>, Option<Slots>)> {
        let first = || self.paused.values().next().map(|paused| paused.came.running.clone());
        let newest = self.live().first().cloned().or_else(first)?;
        let slots = newest.wanted.slots(members);
        Some((newest, slots))
    }

    /// A stream that waited goes on.
    fn resumed(&mut self, paused: Paused, seen: &Streamed, (running, slots): (Rc<Running>, Option<Slots>), clean: bool) -> Met {
        let Paused { stream, came: Came { id, .. }, .. } = paused;
        let named = seen.header(OVERRIDE).filter(|_| clean);
        let named: Option<Vec<String>> = named.map(|list| list.split(',').map(str::to_owned).collect());
        check_retries(seen, named.as_ref());
        let lease = self.lease_of(id).expect("a job is resumed without a lease");
        if clean {
            let first = named.as_ref().and_then(|named| Address::parse(named[0].as_bytes()));
            assert!(first.is_some() && lease.0 == first, "leased is not what was named");
            assert!(lease.1.is_some(), "a lease without a seat");
        }
        self.jobs.insert(id, Job::new(stream, named.clone().unwrap_or_default(), true));
        let (now, record) = (self.now(), Record::parse(seen.stored_before.clone()).ok());
        Met { running, named, verdict: None, waits: false, is_job: true, before: 0, slots, clean, now, record }
    }

    /// Refusals that the record does not count yet.
    pub fn unstored(&self) -> u64 {
        self.worker.borrow().books.get(POOL).map_or(0, |books| books.book.turned_away)
    }

    fn check_order(&self, batch: &Batch) {
        // A job that is held lets others pass.
        if self.live().iter().any(|running| running.wanted.holds()) {
            return;
        }
        for (came, waits) in batch.served.iter().flat_map(|came| self.paused.values().map(move |waits| (came, &waits.came))) {
            assert!(!batch.is_before(waits, came), "stream {} waits, and {} was served before it", waits.id, came.id);
        }
        // What follows is as simple only where no other worker has a part in it, nor a job of which we do not know what it said.
        let is_alone = batch.record.waiting().all(|entry| entry.worker == self.id);
        let are_known =
            || batch.served.iter().chain(self.paused.values().map(|waits| &waits.came)).all(|came| came.rank.is_some());
        if !is_alone || !are_known() {
            return;
        }
        for (priority, tenant) in self.paused.values().filter_map(|waits| waits.came.rank) {
            for (_, other) in batch.served.iter().filter_map(|came| came.rank).filter(|rank| rank.0 == priority) {
                let (own, others) =
                    (batch.count(|rank| rank == (priority, tenant)), batch.count(|rank| rank == (priority, other)));
                assert!(others <= own + 2, "{other:?} had {others} turns while {tenant:?} waited and had {own}");
            }
            let (higher, lower) = (batch.count(|rank| rank.0 <= priority), batch.count(|rank| rank.0 > priority));
            assert!(
                lower <= higher + 2,
                "{lower} of lower priority were served while one of {priority:?} waited, and {higher} others"
            );
        }
    }

    /// The streams that wait are those of which the worker knows, they are neither resumed nor answered, and somebody ticks for
    /// them.
    pub fn check_paused(&self) {
        let worker = self.worker.borrow();
        let known: BTreeSet<u32> = worker.books.get(POOL).into_iter().flat_map(|books| books.paused.keys().copied()).collect();
        assert_eq!(known, self.paused.keys().copied().collect(), "streams that wait, by the worker and by what was seen of them");
        for paused in self.paused.values() {
            let is_held = self.host.stream(paused.came.id, |stream| stream.resumed == 0 && stream.replied.is_none());
            assert!(is_held, "a stream goes on in a callback that is none of its root's");
            assert!(self.lease_of(paused.came.id).is_none(), "a job that waits has a lease");
        }
        let is_quick = || self.roots().any(|running| self.host.pace_of(running.root) == Some(QUICK_TICK));
        assert!(self.paused.is_empty() || is_quick(), "jobs wait, and no root ticks quickly");
    }

    /// The record's entries of this worker must be those of its jobs that wait.
    fn check_entries(&self, record: &Record) {
        let entries: Vec<Waiting> = record.waiting().filter(|entry| entry.worker == self.id).collect();
        let streams: BTreeSet<u32> = entries.iter().map(|entry| entry.stream).collect();
        assert_eq!(streams.len(), entries.len(), "a job waits twice");
        assert_eq!(streams, self.paused.keys().copied().collect(), "jobs that wait, by the record and by what is seen");
        for (entry, came) in entries.iter().filter_map(|entry| Some((entry, &self.paused.get(&entry.stream)?.came))) {
            let rank = came.rank.map(|(priority, tenant)| (priority, tenant.is_some()));
            assert!(rank.is_none_or(|rank| rank == (entry.priority(), entry.tenant != 0)), "{entry:?}: {:?}", came.rank);
            assert_eq!(entry.since(), came.at);
        }
    }
}

impl Paused {
    fn is_overdue(&self, since: Instant, now: Instant) -> bool {
        let timeout = self.came.running.wanted.queue.map(|queue| queue.timeout());
        timeout.is_some_and(|timeout| now.since(since) >= timeout)
    }
}

impl Grave {
    fn check_entries(&self, record: &Record) {
        let entries: BTreeSet<u32> = record.waiting().filter(|entry| entry.worker == self.id).map(|entry| entry.stream).collect();
        assert_eq!(entries, self.paused, "jobs that waited in a worker that died");
    }
}

impl World {
    /// Who waits, by the record, and how many have.
    pub fn check_queue(&self, record: &Record) {
        assert!(record.waiting().is_sorted_by_key(|entry| entry.since()), "they are not in the order in which they came");
        assert!(record.has_waiting() || record.turns().is_empty(), "tenants are ahead of nobody");
        let has_row = |id: u64| record.worker_row(id, 0).is_some();
        assert!(record.waiting().all(|entry| has_row(entry.worker)), "a job waits in no worker");
        for vm in &self.vms {
            let vm = vm.borrow();
            vm.check_paused();
            if has_row(vm.id) && !vm.is_disturbed() {
                vm.check_entries(record);
            }
        }
        let graves = self.graves.borrow();
        graves.iter().filter(|grave| has_row(grave.id) && !grave.is_disturbed).for_each(|grave| grave.check_entries(record));
        let header = record.header;
        if header.incarnation != self.first.get() || !self.is_undisturbed() {
            return;
        }
        let tallies = self.vms.iter().map(|vm| vm.borrow().tally).chain(graves.iter().map(|grave| grave.tally));
        let all = tallies.fold(Tally::default(), |sum, tally| Tally {
            served: sum.served + tally.served,
            left: sum.left + tally.left,
            timed_out: sum.timed_out + tally.timed_out,
            full: sum.full + tally.full,
        });
        // Where a worker joins anew, jobs of its that leave just then had left already.
        let left = if header.epoch == 0 { header.left } else { all.left };
        // These are stored with whatever is stored next.
        let yet = self.vms.iter().map(|vm| vm.borrow().unstored()).chain(graves.iter().map(|grave| grave.unstored));
        let full = header.queue_full + yet.sum::<u64>();
        assert_eq!(Tally { served: header.dequeued, left, timed_out: header.queue_timeout, full }, all);
    }

    /// Nobody to whom it was told that its bell was rung is still taken for called.
    pub fn check_heard(&self) {
        let Some(record) = self.record().filter(|_| self.is_undisturbed()) else {
            return;
        };
        for vm in self.vms.iter().map(|vm| vm.borrow()).filter(|vm| vm.is_told()) {
            let entry = record.worker_row(vm.id, 0).and_then(|row| record.worker(row));
            assert!(entry.is_none_or(|entry| entry.bell == 0 || entry.called == 0), "a worker was woken, and has not answered");
        }
    }

    /// No hostcall was ever refused.
    fn is_undisturbed(&self) -> bool {
        let graves = self.graves.borrow();
        self.vms.iter().all(|vm| vm.borrow().host.refused() == 0) && graves.iter().all(|grave| grave.refused == 0)
    }

    /// Whether nothing stands in the way of a job that has a slot: each worker is alive, can be woken, and has been heard of
    /// since it was.
    pub fn is_calm(&self) -> bool {
        let Some(record) = self.record() else {
            return false;
        };
        let vm_of = |id| self.vms.iter().map(|vm| vm.borrow()).find(|vm| vm.id == id);
        let is_awake = |worker: Worker| worker.bell != 0 && worker.called == 0 && vm_of(worker.id).is_some_and(|vm| vm.is_told());
        let is_there = |vm: &Vm| !vm.is_disturbed() && (vm.paused.is_empty() || record.worker_row(vm.id, 0).is_some());
        record.workers().all(is_awake) && self.vms.iter().all(|vm| is_there(&vm.borrow()))
    }

    /// Whether a slot is free that a job that waits in one of these VMs could have. `None`: where not all VMs have the same
    /// hosts nobody can say, nor where one is in the middle of something.
    ///
    /// Nobody waits who is held for a host that is sooner done; who has just come may be, and that is not known before a tick.
    pub fn idles(&self, vms: &[usize], may_be_held: bool) -> Option<bool> {
        let all: Vec<_> = self.vms.iter().map(|vm| vm.try_borrow().ok()).collect::<Option<_>>()?;
        let record = self.record()?;
        let hosts = |vm: &Vm| vm.places_by(vm.worker.borrow().members(POOL).map(|members| &**members));
        let mut hosts: Vec<Option<Slots>> = all.iter().filter_map(|vm| Some(hosts(vm)?.1)).collect();
        hosts.dedup();
        let waits = vms.iter().any(|vm| all[*vm].waits_for_nobody(may_be_held));
        match hosts.as_slice() {
            [] => Some(false),
            [Some(slots)] => Some(waits && Stand::new(&record, slots, all[0].now()).free() > 0),
            _ => None,
        }
    }
}
