//! What workers take from each other at one record: native threads that do little but choose and settle.
//!
//! Back to back, there is nothing between a thread's transactions: the most that any number of requests can make of it. At a request's pace there
//! is as much as Envoy does for one. Every turn is also a test: what the threads saw and what the record says in the end must be exact.

use std::array;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{RwLock, mpsc};
use std::time::{Duration, Instant};

use plimsoll::roles::shared::MOST_CONFLICTS;

use crate::Effort;
use crate::figures::{Figure, Figures};
use crate::native::{Process, Vm};
use crate::rounds::progress;

const HOSTS: usize = 64;

/// For each host: so few that a lost count shows at once, as a second job on a host. There are slots for two jobs of each thread all the same.
const SLOTS: u32 = 1;

const THREADS: [usize; 4] = [1, 2, 8, 32];

/// Half of the CPU time that Envoy takes for a request without a filter (`overhead` measures it): a request has two transactions.
const WORK: Duration = Duration::from_micros(30);

/// What a thread does between two transactions.
#[derive(Clone, Copy)]
struct Pace {
    /// For the names of figures.
    key: &'static str,
    /// For the table.
    name: &'static str,
    /// It spins so long before each transaction.
    work: Duration,
    /// Choices of all threads in a turn, in full and if quick: about a tenth of a second, so that also each of 32 threads has a core more than once.
    choices: (usize, usize),
}

const PACES: [Pace; 2] = [
    Pace { key: "back_to_back", name: "back to back", work: Duration::ZERO, choices: (120_000, 16_000) },
    Pace { key: "paced", name: "30 µs apart", work: WORK, choices: (1_600, 640) },
];

/// What one turn showed.
#[derive(Clone, Copy)]
struct Seen {
    /// Transactions that were stored, a second.
    rate: f64,
    /// Transactions that were run again, as the record counts them, for each choice.
    conflicts: f64,
    /// Stores that were refused, for each choice: the conflicts, and records that a worker had kept and believed to be current.
    refused: f64,
    /// Transactions that gave up.
    gave_up: f64,
}

/// Lets each number of threads take its turns, at either pace.
pub fn run(effort: Effort, figures: &mut Figures) {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    figures.note(format!(
        "the record's code, built natively, over one map behind one mutex with Envoy's rules; no Envoy, no Wasm, no hostcalls; {HOSTS} hosts of {SLOTS} slot, one job of each thread at a time"
    ));
    figures.note(format!(
        "{cores} cores: of more threads than that the others wait for a core, so they show that all stays exact and how often a thread loses, not how the record scales"
    ));
    figures.note(format!(
        "back to back: nothing between two transactions; {} µs apart: the thread spins so long before each, half of what Envoy does for a request",
        WORK.as_micros()
    ));
    figures.note("a thread that is alone saves its reads: it stores what it kept of its last transaction; so whoever won last is the faster one in the next");
    figures.note(format!("a transaction gives up when it has lost {MOST_CONFLICTS} times"));
    figures.note("exact: no host ever had more jobs than slots; after each turn every count was 0, every job accounted for, nobody declared dead");
    for pace in PACES {
        take_turns(pace, effort, figures);
    }
}

