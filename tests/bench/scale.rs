//! What a choice costs with 1,024 hosts: the record is read and written whole, so that its length counts.

use crate::Effort;
use crate::figures::{Figure, Figures, Target};
use crate::hosts;
use crate::native::{Process, Vm};
use crate::rounds::{Turns, take_turns};
use crate::systems::{self, Chooser, System};

const MOST: usize = 1024;
const MANY: usize = 64;

/// Envoy's own count of the VMs that it has.
const VMS: &str = "wasm.envoy.wasm.runtime.v8.active";

/// Measures it beside 64 hosts.
pub async fn run(effort: Effort, figures: &mut Figures) {
    let hosts = hosts::start(MOST).await;
    let wanted = [
        (Chooser::RoundRobin, MOST),
        (Chooser::Floor, MOST),
        (Chooser::Ours, MOST),
        (Chooser::FullScan, MOST),
        (Chooser::RoundRobin, MANY),
        (Chooser::Ours, MANY),
    ];
    let mut systems = systems::start(&wanted, &hosts, figures).await;
    figures.note("one worker for each Envoy, saturated by 32 HTTP/1.1 clients");
    // The warm-up opens a connection to each of the 1,024.
    let plan = effort.pick(
        Turns { rounds: 9, turns: 10, requests: 300, warm_up: 60 },
        Turns { rounds: 2, turns: 1, requests: 100, warm_up: 20 },
    );
    let rounds = take_turns(&mut systems, plan).await;
    let cpu = |hosts| rounds.each(Chooser::RoundRobin, hosts, |cost| cost.cpu);
    for (chooser, hosts) in [(Chooser::Floor, MOST), (Chooser::Ours, MOST), (Chooser::FullScan, MOST), (Chooser::Ours, MANY)] {
        let name = format!("cpu_added_us.{}_{hosts}", chooser.key());
        let what = format!("CPU per request added by {}, {hosts} hosts", chooser.name());
        figures.add(Figure::new(name, what, "µs", &rounds.added(chooser, hosts)).beside("no filter", &cpu(hosts)));
    }
    let (ours, floor) = (rounds.added(Chooser::Ours, MOST), rounds.added(Chooser::Floor, MOST));
    let over_floor = Figure::ratio("ours_over_floor_1024", "added by ours, 1024 hosts, over the floor F", &ours, &floor);
    figures.add(over_floor.target(Target::AtMost(3.0)));
    let own = rounds.added(Chooser::Ours, MANY);
    let over_own = Figure::ratio("ours_1024_over_ours_64", "added by ours, 1024 hosts, over 64 hosts", &ours, &own);
    figures.add(over_own.target(Target::AtMost(2.2)));
    memory(&systems, figures).await;
    record_bytes(figures);
}

/// What the module takes of memory, once all have served: all that Envoy holds more with it than without, for each VM.
async fn memory(systems: &[System], figures: &mut Figures) {
    figures.note(
        "memory for each VM: Envoy's resident memory with ours, less that without a filter, by Envoy's own count of VMs: each of the file's two Wasm filters (the balancer, the status page) has one on the main thread, one on each worker, and one from which those are cloned; the figure is the mean of both filters, and what VMs share (compiled code) is in it",
    );
    for hosts in [MOST, MANY] {
        let of = |chooser| {
            let system = systems.iter().find(|system| (system.chooser, system.hosts) == (chooser, hosts));
            system.expect("started above")
        };
        let (none, ours) = (of(Chooser::RoundRobin), of(Chooser::Ours));
        let megabytes = |system: &System| system.envoy.rss() as f64 / 1e6;
        for system in [none, ours] {
            let name = format!("memory_mb.{}", system.key());
            let what = format!("memory of Envoy with one worker, {}", system.name());
            figures.add(Figure::new(name, what, "MB", &[megabytes(system)]));
        }
        let vms = ours.envoy.stat(VMS).await;
        let each = (megabytes(ours) - megabytes(none)) / vms as f64;
        let what = format!("memory for each of {vms} VMs, {}", ours.name());
        figures.add(Figure::new(format!("memory_per_vm_mb.{hosts}"), what, "MB", &[each]));
    }
}

/// What every transaction reads and writes.
fn record_bytes(figures: &mut Figures) {
    for hosts in [MOST, MANY] {
        for workers in [2, 32] {
            let process = Process::new();
            for _ in 0..workers {
                let mut vm = Vm::start(&process, hosts, 1);
                vm.take();
            }
            let bytes = process.record_bytes().len() as f64;
            let what = format!("the record, {hosts} hosts, {workers} workers");
            figures.add(Figure::new(format!("record_bytes.hosts_{hosts}_workers_{workers}"), what, "B", &[bytes]));
        }
    }
}
