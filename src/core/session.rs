//! Which host a job's session belongs to: rendezvous hashing with bounded load.
//!
//! Each host draws a number from the key and its own address (Thaler and Ravishankar 1998, weighted as by Schindelhauer and Schomaker 2005), and the highest is the key's host. A host that comes or goes
//! moves its own keys only. It takes a job for its key as long as its jobs in flight are within `bound` times its share of all (Mirrokni, Thorup and Zadimoghaddam 2016); beyond, the
//! next of the key's hosts has it: so a hot key fills several hosts, each with its cache, and drowns none.

use super::address::Address;
use super::random::Random;

/// A host as far as it may take a job for its key.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Where it listens.
    pub address: Address,
    /// Its weight.
    pub weight: f64,
    /// Its jobs in flight.
    pub load: u32,
    /// Whether it has a free slot.
    pub is_free: bool,
}

/// The key's host among these, by its place, and whether it is the first of the key's; `None`: none may take it.
pub fn host_of(key: u64, candidates: &[Candidate], bound: f64) -> Option<(usize, bool)> {
    let weights: f64 = candidates.iter().map(|host| host.weight).sum();
    let jobs: f64 = candidates.iter().map(|host| f64::from(host.load)).sum::<f64>() + 1.0;
    let has_room = |host: &Candidate| host.is_free && f64::from(host.load) < (bound * jobs * host.weight / weights).ceil();
    let drawn = || candidates.iter().enumerate().map(|(place, host)| (place, host, draw(key, host)));
    let (first, ..) = drawn().max_by(|(.., own), (.., other)| own.total_cmp(other))?;
    let (place, ..) = drawn().filter(|(_, host, _)| has_room(host)).max_by(|(.., own), (.., other)| own.total_cmp(other))?;
    Some((place, place == first))
}

fn draw(key: u64, host: &Candidate) -> f64 {
    let bits = host.address.ip();
    let mixed = mix(key ^ mix(bits as u64 ^ mix((bits >> 64) as u64 ^ u64::from(host.address.port()))));
    // In 0..1, never 0.
    let unit = ((mixed >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -host.weight / unit.ln()
}

/// Each bit of these changes half of the bits.
fn mix(bits: u64) -> u64 {
    Random::new(bits).bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::address;

    fn hosts(count: usize) -> Vec<Candidate> {
        (0..count).map(|host| Candidate { address: address(host), weight: 1.0, load: 0, is_free: true }).collect()
    }

    fn place(key: u64, hosts: &[Candidate]) -> usize {
        host_of(key, hosts, 1.25).unwrap().0
    }

    #[test]
    fn keys_are_spread_evenly_and_by_weight() {
        let mut hosts = hosts(4);
        hosts[3].weight = 2.0;
        let mut count = [0u32; 4];
        (0..20_000).for_each(|key| count[place(key, &hosts)] += 1);
        assert!(count[..3].iter().all(|count| (3_700..4_300).contains(count)) && (7_700..8_300).contains(&count[3]), "{count:?}");
    }

    #[test]
    fn a_host_that_goes_moves_its_own_keys_only() {
        let (all, less) = (hosts(5), hosts(4));
        assert!((0..1000).all(|key| place(key, &all) == 4 || place(key, &all) == place(key, &less)));
    }

    #[test]
    fn a_hot_key_fills_its_hosts_to_their_bound_one_after_the_other() {
        let mut hosts = hosts(4);
        for _ in 0..400 {
            let (place, is_first) = host_of(7, &hosts, 1.25).unwrap();
            assert_eq!(is_first, place == self::place(7, &self::hosts(4)));
            hosts[place].load += 1;
        }
        let mut loads: Vec<u32> = hosts.iter().map(|host| host.load).collect();
        loads.sort_unstable();
        assert!(loads[3] <= 126 && loads[0] >= 20, "{loads:?}");
    }

    #[test]
    fn where_none_may_take_it_there_is_none() {
        let mut hosts = hosts(2);
        hosts.iter_mut().for_each(|host| host.is_free = false);
        assert_eq!(host_of(1, &hosts, 1.25), None);
        assert_eq!(host_of(1, &[], 1.25), None);
    }
}
