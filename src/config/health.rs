//! What a pool's configuration says of hosts that fail.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::reader::{Fields, Reader};
use super::{is_path, millis};

/// When a failing host is left alone, and for how long.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// So many failures in a row eject a host.
    pub consecutive: u32,
    /// The statuses that are failures.
    pub statuses: Statuses,
    /// The first ejection's length.
    pub base_ejection: Duration,
    /// The longest ejection, without its jitter.
    pub max_ejection: Duration,
    /// At most this part of a pool is ejected at once, in percent.
    pub max_ejected_percent: u32,
}

/// A set of HTTP statuses: those listed, less the exceptions.
#[derive(Clone, Debug, PartialEq)]
pub struct Statuses {
    listed: Vec<RangeInclusive<u16>>,
    except: Vec<RangeInclusive<u16>>,
}

/// When a slow host is left alone: the quantile of a window of jobs is over the threshold, in so many windows in a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Breaker {
    /// Completed jobs in a window.
    pub window: u16,
    /// So many jobs over the threshold and the quantile of the window is over it, too.
    pub most_slow: u16,
    /// A longer job is slow.
    pub threshold: Duration,
    /// So many slow windows in a row eject a host.
    pub consecutive_windows: u16,
}

/// How hosts are asked whether they are well.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// What is asked for; any 2xx is well.
    pub path: String,
    /// The time from one probe of a host to the next.
    pub interval: Duration,
    /// A probe that takes longer has failed.
    pub timeout: Duration,
    /// So many failed probes in a row make a host unhealthy.
    pub unhealthy_after: u32,
    /// So many good probes in a row make it healthy again.
    pub healthy_after: u32,
    /// Whether every worker keeps a connection to each host warm by probes of its own.
    pub prewarm: bool,
}

impl Statuses {
    /// Whether the status is in the set.
    pub fn include(&self, status: u16) -> bool {
        let is_in = |ranges: &[RangeInclusive<u16>]| ranges.iter().any(|range| range.contains(&status));
        is_in(&self.listed) && !is_in(&self.except)
    }

    fn read(value: &Reader) -> Option<RangeInclusive<u16>> {
        const ALLOWED: &str = "\"5xx\", a status in 400..=599 such as 503, or a range such as \"500-504\"";
        let text = value.word_or_number(ALLOWED)?;
        let status =
            |text: &str| text.parse::<u16>().ok().filter(|_| text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit()));
        let range = match (text.strip_suffix("xx").filter(|class| class.len() == 1), text.split_once('-')) {
            (Some(class), _) => class.parse::<u16>().ok().map(|class| class * 100..=class * 100 + 99),
            (None, Some((first, last))) => status(first).zip(status(last)).map(|(first, last)| first..=last),
            (None, None) => status(&text).map(|status| status..=status),
        };
        let is_allowed = |range: &RangeInclusive<u16>| !range.is_empty() && *range.start() >= 400 && *range.end() <= 599;
        let range = range.filter(is_allowed);
        if range.is_none() {
            value.refuse(ALLOWED);
        }
        range
    }
}

impl Failure {
    /// How many hosts of so many may be ejected at once.
    pub fn most_ejected(&self, hosts: usize) -> usize {
        (hosts * self.max_ejected_percent as usize / 100).max(1)
    }

    pub(super) fn read(fields: &mut Fields) -> Self {
        let failure = Self {
            consecutive: fields.integer("consecutive", 1..=1000, 3) as u32,
            statuses: Statuses {
                listed: fields.list("statuses", ("5xx", &[500..=599]), "statuses", Statuses::read),
                except: fields.list("except", ("none", &[]), "statuses", Statuses::read),
            },
            base_ejection: millis(fields, "base_ejection_ms", 10_000),
            max_ejection: millis(fields, "max_ejection_ms", 300_000),
            max_ejected_percent: fields.integer("max_ejected_percent", 1..=100, 50) as u32,
        };
        // A default that is shorter than what the user asked for is nothing that the user said.
        let max_ejection =
            if fields.has("max_ejection_ms") { failure.max_ejection } else { failure.max_ejection.max(failure.base_ejection) };
        if max_ejection < failure.base_ejection {
            let (base, most) = (failure.base_ejection.as_millis(), max_ejection.as_millis());
            fields.note("max_ejection_ms", format_args!("{most} is less than base_ejection_ms: {base}"));
        }
        Self { max_ejection, ..failure }
    }
}

impl Breaker {
    pub(super) fn read(fields: &mut Fields) -> Self {
        let window = fields.integer("window", 1..=10_000, 100);
        let quantile = fields.number("quantile", 0.01..=1.0, 0.99);
        // Nearest rank: the quantile is the job at rank ⌈quantile × window⌉, so it is slow as soon as fewer than that many are fast. In
        // millionths, because 0.99 is no binary fraction.
        let rank = (window * (f64::from(quantile) * 1e6).round() as u64).div_ceil(1_000_000);
        Self {
            window: window as u16,
            most_slow: window.saturating_sub(rank) as u16,
            threshold: millis(fields, "threshold_ms", 8000),
            consecutive_windows: fields.integer("consecutive_windows", 1..=1000, 3) as u16,
        }
    }
}

impl Probe {
    pub(super) fn read(fields: &mut Fields) -> Self {
        const ALLOWED: &str = "a path that starts with /, such as \"/health\"";
        let path = fields.take("path", |value| {
            value.text(ALLOWED).filter(|text| is_path(text) || value.refuse(ALLOWED)).unwrap_or_default().to_owned()
        });
        if path.is_none() {
            fields.note("path", "it is missing; say \"path\": \"/health\"");
        }
        Self {
            path: path.unwrap_or_default(),
            interval: Duration::from_millis(fields.integer("interval_ms", 200..=3_600_000, 2000)),
            timeout: Duration::from_millis(fields.integer("timeout_ms", 1..=60_000, 1000)),
            unhealthy_after: fields.integer("unhealthy_after", 1..=1000, 3) as u32,
            healthy_after: fields.integer("healthy_after", 1..=1000, 2) as u32,
            prewarm: fields.boolean("prewarm", false),
        }
    }
}
