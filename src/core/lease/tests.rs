use super::*;
use crate::core::ewma::Ewma;
use crate::core::fixture::{address, at, pool_of, seats_of};
use proptest::prelude::*;

const TAU: Duration = Duration::from_secs(30);

/// A lease on the first of four named hosts, in a pool of five.
struct Bench {
    record: Record,
    seats: Vec<Seat>,
    lease: Lease,
}

impl Bench {
    fn new() -> Self {
        Self::of("")
    }

    fn of(keys: &str) -> Self {
        let (mut record, seats) = seats_of(5);
        record.reserve(0, None, Instant::default());
        let lease = Lease::new(Some(seats[0]), (0..4).map(address).collect(), at(1.0), pool_of(5, keys), None);
        Self { record, seats, lease }
    }

    /// Envoy's attempt of this number works at this host.
    fn seen(&mut self, host: usize, attempts: u64) {
        let moved =
            self.lease.follow(&mut self.record, Whereabouts { address: address(host), attempts }, at(5.0), &mut Random::new(1));
        self.lease.moved(moved);
    }

    fn settle(&mut self, outcome: Outcome, latency: Option<Duration>, whereabouts: Option<Whereabouts>) {
        self.lease.settle(
            &mut self.record,
            Settlement { outcome, is_timed: true, latency, whereabouts, reading: None },
            at(10.0),
            &mut Random::new(1),
        );
    }

    fn loads(&self) -> Vec<u32> {
        self.record.hosts().map(|host| host.load()).collect()
    }

    fn failures(&self) -> Vec<u64> {
        self.record.hosts().map(|host| host.failures).collect()
    }
}

#[test]
fn each_failed_attempt_is_blamed_once_whichever_of_them_were_seen() {
    for seen in 0..8u32 {
        let mut bench = Bench::new();
        for attempt in (2..4u64).filter(|attempt| seen & (1 << attempt) >> 2 != 0) {
            bench.seen(attempt as usize - 1, attempt);
        }
        bench.seen(3, 4);
        assert_eq!(bench.failures(), [1, 1, 1, 0, 0], "seen: {seen:b}");
        assert_eq!(bench.loads(), [0, 0, 0, 1, 0]);
        bench.settle(Outcome::Failure, None, None);
        assert_eq!(bench.failures(), [1, 1, 1, 1, 0]);
        assert_eq!(bench.loads(), [0; 5]);
    }
}

#[test]
fn those_before_are_blamed_if_as_many_attempts_failed_and_nobody_if_some_were_passed_over() {
    for (host, attempts, blamed) in
        [(1, 2, [1, 0, 0, 0, 0]), (2, 3, [1, 1, 0, 0, 0]), (2, 2, [0; 5]), (3, 2, [0; 5]), (3, 3, [0; 5])]
    {
        let mut bench = Bench::new();
        bench.seen(host, attempts);
        assert_eq!(bench.failures(), blamed, "attempt {attempts} at {host}");
    }
}

#[test]
fn an_address_that_envoy_passed_over_is_not_blamed() {
    let mut bench = Bench::new();
    bench.seen(1, 1);
    assert_eq!((bench.failures(), bench.loads()), (vec![0; 5], vec![0, 1, 0, 0, 0]));
    bench.seen(2, 2);
    assert_eq!(bench.failures(), [0, 1, 0, 0, 0]);
    bench.settle(Outcome::Success, None, None);
    assert_eq!((bench.failures(), bench.loads()), (vec![0, 1, 0, 0, 0], vec![0; 5]));
}

#[test]
fn a_host_that_was_not_named_takes_over_and_the_named_ones_before_it_are_blamed() {
    let mut bench = Bench::new();
    bench.seen(4, 3);
    assert_eq!((bench.failures(), bench.loads()), (vec![1, 1, 0, 0, 0], vec![0, 0, 0, 0, 1]));
    bench.seen(4, 9);
    assert_eq!(bench.failures(), [1, 1, 1, 1, 0], "no more than were named");
}

