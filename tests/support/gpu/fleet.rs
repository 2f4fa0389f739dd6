//! Several hosts at once.

use std::net::SocketAddr;
use std::ops::Deref;

use super::{Gpu, GpuHost};

/// Hosts by number: `fleet[0]`, `fleet.iter()`.
#[derive(Clone, Debug)]
pub struct Fleet(Vec<GpuHost>);

impl Fleet {
    /// `hosts` equal hosts on free ports.
    pub async fn start(hosts: usize, spec: Gpu) -> Self {
        Self::start_each(vec![spec; hosts]).await
    }

    /// One host of each kind, on free ports.
    pub async fn start_each(specs: impl IntoIterator<Item = Gpu>) -> Self {
        let mut hosts = Vec::new();
        for spec in specs {
            hosts.push(GpuHost::start(spec).await);
        }
        Self(hosts)
    }

    /// `ip:port` of each host.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.iter().map(GpuHost::address).collect()
    }

    /// Jobs that each host has received.
    pub fn jobs(&self) -> Vec<u64> {
        self.iter().map(GpuHost::jobs).collect()
    }

    /// Jobs that each host has in flight.
    pub fn in_flight(&self) -> Vec<u64> {
        self.iter().map(GpuHost::in_flight).collect()
    }

    /// The most that each host ever ran at once.
    pub fn max_running(&self) -> Vec<u64> {
        self.iter().map(|host| host.counts().max_running).collect()
    }

    /// The most that each host ever had in flight.
    pub fn max_in_flight(&self) -> Vec<u64> {
        self.iter().map(|host| host.counts().max_in_flight).collect()
    }

    /// Starts every host's books afresh.
    pub fn clear_books(&self) {
        self.iter().for_each(GpuHost::clear_books);
    }

    /// Waits until no host has a job in flight; panics after [`crate::DEADLINE`].
    pub async fn idle(&self) {
        for host in self.iter() {
            host.until("no job is in flight", |counts| counts.in_flight == 0).await;
        }
    }
}

impl Deref for Fleet {
    type Target = [GpuHost];

    fn deref(&self) -> &[GpuHost] {
        &self.0
    }
}
