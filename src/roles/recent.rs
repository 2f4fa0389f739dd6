//! What a pool went through lately, kept by the leader for the status page: see [`crate::core::recent`].

use super::shared;
use super::worker::Worker;
use crate::core::lookout::Event;
use crate::core::recent::{Point, Recent, STEP};
use crate::core::record::Record;
use crate::core::time::Instant;
use crate::host::{Fault, Host, IF_ABSENT};

impl<H: Host> Worker<H> {
    /// Notes what became of a pool's hosts, and each [`STEP`] how full it is. Asked at each of the leader's ticks.
    pub(super) fn remember(&mut self, name: &str, record: &Record, events: &[Event]) {
        let now = self.host.now();
        let Some(watch) = self.books.get_mut(name).map(|books| &mut books.watch) else {
            return;
        };
        let is_due = watch.noted == Instant::default() || now.since(watch.noted) >= STEP;
        if !is_due && events.is_empty() {
            return;
        }
        if is_due {
            watch.noted = now;
        }
        if let Err(fault) = note(&self.host, &shared::recent_key(name), events, Point::of(record, now)) {
            self.say_fault("keep the last minutes", fault);
        }
    }
}

fn note(host: &impl Host, key: &str, events: &[Event], point: Point) -> Result<(), Fault> {
    // Another one writes only when the lead passes on.
    for _ in 0..shared::MOST_CONFLICTS {
        let shared = host.load(key)?;
        let cas = if shared.value.is_some() { shared.cas } else { IF_ABSENT };
        let mut recent = Recent::parse(&shared.value.unwrap_or_default(), Instant(point.at));
        if !recent.note(events, point) || host.store(key, &recent.bytes(), cas)? {
            break;
        }
    }
    Ok(())
}

/// What a pool went through lately; nothing, where nobody has written anything yet.
pub fn of(host: &impl Host, pool: &str) -> Recent {
    let bytes = host.load(&shared::recent_key(pool)).ok().and_then(|shared| shared.value);
    Recent::parse(&bytes.unwrap_or_default(), host.now())
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::sync::Arc;

    use super::*;
    use crate::config::Role;
    use crate::core::fixture::address;
    use crate::core::health::{Evidence, judge};
    use crate::core::outcome::Outcome;
    use crate::core::random::Random;
    use crate::roles::fake::{Call, Fake, Process};
    use crate::roles::roots::Pools;
    use crate::roles::worker::TICK;

    struct Bench {
        host: Fake,
        worker: Worker<Fake>,
        pools: Pools,
    }

    impl Bench {
        fn new(process: &Arc<Process>) -> Self {
            let json =
                r#"{"pools": {"gpu": {"hosts": [{"address": "10.0.0.1:80"}, {"address": "10.0.0.2:80"}], "max_in_flight": 3}}}"#;
            let Ok(Role::Balancer(config)) = Role::parse(json.as_bytes()) else {
                panic!("{json}");
            };
            let pools = config.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect();
            let host = Fake::new(process);
            Self { worker: Worker::new(host.clone()), host, pools }
        }

        fn ticks(&mut self, ticks: usize) {
            let name: Rc<str> = "plimsoll".into();
            for _ in 0..ticks {
                self.host.process.pass(TICK);
                self.worker.root_ticks(1, &name, &self.pools);
            }
        }

        fn recent(&self) -> Recent {
            of(&self.host, "gpu")
        }

        fn fail(&self) {
            let key = shared::key("gpu");
            let mut record = Record::parse(self.host.process.value(&key).unwrap()).unwrap();
            let (pool, now) = (&self.pools[0].1, self.host.now());
            let evidence = Evidence { is_timed: true, outcome: Outcome::Failure, latency: None, begun: now, trial: None };
            (0..3).for_each(|_| judge(&mut record, 1, evidence, pool, now, &mut Random::new(1)));
            self.host.process.put(&key, record.into_bytes());
        }
    }

    #[test]
    fn the_leader_keeps_a_point_each_step_and_what_happened() {
        let process = Process::new(1);
        let mut bench = Bench::new(&process);
        assert_eq!(bench.recent(), Recent::default());
        bench.ticks(50);
        let recent = bench.recent();
        assert!((2..=3).contains(&recent.points().len()), "{recent:?}");
        let last = recent.points().last().unwrap();
        assert_eq!((last.in_flight, last.slots, last.waiting, last.eligible), (0, 6, 0, 2));
        bench.fail();
        bench.ticks(1);
        let recent = bench.recent();
        let [told] = recent.events().collect::<Vec<_>>()[..] else { panic!("{recent:?}") };
        assert_eq!((told.event(), told.host(), told.reason()), (Some("ejected"), Some(address(1)), Some("failures")));
    }

    #[test]
    fn whoever_leads_next_goes_on_with_it() {
        let process = Process::new(1);
        let (mut first, mut second) = (Bench::new(&process), Bench::new(&process));
        first.ticks(30);
        first.fail();
        first.ticks(1);
        let before = first.recent();
        second.ticks(60);
        let after = second.recent();
        assert!(
            after.points().starts_with(before.points()) && after.points().len() > before.points().len(),
            "{before:?}\n{after:?}"
        );
        assert!(after.events().count() == 1 && before.events().count() == 1);
    }

    #[test]
    fn bytes_that_are_not_ours_are_replaced_and_a_host_that_refuses_is_asked_again() {
        let process = Process::new(1);
        let mut bench = Bench::new(&process);
        process.put(&shared::recent_key("gpu"), b"\x00something else entirely".to_vec());
        bench.ticks(30);
        assert!(!bench.recent().points().is_empty());
        process.put(&shared::recent_key("gpu"), vec![]);
        for call in [Call::Load, Call::Store] {
            bench.host.refuse(call, u32::MAX);
            bench.ticks(30);
            bench.host.heal();
            bench.ticks(30);
            assert!(!bench.recent().points().is_empty(), "{call:?}");
        }
    }
}
