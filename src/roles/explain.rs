//! Why a job went where it went, in one line of `key=value`.

use crate::config::{Explain, Pool};
use crate::core::choice::{Chosen, FULL, Kind};
use crate::host::Host;

/// Who served.
const HOST: &str = "x-plimsoll-host";

/// Why.
const WHY: &str = "x-plimsoll-why";

/// Room for a line, so that it is not moved while it grows.
const LONG: usize = 240;

/// What is known when the host is chosen.
pub fn chosen(pool: &Pool, chosen: &Chosen, kind: Kind) -> String {
    let kind = match (kind, chosen.trial) {
        (Kind::Job, None) => "job",
        (Kind::Job, Some(_)) => "trial",
        (Kind::Other, _) => "other",
    };
    let mut line = String::with_capacity(LONG);
    line.push_str("policy=least_score kind=");
    line.push_str(kind);
    let Some(why) = chosen.why else {
        return line;
    };
    for (key, value) in [(" score=", why.score), (" jobs=", why.jobs), (" latency=", why.latency), (" penalty=", why.penalty)] {
        line.push_str(key);
        push(&mut line, value);
    }
    if let Some((host, score)) = why.runner_up.and_then(|(host, score)| Some((pool.hosts.get(host)?, score))) {
        line.push_str(" runner_up=");
        line.push_str(&host.text);
        line.push_str(" runner_up_score=");
        if score < FULL { push(&mut line, score) } else { line.push_str("full") }
    }
    line.push_str(" waited_ms=0");
    line
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
    use super::*;
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
