//! What the filter does in each of its roles: callbacks become events of the core, decisions become hostcalls. No policy here.

pub mod balancer;
pub mod classifier;
mod client;
mod explain;
mod fleet;
mod metrics;
mod recent;
pub mod reply;
pub mod roots;
pub mod route;
mod said;
mod scrape;
pub mod shared;
pub mod status;
mod watch;
pub mod worker;

#[cfg(test)]
pub mod fake;
