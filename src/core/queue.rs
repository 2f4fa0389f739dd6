//! The jobs that wait, in the order in which they get the slots that come free.
//!
//! ```text
//!                  a slot is free for it                  a slot is free for it, in its order (drawn in its own worker)
//!   request ──┬────────────────────────► placed ◄──────────────────────────────┐
//!             │                                                                │
//!             ├── max_length wait already ──► queue_full                       │
//!             └──────────────────────────────────────────────────────────► waiting ──► its client leaves
//!                                                                              └─────► timeout_ms: queue_timeout
//! ```
//!
//! A stream can be resumed in its own worker only. So the record holds who waits, one entry of 30 bytes for each, in the order of arrival; whoever frees a
//! slot finds there whose turn it is, and rings that worker's bell ([`call`]). The worker draws ([`draw`]): as many jobs as there are free slots are entitled
//! to one, in their order; those of its own it places, in the same transaction, and the workers of the others it calls. Nothing is promised to a job before it is
//! placed: what a worker does not take, because it is dead or hangs, others may, as soon as it has not answered for [`ANSWERS_WITHIN`].
//!
//! **The order.** Priorities are strict, but age: once the oldest job of a lower one has waited `ageing_ms`, every fourth slot goes to that priority ([`SHARE`]). So none is
//! starved, and however many of a lower priority wait, for however long, at least half of the slots are for the highest one: ageing by the time alone would
//! turn priorities off in just the overload that they are for. Within a priority
//! tenants take turns (start-time fair queueing, Goyal 1996, with the state kept relative to the virtual time): a [`Turn`] says how far ahead of the round a tenant is,
//! and the one that is least ahead is next; a turn is as long as the job's work is, where that is known. A tenant that is not ahead has no turn in the record, so that what is kept is bounded by who is being served, and by [`MOST_TURNS`].

use std::time::Duration;

use super::packed::packed;
use super::record::{Header, Record, Worker};
use super::time::Instant;

/// What a job costs of which nothing is known: one turn. Of others it is their work, by the pool's mean; within bounds, so that no single job takes its tenant's turns for ever, or none.
pub const ONE_TURN: f32 = 1.0;
/// The least and the most of it.
pub const TURNS: (f32, f32) = (0.02, 50.0);

/// So many jobs that wait are looked at that are held for a busy host. More are not to be expected where any host has a free slot.
const MOST_HELD: usize = 64;

/// A worker that was called and has not been heard of for so long is passed over until it is. A wake-up takes about a millisecond, and on a busy machine tens of them: one
/// tick, so that nobody overtakes others for that.
pub const ANSWERS_WITHIN: Duration = Duration::from_millis(100);

/// Most turns that are kept of one priority. With more tenants in one round the round ends: those that are least ahead start afresh.
pub const MOST_TURNS: usize = 256;

/// Of so many slots one goes to a lower priority that has aged.
const SHARE: u32 = 4;

/// How urgent a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Before all others.
    High,
    /// In between.
    Normal,
    /// After all others.
    Low,
}

impl Priority {
    /// All of them, the highest first.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// Their words.
    pub const WORDS: [&str; 3] = ["high", "normal", "low"];

    /// The word in configurations, headers and the status.
    pub fn word(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// Reads a word, in whatever case.
    pub fn parse(word: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.word().as_bytes().eq_ignore_ascii_case(word))
    }

    /// 0 is the highest.
    fn level(self) -> usize {
        match self {
            Self::High => 0,
            Self::Normal => 1,
            Self::Low => 2,
        }
    }
}

packed! {
    /// A job that waits.
    pub struct Waiting {
        /// Its worker's id.
        pub worker: u64,
        /// Its stream, which is unique in its worker.
        pub stream: u32,
        /// Hash of whose job it is; 0 if that is not known.
        pub tenant: u32,
        pub(super) since: u64,
        /// Its priority's.
        level: u16,
        /// Its work, by the pool's mean.
        size: f32,
    }
}

packed! {
    /// How far a tenant is ahead of the others of a priority, by what it was given.
    pub struct Turn {
        tenant: u32,
        level: u16,
        ahead: f32,
    }
}

impl Waiting {
    /// A job that waits from now on, of so many times the pool's mean work.
    pub fn new(worker: u64, stream: u32, priority: Priority, tenant: u32, size: f32, now: Instant) -> Self {
        Self { worker, stream, tenant, since: now.0, level: priority.level() as u16, size }
    }

    /// Its work, by the pool's mean: any bytes are some.
    pub fn size(&self) -> f32 {
        if self.size.is_finite() { self.size.clamp(TURNS.0, TURNS.1) } else { ONE_TURN }
    }

    /// When it came.
    pub fn since(&self) -> Instant {
        Instant(self.since)
    }

