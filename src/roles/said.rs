//! What was said in the log, so that nobody can fill it: of each kind of line one in a while, with the number of those left out.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::core::time::Instant;
use crate::host::{Host, Level};

/// How often lines of most kinds are said.
pub const EACH_SECOND: Duration = Duration::from_secs(1);

/// What was said last, by kind.
#[derive(Default)]
pub struct Said(BTreeMap<&'static str, Last>);

/// The last line of a kind.
struct Last {
    at: Instant,
    /// For how long no other one follows.
    each: Duration,
    level: Level,
    line: String,
    /// How many were left out since.
    left_out: u64,
}

impl Last {
    fn is_recent(&self, now: Instant) -> bool {
        (self.at..self.at + self.each).contains(&now)
    }
}

impl Said {
    /// Whether a line of this kind would be said now.
    pub fn has_turn(&self, host: &impl Host, kind: &'static str) -> bool {
        let now = host.now();
        self.0.get(kind).is_none_or(|last| !last.is_recent(now))
    }

    /// Logs a line of this kind, unless one was within `each`: then it is left out, and counted.
    pub fn say(&mut self, host: &impl Host, each: Duration, (kind, level): (&'static str, Level), line: impl FnOnce() -> String) {
        let now = host.now();
        let mut tail = String::new();
        if let Some(last) = self.0.get_mut(kind) {
            if last.is_recent(now) {
                last.left_out += 1;
                return;
            }
            if last.left_out > 0 {
                tail = format!(" (and {} more like it)", last.left_out);
            }
        }
        let line = line();
        host.log(level, &format!("plimsoll: {line}{tail}"));
        self.0.insert(kind, Last { at: now, each, level, line, left_out: 0 });
    }

    /// Says how many lines were left out, of the kinds that no other line has followed in time. To be called at each tick.
    pub fn say_what_was_left_out(&mut self, host: &impl Host) {
        let now = host.now();
        for last in self.0.values_mut().filter(|last| last.left_out > 0 && !last.is_recent(now)) {
            let more = std::mem::take(&mut last.left_out);
            host.log(last.level, &format!("plimsoll: {} (said before, and {more} more like it since)", last.line));
            last.at = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

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

    #[test]
    fn the_end_of_a_flood_is_told_once_and_counts_as_a_line() {
        let process = Process::new(1);
        let (host, mut said) = (Fake::new(&process), Said::default());
        let told = Cell::new(0);
        let mut told_after = |millis, jobs| {
            process.pass(Duration::from_millis(millis));
            said.say_what_was_left_out(&host);
            (0..jobs).for_each(|job| said.say(&host, EACH_SECOND, ("full", Level::Warn), || format!("job {job}")));
            host.logged().split_off(told.replace(host.logged().len()))
        };
        assert_eq!(told_after(5000, 4), ["plimsoll: job 0"]);
        assert_eq!(told_after(900, 0), [""; 0], "another may yet come");
        assert_eq!(told_after(100, 2), ["plimsoll: job 0 (said before, and 3 more like it since)"]);
        assert_eq!(told_after(1000, 0), ["plimsoll: job 0 (said before, and 2 more like it since)"]);
        assert_eq!(told_after(5000, 0), [""; 0]);
        assert_eq!(told_after(0, 1), ["plimsoll: job 0"]);
    }
}
