//! What is compared: all that can stand in front of eight cards and choose.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use support::peers::Peer;
use support::{Envoy, RunningEnvoy};

use crate::queue::systems::{Compared, Front};
use crate::systems::Chooser;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    LeastTimeQueue,
    LeastTime,
    LeastScoreQueue,
    LeastScore,
    RoundRobin,
    TwoChoices,
    FullScan,
    Weighted,
    Nginx,
    Haproxy,
    HaproxyQueue,
}

impl Kind {
    pub const ALL: [Self; 11] = [
        Self::LeastTimeQueue,
        Self::LeastTime,
        Self::LeastScoreQueue,
        Self::LeastScore,
        Self::RoundRobin,
        Self::TwoChoices,
        Self::FullScan,
        Self::Weighted,
        Self::Nginx,
        Self::Haproxy,
        Self::HaproxyQueue,
    ];

    /// Enough to see that the benchmark works: each costs seconds to start.
    pub const QUICK: [Self; 4] = [Self::LeastTimeQueue, Self::LeastTime, Self::Weighted, Self::HaproxyQueue];

    pub fn key(self) -> &'static str {
        match self {
            Self::LeastTimeQueue => "least_time_queue",
            Self::LeastTime => "least_time",
            Self::LeastScoreQueue => "least_score_queue",
            Self::LeastScore => "least_score",
            Self::RoundRobin => "round_robin",
            Self::TwoChoices => "least_request",
            Self::FullScan => "full_scan",
            Self::Weighted => "weighted_round_robin",
            Self::Nginx => "nginx",
            Self::Haproxy => "haproxy",
            Self::HaproxyQueue => "haproxy_queue",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::LeastTimeQueue => "ours, least_time, queue",
            Self::LeastTime => "ours, least_time",
            Self::LeastScoreQueue => "ours, least_score, queue",
            Self::LeastScore => "ours, least_score",
            Self::RoundRobin => "Envoy round robin",
            Self::TwoChoices => "Envoy least_request",
            Self::FullScan => "Envoy FULL_SCAN",
            Self::Weighted => "Envoy weighted by ORCA",
            Self::Nginx => "nginx least_conn",
            Self::Haproxy => "HAProxy leastconn",
            Self::HaproxyQueue => "HAProxy, maxconn 1",
        }
    }

    pub fn is_ours(self) -> bool {
        matches!(self, Self::LeastTimeQueue | Self::LeastTime | Self::LeastScoreQueue | Self::LeastScore)
    }

    /// Jobs wait in front of the cards, which have one each.
    pub fn has_slots(self) -> bool {
        matches!(self, Self::LeastTimeQueue | Self::LeastScoreQueue)
    }
}

/// One of them, set up for jobs of which a second takes so long.
#[derive(Clone, Copy, Debug)]
pub struct Scaled {
    pub kind: Kind,
    pub second: Duration,
}

