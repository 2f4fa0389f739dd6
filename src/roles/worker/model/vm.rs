//! One VM of the model: a worker, the configurations that its streams run under, its streams.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use super::queue::{Came, Paused, Tally};
use super::wanted::{ADMIN, CLASS, COST, PRIORITY, Running, Slots, TENANT, Wanted};
use super::{ADDRESSES, CLASSES, COSTS, How, POOL, PRIORITIES, STRANGER, Says, TENANTS};
use crate::core::address::Address;
use crate::core::record::{Record, Seat};
use crate::core::time::Instant;
use crate::host::{Host, Map};
use crate::roles::balancer::{Flow, Stream};
use crate::roles::fake::{Fake, Process, Streamed};
use crate::roles::shared::{Kept, key};
use crate::roles::worker::{QUICK_TICK, TICK, Worker};

pub const OVERRIDE: &str = "x-gateway-destination-endpoint";

/// A stream, and what the model knows of it.
pub struct Job {
    pub stream: Stream<Fake>,
    pub named: Vec<String>,
    pub has_lease: bool,
    pub attempts: u64,
    pub answered: bool,
    /// Ticks of its VM since it began, since its last attempt, and since the clock last stepped.
    pub ticks: u32,
    /// How many of those may pass until its lease has followed: the first may come too soon after it was taken, and if the
    /// clock stepped back, a few more may seem to.
    pub patience: u32,
}

/// What a request met.
pub struct Met {
    pub running: Rc<Running>,
    /// The addresses that the override header names, if the filter set it.
    pub named: Option<Vec<String>>,
    pub verdict: Option<String>,
    /// It waits.
    pub waits: bool,
    pub is_job: bool,
    /// How many that wait in its VM must be served before it.
    pub before: usize,
    /// The hosts that the pool has, and their slots; `None`: that is not known.
    pub slots: Option<Slots>,
    /// No hostcall was refused.
    pub clean: bool,
    /// When it met it.
    pub now: Instant,
    /// The pool's record as its choice left it.
    pub record: Option<Record>,
}

/// What a tick was.
#[derive(Default)]
pub struct Ticked {
    /// How many ticks it was for the worker: if time passes between two roots' ticks, each is one; none if it was too soon.
    pub ticks: u64,
    /// No hostcall was refused.
    pub clean: bool,
    /// What those met that were resumed.
    pub met: Vec<Met>,
}

pub struct Vm {
    pub host: Fake,
    pub id: u64,
    pub worker: Rc<RefCell<Worker<Fake>>>,
    pub running: Rc<Running>,
    old: Vec<Rc<Running>>,
    pub jobs: BTreeMap<u32, Job>,
    /// The streams that wait.
    pub paused: BTreeMap<u32, Paused>,
    pub tally: Tally,
    /// Streams that have ended, whose settlement Envoy refused to store.
    owed: BTreeSet<u32>,
    contexts: u32,
    /// The incarnation and epoch of the record that stood before its last tick.
    pub caught_up: Option<(u64, u32)>,
    /// How many of its next looks at Envoy's cluster find something else.
    pub garbled: u32,
    /// How many hostcalls had been refused when a tick last mended what that had spoilt.
    mended: u64,
}

impl Job {
    pub fn new(stream: Stream<Fake>, named: Vec<String>, has_lease: bool) -> Self {
        Self { stream, named, has_lease, attempts: 0, answered: false, ticks: 0, patience: 2 }
    }
}

impl Vm {
    pub fn new(process: &Arc<Process>, wanted: &Wanted) -> Self {
        let host = Fake::new(process);
        let worker = Worker::new(host.clone());
        Self {
            id: worker.id,
            worker: Rc::new(RefCell::new(worker)),
            running: Running::new(wanted, &host, 1),
            host,
            old: Vec::new(),
            jobs: BTreeMap::new(),
            paused: BTreeMap::new(),
            tally: Tally::default(),
            owed: BTreeSet::new(),
            contexts: 1,
            caught_up: None,
            garbled: 0,
            mended: 0,
        }
    }

    /// Its roots, the newest first.
    pub fn roots(&self) -> impl Iterator<Item = &Rc<Running>> {
        [&self.running].into_iter().chain(&self.old)
    }

