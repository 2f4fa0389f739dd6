//! `scripts/why` over lines that Envoy really wrote. (That it has words for each key is a test beside `src/roles/explain.rs`.)

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::json;
use support::{Envoy, Fleet, Gpu, Load};

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
    let sentence = why("policy=best kind=new score=x runner_up=a runner_up_score=b penalty=c attempt=99999 colour=blue").await;
    assert!(["score, x", "kind=new", "colour=blue"].iter().all(|part| sentence.contains(part)), "{sentence}");
    let sentence = why("\u{1b}[2J\u{9b} policy=least_score verdict=new\u{7} waited_ms=1").await;
    assert!(!sentence.contains(|char: char| char.is_control()) && sentence.contains("new"), "{sentence:?}");
}
