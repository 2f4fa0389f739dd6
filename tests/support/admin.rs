//! A stand-in for Envoy's admin page `/clusters?format=json`: answers what a test sets, well or badly, and remembers who asked.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::Target;
use crate::gpu::Port;

/// A host as the page lists it, in Envoy's own shape. The default: weight 1, healthy.
#[derive(Clone, Debug)]
pub struct Listed(Value);

impl Listed {
    /// A host at this address.
    pub fn at(address: SocketAddr) -> Self {
        Self::of(json!({ "socket_address": { "address": address.ip().to_string(), "port_value": address.port() } }))
    }

    /// A host that is a Unix socket.
    pub fn pipe(path: &str) -> Self {
        Self::of(json!({ "pipe": { "path": path } }))
    }

    /// A host at this address, whatever it is.
    pub fn of(address: Value) -> Self {
        let counters = ["cx_connect_fail", "cx_total", "rq_error", "rq_success", "rq_timeout", "rq_total"];
        let gauges = ["cx_active", "rq_active", "rq_pending_active"];
        let mut stats: Vec<Value> = counters.iter().map(|name| json!({ "name": name })).collect();
        stats.extend(gauges.iter().map(|name| json!({ "type": "GAUGE", "name": name })));
        Self(json!({
            "address": address,
            "stats": stats,
            "health_status": { "eds_health_status": "HEALTHY" },
            "weight": 1,
            "locality": {},
        }))
    }

    /// Its `weight`.
    pub fn weight(mut self, weight: u32) -> Self {
        self.0["weight"] = weight.into();
        self
    }

    /// The `priority` of its locality; Envoy leaves out 0.
    pub fn priority(mut self, priority: u32) -> Self {
        self.0["priority"] = priority.into();
        self
    }

    /// Its `eds_health_status`; empty: left out, as Envoy leaves out `UNKNOWN`.
    pub fn eds(mut self, status: &str) -> Self {
        self.0["health_status"]["eds_health_status"] = status.into();
        if status.is_empty() {
            self.0["health_status"] = json!({});
        }
        self
    }

    /// Raises a flag of its `health_status`, such as `failed_outlier_check`.
    pub fn flag(mut self, name: &str) -> Self {
        self.0["health_status"][name] = true.into();
        self
    }

    /// Its JSON.
    pub fn json(&self) -> &Value {
        &self.0
    }
}

/// One answer of the page.
#[derive(Clone, Debug)]
pub struct Page {
    status: u16,
    body: Bytes,
    delay: Duration,
    cut: bool,
    hangs: bool,
}

impl Page {
    /// The cluster with these hosts; Envoy leaves the list out where there are none.
    pub fn hosts(cluster: &str, hosts: impl IntoIterator<Item = Listed>) -> Self {
        let hosts: Vec<Value> = hosts.into_iter().map(|host| host.0).collect();
        let mut status = json!({ "name": cluster, "circuit_breakers": { "thresholds": [] }, "observability_name": cluster });
        if !hosts.is_empty() {
            status["host_statuses"] = json!(hosts);
        }
        Self::text(serde_json::to_vec_pretty(&json!({ "cluster_statuses": [status] })).expect("JSON"))
    }

    /// Any bytes.
    pub fn text(body: impl Into<Bytes>) -> Self {
        Self { status: 200, body: body.into(), delay: Duration::ZERO, cut: false, hangs: false }
    }

    /// No answer, ever.
    pub fn hang() -> Self {
        Self { hangs: true, ..Self::text("") }
    }

    /// With this status.
    pub fn status(mut self, status: u16) -> Self {
        self.status = status;
        self
    }

    /// Only after so long.
    pub fn after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Only the first half of the body; then the connection ends.
    pub fn cut(mut self) -> Self {
        self.cut = true;
        self
    }
}

/// One request that came.
#[derive(Clone, Debug)]
pub struct Asked {
    /// When.
    pub at: Instant,
    /// `GET`
    pub method: String,
    /// Path and query, as received.
    pub path: String,
}

#[derive(Debug)]
struct Shared {
    address: SocketAddr,
    page: Mutex<Page>,
    asked: Mutex<Vec<Asked>>,
    wanted: watch::Sender<bool>,
    listening: watch::Sender<bool>,
}

/// A running stand-in; it ends with the tokio runtime that it was started in. At first it knows no cluster.
#[derive(Clone, Debug)]
pub struct AdminPage(Arc<Shared>);

