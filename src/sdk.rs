//! The SDK's callbacks, given to the roles.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType};

use crate::config::Role;
use crate::host::{Host, Level};
use crate::hostcalls::Envoy;
use crate::roles::balancer::{Flow, Plan, Stream};
use crate::roles::classifier::{self, Course, Desk};
use crate::roles::status;
use crate::roles::worker::Worker;

/// Most lines that a refused configuration puts in the log.
const MOST_FAULTS: usize = 20;

/// Within how many milliseconds the first tick comes.
const FIRST_TICK_WITHIN_MS: u64 = 10;

thread_local! {
    /// What all instances of the filter in this VM share.
    static WORKER: Rc<RefCell<Worker<Envoy>>> = Rc::new(RefCell::new(Worker::new(Envoy)));

    /// The requests that the classifiers in this VM hold.
    static DESK: RefCell<Desk<Envoy>> = RefCell::new(Desk::new(Envoy));
}

fn worker() -> Rc<RefCell<Worker<Envoy>>> {
    WORKER.with(Rc::clone)
}

/// Does something with the requests that are held; nothing where a callback is inside another one's, which Envoy does not do.
fn at_desk<T>(act: impl FnOnce(&mut Desk<Envoy>) -> T) -> Option<T> {
    DESK.with(|desk| desk.try_borrow_mut().ok().map(|mut desk| act(&mut desk)))
}

// The symbols that the VM looks up by name; the macro exports one of them.
#[allow(unsafe_code)]
mod entry {
    use crate::roles::classifier::Course;

    proxy_wasm::main! {{
        proxy_wasm::set_root_context(|id| Box::new(super::Root { id, role: super::Running::Nothing }));
    }}

    /// Envoy's `proxy_on_request_body`: `scripts/trim-exports` gives it that name, in the place of the SDK's, whose `Action` has no word for
    /// `StopIterationAndWatermark`. And the balancer's streams need not be looked up to let a piece of a body pass.
    #[unsafe(export_name = "plimsoll_on_request_body")]
    extern "C" fn on_request_body(stream: u32, size: usize, ends: u32) -> u32 {
        const CONTINUE: u32 = 0;
        const STOP_ITERATION_AND_WATERMARK: u32 = 2;
        match super::at_desk(|desk| desk.body(stream, size, ends != 0)) {
            Some(Course::Held) => STOP_ITERATION_AND_WATERMARK,
            Some(Course::GoesOn) | None => CONTINUE,
        }
    }
}

/// What a root runs.
enum Running {
    /// Not configured: passes everything.
    Nothing,
    Balancer(Rc<Plan>),
    Status,
    Classifier(Rc<classifier::Plan>),
}

struct Root {
    id: u32,
    role: Running,
}

impl Context for Root {
    fn on_http_call_response(&mut self, token: u32, _: usize, body_size: usize, _: usize) {
        if let Ok(mut worker) = worker().try_borrow_mut() {
            worker.called_back(token, body_size);
        }
    }
}

/// Envoy deletes the root.
impl Drop for Root {
    fn drop(&mut self) {
        if let Running::Balancer(plan) = &self.role
            && let Ok(mut worker) = worker().try_borrow_mut()
        {
            plan.end(&mut worker);
        }
        if let Running::Classifier(_) = &self.role {
            at_desk(|desk| desk.root_ends(self.id));
        }
        Envoy.tick_each(Duration::ZERO);
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, size: usize) -> bool {
        let configuration = match Envoy.configuration(size) {
            Ok(bytes) => bytes,
            Err(fault) => {
                Envoy.log(Level::Error, &format!("plimsoll: the configuration could not be read: {fault:?}"));
                return false;
            }
        };
        match Role::parse(&configuration) {
            Ok(Role::Balancer(config)) => {
                let instance = String::from_utf8(Envoy.property("plugin_name").unwrap_or_default()).unwrap_or_default();
                let plan = Plan::new(self.id, &instance, config);
                if let Ok(mut worker) = worker().try_borrow_mut() {
                    plan.made(&mut worker);
                }
                self.role = Running::Balancer(Rc::new(plan));
                // The first tick makes the books; at random, so that the workers' later ticks do not all meet at the record.
                Envoy.tick_each(Duration::from_millis(1 + Envoy.random() % FIRST_TICK_WITHIN_MS));
                true
            }
            Ok(Role::Status) => {
                self.role = Running::Status;
                true
            }
            Ok(Role::Classifier(config)) => {
                self.role = Running::Classifier(Rc::new(classifier::Plan::new(self.id, &config)));
                true
            }
            Err(faults) => {
                for line in faults.iter().take(MOST_FAULTS) {
                    Envoy.log(Level::Error, &format!("plimsoll: {line}"));
                }
                if faults.len() > MOST_FAULTS {
                    let more = faults.len() - MOST_FAULTS;
                    Envoy.log(Level::Error, &format!("plimsoll: and {more} more faults"));
                }
                false
            }
        }
    }

