use super::*;
use crate::core::ewma::Ewma;
use crate::core::fixture::{at, pool, pool_of, record_of, wants};
use proptest::prelude::*;

const NOW: f64 = 1000.0;

/// A pool with its books.
struct Bench {
    pool: std::rc::Rc<Pool>,
    record: Record,
    random: Random,
    now: Instant,
}

impl Bench {
    fn new(pool: std::rc::Rc<Pool>) -> Self {
        let mut record = record_of(&pool);
        record.header.describe(&pool.score, pool.time_constant);
        Self { pool, record, random: Random::new(1), now: at(NOW) }
    }

    fn of(hosts: usize, keys: &str) -> Self {
        Self::new(pool_of(hosts, keys))
    }

    fn load(mut self, loads: &[u32]) -> Self {
        for (slot, load) in (0..).zip(loads) {
            self.record.with_host(slot, |host| host.in_flight = *load);
        }
        self
    }

    /// Latencies just measured; 0: never.
    fn latency(mut self, millis: &[f32]) -> Self {
        for (slot, millis) in (0..).zip(millis) {
            self.feed(slot, *millis);
        }
        self
    }

    fn feed(&mut self, slot: u32, millis: f32) {
        let fed = if millis > 0.0 { self.now } else { Instant::default() };
        self.record.with_host(slot, |host| host.set_ewma(Ewma { millis, fed }));
    }

    fn decide(&mut self, kind: Kind) -> Decision {
        choose(&self.record, &self.pool, &mut Roster::default(), self.now, &mut self.random, wants(kind))
    }

    fn hosts(&mut self, kind: Kind) -> Vec<usize> {
        match self.decide(kind) {
            Decision::Chosen(chosen) => chosen.hosts,
            other => panic!("{other:?}"),
        }
    }

    fn scores(&self) -> Vec<f64> {
        crate::core::score::scores(&self.record, self.now)
    }

    /// How often each host comes first in so many choices that leave no trace.
    fn firsts(&mut self, choices: usize) -> Vec<usize> {
        let mut firsts = vec![0; self.pool.hosts.len()];
        for _ in 0..choices {
            firsts[self.hosts(Kind::Job)[0]] += 1;
        }
        firsts
    }

    /// Places so many jobs, each of which stays, and gives the loads.
    fn fill(&mut self, jobs: usize) -> Vec<u32> {
        for _ in 0..jobs {
            let host = self.hosts(Kind::Job)[0];
            self.record.reserve(host as u32, None, Instant::default());
        }
        self.record.hosts().map(|host| host.load()).collect()
    }
}

/// The decision for this host alone.
fn sent_to(host: usize) -> Decision {
    Decision::Chosen(Chosen { hosts: vec![host], trial: None, work: None, why: None })
}

#[track_caller]
fn assert_close(seen: &[f64], expected: &[f64]) {
    let is_close =
        seen.len() == expected.len() && seen.iter().zip(expected).all(|(seen, expected)| (seen - expected).abs() < 1e-6);
    assert!(is_close, "{seen:?} is not {expected:?}");
}

#[test]
fn the_score_is_jobs_over_weight_plus_latency_over_target() {
    let hosts = r#""hosts": [{"address": "10.0.0.1:80", "weight": 2}, {"address": "10.0.0.2:80"}, {"address": "10.0.0.3:80", "weight": 0.5}]"#;
    let bench = Bench::new(pool(hosts)).load(&[3, 0, 1]).latency(&[2000.0, 1000.0, 8000.0]);
    // 0.7 × 4 / 2 + 0.3 × 2000 / 4000; 0.7 × 1 / 1 + 0.3 × 1000 / 4000; 0.7 × 2 / 0.5 + 0.3 × 8000 / 4000
    assert_close(&bench.scores(), &[1.55, 0.775, 3.4]);
}

#[test]
fn both_weights_and_the_target_are_the_configurations() {
    let score = r#", "score": {"in_flight_weight": 2, "latency_weight": 5, "target_latency_ms": 1000}"#;
    let bench = Bench::of(2, score).load(&[1, 0]).latency(&[500.0, 100.0]);
    assert_close(&bench.scores(), &[2.0 * 2.0 + 5.0 * 0.5, 2.0 + 5.0 * 0.1]);
}

#[test]
fn a_host_without_history_is_scored_as_the_pools_mean() {
    let bench = Bench::of(3, "").latency(&[1000.0, 3000.0, 0.0]);
    assert_close(&bench.scores(), &[0.7 + 0.075, 0.7 + 0.225, 0.7 + 0.15]);
}

