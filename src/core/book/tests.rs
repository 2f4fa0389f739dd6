use super::*;
use crate::core::fixture::{address, at, named, pool_of};
use crate::core::lease::Settlement;
use crate::core::outcome::Outcome;
use crate::core::random::Random;
use proptest::prelude::*;

mod sweeps;

/// Some books of one record.
struct Crew {
    record: Record,
    books: Vec<Book>,
    streams: u32,
}

fn declared(hosts: &[usize]) -> Declared {
    Declared { has_pool: !hosts.is_empty(), hosts: hosts.iter().map(|host| named(*host)).collect(), ..Declared::default() }
}

impl Crew {
    /// So many workers that name these hosts and have joined.
    fn new(workers: u64, hosts: &[usize]) -> Self {
        let mut crew = Self { record: Record::new(1), books: Vec::new(), streams: 0 };
        (1..=workers).for_each(|_| _ = crew.hire(hosts));
        crew
    }

    fn hire(&mut self, hosts: &[usize]) -> usize {
        let mut book = Book::new(self.books.len() as u64 + 1);
        book.declare(declared(hosts));
        self.books.push(book);
        self.sync(self.books.len() - 1)
    }

    /// A transaction of the worker that changes nothing else.
    fn sync(&mut self, worker: usize) -> usize {
        let book = &mut self.books[worker];
        if !book.is_in_step(&self.record) {
            let joined = book.join(&mut self.record, at(1.0));
            book.joined(joined);
        }
        assert!(book.is_in_step(&self.record));
        worker
    }

    fn sync_all(&mut self) {
        (0..self.books.len()).for_each(|worker| _ = self.sync(worker));
    }

    /// The worker takes a lease on the host, and gives its stream.
    fn take(&mut self, worker: usize, host: usize) -> u32 {
        self.sync(worker);
        self.streams += 1;
        let seat = self.record.seat_at(address(host)).unwrap();
        self.record.reserve(seat.slot, None, Instant::default());
        let lease = Lease::new(Some(seat), vec![address(host)], at(1.0), pool_of(1, ""), None);
        self.books[worker].take(self.streams, lease);
        self.streams
    }

    fn settle(&mut self, worker: usize, stream: u32) {
        self.sync(worker);
        let end = Settlement { outcome: Outcome::Success, is_timed: true, latency: None, whereabouts: None, reading: None };
        let lease = self.books[worker].give(stream).unwrap();
        lease.settle(&mut self.record, end, at(2.0), &mut Random::new(1));
    }

    fn declare(&mut self, worker: usize, hosts: &[usize]) {
        self.books[worker].declare(declared(hosts));
    }

    /// Somebody declares the worker dead.
    fn bury(&mut self, worker: usize) {
        let row = self.record.worker_row(self.books[worker].worker, 0).unwrap();
        self.record.declare_dead(row);
    }

    /// The worker is gone for good.
    fn lose(&mut self, worker: usize) {
        self.bury(worker);
        self.books.remove(worker);
    }

    /// Each entry's host, in flight and pending.
    fn counts(&self) -> Vec<(usize, u32, u32)> {
        let host = |host: &super::super::record::Host| (0..9).find(|index| address(*index) == host.address()).unwrap();
        self.record.hosts().map(|entry| (host(&entry), entry.in_flight, entry.pending)).collect()
    }

    fn is_swept(&self) -> bool {
        self.record.header.swept == self.record.header.epoch
    }
}

#[test]
fn a_worker_that_joins_is_in_the_record_with_the_hosts_that_it_names() {
    let crew = Crew::new(1, &[0, 1]);
    assert_eq!(crew.counts(), [(0, 0, 0), (1, 0, 0)]);
    let worker = crew.record.worker(0).unwrap();
    assert_eq!((worker.id, worker.epoch, worker.served), (1, 0, 0));
}

#[test]
fn joining_again_changes_no_count() {
    let mut crew = Crew::new(2, &[0, 1]);
    crew.take(0, 1);
    crew.declare(0, &[1, 0, 2]);
    crew.sync(0);
    assert_eq!(crew.counts(), [(0, 0, 0), (1, 1, 0), (2, 0, 0)]);
    assert_eq!(crew.record.workers().count(), 2);
}

