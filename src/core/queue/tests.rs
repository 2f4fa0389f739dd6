use super::*;
use crate::core::fixture::at;
use proptest::prelude::*;

/// So many slots, and who took one.
struct Free {
    slots: usize,
    taken: Vec<u32>,
}

impl Slots for Free {
    fn starts_now(&mut self, _: &Record, _: &Waiting) -> bool {
        true
    }

    fn free(&mut self, _: &Record) -> usize {
        self.slots
    }

    fn may_take(&self, _: u32) -> Option<bool> {
        Some(true)
    }

    fn take(&mut self, _: &mut Record, stream: u32) -> Taken {
        self.taken.push(stream);
        Taken::Slot
    }
}

const AGEING: Duration = Duration::from_secs(10);

fn record_of(workers: u64) -> Record {
    let mut record = Record::new(1);
    record.header.describe_queue(1000, AGEING);
    for id in 1..=workers {
        record.add_worker(Worker { id, bell: id as u32 + 100, ..Worker::default() });
    }
    record
}

fn wait(record: &mut Record, worker: u64, stream: u32, priority: Priority, tenant: u32, seconds: f64) {
    record.add_waiting(Waiting::new(worker, stream, priority, tenant, 1.0, at(seconds)));
}

/// The streams that the worker places of so many free slots.
fn drawn(record: &mut Record, worker: u64, slots: usize, seconds: f64) -> Vec<u32> {
    let mut free = Free { slots, taken: Vec::new() };
    let _ = draw(record, worker, at(seconds), usize::MAX, &mut free);
    free.taken
}

/// All streams in the order in which they are served, where a slot comes free every `step` seconds.
fn served_from(record: &mut Record, start: f64, step: f64) -> Vec<u32> {
    let mut now = start;
    std::iter::from_fn(|| {
        now += step;
        drawn(record, 1, 1, now).first().copied()
    })
    .collect()
}

#[test]
fn jobs_of_one_priority_are_served_in_the_order_in_which_they_came() {
    let mut record = record_of(1);
    for (stream, second) in [(3, 1.0), (1, 2.0), (2, 1.5)] {
        wait(&mut record, 1, stream, Priority::Normal, 0, second);
    }
    assert_eq!(served_from(&mut record, 3.0, 0.1), [3, 2, 1]);
    assert!(!record.has_waiting());
    assert_eq!(record.turns(), []);
}

#[test]
fn a_higher_priority_is_served_first_whenever_it_came() {
    let mut record = record_of(1);
    for (stream, priority) in
        [(1, Priority::Low), (2, Priority::Normal), (3, Priority::High), (4, Priority::Low), (5, Priority::High)]
    {
        wait(&mut record, 1, stream, priority, 0, f64::from(stream) / 10.0);
    }
    assert_eq!(served_from(&mut record, 1.0, 0.1), [3, 5, 2, 1, 4]);
}

#[test]
fn a_lower_priority_that_has_aged_gets_every_fourth_slot_and_none_before() {
    let mut record = record_of(1);
    for stream in 0..20 {
        wait(&mut record, 1, stream, Priority::Low, 0, 0.0);
        wait(&mut record, 1, 100 + stream, Priority::High, 0, 0.0);
    }
    let are_high = |streams: Vec<u32>| -> Vec<bool> { streams.into_iter().map(|stream| stream >= 100).collect() };
    assert_eq!(are_high(drawn(&mut record, 1, 5, 9.9)), [true; 5]);
    let order = are_high(drawn(&mut record, 1, 12, 10.0));
    assert_eq!(order, [false, true, true, true, false, true, true, true, false, true, true, true]);
}

#[test]
fn however_many_have_aged_at_least_half_of_the_slots_are_for_the_highest() {
    let mut record = record_of(1);
    for stream in 0..300 {
        wait(&mut record, 1, stream, [Priority::Low, Priority::Normal, Priority::High][stream as usize % 3], 0, 0.0);
    }
    let mut served = [0; 3];
    for _ in 0..40 {
        served[drawn(&mut record, 1, 1, 100.0)[0] as usize % 3] += 1;
    }
    assert_eq!(served, [10, 9, 21]);
}

#[test]
fn a_high_job_is_served_at_once_though_low_ones_have_waited_for_long() {
    let mut record = record_of(1);
    for stream in 0..300 {
        wait(&mut record, 1, stream, Priority::Low, 0, 0.0);
    }
    for stream in 1000..1010 {
        wait(&mut record, 1, stream, Priority::High, 0, 100.0);
        // Behind one of the others at most, if that is due.
        assert!(drawn(&mut record, 1, 2, 100.0).contains(&stream));
    }
}

