//! A model of one Envoy: several VMs with real workers, plans and streams over one fake host, driven by random events, and
//! after each event compared with what the events say must be true.
//!
//! [`world`] carries the events out, [`truth`], [`choice`] and [`queue`] hold the promises. An event that makes no sense where
//! it comes (the end of a stream in a VM that has none) does nothing, so that any sequence is valid and shrinks well.

mod choice;
mod queue;
mod truth;
mod vm;
mod wanted;
mod world;

use proptest::prelude::*;

use crate::roles::fake::Call;
use wanted::{Entry, Learns, Queue, Wanted};
use world::World;

/// The hosts that configurations choose from.
const ADDRESSES: [&str; 4] = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "[fd00::4]:80"];

/// An address that no configuration names.
const STRANGER: &str = "10.9.9.9:80";

/// The pool that the streams go to.
const POOL: &str = "gpu";

/// What requests say of their priority; the last is no word for one.
const PRIORITIES: [Option<&str>; 5] = [None, Some("high"), Some("Normal"), Some("LOW"), Some("urgent")];

/// What requests say of their tenant.
const TENANTS: [Option<&str>; 3] = [None, Some("a"), Some("b")];

/// What requests say of their class and their cost, by the same places; the last is no cost.
const CLASSES: [Option<&str>; 5] = [None, Some("draft"), Some("film"), Some("draft"), Some("other")];
const COSTS: [Option<&str>; 3] = [None, Some("2.5"), Some("-1")];

/// What a request says of itself, by its place among [`PRIORITIES`] and [`TENANTS`].
#[derive(Clone, Copy, Debug)]
struct Says {
    is_job: bool,
    priority: usize,
    tenant: usize,
}

/// What Envoy says of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Healthy,
    Degraded,
    Draining,
    Unhealthy,
}

/// What Envoy's cluster has.
type Cluster = [Option<Said>; ADDRESSES.len()];

/// How a stream ends.
#[derive(Clone, Copy, Debug)]
enum How {
    Success,
    Failure,
    Abort,
    BadPrompt,
    TooMany,
}

/// What becomes of the pool's record.
#[derive(Clone, Debug)]
enum Loss {
    Gone,
    Garbage(Vec<u8>),
    AnotherVersion,
    Truncated,
    /// It is there, with another version number under the same bytes: somebody stored what was there before.
    Touched,
}

/// One event. Numbers of VMs, streams and addresses are taken modulo how many there are.
#[derive(Clone, Debug)]
enum Event {
    /// A request comes; an old one over a connection that still has the configuration before.
    Request { vm: usize, says: Says, old: bool },
    /// Envoy's next attempt goes to one of the named hosts, to any other, or to a stranger.
    Attempt { vm: usize, stream: usize, to: usize },
    /// The response's headers come.
    Answer { vm: usize, stream: usize },
    /// A stream ends.
    End { vm: usize, stream: usize, how: How, millis: u64, tells: u32 },
    /// A stream that waits ends, or another filter answers it.
    Leave { vm: usize, stream: usize, is_answered: bool },
    /// A VM is told that its bell was rung, if it was.
    Hear { vm: usize },
    /// That news is lost.
    Deafen { vm: usize },
    /// One VM ticks; quickly: only those of its roots that have asked for it, and sooner.
    Tick { vm: usize, is_quick: bool },
    /// All VMs tick so many times, but for one that sleeps, if any.
    Rounds { rounds: u32, asleep: Option<usize>, is_quick: bool },
    /// A new configuration is there for the VMs to take.
    Publish(Wanted),
    /// A VM takes the newest configuration.
    Adopt { vm: usize },
    /// Envoy deletes those old roots of a VM that have no streams.
    Delete { vm: usize },
    /// A VM traps; a new one takes its place.
    Die { vm: usize },
    /// Envoy's cluster has other hosts.
    Cluster(Cluster),
    /// The next looks of a VM at Envoy's cluster find something else.
    Garble { vm: usize, times: u32 },
    /// The next hostcalls of a VM are refused.
    Refuse { vm: usize, call: Call, times: u32 },
    /// The record is lost.
    Lose(Loss),
    /// The clock steps.
    Step { back: bool, seconds: u64 },
    /// This happens between a load and a store of the VM.
    Meanwhile { vm: usize, event: Box<Event> },
}

