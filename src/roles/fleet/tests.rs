use std::sync::Arc;

use super::*;
use crate::config::Role;
use crate::core::address::Address;
use crate::core::fixture::address;
use crate::core::health::State;
use crate::core::record::Record;
use crate::roles::fake::{Call, Called, Fake, Process};
use crate::roles::roots::Pools;
use crate::roles::worker::TICK;

/// The current stream of a callback for a call's answer.
const ANSWER: u32 = 900;

const METRIC: &str = "plimsoll.polls;pool=gpu;outcome=";

/// A worker with one root.
struct Bench {
    host: Fake,
    worker: Worker<Fake>,
    pools: Pools,
}

fn pools(keys: &str) -> Pools {
    let json = format!(r#"{{"pools": {{"gpu": {{"discovery": {{"cluster": "envoy_admin"}}{keys}}}}}}}"#);
    match Role::parse(json.as_bytes()) {
        Ok(Role::Balancer(config)) => config.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect(),
        other => panic!("{json}: {other:?}"),
    }
}

/// The page with these hosts, by their number and what else is said of them.
fn page(hosts: &[(usize, &str)]) -> String {
    let host = |(number, rest): &(usize, &str)| {
        let text = address(*number).to_string();
        let (ip, port) = text.split_once(':').unwrap();
        format!(r#"{{"address": {{"socket_address": {{"address": "{ip}", "port_value": {port}}}}}{rest}}}"#)
    };
    let hosts: Vec<String> = hosts.iter().map(host).collect();
    format!(r#"{{"cluster_statuses": [{{"name": "gpu", "host_statuses": [{}]}}]}}"#, hosts.join(","))
}

const UNHEALTHY: &str = r#", "health_status": {"failed_outlier_check": true}"#;

impl Bench {
    fn new(process: &Arc<Process>, keys: &str) -> Self {
        let host = Fake::new(process);
        Self { worker: Worker::new(host.clone()), host, pools: pools(keys) }
    }

    /// Ticks; gives the calls that it made.
    fn tick(&mut self) -> Vec<Called> {
        self.host.process.pass(TICK);
        self.worker.root_ticks(1, &"plimsoll".into(), &self.pools);
        self.host.called()
    }

    fn answer(&mut self, token: u32, status: Option<&str>, body: &str) {
        self.host.answer_with(body.as_bytes());
        self.answer_of(token, status, body.len());
    }

    fn answer_of(&mut self, token: u32, status: Option<&str>, size: usize) {
        self.host.is_answered(ANSWER, status);
        self.worker.called_back(token, size);
    }

    /// Ticks until it asks, and gives the question.
    fn asks(&mut self) -> Called {
        for _ in 0..100 {
            if let Some(call) = self.tick().pop() {
                return call;
            }
        }
        panic!("it does not ask");
    }

    /// Ticks until it asks, and answers that there are these hosts.
    fn learn(&mut self, hosts: &[(usize, &str)]) {
        let token = self.asks().token;
        self.answer(token, Some("200"), &page(hosts));
    }

    fn known(&self) -> Option<Vec<Address>> {
        Some(self.worker.members("gpu")?.members().iter().map(|member| member.address).collect())
    }
}

fn record(process: &Arc<Process>) -> Record {
    Record::parse(process.value(&shared::key("gpu")).unwrap()).unwrap()
}

fn states(bench: &Bench) -> Vec<State> {
    record(&bench.host.process).hosts().map(|host| host.state(bench.host.now())).collect()
}

#[test]
fn the_first_tick_asks_envoys_admin_for_the_pools_cluster() {
    let mut bench = Bench::new(&Process::new(1), "");
    let call = bench.asks();
    assert_eq!((call.cluster.as_str(), call.body.as_str()), ("envoy_admin", ""));
    assert_eq!(
        (call.headers[":method"].as_str(), call.headers[":path"].as_str()),
        ("GET", "/clusters?format=json&filter=%5Egpu%24")
    );
    assert!(record(&bench.host.process).header.awaits_hosts());
    assert!((0..20).all(|_| bench.tick().is_empty()), "one question is open at a time");
}

#[test]
fn what_envoys_cluster_has_is_what_the_pool_has_for_every_worker() {
    let process = Process::new(1);
    let (mut leader, mut other) = (Bench::new(&process, ""), Bench::new(&process, ""));
    let call = leader.asks();
    assert!((0..3).all(|_| other.tick().is_empty()), "one asks for all");
    leader.answer(call.token, Some("200"), &page(&[(1, ""), (2, UNHEALTHY)]));
    assert_eq!((leader.known(), other.known()), (Some(vec![address(1), address(2)]), None));
    assert_eq!(states(&leader), [State::Serving, State::Unhealthy], "before any other worker chooses among them");
    other.tick();
    assert_eq!(other.known(), leader.known());
    let configured = &other.pools[0].1;
    let hosts: Vec<Address> = other.worker.pool("gpu", configured).hosts.iter().map(|host| host.address).collect();
    assert_eq!(hosts, [address(1), address(2)]);
    let header = record(&process).header;
    assert_eq!((header.discovered, header.failed_polls, leader.host.value_of(&format!("{METRIC}read"))), (2, 0, Some(1)));
    assert!(leader.host.logged().iter().any(|line| line.ends_with("Envoy's cluster has 2 hosts: 10.0.0.2:80, 10.0.0.3:80 came")));
}

#[test]
fn a_host_that_goes_is_retired_once_all_workers_know_and_one_that_comes_back_is_another_generation() {
    let process = Process::new(1);
    let (mut leader, mut other) = (Bench::new(&process, ""), Bench::new(&process, ""));
    leader.learn(&[(1, ""), (2, "")]);
    other.tick();
    let generations = || record(&process).hosts().map(|host| (host.address(), host.generation)).collect::<Vec<_>>();
    assert_eq!(generations(), [(address(1), 1), (address(2), 2)]);
    leader.learn(&[(1, "")]);
    assert_eq!(generations().len(), 2, "the other worker may yet choose it");
    other.tick();
    leader.tick();
    assert_eq!(generations(), [(address(1), 1)]);
    leader.learn(&[(1, ""), (2, "")]);
    other.tick();
    assert_eq!(generations(), [(address(1), 1), (address(2), 3)]);
}

#[test]
fn whatever_is_no_list_of_hosts_keeps_the_last_one_and_is_counted() {
    let mut bench = Bench::new(&Process::new(1), "");
    bench.learn(&[(1, "")]);
    let long = "x".repeat(MOST_BYTES + 1);
    let answers = [
        (Some("200"), "nonsense", "is not Envoy's list of clusters"),
        (Some("200"), "{}", "Envoy has no cluster named \"gpu\""),
        (Some("200"), "", "the answer is empty"),
        (Some("200"), long.as_str(), "at most 4194304 are read"),
        (Some("404"), "", "the answer was 404"),
        (Some("504"), "", "no answer within 2 s"),
        (None, "", "cut off"),
    ];
    for (count, (status, body, line)) in (1..).zip(answers) {
        let token = bench.asks().token;
        bench.answer(token, status, body);
        assert_eq!(bench.known(), Some(vec![address(1)]), "{line}");
        assert_eq!(record(&bench.host.process).header.failed_polls, count, "{line}");
        let logged = bench.host.logged().pop().unwrap();
        assert!(logged.contains(line) && logged.contains("; the last known 1 stay"), "{logged}");
    }
    bench.host.refuse(Call::Call, 1);
    while record(&bench.host.process).header.failed_polls == 7 {
        bench.tick();
    }
    assert_eq!(bench.host.value_of(&format!("{METRIC}failed")), Some(8));
    bench.learn(&[]);
    assert_eq!(bench.known(), Some(Vec::new()), "a cluster without hosts has none");
}

#[test]
fn an_answer_that_comes_when_another_leads_changes_nothing() {
    let process = Process::new(1);
    let (mut first, mut second) = (Bench::new(&process, ""), Bench::new(&process, ""));
    let old = first.asks();
    (0..10).for_each(|_| _ = second.tick());
    second.learn(&[(2, "")]);
    first.tick();
    first.answer(old.token, Some("200"), &page(&[(1, "")]));
    assert_eq!((first.known(), second.known()), (Some(vec![address(2)]), Some(vec![address(2)])));
}

#[test]
fn a_new_vm_knows_the_hosts_before_its_first_tick() {
    let process = Process::new(1);
    let mut leader = Bench::new(&process, "");
    leader.learn(&[(1, ""), (2, "")]);
    let mut anew = Bench::new(&process, "");
    anew.worker.stream_starts(1, &"plimsoll".into(), &anew.pools);
    assert_eq!(anew.known(), leader.known());
}

#[test]
fn what_is_lost_or_overwritten_is_there_again_after_the_next_look() {
    let process = Process::new(1);
    let (mut leader, mut other) = (Bench::new(&process, ""), Bench::new(&process, ""));
    leader.learn(&[(1, ""), (2, "")]);
    other.tick();
    process.put(&shared::key("gpu"), b"garbage".into());
    process.put(&shared::members_key("gpu"), b"garbage".into());
    other.tick();
    assert_eq!(other.known(), Some(vec![address(1), address(2)]), "what was known last stands");
    leader.learn(&[(1, "")]);
    other.tick();
    assert_eq!(other.known(), Some(vec![address(1)]));
    let mut late = Bench::new(&process, "");
    late.tick();
    assert_eq!(late.known(), other.known());
}

#[test]
fn the_status_page_says_what_is_known_of_envoys_cluster() {
    let process = Process::new(1);
    let mut bench = Bench::new(&process, "");
    let discovery = |bench: &Bench| {
        let host = Fake::new(&bench.host.process);
        host.stream(1, |stream| {
            stream.headers = [(b":method".to_vec(), b"GET".to_vec()), (b":path".to_vec(), b"/status.json".to_vec())].into();
        });
        host.make_current(1);
        crate::roles::status::answer(&host).unwrap();
        let status: serde_json::Value = serde_json::from_str(&host.stream(1, |stream| stream.body.clone())).unwrap();
        status["pools"]["gpu"]["discovery"].clone()
    };
    let token = bench.asks().token;
    assert_eq!(discovery(&bench), serde_json::json!({"hosts": null, "age_ms": null, "failed_polls": 0}));
    bench.answer(token, Some("503"), "");
    bench.learn(&[(1, ""), (2, "")]);
    bench.host.process.pass(Duration::from_millis(250));
    assert_eq!(discovery(&bench), serde_json::json!({"hosts": 2, "age_ms": 250, "failed_polls": 1}));
}

#[test]
fn a_late_answer_of_a_former_leader_leaves_no_worker_behind() {
    let process = Process::new(1);
    let [mut first, mut second, mut third] = [(); 3].map(|()| Bench::new(&process, ""));
    let (before, now) = ([(1, ""), (2, "")], page(&[(1, ""), (2, ""), (3, "")]));
    first.learn(&before);
    second.tick();
    third.tick();
    // The first asks, and stands still until another leads, and asks.
    let firsts = first.asks();
    let mut seconds = Vec::new();
    for _ in 0..20 {
        seconds.extend(second.tick());
        third.tick();
    }
    assert_eq!(seconds.len(), 1);
    first.answer(firsts.token, Some("200"), &now);
    second.answer(seconds[0].token, Some("200"), &now);
    first.tick();
    third.tick();
    let known = Some(vec![address(1), address(2), address(3)]);
    assert_eq!([first.known(), second.known(), third.known()], [known.clone(), known.clone(), known]);
}

#[test]
fn what_was_stored_though_the_record_could_not_be_is_known_after_the_next_look() {
    let process = Process::new(1);
    let [mut leader, mut other] = [(); 2].map(|()| Bench::new(&process, ""));
    leader.learn(&[(1, "")]);
    other.tick();
    let call = leader.asks();
    let host = leader.host.clone();
    // The membership is stored, and the record is not.
    leader.host.meanwhile(move || {
        let refusing = host.clone();
        host.meanwhile(move || refusing.refuse(Call::Store, 1));
    });
    leader.answer(call.token, Some("200"), &page(&[(1, ""), (2, "")]));
    other.tick();
    assert_eq!(other.known(), Some(vec![address(1)]));
    leader.learn(&[(1, ""), (2, "")]);
    other.tick();
    assert_eq!(other.known(), Some(vec![address(1), address(2)]));
}

#[test]
fn as_long_as_nothing_is_known_it_looks_again_soon_whatever_the_interval() {
    let mut bench = Bench::new(&Process::new(1), "");
    bench.pools = match Role::parse(br#"{"pools": {"gpu": {"discovery": {"cluster": "envoy_admin", "interval_ms": 3600000}}}}"#) {
        Ok(Role::Balancer(config)) => config.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect(),
        other => panic!("{other:?}"),
    };
    let token = bench.asks().token;
    bench.answer(token, Some("200"), "{}");
    // The time of the second had been set before the first was answered.
    (0..2).for_each(|_| bench.learn(&[(1, "")]));
    assert!((0..100).all(|_| bench.tick().is_empty()));
}

#[test]
fn where_one_of_two_instances_wants_to_know_it_is_asked_whichever_is_newer() {
    let mut bench = Bench::new(&Process::new(1), "");
    let plain = match Role::parse(br#"{"pools": {"gpu": {"hosts": [{"address": "10.0.0.9:80"}]}}}"#) {
        Ok(Role::Balancer(config)) => {
            config.pools.into_iter().map(|(name, pool)| (name.as_str().into(), pool)).collect::<Pools>()
        }
        other => panic!("{other:?}"),
    };
    bench.tick();
    bench.worker.root_ticks(2, &"another".into(), &plain);
    bench.learn(&[(1, "")]);
    assert_eq!(bench.known(), Some(vec![address(1)]));
    bench.worker.root_ticks(2, &"another".into(), &plain);
    bench.tick();
    let addresses: Vec<String> = record(&bench.host.process).hosts().map(|host| host.address().to_string()).collect();
    assert_eq!(addresses, ["10.0.0.9:80", "10.0.0.2:80"]);
}
