//! What a turn cost Envoy, and how much others disturbed it.

use std::time::{Duration, Instant};

use support::{RunningEnvoy, Times};

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
