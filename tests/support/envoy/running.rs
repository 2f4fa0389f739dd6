//! An Envoy that serves: its listeners, its admin, the filter's books.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::OwnedSemaphorePermit;

use super::process::{ADMIN_ADDRESS, Process, Times};
use super::{ENDPOINTS_FILE, Endpoint, LIVE_FILE, endpoints, pool_of};
use crate::gpu::Port;
use crate::{Client, DEADLINE, Pool, Reply, Target, eventually};

/// Loading the module takes a second or two on a busy machine, once for each thread.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// A running Envoy. It ends when dropped; dropped in a panic, it prints the end of its log and leaves its directory.
pub struct RunningEnvoy {
    process: Process,
    directory: TempDir,
    admin: SocketAddr,
    listeners: BTreeMap<String, SocketAddr>,
    /// Nobody else is given the admin's port while Envoy starts and ends.
    _admin_port: Option<Port>,
    /// Given back after the process has ended: fields are dropped in order.
    _place: Option<OwnedSemaphorePermit>,
}

impl Target for RunningEnvoy {
    /// Of `ingress`.
    fn address(&self) -> SocketAddr {
        self.listener("ingress")
    }
}

impl RunningEnvoy {
    pub(super) async fn start(
        directory: TempDir,
        workers: usize,
        admin_port: Option<Port>,
        place: Option<OwnedSemaphorePermit>,
    ) -> Self {
        let process = Process::start(directory.path(), workers);
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let (admin, listeners) = (nowhere, BTreeMap::new());
        let mut envoy = Self { process, directory, admin, listeners, _admin_port: admin_port, _place: place };
        let started = Instant::now();
        while !envoy.serves().await {
            if let Some(status) = envoy.process.ended() {
                panic!("Envoy ended at its start: {status}");
            }
            assert!(started.elapsed() < START_DEADLINE, "Envoy is not ready after {START_DEADLINE:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        envoy.find_listeners().await;
        envoy
    }

    async fn serves(&mut self) -> bool {
        let Ok(admin) = std::fs::read_to_string(self.directory.path().join(ADMIN_ADDRESS)) else { return false };
        let Ok(admin) = admin.trim().parse() else { return false };
        self.admin = admin;
        Client::http1(&admin).get("/ready").send().await.is_ok_and(|reply| reply.status == 200)
    }

    async fn find_listeners(&mut self) {
        let listeners = self.admin("/listeners?format=json").await.json();
        for listener in listeners["listener_statuses"].as_array().expect("listener_statuses") {
            let socket = &listener["local_address"]["socket_address"];
            let address = format!("{}:{}", socket["address"].as_str().expect("an address"), socket["port_value"]);
            let name = listener["name"].as_str().expect("a name").to_owned();
            self.listeners.insert(name, address.parse().expect("ip:port"));
        }
    }

    /// The address of a listener, by its name.
    pub fn listener(&self, name: &str) -> SocketAddr {
        *self.listeners.get(name).unwrap_or_else(|| panic!("no listener {name} among {:?}", self.listeners))
    }

    /// A client of `ingress`, HTTP/1.1.
    pub fn client(&self) -> Client {
        Client::http1(self)
    }

    /// Gets a path of the admin interface.
    pub async fn admin(&self, path: &str) -> Reply {
        Client::http1(&self.admin).get(path).await
    }

    /// The filter's `/status.json`.
    pub async fn status(&self) -> Value {
        let reply = Client::http1(&self.listener("status")).get("/status.json").await;
        assert_eq!(reply.status, 200, "/status.json says {}", reply.text());
        reply.json()
    }

    /// What the filter says of the pool `gpu`; null before it knows it.
    pub async fn pool_status(&self) -> Value {
        self.status().await["pools"]["gpu"].take()
    }

    /// What the filter says of the hosts of the pool `gpu`, in its order.
    pub async fn books(&self) -> Vec<Value> {
        let status = self.status().await;
        status["pools"]["gpu"]["hosts"].as_array().unwrap_or_else(|| panic!("no pool gpu in {status}")).clone()
    }

    /// One field of each host of the pool `gpu`.
    pub async fn column(&self, name: &str) -> Vec<Value> {
        self.books().await.into_iter().map(|mut host| host[name].take()).collect()
    }

    /// Waits until what the filter says of the pool `gpu` is so, and gives it; panics with it after [`DEADLINE`].
    pub async fn until_pool(&self, what: &str, so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let mut status = self.status().await;
            let pool = &mut status["pools"]["gpu"];
            // The first tick makes the books.
            if pool.is_object() && so(pool) {
                return pool.take();
            }
            assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}; it says {status:#}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until what the filter says of the hosts of the pool `gpu` is so, and gives it; panics with it after [`DEADLINE`].
    pub async fn until(&self, what: &str, so: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let pool = self.until_pool(what, |pool| pool["hosts"].as_array().is_some_and(|books| so(books))).await;
        pool["hosts"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until a host of the pool `gpu` is in this state, and gives what the filter says of it then.
    pub async fn until_state(&self, host: usize, state: &str) -> Value {
        self.until(&format!("host {host} is {state}"), |books| books[host]["state"] == state).await.swap_remove(host)
    }

    /// The filter's in-flight count of each host of the pool `gpu`.
    pub async fn in_flight(&self) -> Vec<i64> {
        let books = self.books().await;
        books.iter().map(|host| host["in_flight"].as_i64().unwrap_or_else(|| panic!("no in_flight in {host}"))).collect()
    }

    /// Waits until the filter counts nothing in flight and nobody waiting, in any pool; panics with the books after [`DEADLINE`].
    pub async fn settled(&self) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let status = self.status().await;
            let pools = status["pools"].as_object().unwrap_or_else(|| panic!("no pools in {status}"));
            let mut hosts = pools.values().flat_map(|pool| pool["hosts"].as_array().into_iter().flatten());
            if hosts.all(|host| host["in_flight"] == 0) && pools.values().all(|pool| pool["waiting"].as_u64().unwrap_or(0) == 0) {
                return;
            }
            assert!(Instant::now() < deadline, "not settled after {DEADLINE:?}: {status:#}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// A counter or gauge, by its whole name: `cluster.gpu.upstream_cx_total`. Panics if there is none.
    pub async fn stat(&self, name: &str) -> u64 {
        let stats = self.stats().await;
        let last = name.rsplit('.').next().unwrap_or(name);
        *stats.get(name).unwrap_or_else(|| {
            let like: Vec<_> = stats.keys().filter(|other| other.ends_with(last)).collect();
            panic!("no statistic {name}; like it: {like:?}")
        })
    }

    /// All counters and gauges.
    pub async fn stats(&self) -> BTreeMap<String, u64> {
        let text = self.admin("/stats").await.text();
        text.lines()
            .filter_map(|line| line.split_once(": "))
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect()
    }

    /// The page that Prometheus reads.
    pub async fn prometheus(&self) -> String {
        self.admin("/stats/prometheus").await.text()
    }

    /// One sample of that page, by its name and labels as printed: `plimsoll_in_flight{pool="gpu",host="127.0.0.1:8188"}`.
    pub async fn prometheus_sample(&self, series: &str) -> Option<f64> {
        let page = self.prometheus().await;
        page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok())
    }

    /// How many of `ingress`'s connections each worker has accepted so far.
    pub async fn connections_by_worker(&self) -> Vec<u64> {
        let stats = self.stats().await;
        let accepted = |worker: usize| stats.get(&format!("listener.ingress.worker_{worker}.downstream_cx_total")).copied();
        (0..).map_while(accepted).collect()
    }

    /// HTTP/1.1 keep-alive connections of which at least two workers have some. (The kernel deals them out at random.) Nobody
    /// else may connect meanwhile.
    pub async fn pool_over_workers(&self, connections: usize) -> Pool {
        assert!(connections >= 2, "one connection is on one worker");
        for _ in 0..100 {
            let before = self.connections_by_worker().await;
            let pool = Pool::http1(self, connections).await;
            let mut fresh: Vec<u64> = Vec::new();
            eventually("Envoy has accepted the pool's connections", async || {
                let now = self.connections_by_worker().await;
                fresh = now.iter().zip(&before).map(|(now, before)| now - before).collect();
                fresh.iter().sum::<u64>() >= connections as u64
            })
            .await;
            if fresh.iter().filter(|connections| **connections > 0).count() >= 2 {
                return pool;
            }
        }
        panic!("{connections} connections a hundred times over, all on one worker: has this Envoy two?")
    }

    /// So many HTTP/2 connections on each worker, by worker. (The kernel deals them out at random.) Nobody else may connect meanwhile.
    pub async fn pool_on_each_worker(&self, connections: usize) -> Vec<Pool> {
        let mut pools = vec![Vec::new(); self.connections_by_worker().await.len()];
        for _ in 0..100 * connections {
            let before = self.connections_by_worker().await;
            let pool = Pool::http2(self, 1).await;
            let mut worker = None;
            eventually("Envoy has accepted the connection", async || {
                let now = self.connections_by_worker().await;
                worker = now.iter().zip(&before).position(|(now, before)| now > before);
                worker.is_some()
            })
            .await;
            let own = &mut pools[worker.expect("one has accepted it")];
            if own.len() < connections {
                own.push(pool);
            }
            if pools.iter().all(|own| own.len() == connections) {
                let mut whole = Vec::new();
                for own in &pools {
                    whole.push(Pool::of_all(own).await);
                }
                return whole;
            }
        }
        panic!("{} workers, and after so many tries not {connections} connections on each", pools.len())
    }

    /// Replaces the endpoints of the cluster `gpu` (needs [`super::Envoy::endpoints`]), waits until Envoy has taken them up, and says
    /// when they were written.
    pub async fn set_endpoints(&self, endpoints: impl IntoIterator<Item = impl Into<Endpoint>>) -> Instant {
        let endpoints: Vec<Endpoint> = endpoints.into_iter().map(Into::into).collect();
        let taken = self.stat("cluster.gpu.update_success").await;
        let written = Instant::now();
        endpoints::write(&self.directory.path().join(ENDPOINTS_FILE), &endpoints);
        eventually("Envoy has taken up the new endpoints", async || self.stat("cluster.gpu.update_success").await > taken).await;
        written
    }

    /// Replaces the filter's whole configuration, atomically (needs [`super::Envoy::live`]), and waits until Envoy has taken it up
    /// or refused it.
    ///
    /// # Errors
    /// It was refused.
    pub async fn reload(&self, configuration: Value) -> Result<(), String> {
        self.replace(|value| *value = configuration).await
    }

    /// Replaces the keys of the pool `gpu` but its hosts, as [`RunningEnvoy::reload`] does the whole.
    ///
    /// # Errors
    /// It was refused.
    pub async fn reload_pool(&self, keys: Value) -> Result<(), String> {
        self.replace(|value| {
            let pool = &mut value["pools"]["gpu"];
            *pool = pool_of(pool["hosts"].take(), keys);
        })
        .await
    }

    /// Replaces the filter's module, as [`RunningEnvoy::reload`] does its configuration.
    ///
    /// # Errors
    /// It was refused.
    pub async fn upgrade(&self, module: &str) -> Result<(), String> {
        self.replace_resource(|config| config["vm_config"]["code"]["local"]["filename"] = json!(module)).await
    }

    async fn replace(&self, change: impl FnOnce(&mut Value)) -> Result<(), String> {
        self.replace_resource(|config| {
            let value = &mut config["configuration"]["value"];
            let mut configuration = serde_json::from_str(value.as_str().expect("text")).expect("JSON");
            change(&mut configuration);
            *value = configuration.to_string().into();
        })
        .await
    }

    async fn replace_resource(&self, change: impl FnOnce(&mut Value)) -> Result<(), String> {
        let file = self.directory.path().join(LIVE_FILE);
        let text = std::fs::read_to_string(&file).expect("an Envoy that was started live");
        let mut resource: Value = serde_json::from_str(&text).expect("JSON");
        let version = resource["version_info"].as_str().expect("a version").parse::<u64>().expect("a number") + 1;
        resource["version_info"] = json!(version.to_string());
        change(&mut resource["resources"][0]["typed_config"]["config"]);
        let (taken, refused) = self.updates().await;
        let log = self.log().len();
        let fresh = file.with_extension("new");
        std::fs::write(&fresh, resource.to_string()).expect("a file in our directory");
        std::fs::rename(&fresh, &file).expect("a file in our directory");
        let mut now = (taken, refused);
        eventually("Envoy has taken up or refused the new configuration", async || {
            now = self.updates().await;
            now != (taken, refused)
        })
        .await;
        if now.1 == refused { Ok(()) } else { Err(self.log()[log..].to_owned()) }
    }

    /// Live configurations taken up, and refused.
    async fn updates(&self) -> (u64, u64) {
        let stats = self.stats().await;
        let sum = |end: &str| {
            stats
                .iter()
                .filter(|(name, _)| name.starts_with("extension_config_discovery.") && name.ends_with(end))
                .map(|(_, value)| value)
                .sum()
        };
        (sum(".config_reload"), sum(".update_rejected"))
    }

    /// All that Envoy has logged.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Waits until Envoy's log holds this text.
    pub async fn logged(&self, text: &str) {
        eventually(&format!("the log says {text:?}"), async || self.log().contains(text)).await;
    }

    /// SIGSTOP: when this returns, the process stands still.
    pub fn stop_process(&self) {
        self.process.stop();
    }

    /// SIGCONT: it goes on.
    pub fn continue_process(&self) {
        self.process.signal(Signal::CONT);
    }

    /// User and system time of all threads so far.
    pub fn cpu_time(&self) -> Duration {
        self.times().ran
    }

    /// What the scheduler says of all threads so far.
    pub fn times(&self) -> Times {
        self.process.times()
    }

    /// Resident memory in bytes.
    pub fn rss(&self) -> u64 {
        self.process.rss()
    }
}

impl Drop for RunningEnvoy {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.directory.disable_cleanup(true);
            eprintln!("--- the end of Envoy's log; all of it, and the bootstrap, in {} ---", self.directory.path().display());
            eprintln!("{}\n--- end ---", self.process.log_end());
        }
    }
}
