//! What is compared: Envoys that run the same file of the repository over the same hosts, and differ in who chooses.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use support::{Envoy, RunningEnvoy, Target};

use crate::attempts::per_attempt;
use crate::clients::Clients;
use crate::cores::Cores;
use crate::figures::Figures;
use crate::modules;
use crate::rounds::progress;

/// Every system runs this file. HTTP/1.1 to the hosts costs Envoy the least, and leaves a filter's share the largest.
pub const FILE: &str = "http1.yaml";

/// Where a cluster says how it speaks HTTP to its hosts.
pub const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// With everything on, each host is probed so often.
pub const PROBED_EVERY: Duration = Duration::from_secs(2);

/// Connections of the clients to each Envoy, one request on each at a time.
const CONNECTIONS: usize = 32;

/// Who chooses the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chooser {
    /// Envoy's round robin: the cheapest, and the baseline of all.
    RoundRobin,
    /// The floor filter stands in our filter's place; nobody sets the override header, so that the cluster's fallback chooses.
    Floor,
    /// Our filter, plain.
    Ours,
    /// Our filter with all that a pool can have.
    Everything,
    /// As the baseline, and the floor filter as a filter of each attempt.
    NoneButPerAttempt,
    /// The floor filter twice: in our filter's place, and as a filter of each attempt.
    FloorPerAttempt,
    /// Our filter, and a trimmed floor filter of each attempt.
    OursPerAttempt,
    /// Envoy's own choice of the least loaded among all.
    FullScan,
    /// Envoy's own choice of the less loaded of two.
    TwoChoices,
}

impl Chooser {
    /// For the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "no filter",
            Self::Floor => "floor filter",
            Self::Ours => "ours",
            Self::Everything => "ours, everything on",
            Self::NoneButPerAttempt => "no filter but the floor filter per attempt",
            Self::FloorPerAttempt => "floor filter and one per attempt",
            Self::OursPerAttempt => "ours and a trimmed floor filter per attempt",
            Self::FullScan => "Envoy's FULL_SCAN",
            Self::TwoChoices => "Envoy's least_request",
        }
    }

    /// For the names of figures.
    pub fn key(self) -> &'static str {
        match self {
            Self::RoundRobin => "no_filter",
            Self::Floor => "floor",
            Self::Ours => "ours",
            Self::Everything => "everything_on",
            Self::NoneButPerAttempt => "none_but_per_attempt",
            Self::FloorPerAttempt => "floor_per_attempt",
            Self::OursPerAttempt => "ours_per_attempt",
            Self::FullScan => "full_scan",
            Self::TwoChoices => "least_request",
        }
    }

    /// For those who want to know exactly.
    pub fn about(self) -> &'static str {
        match self {
            Self::RoundRobin => "no Wasm filter; the cluster's policy is round robin",
            Self::Floor => {
                "tests/floor in place of our module: reads xds.cluster_name, sets x-floor; the cluster's override_host policy finds no header and falls back to least_request"
            }
            Self::Ours => {
                "dist/plimsoll.wasm with the file's configuration, without any of the keys that everything on has; the cluster's override_host policy sends where it says"
            }
            Self::Everything => {
                "as ours, and the pool has failure, latency_breaker, probe with prewarm (each host every 2 s) and explain in the response's headers"
            }
            Self::NoneButPerAttempt => {
                "as no filter, and tests/floor as an upstream HTTP filter of the cluster: what an instance costs alone"
            }
            Self::FloorPerAttempt => {
                "as floor filter, and the same module as an upstream HTTP filter of the cluster, with the same vm_id: the same VM"
            }
            Self::OursPerAttempt => {
                "as ours, and tests/floor as an upstream HTTP filter of the cluster, with the same vm_id; trimmed as our module is: without the callbacks that do nothing; another module, so another VM"
            }
            Self::FullScan => "no Wasm filter; the cluster's policy is least_request with FULL_SCAN",
            Self::TwoChoices => "no Wasm filter; the cluster's policy is least_request (two choices)",
        }
    }

    /// The Envoy to be, in front of these.
    pub fn envoy(self, hosts: &[SocketAddr]) -> Envoy {
        let options = json!({"common_http_protocol_options": {"idle_timeout": "600s"}});
        let envoy = Envoy::new(FILE)
            .addresses(hosts)
            // The file's 4 s would close connections while the other systems have their turns.
            .cluster(json!({"typed_extension_protocol_options": {HTTP_OPTIONS: options}}))
            // For every system alike: the file's log prints what our filter explains, and looks at each request all the same.
            .connection_manager(json!({"access_log": null}));
        match self {
            Self::RoundRobin => envoy.without_filter("ROUND_ROBIN"),
            Self::Floor => envoy.module(modules::floor()),
            Self::Ours => plain(envoy),
            Self::Everything => envoy.keys(json!({"pools": {"gpu": {
                "failure": {},
                "latency_breaker": {"window": 100, "threshold_ms": 8000},
                "probe": {"path": "/health", "interval_ms": PROBED_EVERY.as_millis() as u64, "prewarm": true},
                "explain": "header",
            }}})),
            Self::NoneButPerAttempt => per_attempt(envoy.without_filter("ROUND_ROBIN"), &modules::floor()),
            Self::FloorPerAttempt => per_attempt(envoy.module(modules::floor()), &modules::floor()),
            Self::OursPerAttempt => per_attempt(plain(envoy), &modules::trimmed_floor()),
            Self::TwoChoices => envoy.without_filter("LEAST_REQUEST"),
            Self::FullScan => {
                let policy = json!({
                    "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest",
                    "selection_method": "FULL_SCAN",
                });
                let named = json!({"name": "envoy.load_balancing_policies.least_request", "typed_config": policy});
                let policies = json!({"policies": [{"typed_extension_config": named}]});
                envoy.without_filter("ROUND_ROBIN").cluster(json!({"lb_policy": null, "load_balancing_policy": policies}))
            }
        }
    }
}

