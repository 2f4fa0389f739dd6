//! Jobs wait in front of the hosts: none runs more than it has slots, none is idle while somebody waits, and whoever came first is served first.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::load::{Ask, Ongoing};
use support::{Client, Envoy, Fault, Fleet, Gpu, GpuHost, Load, Pool, Reply, RunningEnvoy, Wire, eventually};
use tokio::task::JoinHandle;

/// A pool's keys: hosts of one slot, no alternates, a queue; and these.
pub fn one_slot(keys: Value) -> Value {
    let mut pool = json!({"max_in_flight": 1, "alternates": 0, "queue": {}});
    let own = pool.as_object_mut().expect("an object");
    own.extend(keys.as_object().expect("a pool is an object").clone());
    pool
}

/// Hosts of one slot each, behind an Envoy that lets jobs wait; with these keys in the pool.
pub async fn start(hosts: usize, work_ms: u64, keys: Value) -> (Fleet, RunningEnvoy) {
    let fleet = Fleet::start(hosts, Gpu::new().work_ms(work_ms)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(keys)).start().await;
    (fleet, envoy)
}

/// A job on the one slot of each host, by host; dropped, it gives the slot back.
pub async fn hold(envoy: &RunningEnvoy, fleet: &Fleet) -> Vec<Ongoing> {
    let mut held: Vec<Option<Ongoing>> = fleet.iter().map(|_| None).collect();
    for _ in fleet.iter() {
        let job = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await;
        let place = || fleet.iter().zip(&held).position(|(host, held)| held.is_none() && host.in_flight() == 1);
        eventually("a host has it", async || place().is_some()).await;
        let place = place().expect("one has it");
        held[place] = Some(job);
    }
    held.into_iter().flatten().collect()
}

/// Waits until so many wait, and gives what the filter says of the pool then.
pub async fn waiting(envoy: &RunningEnvoy, jobs: usize) -> Value {
    envoy.until_pool(&format!("{jobs} wait"), |pool| pool["waiting"] == jobs).await
}

/// A load whose requests say which they are.
pub fn numbered(load: Load) -> Load {
    load.each(|n, shot| shot.call.add_header("x-number", n.to_string()))
}

/// A header of the jobs that a host has seen, in the order of their arrival; jobs without it are left out.
pub fn arrivals(host: &GpuHost, header: &str) -> Vec<String> {
    let value = |seen: &support::Seen| Some(seen.headers.get(header)?.to_str().ok()?.to_owned());
    host.requests().iter().filter_map(value).collect()
}

/// The numbers of the jobs that a host has seen (see [`numbered`]), in the order of their arrival.
pub fn numbers(host: &GpuHost) -> Vec<usize> {
    arrivals(host, "x-number").iter().map(|number| number.parse().expect("a number")).collect()
}

/// Sends a job beside the test; gives its answer, and how long that took.
pub fn send(ask: Ask) -> JoinHandle<(Reply, Duration)> {
    tokio::spawn(async move {
        let sent = Instant::now();
        (ask.send().await.expect("a whole response"), sent.elapsed())
    })
}

/// What is left when nobody waits or runs: no wrong count.
pub async fn nothing_is_left(envoy: &RunningEnvoy) -> Value {
    envoy.settled().await;
    let pool = envoy.pool_status().await;
    let zeros = ["waiting", "drift", "unleased"].map(|name| &pool[name]);
    assert_eq!(zeros, [0, 0, 0], "{pool:#}");
    let queue = &pool["queue"];
    let zeros = ["high", "normal", "low", "longest_wait_ms"].map(|name| &queue[name]);
    assert_eq!(zeros, [0, 0, 0, 0], "{pool:#}");
    pool
}

