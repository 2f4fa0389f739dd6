//! What a choice costs with 1,024 hosts: the record is read and written whole, so that its length counts.

use crate::Effort;
use crate::figures::{Figure, Figures, Target};
use crate::hosts;
use crate::rounds::{Turns, take_turns};
use crate::systems::{self, Chooser};

const MOST: usize = 1024;
const MANY: usize = 64;

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
    for (chooser, hosts) in [(Chooser::RoundRobin, MOST), (Chooser::Ours, MOST), (Chooser::Ours, MANY)] {
        let system = systems.iter().find(|system| (system.chooser, system.hosts) == (chooser, hosts)).expect("started above");
        let name = format!("memory_mb.{}", system.key());
        let memory = system.envoy.rss() as f64 / 1e6;
        figures.add(Figure::new(name, format!("memory of Envoy with one worker, {}", system.name()), "MB", &[memory]));
    }
}
