//! One pool's configuration.

use std::rc::Rc;
use std::time::Duration;

use super::health::{Breaker, Failure, Probe};
use super::hosts::{Discovery, Entry, Host, MOST_HOSTS, refuse_repeated};
use super::policy::{Policy, Session};
use super::queue::{Priorities, Queue};
use super::reader::{Fields, Reader};
use super::source::Source;
use super::telemetry::{Scrape, Telemetry};
use super::{Alerts, millis};

/// A pool: the hosts of one Envoy cluster.
#[derive(Clone, Debug)]
pub struct Pool {
    /// The hosts; each address once. With [`Pool::discovery`], those that were written until it is known which there are.
    pub hosts: Vec<Host>,
    /// What was written of hosts.
    pub entries: Vec<Entry>,
    /// A host's slots, unless something else is written of it.
    pub max_in_flight: u32,
    /// If the hosts are those that Envoy's cluster has.
    pub discovery: Option<Discovery>,
    /// Whether it is yet to be known which hosts there are.
    pub awaits_membership: bool,
    /// A host that joins gets its whole weight after this time, step by step; zero: at once.
    pub slow_start: Duration,
    /// How a host is chosen.
    pub policy: Policy,
    /// The parameters of `least_score`.
    pub score: Score,
    /// The EWMA's time constant.
    pub time_constant: Duration,
    /// Where a job's class is written; `None`: all are of one class.
    pub class: Option<Source>,
    /// Where it is written how much work a job is, in whatever unit; `None`: all jobs of a class are alike.
    pub cost: Option<Source>,
    /// Which jobs are better served where others of theirs were; `None`: none.
    pub session: Option<Session>,
    /// What takes a slot; `None`: every request.
    pub jobs: Option<Jobs>,
    /// Where jobs wait that no host has a slot for; `None`: they are refused.
    pub queue: Option<Queue>,
    /// Where a job's priority is written; `None`: all are the same.
    pub priority: Option<Priorities>,
    /// Where it is written whose job it is; `None`: all are one tenant's.
    pub tenant: Option<Source>,
    /// How many next-best hosts follow the chosen one in the header.
    pub alternates: usize,
    /// What happens when no host is eligible.
    pub no_host: NoHost,
    /// What becomes of hosts that fail.
    pub failure: Failure,
    /// What becomes of hosts that are slow; `None`: nothing.
    pub breaker: Option<Breaker>,
    /// How hosts are asked whether they are well; `None`: not at all.
    pub probe: Option<Probe>,
    /// How it is learned what hosts tell of themselves; `None`: not at all.
    pub telemetry: Option<Telemetry>,
    /// Who learns why a job went where it went.
    pub explain: Explain,
    /// Of the whole configuration: see [`super::Balancer::override_header`].
    pub override_header: Rc<str>,
    /// Of the whole configuration: where alerts go, if anywhere.
    pub alerts: Option<Rc<Alerts>>,
}

/// What the whole configuration says to each pool.
pub(super) struct Whole {
    pub override_header: Rc<str>,
    pub trusts_headers: bool,
    pub alerts: Option<Rc<Alerts>>,
}

/// The parameters of `least_score`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// Weight of the jobs in flight.
    pub in_flight_weight: f32,
    /// Weight of the latency.
    pub latency_weight: f32,
    /// The latency that counts 1.
    pub target_latency: Duration,
}

/// Which requests are jobs: those whose method and path are both in the lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Jobs {
    methods: Vec<String>,
    paths: Vec<String>,
}

/// What happens to a request when no host is eligible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoHost {
    /// 503 with `Retry-After`.
    Reject,
    /// Envoy's own fallback policy chooses.
    Fallback,
}

/// Who learns why a job went where it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Explain {
    /// Nobody.
    Off,
    /// The access log: it is in the stream's filter state.
    Log,
    /// The client too: it is in the response's headers.
    Header,
}

impl Jobs {
    /// Whether a request is a job. The path's query does not count.
    pub fn include(&self, method: &[u8], path: &[u8]) -> bool {
        let path = path.split(|byte| matches!(byte, b'?' | b'#')).next().unwrap_or_default();
        let is_path = |pattern: &String| match pattern.strip_suffix('*') {
            Some(prefix) => path.starts_with(prefix.as_bytes()),
            None => path == pattern.as_bytes(),
        };
        self.methods.iter().any(|name| name.as_bytes() == method) && self.paths.iter().any(is_path)
    }

    fn read(fields: &mut Fields) -> Self {
        let is_method = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_uppercase() || c == '-');
        let is_path = |text: &str| {
            let is_plain = |text: &str| text.is_ascii() && !text.contains(['?', '#', ' ', '*']);
            text.starts_with('/') && is_plain(text.strip_suffix('*').unwrap_or(text))
        };
        let methods = ("methods", "a method in upper case, such as \"POST\"");
        let methods = fields.texts("methods", &["POST"], methods, is_method);
        let paths = ("paths", "a path that starts with /, such as \"/prompt\", or \"/v1/*\" for all below");
        let paths = fields.texts("paths", &["/prompt"], paths, is_path);
        Self { methods, paths }
    }
}

impl Score {
    fn read(fields: &mut Fields) -> Self {
        let score = Self {
            in_flight_weight: fields.number("in_flight_weight", 0.0..=1000.0, 0.7),
            latency_weight: fields.number("latency_weight", 0.0..=1000.0, 0.3),
            target_latency: millis(fields, "target_latency_ms", 4000),
        };
        if score.in_flight_weight + score.latency_weight == 0.0 {
            fields.note("in_flight_weight", "0 together with latency_weight: 0 is no score; one of them must be above 0");
        }
        score
    }
}

