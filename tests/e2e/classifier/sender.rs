//! A client that sends a body in pieces as it is told, and a host that gives back what it got.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use support::{DEADLINE, Target};
use tokio::net::{TcpListener, TcpStream};

/// A host that answers with the body that it got, and with its `x-seen-…` headers.
pub struct Mirror;

impl Mirror {
    /// Starts one on a free port.
    pub async fn start() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let serve = auto::Builder::new(TokioExecutor::new());
                tokio::spawn(async move { drop(serve.serve_connection(TokioIo::new(stream), service_fn(reflect)).await) });
            }
        });
        address
    }
}

async fn reflect(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let mut response = Response::new(Full::new(body));
    let seen = head.headers.iter().filter(|(name, _)| name.as_str().starts_with("x-seen-"));
    response.headers_mut().extend(seen.map(|(name, value)| (name.clone(), value.clone())));
    Ok(response)
}

/// A part of a request after its headers.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Some of the body.
    Data(Bytes),
    /// Nothing for so long.
    Pause(Duration),
    /// The end.
    Trailers,
}

impl Piece {
    /// These bytes.
    pub fn data(bytes: &[u8]) -> Self {
        Self::Data(Bytes::copy_from_slice(bytes))
    }
}

/// A body of pieces, whose length nobody is told.
struct Pieces {
    left: VecDeque<Piece>,
    pause: Option<Pin<Box<tokio::time::Sleep>>>,
    length: Option<u64>,
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match self.left.pop_front() {
                None => return Poll::Ready(None),
                Some(Piece::Data(bytes)) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Some(Piece::Trailers) => {
                    let trailers = HeaderMap::from_iter([("x-end".parse().expect("a name"), "yes".parse().expect("a value"))]);
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Some(Piece::Pause(time)) => self.pause = Some(Box::pin(tokio::time::sleep(time))),
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// What came back.
pub struct Mirrored {
    pub status: u16,
    headers: HeaderMap,
    pub body: Bytes,
}

impl Mirrored {
    /// What the host was told that the classifier had passed on.
    pub fn seen(&self, name: &str) -> Option<String> {
        let value = self.headers.get(format!("x-seen-{name}"))?;
        Some(String::from_utf8(value.as_bytes().to_vec()).expect("text")).filter(|value| value != "-")
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Sends each request on a connection of its own.
#[derive(Clone)]
pub struct Sender {
    address: SocketAddr,
    is_http2: bool,
}

impl fmt::Debug for Sender {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if self.is_http2 { "HTTP/2" } else { "HTTP/1.1" })
    }
}

impl Sender {
    /// Over HTTP/1.1.
    pub fn http1(target: &impl Target) -> Self {
        Self { address: target.address(), is_http2: false }
    }

    /// Over either protocol.
    pub fn both(target: &impl Target) -> [Self; 2] {
        [false, true].map(|is_http2| Self { address: target.address(), is_http2 })
    }

    pub fn is_http2(&self) -> bool {
        self.is_http2
    }

    /// Sends a body of these pieces, with its length or without, and reads the answer. Panics where none comes.
    pub async fn send(&self, has_length: bool, headers: &[(&str, &str)], pieces: Vec<Piece>) -> Mirrored {
        let what = format!("{self:?}, {} pieces", pieces.len());
        let whole = tokio::time::timeout(DEADLINE * 3, self.ask(has_length, headers, pieces));
        whole.await.unwrap_or_else(|_| panic!("{what}: no answer")).unwrap_or_else(|error| panic!("{what}: {error}"))
    }

    /// Sends these pieces and goes away before the end, once the first have been sent.
    pub async fn abort(&self, mut pieces: Vec<Piece>) {
        pieces.push(Piece::Pause(DEADLINE * 3));
        let gone = tokio::time::timeout(Duration::from_millis(100), self.ask(false, &[], pieces)).await;
        assert!(gone.is_err(), "it was answered");
    }

    async fn ask(&self, has_length: bool, headers: &[(&str, &str)], pieces: Vec<Piece>) -> Result<Mirrored, hyper::Error> {
        let io = TokioIo::new(TcpStream::connect(self.address).await.expect("it listens"));
        let sum = pieces.iter().map(|piece| if let Piece::Data(bytes) = piece { bytes.len() as u64 } else { 0 }).sum();
        let body = Pieces { left: pieces.into(), pause: None, length: has_length.then_some(sum) };
        let mut request = Request::post("http://gpu.test/prompt").header("host", "gpu.test").body(body).expect("a request");
        if !self.is_http2 {
            *request.uri_mut() = "/prompt".parse().expect("a path");
        }
        for (name, value) in headers {
            request
                .headers_mut()
                .append(hyper::header::HeaderName::try_from(*name).expect("a name"), value.parse().expect("a value"));
        }
        // The connection ends with its task, and that with this request.
        let mut tasks = tokio::task::JoinSet::new();
        let response = if self.is_http2 {
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await?;
            tasks.spawn(async { drop(connection.await) });
            sender.send_request(request).await?
        } else {
            let (mut sender, connection) = http1::handshake(io).await?;
            tasks.spawn(async { drop(connection.await) });
            sender.send_request(request).await?
        };
        let (head, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Mirrored { status: head.status.as_u16(), headers: head.headers, body })
    }
}

/// Bytes that are no text, the same each time.
pub fn random_bytes(length: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}
