//! Replies of our own.

use std::time::Duration;

use crate::host::{Fault, Host};

/// Why the filter answers itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No host is eligible.
    NoHost,
    /// Every eligible host is at its limit.
    Full,
    /// Every eligible host is at its limit, and too many wait already.
    QueueFull,
    /// No slot came free in time.
    QueueTimeout,
}

impl Verdict {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::NoHost, Self::Full, Self::QueueFull, Self::QueueTimeout];

    /// The word in headers, bodies, logs and metrics.
    pub fn word(self) -> &'static str {
        match self {
            Verdict::NoHost => "no_host",
            Verdict::Full => "full",
            Verdict::QueueFull => "queue_full",
            Verdict::QueueTimeout => "queue_timeout",
        }
    }

    fn message(self) -> &'static str {
        match self {
            Verdict::NoHost => "no GPU host can take a job now",
            Verdict::Full => "every GPU host is at its limit",
            Verdict::QueueFull => "every GPU host is at its limit, and the queue is full",
            Verdict::QueueTimeout => "no GPU host had a free slot in time",
        }
    }

    /// Answers the request: 503 with `Retry-After` in whole seconds.
    pub fn send(self, host: &impl Host, retry_after: Duration) -> Result<(), Fault> {
        let seconds = retry_after.as_secs_f64().ceil().to_string();
        let headers =
            [("content-type", "application/json"), ("x-plimsoll-verdict", self.word()), ("retry-after", seconds.as_str())];
        host.reply(503, &headers, error(self.word(), self.message()).as_bytes())
    }
}

/// The one-line body of an error.
pub fn error(code: &str, message: &str) -> String {
    let mut body = serde_json::json!({ "error": { "code": code, "message": message } }).to_string();
    body.push('\n');
    body
}
