//! What it costs the traffic that the status page is looked at: `/status.json` is asked for 50 times a second, as by fifty open pages, of the one worker that also
//! serves the jobs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use support::RunningEnvoy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};

use crate::Effort;
use crate::clients::Latencies;
use crate::figures::{Figure, Figures, Spread};
use crate::hosts;
use crate::measured::Began;
use crate::rounds::progress;
use crate::systems::{self, Chooser, System};

const HOSTS: usize = 64;

/// Questions a second.
const ASKED: u32 = 50;

const QUESTION: &[u8] = b"GET /status.json HTTP/1.1\r\nhost: status\r\n\r\n";

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    NoFilter,
    Ours,
    OursAsked,
}

impl Case {
    const ALL: [Self; 3] = [Self::NoFilter, Self::Ours, Self::OursAsked];

    fn key(self) -> &'static str {
        match self {
            Self::NoFilter => "no_filter",
            Self::Ours => "ours",
            Self::OursAsked => "ours_asked",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::NoFilter => "no filter",
            Self::Ours => "ours",
            Self::OursAsked => "ours, its status asked for 50 times a second",
        }
    }
}

/// What one case showed: a value for each round.
#[derive(Default)]
struct Shown {
    rate: Vec<f64>,
    cpu: Vec<f64>,
    latencies: Vec<Latencies>,
}

/// Measures throughput under saturation, and latency at half of it, with and without the questions.
pub async fn run(effort: Effort, figures: &mut Figures) {
    let hosts = hosts::start(HOSTS).await;
    let mut systems = systems::start(&[(Chooser::RoundRobin, HOSTS), (Chooser::Ours, HOSTS)], &hosts, figures).await;
    let (rounds, requests, length) = effort.pick((15, 6000, Duration::from_millis(500)), (2, 300, Duration::from_millis(50)));
    figures.note(format!(
        "one worker for all: the jobs of 32 HTTP/1.1 clients, and {ASKED} GET /status.json a second; cases take turns, each round in another order, the middle of the rounds counts; latency: Poisson arrivals at half of the throughput of ours"
    ));
    for system in &mut systems {
        system.clients.saturate(effort.pick(10_000, 500)).await;
    }
    let mut shown = Case::ALL.map(|_| Shown::default());
    let mut half = 0.0;
    for part in ["throughput", "latency"] {
        for round in 0..rounds {
            progress(format_args!("{part}: round {} of {rounds}", round + 1));
            for place in 0..Case::ALL.len() {
                let index = (round + place) % Case::ALL.len();
                let (case, shown) = (Case::ALL[index], &mut shown[index]);
                let system = &mut systems[usize::from(case != Case::NoFilter)];
                let asker = (case == Case::OursAsked).then(|| Asker::start(system.envoy.listener("status")));
                match part {
                    "throughput" => throughput(system, requests, shown).await,
                    _ => shown.latencies.push(system.clients.arrive(half, length, round as u64).await),
                }
                if let Some(asker) = asker {
                    asker.end();
                }
            }
        }
        half = Spread::of(&shown[1].rate).median / 2.0;
    }
    progress(format_args!(""));
    tell(&shown, figures);
    let [_, ours] = &systems[..] else { unreachable!("two systems") };
    figures.add(answer(&ours.envoy, effort.pick(9, 2), effort.pick(300, 20)).await);
}

/// What one answer costs, while nothing else is asked.
async fn answer(envoy: &RunningEnvoy, rounds: usize, questions: usize) -> Figure {
    let mut stream = TcpStream::connect(envoy.listener("status")).await.expect("Envoy listens");
    let (mut bytes, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let began = Began::now(envoy);
        for _ in 0..questions {
            ask(&mut stream, &mut bytes).await;
        }
        cpu.push(began.end(envoy).cpu.as_secs_f64() * 1e6 / questions as f64);
    }
    let what = format!("CPU for each answer of /status.json, {HOSTS} hosts, {} KB", bytes.len() / 1000);
    Figure::new("page_answer_cpu_us", what, "µs", &cpu)
}

async fn throughput(System { envoy, clients, .. }: &mut System, requests: usize, shown: &mut Shown) {
    let began = Began::now(envoy);
    clients.saturate(requests).await;
    let measured = began.end(envoy);
    shown.rate.push(requests as f64 / measured.took.as_secs_f64());
    shown.cpu.push(measured.cpu.as_secs_f64() * 1e6 / requests as f64);
}

fn tell([none, ours, asked]: &[Shown; 3], figures: &mut Figures) {
    for (case, shown) in Case::ALL.into_iter().zip([none, ours, asked]) {
        let (key, name) = (case.key(), case.name());
        let figure = |what: &str, words: &str, unit, values: &[f64]| {
            Figure::new(format!("{what}.{key}"), format!("{words}, {name}"), unit, values)
        };
        figures.add(figure("page_requests_per_s", "throughput", "/s", &shown.rate).beside("no filter", &none.rate));
        figures.add(figure("page_cpu_us", "CPU per request, all of Envoy", "µs", &shown.cpu).beside("no filter", &none.cpu));
        for (key, quantile) in [("p50", 0.5), ("p99", 0.99)] {
            let micros = |shown: &Shown| -> Vec<f64> {
                shown.latencies.iter().map(|latencies| latencies.value_at_quantile(quantile) as f64 / 1e3).collect()
            };
            let words = format!("{} latency", key.to_uppercase());
            figures
                .add(figure(&format!("page_latency_us.{key}"), &words, "µs", &micros(shown)).beside("no filter", &micros(none)));
        }
    }
    figures.add(Figure::ratio("page_throughput_ratio", "throughput of ours, asked over not asked", &asked.rate, &ours.rate));
}

/// Asks, evenly, over one connection.
struct Asker {
    task: JoinHandle<()>,
    began: Instant,
    answered: Arc<AtomicU32>,
}

impl Asker {
    fn start(address: SocketAddr) -> Self {
        let answered = Arc::new(AtomicU32::new(0));
        let count = answered.clone();
        let task = tokio::spawn(async move {
            let mut stream = TcpStream::connect(address).await.expect("Envoy listens");
            let mut turns = tokio::time::interval(Duration::from_secs(1) / ASKED);
            turns.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut answer = Vec::new();
            loop {
                turns.tick().await;
                ask(&mut stream, &mut answer).await;
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { task, began: Instant::now(), answered }
    }

    /// Panics if it was not answered as often as it should have asked: then nothing was measured.
    fn end(self) {
        let due = self.began.elapsed().as_secs_f64() * f64::from(ASKED);
        self.task.abort();
        let answered = f64::from(self.answered.load(Ordering::Relaxed));
        assert!(answered >= 0.7 * due - 2.0, "{answered} answers, and {due:.0} were due");
    }
}

async fn ask(stream: &mut TcpStream, answer: &mut Vec<u8>) {
    stream.write_all(QUESTION).await.expect("Envoy keeps the connection");
    answer.clear();
    while !is_whole(answer) {
        let read = stream.read_buf(answer).await.expect("Envoy keeps the connection");
        assert!(
            read > 0 && (answer.len() < 13 || answer.starts_with(b"HTTP/1.1 200 ")),
            "{:.200}",
            String::from_utf8_lossy(answer)
        );
    }
}

fn is_whole(answer: &[u8]) -> bool {
    let Some(end) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return false };
    let head = String::from_utf8_lossy(&answer[..end]);
    let length = head.split("\r\n").find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
    answer.len() >= end + 4 + length.parse::<usize>().expect("a number")
}
