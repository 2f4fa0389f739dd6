//! What a second Wasm filter costs that sees each attempt by itself: an upstream HTTP filter of the cluster, one instance per attempt.
//!
//! Our filter stands among the listener's and sees a request, however many attempts Envoy makes of it. Whether another instance per
//! attempt earns its place depends on what the smallest possible one costs where there is a single attempt, as there nearly always is.

use std::path::Path;

use serde_json::{Value, json};
use support::{Envoy, Gpu, GpuHost};

use crate::Effort;
use crate::figures::{Figure, Figures};
use crate::rounds::{Turns, take_turns};
use crate::systems::{self, Chooser, FILE, HTTP_OPTIONS};
use crate::{hosts, modules};

const HOSTS: usize = 64;

/// What sends an attempt: the last of a cluster's filters.
const CODEC: &str = "envoy.filters.http.upstream_codec";

/// What stands on its own, and the same with an instance per attempt in addition.
const PAIRS: [(Chooser, Chooser); 3] = [
    (Chooser::RoundRobin, Chooser::NoneButPerAttempt),
    (Chooser::Floor, Chooser::FloorPerAttempt),
    (Chooser::Ours, Chooser::OursPerAttempt),
];

/// Measures each beside what it is added to.
pub async fn run(effort: Effort, figures: &mut Figures) {
    for module in [modules::floor(), modules::trimmed_floor()] {
        check(&module).await;
    }
    let hosts = hosts::start(HOSTS).await;
    let wanted: Vec<_> = PAIRS.iter().flat_map(|(alone, with)| [(*alone, HOSTS), (*with, HOSTS)]).collect();
    let mut systems = systems::start(&wanted, &hosts, figures).await;
    figures.note("one worker for each Envoy, saturated by 32 HTTP/1.1 clients; every request is one attempt");
    let plan = effort.pick(
        Turns { rounds: 9, turns: 15, requests: 300, warm_up: 60 },
        Turns { rounds: 2, turns: 1, requests: 100, warm_up: 20 },
    );
    let rounds = take_turns(&mut systems, plan).await;
    let none = rounds.each(Chooser::RoundRobin, HOSTS, |cost| cost.cpu);
    let floor = rounds.added(Chooser::Floor, HOSTS);
    for alone in [Chooser::Floor, Chooser::Ours] {
        let what = format!("CPU per request added by {}, {HOSTS} hosts", alone.name());
        let figure = Figure::new(format!("cpu_added_us.{}", alone.key()), what, "µs", &rounds.added(alone, HOSTS));
        figures.add(figure.beside("no filter", &none));
    }
    for (alone, with) in PAIRS {
        let added = rounds.difference(with, alone, HOSTS);
        let what = format!("CPU per request added to {} by an instance per attempt", alone.name());
        let cpu = rounds.each(alone, HOSTS, |cost| cost.cpu);
        let figure = Figure::new(format!("cpu_added_per_attempt_us.{}", alone.key()), what, "µs", &added);
        figures.add(figure.beside(format!("all of {}", alone.name()), &cpu));
        let what = format!("added to {} by an instance per attempt, over the floor F", alone.name());
        figures.add(Figure::ratio(format!("per_attempt_over_floor.{}", alone.key()), what, &added, &floor));
        let rate = |chooser| rounds.each(chooser, HOSTS, |cost| cost.rate);
        let what = format!("throughput of {} with an instance per attempt over without", alone.name());
        figures.add(Figure::ratio(format!("throughput_per_attempt.{}", alone.key()), what, &rate(with), &rate(alone)));
    }
}

/// Adds the module as an upstream HTTP filter of the cluster, right before what sends.
pub fn per_attempt(envoy: Envoy, module: &Path) -> Envoy {
    // Wrapped, the filter is not among those that get our module: it is of another one beside it.
    let filter = json!({
        "name": "attempts",
        "typed_config": {
            "@type": "type.googleapis.com/xds.type.v3.TypedStruct",
            "type_url": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
            "value": {"config": {
                "name": "attempts",
                "failure_policy": "FAIL_RELOAD",
                // The downstream filter's own, as it would have to be for the two to share data. Of the same module, they share a VM.
                "vm_config": {
                    "vm_id": "plimsoll",
                    "runtime": "envoy.wasm.runtime.v8",
                    "code": {"local": {"filename": module}},
                },
            }},
        },
    });
    envoy.edit(|tree| {
        let clusters = tree["static_resources"]["clusters"].as_array_mut().expect("clusters");
        let cluster = clusters.iter_mut().find(|cluster| cluster["name"] == "gpu").expect("the cluster gpu");
        let filters = cluster["typed_extension_protocol_options"][HTTP_OPTIONS]["http_filters"].as_array_mut();
        let filters = filters.expect("the file has upstream filters");
        let at = filters.iter().position(|filter: &Value| filter["name"] == CODEC).expect("what sends is the last of them");
        filters.insert(at, filter);
    })
}

/// It does what is measured, in an attempt as elsewhere: reads the property, and sets the header that the host then sees. The listener's
/// filter is of the same module and sets the header, too, so that one is removed in between.
async fn check(module: &Path) {
    let host = GpuHost::start(Gpu::new().work_ms(0)).await;
    let filters = json!([
        {
            "name": "between",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
                "mutations": {"request_mutations": [{"remove": "x-floor"}]},
            },
        },
        {
            "name": CODEC,
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.upstream_codec.v3.UpstreamCodec"},
        },
    ]);
    let envoy = Envoy::new(FILE)
        .addresses(&[host.address()])
        .module(module)
        .cluster(json!({"typed_extension_protocol_options": {HTTP_OPTIONS: {"http_filters": filters}}}));
    let envoy = per_attempt(envoy, module).workers(1).start().await;
    let reply = envoy.client().post("/prompt", "{}").await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let seen = host.requests();
    let header = seen.last().and_then(|request| request.headers.get("x-floor")).expect("the attempt's filter sets a header");
    assert_eq!(header, "1", "the attempt's filter read no property");
}
