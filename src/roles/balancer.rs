//! The balancer: chooses a host for each request of its pools, and keeps the job's lease until the stream ends.
//!
//! ```text
//! on_http_request_headers   strip ─► choose and reserve ─► set the override header and the number of retries; or pause
//! on_tick, on_queue_ready   a slot is free for one that waits ─► the same, and resume       (the worker does it: worker/queue.rs)
//! on_tick                   where Envoy works on it now ─► move the lease
//! on_http_response_headers  where it is served, and with which status; Envoy will not retry any more ─► say who served, and why
//! on_http_response_trailers the status of a gRPC call
//! deletion                  how it ended ─► settle
//! ```
//!
//! There is no callback for the body of a response, for the log and for the end: Envoy need not enter the VM for each chunk, and once less at the end.

mod reports;
mod waiting;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::client::{Client, digits};
use super::explain;
use super::metrics::{Family, Of};
use super::reply::Verdict;
use super::roots::Pools;
use super::route::{Route, name_hosts};
use super::worker::{Course, Fate, Paused, QUICK_TICK, TICK, Worker, moved_to};
use crate::config::{self, Explain, NoHost, Pool};
use crate::core::address::Address;
use crate::core::choice::{Chosen, Decision, Kind};
use crate::core::lease::{Lease, Settlement};
use crate::core::outcome::{End, Grpc, Outcome, PAUSE, VIA_UPSTREAM, flag};
use crate::core::reading::Reading;
use crate::core::retry_after;
use crate::core::time::Instant;
use crate::host::{Headers, Host, Level, Map, number};

/// Headers that only this filter sets.
const OURS: &[u8] = b"x-plimsoll-";

/// What becomes of a request after its headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// It goes on to the next filter.
    Continue,
    /// It was answered here.
    Answered,
    /// It waits, to be resumed or answered later.
    Paused,
}

/// A configuration that is being run: what a root and its streams share.
pub struct Plan {
    root: u32,
    instance: Rc<str>,
    override_header: Rc<str>,
    pools: Pools,
    routes: BTreeMap<Box<[u8]>, Rc<Route>>,
    /// How often the root ticks, once it does.
    pace: Cell<Option<Duration>>,
}

impl Plan {
    /// Prepares a configuration for the root with this context id; `instance` is the name of the filter's instance.
    pub fn new(root: u32, instance: &str, config: config::Balancer) -> Self {
        let pools: Pools = config.pools.into_iter().map(|(name, pool)| (name.into(), pool)).collect();
        let route = |(name, pool): &(Rc<str>, Rc<Pool>)| (name.as_bytes().into(), Rc::new(Route::new(name, pool)));
        let routes = pools.iter().map(route).collect();
        let (instance, override_header) = (instance.into(), config.override_header);
        Self { root, instance, override_header, pools, routes, pace: Cell::default() }
    }

    /// Envoy has configured the root.
    pub fn made<H: Host>(&self, worker: &mut Worker<H>) {
        worker.root_made(self.root, &self.instance, &self.pools);
    }

    /// The root's tick.
    pub fn tick<H: Host>(&self, worker: &mut Worker<H>) {
        worker.root_ticks(self.root, &self.instance, &self.pools);
        self.set_pace(worker, if worker.anyone_waits() { QUICK_TICK } else { TICK });
    }

    /// The root's bell was rung.
    pub fn rung<H: Host>(&self, worker: &mut Worker<H>) {
        worker.hears_bell(self.root);
    }

    /// Sets to how often the root ticks. To set it anew puts the next tick off: so only a tick makes ticks rare again, or there might never be one.
    fn set_pace<H: Host>(&self, worker: &Worker<H>, pace: Duration) {
        if self.pace.replace(Some(pace)) != Some(pace) {
            worker.host.tick_each(pace);
        }
    }

    /// Envoy deletes the root.
    pub fn end<H: Host>(&self, worker: &mut Worker<H>) {
        worker.root_ends(self.root);
    }
}

/// One request.
pub struct Stream<H> {
    host: H,
    worker: Rc<RefCell<Worker<H>>>,
    plan: Rc<Plan>,
    id: u32,
    client: Client,
    /// The pool, while the stream has a lease.
    leased: Option<Leased>,
    /// The host that was named first, by its index among the pool's.
    sent_to: Option<usize>,
    answer: Answer,
    /// Why it goes where it goes, and who is to learn that.
    why: Option<(String, Explain)>,
    /// The pool, if its hosts' answers may tell of them.
    reports_to: Option<Rc<str>>,
    /// What the host told, and when.
    reading: Option<(Reading, Instant)>,
    /// While it waits: where, and what its worker makes of it.
    waits: Option<(Rc<str>, Rc<RefCell<Fate>>)>,
}

