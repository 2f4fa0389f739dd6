//! The queue's limits are exact: how many wait, for how long, who has left, and what their bodies cost.

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::json;
use support::load::Ongoing;
use support::{Abort, Client, Envoy, Fault, Fleet, Gpu, Load, Pool, Reply, RunningEnvoy, Seen};
use tokio::time::{sleep, timeout};

use crate::queue::{hold, nothing_is_left, numbered, numbers, one_slot, send, start, waiting};

/// The verdict of a refusal, as its header and its body say, and the seconds after which to come again.
fn refusal(reply: &Reply) -> (String, u64) {
    assert_eq!(reply.status, 503);
    let verdict = reply.header("x-plimsoll-verdict").unwrap_or_else(|| panic!("no verdict in {:?}", reply.headers)).to_owned();
    assert_eq!(reply.json()["error"]["code"], verdict);
    let again = reply.header("retry-after").and_then(|seconds| seconds.parse().ok());
    (verdict, again.unwrap_or_else(|| panic!("no seconds to wait in {:?}", reply.headers)))
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_has_waited_for_the_timeout_is_refused_then_and_not_before_and_never_served() {
    let timeout = Duration::from_millis(1200);
    let (fleet, envoy) = start(1, 500, json!({"queue": {"timeout_ms": 1200}})).await;
    // Half a second each: so much is known of the pool's rate.
    Load::one_by_one(3).run(&envoy).await.assert_served();
    let held = hold(&envoy, &fleet).await;
    let mut jobs = Vec::new();
    for client in [Client::http1(&envoy), Client::http2(&envoy)] {
        for _ in 0..8 {
            jobs.push(send(client.post("/prompt", "{}")));
        }
    }
    waiting(&envoy, 16).await;
    let mut late = Vec::new();
    for job in jobs {
        let (reply, took) = job.await.unwrap();
        let (verdict, again) = refusal(&reply);
        assert_eq!(verdict, "queue_timeout");
        // Up to sixteen wait behind it, half a second each.
        assert!((1..=12).contains(&again), "{again} s");
        assert!(took >= timeout, "after {took:?}");
        late.push(took - timeout);
    }
    late.sort();
    println!("so much later than the timeout: {late:?}");
    assert!(late[late.len() / 2] < Duration::from_millis(400), "{late:?}");
    let queue = waiting(&envoy, 0).await["queue"].take();
    assert_eq!(
        (&queue["timed_out"], &queue["served"], &queue["full"], &queue["left"]),
        (&json!(16), &json!(0), &json!(0), &json!(0))
    );
    let before = fleet[0].jobs();
    drop(held);
    nothing_is_left(&envoy).await;
    sleep(Duration::from_millis(300)).await;
    assert_eq!(fleet[0].jobs(), before, "a job that had been refused was sent");
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_wait_as_may_over_all_workers_and_the_others_are_refused_at_once() {
    let (fleet, envoy) = start(1, 10, json!({"queue": {"max_length": 50}})).await;
    let both = Pool::of_all(&envoy.pool_on_each_worker(1).await).await;
    for round in 1..=3 {
        let held = hold(&envoy, &fleet).await;
        let load = Load::burst(130).over(&both).start(&envoy);
        envoy.until_pool("eighty were refused", |pool| pool["queue"]["full"] == 81 * round - 1 && pool["waiting"] == 50).await;
        assert_eq!(refusal(&envoy.client().post("/prompt", "{}").await).0, "queue_full");
        drop(held);
        let report = load.await.unwrap();
        assert_eq!((report.status(200), report.status(503)), (50, 80), "\n{report}");
        nothing_is_left(&envoy).await;
    }
    assert_eq!(nothing_is_left(&envoy).await["queue"]["served"], 150);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_says_when_to_come_again_from_the_queue_and_the_pools_rate() {
    let (fleet, envoy) = start(2, 1000, json!({"queue": {"max_length": 11}})).await;
    Load::burst(4).run(&envoy).await.assert_served();
    let held = hold(&envoy, &fleet).await;
    let load = Load::burst(11).header("x-sim-ms", "10").start(&envoy);
    waiting(&envoy, 11).await;
    // Twelve jobs of a second each, two at a time. (The second that jobs take may have been a bit more.)
    let (verdict, again) = refusal(&envoy.client().post("/prompt", "{}").await);
    assert_eq!(verdict, "queue_full");
    assert!((5..=9).contains(&again), "{again} s");
    drop(held);
    load.await.unwrap().assert_served();
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_are_gone_from_the_queue_at_once_and_others_move_up() {
    let (fleet, envoy) = start(1, 10, json!({})).await;
    let held = hold(&envoy, &fleet).await;
    let workers = envoy.pool_on_each_worker(1).await;
    let mut all: Vec<(usize, Ongoing)> = Vec::new();
    for n in 0..32 {
        // Over HTTP/1.1 and HTTP/2 connections of their own, and as streams of a connection that stays, one on each worker.
        let ask = |client: Client| client.post("/prompt", "{}").header("x-number", n.to_string());
        let job = match n % 4 {
            0 => ask(Client::http1(&envoy)).start().await,
            1 => ask(Client::http2(&envoy)).start().await,
            worker => ask(Client::http2(&envoy)).start_over(&workers[worker - 2]).await,
        };
        all.push((n, job));
    }
    waiting(&envoy, 32).await;
    // Six of each eight leave, the first among them.
    let (stay, leave): (Vec<_>, Vec<_>) = all.into_iter().partition(|(n, _)| [5, 7].contains(&(n % 8)));
    let left = Instant::now();
    drop(leave);
    assert_eq!(waiting(&envoy, 8).await["queue"]["left"], 24);
    println!("gone after {:?}", left.elapsed());
    assert!(left.elapsed() < Duration::from_secs(2), "gone after {:?}", left.elapsed());
    // It leaves in the middle of its job: the next is woken.
    drop(held);
    let mut stayed = Vec::new();
    for (n, job) in stay {
        assert_eq!(job.finish().await.unwrap().status, 200);
        stayed.push(n);
    }
    let mut served = numbers(&fleet[0]);
    served.sort();
    assert_eq!(served, stayed);
    let queue = nothing_is_left(&envoy).await["queue"].take();
    assert_eq!((&queue["served"], &queue["left"], &queue["timed_out"]), (&json!(8), &json!(24), &json!(0)));
    // All leave, and nobody is woken.
    let held = hold(&envoy, &fleet).await;
    let leave = Abort::After(Duration::from_secs(1));
    let load = Load::burst(20).over(&Pool::of_all(&workers).await).each(|_, shot| shot.abort = Some(leave)).start(&envoy);
    waiting(&envoy, 20).await;
    assert_eq!(load.await.unwrap().aborted(), 20);
    waiting(&envoy, 0).await;
    let before = fleet[0].jobs();
    drop(held);
    assert_eq!(nothing_is_left(&envoy).await["queue"]["left"], 44);
    assert_eq!(fleet[0].jobs(), before);
    let (reply, _) = send(envoy.client().post("/prompt", "{}")).await.unwrap();
    assert_eq!(reply.status, 200);
}

/// The worker's VM is the one that it was, and serves.
async fn no_vm_has_trapped(envoy: &RunningEnvoy) {
    let (reply, _) = send(envoy.client().post("/prompt", "{}")).await.unwrap();
    assert_eq!(reply.status, 200);
    assert!(!envoy.log().contains("Uncaught"));
    assert_eq!(nothing_is_left(envoy).await["dead_workers"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_jobs_leave_or_are_overdue_in_one_moment_and_their_worker_lives() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let keys = one_slot(json!({"queue": {"timeout_ms": 6000}}));
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).workers(1).start().await;
    let held = hold(&envoy, &fleet).await;
    let leaving = Load::burst(1000).http2(20).start(&envoy);
    waiting(&envoy, 1000).await;
    envoy.stop_process();
    leaving.abort();
    envoy.continue_process();
    assert_eq!(waiting(&envoy, 0).await["queue"]["left"], 1000);
    let overdue = Load::burst(1000).http2(20).start(&envoy);
    waiting(&envoy, 1000).await;
    envoy.stop_process();
    sleep(Duration::from_secs(6)).await;
    envoy.continue_process();
    let report = overdue.await.unwrap();
    assert_eq!(report.status(503), 1000, "\n{report}");
    assert_eq!(waiting(&envoy, 0).await["queue"]["timed_out"], 1000);
    drop(held);
    no_vm_has_trapped(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_jobs_are_resumed_in_one_moment_and_their_worker_lives() {
    let fleet = Fleet::start(1, Gpu::new().slots(1000)).await;
    let keys = one_slot(json!({"max_in_flight": 1000}));
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).workers(1).start().await;
    fleet[0].set(Fault::status(429).header("retry-after", "6").next(1));
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 429);
    envoy.until_state(0, "busy").await;
    let load = Load::burst(1000).http2(20).start(&envoy);
    waiting(&envoy, 1000).await;
    // Its pause ends while the process stands still.
    envoy.stop_process();
    sleep(Duration::from_secs(6)).await;
    envoy.continue_process();
    load.await.unwrap().assert_served();
    assert_eq!(nothing_is_left(&envoy).await["queue"]["served"], 1000);
    no_vm_has_trapped(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_leave_at_any_moment_around_their_turn_leave_nothing_behind() {
    let (fleet, envoy) = start(4, 5, json!({})).await;
    // Each wave takes about 300 ms; two thirds leave within that, some as they wait, some as they are woken, some as they run.
    for wave in 0..10u64 {
        // Connections of their own, or Envoy ends those on which most streams are reset.
        let load = Load::burst(240).http2(12).each(|n, shot| {
            if n % 3 != 0 {
                shot.abort = Some(Abort::After(Duration::from_millis((n as u64 * 7 + wave * 13) % 320)));
            }
        });
        let report = load.run(&envoy).await;
        report.assert_served();
        assert!(report.status(200) >= 80, "\n{report}");
        nothing_is_left(&envoy).await;
        fleet.idle().await;
    }
    let queue = envoy.pool_status().await["queue"].take();
    assert!(queue["left"].as_u64() > Some(100), "{queue:#}");
    assert_eq!((&queue["timed_out"], &queue["full"]), (&json!(0), &json!(0)));
}

/// Waits until Envoy has taken all that it takes, and gives its memory.
async fn rss_at_rest(envoy: &RunningEnvoy) -> u64 {
    let mut last = 0;
    loop {
        let now = envoy.rss();
        if now < last + (1 << 20) {
            return now.max(last);
        }
        last = now;
        sleep(Duration::from_millis(500)).await;
    }
}

/// A body of which no part is like the next.
fn body(length: usize) -> Bytes {
    (0..length).map(|n| (n / 7) as u8).collect::<Vec<u8>>().into()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_bodies_of_eight_megabytes_wait_in_their_clients_and_arrive_whole() {
    let body = body(8 << 20);
    let (fleet, envoy) = start(4, 0, json!({})).await;
    let held = hold(&envoy, &fleet).await;
    let shared = Pool::of_all(&envoy.pool_on_each_worker(1).await).await;
    let before = rss_at_rest(&envoy).await;
    let mut jobs = Vec::new();
    for n in 0..100 {
        let ask = |client: Client| client.post("/prompt", body.clone()).header("x-number", n.to_string());
        jobs.push(match n % 3 {
            0 => ask(Client::http1(&envoy)).start().await,
            1 => ask(Client::http2(&envoy)).start().await,
            _ => ask(Client::http2(&envoy)).start_over(&shared).await,
        });
    }
    waiting(&envoy, 100).await;
    let grown = rss_at_rest(&envoy).await.saturating_sub(before);
    println!("Envoy grew by {} KiB with a hundred bodies of 8 MiB waiting, from {before}", grown >> 10);
    // Envoy reads a megabyte of each connection (`per_connection_buffer_limit_bytes`), and over HTTP/2 a stream's or a connection's window.
    assert!(grown < 160 << 20, "Envoy grew by {grown} bytes, from {before}");
    drop(held);
    for job in jobs {
        assert_eq!(job.finish().await.unwrap().status, 200);
    }
    let mut seen: Vec<_> = fleet.iter().flat_map(|host| host.requests()).collect();
    seen.retain(|seen| seen.headers.contains_key("x-number"));
    assert_eq!(seen.len(), 100);
    let is_whole = |seen: &Seen| seen.length == body.len() && body.starts_with(&seen.body);
    assert!(seen.iter().all(is_whole), "a body came mangled");
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_wait_do_not_hold_up_the_body_of_one_that_is_served_on_their_connection() {
    let keys = json!({"priority": {"header": "x-job-priority"}});
    let fleet = Fleet::start(1, Gpu::new()).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(keys)).keys(json!({"trusted_headers": true})).start().await;
    let held = hold(&envoy, &fleet).await;
    let connection = Pool::http2(&envoy, 1).await;
    let body = body(8 << 20);
    let load = numbered(Load::burst(20)).body(body.clone()).over(&connection).start(&envoy);
    waiting(&envoy, 20).await;
    rss_at_rest(&envoy).await;
    let high = Client::http2(&envoy).post("/prompt", body).header("x-job-priority", "high").header("x-number", "100");
    let high = high.start_over(&connection).await;
    waiting(&envoy, 21).await;
    drop(held);
    let served = timeout(Duration::from_secs(10), high.finish()).await;
    assert_eq!(served.expect("its body was held up").unwrap().status, 200);
    load.await.unwrap().assert_served();
    assert_eq!(numbers(&fleet[0])[0], 100);
    nothing_is_left(&envoy).await;
}
