//! Classes from the body: what a job's JSON says reaches the filter state, whatever way it comes; the body itself, and all that is no JSON, passes as it was.

mod sender;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::load::Wire;
use support::{Client, Envoy, Fleet, Gpu, RunningEnvoy, eventually};

use sender::{Mirror, Piece, Sender, random_bytes};

/// What the classifier passes on, in the order of [`Sender`]'s answers.
const NAMES: [&str; 4] = ["class", "cost", "model", "session"];

/// The file's Envoy, which tells the host in `x-seen-…` headers what the classifier has passed on.
fn telling() -> Envoy {
    Envoy::new("classify.yaml").workers(1).edit(|bootstrap| {
        let headers = NAMES.map(|name| {
            let value = format!("%FILTER_STATE(wasm.plimsoll.{name}:PLAIN)%");
            json!({ "header": { "key": format!("x-seen-{name}"), "value": value } })
        });
        route(bootstrap)["request_headers_to_add"] = json!(headers);
    })
}

fn manager(bootstrap: &mut Value) -> &mut Value {
    &mut bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
}

fn route(bootstrap: &mut Value) -> &mut Value {
    &mut manager(bootstrap)["route_config"]["virtual_hosts"][0]["routes"][0]
}

/// The `config` of the classifier's instance.
fn classifier(bootstrap: &mut Value) -> &mut Value {
    let filters = manager(bootstrap)["http_filters"].as_array_mut().expect("filters");
    let ours = filters.iter_mut().find(|filter| filter["name"] == "plimsoll-classifier").expect("the classifier");
    &mut ours["typed_config"]["config"]
}

async fn alive(envoy: &RunningEnvoy) {
    envoy.settled().await;
    eventually("no stream is left", async || envoy.stat("http.ingress.downstream_rq_active").await == 0).await;
    let log = envoy.log();
    let line = log.lines().find(|line| line.contains("wasm") && (line.contains("panicked") || line.contains("Function: proxy_")));
    assert_eq!(line, None, "a VM trapped");
    assert_eq!(envoy.pool_status().await["drift"], 0);
}

