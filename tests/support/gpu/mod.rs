//! A simulated GPU host: a real server on a real port that keeps exact books and fails on command.
//!
//! ```text
//!   connection ─▶ request ─▶ job: waiting ─▶ running ─▶ answered
//!      │ Door        │ Fault       FIFO, n slots   work / speed
//!      ▼             ▼
//!   refused …     500, hang, reset …
//! ```
//!
//! HTTP/1.1 and h2c on one port. Every request is a job, except `/health`, `/metrics`, `/sim/…` (see [`control`]) and what
//! [`GpuHost::set_page`] makes a page.
//! A job is *in flight* from its headers until its stream ends, for whatever reason; it is *running* while it holds a slot.
//! The books are settled before the last byte of an answer leaves: who has read an answer finds the host's count lowered.
//!
//! Request headers that tests may set: `x-job-class` (names a class of [`Gpu::class`]), `x-sim-ms` (this job's work),
//! `x-sim-chunks` (stream the answer in so many pieces over the service time), `x-sim-bytes` (size of the answer's body).
//! Every answer says who gave it in `x-sim-host`.

mod answer;
mod books;
pub mod control;
mod fault;
mod fleet;
mod line;
mod serve;
mod tells;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

pub use books::{Counts, End, Seen};
pub use fault::{Door, Fault};
pub use fleet::Fleet;

use books::Books;
pub(crate) use line::Port;
use line::Wanted;
use tells::Tells;

/// What a host is to be: its slots, its speed and its work. The default: one slot, speed 1, no work.
#[derive(Clone, Debug)]
pub struct Gpu {
    slots: usize,
    speed: f64,
    work: Duration,
    classes: BTreeMap<String, Duration>,
    chunks: usize,
    keep_alive: Option<Duration>,
    kept: usize,
}

impl Default for Gpu {
    fn default() -> Self {
        Self { slots: 1, speed: 1.0, work: Duration::ZERO, classes: BTreeMap::new(), chunks: 0, keep_alive: None, kept: 10_000 }
    }
}

impl Gpu {
    /// One slot, speed 1, no work.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many jobs run at once; the others wait, first in, first out.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Service time is work divided by this.
    pub fn speed(mut self, speed: f64) -> Self {
        assert!(speed > 0.0, "a host's speed is above 0, not {speed}");
        self.speed = speed;
        self
    }

    /// The work, in milliseconds at speed 1, of a job that says nothing about itself.
    pub fn work_ms(mut self, ms: u64) -> Self {
        self.work = Duration::from_millis(ms);
        self
    }

    /// The work, in milliseconds at speed 1, of jobs whose `x-job-class` is `name`.
    pub fn class(mut self, name: &str, ms: u64) -> Self {
        self.classes.insert(name.into(), Duration::from_millis(ms));
        self
    }

    /// Streams every answer in so many pieces, evenly over its service time, as a server-sent event stream does. 0: whole.
    pub fn chunks(mut self, chunks: usize) -> Self {
        self.chunks = chunks;
        self
    }

    /// Closes a connection that has carried no request for so long (uvicorn: 5 s). Without it: never.
    pub fn keep_alive(mut self, idle: Duration) -> Self {
        self.keep_alive = Some(idle);
        self
    }

    /// How many requests the host remembers for [`GpuHost::requests`]. Benchmarks set 0.
    pub fn remember(mut self, requests: usize) -> Self {
        self.kept = requests;
        self
    }
}

/// What can change while the host runs.
#[derive(Debug)]
struct Controls {
    speed: f64,
    fault: Option<Fault>,
    /// Status of `/health`; `None` never answers.
    health: Option<u16>,
    metrics: String,
    tells: Tells,
}

#[derive(Debug)]
struct Shared {
    address: SocketAddr,
    spec: Gpu,
    slots: Arc<Semaphore>,
    books: Books,
    controls: Mutex<Controls>,
    wanted: watch::Sender<Wanted>,
    /// The door as the accepting task has last made it.
    door: watch::Sender<Door>,
}

/// A running host; clones are the same host. It ends with the tokio runtime that it was started in.
#[derive(Clone, Debug)]
pub struct GpuHost(Arc<Shared>);

