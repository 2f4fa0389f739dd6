//! What hosts have to do, by their own word: one worker asks each host for its pages, for all.
//!
//! ```text
//! leader's tick ─► GET /metrics of a host, through the pool's own cluster ─► a reading ─► the pool's record, with the leader's next tick
//!                        └─► anything else: counted; what the page said before is believed for a while, and then is unknown
//! ```
//!
//! Where a host has several pages (ComfyUI), its reading is what they say together, each as long as it is believed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

use super::metrics::{Family, Of};
use super::watch::Purpose;
use super::worker::Worker;
use crate::config::{Pool, Scrape};
use crate::core::address::Address;
use crate::core::poller::Poller;
use crate::core::random::Random;
use crate::core::reading::Reading;
use crate::core::record::Record;
use crate::core::report::{self, Statement};
use crate::core::time::Instant;
use crate::host::{Host, Level};

/// A longer page is not read: 50 times what vLLM writes, and little enough for a VM whose memory never shrinks.
const MOST_BYTES: usize = 2 << 20;

/// Most questions in one tick: with all hosts of the largest pool new at once, they are asked within 2 s.
const MOST_AT_ONCE: usize = 64;

/// New hosts are asked within this time, or within their interval if that is shorter: all of them, but not at once.
const SPREAD: Duration = Duration::from_secs(2);

/// How much later than its timeout an answer may come before it is believed to be lost, as with a root that Envoy deleted meanwhile.
const LOST_AFTER: Duration = Duration::from_secs(5);

/// A page of a host.
type Page = (Address, usize);

/// The questions to the hosts of one pool, and what was answered.
#[derive(Default)]
pub struct Scrapes {
    /// By what is asked; what was asked by another configuration is forgotten.
    by: Option<Scrape>,
    pages: BTreeMap<Page, Asked>,
    /// Who was asked last: the next one comes first at the next tick.
    last: Option<Page>,
    /// Hosts that said something since this was last taken.
    news: BTreeSet<Address>,
}

/// What is known of a page.
struct Asked {
    poller: Poller,
    /// Not before this is it asked for the first time; zero: it was.
    from: Instant,
    open: Option<Question>,
    said: Option<Said>,
    /// Whether the log says that it cannot be read.
    is_told: bool,
}

/// A question that is open.
#[derive(Clone, Copy)]
struct Question {
    token: u32,
    asked: Instant,
    /// See [`Statement::ended`].
    ended: u32,
}

/// What a page said.
#[derive(Clone, Copy)]
struct Said {
    reading: Reading,
    at: Instant,
    /// See [`Statement::ended`].
    ended: u32,
}

impl Scrapes {
    /// Forgets all: somebody else asks now, or nobody.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// What the hosts said since this was last called, each with the time of the answer (where a host has several pages, of the one that counts its jobs).
    pub fn take(&mut self) -> Vec<Statement> {
        let news = std::mem::take(&mut self.news);
        news.into_iter().filter_map(|address| self.statement(address)).collect()
    }

    fn statement(&self, address: Address) -> Option<Statement> {
        let said: Vec<Said> =
            self.pages.range((address, 0)..=(address, usize::MAX)).filter_map(|(_, asked)| asked.said).collect();
        let newest = said.iter().max_by_key(|said| said.at)?;
        let believed_for = self.by.as_ref()?.stale_after();
        let fresh = || said.iter().filter(|said| newest.at.since(said.at) <= believed_for);
        let counts = fresh().filter(|said| said.reading.counts_jobs()).max_by_key(|said| said.at).unwrap_or(newest);
        let reading = fresh().fold(Reading::default(), |all, said| all.and(said.reading));
        Some(Statement { address, reading, at: counts.at, ended: counts.ended })
    }

    /// The pages to ask for now. Each must be asked for: it is noted as open.
    fn due(&mut self, hosts: &[Address], scrape: &Scrape, now: Instant, random: &mut Random) -> Vec<Page> {
        if self.by.as_ref() != Some(scrape) {
            self.forget();
            self.by = Some(scrape.clone());
        }
        let there: BTreeSet<&Address> = hosts.iter().collect();
        self.pages.retain(|(address, _), _| there.contains(address));
        self.news.retain(|address| there.contains(address));
        let spread = SPREAD.min(scrape.interval);
        for address in hosts {
            for page in 0..scrape.paths.len() {
                self.pages.entry((*address, page)).or_insert_with(|| Asked::new(now + spread.mul_f64(random.unit())));
            }
        }
        // In turn: otherwise the last of many would never be asked.
        let (after, before) = match self.last {
            Some(last) => (Bound::Excluded(last), Bound::Included(last)),
            None => (Bound::Unbounded, Bound::Excluded((Address::from_bits(0, 0), 0))),
        };
        let mut due = Vec::new();
        for range in [(after, Bound::Unbounded), (Bound::Unbounded, before)] {
            for (page, asked) in self.pages.range_mut(range) {
                if due.len() < MOST_AT_ONCE && asked.is_due(scrape, now, random) {
                    due.push(*page);
                }
            }
        }
        self.last = due.last().copied().or(self.last);
        due
    }
}

impl Asked {
    fn new(from: Instant) -> Self {
        Self { poller: Poller::default(), from, open: None, said: None, is_told: false }
    }

