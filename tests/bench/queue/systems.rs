//! What is compared: everything that can stand in front of eight GPUs and choose.

use std::net::SocketAddr;

use serde_json::json;
use support::peers::Peer;
use support::{Envoy, RunningEnvoy, Target, Times};

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
}

impl Compared for Kind {
    fn name(self) -> &'static str {
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

    fn key(self) -> &'static str {
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

    async fn start(self, hosts: &[SocketAddr], beside: Option<&RunningEnvoy>) -> Result<Vec<Front>, String> {
        let ours = |keys| Chooser::Ours.envoy(hosts).keys(json!({"pools": {"gpu": keys}}));
        let envoy = match self {
            Self::Nginx => return Front::peer(Peer::nginx(hosts).await),
            Self::Haproxy => return Front::peer(Peer::haproxy(hosts, None).await),
            Self::HaproxyQueue => return Front::peer(Peer::haproxy(hosts, Some(1)).await),
            Self::Ours => {
                ours(json!({"max_in_flight": 1, "alternates": 0, "queue": {"max_length": 100_000, "timeout_ms": 600_000}}))
            }
            Self::WithoutQueue => ours(json!({"max_in_flight": 1000, "alternates": 0})),
            Self::RoundRobin => Chooser::RoundRobin.envoy(hosts),
            Self::TwoChoices => Chooser::TwoChoices.envoy(hosts),
            Self::FullScan => Chooser::FullScan.envoy(hosts),
        };
        Ok(vec![Front::envoy(envoy, beside).await])
    }
}

/// What can be compared.
pub trait Compared: Copy {
    /// For the table.
    fn name(self) -> &'static str;

    /// For the names of figures, and for `--only`.
    fn key(self) -> &'static str;

    /// For those who want to know exactly.
    fn about(self) -> &'static str;

    /// Starts what stands in front of these: one process, or several that share the jobs at random.
    ///
    /// # Errors
    /// It is not here, or it cannot do this; the text says why.
    async fn start(self, hosts: &[SocketAddr], beside: Option<&RunningEnvoy>) -> Result<Vec<Front>, String>;
}

/// The process in front of the cards.
pub enum Front {
    Envoy(Box<RunningEnvoy>),
    Peer(Peer),
}

impl Front {
    /// Two workers. Beside another one, if that runs already.
    pub async fn envoy(envoy: Envoy, beside: Option<&RunningEnvoy>) -> Self {
        let envoy = envoy.workers(2);
        Self::Envoy(Box::new(match beside {
            Some(other) => envoy.start_beside(other).await,
            None => envoy.start().await,
        }))
    }

    /// Alone in front of the cards, if it is here.
    pub fn peer(peer: Result<Peer, String>) -> Result<Vec<Self>, String> {
        peer.map(|peer| vec![Self::Peer(peer)])
    }

    pub fn as_envoy(&self) -> Option<&RunningEnvoy> {
        match self {
            Self::Envoy(envoy) => Some(envoy),
            Self::Peer(_) => None,
        }
    }

    fn address(&self) -> SocketAddr {
        match self {
            Self::Envoy(envoy) => envoy.address(),
            Self::Peer(peer) => peer.address(),
        }
    }

    /// What the scheduler says of it so far.
    fn times(&self) -> Times {
        match self {
            Self::Envoy(envoy) => envoy.times(),
            Self::Peer(peer) => peer.times(),
        }
    }
}

pub struct System<K> {
    pub kind: K,
    fronts: Vec<Front>,
    pub clients: Clients,
}

impl<K> System<K> {
    /// What the scheduler says of all its processes so far.
    pub fn times(&self) -> Times {
        self.fronts.iter().map(Front::times).sum()
    }
}

/// Starts them one after the other, and notes what each is. What is not here is left out, with a line that says so. The clients
/// name the classes of their jobs, if these are any.
pub async fn start<K: Compared>(
    kinds: &[K],
    hosts: &[SocketAddr],
    classes: &'static [&'static str],
    figures: &mut Figures,
) -> Vec<System<K>> {
    let mut systems: Vec<System<K>> = Vec::new();
    for kind in kinds {
        progress(format_args!("starting {}", kind.name()));
        let first = systems.iter().flat_map(|system| &system.fronts).find_map(Front::as_envoy);
        match kind.start(hosts, first).await {
            Ok(fronts) => {
                let version = match &fronts[..] {
                    [Front::Peer(peer)] => format!("{}; ", peer.version()),
                    _ => String::new(),
                };
                figures.note_once(format!("{}: {version}{}", kind.name(), kind.about()));
                let addresses: Vec<SocketAddr> = fronts.iter().map(Front::address).collect();
                let clients = Clients::open(&addresses, classes).await;
                systems.push(System { kind: *kind, fronts, clients });
            }
            Err(reason) => {
                let line = format!("{} is left out: {}", kind.name(), reason.replace('\n', " "));
                progress(format_args!(""));
                eprintln!("  {line}");
                figures.note_once(line);
            }
        }
    }
    progress(format_args!(""));
    systems
}
