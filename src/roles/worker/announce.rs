//! What an operator looks for first: which pools this Envoy balances, and how. One line for each configuration of an instance, whichever worker has it live
//! first.
//!
//! Every worker has a configuration of its own, and so have Envoy's canary and updates that Envoy refuses in the end. So the line is due when a configuration goes
//! live (see [`crate::roles::roots`]), which those never do; and a worker says it only if shared data speak of another one than that which has just gone live with
//! it. Those that follow find it said.

use std::rc::Rc;

use super::Worker;
use crate::config::Pool;
use crate::core::hash::Hash;
use crate::host::{Host, IF_ABSENT, Level};
use crate::roles::roots::Pools;
use crate::roles::shared;

/// What stands behind the name in each such line.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Most pools that a line describes.
const MOST: usize = 20;

impl<H: Host> Worker<H> {
    /// Says which configuration of each instance is live, if that is news to this process.
    pub(super) fn announce(&mut self) {
        let live: Vec<(Rc<str>, u32, Pools)> = self.roots.newest_of_each().collect();
        for (instance, root, pools) in live {
            if self.announced.insert(instance.clone(), root) == Some(root) {
                continue;
            }
            // What was written is gone by now, but what is run says the same.
            let digest = Hash::of(format!("{VERSION} {pools:?}").as_bytes());
            if let Some(is_first) = self.claims(&instance, digest) {
                let what = if is_first { "" } else { "another configuration, " };
                self.host.log(Level::Info, &format!("plimsoll {VERSION}: {what}{}", described(&pools)));
            }
        }
    }

    /// Whether this worker is the one to say so, and if so, whether nothing was said before.
    fn claims(&self, instance: &str, digest: u64) -> Option<bool> {
        let (key, digest) = (shared::said_key(instance), digest.to_le_bytes());
        for _ in 0..shared::MOST_CONFLICTS {
            let Ok(said) = self.host.load(&key) else { break };
            if said.value.as_deref() == Some(digest.as_slice()) {
                return None;
            }
            let is_first = said.value.is_none();
            match self.host.store(&key, &digest, if is_first { IF_ABSENT } else { said.cas }) {
                Ok(true) => return Some(is_first),
                Ok(false) => {}
                Err(_) => break,
            }
        }
        // Rather by each worker than by none.
        Some(true)
    }
}

fn described(pools: &Pools) -> String {
    let mut described: Vec<String> = pools.iter().take(MOST).map(|(name, pool)| format!("{name} ({})", facts(pool))).collect();
    if pools.len() > MOST {
        described.push(format!("and {} more", pools.len() - MOST));
    }
    match pools.len() {
        0 => "no pools".to_owned(),
        1 => format!("pool {}", described.join(", ")),
        _ => format!("pools {}", described.join(", ")),
    }
}

fn facts(pool: &Pool) -> String {
    let draining = pool.entries.iter().filter(|host| host.drain == Some(true)).count();
    let written = match (pool.entries.len(), draining) {
        (0, _) => None,
        (1, 0) => Some("1 host".to_owned()),
        (1, _) => Some("1 host, draining".to_owned()),
        (hosts, 0) => Some(format!("{hosts} hosts")),
        (hosts, draining) => Some(format!("{hosts} hosts, {draining} of them draining")),
    };
    let followed = pool.discovery.as_ref().map(|_| "the hosts of Envoy's cluster".to_owned());
    let queue = pool.queue.as_ref().map_or_else(|| "no queue".to_owned(), |queue| format!("queue of {}", queue.max_length));
    [Some(pool.policy.word().to_owned()), written, followed, Some(queue)].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::Role;
    use crate::roles::fake::{Fake, Process};

    struct Bench {
        host: Fake,
        worker: Worker<Fake>,
    }

    impl Bench {
        fn new(process: &Arc<Process>) -> Self {
            let host = Fake::new(process);
            Self { worker: Worker::new(host.clone()), host }
        }

        /// A root with this configuration ticks for half a second: longer than it takes to settle.
        fn runs(&mut self, root: u32, pools: &str) {
            let pools = read(pools);
            (0..5).for_each(|_| self.ticks(root, &pools));
        }

        fn ticks(&mut self, root: u32, pools: &Pools) {
            self.host.process.pass(super::super::TICK);
            self.worker.root_ticks(root, &"plimsoll".into(), pools);
        }

        fn said(&self) -> Vec<String> {
            self.host.logged()
        }
    }

    fn read(pools: &str) -> Pools {
        let json = format!(r#"{{"pools": {{{pools}}}}}"#);
        let Ok(Role::Balancer(config)) = Role::parse(json.as_bytes()) else { panic!("{json}") };
        config.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect()
    }

    const GPU: &str = r#""gpu": {"hosts": [{"address": "10.0.0.1:1"}, {"address": "10.0.0.2:1", "drain": true}], "queue": {}}"#;
    const LLM: &str = r#""llm": {"discovery": {"cluster": "envoy_admin"}, "policy": "least_time"}"#;

    #[test]
    fn the_first_worker_says_what_runs_and_the_others_find_it_said() {
        let process = Process::new(1);
        let mut workers = [Bench::new(&process), Bench::new(&process)];
        workers.iter_mut().for_each(|worker| worker.runs(1, &format!("{GPU}, {LLM}")));
        let line = format!(
            "plimsoll {VERSION}: pools gpu (least_score, 2 hosts, 1 of them draining, queue of 1000), \
             llm (least_time, the hosts of Envoy's cluster, no queue)"
        );
        assert_eq!([workers[0].said(), workers[1].said()], [vec![line], vec![]]);
    }

    #[test]
    fn a_configuration_that_takes_its_place_is_said_once_also_where_others_lag_behind() {
        let process = Process::new(1);
        let mut workers = [Bench::new(&process), Bench::new(&process)];
        workers.iter_mut().for_each(|worker| worker.runs(1, GPU));
        workers[1].runs(2, LLM);
        workers[0].runs(1, GPU);
        workers[0].runs(2, LLM);
        let first = format!("plimsoll {VERSION}: pool gpu (least_score, 2 hosts, 1 of them draining, queue of 1000)");
        let second =
            format!("plimsoll {VERSION}: another configuration, pool llm (least_time, the hosts of Envoy's cluster, no queue)");
        assert_eq!([workers[0].said(), workers[1].said()], [vec![first], vec![second]]);
    }

    #[test]
    fn a_configuration_that_never_goes_live_is_not_said_and_a_vm_that_comes_later_has_nothing_to_say() {
        let process = Process::new(1);
        let mut bench = Bench::new(&process);
        bench.runs(1, GPU);
        // Envoy refuses an update within milliseconds.
        bench.worker.root_made(2, &"plimsoll".into(), &read(LLM));
        bench.ticks(1, &read(GPU));
        bench.worker.root_ends(2);
        bench.runs(1, GPU);
        assert_eq!(bench.said().len(), 1);
        let mut reloaded = Bench::new(&process);
        reloaded.runs(1, GPU);
        assert_eq!(reloaded.said(), Vec::<String>::new());
    }

    #[test]
    fn a_pool_whose_name_would_begin_a_line_of_its_own_does_not() {
        let process = Process::new(1);
        let mut bench = Bench::new(&process);
        bench.runs(1, r#""a\n[error] b": {"hosts": [{"address": "10.0.0.1:1"}]}"#);
        assert!(
            bench.said().iter().all(|line| !line.contains('\n')) && bench.said()[0].contains(r"a\n[error] b"),
            "{:?}",
            bench.said()
        );
    }
}
