//! The Envoy fixture, with our filter taken out, but where its configuration is the subject.

use std::time::{Duration, Instant};

use serde_json::json;
use support::{Client, Envoy, Fault, Fleet, Gpu, Load, Pool, Wire, eventually};

fn plain(file: &str, fleet: &Fleet) -> Envoy {
    Envoy::new(file).hosts(fleet).without_filter("ROUND_ROBIN")
}

#[tokio::test]
async fn an_envoy_without_the_filter_serves_round_robin_over_either_protocol() {
    for (file, version) in [("http2.yaml", "HTTP/2.0"), ("http1.yaml", "HTTP/1.1")] {
        let fleet = Fleet::start(4, Gpu::new()).await;
        let envoy = plain(file, &fleet).workers(1).start().await;
        let report = Load::one_by_one(40).run(&envoy).await;
        report.assert_served();
        assert_eq!(fleet.jobs(), [10, 10, 10, 10]);
        assert_eq!(report.hosts().len(), 4);
        assert_eq!(format!("{:?}", fleet[0].requests()[0].version), version);
        assert_eq!(envoy.stat("cluster.gpu.upstream_rq_200").await, 40);
        assert_eq!(envoy.prometheus_sample(r#"envoy_cluster_upstream_rq_total{envoy_cluster_name="gpu"}"#).await, Some(40.0));
        assert_eq!(Client::http2(&envoy).get("/").await.status, 200);
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_gone_from_the_host_too() {
    let fleet = Fleet::start(1, Gpu::new().work_ms(60_000)).await;
    for file in ["http2.yaml", "http1.yaml"] {
        let envoy = plain(file, &fleet).start().await;
        let job = envoy.client().post("/prompt", "{}").start().await;
        fleet[0].until("it runs", |counts| counts.running == 1).await;
        let left = Instant::now();
        job.abort();
        fleet.idle().await;
        assert!(left.elapsed() < Duration::from_millis(100), "noticed after {:?}", left.elapsed());
    }
}

#[tokio::test]
async fn changes_reach_the_routes_the_cluster_and_the_filters() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let teapot = json!({
        "name": "teapot",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": { "response_mutations": [{ "append": { "header": { "key": "x-before", "value": "yes" } } }] },
        },
    });
    let envoy = plain("http2.yaml", &fleet)
        .route(json!({ "timeout": "0.2s", "retry_policy": null }))
        .cluster(json!({ "alt_stat_name": "cards" }))
        .connection_manager(json!({ "server_name": "plain" }))
        .filter_before(teapot)
        .start()
        .await;
    let reply = envoy.client().get("/").await;
    assert_eq!((reply.header("x-before"), reply.header("server")), (Some("yes"), Some("plain")));
    assert_eq!(envoy.stat("cluster.cards.upstream_rq_200").await, 1);
    fleet[0].set(Fault::hang());
    assert_eq!(envoy.client().get("/").await.status, 504);
    fleet.idle().await;
}

#[tokio::test]
async fn connections_can_be_had_over_two_workers() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let envoy = plain("http2.yaml", &fleet).workers(2).start().await;
    let pool = envoy.pool_over_workers(4).await;
    assert_eq!(envoy.connections_by_worker().await.iter().filter(|connections| **connections > 0).count(), 2);
    Load::burst(20).over(&pool).run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [20]);
    let open = async |worker: usize| envoy.stat(&format!("listener.ingress.worker_{worker}.downstream_cx_active")).await;
    let workers = envoy.pool_on_each_worker(2).await;
    eventually("spare ones have gone", async || open(0).await + open(1).await == 8).await;
    let both = Pool::of_all(&workers).await;
    drop(workers);
    Load::burst(20).over(&both).run(&envoy).await.assert_served();
    assert_eq!(open(0).await + open(1).await, 8, "they are open, and no other");
}

#[tokio::test]
async fn the_process_can_be_stopped_continued_and_measured() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let envoy = plain("http2.yaml", &fleet).start().await;
    envoy.stop_process();
    let stopped = envoy.client().get("/").start().await;
    let mut answer = Box::pin(stopped.finish());
    assert!(tokio::time::timeout(Duration::from_millis(100), &mut answer).await.is_err());
    envoy.continue_process();
    assert_eq!(answer.await.unwrap().status, 200);
    assert!(envoy.rss() > 10 << 20);
    let before = envoy.cpu_time();
    eventually("Envoy's time grows with its work", async || {
        Load::burst(200).run(&envoy).await.assert_served();
        envoy.cpu_time() > before
    })
    .await;
    envoy.logged("starting main dispatch loop").await;
}

#[tokio::test]
async fn an_envoy_ends_with_its_handle() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let envoy = plain("http2.yaml", &fleet).start().await;
    let beside = plain("http1.yaml", &fleet).start_beside(&envoy).await;
    let addresses = [support::Target::address(&envoy), support::Target::address(&beside)];
    assert_eq!(envoy.client().get("/").await.status, 200);
    assert_eq!(beside.client().get("/").await.status, 200);
    drop((envoy, beside));
    for address in addresses {
        assert!(Client::http1(&address).get("/").send().await.is_err());
    }
}

#[tokio::test]
async fn a_refused_bootstrap_says_why() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    plain("http2.yaml", &fleet).validate().await.unwrap();
    let refused = plain("http2.yaml", &fleet).cluster(json!({ "connect_timeout": "soon" })).validate().await.unwrap_err();
    assert!(refused.contains("connect_timeout"), "{refused}");
}

#[tokio::test]
async fn a_websocket_passes_over_either_protocol() {
    for file in ["http2.yaml", "http1.yaml"] {
        let fleet = Fleet::start(1, Gpu::new()).await;
        // HTTP/2 hosts get an extended CONNECT.
        let envoy = plain(file, &fleet).start().await;
        let mut wire = Wire::open(&envoy).await;
        wire.send("GET /ws HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n").await;
        let head = wire.receive_head().await;
        assert!(head.starts_with("HTTP/1.1 101"), "{file}: {head}");
        wire.send("ping").await;
        assert_eq!(wire.receive_exactly(4).await, b"ping");
        assert_eq!(fleet.in_flight(), [1]);
        drop(wire);
        fleet.idle().await;
    }
}

#[tokio::test]
async fn a_live_configuration_is_replaced_while_it_runs_or_refused() {
    let fleet = Fleet::start(2, Gpu::new()).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({ "max_in_flight": 4 })).live().start().await;
    let limits = async || envoy.books().await.iter().map(|host| host["max_in_flight"].clone()).collect::<Vec<_>>();
    Load::burst(8).run(&envoy).await.assert_served();
    envoy.settled().await;
    assert_eq!(limits().await, [4, 4]);
    envoy.reload_pool(json!({ "max_in_flight": 7 })).await.unwrap();
    eventually("the new limit holds", async || limits().await == [7, 7]).await;
    let refused = envoy.reload_pool(json!({ "max_in_flight": "many" })).await.unwrap_err();
    assert!(refused.contains("max_in_flight"), "{refused}");
    assert_eq!(limits().await, [7, 7]);
    assert_eq!(envoy.client().get("/").await.status, 200);
}

#[tokio::test]
async fn a_refused_configuration_is_told_in_the_modules_own_words() {
    let fleet = Fleet::start(1, Gpu::new()).await;
    let refused = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({ "policy": "best" })).validate().await.unwrap_err();
    assert!(refused.contains("pools.gpu.policy") && !refused.contains("[wasm]"), "{refused}");
}
