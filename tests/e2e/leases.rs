//! A lease is settled once, however its stream ends, on the host that served.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use support::{Abort, Client, Door, Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy, Wire, eventually};

/// Two hosts with room, behind an Envoy of the file.
async fn pair(file: &str, work_ms: u64) -> (Fleet, RunningEnvoy) {
    let fleet = Fleet::start(2, Gpu::new().slots(50).work_ms(work_ms)).await;
    let envoy = Envoy::new(file).hosts(&fleet).pool(json!({})).start().await;
    (fleet, envoy)
}

async fn counted(envoy: &RunningEnvoy, jobs: i64) {
    eventually(&format!("{jobs} are counted"), async || envoy.in_flight().await.iter().sum::<i64>() == jobs).await;
}

async fn field(envoy: &RunningEnvoy, name: &str) -> Vec<Value> {
    envoy.books().await.iter().map(|host| host[name].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_before_the_response_gives_its_lease_back_and_blames_nobody() {
    for file in ["http2.yaml", "http1.yaml"] {
        let (fleet, envoy) = pair(file, 60_000).await;
        for client in [Client::http1(&envoy), Client::http2(&envoy)] {
            let job = client.post("/prompt", "{}").start().await;
            counted(&envoy, 1).await;
            eventually("a host has it", async || fleet.in_flight().iter().sum::<u64>() == 1).await;
            job.abort();
            envoy.settled().await;
            fleet.idle().await;
        }
        assert_eq!(field(&envoy, "failures").await, [0, 0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_the_middle_of_the_upload_gives_its_lease_back() {
    let (_fleet, envoy) = pair("http2.yaml", 60_000).await;
    let mut wire = Wire::open(&envoy).await;
    wire.send("POST /prompt HTTP/1.1\r\nhost: gpu\r\ncontent-length: 1000000\r\n\r\nhalf").await;
    counted(&envoy, 1).await;
    wire.reset();
    envoy.settled().await;
    assert_eq!(field(&envoy, "failures").await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_holds_its_slot_to_the_last_byte() {
    for file in ["http2.yaml", "http1.yaml"] {
        let (_fleet, envoy) = pair(file, 600).await;
        let mut stream = envoy.client().post("/prompt", "{}").header("x-sim-chunks", "6").start().await;
        stream.head().await.expect("a response");
        counted(&envoy, 1).await;
        let mut chunks = 0;
        while stream.chunk().await.expect("a whole response").is_some() {
            chunks += 1;
            if chunks < 3 {
                assert_eq!(envoy.in_flight().await.iter().sum::<i64>(), 1);
            }
        }
        envoy.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_the_middle_of_a_stream_gives_its_lease_back_and_says_nothing_of_the_host() {
    for file in ["http2.yaml", "http1.yaml"] {
        let (_fleet, envoy) = pair(file, 600).await;
        for client in [Client::http1(&envoy), Client::http2(&envoy)] {
            let mut stream = client.post("/prompt", "{}").header("x-sim-chunks", "6").start().await;
            stream.head().await.expect("a response");
            stream.chunk().await.expect("a chunk");
            counted(&envoy, 1).await;
            stream.abort();
            envoy.settled().await;
        }
        assert_eq!(field(&envoy, "failures").await, [0, 0]);
        assert_eq!(field(&envoy, "ewma_ms").await, [Value::Null, Value::Null], "half a job is no latency");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resets_by_the_host_are_its_failures() {
    for file in ["http2.yaml", "http1.yaml"] {
        let (fleet, envoy) = pair(file, 10).await;
        for fault in [Fault::reset(), Fault::reset_in_body()] {
            fleet.iter().for_each(|host| host.set(fault.clone()));
            let _ = envoy.client().post("/prompt", "{}").send().await;
            envoy.settled().await;
        }
        let failures: u64 = field(&envoy, "failures").await.iter().map(|count| count.as_u64().expect("a count")).sum();
        assert_eq!(failures, 2, "{file}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_timeout_gives_the_lease_back_and_is_the_hosts_failure() {
    let fleet = Fleet::start(2, Gpu::new()).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).route(json!({"timeout": "0.3s"})).start().await;
    fleet.iter().for_each(|host| host.set(Fault::hang()));
    let reply = envoy.client().post("/prompt", "{}").await;
    assert_eq!(reply.status, 504);
    envoy.settled().await;
    let failures: u64 = field(&envoy, "failures").await.iter().map(|count| count.as_u64().expect("a count")).sum();
    assert_eq!(failures, 1);
    assert_eq!(field(&envoy, "ewma_ms").await, [Value::Null, Value::Null], "a failure is no latency");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_is_served_by_an_alternate_and_the_lease_follows() {
    for file in ["http2.yaml", "http1.yaml"] {
        let (fleet, envoy) = pair(file, 3_000).await;
        // One refuses connections; jobs whose first choice it is go on to the other.
        fleet[0].door(Door::Closed).await;
        let target = support::Target::address(&envoy);
        let load = tokio::spawn(async move { Load::burst(10).run(&target).await });
        eventually("the working host has all ten", async || fleet[1].in_flight() == 10).await;
        let moved = Instant::now();
        eventually("so say the books", async || envoy.in_flight().await == [0, 10]).await;
        assert!(moved.elapsed() < Duration::from_millis(2_500), "the books followed only when the jobs ended");
        load.await.expect("the load ran").assert_served();
        envoy.settled().await;
        let failures = field(&envoy, "failures").await;
        assert_eq!(failures[1], 0);
        assert!(failures[0].as_u64().expect("a count") >= 1, "{failures:?}");
        assert!(field(&envoy, "ewma_ms").await[0].is_null(), "a host that never served has no latency");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_of_hosts_ends_the_retries() {
    let fleet = Fleet::start(4, Gpu::new()).await;
    for alternates in [0, 2] {
        let keys = json!({"alternates": alternates});
        let route = json!({"retry_policy": {"num_retries": 9, "retry_back_off": {"base_interval": "0.001s"}}});
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).route(route).start().await;
        for host in fleet.iter() {
            host.door(Door::Closed).await;
        }
        let reply = envoy.client().post("/prompt", "{}").await;
        assert_eq!(reply.status, 503);
        assert_eq!(envoy.stat("cluster.gpu.upstream_rq_retry").await, alternates);
        envoy.settled().await;
        let failures: Vec<u64> = field(&envoy, "failures").await.iter().map(|count| count.as_u64().expect("a count")).collect();
        assert_eq!(failures.iter().sum::<u64>(), alternates + 1, "each that was tried is blamed: {failures:?}");
        assert!(failures.iter().all(|count| *count <= 1), "{failures:?}");
        for host in fleet.iter() {
            host.door(Door::Open).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_envoy_does_not_know_is_passed_over_and_nobody_is_blamed() {
    let fleet = Fleet::start(1, Gpu::new().slots(50).work_ms(300)).await;
    let known = fleet.addresses()[0].to_string();
    // Port 1 of another loopback address: in our pool, not in Envoy's cluster.
    let hosts = json!([{"address": "127.0.0.9:1"}, {"address": known}]);
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"hosts": hosts})).start().await;
    let report = Load::burst(10).run(&envoy).await;
    report.assert_served();
    envoy.settled().await;
    assert_eq!(field(&envoy, "failures").await, [0, 0]);
    assert_eq!(field(&envoy, "requests").await[1], 10);
    // The operator is told.
    let overruled = envoy.status().await["pools"]["gpu"]["overruled"].as_u64().expect("a count");
    assert_eq!(Some(overruled), field(&envoy, "requests").await[0].as_u64());
    envoy.logged("though 127.0.0.9:1 was named: is 127.0.0.9:1 in the cluster").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_of_another_filter_takes_or_gives_back_what_it_should() {
    let denied = |name: &str| {
        json!({"name": name, "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault",
            "abort": {"http_status": 429, "percentage": {"numerator": 100}}}})
    };
    let fleet = Fleet::start(2, Gpu::new()).await;
    let before = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).filter_before(denied("before")).start().await;
    assert_eq!(before.client().post("/prompt", "{}").await.status, 429);
    before.settled().await;
    assert_eq!(field(&before, "requests").await, [0, 0], "ours never saw it");
    drop(before);
    let after = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).filter_after(denied("after")).start().await;
    for _ in 0..20 {
        assert_eq!(after.client().post("/prompt", "{}").await.status, 429);
    }
    after.settled().await;
    let requests: u64 = field(&after, "requests").await.iter().map(|count| count.as_u64().expect("a count")).sum();
    assert_eq!(requests, 20);
    assert_eq!(field(&after, "failures").await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_web_socket_holds_its_lease_until_it_closes_and_is_no_latency() {
    let (fleet, envoy) = pair("http1.yaml", 0).await;
    let mut socket = Wire::open(&envoy).await;
    socket
        .send(
            "GET /ws HTTP/1.1\r\nhost: gpu\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
             sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        )
        .await;
    assert!(socket.receive_head().await.starts_with("HTTP/1.1 101"));
    socket.send("ping").await;
    assert_eq!(socket.receive_exactly(4).await, b"ping");
    counted(&envoy, 1).await;
    assert_eq!(fleet.in_flight().iter().sum::<u64>(), 1);
    drop(socket);
    envoy.settled().await;
    assert_eq!(field(&envoy, "ewma_ms").await, [Value::Null, Value::Null]);
    assert_eq!(field(&envoy, "failures").await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_is_counted_like_everything_else() {
    let (fleet, envoy) = pair("http2.yaml", 300).await;
    let client = Client::http2(&envoy);
    let call = client.post("/gpu.Render/Frame", "\0\0\0\0\0").header("content-type", "application/grpc").header("te", "trailers");
    let running = call.clone().start().await;
    counted(&envoy, 1).await;
    running.finish().await.expect("a whole response");
    envoy.settled().await;
    for status in [0, 13] {
        for fault in [Fault::grpc(status), Fault::grpc_trailers_only(status)] {
            fleet.iter().for_each(|host| host.set(fault.clone()));
            assert_eq!(call.clone().await.grpc_status(), Some(status));
            envoy.settled().await;
        }
    }
}

/// The hosts' own counts and ours are the same at quiet points, ours end at 0, and none is ever negative.
#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_mixed_requests_leave_nothing_behind() {
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let fleet = Fleet::start(4, Gpu::new().slots(20).work_ms(20)).await;
    let route =
        json!({"timeout": "0.4s", "retry_policy": {"retry_on": "connect-failure,refused-stream,reset", "num_retries": 2}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"max_in_flight": 100})).route(route).start().await;
    let pool = envoy.pool_over_workers(8).await;
    for round in 0..8 {
        // A different mix in each quarter of a thousand: refused connections, hangs into the timeout, resets before and in the response.
        let faults = [
            Fault::hang().fraction(0.1),
            Fault::reset().fraction(0.1),
            Fault::reset_in_body().fraction(0.1),
            Fault::refuse_stream().fraction(0.1),
            Fault::status(500).fraction(0.2),
        ];
        for host in fleet.iter() {
            host.set(faults[random.random_range(0..faults.len())].clone());
        }
        if round % 2 == 1 {
            fleet[round / 2].door(Door::Closed).await;
        }
        let mut shots = StdRng::seed_from_u64(random.random());
        let load = Load::poisson(300.0, 250, seed ^ round as u64).each(|n, shot| {
            match shots.random_range(0..10) {
                0 => shot.abort = Some(Abort::After(Duration::from_millis(shots.random_range(0..40)))),
                1 => shot.abort = Some(Abort::InBody),
                _ => {}
            }
            if shots.random_bool(0.3) {
                shot.call.add_header("x-sim-chunks", "4");
            }
            shot.call.add_header("x-sim-ms", shots.random_range(0..120).to_string());
            shot.call.add_header("x-number", n.to_string());
        });
        let load = if round % 3 == 0 { load } else { load.over(&pool) };
        let target = support::Target::address(&envoy);
        let running = tokio::spawn(async move { load.run(&target).await });
        while !running.is_finished() {
            let books = envoy.in_flight().await;
            assert!(books.iter().all(|count| (0..=100).contains(count)), "{books:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        running.await.expect("the load ran");
        envoy.settled().await;
        fleet.idle().await;
        for host in fleet.iter() {
            host.clear();
            host.door(Door::Open).await;
        }
        // A quiet point under way: jobs that run, none that start or end.
        let target = support::Target::address(&envoy);
        let quiet = Load::burst(16).header("x-sim-ms", "500");
        let running = tokio::spawn(async move { quiet.run(&target).await });
        let same = async || {
            let hosts: Vec<i64> = fleet.in_flight().iter().map(|count| *count as i64).collect();
            hosts.iter().sum::<i64>() == 16 && envoy.in_flight().await == hosts
        };
        eventually("our counts are the hosts' own", same).await;
        running.await.expect("the load ran");
        envoy.settled().await;
    }
    let pool = &envoy.status().await["pools"]["gpu"];
    assert_eq!((&pool["drift"], &pool["dead_workers"]), (&json!(0), &json!(0)), "{pool}");
}