#[test]
fn under_a_steady_stream_of_high_jobs_a_low_one_is_served_as_soon_as_it_has_aged() {
    let mut record = record_of(1);
    wait(&mut record, 1, 1, Priority::Low, 0, 0.0);
    let mut now = 0.0;
    let served_at = (2..1000).find_map(|stream| {
        now += 0.5;
        // Two come for each that is served.
        wait(&mut record, 1, stream, Priority::High, 0, now);
        wait(&mut record, 1, 1000 + stream, Priority::High, 0, now);
        drawn(&mut record, 1, 1, now).contains(&1).then_some(now)
    });
    assert_eq!(served_at, Some(10.0));
}

#[test]
fn a_single_job_of_one_tenant_comes_right_after_one_of_another_that_has_hundreds() {
    let mut record = record_of(1);
    for stream in 0..500 {
        wait(&mut record, 1, stream, Priority::Normal, 1, 0.0);
    }
    assert_eq!(drawn(&mut record, 1, 8, 1.0), (0..8).collect::<Vec<_>>());
    wait(&mut record, 1, 1000, Priority::Normal, 2, 2.0);
    let order = served_from(&mut record, 2.0, 0.001);
    assert!(order.iter().position(|stream| *stream == 1000).unwrap() <= 1, "{:?}", &order[..4]);
    assert_eq!(order.len(), 493);
}

#[test]
fn tenants_take_turns_and_one_that_always_has_a_single_job_waiting_gets_no_more_than_its_share() {
    let mut record = record_of(1);
    for stream in 0..300 {
        wait(&mut record, 1, stream, Priority::Normal, 1 + stream % 2, 0.0);
    }
    wait(&mut record, 1, 1000, Priority::Normal, 3, 0.0);
    let mut served = [0; 4];
    for turn in 0..90 {
        let stream = drawn(&mut record, 1, 1, 1.0)[0];
        let tenant = if stream >= 1000 { 3 } else { 1 + stream % 2 };
        served[tenant as usize] += 1;
        if tenant == 3 {
            wait(&mut record, 1, 1001 + turn, Priority::Normal, 3, 1.0);
        }
    }
    assert_eq!(served[1..], [30, 30, 30]);
}

#[test]
fn a_tenant_is_no_worse_off_in_one_priority_for_what_it_has_in_another() {
    let mut record = record_of(1);
    for stream in 0..20 {
        wait(&mut record, 1, stream, Priority::Low, 1, 0.0);
    }
    let _ = drawn(&mut record, 1, 10, 0.1);
    wait(&mut record, 1, 100, Priority::High, 1, 0.2);
    wait(&mut record, 1, 101, Priority::High, 2, 0.3);
    assert_eq!(drawn(&mut record, 1, 2, 0.4), [100, 101]);
}

#[test]
fn costs_are_what_turns_are_worth() {
    let entry = |tenant| Waiting::new(1, 0, Priority::Normal, tenant, if tenant == 1 { 6.0 } else { 0.8 }, at(0.0));
    let (mut turns, mut served) = (Vec::new(), [0.0f32; 3]);
    for _ in 0..3000 {
        let next = (1..=2).min_by(|one, other| ahead(&turns, &entry(*one)).total_cmp(&ahead(&turns, &entry(*other)))).unwrap();
        pass(&mut turns, &entry(next));
        served[next as usize] += entry(next).size();
    }
    assert!((served[1] / served[2] - 1.0).abs() < 0.01, "{served:?}");
}

#[test]
fn more_tenants_than_there_is_room_for_are_forgotten_and_nobody_starves() {
    let mut record = record_of(1);
    wait(&mut record, 1, 0, Priority::Normal, 1, 0.0);
    wait(&mut record, 1, 1, Priority::Normal, 1, 0.0);
    assert_eq!(drawn(&mut record, 1, 1, 0.1), [0]);
    let mut second = None;
    for stream in 2..10_000 {
        // A new name each time.
        wait(&mut record, 1, stream, Priority::Normal, stream, 1.0);
        let served = drawn(&mut record, 1, 1, 1.0);
        assert!(record.turns().len() <= MOST_TURNS);
        if served.contains(&1) {
            second = Some(stream);
            break;
        }
    }
    assert!(second.is_some_and(|stream| stream as usize <= MOST_TURNS + 2), "{second:?}");
}

