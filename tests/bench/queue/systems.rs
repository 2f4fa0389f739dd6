//! What is compared: everything that can stand in front of eight GPUs and choose.

use std::net::SocketAddr;

use serde_json::json;
use support::peers::Peer;
use support::{RunningEnvoy, Target, Times};

use super::clients::Clients;
use crate::figures::Figures;
use crate::rounds::progress;
use crate::systems::Chooser;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ours,
    WithoutQueue,
    RoundRobin,
    TwoChoices,
    FullScan,
    Nginx,
    Haproxy,
    HaproxyQueue,
}

impl Kind {
    pub const ALL: [Self; 8] = [
        Self::Ours,
        Self::WithoutQueue,
        Self::RoundRobin,
        Self::TwoChoices,
        Self::FullScan,
        Self::Nginx,
        Self::Haproxy,
        Self::HaproxyQueue,
    ];

    /// For the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours, queue",
            Self::WithoutQueue => "ours, no queue",
            Self::RoundRobin => "Envoy round robin",
            Self::TwoChoices => "Envoy least_request",
            Self::FullScan => "Envoy FULL_SCAN",
            Self::Nginx => "nginx least_conn",
            Self::Haproxy => "HAProxy leastconn",
            Self::HaproxyQueue => "HAProxy, maxconn 1",
        }
    }

    /// For the names of figures, and for `--only`.
    pub fn key(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::WithoutQueue => "ours_without_queue",
            Self::RoundRobin => "round_robin",
            Self::TwoChoices => "least_request",
            Self::FullScan => "full_scan",
            Self::Nginx => "nginx",
            Self::Haproxy => "haproxy",
            Self::HaproxyQueue => "haproxy_queue",
        }
    }

    fn about(self) -> &'static str {
        match self {
            Self::Ours => "dist/plimsoll.wasm with max_in_flight 1, alternates 0 and a queue that never fills up nor times out",
            Self::WithoutQueue => "dist/plimsoll.wasm with max_in_flight 1000 and alternates 0: jobs wait inside the cards",
            Self::RoundRobin => "no Wasm filter; the cluster's policy is round robin",
            Self::TwoChoices => "no Wasm filter; the cluster's policy is least_request (two choices)",
            Self::FullScan => "no Wasm filter; the cluster's policy is least_request with FULL_SCAN",
            Self::Nginx => "least_conn with a zone, so that both workers count together; kept connections",
            Self::Haproxy => "balance leastconn",
            Self::HaproxyQueue => "the same with maxconn 1 on each server: jobs wait in HAProxy's own queue",
        }
    }

    async fn start(self, hosts: &[SocketAddr], beside: Option<&RunningEnvoy>) -> Result<Front, String> {
        let ours = |keys| Chooser::Ours.envoy(hosts).keys(json!({"pools": {"gpu": keys}}));
        let envoy = match self {
            Self::Nginx => return Peer::nginx(hosts).await.map(Front::Peer),
            Self::Haproxy => return Peer::haproxy(hosts, None).await.map(Front::Peer),
            Self::HaproxyQueue => return Peer::haproxy(hosts, Some(1)).await.map(Front::Peer),
            Self::Ours => {
                ours(json!({"max_in_flight": 1, "alternates": 0, "queue": {"max_length": 100_000, "timeout_ms": 600_000}}))
            }
            Self::WithoutQueue => ours(json!({"max_in_flight": 1000, "alternates": 0})),
            Self::RoundRobin => Chooser::RoundRobin.envoy(hosts),
            Self::TwoChoices => Chooser::TwoChoices.envoy(hosts),
            Self::FullScan => Chooser::FullScan.envoy(hosts),
        };
        let envoy = envoy.workers(2);
        let envoy = match beside {
            Some(other) => envoy.start_beside(other).await,
            None => envoy.start().await,
        };
        Ok(Front::Envoy(Box::new(envoy)))
    }
}

/// The process in front of the cards.
pub enum Front {
    Envoy(Box<RunningEnvoy>),
    Peer(Peer),
}

impl Front {
    fn address(&self) -> SocketAddr {
        match self {
            Self::Envoy(envoy) => envoy.address(),
            Self::Peer(peer) => peer.address(),
        }
    }

    /// What the scheduler says of it so far.
    pub fn times(&self) -> Times {
        match self {
            Self::Envoy(envoy) => envoy.times(),
            Self::Peer(peer) => peer.times(),
        }
    }
}

pub struct System {
    pub kind: Kind,
    pub front: Front,
    pub clients: Clients,
}

/// Starts them one after the other, and notes what each is. What is not here is left out, with a line that says so.
pub async fn start(kinds: &[Kind], hosts: &[SocketAddr], figures: &mut Figures) -> Vec<System> {
    let mut systems: Vec<System> = Vec::new();
    for kind in kinds {
        progress(format_args!("starting {}", kind.name()));
        let first = systems.iter().find_map(|system| match &system.front {
            Front::Envoy(envoy) => Some(&**envoy),
            Front::Peer(_) => None,
        });
        match kind.start(hosts, first).await {
            Ok(front) => {
                let version = match &front {
                    Front::Envoy(_) => String::new(),
                    Front::Peer(peer) => format!("{}; ", peer.version()),
                };
                figures.note(format!("{}: {version}{}", kind.name(), kind.about()));
                let clients = Clients::open(front.address()).await;
                systems.push(System { kind: *kind, front, clients });
            }
            Err(reason) => {
                let line = format!("{} is left out: {}", kind.name(), reason.replace('\n', " "));
                eprintln!("  {line}");
                figures.note(line);
            }
        }
    }
    progress(format_args!(""));
    systems
}
