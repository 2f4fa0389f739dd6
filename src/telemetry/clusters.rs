//! Envoy's admin page `/clusters?format=json`: which hosts a cluster has, and what Envoy holds of them.
//!
//! Format: `envoy.admin.v3.Clusters` as JSON; what has its default is left out. A cluster that is not there, or is yet to be warmed, is missing from
//! the page, which is not the same as a cluster without hosts.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;

use crate::config::{MOST_HOSTS, is_a_hosts};
use crate::core::membership::{Condition, Member, Membership};

/// A longer page is not read: four times what Envoy 1.40 writes for the largest pool, and little enough for a VM whose memory never shrinks.
pub const MOST_BYTES: usize = 4 << 20;

/// Most characters of what is wrong with a page.
const MOST_SAID: usize = 200;

/// Where the page of one cluster is.
pub fn path(cluster: &str) -> String {
    let mut filter = String::new();
    for byte in cluster.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => filter.push(byte.into()),
            // As RE2 wants it in a pattern that is to mean itself, and then as a query wants it. Bytes beyond ASCII are no part of its syntax.
            0x80.. => filter.push_str(&format!("%{byte:02X}")),
            _ => filter.push_str(&format!("%5C%{byte:02X}")),
        }
    }
    format!("/clusters?format=json&filter=%5E{filter}%24")
}

#[derive(Deserialize)]
struct Page<'a> {
    #[serde(borrow, default)]
    cluster_statuses: Vec<Cluster<'a>>,
}

#[derive(Deserialize)]
struct Cluster<'a> {
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    host_statuses: Vec<Host<'a>>,
}

#[derive(Deserialize)]
struct Host<'a> {
    #[serde(borrow, default)]
    address: Address<'a>,
    #[serde(borrow, default)]
    health_status: Health<'a>,
    #[serde(default = "one")]
    weight: u32,
    #[serde(default)]
    priority: u32,
}

#[derive(Default, Deserialize)]
struct Address<'a> {
    #[serde(borrow)]
    socket_address: Option<Socket<'a>>,
}

#[derive(Deserialize)]
struct Socket<'a> {
    #[serde(borrow, default)]
    address: Cow<'a, str>,
    #[serde(default)]
    port_value: u32,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Health<'a> {
    failed_active_health_check: bool,
    failed_outlier_check: bool,
    failed_active_degraded_check: bool,
    failed_degraded_outlier_detection: bool,
    pending_dynamic_removal: bool,
    pending_active_hc: bool,
    excluded_via_immediate_hc_fail: bool,
    active_hc_timeout: bool,
    #[serde(borrow)]
    eds_health_status: Cow<'a, str>,
}

fn one() -> u32 {
    1
}

impl Health<'_> {
    /// The worst of what is said.
    fn condition(&self) -> Condition {
        let checks = self.failed_active_health_check || self.pending_active_hc || self.active_hc_timeout;
        let is_unhealthy = checks || self.failed_outlier_check || self.excluded_via_immediate_hc_fail;
        let is_degraded = self.failed_active_degraded_check || self.failed_degraded_outlier_detection;
        match &*self.eds_health_status {
            _ if is_unhealthy => Condition::Unhealthy,
            "UNHEALTHY" | "TIMEOUT" => Condition::Unhealthy,
            _ if is_degraded => Condition::Degraded,
            "DEGRADED" => Condition::Degraded,
            _ => Condition::Healthy,
        }
    }

    /// Also a host that was taken out of the cluster, and that Envoy keeps as long as its active health checks pass.
    fn drains(&self) -> bool {
        self.pending_dynamic_removal || self.eds_health_status == "DRAINING"
    }
}

impl Host<'_> {
    /// `None`: it listens where no job can be sent to by its address, such as on a pipe.
    fn member(&self) -> Option<Member> {
        let socket = self.address.socket_address.as_ref()?;
        let ip: IpAddr = socket.address.parse().ok()?;
        let address = Some(SocketAddr::new(ip, u16::try_from(socket.port_value).ok()?)).filter(is_a_hosts)?;
        let (drains, condition) = (self.health_status.drains(), self.health_status.condition());
        Some(Member { address: address.into(), weight: self.weight.max(1), priority: self.priority, drains, condition })
    }
}

