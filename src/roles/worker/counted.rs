//! What a worker counts in Envoy's metrics, where it happens: after the transaction that made it so.

use std::time::Duration;

use super::Worker;
use crate::core::address::Address;
use crate::core::lease::{Lease, Moved, Settlement};
use crate::core::outcome::Outcome;
use crate::core::time::millis;
use crate::host::Host;
use crate::roles::metrics::{Family, Of};

impl<H: Host> Worker<H> {
    /// Raises one of the pool's counters.
    pub(in crate::roles) fn count(&mut self, family: Family, pool: &str, of: Of, by: u64) {
        self.metrics.add(&self.host, family, pool, of, by);
    }

    /// Adds a time to one of the pool's histograms.
    pub(in crate::roles) fn time(&mut self, family: Family, pool: &str, of: Of, time: Duration) {
        self.metrics.record(&self.host, family, pool, of, millis(time));
    }

    /// A job has been found elsewhere.
    pub(super) fn count_move(&mut self, pool_name: &str, guilty: &[Address], moved: Moved) {
        guilty.iter().for_each(|host| self.count(Family::RetriesBlamed, pool_name, Of::Host(Some(*host)), 1));
        self.count(Family::BeyondSlots, pool_name, Of::Pool, moved.is_beyond.into());
    }

    /// A job has ended, and its lease is given back.
    pub(super) fn count_job(&mut self, pool_name: &str, mut lease: Lease, moved: Option<Moved>, end: &Settlement) {
        if let Some(moved) = moved {
            lease.moved(moved);
            self.count_move(pool_name, lease.guilty(&moved), moved);
        }
        let host = lease.address.filter(|_| lease.seat.is_some());
        self.count(Family::Jobs, pool_name, Of::HostAnd(host, end.outcome.word()), 1);
        if let Some(why) = lease.why_another() {
            self.count(Family::ServedByAnother, pool_name, Of::Word(why.word()), 1);
        }
        if end.outcome == Outcome::Success && end.is_timed {
            let time = self.host.now().since(lease.taken);
            self.time(Family::ServiceMs, pool_name, Of::class(lease.job.label.name), time);
        }
    }
}