#[test]
fn without_any_history_only_the_jobs_count() {
    let mut bench = Bench::of(3, "").load(&[2, 1, 3]);
    assert_close(&bench.scores(), &[2.1, 1.4, 2.8]);
    assert_eq!(bench.hosts(Kind::Job), [1, 0, 2]);
}

#[test]
fn scores_inside_the_band_are_ties_and_those_outside_are_not() {
    // Latency alone: 1000 ms are 1.0, and the band is 0.01 × 1.
    let score = r#", "score": {"in_flight_weight": 0, "latency_weight": 1, "target_latency_ms": 1000}"#;
    let inside = Bench::of(2, score).latency(&[1000.0, 1009.9]).firsts(1000);
    assert!(inside.iter().all(|count| (440..560).contains(count)), "{inside:?}");
    let outside = Bench::of(2, score).latency(&[1000.0, 1010.1]).firsts(1000);
    assert_eq!(outside, [1000, 0]);
}

#[test]
fn the_band_starts_at_the_lowest_score_and_does_not_chain() {
    let score = r#", "score": {"in_flight_weight": 0, "latency_weight": 1, "target_latency_ms": 1000}, "alternates": 0"#;
    let firsts = Bench::of(3, score).latency(&[1016.0, 1008.0, 1000.0]).firsts(1000);
    assert_eq!(firsts[0], 0, "{firsts:?}");
    assert!(firsts[1] > 440 && firsts[2] > 440, "{firsts:?}");
}

#[test]
fn ties_are_spread_evenly_over_equal_hosts() {
    let firsts = Bench::of(8, "").firsts(8000);
    let chi_square: f64 = firsts.iter().map(|count| (*count as f64 - 1000.0).powi(2) / 1000.0).sum();
    // 7 degrees of freedom: 24.3 is passed once in 1,000 seeds; far below 1 would be too even to be chance.
    assert!((0.5..24.3).contains(&chi_square), "{chi_square}: {firsts:?}");
}

