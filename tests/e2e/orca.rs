//! ORCA load reports: what hosts say in headers and trailers is read and kept from clients, and what cannot be read does no harm.

use serde_json::{Value, json};
use support::{Client, Envoy, Fleet, Gpu, Reply, RunningEnvoy};

use crate::least_time::no_trap;

const TEXT: &str = "endpoint-load-metrics";
const BINARY: &str = "endpoint-load-metrics-bin";

/// No fields at all.
const NOTHING: &[(&str, &str)] = &[];

async fn start(telemetry: Value) -> (Fleet, RunningEnvoy) {
    let fleet = Fleet::start(1, Gpu::new().slots(10)).await;
    let mut keys = json!({});
    if !telemetry.is_null() {
        keys["telemetry"] = telemetry;
    }
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    (fleet, envoy)
}

/// A protobuf field of type double.
fn double(field: u8, value: f64) -> Vec<u8> {
    [&[field << 3 | 1][..], &value.to_le_bytes()].concat()
}

/// An entry of a protobuf map from text to double.
fn entry(field: u8, name: &str, value: f64) -> Vec<u8> {
    let entry = [&[0x0a, name.len() as u8][..], name.as_bytes(), &double(2, value)].concat();
    [&[field << 3 | 2, entry.len() as u8][..], &entry].concat()
}

/// `xds.data.orca.v3.OrcaLoadReport`: cpu (1), memory (2), utilization (5), named metrics (8), application (9).
fn message(seed: f64) -> Vec<u8> {
    [
        double(1, 0.9),
        double(2, seed),
        entry(5, "other", 0.1),
        entry(8, "running", 7.0),
        entry(8, "waiting", 3.0),
        double(9, seed / 2.0),
    ]
    .concat()
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits = (0..3).fold(0u32, |bits, at| bits << 8 | u32::from(three.get(at).copied().unwrap_or(0)));
        for digit in 0..4 {
            let sixth = (bits >> (18 - 6 * digit)) as usize & 63;
            text.push(if digit <= three.len() { char::from(DIGITS[sixth]) } else { '=' });
        }
    }
    text
}

/// Each form of a report that says memory `used`, compute half of that, and (but for the first) 7 jobs that run and 3 that wait.
fn forms(used: f64) -> Vec<(&'static str, String)> {
    let half = used / 2.0;
    vec![
        (
            TEXT,
            format!(
                "TEXT mem_utilization={used}, application_utilization={half}, named_metrics.running=7,named_metrics.waiting:3"
            ),
        ),
        (
            TEXT,
            format!(
                "JSON {{\"memUtilization\": {used}, \"application_utilization\": \"{half}\", \"named_metrics\": {{\"running\": 7, \"waiting\": 3}}}}"
            ),
        ),
        (TEXT, format!("BIN {}", base64(&message(used)))),
        (BINARY, base64(&message(used))),
        (BINARY, base64(&message(used)).trim_end_matches('=').to_owned()),
    ]
}

fn is_clean(reply: &Reply) -> bool {
    [TEXT, BINARY].iter().all(|name| !reply.headers.contains_key(*name) && !reply.trailers.contains_key(*name))
}

