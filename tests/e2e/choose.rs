//! Every job goes to the least loaded host.

use std::time::Duration;

use serde_json::json;
use support::{Client, Envoy, Fleet, Gpu, Load};

#[tokio::test(flavor = "multi_thread")]
async fn twenty_jobs_at_once_are_five_on_each_of_four_hosts_every_time() {
    let fleet = Fleet::start(4, Gpu::new().slots(5).work_ms(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    let pool = envoy.pool_over_workers(20).await;
    for round in 0..200 {
        fleet.clear_books();
        Load::burst(20).over(&pool).run(&envoy).await.assert_served();
        assert_eq!(fleet.jobs(), [5, 5, 5, 5], "round {round}");
        assert!(fleet.max_in_flight().iter().all(|most| *most <= 5), "round {round}: {:?}", fleet.max_in_flight());
    }
    envoy.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_one_after_another_are_spread_over_an_idle_pool() {
    let fleet = Fleet::start(4, Gpu::new().work_ms(2)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    let pool = envoy.pool_over_workers(8).await;
    Load::one_by_one(200).over(&pool).run(&envoy).await.assert_served();
    assert!(fleet.jobs().iter().all(|jobs| *jobs >= 25), "{:?}", fleet.jobs());
    assert_eq!(fleet.jobs().iter().sum::<u64>(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_four_times_slower_gets_what_the_score_allows_it() {
    let mut specs = vec![Gpu::new().slots(64).work_ms(40); 3];
    specs.push(Gpu::new().slots(64).speed(0.25).work_ms(40));
    let fleet = Fleet::start_each(specs).await;
    let score = json!({"in_flight_weight": 0.5, "latency_weight": 0.5, "target_latency_ms": 40});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"score": score, "max_in_flight": 1000})).start().await;
    // Each host learns its own latency, then 100 jobs come at once.
    Load::burst(16).http2(4).run(&envoy).await.assert_served();
    let books = envoy.books().await;
    let latencies: Vec<f64> = books.iter().map(|host| host["ewma_ms"].as_f64().expect("a history") / 40.0).collect();
    fleet.clear_books();
    Load::burst(100).http2(4).run(&envoy).await.assert_served();
    // Level filling: a host's score after n jobs is 0.5·(n + 1) + 0.5·latency/target, so that its n differs from another's by the difference of
    // their latencies over the target; one job more or less where the two scores are within the tie band.
    let jobs = fleet.jobs();
    let mean_of_fast = jobs[..3].iter().sum::<u64>() as f64 / 3.0;
    let latency_of_fast = latencies[..3].iter().sum::<f64>() / 3.0;
    let expected = latencies[3] - latency_of_fast;
    let seen = mean_of_fast - jobs[3] as f64;
    assert!((seen - expected).abs() <= 1.5, "{jobs:?}: {seen} less than the others, by the latencies {latencies:?}: {expected}");
    assert!(expected > 2.0, "the slow host did not look slow: {latencies:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_was_slow_and_then_idle_gets_its_share_again_and_no_burst() {
    let fleet = Fleet::start(4, Gpu::new().slots(64).work_ms(20)).await;
    let score = json!({"in_flight_weight": 0.5, "latency_weight": 0.5, "target_latency_ms": 20});
    let keys = json!({"score": score, "ewma": {"time_constant_ms": 1000}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    fleet[0].set_speed(0.05);
    Load::burst(16).http2(4).run(&envoy).await.assert_served();
    fleet[0].set_speed(1.0);
    // The others serve meanwhile; it gets none while it looks slow, and nothing but time tells otherwise.
    fleet.clear_books();
    Load::burst(12).http2(4).run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [0, 4, 4, 4]);
    tokio::time::sleep(Duration::from_secs(8)).await;
    fleet.clear_books();
    Load::burst(40).http2(4).run(&envoy).await.assert_served();
    let jobs = fleet.jobs();
    assert!((8..=12).contains(&jobs[0]), "{jobs:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_one_to_two_give_one_to_two_under_saturation() {
    let fleet = Fleet::start(2, Gpu::new().slots(1000).work_ms(1500)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let hosts = json!([{"address": one.to_string(), "weight": 1}, {"address": two.to_string(), "weight": 2}]);
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"hosts": hosts, "max_in_flight": 1000})).start().await;
    Load::burst(300).http2(8).run(&envoy).await.assert_served();
    let jobs = fleet.jobs();
    // Two jobs on the heavy host weigh as much as one on the light one; the last tie may fall either way.
    assert!((99..=101).contains(&jobs[0]), "{jobs:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_host_gets_no_new_job() {
    let fleet = Fleet::start(2, Gpu::new().slots(10).work_ms(5)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let hosts = json!([{"address": one.to_string(), "drain": true}, {"address": two.to_string()}]);
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"hosts": hosts})).start().await;
    Load::burst(20).run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [0, 20]);
    let states: Vec<_> = envoy.books().await.iter().map(|host| host["state"].clone()).collect();
    assert_eq!(states, ["draining", "serving"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_whose_slots_are_all_taken_answers_full_and_never_takes_one_more() {
    let fleet = Fleet::start(3, Gpu::new().slots(100).work_ms(1000)).await;
    let keys = json!({"max_in_flight": 4, "alternates": 0});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    let pool = envoy.pool_over_workers(40).await;
    let report = Load::burst(40).over(&pool).run(&envoy).await;
    assert_eq!((report.status(200), report.status(503)), (12, 28), "\n{report}");
    assert_eq!(fleet.max_in_flight(), [4, 4, 4]);
    // The same as a client sees it.
    let keepers = Load::burst(12).over(&pool);
    let target = envoy.listener("ingress");
    let running = tokio::spawn(async move { keepers.run(&target).await });
    support::eventually("12 jobs run", async || fleet.in_flight().iter().sum::<u64>() == 12).await;
    let reply = envoy.client().post("/prompt", "{}").await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.header("x-plimsoll-verdict"), Some("full"));
    assert_eq!(reply.header("retry-after"), Some("1"));
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(reply.json(), json!({"error": {"code": "full", "message": "every GPU host is at its limit"}}));
    running.await.expect("the load ran").assert_served();
    envoy.settled().await;
    envoy.logged("plimsoll: pool gpu: answered 503, verdict full").await;
    let lines = envoy.log().matches("answered 503, verdict full").count();
    assert!(lines <= 6, "{lines} lines for 29 refusals within two seconds, on two workers");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_host_decides_what_happens_when_none_is_eligible() {
    let fleet = Fleet::start(2, Gpu::new().work_ms(5)).await;
    let hosts: Vec<_> = fleet.addresses().iter().map(|at| json!({"address": at.to_string(), "drain": true})).collect();
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"hosts": hosts})).start().await;
    let reply = envoy.client().post("/prompt", "{}").await;
    assert_eq!(
        (reply.status, reply.header("x-plimsoll-verdict"), reply.header("retry-after")),
        (503, Some("no_host"), Some("1"))
    );
    assert_eq!(reply.json()["error"]["code"], "no_host");
    drop(envoy);
    let keys = json!({"hosts": hosts, "no_host": "fallback"});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    Load::burst(10).run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs().iter().sum::<u64>(), 10);
    // Envoy chose; each job was counted where it went, all the same.
    envoy.settled().await;
    let requests: u64 = envoy.books().await.iter().map(|host| host["requests"].as_u64().expect("a count")).sum();
    assert_eq!(requests, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_job_takes_no_slot_and_is_counted_apart() {
    let fleet = Fleet::start(2, Gpu::new().slots(100).work_ms(600)).await;
    let keys = json!({"max_in_flight": 1, "jobs": {"methods": ["POST"], "paths": ["/prompt"]}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    let report = Load::burst(20).get("/history/7").run(&envoy).await;
    report.assert_served();
    assert!(fleet.jobs().iter().all(|jobs| *jobs >= 2), "spread over both: {:?}", fleet.jobs());
    let books = envoy.books().await;
    assert!(books.iter().all(|host| host["requests"] == 0), "{books:?}");
    support::eventually("they are counted apart", async || envoy.status().await["pools"]["gpu"]["unleased"] == 20).await;
    // Jobs are still limited to their slots.
    let report = Load::burst(10).run(&envoy).await;
    assert_eq!((report.status(200), report.status(503)), (2, 8), "\n{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_to_another_cluster_pass_untouched() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let other = support::GpuHost::start(Gpu::new()).await;
    let address = other.address();
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .edit(|bootstrap| {
            let resources = &mut bootstrap["static_resources"];
            let endpoint =
                json!({"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": address.port()}}}});
            let cluster = json!({"name": "other", "type": "STATIC", "connect_timeout": "1s",
                "load_assignment": {"cluster_name": "other", "endpoints": [{"lb_endpoints": [endpoint]}]}});
            resources["clusters"].as_array_mut().expect("clusters").push(cluster);
            let manager = &mut resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
            let routes = manager["route_config"]["virtual_hosts"][0]["routes"].as_array_mut().expect("routes");
            routes.insert(0, json!({"match": {"prefix": "/other"}, "route": {"cluster": "other"}}));
        })
        .start()
        .await;
    let reply = envoy.client().post("/other", "{}").await;
    assert_eq!((reply.status, reply.host()), (200, Some(address)));
    let seen = other.requests().remove(0);
    assert!(!seen.headers.contains_key("x-gateway-destination-endpoint"), "{seen:?}");
    assert_eq!(envoy.books().await[0]["requests"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_listener_answers_its_paths_and_nothing_else() {
    let fleet = Fleet::start(2, Gpu::new()).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"max_in_flight": 3})).start().await;
    let client = Client::http1(&envoy.listener("status"));
    let expected: Vec<_> = fleet
        .addresses()
        .iter()
        .map(|address| {
            json!({"address": address.to_string(), "state": "serving", "in_flight": 0, "max_in_flight": 3, "weight": 1.0, "ramp": 1.0,
                "newcomer": false, "reserve": false,
                "ewma_ms": null, "score": 0.7, "penalty": 1.0, "consecutive_failures": 0, "ejected_for_ms": 0, "busy_for_ms": 0,
                "ejections": 0, "reason": null, "requests": 0, "failures": 0, "speed": null, "work_ms": null, "told": null})
        })
        .collect();
    support::eventually("the first tick makes the books", async || !envoy.status().await["pools"]["gpu"].is_null()).await;
    let pool = &envoy.status().await["pools"]["gpu"];
    assert_eq!(pool["hosts"], json!(expected));
    let of_pool = ["policy", "eligible", "slots", "in_flight", "waiting", "workers"].map(|field| pool[field].clone());
    assert_eq!(of_pool, [json!("least_score"), json!(2), json!(6), json!(0), json!(0), json!(0)]);
    // Nothing happened, and the history has its first point.
    let pool = envoy.until_pool("the first point", |pool| pool["history"][0].is_object()).await;
    let mut point = pool["history"][0].clone();
    let ago = point.as_object_mut().expect("a point").remove("ago_ms");
    assert!(ago.is_some_and(|ago| ago.is_u64()) && pool["recent"] == json!([]), "{pool}");
    assert_eq!(point, json!({"in_flight": 0, "slots": 6, "waiting": 0, "eligible": 2}));
    let status = envoy.status().await;
    assert_eq!(status.as_object().expect("an object").keys().collect::<Vec<_>>(), ["pools", "version"]);
    assert_eq!(status["version"], env!("CARGO_PKG_VERSION"));
    let page = client.get("/").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let reply = client.get("/other").await;
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (404, Some("not_found")));
    let reply = client.post("/status.json", "{}").await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("GET, HEAD")));
    let reply = client.ask(hyper::Method::HEAD, "/status.json?x=1", "").await;
    assert_eq!((reply.status, reply.text().as_str()), (200, ""));
    // A worker is one that has served.
    envoy.client().post("/prompt", "{}").await;
    assert_eq!(envoy.status().await["pools"]["gpu"]["workers"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_warm_up_no_request_opens_a_connection() {
    // HTTP/1.1 needs as many connections of a worker to a host as the worker ever has jobs there at once: with one worker and 16 clients that
    // is 4 for each of 4 hosts, which a burst of 16 opens. HTTP/2 needs one.
    for (file, workers) in [("http2.yaml", 2), ("http1.yaml", 1)] {
        let fleet = Fleet::start(4, Gpu::new().slots(64)).await;
        let envoy = Envoy::new(file).hosts(&fleet).pool(json!({})).workers(workers).start().await;
        let pool = support::Pool::http1(&envoy, 16).await;
        Load::burst(16).header("x-sim-ms", "100").over(&pool).run(&envoy).await.assert_served();
        Load::burst(200).over(&pool).run(&envoy).await.assert_served();
        let before = envoy.stat("cluster.gpu.upstream_cx_total").await;
        Load::burst(10_000).over(&pool).run(&envoy).await.assert_served();
        let after = envoy.stat("cluster.gpu.upstream_cx_total").await;
        assert_eq!(after - before, 0, "{file}: {before} connections before");
        assert!(before <= 16, "{file}: {before} connections for 16 clients");
    }
}
