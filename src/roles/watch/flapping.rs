//! What may change with every answer of a host: told at once, but not as often as it changes. Whoever can make a host answer 429 must not fill the log.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use crate::core::address::Address;
use crate::core::health::State;
use crate::core::lookout::Event;
use crate::core::record::Record;
use crate::core::time::Instant;
use crate::host::{Host, Level};
use crate::roles::worker::Worker;

/// For how long the pool has had a host when that is told. Hosts that ask for short rests, all of them, end an outage many times before it is over.
const STANDS: Duration = Duration::from_secs(5);

/// How often a line says that hosts are busy: some are with each second job.
const BUSY_EACH: Duration = Duration::from_secs(10);

/// What a leader has told of a pool.
#[derive(Default)]
pub(super) struct Flapping {
    busy: BTreeSet<Address>,
    /// Whether there was a host by the last line.
    told: Option<bool>,
    /// Whether there is one by the last event, and since when.
    untold: Option<(bool, Instant)>,
}

impl Flapping {
    /// Notes what became of the pool.
    pub fn note(&mut self, event: &Event, now: Instant) {
        match event {
            Event::NoHost => self.untold = Some((false, now)),
            Event::HostAgain => self.untold = Some((true, now)),
            _ => {}
        }
    }

    /// Whether there is a host, if that is to be told now: it is news, and a good one has stood for a while.
    fn due(&mut self, now: Instant) -> Option<bool> {
        if self.untold.is_some_and(|(has_host, since)| has_host && (since..since + STANDS).contains(&now)) {
            return None;
        }
        self.untold()
    }

    /// The same, however short a time that has stood.
    fn untold(&mut self) -> Option<bool> {
        let (has_host, _) = self.untold.take()?;
        let is_news = self.told != Some(has_host);
        self.told = Some(has_host);
        is_news.then_some(has_host)
    }

    /// Those that have become busy, as the log says it.
    fn busier(&mut self, record: &Record, now: Instant) -> Vec<String> {
        let busy = || record.hosts().filter(|host| !host.is_retired() && host.state(now) == State::Busy);
        let news = busy().filter(|host| !self.busy.contains(&host.address())).map(|host| {
            let why = if host.rests() { "it failed at once" } else { "it asked us to wait" };
            format!("{} is busy for {}: {why}", host.address(), seconds(host.busy_for(now)))
        });
        let news = news.collect();
        self.busy = busy().map(|host| host.address()).collect();
        news
    }
}

/// The shortest rests are of a quarter of a second.
fn seconds(time: Duration) -> String {
    let decimals = if time < Duration::from_secs(1) { 2 } else { 1 };
    format!("{:.decimals$} s", time.as_secs_f64())
}

impl<H: Host> Worker<H> {
    /// Once a tick where this worker leads.
    pub(super) fn tell_what_flaps(&mut self, name: &Rc<str>, record: &Record, now: Instant) {
        let Some(flapping) = self.watch_of(name).map(|watch| &mut watch.flapping) else {
            return;
        };
        let (has_host, busy) = (flapping.due(now), flapping.busier(record, now));
        self.tell_whether_there_is_a_host(name, has_host);
        for line in busy {
            self.said.say(&self.host, BUSY_EACH, ("busy", Level::Info), || format!("pool {name}: {line}"));
        }
    }

    /// Where another worker takes the lead: it knows only that all was told.
    pub(super) fn tell_what_is_left(&mut self, name: &Rc<str>) {
        let mut flapping = self.watch_of(name).map(|watch| std::mem::take(&mut watch.flapping)).unwrap_or_default();
        self.tell_whether_there_is_a_host(name, flapping.untold());
    }

    fn tell_whether_there_is_a_host(&self, name: &str, news: Option<bool>) {
        match news {
            Some(true) => self.host.log(Level::Info, &format!("plimsoll: pool {name}: a host is eligible again")),
            Some(false) => self.host.log(Level::Error, &format!("plimsoll: pool {name}: no host is eligible")),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixture::at;

    /// What is told, by the second at which it happens and is looked at, a tenth apart.
    fn told(events: &[(f64, Event)]) -> Vec<(f64, bool)> {
        let mut flapping = Flapping::default();
        let mut told = Vec::new();
        for tenth in 0..200 {
            let now = f64::from(tenth) / 10.0;
            events
                .iter()
                .filter(|(when, _)| (when * 10.0).round() == f64::from(tenth))
                .for_each(|(_, event)| flapping.note(event, at(now)));
            told.extend(flapping.due(at(now)).map(|has_host| (now, has_host)));
        }
        told
    }

    #[test]
    fn bad_news_is_told_at_once_and_good_news_once_it_has_stood() {
        let events = [(1.0, Event::NoHost), (3.0, Event::HostAgain), (8.1, Event::NoHost), (8.2, Event::HostAgain)];
        assert_eq!(told(&events), [(1.0, false), (8.0, true), (8.1, false), (13.2, true)]);
    }

    #[test]
    fn a_pool_that_flaps_is_told_of_once_and_the_last_word_is_true() {
        let mut flaps: Vec<(f64, Event)> = (10..100)
            .map(|tenth| (f64::from(tenth) / 10.0, if tenth % 2 == 0 { Event::NoHost } else { Event::HostAgain }))
            .collect();
        assert_eq!(told(&flaps), [(1.0, false), (14.9, true)]);
        flaps.pop();
        assert_eq!(told(&flaps), [(1.0, false)]);
    }

    #[test]
    fn a_quarter_of_a_second_is_one() {
        let told = [250, 1000, 59_960].map(|millis| seconds(Duration::from_millis(millis)));
        assert_eq!(told, ["0.25 s", "1.0 s", "60.0 s"]);
    }

    #[test]
    fn what_was_held_back_is_told_when_another_worker_takes_the_lead() {
        let mut flapping = Flapping::default();
        flapping.note(&Event::NoHost, at(1.0));
        assert_eq!((flapping.due(at(1.0)), flapping.untold()), (Some(false), None));
        flapping.note(&Event::HostAgain, at(1.5));
        assert_eq!((flapping.due(at(1.5)), flapping.untold()), (None, Some(true)));
    }
}
