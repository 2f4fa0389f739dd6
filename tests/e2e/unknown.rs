//! Without discovery: addresses that Envoy's cluster does not have, and clusters that do not read our header.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Envoy, Fleet, Gpu, Load, RunningEnvoy, eventually};

use crate::discovery::entry;

/// An Envoy that knows the first two of three hosts, and a pool of all three.
async fn start(fleet: &Fleet, mut keys: Value) -> RunningEnvoy {
    keys["hosts"] = fleet.addresses().iter().map(|address| json!({"address": address.to_string()})).collect();
    Envoy::new("http2.yaml").endpoints(fleet.addresses()[..2].to_vec()).pool(keys).start().await
}

async fn overruled(envoy: &RunningEnvoy) -> u64 {
    envoy.settled().await;
    envoy.pool_status().await["overruled"].as_u64().expect("a count")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_envoy_lacks_is_named_no_more_until_its_time_and_serves_once_envoy_has_it() {
    for alternates in [2, 0] {
        let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
        let failure = json!({"base_ejection_ms": 4000, "max_ejection_ms": 4000});
        let envoy = start(&fleet, json!({"alternates": alternates, "failure": failure})).await;
        let stray = fleet.addresses()[2];
        let of = |books: &[Value]| entry(books, stray).clone();
        let jobs = async |number: usize| {
            Load::burst(number).header("x-sim-ms", "50").run(&envoy).await.assert_served();
            envoy.settled().await;
        };
        jobs(12).await;
        let found = Instant::now();
        let books = envoy.until("it is left alone", |books| of(books)["state"] == "ejected").await;
        assert_eq!((&of(&books)["reason"], &of(&books)["failures"]), (&json!("unknown"), &json!(0)), "{alternates} alternates");
        assert!((1..=4400).contains(&of(&books)["ejected_for_ms"].as_u64().expect("a time")), "{}", of(&books));
        assert!(fleet.addresses()[..2].iter().all(|host| entry(&books, *host)["state"] == "serving"), "{books:?}");
        let misses = overruled(&envoy).await;
        assert!(misses >= 1);
        while found.elapsed() < Duration::from_millis(2500) {
            jobs(12).await;
        }
        assert_eq!(overruled(&envoy).await, misses, "{alternates} alternates: it was named in its time");
        // One at a time tries again.
        envoy.until("its time is over", |books| of(books)["state"] == "probing").await;
        eventually("a trial finds it missing", async || {
            jobs(4).await;
            of(&envoy.books().await)["state"] == "ejected"
        })
        .await;
        assert!((misses + 1..=misses + 2).contains(&overruled(&envoy).await), "{alternates} alternates: trials are few");
        // Envoy gets it.
        envoy.set_endpoints(fleet.addresses()).await;
        assert_eq!(fleet[2].jobs(), 0);
        eventually("it is tried again and serves", async || {
            jobs(4).await;
            of(&envoy.books().await)["state"] == "serving"
        })
        .await;
        let missed = overruled(&envoy).await;
        fleet.clear_books();
        jobs(30).await;
        assert!(fleet.jobs()[2] >= 5, "{:?}", fleet.jobs());
        assert_eq!(overruled(&envoy).await, missed);
        let pool = envoy.pool_status().await;
        assert_eq!((&pool["drift"], &pool["elsewhere"]), (&json!(0), &json!(0)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn most_of_a_pool_may_be_missing_and_every_job_is_served() {
    let fleet = Fleet::start(6, Gpu::new().slots(100)).await;
    let hosts: Vec<Value> = fleet.addresses().iter().map(|address| json!({"address": address.to_string()})).collect();
    let envoy = Envoy::new("http2.yaml").endpoints([fleet.addresses()[5]]).pool(json!({"hosts": hosts})).start().await;
    for _ in 0..20 {
        Load::burst(10).run(&envoy).await.assert_served();
    }
    envoy.settled().await;
    let books = envoy.books().await;
    let states: Vec<&str> = books.iter().map(|host| host["state"].as_str().expect("a state")).collect();
    assert_eq!(states, ["ejected", "ejected", "ejected", "ejected", "ejected", "serving"]);
    assert_eq!((fleet.jobs(), &books[5]["requests"]), (vec![0, 0, 0, 0, 0, 200], &json!(200)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_which_envoy_has_none_is_served_and_never_refused() {
    for alternates in [2, 0] {
        let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
        let addresses = fleet.addresses();
        let hosts: Vec<Value> = addresses[1..].iter().map(|address| json!({"address": address.to_string()})).collect();
        let keys = json!({"hosts": hosts, "alternates": alternates});
        let envoy = Envoy::new("http2.yaml").endpoints([addresses[0]]).pool(keys).start().await;
        for _ in 0..20 {
            Load::burst(10).run(&envoy).await.assert_served();
        }
        envoy.settled().await;
        let pool = envoy.pool_status().await;
        assert_eq!((fleet.jobs(), &pool["elsewhere"], &pool["drift"]), (vec![200, 0, 0], &json!(200), &json!(0)));
        let states: Vec<&Value> = pool["hosts"].as_array().expect("hosts").iter().map(|host| &host["state"]).collect();
        assert!(states.contains(&&json!("serving")), "{alternates} alternates: {states:?}");
    }
}

/// Lets the cluster's policy read another header than ours.
fn deaf(bootstrap: &mut Value) {
    let clusters = bootstrap["static_resources"]["clusters"].as_array_mut().expect("clusters");
    let cluster = clusters.iter_mut().find(|cluster| cluster["name"] == "gpu").expect("our cluster");
    let policy = &mut cluster["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"];
    policy["override_host_sources"] = json!([{"header": "x-some-other-header"}]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_does_not_read_our_header_refuses_no_job_for_hosts_that_were_not_asked() {
    for (hosts, alternates) in [(2, 0), (4, 2), (4, 0)] {
        let fleet = Fleet::start(hosts, Gpu::new().slots(100)).await;
        let keys = json!({"max_in_flight": 1, "alternates": alternates});
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).edit(deaf).start().await;
        // As many jobs as slots, each when the one before has been seen to be elsewhere.
        let times = (0..hosts as u64).map(|n| Duration::from_millis(400 * n));
        Load::at(times).header("x-sim-ms", "2500").http2(4).run(&envoy).await.assert_served();
        envoy.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_host_sends_no_jobs_past_the_slots_of_the_others_once_it_is_known_to_be_missing() {
    for alternates in [2, 0] {
        let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
        let envoy = start(&fleet, json!({"alternates": alternates, "max_in_flight": 2})).await;
        let stray = fleet.addresses()[2].to_string();
        // The first miss, and the trial that it has before a job is refused.
        let full = async || {
            let report = Load::burst(12).header("x-sim-ms", "600").http2(4).run(&envoy).await;
            envoy.settled().await;
            report.status(200)
        };
        let mut taken = full().await;
        while envoy.books().await.iter().any(|host| host["address"] == *stray && host["ejections"].as_u64() < Some(2)) {
            taken = full().await;
        }
        assert!(taken >= 4, "{taken}");
        for _ in 0..4 {
            fleet.clear_books();
            assert_eq!(full().await, 4, "{alternates} alternates");
            assert_eq!(fleet.iter().map(|host| host.counts().max_in_flight).collect::<Vec<_>>(), [2, 2, 0]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_a_later_filter_sends_to_another_cluster_cost_the_others_no_host() {
    let fleet = Fleet::start(4, Gpu::new().slots(100)).await;
    let script = "function envoy_on_request(h)\n if h:headers():get('x-model') == 'big' then\n h:headers():add('x-other', '1')\n \
                  h:clearRouteCache()\n end\nend\n";
    let lua = json!({
        "name": "lua",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": script},
        },
    });
    // The other cluster has only the last of the hosts.
    let is_for = json!({"prefix": "/", "headers": [{"name": "x-other", "present_match": true}]});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"max_in_flight": 4})).filter_after(lua);
    let envoy = envoy.second_cluster("other", &fleet.addresses()[3..], is_for).start().await;
    let until = Instant::now() + Duration::from_secs(15);
    while Instant::now() < until {
        let reply = envoy.client().post("/prompt", "{}").header("x-model", "big").header("x-sim-ms", "50").await;
        assert_eq!(reply.status, 200);
        // What two of the four have slots for.
        Load::burst(8).header("x-sim-ms", "200").http2(2).run(&envoy).await.assert_served();
        let books = envoy.books().await;
        let serving = books.iter().filter(|host| host["state"] == "serving").count();
        assert!(serving >= 2, "{books:#?}");
    }
    envoy.settled().await;
    assert_eq!(envoy.pool_status().await["drift"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_does_not_read_our_header_is_served_all_the_same_and_nobody_stays_ejected() {
    for alternates in [2, 0] {
        let fleet = Fleet::start(4, Gpu::new().slots(100).work_ms(20)).await;
        let keys = json!({"alternates": alternates, "failure": {"base_ejection_ms": 1000, "max_ejection_ms": 1000}});
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).edit(deaf).start().await;
        let clients = envoy.pool_over_workers(16).await;
        let load = Load::rate(100.0, 100).over(&clients).repeat(&envoy);
        eventually("it is noticed", async || envoy.pool_status().await["overruled"].as_u64() > Some(20)).await;
        let all = |books: &[Value]| books.iter().all(|host| host["state"] == "serving");
        envoy.until("all serve", all).await;
        // Once it is clear that nobody is missing, nobody is held to be.
        let until = Instant::now() + Duration::from_secs(4);
        while Instant::now() < until {
            let books = envoy.books().await;
            assert!(all(&books), "{alternates} alternates: {books:#?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let report = load.end().await;
        report.assert_served();
        envoy.settled().await;
        assert_eq!(fleet.jobs().iter().sum::<u64>(), report.served.len() as u64);
        assert_eq!(envoy.pool_status().await["drift"], 0);
    }
}
