//! The classifier: holds a request at its headers until its body has come, and passes on what the body says of the job.
//!
//! ```text
//! on_http_request_headers   a body that may be JSON, and not too large ─► hold
//! on_http_request_body      no JSON, too large ─► go on       last piece ─► read, set filter state, go on
//! on_http_request_trailers  the body has ended ─► the same
//! on_tick                   nothing has come for a while ─► go on, with nothing said
//! deletion                  the client has gone ─► forget
//! ```
//!
//! What it passes on is filter state, which no client can write; it never refuses, and changes neither headers nor bodies.
//!
//! **Nothing is refused for its size.** Envoy keeps what is held, and answers 413 where that exceeds its limit, which nobody here knows (a listener's, a route's, or
//! the window of an HTTP/2 stream), unless it is told that the body is being streamed: then it stops reading instead. So each piece is held with
//! `StopIterationAndWatermark`, and one copy is kept here, because Envoy shows a filter that streams only the piece that has come. Where Envoy has stopped reading,
//! nothing more comes, and a tick lets the request go on.
//!
//! **Memory.** A VM's never shrinks, and one that runs out ends with all its streams. So what is held is bounded over all requests of the VM, and whoever holds most of it
//! goes on first: slow uploads of many megabytes cost those that send them their class, and nobody else.

mod reading;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use self::reading::{Said, Wanted};
use super::client::digits;
use crate::config::Classify;
use crate::host::{Headers, Host, Level};

/// How often the root ticks while it holds requests.
const TICK: Duration = Duration::from_millis(100);

/// After how many ticks without a piece of its body a request goes on: half a second, which is long within an upload, and short beside a job.
const MOST_QUIET_TICKS: u32 = 5;

/// Most requests that go on in one callback: Envoy resumes each inside the one before (see `worker/queue.rs`).
const MOST_AT_ONCE: usize = 32;

/// Most bytes that are held in one VM: a sixteenth of what Envoy gives it, and four times the largest body.
const MOST_HELD: usize = 64 << 20;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// It goes on to the next filter, with what is held of it.
    GoesOn,
    /// It is held until more of it has come.
    Held,
}

/// A configuration that is being run: what a root and its streams share.
pub struct Plan {
    root: u32,
    wanted: Wanted,
    max_body_bytes: usize,
}

impl Plan {
    /// Prepares a configuration for the root with this context id.
    pub fn new(root: u32, config: &Classify) -> Self {
        Self { root, wanted: Wanted::new(config), max_body_bytes: config.max_body_bytes }
    }

    /// The root's context id.
    pub fn root(&self) -> u32 {
        self.root
    }
}

/// The requests that are held in this VM.
pub struct Desk<H> {
    host: H,
    held: BTreeMap<u32, Held>,
    /// How many bytes of bodies are held.
    bytes: usize,
    /// The roots that tick.
    ticking: BTreeSet<u32>,
    /// A piece of a body has come: so the instance is set up as it must be.
    hears: bool,
    has_warned: bool,
}

/// A request that is held.
struct Held {
    plan: Rc<Plan>,
    body: Vec<u8>,
    /// Something else than white space has come.
    has_begun: bool,
    /// How many ticks have passed since a piece came.
    quiet: u32,
}

impl<H: Host> Desk<H> {
    /// A VM in which no request is held.
    pub fn new(host: H) -> Self {
        Self { host, held: BTreeMap::new(), bytes: 0, ticking: BTreeSet::new(), hears: false, has_warned: false }
    }

    /// `on_http_request_headers`; `ends`: there is no body.
    pub fn headers(&mut self, plan: &Rc<Plan>, stream: u32, ends: bool) -> Course {
        let may_say = |headers: &Headers| may_be_json(headers, plan.max_body_bytes);
        if ends || !self.host.request_headers().is_ok_and(|headers| may_say(&headers)) {
            return Course::GoesOn;
        }
        let held = Held { plan: plan.clone(), body: Vec::new(), has_begun: false, quiet: 0 };
        self.held.insert(stream, held);
        if self.ticking.insert(plan.root) {
            self.host.tick_each(TICK);
        }
        Course::Held
    }