    fn is_due(&mut self, scrape: &Scrape, now: Instant, random: &mut Random) -> bool {
        // A clock that stepped back must not put the first question off.
        self.from = self.from.min(now + SPREAD);
        let is_lost = |asked: Instant| !(asked..asked + scrape.timeout + LOST_AFTER).contains(&now);
        self.open = self.open.filter(|open| !is_lost(open.asked));
        let is_due = self.from <= now && self.open.is_none() && self.poller.is_due(scrape.interval, now, random);
        if is_due {
            self.from = Instant::default();
        }
        is_due
    }
}

impl<H: Host> Worker<H> {
    /// Asks the hosts of a pool whose time has come. Only the leader does.
    pub(super) fn scrape(&mut self, name: &Rc<str>, pool: &Pool, scrape: &Scrape, record: &Record) {
        let now = self.host.now();
        let Some(books) = self.books.get_mut(&**name) else {
            return;
        };
        // Of all live configurations: one that only an older one names has jobs all the same.
        let hosts: Vec<Address> = books.book.named().collect();
        for (address, page) in books.watch.scrapes.due(&hosts, scrape, now, &mut self.random) {
            let Some(path) = scrape.paths.get(page) else {
                continue;
            };
            let text = address.to_string();
            let headers = [(":method", "GET"), (":path", path.as_str()), (":authority", &text), (&*pool.override_header, &text)];
            match self.host.call(name, &headers, b"", scrape.timeout) {
                Ok(token) => {
                    if let Some(asked) = self.asked(name, (address, page)) {
                        asked.open = Some(Question { token, asked: now, ended: report::ended(record, address) });
                    }
                    self.calls(token, Purpose::Scrape { pool: name.clone(), address, page });
                }
                Err(fault) => {
                    let what = format!("Envoy did not send the question (status {})", fault.0);
                    self.scrape_answered(name, (address, page), scrape, Err(what), 0);
                }
            }
        }
    }

    fn asked(&mut self, name: &str, page: Page) -> Option<&mut Asked> {
        self.books.get_mut(name)?.watch.scrapes.pages.get_mut(&page)
    }

    /// A page has come, or something else.
    pub(super) fn scraped(&mut self, name: &str, page: Page, token: u32, status: Option<&[u8]>, size: usize) {
        let Some(scrape) =
            self.books.get(name).filter(|books| books.watch.leads()).and_then(|books| books.watch.scrapes.by.clone())
        else {
            return;
        };
        // An answer to another question: it was given up, or asked by another configuration.
        let open = self.asked(name, page).and_then(|asked| asked.open).filter(|open| open.token == token);
        let Some(Question { ended, .. }) = open else {
            return;
        };
        let said = self.read_answer(&scrape, status, size);
        self.scrape_answered(name, page, &scrape, said, ended);
    }

    fn read_answer(&self, scrape: &Scrape, status: Option<&[u8]>, size: usize) -> Result<Reading, String> {
        match status {
            Some(b"200") if size > MOST_BYTES => Err(format!("the page has {size} bytes; at most {MOST_BYTES} are read")),
            Some(b"200") => match self.host.body(size) {
                Some(page) => scrape.preset.read(&page),
                None => Err("the page is empty".to_owned()),
            },
            Some(b"503") => Err("the answer was 503, which is Envoy's own where it cannot reach the host".to_owned()),
            Some(b"504") => Err(format!("no answer within {} ms, or a status of 504", scrape.timeout.as_millis())),
            Some(status) => Err(format!("the answer was {}", String::from_utf8_lossy(status))),
            None => Err("the answer was cut off, or longer than Envoy keeps".to_owned()),
        }
    }

    fn scrape_answered(&mut self, name: &str, (address, page): Page, scrape: &Scrape, said: Result<Reading, String>, ended: u32) {
        let now = self.host.now();
        let Some(asked) = self.asked(name, (address, page)) else {
            return;
        };
        asked.open = None;
        let had_failed = asked.poller.answered(said.is_ok(), scrape.interval, now);
        let is_told = asked.is_told;
        let outcome = if said.is_ok() { "read" } else { "failed" };
        self.count(Family::Scrapes, name, Of::HostAnd(Some(address), outcome), 1);
        let path = scrape.paths.get(page).map_or("", String::as_str);
        match said {
            Ok(reading) => {
                if let Some(asked) = self.asked(name, (address, page)) {
                    (asked.said, asked.is_told) = (Some(Said { reading, at: now, ended }), false);
                }
                if let Some(books) = self.books.get_mut(name) {
                    books.watch.scrapes.news.insert(address);
                }
                if had_failed {
                    self.say("scrape again", Level::Info, || format!("pool {name}: {path} of {address} is read again"));
                }
            }
            // One of a row is told; the counter has them all. Where many fail at once, each has its line in its turn.
            Err(what) if !is_told => {
                let then = scrape.stale_after().as_secs_f64();
                let is_told = self.say_in_turn("scrape", Level::Warn, || {
                    format!(
                        "pool {name}: could not read {path} of {address}: {what}; what it said before is unknown once that is {then:.1} s old"
                    )
                });
                if let Some(asked) = self.asked(name, (address, page)) {
                    asked.is_told = is_told;
                }
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests;
