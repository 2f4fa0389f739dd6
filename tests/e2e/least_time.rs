//! `least_time` learns what jobs of a class cost and how fast hosts are, from nothing, and sends jobs where they are done first.

use std::time::Duration;

use serde_json::{Value, json};
use support::{Client, Envoy, Fault, Fleet, Gpu, Load, Pool, Reply, RunningEnvoy, eventually};

/// A pool that learns; with these keys, too.
pub fn learning(keys: Value) -> Value {
    let mut pool = json!({"policy": "least_time", "class": {"header": "x-job-class"}, "explain": "header"});
    pool.as_object_mut().expect("an object").extend(keys.as_object().expect("a pool is an object").clone());
    pool
}

/// An Envoy in front of these hosts, with such a pool.
pub fn envoy(fleet: &Fleet, keys: Value) -> Envoy {
    Envoy::new("http2.yaml").hosts(fleet).pool(learning(keys)).keys(json!({"trusted_headers": true}))
}

/// Hosts of one slot and these speeds.
pub async fn fleet(speeds: &[f64], gpu: Gpu) -> Fleet {
    Fleet::start_each(speeds.iter().map(|speed| gpu.clone().speed(*speed))).await
}

/// What is known of a class: the mean work in milliseconds on a host of speed 1, and its jobs.
pub fn class(pool: &Value, name: &str) -> Option<(f64, u64)> {
    let class = pool["classes"].as_array()?.iter().find(|class| class["name"] == name)?;
    Some((class["work_ms"].as_f64()?, class["jobs"].as_u64()?))
}

/// The learned speed of each host.
fn speeds(pool: &Value) -> Vec<Option<f64>> {
    pool["hosts"].as_array().expect("hosts").iter().map(|host| host["speed"].as_f64()).collect()
}

