//! The balancer: chooses a host for each request of its pools, and keeps the job's lease until the stream ends.
//!
//! ```text
//! on_http_request_headers   strip ─► choose and reserve ─► set the override header and the number of retries
//! on_tick                   where Envoy works on it now ─► move the lease
//! on_done                   where and how it ended ─► settle
//! ```
//!
//! There is no callback for responses: what a response says is read at its end, and Envoy need not enter the VM for each of its chunks.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::reply::Verdict;
use super::roots::Pools;
use super::worker::{Worker, moved_to};
use crate::config::{self, NoHost, Pool};
use crate::core::choice::{Decision, Kind};
use crate::core::lease::Settlement;
use crate::core::outcome::{End, Outcome, VIA_UPSTREAM};
use crate::core::roster::Roster;
use crate::host::{Headers, Host, Level, number};

/// Headers that only this filter sets.
const OURS: &[u8] = b"x-plimsoll-";

/// Envoy's own header for the number of retries; it does not reach the host.
const MAX_RETRIES: &[u8] = b"x-envoy-max-retries";

/// When no host is eligible, nobody knows for how long; asking once a second costs little.
const NO_HOST_RETRY_AFTER: Duration = Duration::from_secs(1);

/// What becomes of a request after its headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// It goes on to the next filter.
    Continue,
    /// It was answered here.
    Answered,
}

/// One pool of one configuration.
struct Route {
    name: Rc<str>,
    pool: Rc<Pool>,
    roster: RefCell<Roster>,
}

/// A configuration that is being run: what a root and its streams share.
pub struct Plan {
    root: u32,
    instance: Rc<str>,
    override_header: Box<[u8]>,
    pools: Pools,
    routes: BTreeMap<Box<[u8]>, Rc<Route>>,
}

impl Plan {
    /// Prepares a configuration for the root with this context id; `instance` is the name of the filter's instance.
    pub fn new(root: u32, instance: &str, config: config::Balancer) -> Self {
        let pools: Pools = config.pools.into_iter().map(|(name, pool)| (name.into(), pool)).collect();
        let route = |(name, pool): &(Rc<str>, Rc<Pool>)| {
            let route = Route { name: name.clone(), pool: pool.clone(), roster: RefCell::default() };
            (name.as_bytes().into(), Rc::new(route))
        };
        let routes = pools.iter().map(route).collect();
        let override_header = config.override_header.into_bytes().into_boxed_slice();
        Self { root, instance: instance.into(), override_header, pools, routes }
    }

    /// Envoy has configured the root.
    pub fn made<H: Host>(&self, worker: &mut Worker<H>) {
        worker.root_made(self.root, &self.instance, &self.pools);
    }

    /// The root's tick.
    pub fn tick<H: Host>(&self, worker: &mut Worker<H>) {
        worker.root_ticks(self.root, &self.instance, &self.pools);
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
    /// The pool, while the stream has a lease.
    leased: Option<Rc<Route>>,
}

impl<H: Host> Stream<H> {
    /// A stream with this context id.
    pub fn new(host: H, worker: Rc<RefCell<Worker<H>>>, plan: Rc<Plan>, id: u32) -> Self {
        Self { host, worker, plan, id, leased: None }
    }

    /// `on_http_request_headers`.
    pub fn request(&mut self) -> Flow {
        let Some(cluster) = self.host.property("xds\0cluster_name") else {
            return Flow::Continue;
        };
        let Some(route) = self.plan.routes.get(cluster.as_slice()).cloned() else {
            return Flow::Continue;
        };
        let kind = match self.host.request_headers() {
            Ok(headers) => {
                self.strip(&headers);
                kind(&route.pool, &headers)
            }
            // Then nobody can say what the request is: it is counted, and the one header that steers is removed unseen.
            Err(_) => {
                let _ = self.host.set_request_header(&self.plan.override_header, None);
                Kind::Job
            }
        };
        let decision = {
            let Ok(mut worker) = self.worker.try_borrow_mut() else {
                return Flow::Continue;
            };
            worker.stream_starts(self.plan.root, &self.plan.instance, &self.plan.pools);
            let mut roster = route.roster.borrow_mut();
            let decision = worker.choose(&route.name, self.id, &route.pool, &mut roster, kind);
            decision.map_err(|fault| worker.say_fault("choose a host", fault))
        };
        match decision {
            Ok(Decision::Chosen(hosts)) => self.send_to(&route, &hosts, kind),
            Ok(Decision::Full(retry_after)) => self.answer(Verdict::Full, &route, kind, retry_after),
            Ok(Decision::NoHost) if route.pool.no_host == NoHost::Reject => {
                self.answer(Verdict::NoHost, &route, kind, NO_HOST_RETRY_AFTER)
            }
            // Missing books never mean stop.
            Ok(Decision::NoHost) | Err(()) => self.leave_to_envoy(&route, kind),
        }
    }

