//! Every Envoy file of the repository is valid, and every configuration that must be refused is refused by a real Envoy.

use plimsoll::config::Role;
use serde_json::json;
use support::Envoy;
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread")]
async fn every_envoy_file_is_valid() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../envoy");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let name = entry.expect("a file").file_name().into_string().expect("a plain name");
        if !name.ends_with(".yaml") || name == "compose.yaml" {
            continue;
        }
        assert_eq!(Envoy::new(&name).validate().await, Ok(()), "{name}");
        files += 1;
    }
    assert!(files >= 2);
}

#[test]
fn every_envoy_file_notices_a_host_that_is_gone_without_a_word() {
    // TCP_USER_TIMEOUT, in milliseconds.
    let user_timeout = json!([{"level": 6, "name": 18, "int_value": 30000, "state": "STATE_PREBIND"}]);
    // The dynamic one may be told to speak HTTP/1.1.
    let files =
        [("http1.yaml", false, true), ("http2.yaml", true, false), ("dynamic.yaml", true, true), ("classify.yaml", false, true)];
    for (file, has_ping, has_timeout) in files {
        let _ = Envoy::new(file).edit(|bootstrap| {
            let clusters = bootstrap["static_resources"]["clusters"].as_array().expect("clusters");
            let gpu = clusters.iter().find(|cluster| cluster["name"] == "gpu").expect("a cluster gpu");
            let options = &gpu["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
            let ping = &options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"];
            assert_eq!(ping.is_object(), has_ping, "{file}");
            assert_eq!(gpu["upstream_bind_config"]["socket_options"] == user_timeout, has_timeout, "{file}");
        });
    }
}

/// The cases of `refused.txt`: configuration, and the faults expected. The file says how it is written.
fn refused() -> Vec<(String, Vec<&'static str>)> {
    let mut cases: Vec<(String, Vec<&str>)> = vec![(String::new(), Vec::new())];
    for line in include_str!("../refused.txt").lines().filter(|line| !line.starts_with('#')) {
        let case = cases.last_mut().expect("never empty");
        match line.strip_prefix("=> ") {
            Some(fault) => case.1.push(fault),
            None if case.1.is_empty() => case.0.push_str(line),
            None => cases.push((line.to_owned(), Vec::new())),
        }
    }
    let expand = |text: String| match text.split_once(' ') {
        Some(("pool", pool)) => format!(r#"{{"pools": {{"gpu": {pool}}}}}"#),
        Some(("with", keys)) => format!(r#"{{"pools": {{"gpu": {{"hosts": [{{"address": "10.0.0.1:8188"}}], {keys}}}}}}}"#),
        Some(("host", host)) => format!(r#"{{"pools": {{"gpu": {{"hosts": [{host}]}}}}}}"#),
        _ => text,
    };
    cases.into_iter().map(|(text, faults)| (expand(text), faults)).collect()
}

#[test]
fn every_fault_is_named_with_its_path_its_value_and_what_is_allowed() {
    for (text, faults) in refused() {
        let lines = Role::parse(text.as_bytes()).map(|role| format!("{role:?}")).expect_err(&text);
        assert_eq!(lines, faults, "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_envoy_refuses_what_must_be_refused_with_the_line_expected() {
    let cases = refused();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    let mut running = JoinSet::new();
    for (text, faults) in cases {
        while running.len() >= 2 {
            running.join_next().await.expect("two run").expect("a case failed");
        }
        running.spawn(async move {
            let said = Envoy::new("http2.yaml").configuration_text(&text).validate().await.expect_err(&text);
            for fault in faults {
                assert!(said.contains(fault), "{text}\nexpected: {fault}\nsaid: {said}");
            }
        });
    }
    while let Some(done) = running.join_next().await {
        done.expect("a case failed");
    }
}
