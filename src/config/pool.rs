//! One pool's configuration.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::health::{Breaker, Failure, Probe};
use super::reader::{Fields, Reader};
use super::{Alerts, millis};
use crate::core::address::Address;

/// Most hosts of one pool: the size up to which the shared record is measured and tested.
const MOST_HOSTS: usize = 1024;

/// A pool: the hosts of one Envoy cluster.
#[derive(Clone, Debug)]
pub struct Pool {
    /// At least one; each address once.
    pub hosts: Vec<Host>,
    /// The score's parameters.
    pub score: Score,
    /// The EWMA's time constant.
    pub time_constant: Duration,
    /// What takes a slot; `None`: every request.
    pub jobs: Option<Jobs>,
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
    /// Who learns why a job went where it went.
    pub explain: Explain,
    /// Of the whole configuration: see [`super::Balancer::override_header`].
    pub override_header: Rc<str>,
    /// Of the whole configuration: where alerts go, if anywhere.
    pub alerts: Option<Rc<Alerts>>,
}

/// A host as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// Where it listens.
    pub address: Address,
    /// The address as Envoy writes it.
    pub text: String,
    /// Relative capacity, 0.01 to 1,000.
    pub weight: f32,
    /// What one job in flight adds to the host's score: `score.in_flight_weight / weight`.
    pub per_job: f64,
    /// Slots.
    pub max_in_flight: u32,
    /// No new jobs.
    pub drain: bool,
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
    pub(super) fn read(value: Reader, override_header: Rc<str>, alerts: Option<Rc<Alerts>>) -> Option<Self> {
        let mut fields = value.fields()?;
        let max_in_flight = fields.integer("max_in_flight", 1..=1_000_000, 50) as u32;
        let mut hosts: Vec<Option<Host>> = Vec::new();
        let there = fields.take("hosts", |list| {
            hosts = list.items("hosts", 1..=MOST_HOSTS, |host| read_host(host, max_in_flight));
        });
        if there.is_none() {
            fields.note("hosts", "it is missing; say \"hosts\": [{\"address\": \"10.0.0.1:8188\"}]");
        }
        refuse_repeated(&fields, &hosts);
        fields.word("policy", &["least_score"], &["least_time", "weighted"], "least_score");
        let score = fields.section("score", Score::read);
        let time_constant = fields.section("ewma", |ewma| millis(ewma, "time_constant_ms", 30_000));
        let jobs = fields.optional("jobs", Jobs::read);
        let alternates = fields.integer("alternates", 0..=8, 2) as usize;
        let no_host = match fields.word("no_host", &["reject", "fallback"], &[], "reject") {
            "fallback" => NoHost::Fallback,
            _ => NoHost::Reject,
        };
        let failure = fields.section("failure", Failure::read);
        let breaker = fields.optional("latency_breaker", Breaker::read);
        let probe = fields.optional("probe", Probe::read);
        let explain = match fields.word("explain", &["off", "log", "header"], &[], "off") {
            "log" => Explain::Log,
            "header" => Explain::Header,
            _ => Explain::Off,
        };
        fields.later_than("slow_start_ms", 0);
        for key in LATER {
            fields.later(key);
        }
        fields.finish();
        let mut hosts: Vec<Host> = hosts.into_iter().flatten().collect();
        for host in &mut hosts {
            host.per_job = f64::from(score.in_flight_weight) / f64::from(host.weight);
        }
        Some(Self {
            hosts,
            score,
            time_constant,
            jobs,
            alternates,
            no_host,
            failure,
            breaker,
            probe,
            explain,
            override_header,
            alerts,
        })
    }
}

/// Keys of features to come.
const LATER: [&str; 10] =
    ["discovery", "weighted", "queue", "class", "cost", "priority", "tenant", "telemetry", "budgets", "affinity"];

fn read_host(value: Reader, default_slots: u32) -> Option<Host> {
    let mut fields = value.fields()?;
    let address = fields.take("address", read_address);
    if address.is_none() {
        fields.note("address", "it is missing; say \"address\": \"10.0.0.1:8188\"");
    }
    let weight = fields.number("weight", 0.01..=1000.0, 1.0);
    let max_in_flight = fields.integer("max_in_flight", 1..=1_000_000, default_slots.into()) as u32;
    let drain = fields.boolean("drain", false);
    fields.finish();
    let address = address.flatten()?;
    Some(Host { address: address.into(), text: address.to_string(), weight, per_job: 0.0, max_in_flight, drain })
}

fn read_address(value: Reader) -> Option<SocketAddr> {
    const ALLOWED: &str = "an IP address and a port in 1..=65535, such as 10.0.0.1:8188 or [fd00::1]:8188";
    let address = value.text(ALLOWED)?.parse().ok().filter(|address: &SocketAddr| {
        let is_plain = match address {
            SocketAddr::V4(_) => true,
            SocketAddr::V6(v6) => v6.scope_id() == 0 && v6.ip().to_ipv4_mapped().is_none(),
        };
        is_plain && address.port() != 0 && !address.ip().is_unspecified() && !address.ip().is_multicast()
    });
    if address.is_none() {
        value.refuse(ALLOWED);
    }
    address
}

fn refuse_repeated(fields: &Fields, hosts: &[Option<Host>]) {
    let mut first: BTreeMap<Address, usize> = BTreeMap::new();
    for (index, host) in hosts.iter().enumerate() {
        let Some(host) = host else { continue };
        if let Some(earlier) = first.insert(host.address, index) {
            let what = format!("\"{}\" is there twice; hosts[{earlier}] has it already", host.text);
            fields.note_item("hosts", index, "address", what);
        }
    }
}