#[test]
fn tied_alternates_come_in_random_order_too() {
    let mut bench = Bench::of(4, r#", "alternates": 3"#);
    let mut last = [0; 4];
    for _ in 0..4000 {
        last[bench.hosts(Kind::Job)[3]] += 1;
    }
    assert!(last.iter().all(|count| (880..1120).contains(count)), "{last:?}");
}

#[test]
fn a_host_of_twice_the_weight_gets_twice_the_jobs() {
    let hosts = r#""hosts": [{"address": "10.0.0.1:80"}, {"address": "10.0.0.2:80", "weight": 2}], "max_in_flight": 1000"#;
    let loads = Bench::new(pool(hosts)).fill(300);
    assert!(loads[0].abs_diff(100) <= 1, "{loads:?}");
}

#[test]
fn a_host_four_times_slower_gets_fewer_jobs_by_the_scores_own_arithmetic() {
    let score =
        r#", "max_in_flight": 1000, "score": {"in_flight_weight": 0.1, "latency_weight": 0.9, "target_latency_ms": 1000}"#;
    let loads = Bench::of(2, score).latency(&[4000.0, 1000.0]).fill(101);
    // Even where 0.1 a + 0.9 × 4 = 0.1 b + 0.9 × 1: 27 jobs apart.
    assert_eq!(loads.iter().sum::<u32>(), 101);
    assert!((loads[1] - loads[0]).abs_diff(27) <= 1, "{loads:?}");
}

#[test]
fn an_idle_host_that_was_slow_is_tried_again_after_its_average_has_faded() {
    let mut bench = Bench::of(4, "").latency(&[60_000.0, 100.0, 100.0, 100.0]);
    assert_eq!(bench.firsts(1000)[0], 0);
    bench.now = at(NOW + 600.0);
    (1..4).for_each(|slot| bench.feed(slot, 100.0));
    let firsts = bench.firsts(1000);
    assert!((190..310).contains(&firsts[0]), "{firsts:?}");
}

#[test]
fn one_slow_host_of_long_ago_does_not_hold_up_the_mean() {
    let mut bench = Bench::of(3, "").latency(&[60_000.0, 100.0, 0.0]);
    bench.now = at(NOW + 300.0);
    bench.feed(1, 100.0);
    assert!(bench.scores().iter().all(|score| (score - 0.7 - 0.3 * 0.025).abs() < 1e-3), "{:?}", bench.scores());
}

#[test]
fn when_all_evidence_has_faded_the_mean_is_the_plain_one() {
    let mut bench = Bench::of(3, "").latency(&[1000.0, 3000.0, 0.0]);
    bench.now = at(NOW + 100_000.0);
    assert_close(&bench.scores(), &[0.85; 3]);
}

#[test]
fn a_clock_that_stepped_back_leaves_the_averages_as_they_are() {
    let mut bench = Bench::of(2, "").latency(&[1000.0, 3000.0]);
    let before = bench.scores();
    bench.now = at(1.0);
    assert_eq!(bench.scores(), before);
    assert_eq!(bench.hosts(Kind::Job)[0], 0);
}

#[test]
fn alternates_are_distinct_and_best_first() {
    let mut bench = Bench::of(5, r#", "alternates": 3"#).load(&[4, 2, 0, 3, 1]);
    assert_eq!(bench.hosts(Kind::Job), [2, 4, 1, 3]);
}

#[test]
fn a_small_pool_names_every_host_once() {
    assert_eq!(Bench::of(2, r#", "alternates": 8"#).load(&[1, 0]).hosts(Kind::Job), [1, 0]);
    assert_eq!(Bench::of(1, r#", "alternates": 8"#).hosts(Kind::Job), [0]);
}

#[test]
fn without_alternates_one_host_is_named() {
    assert_eq!(Bench::of(3, r#", "alternates": 0"#).load(&[1, 0, 2]).hosts(Kind::Job), [1]);
}

#[test]
fn a_host_without_a_free_slot_is_an_alternate_only_after_all_that_have_one() {
    let hosts = r#""hosts": [{"address": "10.0.0.1:80", "max_in_flight": 1}, {"address": "10.0.0.2:80", "max_in_flight": 10},
        {"address": "10.0.0.3:80", "max_in_flight": 2}]"#;
    let mut bench = Bench::new(pool(hosts)).load(&[1, 9, 2]);
    assert_eq!(bench.hosts(Kind::Job), [1, 0, 2]);
}

#[test]
fn a_host_that_drains_is_never_named() {
    let hosts = r#""hosts": [{"address": "10.0.0.1:80", "drain": true}, {"address": "10.0.0.2:80"}]"#;
    let mut bench = Bench::new(pool(hosts)).load(&[0, 49]);
    assert_eq!(bench.hosts(Kind::Job), [1]);
    bench = bench.load(&[0, 50]);
    assert!(matches!(bench.decide(Kind::Job), Decision::Full(_)));
    assert_eq!(bench.hosts(Kind::Other), [1]);
}

#[test]
fn a_host_that_the_record_does_not_have_is_not_named() {
    let mut bench = Bench::of(2, "");
    let mut smaller = Record::new(2);
    smaller.add_host(bench.pool.hosts[1].named(), false);
    bench.record = smaller;
    assert_eq!(bench.hosts(Kind::Job), [1]);
}

#[test]
fn a_host_that_was_retired_is_not_named() {
    let mut bench = Bench::of(2, "").load(&[0, 1]);
    bench.record.retire(0);
    assert_eq!(bench.hosts(Kind::Job), [1]);
}

#[test]
fn when_all_drain_there_is_no_host_for_anybody() {
    let hosts = r#""hosts": [{"address": "10.0.0.1:80", "drain": true}]"#;
    let mut bench = Bench::new(pool(hosts));
    assert_eq!(bench.decide(Kind::Job), Decision::NoHost(Duration::from_secs(1)));
    assert_eq!(bench.decide(Kind::Other), Decision::NoHost(Duration::from_secs(1)));
}

#[test]
fn leases_that_wait_for_their_worker_fill_slots_too() {
    let mut bench = Bench::of(1, r#", "max_in_flight": 2"#).load(&[1]);
    bench.record.with_host(0, |host| host.pending = 1);
    assert!(matches!(bench.decide(Kind::Job), Decision::Full(_)));
}

#[test]
fn a_request_that_needs_no_slot_goes_to_a_full_host() {
    let mut bench = Bench::of(2, r#", "max_in_flight": 3"#).load(&[4, 3]);
    assert!(matches!(bench.decide(Kind::Job), Decision::Full(_)));
    assert_eq!(bench.hosts(Kind::Other), [1, 0]);
}

#[test]
fn the_advice_to_come_back_is_the_time_until_a_slot_is_free_within_a_second_and_a_minute() {
    let advice =
        |millis: f32| match Bench::of(2, r#", "max_in_flight": 2"#).load(&[2, 2]).latency(&[millis, millis]).decide(Kind::Job) {
            Decision::Full(advice) => advice.as_secs_f64(),
            other => panic!("{other:?}"),
        };
    // Four jobs side by side.
    assert!((advice(40_000.0) - 10.0).abs() < 1e-3);
    assert_eq!(advice(0.0), 1.0);
    assert_eq!(advice(10.0), 1.0);
    assert_eq!(advice(1e9), 60.0);
}

#[test]
fn a_host_that_came_back_is_as_full_as_its_machine_was_left() {
    let pool = pool_of(2, r#", "max_in_flight": 2, "alternates": 0"#);
    let mut record = record_of(&pool);
    record.reserve(0, None, Instant::default());
    record.retire(0);
    record.add_host(pool.hosts[0].named(), false);
    let (mut random, mut roster) = (Random::new(1), Roster::default());
    let mut decide = |record: &Record| choose(record, &pool, &mut roster, at(1.0), &mut random, wants(Kind::Job));
    // One of its two slots is taken by the job of the generation before; the other host is the less loaded one.
    assert_eq!(decide(&record), sent_to(1));
    (0..2).for_each(|_| record.reserve(1, None, Instant::default()));
    assert_eq!(decide(&record), sent_to(0));
    record.reserve(2, None, Instant::default());
    assert!(matches!(decide(&record), Decision::Full(_)));
}

#[test]
fn a_latency_that_was_fed_counts_at_the_next_choice_and_fades_with_time() {
    let pool = pool_of(2, r#", "alternates": 0"#);
    let (mut record, mut random, mut roster) = (record_of(&pool), Random::new(1), Roster::default());
    let mut firsts = |record: &Record, seconds: f64| {
        let decisions = (0..200).map(|_| choose(record, &pool, &mut roster, at(seconds), &mut random, wants(Kind::Job)));
        decisions.filter(|decision| *decision == sent_to(0)).count()
    };
    assert!((70..130).contains(&firsts(&record, NOW)), "no history: a tie");
    for (slot, millis) in [(0, 9000.0), (1, 1000.0)] {
        record.with_host(slot, |host| host.set_ewma(Ewma { millis, fed: at(NOW) }));
    }
    record.header.learned += 1;
    assert_eq!(firsts(&record, NOW), 0, "the slow one");
    // Only the other one is used; the slow one's average fades to its.
    record.with_host(1, |host| host.set_ewma(Ewma { millis: 1000.0, fed: at(NOW + 300.0) }));
    assert!((70..130).contains(&firsts(&record, NOW + 300.0)), "a tie again");
}

proptest! {
    #[test]
    fn any_loads_weights_and_latencies_give_finite_scores_and_a_decision(
        hosts in prop::collection::vec((0.01f32..=1000.0, 1..=1_000_000u32, 0..=2_000_000u32, 0u64..=u64::MAX / 1000, any::<bool>()), 1..12),
        weights in (prop_oneof![Just(0.0f32), Just(1000.0), 0.001f32..1.0], 0.001f32..=1000.0),
        target in 1..=3_600_000u64,
        now in any::<u64>(),
    ) {
        let entries: Vec<String> = hosts.iter().enumerate().map(|(index, (weight, slots, _, _, drain))| {
            format!(r#"{{"address": "10.0.0.{}:80", "weight": {weight}, "max_in_flight": {slots}, "drain": {drain}}}"#, index + 1)
        }).collect();
        let (in_flight, latency) = weights;
        let score = format!(r#""in_flight_weight": {in_flight}, "latency_weight": {latency}, "target_latency_ms": {target}"#);
        let mut bench = Bench::new(pool(&format!(r#""hosts": [{}], "score": {{{score}}}"#, entries.join(","))));
        for (slot, (_, _, load, micros, _)) in (0..).zip(&hosts) {
            let ewma = Ewma::default().with(Duration::from_micros(*micros), Instant(*micros), Duration::from_secs(30));
            bench.record.with_host(slot, |host| {
                host.in_flight = *load;
                host.set_ewma(ewma);
            });
        }
        bench.now = Instant(now);
        prop_assert!(bench.scores().into_iter().all(f64::is_finite), "{:?}", bench.scores());
        let serves = |index: usize| !hosts[index].4;
        let has_slot = |index: usize| hosts[index].2 < hosts[index].1;
        let all = 0..hosts.len();
        match bench.decide(Kind::Job) {
            Decision::Chosen(Chosen { hosts: chosen, .. }) => {
                prop_assert!(has_slot(chosen[0]), "the first has no free slot");
                prop_assert!(chosen.iter().all(|host| serves(*host)));
                prop_assert_eq!(chosen.len(), all.filter(|host| serves(*host)).count().min(3));
                let full: Vec<bool> = chosen.iter().map(|host| !has_slot(*host)).collect();
                prop_assert!(full.is_sorted(), "a full host before one with a slot: {:?}", chosen);
            }
            Decision::Full(advice) => {
                prop_assert!(all.clone().any(serves) && !all.into_iter().any(|host| serves(host) && has_slot(host)));
                prop_assert!((1..=60).contains(&advice.as_secs()));
            }
            Decision::NoHost(_) => prop_assert!(!all.into_iter().any(serves)),
        }
    }
}
