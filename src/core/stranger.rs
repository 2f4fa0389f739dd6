//! A host that our configuration names and Envoy's cluster does not have.
//!
//! Envoy passes over such an address in silence, and takes the next in the header. It costs nothing but a wrong count until that is seen; so the
//! first miss is enough: the host is *ejected*, as a failing one is, and tried again as rarely. (Unlike with a failure this protects
//! nobody, so that it does not count to those that `max_ejected_percent` allows; of hosts that have served before, no more than so many are called
//! strangers at once.)
//!
//! Where Envoy's policy does not read our header at all, or a later filter sends jobs to another cluster, sound hosts look like strangers now and
//! then. But there those that were called so are soon seen to serve: then nobody is called so for [`UNREAD_FOR`], and if another host had been named
//! for that job, all are taken back. And before a job is refused for want of a free slot, a host that was called a stranger for the first time has its
//! trial early: if it is one, the job goes to a host that has no slot for it, as the first miss did; but once, not each time that the pool is full.

use std::time::Duration;

use super::address::Address;
use super::health::{Reason, State, Trial, another_serves};
use super::random::Random;
use super::record::{Host, Record, STRANGER};
use super::time::Instant;
use crate::config::Pool;

/// How long nobody is called a stranger after one that was is seen to serve.
pub const UNREAD_FOR: Duration = Duration::from_secs(300);

/// A job whose header Envoy did not follow.
#[derive(Clone, Copy, Debug)]
pub struct Passed<'a> {
    /// The names before the one that serves.
    pub names: &'a [Address],
    /// Whether the one that serves was named, too. Where it was not, Envoy may not read our header at all, and where the host has served before, the job
    /// may have gone to another cluster: then only so many are called strangers as may be ejected.
    pub is_clear: bool,
    /// When the job was begun.
    pub begun: Instant,
    /// If it was the trial of its first name.
    pub trial: Option<Trial>,
}

impl Passed<'_> {
    /// Calls those that were passed over strangers. The host that serves is to be one of the pool's: where it is not, the job has gone to another
    /// cluster, or this one has hosts that we do not know.
    pub fn note(&self, record: &mut Record, pool: &Pool, now: Instant, random: &mut Random) {
        // Further ahead than it is ever set: the clock has stepped back.
        let rest = Instant(record.header.unread_until).since(now);
        if !rest.is_zero() && rest <= UNREAD_FOR {
            return;
        }
        let most = pool.failure.most_ejected(record.hosts().filter(|host| !host.is_retired()).count());
        for (position, address) in self.names.iter().enumerate() {
            let seat = record.seat_at(*address);
            let Some((slot, mut host)) = seat.and_then(|seat| Some((seat.slot, record.host(seat.slot)?))) else {
                continue;
            };
            host.mend_readmission(now);
            let trial = self.trial.filter(|_| position == 0);
            let is_its_trial = trial.is_some_and(|trial| host.is_on(trial));
            // One that has never served may well not be there; of the others, or where no name was followed, it takes more than one look.
            let is_certain = self.is_clear && !host.ewma().has_history();
            let may = || another_serves(record, pool, slot, now) && (is_certain || strangers(record) < most);
            let is_news = !host.is_ejected() && !host.is_old_news(self.begun) && may();
            if is_its_trial || is_news {
                host.eject(Reason::Unknown, &pool.failure, now, random);
                record.with_host(slot, |entry| *entry = host);
                record.header.stands_anew();
            }
        }
    }
}

fn strangers(record: &Record) -> usize {
    record.hosts().filter(is_stranger).count()
}

/// A job is served by this host: whoever serves is no stranger. `for_another` says that another one was named.
pub fn serves(record: &mut Record, slot: u32, for_another: bool, now: Instant) {
    if !record.host(slot).is_some_and(|host| is_stranger(&host)) {
        return;
    }
    record.header.unread_until = (now + UNREAD_FOR).0;
    let all = if for_another { 0..record.header.hosts } else { slot..slot + 1 };
    for slot in all {
        acquit(record, slot, now);
    }
}

/// Envoy knows the host in this slot: if it was called a stranger, it serves again. Gives whether it was.
pub fn acquit(record: &mut Record, slot: u32, now: Instant) -> bool {
    let header = record.header;
    if !record.host(slot).is_some_and(|host| is_stranger(&host)) {
        return false;
    }
    record.with_host(slot, |host| host.readmit(&header, now));
    record.header.stands_anew();
    true
}

/// Whether a host may be tried before its time: see above.
pub fn wants_early_trial(host: &Host, now: Instant) -> bool {
    is_stranger(host) && host.severity <= 1 && host.health(now) == State::Ejected && host.busy_for(now).is_zero()
}

