//! Which hosts a pool has, where Envoy's own cluster says it.
//!
//! One worker reads it ([`crate::telemetry::clusters`]) and puts it into the shared data; the others see from the record's `members` that there is
//! another one. What a configuration runs on is the configuration with these hosts in the place of its own: [`Membership::pool`]. A job keeps the pool
//! that it began with.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::address::Address;
use super::health::{self, Watcher};
use super::packed::packed;
use super::record::Record;
use super::stranger;
use super::time::Instant;
use crate::config::{Entry, Host, Pool, WEIGHTS};

/// How well a host is, as far as Envoy knows, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// It takes jobs.
    Healthy,
    /// It takes jobs where nobody else can.
    Degraded,
    /// It takes none.
    Unhealthy,
}

/// A host of Envoy's cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Where it listens.
    pub address: Address,
    /// Envoy's weight of it, at least 1.
    pub weight: u32,
    /// Its locality's priority: 0 comes first.
    pub priority: u32,
    /// Whether it is to take no new jobs.
    pub drains: bool,
    /// How well it is.
    pub condition: Condition,
}

packed! {
    /// A [`Member`] in the shared data.
    pub struct Stored {
        ip: u128,
        port: u16,
        drains: u8,
        condition: u8,
        weight: u32,
        priority: u32,
    }
}

/// The hosts of Envoy's cluster, by address, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership(Vec<Member>);

impl Membership {
    /// Of hosts in any order. Where an address is there twice, as in two localities, the better words stand.
    pub fn new(members: impl IntoIterator<Item = Member>) -> Self {
        let mut by_address: BTreeMap<Address, Member> = BTreeMap::new();
        for member in members {
            let known = by_address.entry(member.address).or_insert(member);
            known.condition = known.condition.min(member.condition);
            known.priority = known.priority.min(member.priority);
            known.drains &= member.drains;
        }
        Self(by_address.into_values().collect())
    }

    /// The hosts.
    pub fn members(&self) -> &[Member] {
        &self.0
    }

    /// For the shared data.
    pub fn encode(&self) -> Vec<u8> {
        let stored = |member: &Member| {
            let Member { address, weight, priority, drains, condition } = *member;
            let mut bytes = [0; Stored::BYTES];
            let (drains, condition) = (drains.into(), condition as u8);
            Stored { ip: address.ip(), port: address.port(), drains, condition, weight, priority }.write(&mut bytes);
            bytes
        };
        self.0.iter().flat_map(stored).collect()
    }

    /// Tells it from others; never 0.
    pub fn digest(&self) -> u32 {
        let mut hasher = DefaultHasher::new();
        self.encode().hash(&mut hasher);
        (hasher.finish() as u32).max(1)
    }

