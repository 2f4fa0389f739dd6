//! A real Envoy: one of the repository's files, changed for a test, started on free ports, watched and ended.
//!
//! ```text
//!   Envoy (a file and its changes) ── start ──▶ RunningEnvoy (listeners, admin, log, process)
//!         └──────────────────────── validate ──▶ Ok, or what the log said
//! ```

mod bootstrap;
mod endpoints;
mod process;
mod running;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Fleet;
use crate::gpu::Port;
use bootstrap::Bootstrap;
pub use endpoints::Endpoint;
pub use process::Times;
pub(crate) use process::die_with_parent;
pub use running::RunningEnvoy;

/// The file that a live configuration (see [`Envoy::live`]) is read from, in the directory of the process.
const LIVE_FILE: &str = "plimsoll.json";

/// The file that endpoints (see [`Envoy::endpoints`]) are read from, in a directory of its own: Envoy's watch on one counts every file in it.
const ENDPOINTS_FILE: &str = "endpoints/gpu.json";

/// How many Envoys run at once in this process. Each has several busy threads, and the machines that test have two cores.
static PLACES: std::sync::LazyLock<std::sync::Arc<Semaphore>> =
    std::sync::LazyLock::new(|| std::sync::Arc::new(Semaphore::new(2)));

/// An Envoy to be: one of the repository's files in `envoy/`, with a test's changes. Changes are made in the order of the calls.
///
/// ```ignore
/// let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"max_in_flight": 4})).workers(2).start().await;
/// ```
///
/// Found by their names: the listener `ingress`, the cluster `gpu`, and the Wasm filter of `ingress` whose configuration has
/// `pools`. Every listener and the admin move to free ports of 127.0.0.1.
#[must_use]
pub struct Envoy {
    bootstrap: Bootstrap,
    workers: usize,
    live: bool,
    module: Option<PathBuf>,
    endpoints: Option<Vec<Endpoint>>,
    admin: Option<Port>,
}

impl Envoy {
    /// Reads `envoy/<file>`.
    pub fn new(file: &str) -> Self {
        let bootstrap = Bootstrap::read(&root().join("envoy").join(file));
        Self { bootstrap, workers: 2, live: false, module: None, endpoints: None, admin: None }
    }

    /// Puts these hosts into the cluster and into the filter's pool, in this order.
    pub fn hosts(self, fleet: &Fleet) -> Self {
        self.addresses(&fleet.addresses())
    }

    /// Puts these addresses into the cluster and into the filter's pool, in this order.
    pub fn addresses(mut self, addresses: &[SocketAddr]) -> Self {
        self.bootstrap.set_endpoints(addresses);
        let hosts: Vec<Value> = addresses.iter().map(|address| json!({ "address": address.to_string() })).collect();
        self.bootstrap.edit_configuration(|configuration| configuration["pools"]["gpu"]["hosts"] = json!(hosts));
        self
    }

    /// Makes the cluster one whose hosts come from a file (file EDS), these at first, and leaves the filter's pool without `hosts`; see
    /// [`RunningEnvoy::set_endpoints`].
    pub fn endpoints(mut self, endpoints: impl IntoIterator<Item = impl Into<Endpoint>>) -> Self {
        self.endpoints = Some(endpoints.into_iter().map(Into::into).collect());
        self.bootstrap.edit_configuration(|configuration| {
            configuration["pools"]["gpu"].as_object_mut().expect("a pool is an object").remove("hosts");
        });
        self
    }

