//! A host for tests: Envoy's shared data in memory, virtual time, streams, and on command whatever can go wrong.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use crate::core::random::Random;
use crate::core::time::Instant;
use crate::host::{Fault, Headers, Host, Level, Map, Metric, Shared};

/// What all VMs of one Envoy share: the data, one clock, one source of randomness.
#[derive(Debug)]
pub struct Process {
    data: Mutex<Data>,
    micros: AtomicU64,
    random: Mutex<Random>,
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
        Arc::new(Self { data, micros: AtomicU64::new(86_400_000_000), random })
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
        assert!(self.data.lock().unwrap().store(key, &value, 0));
    }

    /// A key is lost.
    pub fn lose(&self, key: &str) {
        self.data.lock().unwrap().values.remove(key);
    }
}

impl Data {
    /// As `SharedData::set` of proxy-wasm-cpp-host does it: version 0 is any version, and a missing key has every version.
    fn store(&mut self, key: &str, value: &[u8], cas: u32) -> bool {
        if let Some((_, version)) = self.values.get(key)
            && cas != 0
            && cas != *version
        {
            return false;
        }
        self.last_cas += 1;
        self.values.insert(key.to_owned(), (value.to_vec(), self.last_cas));
        true
    }
}

/// The fallible hostcalls.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    /// [`Host::load`].
    Load,
    /// [`Host::store`].
    Store,
    /// [`Host::set_request_header`] and [`Host::request_headers`].
    Header,
    /// [`Host::reply`].
    Reply,
    /// [`Host::call`].
    Call,
}

/// A request of the module's own.
#[derive(Clone, Debug)]
pub struct Called {
    /// Its token.
    pub token: u32,
    /// Where it went.
    pub cluster: String,
    /// Its headers.
    pub headers: BTreeMap<String, String>,
    /// Its body.
    pub body: String,
}

/// A stream as Envoy knows it.
#[derive(Clone, Debug, Default)]
pub struct Streamed {
    /// The request's headers.
    pub headers: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The stream's properties, their paths' parts separated by NUL.
    pub properties: BTreeMap<&'static str, Vec<u8>>,
    /// The response's headers and trailers, and the headers of the answer to a call.
    pub maps: BTreeMap<(u8, String), Vec<u8>>,
    /// The filter state that was set.
    pub filter_state: BTreeMap<String, String>,
    /// The status and headers of the filter's own reply.
    pub replied: Option<(u16, BTreeMap<String, String>)>,
    /// The body of that reply.
    pub body: String,
}

impl Streamed {
    /// The value of a request header as text.
    pub fn header(&self, name: &str) -> Option<String> {
        self.headers.get(name.as_bytes()).map(|value| String::from_utf8(value.clone()).unwrap())
    }
}

type Deed = Box<dyn FnOnce()>;

struct Vm {
    current: Cell<u32>,
    streams: RefCell<BTreeMap<u32, Streamed>>,
    refusals: [Cell<u32>; 5],
    refused: Cell<u64>,
    meanwhile: RefCell<VecDeque<Deed>>,
    log: RefCell<Vec<String>>,
    called: RefCell<Vec<Called>>,
    body: RefCell<Vec<u8>>,
    metrics: RefCell<Vec<(String, i64)>>,
}

/// One VM's view of a [`Process`].
#[derive(Clone)]
pub struct Fake {
    /// The Envoy around the VM.
    pub process: Arc<Process>,
    vm: Rc<Vm>,
}

impl Fake {
    /// A new VM in this process.
    pub fn new(process: &Arc<Process>) -> Self {
        let vm = Vm {
            current: Cell::default(),
            streams: RefCell::default(),
            refusals: Default::default(),
            refused: Cell::default(),
            meanwhile: RefCell::default(),
            log: RefCell::default(),
            called: RefCell::default(),
            body: RefCell::default(),
            metrics: RefCell::default(),
        };
        Self { process: process.clone(), vm: Rc::new(vm) }
    }

    /// Changes a stream's request or properties; makes the stream if need be.
    pub fn stream<T>(&self, stream: u32, change: impl FnOnce(&mut Streamed) -> T) -> T {
        change(self.vm.streams.borrow_mut().entry(stream).or_default())
    }

    /// The stream whose callback comes next.
    pub fn make_current(&self, stream: u32) {
        self.vm.current.set(stream);
    }

    /// Envoy forgets a stream.
    pub fn forget(&self, stream: u32) {
        self.vm.streams.borrow_mut().remove(&stream);
    }

    /// The next `times` calls of this kind are refused.
    pub fn refuse(&self, call: Call, times: u32) {
        self.vm.refusals[call as usize].set(times);
    }

    /// All goes well again: nothing will be refused, nothing happens meanwhile.
    pub fn heal(&self) {
        self.vm.refusals.iter().for_each(|times| times.set(0));
        self.vm.meanwhile.borrow_mut().clear();
    }

    /// How many calls were refused so far.
    pub fn refused(&self) -> u64 {
        self.vm.refused.get()
    }

    /// Does this between the next load and its store: what another worker does is done there.
    pub fn meanwhile(&self, deed: impl FnOnce() + 'static) {
        self.vm.meanwhile.borrow_mut().push_back(Box::new(deed));
    }

    /// The lines logged so far.
    pub fn logged(&self) -> Vec<String> {
        self.vm.log.borrow().clone()
    }

    /// The calls made since this was last asked.
    pub fn called(&self) -> Vec<Called> {
        self.vm.called.take()
    }

    /// What the next answer to a call holds.
    pub fn answer_with(&self, body: &[u8]) {
        *self.vm.body.borrow_mut() = body.to_vec();
    }

