//! Clients that send recorded jobs, each when it is due, however the ones before it fare.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use support::trace::Arrival;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::alarm::Alarm;
use super::cards::Cards;

/// Opened before the first run: so many that a run rarely needs more. The longest idle is used first, so that all workers of a
/// system are.
const CONNECTIONS: usize = 128;

/// Time for this program to be ready for the first job.
const LEAD: Duration = Duration::from_millis(20);

/// By then a job that is not answered will not be.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a client saw of a job; times are from the start of the run.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub number: usize,
    pub sent: Duration,
    pub answered: Duration,
    /// With the whole answer of a card.
    pub well: bool,
}

/// Clients of one system.
pub struct Clients {
    /// Of each of its processes.
    doors: Vec<Door>,
    /// What the header `x-job-class` says of each class; none: the jobs have no such header.
    classes: &'static [&'static str],
}

/// Where a job may enter a system.
struct Door {
    address: SocketAddr,
    idle: VecDeque<Connection>,
}

struct Connection {
    stream: TcpStream,
    response: Vec<u8>,
}

impl Connection {
    async fn open(address: SocketAddr) -> Option<Self> {
        let stream = TcpStream::connect(address).await.ok()?;
        stream.set_nodelay(true).ok()?;
        Some(Self { stream, response: Vec::with_capacity(2048) })
    }

    /// Sends a job and waits for the whole answer of a card, which is this.
    async fn ask(mut self, job: &str, length: Duration, class: Option<&str>) -> Option<Self> {
        let nanos = length.as_nanos();
        let class = class.map(|class| format!("x-job-class: {class}\r\n")).unwrap_or_default();
        let request = format!(
            "POST /prompt?job={job}&ns={nanos} HTTP/1.1\r\nhost: gpu.example\r\nuser-agent: bench/1\r\naccept: */*\r\n\
            {class}content-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}"
        );
        self.stream.write_all(request.as_bytes()).await.ok()?;
        self.response.clear();
        while !self.response.ends_with(b"\r\n\r\n{}") {
            if self.stream.read_buf(&mut self.response).await.ok()? == 0 {
                return None;
            }
            if self.response.len() >= 13 && !self.response.starts_with(b"HTTP/1.1 200 ") {
                return None;
            }
        }
        Some(self)
    }
}

impl Clients {
    /// Opens connections to each of these, over which the jobs are spread at random.
    pub async fn open(addresses: &[SocketAddr], classes: &'static [&'static str]) -> Self {
        let mut doors = Vec::new();
        for address in addresses.iter().copied() {
            let mut idle = VecDeque::new();
            for _ in 0..CONNECTIONS {
                idle.push_back(Connection::open(address).await.expect("the system listens"));
            }
            doors.push(Door { address, idle });
        }
        Self { doors, classes }
    }

    /// Sends so many short jobs, some at a time, that connections are open and code is hot.
    pub async fn warm_up(&mut self, jobs: usize, at_a_time: usize, length: Duration) {
        let mut left = jobs;
        while left > 0 {
            let now = left.min(at_a_time);
            left -= now;
            let mut running = JoinSet::new();
            for _ in 0..now {
                running.spawn(self.take().ask("-", length, None));
            }
            while let Some(done) = running.join_next().await {
                self.doors[0].idle.push_back(done.expect("a client panicked").expect("a job of the warm-up is served"));
            }
        }
    }

    /// How much later than it would be without anything in between a lone job is answered: of so many, one after another.
    pub async fn hops(&mut self, jobs: usize, length: Duration) -> Vec<Duration> {
        let mut hops = Vec::with_capacity(jobs);
        for _ in 0..jobs {
            let connection = self.take();
            let sent = Instant::now();
            let connection = connection.ask("-", length, None).await.expect("a lone job is served");
            hops.push(sent.elapsed().saturating_sub(length));
            self.doors[0].idle.push_back(connection);
        }
        hops
    }

    /// Sends what was recorded, and waits for the last answer.
    pub async fn run(&mut self, arrivals: &[Arrival], cards: &Cards, alarm: &Alarm) -> Vec<Asked> {
        let start = Instant::now() + LEAD;
        cards.begin(arrivals.len(), start);
        let mut all = Vec::with_capacity(arrivals.len());
        let mut running: JoinSet<(Asked, usize, Option<Connection>)> = JoinSet::new();
        let mut random = StdRng::seed_from_u64(arrivals.len() as u64);
        for (number, Arrival { at, length, class }) in arrivals.iter().copied().enumerate() {
            alarm.at(start + at).await;
            while let Some(done) = running.try_join_next() {
                all.push(self.take_back(done.expect("a client panicked")));
            }
            let which = random.random_range(0..self.doors.len());
            let door = &mut self.doors[which];
            let (address, connection, class) = (door.address, door.idle.pop_front(), self.classes.get(class).copied());
            running.spawn(async move {
                let sent = start.elapsed();
                let asking = async {
                    let connection = match connection {
                        Some(connection) => connection,
                        None => Connection::open(address).await?,
                    };
                    connection.ask(&number.to_string(), length, class).await
                };
                let connection = tokio::time::timeout(PATIENCE, asking).await.ok().flatten();
                (Asked { number, sent, answered: start.elapsed(), well: connection.is_some() }, which, connection)
            });
        }
        while let Some(done) = running.join_next().await {
            all.push(self.take_back(done.expect("a client panicked")));
        }
        all
    }

    /// Lone jobs and those of a warm-up are asked of the first.
    fn take(&mut self) -> Connection {
        self.doors[0].idle.pop_front().expect("the warm-up asks less at a time than there are connections")
    }

    fn take_back(&mut self, (asked, door, connection): (Asked, usize, Option<Connection>)) -> Asked {
        self.doors[door].idle.extend(connection);
        asked
    }
}