    /// From the shared data; `None`: these bytes are none of ours.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (stored, rest) = bytes.as_chunks();
        let member = |bytes: &[u8; Stored::BYTES]| {
            let Stored { ip, port, drains, condition, weight, priority } = Stored::read(bytes);
            let all = [Condition::Healthy, Condition::Degraded, Condition::Unhealthy];
            let condition = all.into_iter().find(|known| *known as u8 == condition)?;
            Some(Member { address: Address::from_bits(ip, port), weight, priority, drains: drains != 0, condition })
        };
        let members: Option<Vec<Member>> = stored.iter().map(member).collect();
        members.filter(|_| rest.is_empty()).map(Self)
    }

    /// The pool with these hosts. Envoy's weights are relative: the least counts 1. Hosts behind the first priority are reserves, as degraded ones are.
    /// What was written of a host stands in the place of what Envoy says; so a weight is one of Envoy's, and keeps its proportion to the others
    /// whichever of them come and go.
    pub fn pool(&self, configured: &Pool) -> Pool {
        let least = self.0.iter().map(|member| member.weight).min().unwrap_or(1).max(1);
        let first = self.0.iter().map(|member| member.priority).min().unwrap_or_default();
        let entries: BTreeMap<Address, &Entry> = configured.entries.iter().map(|entry| (entry.address, entry)).collect();
        configured.with_hosts(self.0.iter().map(|member| {
            let mut host = Host::new(member.address, configured.max_in_flight);
            host.weight = member.weight as f32;
            host.drain = member.drains;
            host.is_reserve = member.condition == Condition::Degraded || member.priority > first;
            if let Some(entry) = entries.get(&member.address) {
                host = host.overridden(entry);
            }
            host.weight = (host.weight / least as f32).clamp(*WEIGHTS.start(), *WEIGHTS.end());
            host
        }))
    }

    /// What is new since another membership, in words for the log: who came, who left, and of whom Envoy says something else.
    pub fn changes(&self, before: Option<&Membership>) -> Vec<String> {
        let by_address = |membership: &Membership| -> BTreeMap<Address, Member> {
            membership.0.iter().map(|member| (member.address, *member)).collect()
        };
        let (before, now) = (before.map(by_address).unwrap_or_default(), by_address(self));
        let both = || now.values().filter_map(|member| Some((before.get(&member.address)?, member)));
        let those = |is_it: &dyn Fn(&Member, &Member) -> bool| -> Vec<Address> {
            both().filter(|(then, now)| is_it(then, now)).map(|(_, now)| now.address).collect()
        };
        let less = |these: &BTreeMap<Address, Member>, those: &BTreeMap<Address, Member>| -> Vec<Address> {
            these.keys().filter(|address| !those.contains_key(address)).copied().collect()
        };
        let changes = [
            ("came", less(&now, &before)),
            ("left", less(&before, &now)),
            ("drains", those(&|then, now| !then.drains && now.drains)),
            ("drains no more", those(&|then, now| then.drains && !now.drains)),
            ("has another weight", those(&|then, now| then.weight != now.weight)),
            ("is degraded", those(&|then, now| then.condition != now.condition && now.condition == Condition::Degraded)),
            ("is degraded no more", those(&|then, now| then.condition != now.condition && then.condition == Condition::Degraded)),
        ];
        changes
            .into_iter()
            .filter(|(_, addresses)| !addresses.is_empty())
            .map(|(what, addresses)| named(&addresses, what))
            .collect()
    }

    /// Writes down what Envoy holds of the hosts that are in the record. Gives those that were called strangers and are there.
    ///
    /// As long as Envoy has never held any of them well, that says nothing: right after a start its health checks may have failed because it was busy
    /// with starting, and the next ones may be a minute away.
    pub fn report(&self, record: &mut Record, now: Instant) -> Vec<Address> {
        let mut acquitted = Vec::new();
        record.header.seen_well |= u32::from(self.0.iter().any(|member| member.condition != Condition::Unhealthy));
        let is_unhealthy = |member: &Member| member.condition == Condition::Unhealthy && record.header.seen_well != 0;
        let unhealthy: BTreeMap<Address, bool> = self.0.iter().map(|member| (member.address, is_unhealthy(member))).collect();
        for slot in 0..record.header.hosts {
            let Some(host) = record.host(slot).filter(|host| !host.is_retired()) else {
                continue;
            };
            let word = unhealthy.get(&host.address());
            health::report_at(record, slot, Watcher::Envoy, word.copied().unwrap_or(false), now);
            if word.is_some() && stranger::acquit(record, slot, now) {
                acquitted.push(host.address());
            }
        }
        acquitted
    }
}

