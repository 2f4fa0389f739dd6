//! What each end of a job says of its host.

use serde_json::{Value, json};
use support::load::Ask;
use support::{Client, Door, Envoy, Fault, Fleet, Gpu, GpuHost, RunningEnvoy};
use tokio::time::timeout;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Success,
    Failure,
    Busy,
    Neutral,
}
use Outcome::{Busy, Failure, Neutral, Success};

/// What is asked of a host that does what, and what that says of it.
type Case = (&'static str, Ask, Option<Fault>, Outcome);

/// The only host of a pool: every job goes there, and nothing ejects it.
struct Judge {
    file: String,
    host: GpuHost,
    envoy: RunningEnvoy,
    wrong: Vec<String>,
}

impl Judge {
    async fn start(file: &str, failure: Value) -> Self {
        let fleet = Fleet::start(1, Gpu::new().slots(100)).await;
        let local = json!({"internal_address_config": {"cidr_ranges": [{"address_prefix": "127.0.0.0", "prefix_len": 8}]}});
        let envoy = Envoy::new(file)
            .hosts(&fleet)
            .pool(json!({"failure": failure}))
            .route(json!({"timeout": "1s"}))
            // Whoever is inside may ask for a timeout of its own.
            .connection_manager(local)
            .start()
            .await;
        Self { file: file.into(), host: fleet[0].clone(), envoy, wrong: Vec::new() }
    }

    fn client(&self) -> Client {
        Client::http2(&self.envoy)
    }

    fn prompt(&self) -> Ask {
        self.client().post("/prompt", "{}")
    }

    async fn books(&self) -> Value {
        self.envoy.until("the job is settled", |books| books[0]["in_flight"] == 0).await.swap_remove(0)
    }

    /// Starts from one failure in a row, which a success would clear and a failure would make two.
    async fn ready(&self) -> u64 {
        self.host.clear();
        self.envoy.until("it is not paused", |books| books[0]["state"] == "serving").await;
        assert_eq!(self.prompt().await.status, 200);
        self.host.set(Fault::status(500));
        assert_eq!(self.prompt().await.status, 500);
        self.host.clear();
        let books = self.books().await;
        assert_eq!(books["consecutive_failures"], 1, "{books}");
        books["failures"].as_u64().expect("a count")
    }

    async fn compare(&mut self, name: &str, failures: u64, expected: Outcome) {
        let books = self.books().await;
        let more = books["failures"].as_u64().expect("a count") - failures;
        let row = books["consecutive_failures"].as_u64().expect("a count");
        let seen = match (more, row, books["busy_for_ms"] != 0) {
            (0, 0, false) => Some(Success),
            (1, 2, false) => Some(Failure),
            (0, 1, true) => Some(Busy),
            (0, 1, false) => Some(Neutral),
            _ => None,
        };
        if seen != Some(expected) {
            self.wrong.push(format!("{}: {name}: expected {expected:?}, seen {seen:?}: {books}", self.file));
        }
    }

    async fn judge(&mut self, cases: Vec<Case>) {
        for (name, ask, fault, expected) in cases {
            let failures = self.ready().await;
            if let Some(fault) = fault {
                self.host.set(fault);
            }
            let ended = timeout(support::DEADLINE, ask.send()).await;
            assert!(ended.is_ok(), "{name}: no end within {:?}", support::DEADLINE);
            self.compare(name, failures, expected).await;
        }
    }

    fn end(self) {
        assert!(self.wrong.is_empty(), "\n{}", self.wrong.join("\n"));
    }
}

fn waits(status: u16, retry_after: &str) -> Option<Fault> {
    Some(Fault::status(status).header("retry-after", retry_after))
}

#[tokio::test(flavor = "multi_thread")]
async fn statuses_resets_and_timeouts_say_what_the_table_says() {
    for file in ["http2.yaml", "http1.yaml"] {
        let mut judge = Judge::start(file, json!({})).await;
        let prompt = judge.prompt();
        let plain = |status| (prompt.clone(), Some(Fault::status(status)));
        let mut cases: Vec<Case> = Vec::new();
        for (name, (ask, fault), outcome) in [
            ("201", plain(201), Success),
            ("302", plain(302), Success),
            ("400", plain(400), Neutral),
            ("401", plain(401), Neutral),
            ("404", plain(404), Neutral),
            ("422", plain(422), Neutral),
            ("429", plain(429), Busy),
            ("429 with a time", (prompt.clone(), waits(429, "3")), Busy),
            ("500", plain(500), Failure),
            ("501", plain(501), Failure),
            ("502", plain(502), Failure),
            ("503", plain(503), Failure),
            ("503 with a time", (prompt.clone(), waits(503, "3")), Busy),
            ("503 with a time that is none", (prompt.clone(), waits(503, "soon")), Busy),
            ("504", plain(504), Failure),
            ("504 with a time", (prompt.clone(), waits(504, "3")), Failure),
            ("400 with a time", (prompt.clone(), waits(400, "3")), Neutral),
            ("reset", (prompt.clone(), Some(Fault::reset())), Failure),
            ("reset in the body", (prompt.clone(), Some(Fault::reset_in_body())), Failure),
            ("refused stream", (prompt.clone(), Some(Fault::refuse_stream())), Failure),
            ("the route's timeout", (prompt.clone(), Some(Fault::hang())), Failure),
            (
                "the client's own timeout",
                (prompt.clone().header("x-envoy-upstream-rq-timeout-ms", "300"), Some(Fault::hang())),
                Neutral,
            ),
            // grpc-status is a word like any other outside gRPC.
            ("a grpc-status without gRPC", (prompt.clone(), Some(Fault::status(200).header("grpc-status", "14"))), Success),
        ] {
            cases.push((name, ask, fault, outcome));
        }
        judge.judge(cases).await;

        let failures = judge.ready().await;
        judge.host.set(Fault::hang());
        let leaving = judge.prompt().start().await;
        judge.host.until("it is there", |counts| counts.in_flight == 1).await;
        leaving.abort();
        judge.compare("a client that leaves", failures, Neutral).await;

        let failures = judge.ready().await;
        judge.host.stop().await;
        assert_eq!(judge.prompt().await.status, 503);
        judge.compare("a connection refused", failures, Failure).await;
        judge.host.door(Door::Resetting).await;
        assert_eq!(judge.prompt().await.status, 503);
        let books = judge.books().await;
        assert_eq!((&books["failures"], &books["consecutive_failures"]), (&json!(failures + 2), &json!(3)), "{books}");
        judge.end();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_configuration_says_which_statuses_are_failures() {
    let statuses = json!({"statuses": ["5xx", 404, "408", "410-412"], "except": ["501", 505, "507-508"]});
    let mut judge = Judge::start("http2.yaml", statuses).await;
    let prompt = judge.prompt();
    let listed = [500, 502, 503, 504, 506, 509, 404, 408, 410, 411, 412].map(|status| (status, Failure));
    let others = [501, 505, 507, 508, 400, 403, 405, 409, 413].map(|status| (status, Neutral));
    let cases = listed.into_iter().chain(others).map(|(status, outcome)| {
        let name: &'static str = format!("{status}").leak();
        (name, prompt.clone(), Some(Fault::status(status)), outcome)
    });
    judge.judge(cases.collect()).await;
    judge.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_statuses_say_the_same_in_trailers_and_in_headers() {
    let mut judge = Judge::start("http2.yaml", json!({})).await;
    let call = judge.client().grpc("/gpu.Render/Frame");
    let mut cases: Vec<Case> = Vec::new();
    for status in 0..=16 {
        let outcome = match status {
            0 => Success,
            2 | 4 | 13 | 14 | 15 => Failure,
            8 => Busy,
            _ => Neutral,
        };
        for (where_, fault) in [("trailers", Fault::grpc(status)), ("headers", Fault::grpc_trailers_only(status))] {
            let name: &'static str = format!("gRPC {status} in the {where_}").leak();
            cases.push((name, call.clone(), Some(fault), outcome));
        }
    }
    let patient = call.clone().header("grpc-timeout", "5S");
    let other = |content_type: &str| judge.client().post("/gpu.Render/Frame", &[0u8; 5][..]).header("content-type", content_type);
    let grpc = |status| Some(Fault::grpc(status));
    cases.extend([
        ("4 in the trailers, the client's deadline", patient.clone(), grpc(4), Neutral),
        ("4 in the headers, the client's deadline", patient.clone(), Some(Fault::grpc_trailers_only(4)), Neutral),
        ("14 in spite of the client's deadline", patient.clone(), grpc(14), Failure),
        ("application/grpc+proto", other("application/grpc+proto"), grpc(14), Failure),
        ("application/grpc-web is not gRPC", other("application/grpc-web"), grpc(14), Success),
        ("a gRPC call that meets the route's timeout", call.clone(), Some(Fault::hang()), Failure),
        ("a gRPC call that is reset", call.clone(), Some(Fault::reset()), Failure),
        // Not every answer to a gRPC call is gRPC: a proxy before the host answers in plain HTTP.
        ("a gRPC call answered 500", call.clone(), Some(Fault::status(500)), Failure),
        ("a gRPC call answered 400", call.clone(), Some(Fault::status(400)), Neutral),
        ("a gRPC call answered 429", call.clone(), Some(Fault::status(429)), Busy),
        ("a gRPC call answered 503 with a time", call.clone(), waits(503, "3"), Busy),
    ]);
    judge.judge(cases).await;
    judge.end();
}