    /// Adds a cluster `envoy_admin`, which leads to this Envoy's own admin interface.
    pub fn admin_cluster(mut self) -> Self {
        let port = Port::reserve(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        self.bootstrap.add_cluster("envoy_admin", port.address());
        self.admin = Some(port);
        self
    }

    /// Makes these the keys of the filter's pool `gpu`, in place of the file's. `hosts` stay, unless they are among them.
    pub fn pool(mut self, keys: Value) -> Self {
        self.bootstrap.edit_configuration(|configuration| {
            let pool = &mut configuration["pools"]["gpu"];
            *pool = pool_of(pool["hosts"].take(), keys);
        });
        self
    }

    /// Merges into the filter's configuration, beside its pools, as [`Envoy::route`] does into routes.
    pub fn keys(mut self, patch: Value) -> Self {
        self.bootstrap.edit_configuration(|configuration| merge(configuration, &patch));
        self
    }

    /// Makes this the filter's whole configuration.
    pub fn configuration(mut self, configuration: Value) -> Self {
        self.bootstrap.edit_configuration(|old| *old = configuration);
        self
    }

    /// Makes this text the filter's whole configuration, JSON or not.
    pub fn configuration_text(mut self, text: &str) -> Self {
        self.bootstrap.set_configuration_text(text);
        self
    }

    /// Merges into the action of every route to the cluster: `json!({"timeout": "1s", "retry_policy": {"num_retries": 0}})`. Objects
    /// merge, null removes, all else replaces (RFC 7396).
    pub fn route(mut self, patch: Value) -> Self {
        self.bootstrap.edit_routes(|route| merge(route, &patch));
        self
    }

    /// Merges into the cluster, as [`Envoy::route`] does into routes.
    pub fn cluster(mut self, patch: Value) -> Self {
        merge(self.bootstrap.cluster(), &patch);
        self
    }

    /// Adds a cluster of one HTTP/1.1 host.
    pub fn other_cluster(mut self, name: &str, host: &impl crate::Target) -> Self {
        self.bootstrap.add_cluster(name, host.address());
        self
    }

    /// Adds a cluster like `gpu` of these hosts, and lets the requests that match (`{"prefix": "/v1"}`) go there.
    pub fn second_cluster(mut self, name: &str, addresses: &[SocketAddr], is_for: Value) -> Self {
        self.bootstrap.add_cluster_like_ours(name, addresses);
        self.bootstrap.add_route(name, is_for);
        self
    }

    /// Merges into `ingress`'s HTTP connection manager, as [`Envoy::route`] does into routes.
    pub fn connection_manager(mut self, patch: Value) -> Self {
        merge(self.bootstrap.connection_manager("ingress"), &patch);
        self
    }

    /// Puts an HTTP filter (`{"name", "typed_config"}`) right before ours.
    pub fn filter_before(mut self, filter: Value) -> Self {
        self.bootstrap.insert_filter(filter, 0);
        self
    }

    /// Puts an HTTP filter (`{"name", "typed_config"}`) right after ours.
    pub fn filter_after(mut self, filter: Value) -> Self {
        self.bootstrap.insert_filter(filter, 1);
        self
    }

    /// Removes our filter everywhere, and lets Envoy's own policy choose: `ROUND_ROBIN`, `LEAST_REQUEST`. The baseline of comparisons.
    pub fn without_filter(mut self, lb_policy: &str) -> Self {
        self.bootstrap.remove_filter();
        self.cluster(json!({ "load_balancing_policy": null, "lb_policy": lb_policy }))
    }

    /// Loads this module in place of ours.
    pub fn module(mut self, file: impl Into<PathBuf>) -> Self {
        self.module = Some(file.into());
        self
    }

    /// Any other change, of the whole bootstrap.
    pub fn edit(mut self, change: impl FnOnce(&mut Value)) -> Self {
        change(self.bootstrap.value());
        self
    }

    /// Lets Envoy read our filter's configuration from a file that can be replaced while it runs (file ECDS); see
    /// [`RunningEnvoy::reload`]. To be called last.
    pub fn live(mut self) -> Self {
        self.live = true;
        self
    }

    /// Worker threads (2).
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Starts it, as soon as fewer than two others run in this process, and waits until it serves.
    pub async fn start(self) -> RunningEnvoy {
        let place = PLACES.clone().acquire_owned().await.expect("places are never closed");
        self.launch(Some(place)).await
    }

    /// Starts it beside another one of the same test, whose place it shares.
    pub async fn start_beside(self, _other: &RunningEnvoy) -> RunningEnvoy {
        self.launch(None).await
    }

    async fn launch(mut self, place: Option<OwnedSemaphorePermit>) -> RunningEnvoy {
        let directory = tempfile::Builder::new().prefix("plimsoll-envoy-").tempdir().expect("a temporary directory");
        self.prepare(directory.path());
        RunningEnvoy::start(directory, self.workers, self.admin, place).await
    }

    /// Has Envoy check the configuration, which runs the module's own check (`on_configure`) as well.
    ///
    /// # Errors
    /// It was refused; the text is what the module logged as an error, or else all that Envoy logged.
    pub async fn validate(mut self) -> Result<(), String> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = self.prepare(directory.path());
        process::validate(&file).await
    }

    /// Writes the bootstrap (and the live configuration) and gives the bootstrap's path.
    fn prepare(&mut self, directory: &Path) -> PathBuf {
        self.bootstrap.on_free_ports();
        if let Some(port) = &self.admin {
            self.bootstrap.set_admin(port.address());
        }
        if let Some(endpoints) = &self.endpoints {
            let file = directory.join(ENDPOINTS_FILE);
            std::fs::create_dir(file.parent().expect("a file is in a directory")).expect("a fresh directory");
            endpoints::write(&file, endpoints);
            self.bootstrap.follow_endpoints(&file);
        }
        if self.bootstrap.has_filter() {
            self.bootstrap.set_module(&self.module.take().unwrap_or_else(process::module));
        }
        if self.live {
            let file = directory.join(LIVE_FILE);
            let resource = self.bootstrap.make_live(&file);
            std::fs::write(&file, resource.to_string()).expect("a file in a fresh directory");
        }
        let file = directory.join(process::BOOTSTRAP);
        std::fs::write(&file, serde_json::to_vec_pretty(self.bootstrap.value()).expect("JSON"))
            .expect("a file in a fresh directory");
        file
    }
}

/// A pool of these hosts, if any, and keys; hosts among the keys win.
fn pool_of(hosts: Value, mut keys: Value) -> Value {
    let object = keys.as_object_mut().unwrap_or_else(|| panic!("a pool is an object"));
    if !hosts.is_null() {
        object.entry("hosts").or_insert(hosts);
    }
    keys
}

/// JSON merge patch, RFC 7396.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let object = target.as_object_mut().expect("made one above");
    for (key, value) in patch {
        if value.is_null() {
            object.remove(key);
        } else {
            merge(object.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the repository").to_owned()
}
