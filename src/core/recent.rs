//! What a pool went through lately: how full it was over the last minutes, and what was told of its hosts. For an operator who opens the status page in the
//! middle of an incident.
//!
//! It lies in the shared data beside the pool's record, so that it outlives every worker; the leader alone writes it, and whoever leads next goes on with it.
//! Nothing is decided by it. So bytes that are not ours, or that an older build left, are as good as none, and a write that fails costs a point.
//!
//! ```text
//! magic, points, events │ Point × points, the oldest first │ Entry × events, the oldest first
//! ```

use std::time::Duration;

use super::address::Address;
use super::health::{Reason, State, Watcher};
use super::lookout::Event;
use super::packed::packed;
use super::record::Record;
use super::time::Instant;

/// How often a point is kept.
pub const STEP: Duration = Duration::from_secs(2);

/// How far back the points go. With [`STEP`] it bounds how many there are.
pub const REACH: Duration = Duration::from_secs(300);

const MOST_POINTS: usize = 150;

/// The newest are kept, however old they are.
pub const MOST_EVENTS: usize = 32;

/// A pool that has a host for less than this, in the midst of an outage, is one that has none: hosts that ask for a short rest each come and go many times a
/// minute, and would leave no room for what else happened.
const BRIEF: Duration = Duration::from_secs(10);

const MAGIC: u32 = u32::from_le_bytes(*b"PLR1");

packed! {
    /// What the bytes begin with.
    pub struct Head {
        /// [`MAGIC`].
        magic: u32,
        points: u32,
        events: u32,
    }
}

packed! {
    /// How full a pool was at one moment.
    pub struct Point {
        /// When, in microseconds of the monotonic clock.
        pub at: u64,
        /// Jobs that its hosts worked on.
        pub in_flight: u32,
        /// Slots of the hosts that took jobs; a host on trial takes one.
        pub slots: u32,
        /// Jobs that waited.
        pub waiting: u32,
        /// Hosts that took jobs.
        pub eligible: u32,
    }
}

packed! {
    /// Something that was told of a host, or of the pool.
    pub struct Entry {
        /// When, in microseconds of the monotonic clock.
        pub at: u64,
        for_ms: u32,
        /// Failures in a row, of an ejection for those.
        pub failures: u32,
        ip: u128,
        port: u16,
        kind: u8,
        reason: u8,
    }
}

/// By [`Entry::kind`].
const KINDS: [&str; 6] = ["ejected", "readmitted", "unhealthy", "healthy", "no_host", "host_again"];

/// By [`Entry::reason`], from 1 on; 0 is none.
const REASONS: [&str; 5] = ["failures", "latency", "unknown", "probes", "envoy"];

impl Point {
    /// How full the pool is now.
    pub fn of(record: &Record, now: Instant) -> Self {
        let mut point = Self { at: now.0, waiting: u32::try_from(record.count_waiting()).unwrap_or(u32::MAX), ..Self::default() };
        for host in record.hosts() {
            point.in_flight = point.in_flight.saturating_add(host.load());
            let slots = match host.state(now) {
                State::Serving => host.max_in_flight,
                _ if host.is_eligible(now) => 1,
                _ => continue,
            };
            point.slots = point.slots.saturating_add(slots);
            point.eligible += 1;
        }
        point
    }
}

impl Entry {
    fn of(event: &Event, now: Instant) -> Option<Self> {
        let new = |kind: &str, address: Option<Address>| Self {
            at: now.0,
            kind: place(&KINDS, kind),
            ip: address.map_or(0, Address::ip),
            port: address.map_or(0, Address::port),
            ..Self::default()
        };
        Some(match event {
            Event::Ejected { address, reason, failures, length } => {
                let failures = if *reason == Reason::Failures { *failures } else { 0 };
                let for_ms = u32::try_from(length.as_millis()).unwrap_or(u32::MAX);
                Self { reason: 1 + place(&REASONS, reason.word()), failures, for_ms, ..new("ejected", Some(*address)) }
            }
            Event::Readmitted(address) => new("readmitted", Some(*address)),
            Event::Unhealthy(address, watcher) => {
                let reason = match watcher {
                    Watcher::Probes => "probes",
                    Watcher::Envoy => "envoy",
                };
                Self { reason: 1 + place(&REASONS, reason), ..new("unhealthy", Some(*address)) }
            }
            Event::Healthy(address) => new("healthy", Some(*address)),
            Event::NoHost => new("no_host", None),
            Event::HostAgain => new("host_again", None),
            Event::PassedOver => return None,
        })
    }