    /// Whether a hostcall was refused, and no tick has passed without since.
    pub fn is_disturbed(&self) -> bool {
        self.host.refused() != self.mended
    }

    pub fn forget_kept(&self) {
        self.worker.borrow_mut().books.values_mut().for_each(|books| books.kept = Kept::default());
    }

    fn context(&mut self) -> u32 {
        self.contexts += 1;
        self.contexts
    }

    pub fn adopt(&mut self, wanted: &Wanted) {
        let root = self.context();
        let running = Running::new(wanted, &self.host, root);
        self.host.make_current(root);
        running.plan.made(&mut self.worker.borrow_mut());
        self.old.push(std::mem::replace(&mut self.running, running));
    }

    pub fn delete_old(&mut self) {
        for running in self.old.extract_if(.., |running| Rc::strong_count(&running.plan) == 1) {
            self.host.make_current(running.root);
            running.plan.end(&mut self.worker.borrow_mut());
            self.host.forget(running.root);
        }
    }

    /// A request; gives what it met if it went to the pool.
    pub fn request(&mut self, says: Says, old: bool) -> Option<Met> {
        let Says { is_job, priority, tenant } = says;
        let running = self.old.last().filter(|_| old).unwrap_or(&self.running).clone();
        let id = self.context();
        let method = if is_job { "POST" } else { "GET" };
        self.host.stream(id, |stream| {
            let headers = [(":method", method), (":path", "/prompt"), (OVERRIDE, "6.6.6.6:6"), ("x-plimsoll-class", "mine")];
            let said =
                [(PRIORITY, PRIORITIES[priority]), (TENANT, TENANTS[tenant]), (CLASS, CLASSES[priority]), (COST, COSTS[tenant])];
            let said = said.into_iter().filter_map(|(name, value)| Some((name, value?)));
            stream.headers = headers.into_iter().chain(said).map(|(name, value)| (name.into(), value.into())).collect();
            stream.properties.insert("xds\0cluster_name", POOL.into());
            stream.root = running.root;
        });
        let refused = self.host.refused();
        let mut stream = Stream::new(self.host.clone(), self.worker.clone(), running.plan.clone(), id);
        self.host.make_current(id);
        let now = self.host.now();
        let flow = stream.request();
        let seen = self.host.stream(id, |stream| stream.clone());
        let clean = self.host.refused() == refused;
        let is_pools = running.wanted.hosts.is_some();
        let named = seen.header(OVERRIDE).filter(|_| is_pools && flow == Flow::Continue && clean);
        let named: Option<Vec<String>> = named.map(|list| list.split(',').map(str::to_owned).collect());
        if is_pools && clean {
            assert_eq!(seen.header("x-plimsoll-class"), None, "a client's word came through");
            assert_ne!(named.as_deref(), Some(["6.6.6.6:6".to_owned()].as_slice()), "a client chose its host");
        }
        let verdict = seen.replied.as_ref().and_then(|(_, headers)| headers.get("x-plimsoll-verdict").cloned());
        let record = self.host.process.value(&key(POOL)).and_then(|bytes| Record::parse(bytes).ok());
        let queue = running.wanted.queue;
        let rank = queue.filter(|_| clean).map(|queue| (queue.priority_of(says), queue.tenant_of(says)));
        let came = Came { id, at: now, rank, running: running.clone() };
        let before = record.as_ref().filter(|_| is_job).map_or(0, |record| self.count_before(&came, record));
        match (flow, named.as_ref()) {
            (Flow::Answered, _) => {
                assert!(self.lease_of(id).is_none(), "a reply of our own took a lease");
                self.tally.full += u64::from(verdict.as_deref() == Some("queue_full"));
                stream.done();
                self.host.forget(id);
            }
            (Flow::Paused, _) => {
                assert!(is_pools && queue.is_some(), "a job waits in a pool that has no queue");
                assert!(!clean || seen.header(OVERRIDE).is_none(), "a job that waits has a host");
                self.pauses(stream, came, record.as_ref());
            }
            (Flow::Continue, named) => {
                check_retries(&seen, named);
                let lease = self.lease_of(id);
                assert!(!clean || lease.is_some() == (is_job && is_pools), "lease: {lease:?}");
                if let Some(named) = named.filter(|_| is_job) {
                    assert_eq!(lease.unwrap().0, Address::parse(named[0].as_bytes()), "leased is not what was named");
                }
                self.jobs.insert(id, Job::new(stream, named.cloned().unwrap_or_default(), lease.is_some()));
            }
        }
        let slots = running.wanted.slots(self.worker.borrow().members(POOL).map(|members| &**members));
        let waits = flow == Flow::Paused;
        is_pools.then_some(Met { running, named, verdict, waits, is_job, before, slots, clean, now, record })
    }