#[test]
fn a_retry_that_comes_back_to_an_earlier_host_blames_nobody_twice() {
    let mut bench = Bench::new();
    bench.seen(1, 2);
    bench.seen(0, 3);
    bench.seen(1, 4);
    assert_eq!((bench.failures(), bench.loads()), (vec![1, 0, 0, 0, 0], vec![0, 1, 0, 0, 0]));
}

#[test]
fn a_host_outside_the_pool_holds_no_lease_of_the_pools_and_can_give_it_back_to_one_inside() {
    let mut bench = Bench::new();
    bench.seen(77, 2);
    assert_eq!((bench.loads(), bench.record.header.elsewhere), (vec![0; 5], 1));
    assert_eq!((bench.lease.seat, bench.lease.address), (None, Some(address(77))));
    bench.seen(1, 3);
    assert_eq!(bench.loads(), [0, 1, 0, 0, 0]);
    bench.settle(Outcome::Neutral, None, None);
    assert_eq!((bench.loads(), bench.record.header.drift), (vec![0; 5], 0));
}

#[test]
fn a_lease_elsewhere_is_settled_without_a_trace() {
    let mut bench = Bench::new();
    bench.seen(77, 1);
    let before = bench.record.clone();
    bench.settle(Outcome::Failure, None, None);
    assert_eq!(bench.record, before);
}

#[test]
fn a_lease_that_nobody_saw_placed_is_settled_without_a_trace() {
    let mut bench = Bench::new();
    bench.lease = Lease::new(None, Vec::new(), at(1.0), pool_of(5, ""), None);
    let before = bench.record.clone();
    bench.settle(Outcome::Failure, None, None);
    assert_eq!(bench.record, before);
}

#[test]
fn where_the_job_was_last_counts_at_its_end_too() {
    let mut bench = Bench::new();
    let whereabouts = Some(Whereabouts { address: address(1), attempts: 2 });
    bench.settle(Outcome::Success, Some(Duration::from_millis(300)), whereabouts);
    assert_eq!((bench.loads(), bench.failures()), (vec![0; 5], vec![1, 0, 0, 0, 0]));
    let ewma: Vec<f32> = bench.record.hosts().map(|host| host.ewma().millis).collect();
    assert_eq!(ewma, [0.0, 300.0, 0.0, 0.0, 0.0]);
    assert_eq!(bench.record.hosts().map(|host| host.requests).collect::<Vec<_>>(), [1, 1, 0, 0, 0]);
}

#[test]
fn whereabouts_that_are_no_news_change_nothing() {
    let mut bench = Bench::new();
    bench.settle(Outcome::Success, None, Some(Whereabouts { address: address(0), attempts: 1 }));
    assert_eq!((bench.loads(), bench.failures()), (vec![0; 5], vec![0; 5]));
    assert_eq!(bench.record.host(0).unwrap().requests, 1);
}

#[test]
fn only_a_success_feeds_the_average_and_ends_a_row_of_failures() {
    let millis = Duration::from_millis(5);
    for (outcome, expected_row, feeds) in
        [(Outcome::Success, 0, true), (Outcome::Failure, 3, false), (Outcome::Neutral, 2, false)]
    {
        let mut bench = Bench::new();
        let before = Ewma { millis: 800.0, fed: at(2.0) };
        bench.record.with_host(0, |host| {
            host.consecutive_failures = 2;
            host.set_ewma(before);
        });
        bench.settle(outcome, Some(millis), None);
        let host = bench.record.host(0).unwrap();
        assert_eq!(host.consecutive_failures, expected_row, "{outcome:?}");
        assert_eq!(host.ewma(), if feeds { before.with(millis, at(10.0), TAU) } else { before }, "{outcome:?}");
        assert_eq!(host.load(), 0);
    }
}

#[test]
fn a_lease_is_given_back_to_its_own_generation() {
    let mut bench = Bench::new();
    bench.record.retire(0);
    let new = bench.record.add_host(crate::core::fixture::named(0), false);
    bench.record.reserve(new.slot, None, Instant::default());
    bench.settle(Outcome::Success, None, None);
    assert_eq!(bench.loads(), [0, 0, 0, 0, 0, 1]);
    assert_eq!(bench.record.header.drift, 0);
}

