//! Jobs as they are recorded, what became of them, and the best that could have: one queue in front of all cards, or, where
//! cards differ, each job on the card that is done with it first.
//!
//! A *card* is a GPU that runs one job at a time; a job that is handed to a busy card waits inside it, first in, first out. It
//! takes a job's length, divided by the card's speed.
//! Nothing here runs anything: a simulation and the accounts of a run are pure functions. All times are from the start of the
//! run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Exp1};

/// A job to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When it is due.
    pub at: Duration,
    /// How long a card of speed 1 runs it.
    pub length: Duration,
    /// Which part of the mix it is of.
    pub class: usize,
}

/// Poisson arrivals of a mix of jobs (parts of the whole, and how long they run) that offer this load to cards whose speeds
/// together are so much. The same seed gives the same.
///
/// Of each length there are exactly as many as the mix says, in random order, and the arrivals are stretched to the load
/// exactly: what is left of a Poisson process if the number of its arrivals is known. Of a thousand jobs by chance, the load
/// would be off by some hundredths, which at 0.95 makes all the difference.
pub fn poisson(mix: &[(f64, Duration)], load: f64, speed: f64, jobs: usize, seed: u64) -> Vec<Arrival> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut exponential = || -> f64 { Exp1.sample(&mut random) };
    let parts: f64 = mix.iter().map(|(part, _)| part).sum();
    let (mut lengths, mut so_far) = (Vec::with_capacity(jobs), 0.0);
    for (class, (part, length)) in mix.iter().enumerate() {
        so_far += part;
        lengths.resize((jobs as f64 * so_far / parts).round() as usize, (class, *length));
    }
    let mut order: Vec<(f64, (usize, Duration))> = lengths.into_iter().map(|length| (exponential(), length)).collect();
    order.sort_by(|one, other| one.0.total_cmp(&other.0));
    let work: Duration = order.iter().map(|(_, (_, length))| *length).sum();
    let whole = work.as_secs_f64() / (load * speed);
    // One gap more than there are jobs: from the last of them to the end.
    let gaps: Vec<f64> = (0..=jobs).map(|_| exponential()).collect();
    let stretch = whole / gaps.iter().sum::<f64>();
    let mut now = 0.0;
    order
        .into_iter()
        .zip(gaps)
        .map(|((_, (class, length)), gap)| {
            now += gap * stretch;
            Arrival { at: Duration::from_secs_f64(now), length, class }
        })
        .collect()
}

/// What became of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// When it was due.
    pub arrived: Duration,
    /// When a card got it.
    pub reached: Duration,
    /// When that card began with it.
    pub started: Duration,
    /// When that card was done with it.
    pub ended: Duration,
    /// Which it was.
    pub card: usize,
}

/// The ideal: one queue in front of cards of these speeds, first in, first out, each job to the card that has been free for
/// longest, and no time lost on any way. `pause` passes before a card that was waited for begins with the next job; zero for the
/// ideal itself.
///
/// Arrivals must be in order.
pub fn one_queue(arrivals: &[Arrival], speeds: &[f64], pause: Duration) -> Vec<Ran> {
    let mut free: BinaryHeap<_> = (0..speeds.len()).map(|card| Reverse((Duration::ZERO, card))).collect();
    arrivals
        .iter()
        .map(|Arrival { at, length, .. }| {
            let Reverse((since, card)) = free.pop().expect("at least one card");
            let started = if since > *at { since + pause } else { *at };
            let ended = started + length.div_f64(speeds[card]);
            free.push(Reverse((ended, card)));
            Ran { arrived: *at, reached: started, started, ended, card }
        })
        .collect()
}

/// The limit where cards differ: each job goes, when it arrives, to the card that will be done with it first, by the true
/// lengths and speeds, and no time is lost on any way. Among cards of one speed it is [`one_queue`].
///
/// Arrivals must be in order.
pub fn earliest_completion(arrivals: &[Arrival], speeds: &[f64]) -> Vec<Ran> {
    let mut free = vec![Duration::ZERO; speeds.len()];
    arrivals
        .iter()
        .map(|Arrival { at, length, .. }| {
            let done = |card: usize| free[card].max(*at) + length.div_f64(speeds[card]);
            let card = (0..speeds.len()).min_by_key(|card| done(*card)).expect("at least one card");
            let (started, ended) = (free[card].max(*at), done(card));
            free[card] = ended;
            Ran { arrived: *at, reached: *at, started, ended, card }
        })
        .collect()
}

