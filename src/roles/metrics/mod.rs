//! Metrics, for Envoy's `/stats/prometheus`.
//!
//! ```text
//! a job ends, waits, is answered ─► its worker counts it at once             Envoy's counters and histograms are the process's
//! the leader, once a second ─► gauges of the pool's record, where they moved       the last word counts: only one may speak
//! ```
//!
//! Envoy has no labels in the ABI and never forgets a metric. So names carry the labels (`plimsoll.jobs;pool=gpu;host=10.0.0.1:80;outcome=success`, which `stats_tags` take
//! apart), and what could grow without end is bounded: see [`Bounded`].

mod bounded;
mod family;
mod gauges;

use std::collections::BTreeMap;
use std::rc::Rc;

pub use family::Family;
pub use gauges::Shown;

use bounded::Bounded;

use crate::core::address::Address;
use crate::core::learning::Label;
use crate::host::{Host, Level};

/// Most pairs of a pool and a host that have metrics of their own; the others share `other`.
pub const MOST_HOSTS: usize = 1024;

/// Most pairs of a pool and a class.
pub const MOST_CLASSES: usize = 256;

/// Whoever has no metrics of their own.
const OTHER: &str = "other";

/// The values of a metric's labels, but for the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Of {
    /// The pool as a whole.
    Pool,
    /// One host; `None`: one of those that have no metrics of their own, or of those that are not in the pool.
    Host(Option<Address>),
    /// One host, and an outcome or reason.
    HostAnd(Option<Address>, &'static str),
    /// An outcome, reason, state or priority.
    Word(&'static str),
    /// The beginning of a class's name, as [`Of::class`] shows it; `None`: one of those that have no metrics of their own.
    Class(Option<[u8; Label::LENGTH]>),
}

impl Of {
    /// A class, by the beginning of its name. It came with a request, if only in a header that the operator trusts: what is no plain text is not shown.
    pub fn class(name: [u8; Label::LENGTH]) -> Self {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:+@=, ".contains(&byte);
        let mut shown = [0; Label::LENGTH];
        let plain = name.iter().take_while(|byte| **byte != 0).map(|byte| if is_plain(*byte) { *byte } else { b'_' });
        shown.iter_mut().zip(plain).for_each(|(shown, byte)| *shown = byte);
        Self::Class(Some(shown))
    }

    fn host(self) -> Option<Address> {
        match self {
            Self::Host(host) | Self::HostAnd(host, _) => host,
            _ => None,
        }
    }

    /// The same for those that have no metrics of their own.
    fn other(self) -> Self {
        match self {
            Self::Host(_) => Self::Host(None),
            Self::HostAnd(_, word) => Self::HostAnd(None, word),
            Self::Class(_) => Self::Class(None),
            own => own,
        }
    }

    fn value(self, label: &str, pool: &str) -> String {
        match (label, self) {
            ("pool", _) => text(pool),
            ("host", Self::Host(Some(host)) | Self::HostAnd(Some(host), _)) => host.to_string(),
            ("class", Self::Class(Some(name))) => class_name(&name),
            (_, Self::HostAnd(_, word) | Self::Word(word)) if label != "host" => word.to_owned(),
            _ => OTHER.to_owned(),
        }
    }
}

/// A value that Envoy's names, Prometheus and our lists can hold, whatever it was: `;` ends a label.
fn text(value: &str) -> String {
    value.chars().map(|char| if char == ';' || char.is_control() { '_' } else { char }).collect()
}

fn class_name(shown: &[u8]) -> String {
    shown.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect()
}

/// Ids by family and labels; `None`: Envoy refused to make it.
type Ids = BTreeMap<(Family, Of), Option<u32>>;

/// What one VM has of them: Envoy gives each VM ids of its own for the process's metrics.
pub struct Metrics {
    /// By pool; those of no pool under the empty name.
    ids: BTreeMap<Rc<str>, Ids>,
    hosts: Bounded,
    classes: Bounded,
    /// What each pool has had gauges of at some time, where that is not so of all pools.
    kinds: Bounded,
    has_complained: bool,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            ids: BTreeMap::new(),
            hosts: Bounded::new("plimsoll.labels.hosts", MOST_HOSTS),
            classes: Bounded::new("plimsoll.labels.classes", MOST_CLASSES),
            kinds: Bounded::new("plimsoll.labels.kinds", MOST_HOSTS),
            has_complained: false,
        }
    }
}