/// Jobs on a host that runs one at a time, in a pool that learns.
struct Learner {
    record: Record,
    pool: Rc<Pool>,
    random: Random,
}

impl Learner {
    fn place(&mut self, now: f64) -> Lease {
        let burden = Burden {
            work: learning::work_of(&self.record, &Job::unknown()).map(|millis| (millis * 1e3) as u64),
            was_crowded: is_crowded(&self.record, 0, &self.pool),
        };
        let (seat, _) = self.record.place(0, at(now), None, burden.work).unwrap();
        Lease { burden, ..Lease::new(Some(seat), vec![address(0)], at(now), self.pool.clone(), None) }
    }

    fn end(&mut self, lease: &Lease, outcome: Outcome, now: f64) {
        let latency = Some(at(now).since(lease.taken));
        let end = Settlement { outcome, is_timed: true, latency, whereabouts: None, reading: None };
        lease.settle(&mut self.record, end, at(now), &mut self.random);
    }

    fn work(&self) -> f32 {
        learning::work_of(&self.record, &Job::unknown()).unwrap()
    }
}

#[test]
fn clients_that_leave_while_they_wait_inside_a_host_do_not_make_it_look_fast() {
    let pool = pool_of(1, r#", "policy": "least_time""#);
    let mut bench = Learner { record: crate::core::fixture::record_of(&pool), pool, random: Random::new(1) };
    let mut now = 1.0;
    let (mut running, mut next) = (bench.place(now), bench.place(now));
    for round in 0..60 {
        // Each job takes a second; in the first rounds, somebody leaves just before it is done.
        if round < 30 {
            let doomed = bench.place(now);
            bench.end(&doomed, Outcome::Neutral, now + 0.95);
        }
        now += 1.0;
        bench.end(&running, Outcome::Success, now);
        (running, next) = (next, bench.place(now));
        assert!((900.0..1200.0).contains(&bench.work()), "round {round}: {} ms", bench.work());
    }
    let jobs = bench.record.class(Job::unknown().label.key).unwrap().1.jobs;
    assert!(jobs >= 30, "it learns again once nobody leaves: {jobs}");
    bench.end(&next, Outcome::Neutral, now);
    bench.end(&running, Outcome::Neutral, now);
    let insight = bench.record.insight(0);
    assert_eq!((insight.work, insight.weighed), (0, 0));
}

proptest! {
    #[test]
    fn whatever_envoy_says_of_a_lease_it_counts_on_one_host_at_most_and_ends_at_0(
        seen in prop::collection::vec((0..7usize, prop_oneof![0..6u64, Just(u64::MAX)]), 0..12),
    ) {
        let mut bench = Bench::new();
        for (host, attempts) in seen {
            bench.seen(host, attempts);
            let expected = u32::from(host < bench.seats.len());
            prop_assert_eq!(bench.loads().iter().sum::<u32>(), expected);
            prop_assert!(bench.failures().iter().take(4).all(|failures| *failures <= 1), "blamed twice");
            prop_assert_eq!(bench.failures()[4], 0);
        }
        bench.settle(Outcome::Neutral, None, None);
        prop_assert_eq!((bench.loads(), bench.record.header.drift), (vec![0; 5], 0));
    }

    #[test]
    fn a_change_that_is_run_again_on_a_newer_record_does_the_same(host in 0..7usize, attempts in 0..6u64) {
        let bench = Bench::new();
        let (mut first, mut second) = (bench.record.clone(), bench.record.clone());
        second.reserve(4, None, Instant::default());
        let whereabouts = Whereabouts { address: address(host), attempts };
        let moved = bench.lease.follow(&mut first, whereabouts, at(5.0), &mut Random::new(1));
        prop_assert_eq!(bench.lease.follow(&mut second, whereabouts, at(5.0), &mut Random::new(1)), moved);
        second.release(bench.seats[4], None, Instant::default());
        prop_assert!(first.hosts().zip(second.hosts()).all(|(first, second)| first.load() == second.load()));
    }
}
