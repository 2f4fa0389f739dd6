//! One request at a time.

use std::future::{Future, IntoFuture};
use std::net::SocketAddr;
use std::pin::Pin;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{HOST, HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};

use super::connection::{Connection, Failure, Lent, Pool, Protocol};
use crate::Target;

/// The authority that all requests name.
const AUTHORITY: &str = "gpu.test";

/// What is asked.
#[derive(Clone, Debug)]
pub struct Call {
    /// `POST`
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Besides `host`.
    pub headers: HeaderMap,
    /// Sent with its `content-length`.
    pub body: Bytes,
}

impl Call {
    /// A call without headers.
    pub fn new(method: Method, path: &str, body: impl Into<Bytes>) -> Self {
        Self { method, path: path.into(), headers: HeaderMap::new(), body: body.into() }
    }

    /// Adds a header; the value may be any bytes that HTTP allows, not only UTF-8.
    pub fn add_header(&mut self, name: &str, value: impl AsRef<[u8]>) {
        let name = HeaderName::try_from(name).expect("a header's name");
        self.headers
            .append(name, HeaderValue::from_bytes(value.as_ref()).expect("a header's value; for a malformed one use Wire"));
    }

    pub(super) fn request(&self, protocol: Protocol) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.headers_mut() = self.headers.clone();
        let uri = match protocol {
            Protocol::Http1 => self.path.parse(),
            Protocol::Http2 => format!("http://{AUTHORITY}{}", self.path).parse(),
        };
        *request.uri_mut() = uri.unwrap_or_else(|error| panic!("{}: {error}", self.path));
        if protocol == Protocol::Http1 {
            request.headers_mut().entry(HOST).or_insert(HeaderValue::from_static(AUTHORITY));
        }
        request
    }
}

/// A whole response.
#[derive(Clone, Debug)]
pub struct Reply {
    /// 200
    pub status: u16,
    /// As received.
    pub headers: HeaderMap,
    /// All of it.
    pub body: Bytes,
    /// HTTP/2, gRPC.
    pub trailers: HeaderMap,
}

impl Reply {
    /// A header's (first) value, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The simulated host that answered.
    pub fn host(&self) -> Option<SocketAddr> {
        self.header("x-sim-host")?.parse().ok()
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; panics with the text if it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }

    /// `grpc-status`, from the trailers or (trailers-only) from the headers.
    pub fn grpc_status(&self) -> Option<u16> {
        self.trailers.get("grpc-status").or_else(|| self.headers.get("grpc-status"))?.to_str().ok()?.parse().ok()
    }
}

/// Sends requests to one target, each on a connection of its own.
///
/// ```ignore
/// let reply = client.post("/prompt", "{}").header("x-odd", b"\xff").await;   // a Reply, or a panic that says why not
/// let failure = client.get("/").send().await.unwrap_err();                   // where a failure is expected
/// let mut job = client.post("/prompt", "{}").start().await;                  // under way; dropped, it is aborted
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Client {
    address: SocketAddr,
    protocol: Protocol,
}

impl Client {
    /// Over HTTP/1.1.
    pub fn http1(target: &impl Target) -> Self {
        Self { address: target.address(), protocol: Protocol::Http1 }
    }

    /// Over HTTP/2 (h2c, prior knowledge).
    pub fn http2(target: &impl Target) -> Self {
        Self { address: target.address(), protocol: Protocol::Http2 }
    }

    /// A GET.
    pub fn get(&self, path: &str) -> Ask {
        self.ask(Method::GET, path, "")
    }

    /// A POST.
    pub fn post(&self, path: &str, body: impl Into<Bytes>) -> Ask {
        self.ask(Method::POST, path, body)
    }

    /// A gRPC call with an empty message. (HTTP/2 is what gRPC wants.)
    pub fn grpc(&self, path: &str) -> Ask {
        self.post(path, &[0u8; 5][..]).header("content-type", "application/grpc").header("te", "trailers")
    }