impl Metrics {
    /// Raises a counter.
    pub fn add(&mut self, host: &impl Host, family: Family, pool: &str, of: Of, by: u64) {
        if by > 0
            && let Some(id) = self.id(host, family, pool, of)
        {
            host.add(id, by);
        }
    }

    /// Sets a gauge, or adds to a histogram.
    pub fn record(&mut self, host: &impl Host, family: Family, pool: &str, of: Of, value: u64) {
        if let Some(id) = self.id(host, family, pool, of) {
            host.record(id, value);
        }
    }

    /// Gives metrics of their own to as many of these hosts as there are places for.
    fn admit(&mut self, host: &impl Host, pool: &str, addresses: impl Iterator<Item = Address>) {
        let pool = text(pool);
        self.hosts.admit(host, addresses.map(|address| format!("{pool};{address}")));
    }

    /// Whether a host has metrics of its own.
    fn has_own(&mut self, host: &impl Host, pool: &str, address: Address) -> bool {
        self.hosts.admits(host, &format!("{};{address}", text(pool)))
    }

    /// Whether a class has metrics of its own.
    fn has_own_class(&mut self, host: &impl Host, pool: &str, name: &[u8]) -> bool {
        self.classes.admits(host, &format!("{};{}", text(pool), class_name(name)))
    }

    /// The classes of a pool that have, or ever had, metrics of their own.
    fn known_classes(&mut self, host: &impl Host, pool: &str) -> Vec<Of> {
        let all = self.classes.all(host, &format!("{};", text(pool)));
        all.iter().map(|name| Of::class(Label::of(name.as_bytes()).name)).collect()
    }

    /// The hosts of a pool that have, or ever had, metrics of their own.
    fn known_hosts(&mut self, host: &impl Host, pool: &str) -> Vec<Address> {
        let all = self.hosts.all(host, &format!("{};", text(pool)));
        all.iter().filter_map(|address| Address::parse(address.as_bytes())).collect()
    }

    fn id(&mut self, host: &impl Host, family: Family, pool: &str, of: Of) -> Option<u32> {
        if let Some(id) = self.ids.get(pool).and_then(|ids| ids.get(&(family, of))) {
            return *id;
        }
        let is_admitted = match of {
            Of::Class(Some(name)) => self.has_own_class(host, pool, &name),
            of => of.host().is_none_or(|address| self.has_own(host, pool, address)),
        };
        if !is_admitted {
            // Not remembered: there is no end to those.
            return self.id(host, family, pool, of.other());
        }
        let id = self.define(host, family, pool, of);
        self.ids.entry(pool.into()).or_default().insert((family, of), id);
        id
    }

    fn define(&mut self, host: &impl Host, family: Family, pool: &str, of: Of) -> Option<u32> {
        let labels: String = family.labels().iter().map(|label| format!(";{label}={}", of.value(label, pool))).collect();
        let made = host.metric(family.kind(), &format!("plimsoll.{}{labels}", family.name()));
        if let Err(fault) = made
            && !std::mem::replace(&mut self.has_complained, true)
        {
            let name = family.name();
            host.log(
                Level::Warn,
                &format!(
                    "plimsoll: could not make the metric {name}: Envoy answered with status {}; metrics are missing",
                    fault.0
                ),
            );
        }
        made.ok()
    }
}

#[cfg(test)]
mod tests;
