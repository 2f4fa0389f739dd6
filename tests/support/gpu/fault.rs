//! What a host does wrong, on command.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::header::{HeaderName, HeaderValue};
use serde::Deserialize;

/// What becomes of new connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Door {
    /// They are accepted and served.
    Open,
    /// Nobody listens: the kernel refuses them.
    #[default]
    Closed,
    /// Somebody listens and never accepts: they are established, and nothing ever comes.
    Ignoring,
    /// They are accepted and reset at once, before a byte is read.
    Resetting,
}

/// What happens to a job instead of work, and to which jobs. By default to all, until [`super::GpuHost::clear`].
///
/// A fault takes no slot: a host that fails does so at once.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Fault {
    #[serde(flatten)]
    pub(super) kind: Kind,
    /// Only the next so many jobs.
    #[serde(default)]
    next: Option<u64>,
    /// Only this share of the jobs, spread evenly: 0.25 is every fourth.
    #[serde(default)]
    fraction: Option<f64>,
    /// How much of a faulty job has come together (1 is one).
    #[serde(skip)]
    due: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case")]
pub(super) enum Kind {
    Status {
        status: u16,
        #[serde(default)]
        headers: BTreeMap<String, String>,
        #[serde(default)]
        after_ms: u64,
    },
    Grpc {
        status: u16,
        #[serde(default)]
        trailers_only: bool,
    },
    Hang,
    Reset,
    ResetInBody,
    RefuseStream,
}

impl Fault {
    fn of(kind: Kind) -> Self {
        Self { kind, next: None, fraction: None, due: 0.0 }
    }

    /// Answers with this status at once.
    pub fn status(status: u16) -> Self {
        Self::of(Kind::Status { status, headers: BTreeMap::new(), after_ms: 0 })
    }

    /// Answers 200 with this `grpc-status` in the trailers.
    pub fn grpc(status: u16) -> Self {
        Self::of(Kind::Grpc { status, trailers_only: false })
    }

    /// Answers 200 with this `grpc-status` in the headers and no body ("trailers-only").
    pub fn grpc_trailers_only(status: u16) -> Self {
        Self::of(Kind::Grpc { status, trailers_only: true })
    }

    /// Reads the request and never answers.
    pub fn hang() -> Self {
        Self::of(Kind::Hang)
    }

    /// Reads the request and resets the connection (TCP RST) before any response.
    pub fn reset() -> Self {
        Self::of(Kind::Reset)
    }

    /// Sends the response's headers and part of its body, and resets the connection (TCP RST).
    pub fn reset_in_body() -> Self {
        Self::of(Kind::ResetInBody)
    }

    /// HTTP/2: RST_STREAM with REFUSED_STREAM. HTTP/1.1: closes the connection.
    pub fn refuse_stream() -> Self {
        Self::of(Kind::RefuseStream)
    }

    /// Adds a response header to [`Fault::status`].
    pub fn header(mut self, name: &str, value: &str) -> Self {
        let Kind::Status { headers, .. } = &mut self.kind else { panic!("only Fault::status has headers") };
        headers.insert(name.into(), value.into());
        self
    }

    /// Lets [`Fault::status`] answer only after so long.
    pub fn after(mut self, delay: Duration) -> Self {
        let Kind::Status { after_ms, .. } = &mut self.kind else { panic!("only Fault::status can be late") };
        *after_ms = u64::try_from(delay.as_millis()).unwrap();
        self
    }

    /// Only the next `jobs` jobs.
    pub fn next(mut self, jobs: u64) -> Self {
        self.next = Some(jobs);
        self
    }

    /// Only this share of the jobs, spread evenly: 0.25 is every fourth.
    pub fn fraction(mut self, fraction: f64) -> Self {
        self.fraction = Some(fraction);
        self
    }

    /// What is wrong with a fault that came as JSON.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        if self.fraction.is_some_and(|fraction| !(0.0..=1.0).contains(&fraction)) {
            return Err("fraction: is within 0..=1");
        }
        if let Kind::Status { status, headers, .. } = &self.kind {
            if !(200..=999).contains(status) {
                return Err("status: is within 200..=999");
            }
            let valid =
                |(name, value): (&String, &String)| HeaderName::try_from(name).is_ok() && HeaderValue::try_from(value).is_ok();
            if !headers.iter().all(valid) {
                return Err("headers: not a header");
            }
        }
        Ok(())
    }

    /// Whether the job that has just come meets the fault.
    pub(super) fn strikes(&mut self) -> bool {
        if let Some(fraction) = self.fraction {
            self.due += fraction;
            // Three thirds are not quite 1 in floating point.
            if self.due < 1.0 - 1e-9 {
                return false;
            }
            self.due -= 1.0;
        }
        match &mut self.next {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        }
    }
}