    /// Its priority: any bytes are some.
    pub fn priority(&self) -> Priority {
        Priority::ALL.get(usize::from(self.level)).copied().unwrap_or(Priority::Low)
    }
}

/// The order in which those that wait are served next.
struct Order {
    /// Workers that have been called and do not answer.
    silent: Vec<u64>,
    /// Whether each, by its place, has had its turn; of those behind the last one that has, nothing is said.
    gone: Vec<bool>,
    turns: Vec<Turn>,
    passed: Passed,
    now: Instant,
}

/// By level: how many slots went to other priorities since each had its last.
#[derive(Clone, Copy)]
struct Passed([u32; Priority::ALL.len()]);

impl Passed {
    fn of(header: &Header) -> Self {
        Self([0, header.passed_normal, header.passed_low])
    }

    /// A slot goes to this priority.
    fn note(&mut self, priority: Priority) {
        for (level, passed) in self.0.iter_mut().enumerate() {
            *passed = if level == priority.level() { 0 } else { passed.saturating_add(1) };
        }
    }

    /// Whether the next slot may be one for this priority, though a higher one waits.
    fn is_due(&self, priority: Priority) -> bool {
        self.0.get(priority.level()).is_some_and(|passed| *passed >= SHARE - 1)
    }

    fn write(self, header: &mut Header) {
        let [_, normal, low] = self.0;
        (header.passed_normal, header.passed_low) = (normal, low);
    }
}

impl Order {
    /// Of those whose worker answers, as `me` does.
    fn of(record: &Record, me: u64, now: Instant) -> Self {
        // One that was called later than now was called before the clock stepped back.
        let within = |called: Instant| (called..=called + ANSWERS_WITHIN).contains(&now);
        let is_silent = |worker: &Worker| worker.called != 0 && !within(Instant(worker.called));
        let silent = record.workers().filter(|worker| worker.id != me && is_silent(worker)).map(|worker| worker.id).collect();
        Self { silent, gone: Vec::new(), turns: record.turns(), passed: Passed::of(&record.header), now }
    }

    /// Those that have not had their turn, with their places.
    fn rest<'a>(&'a self, record: &'a Record) -> impl Iterator<Item = (usize, Waiting)> {
        let answers = |entry: &Waiting| self.silent.is_empty() || !self.silent.contains(&entry.worker);
        record.waiting().enumerate().filter(move |(at, entry)| !self.gone.get(*at).is_some_and(|gone| *gone) && answers(entry))
    }

    /// The next; its tenant has had its turn, and it is not in the order any more.
    fn next(&mut self, record: &Record) -> Option<Waiting> {
        let level = self.next_level(record)?;
        let (mut best, mut least) = (None, f32::INFINITY);
        for (at, entry) in self.rest(record).filter(|(_, entry)| entry.priority() == level) {
            let ahead = ahead(&self.turns, &entry);
            if ahead < least {
                (best, least) = (Some((at, entry)), ahead);
            }
            if ahead <= 0.0 {
                break;
            }
        }
        let (at, next) = best?;
        if at >= self.gone.len() {
            self.gone.resize(at + 1, false);
        }
        self.gone.get_mut(at).into_iter().for_each(|gone| *gone = true);
        self.passed.note(next.priority());
        pass(&mut self.turns, &next);
        Some(next)
    }

    /// The priority whose turn it is.
    fn next_level(&self, record: &Record) -> Option<Priority> {
        let mut header = record.header;
        let ageing = header.ageing();
        let mut missing = Priority::ALL.into_iter().filter(|priority| *header.waiting_at(*priority) > 0).count();
        // The oldest of each priority, in the order in which they came.
        let mut oldest: Vec<Waiting> = Vec::with_capacity(Priority::ALL.len());
        for (_, entry) in self.rest(record) {
            if oldest.iter().any(|older| older.priority() == entry.priority()) {
                continue;
            }
            oldest.push(entry);
            missing = missing.saturating_sub(1);
            if missing == 0 {
                break;
            }
        }
        let highest = oldest.iter().map(Waiting::priority).min()?;
        let is_due = |entry: &&Waiting| {
            let has_aged = self.now.since(entry.since()) >= ageing;
            entry.priority() > highest && has_aged && self.passed.is_due(entry.priority())
        };
        oldest.iter().find(is_due).map(Waiting::priority).or(Some(highest))
    }
}

fn ahead(turns: &[Turn], entry: &Waiting) -> f32 {
    let its = turns.iter().find(|turn| (turn.tenant, usize::from(turn.level)) == (entry.tenant, entry.priority().level()));
    // Whatever the bytes are, it is a number, and somebody is next.
    its.filter(|turn| turn.ahead > 0.0).map_or(0.0, |turn| turn.ahead.min(f32::MAX))
}

