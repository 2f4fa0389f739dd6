//! Simulated GPUs that run one job at a time and keep the times of each, and cost next to nothing. (The simulated hosts of the
//! end-to-end tests count whole milliseconds.)
//!
//! A job says in its query how long it runs on a card of speed 1. One that reaches a busy card waits inside it, first in, first out. A card is busy
//! until it has answered: where this program wakes late, a job runs longer, whoever handed it over.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::alarm::Alarm;
use super::report::Meter;

/// What a card saw of a job; times are from the start of the run.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub card: usize,
    pub reached: Duration,
    pub started: Duration,
    pub ended: Duration,
}

/// What the cards saw of a run.
#[derive(Default)]
pub struct Log {
    /// By the job's number; those that have ended.
    pub jobs: Vec<Option<Seen>>,
    /// Jobs that ran a second time.
    pub again: usize,
}

/// A number of cards, each with a port of its own.
#[derive(Clone)]
pub struct Cards {
    pub addresses: Vec<SocketAddr>,
    pub speeds: Vec<f64>,
    books: Arc<Mutex<Books>>,
}

struct Books {
    start: Instant,
    log: Log,
}

impl Cards {
    /// One of each speed; with reports of their load, if so. They end with the process.
    pub async fn start(speeds: &[f64], reports: bool, alarm: &Alarm) -> Self {
        let books = Arc::new(Mutex::new(Books { start: Instant::now(), log: Log::default() }));
        let mut addresses = Vec::new();
        for (number, speed) in speeds.iter().copied().enumerate() {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            addresses.push(listener.local_addr().expect("a bound socket"));
            let meter = reports.then(Arc::default);
            let card = Card { number, speed, runs: Arc::default(), meter, books: books.clone(), alarm: alarm.clone() };
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(card.clone().serve(stream));
                }
            });
        }
        Self { addresses, speeds: speeds.to_vec(), books }
    }

    /// A run of so many jobs starts then.
    pub fn begin(&self, jobs: usize, start: Instant) {
        *self.books.lock().expect("nobody panics with them") = Books { start, log: Log { jobs: vec![None; jobs], again: 0 } };
    }

    /// What they saw of it.
    pub fn end(&self) -> Log {
        std::mem::take(&mut self.books.lock().expect("nobody panics with them").log)
    }
}

#[derive(Clone)]
struct Card {
    number: usize,
    speed: f64,
    /// Held by the job that runs; the others wait for it in their order.
    runs: Arc<tokio::sync::Mutex<()>>,
    meter: Option<Arc<Mutex<Meter>>>,
    books: Arc<Mutex<Books>>,
    alarm: Alarm,
}

impl Card {
    async fn serve(self, mut stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut request = Vec::with_capacity(2048);
        while stream.read_buf(&mut request).await.is_ok_and(|read| read > 0) {
            let answer = if request.starts_with(b"GET ") && request.ends_with(b"\r\n\r\n") {
                self.page()
            } else if request.ends_with(b"\r\n\r\n{}") {
                let job = number(&request, "job").map(|job| job as usize);
                let length = Duration::from_nanos(number(&request, "ns").expect("a job says how long it runs"));
                self.run(job, length.div_f64(self.speed)).await
            } else {
                continue;
            };
            request.clear();
            if stream.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    }

    /// What is on the metrics page, which only a card with reports has.
    fn page(&self) -> String {
        let Some(meter) = &self.meter else { return "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned() };
        let page = meter.lock().expect("nobody panics with it").page();
        format!("HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: {}\r\n\r\n{page}", page.len())
    }

    /// Gives the answer.
    async fn run(&self, job: Option<usize>, length: Duration) -> String {
        let reached = Instant::now();
        self.note(|meter| meter.reached());
        let running = self.runs.lock().await;
        let started = Instant::now();
        self.note(|meter| meter.started());
        self.alarm.at(started + length).await;
        let ended = Instant::now();
        let report = self.note(|meter| {
            meter.ended(started, ended);
            meter.report(ended)
        });
        drop(running);
        self.books.lock().expect("nobody panics with them").write(self.number, job, [reached, started, ended]);
        format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{}content-length: 2\r\n\r\n{{}}",
            report.unwrap_or_default()
        )
    }

    fn note<T>(&self, what: impl FnOnce(&mut Meter) -> T) -> Option<T> {
        Some(what(&mut self.meter.as_ref()?.lock().expect("nobody panics with it")))
    }
}

impl Books {
    fn write(&mut self, card: usize, job: Option<usize>, times: [Instant; 3]) {
        let Some(seen) = job.and_then(|job| self.log.jobs.get_mut(job)) else { return };
        let again = seen.is_some();
        let [reached, started, ended] = times.map(|time| time.saturating_duration_since(self.start));
        *seen = Some(Seen { card, reached, started, ended });
        self.log.again += usize::from(again);
    }
}

/// Of the request line's query.
fn number(request: &[u8], key: &str) -> Option<u64> {
    let line = std::str::from_utf8(request.split(|byte| *byte == b'\r').next()?).ok()?;
    let query = line.split(' ').nth(1)?.split_once('?')?.1;
    query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
}