#[test]
fn where_insights_go_and_come_back_each_worker_says_again_what_its_jobs_weigh() {
    let mut crew = Crew::new(2, &[0]);
    let insightful = |crew: &mut Crew, worker: usize, wants_insight: bool| {
        crew.books[worker].declare(Declared { wants_insight, ..declared(&[0]) });
        crew.sync(worker);
    };
    let weigh = |crew: &mut Crew, worker: usize, work: u64| {
        let stream = crew.take(worker, 0);
        crew.record.weigh(0, Some(work));
        crew.books[worker].lease_mut(stream).unwrap().burden.work = Some(work);
        stream
    };
    let weighs = |crew: &Crew| (crew.record.insight(0).weighed, crew.record.insight(0).work);
    (0..2).for_each(|worker| insightful(&mut crew, worker, true));
    let old = [weigh(&mut crew, 0, 100), weigh(&mut crew, 1, 1000)];
    assert_eq!(weighs(&crew), (2, 1100));
    (0..2).for_each(|worker| insightful(&mut crew, worker, false));
    (0..2).for_each(|worker| insightful(&mut crew, worker, true));
    crew.sync_all();
    assert_eq!((weighs(&crew), crew.counts(), crew.is_swept()), ((2, 1100), vec![(0, 2, 0)], true));
    weigh(&mut crew, 0, 10);
    crew.settle(1, old[1]);
    crew.settle(0, old[0]);
    assert_eq!((weighs(&crew), crew.counts()), ((1, 10), vec![(0, 1, 0)]));
    assert_eq!((crew.record.header.deaths, crew.record.header.drift), (0, 0));
}

#[test]
fn when_another_dies_its_share_goes_and_the_others_stay_counted_all_the_time() {
    let mut crew = Crew::new(3, &[0]);
    let stream = crew.take(0, 0);
    crew.take(1, 0);
    crew.take(2, 0);
    crew.take(2, 0);
    crew.lose(2);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 0, 4)], false));
    crew.sync(0);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 1, 3)], false));
    crew.settle(0, stream);
    assert_eq!(crew.counts(), [(0, 0, 3)]);
    crew.sync(1);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 1, 0)], true));
}

#[test]
fn a_host_is_retired_when_the_last_worker_no_longer_names_it() {
    let mut crew = Crew::new(2, &[0, 1]);
    crew.declare(0, &[0]);
    crew.sync(0);
    assert_eq!(crew.counts(), [(0, 0, 0), (1, 0, 0)], "the other still names it");
    crew.declare(1, &[0]);
    crew.sync(1);
    assert_eq!(crew.counts(), [(0, 0, 0)]);
}

#[test]
fn what_is_said_of_a_host_last_is_shown() {
    let mut crew = Crew::new(2, &[0]);
    let mut news = declared(&[0]);
    (news.hosts[0].weight, news.hosts[0].drain) = (5.0, true);
    crew.books[0].declare(news);
    crew.sync(0);
    let host = crew.record.host(0).unwrap();
    assert_eq!((host.weight, host.is_draining()), (5.0, true));
}

#[test]
fn workers_that_disagree_on_a_weight_or_on_the_order_still_agree_that_a_host_has_gone() {
    let mut crew = Crew::new(2, &[0, 1, 2]);
    crew.declare(0, &[0, 1]);
    let mut other = declared(&[1, 0]);
    other.hosts[0].weight = 9.0;
    crew.books[1].declare(other);
    crew.sync_all();
    assert_eq!(crew.counts(), [(0, 0, 0), (1, 0, 0)]);
}

#[test]
fn a_host_removed_and_added_again_with_five_in_flight_ends_at_0() {
    let mut crew = Crew::new(2, &[0, 1]);
    let old: Vec<u32> = (0..5).map(|_| crew.take(0, 0)).collect();
    (0..2).for_each(|worker| crew.declare(worker, &[1]));
    crew.sync_all();
    assert_eq!(crew.counts(), [(0, 5, 0), (1, 0, 0)]);
    assert!(crew.record.host(0).unwrap().is_retired());
    (0..2).for_each(|worker| crew.declare(worker, &[0, 1]));
    crew.sync_all();
    let new = crew.take(1, 0);
    assert_eq!(crew.counts(), [(0, 5, 0), (1, 0, 0), (0, 1, 0)]);
    old.into_iter().for_each(|stream| crew.settle(0, stream));
    assert_eq!(crew.counts(), [(0, 0, 0), (1, 0, 0), (0, 1, 0)]);
    crew.settle(1, new);
    crew.record.drop_retired();
    assert_eq!((crew.counts(), crew.record.header.drift), (vec![(1, 0, 0), (0, 0, 0)], 0));
}

