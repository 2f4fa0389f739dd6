//! Client connections, HTTP/1.1 and HTTP/2, one at a time or pooled.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;

use crate::Target;

/// Why a client got no (whole) response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// No connection.
    Connect,
    /// The connection or the stream ended before the response's headers.
    Reset,
    /// It ended in the response's body.
    Cut,
    /// The client gave up.
    Timeout,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "no connection",
            Self::Reset => "ended before the response",
            Self::Cut => "ended in the response's body",
            Self::Timeout => "given up by the client",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

/// An open connection; dropped, it closes at once, whatever is in flight on it.
pub(super) struct Connection {
    sender: Sender,
    task: Option<JoinHandle<()>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl Connection {
    pub async fn open(address: SocketAddr, protocol: Protocol) -> Result<Self, Failure> {
        let stream = TcpStream::connect(address).await.map_err(|_| Failure::Connect)?;
        let _ = stream.set_nodelay(true);
        let io = TokioIo::new(stream);
        let (sender, task) = match protocol {
            Protocol::Http1 => {
                let (sender, serving) = http1::handshake(io).await.map_err(|_| Failure::Connect)?;
                (Sender::Http1(sender), tokio::spawn(async { drop(serving.await) }))
            }
            Protocol::Http2 => {
                let mut builder = http2::Builder::new(TokioExecutor::new());
                // The server says how many; hyper's own first guess of 100 would hold a burst back.
                builder.initial_max_send_streams(1 << 16).max_concurrent_reset_streams(1 << 16);
                let (sender, serving) = builder.handshake(io).await.map_err(|_| Failure::Connect)?;
                (Sender::Http2(sender), tokio::spawn(async { drop(serving.await) }))
            }
        };
        Ok(Self { sender, task: Some(task) })
    }

    /// Hands the request to the connection at once; the future is the response.
    pub fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> impl Future<Output = hyper::Result<Response<Incoming>>> + Send + use<> {
        // Two future types, one name.
        let (one, two) = match &mut self.sender {
            Sender::Http1(sender) => (Some(sender.send_request(request)), None),
            Sender::Http2(sender) => (None, Some(sender.send_request(request))),
        };
        async move {
            match (one, two) {
                (Some(response), _) => response.await,
                (_, Some(response)) => response.await,
                (None, None) => unreachable!("one of them is there"),
            }
        }
    }

    /// Waits until the connection takes another request; false if it never will.
    pub async fn ready(&mut self) -> bool {
        match &mut self.sender {
            Sender::Http1(sender) => sender.ready().await.is_ok(),
            Sender::Http2(sender) => sender.ready().await.is_ok(),
        }
    }

    fn closed(&self) -> bool {
        match &self.sender {
            Sender::Http1(sender) => sender.is_closed(),
            Sender::Http2(sender) => sender.is_closed(),
        }
    }

    /// Another handle on an HTTP/2 connection, which does not end it when dropped.
    fn share(&self) -> Self {
        let Sender::Http2(sender) = &self.sender else { panic!("an HTTP/1.1 connection is not shared") };
        Self { sender: Sender::Http2(sender.clone()), task: None }
    }
}

/// A number of connections, opened beforehand and reopened when they break.
///
/// HTTP/1.1: one request at a time on each, the longest idle first. HTTP/2: any number on each, in turn.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

struct Inner {
    address: SocketAddr,
    protocol: Protocol,
    /// HTTP/1.1: the idle ones; `None` is one that broke.
    idle: Mutex<mpsc::UnboundedReceiver<Option<Connection>>>,
    back: mpsc::UnboundedSender<Option<Connection>>,
    /// HTTP/2: all.
    shared: Vec<Mutex<Connection>>,
    next: AtomicUsize,
    /// The pools whose connections these are.
    _of: Vec<Pool>,
}

impl Pool {
    /// Opens so many HTTP/1.1 keep-alive connections.
    pub async fn http1(target: &impl Target, connections: usize) -> Self {
        Self::open(target.address(), Protocol::Http1, connections).await
    }