impl AdminPage {
    /// Starts on a free port.
    pub async fn start() -> Self {
        let port = Port::reserve(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        let page = Self(Arc::new(Shared {
            address: port.address(),
            page: Mutex::new(Page::text("{}\n")),
            asked: Mutex::default(),
            wanted: watch::Sender::new(true),
            listening: watch::Sender::new(false),
        }));
        tokio::spawn(accept(page.0.clone(), port));
        page.open().await;
        page
    }

    /// Answers so from now on; what was asked before is answered as it stood then.
    pub fn show(&self, page: Page) {
        *self.0.page.lock().unwrap() = page;
    }

    /// Closes every connection and refuses new ones. Returns when it holds.
    pub async fn close(&self) {
        self.set(false).await;
    }

    /// Accepts connections again.
    pub async fn open(&self) {
        self.set(true).await;
    }

    async fn set(&self, open: bool) {
        self.0.wanted.send_replace(open);
        let _ = self.0.listening.subscribe().wait_for(|listening| *listening == open).await;
    }

    /// What was asked so far, in its order.
    pub fn asked(&self) -> Vec<Asked> {
        self.0.asked.lock().unwrap().clone()
    }

    /// How often it was asked so far.
    pub fn times(&self) -> usize {
        self.0.asked.lock().unwrap().len()
    }

    /// Waits until it has been asked so many times more.
    pub async fn asked_again(&self, times: usize) {
        let wanted = self.times() + times;
        crate::eventually(&format!("the page is asked {times} times more"), async || self.times() >= wanted).await;
    }
}

impl Target for AdminPage {
    fn address(&self) -> SocketAddr {
        self.0.address
    }
}

async fn accept(shared: Arc<Shared>, port: Port) {
    let mut wanted = shared.wanted.subscribe();
    loop {
        if *wanted.borrow_and_update() {
            let listener = port.listen().expect("the port is reserved");
            shared.listening.send_replace(true);
            // Whoever is still there when the door shuts is cut off.
            let mut connections = JoinSet::new();
            while *wanted.borrow_and_update() {
                tokio::select! {
                    biased;
                    changed = wanted.changed() => if changed.is_err() { return },
                    accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                        connections.spawn(serve(shared.clone(), stream));
                    },
                }
            }
            connections.shutdown().await;
        }
        shared.listening.send_replace(false);
        if wanted.wait_for(|wanted| *wanted).await.is_err() {
            return;
        }
    }
}

/// Answers what comes on one connection, one request after another, until it ends.
async fn serve(shared: Arc<Shared>, mut stream: TcpStream) {
    let mut received = Vec::new();
    loop {
        let end = received.windows(4).position(|window| window == b"\r\n\r\n");
        let Some(end) = end else {
            match stream.read_buf(&mut received).await {
                Ok(0) | Err(_) => return,
                Ok(_) => continue,
            }
        };
        let head: Vec<u8> = received.drain(..end + 4).collect();
        let line = String::from_utf8_lossy(&head);
        let mut words = line.split(' ').map(str::to_owned);
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        shared.asked.lock().unwrap().push(Asked { at: Instant::now(), method, path });
        let page = shared.page.lock().unwrap().clone();
        if page.hangs {
            // Until whoever asked has had enough.
            while stream.read_buf(&mut received).await.is_ok_and(|bytes| bytes > 0) {}
            return;
        }
        tokio::time::sleep(page.delay).await;
        let mut answer = format!("HTTP/1.1 {} Whatever\r\n", page.status).into_bytes();
        answer.extend(format!("content-type: application/json\r\ncontent-length: {}\r\n\r\n", page.body.len()).into_bytes());
        answer.extend_from_slice(if page.cut { &page.body[..page.body.len() / 2] } else { &page.body });
        if stream.write_all(&answer).await.is_err() || page.cut {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Client, Failure};

    #[tokio::test]
    async fn it_answers_what_it_was_told_to_and_remembers_who_asked() {
        let page = AdminPage::start().await;
        let client = Client::http1(&page);
        assert_eq!(client.get("/clusters?format=json").await.json(), json!({}));
        page.show(Page::hosts("gpu", [Listed::at(page.address()).weight(3).flag("failed_outlier_check")]));
        let host = &client.get("/clusters").await.json()["cluster_statuses"][0]["host_statuses"][0];
        assert_eq!((&host["weight"], &host["health_status"]["failed_outlier_check"]), (&json!(3), &json!(true)));
        page.show(Page::text("gone").status(404));
        let reply = client.get("/clusters").await;
        assert_eq!((reply.status, reply.text().as_str()), (404, "gone"));
        let asked = page.asked();
        assert_eq!((asked[0].method.as_str(), asked[0].path.as_str()), ("GET", "/clusters?format=json"));
        assert!(asked.is_sorted_by_key(|one| one.at) && page.times() == 3);
    }

    #[tokio::test]
    async fn it_is_late_or_breaks_off_or_hangs_or_is_gone_as_told() {
        let page = AdminPage::start().await;
        let client = Client::http1(&page);
        page.show(Page::text("late").after(Duration::from_millis(100)));
        let began = Instant::now();
        assert_eq!(client.get("/").await.text(), "late");
        assert!(began.elapsed() >= Duration::from_millis(100));
        page.show(Page::text("half of it").cut());
        assert_eq!(client.get("/").send().await.unwrap_err(), Failure::Cut);
        page.show(Page::hang());
        let endless = client.get("/").start().await;
        let ended = tokio::spawn(async move { endless.finish().await });
        page.asked_again(0).await;
        crate::eventually("it was asked", async || page.times() == 3).await;
        assert!(!ended.is_finished());
        page.close().await;
        assert_eq!(ended.await.unwrap().unwrap_err(), Failure::Reset);
        assert_eq!(client.get("/").send().await.unwrap_err(), Failure::Connect);
        page.open().await;
        page.show(Page::text("back"));
        assert_eq!(client.get("/").await.text(), "back");
    }
}
