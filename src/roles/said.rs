//! What was said in the log, so that nobody can fill it: of each kind of line one in a while, with the number of those left out.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::core::time::Instant;
use crate::host::{Host, Level};

/// How often lines of most kinds are said.
pub const EACH_SECOND: Duration = Duration::from_secs(1);

/// By kind: when a line was said last, and how many were left out since.
#[derive(Default)]
pub struct Said(BTreeMap<&'static str, (Instant, u64)>);

impl Said {
    /// Logs a line of this kind, unless one was within `each`. Gives whether it did.
    pub fn say(
        &mut self,
        host: &impl Host,
        each: Duration,
        (kind, level): (&'static str, Level),
        line: impl FnOnce() -> String,
    ) -> bool {
        let now = host.now();
        let (last, left_out) = self.0.entry(kind).or_default();
        if (*last..*last + each).contains(&now) && *last != Instant::default() {
            *left_out += 1;
            return false;
        }
        let more = std::mem::take(left_out);
        *last = now;
        let tail = if more > 0 { format!(" (and {more} more like it)") } else { String::new() };
        host.log(level, &format!("plimsoll: {}{tail}", line()));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roles::fake::{Fake, Process};

    #[test]
    fn of_a_flood_one_line_a_second_is_said_and_each_kind_has_its_own() {
        let process = Process::new(1);
        let (host, mut said) = (Fake::new(&process), Said::default());
        for _ in 0..3000 {
            process.pass(Duration::from_millis(1));
            said.say(&host, EACH_SECOND, ("full", Level::Warn), || "full".to_owned());
        }
        said.say(&host, EACH_SECOND, ("other", Level::Warn), || "other".to_owned());
        let more = "plimsoll: full (and 999 more like it)";
        assert_eq!(host.logged(), ["plimsoll: full", more, more, "plimsoll: other"]);
    }
}
