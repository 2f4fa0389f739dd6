//! Counts stay exact through reloads, generations, traps and other workers' ends.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use support::{Envoy, Fleet, Gpu, Load, RunningEnvoy, eventually};

fn named(fleet: &Fleet, which: &[usize]) -> Value {
    let addresses = fleet.addresses();
    which.iter().map(|host| json!({"address": addresses[*host].to_string()})).collect()
}

fn column<'a>(books: &'a [Value], name: &str) -> Vec<&'a Value> {
    books.iter().map(|host| &host[name]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_keeps_counts_and_latencies() {
    let fleet = Fleet::start(3, Gpu::new().slots(50).work_ms(20)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).live().start().await;
    Load::burst(12).run(&envoy).await.assert_served();
    let learned = envoy.books().await;
    assert!(column(&learned, "ewma_ms").iter().all(|ewma| ewma.is_number()), "{learned:?}");
    let target = support::Target::address(&envoy);
    let running = tokio::spawn(async move { Load::burst(6).header("x-sim-ms", "2500").run(&target).await });
    eventually("six run", async || envoy.in_flight().await == [2, 2, 2]).await;
    for slots in [7, 8, 9] {
        envoy.reload_pool(json!({"max_in_flight": slots})).await.expect("accepted");
        eventually("it is live", async || column(&envoy.books().await, "max_in_flight") == vec![slots; 3]).await;
        assert_eq!(envoy.in_flight().await, [2, 2, 2]);
        assert_eq!(column(&envoy.books().await, "ewma_ms"), column(&learned, "ewma_ms"));
    }
    running.await.expect("the load ran").assert_served();
    envoy.settled().await;
    assert_eq!(envoy.status().await["pools"]["gpu"]["drift"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_removed_and_comes_back_is_another_generation() {
    let fleet = Fleet::start(2, Gpu::new().slots(50).work_ms(20)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).live().start().await;
    let target = support::Target::address(&envoy);
    let running = tokio::spawn(async move { Load::burst(10).header("x-sim-ms", "4000").run(&target).await });
    eventually("ten run", async || envoy.in_flight().await == [5, 5]).await;
    let pool = |which: &[usize]| json!({"pools": {"gpu": {"hosts": named(&fleet, which)}}});
    envoy.reload(pool(&[0])).await.expect("accepted");
    eventually("the second is leaving", async || column(&envoy.books().await, "state") == ["serving", "draining"]).await;
    assert_eq!(envoy.in_flight().await, [5, 5]);
    envoy.reload(pool(&[0, 1])).await.expect("accepted");
    eventually("it is back, anew", async || column(&envoy.books().await, "state") == ["serving", "draining", "serving"]).await;
    assert_eq!(envoy.in_flight().await, [5, 5, 0]);
    Load::burst(4).run(&envoy).await.assert_served();
    assert!(envoy.in_flight().await[2] <= 4);
    running.await.expect("the load ran").assert_served();
    eventually("the old one is gone", async || envoy.in_flight().await == [0, 0]).await;
    assert_eq!(envoy.status().await["pools"]["gpu"]["drift"], 0);
}

/// Sends the request that makes a worker's VM of `plimsoll-trap.wasm` trap; gives what its client saw.
async fn trap(envoy: &RunningEnvoy) -> u16 {
    envoy.client().post("/prompt", "{}").header("x-trap", "1").await.status
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_workers_share_is_given_back_within_ten_seconds_and_no_living_workers() {
    let fleet = Fleet::start(2, Gpu::new().slots(100).work_ms(20)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).module(module("plimsoll-trap.wasm")).start().await;
    let pool = envoy.pool_over_workers(16).await;
    let target = support::Target::address(&envoy);
    let running = {
        let pool = pool.clone();
        tokio::spawn(async move { Load::burst(16).header("x-sim-ms", "14000").over(&pool).run(&target).await })
    };
    eventually("sixteen run", async || envoy.in_flight().await == [8, 8]).await;
    assert_eq!(trap(&envoy).await, 503);
    let died = Instant::now();
    assert_eq!(envoy.status().await["pools"]["gpu"]["workers"], 2);
    // The job that trapped had its lease.
    assert_eq!(envoy.in_flight().await.iter().sum::<i64>(), 17);
    let mut left = 17;
    while left == 17 {
        assert!(died.elapsed() < Duration::from_secs(10), "still 17 in the books");
        tokio::time::sleep(Duration::from_millis(20)).await;
        left = envoy.in_flight().await.iter().sum::<i64>();
        // Both workers serve meanwhile; what they serve is short.
        assert!(left <= 17);
    }
    println!("given back after {:?}", died.elapsed());
    assert!((1..16).contains(&left), "{left} of 16 belong to the living worker");
    let report = running.await.expect("the load ran");
    assert_eq!(report.status(200) as i64, left, "the living worker's jobs are those that the books kept\n{report}");
    envoy.settled().await;
    let status = envoy.status().await;
    assert_eq!((&status["pools"]["gpu"]["drift"], &status["pools"]["gpu"]["dead_workers"]), (&json!(0), &json!(1)));
    // The dead VM has been loaded anew.
    let again = envoy.pool_over_workers(16).await;
    Load::burst(16).over(&again).run(&envoy).await.assert_served();
    envoy.settled().await;
    assert_eq!(envoy.status().await["pools"]["gpu"]["workers"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn traps_one_after_another_heal_while_they_go_on() {
    let fleet = Fleet::start(2, Gpu::new().slots(100).work_ms(20)).await;
    let keys = json!({"max_in_flight": 6});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).module(module("plimsoll-trap.wasm")).start().await;
    // Each leaves the lease of its own job behind. What is older than ten seconds must be gone, though the next has died meanwhile.
    for number in 1..=10 {
        trap(&envoy).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let left = envoy.in_flight().await.iter().sum::<i64>();
        assert!(left <= number.min(6), "{left} leases are left after {number} traps within {} s", number * 2);
    }
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    let healed = Instant::now();
    envoy.settled().await;
    println!("all given back {:?} after the last", healed.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_stopped_loses_and_leaks_nothing() {
    let fleet = Fleet::start(2, Gpu::new().slots(100).work_ms(20)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    let pool = envoy.pool_over_workers(12).await;
    let target = support::Target::address(&envoy);
    let running = tokio::spawn(async move { Load::burst(12).header("x-sim-ms", "20000").over(&pool).run(&target).await });
    eventually("twelve run", async || envoy.in_flight().await == [6, 6]).await;
    envoy.stop_process();
    tokio::time::sleep(Duration::from_secs(15)).await;
    envoy.continue_process();
    // Ticks enough for anybody who wanted to declare somebody dead.
    for _ in 0..20 {
        assert_eq!(envoy.in_flight().await, [6, 6]);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    running.await.expect("the load ran").assert_served();
    envoy.settled().await;
    let status = envoy.status().await;
    assert_eq!((&status["pools"]["gpu"]["drift"], &status["pools"]["gpu"]["dead_workers"]), (&json!(0), &json!(0)));
}

/// Replaces a file in one step, as Envoy's watch on it needs.
fn replace(file: &Path, content: &Value) {
    let fresh = file.with_extension("new");
    std::fs::write(&fresh, content.to_string()).expect("a file in our directory");
    std::fs::rename(&fresh, file).expect("a file in our directory");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_reloads_under_load_fail_no_request_and_leave_nothing() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(15)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).live().start().await;
    let pool = envoy.pool_over_workers(8).await;
    let target = support::Target::address(&envoy);
    let ended = Arc::new(AtomicBool::new(false));
    let load = tokio::spawn({
        let ended = ended.clone();
        async move {
            while !ended.load(Ordering::Relaxed) {
                Load::poisson(100.0, 100, 7).over(&pool).run(&target).await.assert_served();
            }
        }
    });
    let mut random = StdRng::seed_from_u64(11);
    let mut warm = 0;
    for round in 0..1000 {
        // Hosts come and go, keys change; every fifteenth is refused.
        let mut which: Vec<usize> = (0..4).filter(|_| random.random_bool(0.8)).collect();
        if which.is_empty() {
            which = vec![0];
        }
        let slots = random.random_range(50..100);
        let pool = json!({"hosts": named(&fleet, &which), "max_in_flight": slots, "alternates": round % 3});
        if round % 15 == 0 {
            let taken = envoy.reload(json!({"pools": {"gpu": pool}, "unknown": round})).await;
            assert!(taken.is_err(), "an unknown key");
        }
        envoy.reload(json!({"pools": {"gpu": pool}})).await.expect("accepted");
        if round == 200 {
            warm = envoy.rss();
        }
    }
    ended.store(true, Ordering::Relaxed);
    load.await.expect("the load ran, and every request was served");
    envoy.settled().await;
    let grown = envoy.rss().saturating_sub(warm);
    assert!(grown < 30 << 20, "Envoy grew by {grown} bytes in 800 reloads, from {warm}");
    let status = envoy.status().await;
    assert_eq!((&status["pools"]["gpu"]["drift"], &status["pools"]["gpu"]["dead_workers"]), (&json!(0), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_of_the_listener_that_another_filter_refuses_leaves_no_trace() {
    let fleet = Fleet::start(3, Gpu::new().slots(50).work_ms(20)).await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("listeners.json");
    let mut resource = Value::Null;
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .pool(json!({"hosts": named(&fleet, &[0, 1])}))
        .edit(|bootstrap| {
            let listeners = bootstrap["static_resources"]["listeners"].as_array_mut().expect("listeners");
            let at = listeners.iter().position(|listener| listener["name"] == "ingress").expect("the ingress");
            let mut listener = listeners.remove(at);
            listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
            listener["address"]["socket_address"] = json!({"address": "127.0.0.1", "port_value": free_port()});
            listener["stat_prefix"] = json!("ingress");
            let config = wasm_config(&mut listener);
            config["vm_config"]["code"]["local"]["filename"] = json!(module("plimsoll.wasm"));
            resource = json!({"version_info": "1", "resources": [listener]});
            bootstrap["dynamic_resources"] = json!({"lds_config": {"path_config_source": {"path": file.to_str()}}});
            replace(&file, &resource);
        })
        .start()
        .await;
    let port = resource["resources"][0]["address"]["socket_address"]["port_value"].as_u64().expect("a port");
    let ingress = std::net::SocketAddr::from(([127, 0, 0, 1], port as u16));
    eventually("the listener is there", async || envoy.status().await["pools"]["gpu"].is_object()).await;
    let running = tokio::spawn(async move { Load::burst(6).header("x-sim-ms", "3000").run(&ingress).await });
    eventually("six run", async || envoy.in_flight().await == [3, 3]).await;
    let before = envoy.books().await;
    // Ours is fine: it names another host, and not the second. The router's is not.
    let good = wasm_config(&mut resource["resources"][0])["configuration"]["value"].take();
    let mut configuration: Value = serde_json::from_str(good.as_str().expect("text")).expect("JSON");
    configuration["pools"]["gpu"]["hosts"] = named(&fleet, &[0, 2]);
    wasm_config(&mut resource["resources"][0])["configuration"]["value"] = json!(configuration.to_string());
    let filters = http_filters(&mut resource["resources"][0]);
    filters.insert(
        filters.len() - 1,
        json!({"name": "bad", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": "this is not lua"}}}),
    );
    resource["version_info"] = json!("2");
    replace(&file, &resource);
    eventually("Envoy refuses it", async || envoy.stat("listener_manager.lds.update_rejected").await == 1).await;
    for _ in 0..10 {
        let now = envoy.books().await;
        assert_eq!(column(&now, "address"), column(&before, "address"));
        assert_eq!(column(&now, "state"), ["serving", "serving"]);
        assert_eq!(envoy.in_flight().await, [3, 3]);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    running.await.expect("the load ran").assert_served();
    envoy.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_under_load_fails_no_request() {
    // The trap module is another build with the same record; the other one has another record.
    for next in ["plimsoll-trap.wasm", "plimsoll-next-record.wasm"] {
        let fleet = Fleet::start(3, Gpu::new().slots(100).work_ms(30)).await;
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).live().start().await;
        let pool = envoy.pool_over_workers(8).await;
        let target = support::Target::address(&envoy);
        let load = tokio::spawn(async move { Load::poisson(100.0, 800, 3).over(&pool).run(&target).await });
        eventually("it runs", async || fleet.jobs().iter().sum::<u64>() > 100).await;
        envoy.upgrade(&module(next)).await.expect("accepted");
        eventually("the new build serves", async || fleet.jobs().iter().sum::<u64>() > 600).await;
        load.await.expect("the load ran").assert_served();
        envoy.settled().await;
        let log = envoy.log();
        assert!(!log.contains("not one of ours") && !log.contains("panicked"), "{next}: a record was misread");
        let pool = &envoy.status().await["pools"]["gpu"];
        if next == "plimsoll-trap.wasm" {
            let requests = column(pool["hosts"].as_array().expect("hosts"), "requests");
            let counted: u64 = requests.iter().map(|count| count.as_u64().expect("a count")).sum();
            assert_eq!(counted, 800, "one record counts for both builds");
            assert_eq!((&pool["drift"], &pool["dead_workers"]), (&json!(0), &json!(0)), "the old build's workers left");
        } else {
            // The page is the old build's, whose workers have left its record.
            eventually("the old record is empty", async || envoy.status().await["pools"]["gpu"].is_null()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_pools_and_two_listeners_keep_their_books_apart() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(20)).await;
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .configuration(json!({"pools": {
            "gpu": {"hosts": named(&fleet, &[0, 1, 2]), "max_in_flight": 10},
            // The same host in two pools is counted apart.
            "llm": {"hosts": named(&fleet, &[2, 3]), "max_in_flight": 20}}}))
        .second_cluster("llm", &fleet.addresses()[2..], json!({"prefix": "/v1"}))
        .edit(|bootstrap| {
            let listeners = bootstrap["static_resources"]["listeners"].as_array_mut().expect("listeners");
            let mut second = listeners[0].clone();
            second["name"] = json!("second");
            second["stat_prefix"] = json!("second");
            wasm_config(&mut second)["name"] = json!("plimsoll-second");
            listeners.push(second);
        })
        .start()
        .await;
    let second = envoy.listener("second");
    let first = support::Target::address(&envoy);
    let loads: Vec<_> = [(first, "/prompt", 9), (second, "/prompt", 9), (first, "/v1/chat", 8), (second, "/v1/chat", 8)]
        .into_iter()
        .map(|(target, path, jobs)| {
            tokio::spawn(async move { Load::burst(jobs).post(path).header("x-sim-ms", "1500").run(&target).await })
        })
        .collect();
    // Both listeners fill one pool's books; the other pool's are its own.
    let books = async |pool: &str| -> Vec<i64> {
        let status = envoy.status().await;
        let hosts = status["pools"][pool]["hosts"].as_array().cloned().unwrap_or_default();
        hosts.iter().map(|host| host["in_flight"].as_i64().expect("a count")).collect()
    };
    eventually("eighteen on three hosts", async || books("gpu").await == [6, 6, 6]).await;
    eventually("sixteen on two", async || books("llm").await == [8, 8]).await;
    for load in loads {
        load.await.expect("the load ran").assert_served();
    }
    envoy.settled().await;
    // Another Envoy on this machine, with another build, knows nothing of it.
    let other = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).module(module("plimsoll-next-record.wasm"));
    let other = other.start_beside(&envoy).await;
    eventually("its own books", async || !other.status().await["pools"]["gpu"].is_null()).await;
    assert!(other.books().await.iter().all(|host| host["requests"] == 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_workers_and_a_thousand_hosts_are_exact() {
    // Four real hosts among 1,024 names: the others are out of slots' reach, because nobody listens there and each is drained.
    // As long as a job takes no busy machine takes to send all of them.
    let fleet = Fleet::start(4, Gpu::new().slots(1000).work_ms(2000)).await;
    let mut hosts: Vec<Value> =
        (0..1020).map(|n| json!({"address": format!("127.1.{}.{}:9", n / 250, n % 250 + 1), "drain": true})).collect();
    hosts.extend(named(&fleet, &[0, 1, 2, 3]).as_array().cloned().expect("a list"));
    let keys = json!({"hosts": hosts, "max_in_flight": 40, "alternates": 0});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).workers(32).start().await;
    for _ in 0..5 {
        fleet.clear_books();
        let report = Load::burst(200).run(&envoy).await;
        assert_eq!((report.status(200), report.status(503)), (160, 40), "\n{report}");
        assert_eq!(fleet.max_in_flight(), [40, 40, 40, 40]);
        envoy.settled().await;
    }
    let status = envoy.status().await;
    assert_eq!(status["pools"]["gpu"]["hosts"].as_array().map(Vec::len), Some(1024));
    assert!(status["pools"]["gpu"]["workers"].as_u64() > Some(8), "{}", status["pools"]["gpu"]["workers"]);
    assert_eq!(status["pools"]["gpu"]["drift"], 0);
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port").port()
}

/// A module in `dist/`, as an absolute path.
pub fn module(file: &str) -> String {
    format!("{}/../dist/{file}", env!("CARGO_MANIFEST_DIR"))
}

fn http_filters(listener: &mut Value) -> &mut Vec<Value> {
    listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"].as_array_mut().expect("filters")
}

fn wasm_config(listener: &mut Value) -> &mut Value {
    let filter = http_filters(listener).iter_mut().find(|filter| filter["name"] == "plimsoll").expect("our filter");
    &mut filter["typed_config"]["config"]
}
