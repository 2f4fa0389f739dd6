//! Whatever a client does, no host is blamed for it.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use support::{Client, Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy, Wire, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// Two hosts with room, behind an Envoy of the file.
async fn pair(file: &str) -> (Fleet, RunningEnvoy) {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let envoy = Envoy::new(file).hosts(&fleet).pool(json!({})).start().await;
    (fleet, envoy)
}

/// Envoy takes the word of clients of its own network, which ours are then, for deadlines and retries.
fn internal(envoy: Envoy) -> Envoy {
    let local = json!({"cidr_ranges": [{"address_prefix": "127.0.0.0", "prefix_len": 8}]});
    envoy.connection_manager(json!({"internal_address_config": local}))
}

async fn nobody_was_blamed(envoy: &RunningEnvoy, after: &str) {
    envoy.settled().await;
    assert_eq!(envoy.column("failures").await, [0, 0], "after {after}");
}

/// A host that answers 413 as soon as it has a request's headers, and closes the connection without reading on.
async fn impatient_host() -> SocketAddr {
    async fn serve(mut connection: TcpStream) {
        let (mut request, mut piece) = (Vec::new(), [0; 4096]);
        while !request.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
            match connection.read(&mut piece).await {
                Ok(length) if length > 0 => request.extend_from_slice(&piece[..length]),
                _ => return,
            }
        }
        // The client may have gone: that is its business.
        let _ = connection.write_all(b"HTTP/1.1 413 Payload Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            tokio::spawn(serve(connection));
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn an_authority_that_is_none_is_not_the_hosts_fault() {
    for file in ["http2.yaml", "http1.yaml"] {
        let (_fleet, envoy) = pair(file).await;
        for authority in ["", "[::1", "a%zz"] {
            for _ in 0..4 {
                let mut wire = Wire::open(&envoy).await;
                wire.send(format!("POST /prompt HTTP/1.1\r\nhost: {authority}\r\ncontent-length: 2\r\n\r\n{{}}")).await;
                wire.receive_head().await;
            }
            nobody_was_blamed(&envoy, &format!("host: {authority}")).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_with_a_length_does_not_end_the_connection_that_others_share() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).workers(1).start().await;
    let others = Load::burst(10).header("x-sim-ms", "2000").start(&envoy);
    eventually("they run", async || fleet.in_flight().iter().sum::<u64>() == 10).await;
    let mut wire = Wire::open(&envoy).await;
    let upgrade =
        "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==";
    wire.send(format!("GET /prompt HTTP/1.1\r\nhost: gpu\r\n{upgrade}\r\ncontent-length: 5\r\n\r\nhello")).await;
    wire.receive_head().await;
    others.await.unwrap().assert_served();
    wire.reset();
    nobody_was_blamed(&envoy, "the upgrade").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_refuses_an_upload_before_its_end_is_not_blamed() {
    let hosts = [impatient_host().await, impatient_host().await];
    let envoy = Envoy::new("http1.yaml").addresses(&hosts).pool(json!({})).start().await;
    // What fits into the sockets' buffers is sent, as far as Envoy knows, also if nobody reads it: so much more than that, or little.
    for size in [100_000, 40_000_000] {
        for _ in 0..6 {
            // 413, or 503 where the connection was reset before Envoy had read that.
            let _ = Client::http1(&envoy).post("/prompt", vec![b'x'; size]).send().await;
        }
        nobody_was_blamed(&envoy, &format!("{size} bytes")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_uploads_are_neither_latency_nor_slow_windows() {
    let fleet = Fleet::start(2, Gpu::new().slots(100).work_ms(5)).await;
    let breaker = json!({"window": 4, "quantile": 0.5, "threshold_ms": 1000, "consecutive_windows": 1});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"latency_breaker": breaker})).start().await;
    let mut uploads = Vec::new();
    for _ in 0..16 {
        let mut wire = Wire::open(&envoy).await;
        wire.send("POST /prompt HTTP/1.1\r\nhost: gpu\r\ncontent-length: 4\r\n\r\na").await;
        uploads.push(wire);
    }
    sleep(Duration::from_secs(3)).await;
    for wire in &mut uploads {
        wire.send("aaa").await;
        assert!(wire.receive_head().await.starts_with("HTTP/1.1 200"));
    }
    envoy.settled().await;
    assert_eq!(envoy.column("ejections").await, [0, 0]);
    for latency in envoy.column("ewma_ms").await {
        assert!(latency.as_f64().is_some_and(|millis| millis < 1000.0), "{latency} ms for work of 5 ms");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_of_the_clients_own_blames_nobody_however_it_is_written() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    // Where Envoy does not take the client's word, the route's own timeout ends the request.
    let envoy = internal(Envoy::new("http2.yaml")).hosts(&fleet).pool(json!({})).route(json!({"timeout": "5s"})).start().await;
    fleet.iter().for_each(|host| host.set(Fault::hang()));
    for header in ["x-envoy-upstream-rq-timeout-ms", "x-envoy-upstream-rq-per-try-timeout-ms"] {
        for millis in ["200", "+200", "20"] {
            for _ in 0..3 {
                let reply = Client::http1(&envoy).post("/prompt", "{}").header(header, millis).send().await.unwrap();
                assert_eq!(reply.status, 504, "{header}: {millis}");
            }
            nobody_was_blamed(&envoy, &format!("{header}: {millis}")).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_that_the_client_orders_blame_nobody() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let envoy = internal(Envoy::new("http2.yaml")).hosts(&fleet).pool(json!({})).start().await;
    for _ in 0..10 {
        let request = Client::http1(&envoy).post("/prompt", "{}");
        let request =
            request.header("x-envoy-retry-on", "retriable-status-codes").header("x-envoy-retriable-status-codes", "200");
        request.send().await.unwrap();
    }
    assert!(envoy.stat("cluster.gpu.upstream_rq_retry").await > 0, "the orders were taken");
    nobody_was_blamed(&envoy, "orders to retry on 200").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_hangs_is_blamed_also_where_the_answer_to_a_timeout_is_mapped_to_another_status() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let timeouts = json!({"comparison": {"op": "EQ", "value": {"default_value": 504, "runtime_key": "none"}}});
    let mapper = json!({"filter": {"status_code_filter": timeouts}, "status_code": 503});
    let manager = json!({"local_reply_config": {"mappers": [mapper]}});
    let envoy =
        Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"failure": {"consecutive": 1000}})).connection_manager(manager);
    let envoy = envoy.route(json!({"timeout": "0.3s"})).start().await;
    fleet.iter().for_each(|host| host.set(Fault::hang()));
    for _ in 0..4 {
        assert_eq!(envoy.client().post("/prompt", "{}").await.status, 503);
    }
    envoy.settled().await;
    assert_eq!(envoy.column("failures").await.iter().filter_map(|failures| failures.as_u64()).sum::<u64>(), 4);
}
