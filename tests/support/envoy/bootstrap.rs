//! A bootstrap as a tree, and the places in it that tests change.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

const WASM: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const MANAGER: &str = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const ROUTER: &str = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";

pub(super) struct Bootstrap {
    file: PathBuf,
    tree: Value,
}

impl Bootstrap {
    /// Reads a YAML file.
    pub fn read(file: &Path) -> Self {
        let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let tree = serde_norway::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        Self { file: file.to_owned(), tree }
    }

    pub fn value(&mut self) -> &mut Value {
        &mut self.tree
    }

    fn missing(&self, what: &str) -> ! {
        panic!("{} has no {what}, which the tests look for", self.file.display())
    }

    fn listener(&mut self, name: &str) -> &mut Value {
        if !items(&self.tree["static_resources"]["listeners"]).any(|listener| listener["name"] == name) {
            self.missing(&format!("listener named {name}"));
        }
        items_mut(&mut self.tree["static_resources"]["listeners"]).find(|listener| listener["name"] == name).expect("found above")
    }

    /// The cluster `gpu`.
    pub fn cluster(&mut self) -> &mut Value {
        if !items(&self.tree["static_resources"]["clusters"]).any(|cluster| cluster["name"] == "gpu") {
            self.missing("cluster named gpu");
        }
        items_mut(&mut self.tree["static_resources"]["clusters"]).find(|cluster| cluster["name"] == "gpu").expect("found above")
    }

    /// The `typed_config` of the first HTTP connection manager of a listener.
    pub fn connection_manager(&mut self, listener: &str) -> &mut Value {
        let has_one = |chain: &Value| items(&chain["filters"]).any(|filter| filter["typed_config"]["@type"] == MANAGER);
        if !items(&self.listener(listener)["filter_chains"]).any(has_one) {
            self.missing(&format!("HTTP connection manager in the listener {listener}"));
        }
        items_mut(&mut self.listener(listener)["filter_chains"])
            .flat_map(|chain| items_mut(&mut chain["filters"]))
            .map(|filter| &mut filter["typed_config"])
            .find(|config| config["@type"] == MANAGER)
            .expect("found above")
    }

    fn http_filters(&mut self) -> &mut Vec<Value> {
        self.connection_manager("ingress")["http_filters"].as_array_mut().expect("http_filters is a list")
    }

    /// Where our balancer is among `ingress`'s HTTP filters.
    fn balancer(&mut self) -> Option<usize> {
        self.http_filters().iter().position(|filter| {
            let text = filter["typed_config"]["config"]["configuration"]["value"].as_str();
            filter["typed_config"]["@type"] == WASM && text.is_some_and(|text| text.contains("\"pools\""))
        })
    }

    pub fn set_endpoints(&mut self, addresses: &[SocketAddr]) {
        self.cluster()["load_assignment"]["endpoints"] = endpoints(addresses);
    }

    /// Lets the cluster `gpu` follow the endpoints in this file, in place of its own.
    pub fn follow_endpoints(&mut self, file: &Path) {
        let directory = file.parent().expect("a file is in a directory");
        let cluster = self.cluster();
        cluster.as_object_mut().expect("a cluster is an object").remove("load_assignment");
        cluster["type"] = "EDS".into();
        cluster["eds_cluster_config"]["eds_config"] = json!({
            "path_config_source": { "path": file, "watched_directory": { "path": directory } },
            "resource_api_version": "V3",
        });
    }

    /// Adds a cluster like `gpu`, of these hosts.
    pub fn add_cluster_like_ours(&mut self, name: &str, addresses: &[SocketAddr]) {
        let mut cluster = self.cluster().clone();
        cluster["name"] = name.into();
        cluster["load_assignment"] = json!({ "cluster_name": name, "endpoints": endpoints(addresses) });
        self.tree["static_resources"]["clusters"].as_array_mut().expect("clusters").push(cluster);
    }

    /// Puts a route like the first of `ingress` before it, to this cluster.
    pub fn add_route(&mut self, cluster: &str, is_for: Value) {
        let hosts = &mut self.connection_manager("ingress")["route_config"]["virtual_hosts"];
        let Some(routes) = hosts[0]["routes"].as_array_mut() else { self.missing("route in the listener ingress") };
        let mut route = routes[0].clone();
        route["match"] = is_for;
        route["route"]["cluster"] = cluster.into();
        routes.insert(0, route);
    }

    /// Adds a plain cluster.
    pub fn add_cluster(&mut self, name: &str, address: SocketAddr) {
        let cluster = json!({
            "name": name,
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": { "cluster_name": name, "endpoints": endpoints(&[address]) },
        });
        self.tree["static_resources"]["clusters"].as_array_mut().expect("clusters").push(cluster);
    }

