//! From an accepted connection to the answers on it.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue, UPGRADE};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};

use super::answer::{Answer, Part};
use super::books::Job;
use super::fault::Kind;
use super::line::{GatedExecutor, Line, Port, gated};
use super::{Door, Shared, control, tells};

/// How much of a request's body is remembered.
const BODY_KEPT: usize = 64 << 10;

/// Why a request gets no response at all; hyper resets its stream with the reason, or closes its HTTP/1.1 connection.
type NoAnswer = h2::Error;

/// Accepts connections as the host's door stands, as long as the runtime lives.
pub(super) async fn accept(shared: Arc<Shared>, port: Port) {
    let mut wanted = shared.wanted.subscribe();
    let mut listener: Option<TcpListener> = None;
    loop {
        let now = *wanted.borrow_and_update();
        if now.door == Door::Closed {
            listener = None;
        } else if listener.is_none() {
            listener = Some(port.listen().expect("the host's port is reserved"));
        }
        shared.door.send_replace(now.door);
        let accepting = matches!(now.door, Door::Open | Door::Resetting) && !now.frozen;
        tokio::select! {
            biased;
            changed = wanted.changed() => if changed.is_err() { return },
            accepted = async { listener.as_ref().unwrap().accept().await }, if accepting => match accepted {
                Ok((stream, _)) if now.door == Door::Resetting => drop(stream.set_zero_linger()),
                Ok((stream, _)) => { tokio::spawn(connection(shared.clone(), stream)); }
                // Out of descriptors, most likely: waiting is all that helps.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
        }
    }
}

/// Counts a connection as open until dropped.
struct Open(Arc<Shared>);

impl Open {
    fn new(shared: Arc<Shared>) -> Self {
        shared.books.change(|counts| {
            counts.connections += 1;
            counts.open_connections += 1;
        });
        Self(shared)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.books.change(|counts| counts.open_connections -= 1);
    }
}

async fn connection(shared: Arc<Shared>, stream: TcpStream) {
    let _open = Open::new(shared.clone());
    let _ = stream.set_nodelay(true);
    // Fails where the client has gone already, or descriptors have run out.
    let Ok(line) = Line::new(&stream) else { return };
    let wanted = shared.wanted.subscribe();

    let mut builder = auto::Builder::new(GatedExecutor(wanted.clone()));
    builder.http1().max_headers(1_000).max_buf_size(1 << 20);
    // Envoy's aborts are resets, and thousands of them are no attack here.
    builder
        .http2()
        .max_concurrent_streams(1 << 20)
        .max_header_list_size(1 << 20)
        .max_pending_accept_reset_streams(1 << 20)
        .max_local_error_reset_streams(None)
        .enable_connect_protocol();

    let service = service_fn({
        let (shared, line) = (shared.clone(), line.clone());
        move |request| respond(shared.clone(), line.clone(), request)
    });
    let serving = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    gated(wanted, async {
        tokio::select! {
            _ = serving => {}
            () = line.was_cut() => {}
            () = line.was_idle(shared.spec.keep_alive) => {}
        }
    })
    .await;
    line.release();
}

async fn respond(shared: Arc<Shared>, line: Arc<Line>, request: Request<Incoming>) -> Result<Response<Answer>, NoAnswer> {
    let busy = line.busy();
    let told = tells::page(&shared, request.uri().path()).await;
    let mut response = match (told, request.uri().path()) {
        (Some(page), _) => page,
        (None, "/health") => health(&shared).await,
        (None, "/metrics") => text("text/plain; version=0.0.4", shared.controls.lock().unwrap().metrics.clone()),
        (None, path) if path.starts_with("/sim/") => control::respond(shared.clone(), request).await,
        _ => job(&shared, &line, request).await?,
    };
    response.body_mut().hold(busy);
    let host = HeaderValue::try_from(line.local.to_string()).unwrap();
    response.headers_mut().insert("x-sim-host", host);
    Ok(response)
}

async fn health(shared: &Shared) -> Response<Answer> {
    shared.books.change(|counts| counts.health_checks += 1);
    let status = shared.controls.lock().unwrap().health;
    match status {
        Some(status) => {
            let mut response = text("text/plain", "");
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            response
        }
        None => std::future::pending().await,
    }
}

pub(super) fn text(content_type: &'static str, body: impl Into<Bytes>) -> Response<Answer> {
    let mut response = Response::new(Answer::whole(body.into()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

async fn job(shared: &Arc<Shared>, line: &Arc<Line>, request: Request<Incoming>) -> Result<Response<Answer>, NoAnswer> {
    let (head, body) = request.into_parts();
    let job = Job::enter(shared, &head);
    let websocket = head.headers.contains_key(UPGRADE) || head.method == Method::CONNECT;
    let fault = {
        let mut controls = shared.controls.lock().unwrap();
        controls.fault.as_mut().and_then(|fault| fault.strikes().then(|| fault.kind.clone()))
    };
    if websocket && fault.is_none() {
        return Ok(echo(shared, job, Request::from_parts(head, body)));
    }
    job.received(drain(body).await?);
    match fault {
        Some(kind) => misbehave(kind, line, job, &head).await,
        None => Ok(tells::told(shared, work(shared, job, &head).await)),
    }
}

/// Reads a body to its end and gives the beginning of it, and its length.
async fn drain(mut body: Incoming) -> Result<(Bytes, usize), NoAnswer> {
    let (mut beginning, mut length) = (BytesMut::new(), 0);
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Err(h2::Reason::CANCEL.into()) };
        if let Some(data) = frame.data_ref() {
            beginning.extend_from_slice(&data[..data.len().min(BODY_KEPT - beginning.len())]);
            length += data.len();
        }
    }
    Ok((beginning.freeze(), length))
}

async fn misbehave(kind: Kind, line: &Arc<Line>, job: Job, head: &Parts) -> Result<Response<Answer>, NoAnswer> {
    match kind {
        Kind::Status { status, headers, after_ms } => {
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            let mut response = Response::new(Answer::to(head, vec![Part::now("the simulated host fails as told\n")], job));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            for (name, value) in headers {
                let name = hyper::header::HeaderName::try_from(name).unwrap();
                response.headers_mut().append(name, HeaderValue::try_from(value).unwrap());
            }
            Ok(response)
        }
        Kind::Grpc { status, trailers_only: true } => {
            let mut response = grpc(Answer::to(head, vec![], job));
            response.headers_mut().extend(grpc_status(status));
            Ok(response)
        }
        Kind::Grpc { status, trailers_only: false } => Ok(grpc(Answer::to(head, vec![Part::trailers(grpc_status(status))], job))),
        Kind::Hang => std::future::pending().await,
        Kind::Reset => {
            line.reset();
            std::future::pending().await
        }
        Kind::ResetInBody => Ok(Response::new(Answer::to(head, vec![Part::now("half of the answ"), Part::reset(line)], job))),
        Kind::RefuseStream => Err(h2::Reason::REFUSED_STREAM.into()),
    }
}

async fn work(shared: &Arc<Shared>, mut job: Job, head: &Parts) -> Response<Answer> {
    job.take_slot().await;
    let service = service_time(shared, head);
    let chunks = number(&head.headers, "x-sim-chunks").map_or(shared.spec.chunks, |chunks| chunks as usize);
    if chunks > 0 {
        let started = tokio::time::Instant::now();
        let parts = (1..=u32::try_from(chunks).unwrap())
            .map(|n| Part::at(started + service * n / chunks as u32, format!("data: {{\"chunk\":{n},\"of\":{chunks}}}\n\n")))
            .collect();
        let mut response = Response::new(Answer::to(head, parts, job));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        return response;
    }
    if !service.is_zero() {
        tokio::time::sleep(service).await;
    }
    if is_grpc(&head.headers) {
        // One message of no bytes.
        return grpc(Answer::to(head, vec![Part::now(&[0u8; 5][..]), Part::trailers(grpc_status(0))], job));
    }
    let body = match number(&head.headers, "x-sim-bytes") {
        Some(bytes) => Bytes::from(vec![b'.'; bytes as usize]),
        None => Bytes::from_static(b"{\"done\":true}\n"),
    };
    let mut response = Response::new(Answer::to(head, vec![Part::now(body)], job));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn service_time(shared: &Shared, head: &Parts) -> Duration {
    let class = head.headers.get("x-job-class").and_then(|class| class.to_str().ok());
    let work = match number(&head.headers, "x-sim-ms") {
        Some(ms) => Duration::from_secs_f64(ms / 1_000.0),
        None => class.and_then(|class| shared.spec.classes.get(class)).copied().unwrap_or(shared.spec.work),
    };
    work.div_f64(shared.controls.lock().unwrap().speed)
}

/// A header's number, if it is one and not negative.
fn number(headers: &HeaderMap, name: &str) -> Option<f64> {
    let number: f64 = headers.get(name)?.to_str().ok()?.parse().ok()?;
    (0.0..1e9).contains(&number).then_some(number)
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

fn grpc(answer: Answer) -> Response<Answer> {
    let mut response = Response::new(answer);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

fn grpc_status(status: u16) -> HeaderMap {
    HeaderMap::from_iter([(hyper::header::HeaderName::from_static("grpc-status"), HeaderValue::from(status))])
}

/// Switches protocols and returns every byte that comes until the client closes. The job lasts as long, and takes no slot.
fn echo(shared: &Arc<Shared>, job: Job, request: Request<Incoming>) -> Response<Answer> {
    let mut response = Response::new(Answer::whole(Bytes::new()));
    if request.method() != Method::CONNECT {
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        response.headers_mut().insert(UPGRADE, HeaderValue::from_static("websocket"));
        response.headers_mut().insert(hyper::header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    tokio::spawn(gated(shared.wanted.subscribe(), async move {
        let _job = job;
        if let Ok(upgraded) = hyper::upgrade::on(request).await {
            let (mut from, mut to) = tokio::io::split(TokioIo::new(upgraded));
            let _ = tokio::io::copy(&mut from, &mut to).await;
        }
    }));
    response
}
