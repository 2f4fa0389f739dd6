//! What jobs cost and how fast hosts are: learned from jobs that ended well.
//!
//! ```text
//! service time of a job = work of its class (× its cost) / speed of its host          ln s = ln w − ln v + noise
//! ```
//!
//! One number for each class and one for each host, in logarithms, each with how far it is to be doubted (a variance). A job's surprise `r`, the difference between
//! what it took and what was expected, is shared between the two by their doubts, as in a Kalman filter of a product:
//!
//! ```text
//! ln w += r · Dw / (Dw + Dv + noise)        D falls with each job, and rises by DRIFT: old news is forgotten
//! ln v −= r · Dv / (Dw + Dv + noise)        noise: how far jobs of the class differ, learned too
//! ```
//!
//! - A surprise counts no more than three times what was to be expected ([`BOUND`]): one job that hung moves nothing far. Two in a row, up or down, are no outliers:
//!   then the doubt is raised, so that a host that throttles or a class that grew is learned anew within some ten jobs. Whose jobs they are in a row says which of both changed.
//! - A class whose jobs differ much says little about the speed of hosts, and changes it little.
//! - The mean of jobs spread so is `w = exp(ln w + noise / 2)`.
//! - A host without jobs fades to the pool's mean, which is speed 1 ([`pin`]), and its doubt rises; a configured weight is the speed that is believed until then.
//! - With a `cost` a class learns the work of one unit of it.

use std::time::Duration;

use super::choice::Load;
use super::ewma::Fading;
use super::hash::Hash;
use super::queue::{ONE_TURN, TURNS};
use super::record::{Class, Insight, Record};
use super::score::least_time::Ahead;
use super::time::Instant;

/// Most classes of a pool that have a name of their own.
pub const MOST_CLASSES: usize = 64;

/// The doubt about a host of which nothing is known: speeds differ by some 60 %.
const HOST_DOUBT: f32 = 0.25;

/// The noise of a class of which nothing is known.
const FIRST_NOISE: f32 = 0.25;

/// The least noise: two jobs of a class differ by a tenth.
const LEAST_NOISE: f32 = 0.01;

/// How much the doubt rises with each job.
const DRIFT: f32 = 0.001;

/// How much it rises with each job after the first that surprised in the same direction.
const ALARM: f32 = 0.1;

/// A surprise is cut at so many standard deviations.
const BOUND: f32 = 3.0;

/// How far, in logarithms, the work that a job's cost makes of it may be from the pool's mean to say something of a host: a hundredfold.
const FAR: f32 = 4.6;

/// Jobs whose noise counts.
const NOISE_WINDOW: f32 = 16.0;

/// Jobs over which the pool's mean goes.
const POOL_WINDOW: f32 = 32.0;

/// What is learned of a host fades so many times slower than its latency: to be wrong about a slow host costs a slow job.
const FADES_SLOWER: u32 = 10;

/// A class that had no job for this long, for each job that it had of late, gives its place to another one.
const IDLE: Duration = Duration::from_secs(60);

/// Works and service times within a microsecond and a year.
const RANGE_MS: (f32, f32) = (1e-3, 3.2e10);

/// The class of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Tells it from others.
    pub key: u64,
    /// The beginning of its name.
    pub name: [u8; Label::LENGTH],
}

impl Label {
    /// So much of a name is shown.
    pub const LENGTH: usize = 24;

    /// All jobs together: no job's own class.
    const ALL: u64 = 0;

    /// The class of this name. Any bytes are one.
    pub fn of(name: &[u8]) -> Self {
        let mut shown = [0; Self::LENGTH];
        shown.iter_mut().zip(name).for_each(|(shown, byte)| *shown = *byte);
        Self { key: (Hash::of(name) & !1).max(2), name: shown }
    }

    /// Where there is no place for another name.
    fn other(self) -> Self {
        let other = Self::of(b"other");
        Self { key: other.key | self.key & 1, ..other }
    }

    /// Jobs whose cost is known learn another number than those without: the last bit of the key.
    fn with_cost(self, cost: Option<f32>) -> Self {
        Self { key: self.key | u64::from(cost.is_some()), ..self }
    }

    /// Whether it is no name that a job may have.
    fn is_reserved(key: u64) -> bool {
        key == Self::ALL || key & !1 == Self::of(b"other").key
    }
}

/// What is known of a job before it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    /// Its class.
    pub label: Label,
    /// How much of its class's work it is; above 0.
    pub cost: Option<f32>,
    /// What it has in common with others that were served before: see [`super::session`].
    pub session: Option<u64>,
}