/// `a, b and 3 more did this`.
fn named(addresses: &[Address], what: &str) -> String {
    const MOST: usize = 8;
    let named: Vec<String> = addresses.iter().take(MOST).map(Address::to_string).collect();
    let more = addresses.len().saturating_sub(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more} {what}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::{address, at, pool, record_of};
    use crate::core::health::State;

    fn member(host: usize, weight: u32, condition: Condition) -> Member {
        Member { address: address(host), weight, priority: 0, drains: false, condition }
    }

    fn draining(host: usize, weight: u32) -> Member {
        Member { drains: true, ..member(host, weight, Condition::Healthy) }
    }

    const DISCOVERY: &str = r#""discovery": {"cluster": "envoy_admin"}"#;

    #[test]
    fn it_comes_back_from_the_shared_data_as_it_was() {
        let members = Membership::new([
            member(3, 1, Condition::Healthy),
            draining(1, 128),
            Member {
                address: Address::parse(b"[fd00::1]:80").unwrap(),
                weight: 7,
                priority: 3,
                drains: true,
                condition: Condition::Unhealthy,
            },
            member(2, 1, Condition::Degraded),
        ]);
        assert_eq!(Membership::decode(&members.encode()), Some(members.clone()));
        assert_eq!(Membership::decode(&[]), Some(Membership::default()));
        let bytes = members.encode();
        assert_eq!(Membership::decode(&bytes[1..]), None);
        let mut nonsense = bytes;
        nonsense[19] = 9;
        assert_eq!(Membership::decode(&nonsense), None);
    }

    #[test]
    fn what_is_new_is_said_in_words() {
        let before = Membership::new([
            member(1, 1, Condition::Healthy),
            member(2, 1, Condition::Degraded),
            draining(3, 1),
            member(4, 1, Condition::Healthy),
        ]);
        let now = Membership::new([
            draining(1, 1),
            member(2, 2, Condition::Healthy),
            member(3, 1, Condition::Degraded),
            member(5, 1, Condition::Healthy),
        ]);
        let changes = now.changes(Some(&before));
        let expected = [
            "10.0.0.6:80 came",
            "10.0.0.5:80 left",
            "10.0.0.2:80 drains",
            "10.0.0.4:80 drains no more",
            "10.0.0.3:80 has another weight",
            "10.0.0.4:80 is degraded",
            "10.0.0.3:80 is degraded no more",
        ];
        assert_eq!(changes, expected);
        assert_eq!(now.changes(Some(&now)), [""; 0]);
        let many = Membership::new((0..10).map(|host| member(host, 1, Condition::Healthy)));
        let shown = many.changes(None).join("; ");
        assert!(shown.starts_with("10.0.0.1:80, 10.0.0.2:80, ") && shown.ends_with(", 10.0.0.8:80 and 2 more came"), "{shown}");
    }

    #[test]
    fn of_an_address_that_is_there_twice_the_better_word_stands() {
        let members = Membership::new([member(1, 1, Condition::Unhealthy), draining(1, 1), member(1, 1, Condition::Degraded)]);
        assert_eq!(members.members(), [member(1, 1, Condition::Healthy)]);
    }

    #[test]
    fn what_was_written_of_a_host_stands_above_what_envoy_says() {
        let first = address(1);
        let entry = format!(r#"{{"address": "{first}", "weight": 50, "max_in_flight": 7, "drain": true}}"#);
        let configured = pool(&format!(r#"{DISCOVERY}, "max_in_flight": 3, "hosts": [{entry}, {{"address": "10.9.9.9:1"}}]"#));
        assert!(configured.awaits_membership);
        let members =
            Membership::new([member(1, 200, Condition::Healthy), draining(2, 100), member(3, 300, Condition::Degraded)]);
        let running = members.pool(&configured);
        assert!(!running.awaits_membership);
        let shown: Vec<_> = running
            .hosts
            .iter()
            .map(|host| (host.address, host.weight, host.max_in_flight, host.drain, host.is_reserve))
            .collect();
        let expected = [(address(1), 0.5, 7, true, false), (address(2), 1.0, 3, true, false), (address(3), 3.0, 3, false, true)];
        assert_eq!(shown, expected);
        assert_eq!(running.hosts[0].per_job, f64::from(0.7f32) / 0.5);
    }

    #[test]
    fn an_entry_that_says_nothing_of_a_thing_leaves_it_to_envoy() {
        let configured = pool(&format!(r#"{DISCOVERY}, "hosts": [{{"address": "{}", "drain": false}}]"#, address(2)));
        let running = Membership::new([member(1, 1, Condition::Healthy), draining(2, 4)]).pool(&configured);
        assert_eq!((running.hosts[1].weight, running.hosts[1].drain), (4.0, false));
    }

    #[test]
    fn a_weight_that_was_written_keeps_its_proportion_to_envoys_whoever_comes_and_goes() {
        let configured = pool(&format!(r#"{DISCOVERY}, "hosts": [{{"address": "{}", "weight": 4}}]"#, address(2)));
        let weights = |members: &[Member]| -> Vec<f32> {
            Membership::new(members.iter().copied()).pool(&configured).hosts.iter().map(|host| host.weight).collect()
        };
        let [light, written, heavy] = [(1, 1), (2, 4), (3, 4)].map(|(host, weight)| member(host, weight, Condition::Healthy));
        assert_eq!(weights(&[light, written, heavy]), [1.0, 4.0, 4.0]);
        assert_eq!(weights(&[written, heavy]), [1.0, 1.0]);
    }

    #[test]
    fn hosts_behind_the_first_priority_are_reserves() {
        let behind = |host, priority| Member { priority, ..member(host, 1, Condition::Healthy) };
        let running = Membership::new([behind(1, 1), behind(2, 2), behind(3, 1)]).pool(&pool(DISCOVERY));
        assert_eq!(running.hosts.iter().map(|host| host.is_reserve).collect::<Vec<_>>(), [false, true, false]);
    }

    #[test]
    fn weights_far_apart_stay_within_what_the_choice_takes() {
        let configured = pool(DISCOVERY);
        let running =
            Membership::new([member(1, 1, Condition::Healthy), member(2, u32::MAX, Condition::Healthy)]).pool(&configured);
        assert_eq!(running.hosts[1].weight, 1000.0);
    }

    #[test]
    fn as_long_as_envoy_has_held_no_host_well_it_says_nothing() {
        let configured = pool(DISCOVERY);
        let members = |conditions: [Condition; 2]| Membership::new([member(1, 1, conditions[0]), member(2, 1, conditions[1])]);
        let [ill, well] = [Condition::Unhealthy, Condition::Healthy];
        let mut record = record_of(&members([ill, ill]).pool(&configured));
        let states = |record: &Record| record.hosts().map(|host| host.state(at(1.0))).collect::<Vec<_>>();
        members([ill, ill]).report(&mut record, at(1.0));
        assert_eq!(states(&record), [State::Serving; 2]);
        members([ill, well]).report(&mut record, at(1.0));
        assert_eq!(states(&record), [State::Unhealthy, State::Serving]);
        members([ill, ill]).report(&mut record, at(1.0));
        assert_eq!(states(&record), [State::Unhealthy; 2]);
    }

    #[test]
    fn what_envoy_holds_of_a_host_is_written_down_once() {
        let configured = pool(DISCOVERY);
        let members = Membership::new([member(1, 1, Condition::Unhealthy), member(2, 1, Condition::Healthy)]);
        let mut record = record_of(&members.pool(&configured));
        let standing = |record: &Record| record.header.standing;
        members.report(&mut record, at(1.0));
        let before = standing(&record);
        assert_eq!(members.report(&mut record, at(1.0)), []);
        assert_eq!(standing(&record), before, "it was no news");
        let states: Vec<State> = record.hosts().map(|host| host.state(at(1.0))).collect();
        assert_eq!(states, [State::Unhealthy, State::Serving]);
        let better = Membership::new([member(2, 1, Condition::Healthy)]);
        better.report(&mut record, at(1.0));
        assert_eq!(record.host(0).unwrap().state(at(1.0)), State::Serving, "what Envoy does not have any more is not unhealthy");
    }
}
