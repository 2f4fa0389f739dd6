//! When to ask each host whether it is well, and what its answers come to.
//!
//! Every host has its own time, and an interval that varies by a tenth: a pool of a thousand hosts is not asked at once. One question to a host
//! is open at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::address::Address;
use super::random::Random;
use super::time::Instant;
use crate::config::Probe;

/// An interval is longer or shorter by up to this part.
const JITTER: f64 = 0.1;

/// Most questions in one tick: with all hosts of the largest pool new at once, they are asked within 2 s.
const MOST_AT_ONCE: usize = 64;

/// How much later than its timeout an answer may come before it is believed to be lost, as with a root that Envoy deleted meanwhile.
const LOST_AFTER: Duration = Duration::from_secs(5);

/// What the last answers of a host come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Good ones in a row.
    pub good: u32,
    /// Bad ones in a row.
    pub bad: u32,
}

#[derive(Clone, Debug)]
struct Asked {
    due: Instant,
    is_new: bool,
    open: Option<Instant>,
    run: Run,
}

/// The questions to the hosts of one pool.
#[derive(Clone, Debug, Default)]
pub struct Prober {
    asked: BTreeMap<Address, Asked>,
}

impl Prober {
    /// The hosts to ask now. Each must be asked: it is noted as open.
    pub fn due(&mut self, hosts: &[Address], probe: &Probe, now: Instant, random: &mut Random) -> Vec<Address> {
        let there: BTreeSet<&Address> = hosts.iter().collect();
        self.asked.retain(|address, _| there.contains(address));
        for address in hosts {
            // A connection to a new host is wanted before its first job; an opinion of it is not that urgent.
            let wait = if probe.prewarm { Duration::ZERO } else { probe.interval.mul_f64(random.unit()) };
            self.asked.entry(*address).or_insert_with(|| Asked {
                due: now + wait,
                is_new: true,
                open: None,
                run: Run::default(),
            });
        }
        let mut due = Vec::new();
        for (address, asked) in &mut self.asked {
            // A clock that stepped back must not put the next question off.
            asked.due = asked.due.min(now + probe.interval * 2);
            let lost = |open: Instant| !(open..open + probe.timeout + LOST_AFTER).contains(&now);
            asked.open = asked.open.filter(|open| !lost(*open));
            if asked.due <= now && asked.open.is_none() {
                due.push((asked.due, *address));
            }
        }
        // Who has waited longest comes first: otherwise the last of many would never be asked.
        due.sort_unstable();
        due.truncate(MOST_AT_ONCE);
        let due: Vec<Address> = due.into_iter().map(|(_, address)| address).collect();
        for address in &due {
            if let Some(asked) = self.asked.get_mut(address) {
                asked.open = Some(now);
                // Hosts that came together are not asked together for ever.
                let is_first = std::mem::take(&mut asked.is_new);
                let part = if is_first { random.unit() } else { 1.0 - JITTER + 2.0 * JITTER * random.unit() };
                asked.due = now + probe.interval.mul_f64(part);
            }
        }
        due
    }

    /// A host has answered; gives what its answers come to.
    pub fn answered(&mut self, address: Address, is_well: bool) -> Option<Run> {
        let asked = self.asked.get_mut(&address)?;
        asked.open = None;
        asked.run = match is_well {
            true => Run { good: asked.run.good.saturating_add(1), bad: 0 },
            false => Run { good: 0, bad: asked.run.bad.saturating_add(1) },
        };
        Some(asked.run)
    }

    /// A host could not be asked: that says nothing about it.
    pub fn not_asked(&mut self, address: Address) {
        if let Some(asked) = self.asked.get_mut(&address) {
            asked.open = None;
        }
    }

