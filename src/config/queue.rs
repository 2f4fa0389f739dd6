//! What a pool's configuration says of jobs that wait.

use std::time::Duration;

use super::is_header_name;
use super::reader::{Fields, Reader};
use crate::core::queue::Priority;

/// The queue in front of a pool's hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct Queue {
    /// Most jobs that wait, over all workers.
    pub max_length: u32,
    /// How long a job waits at most.
    pub timeout: Duration,
    /// Once the oldest job of a lower priority has waited so long, that priority gets its part of the slots: see [`crate::core::queue`].
    pub ageing: Duration,
}

/// Where a job's priority is written, and what holds where nothing of use is.
#[derive(Clone, Debug, PartialEq)]
pub struct Priorities {
    /// Where.
    pub source: Source,
    /// What holds else.
    pub default: Priority,
}

/// Where something is written that the operator's own stack says of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A request header, lower case.
    Header(String),
    /// A claim that Envoy's `jwt_authn` has verified: the property's path, its parts separated by NUL.
    Claim(String),
}

/// Where Envoy's `jwt_authn` puts what it has verified, in the stream's dynamic metadata.
const VERIFIED: &str = "metadata\0filter_metadata\0envoy.filters.http.jwt_authn";

/// What is allowed as the name of a claim, or of the metadata that it is in.
const NAME: &str = "a name of at least one character, none of them a control character";

impl Queue {
    pub(super) fn read(fields: &mut Fields) -> Self {
        let max_length = fields.integer("max_length", 1..=100_000, 1000) as u32;
        let timeout = fields.integer("timeout_ms", 1..=3_600_000, 30_000);
        let ageing = fields.integer("ageing_ms", 1..=3_600_000, (timeout / 4).max(1));
        if ageing > timeout {
            fields.note(
                "ageing_ms",
                format_args!("{ageing} is more than timeout_ms: {timeout}; lower priorities would never have their turn"),
            );
        }
        Self { max_length, timeout: Duration::from_millis(timeout), ageing: Duration::from_millis(ageing) }
    }
}

impl Priorities {
    pub(super) fn read(fields: &mut Fields, trusts_headers: bool) -> Option<Self> {
        let source = Source::read(fields, trusts_headers, "x-job-priority", "tier");
        let default = Priority::parse(fields.word("default", &Priority::WORDS, &[], Priority::Normal.word()).as_bytes());
        Some(Self { source: source?, default: default? })
    }
}

impl Source {
    pub(super) fn read(fields: &mut Fields, trusts_headers: bool, header_example: &str, claim_example: &str) -> Option<Self> {
        let header = fields.take("header", |value| {
            let allowed = format!("a header name in lower case that does not start with x-plimsoll-, such as {header_example}");
            let is_allowed = |name: &str| is_header_name(name) && !name.starts_with("x-plimsoll-");
            value.text(&allowed).filter(|name| is_allowed(name) || value.refuse(&allowed)).map(str::to_owned)
        });
        let claim = fields.take("jwt_claim", name);
        let metadata = fields.take("metadata", name);
        match (header, claim, metadata) {
            (Some(header), None, None) => {
                if !trusts_headers {
                    let why =
                        "a client could write it; say \"trusted_headers\": true if an earlier part of your own stack sets it";
                    fields.note("header", why);
                }
                Some(Self::Header(header?))
            }
            (None, Some(claim), Some(metadata)) => Some(Self::Claim(format!("{VERIFIED}\0{}\0{}", metadata?, claim?))),
            (Some(_), ..) => {
                fields.note("header", "it is there together with jwt_claim or metadata; a header or a claim is allowed");
                None
            }
            (None, Some(_), None) => {
                fields.note("metadata", "it is missing; say what payload_in_metadata of jwt_authn says, such as \"jwt_payload\"");
                None
            }
            (None, None, Some(_)) => {
                fields.note("jwt_claim", format_args!("it is missing; say which claim, such as \"{claim_example}\""));
                None
            }
            (None, None, None) => {
                let claim = "\"jwt_claim\": \"<claim>\" with \"metadata\": \"jwt_payload\"";
                fields.note("header", format_args!("it is missing; say \"header\": \"{header_example}\", or {claim}"));
                None
            }
        }
    }
}

fn name(value: Reader) -> Option<String> {
    let is_allowed = |name: &str| !name.is_empty() && !name.contains(char::is_control);
    value.text(NAME).filter(|name| is_allowed(name) || value.refuse(NAME)).map(str::to_owned)
}