    fn on_tick(&mut self) {
        if let Running::Balancer(plan) = &self.role
            && let Ok(mut worker) = worker().try_borrow_mut()
        {
            plan.tick(&mut worker);
        }
        if let Running::Classifier(_) = &self.role {
            at_desk(|desk| desk.tick(self.id));
        }
    }

    fn on_queue_ready(&mut self, _: u32) {
        if let Running::Balancer(plan) = &self.role
            && let Ok(mut worker) = worker().try_borrow_mut()
        {
            plan.rung(&mut worker);
        }
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        Some(match &self.role {
            Running::Nothing => Box::new(Passing),
            Running::Balancer(plan) => Box::new(Balancing(Stream::new(Envoy, worker(), plan.clone(), id))),
            Running::Status => Box::new(Showing),
            Running::Classifier(plan) => Box::new(Classifying { plan: plan.clone(), id }),
        })
    }
}

struct Passing;

impl Context for Passing {}
impl HttpContext for Passing {}

struct Balancing(Stream<Envoy>);

impl Context for Balancing {}

/// Envoy deletes the stream: its end, whichever that was.
impl Drop for Balancing {
    fn drop(&mut self) {
        self.0.done();
    }
}

impl HttpContext for Balancing {
    fn on_http_request_headers(&mut self, _: usize, _: bool) -> Action {
        let flow = self.0.request();
        #[cfg(feature = "trap")]
        if !Envoy.request_headers().unwrap_or_default().value(b"x-trap").is_empty() {
            core::arch::wasm32::unreachable();
        }
        match flow {
            Flow::Continue => Action::Continue,
            Flow::Answered | Flow::Paused => Action::Pause,
        }
    }

    fn on_http_response_headers(&mut self, _: usize, _: bool) -> Action {
        self.0.response();
        Action::Continue
    }

    fn on_http_response_trailers(&mut self, _: usize) -> Action {
        self.0.trailers();
        Action::Continue
    }
}

struct Showing;

impl Context for Showing {}

impl HttpContext for Showing {
    fn on_http_request_headers(&mut self, _: usize, _: bool) -> Action {
        match status::answer(&Envoy) {
            Ok(()) => Action::Pause,
            Err(_) => Action::Continue,
        }
    }
}

/// A request of the classifier's. The pieces of its body come another way: see [`entry`].
struct Classifying {
    plan: Rc<classifier::Plan>,
    id: u32,
}

impl Context for Classifying {}

/// Envoy deletes the stream.
impl Drop for Classifying {
    fn drop(&mut self) {
        at_desk(|desk| desk.done(self.id));
    }
}

impl HttpContext for Classifying {
    fn on_http_request_headers(&mut self, _: usize, ends: bool) -> Action {
        match at_desk(|desk| desk.headers(&self.plan, self.id, ends)) {
            Some(Course::Held) => Action::Pause,
            Some(Course::GoesOn) | None => Action::Continue,
        }
    }

    fn on_http_request_trailers(&mut self, _: usize) -> Action {
        at_desk(|desk| desk.trailers(self.id));
        Action::Continue
    }
}
