//! Wakes to the fraction of a millisecond: tokio's own timer counts whole ones, and a card that is late by one is late by a
//! twentieth of a job.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

/// An alarm for any number of sleepers; it ends with the runtime.
#[derive(Clone)]
pub struct Alarm(Arc<Inner>);

struct Inner {
    timer: AsyncFd<OwnedFd>,
    sleepers: Mutex<BinaryHeap<Reverse<Sleeper>>>,
}

struct Sleeper {
    at: Instant,
    wake: oneshot::Sender<()>,
}

impl PartialEq for Sleeper {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Sleeper {}

impl PartialOrd for Sleeper {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Sleeper {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Alarm {
    pub fn start() -> Self {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC);
        let timer = registered(timer.expect("a descriptor"));
        let alarm = Self(Arc::new(Inner { timer, sleepers: Mutex::default() }));
        tokio::spawn(alarm.clone().ring());
        alarm
    }

    /// Sleeps until then.
    pub async fn at(&self, at: Instant) {
        let (wake, woken) = oneshot::channel();
        {
            let mut sleepers = self.0.sleepers.lock().expect("nobody panics with it");
            sleepers.push(Reverse(Sleeper { at, wake }));
            self.0.set(&sleepers);
        }
        woken.await.expect("the alarm rings as long as the runtime lives");
    }

    async fn ring(self) {
        loop {
            let mut ready = self.0.timer.readable().await.expect("a timer");
            let _ = ready.try_io(|timer| Ok(rustix::io::read(timer.get_ref(), &mut [0_u8; 8])?));
            let mut sleepers = self.0.sleepers.lock().expect("nobody panics with it");
            let now = Instant::now();
            while sleepers.peek().is_some_and(|Reverse(first)| first.at <= now) {
                let Some(Reverse(first)) = sleepers.pop() else { break };
                // Fails where the sleeper has gone.
                let _ = first.wake.send(());
            }
            self.0.set(&sleepers);
        }
    }
}

#[allow(unsafe_code, reason = "tokio has no safe way to wait for a descriptor that is no socket, pipe or signal")]
fn registered(timer: OwnedFd) -> AsyncFd<OwnedFd> {
    // SAFETY: the descriptor is open, and its only owner, which gives no access to change it, moves into what waits for it.
    unsafe { AsyncFd::register(timer) }.expect("a runtime with a reactor")
}

impl Inner {
    /// Lets the timer expire when the first sleeper is to be woken.
    fn set(&self, sleepers: &BinaryHeap<Reverse<Sleeper>>) {
        let Some(Reverse(first)) = sleepers.peek() else { return };
        // Zero would disarm it.
        let left = first.at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let it_value = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once).expect("a time from now on");
    }
}
