//! What a pool's configuration says of jobs that wait.

use std::time::Duration;

use super::reader::Fields;
use super::source::Source;
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