    /// Any method.
    pub fn ask(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Ask {
        Ask { client: *self, call: Call::new(method, path, body) }
    }
}

/// A request that has not been sent yet; `.await` sends it.
#[derive(Clone, Debug)]
#[must_use]
pub struct Ask {
    client: Client,
    call: Call,
}

impl Ask {
    /// Adds a header; the value may be any bytes that HTTP allows, not only UTF-8.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.call.add_header(name, value);
        self
    }

    /// Sends it and reads the whole response.
    ///
    /// # Errors
    /// No (whole) response came.
    pub async fn send(self) -> Result<Reply, Failure> {
        let mut connection = Connection::open(self.client.address, self.client.protocol).await?;
        let response = connection.send(self.call.request(self.client.protocol)).await.map_err(|_| Failure::Reset)?;
        read(response).await
    }

    /// Sends it and comes back without waiting for the response.
    pub async fn start(self) -> Ongoing {
        let Client { address, protocol } = self.client;
        let mut connection = Connection::open(address, protocol).await.unwrap_or_else(|error| panic!("{address}: {error}"));
        let response = Box::pin(connection.send(self.call.request(protocol)));
        Ongoing { _connection: Lent::own(connection), state: State::Waiting(response) }
    }

    /// As [`Ask::start`], over a connection of this pool. Over HTTP/2 only its stream ends with it.
    pub async fn start_over(self, pool: &Pool) -> Ongoing {
        let mut lent = pool.take().await.unwrap_or_else(|error| panic!("{}: {error}", self.client.address));
        let response = Box::pin(lent.connection().send(self.call.request(pool.protocol())));
        Ongoing { _connection: lent, state: State::Waiting(response) }
    }
}

impl IntoFuture for Ask {
    type Output = Reply;
    type IntoFuture = Pin<Box<dyn Future<Output = Reply> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let what = format!("{} http://{}{}", self.call.method, self.client.address, self.call.path);
            // Envoy's main thread answers nobody while it compiles a module, which on a busy machine takes its time.
            let reply = tokio::time::timeout(crate::DEADLINE * 3, self.send()).await.unwrap_or(Err(Failure::Timeout));
            reply.unwrap_or_else(|error| panic!("{what}: {error}"))
        })
    }
}

enum State {
    Waiting(Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>),
    Streaming(Incoming),
}

/// A request under way. Dropped before its end, it is aborted: the client closes the connection.
#[must_use]
pub struct Ongoing {
    _connection: Lent,
    state: State,
}

impl Ongoing {
    /// Waits for the response's status and headers.
    ///
    /// # Errors
    /// None came.
    pub async fn head(&mut self) -> Result<(StatusCode, HeaderMap), Failure> {
        let State::Waiting(response) = &mut self.state else { panic!("the head has been read") };
        let (head, body) = response.await.map_err(|_| Failure::Reset)?.into_parts();
        self.state = State::Streaming(body);
        Ok((head.status, head.headers))
    }

    /// Waits for the next piece of the body (the head is read on the way); `None` is its end.
    ///
    /// # Errors
    /// The response was cut short.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Failure> {
        if let State::Waiting(_) = &self.state {
            self.head().await?;
        }
        let State::Streaming(body) = &mut self.state else { panic!("the head has been read") };
        loop {
            match body.frame().await {
                None => return Ok(None),
                Some(Err(_)) => return Err(Failure::Cut),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// Closes the connection.
    pub fn abort(self) {}

    /// Reads the response to its end.
    ///
    /// # Errors
    /// No (whole) response came.
    pub async fn finish(self) -> Result<Reply, Failure> {
        match self.state {
            State::Waiting(response) => read(response.await.map_err(|_| Failure::Reset)?).await,
            State::Streaming(_) => panic!("the head has been read: read the chunks"),
        }
    }
}

async fn read(response: Response<Incoming>) -> Result<Reply, Failure> {
    let (head, body) = response.into_parts();
    let collected = body.collect().await.map_err(|_| Failure::Cut)?;
    let trailers = collected.trailers().cloned().unwrap_or_default();
    Ok(Reply { status: head.status.as_u16(), headers: head.headers, body: collected.to_bytes(), trailers })
}
