//! A pool's hosts: what the configuration says of each, and where else they come from.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use super::Score;
use super::cluster;
use super::reader::{Fields, Reader};
use crate::core::address::Address;

/// Most hosts of one pool: the size up to which the shared record is measured and tested.
pub const MOST_HOSTS: usize = 1024;

/// Weights that the choice takes.
pub const WEIGHTS: RangeInclusive<f32> = 0.01..=1000.0;

/// A host as it is run.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// Where it listens.
    pub address: Address,
    /// The address as Envoy writes it.
    pub text: String,
    /// Relative capacity, 0.01 to 1,000.
    pub weight: f32,
    /// What one job in flight adds to the host's score: `score.in_flight_weight / weight`.
    pub per_job: f64,
    /// Slots.
    pub max_in_flight: u32,
    /// No new jobs.
    pub drain: bool,
    /// Envoy holds it degraded, or behind others in priority: to be chosen only where no other host has a free slot.
    pub is_reserve: bool,
}

/// A host as it was written: what is left out comes from the pool, or from Envoy.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Where it listens.
    pub address: Address,
    /// See [`Host::weight`].
    pub weight: Option<f32>,
    /// See [`Host::max_in_flight`].
    pub max_in_flight: Option<u32>,
    /// See [`Host::drain`].
    pub drain: Option<bool>,
}

/// The pool's hosts are those that Envoy's cluster has.
#[derive(Clone, Debug, PartialEq)]
pub struct Discovery {
    /// The Envoy cluster that points at Envoy's own admin address.
    pub cluster: String,
    /// The time from one look to the next.
    pub interval: Duration,
}

impl Host {
    /// A host that takes jobs, of weight 1.
    pub fn new(address: Address, max_in_flight: u32) -> Self {
        let text = address.to_string();
        Self { address, text, weight: 1.0, per_job: 0.0, max_in_flight, drain: false, is_reserve: false }
    }

    /// Lets what was written of it stand above all else.
    #[must_use]
    pub fn overridden(mut self, entry: &Entry) -> Self {
        self.weight = entry.weight.unwrap_or(self.weight);
        self.max_in_flight = entry.max_in_flight.unwrap_or(self.max_in_flight);
        self.drain = entry.drain.unwrap_or(self.drain);
        self
    }

    /// Works out what its weight makes of a job.
    #[must_use]
    pub(super) fn weighed(mut self, score: &Score) -> Self {
        self.per_job = f64::from(score.in_flight_weight) / f64::from(self.weight);
        self
    }
}

impl Entry {
    pub(super) fn read(value: Reader, pools_slots: u32) -> Option<Self> {
        let mut fields = value.fields()?;
        let address = fields.take("address", read_address);
        if address.is_none() {
            fields.note("address", "it is missing; say \"address\": \"10.0.0.1:8188\"");
        }
        let weight = fields.number("weight", WEIGHTS, 1.0);
        let max_in_flight = fields.integer("max_in_flight", 1..=1_000_000, pools_slots.into()) as u32;
        let drain = fields.boolean("drain", false);
        let weight = fields.has("weight").then_some(weight);
        let max_in_flight = fields.has("max_in_flight").then_some(max_in_flight);
        let drain = fields.has("drain").then_some(drain);
        fields.finish();
        Some(Self { address: address.flatten()?, weight, max_in_flight, drain })
    }
}

impl Discovery {
    pub(super) fn read(fields: &mut Fields) -> Self {
        Self {
            cluster: cluster(fields, "envoy_admin"),
            interval: Duration::from_millis(fields.integer("interval_ms", 200..=3_600_000, 1000)),
        }
    }
}

/// Whether a host can listen there.
pub fn is_a_hosts(address: &SocketAddr) -> bool {
    let is_plain = match address.ip() {
        IpAddr::V4(ip) => !ip.is_broadcast(),
        // Envoy writes an IPv4 address within one of IPv6 in another way than we do.
        IpAddr::V6(ip) => ip.is_loopback() || ip.to_ipv4().is_none(),
    };
    let has_scope = matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0);
    is_plain && !has_scope && address.port() != 0 && !address.ip().is_unspecified() && !address.ip().is_multicast()
}

fn read_address(value: Reader) -> Option<Address> {
    const ALLOWED: &str = "an IP address and a port in 1..=65535, such as 10.0.0.1:8188 or [fd00::1]:8188";
    let address = value.text(ALLOWED)?.parse().ok().filter(is_a_hosts);
    if address.is_none() {
        value.refuse(ALLOWED);
    }
    address.map(Address::from)
}

pub(super) fn refuse_repeated(fields: &Fields, entries: &[Option<Entry>]) {
    let mut first: BTreeMap<Address, usize> = BTreeMap::new();
    for (index, entry) in entries.iter().enumerate() {
        let Some(entry) = entry else { continue };
        if let Some(earlier) = first.insert(entry.address, index) {
            let what = format!("\"{}\" is there twice; hosts[{earlier}] has it already", entry.address);
            fields.note_item("hosts", index, "address", what);
        }
    }
}
