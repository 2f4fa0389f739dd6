//! What the VMs of one Envoy share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::core::random::Random;
use crate::host::Shared;

/// What all VMs of one Envoy share: the data, one clock, one source of randomness.
#[derive(Debug)]
pub struct Process {
    data: Mutex<Data>,
    micros: AtomicU64,
    random: Mutex<Random>,
    bells: Mutex<Vec<Bell>>,
}

/// A shared queue.
#[derive(Debug)]
struct Bell {
    name: String,
    /// Who is told.
    root: u32,
    /// How much is in it.
    inside: u32,
    /// How often its root is yet to be told.
    news: u32,
}

#[derive(Debug, Default)]
struct Data {
    values: BTreeMap<String, (Vec<u8>, u32)>,
    last_cas: u32,
}

impl Process {
    /// An Envoy that has run for a day.
    pub fn new(seed: u64) -> Arc<Self> {
        let (data, random) = (Mutex::default(), Mutex::new(Random::new(seed)));
        Arc::new(Self { data, micros: AtomicU64::new(86_400_000_000), random, bells: Mutex::default() })
    }

    /// Lets time pass.
    pub fn pass(&self, time: Duration) {
        self.micros.fetch_add(time.as_micros() as u64, Relaxed);
    }

    /// Sets the clock back.
    pub fn step_back(&self, time: Duration) {
        self.micros.fetch_sub(time.as_micros() as u64, Relaxed);
    }

    /// The value under a key.
    pub fn value(&self, key: &str) -> Option<Vec<u8>> {
        self.data.lock().unwrap().values.get(key).map(|(bytes, _)| bytes.clone())
    }

    /// Another hand puts a value under a key, whatever its version.
    pub fn put(&self, key: &str, value: Vec<u8>) {
        assert!(self.store(key, &value, 0));
    }

    /// A key is lost.
    pub fn lose(&self, key: &str) {
        self.data.lock().unwrap().values.remove(key);
    }

    pub(super) fn load(&self, key: &str) -> Shared {
        let data = self.data.lock().unwrap();
        data.values.get(key).map_or(Shared::default(), |(bytes, cas)| Shared { value: Some(bytes.clone()), cas: *cas })
    }

    /// As `SharedData::set` of proxy-wasm-cpp-host does it: version 0 is any version, and a missing key has every version.
    pub(super) fn store(&self, key: &str, value: &[u8], cas: u32) -> bool {
        let Data { values, last_cas } = &mut *self.data.lock().unwrap();
        if let Some((_, version)) = values.get(key)
            && cas != 0
            && cas != *version
        {
            return false;
        }
        *last_cas += 1;
        values.insert(key.to_owned(), (value.to_vec(), *last_cas));
        true
    }

    pub(super) fn micros(&self) -> u64 {
        self.micros.load(Relaxed)
    }

    pub(super) fn random(&self) -> u64 {
        self.random.lock().unwrap().bits()
    }

    /// Gives the number of the shared queue of this name; from now on this root is told.
    pub(super) fn register(&self, name: &str, root: u32) -> u32 {
        let mut bells = self.bells.lock().unwrap();
        let at = bells.iter().position(|bell| bell.name == name).unwrap_or_else(|| {
            bells.push(Bell { name: name.to_owned(), root, inside: 0, news: 0 });
            bells.len() - 1
        });
        bells[at].root = root;
        at as u32 + 1
    }

    fn with_bell<T>(&self, bell: u32, change: impl FnOnce(&mut Bell) -> T) -> Option<T> {
        self.bells.lock().unwrap().get_mut((bell as usize).checked_sub(1)?).map(change)
    }

    /// `None`: there is no such queue.
    pub(super) fn ring(&self, bell: u32) -> Option<()> {
        self.with_bell(bell, |bell| (bell.inside, bell.news) = (bell.inside + 1, bell.news + 1))
    }

    /// As Envoy does it, whoever was yet to be told is told all the same.
    pub(super) fn silence(&self, bell: u32) {
        self.with_bell(bell, |bell| bell.inside = 0);
    }

    pub(super) fn held_by(&self, bell: u32) -> u32 {
        self.with_bell(bell, |bell| bell.inside).unwrap_or(0)
    }

    /// Gives the root that is to be told next that this was rung, if one is.
    pub(super) fn take_news(&self, bell: u32) -> Option<u32> {
        self.with_bell(bell, |bell| {
            bell.news = bell.news.checked_sub(1)?;
            Some(bell.root)
        })?
    }
}
