//! The simulated host, seen through plain clients.

use std::time::{Duration, Instant};

use serde_json::json;
use support::gpu::End;
use support::{Client, Door, Failure, Fault, Fleet, Gpu, GpuHost, Load, Pool, Wire};
use tokio::time::timeout;

const BOTH: [fn(&GpuHost) -> Client; 2] = [Client::http1, Client::http2];

#[tokio::test]
async fn a_host_answers_http1_and_http2_on_one_port_and_says_who_it_is() {
    let host = GpuHost::start(Gpu::new()).await;
    for client in BOTH.map(|client| client(&host)) {
        let reply = client.post("/prompt", "{}").await;
        assert_eq!((reply.status, reply.host()), (200, Some(host.address())));
    }
    let versions: Vec<_> = host.requests().iter().map(|seen| format!("{:?}", seen.version)).collect();
    assert_eq!(versions, ["HTTP/1.1", "HTTP/2.0"]);
    assert_eq!((host.jobs(), host.in_flight()), (2, 0));
}

#[tokio::test]
async fn a_host_keeps_what_it_received_byte_by_byte() {
    let host = GpuHost::start(Gpu::new()).await;
    Client::http1(&host).post("/prompt?a=b", "{}").header("x-odd", b"caf\xe9").header("x-odd", "").await;
    let seen = &host.requests()[0];
    assert_eq!((seen.method.as_str(), seen.path.as_str()), ("POST", "/prompt?a=b"));
    let values: Vec<&[u8]> = seen.headers.get_all("x-odd").iter().map(|value| value.as_bytes()).collect();
    assert_eq!(values, [b"caf\xe9".as_slice(), b"".as_slice()]);
    assert_eq!(seen.ended.unwrap().1, End::Answered);
}

#[tokio::test]
async fn a_host_runs_as_many_jobs_as_it_has_slots_first_come_first_served() {
    let host = GpuHost::start(Gpu::new().slots(2).work_ms(20)).await;
    let report = Load::rate(1_000.0, 10).run(&host).await;
    report.assert_served();
    let counts = host.counts();
    assert_eq!((counts.max_running, counts.running, counts.waiting, counts.in_flight), (2, 0, 0, 0));
    assert!(counts.max_in_flight > 2, "nobody had to wait: {counts:?}");
    // Remembered by arrival, so the starts are in order as well.
    let starts: Vec<_> = host.requests().iter().map(|seen| seen.started.unwrap()).collect();
    assert!(starts.is_sorted());
    // Ten jobs of 20 ms on two slots.
    assert!(report.duration() >= Duration::from_millis(100), "{report}");
}

#[tokio::test]
async fn service_time_is_the_work_of_the_class_over_the_speed() {
    let host = GpuHost::start(Gpu::new().speed(0.5).work_ms(10).class("film", 50)).await;
    let client = Client::http1(&host);
    let ms = async |name: &str, value: &str| {
        let started = Instant::now();
        client.post("/", "").header(name, value).await;
        started.elapsed().as_millis()
    };
    let (default, film, own) = (ms("x-none", "").await, ms("x-job-class", "film").await, ms("x-sim-ms", "30").await);
    assert!((20..60).contains(&default) && (100..150).contains(&film) && (60..100).contains(&own), "{default} {film} {own}");
    host.set_speed(10.0);
    let faster = ms("x-job-class", "film").await;
    assert!((5..40).contains(&faster), "{faster}");
}

#[tokio::test]
async fn a_host_notices_at_once_that_a_client_has_gone() {
    let host = GpuHost::start(Gpu::new().slots(1).work_ms(60_000)).await;
    for client in BOTH.map(|client| client(&host)) {
        let running = client.post("/", "{}").start().await;
        host.until("one runs", |counts| counts.running == 1).await;
        let waiting = client.post("/", "{}").start().await;
        host.until("one waits", |counts| counts.waiting == 1).await;
        let streaming = client.post("/", "{}").header("x-sim-chunks", "600").start().await;
        host.until("two wait", |counts| counts.waiting == 2).await;

        waiting.abort();
        timeout(Duration::from_millis(100), host.until("one left", |counts| counts.waiting == 1)).await.unwrap();
        running.abort();
        // The slot goes to the one that streams its answer.
        timeout(Duration::from_millis(100), host.until("the next runs", |counts| (counts.running, counts.waiting) == (1, 0)))
            .await
            .unwrap();
        let mut streaming = streaming;
        streaming.chunk().await.unwrap();
        streaming.abort();
        timeout(Duration::from_millis(100), host.until("all left", |counts| (counts.in_flight, counts.running) == (0, 0)))
            .await
            .unwrap();
    }
    assert!(host.requests().iter().all(|seen| seen.ended.unwrap().1 == End::Aborted));
}

#[tokio::test]
async fn a_reset_by_the_client_counts_as_gone() {
    let host = GpuHost::start(Gpu::new()).await;
    host.set(Fault::hang());
    let mut wire = Wire::open(&host).await;
    wire.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    host.until("it came", |counts| counts.in_flight == 1).await;
    wire.reset();
    host.until("it is gone", |counts| counts.in_flight == 0 && counts.open_connections == 0).await;
}