/// A tenant has its turn: all of its priority are moved up to where it stands, and it is that far ahead.
fn pass(turns: &mut Vec<Turn>, entry: &Waiting) {
    let level = entry.priority().level() as u16;
    let catch_up = |turns: &mut Vec<Turn>, by: f32| {
        turns.iter_mut().filter(|turn| turn.level == level).for_each(|turn| turn.ahead -= by);
        // Whatever the bytes are, a turn that is no number is none.
        turns.retain(|turn| turn.ahead > 0.0);
    };
    let own = ahead(turns, entry);
    catch_up(turns, own);
    turns.retain(|turn| (turn.tenant, turn.level) != (entry.tenant, level));
    let of_level = |turns: &[Turn]| turns.iter().filter(|turn| turn.level == level).map(|turn| turn.ahead).collect::<Vec<_>>();
    while of_level(turns).len() >= MOST_TURNS {
        let least = of_level(turns).into_iter().fold(f32::INFINITY, f32::min);
        catch_up(turns, least);
    }
    turns.push(Turn { tenant: entry.tenant, level, ahead: entry.size() });
}

/// A worker that is to be woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Called {
    /// Its id.
    pub worker: u64,
    /// Its bell; 0 if it has none.
    pub bell: u32,
}

/// The slots that are drawn for, and what a job needs to take one.
pub trait Slots {
    /// How many are free.
    fn free(&mut self, record: &Record) -> usize;
    /// Whether this stream of the worker that draws may be placed now; if not, it will be in another callback. `None`: it does not wait any more, which the record is yet to
    /// be told.
    fn may_take(&self, stream: u32) -> Option<bool>;
    /// Whether the next of those that wait is to have a slot now, and not one that comes free later.
    fn starts_now(&mut self, record: &Record, next: &Waiting) -> bool;
    /// Takes a slot for a stream.
    fn take(&mut self, record: &mut Record, stream: u32) -> Taken;
}

/// What a stream got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// There is none.
    Nothing,
    /// A slot.
    Slot,
    /// A host's trial: which hosts may be chosen is another question from now on, and to be answered by a record that is stored.
    Trial,
}

/// Says whose turn it is, if a slot has come free: the worker that is to be woken, which is noted in the record as called. `None`: nobody waits, or who is next has
/// been called already. `me` is the worker that asks.
#[must_use]
pub fn call(record: &mut Record, me: u64, now: Instant) -> Option<Called> {
    if !record.has_waiting() {
        return None;
    }
    let next = Order::of(record, me, now).next(record)?;
    summon(record, next.worker, now)
}

/// Whether a worker has been called since it was last heard of: then its next transaction must be stored, also if it finds nothing to do, or it would be taken for silent.
pub fn is_called(record: &Record, worker: u64) -> bool {
    record.worker_row(worker, 0).and_then(|row| record.worker(row)).is_some_and(|entry| entry.called != 0)
}

/// Notes that a worker is called, unless it has been.
fn summon(record: &mut Record, worker: u64, now: Instant) -> Option<Called> {
    let row = record.worker_row(worker, 0)?;
    let mut entry = record.worker(row)?;
    if entry.called != 0 {
        return None;
    }
    entry.called = now.0;
    record.set_worker(row, entry);
    Some(Called { worker, bell: entry.bell })
}

/// Places jobs of the worker `me`, as many as are entitled to a free slot, and no more than `most`. Gives the workers that are to be woken for others, which are noted as
/// called.
#[must_use]
pub fn draw(record: &mut Record, me: u64, now: Instant, most: usize, slots: &mut impl Slots) -> Vec<Called> {
    let mut called = Vec::new();
    if !record.has_waiting() {
        return called;
    }
    let mut order = Order::of(record, me, now);
    let free = slots.free(record);
    let (mut served, mut left_to_others, mut held) = (Vec::new(), 0, 0);
    while served.len() < most && served.len() + left_to_others < free && held < MOST_HELD {
        let Some(next) = order.next(record) else { break };
        let may_take = if next.worker == me { slots.may_take(next.stream) } else { Some(false) };
        if may_take.is_none() {
            continue;
        }
        if !slots.starts_now(record, &next) {
            held += 1;
            continue;
        }
        if may_take == Some(true) {
            let taken = slots.take(record, next.stream);
            if taken != Taken::Nothing {
                served.push(next);
            }
            if taken != Taken::Slot {
                break;
            }
        } else {
            left_to_others += 1;
            called.extend(summon(record, next.worker, now));
        }
    }
    remove(record, &served);
    called
}

/// These have been placed, in this order.
fn remove(record: &mut Record, served: &[Waiting]) {
    let (mut turns, mut passed) = (record.turns(), Passed::of(&record.header));
    for entry in served {
        passed.note(entry.priority());
        pass(&mut turns, entry);
        record.remove_waiting(entry.worker, entry.stream);
    }
    passed.write(&mut record.header);
    if record.has_waiting() {
        record.set_turns(&turns);
    }
}

#[cfg(test)]
mod tests;
