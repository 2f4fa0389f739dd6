//! Who is served before whom: priorities, which age, and tenants, which take turns.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Envoy, Fleet, Gpu, Load, Pool, RunningEnvoy};

use crate::queue::{arrivals, hold, nothing_is_left, numbered, one_slot, send, waiting};

/// One-slot hosts behind an Envoy that believes what headers say of jobs.
async fn trusting(hosts: usize, work_ms: u64, keys: Value) -> (Fleet, RunningEnvoy) {
    let fleet = Fleet::start(hosts, Gpu::new().work_ms(work_ms)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(keys)).keys(json!({"trusted_headers": true}));
    (fleet, envoy.start().await)
}

/// Stands for `jwt_authn`: makes claims (`{tier = "high"}`, in Lua) of the header that tests send.
fn claims() -> Value {
    let lua = "function envoy_on_request(handle)
        local claims = handle:headers():get('x-test-claims')
        if claims then
            handle:streamInfo():dynamicMetadata():set('envoy.filters.http.jwt_authn', 'jwt_payload', loadstring('return ' .. claims)())
        end
    end";
    json!({"name": "claims", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": lua}}})
}

/// One job for each of these values of a header (empty: without it), in their order, while the only host is held; gives the numbers of the
/// jobs as the host got them.
async fn order(envoy: &RunningEnvoy, fleet: &Fleet, over: &Pool, apart: Duration, header: &str, values: &[&str]) -> Vec<String> {
    let held = hold(envoy, fleet).await;
    let times = (0..values.len()).map(|n| apart * n as u32);
    let load = numbered(Load::at(times)).over(over).each(|n, shot| {
        if !values[n].is_empty() {
            shot.call.add_header(header, values[n]);
        }
    });
    let load = load.start(envoy);
    waiting(envoy, values.len()).await;
    fleet.clear_books();
    drop(held);
    load.await.unwrap().assert_served();
    arrivals(&fleet[0], "x-number")
}

#[tokio::test(flavor = "multi_thread")]
async fn high_comes_before_normal_before_low_and_within_each_who_came_first() {
    let (fleet, envoy) = trusting(1, 20, json!({"priority": {"header": "x-job-priority"}})).await;
    let workers = envoy.pool_on_each_worker(1).await;
    let values = ["low", "normal", "high", "urgent", "LOW", "High", "", "high"];
    let expected = ["2", "5", "7", "1", "3", "6", "0", "4"];
    for worker in &workers {
        assert_eq!(order(&envoy, &fleet, worker, Duration::ZERO, "x-job-priority", &values).await, expected);
    }
    let both = Pool::of_all(&workers).await;
    assert_eq!(order(&envoy, &fleet, &both, Duration::from_millis(250), "x-job-priority", &values).await, expected);
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_priority_is_the_default_and_the_page_counts_them_apart() {
    let priority = json!({"header": "x-job-priority", "default": "low"});
    let (fleet, envoy) = trusting(1, 20, json!({"priority": priority})).await;
    let worker = envoy.pool_on_each_worker(1).await.swap_remove(0);
    let values = ["", "normal", "urgent", "normal", "1", "low"];
    assert_eq!(order(&envoy, &fleet, &worker, Duration::ZERO, "x-job-priority", &values).await, ["1", "3", "0", "2", "4", "5"]);
    let _held = hold(&envoy, &fleet).await;
    let values = ["high", "normal", "normal", "low", "", "low"];
    let load = Load::burst(6).over(&worker).each(|n, shot| shot.call.add_header("x-job-priority", values[n]));
    let load = load.start(&envoy);
    let queue = waiting(&envoy, 6).await["queue"].take();
    assert_eq!((&queue["high"], &queue["normal"], &queue["low"]), (&json!(1), &json!(2), &json!(3)));
    load.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn where_a_claim_says_it_a_clients_header_counts_for_nothing() {
    let fleet = Fleet::start(1, Gpu::new().work_ms(20)).await;
    let keys = json!({"priority": {"jwt_claim": "tier", "metadata": "jwt_payload"}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(keys)).filter_before(claims()).start().await;
    let held = hold(&envoy, &fleet).await;
    let worker = envoy.pool_on_each_worker(1).await.swap_remove(0);
    // Claims, and what the client says of itself.
    let jobs = [
        ("{tier = 'low'}", "high"),
        ("", "high"),
        ("{sub = 'high'}", "high"),
        ("{tier = {'high'}}", "high"),
        ("{tier = 3}", "high"),
        ("{tier = 'HIGH'}", "low"),
        ("{tier = 'normal'}", "low"),
    ];
    let load = numbered(Load::burst(jobs.len())).over(&worker).each(|n, shot| {
        let (claims, header) = jobs[n];
        if !claims.is_empty() {
            shot.call.add_header("x-test-claims", claims);
        }
        for name in ["x-job-priority", "tier", "x-plimsoll-priority", "priority"] {
            shot.call.add_header(name, header);
        }
    });
    let load = load.start(&envoy);
    waiting(&envoy, jobs.len()).await;
    drop(held);
    load.await.unwrap().assert_served();
    assert_eq!(arrivals(&fleet[0], "x-number"), ["5", "1", "2", "3", "4", "6", "0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_low_job_is_served_within_its_bound_under_a_steady_stream_of_high_ones() {
    let keys = json!({"priority": {"header": "x-job-priority"}, "queue": {"ageing_ms": 500}, "explain": "header"});
    let (fleet, envoy) = trusting(1, 100, keys).await;
    let clients = envoy.pool_over_workers(5).await;
    // Five clients of whom four wait at any time, for seven seconds.
    let high = Load::burst(70).header("x-job-priority", "high").over(&clients).start(&envoy);
    fleet[0].until("it runs", |counts| counts.jobs > 3).await;
    let reply = envoy.client().post("/prompt", "{}").header("x-job-priority", "low").await;
    let why = reply.header("x-plimsoll-why").unwrap();
    let waited = why.split(' ').find_map(|item| item.strip_prefix("waited_ms=")).unwrap();
    // `ageing_ms`, and of the next four slots, a tenth of a second each, one. The rest is for a busy machine.
    let waited: u64 = waited.parse().unwrap();
    assert!((500..=3000).contains(&waited), "waited for {waited} ms");
    assert!(!high.is_finished(), "the stream of high jobs had ended");
    high.await.unwrap().assert_served();
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_all_have_waited_for_long_the_highest_keeps_half_of_the_slots_and_each_other_gets_every_fourth() {
    let keys = json!({"priority": {"header": "x-job-priority"}, "queue": {"ageing_ms": 300}});
    let (fleet, envoy) = trusting(1, 15, keys).await;
    let both = Pool::of_all(&envoy.pool_on_each_worker(2).await).await;
    let held = hold(&envoy, &fleet).await;
    let load =
        Load::burst(180).over(&both).each(|n, shot| shot.call.add_header("x-job-priority", ["high", "normal", "low"][n / 60]));
    let load = load.start(&envoy);
    waiting(&envoy, 180).await;
    envoy.until_pool("all have", |pool| pool["queue"]["longest_wait_ms"].as_u64() > Some(1500)).await;
    drop(held);
    load.await.unwrap().assert_served();
    let order = arrivals(&fleet[0], "x-job-priority");
    let counts = ["high", "normal", "low"].map(|priority| order[..100].iter().filter(|one| *one == priority).count());
    // As long as each has some left; the round may begin and end in the middle.
    let [high, normal, low] = counts;
    assert!((49..=52).contains(&high) && (24..=26).contains(&normal) && (24..=26).contains(&low), "{counts:?}: {order:?}");
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_jobs_of_one_tenant_delay_anothers_by_one_job_on_each_host_at_most() {
    let (fleet, envoy) = trusting(4, 5, json!({"tenant": {"header": "x-tenant"}})).await;
    let workers = envoy.pool_on_each_worker(3).await;
    let held = hold(&envoy, &fleet).await;
    // The first of them are long, so that it is seen in which order hosts were given jobs.
    let many = Load::burst(500).header("x-tenant", "a").over(&Pool::of_all(&workers).await).each(|n, shot| {
        if n < 24 {
            shot.call.add_header("x-sim-ms", "500");
        }
    });
    let many = many.start(&envoy);
    waiting(&envoy, 500).await;
    let one = Load::burst(1).header("x-tenant", "b").over(&workers[1]).start(&envoy);
    waiting(&envoy, 501).await;
    let released = Instant::now();
    drop(held);
    one.await.unwrap().assert_served();
    many.await.unwrap().assert_served();
    let mut seen: Vec<_> = fleet.iter().flat_map(|host| host.requests()).filter(|seen| seen.arrived > released).collect();
    seen.sort_by_key(|seen| seen.arrived);
    let before = seen.iter().position(|seen| seen.headers["x-tenant"] == "b").unwrap();
    assert!(before <= fleet.len(), "{before} jobs of the other tenant went before it");
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_take_turns_a_job_each_however_many_they_send_and_over_which_worker() {
    let (fleet, envoy) = trusting(1, 15, json!({"tenant": {"header": "x-tenant"}})).await;
    let workers = envoy.pool_on_each_worker(2).await;
    let both = Pool::of_all(&workers).await;
    let held = hold(&envoy, &fleet).await;
    let mut loads = Vec::new();
    let mut all = 0;
    for (tenant, jobs, over) in [("a", 90, &both), ("b", 30, &workers[0]), ("c", 30, &workers[1]), ("", 30, &both)] {
        let load = Load::burst(jobs).over(over).each(|_, shot| {
            if !tenant.is_empty() {
                shot.call.add_header("x-tenant", tenant);
            }
            shot.call.add_header("x-who", if tenant.is_empty() { "nobody" } else { tenant });
        });
        loads.push(load.start(&envoy));
        all += jobs;
        waiting(&envoy, all).await;
    }
    drop(held);
    for load in loads {
        load.await.unwrap().assert_served();
    }
    let order = arrivals(&fleet[0], "x-who");
    // As long as each has some left.
    let mut counts = [0; 4];
    for (n, who) in order[..100].iter().enumerate() {
        counts[["a", "b", "c", "nobody"].iter().position(|one| one == who).unwrap()] += 1;
        let (most, least) = (counts.iter().max().unwrap(), counts.iter().min().unwrap());
        assert!(most - least <= 1, "after {} jobs: {counts:?}; the order: {}", n + 1, order.concat());
    }
    nothing_is_left(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_tells_tenants_apart_and_a_header_does_not() {
    let fleet = Fleet::start(1, Gpu::new().work_ms(20)).await;
    let keys = json!({"tenant": {"jwt_claim": "sub", "metadata": "jwt_payload"}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(one_slot(keys)).filter_before(claims()).start().await;
    let worker = envoy.pool_on_each_worker(1).await.swap_remove(0);
    let held = hold(&envoy, &fleet).await;
    let load = numbered(Load::burst(8)).over(&worker).each(|n, shot| {
        shot.call.add_header("x-test-claims", if n < 6 { "{sub = 'a'}" } else { "{sub = 'b'}" });
        shot.call.add_header("x-tenant", n.to_string());
    });
    let load = load.start(&envoy);
    waiting(&envoy, 8).await;
    drop(held);
    load.await.unwrap().assert_served();
    assert_eq!(arrivals(&fleet[0], "x-number"), ["0", "6", "1", "7", "2", "3", "4", "5"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_tenant_names_leave_nothing_behind() {
    let fleet = Fleet::start(8, Gpu::new()).await;
    let keys = one_slot(json!({"tenant": {"header": "x-tenant"}}));
    let envoy = Envoy::new("http1.yaml").hosts(&fleet).pool(keys).keys(json!({"trusted_headers": true})).start().await;
    let (mut warm, mut page) = (0, 0);
    for wave in 0..5 {
        let held = hold(&envoy, &fleet).await;
        // Long ones, so that whoever kept them would be seen to.
        let name = |n: usize| format!("{wave}-{n}-{}", "x".repeat(4000));
        let load = Load::burst(1000).each(|n, shot| shot.call.add_header("x-tenant", name(n))).start(&envoy);
        waiting(&envoy, 1000).await;
        drop(held);
        load.await.unwrap().assert_served();
        envoy.settled().await;
        if wave == 1 {
            (warm, page) = (envoy.rss(), envoy.status().await.to_string().len());
        }
    }
    let (grown, longer) = (envoy.rss().saturating_sub(warm), envoy.status().await.to_string().len().saturating_sub(page));
    println!("Envoy grew by {grown} bytes with 3,000 names, from {warm}; the status page by {longer}");
    assert!(grown < 6 << 20, "Envoy grew by {grown} bytes with 3,000 names, from {warm}");
    assert!(longer < 100, "the status page grew by {longer} bytes");
    nothing_is_left(&envoy).await;
    // And whoever comes now waits for nobody.
    let sent = send(envoy.client().post("/prompt", "{}").header("x-tenant", "another"));
    assert_eq!(sent.await.unwrap().0.status, 200);
}
