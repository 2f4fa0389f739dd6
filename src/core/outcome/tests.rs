use super::*;
use crate::core::fixture::pool_of;
use Outcome::{Failure, Neutral, Success};

fn with(keys: &str, end: End) -> Outcome {
    end.outcome(&pool_of(1, keys).failure.statuses)
}

fn end(code: u16, flags: u64, details: &str) -> Outcome {
    let came_after_timeout = code == 504;
    with("", End { code: Some(code), came_after_timeout, flags, details: details.as_bytes(), ..End::default() })
}

fn call(status: u32, patience: Option<u64>) -> Outcome {
    let (grpc, patience) = (Some(Grpc { status }), patience.map(Duration::from_millis));
    with("", End { code: Some(200), details: VIA_UPSTREAM, grpc, patience, ..End::default() })
}

fn busy(seconds: u64) -> Outcome {
    Outcome::Busy(Duration::from_secs(seconds))
}

#[test]
fn only_the_guilty_are_blamed() {
    let cases = [
        (Success, end(200, 0, "via_upstream")),
        (Success, end(101, 0, "via_upstream")),
        (Success, end(302, 0, "via_upstream")),
        (Failure, end(500, 0, "via_upstream")),
        (Failure, end(503, 0, "via_upstream")),
        (Failure, end(503, flag::CONNECTION_FAILURE, "upstream_reset_before_response_started{…}")),
        (Failure, end(503, flag::CONNECTION_TERMINATION, "upstream_reset_before_response_started{…}")),
        (Failure, end(200, flag::UPSTREAM_RESET, "upstream_reset_after_response_started{…}")),
        (Failure, end(502, flag::UPSTREAM_PROTOCOL_ERROR, "upstream_reset_before_response_started{…}")),
        (Failure, end(504, flag::UPSTREAM_TIMEOUT, "response_timeout")),
        // A bad prompt.
        (Neutral, end(400, 0, "via_upstream")),
        (Neutral, end(404, 0, "via_upstream")),
        // A client that reads slowly, one that left, one that left while the host was failing too.
        (Neutral, end(200, flag::UPSTREAM_TIMEOUT, "response_timeout")),
        (Neutral, end(200, flag::CLIENT_GONE, "downstream_remote_disconnect")),
        (Neutral, end(503, flag::CLIENT_RESET | flag::UPSTREAM_RESET, "")),
        // Another filter's reply, a header that Envoy did not like.
        (Neutral, end(429, 0, "local_rate_limited")),
        (Neutral, end(503, 0, "filter_removed_required_request_headers")),
        (Neutral, with("", End::default())),
    ];
    for (case, (expected, seen)) in cases.iter().enumerate() {
        assert_eq!(expected, seen, "case {case}");
    }
}

#[test]
fn a_full_host_is_busy_for_as_long_as_it_says_and_at_most_a_minute() {
    let reply = |code: u16, retry_after: Option<u64>| {
        let retry_after = retry_after.map(Duration::from_secs);
        with("", End { code: Some(code), details: VIA_UPSTREAM, retry_after, ..End::default() })
    };
    assert_eq!(reply(429, None), busy(1));
    assert_eq!(reply(429, Some(7)), busy(7));
    assert_eq!(reply(429, Some(100_000)), busy(60));
    assert_eq!(reply(503, Some(2)), busy(2));
    assert_eq!(reply(503, Some(0)), busy(1), "or it would draw every job");
    assert_eq!(reply(503, None), Failure);
    assert_eq!(reply(500, Some(2)), Failure);
}

#[test]
fn the_configuration_says_which_statuses_are_failures() {
    let outcomes = |keys: &str| {
        let codes = [404u16, 429, 500, 501, 503, 504, 599];
        codes.map(|code| with(keys, End { code: Some(code), details: VIA_UPSTREAM, ..End::default() }) == Failure)
    };
    assert_eq!(outcomes(""), [false, false, true, true, true, true, true]);
    assert_eq!(outcomes(r#", "failure": {"except": [501, "503-504"]}"#), [false, false, true, false, false, false, true]);
    assert_eq!(outcomes(r#", "failure": {"statuses": ["404", "500-501"]}"#), [true, false, true, true, false, false, false]);
    assert_eq!(outcomes(r#", "failure": {"statuses": ["4xx", 599]}"#), [true, false, false, false, false, false, true]);
    assert_eq!(outcomes(r#", "failure": {"statuses": []}"#), [false; 7]);
}

#[test]
fn a_grpc_call_is_judged_by_its_status() {
    for (status, outcome) in (0..=16).map(|status| (status, call(status, None))) {
        let expected = match status {
            0 => Success,
            8 => busy(1),
            2 | 4 | 13 | 14 | 15 => Failure,
            _ => Neutral,
        };
        assert_eq!(outcome, expected, "grpc-status {status}");
    }
    assert_eq!(call(4, Some(100)), Neutral, "the client had set a deadline");
    assert_eq!(call(14, Some(100)), Failure);
    let refused = End { code: Some(503), details: VIA_UPSTREAM, grpc: Some(Grpc { status: 0 }), ..End::default() };
    assert_eq!(with("", refused), Failure, "HTTP's own statuses stand above");
}

#[test]
fn a_timeout_is_the_hosts_doing_unless_the_client_had_asked_for_it_or_the_response_had_begun() {
    let timeout = |came_after_timeout: bool, code: u16, patience: Option<u64>, elapsed: u64| {
        let (patience, elapsed) = (patience.map(Duration::from_millis), Duration::from_millis(elapsed));
        let (flags, details): (u64, &[u8]) = (flag::UPSTREAM_TIMEOUT, b"response_timeout");
        with("", End { code: Some(code), came_after_timeout, flags, details, patience, elapsed, ..End::default() })
    };
    // A file may map Envoy's 504 to something else; to a gRPC call it answers 200.
    for code in [504, 503, 200] {
        assert_eq!(timeout(true, code, None, 1000), Failure);
        assert_eq!(timeout(true, code, Some(10), 12), Neutral);
        assert_eq!(timeout(true, code, Some(300), 290), Neutral, "Envoy's timer fired early");
        assert_eq!(timeout(true, code, Some(60_000), 1000), Failure, "the route's timeout was shorter");
        assert_eq!(timeout(false, code, None, 1000), Neutral, "the response had begun");
    }
}

#[test]
fn a_host_that_breaks_off_a_request_that_is_none_is_not_blamed() {
    let broken = |flags: u64| with("", End { code: Some(503), flags, is_at_fault: true, ..End::default() });
    assert_eq!([flag::UPSTREAM_RESET, flag::CONNECTION_TERMINATION, flag::UPSTREAM_PROTOCOL_ERROR].map(broken), [Neutral; 3]);
    assert_eq!(broken(flag::CONNECTION_FAILURE), Failure, "it has not seen the request");
    assert_eq!(broken(flag::CONNECTION_FAILURE | flag::CONNECTION_TERMINATION), Failure);
}