impl GpuHost {
    /// Starts a host on a free port of 127.0.0.1.
    pub async fn start(spec: Gpu) -> Self {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), spec).await.expect("a free port")
    }

    /// Starts a host on this address; port 0 is a free one.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn start_at(address: SocketAddr, spec: Gpu) -> std::io::Result<Self> {
        let port = Port::reserve(address)?;
        let host = Self(Arc::new(Shared {
            address: port.address(),
            slots: Arc::new(Semaphore::new(spec.slots)),
            books: Books::new(spec.kept),
            controls: Mutex::new(Controls {
                speed: spec.speed,
                fault: None,
                health: Some(200),
                metrics: String::new(),
                tells: Tells::default(),
            }),
            wanted: watch::Sender::new(Wanted::default()),
            door: watch::Sender::new(Door::Closed),
            spec,
        }));
        tokio::spawn(serve::accept(host.0.clone(), port));
        host.door(Door::Open).await;
        Ok(host)
    }

    /// The host's `ip:port`.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Every number that the host knows about itself, at one moment.
    pub fn counts(&self) -> Counts {
        self.0.books.counts()
    }

    /// Jobs received.
    pub fn jobs(&self) -> u64 {
        self.counts().jobs
    }

    /// Jobs received whose stream has not ended.
    pub fn in_flight(&self) -> u64 {
        self.counts().in_flight
    }

    /// Waits until the host's numbers are so; panics with them after [`crate::DEADLINE`].
    pub async fn until(&self, what: &str, so: impl Fn(&Counts) -> bool) {
        let mut counts = self.0.books.subscribe();
        let waited = tokio::time::timeout(crate::DEADLINE, counts.wait_for(|counts| so(counts))).await;
        if waited.is_err() {
            panic!("host {} not within {:?}: {what}; it is at {:?}", self.address(), crate::DEADLINE, self.counts());
        }
    }

    /// The jobs that the host remembers, by arrival.
    pub fn requests(&self) -> Vec<Seen> {
        self.0.books.seen()
    }

    /// Starts the books afresh; what is in flight stays so.
    pub fn clear_books(&self) {
        self.0.books.clear();
    }

    /// From now on jobs meet this fault.
    pub fn set(&self, fault: Fault) {
        self.0.controls.lock().unwrap().fault = Some(fault);
    }

    /// Answers normally again. Jobs that hang go on hanging, until their clients leave.
    pub fn clear(&self) {
        self.0.controls.lock().unwrap().fault = None;
    }

    /// Changes the speed, for jobs that have not yet started.
    pub fn set_speed(&self, speed: f64) {
        assert!(speed > 0.0, "a host's speed is above 0, not {speed}");
        self.0.controls.lock().unwrap().speed = speed;
    }

    /// What `/health` answers; `None` lets it hang.
    pub fn set_health(&self, status: Option<u16>) {
        self.0.controls.lock().unwrap().health = status;
    }

    /// The text of `/metrics`.
    pub fn set_metrics(&self, text: impl Into<String>) {
        self.0.controls.lock().unwrap().metrics = text.into();
    }

    /// What becomes of new connections; open ones live on. Returns when it holds.
    pub async fn door(&self, door: Door) {
        self.set_door(door);
        let _ = self.0.door.subscribe().wait_for(|now| *now == door).await;
    }

    fn set_door(&self, door: Door) {
        self.0.wanted.send_modify(|wanted| wanted.door = door);
    }

    /// Stands still, like a process under SIGSTOP: the kernel accepts and buffers, nothing is read, written or ended.
    pub fn freeze(&self) {
        self.0.wanted.send_modify(|wanted| wanted.frozen = true);
    }

    /// Goes on where [`GpuHost::freeze`] left it.
    pub fn thaw(&self) {
        self.0.wanted.send_modify(|wanted| wanted.frozen = false);
    }

    /// Dies, like a killed process: every connection is closed, new ones are refused. Returns when it holds.
    pub async fn stop(&self) {
        self.0.wanted.send_modify(|wanted| {
            wanted.life += 1;
            wanted.frozen = false;
        });
        self.door(Door::Closed).await;
        self.until("no connection is open, no job in flight", |counts| counts.open_connections == 0 && counts.in_flight == 0)
            .await;
    }

    /// Comes back on the same port. The books go on.
    pub async fn restart(&self) {
        self.door(Door::Open).await;
    }
}

impl crate::Target for GpuHost {
    fn address(&self) -> SocketAddr {
        self.0.address
    }
}
