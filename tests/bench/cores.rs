//! Which cores the threads may use.
//!
//! The clients spin between the arrivals, and the kernel likes to wake a server on its client's core. So an Envoy with one worker has the
//! machine's last core, and the clients and hosts have the others.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores that this program was given, apart.
pub struct Cores {
    all: CpuSet,
    envoy: CpuSet,
    clients: CpuSet,
}

impl Cores {
    /// Divides those of the calling thread. With a single core, all share it.
    pub fn divide() -> Self {
        let all = sched_getaffinity(None).expect("our own thread");
        let (mut envoy, mut clients) = (all, all);
        if let Some(last) = (0..CpuSet::MAX_CPU).rev().find(|core| all.is_set(*core)).filter(|_| all.count() > 1) {
            envoy = CpuSet::new();
            envoy.set(last);
            clients.unset(last);
        }
        Self { all, envoy, clients }
    }

    /// Processes that are started from now on have Envoy's core.
    pub fn for_envoy(&self) {
        restrict(&self.envoy);
    }

    /// The calling thread has the clients' cores.
    pub fn for_clients(&self) {
        restrict(&self.clients);
    }

    /// No restriction any more.
    pub fn for_all(&self) {
        restrict(&self.all);
    }
}

fn restrict(cores: &CpuSet) {
    sched_setaffinity(None, cores).expect("cores that we were given");
}