/// A pool as it was when the stream began.
#[derive(Clone)]
struct Leased {
    name: Rc<str>,
    pool: Rc<Pool>,
}

/// What the response said, as far as it matters when the stream ends and can no longer be read.
#[derive(Clone, Copy, Debug, Default)]
struct Answer {
    status: Option<u16>,
    came_after_timeout: bool,
    grpc: Option<Grpc>,
    retry_after: Option<Duration>,
}

impl<H: Host> Stream<H> {
    /// A stream with this context id.
    pub fn new(host: H, worker: Rc<RefCell<Worker<H>>>, plan: Rc<Plan>, id: u32) -> Self {
        Self {
            host,
            worker,
            plan,
            id,
            client: Client::default(),
            leased: None,
            sent_to: None,
            answer: Answer::default(),
            why: None,
            reports_to: None,
            reading: None,
            waits: None,
        }
    }

    /// `on_http_request_headers`.
    pub fn request(&mut self) -> Flow {
        let Some(cluster) = self.host.property("xds\0cluster_name") else {
            return Flow::Continue;
        };
        let Some(route) = self.plan.routes.get(cluster.as_slice()).cloned() else {
            return Flow::Continue;
        };
        let request = match self.host.request_headers() {
            Ok(headers) => {
                self.client = self.receive(&headers);
                self.describe(&route.configured, &headers)
            }
            // Then nobody can say what the request is: it is counted, and the one header that steers is removed unseen.
            Err(_) => {
                let _ = self.host.set_request_header(self.plan.override_header.as_bytes(), None);
                self.describe(&route.configured, &Headers::default())
            }
        };
        let (kind, job) = (request.kind, request.job);
        if route.configured.telemetry.as_ref().is_some_and(|telemetry| telemetry.orca) {
            self.reports_to = Some(route.name.clone());
        }
        let (course, leased) = {
            let (Ok(mut worker), Ok(mut running)) = (self.worker.try_borrow_mut(), route.running.try_borrow_mut()) else {
                return Flow::Continue;
            };
            worker.stream_starts(self.plan.root, &self.plan.instance, &self.plan.pools);
            running.catch_up(&route, &worker);
            let course = worker.choose(&route.name, request, &mut running);
            let blames = !self.client.sets_retries && !self.client.is_malformed;
            if let Some(lease) = worker.lease_mut(&route.name, self.id) {
                (lease.blames, lease.upload.length) = (blames, self.client.length);
            }
            if let Ok(Course::Waits(entry)) = course {
                let fate = Rc::<RefCell<Fate>>::default();
                let mut paused = Paused::new(route.clone(), fate.clone(), job, &entry);
                (paused.blames, paused.length) = (blames, self.client.length);
                worker.pause(&route.name, entry, paused);
                self.waits = Some((route.name.clone(), fate));
                self.plan.set_pace(&worker, QUICK_TICK);
            }
            let course = course.map_err(|fault| worker.say_fault("choose a host", fault));
            (course, Leased { name: route.name.clone(), pool: running.pool.clone() })
        };
        let pool = &leased.pool;
        match course {
            Ok(Course::Placed(placed)) => self.send_to(leased, &placed.chosen, kind),
            Ok(Course::Decided(Decision::Chosen(chosen))) => self.send_to(leased, &chosen, kind),
            Ok(Course::Waits(_)) => {
                explain::foresee_waiting(&self.host, pool);
                Flow::Paused
            }
            Ok(Course::QueueFull(retry_after)) => self.answer(Verdict::QueueFull, leased, kind, retry_after),
            Ok(Course::Decided(Decision::Full(retry_after))) => self.answer(Verdict::Full, leased, kind, retry_after),
            Ok(Course::Decided(Decision::NoHost(retry_after))) if pool.no_host == NoHost::Reject && !pool.awaits_hosts() => {
                self.answer(Verdict::NoHost, leased, kind, retry_after)
            }
            // Missing books, and hosts that are yet to be known, never mean stop.
            Ok(Course::Decided(Decision::NoHost(_))) | Err(()) => self.leave_to_envoy(leased, kind),
        }
    }