    /// Opens so many HTTP/2 connections.
    pub async fn http2(target: &impl Target, connections: usize) -> Self {
        Self::open(target.address(), Protocol::Http2, connections).await
    }

    /// The HTTP/2 connections of all these pools, one of each in turn.
    pub async fn of_all(pools: &[Self]) -> Self {
        let (back, idle) = mpsc::unbounded_channel();
        let mut shared = Vec::new();
        let most = pools.iter().map(|pool| pool.0.shared.len()).max().unwrap_or(0);
        for connection in (0..most).flat_map(|n| pools.iter().filter_map(move |pool| pool.0.shared.get(n))) {
            shared.push(Mutex::new(connection.lock().await.share()));
        }
        let first = &pools.first().expect("a pool has at least one connection").0;
        let (address, protocol) = (first.address, first.protocol);
        let (idle, next, of) = (Mutex::new(idle), AtomicUsize::new(0), pools.to_vec());
        Self(Arc::new(Inner { address, protocol, idle, back, shared, next, _of: of }))
    }

    pub(super) async fn open(address: SocketAddr, protocol: Protocol, connections: usize) -> Self {
        assert!(connections > 0, "a pool has at least one connection");
        let (back, idle) = mpsc::unbounded_channel();
        let mut shared = Vec::new();
        for _ in 0..connections {
            let connection = Connection::open(address, protocol).await.unwrap_or_else(|error| panic!("{address}: {error}"));
            match protocol {
                Protocol::Http1 => back.send(Some(connection)).expect("the pool itself receives"),
                Protocol::Http2 => shared.push(Mutex::new(connection)),
            }
        }
        let (idle, next, of) = (Mutex::new(idle), AtomicUsize::new(0), Vec::new());
        Self(Arc::new(Inner { address, protocol, idle, back, shared, next, _of: of }))
    }

    pub(super) fn protocol(&self) -> Protocol {
        self.0.protocol
    }

    /// Takes a connection, waiting for one if need be.
    pub(super) async fn take(&self) -> Result<Lent, Failure> {
        let inner = &*self.0;
        if inner.protocol == Protocol::Http2 {
            let n = inner.next.fetch_add(1, Ordering::Relaxed) % inner.shared.len();
            let mut connection = inner.shared[n].lock().await;
            if connection.closed() {
                *connection = Connection::open(inner.address, inner.protocol).await?;
            }
            return Ok(Lent { connection: Some(connection.share()), home: None });
        }
        let idle = inner.idle.lock().await.recv().await.expect("the pool itself sends");
        let mut lent = Lent { connection: idle.filter(|connection| !connection.closed()), home: Some(inner.back.clone()) };
        if lent.connection.is_none() {
            lent.connection = Some(Connection::open(inner.address, inner.protocol).await?);
        }
        Ok(lent)
    }
}

/// A connection out of a pool. Dropped without [`Lent::give_back`], it is closed (HTTP/1.1), and the pool opens another.
pub(super) struct Lent {
    connection: Option<Connection>,
    home: Option<mpsc::UnboundedSender<Option<Connection>>>,
}

impl Lent {
    /// A connection that belongs to no pool.
    pub fn own(connection: Connection) -> Self {
        Self { connection: Some(connection), home: None }
    }

    pub fn connection(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("lent until dropped")
    }

    /// After a whole response: the next request may use it.
    pub async fn give_back(mut self) {
        if let Some(home) = self.home.take() {
            let mut connection = self.connection.take();
            let usable = match &mut connection {
                Some(connection) => connection.ready().await,
                None => false,
            };
            let _ = home.send(connection.filter(|_| usable));
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // First closed, then replaced.
        self.connection = None;
        if let Some(home) = &self.home {
            let _ = home.send(None);
        }
    }
}
