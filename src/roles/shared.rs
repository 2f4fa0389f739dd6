//! The process's shared data: which keys hold what.
//!
//! ```text
//! plimsoll.pools               the names of all pools, as a JSON array: shared data cannot be listed
//! plimsoll.<version>.pool.<n>  the record of pool n, in the layout of that version
//! ```
//!
//! Keys are never deleted (the ABI cannot), and come from configurations only, never from requests.

use crate::core::record::{Record, VERSION};
use crate::host::{Fault, Host, IF_ABSENT, Level};

/// How often a change is run again. Each loss means that another worker won, so that this is reached only if something is broken.
pub const MOST_CONFLICTS: u32 = 1000;

const POOLS: &str = "plimsoll.pools";

/// The key of a pool's record.
pub fn key(pool: &str) -> String {
    format!("plimsoll.{VERSION}.pool.{pool}")
}

/// The record under the key, or a new one, and the version to store it with.
pub fn open(host: &impl Host, key: &str, pool: &str) -> Result<(Record, u32), Fault> {
    let shared = host.load(key)?;
    let Some(bytes) = shared.value else {
        return Ok((Record::new(host.random()), IF_ABSENT));
    };
    let record = Record::parse(bytes).unwrap_or_else(|_| {
        host.log(Level::Warn, &format!("plimsoll: pool {pool}: the shared record is not one of ours; a new one takes its place"));
        Record::new(host.random())
    });
    Ok((record, shared.cas))
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

/// All pools of the process and their records, for the status page: those that have a host.
pub fn pools(host: &impl Host) -> Vec<(String, Record)> {
    let list = host.load(POOLS).ok().and_then(|shared| shared.value);
    let record = |name: String| {
        let record = Record::parse(host.load(&key(&name)).ok()?.value?).ok()?;
        (record.header.hosts > 0).then_some((name, record))
    };
    names(list).into_iter().filter_map(record).collect()
}
