//! Pools and records for the tests of the core.

use std::rc::Rc;
use std::sync::LazyLock;
use std::time::Duration;

use super::address::Address;
use super::choice::{Kind, Wanted};
use super::learning::Job;
use super::record::{Named, Record, Seat};
use super::time::Instant;
use crate::config::{Pool, Role};

/// A pool, from what stands between the braces of its configuration.
pub fn pool(keys: &str) -> Rc<Pool> {
    match Role::parse(format!(r#"{{"pools": {{"gpu": {{{keys}}}}}}}"#).as_bytes()) {
        Ok(Role::Balancer(config)) => config.pools["gpu"].clone(),
        other => panic!("{keys}: {other:?}"),
    }
}

/// A pool of so many hosts, `10.0.0.1:80` and on, with some more keys.
pub fn pool_of(hosts: usize, keys: &str) -> Rc<Pool> {
    let hosts: Vec<String> = (0..hosts).map(|host| format!(r#"{{"address": "{}"}}"#, address(host))).collect();
    pool(&format!(r#""hosts": [{}]{keys}"#, hosts.join(",")))
}

/// The address of the host with this index.
pub fn address(host: usize) -> Address {
    Address::parse(format!("10.0.{}.{}:80", host / 250, host % 250 + 1).as_bytes()).unwrap()
}

/// A host of weight 1 as a configuration names it.
pub fn named(host: usize) -> Named {
    Named { address: address(host), weight: 1.0, max_in_flight: 4, drain: false, is_reserve: false }
}

/// A record of the pool's hosts in their order.
pub fn record_of(pool: &Pool) -> Record {
    let mut record = Record::new(1);
    record.header.describe_joining(pool.slow_start, pool.discovery.is_some());
    record.header.describe_policy(&pool.policy, pool.most_at_once(), pool.patience().unwrap_or_default());
    record.keep_insights(pool.wants_insight());
    for host in &pool.hosts {
        record.add_host(host.named(), false);
    }
    record
}

/// A record of so many hosts, and their seats.
pub fn seats_of(hosts: usize) -> (Record, Vec<Seat>) {
    let mut record = Record::new(1);
    let seats = (0..hosts).map(|host| record.add_host(named(host), false)).collect();
    (record, seats)
}

/// A point of time, in seconds.
pub fn at(seconds: f64) -> Instant {
    Instant::default() + Duration::from_secs_f64(seconds)
}

/// Any job, or any other request.
pub fn wants(kind: Kind) -> Wanted<'static> {
    static JOB: LazyLock<Job> = LazyLock::new(Job::unknown);
    Wanted { kind, job: &JOB, preferred: None }
}

impl Record {
    /// The bytes to store, as a block of its own.
    pub fn into_bytes(mut self) -> Vec<u8> {
        self.bytes().to_vec()
    }
}
