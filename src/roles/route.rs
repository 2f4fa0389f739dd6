//! One pool of one configuration, with the hosts that it has now.

use std::cell::RefCell;
use std::rc::Rc;

use super::worker::Worker;
use crate::config::{self, Pool};
use crate::core::choice::Chosen;
use crate::core::membership::Membership;
use crate::core::roster::Roster;
use crate::host::{Fault, Host};

/// Envoy's own header for the number of retries; it does not reach the host.
const MAX_RETRIES: &[u8] = b"x-envoy-max-retries";

/// A pool of a configuration.
pub struct Route {
    /// Its name, which is its cluster's.
    pub name: Rc<str>,
    /// As it was written.
    pub configured: Rc<Pool>,
    /// As it is now.
    pub running: RefCell<Running>,
}

/// A pool with the hosts that it has now.
pub struct Running {
    members: Option<Rc<Membership>>,
    /// The pool.
    pub pool: Rc<Pool>,
    /// Where its hosts stand.
    pub roster: Roster,
}

impl Route {
    /// A pool as it was written.
    pub fn new(name: &Rc<str>, configured: &Rc<Pool>) -> Self {
        let running = Running { members: None, pool: configured.clone(), roster: Roster::default() };
        Self { name: name.clone(), configured: configured.clone(), running: RefCell::new(running) }
    }

    /// A pool with the hosts of several configurations, of which it is the newest. (With discovery Envoy's cluster says which there are.)
    pub fn of_all(name: &Rc<str>, newest: &Rc<Pool>, hosts: Vec<config::Host>) -> Self {
        let is_whole = newest.discovery.is_some() || hosts.len() <= newest.hosts.len();
        let configured = if is_whole { newest.clone() } else { Rc::new(newest.with_hosts(hosts.into_iter())) };
        Self::new(name, &configured)
    }
}

impl Running {
    /// Takes over what the worker knows of the pool's hosts.
    pub fn catch_up<H: Host>(&mut self, route: &Route, worker: &Worker<H>) {
        let members = worker.members(&route.name);
        if members.map(Rc::as_ptr) != self.members.as_ref().map(Rc::as_ptr) {
            let pool = worker.pool(&route.name, &route.configured);
            *self = Self { members: members.cloned(), pool, roster: Roster::default() };
        }
    }
}

/// Names the chosen host and its alternates to Envoy, for the current stream. Where that fails Envoy chooses, and the lease follows to where it sends the job.
pub fn name_hosts(host: &impl Host, pool: &Pool, chosen: &Chosen) -> Result<(), Fault> {
    let hosts = chosen.hosts.iter().filter_map(|host| pool.hosts.get(*host));
    let texts: Vec<&str> = hosts.map(|host| host.text.as_str()).collect();
    let named = host.set_request_header(pool.override_header.as_bytes(), Some(texts.join(",").as_bytes()));
    let retries = texts.len().saturating_sub(1).to_string();
    let limited = host.set_request_header(MAX_RETRIES, Some(retries.as_bytes()));
    named.and(limited)
}
