//! The module's lines in Envoy's log: one at the start and for each new configuration, none for a request, and no more of them in a flood.

use std::time::{Duration, Instant};

use serde_json::json;
use support::{Abort, Client, Door, Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy};

/// Kinds of lines that a flood of requests may bring: five verdicts and faults, reports, busy hosts, hosts that come and go.
const KINDS: f64 = 10.0;

/// Our lines, without what Envoy puts before them.
fn ours(envoy: &RunningEnvoy) -> Vec<String> {
    let log = envoy.log();
    // "[time][thread][info][wasm] [source] wasm log plimsoll: plimsoll: what is said", and in a request's callbacks the name is there twice.
    log.lines().filter_map(|line| Some(line.split_once("wasm log ")?.1.split_once(": ")?.1.to_owned())).collect()
}

/// Those that say what runs.
fn announced(envoy: &RunningEnvoy) -> Vec<String> {
    ours(envoy).into_iter().filter_map(|line| Some(line.strip_prefix("plimsoll 0.")?.split_once(": ")?.1.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_start_is_one_line_and_so_is_each_configuration_that_is_taken_but_not_one_that_is_refused() {
    let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"queue": {}})).workers(4).live().start().await;
    envoy.logged("pool gpu (least_score, 3 hosts, queue of 1000)").await;
    let pools = envoy.pool_on_each_worker(1).await;
    let serve = async || {
        for pool in &pools {
            Load::burst(10).over(pool).run(&envoy).await.assert_served();
        }
        // Longer than any worker takes to believe that a configuration is here to stay.
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    serve().await;
    let first = "pool gpu (least_score, 3 hosts, queue of 1000)";
    assert_eq!(announced(&envoy), [first], "one, of four workers and the main thread");
    envoy.reload_pool(json!({"policy": "least_time"})).await.expect("it is valid");
    let second = "another configuration, pool gpu (least_time, 3 hosts, no queue)";
    envoy.logged(second).await;
    serve().await;
    assert_eq!(announced(&envoy), [first, second]);
    envoy.reload_pool(json!({"policy": "fastest"})).await.expect_err("there is no such policy");
    serve().await;
    assert_eq!(announced(&envoy), [first, second], "what was refused does not run");
    let refused = ours(&envoy).into_iter().filter(|line| line.contains("fastest")).count();
    assert_eq!(refused, 1, "why it was refused is said once");
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_requests_of_every_bad_kind_bring_a_few_lines_none_of_them_forged() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(2)).await;
    let keys = json!({
        "max_in_flight": 2,
        "queue": {"max_length": 4, "timeout_ms": 40},
        "telemetry": {},
        "explain": "header",
        "failure": {"consecutive": 3, "base_ejection_ms": 200, "max_ejection_ms": 400},
    });
    let envoy = Envoy::new("http1.yaml").hosts(&fleet).pool(keys).connection_manager(json!({"access_log": null})).start().await;
    fleet[0].set(Fault::status(429).header("retry-after", "1").fraction(0.5));
    fleet[1].set(
        Fault::status(200).header("endpoint-load-metrics", "JSON {\"a\": \"\\n[2026][error] plimsoll: forged\", b").fraction(0.5),
    );
    fleet[2].set(Fault::reset().fraction(0.3));
    fleet[3].set(Fault::status(500).fraction(0.3));
    let started = Instant::now();
    let mut requests = 0;
    for round in 0..6 {
        if round == 4 {
            fleet[1].door(Door::Closed).await;
        }
        let report = Load::burst(500)
            .each(|n, shot| {
                shot.abort = (n % 7 == 0).then_some(Abort::After(Duration::from_millis(n as u64 % 20)));
                let headers: [(&'static str, &'static [u8]); 2] = match n % 4 {
                    0 => [("x-plimsoll-verdict", b"full"), ("x-gateway-destination-endpoint", b"10.9.9.9:1")],
                    1 => [("x-job-class", b"\xff\x80 plimsoll: forged"), ("content-type", b"application/grpc")],
                    2 => [("x-sim-ms", b"30"), ("x-envoy-upstream-rq-timeout-ms", b"5")],
                    _ => [("x-plimsoll-why", b"[2026][error] plimsoll: forged"), ("x-envoy-max-retries", b"99")],
                };
                headers.into_iter().for_each(|(name, value)| shot.call.add_header(name, value));
            })
            .pool(50)
            .run(&envoy)
            .await;
        requests += report.served.len();
    }
    envoy.settled().await;
    // There was a flood, and its end is told a second after its last line.
    envoy.logged("more like it").await;
    let seconds = started.elapsed().as_secs_f64();
    let lines = ours(&envoy);
    println!("{requests} requests in {seconds:.1} s: {lines:#?}");
    // A line a second of each kind from each of two workers; and each change of a host's state, of which ejections allow a few a second.
    let most = (2.0 * KINDS + 4.0 * 10.0) * (seconds + 1.0);
    assert!(requests >= 3000 && (lines.len() as f64) < most, "{} lines in {seconds} s: {lines:#?}", lines.len());
    assert!(lines.len() < requests / 10, "{} lines: {lines:#?}", lines.len());
    let log = envoy.log();
    let forged: Vec<&str> = log.lines().filter(|line| !line.starts_with('[') || line.contains('\u{1b}')).collect();
    assert_eq!(forged, Vec::<&str>::new(), "each line begins as Envoy's do");
    assert_eq!(Client::http1(&envoy.listener("status")).get("/status.json").await.status, 200);
}