/// A job of this class that is so many bytes long.
fn job(class: &str, bytes: usize) -> Vec<u8> {
    let (head, tail) = (format!(r#"{{"size": "{class}", "image": ""#), r#"", "steps": 4}"#);
    [head.as_bytes(), &vec![b'A'; bytes.saturating_sub(head.len() + tail.len())], tail.as_bytes()].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_body_says_is_in_the_filter_state_over_either_protocol() {
    let mirror = Mirror::start().await;
    let envoy = telling().addresses(&[mirror]).start().await;
    let body =
        br#"{"size": "1024x1024", "steps": 20, "width": 1024, "height": "512", "model": "flux-dev", "user": "ann", "steps": 8}"#;
    let mut sessions = Vec::new();
    for sender in Sender::both(&envoy) {
        for has_length in [true, false] {
            let reply = sender.send(has_length, &[], vec![Piece::data(&body[..20]), Piece::data(&body[20..])]).await;
            assert_eq!((reply.status, &reply.body[..]), (200, &body[..]));
            let [class, cost, model, session] = NAMES.map(|name| reply.seen(name));
            assert_eq!(
                (class.as_deref(), cost.as_deref(), model.as_deref()),
                (Some("1024x1024,8"), Some("4194304"), Some("flux-dev"))
            );
            sessions.push(session.expect("there is a user"));
        }
    }
    assert!(sessions.iter().all(|session| session.len() == 16 && *session == sessions[0]), "{sessions:?}");
    envoy.logged(&format!("class=1024x1024,8 cost=4194304 model=flux-dev session={}", sessions[0])).await;
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_every_size_pass_whole_and_are_never_too_large() {
    let mirror = Mirror::start().await;
    let mib = 1 << 20;
    // The example; Envoy's own limits with a max_body_bytes that is above some of them; and small limits.
    let cases = [("as in the file", 4 * mib, false), ("Envoy's defaults", mib, false), ("a small listener", 4 * mib, true)];
    for (what, most, is_small) in cases {
        let mut envoy = telling().addresses(&[mirror]);
        if what != "as in the file" {
            envoy = envoy.edit(|bootstrap| {
                route(bootstrap).as_object_mut().expect("a route").remove("request_body_buffer_limit");
                let keys = json!({ "classify": { "class": ["/size", "/steps"], "max_body_bytes": most } });
                classifier(bootstrap)["configuration"]["value"] = keys.to_string().into();
                if is_small {
                    bootstrap["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = json!(32_768);
                }
            });
        }
        let envoy = envoy.start().await;
        let mut sizes =
            vec![40, 16_384, 32_767, 32_769, 65_536, 262_144, 262_145, mib - 1, mib, mib + 1, mib + 65_536, 2 * mib + 7];
        if !is_small {
            sizes.extend([4 * mib, 4 * mib + 1, 5 * mib]);
        }
        for size in sizes {
            let body = job("s", size);
            for sender in Sender::both(&envoy) {
                for has_length in [true, false] {
                    let reply = sender.send(has_length, &[], body.chunks(150_000).map(Piece::data).collect()).await;
                    assert_eq!(reply.status, 200, "{what}: {size} bytes, {sender:?}, length: {has_length}");
                    assert!(reply.body == body, "{what}: {size} bytes, {sender:?}: another body");
                    let is_told = reply.seen("class").as_deref() == Some("s,4");
                    let limit = match (what, sender.is_http2()) {
                        ("as in the file", _) => 4 * mib,
                        (_, true) => 262_144,
                        (_, false) if is_small => 32_768,
                        (_, false) => mib,
                    };
                    // What Envoy reads at once may exceed its own limit.
                    if size <= limit || size > most {
                        assert_eq!(is_told, size <= most, "{what}: {size} bytes, {sender:?}, length: {has_length}");
                    }
                }
            }
        }
        alive(&envoy).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pieces_may_be_small_and_slow_and_end_with_trailers_or_with_nothing() {
    let mirror = Mirror::start().await;
    let envoy = telling().addresses(&[mirror]).start().await;
    let body = br#" { "size" : "\u00e9t\u00e9" , "steps": 3}  "#;
    for sender in Sender::both(&envoy) {
        let by_bytes = body.iter().flat_map(|byte| [Piece::data(&[*byte]), Piece::Pause(Duration::from_millis(3))]).collect();
        let reply = sender.send(false, &[], by_bytes).await;
        assert_eq!((reply.seen("class").as_deref(), &reply.body[..]), (Some("été,3"), &body[..]));
        let reply = sender.send(false, &[("te", "trailers")], vec![Piece::data(body), Piece::Trailers]).await;
        assert_eq!((reply.status, reply.seen("class").as_deref(), &reply.body[..]), (200, Some("été,3"), &body[..]));
        for pieces in [vec![], vec![Piece::Pause(Duration::from_millis(50))], vec![Piece::Trailers]] {
            let reply = sender.send(false, &[], pieces).await;
            assert_eq!((reply.status, reply.seen("class"), reply.body.len()), (200, None, 0));
        }
    }
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http1_in_all_its_ways_of_sending_is_classified() {
    let mirror = Mirror::start().await;
    let envoy = telling().addresses(&[mirror]).start().await;
    let mut wire = Wire::open(&envoy).await;
    wire.send("POST / HTTP/1.1\r\nhost: gpu\r\ncontent-length: 11\r\nexpect: 100-continue\r\n\r\n").await;
    assert!(wire.receive_head().await.starts_with("HTTP/1.1 100"));
    wire.send(r#"{"size": 1}"#).await;
    let reply = wire.receive().await;
    assert!(reply.starts_with("HTTP/1.1 200") && reply.contains("x-seen-class: 1,-"), "{reply}");
    // Two at once, and the beginning of a third, on one connection.
    let one = |n: usize| format!("POST / HTTP/1.1\r\nhost: gpu\r\ncontent-length: 11\r\n\r\n{{\"size\": {n}}}");
    wire.send(one(2) + &one(3) + &one(4)[..50]).await;
    for n in [2, 3] {
        let reply = wire.receive().await;
        assert!(reply.contains(&format!("x-seen-class: {n},-")), "{reply}");
    }
    wire.send(&one(4)[50..]).await;
    assert!(wire.receive().await.contains("x-seen-class: 4,-"));
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_or_falls_silent_holds_nothing_up() {
    let mirror = Mirror::start().await;
    let envoy = telling().addresses(&[mirror]).start().await;
    for how in 0..6 {
        let mut wire = Wire::open(&envoy).await;
        wire.send("POST / HTTP/1.1\r\nhost: gpu\r\ncontent-length: 100\r\n\r\n").await;
        if how % 3 > 0 {
            wire.send(r#"{"size": 1"#).await;
        }
        if how % 3 > 1 {
            envoy.settled().await;
        }
        if how < 3 { wire.reset() } else { drop(wire) }
    }
    alive(&envoy).await;
    for sender in Sender::both(&envoy) {
        sender.abort(vec![Piece::data(br#"{"size": 1"#)]).await;
        let started = Instant::now();
        let pieces = vec![Piece::data(br#"{"size""#), Piece::Pause(Duration::from_secs(2)), Piece::data(b": 1}")];
        let reply = sender.send(false, &[], pieces).await;
        assert_eq!((reply.status, reply.seen("class"), reply.text().as_str()), (200, None, r#"{"size": 1}"#));
        assert!(started.elapsed() >= Duration::from_secs(2));
    }
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_flag_on_its_instance_requests_pass_and_a_line_says_so() {
    let mirror = Mirror::start().await;
    let flag = |bootstrap: &mut Value| {
        drop(classifier(bootstrap).as_object_mut().expect("a map").remove("allow_on_headers_stop_iteration"))
    };
    let envoy = telling().addresses(&[mirror]).edit(flag).start().await;
    for sender in Sender::both(&envoy) {
        let body = job("x", 100_000);
        let reply = sender.send(true, &[], vec![Piece::data(&body)]).await;
        assert!((reply.status, reply.seen("class")) == (200, None) && reply.body == body);
    }
    envoy.logged("lacks allow_on_headers_stop_iteration").await;
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_forges_what_the_classifier_says_and_hostile_bodies_pass_as_they_are() {
    let mirror = Mirror::start().await;
    let envoy = telling().addresses(&[mirror]).start().await;
    let deep = "[".repeat(200_000);
    let bodies: Vec<Vec<u8>> = vec![
        b"size=1&steps=2".to_vec(),
        b"\xff\xfe{}".to_vec(),
        b"\xef\xbb\xbf{\"size\": 1}".to_vec(),
        br#"{"size": 1} {}"#.to_vec(),
        br#"{"size": 1"#.to_vec(),
        format!(r#"{{"size": {deep}"#).into_bytes(),
        format!(r#"{{"size": {deep}{}}}"#, "]".repeat(200_000)).into_bytes(),
        random_bytes(300_000),
        [br#"{"size": ""#.as_slice(), &random_bytes(70_000), b"\"}"].concat(),
        vec![b' '; 100_000],
        br#"{"steps": null, "size": {}}"#.to_vec(),
    ];
    let forged = [
        ("x-plimsoll-class", "forged"),
        ("x-plimsoll-session", "0123456789abcdef"),
        ("plimsoll.class", "forged"),
        ("wasm.plimsoll.class", "forged"),
        ("x-envoy-filter-state", "wasm.plimsoll.class=forged"),
    ];
    for sender in Sender::both(&envoy) {
        for body in &bodies {
            let reply = sender.send(true, &forged, vec![Piece::data(body)]).await;
            assert!(reply.status == 200 && reply.body == *body, "{:?}", String::from_utf8_lossy(&body[..body.len().min(40)]));
            assert_eq!(NAMES.map(|name| reply.seen(name)), [None, None, None, None]);
        }
        let long = format!(r#"{{"size": "{}\r\n\u0000x: y", "model": "{}"}}"#, "z".repeat(60_000), "m".repeat(300));
        let reply = sender.send(true, &forged, vec![Piece::data(long.as_bytes())]).await;
        let class = reply.seen("class").expect("there is one");
        assert_eq!((class.len(), &class[..56]), (64, &*format!("{}~", "z".repeat(55))));
        assert_eq!(reply.seen("model"), None);
        let gzip = sender.send(true, &[("content-encoding", "gzip")], vec![Piece::data(br#"{"size": 1}"#)]).await;
        assert_eq!((gzip.status, gzip.seen("class")), (200, None));
    }
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_that_together_are_more_than_is_held_pass_all_the_same() {
    let mirror = Mirror::start().await;
    let envoy = telling().addresses(&[mirror]).pool(json!({ "max_in_flight": 1000 })).start().await;
    let sender = Sender::http1(&envoy);
    let body = job("big", 3 << 20);
    let jobs: Vec<_> = (0..40)
        .map(|_| {
            let (sender, body) = (sender.clone(), body.clone());
            tokio::spawn(async move {
                let (most, last) = body.split_at(body.len() - 1);
                // All of them are there at once.
                let pieces = vec![Piece::data(most), Piece::Pause(Duration::from_millis(400)), Piece::data(last)];
                let reply = sender.send(true, &[], pieces).await;
                assert!(reply.status == 200 && reply.body == body, "{}", reply.status);
            })
        })
        .collect();
    for job in jobs {
        job.await.expect("served");
    }
    let reply = sender.send(true, &[], vec![Piece::data(&job("small", 100))]).await;
    assert_eq!(reply.seen("class").as_deref(), Some("small,4"));
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_classified_job_waits_in_the_queue_and_is_retried_like_any_other() {
    let mirror = Mirror::start().await;
    let fleet = Fleet::start(1, Gpu::new()).await;
    let dead = fleet.addresses()[0];
    fleet[0].door(support::Door::Closed).await;
    // The first host takes no connection: whoever is sent there goes on to the other.
    let hosts = json!([{ "address": dead.to_string(), "weight": 100.0 }, { "address": mirror.to_string() }]);
    let keys = json!({ "hosts": hosts, "alternates": 1, "failure": { "consecutive": 1000 } });
    let envoy = telling().addresses(&[dead, mirror]).pool(keys).start().await;
    let body = job("retried", 900_000);
    for sender in Sender::both(&envoy) {
        let reply = sender.send(true, &[], vec![Piece::data(&body)]).await;
        assert!(reply.status == 200 && reply.body == body);
        assert_eq!(reply.seen("class").as_deref(), Some("retried,4"));
    }
    assert!(envoy.stat("cluster.gpu.upstream_rq_retry").await >= 1);
    alive(&envoy).await;
    drop(envoy);

    let keys = json!({ "max_in_flight": 1, "alternates": 0, "queue": {} });
    let envoy = telling().addresses(&[mirror]).pool(keys).start().await;
    for sender in Sender::both(&envoy) {
        let mut first = Wire::open(&envoy).await;
        // It takes the slot: its body is no JSON, and does not end.
        first.send("POST / HTTP/1.1\r\nhost: gpu\r\ncontent-length: 2\r\n\r\n-").await;
        envoy.until("it has the slot", |hosts| hosts[0]["in_flight"] == 1).await;
        let jobs: Vec<_> = (0..3)
            .map(|n| {
                let (sender, body) = (sender.clone(), job(&format!("waits {n}"), 300_000 << n));
                tokio::spawn(async move { (sender.send(n % 2 == 0, &[], vec![Piece::data(&body)]).await, body) })
            })
            .collect();
        envoy.until_pool("they wait", |pool| pool["waiting"] == 3).await;
        first.send("-").await;
        for (n, job) in jobs.into_iter().enumerate() {
            let (reply, body) = job.await.expect("sent");
            assert!(reply.status == 200 && reply.body == body, "{n}: {}", reply.status);
            assert_eq!(reply.seen("class"), Some(format!("waits {n},4")));
        }
    }
    alive(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_body_or_is_no_job_for_a_reader_passes_at_once() {
    let fleet = Fleet::start(1, Gpu::new().slots(50)).await;
    let envoy = telling().hosts(&fleet).start().await;
    for client in [Client::http1(&envoy), Client::http2(&envoy)] {
        assert_eq!(client.get("/").await.status, 200);
    }
    let reply = Client::http2(&envoy).grpc("/package.Service/Call").await;
    assert_eq!(reply.status, 200);
    let mut wire = Wire::open(&envoy).await;
    wire.send("GET /ws HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n").await;
    assert!(wire.receive_head().await.starts_with("HTTP/1.1 101"));
    wire.send("{\"size\": 1").await;
    assert_eq!(wire.receive_exactly(10).await, b"{\"size\": 1");
    drop(wire);
    alive(&envoy).await;
    drop(envoy);

    let spare = |bootstrap: &mut Value| {
        let off = json!({ "@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "disabled": true });
        route(bootstrap)["typed_per_filter_config"] = json!({ "plimsoll-classifier": off });
    };
    let mirror = Mirror::start().await;
    let envoy = telling().addresses(&[mirror]).edit(spare).start().await;
    let reply = Sender::http1(&envoy).send(true, &[], vec![Piece::data(&job("x", 100))]).await;
    assert_eq!((reply.status, reply.seen("class")), (200, None));
}
