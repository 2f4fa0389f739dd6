//! An open loop: every request has its time, and leaves then, however the ones before it fare.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, Response};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Exp};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use super::client::Call;
use super::connection::{Connection, Failure, Lent, Pool, Protocol};
use super::report::{Outcome, Report, Served};
use crate::Target;

/// When a client leaves without its whole response: HTTP/1.1 by closing the connection, HTTP/2 by resetting the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// So long after it was sent, if the response has not ended by then.
    After(Duration),
    /// When the first piece of the body has come.
    InBody,
}

/// One request of a load.
#[derive(Clone, Debug)]
pub struct Shot {
    /// When it is due, from the start of the run.
    pub at: Duration,
    /// What is asked.
    pub call: Call,
    /// When the client leaves, if it does.
    pub abort: Option<Abort>,
    /// How long the client waits before it reads each piece of the body.
    pub read_pause: Duration,
}

#[derive(Clone)]
enum Connections {
    Fresh,
    Pooled(Protocol, usize),
    Given(Pool),
}

/// A schedule of requests. By default `POST /prompt` with the body `{}`, each on an HTTP/1.1 connection of its own.
///
/// ```ignore
/// let report = Load::burst(20).run(&envoy).await;
/// let report = Load::poisson(200.0, 2_000, 7).pool(16).each(|n, shot| if n % 3 == 0 { shot.abort = Some(Abort::InBody) }).run(&envoy).await;
/// ```
#[derive(Clone)]
pub struct Load {
    shots: Vec<Shot>,
    connections: Connections,
    at_once: usize,
    timeout: Duration,
}

impl Load {
    /// Requests that are due at these times.
    pub fn at(times: impl IntoIterator<Item = Duration>) -> Self {
        let call = Call::new(Method::POST, "/prompt", "{}");
        let shots = times.into_iter().map(|at| Shot { at, call: call.clone(), abort: None, read_pause: Duration::ZERO });
        Self {
            shots: shots.collect(),
            connections: Connections::Fresh,
            at_once: Semaphore::MAX_PERMITS,
            timeout: Duration::from_secs(60),
        }
    }

    /// All at once.
    pub fn burst(requests: usize) -> Self {
        Self::at(std::iter::repeat_n(Duration::ZERO, requests))
    }

    /// Each after the end of the one before. (A closed loop: good for what each one meets, not for latencies under load.)
    pub fn one_by_one(requests: usize) -> Self {
        Self { at_once: 1, ..Self::burst(requests) }
    }

    /// Evenly, so many a second.
    pub fn rate(per_second: f64, requests: usize) -> Self {
        Self::at((0..requests).map(|n| Duration::from_secs_f64(n as f64 / per_second)))
    }

    /// At random and independently, so many a second in the mean. The same seed gives the same times.
    pub fn poisson(per_second: f64, requests: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let gap = Exp::new(per_second).expect("a rate is above 0");
        let mut now = 0.0;
        Self::at((0..requests).map(|_| {
            now += gap.sample(&mut random);
            Duration::from_secs_f64(now)
        }))
    }

    /// As recorded: when, and of which class (`x-job-class`).
    pub fn recorded<'a>(arrivals: impl IntoIterator<Item = (Duration, &'a str)>) -> Self {
        let arrivals: Vec<_> = arrivals.into_iter().collect();
        Self::at(arrivals.iter().map(|(at, _)| *at)).each(|n, shot| shot.call.add_header("x-job-class", arrivals[n].1))
    }

    /// Posts to this path.
    pub fn post(self, path: &str) -> Self {
        self.each(|_, shot| {
            shot.call.method = Method::POST;
            shot.call.path = path.into();
        })
    }

    /// Gets this path, without a body.
    pub fn get(self, path: &str) -> Self {
        self.each(|_, shot| shot.call = Call { headers: shot.call.headers.clone(), ..Call::new(Method::GET, path, "") })
    }

    /// Sends this body.
    pub fn body(self, body: impl Into<Bytes>) -> Self {
        let body = body.into();
        self.each(|_, shot| shot.call.body = body.clone())
    }

    /// Adds a header to every request.
    pub fn header(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.each(|_, shot| shot.call.add_header(name, &value))
    }

    /// Changes requests one by one.
    pub fn each(mut self, mut change: impl FnMut(usize, &mut Shot)) -> Self {
        self.shots.iter_mut().enumerate().for_each(|(n, shot)| change(n, shot));
        self
    }

    /// Over so many HTTP/1.1 keep-alive connections, opened before the start.
    pub fn pool(mut self, connections: usize) -> Self {
        self.connections = Connections::Pooled(Protocol::Http1, connections);
        self
    }

    /// Over so many HTTP/2 connections, opened before the start. On each of them requests leave in their order.
    pub fn http2(mut self, connections: usize) -> Self {
        self.connections = Connections::Pooled(Protocol::Http2, connections);
        self
    }

    /// Over connections that are open already; `run` must name their target.
    pub fn over(mut self, pool: &Pool) -> Self {
        self.connections = Connections::Given(pool.clone());
        self
    }

    /// Clients give up after so long (60 s).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Runs beside the test; the handle gives the report.
    pub fn start(self, target: &impl Target) -> JoinHandle<Report> {
        let target = target.address();
        tokio::spawn(async move { self.run(&target).await })
    }

    /// Runs beside the test, over and over, until it is told to end.
    pub fn repeat(self, target: &impl Target) -> Repeated {
        let target = target.address();
        let go_on = Arc::new(AtomicBool::new(true));
        let running = tokio::spawn({
            let go_on = go_on.clone();
            async move {
                let mut report = self.clone().run(&target).await;
                while go_on.load(Ordering::Relaxed) {
                    report.append(self.clone().run(&target).await);
                }
                report
            }
        });
        Repeated { go_on, running }
    }

    /// Sends everything at its time and waits for the last answer.
    pub async fn run(mut self, target: &impl Target) -> Report {
        let address = target.address();
        let pool = match self.connections {
            Connections::Fresh => None,
            Connections::Pooled(protocol, connections) => Some(Pool::open(address, protocol, connections).await),
            Connections::Given(pool) => Some(pool),
        };
        self.shots.sort_by_key(|shot| shot.at);
        let places = Arc::new(Semaphore::new(self.at_once));
        let start = Instant::now();
        let mut due = pace(start, self.shots);
        let mut running = JoinSet::new();
        let mut served = Vec::new();
        while let Some((number, shot)) = due.recv().await {
            let place = places.clone().acquire_owned().await.expect("places are never closed");
            let pool = pool.clone();
            // Tasks run in any order: where several share a connection, what leaves first is settled here.
            let left = match &pool {
                Some(pool) if pool.protocol() == Protocol::Http2 => Some(leave(&shot, pool.take().await, Protocol::Http2)),
                _ => None,
            };
            running.spawn(async move {
                let class = shot.call.headers.get("x-job-class").and_then(|class| class.to_str().ok()).map(str::to_owned);
                let at = shot.at;
                let sent = start.elapsed();
                let fired = tokio::time::timeout(self.timeout, fire(shot, address, pool, left)).await;
                let (outcome, host) = fired.unwrap_or((Outcome::Failed(Failure::Timeout), None));
                drop(place);
                Served { number, class, due: at, sent, ended: start.elapsed(), outcome, host }
            });
            while let Some(done) = running.try_join_next() {
                served.push(done.expect("a request panicked"));
            }
        }
        while let Some(done) = running.join_next().await {
            served.push(done.expect("a request panicked"));
        }
        Report::new(served)
    }
}

