//! What the clients of a load saw.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::connection::Failure;

/// How a request ended for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// A whole response.
    Status(u16),
    /// None, or not all of it.
    Failed(Failure),
    /// The client left, as planned.
    Aborted,
}

/// One request. All times are from the start of the run.
#[derive(Clone, Debug)]
pub struct Served {
    /// Its place in the schedule.
    pub number: usize,
    /// Its `x-job-class`.
    pub class: Option<String>,
    /// When it was due.
    pub due: Duration,
    /// When it left the schedule; later than `due` only if the machine was busy, or in a load that goes one by one.
    pub sent: Duration,
    /// When it ended.
    pub ended: Duration,
    /// How it ended.
    pub outcome: Outcome,
    /// The simulated host that answered, if its response's headers came.
    pub host: Option<SocketAddr>,
}

impl Served {
    /// From when it was due to its end: waiting for a connection counts.
    pub fn latency(&self) -> Duration {
        self.ended.saturating_sub(self.due)
    }
}

/// What the clients of a load saw; prints as a table.
#[derive(Clone, Debug)]
pub struct Report {
    /// Every request, by its place in the schedule.
    pub served: Vec<Served>,
    latency: Histogram<u64>,
}

impl Report {
    pub(super) fn new(mut served: Vec<Served>) -> Self {
        served.sort_by_key(|one| one.number);
        // Microseconds, three digits, up to an hour.
        let mut latency = Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("sound bounds");
        for one in served.iter().filter(|one| matches!(one.outcome, Outcome::Status(_))) {
            latency.saturating_record(u64::try_from(one.latency().as_micros()).unwrap_or(u64::MAX));
        }
        Self { served, latency }
    }

    /// Appends a later run, as if it had begun when this one ended.
    pub(super) fn append(&mut self, later: Self) {
        let (numbers, time) = (self.served.len(), self.duration());
        self.latency.add(&later.latency).expect("the same bounds");
        self.served.extend(later.served.into_iter().map(|one| Served {
            number: one.number + numbers,
            due: one.due + time,
            sent: one.sent + time,
            ended: one.ended + time,
            ..one
        }));
    }

    /// How many requests ended in each way.
    pub fn outcomes(&self) -> BTreeMap<Outcome, usize> {
        tally(self.served.iter().map(|one| one.outcome))
    }

    /// How many got a whole response with this status.
    pub fn status(&self, status: u16) -> usize {
        self.outcomes().get(&Outcome::Status(status)).copied().unwrap_or(0)
    }

    /// How many got no whole response without having left themselves.
    pub fn failed(&self) -> usize {
        self.served.iter().filter(|one| matches!(one.outcome, Outcome::Failed(_))).count()
    }

    /// How many left, as planned.
    pub fn aborted(&self) -> usize {
        self.served.iter().filter(|one| one.outcome == Outcome::Aborted).count()
    }

    /// How many responses came from each simulated host.
    pub fn hosts(&self) -> BTreeMap<SocketAddr, usize> {
        tally(self.served.iter().filter_map(|one| one.host))
    }

    /// Panics with the report unless every request got a 200 or was aborted as planned.
    pub fn assert_served(&self) {
        assert_eq!(self.status(200) + self.aborted(), self.served.len(), "not all were served:\n{self}");
    }

    /// The latency that this share of the whole responses did not exceed, to three digits: `percentile(0.99)`.
    pub fn percentile(&self, quantile: f64) -> Duration {
        Duration::from_micros(self.latency.value_at_quantile(quantile))
    }

    /// The mean latency of whole responses.
    pub fn mean(&self) -> Duration {
        Duration::from_secs_f64(self.latency.mean() / 1e6)
    }

    /// From the first request's due time to the last end.
    pub fn duration(&self) -> Duration {
        let first = self.served.iter().map(|one| one.due).min().unwrap_or_default();
        self.served.iter().map(|one| one.ended).max().unwrap_or_default().saturating_sub(first)
    }

    /// Whole responses per second.
    pub fn throughput(&self) -> f64 {
        self.latency.len() as f64 / self.duration().as_secs_f64().max(1e-9)
    }
}

fn tally<T: Ord>(items: impl Iterator<Item = T>) -> BTreeMap<T, usize> {
    let mut counts = BTreeMap::new();
    for item in items {
        *counts.entry(item).or_insert(0) += 1;
    }
    counts
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>10}  requests in {:.3} s, {:.0}/s", self.served.len(), self.duration().as_secs_f64(), self.throughput())?;
        for (outcome, count) in self.outcomes() {
            match outcome {
                Outcome::Status(status) => writeln!(f, "{count:>10}  {status}")?,
                Outcome::Failed(failure) => writeln!(f, "{count:>10}  {failure}")?,
                Outcome::Aborted => writeln!(f, "{count:>10}  left by the client")?,
            }
        }
        for (host, count) in self.hosts() {
            writeln!(f, "{count:>10}  from {host}")?;
        }
        write!(f, "  latency")?;
        for quantile in [0.5, 0.9, 0.95, 0.99, 1.0] {
            write!(f, "  P{} {:.3} ms", quantile * 100.0, self.percentile(quantile).as_secs_f64() * 1e3)?;
        }
        writeln!(f)
    }
}