#[tokio::test]
async fn a_host_fails_the_next_some_or_all_as_told() {
    let host = GpuHost::start(Gpu::new().work_ms(1)).await;
    let client = Client::http1(&host);
    let statuses = async |requests: usize| {
        let mut statuses = Vec::new();
        for _ in 0..requests {
            statuses.push(client.post("/", "{}").await.status);
        }
        statuses
    };
    host.set(Fault::status(500).next(2));
    assert_eq!(statuses(4).await, [500, 500, 200, 200]);
    host.set(Fault::status(502).fraction(1.0 / 3.0));
    assert_eq!(statuses(6).await, [200, 200, 502, 200, 200, 502]);
    host.set(Fault::status(503).header("retry-after", "2").after(Duration::from_millis(30)));
    let started = Instant::now();
    let reply = client.post("/", "{}").await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("2")));
    assert!(started.elapsed() >= Duration::from_millis(30));
    host.clear();
    assert_eq!(statuses(1).await, [200]);
}

#[tokio::test]
async fn a_host_resets_before_and_in_the_answer() {
    let host = GpuHost::start(Gpu::new()).await;
    for client in BOTH.map(|client| client(&host)) {
        host.set(Fault::reset());
        assert_eq!(client.get("/").send().await.unwrap_err(), Failure::Reset);
        host.set(Fault::reset_in_body());
        let mut job = client.get("/").start().await;
        assert_eq!(job.head().await.unwrap().0, 200);
        assert!(job.chunk().await.unwrap().is_some());
        assert_eq!(job.chunk().await.unwrap_err(), Failure::Cut);
        host.set(Fault::refuse_stream());
        assert_eq!(client.get("/").send().await.unwrap_err(), Failure::Reset);
    }
    host.until("all is settled", |counts| counts.in_flight == 0 && counts.open_connections == 0).await;
}

#[tokio::test]
async fn a_host_speaks_grpc() {
    let host = GpuHost::start(Gpu::new()).await;
    let call = || Client::http2(&host).post("/inference/Run", "").header("content-type", "application/grpc");
    let reply = call().await;
    assert_eq!((reply.status, reply.grpc_status(), reply.body.len()), (200, Some(0), 5));
    host.set(Fault::grpc(8));
    let reply = call().await;
    assert_eq!((reply.status, reply.grpc_status(), reply.trailers.len()), (200, Some(8), 1));
    host.set(Fault::grpc_trailers_only(14));
    let reply = call().await;
    assert_eq!((reply.status, reply.grpc_status(), reply.trailers.len()), (200, Some(14), 0));
    assert_eq!(host.in_flight(), 0);
}

#[tokio::test]
async fn an_upgrade_is_in_flight_until_it_is_closed() {
    let host = GpuHost::start(Gpu::new()).await;
    let mut wire = Wire::open(&host).await;
    wire.send("GET /ws HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n").await;
    assert!(wire.receive_head().await.starts_with("HTTP/1.1 101"));
    wire.send("ping").await;
    assert_eq!(wire.receive_exactly(4).await, b"ping");
    assert_eq!(host.in_flight(), 1);
    drop(wire);
    host.until("it is closed", |counts| counts.in_flight == 0).await;
}

#[tokio::test]
async fn a_door_is_open_closed_ignoring_or_resetting() {
    let host = GpuHost::start(Gpu::new()).await;
    let client = Client::http1(&host);
    host.door(Door::Closed).await;
    assert_eq!(client.get("/").send().await.unwrap_err(), Failure::Connect);
    host.door(Door::Ignoring).await;
    assert!(timeout(Duration::from_millis(50), client.get("/").send()).await.is_err());
    assert_eq!(host.counts().connections, 0);
    host.door(Door::Resetting).await;
    assert_eq!(client.get("/").send().await.unwrap_err(), Failure::Reset);
    host.door(Door::Open).await;
    assert_eq!(client.get("/").await.status, 200);
}

#[tokio::test]
async fn a_stopped_host_cuts_its_jobs_and_comes_back_on_its_port() {
    let host = GpuHost::start(Gpu::new().work_ms(60_000)).await;
    for client in BOTH.map(|client| client(&host)) {
        let job = client.post("/", "{}").start().await;
        host.until("it runs", |counts| counts.running == 1).await;
        host.stop().await;
        assert_eq!(job.finish().await.unwrap_err(), Failure::Reset);
        assert_eq!(client.get("/").send().await.unwrap_err(), Failure::Connect);
        host.restart().await;
        assert_eq!(client.get("/").header("x-sim-ms", "0").await.status, 200);
    }
}

