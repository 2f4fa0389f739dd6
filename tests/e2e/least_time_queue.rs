//! `least_time` with a queue: a job waits for a fast host where that is sooner done with it than a slow one that is idle, and never for longer than that gains.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use support::load::Ask;
use support::{Client, Envoy, Fault, Fleet, Gpu, Load, Reply, RunningEnvoy, eventually};
use tokio::task::JoinHandle;

use crate::least_time::{class, envoy, fleet, learning, why};
use crate::queue::{arrivals, nothing_is_left, one_slot, waiting};

const FAST: usize = 0;
const SLOW: usize = 1;

fn ask(envoy: &RunningEnvoy, class: &str) -> Ask {
    Client::http1(envoy).post("/prompt", "{}").header("x-job-class", class)
}

fn send(envoy: &RunningEnvoy, class: &str) -> JoinHandle<Reply> {
    let ask = ask(envoy, class);
    tokio::spawn(async move { ask.send().await.expect("a whole response") })
}

/// A host of speed 4 and one of speed ½, of one slot each, of which both are known: a `draft` takes 100 ms on the one and 800 ms on the other, a `film` twice as long.
async fn start(keys: Value) -> (Fleet, RunningEnvoy) {
    let gpu = Gpu::new().class("draft", 400).class("film", 800).class("lesson", 160).class("endless", 400);
    let fleet = fleet(&[4.0, 0.5], gpu).await;
    let envoy = envoy(&fleet, one_slot(keys)).start().await;
    for _ in 0..4 {
        Load::burst(14).header("x-job-class", "lesson").run(&envoy).await.assert_served();
    }
    for class in ["draft", "draft", "film", "film", "endless"] {
        let reply = ask(&envoy, class).await;
        assert_eq!((reply.status, reply.host()), (200, Some(fleet[FAST].address())), "{class} {:?}", reply.headers);
    }
    envoy.settled().await;
    let status = envoy.pool_status().await;
    let speed = |host: usize| status["hosts"][host]["speed"].as_f64().expect("known");
    // Eight times, and less where the machine is busy, which adds to each job alike.
    assert!((4.5..=11.0).contains(&(speed(FAST) / speed(SLOW))), "{status:#}");
    assert!(class(&status, "film").is_some() && class(&status, "draft").is_some(), "{status:#}");
    fleet.clear_books();
    (fleet, envoy)
}

/// Waits until the fast host runs a job.
async fn fast_is_busy(fleet: &Fleet) {
    eventually("the fast host is at it", async || fleet[FAST].in_flight() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_job_waits_for_the_fast_host_and_what_comes_behind_it_does_not_wait_for_ever() {
    let (fleet, envoy) = start(json!({})).await;
    let draft = send(&envoy, "draft");
    fast_is_busy(&fleet).await;
    let film = send(&envoy, "film").await.expect("sent");
    assert_eq!((film.status, film.header("x-plimsoll-host")), (200, Some(&*fleet[FAST].address().to_string())));
    let waited = why(&film, "waited_ms").expect("it says how long");
    assert!(waited >= 20.0, "it waited for {waited} ms");
    assert_eq!(draft.await.expect("sent").status, 200);
    assert_eq!(fleet.jobs(), [2, 0], "the slow one was idle all the time");
    // What a film and seven drafts make is longer on the fast host than a draft on the slow one.
    let first = send(&envoy, "film");
    fast_is_busy(&fleet).await;
    let film = send(&envoy, "film");
    waiting(&envoy, 1).await;
    let drafts = Load::burst(8).header("x-job-class", "draft").run(&envoy).await;
    drafts.assert_served();
    assert!((1..=4).contains(&fleet[SLOW].jobs()), "{:?}", fleet.jobs());
    for film in [first, film] {
        assert_eq!(film.await.expect("sent").host(), Some(fleet[FAST].address()));
    }
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_held_no_longer_than_that_gains() {
    let (fleet, envoy) = start(json!({})).await;
    fleet[FAST].set(Fault::hang().next(1));
    let hangs = ask(&envoy, "endless").start().await;
    fast_is_busy(&fleet).await;
    // 800 ms on the slow host, 100 ms on the fast one: it may take 700 ms until that is free.
    let draft = send(&envoy, "draft").await.expect("sent");
    assert_eq!((draft.status, draft.host()), (200, Some(fleet[SLOW].address())), "{:?}", draft.headers);
    let waited = why(&draft, "waited_ms").expect("it says how long");
    assert!((200.0..2500.0).contains(&waited), "it waited for {waited} ms");
    assert_eq!(fleet[FAST].in_flight(), 1);
    hangs.abort();
    envoy.settled().await;
    assert_eq!(ask(&envoy, "draft").await.host(), Some(fleet[FAST].address()));
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_host_that_dies_while_jobs_are_held_loses_its_own_job_only() {
    let (fleet, envoy) = start(json!({"alternates": 1})).await;
    let own = ask(&envoy, "film").header("x-sim-ms", "60000").start().await;
    fast_is_busy(&fleet).await;
    let held: Vec<_> = (0..2).map(|_| send(&envoy, "draft")).collect();
    waiting(&envoy, 2).await;
    fleet[FAST].stop().await;
    for draft in held {
        let reply = draft.await.expect("sent");
        assert_eq!((reply.status, reply.host()), (200, Some(fleet[SLOW].address())), "{:?}", reply.headers);
    }
    assert_eq!(own.finish().await.map(|reply| reply.status), Ok(503));
    nothing_is_left(&envoy).await;
    fleet[FAST].restart().await;
    eventually("the fast host is the first choice again", async || {
        ask(&envoy, "draft").header("x-sim-ms", "1").await.host() == Some(fleet[FAST].address())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn priorities_and_tenants_are_as_without_it() {
    let keys = json!({"priority": {"header": "x-priority"}, "tenant": {"header": "x-tenant"}});
    let fleet = Fleet::start(1, Gpu::new().class("draft", 20)).await;
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .pool(learning(one_slot(keys)))
        .keys(json!({"trusted_headers": true}))
        .start()
        .await;
    for _ in 0..4 {
        assert_eq!(ask(&envoy, "draft").await.status, 200);
    }
    fleet.clear_books();
    let held = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await;
    eventually("it runs", async || fleet[0].in_flight() == 1).await;
    let mut jobs = Vec::new();
    let mut line_up = async |priority: &str, tenant: &str, n: usize| {
        let ask = ask(&envoy, "draft").header("x-priority", priority).header("x-tenant", tenant);
        jobs.push(ask.header("x-name", format!("{priority} {tenant}{n}")).start().await);
        waiting(&envoy, jobs.len()).await;
    };
    for n in 0..3 {
        line_up("low", "a", n).await;
    }
    for n in 0..3 {
        line_up("normal", "a", n).await;
    }
    for n in 0..3 {
        line_up("normal", "b", n).await;
    }
    for n in 0..2 {
        line_up("high", "a", n).await;
    }
    held.abort();
    for job in jobs {
        assert_eq!(job.finish().await.expect("served").status, 200);
    }
    let order = arrivals(&fleet[0], "x-name");
    assert_eq!(order[..2], ["high a0", "high a1"]);
    assert_eq!(order[8..], ["low a0", "low a1", "low a2"]);
    // Two tenants take turns; which of them is first is a matter of what they had before.
    for pair in order[2..8].chunks(2) {
        let tenants: BTreeSet<_> = pair.iter().map(|name| name.as_bytes()["normal ".len()]).collect();
        assert_eq!(tenants, BTreeSet::from([b'a', b'b']), "{order:?}");
    }
    nothing_is_left(&envoy).await;
}
