//! What workers take from each other at one record: native threads that do nothing but choose and settle.
//!
//! In Envoy a request's own work lies between two transactions, and there are as many workers as cores. Here there is nothing between them, and
//! there are far more threads than cores: the most that any number of requests can make of it. Every turn is also a test: what the threads saw
//! and what the record says in the end must be exact.

use std::array;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{RwLock, mpsc};
use std::time::Instant;

use plimsoll::roles::shared::MOST_CONFLICTS;

use crate::Effort;
use crate::figures::{Figure, Figures};
use crate::native::{Process, Vm};
use crate::rounds::progress;

const HOSTS: usize = 64;

/// For each host: so few that a lost count shows at once, as a second job on a host. There are slots for two jobs of each thread all the same.
const SLOTS: u32 = 1;

const THREADS: [usize; 4] = [1, 2, 8, 32];

/// What one turn, or several, showed of so many threads.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// Transactions that were stored, a second; of several turns in the fastest, as others on the machine make them slower and never faster.
    rate: f64,
    choices: usize,
    /// Transactions that were run again, as the record counts them.
    conflicts: u64,
    /// Stores that were refused: the conflicts, and records that a worker had kept and believed to be current.
    refused: u64,
    /// The most of them that one transaction suffered.
    most: u32,
}

impl Seen {
    fn with(self, other: Self) -> Self {
        Self {
            rate: self.rate.max(other.rate),
            choices: self.choices + other.choices,
            conflicts: self.conflicts + other.conflicts,
            refused: self.refused + other.refused,
            most: self.most.max(other.most),
        }
    }
}

/// Lets each number of threads take its turns.
pub fn run(effort: Effort, figures: &mut Figures) {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    figures.note(format!(
        "the record's code, built natively, over one map behind one mutex with Envoy's rules; no Envoy, no Wasm, no hostcalls; {HOSTS} hosts of {SLOTS} slot, one job of each thread at a time"
    ));
    figures.note(format!(
        "{cores} cores: of more threads than that the others wait for a core, so they show whether all stays exact and how often a thread loses, not how the record scales"
    ));
    figures
        .note("one thread alone saves its reads: it stores what it kept of its last transaction, which nobody else has changed");
    figures.note("exact: no host ever had more jobs than slots, and after each turn every count is 0 and every job accounted for (else this would have ended)");
    let (rounds, turns) = effort.pick((9, 3), (1, 2));
    let choices = effort.pick(32_000, 3_200);
    let mut all: [Vec<Seen>; THREADS.len()] = Default::default();
    for round in 0..rounds {
        progress(format_args!("round {} of {rounds}", round + 1));
        let mut this = [Seen::default(); THREADS.len()];
        for turn in 0..turns {
            for place in 0..THREADS.len() {
                // Each time another one begins: whatever drifts, drifts for all.
                let index = (turn + place) % THREADS.len();
                this[index] = this[index].with(take_turn(THREADS[index], choices / THREADS[index]));
            }
        }
        all.iter_mut().zip(this).for_each(|(all, this)| all.push(this));
    }
    progress(format_args!(""));
    let rates = |index: usize| -> Vec<f64> { all[index].iter().map(|seen| seen.rate).collect() };
    for (index, threads) in THREADS.into_iter().enumerate() {
        let name = format!("transactions_per_s.threads_{threads}");
        let figure = Figure::new(name, format!("transactions, {}", name_of(threads)), "/s", &rates(index));
        figures.add(if threads == 1 { figure } else { figure.beside(name_of(1), &rates(0)) });
    }
    type Value = fn(&Seen) -> f64;
    let kinds: [(&str, &str, Value); 3] = [
        ("conflicts_per_choice", "transactions run again for each choice", |seen| seen.conflicts as f64 / seen.choices as f64),
        ("refused_per_choice", "stores refused for each choice", |seen| seen.refused as f64 / seen.choices as f64),
        ("most_refused", "most stores that one transaction lost", |seen| f64::from(seen.most)),
    ];
    for (key, what, value) in kinds {
        for (threads, seen) in THREADS.into_iter().zip(&all).skip(1) {
            let values: Vec<f64> = seen.iter().map(value).collect();
            figures.add(Figure::new(format!("{key}.threads_{threads}"), format!("{what}, {}", name_of(threads)), "", &values));
        }
    }
    figures.note(format!("a transaction gives up after {MOST_CONFLICTS} lost stores; none did"));
}

fn name_of(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

/// Jobs on one host, in a cache line of its own: the threads are to meet in the record only.
#[derive(Default)]
#[repr(align(64))]
struct Running(AtomicU32);

/// Each thread chooses and settles so often, over a record of their own.
fn take_turn(threads: usize, rounds: usize) -> Seen {
    let process = Process::new();
    let running: [Running; HOSTS] = array::from_fn(|_| Running::default());
    // Every thread has joined the record and is warm when the clock starts. A thread that panics drops its sender: nobody waits for it.
    let warm_up = rounds.div_ceil(10);
    let (ready, all_ready) = mpsc::channel();
    let gate = RwLock::new(());
    let work = |ready: mpsc::Sender<()>| {
        let mut vm = Vm::start(&process, HOSTS, SLOTS);
        serve(&mut vm, warm_up, &running);
        ready.send(()).expect("the turn waits for it");
        drop(ready);
        drop(gate.read());
        serve(&mut vm, rounds, &running);
        vm.most_losses()
    };
    let seen = std::thread::scope(|scope| {
        let closed = gate.write().expect("nobody has panicked yet");
        let threads: Vec<_> = (0..threads)
            .map(|_| {
                let (work, ready) = (&work, ready.clone());
                scope.spawn(move || work(ready))
            })
            .collect();
        drop(ready);
        assert_eq!(all_ready.iter().count(), threads.len(), "a thread panicked");
        let (conflicts, refused) = (process.record().header.conflicts, process.refused());
        let (start, choices) = (Instant::now(), threads.len() * rounds);
        drop(closed);
        let most = threads.into_iter().map(|thread| thread.join().expect("a thread panicked")).max();
        Seen {
            rate: 2.0 * choices as f64 / start.elapsed().as_secs_f64(),
            choices,
            conflicts: process.record().header.conflicts - conflicts,
            refused: process.refused() - refused,
            most: most.unwrap_or_default(),
        }
    });
    let record = process.record();
    let sums: (u64, u64) =
        (record.hosts().map(|host| u64::from(host.load())).sum(), record.hosts().map(|host| host.requests).sum());
    assert_eq!(sums.0, 0u64);
    let _: u64 = sums.1; //, "in flight, and jobs placed");
    let header = record.header;
    assert_eq!((header.drift, header.deaths, header.workers as usize), (0, 0, threads), "drift, deaths, workers");
    seen
}

/// Chooses and settles in turn, so often.
fn serve(vm: &mut Vm, rounds: usize, running: &[Running; HOSTS]) -> u64 {
    let mut gave_up = 0;
    for _ in 0..rounds {
        let Some(job) = vm.take() else {
            gave_up += 1;
            continue;
        };
        let jobs = &running[job.host].0;
        let now = jobs.fetch_add(1, SeqCst) + 1;
        assert!(now <= SLOTS, "{now} jobs on a host of {SLOTS} slots");
        jobs.fetch_sub(1, SeqCst);
        gave_up += u64::from(!vm.settle(&job));
    }
    if gave_up > 0 {
        eprintln!("gave up {gave_up} of {rounds}");
        vm.tick();
    }
    gave_up
}
