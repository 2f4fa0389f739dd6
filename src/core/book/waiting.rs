//! A worker's jobs that wait: what the book knows of them, and the record must show.

use super::Book;
use crate::core::queue::Waiting;
use crate::core::record::Record;

impl Book {
    /// A job waits from now on.
    pub fn wait(&mut self, entry: Waiting) {
        self.waiting.insert(entry.stream, entry);
    }

    /// A job waits no more.
    pub fn waits_no_more(&mut self, stream: u32) {
        self.waiting.remove(&stream);
    }

    /// Whether the record's entries of this worker's jobs that wait are those that do.
    pub fn agrees_on_waiting(&self, record: &Record) -> bool {
        let mut own = record.waiting().filter(|entry| entry.worker == self.worker);
        let mut count = 0;
        own.all(|entry| {
            count += 1;
            self.waiting.contains_key(&entry.stream)
        }) && count == self.waiting.len()
    }

    /// Writes which of this worker's jobs wait, where a store was lost, or the record, or the worker's place in it.
    pub fn write_waiting(&self, record: &mut Record) {
        if self.agrees_on_waiting(record) {
            return;
        }
        record.remove_waiting_if(|entry| entry.worker == self.worker);
        self.waiting.values().for_each(|entry| record.add_waiting(*entry));
    }
}