/// How well a run used its cards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// All cards together, until the last job ended.
    pub card_time: Duration,
    /// The part of it in which a card was idle while a job waited, wherever: at each moment the idle cards, but no more of them
    /// than jobs waited.
    pub idle: Duration,
    /// The longest time for which one card was idle while somebody waited.
    pub longest_idle: Duration,
    /// From the end of a job to the start of the next on the same card, each time that there was a job waiting for which no
    /// other card was free.
    pub gaps: Vec<Duration>,
    /// The most jobs that a card had at once, running and waiting inside it.
    pub most_held: usize,
}

/// In the order in which they happen where the clock cannot tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ended,
    Arrived,
    Reached,
    Started,
}

#[derive(Clone, Copy, Default)]
struct Card {
    busy: bool,
    held: usize,
    /// When its last job ended, if somebody waited for the card.
    wanted_since: Option<Duration>,
    /// Since when it has been idle while somebody waited.
    idle_since: Option<Duration>,
}

impl Account {
    /// Of these jobs on so many cards.
    pub fn of(jobs: &[Ran], cards: usize) -> Self {
        let mut events: Vec<(Duration, Event, usize)> = jobs
            .iter()
            .flat_map(|job| {
                let Ran { arrived, reached, started, ended, card } = *job;
                [
                    (arrived, Event::Arrived, card),
                    (reached, Event::Reached, card),
                    (started, Event::Started, card),
                    (ended, Event::Ended, card),
                ]
            })
            .collect();
        events.sort_unstable();
        let mut account = Self::default();
        let mut cards = vec![Card::default(); cards];
        let (mut waiting, mut before) = (0_usize, Duration::ZERO);
        for (now, event, card) in events {
            let idle = cards.iter().filter(|card| !card.busy).count();
            account.idle += (now - before) * idle.min(waiting) as u32;
            before = now;
            account.take(now, event, &mut cards[card], &mut waiting, idle);
            for card in &mut cards {
                match (card.idle_since, !card.busy && waiting > 0) {
                    (None, true) => card.idle_since = Some(now),
                    (Some(since), false) => {
                        account.longest_idle = account.longest_idle.max(now - since);
                        card.idle_since = None;
                    }
                    _ => {}
                }
            }
        }
        account.card_time = before * cards.len() as u32;
        account
    }

