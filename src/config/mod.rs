//! The configuration, in two stages: [`json`] holds what the user wrote, [`reader`] takes it apart and names every fault, and the types here
//! are what the program runs on: a value of them is valid by construction.

mod classify;
mod health;
mod hosts;
mod json;
mod policy;
mod pool;
mod queue;
mod reader;
mod source;
mod telemetry;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

pub use classify::{Classify, Pointer};
pub use health::{Breaker, Failure, Probe, Statuses};
pub use hosts::{Discovery, Entry, Host, MOST_HOSTS, WEIGHTS, is_a_hosts};
pub use policy::{Policy, Session, Weights};
pub use pool::{Explain, Jobs, NoHost, Pool, Score};
pub use queue::{Priorities, Queue};
pub use source::Source;
pub use telemetry::{Scrape, Telemetry};

use json::Json;
use reader::{Faults, Fields, Reader};

/// Most pools of one configuration: each is one record that every worker visits on each tick.
const MOST_POOLS: usize = 64;

/// What an instance of the filter does.
#[derive(Clone, Debug)]
pub enum Role {
    /// Chooses hosts.
    Balancer(Balancer),
    /// Answers the status paths.
    Status,
    /// Reads fields of request bodies.
    Classifier(Classify),
}

/// The balancer's configuration.
#[derive(Clone, Debug)]
pub struct Balancer {
    /// The request header that the cluster's `override_host` policy reads; lower case.
    pub override_header: Rc<str>,
    /// The pools by name, which is the name of their Envoy cluster.
    pub pools: BTreeMap<String, Rc<Pool>>,
}

/// An Alertmanager.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alerts {
    /// The Envoy cluster that points at it.
    pub cluster: String,
    /// Where it takes alerts.
    pub path: String,
}

impl Role {
    /// Reads a configuration. The error holds one line per fault: path, value, and what is allowed.
    pub fn parse(bytes: &[u8]) -> Result<Self, Vec<String>> {
        let faults = Faults::default();
        let role = Self::read(bytes, &faults);
        let lines = faults.into_lines();
        match role {
            Some(role) if lines.is_empty() => Ok(role),
            _ => Err(lines),
        }
    }

    fn read(bytes: &[u8], faults: &Faults) -> Option<Self> {
        let document: Json = match serde_json::from_slice(bytes) {
            Ok(document) => document,
            Err(error) if looks_like_protobuf(bytes) => {
                let how = "it must be a google.protobuf.StringValue that holds JSON (a Struct arrives here as protobuf bytes)";
                faults.note("", format_args!("not JSON ({error}); {how}"));
                return None;
            }
            Err(error) => {
                faults.note("", format_args!("not JSON: {error}"));
                return None;
            }
        };
        let mut fields = Reader::new(faults, &document).fields()?;
        let roles = ["pools", "status", "classify"];
        let named: Vec<&str> = roles.into_iter().filter(|role| fields.has(role)).collect();
        if named.len() > 1 {
            let two = named.join(" and ");
            faults.note("", format_args!("{two} are there together; one instance of the filter has one of {}", roles.join(", ")));
            return None;
        }
        if fields.has("status") {
            let status = fields.boolean("status", false);
            if !status {
                fields.note("status", "only true is allowed; leave the instance out instead");
            }
            fields.finish();
            return Some(Role::Status);
        }
        if fields.has("classify") {
            let classify = fields.optional("classify", Classify::read);
            fields.finish();
            return classify.map(Role::Classifier);
        }
        Balancer::read(fields).map(Role::Balancer)
    }
}

impl Balancer {
    fn read(mut fields: Fields) -> Option<Self> {
        let token = "a header name in lower case, such as x-gateway-destination-endpoint";
        let override_header: Rc<str> =
            fields.text("override_header", "x-gateway-destination-endpoint", token, is_header_name).into();
        let trusts_headers = fields.boolean("trusted_headers", false);
        let alerts = fields.optional("alerts", Alerts::read).map(Rc::new);
        let whole = pool::Whole { override_header: override_header.clone(), trusts_headers, alerts };
        let mut pools = BTreeMap::new();
        let there = fields.take("pools", |value| {
            value.fields()?.each(|name, pool| {
                if name.is_empty() {
                    pool.refuse("the pool of a cluster: its name is empty");
                } else if let Some(read) = Pool::read(pool, name, &whole) {
                    pools.insert(name.to_owned(), Rc::new(read));
                }
            });
            if !(1..=MOST_POOLS).contains(&pools.len()) {
                value.refuse(format_args!("a set of 1..={MOST_POOLS} pools"));
            }
            Some(())
        });
        if there.is_none() {
            fields.note("pools", "it is missing; say \"pools\": {\"<cluster>\": {\"hosts\": […]}}, or \"status\": true");
        }
        fields.finish();
        Some(Self { override_header, pools })
    }
}

impl Alerts {
    fn read(fields: &mut Fields) -> Self {
        let cluster = cluster(fields, "alertmanager");
        let path = fields.text("path", "/api/v2/alerts", "a path that starts with /, such as /api/v2/alerts", is_path);
        Self { cluster, path }
    }
}

/// The name of an Envoy cluster that requests of our own go to, which must be there.
fn cluster(fields: &mut Fields, example: &str) -> String {
    let cluster = fields.take("cluster", |value| {
        const ALLOWED: &str = "the name of a cluster";
        value.text(ALLOWED).filter(|name| !name.is_empty() || value.refuse(ALLOWED)).unwrap_or_default().to_owned()
    });
    if cluster.is_none() {
        fields.note("cluster", format_args!("it is missing; say \"cluster\": \"{example}\""));
    }
    cluster.unwrap_or_default()
}

/// A path as a request of our own may ask for it.
fn is_path(text: &str) -> bool {
    text.starts_with('/') && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// A duration of 1 ms to an hour.
fn millis(fields: &mut Fields, key: &'static str, default: u64) -> Duration {
    Duration::from_millis(fields.integer(key, 1..=3_600_000, default))
}

/// Header names that mean something already.
const TAKEN: [&str; 17] = [
    "host",
    "connection",
    "proxy-connection",
    "keep-alive",
    "content-length",
    "content-type",
    "content-encoding",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "expect",
    "accept",
    "authorization",
    "cookie",
    "grpc-timeout",
    "x-request-id",
];

/// Names that HTTP allows, without those that Envoy or HTTP itself give a meaning.
fn is_header_name(name: &str) -> bool {
    let is_token = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "!#$%&'*+-.^_`|~".contains(c);
    let is_taken = TAKEN.contains(&name) || name.starts_with("x-envoy-") || name.starts_with("x-forwarded-");
    !name.is_empty() && name.len() <= 128 && name.chars().all(is_token) && !is_taken
}

/// Whether somebody wrote the configuration as a protobuf message: `Struct` starts with the tag of its first field.
fn looks_like_protobuf(bytes: &[u8]) -> bool {
    bytes.first() == Some(&0x0A) && bytes.iter().any(|byte| *byte < 0x09)
}

#[cfg(test)]
mod tests;