/// The pool without the keys of [`Chooser::Everything`], whichever of them the file has.
fn plain(envoy: Envoy) -> Envoy {
    envoy.keys(json!({"pools": {"gpu": {"failure": null, "latency_breaker": null, "probe": null, "explain": null}}}))
}

/// One of the things that are compared.
pub struct System {
    /// Who chooses.
    pub chooser: Chooser,
    /// Among how many.
    pub hosts: usize,
    /// The Envoy.
    pub envoy: RunningEnvoy,
    /// Its clients.
    pub clients: Clients,
}

impl System {
    /// Starts an Envoy with so many workers in front of these hosts. Beside another one, if that runs already.
    pub async fn start(chooser: Chooser, hosts: &[SocketAddr], workers: usize, beside: Option<&RunningEnvoy>) -> Self {
        let envoy = chooser.envoy(hosts).workers(workers);
        let envoy = match beside {
            Some(other) => envoy.start_beside(other).await,
            None => envoy.start().await,
        };
        let clients = Clients::open(envoy.address(), CONNECTIONS).await;
        Self { chooser, hosts: hosts.len(), envoy, clients }
    }

    /// For the table.
    pub fn name(&self) -> String {
        format!("{}, {} hosts", self.chooser.name(), thousands(self.hosts))
    }

    /// For the names of figures.
    pub fn key(&self) -> String {
        format!("{}_{}", self.chooser.key(), self.hosts)
    }
}

/// Starts one worker in front of the first so many hosts for each chooser named, and notes what each is.
pub async fn start(choosers: &[(Chooser, usize)], hosts: &[SocketAddr], figures: &mut Figures) -> Vec<System> {
    let mut systems: Vec<System> = Vec::new();
    let cores = Cores::divide();
    figures.note(format!(
        "every system: envoy/{FILE} with all its filters but ours, without its access log, the same hosts and clients, and what is said here"
    ));
    for (chooser, count) in choosers {
        progress(format_args!("starting Envoy: {}, {} hosts", chooser.name(), thousands(*count)));
        if systems.iter().all(|system| system.chooser != *chooser) {
            figures.note(format!("{}: {}", chooser.name(), chooser.about()));
        }
        let first = systems.first().map(|system| &system.envoy);
        // A process inherits the cores of the thread that starts it.
        cores.for_envoy();
        systems.push(System::start(*chooser, &hosts[..*count], 1, first).await);
        cores.for_clients();
    }
    systems
}

fn thousands(number: usize) -> String {
    if number < 1000 { number.to_string() } else { format!("{},{:03}", number / 1000, number % 1000) }
}
