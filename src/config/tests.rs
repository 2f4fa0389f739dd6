use super::*;
use crate::core::address::Address;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;

fn balancer(json: &str) -> Balancer {
    match Role::parse(json.as_bytes()) {
        Ok(Role::Balancer(balancer)) => balancer,
        other => panic!("{json}: {other:?}"),
    }
}

#[test]
fn what_is_left_out_takes_its_default() {
    let config = balancer(r#"{"pools": {"gpu": {"hosts": [{"address": "10.0.0.1:8188"}, {"address": "[fd00::1]:80"}]}}}"#);
    assert_eq!(&*config.override_header, "x-gateway-destination-endpoint");
    let pool = &config.pools["gpu"];
    let host = Host {
        address: Address::parse(b"10.0.0.1:8188").unwrap(),
        text: "10.0.0.1:8188".to_owned(),
        weight: 1.0,
        per_job: f64::from(0.7f32),
        max_in_flight: 50,
        drain: false,
        is_reserve: false,
    };
    assert_eq!(pool.hosts[0], host);
    assert_eq!(pool.hosts[1].text, "[fd00::1]:80");
    let score = Score { in_flight_weight: 0.7, latency_weight: 0.3, target_latency: Duration::from_millis(4000) };
    assert_eq!(pool.score, score);
    assert_eq!(pool.time_constant, Duration::from_secs(30));
    assert_eq!((pool.alternates, pool.no_host, &pool.jobs), (2, NoHost::Reject, &None));
}

#[test]
fn a_hosts_own_slots_override_the_pools() {
    let config = balancer(
        r#"{"pools": {"gpu": {"hosts": [{"address": "10.0.0.1:1"}, {"address": "10.0.0.2:1", "max_in_flight": 7}], "max_in_flight": 3}}}"#,
    );
    let slots: Vec<u32> = config.pools["gpu"].hosts.iter().map(|host| host.max_in_flight).collect();
    assert_eq!(slots, [3, 7]);
}

#[test]
fn values_that_switch_a_later_feature_off_are_allowed() {
    balancer(
        r#"{"trusted_headers": false, "pools": {"gpu": {"hosts": [{"address": "10.0.0.1:1"}], "policy": "least_score",
            "slow_start_ms": 0, "explain": "off"}}}"#,
    );
    assert!(matches!(Role::parse(br#"{"status": true}"#), Ok(Role::Status)));
}

#[test]
fn a_host_too_many_is_refused() {
    let hosts = |count: usize| {
        let hosts: Vec<String> = (0..count).map(|n| format!(r#"{{"address": "10.0.{}.{}:80"}}"#, n / 250, n % 250 + 1)).collect();
        format!(r#"{{"pools": {{"gpu": {{"hosts": [{}]}}}}}}"#, hosts.join(","))
    };
    assert_eq!(balancer(&hosts(1024)).pools["gpu"].hosts.len(), 1024);
    let faults = Role::parse(hosts(1025).as_bytes()).unwrap_err();
    assert_eq!(faults, ["pools.gpu.hosts: […] is not a list of 1..=1024 hosts: it has 1025"]);
}

#[test]
fn a_struct_instead_of_a_string_value_is_told_so() {
    // google.protobuf.Struct {"status": true}
    let bytes = b"\x0a\x0e\x0a\x06status\x12\x04\x20\x01";
    let faults = Role::parse(bytes).unwrap_err();
    assert_eq!(faults.len(), 1);
    assert!(faults[0].contains("it must be a google.protobuf.StringValue that holds JSON"), "{faults:?}");
}

#[test]
fn jobs_are_those_whose_method_and_path_are_listed() {
    let config = |jobs: &str| {
        let text = format!(r#"{{"pools": {{"gpu": {{"hosts": [{{"address": "10.0.0.1:1"}}], "jobs": {jobs}}}}}}}"#);
        balancer(&text).pools["gpu"].jobs.clone().unwrap()
    };
    let jobs = config("{}");
    assert!(jobs.include(b"POST", b"/prompt"));
    assert!(jobs.include(b"POST", b"/prompt?client=1"));
    assert!(!jobs.include(b"GET", b"/prompt"));
    assert!(!jobs.include(b"POST", b"/prompts"));
    assert!(!jobs.include(b"POST", b""));
    let jobs = config(r#"{"methods": ["POST", "PUT"], "paths": ["/v1/*", "/sdapi"]}"#);
    assert!(jobs.include(b"PUT", b"/v1/images/generations"));
    assert!(jobs.include(b"POST", b"/sdapi#x"));
    assert!(!jobs.include(b"POST", b"/v2/images"));
    assert!(!jobs.include(b"POST", b"*"));
}

#[test]
fn telemetry_takes_the_presets_paths_or_the_users_own() {
    use crate::telemetry::preset::Preset;
    let telemetry = |keys: &str| {
        let text = format!(r#"{{"pools": {{"gpu": {{"hosts": [{{"address": "10.0.0.1:1"}}], "telemetry": {keys}}}}}}}"#);
        balancer(&text).pools["gpu"].telemetry.clone().unwrap()
    };
    assert_eq!(telemetry("{}"), Telemetry { orca: true, scrape: None });
    let scrape = |keys: &str| telemetry(&format!(r#"{{"orca": false, "scrape": {{{keys}}}}}"#)).scrape.unwrap();
    let vllm = scrape(r#""preset": "vllm""#);
    let second = Duration::from_secs(1);
    assert_eq!(
        (&vllm.preset, &vllm.paths[..], vllm.interval, vllm.timeout),
        (&Preset::Vllm, &["/metrics".to_owned()][..], second, second)
    );
    assert_eq!(vllm.stale_after(), Duration::from_secs(4));
    assert_eq!(scrape(r#""preset": "triton", "path": "/m?x=1""#).paths, ["/m?x=1"]);
    assert_eq!(scrape(r#""preset": "comfyui""#).paths, ["/queue", "/system_stats"]);
    assert_eq!(scrape(r#""metrics": {"running": "jobs"}"#), scrape(r#""preset": "custom", "metrics": {"running": "jobs"}"#));
    let json = scrape(r#""metrics": {"waiting": "/queue/waiting", "compute": "/gpu"}, "path": "/status""#);
    let page = br#"{"queue": {"waiting": [1, 2]}, "gpu": 0.5}"#;
    assert_eq!(json.preset.read(page).map(|reading| (reading.waiting, reading.compute)), Ok((Some(2.0), Some(0.5))));
}

/// What the README's table must say: every key that the parser asks for when every object is there, with its default.
#[test]
fn the_readme_lists_every_key_with_its_default_and_what_is_allowed() {
    let everything = r#"{"pools": {"P": {"hosts": [{"address": "10.0.0.1:1"}], "score": {}, "ewma": {}, "jobs": {},
        "discovery": {"cluster": "envoy_admin"}, "latency_breaker": {}, "probe": {"path": "/health"}, "queue": {},
        "session": {"from": "classifier"}, "priority": {"jwt_claim": "tier", "metadata": "jwt_payload"},
        "telemetry": {"scrape": {"preset": "vllm"}}}}, "alerts": {"cluster": "alertmanager"}}"#;
    let faults = Faults::default();
    Role::read(everything.as_bytes(), &faults).unwrap();
    Role::read(br#"{"classify": {"session": ["/user"]}}"#, &faults).unwrap();
    let row = |(path, (default, allowed)): (String, (String, String))| {
        format!("| `{}` | `{default}` | {allowed} |", path.replace("pools.P.", "").replace("[0]", "[]"))
    };
    let asked: BTreeSet<String> = faults.asked.take().into_iter().map(row).collect();
    let readme = include_str!("../../README.md");
    let listed: BTreeSet<String> = readme.lines().filter(|line| line.starts_with("| `")).map(str::to_owned).collect();
    assert_eq!(listed, asked);
}

#[test]
fn the_configurations_in_the_readme_are_valid() {
    let readme = include_str!("../../README.md");
    let blocks: Vec<&str> = readme.split("```json\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(!blocks.is_empty());
    for block in blocks {
        assert!(Role::parse(block.as_bytes()).is_ok(), "{block}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Err(faults) = Role::parse(&bytes) {
            prop_assert!(!faults.is_empty());
            prop_assert!(faults.iter().all(|line| !line.contains('\n')));
        }
    }

    #[test]
    fn any_json_is_refused_or_read(text in r#"(\{|\}|\[|\]|,|:|"pools"|"gpu"|"hosts"|"address"|"status"|"10.0.0.1:1"|1|-1|1e9|true|null| ){0,40}"#) {
        let _ = Role::parse(text.as_bytes());
    }
}
