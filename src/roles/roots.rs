//! Which configurations are live: those that new requests may still run under.
//!
//! Envoy makes a root for each configuration of an instance of the filter, and deletes it when its last stream has ended, perhaps hours after it
//! was replaced; until then it ticks like any other. It also makes roots for updates that another filter then refuses, and deletes
//! those within milliseconds. So that a removed host is removed at once, and a refused update leaves no trace:
//!
//! ```text
//!            first tick, and no other root of the instance is live
//!          ┌──────────────────────────────────────────────────────┐
//!          │                                                      ▼        a newer root of the instance is live,
//!   made ──┴─► waits ── a stream, or WAIT ticks ───────────────► live ◄─┐  and no stream for REST ticks; or an older
//!                                                                 │     └──────────────┐  one has streams again and
//!                                                                 └────────────────► replaced  this one has none
//!                                                                                   a stream: ───┘
//! ```
//!
//! An instance is told by its `name` in Envoy's configuration: two instances with one name and different hosts for one pool work, but
//! replace each other whenever one of them is idle. (With different pools they do not.)

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::config::Pool;

/// Ticks after which a root is believed to be here to stay, though it has had no stream.
const WAIT: u64 = 3;

/// Ticks without a new stream after which a root that has been replaced is no longer live: a connection of a draining listener may still bring some.
const REST: u64 = 10;

/// The pools of a configuration, by name.
pub type Pools = Vec<(Rc<str>, Rc<Pool>)>;

struct Root {
    instance: Rc<str>,
    pools: Pools,
    /// The worker's tick at which it was first seen.
    made: u64,
    /// The worker's tick of its last stream, if it has had any.
    stream: Option<u64>,
    live: bool,
    has_been_live: bool,
}

/// The roots of one VM.
#[derive(Default)]
pub struct Roots {
    roots: BTreeMap<u32, Root>,
    tick: u64,
}

impl Roots {
    /// Notes that a root was configured; it is not live yet.
    pub fn configured(&mut self, id: u32, instance: &Rc<str>, pools: &Pools) {
        self.known(id, instance, pools);
    }

    /// Whether no root is left: nobody will tick any more.
    pub fn is_empty(&self) -> bool {
        self.roots.is_empty()
    }

    /// Notes a root's tick. Gives whether the set of live roots changed.
    #[must_use]
    pub fn ticked(&mut self, id: u32, instance: &Rc<str>, pools: &Pools) -> bool {
        self.known(id, instance, pools);
        self.update()
    }

    /// Notes that a stream starts under a root. Gives whether the set of live roots changed.
    #[must_use]
    pub fn streams(&mut self, id: u32, instance: &Rc<str>, pools: &Pools) -> bool {
        let tick = self.tick;
        let root = self.known(id, instance, pools);
        root.stream = Some(tick);
        if root.live { false } else { self.update() }
    }

    /// Forgets a root. Gives whether the set of live roots changed.
    #[must_use]
    pub fn ended(&mut self, id: u32) -> bool {
        let counted = self.roots.remove(&id).is_some_and(|root| root.has_been_live);
        self.update() || counted
    }

    /// One tick of the worker has passed.
    pub fn pass(&mut self) {
        self.tick += 1;
    }

    /// The pools that live roots name, the newest first; then those of replaced roots that no other root of the instance names: two instances that
    /// share a name by mistake have their own pools at least.
    pub fn pools(&self) -> Vec<&(Rc<str>, Rc<Pool>)> {
        let newest_first = || self.roots.values().rev();
        let mut pools: Vec<_> = newest_first().filter(|root| root.live).flat_map(|root| &root.pools).collect();
        let mut named: BTreeSet<(&str, &str)> = BTreeSet::new();
        let (live, replaced) =
            (newest_first().filter(|root| root.live), newest_first().filter(|root| !root.live && root.has_been_live));
        for root in live.chain(replaced) {
            for pool in &root.pools {
                let is_new = named.insert((&root.instance, &pool.0));
                pools.extend(Some(pool).filter(|_| is_new && !root.live));
            }
        }
        pools
    }