/// A number of `x-plimsoll-why`.
pub fn why(reply: &Reply, name: &str) -> Option<f64> {
    let line = reply.header("x-plimsoll-why").unwrap_or_else(|| panic!("no x-plimsoll-why in {:?}", reply.headers));
    line.split(' ').find_map(|item| item.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

/// Panics if a VM has trapped, or a count is wrong.
pub async fn no_trap(envoy: &RunningEnvoy) {
    envoy.settled().await;
    let log = envoy.log();
    assert!(!log.contains("panicked") && !log.contains("Proxy-Wasm plugin in-VM backtrace"), "a VM trapped");
    let status = envoy.pool_status().await;
    assert_eq!([&status["drift"], &status["dead_workers"]], [0, 0], "{status:#}");
}

/// Within a quarter of what it should be.
fn is_near(seen: f64, expected: f64) -> bool {
    (0.75..=1.25).contains(&(seen / expected))
}

/// Jobs of these classes in turn.
fn in_turn(load: Load, classes: &'static [&'static str]) -> Load {
    load.each(move |n, shot| shot.call.add_header("x-job-class", classes[n % classes.len()]))
}

#[tokio::test(flavor = "multi_thread")]
async fn from_cold_two_hundred_jobs_teach_the_work_of_two_classes_and_the_speed_of_four_hosts() {
    let fleet = fleet(&[1.0, 1.0, 0.5, 2.0], Gpu::new().class("draft", 60).class("film", 180)).await;
    let envoy = envoy(&fleet, json!({})).start().await;
    let pool = envoy.pool_over_workers(64).await;
    // By chance, so that no class is bound to a host: two drafts to a film, four fifths of what the fleet can do.
    in_turn(Load::poisson(36.0, 200, 7), &["draft", "film", "draft"]).over(&pool).run(&envoy).await.assert_served();
    envoy.settled().await;
    let status = envoy.pool_status().await;
    let speeds: Vec<f64> = speeds(&status).into_iter().map(|speed| speed.expect("it is known")).collect();
    let (draft, film) = (class(&status, "draft").expect("known"), class(&status, "film").expect("known"));
    assert!(is_near(film.0 / draft.0, 3.0), "{status:#}");
    assert_eq!(draft.1 + film.1, 200, "{status:#}");
    for (host, speed) in [1.0, 1.0, 0.5, 2.0].into_iter().enumerate() {
        let mean = 1.0;
        assert!(is_near(speeds[host] / speeds[0], speed / mean), "host {host}: {status:#}");
        // The two together are what a job takes.
        assert!(is_near(draft.0 / speeds[host], 60.0 / speed), "host {host}: {status:#}");
    }
    // All at once: each host gets as much as it is done with at the same time.
    fleet.clear_books();
    in_turn(Load::burst(45), &["draft"]).over(&pool).run(&envoy).await.assert_served();
    let jobs = fleet.jobs();
    for (host, expected) in [10, 10, 5, 20].into_iter().enumerate() {
        assert!(jobs[host].abs_diff(expected) <= 1 + expected / 5, "{jobs:?} of 45: {status:#}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_becomes_slow_loses_its_share_within_twenty_of_its_jobs_and_gets_it_back() {
    let fleet = fleet(&[1.0; 4], Gpu::new().class("draft", 30)).await;
    let envoy = envoy(&fleet, json!({})).start().await;
    let pool = envoy.pool_over_workers(32).await;
    let drafts = |load: Load| in_turn(load, &["draft"]).over(&pool);
    drafts(Load::rate(80.0, 120)).run(&envoy).await.assert_served();
    fleet.clear_books();
    drafts(Load::burst(26)).run(&envoy).await.assert_served();
    assert!(fleet.jobs().iter().all(|jobs| (4..=9).contains(jobs)), "{:?}", fleet.jobs());
    fleet[0].set_speed(0.2);
    fleet.clear_books();
    // A single slow job may be an outlier, and where few jobs come it is enough to get no other: so many come at once.
    let mut share = 8;
    while share > 4 {
        drafts(Load::burst(12)).run(&envoy).await.assert_served();
        let (meanwhile, status) = (fleet[0].jobs(), envoy.pool_status().await);
        assert!(meanwhile <= 20, "it is slow, and gets {share} of 32: {status:#}");
        drafts(Load::burst(32)).run(&envoy).await.assert_served();
        share = fleet[0].jobs() - meanwhile;
    }
    // It gets jobs all the same where many come at once, and shows with them that it is well again.
    fleet[0].set_speed(1.0);
    for round in 0.. {
        fleet.clear_books();
        drafts(Load::burst(32)).run(&envoy).await.assert_served();
        if fleet[0].jobs() >= 6 {
            break;
        }
        assert!(round < 20, "{:?}", fleet.jobs());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_history_jobs_are_spread_by_their_number_and_only_what_ended_well_teaches() {
    let fleet = Fleet::start(4, Gpu::new().slots(10).work_ms(20)).await;
    let envoy = envoy(&fleet, json!({"failure": {"consecutive": 1000}})).start().await;
    let pool = envoy.pool_over_workers(20).await;
    // Bad prompts, and clients that leave.
    fleet.iter().for_each(|host| host.set(Fault::status(400)));
    assert_eq!(Load::burst(20).over(&pool).run(&envoy).await.status(400), 20);
    fleet.iter().for_each(support::GpuHost::clear);
    let leaving = Load::burst(8).header("x-sim-ms", "5000");
    let report = leaving.each(|_, shot| shot.abort = Some(support::Abort::After(Duration::from_millis(50)))).run(&envoy).await;
    assert_eq!(report.aborted(), 8);
    fleet.idle().await;
    envoy.settled().await;
    let knows_nothing = async || {
        let status = envoy.pool_status().await;
        assert_eq!((speeds(&status), &status["classes"]), (vec![None; 4], &json!([])), "{status:#}");
    };
    knows_nothing().await;
    fleet.clear_books();
    Load::burst(20).over(&pool).header("x-sim-ms", "300").run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [5, 5, 5, 5]);
    drop((envoy, pool));

    // A host that fails at once, in a pool of its own kind: it is never taken for a fast one.
    let envoy = self::envoy(&fleet, json!({"failure": {"consecutive": 1000}})).start().await;
    let pool = envoy.pool_over_workers(20).await;
    fleet[0].set(Fault::status(500));
    fleet.clear_books();
    Load::rate(100.0, 100).over(&pool).run(&envoy).await;
    envoy.settled().await;
    let status = envoy.pool_status().await;
    let known: Vec<bool> = speeds(&status).iter().map(Option::is_some).collect();
    assert_eq!(known, [false, true, true, true], "{status:#}");
    assert!((1..=25).contains(&fleet[0].jobs()), "{:?}", fleet.jobs());
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_way_jobs_end_the_work_on_their_hosts_is_nothing_afterwards() {
    let fleet = fleet(&[1.0, 1.0, 0.5, 2.0], Gpu::new().slots(8).class("draft", 20).class("film", 300)).await;
    let patient = json!({"failure": {"consecutive": 1000}, "least_time": {"runs_at_once": 8}});
    let envoy = envoy(&fleet, patient.clone()).live().start().await;
    fleet[1].set(Fault::status(500).fraction(0.3));
    fleet[2].set(Fault::reset_in_body().fraction(0.3));
    fleet[3].set(Fault::reset().fraction(0.3));
    for (alternates, policy) in [(0, "least_time"), (2, "least_score"), (1, "least_time")] {
        in_turn(Load::rate(100.0, 50), &["draft", "film"]).run(&envoy).await;
        let mix = in_turn(Load::burst(50), &["draft", "film", "film", "unheard-of"]).each(|n, shot| match n % 5 {
            0 => shot.abort = Some(support::Abort::After(Duration::from_millis(30))),
            1 => shot.abort = Some(support::Abort::InBody),
            _ => {}
        });
        let running = mix.start(&envoy);
        envoy
            .until("there is work", |hosts| hosts.iter().any(|host| host["work_ms"].as_f64().is_some_and(|work| work > 100.0)))
            .await;
        // Also by a policy that knows nothing of work: what is in flight was counted by the one before.
        let mut keys = learning(patient.clone());
        (keys["alternates"], keys["policy"]) = (json!(alternates), json!(policy));
        envoy.reload_pool(keys).await.expect("taken up");
        running.await.expect("the load ran");
        fleet.idle().await;
        envoy.settled().await;
        let books = envoy.books().await;
        assert!(books.iter().all(|host| matches!(host["work_ms"].as_f64(), None | Some(0.0))), "{policy}: {books:#?}");
        envoy.reload_pool(learning(patient.clone())).await.expect("taken up");
    }
    no_trap(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_worker_learns_all_of_them_know() {
    let fleet = fleet(&[1.0, 4.0], Gpu::new().class("draft", 80)).await;
    let envoy = envoy(&fleet, json!({})).workers(4).start().await;
    let workers: Vec<Pool> = envoy.pool_on_each_worker(1).await;
    for _ in 0..6 {
        in_turn(Load::burst(8), &["draft"]).over(&workers[0]).run(&envoy).await.assert_served();
    }
    envoy.settled().await;
    let learned = class(&envoy.pool_status().await, "draft").expect("known").0;
    for worker in &workers[1..] {
        let ask = Client::http2(&envoy).post("/prompt", "{}").header("x-job-class", "draft");
        let reply = ask.start_over(worker).await.finish().await.expect("served");
        assert!(is_near(why(&reply, "work_ms").expect("it knows"), learned), "{:?}, not {learned}", reply.headers);
        assert_eq!(reply.host(), Some(fleet[1].address()));
        fleet.clear_books();
        in_turn(Load::burst(15), &["draft"]).over(worker).run(&envoy).await.assert_served();
        assert!((10..=14).contains(&fleet[1].jobs()), "{:?}", fleet.jobs());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_class_a_cost_and_a_session_of_which_a_client_could_be_the_author_are_refused() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    for key in ["class", "cost", "session"] {
        let keys = json!({"policy": "least_time", key: {"header": "x-said"}});
        let said = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).validate().await.expect_err(key);
        let line = format!("pools.gpu.{key}.header: a client could write it; say \"trusted_headers\": true");
        assert!(said.contains(&line), "{said}");
    }
    eventually("none of these was started", async || fleet[0].jobs() == 0).await;
}