    /// `idle` cards there were before it.
    fn take(&mut self, now: Duration, event: Event, card: &mut Card, waiting: &mut usize, idle: usize) {
        match event {
            Event::Arrived => *waiting += 1,
            Event::Reached => {
                card.held += 1;
                self.most_held = self.most_held.max(card.held);
            }
            Event::Started => {
                card.busy = true;
                *waiting -= 1;
                self.gaps.extend(card.wanted_since.take().map(|since| now - since));
            }
            Event::Ended => {
                card.busy = false;
                card.held -= 1;
                card.wanted_since = (*waiting > idle).then_some(now);
            }
        }
    }

    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        self.card_time += other.card_time;
        self.idle += other.idle;
        self.longest_idle = self.longest_idle.max(other.longest_idle);
        self.gaps.extend_from_slice(&other.gaps);
        self.most_held = self.most_held.max(other.most_held);
    }

    /// The part of the cards' time that was lost, 0 to 1.
    pub fn idle_share(&self) -> f64 {
        self.idle.as_secs_f64() / self.card_time.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIX: [(f64, Duration); 3] =
        [(0.70, Duration::from_millis(800)), (0.25, Duration::from_millis(4_000)), (0.05, Duration::from_millis(6_000))];

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn arrivals(of: &[(u64, u64)]) -> Vec<Arrival> {
        of.iter().map(|(at, length)| Arrival { at: ms(*at), length: ms(*length), class: 0 }).collect()
    }

    /// Arrived, reached, started, ended, card.
    fn ran(of: &[[u64; 5]]) -> Vec<Ran> {
        let job = |[arrived, reached, started, ended, card]: &[u64; 5]| Ran {
            arrived: ms(*arrived),
            reached: ms(*reached),
            started: ms(*started),
            ended: ms(*ended),
            card: *card as usize,
        };
        of.iter().map(job).collect()
    }

    #[test]
    fn a_record_has_its_mix_and_its_load_and_is_the_same_for_the_same_seed() {
        let record = poisson(&MIX, 0.95, 8.0, 1_000, 7);
        assert_eq!(record, poisson(&MIX, 0.95, 8.0, 1_000, 7));
        assert_ne!(record, poisson(&MIX, 0.95, 8.0, 1_000, 8));
        assert!(record.is_sorted_by_key(|arrival| arrival.at));
        let of = |length| record.iter().filter(|arrival| arrival.length == ms(length)).count();
        assert_eq!([of(800), of(4_000), of(6_000)], [700, 250, 50]);
        assert!(record.iter().all(|arrival| arrival.length == MIX[arrival.class].1));
        let whole = 1_860.0 / (8.0 * 0.95);
        let last = record.last().map(|arrival| arrival.at.as_secs_f64()).expect("a thousand jobs");
        assert!(last < whole && last > 0.95 * whole, "the last of them is due at {last} of {whole} seconds");
    }

    #[test]
    fn gaps_of_a_record_are_exponential() {
        let record = poisson(&MIX, 0.85, 8.0, 20_000, 3);
        let gaps: Vec<f64> = record.windows(2).map(|pair| (pair[1].at - pair[0].at).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let spread = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        // An exponential distribution's deviation is its mean.
        assert!((spread / mean - 1.0).abs() < 0.03, "{spread} beside {mean}");
    }

    #[test]
    fn the_ideal_gives_a_free_card_the_job_that_has_waited_longest() {
        let record = arrivals(&[(0, 50), (0, 20), (10, 30), (12, 5), (100, 1)]);
        let jobs = one_queue(&record, &[1.0; 2], Duration::ZERO);
        let times: Vec<_> = jobs.iter().map(|job| (job.started, job.ended, job.card)).collect();
        assert_eq!(times[..2], [(ms(0), ms(50), 0), (ms(0), ms(20), 1)]);
        assert_eq!(times[2..4], [(ms(20), ms(50), 1), (ms(50), ms(55), 0)]);
        assert_eq!((times[4].0, times[4].1), (ms(100), ms(101)));
        let account = Account::of(&jobs, 2);
        assert_eq!((account.idle, account.longest_idle, account.most_held), (Duration::ZERO, Duration::ZERO, 1));
        assert_eq!(account.gaps, [Duration::ZERO; 2]);
    }

    #[test]
    fn the_ideal_wastes_nothing_at_any_load() {
        for (seed, load) in [(1, 0.5), (2, 0.85), (3, 0.95), (4, 1.2)] {
            let record = poisson(&MIX, load, 8.0, 2_000, seed);
            let jobs = one_queue(&record, &[1.0; 8], Duration::ZERO);
            assert!(jobs.is_sorted_by_key(|job| job.started), "first in, first out");
            let account = Account::of(&jobs, 8);
            assert_eq!((account.idle, account.most_held), (Duration::ZERO, 1));
            assert!(account.gaps.iter().all(Duration::is_zero) && !account.gaps.is_empty());
        }
    }

    #[test]
    fn one_card_waits_as_lindleys_recursion_says() {
        let record = poisson(&MIX, 0.9, 1.0, 500, 11);
        let jobs = one_queue(&record, &[1.0], Duration::ZERO);
        let mut free = Duration::ZERO;
        for (arrival, job) in record.iter().zip(&jobs) {
            assert_eq!(job.started, arrival.at.max(free));
            free = job.started + arrival.length;
        }
    }

    #[test]
    fn the_limit_gives_a_job_to_the_card_that_is_done_with_it_first() {
        let record = arrivals(&[(0, 40), (0, 40), (0, 10), (0, 40), (90, 8)]);
        let jobs = earliest_completion(&record, &[1.0, 0.5, 2.0]);
        let times: Vec<_> = jobs.iter().map(|job| (job.started, job.ended, job.card)).collect();
        // The second would be done at 40 on card 0 as on card 2 behind the first; the fourth waits for card 2 rather than for any other.
        assert_eq!(times[..2], [(ms(0), ms(20), 2), (ms(0), ms(40), 0)]);
        assert_eq!(times[2..4], [(ms(0), ms(20), 1), (ms(20), ms(40), 2)]);
        assert_eq!(times[4], (ms(90), ms(94), 2));
        assert_eq!(Account::of(&jobs, 3).most_held, 2);
    }

    #[test]
    fn the_limit_on_equal_cards_is_one_queue() {
        let record = poisson(&MIX, 0.9, 8.0, 1_000, 5);
        let times = |jobs: Vec<Ran>| jobs.iter().map(|job| (job.started, job.ended)).collect::<Vec<_>>();
        let limit = times(earliest_completion(&record, &[1.0; 8]));
        assert_eq!(limit, times(one_queue(&record, &[1.0; 8], Duration::ZERO)));
    }

    #[test]
    fn the_limit_beats_one_queue_where_cards_differ() {
        let speeds = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0];
        let record = poisson(&MIX, 0.85, speeds.iter().sum(), 4_000, 9);
        let p99 = |jobs: Vec<Ran>| {
            let mut latencies: Vec<Duration> = jobs.iter().map(|job| job.ended - job.arrived).collect();
            latencies.sort_unstable();
            latencies[3_960]
        };
        let (limit, queue) = (earliest_completion(&record, &speeds), one_queue(&record, &speeds, Duration::ZERO));
        // The job that has waited longest may get a card of half the speed.
        assert!(queue.iter().any(|job| job.ended - job.started == ms(12_000)));
        assert!(p99(limit) < p99(queue));
    }

    #[test]
    fn a_pause_is_before_jobs_that_waited_only() {
        let jobs = one_queue(&arrivals(&[(0, 10), (5, 10), (40, 10)]), &[1.0], ms(2));
        let times: Vec<_> = jobs.iter().map(|job| job.started).collect();
        assert_eq!(times, [ms(0), ms(12), ms(40)]);
        assert_eq!(Account::of(&jobs, 1).gaps, [ms(2)]);
    }

    #[test]
    fn a_job_inside_a_busy_card_waits_while_the_other_card_is_idle() {
        // The third job is given to card 0 while it runs; card 1 falls idle at 10.
        let account = Account::of(&ran(&[[0, 0, 0, 30, 0], [0, 0, 0, 10, 1], [5, 5, 30, 40, 0]]), 2);
        assert_eq!((account.idle, account.longest_idle, account.most_held), (ms(20), ms(20), 2));
        // When card 0 ended, another was free for the job that waited inside it: no gap.
        assert_eq!((account.gaps, account.card_time), (vec![], ms(80)));
    }

    #[test]
    fn of_two_idle_cards_one_is_missed_where_one_job_waits() {
        // A job takes 4 ms to reach its card, and both cards are idle meanwhile.
        let account = Account::of(&ran(&[[10, 14, 14, 20, 0]]), 2);
        assert_eq!((account.idle, account.longest_idle), (ms(4), ms(4)));
    }

    #[test]
    fn a_gap_counts_where_a_job_waited_that_no_other_card_was_free_for() {
        // At 10 card 0 ends while a job waits and card 1 is busy: a gap of 1. At 20 card 1 ends while a job is on its way to
        // the idle card 0: none.
        let jobs = [[0, 0, 0, 10, 0], [0, 0, 0, 20, 1], [5, 11, 11, 18, 0], [19, 21, 21, 30, 0], [40, 40, 40, 50, 1]];
        let account = Account::of(&ran(&jobs), 2);
        assert_eq!(account.gaps, [ms(1)]);
        // 1 ms of card 0, and 1 ms before and after card 1 ended, of one card each.
        assert_eq!((account.idle, account.longest_idle), (ms(3), ms(2)));
    }

    #[test]
    fn accounts_add_up() {
        let one = Account::of(&ran(&[[0, 0, 0, 10, 0], [4, 12, 12, 20, 0]]), 1);
        let mut both = one.clone();
        both.add(&Account::of(&ran(&[[0, 3, 3, 10, 0]]), 1));
        assert_eq!((both.card_time, both.idle, both.longest_idle), (ms(30), ms(5), ms(3)));
        assert_eq!((both.gaps, both.most_held), (vec![ms(2)], 1));
        assert!((one.idle_share() - 0.1).abs() < 1e-9);
    }
}
