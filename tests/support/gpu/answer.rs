//! The body of a host's answer: parts that leave at their time, and the job that ends with the last of them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method};
use tokio::time::{Instant, Sleep, sleep_until};

use super::books::Job;
use super::line::{Busy, Line};

pub(super) struct Part {
    due: Option<Instant>,
    what: What,
}

enum What {
    Data(Bytes),
    Trailers(HeaderMap),
    Reset(Arc<Line>),
}

impl Part {
    pub fn now(data: impl Into<Bytes>) -> Self {
        Self { due: None, what: What::Data(data.into()) }
    }

    pub fn at(due: Instant, data: impl Into<Bytes>) -> Self {
        Self { due: Some(due), what: What::Data(data.into()) }
    }

    pub fn trailers(trailers: HeaderMap) -> Self {
        Self { due: None, what: What::Trailers(trailers) }
    }

    /// Resets the connection, late enough for what went before to have been read.
    pub fn reset(line: &Arc<Line>) -> Self {
        Self { due: Some(Instant::now() + Duration::from_millis(20)), what: What::Reset(line.clone()) }
    }
}

/// Dropped before its end, it leaves its job as aborted.
pub(super) struct Answer {
    parts: VecDeque<Part>,
    timer: Option<Pin<Box<Sleep>>>,
    job: Option<Job>,
    busy: Option<Busy>,
}

impl Answer {
    /// The answer to this request: one without a body ends its job at once.
    pub fn to(request: &Parts, parts: Vec<Part>, job: Job) -> Self {
        if parts.is_empty() || request.method == Method::HEAD {
            job.answered();
            return Self { parts: VecDeque::new(), timer: None, job: None, busy: None };
        }
        Self { parts: parts.into(), timer: None, job: Some(job), busy: None }
    }

    /// An answer that belongs to no job.
    pub fn whole(body: Bytes) -> Self {
        let parts = if body.is_empty() { VecDeque::new() } else { VecDeque::from([Part::now(body)]) };
        Self { parts, timer: None, job: None, busy: None }
    }

    /// Ends with these trailers, too.
    pub fn end_with(&mut self, trailers: HeaderMap) {
        if let Some(Part { what: What::Trailers(own), .. }) = self.parts.back_mut() {
            own.extend(trailers);
        } else if !self.parts.is_empty() {
            self.parts.push_back(Part::trailers(trailers));
        }
    }

    /// Its connection is busy until the answer has gone.
    pub fn hold(&mut self, busy: Busy) {
        self.busy = Some(busy);
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let Some(part) = this.parts.front_mut() else {
            return Poll::Ready(None);
        };
        if let Some(due) = part.due.take() {
            this.timer = Some(Box::pin(sleep_until(due)));
        }
        if let Some(timer) = &mut this.timer {
            ready!(timer.as_mut().poll(cx));
            this.timer = None;
        }
        if let What::Reset(line) = &part.what {
            // Stays in place: what ends here is the connection, not the body.
            line.reset();
            return Poll::Pending;
        }
        let part = self.parts.pop_front().unwrap();
        if self.parts.is_empty()
            && let Some(job) = self.job.take()
        {
            job.answered();
        }
        Poll::Ready(Some(Ok(match part.what {
            What::Data(data) => Frame::data(data),
            What::Trailers(trailers) => Frame::trailers(trailers),
            What::Reset(_) => unreachable!("returned above"),
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.parts.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let mut parts = self.parts.iter();
        match (parts.next(), parts.next()) {
            (None, _) => SizeHint::with_exact(0),
            (Some(Part { due: None, what: What::Data(data) }), None) => SizeHint::with_exact(data.len() as u64),
            _ => SizeHint::default(),
        }
    }
}
