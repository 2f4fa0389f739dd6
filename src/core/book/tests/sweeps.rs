//! Deaths, returns and reloads that meet.

use super::*;

#[test]
fn two_deaths_at_once_are_one_sweep() {
    let mut crew = Crew::new(4, &[0]);
    (0..4).for_each(|worker| _ = crew.take(worker, 0));
    crew.lose(3);
    crew.lose(2);
    crew.sync(0);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 1, 3)], false));
    crew.sync(1);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 2, 0)], true));
}

#[test]
fn a_death_during_a_sweep_starts_it_again() {
    let mut crew = Crew::new(4, &[0]);
    (0..4).for_each(|worker| _ = crew.take(worker, 0));
    crew.lose(3);
    crew.sync(0);
    // One that had caught up dies, and one that had not is left.
    crew.bury(0);
    assert_eq!(crew.counts(), [(0, 0, 4)]);
    crew.sync(1);
    crew.sync(2);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 2, 0)], true));
}

#[test]
fn the_last_that_a_sweep_waits_for_may_die_too() {
    let mut crew = Crew::new(3, &[0]);
    (0..3).for_each(|worker| _ = crew.take(worker, 0));
    crew.lose(2);
    crew.sync(0);
    crew.lose(1);
    crew.sync(0);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 1, 0)], true));
}

#[test]
fn the_last_that_a_sweep_waits_for_may_leave_too() {
    let mut crew = Crew::new(3, &[0]);
    crew.take(0, 0);
    crew.take(2, 0);
    crew.lose(2);
    crew.sync(0);
    crew.declare(1, &[]);
    crew.books.pop().unwrap().leave(&mut crew.record);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 1, 0)], true));
}

#[test]
fn a_worker_that_returns_during_the_sweep_takes_its_own_share_back() {
    let mut crew = Crew::new(3, &[0]);
    let streams: Vec<u32> = (0..3).map(|worker| crew.take(worker, 0)).collect();
    crew.bury(2);
    crew.sync(0);
    crew.sync(2);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 2, 1)], false));
    crew.sync(1);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 3, 0)], true));
    (0..3).zip(streams).for_each(|(worker, stream)| crew.settle(worker, stream));
    assert_eq!((crew.counts(), crew.record.header.drift), (vec![(0, 0, 0)], 0));
}

#[test]
fn a_worker_that_returns_after_the_sweep_is_counted_again_and_once() {
    let mut crew = Crew::new(2, &[0]);
    let streams = [crew.take(1, 0), crew.take(1, 0)];
    crew.bury(1);
    crew.sync(0);
    assert_eq!(crew.counts(), [(0, 0, 0)]);
    crew.sync(1);
    crew.sync(1);
    assert_eq!(crew.counts(), [(0, 2, 0)]);
    streams.into_iter().for_each(|stream| crew.settle(1, stream));
    assert_eq!((crew.counts(), crew.record.header.drift), (vec![(0, 0, 0)], 0));
}

#[test]
fn a_worker_that_returns_during_a_later_sweep_does_not_take_what_is_anothers() {
    let mut crew = Crew::new(4, &[0]);
    let streams: Vec<u32> = (0..4).map(|worker| crew.take(worker, 0)).collect();
    crew.bury(3);
    (0..3).for_each(|worker| _ = crew.sync(worker));
    assert_eq!(crew.counts(), [(0, 3, 0)]);
    crew.bury(2);
    // What is pending now is of 0, 1 and 2: nothing of it is 3's.
    crew.sync(3);
    assert_eq!(crew.counts(), [(0, 1, 3)]);
    crew.sync(0);
    crew.sync(1);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 3, 0)], true));
    crew.sync(2);
    (0..4).zip(streams).for_each(|(worker, stream)| crew.settle(worker, stream));
    assert_eq!((crew.counts(), crew.record.header.drift), (vec![(0, 0, 0)], 0));
}

#[test]
fn a_worker_may_return_after_its_hosts_were_dropped() {
    let mut crew = Crew::new(2, &[0, 1]);
    let stream = crew.take(1, 0);
    crew.bury(1);
    crew.declare(0, &[1]);
    crew.sync(0);
    assert_eq!(crew.counts(), [(1, 0, 0)]);
    crew.declare(1, &[1]);
    crew.sync(1);
    assert_eq!(crew.counts(), [(1, 0, 0), (0, 1, 0)]);
    crew.settle(1, stream);
    crew.record.drop_retired();
    assert_eq!((crew.counts(), crew.record.header.drift), (vec![(1, 0, 0)], 0));
}

#[test]
fn a_worker_may_return_after_its_host_was_dropped_and_came_back() {
    let mut crew = Crew::new(2, &[0, 1]);
    let stream = crew.take(1, 0);
    crew.bury(1);
    for hosts in [&[1][..], &[0, 1]] {
        crew.declare(0, hosts);
        crew.sync(0);
    }
    assert_eq!(crew.counts(), [(1, 0, 0), (0, 0, 0)]);
    crew.sync(1);
    assert_eq!(crew.counts(), [(1, 0, 0), (0, 1, 0)]);
    crew.settle(1, stream);
    assert_eq!((crew.counts(), crew.record.header.drift), (vec![(1, 0, 0), (0, 0, 0)], 0));
}

#[test]
fn a_worker_that_joins_during_a_sweep_neither_ends_nor_delays_it() {
    let mut crew = Crew::new(3, &[0]);
    (0..3).for_each(|worker| _ = crew.take(worker, 0));
    crew.lose(2);
    let new = crew.hire(&[0]);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 0, 3)], false));
    crew.take(new, 0);
    crew.sync(0);
    crew.sync(1);
    assert_eq!((crew.counts(), crew.is_swept()), (vec![(0, 3, 0)], true));
}

#[test]
fn hosts_may_go_and_come_during_a_sweep() {
    let mut crew = Crew::new(3, &[0, 1]);
    let streams = [crew.take(0, 0), crew.take(1, 0)];
    crew.take(2, 0);
    crew.lose(2);
    (0..2).for_each(|worker| crew.declare(worker, &[1]));
    crew.sync(0);
    crew.declare(0, &[0, 1]);
    crew.sync(0);
    // The old entry waits for the dead; whoever is late finds its lease there.
    crew.declare(1, &[0, 1]);
    crew.sync(1);
    assert!(crew.is_swept());
    assert_eq!(crew.counts().iter().map(|(_, in_flight, pending)| in_flight + pending).sum::<u32>(), 2);
    streams.into_iter().enumerate().for_each(|(worker, stream)| crew.settle(worker, stream));
    crew.record.drop_retired();
    let mut counts = crew.counts();
    counts.sort_unstable();
    assert_eq!((counts, crew.record.header.drift), (vec![(0, 0, 0), (1, 0, 0)], 0));
}
