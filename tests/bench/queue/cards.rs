//! Simulated GPUs that run one job at a time and keep the times of each, and cost next to nothing. (The simulated hosts of the
//! end-to-end tests count whole milliseconds.)
//!
//! A job says in its query how long it runs. One that reaches a busy card waits inside it, first in, first out. A card is busy
//! until it has answered: where this program wakes late, a job runs longer, whoever handed it over.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::alarm::Alarm;

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

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
    books: Arc<Mutex<Books>>,
}

struct Books {
    start: Instant,
    log: Log,
}

impl Cards {
    /// They end with the process.
    pub async fn start(cards: usize, alarm: &Alarm) -> Self {
        let books = Arc::new(Mutex::new(Books { start: Instant::now(), log: Log::default() }));
        let mut addresses = Vec::new();
        for number in 0..cards {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            addresses.push(listener.local_addr().expect("a bound socket"));
            let card = Card { number, runs: Arc::default(), books: books.clone(), alarm: alarm.clone() };
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(card.clone().serve(stream));
                }
            });
        }
        Self { addresses, books }
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
    /// Held by the job that runs; the others wait for it in their order.
    runs: Arc<tokio::sync::Mutex<()>>,
    books: Arc<Mutex<Books>>,
    alarm: Alarm,
}

impl Card {
    async fn serve(self, mut stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut request = Vec::with_capacity(2048);
        while stream.read_buf(&mut request).await.is_ok_and(|read| read > 0) {
            if !request.ends_with(b"\r\n\r\n{}") {
                continue;
            }
            let job = number(&request, "job").map(|job| job as usize);
            let length = Duration::from_nanos(number(&request, "ns").expect("a job says how long it runs"));
            request.clear();
            self.run(job, length).await;
            if stream.write_all(ANSWER).await.is_err() {
                return;
            }
        }
    }

    async fn run(&self, job: Option<usize>, length: Duration) {
        let reached = Instant::now();
        let _running = self.runs.lock().await;
        let started = Instant::now();
        self.alarm.at(started + length).await;
        let ended = Instant::now();
        let mut books = self.books.lock().expect("nobody panics with them");
        let start = books.start;
        let Some(seen) = job.and_then(|job| books.log.jobs.get_mut(job)) else { return };
        let again = seen.is_some();
        let [reached, started, ended] = [reached, started, ended].map(|time| time.saturating_duration_since(start));
        *seen = Some(Seen { card: self.number, reached, started, ended });
        books.log.again += usize::from(again);
    }
}

/// Of the request line's query.
fn number(request: &[u8], key: &str) -> Option<u64> {
    let line = std::str::from_utf8(request.split(|byte| *byte == b'\r').next()?).ok()?;
    let query = line.split(' ').nth(1)?.split_once('?')?.1;
    query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
}