#[test]
fn after_the_record_was_lost_each_worker_writes_back_what_it_holds() {
    let mut crew = Crew::new(2, &[0, 1]);
    let stream = crew.take(0, 0);
    crew.take(1, 0);
    crew.take(1, 1);
    crew.record = Record::new(2);
    crew.sync(1);
    assert_eq!(crew.counts(), [(0, 1, 0), (1, 1, 0)]);
    crew.settle(0, stream);
    assert_eq!((crew.counts(), crew.record.header.drift), (vec![(0, 1, 0), (1, 1, 0)], 0));
}

#[test]
fn after_the_record_was_lost_a_lease_on_a_host_that_nobody_names_is_counted_until_its_end() {
    let mut crew = Crew::new(1, &[0, 1]);
    let stream = crew.take(0, 0);
    crew.declare(0, &[1]);
    crew.record = Record::new(2);
    crew.sync(0);
    assert_eq!(crew.counts(), [(1, 0, 0), (0, 1, 0)]);
    assert!(crew.record.host(1).unwrap().is_retired());
    crew.settle(0, stream);
    crew.record.drop_retired();
    assert_eq!(crew.counts(), [(1, 0, 0)]);
}

#[test]
fn a_worker_that_leaves_takes_its_row_and_the_last_one_takes_the_hosts() {
    let mut crew = Crew::new(2, &[0]);
    for left in [1, 0] {
        let worker = crew.books.len() - 1;
        crew.declare(worker, &[]);
        assert!(crew.books[worker].is_idle());
        crew.books.pop().unwrap().leave(&mut crew.record);
        assert_eq!((crew.record.workers().count(), crew.record.hosts().len()), (left, left));
    }
}

#[test]
fn a_host_that_only_a_worker_named_that_left_is_seen_to_have_no_name() {
    let mut crew = Crew::new(2, &[0, 1]);
    crew.declare(0, &[0]);
    crew.sync(0);
    assert!(!crew.books[0].has_unnamed(&crew.record));
    crew.declare(1, &[]);
    crew.books.pop().unwrap().leave(&mut crew.record);
    assert!(crew.books[0].has_unnamed(&crew.record));
    crew.books[0].retire_unnamed(&mut crew.record);
    crew.record.drop_retired();
    assert_eq!(crew.counts(), [(0, 0, 0)]);
}