fn is_stranger(host: &Host) -> bool {
    host.is_ejected() && host.has_flag(STRANGER)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::core::choice::{self, Decision, Kind};
    use crate::core::ewma::Ewma;
    use crate::core::fixture::{address, at, pool_of, record_of, wants};
    use crate::core::health::{Evidence, judge};
    use crate::core::lease::{Lease, Settlement, Whereabouts};
    use crate::core::outcome::Outcome;
    use crate::core::roster::Roster;

    /// Jobs over a pool whose Envoy does with them what it likes.
    struct Bench {
        pool: Rc<Pool>,
        record: Record,
        random: Random,
        now: f64,
    }

    impl Bench {
        fn of(hosts: usize) -> Self {
            let pool = pool_of(hosts, "");
            Self { record: record_of(&pool), pool, random: Random::new(2), now: 1000.0 }
        }

        /// A job for which these were named is served by that one, at the first attempt.
        fn job(&mut self, named: &[usize], served: usize) {
            let (seat, trial) = self.take(named);
            self.serve(named, seat, trial, self.now, served);
        }

        fn take(&mut self, named: &[usize]) -> (crate::core::record::Seat, Option<Trial>) {
            let slot = named[0] as u32;
            let is_trial = self.record.host(slot).unwrap().wants_trial(at(self.now));
            self.record.place(slot, at(self.now), is_trial.then_some(Duration::from_secs(10)), None).unwrap()
        }

        fn serve(&mut self, named: &[usize], seat: crate::core::record::Seat, trial: Option<Trial>, begun: f64, served: usize) {
            let names = named.iter().map(|host| address(*host)).collect();
            let mut lease = Lease::new(Some(seat), names, at(begun), self.pool.clone(), trial);
            let there = Whereabouts { address: address(served), attempts: 1 };
            if Some(there.address) != lease.address {
                let moved = lease.follow(&mut self.record, there, at(self.now), &mut self.random);
                lease.moved(moved);
            } else {
                let evidence = Evidence { outcome: Outcome::Success, is_timed: true, latency: None, begun: at(begun), trial };
                judge(&mut self.record, seat.slot, evidence, &self.pool, at(self.now), &mut self.random);
            }
        }

        fn states(&self) -> Vec<State> {
            self.record.hosts().map(|host| host.state(at(self.now))).collect()
        }
    }

    use State::{Ejected, Probing, Serving};

    #[test]
    fn the_first_miss_is_enough_for_every_name_before_the_one_that_serves() {
        let mut bench = Bench::of(4);
        bench.job(&[3, 2, 0], 0);
        assert_eq!(bench.states(), [Serving, Serving, Ejected, Ejected]);
        let reasons: Vec<_> = bench.record.hosts().map(|host| host.reason()).collect();
        assert_eq!(reasons, [None, None, Some(Reason::Unknown), Some(Reason::Unknown)]);
        assert_eq!((bench.record.header.overruled, bench.record.host(3).unwrap().failures), (1, 0), "it is no failure");
    }

    #[test]
    fn it_is_tried_again_ever_more_rarely_and_serves_once_envoy_has_it() {
        let mut bench = Bench::of(3);
        bench.job(&[2, 0, 1], 0);
        for seconds in [11.1, 22.1, 44.1] {
            assert_eq!(bench.states()[2], Ejected);
            bench.now += seconds;
            assert_eq!(bench.states()[2], Probing, "after {seconds} s");
            bench.job(&[2, 0, 1], 0);
        }
        bench.now += 89.0;
        bench.job(&[2, 0, 1], 2);
        assert_eq!(bench.states(), [Serving; 3]);
    }

    #[test]
    fn they_do_not_count_to_those_that_may_be_ejected_but_one_always_serves() {
        let mut bench = Bench::of(4);
        bench.job(&[1, 2, 0], 0);
        let failure = |begun| Evidence { outcome: Outcome::Failure, is_timed: false, latency: None, begun, trial: None };
        (0..3).for_each(|_| judge(&mut bench.record, 3, failure(at(1000.0)), &bench.pool, at(1000.0), &mut Random::new(1)));
        assert_eq!(bench.states(), [Serving, Ejected, Ejected, Ejected]);
        bench.job(&[0, 1], 1);
        assert_eq!(bench.states()[0], Serving);
    }

    #[test]
    fn where_none_of_the_names_serves_only_so_many_are_called_so_as_may_be_ejected() {
        let mut bench = Bench::of(4);
        bench.job(&[0, 1, 2], 3);
        assert_eq!(bench.states(), [Ejected, Ejected, Serving, Serving]);
    }

    #[test]
    fn of_hosts_that_have_served_only_so_many_are_called_so_as_may_be_ejected() {
        let mut bench = Bench::of(4);
        let history = Ewma { millis: 5.0, fed: at(999.0) };
        (0..4).for_each(|slot| _ = bench.record.with_host(slot, |host| host.set_ewma(history)));
        bench.job(&[0, 1, 2, 3], 3);
        assert_eq!(bench.states(), [Ejected, Ejected, Serving, Serving]);
    }

    #[test]
    fn a_host_that_serves_is_none_and_then_nobody_is_called_so_for_a_while() {
        let mut bench = Bench::of(4);
        bench.job(&[0, 1], 1);
        bench.job(&[3, 2], 2);
        assert_eq!(bench.states(), [Ejected, Serving, Serving, Ejected]);
        bench.job(&[1, 2], 0);
        assert_eq!(bench.states(), [Serving; 4], "Envoy does not read our header");
        for job in 0..100 {
            bench.job(&[job % 4, (job + 1) % 4], (job + 2) % 4);
            assert_eq!(bench.states(), [Serving; 4]);
        }
        bench.now += 301.0;
        bench.job(&[0, 1], 1);
        assert_eq!(bench.states()[0], Ejected);
    }

    #[test]
    fn a_clock_that_steps_back_does_not_make_that_while_longer() {
        let mut bench = Bench::of(4);
        bench.job(&[0, 1], 1);
        bench.job(&[1, 2], 0);
        assert_eq!(bench.states(), [Serving; 4]);
        bench.now -= 500.0;
        bench.job(&[3, 2], 2);
        assert_eq!(bench.states()[3], Ejected);
        bench.job(&[0, 1], 1);
        assert_eq!(bench.states()[0], Ejected, "that it was taken back is yet to come, and says nothing");
    }

    #[test]
    fn a_job_that_goes_elsewhere_says_nothing_about_the_pools_hosts() {
        let mut bench = Bench::of(3);
        bench.job(&[0, 1], 77);
        assert_eq!(bench.states(), [Serving; 3]);
    }

    #[test]
    fn a_job_that_was_begun_before_a_host_was_taken_back_says_nothing_about_it() {
        let mut bench = Bench::of(3);
        let (seat, trial) = bench.take(&[0, 1]);
        bench.job(&[0, 1], 1);
        assert_eq!(bench.states()[0], Ejected);
        bench.now += 1.0;
        assert!(acquit(&mut bench.record, 0, at(bench.now)));
        bench.serve(&[0, 1], seat, trial, 1000.0, 1);
        assert_eq!(bench.states()[0], Serving);
        assert!(!acquit(&mut bench.record, 0, at(bench.now)), "there is nothing to take back");
    }

    #[test]
    fn one_that_passes_its_trial_serves_and_for_a_while_nobody_is_called_so_again() {
        let mut bench = Bench::of(4);
        bench.job(&[0, 1, 2], 1);
        bench.job(&[3, 2], 2);
        bench.now += 11.1;
        let (seat, trial) = bench.take(&[0, 1]);
        let mut lease = Lease::new(Some(seat), vec![address(0), address(1)], at(bench.now), bench.pool.clone(), trial);
        lease.is_answered = true;
        let end = Settlement { outcome: Outcome::Success, is_timed: true, latency: None, whereabouts: None, reading: None };
        lease.settle(&mut bench.record, end, at(bench.now), &mut Random::new(1));
        assert_eq!(bench.states(), [Serving, Serving, Serving, Probing], "of the other that says nothing");
        bench.job(&[0, 1], 1);
        assert_eq!(bench.states()[0], Serving);
    }

    #[test]
    fn before_a_job_is_refused_a_stranger_has_its_trial_early_and_only_once() {
        let mut bench = Bench::of(3);
        bench.job(&[2, 0], 0);
        let fill = |bench: &mut Bench, load| {
            (0..2).for_each(|slot| _ = bench.record.with_host(slot, |host| host.in_flight = load));
        };
        let choose = |bench: &mut Bench| {
            let (now, roster) = (at(bench.now), &mut Roster::default());
            choice::choose(&bench.record, &bench.pool, roster, now, &mut bench.random, wants(Kind::Job))
        };
        fill(&mut bench, 49);
        let Decision::Chosen(chosen) = choose(&mut bench) else { panic!("it was refused") };
        assert_ne!(chosen.hosts[0], 2, "there is a free slot");
        fill(&mut bench, 50);
        let Decision::Chosen(chosen) = choose(&mut bench) else { panic!("it was refused") };
        assert_eq!((chosen.hosts[0], chosen.trial.is_some()), (2, true));
        let (seat, trial) = bench.record.place(2, at(bench.now), chosen.trial, None).unwrap();
        assert!(matches!(choose(&mut bench), Decision::Full(_)), "one trial at a time");
        bench.serve(&[2, 0], seat, trial, bench.now, 0);
        fill(&mut bench, 50);
        assert_eq!(bench.states()[2], Ejected);
        assert!(matches!(choose(&mut bench), Decision::Full(_)), "it was given its chance");
    }
}
