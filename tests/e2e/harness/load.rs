//! The load generator and its figures.

use std::time::Duration;

use support::{Abort, Client, Failure, Fault, Gpu, GpuHost, Load, Outcome, Pool, Wire};

#[tokio::test]
async fn latency_counts_from_when_a_request_was_due() {
    // One connection, requests every 10 ms, service 30 ms: the n-th waits for the n - 1 before it.
    let host = GpuHost::start(Gpu::new().work_ms(30)).await;
    let report = Load::rate(100.0, 10).pool(1).run(&host).await;
    report.assert_served();
    let last = report.served[9].latency();
    assert!(last >= Duration::from_millis(300 - 90), "the wait is missing in {last:?}");
    assert!(report.served.iter().all(|one| one.sent - one.due < Duration::from_millis(20)), "the loop was not open\n{report}");
}

#[tokio::test]
async fn percentiles_are_right_to_three_digits() {
    let host = GpuHost::start(Gpu::new().slots(100)).await;
    let report = Load::burst(100).each(|n, shot| shot.call.add_header("x-sim-ms", format!("{}", (n + 1) * 5))).run(&host).await;
    report.assert_served();
    let mut latencies: Vec<_> = report.served.iter().map(|one| one.latency().as_secs_f64()).collect();
    latencies.sort_by(f64::total_cmp);
    for (quantile, nth) in [(0.5, 50), (0.9, 90), (0.99, 99), (1.0, 100)] {
        let (got, exact) = (report.percentile(quantile).as_secs_f64(), latencies[nth - 1]);
        assert!((got / exact - 1.0).abs() < 0.002, "P{}: {got} for {exact}", quantile * 100.0);
    }
    assert!(report.percentile(0.5) >= Duration::from_millis(250) && report.percentile(0.99) >= Duration::from_millis(495));
    assert!(report.to_string().contains("100  200"), "{report}");
}

#[tokio::test]
async fn schedules_are_what_they_say() {
    let host = GpuHost::start(Gpu::new().slots(64)).await;
    let one = Load::poisson(1_000.0, 300, 5).http2(1).run(&host).await;
    let two = Load::poisson(1_000.0, 300, 5).pool(4).run(&host).await;
    let due = |report: &support::Report| report.served.iter().map(|one| one.due).collect::<Vec<_>>();
    assert_eq!(due(&one), due(&two), "a seed gives one schedule");
    let mean = due(&one)[299].as_secs_f64() / 300.0;
    assert!((0.0008..0.0012).contains(&mean), "{mean}");

    let recorded = [(Duration::from_millis(20), "film"), (Duration::ZERO, "draft")];
    let report = Load::recorded(recorded).run(&host).await;
    let classes: Vec<_> = report.served.iter().map(|one| one.class.clone().unwrap()).collect();
    assert_eq!(classes, ["draft", "film"]);
}

#[tokio::test]
async fn pooled_connections_are_reused_and_fresh_ones_are_not() {
    let host = GpuHost::start(Gpu::new().slots(8)).await;
    for (load, connections) in [(Load::burst(60), 60), (Load::burst(60).pool(3), 3), (Load::burst(60).http2(2), 2)] {
        host.clear_books();
        load.run(&host).await.assert_served();
        assert_eq!(host.counts().connections, connections);
        assert_eq!(host.jobs(), 60);
    }
    let pool = Pool::http1(&host, 4).await;
    host.clear_books();
    Load::one_by_one(40).over(&pool).run(&host).await.assert_served();
    assert_eq!((host.counts().max_in_flight, host.counts().connections), (1, 0));
}

