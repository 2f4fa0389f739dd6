//! The record's code without Envoy: VMs of this process, built natively, over shared data that keeps Envoy's rules.
//!
//! ```text
//!   thread: Vm (plimsoll's Worker, one pool) ── Seam (Host) ──▶ Process: one mutex, one map, one count of versions
//! ```
//!
//! What is left out is Wasm, the hostcalls, and the copy between a VM's memory and Envoy's.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use plimsoll::config::{Pool, Role};
use plimsoll::core::choice::Kind;
use plimsoll::core::lease::Settlement;
use plimsoll::core::outcome::Outcome;
use plimsoll::core::queue::Priority;
use plimsoll::core::record::Record;
use plimsoll::core::time;
use plimsoll::host::{Fault, Headers, Host, Level, Map, Metric, Shared};
use plimsoll::roles::roots::Pools;
use plimsoll::roles::route::Route;
use plimsoll::roles::shared;
use plimsoll::roles::worker::{Course, Request, TICK, Worker};
use serde_json::{Value, json};

/// The only pool.
const POOL: &str = "gpu";

/// What Envoy says of a job's length. Always the same: what is measured is how the books are kept, not what they say.
const LATENCY: Duration = Duration::from_secs(2);

/// What all VMs of an Envoy share.
pub struct Process {
    data: Mutex<Data>,
    began: Instant,
}

#[derive(Default)]
struct Data {
    /// Values and their versions.
    values: HashMap<String, (Vec<u8>, u32)>,
    /// The version of the last store of whatever key.
    version: u32,
    refused: u64,
}

impl Process {
    /// One without shared data.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { data: Mutex::default(), began: Instant::now() })
    }

    /// How often a store was refused so far.
    pub fn refused(&self) -> u64 {
        self.data.lock().expect("no thread panicked").refused
    }

    /// The pool's record, whole.
    pub fn record_bytes(&self) -> Vec<u8> {
        let data = self.data.lock().expect("no thread panicked");
        data.values.get(&shared::key(POOL)).expect("a VM has joined").0.clone()
    }

    /// The pool's record, read.
    pub fn record(&self) -> Record {
        Record::parse(self.record_bytes()).expect("a record of ours")
    }
}

impl Data {
    /// As `SharedData::set` of proxy-wasm-cpp-host does it: version 0 is any version, a missing key has every version, and no value has version 0.
    fn store(&mut self, key: &str, value: &[u8], cas: u32) -> bool {
        let version = self.version.wrapping_add(1).max(1);
        match self.values.get_mut(key) {
            Some((_, held)) if cas != 0 && cas != *held => {
                self.refused += 1;
                return false;
            }
            Some(entry) => *entry = (value.to_vec(), version),
            None => _ = self.values.insert(key.to_owned(), (value.to_vec(), version)),
        }
        self.version = version;
        true
    }
}

/// A VM's way to the [`Process`].
#[derive(Clone)]
struct Seam {
    process: Arc<Process>,
}

impl Host for Seam {
    fn now(&self) -> time::Instant {
        // From one on: zero stands for "never".
        time::Instant(1 + self.process.began.elapsed().as_micros() as u64)
    }

    fn random(&self) -> u64 {
        rand::random()
    }

    /// A VM may say that it lost too often; anything else is a fault, a death or a lost record, for which there is no reason here.
    fn log(&self, _: Level, line: &str) {
        assert!(line.contains("contended"), "{line}");
    }

    fn load(&self, key: &str) -> Result<Shared, Fault> {
        let data = self.process.data.lock().expect("no thread panicked");
        // Envoy copies under the lock, too.
        Ok(data.values.get(key).map_or(Shared::default(), |(value, cas)| Shared { value: Some(value.clone()), cas: *cas }))
    }

    fn store(&self, key: &str, value: &[u8], cas: u32) -> Result<bool, Fault> {
        Ok(self.process.data.lock().expect("no thread panicked").store(key, value, cas))
    }

    fn property(&self, _: &str) -> Option<Vec<u8>> {
        None
    }

    fn request_headers(&self) -> Result<Headers, Fault> {
        unreachable!("a worker handles no headers")
    }

    fn set_request_header(&self, _: &[u8], _: Option<&[u8]>) -> Result<(), Fault> {
        unreachable!("a worker handles no headers")
    }

    fn reply(&self, _: u16, _: &[(&str, &str)], _: &[u8]) -> Result<(), Fault> {
        unreachable!("a worker does not reply")
    }

    /// There are no streams: where a job runs is where it was sent.
    fn resume(&self) -> Result<(), Fault> {
        Err(Fault(2))
    }

    fn tick_each(&self, _: Duration) {}

