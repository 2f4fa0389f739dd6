//! The table of all metrics.

use crate::host::Metric;

macro_rules! families {
    ($($(#[$doc:meta])+ $family:ident = $kind:ident $name:literal [$($label:literal)*],)+) => {
        /// A metric with all its labels: see [`super`]. The README's table says what to do when one moves.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Family { $($(#[$doc])+ $family,)+ }

        impl Family {
            /// All of them.
            #[cfg(test)]
            pub const ALL: &[Self] = &[$(Self::$family,)+];

            /// The name, after `plimsoll.` in Envoy and `plimsoll_` in Prometheus.
            pub fn name(self) -> &'static str {
                match self { $(Self::$family => $name,)+ }
            }

            /// What kind of metric it is.
            pub fn kind(self) -> Metric {
                match self { $(Self::$family => Metric::$kind,)+ }
            }

            /// Its labels, in the order in which Envoy's name has them.
            pub fn labels(self) -> &'static [&'static str] {
                match self { $(Self::$family => &[$($label),*],)+ }
            }
        }
    };
}

families! {
    /// Jobs that a host has now.
    InFlight = Gauge "in_flight" ["pool" "host"],
    /// Jobs that it may have.
    MaxInFlight = Gauge "max_in_flight" ["pool" "host"],
    /// Its latency, averaged, in milliseconds; 0 without history.
    EwmaMs = Gauge "ewma_ms" ["pool" "host"],
    /// Its score, as in the status, times 1,000.
    Score = Gauge "score_thousandths" ["pool" "host"],
    /// Its state: 0 it has gone, 1 serving, 2 busy, 3 probing, 4 ejected, 5 unhealthy, 6 draining.
    State = Gauge "state" ["pool" "host"],
    /// What `least_time` has learned of its speed, times 1,000; 0 while that is unknown.
    Speed = Gauge "speed_thousandths" ["pool" "host"],
    /// How old is what it told of itself last, in milliseconds.
    TelemetryAgeMs = Gauge "telemetry_age_ms" ["pool" "host"],
    /// Hosts in each state.
    Hosts = Gauge "hosts" ["pool" "state"],
    /// Hosts that may be chosen now: serving, or due for a trial.
    Eligible = Gauge "eligible" ["pool"],
    /// The slots of those: of one that is on trial 1.
    Slots = Gauge "slots" ["pool"],
    /// 1 while no host serves.
    NoHost = Gauge "no_host" ["pool"],
    /// Jobs that wait.
    Waiting = Gauge "waiting" ["pool" "priority"],
    /// Jobs that may wait; 0 without a queue.
    QueueMaxLength = Gauge "queue_max_length" ["pool"],
    /// For how long a job may wait, in milliseconds; 0 without a queue.
    QueueTimeoutMs = Gauge "queue_timeout_ms" ["pool"],
    /// For how long the first of them has waited, in milliseconds.
    LongestWaitMs = Gauge "longest_wait_ms" ["pool"],
    /// The size of the pool's record, in bytes.
    RecordBytes = Gauge "record_bytes" ["pool"],
    /// Leases given back that the record did not know, since it began.
    Drift = Gauge "drift" ["pool"],
    /// Workers that have served.
    Workers = Gauge "workers" ["pool"],
    /// For how long Envoy's membership has not been read, in milliseconds.
    DiscoveryAgeMs = Gauge "discovery_age_ms" ["pool"],
    /// The mean work of a class's jobs, in microseconds on a host of speed 1.
    ClassWorkUs = Gauge "class_work_us" ["pool" "class"],
    /// Jobs that ended, by the host that had them last.
    Jobs = Counter "jobs" ["pool" "host" "outcome"],
    /// Requests that the filter answered itself, by verdict.
    Answered = Counter "answered" ["pool" "reason"],
    /// Jobs whose clients left while they waited.
    Left = Counter "left" ["pool"],
    /// Requests that are no jobs.
    Unleased = Counter "unleased" ["pool"],
    /// Attempts that failed before a retry went elsewhere.
    RetriesBlamed = Counter "retries_blamed" ["pool" "host"],
    /// Jobs that ended elsewhere than on the host chosen first.
    ServedByAnother = Counter "served_by_another" ["pool" "reason"],
    /// Jobs that came to a host without a free slot.
    BeyondSlots = Counter "beyond_slots" ["pool"],
    /// Ejections.
    Ejections = Counter "ejections" ["pool" "host" "reason"],
    /// Hosts that serve again after one.
    Readmissions = Counter "readmissions" ["pool" "host"],
    /// Hosts that came to be unhealthy.
    Unhealthy = Counter "unhealthy" ["pool" "host"],
    /// Transactions that were run again because another worker was faster.
    CasRetries = Counter "cas_retries" ["pool"],
    /// Workers that were declared dead, and whose counts healed.
    DeadWorkers = Counter "dead_workers" ["pool"],
    /// Reports of hosts that could not be read.
    BadReports = Counter "bad_reports" ["pool"],
    /// Readings of Envoy's membership.
    Polls = Counter "polls" ["pool" "outcome"],
    /// Readings of the hosts' metrics pages.
    Scrapes = Counter "scrapes" ["pool" "host" "outcome"],
    /// Calls to the alerts' sink.
    Alerts = Counter "alerts" ["outcome"],
    /// From a job's slot to its end, of those that succeeded, in milliseconds.
    ServiceMs = Histogram "service_ms" ["pool" "class"],
    /// From a job's arrival to its slot, in pools with a queue, in milliseconds.
    QueueWaitMs = Histogram "queue_wait_ms" ["pool" "priority"],
}
