//! Endpoints that change while Envoy runs, its own admin page, and the stand-in for it.

use serde_json::{Value, json};
use support::{Client, Endpoint, Envoy, Fleet, Gpu, Listed, Load, Page, RunningEnvoy, eventually};

/// What the real admin page says of the cluster.
async fn listed(envoy: &RunningEnvoy) -> Value {
    envoy.admin("/clusters?format=json&filter=%5Egpu%24").await.json()["cluster_statuses"][0].take()
}

#[tokio::test]
async fn envoy_follows_endpoints_that_are_replaced_while_it_runs() {
    let fleet = Fleet::start(3, Gpu::new()).await;
    let [one, two, three] = fleet.addresses()[..] else { unreachable!("three hosts") };
    let envoy = Envoy::new("http2.yaml").endpoints([one]).without_filter("ROUND_ROBIN").workers(1).start().await;
    Load::one_by_one(4).run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [4, 0, 0]);
    envoy.set_endpoints([Endpoint::at(two).weight(3), Endpoint::at(three).health("DRAINING")]).await;
    Load::one_by_one(4).run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [4, 4, 0]);
    let hosts = listed(&envoy).await["host_statuses"].take();
    assert_eq!((&hosts[0]["weight"], &hosts[1]["health_status"]["eds_health_status"]), (&json!(3), &json!("DRAINING")));
    envoy.set_endpoints([Endpoint::at(three)]).await;
    Load::one_by_one(4).run(&envoy).await.assert_served();
    assert_eq!(fleet.jobs(), [4, 4, 4]);
}

#[tokio::test]
async fn two_envoys_reach_their_own_admin_through_a_cluster() {
    let fleet = Fleet::start(2, Gpu::new()).await;
    let to_admin = |bootstrap: &mut Value| {
        let resources = &mut bootstrap["static_resources"];
        let manager = &mut resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
        manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = json!("envoy_admin");
    };
    let start = |host: usize| {
        let envoy = Envoy::new("http2.yaml").endpoints([fleet[host].address()]).admin_cluster();
        envoy.without_filter("ROUND_ROBIN").edit(to_admin)
    };
    let envoy = start(0).start().await;
    let beside = start(1).start_beside(&envoy).await;
    for (envoy, host) in [(&envoy, &fleet[0]), (&beside, &fleet[1])] {
        let page = envoy.client().get("/clusters?format=json&filter=%5Egpu%24").await.json();
        let port = &page["cluster_statuses"][0]["host_statuses"][0]["address"]["socket_address"]["port_value"];
        assert_eq!(*port, host.address().port());
    }
}

#[tokio::test]
async fn the_stand_in_says_what_a_real_page_says() {
    let fleet = Fleet::start(3, Gpu::new()).await;
    let [one, two, three] = fleet.addresses()[..] else { unreachable!("three hosts") };
    let endpoints = [Endpoint::at(one), Endpoint::at(two).weight(5).health("TIMEOUT"), Endpoint::at(three).health("DEGRADED")];
    let envoy = Envoy::new("http2.yaml").endpoints(endpoints).without_filter("ROUND_ROBIN").start().await;
    // Envoy itself makes UNHEALTHY of TIMEOUT.
    let ours = [Listed::at(one), Listed::at(two).weight(5).eds("UNHEALTHY"), Listed::at(three).eds("DEGRADED")];
    let stand_in = support::AdminPage::start().await;
    let same = async |hosts: &[Listed]| {
        stand_in.show(Page::hosts("gpu", hosts.iter().cloned()));
        let page = Client::http1(&stand_in).get("/clusters").await.json();
        let mut real = listed(&envoy).await;
        real["circuit_breakers"] = json!({ "thresholds": [] });
        assert_eq!(page["cluster_statuses"][0], real);
    };
    same(&ours).await;
    envoy.set_endpoints([] as [Endpoint; 0]).await;
    same(&[]).await;
    assert_eq!(envoy.admin("/clusters?format=json&filter=%5Egp%24").await.json(), json!({}));
    // Envoy's own health checks raise flags beside what the endpoints say.
    let check = json!({ "timeout": "1s", "interval": "0.1s", "unhealthy_threshold": 1, "healthy_threshold": 1,
        "http_health_check": { "path": "/health" } });
    fleet[0].set_health(Some(503));
    let checked =
        Envoy::new("http2.yaml").endpoints([one]).without_filter("ROUND_ROBIN").cluster(json!({ "health_checks": [check] }));
    let checked = checked.start_beside(&envoy).await;
    let failed = Listed::at(one).flag("failed_active_health_check").json()["health_status"].clone();
    eventually("its health check has failed", async || listed(&checked).await["host_statuses"][0]["health_status"] == failed)
        .await;
}
