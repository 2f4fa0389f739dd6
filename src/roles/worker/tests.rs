use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Barrier};

use super::*;
use crate::core::book::TICKS_TO_DEATH;
use crate::core::choice::{Decision, Kind};
use crate::core::fixture::{address, pool, pool_of};
use crate::core::lease::Settlement;
use crate::core::outcome::Outcome;
use crate::core::queue::Priority;
use crate::roles::fake::{Call, Fake, Process};
use crate::roles::route::Route;

/// A worker and one root of it.
struct Bench {
    host: Fake,
    worker: Worker<Fake>,
    name: Rc<str>,
    route: Rc<Route>,
    pools: Pools,
}

impl Bench {
    fn new(process: &Arc<Process>, pool: &Rc<Pool>) -> Self {
        let host = Fake::new(process);
        let mut worker = Worker::new(host.clone());
        let name: Rc<str> = "gpu".into();
        let pools = vec![(name.clone(), pool.clone())];
        worker.stream_starts(1, &name, &pools);
        let route = Rc::new(Route::new(&name, pool));
        Self { host, worker, name, route, pools }
    }

    fn choose(&mut self, stream: u32, kind: Kind) -> Result<Course, Fault> {
        self.worker.choose(&self.name, request(stream, kind), &mut self.route.running.borrow_mut())
    }

    /// Takes a lease and gives the chosen host's index.
    fn take(&mut self, stream: u32) -> usize {
        match self.choose(stream, Kind::Job) {
            Ok(Course::Placed(placed)) => placed.chosen.hosts[0],
            other => panic!("{other:?}"),
        }
    }

    fn settle(&mut self, stream: u32) {
        self.worker.settle(
            &self.name,
            stream,
            Settlement { outcome: Outcome::Success, is_timed: true, latency: None, whereabouts: None, reading: None },
            || None,
        );
    }

    fn tick(&mut self) {
        self.worker.root_ticks(1, &self.name, &self.pools);
    }
}

fn request(stream: u32, kind: Kind) -> Request {
    Request { stream, kind, priority: Priority::Normal, tenant: 0, job: crate::core::learning::Job::unknown() }
}

fn record(process: &Process) -> Record {
    Record::parse(process.value(&shared::key("gpu")).unwrap()).unwrap()
}

fn loads(process: &Process) -> Vec<u32> {
    record(process).hosts().map(|host| host.load()).collect()
}

/// All of them tick so many times.
fn tick_all(process: &Process, benches: &mut [&mut Bench], ticks: u32) {
    for _ in 0..ticks {
        process.pass(TICK);
        benches.iter_mut().for_each(|bench| bench.tick());
    }
}

#[test]
fn eight_threads_never_take_more_than_the_slots_and_end_at_0() {
    fight_over_the_last_slot(8, 4, 0, 2000);
}

#[test]
fn thirty_two_threads_and_a_thousand_hosts_never_take_more_than_the_slots_and_end_at_0() {
    fight_over_the_last_slot(32, 4, 1020, 60);
}

