use std::sync::Arc;

use super::*;
use crate::config::Role;
use crate::core::fixture::address;
use crate::roles::fake::{Call, Called, Fake, Process};
use crate::roles::roots::Pools;
use crate::roles::worker::TICK;

/// The current stream of a callback for a call's answer.
const ANSWER: u32 = 900;

const TGI: &str = r#", "telemetry": {"scrape": {"preset": "tgi"}}"#;
const COMFYUI: &str = r#", "telemetry": {"scrape": {"preset": "comfyui"}}"#;

/// A worker with one root.
struct Bench {
    host: Fake,
    worker: Worker<Fake>,
    pools: Pools,
}

fn pools(hosts: usize, keys: &str) -> Pools {
    let hosts: Vec<String> = (0..hosts).map(|host| format!(r#"{{"address": "{}"}}"#, address(host))).collect();
    let json = format!(r#"{{"pools": {{"gpu": {{"hosts": [{}]{keys}}}}}}}"#, hosts.join(","));
    match Role::parse(json.as_bytes()) {
        Ok(Role::Balancer(config)) => config.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect(),
        other => panic!("{json}: {other:?}"),
    }
}

/// A page of a host that has so many jobs.
fn page(running: u32, waiting: u32) -> String {
    format!("# TYPE tgi_queue_size gauge\ntgi_queue_size {waiting}\ntgi_batch_current_size {running}\n")
}

fn jobs(running: f64, waiting: f64) -> Reading {
    Reading::of(Some(running), Some(waiting), None, None)
}

impl Bench {
    fn new(process: &Arc<Process>, hosts: usize, keys: &str) -> Self {
        let host = Fake::new(process);
        Self { worker: Worker::new(host.clone()), host, pools: pools(hosts, keys) }
    }

    fn one(keys: &str) -> Self {
        Self::new(&Process::new(1), 1, keys)
    }

    /// Ticks; gives the calls that it made.
    fn tick(&mut self) -> Vec<Called> {
        self.host.process.pass(TICK);
        self.worker.root_ticks(1, &"plimsoll".into(), &self.pools);
        self.host.called()
    }

    fn answer(&mut self, token: u32, status: Option<&str>, body: &str) {
        self.host.answer_with(body.as_bytes());
        self.host.is_answered(ANSWER, status);
        self.worker.called_back(token, body.len());
    }

    /// Ticks until it asks, and gives the questions.
    fn asks(&mut self) -> Vec<Called> {
        for _ in 0..200 {
            let calls = self.tick();
            if !calls.is_empty() {
                return calls;
            }
        }
        panic!("it does not ask");
    }

    /// Ticks until it asks one thing, and answers that.
    fn told(&mut self, status: Option<&str>, body: &str) {
        let calls = self.asks();
        assert_eq!(calls.len(), 1, "{calls:?}");
        self.answer(calls[0].token, status, body);
    }

    fn readings(&mut self) -> Vec<(Address, Reading, Instant)> {
        let said = self.worker.books.get_mut("gpu").map(|books| books.watch.take_readings()).unwrap_or_default();
        said.into_iter().map(|said| (said.address, said.reading, said.at)).collect()
    }

    /// What the record says that each host told, and when it told of its jobs.
    fn written(&self) -> Vec<(Reading, Instant)> {
        let bytes = self.host.process.value(&crate::roles::shared::key("gpu")).unwrap();
        let record = crate::core::record::Record::parse(bytes).unwrap();
        let now = self.host.now();
        let told = (0..record.header.hosts).map(|slot| record.insight(slot));
        told.filter_map(|told| Some((told.told_ever(), Instant(now.0 - told.ages(now)[0]?.as_micros() as u64)))).collect()
    }

    fn count(&self, outcome: &str) -> Option<u64> {
        self.host.value_of(&format!("plimsoll.scrapes;pool=gpu;host={};outcome={outcome}", address(0)))
    }

    fn logged(&self, text: &str) -> usize {
        self.host.logged().iter().filter(|line| line.contains(text)).count()
    }
}

#[test]
fn a_question_goes_to_the_host_through_the_pools_own_cluster_and_its_answer_is_a_reading() {
    let mut bench = Bench::one(TGI);
    let call = bench.asks().remove(0);
    let header = |name: &str| call.headers[name].as_str();
    let host = address(0).to_string();
    assert_eq!((call.cluster.as_str(), call.body.as_str()), ("gpu", ""));
    assert_eq!((header(":method"), header(":path")), ("GET", "/metrics"));
    assert_eq!((header(":authority"), header("x-gateway-destination-endpoint")), (host.as_str(), host.as_str()));
    bench.host.process.pass(TICK / 2);
    bench.answer(call.token, Some("200"), &page(3, 7));
    assert_eq!(bench.readings(), [(address(0), jobs(3.0, 7.0), bench.host.now())]);
    assert_eq!(bench.readings(), [], "it was taken");
    assert_eq!((bench.count("read"), bench.count("failed")), (Some(1), None));
}

#[test]
fn each_host_is_asked_once_an_interval_and_not_all_at_once() {
    let mut bench = Bench::new(&Process::new(1), 60, TGI);
    let (mut asked, mut most) = (BTreeMap::new(), 0);
    for _ in 0..200 {
        let calls = bench.tick();
        most = most.max(calls.len());
        for call in calls {
            *asked.entry(call.headers[":authority"].clone()).or_insert(0) += 1;
            bench.answer(call.token, Some("200"), &page(1, 0));
        }
    }
    assert_eq!(asked.len(), 60);
    assert!(asked.values().all(|asked| (16..=21).contains(asked)), "{asked:?}");
    assert!(most <= 25, "{most} of 60 at once, in 10 ticks an interval");
    bench.tick();
    assert_eq!(bench.written().len(), 60);
}

#[test]
fn of_more_hosts_than_can_be_asked_each_has_its_turn() {
    let mut bench = Bench::new(&Process::new(1), 1024, TGI);
    let mut asked = BTreeMap::new();
    for _ in 0..100 {
        let calls = bench.tick();
        assert!(calls.len() <= MOST_AT_ONCE, "{}", calls.len());
        for call in calls {
            *asked.entry(call.headers[":authority"].clone()).or_insert(0) += 1;
            bench.answer(call.token, Some("200"), &page(1, 0));
        }
    }
    assert_eq!(asked.len(), 1024);
    assert!(asked.values().all(|asked| *asked >= 4), "{:?}", asked.values().min());
}

#[test]
fn one_question_to_a_page_is_open_at_a_time_also_where_the_timeout_is_long() {
    let mut bench = Bench::one(r#", "telemetry": {"scrape": {"preset": "tgi", "timeout_ms": 20000}}"#);
    let call = bench.asks().remove(0);
    assert!((0..240).all(|_| bench.tick().is_empty()), "24 s");
    let again = bench.asks().remove(0);
    // The first is lost, and what it says now is old.
    bench.answer(call.token, Some("200"), &page(9, 9));
    assert_eq!(bench.readings(), []);
    bench.answer(again.token, Some("200"), &page(1, 2));
    assert_eq!(bench.readings().len(), 1);
}

#[test]
fn whatever_is_no_page_of_use_is_counted_and_said_once_in_a_row() {
    let long = "tgi_queue_size 1\n".repeat(MOST_BYTES / 17 + 1);
    let answers = [
        (Some("200"), "nonsense", "the page holds no value of use of tgi_batch_current_size, tgi_queue_size"),
        (Some("200"), "tgi_queue_size NaN", "the page holds no value of use"),
        (Some("200"), "", "the page is empty"),
        (Some("200"), long.as_str(), "at most 2097152 are read"),
        (Some("307"), "", "the answer was 307"),
        (Some("204"), &page(1, 1), "the answer was 204"),
        (Some("503"), "", "cannot reach the host"),
        (Some("504"), "", "no answer within 1000 ms"),
        (None, "", "cut off"),
    ];
    for (status, body, line) in answers {
        let mut bench = Bench::one(TGI);
        (0..3).for_each(|_| bench.told(status, body));
        assert_eq!((bench.readings(), bench.count("failed"), bench.count("read")), (Vec::new(), Some(3), None), "{line}");
        assert_eq!(bench.logged(line), 1, "{line}: {:?}", bench.host.logged());
        assert_eq!(bench.logged("could not read /metrics of 10.0.0.1:80: "), 1);
        assert_eq!(bench.logged("is unknown once that is 4.0 s old"), 1);
        bench.told(Some("200"), &page(1, 1));
        assert_eq!((bench.readings().len(), bench.logged("/metrics of 10.0.0.1:80 is read again")), (1, 1));
    }
}

#[test]
fn where_many_pages_fail_at_once_each_has_its_line_in_its_turn_and_none_is_left_out() {
    let mut bench = Bench::new(&Process::new(1), 6, TGI);
    for _ in 0..300 {
        for call in bench.tick() {
            bench.answer(call.token, Some("404"), "");
        }
    }
    let each: Vec<usize> = (0..6).map(|host| bench.logged(&format!("could not read /metrics of {}: ", address(host)))).collect();
    assert_eq!((each, bench.logged("more like it")), (vec![1; 6], 0), "{:?}", bench.host.logged());
}

#[test]
fn a_question_that_envoy_does_not_send_has_failed_and_is_asked_again_later() {
    let mut bench = Bench::one(TGI);
    bench.host.refuse(Call::Call, 1000);
    (0..300).for_each(|_| _ = bench.tick());
    let failed = bench.count("failed").unwrap();
    assert!((7..=10).contains(&failed), "{failed} within 30 s");
    assert_eq!(bench.logged("Envoy did not send the question (status 10)"), 1);
    bench.host.heal();
    bench.told(Some("200"), &page(1, 1));
    assert_eq!(bench.readings().len(), 1);
}

#[test]
fn pages_of_one_host_are_one_reading_with_the_time_of_the_one_that_counts_jobs() {
    let mut bench = Bench::one(COMFYUI);
    let queue = r#"{"queue_running": [[]], "queue_pending": [[], []]}"#;
    let stats = r#"{"devices": [{"vram_total": 8, "vram_free": 2}]}"#;
    let (mut expected, mut counted) = (Reading::default(), None);
    let mut paths = BTreeSet::new();
    while paths.len() < 2 {
        for call in bench.tick() {
            let is_queue = call.headers[":path"] == "/queue";
            bench.answer(call.token, Some("200"), if is_queue { queue } else { stats });
            let told = if is_queue { jobs(1.0, 2.0) } else { Reading::of(None, None, Some(0.75), None) };
            expected = expected.and(told);
            counted = if is_queue { Some(bench.host.now()) } else { counted };
            assert_eq!(bench.readings(), [(address(0), expected, counted.unwrap_or(bench.host.now()))]);
            paths.insert(call.headers[":path"].clone());
        }
    }
    assert_eq!(expected, Reading::of(Some(1.0), Some(2.0), Some(0.75), None));
}

#[test]
fn what_a_page_said_is_unknown_when_it_has_said_nothing_for_too_long() {
    let mut bench = Bench::one(COMFYUI);
    let mut last = Reading::default();
    let mut seen = BTreeSet::new();
    for tick in 0..150 {
        for call in bench.tick() {
            match call.headers[":path"].as_str() {
                "/queue" => bench.answer(call.token, Some("200"), r#"{"queue_running": [], "queue_pending": []}"#),
                _ if tick < 30 => bench.answer(call.token, Some("200"), r#"{"devices": [{"vram_total": 8, "vram_free": 2}]}"#),
                _ => bench.answer(call.token, Some("500"), ""),
            }
        }
        if let Some((_, reading, _)) = bench.readings().pop() {
            last = reading;
            seen.insert(reading.memory.is_some());
        }
        if tick == 50 {
            assert_eq!(last, Reading::of(Some(0.0), Some(0.0), Some(0.75), None));
        }
    }
    assert_eq!(last, jobs(0.0, 0.0));
    assert_eq!(seen.len(), 2);
}

#[test]
fn one_asks_for_all_and_only_its_answers_count() {
    let process = Process::new(1);
    let (mut first, mut second) = (Bench::new(&process, 1, TGI), Bench::new(&process, 1, TGI));
    let call = first.asks().remove(0);
    assert!((0..3).all(|_| second.tick().is_empty()));
    // The first stands still until the second leads.
    let taken = second.asks().remove(0);
    first.tick();
    first.answer(call.token, Some("200"), &page(9, 9));
    second.answer(taken.token, Some("200"), &page(1, 2));
    assert_eq!((first.readings(), second.readings().len()), (Vec::new(), 1));
    assert!(first.tick().is_empty());
}

#[test]
fn hosts_that_have_gone_are_forgotten_and_so_are_questions_of_another_configuration() {
    let mut bench = Bench::new(&Process::new(1), 2, TGI);
    for _ in 0..30 {
        for call in bench.tick() {
            bench.answer(call.token, Some("200"), &page(1, 2));
        }
    }
    let old = bench.asks().remove(0);
    bench.pools = pools(1, COMFYUI);
    bench.worker.stream_starts(2, &"plimsoll".into(), &bench.pools);
    bench.worker.root_ends(1);
    let mut asked = BTreeSet::new();
    for _ in 0..30 {
        bench.host.process.pass(TICK);
        bench.worker.root_ticks(2, &"plimsoll".into(), &bench.pools);
        asked.extend(
            bench.host.called().into_iter().map(|call| (call.headers[":authority"].clone(), call.headers[":path"].clone())),
        );
    }
    bench.answer(old.token, Some("200"), &page(1, 2));
    let host = address(0).to_string();
    assert_eq!(asked, [(host.clone(), "/queue".to_owned()), (host, "/system_stats".to_owned())].into());
    assert_eq!(bench.readings(), []);
    bench.pools = pools(1, "");
    bench.worker.stream_starts(3, &"plimsoll".into(), &bench.pools);
    bench.worker.root_ends(2);
    for _ in 0..30 {
        bench.host.process.pass(TICK);
        bench.worker.root_ticks(3, &"plimsoll".into(), &bench.pools);
    }
    assert!(bench.host.called().is_empty() && bench.worker.books["gpu"].watch.scrapes.pages.is_empty());
}

#[test]
fn a_clock_that_steps_back_puts_no_question_off() {
    let mut bench = Bench::one(TGI);
    bench.told(Some("200"), &page(1, 2));
    bench.host.process.step_back(Duration::from_secs(3600));
    let asked: usize = (0..60)
        .map(|_| {
            let calls = bench.tick();
            calls.iter().for_each(|call| bench.answer(call.token, Some("200"), &page(1, 2)));
            calls.len()
        })
        .sum();
    assert!((3..=7).contains(&asked), "{asked} within 6 s");
    let (_, at) = bench.written().pop().unwrap();
    assert!(at <= bench.host.now());
}

#[test]
fn a_pool_without_a_scrape_asks_nobody() {
    let mut bench = Bench::one(r#", "telemetry": {"orca": true}"#);
    assert!((0..50).all(|_| bench.tick().is_empty()));
    assert_eq!(bench.readings(), []);
}

#[test]
fn a_job_that_ends_while_its_host_is_asked_fills_no_slot_of_it() {
    let mut bench = Bench::one(TGI);
    bench.tick();
    let key = crate::roles::shared::key("gpu");
    let change = |bench: &Bench, change: &dyn Fn(&mut crate::core::record::Record)| {
        let mut record = crate::core::record::Record::parse(bench.host.process.value(&key).unwrap()).unwrap();
        change(&mut record);
        bench.host.process.put(&key, record.bytes().to_vec());
        record
    };
    let now = bench.host.now();
    change(&bench, &|record| record.reserve(0, None, now));
    let call = bench.asks().remove(0);
    bench.answer(call.token, Some("200"), &page(1, 0));
    // The host has told of the job; that it has ended is known before that is written down.
    change(&bench, &|record| record.release(record.seat_at(address(0)).unwrap(), None, now));
    bench.tick();
    let (record, now) = (change(&bench, &|_| ()), bench.host.now());
    assert_eq!(record.insight(0).told_ever(), jobs(1.0, 0.0));
    assert_eq!(record.insight(0).jobs(0, now, Duration::from_secs(4)), 0);
}
