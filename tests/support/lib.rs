//! What the end-to-end tests and the benchmarks stand on.
//!
//! ```text
//!   load (Load, Client, Wire) ──▶ envoy (Envoy, RunningEnvoy) ──▶ gpu (GpuHost, Fleet)
//!     what clients saw: Report      what the filter says: books     what hosts saw: Counts, Seen
//! ```
//!
//! A test starts a fleet, starts an Envoy in front of it, sends load, and compares the three accounts. Nothing here leaves
//! loopback, every port is a free one, and whatever was started ends with its handle or with the process.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "this crate is only ever part of a test or a benchmark: a panic is how it says that something is wrong"
)]

pub mod admin;
pub mod alerts;
pub mod browser;
pub mod bursts;
pub mod envoy;
pub mod gpu;
pub mod load;
pub mod peers;
pub mod plot;
pub mod terminal;
pub mod trace;
pub mod wall;

pub use admin::{AdminPage, Listed, Page};
pub use alerts::Alertmanager;
pub use browser::{Browser, Tab, View};
pub use envoy::{Endpoint, Envoy, RunningEnvoy, Times};
pub use gpu::{Counts, Door, Fault, Fleet, Gpu, GpuHost, Seen};
pub use load::{Abort, Client, Failure, Load, Outcome, Pool, Repeated, Reply, Report, Wire};
pub use terminal::Terminal;

use std::time::{Duration, Instant};

/// How long the fixtures wait for something that should be there at once, on a machine that is busy.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Polls `check` until it says yes; panics with `what` when [`DEADLINE`] has passed.
pub async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !check().await {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Something that listens: an Envoy (its `ingress`), a GPU host, or a plain address.
pub trait Target {
    /// Where it listens.
    fn address(&self) -> std::net::SocketAddr;
}

impl Target for std::net::SocketAddr {
    fn address(&self) -> std::net::SocketAddr {
        *self
    }
}
