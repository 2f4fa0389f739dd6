//! Why a job went where it went, in one line of `key=value`.

use std::time::Duration;

use crate::config::{Explain, Pool};
use crate::core::choice::{Chosen, FULL, Kind, Parts};
use crate::core::roster::BEHIND;
use crate::host::Host;
use crate::roles::reply::Verdict;

/// Who served.
const HOST: &str = "x-plimsoll-host";

/// Why.
const WHY: &str = "x-plimsoll-why";

/// Room for a line, so that it is not moved while it grows.
const LONG: usize = 240;

/// What is known when the host is chosen.
pub fn chosen(pool: &Pool, chosen: &Chosen, kind: Kind, waited: Duration) -> String {
    let kind = match (kind, chosen.trial) {
        (Kind::Job, None) => "job",
        (Kind::Job, Some(_)) => "trial",
        (Kind::Other, _) => "other",
    };
    let mut line = String::with_capacity(LONG);
    line.push_str("policy=");
    line.push_str(pool.policy.word());
    line.push_str(" kind=");
    line.push_str(kind);
    let Some(why) = chosen.why else {
        return line;
    };
    let mut number = |key: &str, value: f64| {
        line.push_str(key);
        push(&mut line, value);
    };
    number(" score=", why.score);
    match why.parts {
        Parts::Score { jobs, latency } => {
            number(" jobs=", jobs);
            number(" latency=", latency);
        }
        Parts::Time { own, ahead, speed } => {
            number(" work_ms=", own);
            number(" ahead_ms=", ahead);
            number(" speed=", speed);
        }
        Parts::Chance(_) => {}
        Parts::Jobs(jobs) => number(" in_flight=", jobs.into()),
    }
    number(" penalty=", why.penalty);
    if let Some(is_own) = why.session {
        line.push_str(if is_own { " session=kept" } else { " session=moved" });
    }
    if let Some((host, score)) = why.runner_up.and_then(|(host, score)| Some((pool.hosts.get(host)?, score))) {
        line.push_str(" runner_up=");
        line.push_str(&host.text);
        line.push_str(" runner_up_score=");
        match score {
            FULL.. => line.push_str("full"),
            BEHIND.. => line.push_str("held_back"),
            _ => push(&mut line, score),
        }
    }
    if why.held_back > 0 {
        line.push_str(" held_back=");
        push_whole(&mut line, why.held_back as u64);
    }
    push_waited(&mut line, waited);
    line
}

/// The host that a job goes to first.
pub fn first<'a>(pool: &'a Pool, chosen: &Chosen) -> Option<&'a str> {
    pool.hosts.get(*chosen.hosts.first()?).map(|host| &*host.text)
}

/// Why, if anybody is to learn it, and who.
pub fn to_whom(pool: &Pool, why: impl FnOnce() -> String) -> Option<(String, Explain)> {
    (pool.explain != Explain::Off).then(|| (why(), pool.explain))
}

/// Why a request was answered here.
pub fn answered(pool: &Pool, verdict: Verdict, waited: Duration) -> String {
    let mut line = format!("policy={} verdict={}", pool.policy.word(), verdict.word());
    push_waited(&mut line, waited);
    line
}

/// Where Envoy chooses.
pub fn left_to_envoy() -> String {
    "policy=envoy".to_owned()
}

fn push_waited(line: &mut String, waited: Duration) {
    line.push_str(" waited_ms=");
    push_whole(line, waited.as_millis() as u64);
}

/// Writes a score with three digits behind the point. The library's own way takes a microsecond each, for precision that nobody asks for here.
fn push(line: &mut String, value: f64) {
    let thousandths = (value * 1e3).round() as u64;
    push_whole(line, thousandths / 1000);
    line.push('.');
    line.extend([100, 10, 1].map(|place| char::from(b'0' + (thousandths / place % 10) as u8)));
}

fn push_whole(line: &mut String, mut rest: u64) {
    let mut digits = [b'0'; 20];
    let mut at = digits.len();
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        (rest, at) = (rest / 10, at - 1);
        if rest == 0 {
            break;
        }
    }
    line.extend(digits.iter().skip(at).map(|digit| char::from(*digit)));
}

/// Tells what is to be told should the client leave before there is a response: nobody asks then. The response's word takes its place.
pub fn foresee(host: &impl Host, why: Option<&(String, Explain)>, to: Option<&str>) {
    let Some((why, _)) = why else { return };
    let _ = host.set_filter_state("plimsoll.why", format!("{why} left={}", to.unwrap_or("host")).as_bytes());
}

/// The same of a job that waits.
pub fn foresee_waiting(host: &impl Host, pool: &Pool) {
    if pool.explain != Explain::Off {
        let why = format!("policy={} kind=job left=queue", pool.policy.word());
        let _ = host.set_filter_state("plimsoll.why", why.as_bytes());
    }
}