    /// The stream with this number; its callbacks come next.
    fn pick(&mut self, number: usize) -> Option<(u32, &mut Job)> {
        let id = *self.jobs.keys().nth(number % self.jobs.len().max(1))?;
        self.host.make_current(id);
        Some((id, self.jobs.get_mut(&id)?))
    }

    /// Envoy tries a host; gives whether that was a retry.
    pub fn attempt(&mut self, number: usize, to: usize) -> bool {
        let host = self.host.clone();
        let Some((id, job)) = self.pick(number).filter(|(_, job)| !job.answered) else {
            return false;
        };
        let others = ADDRESSES.into_iter().chain([STRANGER]);
        let choices: Vec<&str> = job.named.iter().map(String::as_str).chain(others).collect();
        let address = choices[to % choices.len()];
        job.attempts += 1;
        job.ticks = 0;
        host.stream(id, |stream| {
            stream.properties.insert("upstream\0address", address.into());
            stream.properties.insert("upstream\0request_attempt_count", job.attempts.to_le_bytes().into());
        });
        job.attempts > 1
    }

    /// A response begins: Envoy does not retry any more.
    pub fn answer(&mut self, number: usize) {
        let refused = self.host.refused();
        let Some((id, job)) = self.pick(number).filter(|(_, job)| job.attempts > 0 && !job.answered) else {
            return;
        };
        job.answered = true;
        job.stream.response();
        if self.host.refused() == refused {
            self.check_follows(id, "when its response began");
        }
    }

    /// A stream ends; gives whether its host may be blamed.
    pub fn end(&mut self, number: usize, how: How, millis: u64, tells: u32) -> bool {
        let (host, refused) = (self.host.clone(), self.host.refused());
        let Some((id, job)) = self.pick(number) else {
            return false;
        };
        let (code, flags, details) = match how {
            How::Success => (200u64, 0u64, "via_upstream"),
            How::Failure => (503, 1 << 5, "upstream_reset_before_response_started"),
            How::Abort => (0, 1 << 14, "downstream_remote_disconnect"),
            How::BadPrompt => (400, 0, "via_upstream"),
            How::TooMany => (429, 0, "via_upstream"),
        };
        host.stream(id, |stream| {
            stream.maps.insert((Map::Response as u8, ":status".to_owned()), code.to_string().into());
            stream.properties.insert("response\0flags", flags.to_le_bytes().into());
            stream.properties.insert("response\0code_details", details.into());
            stream.properties.insert("response\0backend_latency", (millis * 1_000_000).to_le_bytes().into());
            let report = format!("TEXT named_metrics.running={tells}, cpu_utilization=0.{}", tells % 10);
            stream.maps.insert((Map::Response as u8, "endpoint-load-metrics".to_owned()), report.into());
        });
        if code != 0 && !job.answered {
            job.stream.response();
        }
        job.stream.done();
        self.jobs.remove(&id);
        host.forget(id);
        if self.lease_of(id).is_some() {
            assert_ne!(host.refused(), refused, "a stream ended, and its lease is still there");
            self.owed.insert(id);
        }
        matches!(how, How::Failure)
    }

    /// A job that its host does at once.
    pub fn serve(&mut self) {
        self.request(Says { is_job: true, priority: 0, tenant: 0 }, false);
        self.end_all();
    }

    pub fn end_all(&mut self) {
        while !self.jobs.is_empty() {
            self.end(0, How::Success, 100, 0);
        }
    }

