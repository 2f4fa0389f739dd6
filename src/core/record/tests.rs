use super::*;
use crate::core::choice;
use crate::core::ewma::Ewma;
use crate::core::fixture::{address, at, named, seats_of, wants};
use crate::core::queue::{self, Priority, Slots, Taken};
use crate::core::random::Random;
use crate::core::roster::Roster;
use crate::core::score;
use proptest::prelude::*;

/// A record of some workers and hosts, all of whose fields are set.
fn full(workers: u32, hosts: usize) -> Record {
    let (mut record, _) = seats_of(hosts);
    for id in 1..=workers {
        record.add_worker(Worker { id: id.into(), names: 7, beat: id, served: 1, ..Worker::default() });
    }
    for slot in 0..hosts as u32 {
        record.reserve(slot, None, Instant::default());
        record.with_host(slot, |host| {
            host.pending = slot;
            host.consecutive_failures = 2;
            host.failures = 9;
            host.set_ewma(Ewma { millis: 12.5, fed: at(3.0) });
        });
    }
    record
}

fn generations(record: &Record) -> Vec<u32> {
    record.hosts().map(|host| host.generation).collect()
}

#[test]
fn the_layout_is_the_one_that_bears_this_version() {
    // Whoever changes a length changes the version.
    assert_eq!((VERSION, Header::BYTES, Worker::BYTES, Host::BASE, Host::BYTES), (5, 296, 40, 76, 136));
    assert_eq!((Insight::BYTES, Class::BYTES, Waiting::BYTES), (84, 60, 30));
    assert_eq!(full(3, 5).into_bytes().len(), 296 + 3 * 40 + 5 * 76);
    let mut insightful = full(3, 5);
    insightful.keep_insights(true);
    insightful.add_class(Class::default());
    assert_eq!(insightful.into_bytes().len(), 296 + 3 * 40 + 5 * (76 + 84) + 60);
}

#[test]
fn a_record_comes_back_as_it_was_stored() {
    let record = full(3, 5);
    let bytes = record.clone().into_bytes();
    let again = Record::parse(bytes.clone()).unwrap();
    assert_eq!(again.header, record.header);
    assert!(again.workers().eq(record.workers()) && again.hosts().eq(record.hosts()));
    assert_eq!(again.into_bytes(), bytes);
}

#[test]
fn an_empty_record_is_a_record() {
    let record = Record::parse(Record::new(9).into_bytes()).unwrap();
    assert_eq!((record.workers().count(), record.hosts().len()), (0, 0));
    assert_eq!(record.header.incarnation, 9);
}

#[test]
fn what_is_not_a_whole_record_of_this_version_is_foreign() {
    let bytes = full(2, 2).into_bytes();
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        Record::parse(bytes)
    };
    assert!(changed(&|_| {}).is_ok());
    assert_eq!(changed(&|bytes| bytes.clear()), Err(Foreign));
    assert_eq!(changed(&|bytes| bytes[0] ^= 1), Err(Foreign), "another magic");
    assert_eq!(changed(&|bytes| bytes[4] += 1), Err(Foreign), "another version");
    assert_eq!(changed(&|bytes| bytes.truncate(Header::BYTES - 1)), Err(Foreign), "half a header");
    assert_eq!(changed(&|bytes| _ = bytes.pop()), Err(Foreign), "a byte too few");
    assert_eq!(changed(&|bytes| bytes.push(0)), Err(Foreign), "a byte too many");
    let count = |at: usize| changed(&|bytes| bytes[at..at + 4].fill(0xFF));
    assert_eq!(count(32), Err(Foreign), "more workers than there is room for");
    assert_eq!(count(36), Err(Foreign), "more hosts than there is room for");
}