    /// `on_http_response_headers`.
    pub fn response(&mut self) {
        if self.learn_fate() {
            // Somebody else answers it, and it will not be resumed.
            self.leave_queue();
        }
        self.take_report(Map::Response);
        let why = self.why.take();
        if self.leased.is_none() && why.is_none() {
            return;
        }
        let served = self.host.property("upstream\0address");
        let mut attempts = None;
        if let Some(leased) = self.leased.clone()
            && let Ok(mut worker) = self.worker.try_borrow_mut()
        {
            attempts = worker.answered(&leased.name, self.id, self.read_address(&leased.pool, served.as_deref()));
            self.answer = self.read_answer();
        }
        if let Some((why, to)) = why {
            explain::say(&self.host, why, to, served.as_deref(), attempts);
        }
    }

    /// Reads an address of Envoy's; as a rule it is the one that the job was sent to, as the configuration writes it.
    fn read_address(&self, pool: &Pool, text: Option<&[u8]>) -> Option<Address> {
        let sent_to = self.sent_to.and_then(|host| pool.hosts.get(host));
        match sent_to.filter(|host| Some(host.text.as_bytes()) == text) {
            Some(host) => Some(host.address),
            None => Address::parse(text?),
        }
    }

    fn read_answer(&self) -> Answer {
        let header = |name| self.host.header(Map::Response, name);
        // Of a host's response Envoy has noted it, which is quicker to read; of its own answers it will at the end.
        let noted = number(self.host.property("response\0code"));
        let status = noted.or_else(|| digits(&header(":status")?)).and_then(|status| u16::try_from(status).ok());
        let grpc = if self.client.is_grpc { self.grpc(Map::Response) } else { None };
        let may_be_busy = matches!(status, Some(429 | 503)) || grpc.is_some_and(|grpc| grpc.status != 0);
        let retry_after = if may_be_busy { header("retry-after") } else { None };
        let retry_after = retry_after.map(|value| retry_after::read(&value, header("date").as_deref()));
        // Of Envoy's own answers the flags are set before; a host's own error has none.
        let may_be_envoys = status.is_none_or(|status| status >= 400) || grpc.is_some();
        let came_after_timeout = may_be_envoys && self.flags() & flag::UPSTREAM_TIMEOUT != 0;
        Answer { status, came_after_timeout, grpc, retry_after }
    }

    fn flags(&self) -> u64 {
        number(self.host.property("response\0flags")).unwrap_or(0)
    }

    /// `on_http_response_trailers`.
    pub fn trailers(&mut self) {
        self.take_report(Map::Trailers);
        if self.client.is_grpc && self.leased.is_some() {
            self.answer.grpc = self.grpc(Map::Trailers).or(self.answer.grpc);
        }
    }

    fn grpc(&self, map: Map) -> Option<Grpc> {
        let status = self.host.header(map, "grpc-status").as_deref().and_then(digits)?;
        Some(Grpc { status: u32::try_from(status).ok()? })
    }

    /// Envoy deletes the stream, after its last byte or its abort.
    pub fn done(&mut self) {
        if self.learn_fate() {
            self.leave_queue();
        }
        let Some(Leased { name, pool }) = self.leased.take() else {
            return;
        };
        let Ok(mut worker) = self.worker.try_borrow_mut() else {
            return;
        };
        let lease = worker.lease(&name, self.id);
        let whereabouts = lease.filter(|lease| !lease.is_answered).and_then(|lease| moved_to(&self.host, lease.address));
        let outcome = self.outcome(&pool, lease);
        // An upgraded connection lives as long as its client likes.
        let is_timed = self.answer.status != Some(101);
        let latency = || number(self.host.property("response\0backend_latency")).filter(|_| is_timed).map(Duration::from_nanos);
        worker.settle(
            &name,
            self.id,
            Settlement { outcome, is_timed, latency: None, whereabouts, reading: self.reading },
            latency,
        );
    }

    /// Removes what a client must not set, and gives what else matters of what it says.
    fn receive(&self, headers: &Headers) -> Client {
        let mut client = Client::default();
        for (name, value) in headers.iter() {
            let is_ours = name.get(..OURS.len()).is_some_and(|start| start.eq_ignore_ascii_case(OURS));
            if is_ours || *name == *self.plan.override_header.as_bytes() {
                // A repeated header goes with its first; removing it again is nothing.
                let _ = self.host.set_request_header(name, None);
            } else {
                client.says(name, value);
            }
        }
        // An upgrade has no body; a length all the same ends the host's whole connection, with all that runs on it.
        if client.length.is_some() && client.is_websocket {
            let _ = self.host.set_request_header(b"content-length", None);
        }
        client
    }