impl Job {
    /// A job of which nothing is known.
    pub fn unknown() -> Self {
        Self { label: Label::of(b"default"), cost: None, session: None }
    }

    fn class(&self) -> Label {
        self.label.with_cost(self.cost)
    }
}

impl Class {
    /// The mean work, in milliseconds on a host of speed 1, of a job of cost 1.
    pub fn mean(&self) -> Option<f32> {
        let mean = (self.log_work + self.noise.clamp(0.0, 2.0) / 2.0).exp();
        // Of one unit of cost it may be a millionth of a millisecond.
        (self.jobs > 0 && mean.is_finite() && mean > 0.0).then_some(mean)
    }

    fn new(label: Label, now: Instant) -> Self {
        let mut class = Self::named(label.key, label.name);
        (class.noise, class.fed) = (FIRST_NOISE, now.0);
        class
    }
}

/// The work of a job in milliseconds on a host of speed 1; `None`: neither its class nor any other is known. A cost may be what a client says: so it makes no more of the mean than
/// [`TURNS`], or one job could keep all others away from its host.
pub fn work_of(record: &Record, job: &Job) -> Option<f32> {
    let class = job.class();
    let known = record.class(class.key).or_else(|| record.class(class.other().key));
    let own = known.and_then(|(_, class)| Some(class.mean()? * job.cost.unwrap_or(1.0)));
    let mean = mean_work(record);
    let bounds = mean.filter(|_| job.cost.is_some()).map_or(RANGE_MS, |mean| (mean * TURNS.0, mean * TURNS.1));
    own.map(|work| work.max(bounds.0).min(bounds.1)).or(mean)
}

/// The mean work of all jobs of late.
pub fn mean_work(record: &Record) -> Option<f32> {
    record.class(Label::ALL)?.1.mean()
}

/// A job's work by the pool's mean; 1 where nothing is known.
pub fn size(record: &Record, job: &Job) -> f32 {
    work_of(record, job).zip(mean_work(record)).map_or(ONE_TURN, |(work, mean)| work / mean)
}

/// Whether jobs of a class are so much alike that it says something how long one has run: they differ by less than a third.
pub fn are_alike(record: &Record) -> bool {
    const ALIKE: f32 = 0.1;
    record.class(Label::ALL).is_some_and(|(_, all)| all.doubt < ALIKE)
}

/// How a host's speed fades, with this time constant of latencies.
pub fn fading(time_constant: Duration) -> Fading {
    Fading::new(time_constant.saturating_mul(FADES_SLOWER))
}

impl Insight {
    /// Its speed, if a job ever taught something of it.
    pub fn speed_if_known(&self, now: Instant, fading: Fading) -> Option<f32> {
        (self.taught != 0).then(|| self.speed(now, fading))
    }

    /// How fast the host works through jobs, where 1 is the pool's mean, beyond what its weight says; always a number above 0.
    pub fn speed(&self, now: Instant, fading: Fading) -> f32 {
        self.log_speed_now(now, fading).exp()
    }

    /// What stands before a job on this host; a job of which nothing is known is of the mean work. Of those that only the host knows of so much is believed to be done as the host can
    /// have done since it told of them.
    #[inline]
    pub fn ahead(&self, load: Load, mean: f64, speed: f64, now: Instant) -> Ahead {
        let unknown = load.counted.saturating_sub(self.weighed);
        let known = self.work_ms() + f64::from(unknown) * mean;
        let others = f64::from(load.jobs.saturating_sub(load.counted));
        if others == 0.0 {
            return Ahead { jobs: load.counted, work: known };
        }
        let left = (others * mean - self.since_told(now) * speed).max(0.0);
        Ahead { jobs: load.counted.saturating_add((left / mean).ceil() as u32), work: known + left }
    }

    /// The work of its jobs in flight that is known, in milliseconds on a host of speed 1.
    pub fn work_ms(&self) -> f64 {
        self.work as f64 / 1e3
    }

    /// When it took up what it runs now; zero if that is not known.
    pub fn began(&self) -> Instant {
        Instant(self.began)
    }

    /// A job of its has ended of which nobody can say whether it ran or waited, as one whose client has left: so it is not known any more when it took up what it runs now.
    pub fn loses_track(&mut self) {
        self.began = 0;
    }

    /// For how long it has been at what it runs now, as far as that is known, in milliseconds.
    #[inline]
    pub fn took(&self, now: Instant) -> f64 {
        if self.began == 0 { 0.0 } else { now.since(self.began()).as_micros() as f64 / 1e3 }
    }