/// Panics unless the hosts are idle for less than 20 ms between the end of a job and the start of the next, as far as it is not the machine
/// that is busy: the shortest tenth of the gaps tells. (`scripts/bench` has all of them.)
fn no_host_was_idle(hosts: &[GpuHost]) {
    let mut gaps = Vec::new();
    for host in hosts {
        let seen = host.requests();
        gaps.extend(seen.windows(2).filter_map(|pair| pair[1].started?.checked_duration_since(pair[0].ended?.0)));
    }
    gaps.sort();
    let part = |share: usize| gaps[gaps.len() * share / 100];
    let (least, half, most) = (part(10), part(50), part(90));
    println!("idle between two jobs for {least:?} in a tenth of all cases, {half:?} in a half, {most:?} in nine of ten");
    assert!(least < Duration::from_millis(20), "hosts were idle for {least:?} and more while jobs waited");
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_jobs_at_once_never_run_two_on_a_host_and_no_host_is_idle_meanwhile() {
    let (fleet, envoy) = start(8, 60, json!({})).await;
    let both = Pool::of_all(&envoy.pool_on_each_worker(2).await).await;
    let first = Load::burst(8).header("x-sim-ms", "3000").start(&envoy);
    eventually("each host has one", async || fleet.in_flight() == [1; 8]).await;
    let all = numbered(Load::burst(300)).over(&both).start(&envoy);
    waiting(&envoy, 300).await;
    first.await.unwrap().assert_served();
    all.await.unwrap().assert_served();
    assert_eq!(fleet.max_in_flight(), [1; 8]);
    assert_eq!(fleet.jobs().iter().sum::<u64>(), 308);
    assert_eq!(nothing_is_left(&envoy).await["queue"]["served"], 300);
    no_host_was_idle(&fleet);
    // A burst over several connections has no order between them; on each of the four it has, but for what a busy machine brings about.
    for connection in 0..4 {
        let mut starts: Vec<(usize, Instant)> = Vec::new();
        for seen in fleet.iter().flat_map(|host| host.requests()) {
            let number = seen.headers.get("x-number").and_then(|number| number.to_str().ok()?.parse().ok());
            starts.extend(number.filter(|number| number % 4 == connection).zip(seen.started));
        }
        starts.sort();
        let mut latest = starts[0].1;
        for (number, start) in starts {
            let late = latest.saturating_duration_since(start);
            assert!(late < Duration::from_millis(400), "job {number} overtook one that came before it by {late:?}");
            latest = latest.max(start);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_served_in_the_order_of_their_arrival_whichever_worker_has_them() {
    let (fleet, envoy) = start(1, 300, json!({})).await;
    let workers = envoy.pool_on_each_worker(1).await;
    // A quarter of a second apart, each on the other worker than the one before, faster than they are served.
    let load = numbered(Load::rate(4.0, 12)).each(|n, shot| {
        if n == 0 {
            shot.call.add_header("x-sim-ms", "1500");
        }
    });
    load.over(&Pool::of_all(&workers).await).run(&envoy).await.assert_served();
    assert_eq!(numbers(&fleet[0]), (0..12).collect::<Vec<_>>());
    // A slot that one worker gives back goes to a job of the other.
    no_host_was_idle(&fleet);
    // On one connection the order is exact however fast they come.
    for worker in &workers {
        fleet.clear_books();
        let held = hold(&envoy, &fleet).await;
        let load = numbered(Load::burst(60)).header("x-sim-ms", "5").over(worker).start(&envoy);
        waiting(&envoy, 60).await;
        drop(held);
        load.await.unwrap().assert_served();
        assert_eq!(numbers(&fleet[0]), (0..60).collect::<Vec<_>>());
    }
    assert_eq!(nothing_is_left(&envoy).await["queue"]["served"], 11 + 120);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_send_a_job_after_the_other_are_all_served_and_no_host_ever_runs_two() {
    let (fleet, envoy) = start(8, 20, json!({})).await;
    let clients = envoy.pool_over_workers(24).await;
    let report = Load::burst(1600).over(&clients).run(&envoy).await;
    println!("{report}");
    report.assert_served();
    assert_eq!(fleet.max_in_flight(), [1; 8]);
    assert_eq!(fleet.jobs().iter().sum::<u64>(), 1600);
    // Sixteen of the twenty-four wait at any time; a job may find a slot where others have just been woken.
    let pool = nothing_is_left(&envoy).await;
    assert!(pool["queue"]["served"].as_u64() > Some(800), "{pool:#}");
    assert_eq!((&pool["queue"]["full"], &pool["queue"]["timed_out"], &pool["queue"]["left"]), (&json!(0), &json!(0), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_jobs_that_waited_leave_nothing_behind() {
    let (fleet, envoy) = start(8, 0, json!({})).await;
    let workers = Pool::of_all(&envoy.pool_on_each_worker(3).await).await;
    let mut warm = 0;
    for wave in 0..20 {
        let held = hold(&envoy, &fleet).await;
        let load = Load::burst(500).over(&workers).start(&envoy);
        waiting(&envoy, 500).await;
        drop(held);
        load.await.unwrap().assert_served();
        if wave == 4 {
            warm = envoy.rss();
        }
    }
    let grown = envoy.rss().saturating_sub(warm);
    println!("Envoy grew by {grown} bytes in 7,500 jobs, from {warm}");
    assert!(grown < 10 << 20, "Envoy grew by {grown} bytes in 7,500 jobs, from {warm}");
    let pool = nothing_is_left(&envoy).await;
    assert_eq!((&pool["queue"]["served"], &pool["queue"]["left"]), (&json!(10_000), &json!(0)));
}

const UPGRADE: &str = "GET /ws HTTP/1.1\r\nhost: gpu\r\nx-number: 1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
    sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn grpc_calls_web_sockets_and_streams_wait_for_a_slot_and_hold_it_to_their_end() {
    for file in ["http2.yaml", "http1.yaml"] {
        // gRPC is HTTP/2's.
        let has_grpc = file == "http2.yaml";
        let fleet = Fleet::start(1, Gpu::new()).await;
        let envoy = Envoy::new(file).hosts(&fleet).pool(one_slot(json!({}))).start().await;
        let held = hold(&envoy, &fleet).await;
        let mut behind = 0;
        let call = has_grpc.then(|| send(Client::http2(&envoy).grpc("/gpu.Render/Frame").header("x-number", "0")));
        behind += usize::from(has_grpc);
        waiting(&envoy, behind).await;
        let mut socket = Wire::open(&envoy).await;
        socket.send(UPGRADE).await;
        waiting(&envoy, behind + 1).await;
        let streamed = envoy.client().post("/prompt", "{}").header("x-number", "2");
        let mut stream = streamed.header("x-sim-ms", "1200").header("x-sim-chunks", "6").start().await;
        waiting(&envoy, behind + 2).await;
        let last = send(envoy.client().post("/prompt", "{}").header("x-number", "3"));
        waiting(&envoy, behind + 3).await;
        drop(held);
        if let Some(call) = call {
            let (reply, _) = call.await.unwrap();
            assert_eq!((reply.status, reply.grpc_status()), (200, Some(0)));
        }
        assert!(socket.receive_head().await.starts_with("HTTP/1.1 101"), "{file}");
        socket.send("ping").await;
        assert_eq!(socket.receive_exactly(4).await, b"ping");
        waiting(&envoy, 2).await;
        assert_eq!(envoy.in_flight().await, [1], "the socket's");
        drop(socket);
        assert_eq!(stream.head().await.unwrap().0, 200);
        let mut chunks = 0;
        while stream.chunk().await.unwrap().is_some() {
            chunks += 1;
        }
        assert_eq!((chunks, last.await.unwrap().0.status), (6, 200));
        let seen = fleet[0].requests();
        let of =
            |number: &str| seen.iter().find(|seen| seen.headers.get("x-number").is_some_and(|value| value == number)).unwrap();
        assert!(of("3").arrived >= of("2").ended.unwrap().0, "{file}: the next job came before the stream's last byte");
        nothing_is_left(&envoy).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_no_jobs_do_not_wait() {
    let (fleet, envoy) = start(1, 0, json!({"jobs": {}})).await;
    let held = hold(&envoy, &fleet).await;
    let job = send(envoy.client().post("/prompt", "{}").header("x-number", "job"));
    waiting(&envoy, 1).await;
    // The host has one slot: what comes to it stands there behind the job that holds it.
    let mut others = Vec::new();
    for ask in [envoy.client().get("/history"), envoy.client().post("/upload", "{}"), envoy.client().get("/prompt")] {
        others.push(send(ask.header("x-number", "other")));
    }
    eventually("they are at the host", async || arrivals(&fleet[0], "x-number") == ["other"; 3]).await;
    assert_eq!(waiting(&envoy, 1).await["queue"]["served"], 0);
    drop(held);
    assert_eq!(job.await.unwrap().0.status, 200);
    for other in others {
        assert_eq!(other.await.unwrap().0.status, 200);
    }
    assert_eq!(envoy.pool_status().await["queue"]["served"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_page_and_the_explanation_say_who_waits_and_for_how_long() {
    let queue = json!({"max_length": 7, "timeout_ms": 2500});
    let (fleet, envoy) = start(1, 0, json!({"queue": queue, "explain": "header"})).await;
    let waited = |text: &str| -> u64 {
        let value = text.split(' ').find_map(|item| item.strip_prefix("waited_ms="));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no waited_ms in {text:?}"))
    };
    let reply = envoy.client().post("/prompt", "{}").await;
    assert_eq!(waited(reply.header("x-plimsoll-why").unwrap()), 0);
    let quiet = json!({"high": 0, "normal": 0, "low": 0, "longest_wait_ms": 0, "max_length": 7, "served": 0, "full": 0,
        "timed_out": 0, "left": 0});
    assert_eq!(nothing_is_left(&envoy).await["queue"], quiet);
    let held = hold(&envoy, &fleet).await;
    let (one, two) = (send(envoy.client().post("/prompt", "{}")), send(envoy.client().post("/prompt", "{}")));
    assert_eq!(waiting(&envoy, 2).await["queue"]["normal"], 2);
    envoy.until_pool("it grows", |pool| pool["queue"]["longest_wait_ms"].as_u64() > Some(600)).await;
    drop(held);
    for job in [one, two] {
        let (reply, took) = job.await.unwrap();
        let waited = waited(reply.header("x-plimsoll-why").unwrap());
        assert!((600..=took.as_millis() as u64).contains(&waited), "waited for {waited} ms of {took:?}");
    }
    assert_eq!(nothing_is_left(&envoy).await["queue"]["served"], 2);
    // What the filter answers itself is in Envoy's log.
    let _held = hold(&envoy, &fleet).await;
    let (reply, took) = send(envoy.client().post("/prompt", "{}")).await.unwrap();
    assert_eq!(reply.status, 503);
    envoy.logged("policy=least_score verdict=queue_timeout waited_ms=").await;
    let log = envoy.log();
    let line = log.lines().find(|line| line.contains("verdict=queue_timeout")).unwrap();
    assert!((2500..=took.as_millis() as u64).contains(&waited(line)), "{line} took {took:?}");
    let without = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start_beside(&envoy).await;
    let pool = without.until_pool("it has books", |pool| pool["hosts"].is_array()).await;
    assert_eq!((&pool["waiting"], &pool["queue"]), (&json!(0), &json!(null)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_that_goes_to_a_host_without_a_free_slot_is_counted() {
    let fleet = Fleet::start(2, Gpu::new().slots(5)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let hosts = json!([{"address": one.to_string(), "weight": 1000}, {"address": two.to_string()}]);
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .pool(one_slot(json!({"hosts": hosts, "alternates": 1})))
        .route(json!({"retry_policy": {"retry_on": "reset", "num_retries": 1}}))
        .start()
        .await;
    // The heavier one first; the second job has only the other left.
    let short = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await;
    fleet[0].until("the heavier has one", |counts| counts.running == 1).await;
    let long = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await;
    fleet[1].until("the other has one", |counts| counts.running == 1).await;
    assert_eq!(envoy.pool_status().await["beyond_slots"], 0);
    fleet[0].set(Fault::refuse_stream().next(1));
    let job = send(envoy.client().post("/prompt", "{}").header("x-number", "1").header("x-sim-ms", "1000"));
    waiting(&envoy, 1).await;
    drop(short);
    fleet[1].until("it has taken the one that the first refused", |counts| counts.in_flight == 2).await;
    envoy.until("so the books say", |books| books[0]["in_flight"] == 0 && books[1]["in_flight"] == 2).await;
    let (reply, _) = job.await.unwrap();
    assert_eq!((reply.status, reply.host()), (200, Some(two)));
    assert_eq!(envoy.pool_status().await["beyond_slots"], 1);
    drop(long);
    assert_eq!(nothing_is_left(&envoy).await["beyond_slots"], 1);
}