    fn send_to(&mut self, to: Leased, chosen: &Chosen, kind: Kind) -> Flow {
        self.why = explain::to_whom(&to.pool, || explain::chosen(&to.pool, chosen, kind, Duration::ZERO));
        explain::foresee(&self.host, self.why.as_ref(), explain::first(&to.pool, chosen));
        let named = name_hosts(&self.host, &to.pool, chosen);
        if kind == Kind::Job {
            (self.leased, self.sent_to) = (Some(to), chosen.hosts.first().copied());
        }
        if let Err(fault) = named
            && let Ok(mut worker) = self.worker.try_borrow_mut()
        {
            worker.say_fault("name the chosen host", fault);
        }
        Flow::Continue
    }

    fn leave_to_envoy(&mut self, to: Leased, kind: Kind) -> Flow {
        self.why = explain::to_whom(&to.pool, explain::left_to_envoy);
        explain::foresee(&self.host, self.why.as_ref(), None);
        if kind == Kind::Job
            && let Ok(mut worker) = self.worker.try_borrow_mut()
        {
            worker.take_unplaced(&to.name, self.id, &to.pool);
            self.leased = Some(to);
        }
        Flow::Continue
    }

    fn answer(&mut self, verdict: Verdict, to: Leased, kind: Kind, retry_after: Duration) -> Flow {
        self.why = explain::to_whom(&to.pool, || explain::answered(&to.pool, verdict, Duration::ZERO));
        let sent = verdict.send(&self.host, retry_after);
        if let Ok(mut worker) = self.worker.try_borrow_mut() {
            match sent {
                Ok(()) => {
                    worker.count(Family::Answered, &to.name, Of::Word(verdict.word()), 1);
                    worker.say(verdict.word(), Level::Warn, || {
                        format!("pool {}: answered 503, verdict {}", to.name, verdict.word())
                    });
                }
                Err(fault) => worker.say_fault("answer a request", fault),
            }
        }
        if sent.is_ok() { Flow::Answered } else { self.leave_to_envoy(to, kind) }
    }

    /// How the stream ended for its host.
    fn outcome(&self, pool: &Pool, lease: Option<&Lease>) -> Outcome {
        let details = self.host.property("response\0code_details").unwrap_or_default();
        // Whatever ends a response before its time replaces these details, so that with them there are no flags that judge.
        let flags = if details == VIA_UPSTREAM { 0 } else { self.flags() };
        let Answer { status: code, came_after_timeout, grpc, retry_after } = self.answer;
        let is_at_fault = flags != 0 && (self.client.is_malformed || self.is_unfinished(lease));
        let patience = self.client.patience;
        let elapsed = lease.filter(|_| patience.is_some()).map_or(Duration::ZERO, |lease| self.host.now().since(lease.taken));
        let end = End { code, came_after_timeout, is_at_fault, flags, details: &details, grpc, retry_after, patience, elapsed };
        let outcome = end.outcome(&pool.failure.statuses);
        // Envoy answers at once, and so would all that wait be answered.
        let would_drain_queue = outcome == Outcome::Neutral && flags & flag::NO_HEALTHY_HOST != 0 && pool.queue.is_some();
        if would_drain_queue { Outcome::Busy(PAUSE) } else { outcome }
    }

    /// Whether the client has not sent all of its body: a host may answer before that, or lose its patience, and break off. One that breaks off
    /// before anything of the body has come, at once, has not even looked at it.
    fn is_unfinished(&self, lease: Option<&Lease>) -> bool {
        let Some(length) = self.client.length else {
            return false;
        };
        let least = if lease.is_some_and(|lease| lease.upload.was_seen_coming()) { 0 } else { 1 };
        // As long as the headers can be read this is what they promise; now it is what has come.
        number(self.host.property("request\0size")).is_some_and(|received| (least..length).contains(&received))
    }
}

fn kind(pool: &Pool, headers: &Headers) -> Kind {
    let Some(jobs) = &pool.jobs else {
        return Kind::Job;
    };
    let is_job = jobs.include(headers.value(b":method"), headers.value(b":path"));
    if is_job { Kind::Job } else { Kind::Other }
}

#[cfg(test)]
mod tests;