#[test]
fn each_worker_places_its_own_and_calls_the_others_once() {
    let mut record = record_of(3);
    for (worker, stream) in [(2, 1), (1, 2), (3, 3), (1, 4)] {
        wait(&mut record, worker, stream, Priority::Normal, 0, f64::from(stream));
    }
    let mut free = Free { slots: 2, taken: Vec::new() };
    assert_eq!(draw(&mut record, 1, at(5.0), usize::MAX, &mut free), [Called { worker: 2, bell: 102 }]);
    // One of the two slots is for the other worker's job, which came first.
    assert_eq!(free.taken, [2]);
    let mut free = Free { slots: 1, taken: Vec::new() };
    assert_eq!(draw(&mut record, 1, at(5.0), usize::MAX, &mut free), [], "it has been called");
    assert!(free.taken.is_empty());
    assert_eq!(drawn(&mut record, 2, 1, 5.0), [1]);
    // Nobody has heard of it since it was called, so that another may go first after a while.
    assert!(drawn(&mut record, 1, 1, 5.0).is_empty());
    assert_eq!(drawn(&mut record, 1, 1, 5.2), [4]);
}

#[test]
fn a_worker_that_does_not_answer_is_passed_over_until_it_does() {
    let mut record = record_of(2);
    for (worker, stream) in [(2, 1), (2, 2), (1, 3), (1, 4)] {
        wait(&mut record, worker, stream, Priority::Normal, 0, f64::from(stream));
    }
    assert_eq!(call(&mut record, 1, at(5.0)), Some(Called { worker: 2, bell: 102 }));
    assert_eq!(call(&mut record, 1, at(5.001)), None);
    assert!(drawn(&mut record, 1, 1, 5.1).is_empty(), "it may still answer");
    assert_eq!(call(&mut record, 1, at(5.101)), Some(Called { worker: 1, bell: 101 }));
    assert_eq!(drawn(&mut record, 1, 1, 5.101), [3]);
    // It answers.
    assert_eq!(drawn(&mut record, 2, 1, 5.11), [1]);
    let row = record.worker_row(2, 0).unwrap();
    record.set_worker(row, Worker { called: 0, ..record.worker(row).unwrap() });
    assert!(drawn(&mut record, 1, 1, 5.12).is_empty());
}

#[test]
fn the_jobs_of_a_worker_that_is_declared_dead_are_gone_and_those_of_one_that_is_not_there_are_passed_over() {
    let mut record = record_of(2);
    for (worker, stream) in [(2, 1), (1, 2), (9, 3)] {
        wait(&mut record, worker, stream, Priority::Normal, 1, f64::from(stream));
    }
    record.declare_dead(record.worker_row(2, 0).unwrap());
    assert_eq!(record.waiting().map(|entry| entry.stream).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(served_from(&mut record, 5.0, 0.1), [2]);
}

#[test]
fn words_are_read_in_any_case_and_nothing_else_is() {
    assert_eq!(Priority::parse(b"High"), Some(Priority::High));
    assert_eq!(Priority::parse(b"low"), Some(Priority::Low));
    for word in [b"".as_slice(), b"urgent", b"high ", b"\xff"] {
        assert_eq!(Priority::parse(word), None);
    }
}

/// What happens to the queue.
#[derive(Clone, Debug)]
enum Event {
    Wait { worker: u64, level: usize, tenant: u32 },
    Free { worker: u64, slots: usize },
    Leave { number: usize },
    Pass { millis: u64 },
    Die { worker: u64 },
    Step,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => (1..4u64, 0..3usize, 0..4u32).prop_map(|(worker, level, tenant)| Event::Wait { worker, level, tenant }),
        6 => (1..4u64, 0..4usize).prop_map(|(worker, slots)| Event::Free { worker, slots }),
        2 => (0..10usize).prop_map(|number| Event::Leave { number }),
        3 => (0..15_000u64).prop_map(|millis| Event::Pass { millis }),
        1 => (1..4u64).prop_map(|worker| Event::Die { worker }),
        1 => Just(Event::Step),
    ]
}

