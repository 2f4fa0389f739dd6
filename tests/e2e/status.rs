//! The status listener, whoever asks and however: it has the page and the JSON, nothing of what clients send, and nothing else.

use serde_json::json;
use support::{Client, Envoy, Fleet, Gpu, Load, Wire};

#[tokio::test(flavor = "multi_thread")]
async fn the_status_listener_is_guarded_and_answers_nothing_else_however_it_is_asked() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    let address = envoy.listener("status");
    let client = Client::http1(&address);
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/?a=/status.json", "text/html; charset=utf-8"),
        ("/status.json?x", "application/json"),
    ] {
        let reply = client.get(path).await;
        assert_eq!((reply.status, reply.header("content-type")), (200, Some(kind)), "{path}");
        let head = client.ask(hyper::Method::HEAD, path, "").await;
        assert_eq!((head.status, head.text().as_str(), head.header("content-type")), (200, "", Some(kind)), "{path}");
        assert_eq!(head.header("content-security-policy"), reply.header("content-security-policy"));
        for name in ["cache-control", "x-content-type-options", "referrer-policy"] {
            assert!(reply.header(name).is_some() && head.header(name) == reply.header(name), "{path}: {name}");
        }
    }
    let (page, head) = (client.get("/").await, client.ask(hyper::Method::HEAD, "/", "").await);
    assert_eq!(head.header("content-length"), Some(page.body.len().to_string().as_str()));
    let policy = page.header("content-security-policy").expect("a policy");
    for part in ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "frame-ancestors 'none'", "form-action 'none'"] {
        assert!(policy.split("; ").any(|said| said == part), "{part} is not in {policy}");
    }
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"] {
        for path in ["/", "/status.json", "/other"] {
            let reply = client.ask(hyper::Method::from_bytes(method.as_bytes()).expect("a method"), path, "").await;
            assert_eq!((reply.status, reply.header("allow")), (405, Some("GET, HEAD")), "{method} {path}");
        }
    }
    let long = format!("/{}", "x".repeat(50_000));
    for (target, statuses) in [
        ("http://elsewhere/status.json", &["200"][..]),
        ("http://elsewhere/x?/status.json", &["404"]),
        ("//", &["404"]),
        ("/%00/../status.json", &["404", "400"]),
        ("/\u{fc}", &["404", "400"]),
        ("*", &["404", "400"]),
        (&long, &["404", "414", "431"]),
    ] {
        let answer = Wire::ask(&address, &format!("GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await;
        let status = answer.split(' ').nth(1).unwrap_or_default();
        assert!(statuses.contains(&status), "{:.60}: {:.200}", target, answer);
    }
    // Envoy itself answers a CONNECT; whatever it says, it is no 200.
    let answer = Wire::ask(&address, "CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n").await;
    assert!(!answer.starts_with("HTTP/1.1 2"), "{answer}");
    assert_eq!(client.get("/status.json").await.status, 200);
    assert_eq!(envoy.log().matches("panicked").count() + envoy.log().matches("Wasm VM failed").count(), 0, "{}", envoy.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_page_nor_json_shows_what_clients_send() {
    let fleet = Fleet::start(2, Gpu::new()).await;
    let pool = json!({"policy": "least_time", "class": {"header": "x-job-class"}, "cost": {"header": "x-job-cost"}, "tenant": {"header": "x-tenant"},
        "priority": {"header": "x-job-priority"}, "session": {"header": "x-session"}, "queue": {}, "explain": "log"});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).keys(json!({"trusted_headers": true})).pool(pool).start().await;
    let mut load = Load::burst(20);
    for name in [
        "authorization",
        "cookie",
        "x-tenant",
        "x-session",
        "x-job-cost",
        "x-job-priority",
        "user-agent",
        "x-anything",
        "x-request-id",
        "x-plimsoll-host",
    ] {
        load = load.header(name, "hush-hush");
    }
    load.header("x-job-class", "film")
        .each(|_, shot| shot.call.path = "/prompt?key=hush-hush".to_owned())
        .run(&envoy)
        .await
        .assert_served();
    envoy.settled().await;
    let client = Client::http1(&envoy.listener("status"));
    let asked = client.get("/status.json?hush-hush").header("cookie", "hush-hush").await;
    let page = client.get("/?hush-hush").header("authorization", "hush-hush").await;
    for reply in [&asked, &page] {
        assert!(!reply.text().contains("hush") && !format!("{:?}", reply.headers).contains("hush"), "{}", reply.text());
    }
    // The one exception is the name of a class: that header is the operator's own, and it names a kind of job.
    let classes = asked.json()["pools"]["gpu"]["classes"].as_array().expect("classes").clone();
    assert!(classes.iter().any(|class| class["name"] == "film"), "{classes:?}");
    // Without trusted_headers there is no such class.
    drop(envoy);
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"policy": "least_time"})).start().await;
    Load::burst(20).header("x-job-class", "hush-hush").run(&envoy).await.assert_served();
    assert!(!envoy.status().await.to_string().contains("hush"));
}
