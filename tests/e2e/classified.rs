//! The classifier and the balancer together: what a job is comes from its body, and nobody else has a say.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use support::load::Ask;
use support::{Client, Envoy, Fleet, Gpu, Load, RunningEnvoy};

use crate::least_time::{class, no_trap, why};

/// Headers by which a client would like to say what its job is.
const FORGED: [(&str, &str); 7] = [
    ("x-job-class", "forged"),
    ("x-job-cost", "1e9"),
    ("x-session", "forged"),
    ("x-plimsoll-class", "forged"),
    ("x-plimsoll-cost", "1e9"),
    ("x-plimsoll-session", "0123456789abcdef"),
    ("plimsoll.class", "forged"),
];

fn envoy(fleet: &Fleet, keys: Value, classify: Value) -> Envoy {
    let mut pool = json!({"policy": "least_time", "explain": "header", "max_in_flight": 100});
    pool.as_object_mut().expect("an object").extend(keys.as_object().expect("a pool is an object").clone());
    Envoy::new("classify.yaml").hosts(fleet).pool(pool).edit(|bootstrap| {
        let manager = &mut bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
        let filters = manager["http_filters"].as_array_mut().expect("filters");
        let ours = filters.iter_mut().find(|filter| filter["name"] == "plimsoll-classifier").expect("the classifier");
        ours["typed_config"]["config"]["configuration"]["value"] = json!({"classify": classify}).to_string().into();
    })
}

/// A job with this body, whose client claims all sorts of things.
fn ask(envoy: &RunningEnvoy, body: &Value, ms: u64) -> Ask {
    let ask = Client::http1(envoy).post("/prompt", body.to_string()).header("x-sim-ms", ms.to_string());
    FORGED.iter().fold(ask, |ask, (name, value)| ask.header(name, value))
}

#[tokio::test(flavor = "multi_thread")]
async fn two_classes_from_the_body_are_learned_and_a_clients_headers_play_no_part() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let keys = json!({"class": {"from": "classifier"}, "least_time": {"runs_at_once": 100}});
    let envoy = envoy(&fleet, keys, json!({"class": ["/size"]})).start().await;
    // No JSON, or none that says it: that is the class `default`.
    let bodies = [r#"{"size": "small"}"#, r#"{"size": "large"}"#, "size=small", r#"{"Size": "small"}"#];
    let load = Load::rate(30.0, 80).each(|n, shot| {
        shot.call.body = bodies[n % 4].into();
        shot.call.add_header("x-sim-ms", ["80", "320", "160", "160"][n % 4]);
        FORGED.iter().for_each(|(name, value)| shot.call.add_header(name, value));
    });
    load.pool(16).run(&envoy).await.assert_served();
    envoy.settled().await;
    let status = envoy.pool_status().await;
    let [small, large, default] = ["small", "large", "default"].map(|name| class(&status, name).expect("it is known"));
    assert_eq!((small.1, large.1, default.1), (20, 20, 40), "{status:#}");
    assert!((2.8..=5.0).contains(&(large.0 / small.0)), "{status:#}");
    let names: BTreeSet<&str> =
        status["classes"].as_array().expect("classes").iter().filter_map(|class| class["name"].as_str()).collect();
    assert_eq!(names, BTreeSet::from(["all", "default", "large", "small"]));
    let reply = ask(&envoy, &json!({"size": "large"}), 320).await;
    let work = why(&reply, "work_ms").expect("it is known");
    assert!((0.7..=1.3).contains(&(work / large.0)), "{work}, not {}", large.0);
    no_trap(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn costs_and_sessions_come_from_the_body_too() {
    let fleet = Fleet::start(4, Gpu::new().slots(100)).await;
    let keys = json!({
        "class": {"from": "classifier"},
        "cost": {"from": "classifier"},
        "session": {"from": "classifier"},
        "least_time": {"runs_at_once": 100},
    });
    let classify = json!({"class": ["/model"], "cost": ["/width", "/height"], "session": ["/user"]});
    let envoy = envoy(&fleet, keys, classify).start().await;
    let job = |user: usize, side: u32| json!({"model": "flux", "user": format!("user {user}"), "width": side, "height": side});
    let mut homes = vec![BTreeSet::new(); 16];
    for round in 0..4 {
        for (user, homes) in homes.iter_mut().enumerate() {
            let side = [512, 1024][(round + user) % 2];
            let reply = ask(&envoy, &job(user, side), u64::from(side * side) >> 14).await;
            assert_eq!(reply.status, 200);
            homes.insert(reply.host().expect("a host"));
        }
    }
    assert!(homes.iter().all(|hosts| hosts.len() == 1), "{homes:?}");
    let used: BTreeSet<_> = homes.iter().flatten().collect();
    assert!(used.len() >= 2, "one forged session for all is none: {homes:?}");
    let work = async |side: u32| why(&ask(&envoy, &job(0, side), 1).await, "work_ms").expect("it is known");
    let (small, large) = (work(256).await, work(2048).await);
    assert!((45.0..=85.0).contains(&(large / small)), "{small} {large}: the costs are 1 to 64");
    no_trap(&envoy).await;
}