/// So many threads, each a worker, over so many hosts with together as many slots, and others that drain: once each thread has a slot there is none
/// left, and from then on the last one is fought over.
fn fight_over_the_last_slot(threads: usize, serving: usize, draining: usize, rounds: u32) {
    let slots = (threads / serving) as u32;
    let hosts: Vec<String> = (0..serving + draining)
        .map(|host| format!(r#"{{"address": "{}", "drain": {}}}"#, address(host), host >= serving))
        .collect();
    let keys = format!(r#""hosts": [{}], "max_in_flight": {slots}"#, hosts.join(","));
    let process = Process::new(1);
    let running: Vec<AtomicU32> = (0..serving).map(|_| AtomicU32::new(0)).collect();
    let barrier = Barrier::new(threads);
    let work = || {
        let mut bench = Bench::new(&process, &pool(&keys));
        let (mut held, mut placed, mut faults) = (Vec::new(), 0, Vec::new());
        let give_back = |bench: &mut Bench, held: &mut Vec<(u32, usize)>| {
            for (stream, host) in held.drain(..) {
                running[host].fetch_sub(1, SeqCst);
                bench.settle(stream);
            }
        };
        for stream in 0..rounds {
            let decision = bench.choose(stream, Kind::Job);
            if stream < 2 {
                barrier.wait();
            }
            match decision {
                Ok(Course::Placed(Placed { chosen, .. })) => {
                    assert_ne!(stream, 1, "every slot was taken");
                    let now = running[chosen.hosts[0]].fetch_add(1, SeqCst) + 1;
                    assert!(now <= slots, "{now} jobs on a host of {slots} slots");
                    held.push((stream, chosen.hosts[0]));
                    placed += 1;
                }
                Ok(_) => give_back(&mut bench, &mut held),
                Err(fault) => faults.push(fault),
            }
            if held.len() > 2 {
                give_back(&mut bench, &mut held);
            }
        }
        give_back(&mut bench, &mut held);
        assert_eq!(faults, []);
        placed
    };
    let placed: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let record = record(&process);
    assert_eq!((loads(&process), record.header.drift, record.header.deaths), (vec![0; serving + draining], 0, 0));
    assert_eq!(record.hosts().map(|host| host.requests).sum::<u64>(), placed);
}

#[test]
fn a_job_holds_a_slot_from_its_choice_to_its_end() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, &pool_of(2, r#", "max_in_flight": 1"#));
    let hosts = [bench.take(1), bench.take(2)];
    assert_ne!(hosts[0], hosts[1]);
    assert!(matches!(bench.choose(3, Kind::Job), Ok(Course::Decided(Decision::Full(_)))));
    assert!(matches!(bench.choose(4, Kind::Other), Ok(Course::Decided(Decision::Chosen(_)))));
    assert_eq!(loads(&process), [1, 1]);
    bench.settle(1);
    bench.settle(1);
    assert_eq!(loads(&process).iter().sum::<u32>(), 1);
    bench.settle(2);
    assert_eq!((loads(&process), record(&process).header.drift), (vec![0, 0], 0));
}

#[test]
fn the_last_slot_is_not_taken_twice_by_two_who_saw_it_free() {
    let process = Process::new(1);
    let pool = pool_of(1, r#", "max_in_flight": 1"#);
    let mut first = Bench::new(&process, &pool);
    first.tick();
    let mut second = Bench::new(&process, &pool);
    second.tick();
    first.host.meanwhile(move || _ = second.take(1));
    assert!(matches!(first.choose(1, Kind::Job), Ok(Course::Decided(Decision::Full(_)))));
    assert_eq!(loads(&process), [1]);
}

#[test]
fn a_lease_follows_a_retry_at_the_first_tick_after_it() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, &pool_of(2, ""));
    let from = bench.take(7);
    bench.host.stream(7, |stream| {
        stream.properties.insert("upstream\0address", address(1 - from).to_string().into());
        stream.properties.insert("upstream\0request_attempt_count", 2u64.to_le_bytes().into());
    });
    process.pass(TICK);
    bench.tick();
    assert_eq!((loads(&process)[from], loads(&process)[1 - from]), (0, 1));
    assert_eq!(record(&process).host(from as u32).unwrap().failures, 1);
}

#[test]
fn a_settlement_that_could_not_be_stored_is_stored_at_the_next_tick() {
    for call in [Call::Load, Call::Store] {
        let process = Process::new(1);
        let mut bench = Bench::new(&process, &pool_of(1, ""));
        bench.take(1);
        bench.host.refuse(call, 1);
        bench.settle(1);
        assert_eq!(loads(&process), [1]);
        tick_all(&process, &mut [&mut bench], 2);
        assert_eq!((loads(&process), record(&process).header.drift), (vec![0], 0), "{call:?}");
    }
}

#[test]
fn a_choice_that_could_not_be_stored_takes_nothing() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, &pool_of(1, ""));
    bench.tick();
    for call in [Call::Load, Call::Store] {
        bench.host.refuse(call, 1);
        assert!(bench.choose(1, Kind::Job).is_err());
        assert_eq!((loads(&process), bench.worker.lease("gpu", 1).is_none()), (vec![0], true));
    }
}

#[test]
fn what_a_dead_worker_held_is_gone_within_ten_seconds_and_the_others_leases_stay() {
    let process = Process::new(1);
    let pool = pool_of(1, "");
    let (mut first, mut second, mut dead) =
        (Bench::new(&process, &pool), Bench::new(&process, &pool), Bench::new(&process, &pool));
    first.take(1);
    second.take(1);
    dead.take(1);
    dead.take(2);
    drop(dead);
    let alive = &mut [&mut first, &mut second];
    tick_all(&process, alive, TICKS_TO_DEATH - 1);
    assert_eq!(loads(&process), [4]);
    tick_all(&process, alive, 100 - TICKS_TO_DEATH);
    assert_eq!((loads(&process), record(&process).header.deaths), (vec![2], 1));
    // Minutes later they are still there.
    tick_all(&process, alive, 3000);
    assert_eq!((loads(&process), record(&process).header.deaths), (vec![2], 1));
}

#[test]
fn a_process_that_was_stopped_and_goes_on_loses_and_leaks_nothing() {
    let process = Process::new(1);
    let pool = pool_of(2, "");
    let mut benches: Vec<Bench> = (0..4).map(|_| Bench::new(&process, &pool)).collect();
    benches.iter_mut().for_each(|bench| _ = bench.take(1));
    for _ in 0..3 {
        process.pass(Duration::from_secs(15));
        tick_all(&process, &mut benches.iter_mut().collect::<Vec<_>>(), 5);
    }
    assert_eq!((loads(&process).iter().sum::<u32>(), record(&process).header.deaths), (4, 0));
}