    /// `on_http_request_body`: so many bytes have come; `ends`: they are the last.
    pub fn body(&mut self, stream: u32, size: usize, ends: bool) -> Course {
        let Some(mut held) = self.take(stream) else {
            return Course::GoesOn;
        };
        self.hears = true;
        if size > held.plan.max_body_bytes.saturating_sub(held.body.len()) {
            return Course::GoesOn;
        }
        let piece = if size > 0 { self.host.request_body(size) } else { Some(Vec::new()) };
        // What cannot be read says nothing.
        let Some(piece) = piece.filter(|piece| piece.len() == size) else {
            return Course::GoesOn;
        };
        if !held.has_begun
            && let Some(first) = piece.iter().find(|byte| !byte.is_ascii_whitespace())
        {
            held.has_begun = true;
            if !matches!(first, b'{' | b'[') {
                return Course::GoesOn;
            }
        }
        match held.body.is_empty() {
            true => held.body = piece,
            false => held.body.extend(piece),
        }
        if ends {
            self.pass_on(&held);
            return Course::GoesOn;
        }
        held.quiet = 0;
        self.bytes += held.body.len();
        self.held.insert(stream, held);
        if self.bytes > MOST_HELD { self.make_room(stream) } else { Course::Held }
    }

    /// `on_http_request_trailers`: the body has ended before them. The request goes on.
    pub fn trailers(&mut self, stream: u32) {
        if let Some(held) = self.take(stream) {
            self.pass_on(&held);
        }
    }

    /// A root's tick: what has been quiet for too long goes on.
    pub fn tick(&mut self, root: u32) {
        let (mut quiet, mut is_idle) = (Vec::new(), true);
        for (stream, held) in self.held.iter_mut().filter(|(_, held)| held.plan.root == root) {
            is_idle = false;
            held.quiet += 1;
            if held.quiet > MOST_QUIET_TICKS && quiet.len() < MOST_AT_ONCE {
                quiet.push(*stream);
            }
        }
        for stream in quiet {
            self.let_go(stream);
        }
        if is_idle && self.ticking.remove(&root) {
            self.host.tick_each(Duration::ZERO);
        }
    }

    /// Envoy deletes the stream.
    pub fn done(&mut self, stream: u32) {
        self.take(stream);
    }

    /// Envoy deletes the root.
    pub fn root_ends(&mut self, root: u32) {
        self.ticking.remove(&root);
    }

    fn take(&mut self, stream: u32) -> Option<Held> {
        let held = self.held.remove(&stream)?;
        self.bytes = self.bytes.saturating_sub(held.body.len());
        Some(held)
    }

    /// Lets a request go on from outside its own callbacks, with nothing said. One that Envoy does not let go is tried again.
    fn let_go(&mut self, stream: u32) {
        let Some(held) = self.take(stream) else {
            return;
        };
        if self.host.enter(stream).is_err() {
            return;
        }
        if self.host.resume().is_err() {
            self.bytes += held.body.len();
            self.held.insert(stream, held);
            return;
        }
        if !self.hears && !self.has_warned {
            self.has_warned = true;
            let line = "plimsoll: nothing came of the body of a request that was held: if this goes on, the classifier's instance lacks \
                allow_on_headers_stop_iteration: true";
            self.host.log(Level::Warn, line);
        }
    }

    /// Too much is held: whoever holds most goes on, which is enough, because it holds as much as has just come.
    fn make_room(&mut self, current: u32) -> Course {
        let largest = self.held.iter().max_by_key(|(_, held)| held.body.len()).map(|(stream, _)| *stream);
        match largest.filter(|largest| *largest != current) {
            Some(largest) => {
                self.let_go(largest);
                // Only to leave things as they were found: nothing more is asked about this stream.
                let _ = self.host.enter(current);
                if self.bytes <= MOST_HELD { Course::Held } else { self.drop_current(current) }
            }
            None => self.drop_current(current),
        }
    }

    fn drop_current(&mut self, stream: u32) -> Course {
        self.take(stream);
        Course::GoesOn
    }

    /// Passes on what this body says.
    fn pass_on(&mut self, held: &Held) {
        let Said { class, cost, model, session } = held.plan.wanted.read(&held.body);
        let values = [
            ("plimsoll.class", class),
            ("plimsoll.cost", cost.map(|cost| cost.to_string())),
            ("plimsoll.model", model),
            ("plimsoll.session", session.map(|hash| format!("{hash:016x}"))),
        ];
        for (name, value) in values {
            if let Some(value) = value {
                // Refused, it is as good as missing.
                let _ = self.host.set_filter_state(name, value.as_bytes());
            }
        }
    }
}

/// Whether a request with these headers may have a body that can be read.
fn may_be_json(headers: &Headers, max_body_bytes: usize) -> bool {
    headers.iter().all(|(name, value)| match name {
        b"upgrade" | b"content-encoding" => false,
        b":method" => value != b"CONNECT",
        b"content-type" => !value.to_ascii_lowercase().starts_with(b"application/grpc"),
        b"content-length" => digits(value).is_some_and(|length| length <= max_body_bytes as u64),
        _ => true,
    })
}

#[cfg(test)]
mod tests;
