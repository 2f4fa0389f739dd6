//! Clients over keep-alive connections, as lean as can be: they share two cores with the Envoy that is measured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Exp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// A job with the smallest JSON body and the headers that a client's library sends unasked.
const REQUEST: &[u8] = b"POST /prompt HTTP/1.1\r\nhost: gpu.example\r\nuser-agent: bench/1\r\naccept: */*\r\n\
    content-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

/// A minute: by then the benchmark should have ended.
const LONGEST: u64 = 60_000_000_000;

/// Latencies in nanoseconds.
pub type Latencies = Histogram<u64>;

/// None yet.
pub fn latencies() -> Latencies {
    Histogram::new_with_bounds(1, LONGEST, 3).expect("bounds in order")
}

/// Open connections to one Envoy.
pub struct Clients {
    connections: Vec<Connection>,
}

struct Connection {
    stream: TcpStream,
    response: Vec<u8>,
}

impl Connection {
    /// Sends the request and waits for the whole response, which must be a host's.
    async fn ask(&mut self) {
        self.stream.write_all(REQUEST).await.expect("Envoy keeps the connection");
        self.response.clear();
        while !self.response.ends_with(b"\r\n\r\n{}") {
            let read = self.stream.read_buf(&mut self.response).await.expect("Envoy keeps the connection");
            let whole = self.response.starts_with(b"HTTP/1.1 200 ") || self.response.len() < 13;
            assert!(read > 0 && whole, "not a host's answer: {}", String::from_utf8_lossy(&self.response));
        }
    }
}

impl Clients {
    /// Opens so many connections.
    pub async fn open(address: SocketAddr, connections: usize) -> Self {
        let mut open = Vec::new();
        for _ in 0..connections {
            let stream = TcpStream::connect(address).await.expect("Envoy listens");
            stream.set_nodelay(true).expect("a socket of our own");
            open.push(Connection { stream, response: Vec::with_capacity(2048) });
        }
        Self { connections: open }
    }

    /// A closed loop: each connection sends its next request when it has the answer to the last, until `requests` have been sent by
    /// all together.
    pub async fn saturate(&mut self, requests: usize) {
        let sent = Arc::new(AtomicUsize::new(0));
        let mut running = JoinSet::new();
        for mut connection in self.connections.drain(..) {
            let sent = sent.clone();
            running.spawn(async move {
                while sent.fetch_add(1, Ordering::Relaxed) < requests {
                    connection.ask().await;
                }
                connection
            });
        }
        while let Some(connection) = running.join_next().await {
            self.connections.push(connection.expect("a client panicked"));
        }
    }

    /// An open loop: requests come at random and independently, `rate` a second in the mean, whatever becomes of the ones before. Gives the
    /// latencies in nanoseconds from when each was due, so that waiting for a free connection counts.
    pub async fn arrive(&mut self, rate: f64, length: Duration, seed: u64) -> Latencies {
        let mut random = StdRng::seed_from_u64(seed);
        let gap = Exp::new(rate).expect("a rate is above 0");
        let mut latencies = latencies();
        let mut running: JoinSet<(Connection, u64)> = JoinSet::new();
        let start = Instant::now();
        let mut due = start;
        loop {
            due += Duration::from_secs_f64(gap.sample(&mut random));
            if due > start + length {
                break;
            }
            // Spins: tokio's timer counts whole milliseconds. Yielding lets sockets be seen to each time.
            while Instant::now() < due {
                tokio::task::yield_now().await;
                while let Some(done) = running.try_join_next() {
                    self.take_back(done.expect("a client panicked"), &mut latencies);
                }
            }
            if self.connections.is_empty() {
                let done = running.join_next().await.expect("all connections are busy");
                self.take_back(done.expect("a client panicked"), &mut latencies);
            }
            let mut connection = self.connections.pop().expect("one has just come back");
            running.spawn(async move {
                connection.ask().await;
                (connection, due.elapsed().as_nanos() as u64)
            });
        }
        while let Some(done) = running.join_next().await {
            self.take_back(done.expect("a client panicked"), &mut latencies);
        }
        latencies
    }

    fn take_back(&mut self, (connection, nanos): (Connection, u64), latencies: &mut Latencies) {
        latencies.saturating_record(nanos);
        self.connections.push(connection);
    }
}