    fn log_speed_now(&self, now: Instant, fading: Fading) -> f32 {
        const MOST: f32 = 7.0;
        let faded = self.log_speed * self.freshness(now, fading);
        // Whatever the bytes are, it is a number.
        if faded.is_finite() { faded.clamp(-MOST, MOST) } else { 0.0 }
    }

    fn freshness(&self, now: Instant, fading: Fading) -> f32 {
        if self.taught == 0 { 0.0 } else { fading.after(now, Instant(self.taught)) }
    }
}

/// A job's cost, as it is written: a number from a millionth to a trillion.
pub fn cost(text: &[u8]) -> Option<f32> {
    let cost: f32 = std::str::from_utf8(text).ok()?.trim().parse().ok()?;
    (1e-6..=1e12).contains(&cost).then_some(cost)
}

/// How long a host worked on a job that took so long and has just ended. A host that runs `at_once` jobs takes one up when it comes, or, where as many were there already (`was_crowded`), when
/// the one before it has ended: if it runs one at a time that was `began`; if several, the time between two ends is believed to be the `at_once`-th part of what a job takes.
/// `None`: nobody can say, as where it is not known when that was, or where its client took as long to send it.
pub fn service(latency: Duration, began: Instant, now: Instant, at_once: u32, was_crowded: bool) -> Option<Duration> {
    let at_once = at_once.max(1);
    // One that lies ahead was before the clock stepped back.
    let since = (began != Instant::default() && began <= now).then(|| now.since(began));
    let service = match since {
        Some(since) if was_crowded || at_once == 1 => latency.min(since.saturating_mul(at_once)),
        None if was_crowded => return None,
        _ => latency,
    };
    (!service.is_zero()).then_some(service)
}

/// A job that ended well, as far as it teaches something.
#[derive(Clone, Copy, Debug)]
pub struct Lesson<'a> {
    /// The host's entry.
    pub slot: u32,
    /// The host's configured weight.
    pub weight: f32,
    /// The job.
    pub job: &'a Job,
    /// How long the host worked on it.
    pub service: Duration,
}

/// Learns from a job. Changes the class, the host and the pool's mean.
pub fn learn(record: &mut Record, lesson: Lesson, now: Instant, fading: Fading) {
    let service = (lesson.service.as_secs_f32() * 1e3).clamp(RANGE_MS.0, RANGE_MS.1).ln();
    let cost = lesson.job.cost.unwrap_or(1.0).ln();
    let mut insight = record.insight(lesson.slot);
    let freshness = insight.freshness(now, fading);
    let speed = insight.log_speed_now(now, fading) + lesson.weight.ln();
    let (all, _) = place_of(record, Label { key: Label::ALL, ..Label::of(b"all") }, now);
    record.with_class(all, |all| learn_mean(all, service + speed, now));
    let usual = record.class_at(all).map_or(0.0, |all| all.log_work);
    let (place, is_new) = place_of(record, lesson.job.class(), now);
    let mut class = record.class_at(place).unwrap_or_default();
    let doubt = if insight.taught == 0 { HOST_DOUBT } else { sane(insight.doubt, HOST_DOUBT) };
    let doubt = doubt + (HOST_DOUBT - doubt).max(0.0) * (1.0 - freshness);
    if is_new || class.jobs == 0 {
        class.log_work = service + speed - cost;
        class.doubt = FIRST_NOISE + doubt;
        (insight.doubt, insight.log_speed) = (doubt, speed - lesson.weight.ln());
    } else {
        let noise = sane(class.noise, FIRST_NOISE).max(LEAST_NOISE);
        let class_doubt = sane(class.doubt, FIRST_NOISE);
        let expected = class.log_work + cost - speed;
        let raw = if expected.is_finite() { service - expected } else { 0.0 };
        let bound = |sum: f32| BOUND * sum.sqrt();
        let is_surprise = raw.abs() > bound(class_doubt + doubt + noise);
        class.run = in_a_row(class.run, raw, is_surprise);
        // A cost may be what a client says: one that is not true is no news of a host.
        let is_believed = lesson.job.cost.is_none() || (class.log_work + cost - usual).abs() <= FAR;
        if is_believed {
            insight.run = in_a_row(insight.run, raw, is_surprise);
        }
        let alarm = |run: i32| if run.abs() >= 2 { ALARM } else { 0.0 };
        let before = doubt;
        let (class_doubt, doubt) = (class_doubt + alarm(class.run), if is_believed { doubt + alarm(insight.run) } else { 0.0 });
        let sum = class_doubt + doubt + noise;
        let surprise = raw.clamp(-bound(sum), bound(sum));
        let (class_part, own_part) = (class_doubt / sum, doubt / sum);
        class.log_work = expected + speed - cost + class_part * surprise;
        insight.log_speed = speed - lesson.weight.ln() - own_part * surprise;
        // What the doubts do not explain is noise.
        let unexplained = (surprise * surprise - class_doubt - doubt).max(0.0);
        class.noise = noise + (unexplained - noise) * (1.0 / (class.jobs as f32 + 1.0)).max(1.0 / NOISE_WINDOW);
        class.doubt = (class_doubt * (1.0 - class_part) + DRIFT).min(HOST_DOUBT);
        insight.doubt = if is_believed { (doubt * (1.0 - own_part) + DRIFT).min(HOST_DOUBT) } else { before };
    }
    (class.jobs, class.fed, insight.taught) = (class.jobs.saturating_add(1), now.0, now.0.max(1));
    record.with_class(place, |entry| *entry = class);
    record.with_class(all, |all| all.doubt += (class.noise - all.doubt) / POOL_WINDOW);
    record.with_insight(lesson.slot, |entry| *entry = insight);
    record.header.learns();
}