impl Compared for Scaled {
    fn name(self) -> &'static str {
        self.kind.name()
    }

    fn key(self) -> &'static str {
        self.kind.key()
    }

    fn about(self) -> &'static str {
        match self.kind {
            Kind::LeastTimeQueue => {
                "dist/plimsoll.wasm with policy least_time, class from x-job-class, max_in_flight 1, alternates 0 and a queue that never fills up nor times out; ewma.time_constant_ms of 30 s, scaled as the jobs are"
            }
            Kind::LeastTime => {
                "the same with max_in_flight 1000, no queue and least_time.runs_at_once 1: jobs wait inside the cards"
            }
            Kind::LeastScoreQueue => {
                "dist/plimsoll.wasm with policy least_score, max_in_flight 1, alternates 0 and the same queue; score.target_latency_ms of 4 s and ewma.time_constant_ms of 30 s, scaled as the jobs are"
            }
            Kind::LeastScore => "the same with max_in_flight 1000 and no queue",
            Kind::RoundRobin => "no Wasm filter; the cluster's policy is round robin",
            Kind::TwoChoices => "no Wasm filter; the cluster's policy is least_request (two choices)",
            Kind::FullScan => "no Wasm filter; the cluster's policy is least_request with FULL_SCAN",
            Kind::Weighted => {
                "no Wasm filter; the cluster's policy is client_side_weighted_round_robin: each answer carries an ORCA report of the card's last 100 jobs (application_utilization, rps_fractional); blackout_period 10 s and weight_update_period 1 s, scaled (100 ms at least), and weights do not expire"
            }
            Kind::Nginx => "least_conn with a zone, so that both workers count together; kept connections",
            Kind::Haproxy => "balance leastconn",
            Kind::HaproxyQueue => "the same with maxconn 1 on each server: jobs wait in HAProxy's own queue",
        }
    }

    async fn start(self, hosts: &[SocketAddr], beside: Option<&RunningEnvoy>) -> Result<Vec<Front>, String> {
        let envoy = match self.kind {
            Kind::Nginx => return Front::peer(Peer::nginx(hosts).await),
            Kind::Haproxy => return Front::peer(Peer::haproxy(hosts, None).await),
            Kind::HaproxyQueue => return Front::peer(Peer::haproxy(hosts, Some(1)).await),
            Kind::LeastTimeQueue | Kind::LeastTime | Kind::LeastScoreQueue | Kind::LeastScore => {
                return self.ours(hosts, beside, json!({}), 1).await;
            }
            Kind::RoundRobin => Chooser::RoundRobin.envoy(hosts),
            Kind::TwoChoices => Chooser::TwoChoices.envoy(hosts),
            Kind::FullScan => Chooser::FullScan.envoy(hosts),
            Kind::Weighted => self.weighted(hosts),
        };
        Ok(vec![Front::envoy(envoy, beside).await])
    }
}

impl Scaled {
    /// So many Envoys with ours, which share the jobs, and these keys of the pool besides.
    ///
    /// # Errors
    /// The module refuses the configuration; the text is its line.
    pub async fn ours(
        self,
        hosts: &[SocketAddr],
        beside: Option<&RunningEnvoy>,
        keys: Value,
        envoys: usize,
    ) -> Result<Vec<Front>, String> {
        let envoy = || self.ours_to_be(hosts).keys(json!({"pools": {"gpu": keys}}));
        envoy().validate().await.map_err(|log| log.replace("plimsoll: ", ""))?;
        let mut fronts = Vec::new();
        for _ in 0..envoys {
            let beside = fronts.iter().find_map(Front::as_envoy).or(beside);
            fronts.push(Front::envoy(envoy(), beside).await);
        }
        Ok(fronts)
    }

    fn ours_to_be(self, hosts: &[SocketAddr]) -> Envoy {
        let scaled = |seconds: u32| (self.second * seconds).as_millis().max(1) as u64;
        let mut pool = json!({
            "alternates": 0,
            "explain": null,
            "ewma": {"time_constant_ms": scaled(30)},
            "score": {"target_latency_ms": scaled(4)},
        });
        if self.kind.has_slots() {
            pool["max_in_flight"] = 1.into();
            pool["queue"] = json!({"max_length": 100_000, "timeout_ms": 600_000});
        } else {
            pool["max_in_flight"] = 1000.into();
            pool["queue"] = Value::Null;
        }
        pool["policy"] = "least_score".into();
        let mut keys = json!({});
        if matches!(self.kind, Kind::LeastTime | Kind::LeastTimeQueue) {
            keys["trusted_headers"] = true.into();
            pool["policy"] = "least_time".into();
            pool["class"] = json!({"header": "x-job-class"});
            pool["score"] = Value::Null;
        }
        if self.kind == Kind::LeastTime {
            pool["least_time"] = json!({"runs_at_once": 1});
        }
        keys["pools"] = json!({"gpu": pool});
        Chooser::Ours.envoy(hosts).keys(keys)
    }

    fn weighted(self, hosts: &[SocketAddr]) -> Envoy {
        let seconds = |seconds: f64| format!("{seconds:.3}s");
        let second = self.second.as_secs_f64();
        let policy = json!({
            "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin",
            "blackout_period": seconds(10.0 * second),
            "weight_update_period": seconds(second.max(0.1)),
            "weight_expiration_period": "3600s",
        });
        let named = json!({"name": "envoy.load_balancing_policies.client_side_weighted_round_robin", "typed_config": policy});
        let policies = json!({"policies": [{"typed_extension_config": named}]});
        Chooser::RoundRobin.envoy(hosts).cluster(json!({"lb_policy": null, "load_balancing_policy": policies}))
    }
}