fn take_turns(pace: Pace, effort: Effort, figures: &mut Figures) {
    let rounds = effort.pick(9, 1);
    let choices = effort.pick(pace.choices.0, pace.choices.1);
    let mut all: [Vec<Seen>; THREADS.len()] = Default::default();
    for round in 0..rounds {
        progress(format_args!("{}: round {} of {rounds}", pace.name, round + 1));
        for place in 0..THREADS.len() {
            // Each time another one begins: whatever drifts, drifts for all.
            let index = (round + place) % THREADS.len();
            all[index].push(take_turn(THREADS[index], choices / THREADS[index], pace.work));
        }
    }
    progress(format_args!(""));
    let mut add = |key: &str, what: &str, unit, value: fn(&Seen) -> f64| {
        let values = |index: usize| -> Vec<f64> { all[index].iter().map(value).collect() };
        let alone = values(0);
        for (index, threads) in THREADS.into_iter().enumerate() {
            let name = format!("{key}.{}_{threads}", pace.key);
            let what = format!("{what}, {}, {threads} thread{}", pace.name, if threads == 1 { "" } else { "s" });
            let figure = Figure::new(name, what, unit, &values(index));
            // Alone, a thread loses nothing: a speed is all that there is to show.
            match (threads, unit) {
                (1, "/s") => figures.add(figure),
                (1, _) => {}
                (_, "/s") => figures.add(figure.beside("1 thread", &alone)),
                _ => figures.add(figure),
            }
        }
    };
    add("transactions_per_s", "transactions", "/s", |seen| seen.rate);
    add("conflicts_per_choice", "run again for each choice", "", |seen| seen.conflicts);
    add("refused_per_choice", "stores refused for each choice", "", |seen| seen.refused);
    add("gave_up", "transactions that gave up", "", |seen| seen.gave_up);
}

/// Jobs on one host, in a cache line of its own: the threads are to meet in the record only.
#[derive(Default)]
#[repr(align(64))]
struct Running(AtomicU32);

/// Each thread chooses and settles so often, over a record of their own.
fn take_turn(threads: usize, rounds: usize, work: Duration) -> Seen {
    let process = Process::new();
    let running: [Running; HOSTS] = array::from_fn(|_| Running::default());
    let warm_up = rounds.div_ceil(10);
    // Every thread has joined the record and is warm when the clock starts. A thread that panics drops its sender: nobody waits for it.
    let (ready, all_ready) = mpsc::channel();
    let gate = RwLock::new(());
    let thread = |ready: mpsc::Sender<()>| {
        let mut vm = Vm::start(&process, HOSTS, SLOTS);
        serve(&mut vm, warm_up, work, &running);
        ready.send(()).expect("the turn waits for it");
        drop(ready);
        drop(gate.read());
        serve(&mut vm, rounds, work, &running);
        vm.gave_up()
    };
    let seen = std::thread::scope(|scope| {
        let closed = gate.write().expect("nobody has panicked yet");
        let spawn = |ready: mpsc::Sender<()>| scope.spawn(|| thread(ready));
        let all: Vec<_> = (0..threads).map(|_| spawn(ready.clone())).collect();
        drop(ready);
        assert_eq!(all_ready.iter().count(), threads, "a thread panicked");
        let (conflicts, refused) = (process.record().header.conflicts, process.refused());
        let start = Instant::now();
        drop(closed);
        let gave_up: u64 = all.into_iter().map(|thread| thread.join().expect("a thread panicked")).sum();
        let (took, choices) = (start.elapsed(), (threads * rounds) as f64);
        Seen {
            rate: 2.0 * choices / took.as_secs_f64(),
            conflicts: (process.record().header.conflicts - conflicts) as f64 / choices,
            refused: (process.refused() - refused) as f64 / choices,
            gave_up: gave_up as f64,
        }
    });
    let record = process.record();
    assert!(record.hosts().all(|host| host.load() == 0), "no lease is held, and the record counts some");
    let placed: u64 = record.hosts().map(|host| host.requests).sum();
    assert_eq!(placed, (threads * (warm_up + rounds)) as u64, "jobs placed");
    let header = record.header;
    assert_eq!((header.drift, header.deaths, header.workers as usize), (0, 0, threads), "drift, deaths, workers");
    seen
}

/// Chooses and settles in turn, so often, and works so long before each.
fn serve(vm: &mut Vm, rounds: usize, work: Duration, running: &[Running; HOSTS]) {
    for _ in 0..rounds {
        spin(work);
        let job = vm.take();
        let jobs = &running[job.host].0;
        let now = jobs.fetch_add(1, SeqCst) + 1;
        assert!(now <= SLOTS, "{now} jobs on a host of {SLOTS} slot");
        spin(work);
        jobs.fetch_sub(1, SeqCst);
        vm.settle(&job);
    }
}

fn spin(time: Duration) {
    let start = Instant::now();
    while !time.is_zero() && start.elapsed() < time {
        std::hint::spin_loop();
    }
}
