//! Measuring on a machine that others use, too.
//!
//! A thread that loses its core to another program finds its caches full of that program's data when it comes back: its next requests cost
//! up to twice the CPU time. The scheduler says for how long Envoy and the clients wanted a core that others had. Where that was more than
//! a few per cent, the turn is taken again; of several such, the least disturbed counts. What is thrown away is so by
//! what others did, not by what was measured. Turns are short, so that even a busy machine leaves room for an undisturbed one.

use std::time::{Duration, Instant};

use support::{RunningEnvoy, Times};

/// The part of a turn's time that others may take.
const MOST_DISTURBANCE: f64 = 0.03;

/// How often a turn is taken at most.
const MOST_ATTEMPTS: usize = 25;

/// A measurement that has begun.
pub struct Began {
    envoy: Times,
    own: Times,
    at: Instant,
}

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// User and system time of the whole Envoy process.
    pub cpu: Duration,
    /// On the wall.
    pub took: Duration,
    /// The part of that time in which others had a core that Envoy or the clients wanted.
    pub disturbance: f64,
}

impl Began {
    /// Begins.
    pub fn now(envoy: &RunningEnvoy) -> Self {
        settle();
        Self { envoy: envoy.times(), own: Times::own(), at: Instant::now() }
    }

    /// Ends.
    pub fn end(self, envoy: &RunningEnvoy) -> Measured {
        let took = self.at.elapsed();
        settle();
        let (now, own) = (envoy.times(), Times::own());
        let waited = (now.waited - self.envoy.waited) + (own.waited - self.own.waited);
        Measured { cpu: now.ran - self.envoy.ran, took, disturbance: waited.as_secs_f64() / took.as_secs_f64() }
    }
}

/// The scheduler adds to a running thread's time only now and then: wait until the worker sleeps. Spins, as a core that is left would be
/// another program's at once.
fn settle() {
    let start = Instant::now();
    while start.elapsed() < Duration::from_micros(200) {
        std::hint::spin_loop();
    }
}

/// Takes a turn until it was undisturbed. The turn begins its measurement itself, when it is warm, and ends with it.
pub async fn undisturbed<T>(envoy: &RunningEnvoy, mut turn: impl AsyncFnMut() -> (Began, T)) -> (Measured, T) {
    let mut best: Option<(Measured, T)> = None;
    for _ in 0..MOST_ATTEMPTS {
        let (began, result) = turn().await;
        let measured = began.end(envoy);
        if best.as_ref().is_none_or(|(best, _)| measured.disturbance < best.disturbance) {
            best = Some((measured, result));
        }
        if measured.disturbance <= MOST_DISTURBANCE {
            break;
        }
    }
    best.expect("at least one attempt")
}