proptest! {
    /// Against a plain list: nobody is lost, served twice or served out of turn, and the record is a record at every step.
    #[test]
    fn whatever_happens_everybody_is_served_once_and_in_turn(events in prop::collection::vec(event(), 1..120)) {
        let mut record = record_of(3);
        let mut list: Vec<Waiting> = Vec::new();
        let (mut now, mut streams) = (86_400_000_000u64, 0);
        for event in events {
            match event {
                Event::Wait { worker, level, tenant } => {
                    streams += 1;
                    let entry = Waiting::new(worker, streams, Priority::ALL[level], tenant, 1.0, Instant(now));
                    record.add_waiting(entry);
                    let at = list.partition_point(|other| other.since() <= entry.since());
                    list.insert(at, entry);
                }
                Event::Free { worker, slots } => {
                    let before = list.clone();
                    let mut free = Free { slots, taken: Vec::new() };
                    let called = draw(&mut record, worker, Instant(now), usize::MAX, &mut free);
                    prop_assert!(called.iter().all(|called| called.worker != worker));
                    prop_assert!(free.taken.len() <= slots);
                    for stream in &free.taken {
                        let at = list.iter().position(|entry| (entry.worker, entry.stream) == (worker, *stream));
                        prop_assert!(at.is_some(), "served twice, or by another worker");
                        list.remove(at.unwrap());
                    }
                    // Of one tenant and priority nobody is served before one of the same worker that came first.
                    for stream in &free.taken {
                        let entry = before.iter().find(|entry| entry.stream == *stream).unwrap();
                        let is_like = |other: &&Waiting| (other.worker, other.tenant, other.priority()) == (worker, entry.tenant, entry.priority());
                        let first: Vec<u32> = before.iter().filter(is_like).map(|other| other.stream).collect();
                        let taken: Vec<u32> = free.taken.iter().copied().filter(|taken| first.contains(taken)).collect();
                        prop_assert_eq!(&first[..taken.len()], &taken[..]);
                    }
                    // As many as there are slots for are taken, but for those that others are entitled to.
                    let others = before.iter().filter(|entry| entry.worker != worker).count();
                    prop_assert!(free.taken.len() + others >= slots.min(before.len()));
                    let row = record.worker_row(worker, 0).unwrap();
                    record.set_worker(row, Worker { called: 0, ..record.worker(row).unwrap() });
                }
                Event::Leave { number } => {
                    if let Some(entry) = (!list.is_empty()).then(|| list.remove(number % list.len())) {
                        prop_assert!(record.remove_waiting(entry.worker, entry.stream));
                        prop_assert!(!record.remove_waiting(entry.worker, entry.stream));
                    }
                }
                Event::Pass { millis } => now += millis * 1000,
                Event::Die { worker } => {
                    record.declare_dead(record.worker_row(worker, 0).unwrap());
                    record.add_worker(Worker { id: worker, bell: 1, ..Worker::default() });
                    list.retain(|entry| entry.worker != worker);
                }
                Event::Step => now -= 100_000_000,
            }
            prop_assert_eq!(record.waiting().collect::<Vec<_>>(), list.clone());
            prop_assert!(record.has_waiting() || record.turns().is_empty());
            let parsed = Record::parse(record.clone().into_bytes());
            prop_assert!(parsed.is_ok_and(|parsed| parsed.header == record.header && parsed.waiting().eq(record.waiting())));
        }
        // Whoever is left is served, by whichever workers.
        for worker in 1..4 {
            let row = record.worker_row(worker, 0).unwrap();
            record.set_worker(row, Worker { called: 0, ..record.worker(row).unwrap() });
        }
        for _ in 0..list.len() {
            for worker in 1..4 {
                let mut free = Free { slots: 1, taken: Vec::new() };
                let _ = draw(&mut record, worker, Instant(now), usize::MAX, &mut free);
            }
        }
        prop_assert!(!record.has_waiting(), "somebody is left");
    }

    #[test]
    fn any_bytes_behind_the_entries_are_some_queue(bytes in prop::collection::vec(any::<u8>(), 26..260), now in any::<u64>()) {
        let mut record = record_of(1);
        for chunk in bytes.as_chunks().0 {
            record.add_waiting(Waiting::read(chunk));
        }
        let turns: Vec<Turn> = bytes.as_chunks().0.iter().map(Turn::read).collect();
        record.set_turns(&turns);
        let mut free = Free { slots: 100, taken: Vec::new() };
        let _ = draw(&mut record, 1, Instant(now), 100, &mut free);
        let _ = call(&mut record, 1, Instant(now));
        prop_assert!(Record::parse(record.into_bytes()).is_ok());
    }
}