    fn register_bell(&self, _: &str) -> Result<u32, Fault> {
        Err(Fault(2))
    }

    fn ring(&self, _: u32) -> Result<(), Fault> {
        Err(Fault(2))
    }

    fn silence_bell(&self, _: u32) {}

    fn enter(&self, _: u32) -> Result<(), Fault> {
        Err(Fault(2))
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH
    }

    fn header(&self, _: Map, _: &str) -> Option<Vec<u8>> {
        None
    }

    fn body(&self, _: usize) -> Option<Vec<u8>> {
        None
    }

    fn remove_header(&self, _: Map, _: &str) -> Result<(), Fault> {
        unreachable!("a worker handles no headers")
    }

    fn set_response_header(&self, _: &[u8], _: Option<&[u8]>) -> Result<(), Fault> {
        unreachable!("a worker handles no headers")
    }

    fn set_filter_state(&self, _: &str, _: &[u8]) -> Result<(), Fault> {
        unreachable!("nothing is explained here")
    }

    fn call(&self, _: &str, _: &[(&str, &str)], _: &[u8], _: Duration) -> Result<u32, Fault> {
        unreachable!("there are no probes and no alerts here")
    }

    fn request_body(&self, _: usize) -> Option<Vec<u8>> {
        None
    }

    fn metric(&self, _: Metric, _: &str) -> Result<u32, Fault> {
        Ok(0)
    }

    fn add(&self, _: u32, _: u64) {}

    fn record(&self, _: u32, _: u64) {}
}

/// A worker of ours that serves one pool. It stays on its thread, as Envoy's do.
pub struct Vm {
    worker: Worker<Seam>,
    name: Rc<str>,
    route: Route,
    pools: Pools,
    /// The stream of the next job.
    stream: u32,
    gave_up: u64,
}

/// A job that holds a lease.
pub struct Job {
    stream: u32,
    /// Index of the chosen host.
    pub host: usize,
}

impl Vm {
    /// A VM that names so many hosts, with so many slots each.
    pub fn start(process: &Arc<Process>, hosts: usize, slots: u32) -> Self {
        let mut worker = Worker::new(Seam { process: process.clone() });
        let (name, pool): (Rc<str>, _) = (POOL.into(), pool(hosts, slots));
        let pools = vec![(name.clone(), pool.clone())];
        worker.stream_starts(1, &name, &pools);
        let route = Route::new(&name, &pool);
        Self { worker, name, route, pools, stream: 0, gave_up: 0 }
    }

    /// Chooses a host for a job: one transaction, or two the first time, when the VM joins the record. (In Envoy the job would go where the
    /// cluster's fallback sends it, if the transaction gave up; here it tries again.)
    pub fn take(&mut self) -> Job {
        loop {
            self.stream += 1;
            let request = Request {
                stream: self.stream,
                kind: Kind::Job,
                priority: Priority::Normal,
                tenant: 0,
                job: plimsoll::core::learning::Job::unknown(),
            };
            match self.worker.choose(&self.name, request, &mut self.route.running.borrow_mut()) {
                Ok(Course::Placed(placed)) => return Job { stream: self.stream, host: placed.chosen.hosts[0] },
                Ok(decision) => panic!("no host for a job while there are free slots: {decision:?}"),
                Err(_) => self.gave_up += 1,
            }
        }
    }

    /// Gives its lease back: one transaction; if that gives up, waits for the tick that does it.
    pub fn settle(&mut self, job: &Job) {
        let end = Settlement { outcome: Outcome::Success, is_timed: true, latency: None, whereabouts: None, reading: None };
        self.worker.settle(&self.name, job.stream, end, || Some(LATENCY));
        while self.worker.lease(&self.name, job.stream).is_some() {
            self.gave_up += 1;
            std::thread::sleep(TICK);
            self.worker.root_ticks(1, &self.name, &self.pools);
        }
    }

    /// How many transactions lost so often that they gave up.
    pub fn gave_up(&self) -> u64 {
        self.gave_up
    }
}

/// A configuration like a user's, read as Envoy's VMs read it.
fn pool(hosts: usize, slots: u32) -> Rc<Pool> {
    let host = |index: usize| json!({"address": format!("10.0.{}.{}:8188", index / 256, index % 256)});
    let hosts: Vec<Value> = (0..hosts).map(host).collect();
    let configuration = json!({"pools": {POOL: {"hosts": hosts, "max_in_flight": slots}}});
    match Role::parse(configuration.to_string().as_bytes()) {
        Ok(Role::Balancer(mut balancer)) => balancer.pools.remove(POOL).expect("named above"),
        other => panic!("not a balancer's configuration: {other:?}"),
    }
}
