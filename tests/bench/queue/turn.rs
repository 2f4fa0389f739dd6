//! One turn of a system: a record's jobs through it, and what became of them.

use std::time::{Duration, Instant};

use support::Times;
use support::trace::{Account, Arrival, Ran};

use super::alarm::Alarm;
use super::cards::{Cards, Seen};
use super::systems::System;

/// What one system showed in one round at one load; or what a simulation would.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// Of the jobs that were served.
    pub latencies: Vec<Duration>,
    /// When each job was answered, from the start of the turn, by its number; none if it was not served.
    pub answered: Vec<Option<Duration>>,
    pub account: Account,
    /// Jobs that were refused, cut off, never answered, or that ran twice.
    pub errors: usize,
    /// What a lone job takes longer than on the card, if that was asked.
    pub hops: Vec<Duration>,
    /// How much later than they were due this program sent the jobs.
    pub sent_late: Vec<Duration>,
    /// How much longer than they should the cards of this program ran them.
    pub ran_over: Vec<Duration>,
    /// How many jobs each card ran.
    pub by_card: Vec<usize>,
    /// Of the system, for all jobs.
    pub cpu: Duration,
    /// Of this program: clients and cards.
    pub own_cpu: Duration,
    /// In which others had a core that the system or this program wanted.
    pub disturbed: Duration,
    pub took: Duration,
}

impl Turn {
    /// Of jobs that were only simulated, on so many cards, if each is answered so much later than it ends.
    pub fn simulated(jobs: &[Ran], cards: usize, hop: Duration) -> Self {
        let latencies = jobs.iter().map(|job| job.ended - job.arrived + hop).collect();
        let answered = jobs.iter().map(|job| Some(job.ended + hop)).collect();
        let mut by_card = vec![0; cards];
        jobs.iter().for_each(|job| by_card[job.card] += 1);
        Self { latencies, answered, by_card, account: Account::of(jobs, cards), ..Self::default() }
    }

    pub async fn take<K>(system: &mut System<K>, record: &[Arrival], cards: &Cards, alarm: &Alarm) -> Self {
        let (front, own, began) = (system.times(), Times::own(), Instant::now());
        let asked = system.clients.run(record, cards, alarm).await;
        let (took, front_now, own_now) = (began.elapsed(), system.times(), Times::own());
        let log = cards.end();
        let mut turn = Self {
            errors: log.again,
            answered: vec![None; record.len()],
            by_card: vec![0; cards.speeds.len()],
            took,
            cpu: front_now.ran - front.ran,
            own_cpu: own_now.ran - own.ran,
            disturbed: (front_now.waited - front.waited) + (own_now.waited - own.waited),
            ..Self::default()
        };
        let mut jobs = Vec::with_capacity(record.len());
        for asked in asked {
            let Arrival { at: due, length, .. } = record[asked.number];
            turn.sent_late.push(asked.sent.saturating_sub(due));
            match log.jobs[asked.number].filter(|_| asked.well) {
                Some(seen) => {
                    turn.latencies.push(asked.answered - due);
                    turn.answered[asked.number] = Some(asked.answered);
                    let Seen { card, reached, started, ended } = seen;
                    turn.by_card[card] += 1;
                    turn.ran_over.push((ended - started).saturating_sub(length.div_f64(cards.speeds[card])));
                    // What the system had not yet been sent, it could not give to a card.
                    jobs.push(Ran { arrived: asked.sent, reached, started, ended, card });
                }
                None => turn.errors += 1,
            }
        }
        turn.account = Account::of(&jobs, cards.speeds.len());
        turn
    }
}
