//! Hosts that die, hang, fail at once or are blamed for nothing, under load.

use std::time::Duration;

use serde_json::{Value, json};
use support::{Door, Envoy, Failure, Fault, Fleet, Gpu, Load, Outcome, RunningEnvoy, eventually};

/// What the filter says of a host.
fn number(host: &Value, name: &str) -> u64 {
    host[name].as_u64().unwrap_or_else(|| panic!("no {name} in {host}"))
}

async fn nobody_is_blamed(envoy: &RunningEnvoy) {
    for host in envoy.books().await {
        for name in ["failures", "consecutive_failures", "ejections", "busy_for_ms"] {
            assert_eq!(host[name], 0, "{host}");
        }
        assert_eq!(host["state"], "serving");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_host_costs_no_request_gets_no_job_while_it_is_ejected_and_comes_back() {
    for file in ["http2.yaml", "http1.yaml"] {
        let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(20)).await;
        let route = json!({"retry_policy": {"retry_on": "connect-failure,refused-stream,reset,5xx", "num_retries": 2}});
        let keys = json!({"failure": {"base_ejection_ms": 2000}});
        let envoy = Envoy::new(file).hosts(&fleet).pool(keys).route(route).start().await;
        let clients = envoy.pool_over_workers(32).await;
        let load = Load::poisson(200.0, 100, 7).over(&clients).repeat(&envoy);
        eventually("all serve", async || fleet.jobs().iter().all(|jobs| *jobs > 10)).await;
        fleet[2].stop().await;
        envoy.until_state(2, "ejected").await;
        // A second after the third failure even what was under way is over; from then on nothing is sent there.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut placed = None;
        loop {
            let host = envoy.books().await.swap_remove(2);
            // A trial that fails at once, and the next ejection with it, may lie between two looks.
            if host["state"] != "ejected" || number(&host, "ejections") != 1 {
                break;
            }
            let requests = number(&host, "requests");
            assert_eq!(*placed.get_or_insert(requests), requests, "an ejected host got a job");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(placed.is_some(), "the ejection ended within a second");
        // The trial fails, at nobody's cost. Then the host returns.
        envoy.until("it is ejected again", |books| number(&books[2], "ejections") == 2).await;
        let before = fleet[2].jobs();
        fleet[2].restart().await;
        envoy.until_state(2, "serving").await;
        eventually("it gets its share again", async || fleet[2].jobs() > before + 10).await;
        load.end().await.assert_served();
        envoy.settled().await;
        let failures: Vec<u64> = envoy.books().await.iter().map(|host| number(host, "failures")).collect();
        assert!(failures[2] >= 4 && [0, 1, 3].iter().all(|n| failures[*n] == 0), "{file}: only the guilty: {failures:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_host_costs_no_request_where_attempts_have_a_timeout() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(100)).await;
    let retry = json!({"retry_on": "connect-failure,refused-stream,reset", "per_try_timeout": "1s", "num_retries": 2});
    let keys = json!({"failure": {"base_ejection_ms": 2000}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).route(json!({"retry_policy": retry})).start().await;
    let load = Load::poisson(150.0, 75, 3).http2(8).repeat(&envoy);
    eventually("all serve", async || fleet.jobs().iter().all(|jobs| *jobs > 10)).await;
    fleet[1].freeze();
    envoy.until_state(1, "ejected").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    fleet[1].thaw();
    envoy.until_state(1, "serving").await;
    load.end().await.assert_served();
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_that_never_answer_draw_what_their_count_allows_and_are_ejected_by_their_timeouts() {
    let fleet = Fleet::start(6, Gpu::new().slots(100)).await;
    let keys = json!({"failure": {"base_ejection_ms": 60_000}});
    let route = json!({"timeout": "4s", "retry_policy": null});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).route(route).start().await;
    // Connections that are established and never served, a process that stands still, and a server that reads and does not answer.
    fleet[0].door(Door::Ignoring).await;
    fleet[1].freeze();
    fleet[2].set(Fault::hang());
    let first = Load::burst(36).header("x-sim-ms", "300").start(&envoy);
    envoy
        .until("only the silent ones have jobs left", |books| {
            (0..6).all(|n| number(&books[n], "requests") == 6 && number(&books[n], "in_flight") == if n < 3 { 6 } else { 0 })
        })
        .await;
    // As long as they hold their six, others have less, and get everything.
    Load::rate(100.0, 100).run(&envoy).await.assert_served();
    let report = first.await.expect("the load ran");
    assert_eq!((report.status(200), report.status(504)), (18, 18), "those in flight are lost\n{report}");
    let books = envoy.until("they are ejected", |books| (0..3).all(|n| books[n]["state"] == "ejected")).await;
    assert!((0..3).all(|n| number(&books[n], "requests") == 6), "{books:#?}");
    // And none after.
    Load::burst(60).run(&envoy).await.assert_served();
    assert!(envoy.books().await[3..].iter().all(|host| number(host, "failures") == 0));
}

/// The part of 2,000 jobs that goes to one of four hosts, which has this fault; and how often it was ejected.
async fn share(load: Load, clients: usize, fault: Fault) -> (f64, u64) {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(5)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    let clients = envoy.pool_over_workers(clients).await;
    fleet[0].set(fault);
    let report = load.over(&clients).run(&envoy).await;
    assert_eq!(report.status(200) + report.status(500), 2000, "\n{report}");
    let share = fleet[0].jobs() as f64 / 2000.0;
    println!("{share} of the jobs");
    (share, number(&envoy.books().await[0], "ejections"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_fails_half_of_its_jobs_at_once_draws_few() {
    for clients in [4, 48] {
        let (share, _) = share(Load::burst(2000), clients, Fault::status(500).fraction(0.5)).await;
        assert!(share <= 0.12, "{clients} clients: {share} of the jobs");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_fails_every_third_job_draws_less_than_its_share_without_being_ejected() {
    // A failure takes as long as a job, and jobs come evenly: failures that overtake the jobs between them would be three in a row.
    let fault = Fault::status(500).fraction(1.0 / 3.0).after(Duration::from_millis(40));
    let (share, ejections) = share(Load::rate(800.0, 2000).header("x-sim-ms", "40"), 64, fault).await;
    assert_eq!(ejections, 0);
    // Some, or it would show nothing that it is not ejected.
    assert!((0.01..=0.18).contains(&share), "{share} of the jobs");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_prompts_of_half_of_the_clients_blame_nobody() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(5)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    for (n, status) in [400, 404, 413, 422].into_iter().enumerate() {
        fleet[n].set(Fault::status(status).fraction(0.5));
    }
    let report = Load::burst(1000).pool(32).run(&envoy).await;
    assert_eq!(report.status(200) + [400, 404, 413, 422].map(|status| report.status(status)).iter().sum::<usize>(), 1000);
    assert!(report.status(200) < 800, "\n{report}");
    envoy.settled().await;
    nobody_is_blamed(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_readers_and_other_filters_blame_nobody() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    // Answers what x-answer says, and asks to wait, behind ours.
    let lua = "function envoy_on_request(handle)
        local status = handle:headers():get('x-answer')
        if status then handle:respond({[':status'] = status, ['retry-after'] = '30'}, 'no') end
    end";
    let other = json!({"name": "other", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": lua}}});
    let route = json!({"timeout": "1s"});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).route(route).filter_after(other).start().await;
    for status in ["429", "503", "500"] {
        for _ in 0..8 {
            let reply = envoy.client().post("/prompt", "{}").header("x-answer", status).await;
            assert_eq!((reply.status.to_string().as_str(), reply.host()), (status, None));
        }
    }
    envoy.settled().await;
    nobody_is_blamed(&envoy).await;
    // More than the sockets hold, read so slowly that the route's timeout ends the response.
    let slow = Load::burst(8).header("x-sim-bytes", "16000000").each(|_, shot| shot.read_pause = Duration::from_millis(300));
    let report = slow.run(&envoy).await;
    assert_eq!(report.outcomes().get(&Outcome::Failed(Failure::Cut)), Some(&8), "\n{report}");
    envoy.settled().await;
    nobody_is_blamed(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_pool_serves_again_by_itself_when_one_host_returns() {
    let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(5)).await;
    let keys = json!({"alternates": 3, "failure": {"base_ejection_ms": 500, "max_ejection_ms": 1000}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    Load::burst(8).run(&envoy).await.assert_served();
    for host in fleet.iter() {
        host.stop().await;
    }
    let load = Load::rate(50.0, 25).repeat(&envoy);
    envoy.until("half of them are ejected", |books| books.iter().filter(|host| host["ejections"] != 0).count() >= 2).await;
    fleet[3].restart().await;
    let before = fleet[3].jobs();
    eventually("it gets jobs", async || fleet[3].jobs() > before + 10).await;
    envoy.until_state(3, "serving").await;
    load.end().await;
    // The others are tried now and then, and cost nobody his job.
    Load::rate(50.0, 100).run(&envoy).await.assert_served();
    assert!(fleet[3].jobs() > before + 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_on_a_pool_that_is_known_to_be_dead_is_answered_at_once() {
    let fleet = Fleet::start(3, Gpu::new().slots(100).work_ms(5)).await;
    let probe = json!({"path": "/health", "interval_ms": 200, "unhealthy_after": 2});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"probe": probe})).start().await;
    for host in fleet.iter() {
        host.stop().await;
    }
    envoy.until("all are known to be dead", |books| books.iter().all(|host| host["state"] == "unhealthy")).await;
    let attempts = envoy.stat("cluster.gpu.upstream_cx_connect_fail").await;
    let report = Load::burst(1000).pool(64).run(&envoy).await;
    assert_eq!(report.status(503), 1000, "\n{report}");
    let reply = envoy.client().post("/prompt", "{}").await;
    assert_eq!((reply.status, reply.header("x-plimsoll-verdict")), (503, Some("no_host")));
    assert!(reply.header("retry-after").is_some());
    let attempts = envoy.stat("cluster.gpu.upstream_cx_connect_fail").await - attempts;
    assert!(attempts < 200, "{attempts} connections were tried: a flood should try none, only probes do");
    fleet[1].restart().await;
    envoy.until_state(1, "serving").await;
    Load::burst(50).run(&envoy).await.assert_served();
    assert!(fleet[1].jobs() >= 50);
}