#[test]
fn a_worker_is_suspect_after_exactly_so_many_ticks_of_the_observer() {
    let mut crew = Crew::new(2, &[0]);
    crew.books[1].served = true;
    crew.books[1].beat(&mut crew.record);
    assert!(crew.books[0].watch(&crew.record).is_empty(), "the first look");
    for tick in 1..TICKS_TO_DEATH {
        assert!(crew.books[0].watch(&crew.record).is_empty(), "tick {tick}");
    }
    let suspects = crew.books[0].watch(&crew.record);
    assert_eq!(suspects, [2]);
    assert_eq!(crew.books[0].bury(&mut crew.record, &suspects), (1, 1));
    assert_eq!(crew.record.workers().map(|worker| worker.id).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_worker_that_never_served_goes_without_a_death_and_may_come_back() {
    let mut crew = Crew::new(3, &[0]);
    let stream = crew.take(0, 0);
    (0..=TICKS_TO_DEATH).for_each(|_| _ = crew.books[0].watch(&crew.record));
    let suspects = crew.books[0].watch(&crew.record);
    let epoch = crew.record.header.epoch;
    assert_eq!(crew.books[0].bury(&mut crew.record, &suspects), (2, 0));
    assert_eq!((crew.record.header.epoch, crew.record.header.deaths, crew.record.workers().count()), (epoch, 0, 1));
    assert_eq!(crew.record.host(0).unwrap().load(), 1, "nobody's count was in doubt");
    crew.sync_all();
    let other = crew.take(2, 0);
    crew.settle(2, other);
    crew.settle(0, stream);
    assert_eq!((crew.record.host(0).unwrap().load(), crew.record.header.drift, crew.record.workers().count()), (0, 0, 3));
}

#[test]
fn one_beat_starts_the_count_of_ticks_again() {
    let mut crew = Crew::new(2, &[0]);
    for _ in 0..3 {
        for _ in 0..TICKS_TO_DEATH {
            assert!(crew.books[0].watch(&crew.record).is_empty());
        }
        crew.books[1].beat(&mut crew.record);
        crew.books[1].has_beaten();
    }
}

#[test]
fn nobody_dies_while_nobody_watches() {
    let mut crew = Crew::new(3, &[0]);
    for round in 0..500 {
        // However long the process is stopped between two rounds: time is not asked for.
        for worker in 0..3 {
            assert!(crew.books[worker].watch(&crew.record).is_empty(), "round {round}");
            crew.books[worker].beat(&mut crew.record);
            crew.books[worker].has_beaten();
        }
    }
}

#[test]
fn a_suspect_that_speaks_before_its_burial_lives() {
    let mut crew = Crew::new(2, &[0]);
    (0..TICKS_TO_DEATH).for_each(|_| _ = crew.books[0].watch(&crew.record));
    let suspects = crew.books[0].watch(&crew.record);
    crew.books[1].beat(&mut crew.record);
    assert_eq!(crew.books[0].bury(&mut crew.record, &suspects), (0, 0));
    assert_eq!(crew.record.workers().count(), 2);
}

#[test]
fn a_worker_that_returns_is_not_taken_for_the_one_that_stood_still() {
    let mut crew = Crew::new(2, &[0]);
    // Its last sign of life was that it joined, long ago.
    (0..TICKS_TO_DEATH).for_each(|_| assert!(crew.books[0].watch(&crew.record).is_empty()));
    crew.bury(1);
    crew.sync(1);
    assert!(crew.books[0].watch(&crew.record).is_empty());
}

#[test]
fn requests_without_a_lease_are_counted_with_the_next_beat_and_once() {
    let mut crew = Crew::new(1, &[0]);
    (crew.books[0].unleased, crew.books[0].conflicts) = (3, 2);
    crew.books[0].beat(&mut crew.record.clone());
    crew.books[0].beat(&mut crew.record);
    crew.books[0].has_beaten();
    crew.books[0].beat(&mut crew.record);
    assert_eq!((crew.record.header.unleased, crew.record.header.conflicts), (3, 2));
}

proptest! {
    #[test]
    fn a_join_that_lost_the_race_can_be_run_again(holds in 0..4u32, dead in any::<bool>(), lost in any::<bool>()) {
        let mut crew = Crew::new(3, &[0]);
        (0..holds).for_each(|_| _ = crew.take(0, 0));
        crew.take(1, 0);
        if dead {
            crew.bury(2);
        }
        if lost {
            crew.record = Record::new(2);
        }
        let mut stale = crew.record.clone();
        let _ = crew.books[0].join(&mut stale, at(1.0));
        crew.sync(1);
        crew.sync(0);
        crew.sync_all();
        prop_assert_eq!(crew.counts(), vec![(0, holds + 1, 0)]);
    }
}

#[test]
fn a_job_that_envoy_sent_to_a_host_before_it_was_known_takes_its_seat_once_it_is() {
    let mut crew = Crew::new(2, &[0]);
    let mut lease = Lease::new(None, Vec::new(), at(1.0), pool_of(1, ""), None);
    lease.address = Some(address(1));
    crew.books[0].take(77, lease);
    crew.sync_all();
    assert_eq!(crew.counts(), [(0, 0, 0)]);
    for worker in [0, 1] {
        crew.declare(worker, &[0, 1]);
        crew.sync(worker);
        assert_eq!(crew.record.host(1).map(|host| (host.load(), host.requests)), Some((1, 1)));
    }
    crew.settle(0, 77);
    assert_eq!(crew.record.host(1).map(|host| host.load()), Some(0));
    assert_eq!(crew.record.header.drift, 0);
}

#[test]
fn a_host_that_comes_or_is_no_longer_draining_is_a_newcomer_where_jobs_have_been_placed() {
    let mut crew = Crew::new(1, &[0]);
    crew.declare(0, &[0, 1]);
    crew.sync(0);
    let newcomers = |crew: &Crew| crew.record.hosts().map(|host| host.is_newcomer()).collect::<Vec<_>>();
    assert_eq!(newcomers(&crew), [false, false]);
    let stream = crew.take(0, 0);
    crew.settle(0, stream);
    crew.declare(0, &[0, 1, 2]);
    crew.sync(0);
    assert_eq!(newcomers(&crew), [false, false, true]);
    for (drain, is_newcomer) in [(true, false), (false, true)] {
        let mut declared = declared(&[0, 1, 2]);
        declared.hosts[0].drain = drain;
        crew.books[0].declare(declared);
        crew.sync(0);
        assert_eq!(newcomers(&crew), [is_newcomer, false, true]);
    }
}