    /// `on_done`.
    pub fn done(&mut self) {
        let Some(route) = self.leased.take() else {
            return;
        };
        let Ok(mut worker) = self.worker.try_borrow_mut() else {
            return;
        };
        let whereabouts = worker.leased_at(&route.name, self.id).and_then(|leased_at| moved_to(&self.host, leased_at));
        let (outcome, is_timed) = self.outcome();
        let latency = || number(self.host.property("response\0backend_latency")).filter(|_| is_timed).map(Duration::from_nanos);
        worker.settle(&route.name, self.id, Settlement { outcome, latency: None, whereabouts }, latency);
    }

    /// Removes what a client must not set.
    fn strip(&self, headers: &Headers) {
        let is_foreign = |name: &[u8]| {
            let starts = name.get(..OURS.len()).is_some_and(|start| start.eq_ignore_ascii_case(OURS));
            starts || *name == *self.plan.override_header
        };
        for (name, _) in headers.iter().filter(|(name, _)| is_foreign(name)) {
            // A repeated header goes with its first; removing it again is nothing.
            let _ = self.host.set_request_header(name, None);
        }
    }

    fn send_to(&mut self, route: &Rc<Route>, hosts: &[usize], kind: Kind) -> Flow {
        let texts: Vec<&str> =
            hosts.iter().filter_map(|host| route.pool.hosts.get(*host)).map(|host| host.text.as_str()).collect();
        if kind == Kind::Job {
            self.leased = Some(route.clone());
        }
        let named = self.host.set_request_header(&self.plan.override_header, Some(texts.join(",").as_bytes()));
        let retries = texts.len().saturating_sub(1).to_string();
        let limited = self.host.set_request_header(MAX_RETRIES, Some(retries.as_bytes()));
        if let Err(fault) = named.and(limited)
            && let Ok(mut worker) = self.worker.try_borrow_mut()
        {
            // Envoy chooses; the lease follows to where it sends the job.
            worker.say_fault("name the chosen host", fault);
        }
        Flow::Continue
    }

    fn leave_to_envoy(&mut self, route: &Rc<Route>, kind: Kind) -> Flow {
        if kind == Kind::Job
            && let Ok(mut worker) = self.worker.try_borrow_mut()
        {
            worker.take_unplaced(&route.name, self.id, &route.pool);
            self.leased = Some(route.clone());
        }
        Flow::Continue
    }

    fn answer(&mut self, verdict: Verdict, route: &Rc<Route>, kind: Kind, retry_after: Duration) -> Flow {
        let sent = verdict.send(&self.host, retry_after);
        if let Ok(mut worker) = self.worker.try_borrow_mut() {
            match sent {
                Ok(()) => worker.say(verdict.word(), Level::Warn, || {
                    format!("pool {}: answered 503, verdict {}", route.name, verdict.word())
                }),
                Err(fault) => worker.say_fault("answer a request", fault),
            }
        }
        if sent.is_ok() { Flow::Answered } else { self.leave_to_envoy(route, kind) }
    }

    /// How the stream ended, and whether the time that it took says something.
    fn outcome(&self) -> (Outcome, bool) {
        let details = self.host.property("response\0code_details").unwrap_or_default();
        let code = number(self.host.property("response\0code")).and_then(|code| u16::try_from(code).ok());
        // Whatever ends a response before its time replaces these details, so that with them there are no flags that judge.
        let flags = if details == VIA_UPSTREAM { 0 } else { number(self.host.property("response\0flags")).unwrap_or(0) };
        // An upgraded connection lives as long as its client likes.
        (End { code, flags, details: &details }.outcome(), code != Some(101))
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
