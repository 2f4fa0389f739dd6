//! Where the hosts of a configuration stand in the record.

use std::collections::HashMap;

use super::address::Address;
use super::record::{Header, Host, Record};

/// Where the hosts of one configuration stand in the record, kept until the membership changes.
#[derive(Clone, Debug, Default)]
pub struct Roster {
    incarnation: u64,
    membership: u32,
    slots: Vec<Option<u32>>,
    /// Hosts, by their place in the configuration, and the slot of an earlier generation of each: empty but for the time
    /// after a host was removed and came back.
    earlier: Vec<(u32, u32)>,
}

impl Roster {
    /// Looks the hosts up again if the record's membership is another than the last time.
    pub fn refresh(&mut self, record: &Record, addresses: impl ExactSizeIterator<Item = Address>) {
        let Header { incarnation, membership, .. } = record.header;
        if (self.incarnation, self.membership) == (incarnation, membership) && self.slots.len() == addresses.len() {
            return;
        }
        let (retired, current): (Vec<(Host, u32)>, Vec<_>) = record.hosts().zip(0..).partition(|(host, _)| host.is_retired());
        let current: HashMap<Address, u32> = current.into_iter().map(|(host, slot)| (host.address(), slot)).collect();
        self.slots.clear();
        self.earlier.clear();
        for (index, address) in (0..).zip(addresses) {
            self.slots.push(current.get(&address).copied());
            let same_machine = retired.iter().filter(|(host, _)| host.address() == address);
            self.earlier.extend(same_machine.map(|(_, slot)| (index, *slot)));
        }
        (self.incarnation, self.membership) = (incarnation, membership);
    }

    /// The slot of each host, in the configuration's order; `None` for one that the record does not have.
    pub fn slots(&self) -> &[Option<u32>] {
        &self.slots
    }

    /// Jobs that still run on the machine of this host from before it was removed and came back: they are other leases on another entry, but
    /// they fill the same card.
    #[inline]
    pub fn earlier_load(&self, index: u32, record: &Record) -> u32 {
        let entries = self.earlier.iter().filter(|(host, _)| *host == index);
        entries.filter_map(|(_, slot)| record.host(*slot)).fold(0, |load, host| load.saturating_add(host.load()))
    }
}