/// A load that runs over and over: see [`Load::repeat`].
pub struct Repeated {
    go_on: Arc<AtomicBool>,
    running: JoinHandle<Report>,
}

impl Repeated {
    /// Lets the run that is under way be the last, and gives the report of all.
    pub async fn end(self) -> Report {
        self.go_on.store(false, Ordering::Relaxed);
        self.running.await.expect("the load ran")
    }
}

/// Hands each shot out at its time. A thread of its own: tokio's timer counts whole milliseconds.
fn pace(start: Instant, shots: Vec<Shot>) -> mpsc::UnboundedReceiver<(usize, Shot)> {
    let (due, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for (number, shot) in shots.into_iter().enumerate() {
            std::thread::sleep((start + shot.at).saturating_duration_since(Instant::now()));
            if due.send((number, shot)).is_err() {
                return;
            }
        }
    });
    receiver
}

/// A request that has left, and the connection that it left on.
type Left = Result<(Lent, Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>), Failure>;

fn leave(shot: &Shot, taken: Result<Lent, Failure>, protocol: Protocol) -> Left {
    let mut lent = taken?;
    let response = Box::pin(lent.connection().send(shot.call.request(protocol)));
    Ok((lent, response))
}

async fn fire(shot: Shot, address: SocketAddr, pool: Option<Pool>, left: Option<Left>) -> (Outcome, Option<SocketAddr>) {
    let left = match (left, pool) {
        (Some(left), _) => left,
        (None, Some(pool)) => leave(&shot, pool.take().await, pool.protocol()),
        (None, None) => leave(&shot, Connection::open(address, Protocol::Http1).await.map(Lent::own), Protocol::Http1),
    };
    let (lent, response) = match left {
        Ok(left) => left,
        Err(failure) => return (Outcome::Failed(failure), None),
    };
    let mut host = None;
    let exchange = exchange(response, &shot, &mut host);
    let outcome = match shot.abort {
        Some(Abort::After(time)) => tokio::time::timeout(time, exchange).await.unwrap_or(Outcome::Aborted),
        _ => exchange.await,
    };
    if let Outcome::Status(_) = outcome {
        lent.give_back().await;
    }
    (outcome, host)
}

async fn exchange(
    response: impl Future<Output = hyper::Result<Response<Incoming>>>,
    shot: &Shot,
    host: &mut Option<SocketAddr>,
) -> Outcome {
    let Ok(response) = response.await else { return Outcome::Failed(Failure::Reset) };
    let status = response.status().as_u16();
    *host = response.headers().get("x-sim-host").and_then(|host| host.to_str().ok()?.parse().ok());
    let mut body = response.into_body();
    loop {
        if !shot.read_pause.is_zero() {
            tokio::time::sleep(shot.read_pause).await;
        }
        match body.frame().await {
            None => return Outcome::Status(status),
            Some(Err(_)) => return Outcome::Failed(Failure::Cut),
            Some(Ok(_)) if shot.abort == Some(Abort::InBody) => return Outcome::Aborted,
            Some(Ok(_)) => {}
        }
    }
}
