//! No way in, and no trap, whatever a client sends.

use serde_json::json;
use support::{Client, Envoy, Fleet, Gpu, RunningEnvoy, Wire};

/// Hosts of which only the first can be chosen: whoever gets to another one has found a way in.
async fn guarded(native_strip: bool) -> (Fleet, RunningEnvoy) {
    let fleet = Fleet::start(2, Gpu::new().slots(50)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let hosts = json!([{"address": one.to_string()}, {"address": two.to_string(), "drain": true}]);
    let mut envoy = Envoy::new("http1.yaml").hosts(&fleet).pool(json!({"hosts": hosts}));
    if !native_strip {
        envoy = envoy.edit(|bootstrap| {
            let manager = &mut bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
            manager["http_filters"].as_array_mut().expect("filters").retain(|filter| filter["name"] != "strip");
        });
    }
    (fleet, envoy.start().await)
}

async fn alive(envoy: &RunningEnvoy) {
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    envoy.settled().await;
    let log = envoy.log();
    let line = log.lines().find(|line| line.contains("wasm") && (line.contains("panicked") || line.contains("Function: proxy_")));
    assert_eq!(line, None, "a VM trapped");
    assert_eq!(envoy.status().await["pools"]["gpu"]["drift"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_cannot_steer() {
    for native_strip in [true, false] {
        let (fleet, envoy) = guarded(native_strip).await;
        let other = fleet.addresses()[1].to_string();
        for client in [Client::http1(&envoy), Client::http2(&envoy)] {
            let tries = [
                client.post("/prompt", "{}").header("x-gateway-destination-endpoint", &other),
                client.post("/prompt", "{}").header("X-Gateway-Destination-Endpoint", &other),
                client
                    .post("/prompt", "{}")
                    .header("x-gateway-destination-endpoint", &other)
                    .header("x-gateway-destination-endpoint", format!("{other},{other}")),
                client.get("/").header("x-gateway-destination-endpoint", &other),
                client.post("/prompt", "{}").header("x-plimsoll-host", &other).header("X-Plimsoll-Class", b"\xff"),
                client.post("/prompt", "{}").header("x-plimsoll-", "").header("x-plimsoll-a", "1").header("x-plimsoll-a", "2"),
            ];
            for ask in tries {
                let reply = ask.await;
                assert_eq!((reply.status, reply.host()), (200, Some(fleet.addresses()[0])));
            }
        }
        let seen = fleet[0].requests();
        assert_eq!(seen.len(), 12);
        for request in seen {
            let ours = request.headers.keys().find(|name| name.as_str().starts_with("x-plimsoll-"));
            assert_eq!(ours, None, "a header of ours reached the host");
            assert!(!request.headers.contains_key("x-gateway-destination-endpoint"));
            assert!(!request.headers.contains_key("x-envoy-max-retries"));
        }
        alive(&envoy).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_header_value_traps() {
    let (_fleet, envoy) = guarded(false).await;
    let long = "x".repeat(50_000);
    let values: [&[u8]; 5] = [b"", b"\xff\xfe\x80", b"\xc3\x28", long.as_bytes(), b" , ,,"];
    for value in values {
        for name in ["x-gateway-destination-endpoint", "x-plimsoll-why", "x-other", "content-type", "x-envoy-max-retries"] {
            for client in [Client::http1(&envoy), Client::http2(&envoy)] {
                let reply = client.post("/prompt", "{}").header(name, value).header(name, value).send().await;
                // Envoy's own limit on the size of headers is 431, or a reset of the stream.
                if let Ok(reply) = reply {
                    assert!([200, 431].contains(&reply.status), "{name}: {}", reply.status);
                }
            }
        }
    }
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_requests_are_served_or_refused_by_envoy_and_never_trap() {
    let (fleet, envoy) = guarded(false).await;
    let cases = [
        ("POST /prompt HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}", "426"),
        ("HEAD / HTTP/1.1\r\nhost: gpu\r\nconnection: close\r\n\r\n", "200"),
        ("OPTIONS * HTTP/1.1\r\nhost: gpu\r\nconnection: close\r\n\r\n", "200 404"),
        ("GET  HTTP/1.1\r\nhost: gpu\r\n\r\n", "400"),
        ("GET /?%ff%00 HTTP/1.1\r\nhost: gpu\r\nconnection: close\r\n\r\n", "200 400"),
        ("GET / HTTP/1.1\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\nhost: gpu\r\nx-plimsoll-\u{1}: a\r\n\r\n", "400"),
        ("POST /prompt HTTP/1.1\r\nhost: gpu\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}", "400"),
        ("CONNECT gpu:80 HTTP/1.1\r\nhost: gpu\r\n\r\n", "404"),
        ("BREW /pot HTTP/1.1\r\nhost: gpu\r\nconnection: close\r\n\r\n", "200 400"),
        ("PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", ""),
    ];
    for (request, expected) in cases {
        let mut wire = Wire::open(&envoy).await;
        wire.send(request).await;
        let answer = wire.receive_head().await;
        let status = answer.split(' ').nth(1).unwrap_or_default();
        assert!(expected.split(' ').any(|one| one == status), "{request:?}: {answer:?}");
    }
    let mut wire = Wire::open(&envoy).await;
    wire.send("POST /prompt HTTP/1.1\r\nhost: gpu\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n").await;
    assert!(wire.receive_head().await.starts_with("HTTP/1.1 100"));
    wire.send("{}").await;
    assert!(wire.receive().await.starts_with("HTTP/1.1 200"));
    assert_eq!(fleet[1].jobs(), 0);
    alive(&envoy).await;
}