fn entry() -> impl Strategy<Value = Entry> {
    let weight = prop_oneof![Just(1.0f32), Just(0.01), Just(2.0), Just(1000.0)];
    (weight, 1..4u32, prop::bool::weighted(0.15)).prop_map(|(weight, slots, drain)| Entry { weight, slots, drain })
}

fn wanted() -> impl Strategy<Value = Wanted> {
    let hosts = prop::array::uniform4(prop::option::weighted(0.7, entry()))
        .prop_map(|hosts| Some(hosts).filter(|hosts| hosts.iter().any(Option::is_some)));
    let rest = (0..3usize, any::<bool>(), prop::bool::weighted(0.4), prop::option::weighted(0.7, queue()), learns());
    (hosts, rest).prop_map(|(hosts, (alternates, fallback, discovers, queue, learns))| Wanted {
        hosts,
        discovers,
        alternates,
        fallback,
        queue,
        learns,
    })
}

fn learns() -> impl Strategy<Value = Learns> {
    let policy = prop_oneof![2 => Just(0usize), 4 => Just(1), 1 => Just(2)];
    (policy, any::<bool>(), prop::bool::weighted(0.3)).prop_map(|(policy, has_classes, tells)| Learns {
        policy,
        has_classes,
        tells,
    })
}

fn queue() -> impl Strategy<Value = Queue> {
    let timeout_ms = prop_oneof![Just(300u64), Just(1000), Just(10_000), Just(30_000)];
    let ageing_ms = prop_oneof![Just(50u64), Just(1000), Just(10_000)];
    (1..7usize, timeout_ms, ageing_ms, any::<bool>(), any::<bool>()).prop_map(
        |(max_length, timeout_ms, ageing_ms, has_priorities, has_tenants)| {
            let ageing_ms = ageing_ms.min(timeout_ms);
            Queue { max_length, timeout_ms, ageing_ms, has_priorities, has_tenants }
        },
    )
}

fn cluster() -> impl Strategy<Value = Cluster> {
    let said = prop_oneof![
        5 => Just(Said::Healthy),
        1 => Just(Said::Degraded),
        1 => Just(Said::Draining),
        1 => Just(Said::Unhealthy),
    ];
    prop::array::uniform4(prop::option::weighted(0.7, said))
}

