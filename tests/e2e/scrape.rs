//! Hosts' own pages: one of us asks each host for all, and what pages say is known with its age; one that says nothing of use stops nothing.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Abort, Client, Envoy, Fleet, Gpu, Load, RunningEnvoy, eventually};

use crate::least_time::no_trap;

const VLLM: &str = include_str!("../../src/telemetry/samples/vllm.txt");

fn asked(scrape: &Value) -> Value {
    json!({"telemetry": {"orca": false, "scrape": scrape}})
}

/// What a host is believed to have told, without ages.
fn told(host: &Value) -> [Option<f64>; 4] {
    ["running", "waiting", "memory", "compute"].map(|name| host["told"][name].as_f64())
}

/// Whether the ages are there where there are values, and young.
fn is_fresh(host: &Value) -> bool {
    let [running, waiting, memory, compute] = told(host);
    let is = |name: &str, is_told: bool| !is_told || host["told"][name].as_u64().is_some_and(|age| age < 1500);
    is("jobs_age_ms", running.or(waiting).is_some()) && is("parts_age_ms", memory.or(compute).is_some())
}

async fn until_told(envoy: &RunningEnvoy, what: &str, expected: [Option<f64>; 4]) {
    envoy
        .until(what, |hosts| hosts.iter().all(|host| host["told"].is_object() && told(host) == expected && is_fresh(host)))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pages_of_each_server_are_read_and_one_of_four_workers_asks_for_all() {
    let fleet = Fleet::start(2, Gpu::new().slots(10)).await;
    let pages = |pages: &[(&str, &str)]| {
        for host in fleet.iter() {
            pages.iter().for_each(|(path, page)| host.set_page(path, 200, (*page).to_owned()));
        }
    };
    let queue = include_str!("../../src/telemetry/samples/comfyui_queue.json");
    let stats = include_str!("../../src/telemetry/samples/comfyui_system_stats.json");
    pages(&[("/metrics", VLLM), ("/queue", queue), ("/system_stats", stats)]);
    let vllm = json!({"preset": "vllm", "interval_ms": 200});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(asked(&vllm)).workers(4).live().start().await;
    // All workers serve.
    let workers = envoy.pool_on_each_worker(1).await;
    for worker in &workers {
        Load::burst(4).over(worker).run(&envoy).await.assert_served();
    }
    until_told(&envoy, "vllm", [Some(8.0), Some(2.0), Some(0.25), None]).await;
    // Each host about five times a second, and not once for each worker.
    let (before, began) = (fleet[0].asked("/metrics"), Instant::now());
    eventually("it is asked ten times more", async || fleet[0].asked("/metrics") >= before + 10).await;
    let times = (fleet[0].asked("/metrics") - before) as f64;
    assert!(times <= 8.0 * began.elapsed().as_secs_f64() + 1.0, "{times} times within {:?}", began.elapsed());
    // A page is no job, and its way is that of a job: nothing of ours reaches the host.
    assert_eq!((fleet.jobs().iter().sum::<u64>(), envoy.column("in_flight").await), (16, vec![json!(0), json!(0)]));

    let samples = [
        ("sglang", include_str!("../../src/telemetry/samples/sglang.txt"), [Some(162.0), Some(28.0), Some(0.28), None]),
        ("triton", include_str!("../../src/telemetry/samples/triton.txt"), [None, Some(4.0), Some(0.125), Some(0.75)]),
        ("tgi", include_str!("../../src/telemetry/samples/tgi.txt"), [Some(12.0), Some(7.0), None, None]),
        ("dcgm", include_str!("../../src/telemetry/samples/dcgm.txt"), [None, None, Some(0.3889), Some(0.49)]),
    ];
    // What a page says no word of is what the last one said: an age tells which.
    for (preset, page, expected) in samples {
        pages(&[("/metrics", page)]);
        envoy.reload_pool(asked(&json!({"preset": preset, "interval_ms": 200}))).await.expect("taken up");
        let is_new = |host: &Value| {
            let told = told(host);
            is_fresh(host) && (0..4).all(|part| expected[part].is_none() || told[part] == expected[part])
        };
        envoy.until(preset, |hosts| hosts.iter().all(is_new)).await;
    }
    envoy.reload_pool(asked(&json!({"preset": "comfyui", "interval_ms": 200}))).await.expect("taken up");
    envoy
        .until("comfyui, which has two pages", |hosts| {
            hosts.iter().all(|host| {
                let [running, waiting, memory, _] = told(host);
                is_fresh(host) && (running, waiting, memory) == (Some(1.0), Some(2.0), Some(0.75))
            })
        })
        .await;
    no_trap(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_pointers_of_ones_own_are_read() {
    let fleet = Fleet::start(1, Gpu::new().slots(10)).await;
    fleet[0].set_page("/own", 200, "jobs{state=\"running\"} 3\njobs{state=\"waiting\"} 11\nused 0.5\n# and a comment\n");
    fleet[0].set_page("/status", 200, r#"{"queue": {"running": 4, "waiting": "12"}, "gpu": [{"memory": 0.75}]}"#);
    let series = json!({"running": "jobs{state=\"running\"}", "waiting": "jobs{state=\"waiting\"}", "compute": "used"});
    let scrape = json!({"path": "/own", "interval_ms": 200, "metrics": series});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(asked(&scrape)).live().start().await;
    until_told(&envoy, "names", [Some(3.0), Some(11.0), None, Some(0.5)]).await;
    let pointers = json!({"running": "/queue/running", "waiting": "/queue/waiting", "memory": "/gpu/0/memory"});
    let scrape = json!({"preset": "custom", "path": "/status", "interval_ms": 200, "metrics": pointers});
    envoy.reload_pool(asked(&scrape)).await.expect("taken up");
    until_told(&envoy, "pointers", [Some(4.0), Some(12.0), Some(0.75), None]).await;
    no_trap(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_no_use_are_counted_and_told_once_and_jobs_go_on() {
    let fleet = Fleet::start(7, Gpu::new().slots(10)).await;
    let mut large = VLLM.repeat(3 << 20 >> 11);
    large.truncate(3 << 20);
    let garbage: Vec<u8> = (0..100_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fleet[0].set_page("/metrics", 200, VLLM);
    fleet[1].set_page("/metrics", 404, VLLM);
    fleet[2].set_page("/metrics", 200, "");
    fleet[3].set_page("/metrics", 200, large);
    fleet[4].set_page("/metrics", 200, garbage);
    fleet[5].hang_page("/metrics");
    let lies = VLLM.replace(" 5.0", " NaN").replace(" 2.0", " -7").replace(" 0.375", " 1e308");
    fleet[6].set_page("/metrics", 200, lies);
    let scrape = json!({"preset": "vllm", "interval_ms": 300, "timeout_ms": 500});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(asked(&scrape)).start().await;
    let going_on = Load::rate(60.0, 180).start(&envoy);
    let counted = async |host: usize, outcome: &str| {
        let labels = format!("pool=\"gpu\",host=\"{}\",outcome=\"{outcome}\"", fleet[host].address());
        envoy.prometheus_sample(&format!("plimsoll_scrapes{{{labels}}}")).await.unwrap_or(0.0)
    };
    for host in 1..7 {
        eventually(&format!("page {host} has failed twice"), async || counted(host, "failed").await >= 2.0).await;
        assert_eq!(counted(host, "read").await, 0.0, "page {host}");
    }
    eventually("the good one is read", async || counted(0, "read").await >= 2.0).await;
    going_on.await.expect("the load ran").assert_served();
    let books = envoy.books().await;
    assert_eq!(told(&books[0]), [Some(8.0), Some(2.0), Some(0.25), None]);
    assert!(books[1..].iter().all(|host| host["told"].is_null()), "{books:#?}");
    // Each has its line in its turn, and no second one: but where the lead passes from one of us to another, as it does right after a start.
    let lines = |host: usize| {
        let (log, what) = (envoy.log(), format!("could not read /metrics of {}:", fleet[host].address()));
        log.lines().filter(|line| line.contains(&what)).count()
    };
    for host in 1..7 {
        eventually(&format!("page {host} is told of"), async || lines(host) > 0).await;
        assert!(lines(host) <= 2, "{} lines on host {host}", lines(host));
    }
    // One that is well again is read again.
    fleet[1].set_page("/metrics", 200, VLLM);
    envoy.until("it is read", |hosts| told(&hosts[1]) == [Some(8.0), Some(2.0), Some(0.25), None]).await;
    no_trap(&envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_envoys_in_front_of_one_fleet_see_each_others_jobs() {
    let fleet = Fleet::start(3, Gpu::new().slots(6)).await;
    fleet.iter().for_each(|host| host.set_page("/metrics", 200, "running {running}\nwaiting {waiting}\n"));
    let scrape = json!({"interval_ms": 200, "metrics": {"running": "running", "waiting": "waiting"}});
    // The other one knows the first host only.
    let others = Envoy::new("http2.yaml").addresses(&fleet.addresses()[..1]).pool(asked(&scrape)).start().await;
    let mut keys = asked(&scrape);
    (keys["max_in_flight"], keys["alternates"]) = (json!(10), json!(0));
    let ours = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).start_beside(&others).await;
    let pool = ours.pool_over_workers(18).await;
    Load::burst(18).over(&pool).run(&ours).await.assert_served();
    let held = Load::burst(10).header("x-sim-ms", "600000").timeout(Duration::from_secs(60));
    let target = others.listener("ingress");
    let held = tokio::spawn(async move { held.run(&target).await });
    let tells = |jobs: [f64; 2]| {
        move |hosts: &[Value]| [hosts[0]["told"]["running"].as_f64(), hosts[0]["told"]["waiting"].as_f64()] == jobs.map(Some)
    };
    ours.until("it is told that six run and four wait", tells([6.0, 4.0])).await;
    assert_eq!(ours.in_flight().await, [0, 0, 0], "they are none of ours");
    fleet.clear_books();
    Load::burst(18).header("x-sim-ms", "300").over(&pool).run(&ours).await.assert_served();
    assert_eq!(fleet.jobs(), [0, 9, 9]);
    // They count in the choice and fill no slot: what is told may be old.
    fleet.clear_books();
    let patience = Duration::from_secs(4);
    let load = Load::burst(33).header("x-sim-ms", "400").each(|_, shot| shot.abort = Some(Abort::After(patience)));
    let report = load.run(&ours).await;
    // Behind the other one's ten those of ours wait in vain.
    assert_eq!((report.status(200), report.aborted(), report.status(503)), (20, 10, 3), "\n{report}");
    assert_eq!(fleet.jobs(), [10, 10, 10]);
    // They leave, and it is one of three again.
    held.abort();
    let _ = held.await;
    ours.until("it is told that nothing runs there", tells([0.0, 0.0])).await;
    fleet.clear_books();
    Load::burst(18).header("x-sim-ms", "300").over(&pool).run(&ours).await.assert_served();
    assert_eq!(fleet.jobs(), [6, 6, 6]);
    let client = Client::http1(&ours);
    assert_eq!(client.get("/metrics").await.status, 200, "the page is the client's, too");
    no_trap(&ours).await;
    no_trap(&others).await;
}
