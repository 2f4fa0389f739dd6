//! Whoever asks can see which host served and why.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use support::{Client, Door, Envoy, Fault, Fleet, Gpu, Reply, RunningEnvoy};

use crate::ejection::Pinned;

/// Lines of this form on Envoy's standard output.
fn access_log(line: &str) -> Value {
    json!({"name": "stdout", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
        "log_format": {"text_format_source": {"inline_string": line}}}})
}

/// Two hosts, of which the first is so heavy that it is always the first choice. What the filter leaves in the filter state is in the log.
async fn start(explain: &str) -> (Fleet, RunningEnvoy) {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let hosts = json!([{"address": one.to_string(), "weight": 1000}, {"address": two.to_string()}]);
    let line = "state of %REQ(x-number)%: %FILTER_STATE(wasm.plimsoll.host:PLAIN)% [%FILTER_STATE(wasm.plimsoll.why:PLAIN)%]\n";
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .pool(json!({"hosts": hosts, "explain": explain}))
        .connection_manager(json!({"access_log": [access_log(line)]}))
        .start()
        .await;
    (fleet, envoy)
}

/// `key=value key=value`
fn why(text: &str) -> BTreeMap<&str, &str> {
    text.split(' ').map(|item| item.split_once('=').unwrap_or_else(|| panic!("{item:?} in {text:?} is not key=value"))).collect()
}

/// Our headers of a reply; each is there once or not at all.
fn ours(reply: &Reply) -> Option<(String, String)> {
    let values = |name: &str| -> Vec<String> {
        reply.headers.get_all(name).iter().map(|value| value.to_str().expect("text").to_owned()).collect()
    };
    match (&values("x-plimsoll-host")[..], &values("x-plimsoll-why")[..]) {
        ([], []) => None,
        ([host], [why]) => Some((host.clone(), why.clone())),
        other => panic!("{other:?}"),
    }
}

fn logged(number: u32, host: &str, why: &str) -> String {
    format!("state of {number}: {host} [{why}]")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_says_who_served_and_why_also_after_a_retry() {
    let (fleet, envoy) = start("header").await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    for client in [Client::http1(&envoy), Client::http2(&envoy)] {
        let reply = client.post("/prompt", "{}").header("x-number", "1").await;
        let (host, text) = ours(&reply).expect("both headers");
        let reasons = why(&text);
        assert_eq!((host, reasons["policy"], reasons["attempt"]), (one.to_string(), "least_score", "1"));
        assert!(reasons["runner_up"].contains(&two.to_string()), "{text}");
        for number in ["score", "jobs", "penalty", "waited_ms"] {
            assert!(reasons[number].parse::<f64>().is_ok(), "{number} in {text}");
        }
        assert!(reasons.contains_key("latency") && reasons.get("kind") != Some(&"trial"), "{text}");
        envoy.logged(&logged(1, &one.to_string(), &text)).await;
    }
    // The first refuses; the job is served by the second, and that is what the reply says.
    fleet[0].stop().await;
    let reply = envoy.client().post("/prompt", "{}").header("x-number", "2").await;
    let (host, text) = ours(&reply).expect("both headers");
    assert_eq!((reply.host(), host, why(&text)["attempt"]), (Some(two), two.to_string(), "2"), "{text}");
    envoy.logged(&logged(2, &two.to_string(), &text)).await;
    // The host's own words are not taken for ours.
    fleet[0].door(Door::Open).await;
    fleet.iter().for_each(|host| host.set(Fault::status(200).header("x-plimsoll-host", "me").header("x-plimsoll-why", "a=b")));
    let reply = envoy.client().post("/prompt", "{}").await;
    let (host, text) = ours(&reply).expect("both headers, once each");
    assert_eq!((Some(host), why(&text)["policy"]), (reply.host().map(|host| host.to_string()), "least_score"));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_log_says_it_where_that_is_asked_for_and_nobody_where_nothing_is() {
    for explain in ["log", "off"] {
        let (fleet, envoy) = start(explain).await;
        let spoofed = ("x-plimsoll-host", "10.9.9.9:1");
        let ask = envoy.client().post("/prompt", "{}").header(spoofed.0, spoofed.1).header("x-plimsoll-why", "policy=mine");
        let reply = ask.header("x-number", "3").await;
        assert_eq!(ours(&reply), None, "{explain}: {:?}", reply.headers);
        if explain == "off" {
            envoy.logged(&logged(3, "-", "-")).await;
        } else {
            envoy.logged(&format!("state of 3: {} [", fleet.addresses()[0])).await;
            assert!(envoy.log().contains("policy=least_score"));
        }
        assert!(!envoy.log().contains("policy=mine"));
        let reached = fleet[0].requests().remove(0);
        assert!(!reached.headers.contains_key("x-plimsoll-host") && !reached.headers.contains_key("x-plimsoll-why"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trial_is_called_one_and_a_reply_of_our_own_names_no_host() {
    let pinned = Pinned::start(json!({"explain": "header", "failure": {"base_ejection_ms": 3000}})).await;
    pinned.eject().await;
    // The other host is full: what the filter answers itself was served by nobody.
    let reply = pinned.envoy.client().post("/prompt", "{}").await;
    assert_eq!((reply.status, reply.header("x-plimsoll-host")), (503, None));
    pinned.envoy.until_state(0, "probing").await;
    let reply = pinned.envoy.client().post("/prompt", "{}").await;
    let (host, text) = ours(&reply).expect("both headers");
    assert_eq!((host, why(&text)["kind"]), (pinned.fleet[0].address().to_string(), "trial"), "{text}");
    pinned.settled().await;
    let reply = pinned.envoy.client().post("/prompt", "{}").await;
    let (_, text) = ours(&reply).expect("both headers");
    assert_ne!(why(&text).get("kind"), Some(&"trial"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_tells_of_a_job_whose_client_left_where_it_was() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let line = "state of %REQ(x-number)%: [%FILTER_STATE(wasm.plimsoll.why:PLAIN)%]\n";
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .pool(json!({"max_in_flight": 1, "queue": {}, "explain": "log"}))
        .connection_manager(json!({"access_log": [access_log(line)]}))
        .start()
        .await;
    let ask = |number: &str| envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").header("x-number", number);
    let runs = ask("1").start().await;
    envoy.until("it runs", |hosts| hosts[0]["in_flight"] == 1).await;
    let waits = ask("2").start().await;
    let waited = ask("3").start().await;
    crate::queue::waiting(&envoy, 2).await;
    waits.abort();
    envoy.logged("state of 2: [policy=least_score kind=job left=queue]").await;
    runs.abort();
    // The one that waited has its host now.
    envoy.logged("state of 1: [policy=least_score kind=job score=").await;
    envoy.until_pool("nobody waits, and one runs", |pool| pool["waiting"] == 0 && pool["hosts"][0]["in_flight"] == 1).await;
    waited.abort();
    envoy.logged("state of 3: [policy=least_score kind=job score=").await;
    envoy.settled().await;
    let left = format!(" left={}]", fleet.addresses()[0]);
    assert_eq!(envoy.log().matches(&left).count(), 2, "{}", envoy.log());
}