    /// The value of a metric; `None`: it was never defined.
    pub fn value_of(&self, metric: &str) -> Option<i64> {
        self.vm.metrics.borrow().iter().find(|(name, _)| name == metric).map(|(_, value)| *value)
    }

    fn check(&self, call: Call) -> Result<(), Fault> {
        let times = &self.vm.refusals[call as usize];
        if times.get() == 0 {
            return Ok(());
        }
        times.set(times.get() - 1);
        self.vm.refused.set(self.vm.refused.get() + 1);
        Err(Fault(10))
    }
}

impl Host for Fake {
    fn now(&self) -> Instant {
        Instant(self.process.micros.load(Relaxed))
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_micros(self.process.micros.load(Relaxed))
    }

    fn random(&self) -> u64 {
        self.process.random.lock().unwrap().bits()
    }

    fn log(&self, _: Level, line: &str) {
        self.vm.log.borrow_mut().push(line.to_owned());
    }

    fn load(&self, key: &str) -> Result<Shared, Fault> {
        self.check(Call::Load)?;
        let data = self.process.data.lock().unwrap();
        Ok(data.values.get(key).map_or(Shared::default(), |(bytes, cas)| Shared { value: Some(bytes.clone()), cas: *cas }))
    }

    fn store(&self, key: &str, value: &[u8], cas: u32) -> Result<bool, Fault> {
        let deed = self.vm.meanwhile.borrow_mut().pop_front();
        if let Some(deed) = deed {
            deed();
        }
        self.check(Call::Store)?;
        Ok(self.process.data.lock().unwrap().store(key, value, cas))
    }

    fn property(&self, path: &str) -> Option<Vec<u8>> {
        self.vm.streams.borrow().get(&self.vm.current.get())?.properties.get(path).cloned()
    }

    fn request_headers(&self) -> Result<Headers, Fault> {
        self.check(Call::Header)?;
        let streams = self.vm.streams.borrow();
        let headers = streams.get(&self.vm.current.get()).ok_or(Fault(2))?.headers.iter();
        let pairs: Vec<(&[u8], &[u8])> = headers.map(|(name, value)| (name.as_slice(), value.as_slice())).collect();
        Ok(Headers::encode(&pairs))
    }

    fn set_request_header(&self, name: &[u8], value: Option<&[u8]>) -> Result<(), Fault> {
        self.check(Call::Header)?;
        let mut streams = self.vm.streams.borrow_mut();
        let headers = &mut streams.get_mut(&self.vm.current.get()).ok_or(Fault(2))?.headers;
        match value {
            Some(value) => headers.insert(name.to_vec(), value.to_vec()),
            None => headers.remove(name),
        };
        Ok(())
    }

    fn header(&self, map: Map, name: &str) -> Option<Vec<u8>> {
        let streams = self.vm.streams.borrow();
        streams.get(&self.vm.current.get())?.maps.get(&(map as u8, name.to_owned())).cloned()
    }

    fn set_response_header(&self, name: &[u8], value: Option<&[u8]>) -> Result<(), Fault> {
        self.check(Call::Header)?;
        let mut streams = self.vm.streams.borrow_mut();
        let maps = &mut streams.get_mut(&self.vm.current.get()).ok_or(Fault(2))?.maps;
        let key = (Map::Response as u8, String::from_utf8(name.to_vec()).unwrap());
        match value {
            Some(value) => maps.insert(key, value.to_vec()),
            None => maps.remove(&key),
        };
        Ok(())
    }

    fn set_filter_state(&self, name: &str, value: &[u8]) -> Result<(), Fault> {
        let mut streams = self.vm.streams.borrow_mut();
        let state = &mut streams.get_mut(&self.vm.current.get()).ok_or(Fault(2))?.filter_state;
        state.insert(name.to_owned(), String::from_utf8(value.to_vec()).unwrap());
        Ok(())
    }

    fn call(&self, cluster: &str, headers: &[(&str, &str)], body: &[u8], _: Duration) -> Result<u32, Fault> {
        self.check(Call::Call)?;
        let token = self.random() as u32;
        let headers = headers.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let (cluster, body) = (cluster.to_owned(), String::from_utf8(body.to_vec()).unwrap());
        self.vm.called.borrow_mut().push(Called { token, cluster, headers, body });
        Ok(token)
    }

    fn body(&self, size: usize) -> Option<Vec<u8>> {
        self.vm.body.borrow().get(..size).filter(|body| !body.is_empty()).map(<[u8]>::to_vec)
    }

    fn metric(&self, _: Metric, name: &str) -> Result<u32, Fault> {
        let mut metrics = self.vm.metrics.borrow_mut();
        metrics.push((name.to_owned(), 0));
        Ok(metrics.len() as u32 - 1)
    }

    fn add(&self, metric: u32, by: u32) {
        self.vm.metrics.borrow_mut()[metric as usize].1 += i64::from(by);
    }

    fn set(&self, metric: u32, to: u64) {
        self.vm.metrics.borrow_mut()[metric as usize].1 = to as i64;
    }

    fn reply(&self, status: u16, headers: &[(&str, &str)], body: &[u8]) -> Result<(), Fault> {
        self.check(Call::Reply)?;
        let mut streams = self.vm.streams.borrow_mut();
        let stream = streams.get_mut(&self.vm.current.get()).ok_or(Fault(2))?;
        let headers = headers.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        stream.replied = Some((status, headers.collect()));
        stream.body = String::from_utf8(body.to_vec()).unwrap();
        Ok(())
    }

    fn enter(&self, stream: u32) -> Result<(), Fault> {
        if !self.vm.streams.borrow().contains_key(&stream) {
            return Err(Fault(2));
        }
        self.vm.current.set(stream);
        Ok(())
    }
}
