//! What a pool knows beyond counts, behind the hosts' entries, where a policy or telemetry asks for it: one [`Insight`] for each host, and the [`Class`]es.

use super::{Class, Host, Insight, Record};

impl Record {
    /// Whether hosts have insights.
    #[inline]
    pub fn has_insights(&self) -> bool {
        self.header.insights != 0
    }

    pub(super) fn insights_start(&self) -> usize {
        self.hosts_start() + self.header.hosts as usize * Host::BASE
    }

    fn insight_range(&self, slot: u32) -> std::ops::Range<usize> {
        let start = self.insights_start() + slot as usize * Insight::BYTES;
        start..start + Insight::BYTES
    }

    /// The insights by slot; empty if there are none.
    #[inline]
    pub fn insight_bytes(&self) -> &[[u8; Insight::BYTES]] {
        self.bytes.get(self.insights_start()..self.pasts_start()).unwrap_or(&[]).as_chunks().0
    }

    /// What is known of the host in this slot.
    #[inline]
    pub fn insight(&self, slot: u32) -> Insight {
        self.insight_bytes().get(slot as usize).map(Insight::read).unwrap_or_default()
    }

    /// Changes what is known of the host in this slot, where anything is.
    pub fn with_insight(&mut self, slot: u32, change: impl FnOnce(&mut Insight)) {
        if slot >= self.header.hosts || !self.has_insights() {
            return;
        }
        let mut insight = self.insight(slot);
        change(&mut insight);
        let range = self.insight_range(slot);
        if let Some(bytes) = self.bytes.get_mut(range).and_then(|bytes| bytes.first_chunk_mut()) {
            insight.write(bytes);
        }
    }

    /// Makes room for insights, or forgets them all.
    pub fn keep_insights(&mut self, wanted: bool) {
        if wanted == self.has_insights() {
            return;
        }
        let (start, end) = (self.insights_start(), self.pasts_start());
        if wanted {
            self.bytes.splice(start..start, vec![0; self.header.hosts as usize * Insight::BYTES]);
        } else {
            // From behind: what lies before stays where it is.
            let classes = self.classes_start()..self.waiting_start();
            self.bytes.drain(classes);
            self.header.classes = 0;
            self.bytes.drain(start..end);
        }
        self.header.insights = wanted.into();
    }

    pub(super) fn add_insight(&mut self) {
        if self.has_insights() {
            // The host has been added already.
            let at = self.pasts_start() - Insight::BYTES;
            self.bytes.splice(at..at, [0; Insight::BYTES]);
        }
    }

    pub(super) fn drop_insight(&mut self, slot: u32) {
        if self.has_insights() {
            let range = self.insight_range(slot);
            self.bytes.drain(range);
        }
    }

    pub(super) fn classes_start(&self) -> usize {
        self.pasts_start() + self.header.pasts as usize * super::PAST_BYTES
    }

    /// The classes.
    pub fn classes(&self) -> impl ExactSizeIterator<Item = Class> {
        self.class_bytes().iter().map(Class::read)
    }

    fn class_bytes(&self) -> &[[u8; Class::BYTES]] {
        self.bytes.get(self.classes_start()..self.waiting_start()).unwrap_or(&[]).as_chunks().0
    }

    /// The class with this key, and its place.
    pub fn class(&self, key: u64) -> Option<(usize, Class)> {
        self.classes().enumerate().find(|(_, class)| class.key == key)
    }

    /// The class in this place.
    pub fn class_at(&self, place: usize) -> Option<Class> {
        self.class_bytes().get(place).map(Class::read)
    }

    /// Adds a class, and gives its place.
    pub fn add_class(&mut self, class: Class) -> usize {
        let mut bytes = [0; Class::BYTES];
        class.write(&mut bytes);
        let at = self.waiting_start();
        self.bytes.splice(at..at, bytes);
        self.header.classes += 1;
        self.header.classes as usize - 1
    }

    /// Changes the class in this place, if there is one.
    pub fn with_class(&mut self, place: usize, change: impl FnOnce(&mut Class)) {
        let Some(mut class) = self.class_at(place) else { return };
        change(&mut class);
        let start = self.classes_start() + place * Class::BYTES;
        if let Some(bytes) = self.bytes.get_mut(start..).and_then(|bytes| bytes.first_chunk_mut()) {
            class.write(bytes);
        }
    }
}