#[tokio::test]
async fn clients_leave_before_and_in_the_answer_and_pools_recover() {
    let host = GpuHost::start(Gpu::new().slots(8).work_ms(40).chunks(4)).await;
    for pool in [Pool::http1(&host, 2).await, Pool::http2(&host, 2).await] {
        let report = Load::one_by_one(9)
            .over(&pool)
            .each(|n, shot| {
                shot.abort = [None, Some(Abort::After(Duration::from_millis(5))), Some(Abort::InBody)][n % 3];
            })
            .run(&host)
            .await;
        assert_eq!((report.status(200), report.aborted()), (3, 6), "{report}");
        host.until("all have ended", |counts| counts.in_flight == 0).await;
    }
}

#[tokio::test]
async fn what_shares_an_http2_connection_arrives_in_its_order_and_leaves_without_the_others() {
    let host = GpuHost::start(Gpu::new().slots(200)).await;
    let pool = Pool::http2(&host, 1).await;
    Load::burst(200).each(|n, shot| shot.call.path = format!("/{n}")).over(&pool).run(&host).await.assert_served();
    let paths: Vec<_> = host.requests().into_iter().map(|seen| seen.path).collect();
    assert_eq!(paths, (0..200).map(|n| format!("/{n}")).collect::<Vec<_>>());
    let ask = Client::http2(&host).post("/prompt", "{}").header("x-sim-ms", "600");
    let (stays, leaves) = (ask.clone().start_over(&pool).await, ask.start_over(&pool).await);
    host.until("both run", |counts| counts.running == 2).await;
    drop(leaves);
    host.until("one has left", |counts| counts.running == 1).await;
    assert_eq!(stays.finish().await.unwrap().status, 200);
    assert_eq!(host.counts().connections, 1);
}

#[tokio::test]
async fn failures_are_told_apart() {
    let host = GpuHost::start(Gpu::new()).await;
    let outcome = async |load: Load| load.run(&host).await.served[0].outcome;
    host.set(Fault::reset());
    assert_eq!(outcome(Load::burst(1)).await, Outcome::Failed(Failure::Reset));
    host.set(Fault::reset_in_body());
    assert_eq!(outcome(Load::burst(1)).await, Outcome::Failed(Failure::Cut));
    host.set(Fault::hang());
    assert_eq!(outcome(Load::burst(1).timeout(Duration::from_millis(50))).await, Outcome::Failed(Failure::Timeout));
    host.stop().await;
    assert_eq!(outcome(Load::burst(1)).await, Outcome::Failed(Failure::Connect));
}

#[tokio::test]
async fn a_slow_reader_takes_its_time() {
    let host = GpuHost::start(Gpu::new()).await;
    let load = Load::burst(1).header("x-sim-bytes", "30000000").each(|_, shot| shot.read_pause = Duration::from_millis(2));
    let report = load.run(&host).await;
    report.assert_served();
    assert!(report.percentile(1.0) > Duration::from_millis(100), "{report}");
}

#[tokio::test]
async fn bytes_go_out_as_they_are() {
    let host = GpuHost::start(Gpu::new()).await;
    assert!(Wire::ask(&host, "GET / HTTP/1.0\r\n\r\n").await.starts_with("HTTP/1.0 200"));
    assert!(Wire::ask(&host, "GET / HTTP/1.1\r\nbad header\r\n\r\n").await.starts_with("HTTP/1.1 400"));
    assert!(Wire::ask(&host, "OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n").await.starts_with("HTTP/1.1 200"));
    let mut wire = Wire::open(&host).await;
    wire.send("POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n").await;
    assert!(wire.receive().await.starts_with("HTTP/1.1 100"));
    wire.send("{}").await;
    assert!(wire.receive().await.ends_with("{\"done\":true}\n"));
    wire.send("HEAD / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(wire.receive_head().await.starts_with("HTTP/1.1 200"));
    wire.send("GET / HTTP/1.1\r\nhost: x\r\nx-sim-chunks: 2\r\n\r\n").await;
    assert!(wire.receive().await.contains("\"chunk\":2"));
    assert_eq!(host.in_flight(), 0);
    let reply = Client::http1(&host).ask(hyper::Method::HEAD, "/", "").await;
    assert_eq!((reply.status, host.in_flight()), (200, 0));
}
