//! Carries the model's events out.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use super::truth::Beat;
use super::vm::{Met, Vm};
use super::{ADDRESSES, Cluster, Event, Loss, POOL, Said, Wanted};
use crate::core::address::Address;
use crate::core::health::State;
use crate::core::record::{Host, Record, Seat};
use crate::core::stranger::wants_early_trial;
use crate::roles::fake::Process;
use crate::roles::shared::key;
use crate::roles::worker::TICK;

/// A VM that died, and what it held.
pub struct Grave {
    pub id: u64,
    pub seats: Vec<(Address, Seat)>,
}

/// One Envoy.
pub struct World {
    me: Weak<World>,
    process: Arc<Process>,
    pub vms: Vec<RefCell<Vm>>,
    pub graves: RefCell<Vec<Grave>>,
    wanted: RefCell<Wanted>,
    pub cluster: RefCell<Cluster>,
    /// Whether there was ever another configuration than the first.
    pub reloaded: Cell<bool>,
    /// Ticks of each VM that counted.
    pub ticks: Vec<Cell<u64>>,
    /// The incarnation of the record in which each worker was last seen.
    pub joined: RefCell<BTreeMap<u64, u64>>,
    /// What was last seen of each worker's beat.
    pub beats: RefCell<BTreeMap<u64, Beat>>,
    /// Failed attempts and failed jobs so far.
    pub guilty: Cell<u64>,
}

impl World {
    pub fn new(vms: usize, seed: u64, wanted: Wanted) -> Rc<Self> {
        let process = Process::new(seed);
        Rc::new_cyclic(|me| Self {
            me: me.clone(),
            vms: (0..vms).map(|_| RefCell::new(Vm::new(&process, &wanted))).collect(),
            process,
            graves: RefCell::default(),
            wanted: RefCell::new(wanted),
            cluster: RefCell::new([Some(Said::Healthy); ADDRESSES.len()]),
            reloaded: Cell::new(false),
            ticks: vec![Cell::new(0); vms],
            joined: RefCell::default(),
            beats: RefCell::default(),
            guilty: Cell::new(0),
        })
    }

    /// The pool's record, if it is there and ours.
    pub fn record(&self) -> Option<Record> {
        Record::parse(self.process.value(&key(POOL))?).ok()
    }

    /// Does something with a VM, unless it is in the middle of something.
    fn with<T>(&self, vm: usize, act: impl FnOnce(&mut Vm) -> T) -> Option<T> {
        let vm = self.vms.get(vm % self.vms.len())?;
        let mut vm = vm.try_borrow_mut().ok()?;
        let result = act(&mut vm);
        if let Some(record) = self.record() {
            self.watch(&record);
        }
        Some(result)
    }

    pub fn act(&self, event: &Event) {
        self.process.pass(Duration::from_millis(1));
        match event {
            Event::Request { vm, job, old } => {
                if let Some(Some(met)) = self.with(*vm, |vm| vm.request(*job, *old)) {
                    self.check_choice(&met, *job);
                }
            }
            Event::Attempt { vm, stream, to } => {
                if self.with(*vm, |vm| vm.attempt(*stream, *to)) == Some(true) {
                    self.guilty.set(self.guilty.get() + 1);
                }
            }
            Event::Answer { vm, stream } => _ = self.with(*vm, |vm| vm.answer(*stream)),
            Event::End { vm, stream, how, millis } => {
                if self.with(*vm, |vm| vm.end(*stream, *how, *millis)) == Some(true) {
                    self.guilty.set(self.guilty.get() + 1);
                }
            }
            Event::Tick { vm } => {
                self.process.pass(TICK);
                self.tick(*vm % self.vms.len());
            }
            Event::Rounds { rounds, asleep } => {
                let asleep = asleep.map(|vm| vm % self.vms.len());
                for _ in 0..*rounds {
                    self.process.pass(TICK);
                    (0..self.vms.len()).filter(|vm| Some(*vm) != asleep).for_each(|vm| self.tick(vm));
                }
            }
            Event::Publish(wanted) => {
                self.reloaded.set(true);
                *self.wanted.borrow_mut() = wanted.clone();
            }
            Event::Cluster(cluster) => {
                self.reloaded.set(true);
                *self.cluster.borrow_mut() = *cluster;
            }
            Event::Garble { vm, times } => _ = self.with(*vm, |vm| vm.garbled = *times),
            Event::Adopt { vm } => _ = self.with(*vm, |vm| vm.adopt(&self.wanted.borrow())),
            Event::Delete { vm } => _ = self.with(*vm, Vm::delete_old),
            Event::Die { vm } => self.die(*vm),
            Event::Refuse { vm, call, times } => _ = self.with(*vm, |vm| vm.host.refuse(*call, *times)),
            Event::Lose(loss) => self.lose(loss),
            Event::Step { back, seconds } => self.step(*back, Duration::from_secs(*seconds)),
            Event::Meanwhile { vm, event } => {
                let (world, event) = (self.me.clone(), event.as_ref().clone());
                let deed = move || {
                    if let Some(world) = world.upgrade() {
                        world.act(&event);
                    }
                };
                self.with(*vm, |vm| vm.host.meanwhile(deed));
            }
        }
    }

