//! A stand-in for Prometheus' Alertmanager: takes alerts and shows what came. Being a [`GpuHost`], it fails on command like one.

use std::ops::Deref;
use std::time::Instant;

use serde_json::Value;

use crate::{Gpu, GpuHost, Target};

/// A running stand-in.
#[derive(Clone, Debug)]
pub struct Alertmanager(GpuHost);

/// One request that came.
#[derive(Clone, Debug)]
pub struct Post {
    /// When.
    pub arrived: Instant,
    /// `POST /api/v2/alerts application/json`
    pub line: String,
    /// The one alert that is in it.
    pub alert: Value,
}

impl Post {
    /// Whether it says that something is over.
    pub fn resolves(&self) -> bool {
        !self.alert["endsAt"].is_null()
    }

    /// A label of the alert.
    pub fn label(&self, name: &str) -> &str {
        self.alert["labels"][name].as_str().unwrap_or_else(|| panic!("no label {name} in {:#}", self.alert))
    }
}

impl Alertmanager {
    /// Starts on a free port.
    pub async fn start() -> Self {
        Self(GpuHost::start(Gpu::new().slots(100)).await)
    }

    /// What came so far, in its order; panics when a body is no list of one alert. A post whose body is still coming is left out.
    pub fn posts(&self) -> Vec<Post> {
        let whole = self.0.requests().into_iter().filter(|seen| !seen.body.is_empty());
        whole
            .map(|seen| {
                let content_type = seen.headers.get("content-type").map_or("", |value| value.to_str().unwrap_or("?"));
                let line = format!("{} {} {content_type}", seen.method, seen.path);
                let text = String::from_utf8_lossy(&seen.body);
                let mut list: Vec<Value> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"));
                assert_eq!(list.len(), 1, "a list of one alert: {text}");
                Post { arrived: seen.arrived, line, alert: list.swap_remove(0) }
            })
            .collect()
    }
}

impl Deref for Alertmanager {
    type Target = GpuHost;

    fn deref(&self) -> &GpuHost {
        &self.0
    }
}

impl Target for Alertmanager {
    fn address(&self) -> std::net::SocketAddr {
        self.0.address()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Client;

    #[tokio::test]
    async fn what_was_posted_can_be_read() {
        let alertmanager = Alertmanager::start().await;
        let client = Client::http1(&alertmanager);
        let alert = json!([{"labels": {"alertname": "One"}, "endsAt": "2026-01-01T00:00:00Z"}]).to_string();
        client.post("/api/v2/alerts", alert).header("content-type", "application/json").await;
        let [post] = &alertmanager.posts()[..] else { panic!("one post") };
        assert_eq!((post.line.as_str(), post.label("alertname")), ("POST /api/v2/alerts application/json", "One"));
        assert!(post.resolves());
    }
}
