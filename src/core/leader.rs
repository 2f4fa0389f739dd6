//! Which worker watches a pool's hosts for all: probes them, says what became of them, sends alerts.
//!
//! The leader says in the record, once a tick, that it leads. Another worker takes over when it has seen nothing new of that for [`SILENT_TICKS`]
//! of its *own* ticks (when the whole process was stopped, its own stopped too), and at once when it serves no streams and the leader does:
//! Envoy runs a VM on its main thread too, and no client can trap that one.

use super::record::Record;
use super::time::Instant;

/// 0.4 s: shorter than three intervals between the shortest probes.
pub const SILENT_TICKS: u32 = 4;

/// What a worker has seen of the leader.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    leader: u64,
    led: u64,
    ticks: u32,
}

impl Seen {
    /// Once a tick: looks at the leader.
    pub fn look(&mut self, record: &Record) {
        let (leader, led) = (record.header.leader, record.header.led);
        let ticks = if (leader, led) == (self.leader, self.led) { self.ticks.saturating_add(1) } else { 0 };
        *self = Self { leader, led, ticks };
    }

    /// Whether this worker, which is in the record, leads from now on; then the record says so.
    pub fn claim(&self, record: &mut Record, worker: u64, now: Instant) -> bool {
        let leader = record.header.leader;
        let served = |id: u64| record.workers().find(|worker| worker.id == id).map(|worker| worker.served != 0);
        let is_silent = (leader, record.header.led) == (self.leader, self.led) && self.ticks >= SILENT_TICKS;
        let may_take = match served(leader) {
            _ if leader == worker => true,
            None => true,
            Some(has_served) => is_silent || has_served && served(worker) == Some(false),
        };
        if may_take {
            (record.header.leader, record.header.led) = (worker, now.0);
        }
        may_take
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::at;
    use crate::core::record::Worker;

    fn record(workers: &[(u64, bool)]) -> Record {
        let mut record = Record::new(1);
        for (id, served) in workers {
            record.add_worker(Worker { id: *id, served: u32::from(*served), ..Worker::default() });
        }
        record
    }

    /// A worker's tick.
    fn tick(record: &mut Record, seen: &mut Seen, worker: u64, seconds: f64) -> bool {
        seen.look(record);
        seen.claim(record, worker, at(seconds))
    }

    #[test]
    fn one_leads_and_the_others_do_not_as_long_as_it_speaks() {
        let (mut record, mut seen) = (record(&[(1, true), (2, true)]), [Seen::default(); 2]);
        for round in 1..100 {
            assert!(tick(&mut record, &mut seen[0], 1, f64::from(round) * 0.1));
            assert!(!tick(&mut record, &mut seen[1], 2, f64::from(round) * 0.1 + 0.05));
        }
    }

    #[test]
    fn another_takes_over_when_the_leader_is_silent_or_gone() {
        let (mut record, mut seen) = (record(&[(1, true), (2, true)]), [Seen::default(); 2]);
        assert!(tick(&mut record, &mut seen[0], 1, 10.0));
        // However much time has passed: it may have been stopped as well.
        assert!((0..SILENT_TICKS).all(|round| !tick(&mut record, &mut seen[1], 2, 50.0 + f64::from(round) * 0.1)));
        assert!(tick(&mut record, &mut seen[1], 2, 50.5));
        record.remove_worker(1);
        assert!(tick(&mut record, &mut seen[0], 1, 50.6));
    }

    #[test]
    fn one_that_serves_no_streams_takes_over_from_one_that_does() {
        let (mut record, mut seen) = (record(&[(1, true), (2, false)]), [Seen::default(); 2]);
        assert!(tick(&mut record, &mut seen[0], 1, 10.0));
        assert!(tick(&mut record, &mut seen[1], 2, 10.1));
        assert!(!tick(&mut record, &mut seen[0], 1, 10.2));
    }
}