    /// Changes the balancer's configuration as the JSON that it is.
    pub fn edit_configuration(&mut self, change: impl FnOnce(&mut Value)) {
        let Some(at) = self.balancer() else { self.missing("Wasm filter with \"pools\" in the listener ingress") };
        let text = self.http_filters()[at]["typed_config"]["config"]["configuration"]["value"].as_str().expect("matched above");
        let mut configuration = serde_json::from_str(text).unwrap_or_else(|error| panic!("{}: {error}", self.file.display()));
        change(&mut configuration);
        self.http_filters()[at]["typed_config"]["config"]["configuration"]["value"] = configuration.to_string().into();
    }

    pub fn set_configuration_text(&mut self, text: &str) {
        let Some(at) = self.balancer() else { self.missing("Wasm filter with \"pools\" in the listener ingress") };
        self.http_filters()[at]["typed_config"]["config"]["configuration"]["value"] = text.into();
    }

    /// Changes the action of every route of `ingress` to the cluster `gpu`.
    pub fn edit_routes(&mut self, mut change: impl FnMut(&mut Value)) {
        let mut found = false;
        for host in items_mut(&mut self.connection_manager("ingress")["route_config"]["virtual_hosts"]) {
            for route in items_mut(&mut host["routes"]).filter(|route| route["route"]["cluster"] == "gpu") {
                change(&mut route["route"]);
                found = true;
            }
        }
        if !found {
            self.missing("route to the cluster gpu in the listener ingress");
        }
    }

    /// Inserts an HTTP filter so many places after ours; before the router where ours has been removed.
    pub fn insert_filter(&mut self, filter: Value, after: usize) {
        let router = self.http_filters().iter().position(|filter| filter["typed_config"]["@type"] == ROUTER);
        let at = self.balancer().map(|at| at + after).or(router);
        let Some(at) = at else { self.missing("router in the listener ingress") };
        self.http_filters().insert(at, filter);
    }

    /// Removes every Wasm filter of every listener.
    pub fn remove_filter(&mut self) {
        visit(&mut self.tree, &mut |node| {
            if let Some(filters) = node.get_mut("http_filters").and_then(Value::as_array_mut) {
                filters.retain(|filter| filter["typed_config"]["@type"] != WASM);
            }
        });
    }

    pub fn has_filter(&mut self) -> bool {
        let mut found = false;
        visit(&mut self.tree, &mut |node| found |= node["@type"] == WASM);
        found
    }

    /// Lets every Wasm filter load this module.
    pub fn set_module(&mut self, module: &Path) {
        let path = module.to_str().expect("a path in UTF-8");
        visit(&mut self.tree, &mut |node| {
            if node["@type"] == WASM {
                node["config"]["vm_config"]["code"]["local"]["filename"] = path.into();
            }
        });
    }

    /// Listeners and admin on free ports of loopback; the listeners' statistics under their names.
    pub fn on_free_ports(&mut self) {
        let free = json!({ "socket_address": { "address": "127.0.0.1", "port_value": 0 } });
        self.tree["admin"]["address"] = free.clone();
        for listener in items_mut(&mut self.tree["static_resources"]["listeners"]) {
            listener["address"] = free.clone();
            listener["stat_prefix"] = listener["name"].clone();
        }
    }

    /// Puts the admin interface on this address.
    pub fn set_admin(&mut self, address: SocketAddr) {
        self.tree["admin"]["address"]["socket_address"] =
            json!({ "address": address.ip().to_string(), "port_value": address.port() });
    }

    /// Moves our balancer's configuration out of the bootstrap: what is left asks for it in `file`. Gives what belongs there.
    pub fn make_live(&mut self, file: &Path) -> Value {
        let Some(at) = self.balancer() else { self.missing("Wasm filter with \"pools\" in the listener ingress") };
        let filter = &mut self.http_filters()[at];
        let directory = file.parent().expect("a file is in a directory");
        let source = json!({
            "path_config_source": { "path": file, "watched_directory": { "path": directory } },
            "resource_api_version": "V3",
        });
        let typed_config = filter["typed_config"].take();
        *filter = json!({
            "name": filter["name"],
            "config_discovery": { "config_source": source, "type_urls": [WASM] },
        });
        json!({
            "version_info": "1",
            "resources": [{
                "@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
                "name": filter["name"],
                "typed_config": typed_config,
            }],
        })
    }
}

fn endpoints(addresses: &[SocketAddr]) -> Value {
    let endpoint = |address: &SocketAddr| {
        let socket = json!({ "address": address.ip().to_string(), "port_value": address.port() });
        json!({ "endpoint": { "address": { "socket_address": socket } } })
    };
    json!([{ "lb_endpoints": addresses.iter().map(endpoint).collect::<Vec<_>>() }])
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn items_mut(list: &mut Value) -> impl Iterator<Item = &mut Value> {
    list.as_array_mut().into_iter().flatten()
}

/// Calls `change` for every object of the tree.
fn visit(node: &mut Value, change: &mut impl FnMut(&mut Value)) {
    if node.is_object() {
        change(node);
    }
    match node {
        Value::Object(object) => object.values_mut().for_each(|child| visit(child, change)),
        Value::Array(list) => list.iter_mut().for_each(|child| visit(child, change)),
        _ => {}
    }
}
