//! The process's shared data: which keys hold what.
//!
//! ```text
//! plimsoll.pools               the names of all pools, as a JSON array: shared data cannot be listed
//! plimsoll.<version>.pool.<n>  the record of pool n, in the layout of that version
//! plimsoll.<version>.hosts.<n> the hosts that Envoy's cluster n has, where a configuration wants to know
//! plimsoll.<version>.recent.<n> what pool n went through lately
//! plimsoll.said.<i>            which configuration of the filter's instance i the log speaks of, as a digest
//! plimsoll.labels.<l>          the values that a metric's label may have, a line each: see `roles/metrics/bounded.rs`
//! ```
//!
//! Keys are never deleted (the ABI cannot), and come from configurations only, never from requests.

use crate::core::record::{Record, VERSION};
use crate::host::{Fault, Host, IF_ABSENT};

/// How often a change is run again. Each loss means that another worker won. With a request's work between two transactions nobody loses more
/// than a few times in a row; workers that did nothing else reach this, and then the job is left to Envoy, or the settlement to the next tick.
pub const MOST_CONFLICTS: u32 = 1000;

const POOLS: &str = "plimsoll.pools";

/// The key of a pool's record.
pub fn key(pool: &str) -> String {
    format!("plimsoll.{VERSION}.pool.{pool}")
}

/// The key of what Envoy's cluster has.
pub fn members_key(pool: &str) -> String {
    format!("plimsoll.{VERSION}.hosts.{pool}")
}

/// The key of what a pool went through lately.
pub fn recent_key(pool: &str) -> String {
    format!("plimsoll.{VERSION}.recent.{pool}")
}

/// The key of what was said of an instance's configuration.
pub fn said_key(instance: &str) -> String {
    format!("plimsoll.said.{instance}")
}

/// What was found under a record's key.
pub struct Opened {
    /// The record, or a new one.
    pub record: Record,
    /// The version to store it with.
    pub cas: u32,
    /// Something that is no record of ours is there, and the new one would take its place.
    pub replaces: bool,
}

/// The record under the key, or a new one.
pub fn open(host: &impl Host, key: &str) -> Result<Opened, Fault> {
    let shared = host.load(key)?;
    let Some(bytes) = shared.value else {
        return Ok(Opened { record: Record::new(host.random()), cas: IF_ABSENT, replaces: false });
    };
    let (record, replaces) = match Record::parse(bytes) {
        Ok(record) => (record, false),
        Err(_) => (Record::new(host.random()), true),
    };
    Ok(Opened { record, cas: shared.cas, replaces })
}

/// The record that this worker stored last, to change again without reading it.
///
/// Envoy numbers every write to shared data of the process, and a store names the number that it believes the value to have. So if nobody has
/// written anything since our last store, the next number is known, and with it the value. A guess that fails costs a refused store; it is made
/// only while the last record that was read was the one that would have been guessed: a worker that is alone saves every read, one among many does
/// not try. (Envoy never deletes a key while a VM with its `vm_id` lives: on a missing key a store would succeed whatever the number is.)
#[derive(Default)]
pub struct Kept {
    record: Option<Record>,
    expected: u32,
    is_calm: bool,
}

impl Kept {
    /// The record to try, and the version to store it with.
    pub fn take(&mut self) -> Option<(Record, u32)> {
        Some((self.record.take()?, self.expected))
    }

    /// Notes the version that was read.
    pub fn loaded(&mut self, cas: u32) {
        self.is_calm = cas == self.expected;
    }

    /// Notes what was stored, and with which version.
    pub fn stored(&mut self, record: Record, cas: u32) {
        // Envoy's numbers skip 0, which would be stored whatever the value is.
        self.expected = cas.wrapping_add(1).max(1);
        self.record = Some(record).filter(|_| self.is_calm && self.expected != IF_ABSENT);
    }
}

/// Adds a pool to the list. A failure costs only its place on the status page, until the next worker tries.
pub fn publish(host: &impl Host, pool: &str) {
    for _ in 0..MOST_CONFLICTS {
        let Ok(shared) = host.load(POOLS) else { return };
        let cas = if shared.value.is_some() { shared.cas } else { IF_ABSENT };
        let mut names = names(shared.value);
        if names.iter().any(|name| name == pool) {
            return;
        }
        names.push(pool.to_owned());
        let bytes = serde_json::Value::from(names).to_string();
        if host.store(POOLS, bytes.as_bytes(), cas) != Ok(false) {
            return;
        }
    }
}

fn names(list: Option<Vec<u8>>) -> Vec<String> {
    list.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// All pools of the process and their records, for the status page: those that have a host, or somebody who would know of one.
pub fn pools(host: &impl Host) -> Vec<(String, Record)> {
    let list = host.load(POOLS).ok().and_then(|shared| shared.value);
    let record = |name: String| {
        let record = Record::parse(host.load(&key(&name)).ok()?.value?).ok()?;
        (record.header.hosts > 0 || record.header.workers > 0).then_some((name, record))
    };
    names(list).into_iter().filter_map(record).collect()
}
