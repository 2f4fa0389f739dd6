//! The floor filter: on each request it reads one property and sets one header, by the ordinary SDK, and does nothing else.
//!
//! Whatever a filter does in WebAssembly, it pays this: entering the VM for each callback of a stream, a context, two hostcalls. The
//! benchmark (`scripts/bench`) measures Plimsoll by it.

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType};

// The one symbol that the VM looks up by name; the macro exports it.
#[allow(unsafe_code)]
mod entry {
    proxy_wasm::main! {{
        proxy_wasm::set_root_context(|_| Box::new(super::Root));
    }}
}

struct Root;

impl Context for Root {}

impl RootContext for Root {
    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }

    fn create_http_context(&self, _: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream))
    }
}

struct Stream;

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _: usize, _: bool) -> Action {
        let cluster = self.get_property(vec!["xds", "cluster_name"]);
        self.set_http_request_header("x-floor", Some(if cluster.is_some() { "1" } else { "0" }));
        Action::Continue
    }
}
