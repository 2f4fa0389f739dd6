//! How a job ended for its host.
//!
//! A host is judged only when it is clear that the end was its doing. A client that went, reads slowly or had less patience than the job
//! takes, another filter's reply, a bad prompt: all of that is [`Outcome::Neutral`].

use std::time::Duration;

use crate::config::Statuses;

/// How a job ended for the host that ran it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The host did the job.
    Success,
    /// The host did not do the job, and that is its own doing.
    Failure,
    /// The host asks us to wait for so long: it is full, not broken.
    Busy(Duration),
    /// The end says nothing about the host.
    Neutral,
}

impl Outcome {
    /// The word in metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failure => "failure",
            Self::Busy(_) => "busy",
            Self::Neutral => "neutral",
        }
    }
}

/// What Envoy says of a stream that ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct End<'a> {
    /// The response's status; absent where no response was sent.
    pub code: Option<u16>,
    /// Whether the response came when the time was up already: it is Envoy's own.
    pub came_after_timeout: bool,
    /// Whether the request was one that a host need not answer: malformed, or never sent to its end.
    pub is_at_fault: bool,
    /// `response.flags`, see [`flag`].
    pub flags: u64,
    /// `response.code_details`.
    pub details: &'a [u8],
    /// Of a gRPC call: its status; `None` for any other request, or where there is none.
    pub grpc: Option<Grpc>,
    /// How long the host asks us to wait.
    pub retry_after: Option<Duration>,
    /// How long the client wanted to wait, where it said so.
    pub patience: Option<Duration>,
    /// How long the job took; only asked for where the client wanted to wait so long.
    pub elapsed: Duration,
}

/// How a gRPC call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grpc {
    /// `grpc-status`, in the trailers, or in the headers of an answer without messages.
    pub status: u32,
}

/// The bits of `response.flags` that judge (`envoy/stream_info/stream_info.h`).
pub mod flag {
    /// UH: Envoy's cluster has no host that it would use.
    pub const NO_HEALTHY_HOST: u64 = 1 << 1;
    /// UT: the route's timeout or the per-try timeout.
    pub const UPSTREAM_TIMEOUT: u64 = 1 << 2;
    /// UR: the host reset the stream.
    pub const UPSTREAM_RESET: u64 = 1 << 4;
    /// UF: no connection.
    pub const CONNECTION_FAILURE: u64 = 1 << 5;
    /// UC: the connection ended under the job.
    pub const CONNECTION_TERMINATION: u64 = 1 << 6;
    /// DC: the client went away.
    pub const CLIENT_GONE: u64 = 1 << 14;
    /// UPE: the host broke the protocol.
    pub const UPSTREAM_PROTOCOL_ERROR: u64 = 1 << 23;
    /// DR: the client reset its stream.
    pub const CLIENT_RESET: u64 = 1 << 28;
}

/// `response.code_details` of a response that came from a host, whole.
pub const VIA_UPSTREAM: &[u8] = b"via_upstream";

const HOSTS_DOING: u64 =
    flag::UPSTREAM_RESET | flag::CONNECTION_FAILURE | flag::CONNECTION_TERMINATION | flag::UPSTREAM_PROTOCOL_ERROR;

/// How long a host is left alone that does not say it, or that says 0: one that refuses at once would otherwise draw every job.
pub const PAUSE: Duration = Duration::from_secs(1);

/// The longest that a host is left alone whatever it says.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A timer may fire so much early, and a tenth of its time.
const EARLY: Duration = Duration::from_millis(100);

/// The gRPC statuses that judge (`grpc/doc/statuscodes.md`); all others are the client's doing.
mod grpc {
    pub const OK: u32 = 0;
    pub const UNKNOWN: u32 = 2;
    pub const DEADLINE_EXCEEDED: u32 = 4;
    pub const RESOURCE_EXHAUSTED: u32 = 8;
    pub const INTERNAL: u32 = 13;
    pub const UNAVAILABLE: u32 = 14;
    pub const DATA_LOSS: u32 = 15;
}

impl End<'_> {
    /// The outcome for the host of the last attempt; `statuses` are those that the configuration calls failures.
    pub fn outcome(&self, statuses: &Statuses) -> Outcome {
        if self.flags & (flag::CLIENT_GONE | flag::CLIENT_RESET) != 0 {
            return Outcome::Neutral;
        }
        if self.flags & HOSTS_DOING != 0 {
            // Whom no connection could be made to has not seen the request.
            let is_sent = self.flags & flag::CONNECTION_FAILURE == 0;
            return if is_sent && self.is_at_fault { Outcome::Neutral } else { Outcome::Failure };
        }
        if self.flags & flag::UPSTREAM_TIMEOUT != 0 {
            // A response that had begun before: then the timeout may be a client that reads slowly.
            let is_hosts = self.came_after_timeout && !self.was_the_clients_patience();
            return if is_hosts { Outcome::Failure } else { Outcome::Neutral };
        }
        if self.details != VIA_UPSTREAM {
            return Outcome::Neutral;
        }
        match (self.code, self.grpc) {
            (Some(200), Some(grpc)) => self.outcome_of_call(grpc.status),
            (Some(429), _) => self.busy(),
            (Some(503), _) if self.retry_after.is_some() => self.busy(),
            (Some(code), _) if statuses.include(code) => Outcome::Failure,
            (Some(100..=399), _) => Outcome::Success,
            _ => Outcome::Neutral,
        }
    }

    fn outcome_of_call(&self, status: u32) -> Outcome {
        match status {
            grpc::OK => Outcome::Success,
            grpc::RESOURCE_EXHAUSTED => self.busy(),
            // The client's own deadline, which the host was told.
            grpc::DEADLINE_EXCEEDED if self.patience.is_some() => Outcome::Neutral,
            grpc::UNKNOWN | grpc::DEADLINE_EXCEEDED | grpc::INTERNAL | grpc::UNAVAILABLE | grpc::DATA_LOSS => Outcome::Failure,
            _ => Outcome::Neutral,
        }
    }

    fn busy(&self) -> Outcome {
        Outcome::Busy(self.retry_after.unwrap_or(PAUSE).clamp(PAUSE, LONGEST_PAUSE))
    }

    /// Whether the timeout came no sooner than the client had asked for one: with a deadline of its own a client could have any host ejected.
    /// (Envoy's timers count from its loop's last look at the clock, so that on a busy machine they seem to fire early.)
    fn was_the_clients_patience(&self) -> bool {
        self.patience.is_some_and(|patience| self.elapsed + patience / 10 + EARLY >= patience)
    }
}

#[cfg(test)]
mod tests;