#[test]
fn a_worker_that_was_silent_for_too_long_returns_and_is_counted_again() {
    let process = Process::new(1);
    let pool = pool_of(1, "");
    let (mut alive, mut silent) = (Bench::new(&process, &pool), Bench::new(&process, &pool));
    silent.take(1);
    silent.take(2);
    tick_all(&process, &mut [&mut alive], 100);
    assert_eq!((loads(&process), record(&process).header.deaths), (vec![0], 1));
    silent.settle(1);
    assert_eq!(loads(&process), [1]);
    tick_all(&process, &mut [&mut alive, &mut silent], 100);
    assert_eq!((loads(&process), record(&process).header.deaths), (vec![1], 1));
    silent.settle(2);
    assert_eq!((loads(&process), record(&process).header.drift), (vec![0], 0));
}

#[test]
fn ticks_go_on_when_the_clock_steps_back() {
    let process = Process::new(1);
    let pool = pool_of(1, "");
    let (mut alive, mut dead) = (Bench::new(&process, &pool), Bench::new(&process, &pool));
    alive.tick();
    dead.take(1);
    drop(dead);
    process.step_back(Duration::from_secs(3600));
    tick_all(&process, &mut [&mut alive], 100);
    assert_eq!((loads(&process), record(&process).header.deaths), (vec![0], 1));
}

#[test]
fn ticks_of_two_roots_at_one_time_are_one_tick() {
    let process = Process::new(1);
    let pool = pool_of(1, "");
    let (mut alive, mut quiet) = (Bench::new(&process, &pool), Bench::new(&process, &pool));
    quiet.take(1);
    for _ in 0..TICKS_TO_DEATH - 1 {
        process.pass(TICK);
        (0..3).for_each(|_| alive.tick());
    }
    assert_eq!(record(&process).header.deaths, 0);
}

#[test]
fn a_record_of_another_version_is_not_read_and_a_new_one_takes_its_place() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, &pool_of(1, ""));
    bench.take(1);
    for bytes in [Vec::new(), b"garbage".to_vec(), vec![0xFF; 500]] {
        process.put(&shared::key("gpu"), bytes);
        bench.take(2);
        assert_eq!(loads(&process), [2]);
        bench.settle(2);
        assert_eq!(loads(&process), [1]);
    }
    assert!(bench.host.logged().iter().any(|line| line.contains("not one of ours")));
}

#[test]
fn a_worker_that_could_not_leave_tries_again() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, &pool_of(1, ""));
    bench.tick();
    bench.host.refuse(Call::Store, 1);
    bench.worker.root_ends(1);
    assert_eq!(record(&process).workers().count(), 1);
    process.pass(TICK);
    bench.worker.tick(1);
    let record = record(&process);
    assert_eq!((record.workers().count(), record.hosts().len()), (0, 0));
    assert!(shared::pools(&bench.host).is_empty());
}

#[test]
fn a_host_that_only_a_worker_named_that_left_goes_at_the_next_ticks_of_the_others() {
    let process = Process::new(1);
    let (mut stays, mut leaves) = (Bench::new(&process, &pool_of(1, "")), Bench::new(&process, &pool_of(2, "")));
    tick_all(&process, &mut [&mut stays, &mut leaves], 2);
    assert_eq!(loads(&process), [0, 0]);
    leaves.worker.root_ends(1);
    process.pass(TICK);
    leaves.worker.tick(1);
    for stream in 0..2 {
        // Its own traffic shows that it lives: then a tick stores only if there is something to do.
        stays.take(stream);
        stays.settle(stream);
        tick_all(&process, &mut [&mut stays], 1);
    }
    assert_eq!((loads(&process), record(&process).workers().count()), (vec![0], 1));
}

#[test]
fn requests_without_a_lease_are_counted_apart() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, &pool_of(1, ""));
    (0..5).for_each(|stream| _ = bench.choose(stream, Kind::Other));
    tick_all(&process, &mut [&mut bench], 2);
    let record = record(&process);
    assert_eq!((record.header.unleased, record.host(0).unwrap().requests), (5, 0));
}

#[test]
fn two_pools_have_two_books() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, &pool_of(1, ""));
    let (other, pool): (Rc<str>, _) = ("other".into(), pool_of(2, ""));
    bench.worker.stream_starts(2, &other, &vec![(other.clone(), pool.clone())]);
    bench.take(1);
    let route = Route::new(&other, &pool);
    let taken = bench.worker.choose("other", request(1, Kind::Job), &mut route.running.borrow_mut());
    assert!(matches!(taken, Ok(Course::Placed(_))));
    bench.settle(1);
    let all: Vec<(String, u32)> = shared::pools(&bench.host)
        .into_iter()
        .map(|(name, record)| (name, record.hosts().map(|host| host.load()).sum()))
        .collect();
    assert_eq!(all, [("gpu".to_owned(), 0), ("other".to_owned(), 1)]);
}
