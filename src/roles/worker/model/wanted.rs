//! What a configuration of the model says, and a root that runs it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::rc::Rc;
use std::time::Duration;

use super::{ADDRESSES, POOL, PRIORITIES, Says, TENANTS};
use crate::config::{Policy, Pool, Role};
use crate::core::membership::Membership;
use crate::core::queue::Priority;
use crate::roles::balancer::Plan;
use crate::roles::fake::Fake;

/// The cluster of Envoy's admin.
pub const ADMIN: &str = "envoy_admin";

/// Slots of a host of which none are written.
const SLOTS: u32 = 2;

pub const PRIORITY: &str = "x-job-priority";
pub const TENANT: &str = "x-tenant";
pub const CLASS: &str = "x-job-class";
pub const COST: &str = "x-job-cost";

/// The slots of a pool's hosts.
pub type Slots = BTreeMap<&'static str, u32>;

/// What a configuration says of the pool; `None`: that there is no such pool.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub hosts: Option<[Option<Entry>; ADDRESSES.len()]>,
    /// Whether the pool's hosts are those of Envoy's cluster; with no alternates, no host is written then.
    pub discovers: bool,
    pub alternates: usize,
    pub fallback: bool,
    pub queue: Option<Queue>,
    pub learns: Learns,
}

/// What a pool goes by beyond jobs and latencies.
#[derive(Clone, Copy, Debug)]
pub struct Learns {
    /// By its place in [`Policy::WORDS`].
    pub policy: usize,
    /// Whether requests say what they are.
    pub has_classes: bool,
    /// Whether hosts tell of themselves.
    pub tells: bool,
}

impl Learns {
    fn json(self) -> String {
        let classes = format!(r#", "class": {{"header": "{CLASS}"}}, "cost": {{"header": "{COST}"}}"#);
        let classes = if self.has_classes { classes.as_str() } else { "" };
        let telemetry = if self.tells { r#", "telemetry": {}"# } else { "" };
        format!(r#", "policy": "{}"{classes}{telemetry}"#, Policy::WORDS[self.policy])
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub weight: f32,
    pub slots: u32,
    pub drain: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Queue {
    pub max_length: usize,
    pub timeout_ms: u64,
    pub ageing_ms: u64,
    pub has_priorities: bool,
    pub has_tenants: bool,
}

impl Queue {
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    fn json(&self) -> String {
        let Self { max_length, timeout_ms, ageing_ms, .. } = self;
        let limits = format!(r#""max_length": {max_length}, "timeout_ms": {timeout_ms}, "ageing_ms": {ageing_ms}"#);
        let priority = if self.has_priorities { format!(r#", "priority": {{"header": "{PRIORITY}"}}"#) } else { String::new() };
        let tenant = if self.has_tenants { format!(r#", "tenant": {{"header": "{TENANT}"}}"#) } else { String::new() };
        format!(r#", "queue": {{{limits}}}{priority}{tenant}"#)
    }

    /// The priority of a request that says this.
    pub fn priority_of(&self, says: Says) -> Priority {
        let word = PRIORITIES[says.priority].filter(|_| self.has_priorities).unwrap_or_default();
        match word.to_lowercase().as_str() {
            "high" => Priority::High,
            "low" => Priority::Low,
            _ => Priority::Normal,
        }
    }

    pub fn tenant_of(&self, says: Says) -> Option<&'static str> {
        TENANTS[says.tenant].filter(|_| self.has_tenants)
    }
}

impl Wanted {
    fn json(&self) -> String {
        let mut pools = r#""other": {"hosts": [{"address": "10.1.0.1:80"}]}"#.to_owned();
        if self.hosts.is_some() {
            let hosts: Vec<String> = self
                .entries()
                .map(|(address, entry)| {
                    let Entry { weight, slots, drain } = entry;
                    let drain = if drain { r#", "drain": true"# } else { "" };
                    format!(r#"{{"address": "{address}", "weight": {weight}, "max_in_flight": {slots}{drain}}}"#)
                })
                .collect();
            let hosts = if self.discovers && self.alternates == 0 { Vec::new() } else { hosts };
            let discovery = if self.discovers {
                format!(r#""discovery": {{"cluster": "{ADMIN}"}}, "max_in_flight": {SLOTS}, "#)
            } else {
                String::new()
            };
            let no_host = if self.fallback { "fallback" } else { "reject" };
            let queue = self.queue.map(|queue| queue.json()).unwrap_or_default();
            let rest = self.learns.json() + &queue;
            let rest = format!(r#"{discovery}"jobs": {{}}, "alternates": {}, "no_host": "{no_host}"{rest}"#, self.alternates);
            write!(pools, r#", "{POOL}": {{"hosts": [{}], {rest}}}"#, hosts.join(", ")).unwrap();
        }
        format!(r#"{{"trusted_headers": true, "pools": {{{pools}}}}}"#)
    }

    /// The hosts of the pool and their slots, none where it takes no new jobs; `members` is what is known of Envoy's cluster.
    /// `None`: it is not known which there are.
    pub fn slots(&self, members: Option<&Membership>) -> Option<Slots> {
        let written = self.entries().filter(|_| !self.discovers || self.alternates > 0);
        let written: BTreeMap<_, _> =
            written.map(|(address, entry)| (address, if entry.drain { 0 } else { entry.slots })).collect();
        let Some(members) = members.filter(|_| self.discovers) else {
            return (!self.discovers || !written.is_empty()).then_some(written);
        };
        let is_there = |address: &&str| members.members().iter().find(|member| member.address.to_string() == *address);
        let here = ADDRESSES.into_iter().filter_map(|address| Some((address, is_there(&address)?.drains)));
        let slots = |address: &str, drains: bool| if drains { 0 } else { written.get(address).copied().unwrap_or(SLOTS) };
        Some(here.map(|(address, drains)| (address, slots(address, drains))).collect())
    }

    /// Whether a job may be held for a host that is busy while another one is free.
    pub fn holds(&self) -> bool {
        self.queue.is_some() && Policy::WORDS[self.learns.policy] == "least_time"
    }

    /// What is written of hosts.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, Entry)> {
        let hosts = self.hosts.iter().flatten();
        ADDRESSES.into_iter().zip(hosts).filter_map(|(address, entry)| Some((address, (*entry)?)))
    }
}

/// A configuration that a root of a VM runs.
pub struct Running {
    pub root: u32,
    pub wanted: Wanted,
    /// The pool, if it has one, as the worker knows it.
    pub pool: Option<Rc<Pool>>,
    pub plan: Rc<Plan>,
}

impl Running {
    pub fn new(wanted: &Wanted, host: &Fake, root: u32) -> Rc<Self> {
        host.stream(root, |_| ());
        match Role::parse(wanted.json().as_bytes()) {
            Ok(Role::Balancer(config)) => {
                let pool = config.pools.iter().find(|(name, _)| *name == POOL).map(|(_, pool)| pool.clone());
                Rc::new(Self { root, wanted: wanted.clone(), pool, plan: Rc::new(Plan::new(root, "plimsoll", config)) })
            }
            other => panic!("{}: {other:?}", wanted.json()),
        }
    }
}