impl Pool {
    pub(super) fn read(value: Reader, name: &str, whole: &Whole) -> Option<Self> {
        let mut fields = value.fields()?;
        let max_in_flight = fields.integer("max_in_flight", 1..=1_000_000, 50) as u32;
        let discovery = fields.optional("discovery", Discovery::read);
        let is_itself = discovery.as_ref().is_some_and(|discovery: &Discovery| discovery.cluster == name);
        if is_itself {
            fields.note("discovery", "its cluster is the pool itself; it must be one that points at Envoy's admin address");
        }
        let mut entries: Vec<Option<Entry>> = Vec::new();
        let least = usize::from(discovery.is_none());
        let there = fields.take("hosts", |list| {
            entries = list.items("hosts", least..=MOST_HOSTS, |host| Entry::read(host, max_in_flight));
        });
        if there.is_none() && discovery.is_none() {
            let say = "say \"hosts\": [{\"address\": \"10.0.0.1:8188\"}], or \"discovery\": {\"cluster\": \"envoy_admin\"}";
            fields.note("hosts", format_args!("it is missing; {say}"));
        }
        refuse_repeated(&fields, &entries);
        let policy = Policy::read(&mut fields);
        let score = fields.section("score", Score::read);
        let class = Source::of_job(&mut fields, "class", whole.trusts_headers);
        let cost = Source::of_job(&mut fields, "cost", whole.trusts_headers);
        let session = fields.optional("session", |fields| Session::read(fields, whole.trusts_headers)).flatten();
        let time_constant = fields.section("ewma", |ewma| millis(ewma, "time_constant_ms", 30_000));
        let jobs = fields.optional("jobs", Jobs::read);
        let queue = fields.optional("queue", Queue::read);
        let priority = fields.optional("priority", |fields| Priorities::read(fields, whole.trusts_headers)).flatten();
        let tenant = fields.optional("tenant", |fields| Source::read(fields, whole.trusts_headers, "x-tenant", "sub")).flatten();
        let alternates = fields.integer("alternates", 0..=8, 2) as usize;
        let no_host = match fields.word("no_host", &["reject", "fallback"], &[], "reject") {
            "fallback" => NoHost::Fallback,
            _ => NoHost::Reject,
        };
        let failure = fields.section("failure", Failure::read);
        let breaker = fields.optional("latency_breaker", Breaker::read);
        let probe = fields.optional("probe", Probe::read);
        let telemetry = fields.optional("telemetry", Telemetry::read);
        let explain = match fields.word("explain", &["off", "log", "header"], &[], "off") {
            "log" => Explain::Log,
            "header" => Explain::Header,
            _ => Explain::Off,
        };
        let slow_start = Duration::from_millis(fields.integer("slow_start_ms", 0..=3_600_000, 0));
        for key in LATER {
            fields.later(key);
        }
        fields.finish();
        let entries: Vec<Entry> = entries.into_iter().flatten().collect();
        let host = |entry: &Entry| Host::new(entry.address, max_in_flight).overridden(entry).weighed(&score);
        Some(Self {
            hosts: entries.iter().map(host).collect(),
            entries,
            max_in_flight,
            awaits_membership: discovery.is_some(),
            discovery,
            slow_start,
            policy,
            score,
            time_constant,
            class,
            cost,
            session,
            jobs,
            queue,
            priority,
            tenant,
            alternates,
            no_host,
            failure,
            breaker,
            probe,
            telemetry,
            explain,
            override_header: whole.override_header.clone(),
            alerts: whole.alerts.clone(),
        })
    }

    /// How many jobs a host is believed to run at once, for `least_time`: where jobs wait in front of the hosts, as many as it has slots (`None`); where they wait inside, one.
    pub fn most_at_once(&self) -> Option<u32> {
        match self.policy {
            Policy::LeastTime { runs_at_once: Some(count) } => Some(count),
            _ if self.queue.is_some() => None,
            _ => Some(1),
        }
    }

    /// The same of a host with so many slots.
    pub fn runs_at_once(&self, max_in_flight: u32) -> u32 {
        self.most_at_once().map_or(max_in_flight, |most| most.min(max_in_flight))
    }

    /// Whether it matters what is known of a job before it runs.
    pub fn wants_job(&self) -> bool {
        self.class.is_some() || self.cost.is_some() || self.session.is_some()
    }

    /// For how long what hosts tell of themselves holds; `None`: nobody asks.
    pub fn patience(&self) -> Option<Duration> {
        self.telemetry.as_ref().map(Telemetry::patience)
    }

    /// Whether hosts are to be known by more than their jobs and latencies.
    pub fn wants_insight(&self) -> bool {
        self.policy.wants_insight() || self.patience().is_some()
    }

    /// How hosts are asked what they have to do, if they are.
    pub fn scrape(&self) -> Option<&Scrape> {
        self.telemetry.as_ref()?.scrape.as_ref()
    }

    /// Whether no host is known, and that says nothing about which there are.
    pub fn awaits_hosts(&self) -> bool {
        self.awaits_membership && self.hosts.is_empty()
    }

    /// The same with these hosts, which are all that there are.
    #[must_use]
    pub fn with_hosts(&self, hosts: impl Iterator<Item = Host>) -> Self {
        let hosts = hosts.map(|host| host.weighed(&self.score)).collect();
        Self { hosts, awaits_membership: false, ..self.clone() }
    }
}

/// Keys of features to come.
const LATER: [&str; 2] = ["budgets", "affinity"];
