//! Hosts, configurations and workers come and go while jobs wait: nobody hangs, and nobody is woken for a host that takes no jobs.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::load::Ongoing;
use support::{Client, Endpoint, Envoy, Fault, Fleet, Gpu, Load, Pool, Report, RunningEnvoy, eventually};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::fleet::{all_workers_know, follow};
use crate::queue::{hold, nothing_is_left, numbered, numbers, one_slot, send, waiting};

/// As long as something that must not happen is given to happen.
const WHILE: Duration = Duration::from_millis(800);

/// Sends a job and gives the verdict of its refusal.
async fn verdict(envoy: &RunningEnvoy) -> Option<String> {
    let reply = envoy.client().post("/prompt", "{}").await;
    reply.header("x-plimsoll-verdict").map(str::to_owned)
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_waits_is_served_by_the_others_when_a_host_is_killed() {
    let fleet = Fleet::start(3, Gpu::new().slots(10).work_ms(150)).await;
    let keys = one_slot(json!({"max_in_flight": 3, "alternates": 2}));
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    let both = Pool::of_all(&envoy.pool_on_each_worker(1).await).await;
    let running = Load::burst(9).header("x-sim-ms", "2000").start(&envoy);
    eventually("three run on each", async || fleet.in_flight() == [3, 3, 3]).await;
    let waits = Load::burst(50).over(&both).start(&envoy);
    waiting(&envoy, 50).await;
    fleet[0].stop().await;
    waits.await.unwrap().assert_served();
    let report = running.await.unwrap();
    assert_eq!((report.status(200), report.status(503)), (6, 3), "what ran there is lost, and no more\n{report}");
    let pool = nothing_is_left(&envoy).await;
    assert_eq!((&pool["queue"]["served"], &pool["queue"]["timed_out"]), (&json!(50), &json!(0)));
    // Where the slots seemed to be free, jobs were tried and went on to others, until it was ejected.
    envoy.until_state(0, "ejected").await;
    Load::burst(30).over(&both).run(&envoy).await.assert_served();
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_fails_at_once_does_not_swallow_the_queue() {
    let fleet = Fleet::start(2, Gpu::new().work_ms(150)).await;
    // It is never ejected.
    let keys = one_slot(json!({"failure": {"consecutive": 1000}}));
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    let both = Pool::of_all(&envoy.pool_on_each_worker(1).await).await;
    let held = hold(&envoy, &fleet).await;
    let load = Load::burst(40).over(&both).start(&envoy);
    waiting(&envoy, 40).await;
    fleet[0].set(Fault::status(500));
    drop(held);
    let report = load.await.unwrap();
    assert_eq!(report.status(200) + report.status(500), 40, "\n{report}");
    // In six seconds: a quarter of a second after the first failure, twice that after the second, and so on; not one in a millisecond.
    assert!(report.status(500) <= 8, "\n{report}");
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_drains_wakes_nobody_and_one_that_returns_as_many_as_it_has_slots() {
    let fleet = Fleet::start(2, Gpu::new().slots(10)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let hosts = json!([{"address": one.to_string(), "max_in_flight": 3}]);
    let envoy = follow(&fleet, 2, one_slot(json!({"hosts": hosts}))).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await);
    }
    eventually("all slots are taken", async || fleet.in_flight() == [3, 1]).await;
    // Some come before it drains, some after.
    let mut waits = vec![numbered(Load::burst(3)).header("x-sim-ms", "2500").start(&envoy)];
    waiting(&envoy, 3).await;
    envoy.set_endpoints([Endpoint::at(one).health("DRAINING"), two.into()]).await;
    envoy.until_state(0, "draining").await;
    all_workers_know().await;
    waits.push(numbered(Load::burst(3)).header("x-sim-ms", "2500").start(&envoy));
    waiting(&envoy, 6).await;
    // All give their slots back; the one of the host that serves is taken, by jobs one after the other.
    drop(held);
    waiting(&envoy, 5).await;
    sleep(WHILE).await;
    assert_eq!(numbers(&fleet[0]).len(), 0, "a host that drains was given a job");
    waiting(&envoy, 5).await;
    envoy.set_endpoints([one, two]).await;
    eventually("it runs three", async || fleet[0].in_flight() == 3).await;
    for load in waits {
        load.await.unwrap().assert_served();
    }
    assert_eq!(fleet[0].counts().max_in_flight, 3);
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_all_hosts_drain_new_jobs_are_refused_and_waiting_ones_wait_for_a_host_or_their_timeout() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let one = fleet.addresses()[0];
    let envoy = follow(&fleet, 1, one_slot(json!({"queue": {"timeout_ms": 8000}}))).await;
    let drain = async || {
        envoy.set_endpoints([Endpoint::at(one).health("DRAINING")]).await;
        envoy.until_state(0, "draining").await;
        all_workers_know().await;
    };
    let held = hold(&envoy, &fleet).await;
    let job = send(envoy.client().post("/prompt", "{}"));
    waiting(&envoy, 1).await;
    drain().await;
    assert_eq!(verdict(&envoy).await.as_deref(), Some("no_host"));
    drop(held);
    sleep(WHILE).await;
    assert_eq!((fleet[0].jobs(), job.is_finished()), (1, false));
    waiting(&envoy, 1).await;
    envoy.set_endpoints([one]).await;
    assert_eq!(job.await.unwrap().0.status, 200);
    all_workers_know().await;
    // Nobody comes back.
    let held = hold(&envoy, &fleet).await;
    let job = send(envoy.client().post("/prompt", "{}"));
    waiting(&envoy, 1).await;
    drain().await;
    drop(held);
    let (reply, took) = job.await.unwrap();
    assert_eq!(reply.header("x-plimsoll-verdict"), Some("queue_timeout"));
    assert!(took >= Duration::from_secs(8), "after {took:?}");
    assert_eq!(nothing_is_left(&envoy).await["queue"]["timed_out"], 1);
    assert_eq!(fleet[0].jobs(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_wait_for_a_host_that_asked_to_wait_if_it_is_back_within_their_timeout() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let keys = one_slot(json!({"queue": {"timeout_ms": 4000}, "explain": "header"}));
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    for status in [429, 503] {
        fleet[0].set(Fault::status(status).header("retry-after", "1").next(1));
        let began = Instant::now();
        assert_eq!(envoy.client().post("/prompt", "{}").await.status, status);
        envoy.until_state(0, "busy").await;
        let jobs: Vec<_> = (0..3).map(|_| send(envoy.client().post("/prompt", "{}"))).collect();
        for job in jobs {
            assert_eq!(job.await.unwrap().0.status, 200);
        }
        assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    }
    assert_eq!((fleet.max_in_flight(), fleet[0].jobs()), (vec![1], 8));
    assert_eq!(nothing_is_left(&envoy).await["queue"]["served"], 6);
    // Due back too late.
    fleet[0].set(Fault::status(429).header("retry-after", "30").next(1));
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 429);
    envoy.until_state(0, "busy").await;
    assert_eq!(verdict(&envoy).await.as_deref(), Some("no_host"));
    assert_eq!(envoy.pool_status().await["waiting"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ejected_host_wakes_nobody_and_its_trial_is_the_first_that_waits() {
    let fleet = Fleet::start(2, Gpu::new().slots(10)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let hosts = json!([{"address": one.to_string(), "max_in_flight": 2}, {"address": two.to_string(), "weight": 1000}]);
    let keys = json!({"hosts": hosts, "failure": {"base_ejection_ms": 3000}, "explain": "header"});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(keys)).start().await;
    let held = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await;
    fleet[1].until("the heavier has the job that holds it", |counts| counts.running == 1).await;
    fleet[0].set(Fault::status(500).next(3));
    for _ in 0..3 {
        assert_eq!(envoy.client().post("/prompt", "{}").await.status, 500);
    }
    envoy.until_state(0, "ejected").await;
    let ejected = Instant::now();
    let waits = numbered(Load::rate(8.0, 4)).header("x-sim-ms", "400").over(&envoy.pool_on_each_worker(1).await[0]).start(&envoy);
    waiting(&envoy, 4).await;
    fleet[0].until("its trial", |counts| counts.jobs == 4).await;
    // A bit less than three seconds lie behind: it was ejected before it was seen to be.
    assert!(ejected.elapsed() > Duration::from_secs(2), "it was given a job after {:?}", ejected.elapsed());
    assert_eq!(waiting(&envoy, 3).await["hosts"][0]["state"], "probing");
    waits.await.unwrap().assert_served();
    assert_eq!(numbers(&fleet[0])[0], 0);
    let seen = fleet[0].requests();
    assert!(seen[4].arrived >= seen[3].ended.unwrap().0, "another job came beside the trial");
    drop(held);
    nothing_is_left(&envoy).await;
}

/// Hosts whose slots are held, behind an Envoy whose configuration can be replaced, and fifty jobs that wait.
struct Fifty {
    fleet: Fleet,
    envoy: RunningEnvoy,
    held: Vec<Ongoing>,
    waits: JoinHandle<Report>,
}

impl Fifty {
    async fn start(hosts: usize, keys: Value) -> Self {
        let fleet = Fleet::start(hosts, Gpu::new().slots(10).work_ms(30)).await;
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(keys)).live().start().await;
        let held = hold(&envoy, &fleet).await;
        let both = Pool::of_all(&envoy.pool_on_each_worker(1).await).await;
        let waits = numbered(Load::burst(50)).over(&both).start(&envoy);
        waiting(&envoy, 50).await;
        Self { fleet, envoy, held, waits }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_wait_are_served_after_reloads() {
    let Fifty { fleet, envoy, held, waits, .. } = Fifty::start(2, json!({})).await;
    let mut later = Vec::new();
    for length in [60, 70, 80] {
        envoy.reload_pool(one_slot(json!({"queue": {"max_length": length}}))).await.unwrap();
        // Whoever comes now waits behind them, in the configuration of now.
        later.push(send(envoy.client().post("/prompt", "{}")));
        envoy.until_pool("the new one is live", |pool| pool["queue"]["max_length"] == length).await;
    }
    waiting(&envoy, 53).await;
    drop(held);
    waits.await.unwrap().assert_served();
    for job in later {
        assert_eq!(job.await.unwrap().0.status, 200);
    }
    let pool = nothing_is_left(&envoy).await;
    assert_eq!((&pool["queue"]["served"], &pool["queue"]["timed_out"]), (&json!(53), &json!(0)));
    assert!(fleet.iter().all(|host| numbers(host).len() > 10), "{:?}", fleet.jobs());
}

/// Fifty jobs wait for two hosts; then a configuration comes which says this of the first, or does not name it (null). They are the other's.
async fn all_fifty_are_the_others(first: Value) {
    let Fifty { fleet, envoy, held, waits, .. } = Fifty::start(2, json!({})).await;
    let mut hosts = vec![first, json!({"address": fleet.addresses()[1].to_string()})];
    hosts.retain(|host| !host.is_null());
    if let [first, _] = &mut hosts[..] {
        first["address"] = json!(fleet.addresses()[0].to_string());
    }
    envoy.reload(json!({"pools": {"gpu": one_slot(json!({"hosts": hosts}))}})).await.unwrap();
    // A job of the new configuration makes it the one that holds.
    let job = send(envoy.client().post("/prompt", "{}"));
    envoy.until_state(0, "draining").await;
    all_workers_know().await;
    waiting(&envoy, 51).await;
    drop(held);
    waits.await.unwrap().assert_served();
    assert_eq!(job.await.unwrap().0.status, 200);
    assert_eq!((numbers(&fleet[0]).len(), numbers(&fleet[1]).len()), (0, 50), "jobs for the one that left, and for the other");
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_a_new_configuration_drains_is_given_no_job_that_waited() {
    all_fifty_are_the_others(json!({"drain": true})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_a_new_configuration_does_not_name_is_given_no_job_that_waited() {
    all_fifty_are_the_others(Value::Null).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_that_a_new_configuration_brings_serve_those_that_waited_before_it_and_those_that_came_after() {
    let fleet = Fleet::start(2, Gpu::new().work_ms(30)).await;
    let [one, two] = [0, 1].map(|n| json!({"address": fleet[n].address().to_string()}));
    for named in [json!([two]), json!([{"address": one["address"], "drain": true}, two])] {
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(json!({"hosts": [one]}))).live().start().await;
        let held = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").start().await;
        fleet[0].until("it is held", |counts| counts.running == 1).await;
        let both = Pool::of_all(&envoy.pool_on_each_worker(1).await).await;
        let before = numbered(Load::burst(50)).over(&both).start(&envoy);
        waiting(&envoy, 50).await;
        envoy.reload(json!({"pools": {"gpu": one_slot(json!({"hosts": named}))}})).await.unwrap();
        let after = Load::burst(10).over(&both).run(&envoy).await;
        after.assert_served();
        before.await.unwrap().assert_served();
        assert_eq!((numbers(&fleet[0]).len(), numbers(&fleet[1]).len()), (0, 50), "jobs for the old host, and for the new one");
        drop(held);
        nothing_is_left(&envoy).await;
        fleet.idle().await;
        fleet.clear_books();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_wait_outlive_their_queue_and_none_hangs_beyond_its_timeout() {
    for served in [true, false] {
        let Fifty { fleet, envoy, held, waits, .. } = Fifty::start(1, json!({"queue": {"timeout_ms": 6000}})).await;
        let mut without = one_slot(json!({}));
        without.as_object_mut().unwrap().remove("queue");
        envoy.reload_pool(without).await.unwrap();
        eventually("new jobs do not wait", async || verdict(&envoy).await.as_deref() == Some("full")).await;
        if served {
            drop(held);
            waits.await.unwrap().assert_served();
            assert_eq!(numbers(&fleet[0]).len(), 50);
        } else {
            let report = waits.await.unwrap();
            assert_eq!(report.status(503), 50, "\n{report}");
            for one in &report.served {
                let waited = one.ended - one.sent;
                assert!((Duration::from_secs(6)..Duration::from_secs(9)).contains(&waited), "refused after {waited:?}");
            }
            drop(held);
            assert_eq!(numbers(&fleet[0]).len(), 0);
        }
        envoy.settled().await;
        let pool = envoy.pool_status().await;
        assert_eq!((&pool["drift"], &pool["waiting"]), (&json!(0), &json!(0)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trap_holds_up_only_the_jobs_that_waited_in_its_worker_and_the_books_are_right_after_it() {
    let fleet = Fleet::start(1, Gpu::new().work_ms(50)).await;
    let module = format!("{}/../dist/plimsoll-trap.wasm", env!("CARGO_MANIFEST_DIR"));
    let idle = json!({"stream_idle_timeout": "15s"});
    let envoy =
        Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(json!({}))).module(module).connection_manager(idle).start().await;
    let [trapped, other] = &envoy.pool_on_each_worker(1).await[..] else { panic!("two workers") };
    let client = Client::http2(&envoy);
    let held = client.post("/prompt", "{}").header("x-sim-ms", "600000").start_over(other).await;
    fleet[0].until("it is held", |counts| counts.running == 1).await;
    // Those that will hang are first in the queue.
    let lost = Load::burst(5).header("x-number", "1000").over(trapped).start(&envoy);
    waiting(&envoy, 5).await;
    let waits = numbered(Load::burst(20)).over(other).start(&envoy);
    waiting(&envoy, 25).await;
    let trap = client.post("/prompt", "{}").header("x-trap", "1").start_over(trapped).await;
    envoy.logged("unreachable").await;
    let died = Instant::now();
    drop(held);
    fleet[0].until("the next one runs", |counts| counts.jobs >= 2).await;
    println!("the other worker's first job came after {:?}", died.elapsed());
    waits.await.unwrap().assert_served();
    println!("all of the other worker's jobs were served after {:?}", died.elapsed());
    assert!(died.elapsed() < Duration::from_secs(5), "only after {:?}", died.elapsed());
    assert_eq!(numbers(&fleet[0]), (0..20).collect::<Vec<_>>());
    // Envoy ends those that hang.
    let report = lost.await.unwrap();
    assert_eq!(report.status(200), 0, "\n{report}");
    drop(trap);
    let pool = nothing_is_left(&envoy).await;
    assert_eq!(pool["dead_workers"], 1);
    // Its VM has been loaded anew, and queues.
    let held = hold(&envoy, &fleet).await;
    let waits = Load::burst(10).over(trapped).start(&envoy);
    waiting(&envoy, 10).await;
    drop(held);
    waits.await.unwrap().assert_served();
    nothing_is_left(&envoy).await;
}
