use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::roles::fake::{Fake, Process};

const STREAM: u32 = 7;

fn asked(method: &[u8], path: &[u8]) -> (u16, std::collections::BTreeMap<String, String>, String) {
    let host = Fake::new(&Process::new(1));
    host.stream(STREAM, |stream| {
        stream.headers = [(&b":method"[..], method), (b":path", path), (b"x-secret", b"hush")]
            .map(|(name, value)| (name.to_vec(), value.to_vec()))
            .into();
    });
    host.make_current(STREAM);
    answer(&host).expect("answered");
    let seen = host.stream(STREAM, |stream| stream.clone());
    let (status, headers) = seen.replied.expect("answered");
    (status, headers, seen.body)
}

#[test]
fn the_page_and_the_json_are_there_and_nothing_else_is() {
    for method in [&b"GET"[..], b"HEAD"] {
        for (path, kind) in
            [("/", "text/html; charset=utf-8"), ("/?x", "text/html; charset=utf-8"), ("/status.json?a=/", "application/json")]
        {
            let (status, headers, body) = asked(method, path.as_bytes());
            assert_eq!((status, headers["content-type"].as_str()), (200, kind), "{path}");
            assert!(!body.is_empty());
        }
        for path in [
            "",
            "/x",
            "//",
            "/status.json/",
            "/STATUS.JSON",
            "/index.html",
            "*",
            "/favicon.ico",
            "?",
            "/%2e/",
            "http://x/",
            "/status.json\0",
        ] {
            assert_eq!(asked(method, path.as_bytes()).0, 404, "{path}");
        }
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "", "GETT", "PROPFIND"] {
        for path in ["/", "/status.json", "/x", "*", ""] {
            let (status, headers, _) = asked(method.as_bytes(), path.as_bytes());
            assert_eq!((status, headers["allow"].as_str()), (405, "GET, HEAD"), "{method} {path}");
        }
    }
}

#[test]
fn every_answer_is_guarded_and_the_page_has_its_policy() {
    for (method, path) in [("GET", "/"), ("HEAD", "/status.json"), ("GET", "/x"), ("POST", "/")] {
        let (_, headers, _) = asked(method.as_bytes(), path.as_bytes());
        let of = |name: &str| headers[name].as_str();
        assert_eq!(
            (of("cache-control"), of("x-content-type-options"), of("referrer-policy")),
            ("no-store", "nosniff", "no-referrer")
        );
    }
    assert_eq!(asked(b"GET", b"/").1["content-security-policy"], page::POLICY);
}

#[test]
fn without_a_pool_the_json_says_so() {
    let said: Value = serde_json::from_str(&asked(b"GET", b"/status.json").2).expect("JSON");
    assert_eq!(said, serde_json::json!({"version": env!("CARGO_PKG_VERSION"), "pools": {}}));
}

proptest! {
    #[test]
    fn whatever_is_asked_is_answered_and_never_repeated(method in prop::collection::vec(any::<u8>(), 0..12), path in prop::collection::vec(any::<u8>(), 0..4000)) {
        let (status, headers, body) = asked(&method, &path);
        prop_assert!([200, 404, 405].contains(&status));
        prop_assert!(!body.contains("hush") && !headers.values().any(|value| value.contains("hush")));
    }
}
