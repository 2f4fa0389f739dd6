//! What a pool knows beyond counts, behind the hosts' entries, where a policy or telemetry asks for it: one [`Insight`] for each host, and the [`Class`]es.

use super::{Host, Record};
use crate::core::learning::Label;
use crate::core::packed::packed;
use crate::core::time::Instant;

packed! {
    /// What is learned of a host, and what it told of itself: see [`crate::core::learning`], [`crate::core::report`].
    pub struct Insight {
        /// What its jobs in flight cost, as far as that is known: microseconds on a host of speed 1.
        pub work: u64,
        /// How many of its jobs these are.
        pub weighed: u32,
        /// When it took up what it runs now: the last time that a job of its ended, or came when it had none; 0 if that is not known.
        pub(in crate::core) began: u64,
        /// Jobs that ended here, wrapping.
        pub(in crate::core) ended: u32,
        pub(in crate::core) log_speed: f32,
        pub(in crate::core) doubt: f32,
        /// Surprises in the same direction in a row; below 0: downwards.
        pub(in crate::core) run: i32,
        /// When a job taught something of its speed; 0: none has.
        pub(in crate::core) taught: u64,
        /// When it told something of its jobs, and of its utilisation; 0: never.
        pub(in crate::core) told_jobs: u64,
        pub(in crate::core) told_parts: u64,
        /// How many jobs we counted when it told of its jobs.
        pub(in crate::core) counted_then: u32,
        /// Which of the values it told.
        pub(in crate::core) tells: u32,
        pub(in crate::core) running: f32,
        pub(in crate::core) waiting: f32,
        pub(in crate::core) memory: f32,
        pub(in crate::core) compute: f32,
    }
}

packed! {
    /// Jobs that cost alike: see [`crate::core::learning`].
    pub struct Class {
        /// Tells it from others.
        pub(in crate::core) key: u64,
        name: u128,
        more_of_name: u64,
        pub(in crate::core) log_work: f32,
        pub(in crate::core) doubt: f32,
        pub(in crate::core) noise: f32,
        /// Jobs that taught something of it.
        pub jobs: u32,
        pub(in crate::core) run: i32,
        /// When the last of these ended.
        pub(in crate::core) fed: u64,
    }
}

impl Insight {
    /// A job comes, to so many others.
    pub(super) fn takes(&mut self, work: Option<u64>, others: u32, now: Instant) {
        if others == 0 {
            self.began = now.0;
        }
        self.weigh(work);
    }

    /// Counts the work of one of its jobs.
    pub(super) fn weigh(&mut self, work: Option<u64>) {
        if let Some(work) = work {
            self.work = self.work.saturating_add(work);
            self.weighed = self.weighed.saturating_add(1);
        }
    }

    /// One of its jobs has ended; so many are left.
    pub(super) fn ends(&mut self, work: Option<u64>, left: u32, now: Instant) {
        (self.ended, self.began) = (self.ended.wrapping_add(1), now.0);
        if let Some(work) = work {
            (self.work, self.weighed) = (self.work.saturating_sub(work), self.weighed.saturating_sub(1));
        }
        if left == 0 {
            // Whatever was counted while insights came and went.
            (self.work, self.weighed) = (0, 0);
        }
    }
}

impl Class {
    /// A class of which nothing is known.
    pub(in crate::core) fn named(key: u64, name: [u8; Label::LENGTH]) -> Self {
        let (name, more) = name.split_first_chunk().map_or((0, &[][..]), |(name, more)| (u128::from_le_bytes(*name), more));
        let more_of_name = more.first_chunk().map_or(0, |more| u64::from_le_bytes(*more));
        Self { key, name, more_of_name, ..Self::default() }
    }

    /// Whether it is the work of one unit of cost that is learned.
    pub fn is_of_cost(&self) -> bool {
        self.key & 1 == 1
    }

    /// The beginning of its name: see [`Label::name`].
    pub fn shown(&self) -> [u8; Label::LENGTH] {
        let mut bytes = [0; Label::LENGTH];
        let name = self.name.to_le_bytes().into_iter().chain(self.more_of_name.to_le_bytes());
        bytes.iter_mut().zip(name).for_each(|(shown, byte)| *shown = byte);
        bytes
    }

    /// The beginning of its name, as far as it is text.
    pub fn name(&self) -> String {
        let bytes = self.shown();
        let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(name).replace(char::is_control, "?")
    }
}

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
            // From the end to the beginning: where each part is depends on those before it.
            let classes = self.classes_start()..self.waiting_start();
            self.bytes.drain(classes);
            self.bytes.drain(start..end);
            self.header.classes = 0;
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
