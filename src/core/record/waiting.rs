//! Those that wait, at the end of the record: see [`crate::core::queue`].

use std::time::Duration;

use super::{Class, Header, Record};
use crate::core::queue::{Turn, Waiting};
use crate::core::time::Instant;

impl Record {
    pub(super) fn waiting_start(&self) -> usize {
        self.classes_start() + self.header.classes as usize * Class::BYTES
    }

    fn turns_start(&self) -> usize {
        self.waiting_start() + self.count_waiting() * Waiting::BYTES
    }

    /// The pasts, each with its generation before it.
    pub(super) fn past_bytes(&self) -> &[[u8; super::PAST_BYTES]] {
        self.bytes.get(self.pasts_start()..self.classes_start()).unwrap_or(&[]).as_chunks().0
    }

    fn waiting_bytes(&self) -> &[[u8; Waiting::BYTES]] {
        self.bytes.get(self.waiting_start()..self.turns_start()).unwrap_or(&[]).as_chunks().0
    }

    /// How many jobs wait.
    pub fn count_waiting(&self) -> usize {
        self.waiting_by_priority().into_iter().fold(0, |sum: usize, waiting| sum.saturating_add(waiting as usize))
    }

    /// The same by priority, as in [`crate::core::queue::Priority::ALL`].
    pub fn waiting_by_priority(&self) -> [u32; 3] {
        let Header { waiting_high, waiting_normal, waiting_low, .. } = self.header;
        [waiting_high, waiting_normal, waiting_low]
    }

    /// Whether anybody waits.
    #[inline]
    pub fn has_waiting(&self) -> bool {
        self.header.waiting_high | self.header.waiting_normal | self.header.waiting_low > 0
    }

    /// The jobs that wait, in the order in which they came.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = Waiting> {
        self.waiting_bytes().iter().map(Waiting::read)
    }

    /// For how long the first of them has waited; zero if nobody waits.
    pub fn longest_wait(&self, now: Instant) -> Duration {
        self.waiting().next().map_or(Duration::ZERO, |first| now.since(first.since()))
    }

    /// Adds a job that waits, behind all that came before it.
    pub fn add_waiting(&mut self, waiting: Waiting) {
        let later = self.waiting_bytes().iter().rev().take_while(|bytes| Waiting::read(bytes).since > waiting.since).count();
        let at = self.turns_start() - later * Waiting::BYTES;
        let mut bytes = [0; Waiting::BYTES];
        waiting.write(&mut bytes);
        self.bytes.splice(at..at, bytes);
        *self.header.waiting_at(waiting.priority()) += 1;
    }

    /// Removes a job that waits. Gives whether it was there.
    pub fn remove_waiting(&mut self, worker: u64, stream: u32) -> bool {
        let place = self.waiting().position(|entry| (entry.worker, entry.stream) == (worker, stream));
        let Some((place, priority)) = place.and_then(|place| Some((place, self.waiting().nth(place)?.priority()))) else {
            return false;
        };
        let at = self.waiting_start() + place * Waiting::BYTES;
        self.bytes.drain(at..at + Waiting::BYTES);
        self.header.waits_no_more(priority);
        self.forget_turns_of_nobody();
        true
    }

    /// Removes these; gives how many.
    pub fn remove_waiting_if(&mut self, is_it: impl Fn(&Waiting) -> bool) -> usize {
        let (mut kept, mut removed) = (Vec::new(), Vec::new());
        for bytes in self.waiting_bytes() {
            let entry = Waiting::read(bytes);
            if is_it(&entry) { removed.push(entry.priority()) } else { kept.extend_from_slice(bytes) }
        }
        if removed.is_empty() {
            return 0;
        }
        let range = self.waiting_start()..self.turns_start();
        self.bytes.splice(range, kept);
        removed.iter().for_each(|priority| self.header.waits_no_more(*priority));
        self.forget_turns_of_nobody();
        removed.len()
    }

    /// When nobody waits any more, nobody is ahead of others.
    fn forget_turns_of_nobody(&mut self) {
        if !self.has_waiting() {
            self.set_turns(&[]);
        }
    }

    /// Which tenants are ahead of others.
    pub fn turns(&self) -> Vec<Turn> {
        let bytes: &[[u8; Turn::BYTES]] = self.bytes.get(self.turns_start()..).unwrap_or(&[]).as_chunks().0;
        bytes.iter().map(Turn::read).collect()
    }

    /// Writes which tenants are ahead of others.
    pub fn set_turns(&mut self, turns: &[Turn]) {
        self.bytes.truncate(self.turns_start());
        for turn in turns {
            let mut bytes = [0; Turn::BYTES];
            turn.write(&mut bytes);
            self.bytes.extend(bytes);
        }
        self.header.turns = turns.len() as u32;
    }
}
