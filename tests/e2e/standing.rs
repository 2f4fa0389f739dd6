//! What Envoy's admin page says of each host, and what the configuration says of it besides: standing, weight, slots, address.

use serde_json::{Value, json};
use support::{AdminPage, Endpoint, Envoy, Fleet, Gpu, GpuHost, Listed, Load, Page, eventually};

use crate::discovery::{Told, addresses, entry, often, page_of};
use crate::fleet::all_workers_know;

/// How the first of three hosts stands when the page says this of it.
async fn stands(told: &Told, what: &str, listed: Listed, state: &str) {
    let host = told.fleet[0].address();
    let others = told.fleet[1..].iter().map(|host| Listed::at(host.address()));
    told.page.show(Page::hosts("gpu", std::iter::once(listed).chain(others)));
    told.read().await;
    told.envoy.until(&format!("{what}: {state}"), |books| entry(books, host)["state"] == state).await;
    all_workers_know().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_envoy_holds_ill_or_drains_gets_no_job_until_it_is_well_again() {
    let told = Told::start(3, Gpu::new().slots(100), json!({})).await;
    let first = Listed::at(told.fleet[0].address());
    let flag = |name: &'static str, state| (name, first.clone().flag(name), state);
    let eds = |status: &'static str, state| (status, first.clone().eds(status), state);
    let table = [
        flag("failed_active_health_check", "unhealthy"),
        flag("failed_outlier_check", "unhealthy"),
        flag("excluded_via_immediate_hc_fail", "unhealthy"),
        flag("active_hc_timeout", "unhealthy"),
        flag("pending_active_hc", "unhealthy"),
        eds("UNHEALTHY", "unhealthy"),
        eds("TIMEOUT", "unhealthy"),
        eds("DRAINING", "draining"),
        flag("pending_dynamic_removal", "draining"),
        eds("HEALTHY", "serving"),
        eds("UNKNOWN", "serving"),
        eds("", "serving"),
    ];
    for (what, listed, state) in table {
        stands(&told, what, listed, state).await;
        told.fleet.clear_books();
        Load::burst(12).header("x-sim-ms", "200").run(&told.envoy).await.assert_served();
        let expected = if state == "serving" { [4, 4, 4] } else { [0, 6, 6] };
        assert_eq!(told.fleet.jobs(), expected, "{what}");
        let pool = told.envoy.pool_status().await;
        assert_eq!(
            (&pool["eligible"], &pool["discovery"]["hosts"]),
            (&json!(expected.iter().filter(|jobs| **jobs > 0).count()), &json!(3))
        );
        stands(&told, "well again", first.clone(), "serving").await;
        told.fleet.clear_books();
        Load::burst(12).header("x-sim-ms", "200").run(&told.envoy).await.assert_served();
        assert_eq!(told.fleet.jobs(), [4, 4, 4], "after {what}");
    }
    told.envoy.settled().await;
    assert_eq!(told.envoy.books().await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_drains_is_shown_so_whatever_else_it_is() {
    let told = Told::start(3, Gpu::new(), json!({})).await;
    let draining = Listed::at(told.fleet[0].address()).eds("DRAINING");
    stands(&told, "draining and ill", draining.clone().flag("failed_active_health_check"), "draining").await;
    stands(&told, "draining and degraded", draining.flag("failed_active_degraded_check"), "draining").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_degraded_host_or_one_of_a_later_priority_is_chosen_only_when_the_others_are_full() {
    let told = Told::start(3, Gpu::new().slots(100), json!({"max_in_flight": 2})).await;
    let first = Listed::at(told.fleet[0].address());
    let degraded = [
        ("DEGRADED", first.clone().eds("DEGRADED")),
        ("failed_active_degraded_check", first.clone().flag("failed_active_degraded_check")),
        ("failed_degraded_outlier_detection", first.clone().flag("failed_degraded_outlier_detection")),
        ("of the second priority", first.clone().priority(1)),
    ];
    for (what, listed) in degraded {
        stands(&told, what, listed, "serving").await;
        told.fleet.clear_books();
        let four = Load::burst(4).header("x-sim-ms", "1500").start(&told.envoy);
        eventually("the others take four", async || told.fleet.jobs().iter().sum::<u64>() == 4).await;
        assert_eq!(told.fleet.jobs(), [0, 2, 2], "{what}");
        let report = Load::burst(4).header("x-sim-ms", "300").run(&told.envoy).await;
        assert_eq!((report.status(200), report.status(503)), (2, 2), "{what}\n{report}");
        assert_eq!(told.fleet.jobs(), [2, 2, 2], "{what}");
        four.await.expect("the load ran").assert_served();
        told.envoy.settled().await;
        stands(&told, "well again", first.clone(), "serving").await;
        told.fleet.clear_books();
        Load::burst(6).header("x-sim-ms", "200").run(&told.envoy).await.assert_served();
        assert_eq!(told.fleet.jobs(), [2, 2, 2], "after {what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_well_when_both_envoy_and_the_probes_say_so() {
    let probe = json!({"path": "/health", "interval_ms": 200, "unhealthy_after": 2, "healthy_after": 2});
    let told = Told::start(3, Gpu::new(), json!({"probe": probe})).await;
    let (host, first) = (told.fleet[0].address(), Listed::at(told.fleet[0].address()));
    told.fleet[0].set_health(Some(503));
    told.envoy.until("the probes say no", |books| entry(books, host)["state"] == "unhealthy").await;
    let ill = first.clone().flag("failed_active_health_check");
    stands(&told, "both say no", ill, "unhealthy").await;
    let checks = told.fleet[0].counts().health_checks;
    told.fleet[0].set_health(Some(200));
    told.fleet[0].until("its probes are good", |counts| counts.health_checks > checks + 5).await;
    assert_eq!(entry(&told.envoy.books().await, host)["state"], "unhealthy", "Envoy says no");
    stands(&told, "both say yes", first, "serving").await;
    // Who comes is probed, and who has left is not.
    told.page.show(page_of(&told.fleet[1..]));
    told.envoy.until("it is gone", |books| books.len() == 2).await;
    all_workers_know().await;
    let checks = told.fleet[0].counts().health_checks;
    let others = told.fleet[1].counts().health_checks;
    told.fleet[1].until("the others are probed", |counts| counts.health_checks > others + 3).await;
    assert_eq!(told.fleet[0].counts().health_checks, checks, "a host that has left is probed");
    told.fleet[0].set_health(Some(503));
    told.page.show(page_of(told.fleet.iter()));
    told.envoy.until("it came, and is probed", |books| books.len() == 3 && entry(books, host)["state"] == "unhealthy").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn discovery_is_turned_on_and_off_under_load() {
    let (fleet, page) = (Fleet::start(3, Gpu::new().slots(100).work_ms(20)).await, AdminPage::start().await);
    page.show(page_of(&fleet[..2]));
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).other_cluster("envoy_admin", &page).live().start().await;
    let clients = envoy.pool_over_workers(8).await;
    let load = Load::rate(100.0, 100).over(&clients).repeat(&envoy);
    let pool = envoy.until_pool("there are three", |pool| pool["hosts"].as_array().is_some_and(|books| books.len() == 3)).await;
    assert_eq!(pool["discovery"], Value::Null);
    for _ in 0..3 {
        envoy.reload_pool(json!({"discovery": often()})).await.expect("accepted");
        envoy.until("two are left", |books| books.len() == 2).await;
        all_workers_know().await;
        let left = fleet[2].jobs();
        fleet[0].until("the others serve", |counts| counts.jobs % 50 == 49).await;
        assert_eq!(fleet[2].jobs(), left, "a host that is no member got a job");
        envoy.reload_pool(json!({})).await.expect("accepted");
        envoy.until("there are three again", |books| books.len() == 3).await;
        fleet[2].until("it serves", |counts| counts.jobs > left).await;
        // Streams of the configuration before may run for a second yet.
        envoy.until_pool("nobody looks any more", |pool| pool["discovery"].is_null()).await;
    }
    load.end().await.assert_served();
    envoy.settled().await;
    let asked = page.times();
    all_workers_know().await;
    assert_eq!(page.times(), asked, "the page is asked though nobody wants it");
    assert_eq!(envoy.pool_status().await["drift"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_and_twenty_four_hosts_are_read() {
    let told = Told::start(4, Gpu::new().slots(100), json!({})).await;
    let others = (0..1020u16).map(|n| Listed::at(([127, 1, (n / 250) as u8, (n % 250) as u8 + 1], 9).into()).eds("DRAINING"));
    told.page.show(Page::hosts("gpu", others.chain(told.fleet.iter().map(|host| Listed::at(host.address())))));
    let pool = told.envoy.until_pool("all are read", |pool| pool["discovery"]["hosts"] == 1024).await;
    assert_eq!((&pool["eligible"], pool["hosts"].as_array().map(Vec::len)), (&json!(4), Some(1024)));
    all_workers_know().await;
    Load::burst(40).header("x-sim-ms", "300").run(&told.envoy).await.assert_served();
    assert_eq!(told.fleet.jobs(), [10, 10, 10, 10]);
    told.page.show(page_of(told.fleet.iter()));
    told.envoy.until("the others are gone", |books| books.len() == 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_degraded_hosts_serves() {
    let told = Told::start(2, Gpu::new().slots(100), json!({})).await;
    told.page.show(Page::hosts("gpu", told.fleet.iter().map(|host| Listed::at(host.address()).eds("DEGRADED"))));
    told.read().await;
    Load::burst(10).header("x-sim-ms", "200").run(&told.envoy).await.assert_served();
    assert_eq!(told.fleet.jobs(), [5, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_are_envoys_over_the_least_of_them() {
    let told = Told::start(2, Gpu::new().slots(1000), json!({"max_in_flight": 1000})).await;
    let table = [
        ([1, 3], [1.0, 3.0], [10, 30]),
        ([300, 100], [3.0, 1.0], [30, 10]),
        ([100, 200], [1.0, 2.0], [20, 40]),
        ([7, 7], [1.0, 1.0], [20, 20]),
    ];
    for (envoys, ours, shares) in table {
        let hosts = told.fleet.iter().zip(envoys).map(|(host, weight)| Listed::at(host.address()).weight(weight));
        told.page.show(Page::hosts("gpu", hosts));
        let weight = |books: &[Value], host: usize| entry(books, told.fleet[host].address())["weight"].as_f64();
        told.envoy
            .until(&format!("{envoys:?} is {ours:?}"), |books| [0, 1].map(|host| weight(books, host)) == ours.map(Some))
            .await;
        all_workers_know().await;
        told.fleet.clear_books();
        Load::burst(shares.iter().sum::<u64>() as usize)
            .header("x-sim-ms", "500")
            .http2(8)
            .run(&told.envoy)
            .await
            .assert_served();
        let jobs = told.fleet.jobs();
        // The latencies of the rounds before differ by little, and the last tie may fall either way.
        assert!(jobs.iter().zip(shares).all(|(jobs, share)| jobs.abs_diff(share) <= 1), "{envoys:?}: {jobs:?} for {shares:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_of_a_host_goes_before_what_envoy_says_and_a_host_that_envoy_lacks_is_no_member() {
    let told = Told::start_before_the_page(3, Gpu::new().slots(100), json!({})).await;
    let [one, two, three] = told.fleet.addresses()[..] else { unreachable!("three hosts") };
    let hosts = json!([
        {"address": one.to_string(), "weight": 8, "max_in_flight": 7},
        {"address": two.to_string(), "drain": true},
        {"address": "127.0.0.1:9", "weight": 1000},
    ]);
    let keys = json!({"hosts": hosts, "discovery": often(), "max_in_flight": 20});
    told.envoy.reload_pool(keys).await.expect("accepted");
    // Until the membership is known, the written ones are the members.
    let first = [one.to_string(), two.to_string(), "127.0.0.1:9".to_owned()];
    told.envoy.until("the written ones are the members", |books| addresses(books) == first).await;
    assert_eq!(told.envoy.client().post("/prompt", "{}").await.host(), Some(one), "the one that there is");
    let listed = [Listed::at(one).weight(4), Listed::at(two).weight(4), Listed::at(three).weight(8)];
    told.page.show(Page::hosts("gpu", listed));
    let books =
        told.envoy.until("the page is followed", |books| books.len() == 3 && !addresses(books).contains(&"127.0.0.1:9")).await;
    let seen = |address, name: &str| entry(&books, address)[name].clone();
    assert_eq!([one, two, three].map(|host| seen(host, "weight").as_f64()), [2.0, 1.0, 2.0].map(Some));
    assert_eq!([one, two, three].map(|host| seen(host, "max_in_flight")), [7, 20, 20].map(Value::from));
    assert_eq!([one, two, three].map(|host| seen(host, "state")), ["serving", "draining", "serving"].map(Value::from));
    told.fleet.clear_books();
    let overruled = told.envoy.pool_status().await["overruled"].clone();
    let report = Load::burst(30).header("x-sim-ms", "500").run(&told.envoy).await;
    assert_eq!((report.status(200), report.status(503)), (27, 3), "\n{report}");
    assert_eq!(told.fleet.jobs(), [7, 0, 20]);
    told.envoy.settled().await;
    assert_eq!(told.envoy.pool_status().await["overruled"], overruled, "the host that Envoy lacks was named");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ipv6_host_is_read_and_what_has_no_port_is_passed_over() {
    let six = GpuHost::start_at("[::1]:0".parse().expect("an address"), Gpu::new()).await.expect("IPv6 on loopback");
    let page = AdminPage::start().await;
    let far = "[fd00::1:2]:8188".parse().expect("an address");
    let envoy = Envoy::new("http2.yaml").endpoints([Endpoint::at(six.address())]).pool(json!({"discovery": often()}));
    page.show(Page::hosts(
        "gpu",
        [
            Listed::pipe("/run/gpu.sock"),
            Listed::at(six.address()),
            Listed::of(json!({"envoy_internal_address": {"server_listener_name": "inside"}})),
            Listed::of(json!({"socket_address": {"address": "gpu.example", "port_value": 80}})),
            Listed::of(json!({"socket_address": {"address": "10.0.0.1"}})),
            Listed::at(far).eds("DRAINING"),
        ],
    ));
    let envoy = envoy.other_cluster("envoy_admin", &page).start().await;
    let pool = envoy.until_pool("they are read", |pool| pool["hosts"].as_array().is_some_and(|books| books.len() == 2)).await;
    let states = [six.address(), far].map(|host| entry(pool["hosts"].as_array().expect("hosts"), host)["state"].clone());
    assert_eq!(states, ["serving", "draining"]);
    assert_eq!(pool["discovery"]["failed_polls"], 0);
    Load::burst(10).run(&envoy).await.assert_served();
    envoy.settled().await;
    let counted = entry(&envoy.books().await, six.address())["requests"].clone();
    assert_eq!((six.jobs(), counted, &envoy.pool_status().await["overruled"]), (10, json!(10), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_keeps_the_membership_and_what_is_known_of_it() {
    let told = Told::start(3, Gpu::new().slots(100), json!({})).await;
    Load::burst(12).run(&told.envoy).await.assert_served();
    let jobs = Load::burst(6).header("x-sim-ms", "3000").start(&told.envoy);
    eventually("six run", async || told.envoy.in_flight().await == [2, 2, 2]).await;
    let before = told.envoy.books().await;
    told.page.close().await;
    told.envoy.reload_pool(json!({"discovery": often(), "max_in_flight": 9})).await.expect("accepted");
    let after = told.envoy.until("it is live", |books| books.iter().all(|host| host["max_in_flight"] == 9)).await;
    assert_eq!(addresses(&after), addresses(&before));
    assert_eq!(told.envoy.in_flight().await, [2, 2, 2]);
    for name in ["ewma_ms", "requests", "state"] {
        assert!(before.iter().zip(&after).all(|(before, after)| before[name] == after[name]), "{name}: {before:?} {after:?}");
    }
    told.fleet.clear_books();
    Load::burst(6).header("x-sim-ms", "200").run(&told.envoy).await.assert_served();
    assert_eq!(told.fleet.jobs(), [2, 2, 2]);
    jobs.await.expect("the load ran").assert_served();
    told.envoy.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_host_in_two_pools_is_counted_apart() {
    let fleet = Fleet::start(3, Gpu::new().slots(100)).await;
    let addresses = fleet.addresses();
    let [one, two, three] = addresses[..] else { unreachable!("three hosts") };
    let envoy = Envoy::new("http2.yaml")
        .addresses(&[one, two])
        .configuration(json!({"pools": {"gpu": {"discovery": often()}, "llm": {"discovery": often()}}}))
        .admin_cluster()
        .second_cluster("llm", &[two, three], json!({"prefix": "/v1"}))
        .start()
        .await;
    let in_flight = async |pool: &str| -> Vec<Value> {
        let status = envoy.status().await;
        let hosts = status["pools"][pool]["hosts"].as_array().cloned().unwrap_or_default();
        hosts.iter().map(|host| host["in_flight"].clone()).collect()
    };
    eventually("both are known", async || in_flight("gpu").await == [0, 0] && in_flight("llm").await == [0, 0]).await;
    all_workers_know().await;
    let loads = [("/prompt", 6), ("/v1/chat", 4)]
        .map(|(path, jobs)| Load::burst(jobs).post(path).header("x-sim-ms", "1500").start(&envoy));
    eventually("three on each of two", async || in_flight("gpu").await == [3, 3]).await;
    eventually("two on each of two", async || in_flight("llm").await == [2, 2]).await;
    assert_eq!(fleet.in_flight(), [3, 5, 2]);
    for load in loads {
        load.await.expect("the load ran").assert_served();
    }
    envoy.settled().await;
}
