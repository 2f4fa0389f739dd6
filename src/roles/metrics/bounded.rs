//! Labels that could grow without end.

use std::collections::BTreeSet;

use crate::host::{Host, IF_ABSENT};
use crate::roles::shared::MOST_CONFLICTS;

/// The values that a label may have in this process, first come, first served: Envoy never forgets a metric. They lie in shared data, a line each, so that all workers
/// agree, and none ever goes.
pub struct Bounded {
    key: &'static str,
    most: usize,
    /// Those that are known here; there may be more.
    known: BTreeSet<String>,
}

impl Bounded {
    /// At most so many, under this key.
    pub fn new(key: &'static str, most: usize) -> Self {
        Self { key, most, known: BTreeSet::new() }
    }

    /// Whether a value, which is one line, is one of those, or becomes one; where Envoy refuses, it is not for now.
    pub fn admits(&mut self, host: &impl Host, value: &str) -> bool {
        if !self.known.contains(value) {
            self.admit(host, [value.to_owned()]);
        }
        self.known.contains(value)
    }

    /// Makes as many of these part of the list as there are places for.
    pub fn admit(&mut self, host: &impl Host, values: impl IntoIterator<Item = String>) {
        let mut fresh: Vec<String> = values.into_iter().filter(|value| !self.known.contains(value)).collect();
        for _ in 0..MOST_CONFLICTS {
            if fresh.is_empty() || self.known.len() >= self.most {
                return;
            }
            let Some(cas) = self.read(host) else { return };
            fresh.retain(|value| !self.known.contains(value));
            fresh.truncate(self.most.saturating_sub(self.known.len()));
            let lines: String = self.known.iter().chain(&fresh).flat_map(|line| [line, "\n"]).collect();
            match host.store(self.key, lines.as_bytes(), cas) {
                Ok(true) => return self.known.extend(fresh),
                Ok(false) => {}
                Err(_) => return,
            }
        }
    }

    /// All that begin so, without the beginning.
    pub fn all(&mut self, host: &impl Host, beginning: &str) -> Vec<String> {
        self.read(host);
        self.known.iter().filter_map(|value| value.strip_prefix(beginning)).map(str::to_owned).collect()
    }

    /// Reads what the others have added. Gives the version to store more with.
    fn read(&mut self, host: &impl Host) -> Option<u32> {
        let shared = host.load(self.key).ok()?;
        let Some(bytes) = shared.value else { return Some(IF_ABSENT) };
        let text = String::from_utf8(bytes).unwrap_or_default();
        self.known.extend(text.lines().filter(|line| !line.is_empty()).take(self.most).map(str::to_owned));
        Some(shared.cas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roles::fake::{Call, Fake, Process};

    fn bounded() -> Bounded {
        Bounded::new("plimsoll.labels.test", 3)
    }

    #[test]
    fn the_first_values_of_the_process_have_the_places_and_keep_them() {
        let process = Process::new(1);
        let (one, other) = (Fake::new(&process), Fake::new(&process));
        let (mut mine, mut theirs) = (bounded(), bounded());
        assert!(mine.admits(&one, "a;1") && theirs.admits(&other, "b;1") && mine.admits(&one, "a;2"));
        assert_eq!([mine.admits(&one, "a;3"), theirs.admits(&other, "a;3")], [false, false]);
        assert_eq!([mine.admits(&one, "b;1"), theirs.admits(&other, "a;2")], [true, true]);
        assert_eq!(
            (theirs.all(&other, "a;"), theirs.all(&other, "b;")),
            (vec!["1".to_owned(), "2".to_owned()], vec!["1".to_owned()])
        );
    }

    #[test]
    fn what_is_not_ours_is_replaced_and_a_refusal_admits_nobody() {
        let host = Fake::new(&Process::new(1));
        host.store("plimsoll.labels.test", b"\xff\xfe", IF_ABSENT).unwrap();
        let mut labels = bounded();
        host.refuse(Call::Store, 1);
        assert!(!labels.admits(&host, "a;1"));
        assert!(labels.admits(&host, "a;1"));
        host.refuse(Call::Load, 1);
        assert!(!labels.admits(&host, "a;2"));
        assert_eq!(bounded().all(&host, ""), ["a;1"]);
    }

    #[test]
    fn a_list_that_is_longer_than_ours_gives_no_more_than_fit() {
        let host = Fake::new(&Process::new(1));
        let lines: String = (0..100_000).map(|line| format!("{line}\n")).collect();
        host.store("plimsoll.labels.test", lines.as_bytes(), IF_ABSENT).unwrap();
        let mut labels = bounded();
        assert!(!labels.admits(&host, "a;1"));
        assert_eq!(labels.all(&host, "").len(), 3);
    }
}