    /// The pools that the newest live root of each instance names, the newest first.
    pub fn newest(&self) -> impl Iterator<Item = &(Rc<str>, Rc<Pool>)> {
        let mut instances: BTreeSet<&str> = BTreeSet::new();
        let newest_first = self.roots.values().rev().filter(|root| root.live);
        newest_first.filter(move |root| instances.insert(&root.instance)).flat_map(|root| &root.pools)
    }

    /// The newest live root of each instance that has one.
    pub fn newest_of_each(&self) -> impl Iterator<Item = (Rc<str>, u32, Pools)> {
        let live = self.roots.iter().filter(|(_, root)| root.live);
        let newest: BTreeMap<&Rc<str>, (u32, &Root)> = live.map(|(id, root)| (&root.instance, (*id, root))).collect();
        newest.into_iter().map(|(instance, (id, root))| (instance.clone(), id, root.pools.clone()))
    }

    fn known(&mut self, id: u32, instance: &Rc<str>, pools: &Pools) -> &mut Root {
        let made = self.tick;
        match self.roots.entry(id) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Root {
                instance: instance.clone(),
                pools: pools.clone(),
                made,
                stream: None,
                live: false,
                has_been_live: false,
            }),
        }
    }

    fn update(&mut self) -> bool {
        // By instance, from the newest root to the oldest: whether one that is newer has settled in.
        let mut settled: BTreeMap<Rc<str>, bool> = BTreeMap::new();
        let mut changed = false;
        let others_live: BTreeMap<Rc<str>, usize> =
            self.roots.values().filter(|root| root.live).fold(BTreeMap::new(), |mut live, root| {
                *live.entry(root.instance.clone()).or_default() += 1;
                live
            });
        let is_recent = |stream: u64| self.tick - stream < REST;
        // Envoy takes up an older root again when a configuration comes back while its streams still run.
        let mut oldest_streaming: BTreeMap<Rc<str>, u32> = BTreeMap::new();
        for (id, root) in self.roots.iter().filter(|(_, root)| root.stream.is_some_and(is_recent)) {
            oldest_streaming.entry(root.instance.clone()).or_insert(*id);
        }
        for (id, root) in self.roots.iter_mut().rev() {
            let replaced = settled.entry(root.instance.clone()).or_default();
            let is_streaming = root.stream.is_some_and(is_recent);
            let has_fallen_silent = root.stream.is_some() && !is_streaming;
            let is_given_up = has_fallen_silent && oldest_streaming.get(&root.instance).is_some_and(|older| older < id);
            let is_alone = others_live.get(&root.instance).is_none_or(|live| *live == usize::from(root.live));
            let has_settled = root.live || root.stream.is_some() || self.tick - root.made >= WAIT || is_alone;
            let live = if *replaced { is_streaming } else { has_settled && !is_given_up };
            *replaced |= has_settled && !is_given_up;
            changed |= live != root.live;
            root.live = live;
            root.has_been_live |= live;
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct World {
        roots: Roots,
        instance: Rc<str>,
    }

    impl World {
        fn new() -> Self {
            Self { roots: Roots::default(), instance: "plimsoll".into() }
        }

        fn pools(id: u32) -> Pools {
            let config = r#"{"pools": {"gpu": {"hosts": [{"address": "10.0.0.1:1"}], "max_in_flight": ID}}}"#;
            match crate::config::Role::parse(config.replace("ID", &id.to_string()).as_bytes()) {
                Ok(crate::config::Role::Balancer(balancer)) => {
                    balancer.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect()
                }
                other => panic!("{other:?}"),
            }
        }

        fn tick(&mut self, roots: &[u32]) {
            self.roots.pass();
            for id in roots {
                let _ = self.roots.ticked(*id, &self.instance, &Self::pools(*id));
            }
        }

        fn stream(&mut self, id: u32) -> bool {
            self.roots.streams(id, &self.instance, &Self::pools(id))
        }

        fn live(&self) -> Vec<u32> {
            self.roots.pools().into_iter().map(|(_, pool)| pool.hosts[0].max_in_flight).collect()
        }
    }

    #[test]
    fn the_first_root_is_live_at_its_first_tick_or_stream() {
        let mut world = World::new();
        world.tick(&[1]);
        assert_eq!(world.live(), [1]);
        let mut world = World::new();
        assert!(world.stream(1));
        assert!(!world.stream(1));
        assert_eq!(world.live(), [1]);
    }

    #[test]
    fn a_root_that_is_deleted_before_it_settles_leaves_no_trace() {
        let mut world = World::new();
        world.tick(&[1]);
        world.tick(&[1, 2]);
        world.tick(&[1, 2]);
        assert_eq!(world.live(), [1]);
        assert!(!world.roots.ended(2));
        assert_eq!(world.live(), [1]);
    }

    #[test]
    fn a_new_root_replaces_the_old_one_with_its_first_stream() {
        let mut world = World::new();
        world.tick(&[1]);
        assert!(!world.stream(1));
        (0..REST).for_each(|_| world.tick(&[1]));
        assert!(world.stream(2));
        assert_eq!(world.live(), [2]);
    }

    #[test]
    fn without_streams_a_new_root_replaces_the_old_one_after_some_ticks_though_that_still_ticks() {
        let mut world = World::new();
        world.tick(&[1]);
        (0..=WAIT).for_each(|_| world.tick(&[1, 2]));
        assert_eq!(world.live(), [2]);
        let _ = world.roots.ended(1);
        assert_eq!(world.live(), [2]);
    }

    #[test]
    fn a_replaced_root_is_live_as_long_as_it_has_streams() {
        let mut world = World::new();
        world.tick(&[1]);
        (0..=WAIT).for_each(|_| world.tick(&[1, 2]));
        assert!(world.stream(1));
        assert_eq!(world.live(), [2, 1]);
        (0..REST).for_each(|_| world.tick(&[1, 2]));
        assert_eq!(world.live(), [2]);
    }

    #[test]
    fn when_the_newest_root_ends_the_one_before_is_live_again() {
        let mut world = World::new();
        world.tick(&[1]);
        (0..=WAIT).for_each(|_| world.tick(&[1, 2]));
        assert!(world.roots.ended(2));
        assert_eq!(world.live(), [1]);
    }

    #[test]
    fn an_older_root_that_envoy_takes_up_again_replaces_the_newer_one_that_has_fallen_silent() {
        let mut world = World::new();
        world.tick(&[1]);
        world.stream(1);
        world.stream(2);
        (0..=REST).for_each(|_| world.tick(&[1, 2]));
        assert_eq!(world.live(), [2]);
        world.stream(1);
        assert_eq!(world.live(), [1]);
        assert!(world.stream(2));
        assert_eq!(world.live(), [2, 1]);
    }

    #[test]
    fn a_replaced_root_still_names_the_pools_that_no_newer_one_does() {
        let mut world = World::new();
        let other: Pools = World::pools(9).into_iter().map(|(_, pool)| ("llm".into(), pool)).collect();
        assert!(world.roots.streams(9, &world.instance, &other));
        (0..20).for_each(|_| world.tick(&[10]));
        assert_eq!(world.live(), [10, 9]);
        assert!(world.roots.ended(9));
        assert_eq!(world.live(), [10]);
    }

    #[test]
    fn instances_of_other_names_do_not_replace_each_other() {
        let mut world = World::new();
        world.tick(&[1]);
        world.instance = "another".into();
        world.tick(&[2]);
        (0..20).for_each(|_| world.roots.pass());
        assert_eq!(world.live(), [2, 1]);
    }
}