#[tokio::test]
async fn a_frozen_host_stands_still_and_goes_on() {
    let host = GpuHost::start(Gpu::new().work_ms(10)).await;
    for client in BOTH.map(|client| client(&host)) {
        let before = client.post("/", "{}").start().await;
        host.until("it runs", |counts| counts.running == 1).await;
        host.freeze();
        let jobs = host.jobs();
        let after = client.post("/", "{}").start().await;
        let mut before = Box::pin(before.finish());
        assert!(timeout(Duration::from_millis(50), &mut before).await.is_err(), "answered while frozen");
        assert_eq!((host.jobs(), host.in_flight()), (jobs, 1));
        host.thaw();
        assert_eq!(before.await.unwrap().status, 200);
        assert_eq!(after.finish().await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn an_answer_streams_in_pieces_over_its_service_time() {
    let host = GpuHost::start(Gpu::new().work_ms(60).chunks(3)).await;
    for client in BOTH.map(|client| client(&host)) {
        let mut job = client.post("/", "{}").start().await;
        job.head().await.unwrap();
        let headers_came = Instant::now();
        let mut pieces = 0;
        while job.chunk().await.unwrap().is_some() {
            pieces += 1;
            assert!(headers_came.elapsed() >= Duration::from_millis(15 * pieces), "piece {pieces} came early");
        }
        assert_eq!(pieces, 3);
        assert_eq!(host.in_flight(), 0);
    }
}

#[tokio::test]
async fn an_idle_connection_is_closed_like_uvicorn_does() {
    let host = GpuHost::start(Gpu::new().keep_alive(Duration::from_millis(100)).work_ms(150)).await;
    let mut wire = Wire::open(&host).await;
    for _ in 0..2 {
        // The work is longer than the idle time: a busy connection stays.
        wire.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(wire.receive().await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(host.counts().connections, 1);
    assert!(wire.closed_within(Duration::from_millis(1_000)).await);
}

#[tokio::test]
async fn health_and_metrics_are_no_jobs() {
    let host = GpuHost::start(Gpu::new()).await;
    let client = Client::http1(&host);
    host.set(Fault::status(500));
    host.set_metrics("vllm:num_requests_running 3\n");
    assert_eq!(client.get("/health").await.status, 200);
    host.set_health(Some(503));
    assert_eq!(client.get("/health").await.status, 503);
    host.set_health(None);
    assert!(timeout(Duration::from_millis(50), client.get("/health").send()).await.is_err());
    assert_eq!(client.get("/metrics").await.text(), "vllm:num_requests_running 3\n");
    assert_eq!((host.jobs(), host.counts().health_checks), (0, 3));
}

#[tokio::test]
async fn a_running_host_can_be_changed_over_http() {
    let host = GpuHost::start(Gpu::new()).await;
    let client = Client::http1(&host);
    let set = async |change: serde_json::Value| client.post("/sim/set", change.to_string()).await.status;
    let fault = json!({ "fault": "status", "status": 503, "headers": { "retry-after": "2" }, "next": 1 });
    assert_eq!(set(json!({ "fault": fault })).await, 200);
    assert_eq!(client.get("/").await.header("retry-after"), Some("2"));
    assert_eq!(client.get("/").await.status, 200);
    assert_eq!(client.get("/sim/state").await.json()["jobs"], 2);
    for wrong in [
        json!({ "speed": 0 }),
        json!({ "fault": { "fault": "status", "status": 99 } }),
        json!({ "fault": { "fault": "status", "status": 500, "headers": { "a": "\n" } } }),
        json!({ "fault": { "fault": "hang", "fraction": 2 } }),
        json!({ "door": "closed" }),
        json!({ "sped": 1 }),
    ] {
        assert_eq!(set(wrong.clone()).await, 400, "{wrong}");
    }
    assert_eq!(set(json!({ "door": "closed", "for_ms": 100 })).await, 200);
    support::eventually("the door is closed", async || client.get("/").send().await.is_err()).await;
    support::eventually("the door is open again", async || client.get("/").send().await.is_ok()).await;
}

#[tokio::test]
async fn forgotten_requests_are_still_counted() {
    let host = GpuHost::start(Gpu::new().remember(0)).await;
    Load::burst(5).run(&host).await.assert_served();
    assert_eq!((host.jobs(), host.requests().len()), (5, 0));
    host.clear_books();
    assert_eq!(host.jobs(), 0);
}

#[tokio::test]
async fn random_aborts_and_faults_leave_every_book_at_zero() {
    let fleet = Fleet::start(2, Gpu::new().slots(2).work_ms(3)).await;
    // A reset takes all the jobs of an HTTP/2 connection with it.
    fleet[1].set(Fault::reset().fraction(0.01));
    for host in fleet.iter() {
        for pool in [Pool::http1(host, 8).await, Pool::http2(host, 2).await] {
            let load = Load::poisson(2_000.0, 400, 11).over(&pool).each(|n, shot| {
                if n % 3 == 0 {
                    shot.abort = Some(support::Abort::After(Duration::from_millis(n as u64 % 7)));
                }
            });
            let report = load.run(host).await;
            assert_eq!(report.served.len(), 400);
            assert!(report.aborted() > 0 && report.status(200) > 0, "{report}");
        }
    }
    fleet.idle().await;
    for host in fleet.iter() {
        let counts = host.counts();
        assert_eq!((counts.in_flight, counts.running, counts.waiting), (0, 0, 0));
        assert!(counts.max_running <= 2);
    }
}
