//! A host that joins a pool at work, or comes back to it.
//!
//! It has no jobs, and every other host has some: by its score it is the best of all, and would be sent every job until it has caught up, before it
//! has shown that it can run one. So of its first [`JOBS`] it gets at most [`SHARE`] times its fair share, by weight, of what the pool gives out;
//! while no other host has a free slot it takes what comes, and its first job it gets at once if all others are at work. A pool whose first job is yet to be placed has no newcomers, and one whose hosts are all
//! newcomers holds none of them back.
//!
//! With `slow_start_ms` its weight rises from a tenth to the whole meanwhile, as in Envoy's own slow start (`SlowStartConfig`) with its
//! defaults, an `aggression` of 1 and a `min_weight_percent` of 10:
//!
//! ```text
//! weight × max(0.1, t / slow_start_ms)
//! ```
//!
//! A newcomer is a host that was added, is no longer draining, is healthy again, or was re-admitted.

use std::time::Duration;

use super::record::{Header, Host, Record};
use super::time::Instant;

/// So many of its jobs are watched.
pub const JOBS: u32 = 100;

/// How much of its fair share it gets at most.
pub const SHARE: f64 = 1.5;

/// The least part of its weight.
const LEAST: f64 = 0.1;

impl Host {
    /// The host joins the pool now.
    pub fn join(&mut self, header: &Header, now: Instant) {
        if header.placed != 0 {
            (self.joined, self.joined_at, self.joined_with) = (now.0.max(1), header.placed, self.requests as u32);
        }
    }

    /// Whether its jobs are still watched.
    pub fn is_newcomer(&self) -> bool {
        self.joined != 0 && self.jobs_since() < JOBS
    }

    fn jobs_since(&self) -> u32 {
        (self.requests as u32).wrapping_sub(self.joined_with)
    }

    /// Whether it has had no job since.
    pub fn has_had_none(&self) -> bool {
        self.jobs_since() == 0
    }

    /// Whether one more job keeps it within its share. `fair` is its part of the weights of all hosts that serve.
    pub fn may_take_one(&self, header: &Header, fair: f64) -> bool {
        let placed = header.placed.wrapping_sub(self.joined_at);
        f64::from(self.jobs_since()) + 1.0 <= SHARE * fair * (f64::from(placed) + 1.0)
    }

    /// The part of its weight that counts now.
    pub fn ramp(&self, slow_start: Duration, now: Instant) -> f64 {
        if self.joined == 0 || slow_start.is_zero() {
            return 1.0;
        }
        let part = now.since(Instant(self.joined)).as_secs_f64() / slow_start.as_secs_f64();
        part.clamp(LEAST, 1.0)
    }
}

/// The host in this slot joins the pool now.
pub fn join(record: &mut Record, slot: u32, now: Instant) {
    let header = record.header;
    record.with_host(slot, |host| host.join(&header, now));
}

/// Forgets that a host was a newcomer once it has grown up. `slow_start` is the longest of any live configuration. Gives whether it did.
pub fn grow_up(host: &mut Host, slow_start: Duration, now: Instant) -> bool {
    // One that joined at a time that is yet to come: the clock has stepped back.
    let has_its_weight = !(host.joined..(Instant(host.joined) + slow_start).0).contains(&now.0);
    let is_grown = host.joined != 0 && has_its_weight && !host.is_newcomer();
    if is_grown {
        (host.joined, host.joined_at, host.joined_with) = (0, 0, 0);
    }
    is_grown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::at;

    fn host_of(requests: u64) -> Host {
        let mut host = Host::default();
        host.requests = requests;
        host
    }

    fn newcomer(placed: u32) -> Host {
        let mut host = host_of(7);
        host.join(&header(placed), at(10.0));
        host
    }

    fn header(placed: u32) -> Header {
        Header { placed, ..Header::default() }
    }

    #[test]
    fn it_gets_no_more_than_its_share_at_any_time_of_its_first_jobs() {
        let (mut host, mut placed) = (newcomer(1000), 1000u32);
        for job in 1..=JOBS {
            while !host.may_take_one(&header(placed), 0.25) {
                placed += 1;
            }
            (host.requests, placed) = (host.requests + 1, placed + 1);
            assert!(f64::from(job) <= SHARE * 0.25 * f64::from(placed - 1000), "{job} of {placed}");
        }
        assert_eq!(placed, 1267, "100 of 267: no less, either");
        assert!(!host.is_newcomer());
    }

    #[test]
    fn a_pool_that_has_placed_nothing_has_no_newcomers() {
        assert!(!newcomer(0).is_newcomer());
        assert_eq!(newcomer(0), host_of(7));
    }

    #[test]
    fn counters_that_wrap_do_no_harm() {
        let mut host = host_of(u64::from(u32::MAX));
        host.join(&header(u32::MAX), at(1.0));
        host.requests += 50;
        assert!(host.is_newcomer());
        assert!(host.may_take_one(&header(200), 0.25) && !host.may_take_one(&header(100), 0.25));
        host.requests += 50;
        assert!(!host.is_newcomer());
    }

    #[test]
    fn its_weight_rises_in_a_line_from_a_tenth() {
        let (host, slow_start) = (newcomer(1), Duration::from_secs(20));
        let ramps = [10.0, 11.0, 15.0, 20.0, 30.0, 99.0].map(|seconds| host.ramp(slow_start, at(seconds)));
        assert_eq!(ramps, [0.1, 0.1, 0.25, 0.5, 1.0, 1.0]);
        assert_eq!(host.ramp(Duration::ZERO, at(10.0)), 1.0);
        assert_eq!(Host::default().ramp(slow_start, at(1.0)), 1.0);
        assert_eq!(host.ramp(slow_start, at(1.0)), 0.1, "the clock stepped back");
    }

    #[test]
    fn it_is_grown_up_with_its_jobs_done_and_its_weight_whole() {
        let mut host = newcomer(1);
        let slow_start = Duration::from_secs(20);
        assert!(!grow_up(&mut host, slow_start, at(50.0)), "it has had no job");
        host.requests += 100;
        assert!(!grow_up(&mut host, slow_start, at(29.0)), "it has not its whole weight");
        assert!(grow_up(&mut host, slow_start, at(30.0)));
        assert_eq!(host, host_of(107));
        let mut ahead = newcomer(1);
        ahead.requests += 100;
        assert!(grow_up(&mut ahead, slow_start, at(5.0)), "the clock stepped back");
    }
}
