//! End-to-end tests: real connections, a real Envoy, simulated hosts. One module for each theme.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test panics to say that something is wrong"
)]

mod alerts;
mod breaker;
mod busy;
mod choose;
mod churn;
mod classes;
mod classified;
mod classifier;
mod clients;
mod configuration;
mod discovery;
mod ejection;
mod exact;
mod explain;
mod failing;
mod fleet;
mod harness;
mod hostile;
mod learned;
mod leases;
mod least_time;
mod least_time_queue;
mod logs;
mod metrics;
mod metrics_port;
mod newcomers;
mod orca;
mod outcomes;
mod page;
mod probes;
mod queue;
mod queue_faults;
mod queue_limits;
mod queue_order;
mod scrape;
mod sessions;
mod standing;
mod status;
mod top;
mod unknown;
mod weighted;
mod why;
