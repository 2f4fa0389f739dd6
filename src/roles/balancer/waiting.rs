//! A stream that may have to wait: what the queue wants to know of it, and what becomes of it.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Leased, Stream, kind};
use crate::config::{Pool, Source};
use crate::core::choice::Kind;
use crate::core::hash;
use crate::core::learning::{self, Job, Label};
use crate::core::queue::Priority;
use crate::host::{Headers, Host};
use crate::roles::worker::{Fate, Request, Sent};

impl<H: Host> Stream<H> {
    /// What the choice wants to know of the request.
    pub(super) fn describe(&self, pool: &Pool, headers: &Headers) -> Request {
        let (kind, mut priority, mut tenant) = (kind(pool, headers), Priority::Normal, 0);
        if pool.queue.is_some() && kind == Kind::Job {
            if let Some(priorities) = &pool.priority {
                let word = self.said(&priorities.source, headers);
                priority = word.and_then(|word| Priority::parse(&word)).unwrap_or(priorities.default);
            }
            tenant = pool.tenant.as_ref().and_then(|source| self.said(source, headers)).map_or(0, |name| tenant_of(&name));
        }
        let job = if pool.wants_job() { self.job(pool, headers) } else { Job::unknown() };
        Request { stream: self.id, kind, priority, tenant, job }
    }

    /// What is known of the job before it runs.
    fn job(&self, pool: &Pool, headers: &Headers) -> Job {
        let said = |source: &Option<Source>| source.as_ref().and_then(|source| self.said(source, headers));
        let label = said(&pool.class).map_or(Job::unknown().label, |name| Label::of(&name));
        let session = pool.session.as_ref().and_then(|session| self.said(&session.source, headers));
        Job {
            label,
            cost: said(&pool.cost).and_then(|cost| learning::cost(&cost)),
            session: session.map(|key| hash::Hash::of(&key)),
        }
    }

    /// What the operator's own stack says of the request.
    fn said(&self, source: &Source, headers: &Headers) -> Option<Vec<u8>> {
        let said = match source {
            Source::Header(name) => headers.only(name.as_bytes()).map(<[u8]>::to_vec),
            Source::Claim(path) | Source::Classified(path) => self.host.property(path),
        };
        said.filter(|said| !said.is_empty())
    }

    /// Takes over what has become of a stream that waited. Gives whether it still waits.
    pub(super) fn learn_fate(&mut self) -> bool {
        let Some((name, fate)) = self.waits.take() else {
            return false;
        };
        match fate.take() {
            Fate::Waits => {
                self.waits = Some((name, fate));
                return true;
            }
            Fate::Sent(Sent { pool, to, why }) => {
                (self.leased, self.sent_to, self.why) = (Some(Leased { name, pool }), to, why);
            }
            Fate::Answered(why) => self.why = why,
        }
        false
    }

    /// The stream ends, or is answered, while it waits.
    pub(super) fn leave_queue(&mut self) {
        if let Some((name, _)) = self.waits.take()
            && let Ok(mut worker) = self.worker.try_borrow_mut()
        {
            worker.leaves_queue(&name, self.id);
        }
    }
}

/// Hash of a tenant's name; never 0.
fn tenant_of(name: &[u8]) -> u32 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    (hasher.finish() as u32).max(1)
}