    /// Forgets what the answers came to: somebody else counts them now.
    pub fn forget_runs(&mut self) {
        self.asked.values_mut().for_each(|asked| asked.run = Run::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::{address, at};

    fn probe(prewarm: bool) -> Probe {
        let path = "/health".to_owned();
        let (interval, timeout) = (Duration::from_secs(2), Duration::from_secs(1));
        Probe { path, interval, timeout, unhealthy_after: 3, healthy_after: 2, prewarm }
    }

    /// Asks for 100 s in steps of 0.1 s; each question is answered after `answer_after` steps.
    fn asked_in_100_s(hosts: usize, answer_after: usize) -> Vec<usize> {
        let (hosts, mut prober, mut random) = ((0..hosts).map(address).collect::<Vec<_>>(), Prober::default(), Random::new(3));
        let mut open: BTreeMap<usize, Vec<Address>> = BTreeMap::new();
        let mut count = vec![0; hosts.len()];
        for step in 0..1000 {
            for address in open.remove(&step).unwrap_or_default() {
                prober.answered(address, true);
            }
            for asked in prober.due(&hosts, &probe(false), at(1.0 + step as f64 * 0.1), &mut random) {
                count[hosts.iter().position(|host| *host == asked).unwrap()] += 1;
                open.entry(step + answer_after).or_default().push(asked);
            }
        }
        count
    }

    #[test]
    fn each_host_is_asked_once_an_interval() {
        assert!(asked_in_100_s(4, 1).into_iter().all(|asked| (45..=52).contains(&asked)));
        assert!(asked_in_100_s(200, 1).into_iter().all(|asked| (45..=52).contains(&asked)));
    }

    #[test]
    fn of_more_hosts_than_can_be_asked_each_has_its_turn() {
        let count = asked_in_100_s(1024, 1);
        assert!(count.iter().all(|asked| *asked >= 30), "{:?}", count.iter().min());
        let (hosts, mut prober, mut random) = ((0..200).map(address).collect::<Vec<_>>(), Prober::default(), Random::new(1));
        let probe = Probe { interval: Duration::from_millis(200), ..probe(false) };
        let mut never: BTreeSet<Address> = hosts.iter().copied().collect();
        for step in 0..100 {
            for host in prober.due(&hosts, &probe, at(1.0 + f64::from(step) * 0.1), &mut random) {
                never.remove(&host);
                prober.answered(host, true);
            }
        }
        assert_eq!(never.len(), 0);
    }

    #[test]
    fn one_question_to_a_host_is_open_at_a_time() {
        assert!(asked_in_100_s(2, 40).into_iter().all(|asked| (23..=26).contains(&asked)));
    }

    #[test]
    fn an_answer_that_never_comes_does_not_end_the_questions() {
        assert!(asked_in_100_s(2, 5000).into_iter().all(|asked| (14..=17).contains(&asked)));
    }

    #[test]
    fn hosts_are_not_asked_all_at_once_unless_their_connections_are_to_be_warm() {
        let hosts: Vec<Address> = (0..60).map(address).collect();
        let first = |prewarm| Prober::default().due(&hosts, &probe(prewarm), at(1.0), &mut Random::new(1)).len();
        assert_eq!((first(false), first(true)), (0, 60));
    }

    #[test]
    fn hosts_that_were_asked_at_once_are_spread_over_the_next_intervals() {
        let (hosts, mut prober, mut random) = ((0..60).map(address).collect::<Vec<_>>(), Prober::default(), Random::new(1));
        let mut most = 0;
        for step in 0..200 {
            let due = prober.due(&hosts, &probe(true), at(1.0 + f64::from(step) * 0.1), &mut random);
            due.iter().for_each(|host| _ = prober.answered(*host, true));
            most = most.max(if step == 0 { 0 } else { due.len() });
        }
        assert!(most <= 12, "{most} of 60 at once, in 20 steps an interval");
    }

    #[test]
    fn answers_count_in_a_row() {
        let mut prober = Prober::default();
        let _ = prober.due(&[address(0)], &probe(true), at(1.0), &mut Random::new(1));
        let runs = [true, true, false, false, false, true].map(|well| prober.answered(address(0), well).unwrap());
        assert_eq!(runs.map(|run| (run.good, run.bad)), [(1, 0), (2, 0), (0, 1), (0, 2), (0, 3), (1, 0)]);
        assert_eq!(prober.answered(address(1), true), None);
    }

    #[test]
    fn a_clock_that_steps_back_puts_no_question_off() {
        let (mut prober, mut random) = (Prober::default(), Random::new(1));
        assert_eq!(prober.due(&[address(0)], &probe(true), at(10_000.0), &mut random).len(), 1);
        prober.answered(address(0), true);
        let asked =
            (0..60).map(|step| prober.due(&[address(0)], &probe(true), at(5.0 + f64::from(step) * 0.1), &mut random).len());
        assert_eq!(asked.sum::<usize>(), 1);
    }
}
