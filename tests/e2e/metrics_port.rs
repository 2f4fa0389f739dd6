//! The port of `envoy/metrics.yaml`: Envoy's metrics for whoever may read them, and no way into the rest of its admin interface.

use hyper::Method;
use serde_json::Value;
use support::{Client, Envoy, RunningEnvoy};

/// An Envoy of that file alone, its cluster led to where this Envoy's admin interface really is.
async fn envoy() -> RunningEnvoy {
    let envoy = Envoy::new("metrics.yaml").admin_cluster().edit(|bootstrap| {
        let clusters = bootstrap["static_resources"]["clusters"].as_array_mut().unwrap();
        let admin = clusters.pop().unwrap();
        let ours: Vec<&mut Value> = clusters.iter_mut().collect();
        assert_eq!((ours.len(), &ours[0]["name"]), (1, &"envoy_metrics".into()));
        ours.into_iter()
            .for_each(|cluster| cluster["load_assignment"]["endpoints"] = admin["load_assignment"]["endpoints"].clone());
    });
    envoy.start().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_port_has_the_metrics_and_leads_nowhere_else() {
    let envoy = envoy().await;
    for client in [Client::http1(&envoy.listener("metrics")), Client::http2(&envoy.listener("metrics"))] {
        for path in ["/stats/prometheus", "/stats/prometheus?usedonly&filter=^server"] {
            let reply = client.get(path).await;
            assert_eq!(reply.status, 200, "{path}");
            assert!(reply.text().contains("envoy_server_live"), "{path}");
        }
        let paths = [
            "/",
            "/stats",
            "/stats/",
            "/stats/prometheus/",
            "//stats/prometheus",
            "/stats/prometheus;/../../quitquitquit",
            "/stats/prometheus/../../quitquitquit",
            "/stats/prometheus%2f..%2f..%2fquitquitquit",
            "/stats%2fprometheus",
            "/STATS/PROMETHEUS",
            "/quitquitquit",
            "/quitquitquit?/stats/prometheus",
            "/config_dump",
            "/drain_listeners",
            "/healthcheck/fail",
            "/runtime_modify?a=b",
            "/logging?level=trace",
            "/ready",
        ];
        for path in paths {
            for method in [Method::GET, Method::POST] {
                assert_eq!(client.ask(method.clone(), path, "").await.status, 404, "{method} {path}");
            }
        }
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::HEAD, Method::OPTIONS] {
            let overridden = client.ask(method.clone(), "/stats/prometheus", "").header("x-http-method-override", "GET");
            assert_eq!(overridden.await.status, 404, "{method}");
        }
        let rewritten = client
            .get("/stats/prometheus")
            .header("x-envoy-original-path", "/quitquitquit")
            .header("x-forwarded-uri", "/quitquitquit");
        assert!(rewritten.await.text().contains("envoy_server_live"));
    }
    assert_eq!(envoy.admin("/ready").await.text().trim(), "LIVE");
}
