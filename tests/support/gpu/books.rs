//! What a host knows about itself, exactly.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Version};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::Shared;

/// A host's numbers at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Jobs received.
    pub jobs: u64,
    /// Jobs received whose stream has not ended.
    pub in_flight: u64,
    /// Jobs that hold a slot.
    pub running: u64,
    /// Jobs that wait for a slot.
    pub waiting: u64,
    /// The highest that `running` ever was.
    pub max_running: u64,
    /// The highest that `in_flight` ever was.
    pub max_in_flight: u64,
    /// Connections accepted.
    pub connections: u64,
    /// Connections that are open.
    pub open_connections: u64,
    /// Requests for `/health`.
    pub health_checks: u64,
}

/// How a job ended, as its host saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The whole answer was handed to the connection.
    Answered,
    /// The client, or the host itself by a fault, ended the stream before that.
    Aborted,
}

/// One job as the host received it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// `POST`
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// HTTP/1.1 or HTTP/2.
    pub version: Version,
    /// As received; values are bytes.
    pub headers: HeaderMap,
    /// The first 64 KiB of its body, once it has come whole.
    pub body: Bytes,
    /// The length of its whole body, once that has come.
    pub length: usize,
    /// When its headers came.
    pub arrived: Instant,
    /// When it got a slot.
    pub started: Option<Instant>,
    /// When its stream ended, and how.
    pub ended: Option<(Instant, End)>,
}

#[derive(Debug)]
pub(super) struct Books {
    counts: watch::Sender<Counts>,
    log: Mutex<Log>,
}

#[derive(Debug)]
struct Log {
    kept: usize,
    /// The number of the first entry that is still here.
    first: u64,
    seen: VecDeque<Seen>,
}

impl Log {
    fn push(&mut self, seen: Seen) -> u64 {
        if self.seen.len() >= self.kept {
            self.first += 1;
            self.seen.pop_front();
        }
        if self.kept > 0 {
            self.seen.push_back(seen);
            self.first + self.seen.len() as u64 - 1
        } else {
            self.first - 1
        }
    }

    fn entry(&mut self, id: u64) -> Option<&mut Seen> {
        self.seen.get_mut(usize::try_from(id.checked_sub(self.first)?).ok()?)
    }
}

impl Books {
    pub fn new(kept: usize) -> Self {
        Self { counts: watch::Sender::default(), log: Mutex::new(Log { kept, first: 0, seen: VecDeque::new() }) }
    }

    pub fn counts(&self) -> Counts {
        *self.counts.borrow()
    }

    pub fn subscribe(&self) -> watch::Receiver<Counts> {
        self.counts.subscribe()
    }

    pub fn change(&self, change: impl FnOnce(&mut Counts)) {
        self.counts.send_modify(change);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.log.lock().unwrap().seen.iter().cloned().collect()
    }

    pub fn clear(&self) {
        self.change(|counts| {
            counts.jobs = 0;
            counts.max_running = counts.running;
            counts.max_in_flight = counts.in_flight;
            counts.connections = 0;
            counts.health_checks = 0;
        });
        let mut log = self.log.lock().unwrap();
        log.first += log.seen.len() as u64;
        log.seen.clear();
    }
}

#[derive(Debug)]
enum Phase {
    /// Its request is being read, or a fault has it.
    Held,
    Waiting,
    Running {
        _slot: OwnedSemaphorePermit,
    },
}

/// One job's entry in the books: made when its headers come, settled when it is dropped, however that comes about.
#[derive(Debug)]
pub(super) struct Job {
    shared: Arc<Shared>,
    id: u64,
    phase: Phase,
    end: End,
}

impl Job {
    pub fn enter(shared: &Arc<Shared>, request: &Parts) -> Self {
        shared.books.change(|counts| {
            counts.jobs += 1;
            counts.in_flight += 1;
            counts.max_in_flight = counts.max_in_flight.max(counts.in_flight);
        });
        let id = shared.books.log.lock().unwrap().push(Seen {
            method: request.method.clone(),
            path: request.uri.path_and_query().map_or_else(|| request.uri.to_string(), ToString::to_string),
            version: request.version,
            headers: request.headers.clone(),
            body: Bytes::new(),
            length: 0,
            arrived: Instant::now(),
            started: None,
            ended: None,
        });
        Self { shared: shared.clone(), id, phase: Phase::Held, end: End::Aborted }
    }

    /// Notes what came as the request's body: the beginning, and the length of all of it.
    pub fn received(&self, (body, length): (Bytes, usize)) {
        if let Some(seen) = self.shared.books.log.lock().unwrap().entry(self.id) {
            (seen.body, seen.length) = (body, length);
        }
    }

    /// Waits for a slot behind all who came before.
    pub async fn take_slot(&mut self) {
        self.phase = Phase::Waiting;
        self.shared.books.change(|counts| counts.waiting += 1);
        let slot = self.shared.slots.clone().acquire_owned().await.expect("slots are never closed");
        self.phase = Phase::Running { _slot: slot };
        self.shared.books.change(|counts| {
            counts.waiting -= 1;
            counts.running += 1;
            counts.max_running = counts.max_running.max(counts.running);
        });
        if let Some(seen) = self.shared.books.log.lock().unwrap().entry(self.id) {
            seen.started = Some(Instant::now());
        }
    }

    /// Settles the job as answered.
    pub fn answered(mut self) {
        self.end = End::Answered;
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // The slot itself goes with the phase, after the books: no successor is ever counted beside its predecessor.
        self.shared.books.change(|counts| {
            counts.in_flight -= 1;
            match self.phase {
                Phase::Held => {}
                Phase::Waiting => counts.waiting -= 1,
                Phase::Running { .. } => counts.running -= 1,
            }
        });
        if let Some(seen) = self.shared.books.log.lock().unwrap().entry(self.id) {
            seen.ended = Some((Instant::now(), self.end));
        }
    }
}
