//! The hosts of the cluster `gpu` as a file that Envoy follows (file EDS).

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

/// One endpoint of the cluster. The default: weight and health are left out.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint {
    address: SocketAddr,
    weight: Option<u32>,
    health: Option<&'static str>,
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self { address, weight: None, health: None }
    }
}

impl Endpoint {
    /// At this address.
    pub fn at(address: SocketAddr) -> Self {
        address.into()
    }

    /// Its `load_balancing_weight`.
    pub fn weight(mut self, weight: u32) -> Self {
        self.weight = Some(weight);
        self
    }

    /// Its `health_status`: `HEALTHY`, `UNHEALTHY`, `DRAINING`, `TIMEOUT`, `DEGRADED`.
    pub fn health(mut self, status: &'static str) -> Self {
        self.health = Some(status);
        self
    }

    fn json(self) -> Value {
        let socket = json!({ "address": self.address.ip().to_string(), "port_value": self.address.port() });
        let mut endpoint = json!({ "endpoint": { "address": { "socket_address": socket } } });
        if let Some(weight) = self.weight {
            endpoint["load_balancing_weight"] = weight.into();
        }
        if let Some(health) = self.health {
            endpoint["health_status"] = health.into();
        }
        endpoint
    }
}

/// Writes the file, or replaces it in one step, as Envoy's watch on its directory needs.
pub(super) fn write(file: &Path, endpoints: &[Endpoint]) {
    let endpoints: Vec<Value> = endpoints.iter().map(|endpoint| endpoint.json()).collect();
    let response = json!({
        "resources": [{
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "gpu",
            "endpoints": [{ "lb_endpoints": endpoints }],
        }],
    });
    let fresh = file.with_extension("new");
    std::fs::write(&fresh, response.to_string()).expect("a file in our directory");
    std::fs::rename(&fresh, file).expect("a file in our directory");
}
