//! The pure core: the books of a pool and the choice, with no hostcall, clock, log or randomness of its own.
//!
//! Whatever happens outside arrives as an argument (`now`, a random generator, what Envoy said of a stream), and what is to
//! be done comes back as a value. One [`record::Record`] per pool holds what all workers share; one [`book::Book`] per pool
//! and worker holds what this worker alone knows: its leases. A change is a function of the two, so that it can be run
//! again when another worker was faster (compare-and-swap), and so that tests need no Envoy.

pub mod address;
pub mod alerts;
pub mod book;
pub mod choice;
pub mod ewma;
pub mod hash;
pub mod health;
pub mod leader;
pub mod learning;
pub mod lease;
pub mod lookout;
pub mod membership;
pub mod newcomer;
pub mod outcome;
pub mod packed;
pub mod penalty;
pub mod poller;
pub mod prober;
pub mod queue;
pub mod random;
pub mod reading;
pub mod recent;
pub mod record;
pub mod report;
pub mod retry_after;
pub mod roster;
pub mod score;
pub mod session;
pub mod stranger;
pub mod time;

#[cfg(test)]
pub mod fixture;