    fn tick(&self, number: usize) {
        let before = self.record();
        let ticked = self.with(number, Vm::tick);
        let page = self.page();
        self.with(number, |vm| vm.answer_calls(&page));
        let Some(Some((ticks, clean))) = ticked else {
            return;
        };
        self.ticks[number].set(self.ticks[number].get() + ticks);
        if !clean {
            return;
        }
        self.with(number, |vm| {
            assert!(!vm.owes(), "a tick without a fault left a settlement behind");
            vm.caught_up = before.map(|record| (record.header.incarnation, record.header.epoch));
        });
    }

    /// What Envoy's admin says of the cluster.
    fn page(&self) -> String {
        let host = |(address, said): (&str, Said)| {
            let address: SocketAddr = address.parse().unwrap();
            let health = match said {
                Said::Healthy => r#""eds_health_status": "HEALTHY""#,
                Said::Degraded => r#""failed_active_degraded_check": true"#,
                Said::Draining => r#""eds_health_status": "DRAINING""#,
                Said::Unhealthy => r#""failed_outlier_check": true"#,
            };
            let socket = format!(r#"{{"address": "{}", "port_value": {}}}"#, address.ip(), address.port());
            format!(r#"{{"address": {{"socket_address": {socket}}}, "health_status": {{{health}}}, "weight": 2}}"#)
        };
        let cluster = self.cluster.borrow();
        let here = ADDRESSES.into_iter().zip(*cluster).filter_map(|(address, condition)| Some((address, condition?)));
        let hosts: Vec<String> = here.map(host).collect();
        format!(r#"{{"cluster_statuses": [{{"name": "{POOL}", "host_statuses": [{}]}}]}}"#, hosts.join(","))
    }

    fn die(&self, number: usize) {
        let wanted = self.wanted.borrow();
        let dead = self.with(number, |vm| {
            let mut dead = std::mem::replace(vm, Vm::new(&self.process, &wanted));
            Grave { id: dead.id, seats: dead.seats() }
        });
        self.graves.borrow_mut().extend(dead);
    }

    fn lose(&self, loss: &Loss) {
        let key = key(POOL);
        let Some(mut bytes) = self.process.value(&key) else {
            return;
        };
        match loss {
            // Envoy removes no key, and takes a store to a missing one whatever its version: one that lost its key between its load and its
            // store would bring back what it had read. So a record goes only while nobody is in between.
            Loss::Gone if self.vms.iter().all(|vm| vm.try_borrow().is_ok()) => {
                // A kept record stands on it that Envoy never deletes a key: a store would bring back what was kept, however old.
                self.vms.iter().for_each(|vm| vm.borrow().forget_kept());
                return self.process.lose(&key);
            }
            Loss::Gone => {}
            Loss::Garbage(garbage) => bytes.clone_from(garbage),
            Loss::AnotherVersion => bytes.iter_mut().skip(4).take(1).for_each(|version| *version ^= 0xFF),
            Loss::Truncated => _ = bytes.pop(),
            Loss::Touched => {}
        }
        self.process.put(&key, bytes);
    }

    fn step(&self, back: bool, step: Duration) {
        if back {
            self.process.step_back(step);
        } else {
            self.process.pass(step);
        }
        (0..self.vms.len()).for_each(|vm| _ = self.with(vm, Vm::clock_stepped));
    }

    /// What a request met must fit the record that stands now: nothing happened since.
    fn check_choice(&self, met: &Met, is_job: bool) {
        let Some(record) = self.record().filter(|_| met.clean) else {
            return;
        };
        // All jobs on the machine, also those from before its host was removed and came back.
        let load = |address: &str| -> u32 {
            let address = Address::parse(address.as_bytes()).unwrap();
            record.hosts().filter(|host| host.address() == address).map(|host| host.load()).sum()
        };
        let now = met.now;
        let entry = |address: &str| {
            let seat = record.seat_at(Address::parse(address.as_bytes()).unwrap())?;
            record.host(seat.slot).filter(|host| !host.is_retired())
        };
        let Some(slots_of) = &met.eligible else {
            assert_eq!(
                (&met.verdict, &met.named),
                (&None, &None),
                "it is not known which hosts there are, and Envoy was not let choose"
            );
            return;
        };
        let those = |is_it: &dyn Fn(&Host) -> bool| -> BTreeSet<&str> {
            slots_of.keys().copied().filter(|address| entry(address).is_some_and(|host| is_it(&host))).collect()
        };
        let serving = those(&|host| host.health(now) == State::Serving);
        // Those that would still take a trial: the one that has just begun is not among them.
        let on_trial = those(&|host| host.wants_trial(now));
        // Those that may be tried before their time, rather than refuse a job.
        let strangers = those(&|host| wants_early_trial(host, now));
        let has_slot = |address: &&str| load(address) < slots_of[*address];
        match (met.verdict.as_deref(), &met.named) {
            (Some("full"), _) => {
                assert!(is_job, "a request that needs no slot was refused for want of one");
                assert!(!serving.is_empty(), "there was no host at all");
                let all = serving.iter().chain(&on_trial).chain(&strangers);
                assert!(!all.clone().any(has_slot), "refused although there is a free slot");
            }
            (None, Some(named)) => {
                let (first, alternates) = (named[0].as_str(), met.running.wanted.alternates);
                let is_trial = !serving.contains(first);
                let probing = those(&|host| host.health(now) == State::Probing);
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
                assert_eq!(named.len(), most, "{named:?}");
                assert!(!is_job || load(first) <= slots_of[first], "{first} has more jobs than slots by our own choice");
            }
            (verdict, _) => {
                assert_eq!(verdict, Some("no_host").filter(|_| !met.running.wanted.fallback));
                let others = || on_trial.iter().chain(&strangers);
                assert!(serving.is_empty() && (!is_job || !others().any(has_slot)), "refused although there are hosts");
            }
        }
    }

    /// From now on all goes well: then every host serves again, within the longest ejection.
    fn heal(&self) {
        for _ in 0..250 {
            self.process.pass(Duration::from_secs(2));
            (0..self.vms.len()).for_each(|vm| self.tick(vm));
            self.with(0, Vm::serve);
        }
        // Of a pool whose last worker died before it went nobody reads the record any more.
        let is_alive = |record: &Record| record.workers().any(|worker| self.vms.iter().any(|vm| vm.borrow().id == worker.id));
        let Some(record) = self.record().filter(is_alive) else {
            return;
        };
        let now = self.vms[0].borrow().now();
        for host in record.hosts() {
            assert!(matches!(host.state(now), State::Serving | State::Draining), "{} is {:?}", host.address(), host.state(now));
        }
    }

    /// All streams end, all VMs take the newest configuration, nothing goes wrong any more, and 200 ticks pass.
    pub fn quiet(&self) {
        self.vms.iter().for_each(|vm| vm.borrow().host.heal());
        self.cluster.borrow_mut().iter_mut().flatten().for_each(|condition| *condition = Said::Healthy);
        for vm in &self.vms {
            let mut vm = vm.borrow_mut();
            vm.garbled = 0;
            vm.end_all();
            vm.adopt(&self.wanted.borrow());
            vm.delete_old();
        }
        self.act(&Event::Rounds { rounds: 200, asleep: None });
        self.heal();
        self.check();
        self.check_empty();
    }
}