/// The mean of all jobs, whatever they are: unlike jobs, so nothing is cut off.
fn learn_mean(all: &mut Class, log_work: f32, now: Instant) {
    let part = (1.0 / (all.jobs as f32 + 1.0)).max(1.0 / POOL_WINDOW);
    let surprise = log_work - all.log_work;
    if all.jobs == 0 || !all.log_work.is_finite() {
        // Of the mean of all it is how far jobs of one class differ.
        (all.log_work, all.noise, all.doubt) = (log_work, 0.0, FIRST_NOISE);
    } else {
        all.log_work += part * surprise;
        all.noise += part * (surprise * surprise - sane(all.noise, FIRST_NOISE));
    }
    (all.jobs, all.fed) = (all.jobs.saturating_add(1), now.0);
}

/// Whatever the bytes are, a variance.
fn sane(variance: f32, else_it_is: f32) -> f32 {
    if variance.is_finite() { variance.clamp(0.0, 4.0) } else { else_it_is }
}

/// How many surprises in the same direction there were in a row; below 0: downwards.
fn in_a_row(run: i32, surprise: f32, is_surprise: bool) -> i32 {
    let sign = if surprise > 0.0 { 1 } else { -1 };
    match is_surprise {
        true if run.signum() == sign => run.saturating_add(sign),
        true => sign,
        false => 0,
    }
}

/// The place of a class in the record, which is made if need be, and whether it is new. Where all are taken, and none has been idle, it is that of `other`.
fn place_of(record: &mut Record, label: Label, now: Instant) -> (usize, bool) {
    if let Some((place, _)) = record.class(label.key) {
        return (place, false);
    }
    let is_reserved = |class: &Class| Label::is_reserved(class.key);
    let named = record.classes().filter(|class| !is_reserved(class)).count();
    if named < MOST_CLASSES || Label::is_reserved(label.key) {
        return (record.add_class(Class::new(label, now)), true);
    }
    let patience = |class: &Class| IDLE.saturating_mul(class.jobs.clamp(1, 10));
    let idle = |class: &Class| now.since(Instant(class.fed));
    let stale = record.classes().enumerate().filter(|(_, class)| !is_reserved(class) && idle(class) > patience(class));
    match stale.max_by_key(|(_, class)| idle(class)) {
        Some((place, _)) => {
            record.with_class(place, |class| *class = Class::new(label, now));
            (place, true)
        }
        None => place_of(record, label.other(), now),
    }
}

/// Keeps the pool's mean speed at 1: it is only together that works and speeds are known. What is expected of any job stays the same.
pub fn pin(record: &mut Record) {
    if !record.has_insights() {
        return;
    }
    // Hosts' speeds, and not those of hosts that have gone.
    let slots: Vec<u32> = (0..record.header.hosts).filter(|slot| record.insight(*slot).taught != 0).collect();
    let sum: f32 = slots.iter().map(|slot| record.insight(*slot).log_speed).sum();
    let mean = sum / slots.len().max(1) as f32;
    if mean == 0.0 || !mean.is_finite() {
        return;
    }
    for slot in slots {
        record.with_insight(slot, |insight| insight.log_speed -= mean);
    }
    for place in 0..record.header.classes as usize {
        record.with_class(place, |class| class.log_work -= mean);
    }
    record.header.learns();
}

#[cfg(test)]
mod tests;