#[test]
fn rows_of_workers_move_up_and_leave_the_hosts_as_they_are() {
    let mut record = full(3, 4);
    let hosts: Vec<Host> = record.hosts().collect();
    record.remove_worker(0);
    assert_eq!(record.workers().map(|worker| worker.id).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(record.worker_row(3, 2), Some(1), "a hint that is out of date");
    assert_eq!(record.worker_row(1, 0), None);
    assert_eq!(record.add_worker(Worker { id: 4, ..Worker::default() }), 2);
    assert!(record.hosts().eq(hosts));
}

#[test]
fn a_seat_finds_its_entry_after_others_have_gone() {
    let (mut record, seats) = seats_of(4);
    record.retire(0);
    record.retire(2);
    record.drop_retired();
    assert_eq!(generations(&record), [2, 4]);
    assert_eq!(seats.iter().map(|seat| record.slot_of(*seat)).collect::<Vec<_>>(), [None, Some(0), None, Some(1)]);
}

#[test]
fn a_generation_is_never_given_twice() {
    let (mut record, seats) = seats_of(2);
    for _ in 0..3 {
        record.retire(1);
        record.drop_retired();
        let seat = record.add_host(named(1), false);
        assert!(!seats.contains(&seat));
    }
    assert_eq!(generations(&record), [1, 5]);
}

#[test]
fn an_address_means_the_entry_that_is_not_retired() {
    let (mut record, seats) = seats_of(2);
    assert_eq!(record.seat_at(address(1)), Some(seats[1]));
    record.retire(1);
    assert_eq!(record.seat_at(address(1)), Some(seats[1]), "there is no other yet");
    let new = record.add_host(named(1), false);
    assert_eq!(record.seat_at(address(1)), Some(new));
    assert_eq!(record.seat_at(address(7)), None);
}

#[test]
fn a_retired_host_stays_until_its_last_lease_is_given_back() {
    let (mut record, seats) = seats_of(1);
    record.reserve(0, None, Instant::default());
    record.retire(0);
    record.drop_retired();
    assert_eq!((record.hosts().len(), record.has_droppable()), (1, false));
    record.release(seats[0], None, Instant::default());
    assert!(record.has_droppable());
    record.drop_retired();
    assert_eq!(record.hosts().len(), 0);
}

#[test]
fn a_count_never_falls_below_0_and_says_so() {
    let (mut record, seats) = seats_of(1);
    record.release(seats[0], None, Instant::default());
    record.release(Seat { slot: 5, generation: 77 }, None, Instant::default());
    assert_eq!((record.host(0).unwrap().load(), record.header.drift), (0, 2));
}

#[test]
fn every_change_of_membership_shows_in_its_number() {
    let (mut record, _) = seats_of(1);
    let mut seen = vec![record.header.membership];
    record.add_host(named(1), false);
    seen.push(record.header.membership);
    record.retire(0);
    seen.push(record.header.membership);
    record.drop_retired();
    seen.push(record.header.membership);
    seen.dedup();
    assert_eq!(seen.len(), 4, "{seen:?}");
}

#[test]
fn a_death_makes_all_counts_wait_and_the_sweep_waits_for_all_who_live() {
    let (mut record, _) = seats_of(1);
    for id in 1..=3 {
        record.add_worker(Worker { id, ..Worker::default() });
    }
    record.with_host(0, |host| host.in_flight = 5);
    record.declare_dead(0);
    let counts = |record: &Record| record.host(0).map(|host| (host.in_flight, host.pending)).unwrap();
    assert_eq!((counts(&record), record.header.epoch, record.header.swept, record.header.deaths), ((0, 5), 1, 0, 1));
    record.set_worker(0, Worker { id: 2, epoch: 1, ..Worker::default() });
    record.sweep();
    assert_eq!(counts(&record), (0, 5), "one has yet to catch up");
    record.set_worker(1, Worker { id: 3, epoch: 1, ..Worker::default() });
    record.sweep();
    assert_eq!((counts(&record), record.header.swept), ((0, 0), 1));
}

/// Everything that the code does with a record, done to this one.
fn use_all(mut record: Record) {
    use_queue(record.clone());
    let seats: Vec<Seat> = (0..).zip(record.hosts()).map(|(slot, host)| Seat { slot, generation: host.generation }).collect();
    let mut roster = Roster::default();
    score::scores(&record, at(1.0));
    let pool = crate::core::fixture::pool_of(4, "");
    for kind in [choice::Kind::Job, choice::Kind::Other] {
        choice::choose(&record, &pool, &mut roster, at(1.0), &mut Random::new(1), wants(kind));
    }
    for seat in seats {
        record.release(seat, None, Instant::default());
        record.reserve(seat.slot, None, Instant::default());
        record.retire(seat.slot);
    }
    record.add_host(named(9), false);
    if record.header.workers > 0 {
        record.declare_dead(0);
    }
    record.drop_retired();
    assert!(Record::parse(record.into_bytes()).is_ok());
}

/// Somebody takes part in the queue, until nobody waits any more.
fn use_queue(mut record: Record) {
    struct Two;
    impl Slots for Two {
        fn starts_now(&mut self, _: &Record, _: &Waiting) -> bool {
            true
        }

        fn free(&mut self, _: &Record) -> usize {
            2
        }

        fn may_take(&self, stream: u32) -> Option<bool> {
            [None, Some(false), Some(true)][stream as usize % 3]
        }

        fn take(&mut self, _: &mut Record, _: u32) -> Taken {
            Taken::Slot
        }
    }
    let (me, count) = (3, record.waiting().len());
    record.add_waiting(Waiting::new(me, 2, Priority::Low, 9, 1.0, at(2.0)));
    let _ = queue::call(&mut record, me, at(1e7));
    let _ = queue::draw(&mut record, me, at(1e7), 5, &mut Two);
    assert!(Record::parse(record.clone().into_bytes()).is_ok());
    let first = record.waiting().next();
    assert!(first.is_none_or(|first| record.remove_waiting(first.worker, first.stream)));
    assert!(record.waiting().len() <= count);
    record.remove_waiting_if(|_| true);
    assert_eq!((record.count_waiting(), record.has_waiting(), record.turns()), (0, false, vec![]));
    assert!(Record::parse(record.into_bytes()).is_ok());
}

proptest! {
    #[test]
    fn any_bytes_are_foreign_or_a_record_that_can_be_used(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(record) = Record::parse(bytes) {
            use_all(record);
        }
    }

    #[test]
    fn a_record_with_any_bytes_overwritten_is_foreign_or_can_be_used(
        (workers, hosts) in (0..4u32, 0..5usize),
        changes in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![Just(0xFFu8), any::<u8>()], 1..9usize), 0..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut record = full(workers, hosts);
        for stream in 0..hosts as u32 {
            let priority = Priority::ALL[stream as usize % 3];
            record.add_waiting(Waiting::new(workers.into(), stream, priority, stream, 1.0, at(f64::from(stream))));
        }
        let mut bytes = record.into_bytes();
        for (at, byte, length) in changes {
            let start = at.index(bytes.len());
            bytes.iter_mut().skip(start).take(length).for_each(|changed| *changed = byte);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(record) = Record::parse(bytes.clone()) {
            prop_assert_eq!(record.clone().into_bytes(), bytes);
            use_all(record);
        }
    }
}

#[test]
fn a_host_that_fails_has_a_past_behind_the_entries_and_one_that_is_forgotten_has_none() {
    let mut record = full(2, 4);
    let length = record.clone().into_bytes().len();
    for slot in [2, 0] {
        record.with_host(slot, |host| (host.until, host.rated_at) = (7 + u64::from(slot), 9));
    }
    assert_eq!(record.clone().into_bytes().len(), length + 2 * (4 + 60));
    let mut record = Record::parse(record.into_bytes()).unwrap();
    // Whatever comes and goes before it.
    record.add_worker(Worker { id: 77, ..Worker::default() });
    let fifth = record.add_host(named(9), false);
    record.remove_worker(0);
    let untils = |record: &Record| record.hosts().map(|host| (host.until, host.rated_at)).collect::<Vec<_>>();
    assert_eq!(untils(&record), [(7, 9), (0, 0), (9, 9), (0, 0), (0, 0)]);
    record.with_host(fifth.slot, |host| host.busy_until = 5);
    record.with_host(0, |host| (host.until, host.rated_at) = (0, 0));
    assert_eq!(untils(&record), [(0, 0), (0, 0), (9, 9), (0, 0), (0, 0)]);
    for slot in 0..record.header.hosts {
        record.with_host(slot, |host| (host.in_flight, host.pending) = (0, 0));
    }
    record.retire(2);
    record.drop_retired();
    assert_eq!(untils(&record), [(0, 0); 4]);
    assert_eq!(record.host(3).unwrap().busy_until, 5);
    assert_eq!(record.clone().into_bytes().len(), length + 64);
    assert!(Record::parse(record.into_bytes()).is_ok());
}

/// What lies behind hosts and pasts stays what it is while insights come and go.
#[test]
fn insights_and_classes_come_and_go_and_all_else_stays() {
    let mut record = full(3, 4);
    record.with_host(1, |host| host.failure_rate = 0.5);
    record.add_waiting(Waiting::new(1, 7, Priority::Normal, 3, 1.0, at(1.0)));
    let before = record.clone();
    record.keep_insights(true);
    record.add_class(Class::named(2, [b'a'; 24]));
    record.with_insight(3, |insight| insight.tell(crate::core::reading::Reading::of(Some(5.0), None, None, None), at(1.0), 0));
    assert!(record.hosts().eq(before.hosts()) && record.waiting().eq(before.waiting()));
    assert_eq!(Record::parse(record.clone().into_bytes()).unwrap().into_bytes(), record.clone().into_bytes());
    // A host that goes takes its own along, and one that comes has none yet.
    record.with_host(0, |host| (host.in_flight, host.pending) = (0, 0));
    record.retire(0);
    record.drop_retired();
    record.add_host(named(9), false);
    let told: Vec<Option<f32>> = (0..4).map(|slot| record.insight(slot).told_ever().running).collect();
    assert_eq!(told, [None, None, Some(5.0), None]);
    assert_eq!(record.classes().map(|class| class.name()).collect::<Vec<_>>(), ["a".repeat(24)]);
    assert_eq!(record.host(0).unwrap().failure_rate, 0.5);
    record.keep_insights(false);
    assert_eq!((record.classes().len(), record.waiting().len(), record.insight_bytes().len()), (0, 1, 0));
    assert_eq!(record.host(0).unwrap().failure_rate, 0.5);
    assert!(Record::parse(record.into_bytes()).is_ok());
}
