//! A host for tests: Envoy's shared data in memory, virtual time, streams, and on command whatever can go wrong.

mod process;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use process::Process;

use crate::core::time::Instant;
use crate::host::{Fault, Headers, Host, Level, Map, Metric, Shared, on_one_line};

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
    /// [`Host::resume`].
    Resume,
    /// [`Host::register_bell`] and [`Host::ring`].
    Bell,
    /// [`Host::request_body`].
    Body,
    /// [`Host::set_filter_state`].
    State,
    /// [`Host::metric`].
    Metric,
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
    /// The piece of the request's body that has come.
    pub upload: Vec<u8>,
    /// The filter state that was set.
    pub filter_state: BTreeMap<String, String>,
    /// Its root; 0: it is one itself.
    pub root: u32,
    /// How often it was resumed: once at most, and then its request's headers are out of reach.
    pub resumed: u32,
    /// What its VM had stored last when it was resumed.
    pub stored_before: Vec<u8>,
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
    pace: Cell<Duration>,
    paces: RefCell<BTreeMap<u32, Duration>>,
    bell: Cell<Option<u32>>,
    stored: RefCell<Vec<u8>>,
    streams: RefCell<BTreeMap<u32, Streamed>>,
    refusals: [Cell<u32>; 10],
    refused: Cell<u64>,
    meanwhile: RefCell<VecDeque<Deed>>,
    log: RefCell<Vec<String>>,
    called: RefCell<Vec<Called>>,
    body: RefCell<Vec<u8>>,
    metrics: RefCell<Vec<(Metric, String, u64)>>,
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
            pace: Cell::default(),
            paces: RefCell::default(),
            bell: Cell::default(),
            stored: RefCell::default(),
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

    /// How often the root ticks.
    pub fn pace(&self) -> Duration {
        self.vm.pace.get()
    }

    /// How often a root ticks; `None`: it has not said.
    pub fn pace_of(&self, root: u32) -> Option<Duration> {
        self.vm.paces.borrow().get(&root).copied()
    }

    /// Envoy comes to tell a root that the VM's bell was rung; `None`: it was not. The root may have gone, and then nobody is
    /// told.
    pub fn takes_news(&self) -> Option<u32> {
        self.process.take_news(self.vm.bell.get()?)
    }

    /// How much the VM's bell holds.
    pub fn bell_holds(&self) -> u32 {
        self.vm.bell.get().map_or(0, |bell| self.process.held_by(bell))
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

    /// Makes the answer to a call, with this status if it has one, the current stream.
    pub fn is_answered(&self, stream: u32, status: Option<&str>) {
        self.stream(stream, |streamed| {
            streamed.maps.clear();
            streamed.maps.extend(status.map(|status| ((Map::Call as u8, ":status".to_owned()), status.into())));
        });
        self.make_current(stream);
    }

    /// The value of a metric, and of a histogram how many it has; `None`: it was never defined.
    pub fn value_of(&self, metric: &str) -> Option<u64> {
        self.vm.metrics.borrow().iter().find(|(_, name, _)| name == metric).map(|(.., value)| *value)
    }

    /// The names of all metrics.
    pub fn metrics(&self) -> Vec<String> {
        self.vm.metrics.borrow().iter().map(|(_, name, _)| name.clone()).collect()
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
        Instant(self.process.micros())
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_micros(self.process.micros())
    }

    fn random(&self) -> u64 {
        self.process.random()
    }

    fn log(&self, _: Level, line: &str) {
        self.vm.log.borrow_mut().push(on_one_line(line).into_owned());
    }

    fn load(&self, key: &str) -> Result<Shared, Fault> {
        self.check(Call::Load)?;
        Ok(self.process.load(key))
    }

    fn store(&self, key: &str, value: &[u8], cas: u32) -> Result<bool, Fault> {
        let deed = self.vm.meanwhile.borrow_mut().pop_front();
        if let Some(deed) = deed {
            deed();
        }
        self.check(Call::Store)?;
        let is_stored = self.process.store(key, value, cas);
        if is_stored {
            *self.vm.stored.borrow_mut() = value.to_vec();
        }
        Ok(is_stored)
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
        let stream = streams.get_mut(&self.vm.current.get()).filter(|stream| stream.resumed == 0);
        let headers = &mut stream.ok_or(Fault(2))?.headers;
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

    fn remove_header(&self, map: Map, name: &str) -> Result<(), Fault> {
        self.check(Call::Header)?;
        let mut streams = self.vm.streams.borrow_mut();
        let maps = &mut streams.get_mut(&self.vm.current.get()).ok_or(Fault(2))?.maps;
        maps.remove(&(map as u8, name.to_owned()));
        Ok(())
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
        self.check(Call::State)?;
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

    fn request_body(&self, size: usize) -> Option<Vec<u8>> {
        self.check(Call::Body).ok()?;
        let streams = self.vm.streams.borrow();
        let upload = &streams.get(&self.vm.current.get())?.upload;
        upload.get(..size).filter(|piece| !piece.is_empty()).map(<[u8]>::to_vec)
    }

    fn metric(&self, kind: Metric, name: &str) -> Result<u32, Fault> {
        self.check(Call::Metric)?;
        let mut metrics = self.vm.metrics.borrow_mut();
        assert!(metrics.iter().all(|(_, known, _)| known != name), "{name} is made twice");
        metrics.push((kind, name.to_owned(), 0));
        Ok(metrics.len() as u32 - 1)
    }

    fn add(&self, metric: u32, by: u64) {
        let (kind, _, value) = &mut self.vm.metrics.borrow_mut()[metric as usize];
        assert!(*kind == Metric::Counter && by > 0, "Envoy refuses this");
        *value += by;
    }

    fn record(&self, metric: u32, value: u64) {
        let (kind, _, now) = &mut self.vm.metrics.borrow_mut()[metric as usize];
        *now = match kind {
            Metric::Counter => panic!("a counter is not set"),
            Metric::Gauge => value,
            Metric::Histogram => *now + 1,
        };
    }

    fn reply(&self, status: u16, headers: &[(&str, &str)], body: &[u8]) -> Result<(), Fault> {
        self.check(Call::Reply)?;
        let mut streams = self.vm.streams.borrow_mut();
        let stream = streams.get_mut(&self.vm.current.get()).ok_or(Fault(2))?;
        assert!(stream.replied.is_none() && stream.resumed == 0, "a stream is answered that was answered or resumed");
        let headers = headers.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        stream.replied = Some((status, headers.collect()));
        stream.body = String::from_utf8(body.to_vec()).unwrap();
        Ok(())
    }

    fn resume(&self) -> Result<(), Fault> {
        self.check(Call::Resume)?;
        let mut streams = self.vm.streams.borrow_mut();
        let stream = streams.get_mut(&self.vm.current.get()).ok_or(Fault(2))?;
        assert!(stream.replied.is_none() && stream.resumed == 0, "a stream is resumed that was answered or resumed");
        stream.resumed += 1;
        stream.stored_before = self.vm.stored.borrow().clone();
        Ok(())
    }

    fn tick_each(&self, period: Duration) {
        let current = self.vm.current.get();
        let root = self.vm.streams.borrow().get(&current).map_or(0, |stream| stream.root);
        self.vm.paces.borrow_mut().insert(if root == 0 { current } else { root }, period);
        self.vm.pace.set(period);
    }

    fn register_bell(&self, name: &str) -> Result<u32, Fault> {
        self.check(Call::Bell)?;
        let bell = self.process.register(name, self.vm.current.get());
        self.vm.bell.set(Some(bell));
        Ok(bell)
    }

    fn ring(&self, bell: u32) -> Result<(), Fault> {
        self.check(Call::Bell)?;
        self.process.ring(bell).ok_or(Fault(1))
    }

    fn silence_bell(&self, bell: u32) {
        self.process.silence(bell);
    }

    fn enter(&self, stream: u32) -> Result<(), Fault> {
        if !self.vm.streams.borrow().contains_key(&stream) {
            return Err(Fault(2));
        }
        self.vm.current.set(stream);
        Ok(())
    }
}
