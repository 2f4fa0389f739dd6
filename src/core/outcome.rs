//! How a job ended for its host.
//!
//! A host is judged only when it is clear that the end was its doing. A client that went or reads slowly, another filter's
//! reply, a bad prompt: all of that is [`Outcome::Neutral`].

/// How a job ended for the host that ran it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The host did the job.
    Success,
    /// The host did not do the job, and that is its own doing.
    Failure,
    /// The end says nothing about the host.
    Neutral,
}

/// What Envoy says of a stream that ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct End<'a> {
    /// `response.code`; absent where no response was sent.
    pub code: Option<u16>,
    /// `response.flags`, see [`flag`].
    pub flags: u64,
    /// `response.code_details`.
    pub details: &'a [u8],
}

/// The bits of `response.flags` that judge (`envoy/stream_info/stream_info.h`).
pub mod flag {
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

impl End<'_> {
    /// The outcome for the host of the last attempt.
    pub fn outcome(&self) -> Outcome {
        if self.flags & (flag::CLIENT_GONE | flag::CLIENT_RESET) != 0 {
            return Outcome::Neutral;
        }
        if self.flags & HOSTS_DOING != 0 {
            return Outcome::Failure;
        }
        if self.flags & flag::UPSTREAM_TIMEOUT != 0 {
            // Without response headers Envoy answers 504 itself. A response that had begun keeps its own code: then the
            // timeout may be a client that reads slowly.
            return if self.code == Some(504) { Outcome::Failure } else { Outcome::Neutral };
        }
        match self.code {
            Some(100..=399) if self.details == VIA_UPSTREAM => Outcome::Success,
            Some(500..=599) if self.details == VIA_UPSTREAM => Outcome::Failure,
            _ => Outcome::Neutral,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(code: u16, flags: u64, details: &str) -> Outcome {
        End { code: Some(code), flags, details: details.as_bytes() }.outcome()
    }

    #[test]
    fn only_the_guilty_are_blamed() {
        use Outcome::{Failure, Neutral, Success};
        let cases = [
            (Success, end(200, 0, "via_upstream")),
            (Success, end(101, 0, "via_upstream")),
            (Success, end(302, 0, "via_upstream")),
            (Failure, end(500, 0, "via_upstream")),
            (Failure, end(503, flag::CONNECTION_FAILURE, "upstream_reset_before_response_started{…}")),
            (Failure, end(503, flag::CONNECTION_TERMINATION, "upstream_reset_before_response_started{…}")),
            (Failure, end(200, flag::UPSTREAM_RESET, "upstream_reset_after_response_started{…}")),
            (Failure, end(502, flag::UPSTREAM_PROTOCOL_ERROR, "upstream_reset_before_response_started{…}")),
            (Failure, end(504, flag::UPSTREAM_TIMEOUT, "response_timeout")),
            // A bad prompt.
            (Neutral, end(400, 0, "via_upstream")),
            (Neutral, end(429, 0, "via_upstream")),
            // A client that reads slowly, one that left, one that left while the host was failing too.
            (Neutral, end(200, flag::UPSTREAM_TIMEOUT, "response_timeout")),
            (Neutral, end(200, flag::CLIENT_GONE, "downstream_remote_disconnect")),
            (Neutral, end(503, flag::CLIENT_RESET | flag::UPSTREAM_RESET, "")),
            // Another filter's reply, a header that Envoy did not like.
            (Neutral, end(429, 0, "local_rate_limited")),
            (Neutral, end(503, 0, "filter_removed_required_request_headers")),
            (Neutral, End { code: None, flags: 0, details: b"" }.outcome()),
        ];
        for (case, (expected, seen)) in cases.iter().enumerate() {
            assert_eq!(expected, seen, "case {case}");
        }
    }
}