async fn told(envoy: &RunningEnvoy, used: f64) {
    let is_told = |told: &Value| {
        let is = |name: &str, value: f64| told[name].as_f64().is_some_and(|told| (told - value).abs() < 1e-3);
        is("memory", used) && is("compute", used / 2.0) && is("running", 7.0) && is("waiting", 3.0)
    };
    envoy.until(&format!("it has told that {used} of its memory is used"), |hosts| is_told(&hosts[0]["told"])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_forms_are_read_from_headers_and_from_trailers_and_no_client_sees_them() {
    let (fleet, envoy) = start(json!({})).await;
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    envoy.until("it has told nothing", |hosts| hosts[0]["told"].is_null() && hosts[0]["requests"] == 1).await;
    let mut used = 0.1;
    for client in [Client::http1(&envoy), Client::http2(&envoy)] {
        for n in 0..forms(used).len() {
            used += 0.02;
            let (name, value) = forms(used).swap_remove(n);
            fleet[0].tell(&[(name, &value), ("x-other", &"stays".to_owned())]);
            let reply = client.post("/prompt", "{}").await;
            assert_eq!((reply.status, reply.header("x-other")), (200, Some("stays")));
            assert!(is_clean(&reply), "{value}: {reply:?}");
            told(&envoy, used).await;
        }
    }
    fleet[0].tell(NOTHING);
    let client = Client::http2(&envoy);
    for ask in [client.post("/prompt", "{}"), client.grpc("/package.Service/Call")] {
        for n in 0..forms(used).len() {
            used += 0.02;
            let (name, value) = forms(used).swap_remove(n);
            fleet[0].tell_at_the_end(&[(name, &value), ("x-other", &"stays".to_owned())]);
            let reply = ask.clone().await;
            assert_eq!(reply.trailers.get("x-other").map(|value| value.as_bytes()), Some(&b"stays"[..]), "{reply:?}");
            assert!(is_clean(&reply), "{value}: {reply:?}");
            told(&envoy, used).await;
        }
    }
    // Where both speak, the trailers have the last word: the job has ended.
    fleet[0].tell(&[forms(0.2).swap_remove(0)]);
    fleet[0].tell_at_the_end(&[forms(0.9).swap_remove(3)]);
    assert!(is_clean(&client.grpc("/package.Service/Call").await));
    told(&envoy, 0.9).await;
    assert_eq!(envoy.pool_status().await["bad_reports"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_that_cannot_be_read_are_counted_and_the_answer_is_delivered_whole() {
    let (fleet, envoy) = start(json!({})).await;
    fleet[0].tell(&[forms(0.5).swap_remove(0)]);
    assert_eq!(envoy.client().post("/prompt", "{}").await.status, 200);
    told(&envoy, 0.5).await;
    let long = format!("TEXT {}", "named_metrics.x=1,".repeat(2800));
    let unreadable: Vec<(&str, Vec<u8>)> = vec![
        (TEXT, b"TEXT".to_vec()),
        (TEXT, b"TEXT mem_utilization".to_vec()),
        (TEXT, b"TEXT mem_utilization=half".to_vec()),
        (TEXT, b"JSON {\"mem_utilization\": 0.5".to_vec()),
        (TEXT, b"JSON [1]".to_vec()),
        (TEXT, format!("JSON {}", "[".repeat(20_000)).into_bytes()),
        (TEXT, b"BIN !!!".to_vec()),
        (TEXT, b"XML <a/>".to_vec()),
        (TEXT, (0x80..=0xff).collect()),
        (BINARY, b"////".to_vec()),
        (BINARY, [b'A'; 50_000].to_vec()),
        (BINARY, b"\xff\xfe".to_vec()),
        (TEXT, format!("{long}mem_utilization").into_bytes()),
    ];
    let client = Client::http2(&envoy);
    for (count, (name, value)) in unreadable.iter().enumerate() {
        let what = String::from_utf8_lossy(&value[..value.len().min(40)]);
        for is_at_the_end in [false, true] {
            let (head, end) = if is_at_the_end { (vec![], vec![(*name, value)]) } else { (vec![(*name, value)], vec![]) };
            fleet[0].tell(&head);
            fleet[0].tell_at_the_end(&end);
            let reply = client.post("/prompt", "{}").header("x-sim-bytes", "70000").await;
            assert_eq!((reply.status, reply.body.len()), (200, 70_000), "{what}");
            assert!(is_clean(&reply), "{what}");
            let bad = 2 * count + 1 + usize::from(is_at_the_end);
            envoy.until_pool(&format!("{bad} reports are bad, with {what}"), |pool| pool["bad_reports"] == bad).await;
        }
    }
    fleet[0].tell_at_the_end(NOTHING);
    // What can be read and cannot be true is no value, and what else is said stands.
    let bad = 2 * unreadable.len();
    for value in ["NaN", "-1", "1e308", "inf", "-1e308"] {
        fleet[0].tell(&[(TEXT, format!("TEXT mem_utilization=0.25, cpu_utilization={value}, named_metrics.running={value}"))]);
        assert_eq!(client.post("/prompt", "{}").await.status, 200);
        envoy.until(value, |hosts| hosts[0]["told"]["memory"] == 0.25 && hosts[0]["told"]["compute"].is_null()).await;
        fleet[0].tell(&[forms(0.5).swap_remove(0)]);
        assert_eq!(client.post("/prompt", "{}").await.status, 200);
        told(&envoy, 0.5).await;
    }
    fleet[0].tell(&[(TEXT, &long)]);
    assert_eq!(client.post("/prompt", "{}").await.status, 200);
    envoy.settled().await;
    assert_eq!(envoy.pool_status().await["bad_reports"], bad, "a long one that can be read is a good one");
    no_trap(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_telemetry_what_hosts_say_passes_untouched() {
    let metrics = json!({"running": "jobs"});
    for telemetry in [Value::Null, json!({"orca": false, "scrape": {"metrics": metrics}})] {
        let (fleet, envoy) = start(telemetry).await;
        let (text, binary) = (forms(0.5).swap_remove(0).1, forms(0.5).swap_remove(3).1);
        fleet[0].tell(&[(TEXT, &text), (BINARY, &binary)]);
        fleet[0].tell_at_the_end(&[(TEXT, &text)]);
        let reply = Client::http2(&envoy).post("/prompt", "{}").await;
        assert_eq!((reply.header(TEXT), reply.header(BINARY)), (Some(&*text), Some(&*binary)));
        assert_eq!(reply.trailers.get(TEXT).map(|value| value.as_bytes()), Some(text.as_bytes()));
        envoy.settled().await;
        let status = envoy.pool_status().await;
        assert_eq!((&status["hosts"][0]["told"], &status["bad_reports"]), (&Value::Null, &json!(0)));
    }
}