/// Tells it, with what is known when the response comes: who served, and at which attempt.
pub fn say(host: &impl Host, mut why: String, to: Explain, served: Option<&[u8]>, attempts: Option<u64>) {
    if let (Some(attempts), Some(_)) = (attempts, served) {
        why.push_str(" attempt=");
        push_whole(&mut why, attempts);
    }
    // What cannot be told is not worth a line of the log for each request.
    let _ = host.set_filter_state("plimsoll.why", why.as_bytes());
    if let Some(served) = served {
        let _ = host.set_filter_state("plimsoll.host", served);
    }
    if to == Explain::Header {
        let _ = host.set_response_header(WHY.as_bytes(), Some(why.as_bytes()));
        // A host's own word for it does not stand.
        let _ = host.set_response_header(HOST.as_bytes(), served);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::config::Policy;
    use crate::core::choice::Why;
    use proptest::prelude::*;

    fn pushed(value: f64) -> String {
        let mut line = String::new();
        push(&mut line, value);
        line
    }

    #[test]
    fn scores_are_written_with_three_digits_behind_the_point() {
        let cases = [(0.0, "0.000"), (0.7, "0.700"), (1.43949, "1.439"), (9.9996, "10.000"), (1e12, "1000000000000.000")];
        for (value, text) in cases {
            assert_eq!(pushed(value), text);
        }
    }

    #[test]
    fn a_runner_up_that_is_full_or_held_back_is_said_to_be_so() {
        let pool = crate::core::fixture::pool_of(2, "");
        let line = |score, held_back| {
            let parts = Parts::Score { jobs: 1.4, latency: 0.6 };
            let why = Why { score: 2.0, parts, penalty: 1.0, session: None, runner_up: Some((1, score)), held_back };
            chosen(&pool, &Chosen { hosts: vec![0], trial: None, work: None, why: Some(why) }, Kind::Job, Duration::ZERO)
        };
        let tail = |line: String| line.split_once("runner_up_score=").unwrap().1.to_owned();
        assert_eq!(tail(line(3.0, 0)), "3.000 waited_ms=0");
        assert_eq!(tail(line(BEHIND + 0.7, 1)), "held_back held_back=1 waited_ms=0");
        assert_eq!(tail(line(FULL + BEHIND + 0.7, 2)), "full held_back=2 waited_ms=0");
    }

    /// A line of each kind that can be written, with the host that served.
    fn every_kind_of_line() -> Vec<String> {
        let mut lines = vec![format!("host=10.0.0.9:1 {}", left_to_envoy())];
        let verdicts = [Verdict::NoHost, Verdict::Full, Verdict::QueueFull, Verdict::QueueTimeout];
        for keys in ["", r#", "policy": "least_time""#, r#", "policy": "weighted", "telemetry": {}"#] {
            let pool = crate::core::fixture::pool_of(2, keys);
            lines.push(format!("host=- policy={} kind=job left=queue", pool.policy.word()));
            lines.extend(verdicts.map(|verdict| format!("host=- {}", answered(&pool, verdict, Duration::from_millis(1200)))));
            let parts = match pool.policy {
                Policy::LeastScore => Parts::Score { jobs: 1.4, latency: 0.6 },
                Policy::LeastTime { .. } => Parts::Time { own: 800.0, ahead: 400.0, speed: 1.2 },
                Policy::Weighted(_) => Parts::Chance(0.7),
            };
            let sample = Why { score: 2.0, parts, penalty: 1.0, session: None, runner_up: None, held_back: 0 };
            let runners_up = [Some((1, 1.99)), Some((1, 3.0)), Some((1, FULL)), Some((1, BEHIND)), None];
            let scored = runners_up.map(|runner_up| Why { runner_up, ..sample });
            let others = [
                Why { parts: Parts::Jobs(3), ..sample },
                Why { penalty: 1.5, ..sample },
                Why { session: Some(true), ..sample },
                Why { session: Some(false), held_back: 2, ..sample },
            ];
            let trial = Some(Duration::ZERO);
            let whys = scored.into_iter().chain(others).map(|why| (Some(why), Kind::Job, None));
            let rest = [(None, Kind::Other, None), (Some(sample), Kind::Other, None), (Some(sample), Kind::Job, trial)];
            for (why, kind, trial) in whys.chain(rest) {
                let line = chosen(&pool, &Chosen { hosts: vec![0], trial, work: None, why }, kind, Duration::from_millis(40));
                lines.extend(["1", "2", "11"].map(|attempt| format!("host=10.0.0.9:1 {line} attempt={attempt}")));
                lines.extend(["host", "10.0.0.9:1"].map(|to| format!("host=- {line} left={to}")));
            }
        }
        lines
    }

    #[test]
    fn scripts_why_has_words_for_every_key_and_every_word_that_is_written() {
        let lines = every_kind_of_line();
        let (ours, _) = include_str!("explain.rs").split_once("#[cfg(test)]").unwrap();
        for literal in ours.split('"').skip(1).step_by(2).flat_map(|literal| literal.split(' ')) {
            let key = literal.split_once('=').map_or("", |(key, _)| key);
            assert!(
                key.is_empty() || lines.iter().any(|line| line.contains(&format!("{key}="))),
                "no line of this test has {key}="
            );
        }
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/why");
        let mut why = Command::new(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        why.stdin.take().unwrap().write_all(lines.join("\n").as_bytes()).unwrap();
        let said = String::from_utf8(why.wait_with_output().unwrap().stdout).unwrap();
        assert_eq!(said.lines().count(), lines.len(), "{said}");
        for (line, said) in lines.iter().zip(said.lines()) {
            // What it has no words for it shows as it is.
            let as_it_is = ["=", "no_host", "queue_", "held_back", "None"].into_iter().find(|word| said.contains(word));
            assert_eq!(as_it_is, None, "{line}\n{said}");
        }
    }

    proptest! {
        #[test]
        fn any_number_is_written_without_a_panic(value in any::<f64>()) {
            prop_assert!(pushed(value).len() <= 24);
        }

        #[test]
        fn a_score_reads_back_as_what_it_was(value in 0.0..1e9f64) {
            prop_assert!((pushed(value).parse::<f64>().unwrap() - value).abs() <= 5.1e-4);
        }
    }
}