    /// What happened; `None`: another build's word.
    pub fn event(&self) -> Option<&'static str> {
        KINDS.get(usize::from(self.kind)).copied()
    }

    /// Whom it happened to; `None`: to the pool as a whole.
    pub fn host(&self) -> Option<Address> {
        (self.port != 0).then(|| Address::from_bits(self.ip, self.port))
    }

    /// Why, where there is a word for it.
    pub fn reason(&self) -> Option<&'static str> {
        REASONS.get(usize::from(self.reason.checked_sub(1)?)).copied()
    }

    /// For how long the host was ejected, in milliseconds.
    pub fn for_ms(&self) -> Option<u32> {
        (self.event() == Some("ejected")).then_some(self.for_ms)
    }
}

fn place(words: &[&str], word: &str) -> u8 {
    words.iter().position(|known| *known == word).and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX - 1)
}

/// A pool's last minutes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recent {
    points: Vec<Point>,
    events: Vec<Entry>,
}

impl Recent {
    /// What the bytes hold. Whatever they are: nothing where they are not ours, and nothing that lies in the future.
    pub fn parse(bytes: &[u8], now: Instant) -> Self {
        Self::read(bytes, now).unwrap_or_default()
    }

    fn read(bytes: &[u8], now: Instant) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk()?;
        let head = Head::read(head);
        let points = (head.points as usize).checked_mul(Point::BYTES)?;
        let events = (head.events as usize).checked_mul(Entry::BYTES)?;
        if head.magic != MAGIC || rest.len() != points.checked_add(events)? {
            return None;
        }
        let (points, events) = rest.split_at_checked(points)?;
        let mut recent = Self {
            points: points.as_chunks().0.iter().map(Point::read).filter(|point| point.at <= now.0).collect(),
            events: events.as_chunks().0.iter().map(Entry::read).filter(|entry| entry.at <= now.0).collect(),
        };
        recent.trim(now);
        Some(recent)
    }

    /// The bytes to store.
    pub fn bytes(&self) -> Vec<u8> {
        let head = Head { magic: MAGIC, points: self.points.len() as u32, events: self.events.len() as u32 };
        let mut bytes = vec![0; Head::BYTES + self.points.len() * Point::BYTES + self.events.len() * Entry::BYTES];
        let Some((first, rest)) = bytes.split_first_chunk_mut() else { return bytes };
        head.write(first);
        let (points, events) = rest.split_at_mut(self.points.len() * Point::BYTES);
        points.as_chunks_mut().0.iter_mut().zip(&self.points).for_each(|(to, point)| point.write(to));
        events.as_chunks_mut().0.iter_mut().zip(&self.events).for_each(|(to, entry)| entry.write(to));
        bytes
    }

    /// Notes what happened, and how full the pool is, if the last point is old enough. Gives whether there is something new.
    pub fn note(&mut self, events: &[Event], point: Point) -> bool {
        let now = Instant(point.at);
        let mut is_news = false;
        for entry in events.iter().filter_map(|event| Entry::of(event, now)) {
            is_news = true;
            if self.goes_on(&entry) {
                self.events.pop();
            } else {
                self.events.push(entry);
            }
        }
        let is_due = self.points.last().is_none_or(|last| now.since(Instant(last.at)) >= STEP);
        if is_due {
            self.points.push(point);
        }
        self.trim(now);
        is_news || is_due
    }

    /// Whether an entry says that the outage goes on of which the newest one said that it is over. An end of which the beginning was forgotten is kept.
    fn goes_on(&self, entry: &Entry) -> bool {
        let Some((newest, before)) = self.events.split_last() else { return false };
        let of_pool = |entry: &&Entry| entry.host().is_none();
        entry.event() == Some("no_host")
            && newest.event() == Some("host_again")
            && Instant(entry.at).since(Instant(newest.at)) < BRIEF
            && before.iter().rev().find(of_pool).is_some_and(|last| last.event() == Some("no_host"))
    }

    fn trim(&mut self, now: Instant) {
        let is_old = |point: &&Point| now.since(Instant(point.at)) > REACH;
        let old = self.points.iter().take_while(is_old).count();
        self.points.drain(..old.max(self.points.len().saturating_sub(MOST_POINTS)));
        self.events.drain(..self.events.len().saturating_sub(MOST_EVENTS));
    }

    /// How full the pool was, the oldest first.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// What happened, the newest first.
    pub fn events(&self) -> impl Iterator<Item = &Entry> {
        self.events.iter().rev()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::fixture::{address, at, pool_of, record_of};

    fn point(seconds: f64) -> Point {
        Point { at: at(seconds).0, in_flight: seconds as u32, slots: 8, waiting: 1, eligible: 2 }
    }

    fn ejected(host: usize) -> Event {
        Event::Ejected { address: address(host), reason: Reason::Failures, failures: 3, length: Duration::from_secs(10) }
    }

    #[test]
    fn what_was_noted_is_there_after_it_was_stored() {
        let mut recent = Recent::default();
        let events = [
            ejected(1),
            Event::Ejected { address: address(2), reason: Reason::Latency, failures: 1, length: Duration::from_millis(1500) },
            Event::Readmitted(address(1)),
            Event::Unhealthy(address(1), Watcher::Probes),
            Event::Unhealthy(address(2), Watcher::Envoy),
            Event::Healthy(address(1)),
            Event::PassedOver,
            Event::NoHost,
            Event::HostAgain,
        ];
        assert!(recent.note(&events, point(7.0)));
        let read = Recent::parse(&recent.bytes(), at(8.0));
        assert_eq!(read, recent);
        let told: Vec<_> =
            read.events().map(|entry| (entry.event(), entry.host(), entry.reason(), entry.failures, entry.for_ms())).collect();
        let (one, two) = (Some(address(1)), Some(address(2)));
        assert_eq!(
            told,
            [
                (Some("host_again"), None, None, 0, None),
                (Some("no_host"), None, None, 0, None),
                (Some("healthy"), one, None, 0, None),
                (Some("unhealthy"), two, Some("envoy"), 0, None),
                (Some("unhealthy"), one, Some("probes"), 0, None),
                (Some("readmitted"), one, None, 0, None),
                (Some("ejected"), two, Some("latency"), 0, Some(1500)),
                (Some("ejected"), one, Some("failures"), 3, Some(10_000)),
            ]
        );
    }

    #[test]
    fn a_point_is_kept_each_step_and_an_event_at_once() {
        let mut recent = Recent::default();
        assert!(recent.note(&[], point(10.0)));
        assert!(!recent.note(&[], point(11.9)));
        assert!(recent.note(&[ejected(0)], point(11.9)));
        assert!(recent.note(&[], point(12.0)));
        assert_eq!((recent.points(), recent.events().count()), (&[point(10.0), point(12.0)][..], 1));
    }

    #[test]
    fn it_stays_small_however_long_it_goes_on() {
        let mut recent = Recent::default();
        for second in 0..2000 {
            recent.note(&[ejected(0)], point(f64::from(second)));
        }
        assert_eq!((recent.points().len(), recent.events().count()), (MOST_POINTS, MOST_EVENTS));
        assert_eq!(
            (recent.points().last(), recent.events().next().map(|entry| entry.at)),
            (Some(&point(1998.0)), Some(at(1999.0).0))
        );
        assert!(recent.bytes().len() < 5000);
        // A pool that nobody led for a while has no points of that time, nor of before; what happened last is told all the same.
        recent.note(&[], point(3000.0));
        assert_eq!((recent.points(), recent.events().count()), (&[point(3000.0)][..], MOST_EVENTS));
    }

    /// What is told after these happened at these seconds, the oldest first.
    fn told(events: &[(f64, Event)]) -> Vec<(&'static str, f64)> {
        let mut recent = Recent::default();
        for (second, event) in events {
            assert!(recent.note(&[*event], point(*second)), "{event:?} is to be stored");
        }
        let told = recent.events().map(|entry| (entry.event().unwrap(), entry.at as f64 / 1e6));
        told.collect::<Vec<_>>().into_iter().rev().collect()
    }

    #[test]
    fn an_outage_that_flaps_is_one_and_leaves_room_for_what_else_happened() {
        let mut events = vec![(1.0, ejected(0))];
        events.extend((0..100).flat_map(|n| {
            let second = 2.0 + f64::from(n);
            [(second, Event::NoHost), (second + 0.5, Event::HostAgain)]
        }));
        assert_eq!(told(&events), [("ejected", 1.0), ("no_host", 2.0), ("host_again", 101.5)]);
        // While it goes on nothing says that it is over.
        events.pop();
        assert_eq!(told(&events), [("ejected", 1.0), ("no_host", 2.0)]);
    }

    #[test]
    fn another_outage_is_one_of_its_own_and_so_is_one_after_something_else_happened() {
        let pause = [(1.0, Event::NoHost), (2.0, Event::HostAgain), (12.0, Event::NoHost)];
        assert_eq!(told(&pause), [("no_host", 1.0), ("host_again", 2.0), ("no_host", 12.0)]);
        let between = [(1.0, Event::NoHost), (2.0, Event::HostAgain), (3.0, ejected(0)), (4.0, Event::NoHost)];
        assert_eq!(told(&between), [("no_host", 1.0), ("host_again", 2.0), ("ejected", 3.0), ("no_host", 4.0)]);
        let within = [(1.0, Event::NoHost), (2.0, ejected(0)), (3.0, Event::HostAgain), (4.0, Event::NoHost)];
        assert_eq!(told(&within), [("no_host", 1.0), ("ejected", 2.0)]);
        // Where nothing is left of when it began.
        let end = [(1.0, Event::HostAgain), (2.0, Event::NoHost)];
        assert_eq!(told(&end), [("host_again", 1.0), ("no_host", 2.0)]);
    }

    #[test]
    fn the_future_is_not_believed() {
        let mut recent = Recent::default();
        recent.note(&[ejected(0)], point(50.0));
        let mut read = Recent::parse(&recent.bytes(), at(49.0));
        assert_eq!(read, Recent::default());
        assert!(read.note(&[], point(49.0)));
    }

    #[test]
    fn slots_are_those_of_the_hosts_that_take_jobs() {
        let pool = pool_of(4, r#", "max_in_flight": 3"#);
        let mut record = record_of(&pool);
        record.with_host(0, |host| host.in_flight = 2);
        record.with_host(1, |host| host.in_flight = 1);
        record.retire(1);
        record
            .with_host(2, |host| host.eject(Reason::Failures, &pool.failure, at(5.0), &mut crate::core::random::Random::new(1)));
        let seen = |now| Point::of(&record, now);
        assert_eq!(seen(at(5.0)), Point { at: at(5.0).0, in_flight: 3, slots: 6, waiting: 0, eligible: 2 });
        // Once its time is over it takes one job, on trial.
        assert_eq!(seen(at(60.0)), Point { at: at(60.0).0, in_flight: 3, slots: 7, waiting: 0, eligible: 3 });
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_and_what_is_made_of_them_can_be_gone_on_with(
            bytes in proptest::collection::vec(any::<u8>(), 0..300), points in 0u32..4, events in 0u32..4, keep_length in any::<bool>(),
        ) {
            let mut ours = Head { magic: MAGIC, points, events };
            if !keep_length {
                ours.points = u32::MAX - points;
            }
            let mut head = [0; Head::BYTES];
            ours.write(&mut head);
            let length = points as usize * Point::BYTES + events as usize * Entry::BYTES;
            let body: Vec<u8> = bytes.iter().copied().cycle().take(if bytes.is_empty() { 0 } else { length }).collect();
            for bytes in [bytes, [&head[..], &body].concat()] {
                let mut recent = Recent::parse(&bytes, Instant(u64::MAX));
                recent.events().for_each(|entry| assert!(entry.event().is_none_or(|word| KINDS.contains(&word)), "{entry:?} {:?} {:?}", entry.host(), entry.reason()));
                recent.note(&[ejected(0)], point(1.0));
                prop_assert!(recent.bytes().len() < 5000);
            }
        }
    }
}
