//! `scripts/why` over lines that Envoy really wrote. (That it has words for each key is a test beside `src/roles/explain.rs`.)

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::json;
use support::{Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy};

use crate::top::{piped, script, text};

/// What it says of this text, given as an argument.
async fn why(line: &str) -> String {
    let mut command = script("why");
    command.arg(line);
    let output = piped(command).await;
    assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    text(&output.stdout).trim_end().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happened_to_real_jobs_is_said_in_a_sentence_each() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    // Heavy enough to be the first choice.
    let hosts = json!([{"address": one.to_string(), "weight": 1000, "max_in_flight": 1}, {"address": two.to_string(), "max_in_flight": 1}]);
    let keys = json!({"hosts": hosts, "explain": "header", "queue": {"timeout_ms": 400}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    let said = async |ms: &str| {
        let reply = envoy.client().post("/prompt", "{}").header("x-sim-ms", ms).await;
        let headers: Vec<String> = ["x-plimsoll-host", "x-plimsoll-why"]
            .iter()
            .filter_map(|name| Some(format!("{}: {}", name, reply.header(name)?)))
            .collect();
        (reply.status, headers)
    };
    let (_, headers) = said("1").await;
    let sentence = why(headers[1].strip_prefix("x-plimsoll-why: ").expect("the second")).await;
    assert!(
        sentence.starts_with("its host had the lowest score, ") && sentence.contains(&format!("next best was {two} with ")),
        "{sentence}"
    );
    // Both are taken, and nobody's turn comes in time.
    let held = Load::burst(2).header("x-sim-ms", "3000").start(&envoy);
    envoy.until("both work", |books| books.iter().all(|host| host["in_flight"] == 1)).await;
    let (status, headers) = said("1").await;
    let sentence = why(&headers[0]).await;
    let expected = "answered here with 503, and no host saw it: no slot came free in time; it waited ";
    assert!(status == 503 && sentence.starts_with(expected), "{sentence}");
    held.await.expect("it ends").assert_served();
    fleet[0].stop().await;
    let (_, headers) = said("1").await;
    let mut command = script("why");
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), format!("HTTP/1.1 200 OK\r\n{}\r\n\r\n{{}}", headers.join("\r\n"))).expect("our own file");
    command.stdin(file.reopen().expect("a handle"));
    let sentence = text(&piped(command).await.stdout);
    assert!(sentence.contains(&format!("second attempt: 1 host failed before {two} served it")), "{sentence}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_access_log_is_read_line_by_line_as_it_grows() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let keys = json!({"policy": "least_time", "explain": "log"});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await;
    Load::one_by_one(30).run(&envoy).await.assert_served();
    // A path that speaks like us, and one that would speak to the terminal.
    let _ = envoy.client().post("/policy=forged/%1b%5b2J", "{}").await;
    envoy.logged("/policy=forged").await;
    let log = envoy.log();
    let mut child = script("why").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let (mut input, mut output) = (child.stdin.take().expect("a pipe"), BufReader::new(child.stdout.take().expect("a pipe")));
    let mut said = Vec::new();
    for line in log.lines() {
        writeln!(input, "{line}").expect("it reads");
        if line.contains(" policy=") {
            let mut sentence = String::new();
            output.read_line(&mut sentence).expect("it says so at once");
            said.push(sentence);
        }
    }
    drop(input);
    let mut rest = String::new();
    output.read_line(&mut rest).expect("the end");
    assert!(rest.is_empty() && child.wait().expect("it ends").success(), "{rest}");
    assert_eq!(said.len(), 31, "{said:?}");
    assert!(said[0].contains("least_time knows too little yet"), "{}", said[0]);
    assert!(
        said[29].contains(" POST /prompt 200 after ") && said[29].contains("should be done with it first, in "),
        "{}",
        said[29]
    );
    assert!(said[30].contains("POST /policy=forged/") && said[30].contains("should be done with it first"), "{}", said[30]);
    assert!(said.iter().all(|line| fleet.addresses().iter().any(|host| line.contains(&host.to_string()))), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_explains_nothing_is_one_clear_line_and_what_is_unknown_is_shown_as_it_is() {
    let mut command = script("why");
    command.arg("no explanation");
    let output = piped(command).await;
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.starts_with("error: there is no explanation (policy=…) in that"), "{said}");
    for nothing in ["", " \n"] {
        let mut command = script("why");
        command.arg(nothing);
        let said = text(&piped(command).await.stderr);
        assert_eq!(said, "error: there is nothing to explain: what came is empty\n");
    }
    let sentence = why("policy=best kind=new score=x runner_up=a runner_up_score=b penalty=c attempt=99999 colour=blue").await;
    assert!(["score, x", "kind=new", "colour=blue"].iter().all(|part| sentence.contains(part)), "{sentence}");
    let sentence = why("\u{1b}[2J\u{9b} policy=least_score verdict=new\u{7} waited_ms=1").await;
    assert!(!sentence.contains(|char: char| char.is_control()) && sentence.contains("new"), "{sentence:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_served_after_a_failure_though_it_was_full_is_not_said_to_have_been_passed_over() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let [one, two] = fleet.addresses()[..] else { unreachable!("two hosts") };
    let hosts = json!([{"address": one.to_string(), "weight": 1000, "max_in_flight": 1}, {"address": two.to_string(), "max_in_flight": 1}]);
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"hosts": hosts, "explain": "log"})).start().await;
    // The first is the first choice, so the second job goes to the second.
    let _first = envoy.client().post("/prompt", "{}").header("x-sim-ms", "1000").start().await;
    envoy.until("one works", |books| books[0]["in_flight"] == 1).await;
    let held = envoy.client().post("/prompt", "{}").header("x-sim-ms", "60000").start().await;
    envoy.until("both work", |books| books.iter().all(|host| host["in_flight"] == 1)).await;
    envoy.until("the first is free", |books| books[0]["in_flight"] == 0).await;
    fleet[0].stop().await;
    assert_eq!(envoy.client().post("/again", "{}").await.host(), Some(two));
    let said = why_logged(&envoy, "/again").await;
    let expected = format!("; second attempt: the host that was named first failed, and {two} served it, without a free slot");
    assert!(said.ends_with(&expected) && said.matches(&two.to_string()).count() == 1, "{said}");
    held.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_left_is_said_to_have_left() {
    let queue = "policy=least_score kind=job left=queue";
    assert_eq!(why(&format!("{queue} waited_ms=1200")).await, "its client left while it waited, after 1.2 s");
    let logged = |line: &str| format!("[2026-12-01T10:52:23.376Z] POST / 0 downstream_remote_disconnect 1213 ms {line}");
    assert_eq!(why(&logged(&format!("host=- {queue}"))).await, "10:52:23 POST / 0 after 1.2 s: its client left while it waited");
    let scored = "policy=least_score kind=job score=0.700 jobs=0.700 latency=0.000 waited_ms=0 left=";
    let begin = "its client left while 127.0.0.1:9002 worked on it; 127.0.0.1:9002 had the lowest score, 0.70";
    assert!(why(&format!("host=127.0.0.1:9002 {scored}host")).await.starts_with(begin));
    assert!(why(&logged(&format!("host=- {scored}127.0.0.1:9002"))).await.contains(begin));
    assert!(why(&format!("{scored}host")).await.starts_with("its client left while its host worked on it; its host had "));
    let fleet = Fleet::start(1, Gpu::new().slots(100)).await;
    let keys = json!({"explain": "log", "max_in_flight": 1, "queue": {}});
    let (envoy, host) = (Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start().await, fleet.addresses()[0]);
    let works = envoy.client().post("/works", "{}").header("x-sim-ms", "60000").start().await;
    envoy.until("it works", |books| books[0]["in_flight"] == 1).await;
    let waits = envoy.client().post("/waits", "{}").start().await;
    envoy.until_pool("it waits", |pool| pool["waiting"] == 1).await;
    waits.abort();
    let said = why_logged(&envoy, "/waits").await;
    assert!(said.ends_with(": its client left while it waited"), "{said}");
    works.abort();
    let said = why_logged(&envoy, "/works").await;
    assert!(said.contains(&format!(": its client left while {host} worked on it; {host} had the lowest score, ")), "{said}");
}

/// What it says of the job with this path, once Envoy has logged it: without the time of day.
async fn why_logged(envoy: &RunningEnvoy, path: &str) -> String {
    let asked = format!(" POST {path} ");
    envoy.logged(&asked).await;
    let log = envoy.log();
    let said = why(log.lines().find(|line| line.contains(&asked)).expect("just seen")).await;
    said.split_once(" POST ").unwrap_or_else(|| panic!("{said}")).1.to_owned()
}

/// That it begins and goes on so, with a time between the two.
fn assert_said(said: &str, begin: &str, then: &str) {
    let rest = said.strip_prefix(begin).unwrap_or_else(|| panic!("{said:?} does not begin with {begin:?}"));
    let is_time = |text: &str| text.ends_with('s') && text.starts_with(|first: char| first.is_ascii_digit());
    let (time, _) = rest.split_once(then).unwrap_or_else(|| panic!("{said:?} has no {then:?}"));
    assert!(is_time(time), "{said:?}: {time:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn how_a_job_that_failed_ended_is_said_first() {
    let fleet = Fleet::start(1, Gpu::new().slots(100)).await;
    let (gpu, host) = (&fleet[0], fleet.addresses()[0]);
    let keys = json!({"explain": "log", "failure": {"consecutive": 1000}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).route(json!({"timeout": "0.4s"})).start().await;
    let may_have_started = "not repeated, for it may have started. 127.0.0.1:";
    let cases = [
        ("/status", Fault::status(500), format!("500: {host} answered 500 after "), ". 127.0.0.1:".to_owned()),
        (
            "/reset",
            Fault::reset(),
            "503: failed after ".to_owned(),
            format!(": its connection broke off before an answer; {may_have_started}"),
        ),
        ("/body", Fault::reset_in_body(), "200: failed after ".to_owned(), ": its answer broke off in the middle. ".to_owned()),
        ("/refused", Fault::refuse_stream(), "503: failed after ".to_owned(), ": its host refused it. ".to_owned()),
        ("/hang", Fault::hang(), "504: failed after ".to_owned(), ": the route's timeout was over before ".to_owned()),
        ("/busy", Fault::status(429).next(1), format!("429: {host} answered 429, too many requests, after "), ". ".to_owned()),
    ];
    for (path, fault, begin, then) in cases {
        gpu.set(fault);
        let _ = envoy.client().post(path, "{}").send().await;
        let said = why_logged(&envoy, path).await;
        assert_said(&said, &format!("{path} {begin}"), &then);
    }
    envoy.until("it takes jobs again", |books| books[0]["busy_for_ms"] == 0).await;
    gpu.stop().await;
    let _ = envoy.client().post("/gone", "{}").await;
    let said = why_logged(&envoy, "/gone").await;
    assert_said(&said, "/gone 503: failed after ", ": its host could not be connected to. ");
    // What has no words is shown as it is.
    let line = "[2026-12-01T10:52:23.376Z] POST / 599 something_new{a} 7 ms host=- policy=least_score kind=job";
    assert!(
        why(line)
            .await
            .ends_with(" POST / 599: answered 599 after 7 ms: something_new{a}. its host took it, because no other could")
    );
}