/// The hosts of this cluster. The error says what is wrong with the page.
pub fn read(page: &[u8], cluster: &str) -> Result<Membership, String> {
    let page: Page = serde_json::from_slice(page).map_err(|error| {
        // It quotes what it stumbled over, however long that is.
        let error: String = error.to_string().chars().take(MOST_SAID).collect();
        format!("the answer is not Envoy's list of clusters ({error})")
    })?;
    let Some(ours) = page.cluster_statuses.iter().find(|status| status.name == cluster) else {
        return Err(format!("Envoy has no cluster named {cluster:?}, or it is not warm yet"));
    };
    let hosts = ours.host_statuses.len();
    if hosts > MOST_HOSTS {
        return Err(format!("the cluster has {hosts} hosts; at most {MOST_HOSTS} are allowed"));
    }
    let membership = Membership::new(ours.host_statuses.iter().filter_map(Host::member));
    if membership.members().is_empty() && hosts > 0 {
        return Err(format!("none of the cluster's {hosts} hosts has an IP address and a port"));
    }
    Ok(membership)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(port: u16, rest: &str) -> String {
        format!(r#"{{"address": {{"socket_address": {{"address": "127.0.0.1", "port_value": {port}}}}}{rest}}}"#)
    }

    fn page(hosts: &[String]) -> String {
        let other = r#"{"name": "other", "host_statuses": [{"address": {"pipe": {"path": "/x"}}}]}"#;
        format!(
            r#"{{"cluster_statuses": [{other}, {{"name": "gpu", "added_via_api": true, "host_statuses": [{}]}}]}}"#,
            hosts.join(",")
        )
    }

    fn read_hosts(hosts: &[String]) -> Result<Vec<Member>, String> {
        read(page(hosts).as_bytes(), "gpu").map(|membership| membership.members().to_vec())
    }

    fn health(health: &str) -> (bool, Condition) {
        let member = read_hosts(&[host(1, &format!(r#", "health_status": {{{health}}}"#))]).unwrap()[0];
        (member.drains, member.condition)
    }

    #[test]
    fn what_envoy_writes_is_read() {
        // From a run of Envoy 1.40, without most of its statistics.
        let text = r#"{"cluster_statuses": [{"name": "gpu", "host_statuses": [
            {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 9001}},
             "stats": [{"name": "cx_total", "value": "7"}, {"type": "GAUGE", "name": "rq_active", "value": "2"}],
             "health_status": {"eds_health_status": "DRAINING"}, "weight": 3, "priority": 1, "hostname": "h1", "locality": {"region": "a"}},
            {"address": {"socket_address": {"address": "::1", "port_value": 9001}},
             "health_status": {"eds_health_status": "HEALTHY"}, "weight": 1}],
            "circuit_breakers": {"thresholds": [{"max_connections": 1024}]}, "observability_name": "gpu"}]}"#;
        let membership = read(text.as_bytes(), "gpu").unwrap();
        let shown: Vec<_> =
            membership.members().iter().map(|m| (m.address.to_string(), m.weight, m.priority, m.drains)).collect();
        let expected = [("[::1]:9001".to_owned(), 1, 0, false), ("127.0.0.1:9001".to_owned(), 3, 1, true)];
        assert_eq!(shown, expected);
    }

    #[test]
    fn every_kind_of_health_status_has_its_meaning() {
        use Condition::*;
        let eds = |status: &str| health(&format!(r#""eds_health_status": "{status}""#));
        assert_eq!(["HEALTHY", "UNKNOWN", "A_NEW_ONE", ""].map(eds), [(false, Healthy); 4]);
        assert_eq!(["UNHEALTHY", "TIMEOUT"].map(eds), [(false, Unhealthy); 2]);
        assert_eq!((eds("DRAINING"), eds("DEGRADED")), ((true, Healthy), (false, Degraded)));
        let flag = |flag: &str| health(&format!(r#""eds_health_status": "HEALTHY", "{flag}": true"#));
        let unhealthy = [
            "failed_active_health_check",
            "failed_outlier_check",
            "pending_active_hc",
            "excluded_via_immediate_hc_fail",
            "active_hc_timeout",
        ];
        assert_eq!(unhealthy.map(flag), [(false, Unhealthy); 5]);
        let degraded = ["failed_active_degraded_check", "failed_degraded_outlier_detection"];
        assert_eq!(degraded.map(flag), [(false, Degraded); 2]);
        assert_eq!(flag("pending_dynamic_removal"), (true, Healthy));
        assert_eq!(health(r#""failed_outlier_check": false"#), (false, Healthy));
        let worst = health(r#""eds_health_status": "DEGRADED", "failed_outlier_check": true"#);
        assert_eq!(worst, (false, Unhealthy));
        let both = health(r#""eds_health_status": "DRAINING", "failed_outlier_check": true"#);
        assert_eq!(both, (true, Unhealthy), "one may be overridden, and then the other holds");
    }

    #[test]
    fn a_cluster_without_hosts_is_empty_and_one_that_is_not_there_is_not() {
        assert_eq!(read_hosts(&[]), Ok(Vec::new()));
        assert_eq!(read(br#"{"cluster_statuses": [{"name": "gpu"}]}"#, "gpu"), Ok(Membership::default()));
        assert_eq!(read(b"{}", "gpu"), Err("Envoy has no cluster named \"gpu\", or it is not warm yet".to_owned()));
        assert_eq!(read(page(&[]).as_bytes(), "gp"), Err("Envoy has no cluster named \"gp\", or it is not warm yet".to_owned()));
    }

    #[test]
    fn hosts_that_cannot_be_named_are_left_out_unless_all_are() {
        let pipe = r#"{"address": {"pipe": {"path": "/tmp/gpu"}}}"#.to_owned();
        let bad = [host(0, ""), pipe.clone(), "{}".to_owned(), host(1, "").replace("127.0.0.1", "gpu.local")];
        let mut all = bad.to_vec();
        all.push(host(7, ""));
        assert_eq!(read_hosts(&all).unwrap().len(), 1);
        assert_eq!(read_hosts(&bad), Err("none of the cluster's 4 hosts has an IP address and a port".to_owned()));
    }

    #[test]
    fn more_hosts_than_a_pool_may_have_are_refused() {
        let hosts = |count: u16| (1..=count).map(|port| host(port, "")).collect::<Vec<_>>();
        assert_eq!(read_hosts(&hosts(1024)).unwrap().len(), 1024);
        assert_eq!(read_hosts(&hosts(1025)), Err("the cluster has 1025 hosts; at most 1024 are allowed".to_owned()));
    }

    #[test]
    fn what_is_no_such_page_is_said_so() {
        for garbage in ["", "nonsense", "7", r#"{"cluster_statuses": 7}"#, r#"{"cluster_statuses": [{"name": "gpu""#] {
            let error = read(garbage.as_bytes(), "gpu").unwrap_err();
            assert!(error.starts_with("the answer is not Envoy's list of clusters ("), "{garbage}: {error}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_in_a_line_however_long_it_is() {
        let error = read_hosts(&[host(1, &format!(r#", "weight": "{}""#, "x".repeat(100_000)))]).unwrap_err();
        assert!(error.len() < 300, "{}", error.len());
    }

    #[test]
    fn a_clusters_name_is_asked_for_as_it_is() {
        assert_eq!(path("gpu"), "/clusters?format=json&filter=%5Egpu%24");
        assert_eq!(path("a|b.c"), "/clusters?format=json&filter=%5Ea%5C%7Cb%5C%2Ec%24");
        assert_eq!(path("ü&"), "/clusters?format=json&filter=%5E%C3%BC%5C%26%24");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = read(&bytes, "gpu");
        }

        #[test]
        fn a_page_that_is_cut_off_anywhere_is_refused(part in 0.0..1.0f64) {
            let text = page(&[host(1, ""), host(2, "")]);
            let cut = (text.len() as f64 * part) as usize;
            prop_assert!(read(&text.as_bytes()[..cut], "gpu").is_err());
        }
    }
}
