//! Where the hosts of a configuration stand in the record.

use std::collections::HashMap;

use super::address::Address;
use super::record::{Header, Record};

/// Where the hosts of one configuration stand in the record, kept until the membership changes.
#[derive(Clone, Debug, Default)]
pub struct Roster {
    incarnation: u64,
    membership: u32,
    slots: Vec<Option<u32>>,
}

impl Roster {
    /// Looks the hosts up again if the record's membership is another than the last time.
    pub fn refresh(&mut self, record: &Record, addresses: impl ExactSizeIterator<Item = Address>) {
        let Header { incarnation, membership, .. } = record.header;
        if (self.incarnation, self.membership) == (incarnation, membership) && self.slots.len() == addresses.len() {
            return;
        }
        let places: HashMap<Address, u32> =
            record.hosts().zip(0..).filter(|(host, _)| !host.is_retired()).map(|(host, slot)| (host.address(), slot)).collect();
        self.slots.clear();
        self.slots.extend(addresses.map(|address| places.get(&address).copied()));
        (self.incarnation, self.membership) = (incarnation, membership);
    }

    /// The slot of each host, in the configuration's order; `None` for one that the record does not have.
    pub fn slots(&self) -> &[Option<u32>] {
        &self.slots
    }
}
