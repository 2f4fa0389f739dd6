//! Carries the model's events out.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use super::queue::Tally;
use super::truth::Beat;
use super::vm::Vm;
use super::wanted::Wanted;
use super::{ADDRESSES, Cluster, Event, Loss, POOL, Said};
use crate::core::address::Address;
use crate::core::health::State;
use crate::core::queue::ANSWERS_WITHIN;
use crate::core::record::{Record, Seat};
use crate::roles::fake::Process;
use crate::roles::shared::key;
use crate::roles::worker::{QUICK_TICK, TICK};

/// Longer than any job waits.
const LONGEST_WAIT: Duration = Duration::from_secs(31);

/// A VM that died, and what it held.
pub struct Grave {
    pub id: u64,
    pub seats: Vec<(Address, Seat, Option<u64>)>,
    /// The streams that waited.
    pub paused: BTreeSet<u32>,
    pub is_disturbed: bool,
    pub refused: u64,
    pub tally: Tally,
    pub unstored: u64,
}

/// One Envoy.
pub struct World {
    me: Weak<World>,
    process: Arc<Process>,
    pub vms: Vec<RefCell<Vm>>,
    pub graves: RefCell<Vec<Grave>>,
    wanted: RefCell<Wanted>,
    pub cluster: RefCell<Cluster>,
    /// Whether whoever is to be told that a bell was rung is told after each event.
    is_prompt: bool,
    /// How many events there were.
    events: Cell<u64>,
    /// The incarnation of the first record.
    pub first: Cell<u64>,
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
    pub fn new(vms: usize, seed: u64, is_prompt: bool, wanted: Wanted) -> Rc<Self> {
        let process = Process::new(seed);
        Rc::new_cyclic(|me| Self {
            me: me.clone(),
            vms: (0..vms).map(|_| RefCell::new(Vm::new(&process, &wanted))).collect(),
            process,
            graves: RefCell::default(),
            wanted: RefCell::new(wanted),
            cluster: RefCell::new([Some(Said::Healthy); ADDRESSES.len()]),
            is_prompt,
            events: Cell::new(0),
            first: Cell::new(0),
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
            if self.first.get() == 0 {
                self.first.set(record.header.incarnation);
            }
        }
        Some(result)
    }

    /// An event, and what must be true after it.
    pub fn run(&self, event: &Event) {
        self.process.pass(Duration::from_millis(1));
        let all: Vec<usize> = (0..self.vms.len()).collect();
        let of = |vm: &RefCell<Vm>| vm.borrow().live().iter().map(|running| running.root).collect();
        let live = || self.vms.iter().map(of).collect::<Vec<Vec<u32>>>();
        // What a dead worker held is given back without anybody's being woken: the next tick sees it.
        let swept = || self.record().map(|record| record.header.swept);
        let (events, roots, swept_before) = (self.events.get(), live(), swept());
        let was_fine = self.is_prompt && self.is_calm() && self.idles(&all, true) == Some(false);
        self.act(event);
        if self.is_prompt {
            self.hear_all();
            self.check_heard();
        }
        self.check();
        // What time brings, or a configuration, the next tick sees.
        let waits_for_tick = match event {
            Event::Tick { .. } | Event::Rounds { .. } | Event::Step { .. } | Event::Lose(_) => true,
            // It comes by its own configuration, and waits by the newest.
            Event::Request { .. } => roots.iter().any(|roots| roots.len() > 1),
            _ => false,
        };
        let is_alike = || (self.events.get(), live(), swept()) == (events + 1, roots, swept_before);
        if was_fine && !waits_for_tick && self.is_calm() && is_alike() {
            assert_ne!(self.idles(&all, true), Some(true), "a slot came free, and nobody was woken for it");
        }
    }

    fn hear_all(&self) {
        // There may be one for each tick of the event before, which nobody heard meanwhile.
        for _ in 0..1000 {
            if (0..self.vms.len()).filter(|vm| self.hear(*vm)).count() == 0 {
                return;
            }
        }
        panic!("the bells ring for ever");
    }

    /// Gives whether there was something to hear.
    fn hear(&self, vm: usize) -> bool {
        let Some(Some(met)) = self.with(vm, Vm::hear) else {
            return false;
        };
        met.iter().for_each(|met| self.check_choice(met));
        true
    }

    fn act(&self, event: &Event) {
        self.events.set(self.events.get() + 1);
        match event {
            Event::Request { vm, says, old } => {
                if let Some(Some(met)) = self.with(*vm, |vm| vm.request(*says, *old)) {
                    self.check_choice(&met);
                }
            }
            Event::Attempt { vm, stream, to } => {
                if self.with(*vm, |vm| vm.attempt(*stream, *to)) == Some(true) {
                    self.guilty.set(self.guilty.get() + 1);
                }
            }
            Event::Answer { vm, stream } => _ = self.with(*vm, |vm| vm.answer(*stream)),
            Event::End { vm, stream, how, millis, tells } => {
                if self.with(*vm, |vm| vm.end(*stream, *how, *millis, *tells)) == Some(true) {
                    self.guilty.set(self.guilty.get() + 1);
                }
            }
            Event::Leave { vm, stream, is_answered } => _ = self.with(*vm, |vm| vm.leave(*stream, *is_answered)),
            Event::Hear { vm } => _ = self.hear(*vm),
            Event::Deafen { vm } if !self.is_prompt => _ = self.with(*vm, |vm| vm.host.takes_news()),
            Event::Deafen { .. } => {}
            Event::Tick { vm, is_quick } => {
                self.process.pass(if *is_quick { QUICK_TICK } else { TICK });
                self.tick(*vm % self.vms.len(), *is_quick);
            }
            Event::Rounds { rounds, asleep, is_quick } => self.rounds(*rounds, *asleep, *is_quick),
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
                        world.process.pass(Duration::from_millis(1));
                        world.act(&event);
                    }
                };
                self.with(*vm, |vm| vm.host.meanwhile(deed));
            }
        }
    }

    /// Gives whether no hostcall was refused.
    fn tick(&self, number: usize, is_quick: bool) -> bool {
        let before = self.record();
        let ticked = self.with(number, |vm| vm.tick(is_quick));
        let page = self.page();
        self.with(number, |vm| vm.answer_calls(&page));
        let Some(ticked) = ticked else {
            return false;
        };
        ticked.met.iter().for_each(|met| self.check_choice(met));
        self.ticks[number].set(self.ticks[number].get() + ticked.ticks);
        if ticked.clean && ticked.ticks > 0 {
            self.with(number, |vm| {
                assert!(!vm.owes(), "a tick without a fault left a settlement behind");
                vm.caught_up = before.map(|record| (record.header.incarnation, record.header.epoch));
            });
        }
        ticked.clean
    }

    /// All VMs tick, but for one. A slot that a job could have is not left free for longer than it takes to see that those who
    /// come first do not answer: each is called, and has [`ANSWERS_WITHIN`].
    fn rounds(&self, rounds: u32, asleep: Option<usize>, is_quick: bool) {
        let pace = if is_quick { QUICK_TICK } else { TICK };
        let patience = ANSWERS_WITHIN.as_millis().div_euclid(pace.as_millis()) as usize + 1;
        let asleep = asleep.map(|vm| vm % self.vms.len());
        let awake: Vec<usize> = (0..self.vms.len()).filter(|vm| Some(*vm) != asleep).collect();
        let served = || awake.iter().filter_map(|vm| Some(self.vms[*vm].try_borrow().ok()?.tally.served)).sum::<u64>();
        let mut idle = 0;
        for _ in 0..rounds {
            self.process.pass(pace);
            let (events, before) = (self.events.get(), served());
            let clean = awake.iter().filter(|vm| self.tick(**vm, is_quick)).count() == awake.len();
            let Some(record) = self.record().filter(|_| clean && self.events.get() == events) else {
                idle = 0;
                continue;
            };
            let vms: Vec<_> = awake.iter().map(|vm| self.vms[*vm].borrow()).collect();
            let is_idle = vms.iter().all(|vm| !vm.is_disturbed()) && self.idles(&awake, false) == Some(true);
            // Of hosts that wait for their trial one is served in each callback.
            idle = if is_idle && served() == before { idle + 1 } else { 0 };
            let silent = record.workers().filter(|worker| vms.iter().all(|vm| vm.id != worker.id)).count();
            let most = patience * silent + 1;
            assert!(idle <= most, "a slot has been free for {idle} ticks of all while a job waited that could have it");
        }
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
            Grave {
                id: dead.id,
                seats: dead.seats(),
                paused: dead.paused.keys().copied().collect(),
                is_disturbed: dead.is_disturbed(),
                refused: dead.host.refused(),
                tally: dead.tally,
                unstored: dead.unstored(),
            }
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

    /// From now on all goes well: then every host serves again, within the longest ejection.
    fn heal(&self) {
        for _ in 0..250 {
            self.process.pass(Duration::from_secs(2));
            (0..self.vms.len()).for_each(|vm| _ = self.tick(vm, false));
            self.vms.iter().for_each(|vm| vm.borrow_mut().end_all());
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

    /// All streams end, all VMs take the newest configuration, nothing goes wrong any more, and 200 ticks pass. Who waits has a
    /// slot by then, or an answer.
    pub fn quiet(&self) {
        self.vms.iter().for_each(|vm| vm.borrow().host.heal());
        self.cluster.borrow_mut().iter_mut().flatten().for_each(|condition| *condition = Said::Healthy);
        for vm in &self.vms {
            let mut vm = vm.borrow_mut();
            vm.garbled = 0;
            vm.end_all();
            vm.adopt(&self.wanted.borrow());
        }
        let waits = || self.vms.iter().any(|vm| !vm.borrow().paused.is_empty());
        for _ in 0..LONGEST_WAIT.as_millis() / TICK.as_millis() {
            if waits() {
                self.rounds(1, None, false);
                self.vms.iter().for_each(|vm| vm.borrow_mut().end_all());
            }
        }
        assert!(!waits(), "a job waits for ever");
        self.vms.iter().for_each(|vm| vm.borrow_mut().delete_old());
        self.rounds(200, None, false);
        self.heal();
        self.check();
        self.check_empty();
    }
}
