//! Clients: one request at a time ([`Client`]), an open-loop load ([`Load`]), or bytes ([`Wire`]).

mod client;
mod connection;
mod report;
mod schedule;
mod wire;

pub use client::{Ask, Call, Client, Ongoing, Reply};
pub use connection::{Failure, Pool};
pub use report::{Outcome, Report, Served};
pub use schedule::{Abort, Load, Repeated, Shot};
pub use wire::Wire;