    /// Its roots tick, those that were replaced too; quickly: only those that have asked for it.
    pub fn tick(&mut self, is_quick: bool) -> Ticked {
        let (refused, mut ticked) = (self.host.refused(), Ticked::default());
        let ticks = |running: &&Rc<Running>| !is_quick || self.host.pace_of(running.root) == Some(QUICK_TICK);
        let roots: Vec<Rc<Running>> = self.roots().filter(ticks).cloned().collect();
        for running in &roots {
            let last = self.worker.borrow().ticked;
            let met = self.call_root(running, |running, vm| running.plan.tick(&mut vm.worker.borrow_mut()));
            ticked.met.extend(met);
            let pace = if self.paused.is_empty() { TICK } else { QUICK_TICK };
            assert_eq!(self.host.pace_of(running.root), Some(pace), "how often a root ticks");
            ticked.ticks += u64::from(self.worker.borrow().ticked != last);
        }
        ticked.clean = self.host.refused() == refused;
        if ticked.clean && ticked.ticks > 0 {
            self.mended = refused;
            self.jobs.values_mut().for_each(|job| job.ticks += 1);
            for id in self.jobs.iter().filter(|(_, job)| job.ticks >= job.patience).map(|(id, _)| *id).collect::<Vec<_>>() {
                self.check_follows(id, "at a tick");
            }
        }
        ticked
    }

    /// Envoy answers its calls.
    pub fn answer_calls(&mut self, page: &str) {
        for call in self.host.called().into_iter().filter(|call| call.cluster == ADMIN) {
            let is_garbled = self.garbled > 0;
            self.garbled -= u32::from(is_garbled);
            let body = if is_garbled { "nonsense" } else { page };
            self.host.answer_with(body.as_bytes());
            self.host.stream(0, |stream| stream.maps.insert((Map::Call as u8, ":status".to_owned()), b"200".into()));
            self.host.make_current(0);
            self.worker.borrow_mut().called_back(call.token, body.len());
        }
    }

    pub fn clock_stepped(&mut self) {
        self.jobs.values_mut().for_each(|job| (job.ticks, job.patience) = (0, 4));
    }

    fn check_follows(&self, id: u32, when: &str) {
        let works_at = self.host.stream(id, |stream| stream.properties.get("upstream\0address").cloned());
        if let (Some(lease), Some(works_at)) = (self.lease_of(id), works_at) {
            assert_eq!(lease.0, Address::parse(&works_at), "{when} the lease of stream {id} had not followed");
        }
    }

    pub fn lease_of(&self, stream: u32) -> Option<(Option<Address>, Option<Seat>)> {
        let worker = self.worker.borrow();
        worker.books.get(POOL)?.book.lease(stream).map(|lease| (lease.address, lease.seat))
    }

    /// Whether the worker has a book of the pool.
    pub fn has_book(&self) -> bool {
        self.worker.borrow().books.contains_key(POOL)
    }

    /// The seats of all leases that the worker holds, and with how much work they are counted there, which must be those of its streams and of the settlements that it owes.
    pub fn seats(&mut self) -> Vec<(Address, Seat, Option<u64>)> {
        let worker = self.worker.borrow();
        let leases = || worker.books.get(POOL).into_iter().flat_map(|books| books.book.leases());
        let held: BTreeSet<u32> = leases().map(|(stream, _)| stream).collect();
        self.owed.retain(|stream| held.contains(stream));
        for stream in &held {
            assert!(self.jobs.contains_key(stream) || self.owed.contains(stream), "a lease without a stream: {stream}");
        }
        for (stream, job) in &self.jobs {
            assert_eq!(held.contains(stream), job.has_lease, "the lease of stream {stream}");
        }
        leases().filter_map(|(_, lease)| Some((lease.address?, lease.seat?, lease.burden.work))).collect()
    }

    pub fn owes(&self) -> bool {
        self.owed.iter().any(|stream| self.lease_of(*stream).is_some())
    }

    pub fn now(&self) -> Instant {
        self.host.now()
    }
}

pub fn check_retries(seen: &Streamed, named: Option<&Vec<String>>) {
    if let Some(named) = named {
        let distinct: BTreeSet<&String> = named.iter().collect();
        assert_eq!(distinct.len(), named.len(), "a host is named twice: {named:?}");
        assert_eq!(seen.header("x-envoy-max-retries"), Some((named.len() - 1).to_string()));
    }
}