fn event() -> impl Strategy<Value = Event> {
    let how = prop_oneof![
        3 => Just(How::Success),
        6 => Just(How::Failure),
        2 => Just(How::Abort),
        1 => Just(How::BadPrompt),
        1 => Just(How::TooMany),
    ];
    let call = prop_oneof![
        3 => Just(Call::Load),
        3 => Just(Call::Store),
        1 => Just(Call::Header),
        1 => Just(Call::Reply),
        1 => Just(Call::Resume),
        1 => Just(Call::Bell),
    ];
    let loss = prop_oneof![
        1 => Just(Loss::Gone),
        1 => prop::collection::vec(any::<u8>(), 0..200).prop_map(Loss::Garbage),
        1 => Just(Loss::AnotherVersion),
        1 => Just(Loss::Truncated),
        4 => Just(Loss::Touched),
    ];
    let vm = || 0..4usize;
    let told = prop_oneof![3 => 0..4u32, 1 => Just(1_000_000)];
    let stream = || 0..8usize;
    let rounds = prop_oneof![3 => 1..4u32, 1 => 9..14u32, 2 => 78..100u32].prop_map(|rounds| (rounds, false));
    let rounds = prop_oneof![3 => rounds, 1 => (1..10u32).prop_map(|rounds| (rounds, true))];
    let says = (prop::bool::weighted(0.9), 0..PRIORITIES.len(), 0..TENANTS.len()).prop_map(|(is_job, priority, tenant)| Says {
        is_job,
        priority,
        tenant,
    });
    let simple = prop_oneof![
        14 => (vm(), says, prop::bool::weighted(0.1)).prop_map(|(vm, says, old)| Event::Request { vm, says, old }),
        8 => (vm(), stream(), 0..9usize).prop_map(|(vm, stream, to)| Event::Attempt { vm, stream, to }),
        2 => (vm(), stream()).prop_map(|(vm, stream)| Event::Answer { vm, stream }),
        7 => (vm(), stream(), how, 0..20_000u64, told).prop_map(|(vm, stream, how, millis, tells)| Event::End { vm, stream, how, millis, tells }),
        2 => (vm(), stream(), any::<bool>()).prop_map(|(vm, stream, is_answered)| Event::Leave { vm, stream, is_answered }),
        3 => vm().prop_map(|vm| Event::Hear { vm }),
        1 => vm().prop_map(|vm| Event::Deafen { vm }),
        6 => (vm(), prop::bool::weighted(0.3)).prop_map(|(vm, is_quick)| Event::Tick { vm, is_quick }),
        5 => (rounds, prop::option::weighted(0.7, vm()))
            .prop_map(|((rounds, is_quick), asleep)| Event::Rounds { rounds, asleep, is_quick }),
        2 => wanted().prop_map(Event::Publish),
        4 => vm().prop_map(|vm| Event::Adopt { vm }),
        1 => vm().prop_map(|vm| Event::Delete { vm }),
        1 => vm().prop_map(|vm| Event::Die { vm }),
        2 => (vm(), call, 1..5u32).prop_map(|(vm, call, times)| Event::Refuse { vm, call, times }),
        1 => loss.prop_map(Event::Lose),
        3 => cluster().prop_map(Event::Cluster),
        1 => (vm(), 1..4u32).prop_map(|(vm, times)| Event::Garble { vm, times }),
        1 => (any::<bool>(), prop_oneof![Just(1u64), Just(3600)]).prop_map(|(back, seconds)| Event::Step { back, seconds }),
    ]
    .boxed();
    let meanwhile = (vm(), simple.clone()).prop_map(|(vm, event)| Event::Meanwhile { vm, event: Box::new(event) });
    prop_oneof![5 => simple, 1 => meanwhile]
}

/// A sound pool of so many hosts.
fn first_configuration(hosts: usize, slots: u32, discovers: bool, queue: Option<Queue>, learns: Learns) -> Wanted {
    let entry = Entry { weight: 1.0, slots, drain: false };
    let hosts = std::array::from_fn(|host| Some(entry).filter(|_| host < hosts));
    Wanted { hosts: Some(hosts), discovers, alternates: 2, fallback: false, queue, learns }
}

proptest! {
    /// What it checks after each event: [`World::check`]; at the end: [`World::quiet`].
    #[test]
    fn the_promises_hold_after_any_sequence_of_events(
        vms in 1..5usize,
        seed in any::<u64>(),
        (hosts, slots, discovers) in (1..=ADDRESSES.len(), 1..3u32, prop::bool::weighted(0.3)),
        (queue, learns) in (prop::option::weighted(0.7, queue()), learns()),
        is_prompt in any::<bool>(),
        crowd in 0..16usize,
        events in prop::collection::vec(event(), 1..80),
    ) {
        let world = World::new(vms, seed, is_prompt, first_configuration(hosts, slots, discovers, queue, learns));
        let jobs = (0..crowd).map(|job| {
            let says = Says { is_job: true, priority: job % PRIORITIES.len(), tenant: job % TENANTS.len() };
            Event::Request { vm: job, says, old: false }
        });
        for event in jobs.chain(events) {
            world.run(&event);
        }
        world.quiet();
    }
}
