//! What a host that joins a pool at work gets of the traffic, in virtual time, and what one gets that is only to be chosen where no other can be.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

use super::*;
use crate::config::Host as Configured;
use crate::core::fixture::{address, at, pool_of, record_of, wants};
use crate::core::newcomer::{self, JOBS, SHARE};

/// A pool in which jobs of a second each run.
struct Fleet {
    pool: Rc<Pool>,
    record: Record,
    roster: Roster,
    random: Random,
    now: f64,
    ends: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Fleet {
    fn of(hosts: usize, keys: &str) -> Self {
        let pool = pool_of(hosts, keys);
        let (record, roster) = (record_of(&pool), Roster::default());
        Self { pool, record, roster, random: Random::new(3), now: 1000.0, ends: BinaryHeap::new() }
    }

    /// One more host joins now.
    fn joins(&mut self) -> u32 {
        let host = self.pool.hosts.len();
        let more = Configured::new(address(host), self.pool.max_in_flight);
        self.pool = Rc::new(self.pool.with_hosts(self.pool.hosts.iter().cloned().chain([more])));
        let seat = self.record.add_host(self.pool.hosts[host].named(), false);
        newcomer::join(&mut self.record, seat.slot, at(self.now));
        self.roster = Roster::default();
        seat.slot
    }

    /// Time passes; jobs end.
    fn until(&mut self, now: f64) {
        self.now = now;
        while let Some(Reverse((due, slot))) = self.ends.peek().copied()
            && due <= at(now).0
        {
            self.ends.pop();
            self.record.with_host(slot, |host| host.in_flight -= 1);
        }
    }

    /// A job comes; gives where it went, if anywhere.
    fn job(&mut self) -> Option<u32> {
        let (record, now) = (&self.record, at(self.now));
        let Decision::Chosen(chosen) = choose(record, &self.pool, &mut self.roster, now, &mut self.random, wants(Kind::Job))
        else {
            return None;
        };
        let slot = chosen.hosts[0] as u32;
        self.record.reserve(slot, None, Instant::default());
        self.ends.push(Reverse((at(self.now + 1.0).0, slot)));
        Some(slot)
    }

    /// So many jobs a second for so long; gives how many each host got.
    fn run(&mut self, rate: f64, seconds: f64) -> Vec<usize> {
        let mut jobs = vec![0; self.pool.hosts.len()];
        for _ in 0..(rate * seconds) as usize {
            self.until(self.now + 1.0 / rate);
            jobs[self.job().unwrap() as usize] += 1;
        }
        jobs
    }
}

#[test]
fn a_host_that_joins_gets_no_more_than_its_share_at_any_time_and_soon_the_whole_of_it() {
    for (hosts, rate) in [(1, 20.0), (4, 40.0), (4, 120.0), (9, 200.0), (63, 600.0)] {
        let mut fleet = Fleet::of(hosts, "");
        fleet.run(rate, 5.0);
        let newcomer = fleet.joins();
        let (mut its, mut all) = (0, 0);
        while its < JOBS {
            fleet.until(fleet.now + 1.0 / rate);
            its += u32::from(fleet.job() == Some(newcomer));
            all += 1;
            let fair = f64::from(all) / (hosts + 1) as f64;
            // The first it gets while all others are at work.
            assert!(its <= 1 || f64::from(its) <= SHARE * fair, "{hosts} hosts: {its} of {all}");
            assert!(all < 200 * (hosts as u32 + 1), "{hosts} hosts: only {its} of {all}");
        }
        let jobs = fleet.run(rate, 20.0);
        let fair = jobs.iter().sum::<usize>() / jobs.len();
        let part = jobs[newcomer as usize] as f64 / fair as f64;
        assert!((0.9..1.3).contains(&part), "{hosts} hosts, afterwards: {part}");
    }
}

#[test]
fn a_newcomer_that_has_had_its_hundred_jobs_is_held_back_no_more_though_its_weight_still_rises() {
    let mut fleet = Fleet::of(2, r#", "slow_start_ms": 3600000, "score": {"latency_weight": 0}"#);
    fleet.run(20.0, 5.0);
    let newcomer = fleet.joins();
    let requests = |fleet: &mut Fleet, requests| fleet.record.with_host(newcomer, |host| host.requests = requests);
    requests(&mut fleet, 99);
    (0..60).for_each(|_| assert_ne!(fleet.job(), Some(newcomer), "it has had more than its share"));
    requests(&mut fleet, 100);
    // The scores are worked out anew before the next choice.
    fleet.record.header.learned += 1;
    assert_eq!(fleet.job(), Some(newcomer), "the others have thirty jobs each, and it has a tenth of their weight");
}

#[test]
fn a_newcomer_takes_what_comes_while_no_other_has_a_free_slot() {
    let mut fleet = Fleet::of(2, r#", "max_in_flight": 4"#);
    (0..8).for_each(|_| assert!(fleet.job().is_some()));
    assert_eq!(fleet.job(), None);
    let newcomer = fleet.joins();
    for _ in 0..4 {
        assert_eq!(fleet.job(), Some(newcomer));
    }
    assert_eq!(fleet.job(), None);
}

#[test]
fn a_pool_of_newcomers_alone_holds_none_of_them_back() {
    let mut fleet = Fleet::of(2, "");
    fleet.record.header.placed = 500;
    (0..2).for_each(|slot| newcomer::join(&mut fleet.record, slot, at(999.0)));
    fleet.record.with_host(1, |host| host.in_flight = 40);
    let to_first = (0..30).filter(|_| fleet.job() == Some(0)).count();
    assert_eq!(to_first, 30);
}

#[test]
fn with_a_slow_start_the_weight_rises_step_by_step() {
    let mut fleet = Fleet::of(4, r#", "slow_start_ms": 40000, "score": {"latency_weight": 0}"#);
    fleet.run(100.0, 5.0);
    let newcomer = fleet.joins() as usize;
    let shares: Vec<f64> = (0..8)
        .map(|_| {
            let jobs = fleet.run(100.0, 5.0);
            jobs[newcomer] as f64 * (jobs.len() - 1) as f64 / (jobs.iter().sum::<usize>() - jobs[newcomer]) as f64
        })
        .collect();
    // In the n-th eighth its weight is about (n + 1/2) / 8 of the others'.
    assert!(shares[0] < 0.3 && (0.3..0.7).contains(&shares[3]) && (0.75..1.05).contains(&shares[7]), "{shares:?}");
    assert!(shares.windows(2).all(|two| two[0] < two[1] + 0.05), "{shares:?}");
}

#[test]
fn a_degraded_host_is_chosen_only_where_no_other_has_a_free_slot() {
    let mut fleet = Fleet::of(3, r#", "max_in_flight": 2, "alternates": 2"#);
    let mut hosts = fleet.pool.hosts.clone();
    hosts[1].is_reserve = true;
    fleet.pool = Rc::new(fleet.pool.with_hosts(hosts.into_iter()));
    let Decision::Chosen(chosen) =
        choose(&fleet.record, &fleet.pool, &mut fleet.roster, at(fleet.now), &mut fleet.random, wants(Kind::Job))
    else {
        panic!("there are hosts");
    };
    assert_eq!(chosen.hosts[2], 1, "it is the last alternate");
    let mut went: Vec<u32> = (0..6).map(|_| fleet.job().unwrap()).collect();
    assert_eq!(went.split_off(4), [1, 1]);
    assert!(!went.contains(&1));
    assert_eq!(fleet.job(), None);
}

#[test]
fn many_newcomers_at_once_get_a_job_each_before_hosts_at_work_get_more() {
    for (from, to) in [(1, 8), (4, 64), (1, 100)] {
        let mut fleet = Fleet::of(from, "");
        fleet.record.header.placed = 500;
        (from..to).for_each(|_| _ = fleet.joins());
        let mut jobs = vec![0; to];
        (0..to).for_each(|_| jobs[fleet.job().unwrap() as usize] += 1);
        assert_eq!(jobs, vec![1; to], "{from} to {to}");
    }
}

/// So many hosts; those of the range are reserves.
fn with_reserves(hosts: usize, reserves: std::ops::Range<usize>, keys: &str) -> Fleet {
    let mut fleet = Fleet::of(hosts, keys);
    let mut all = fleet.pool.hosts.clone();
    reserves.for_each(|host| all[host].is_reserve = true);
    fleet.pool = Rc::new(fleet.pool.with_hosts(all.into_iter()));
    fleet.record.header.placed = 500;
    fleet
}

#[test]
fn the_only_first_choice_that_comes_back_gets_all_that_it_has_slots_for() {
    let mut fleet = with_reserves(6, 1..6, "");
    newcomer::join(&mut fleet.record, 0, at(999.0));
    assert_eq!(fleet.run(20.0, 20.0), [400, 0, 0, 0, 0, 0]);
}

#[test]
fn a_newcomers_fair_share_is_one_among_the_first_choices() {
    let mut fleet = with_reserves(22, 2..22, "");
    newcomer::join(&mut fleet.record, 1, at(999.0));
    let jobs = fleet.run(20.0, 20.0);
    assert!(jobs[1] > 180 && jobs[2..].iter().sum::<usize>() == 0, "{jobs:?}");
}

#[test]
fn a_newcomer_that_has_had_its_share_still_comes_before_a_reserve() {
    let mut fleet = with_reserves(3, 2..3, r#", "max_in_flight": 4"#);
    newcomer::join(&mut fleet.record, 1, at(999.0));
    let went: Vec<u32> = (0..12).map(|_| fleet.job().unwrap()).collect();
    assert!(!went[..8].contains(&2) && went[8..] == [2; 4], "{went:?}");
}
