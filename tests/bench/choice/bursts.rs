//! Key frames: jobs that come all at once, on top of the others.

use std::time::Duration;

use support::bursts::Bursts;
use support::trace::{Arrival, earliest_completion};

use super::points::{Field, fail_on_errors, p99};
use super::{CLASSES, Fleet, MODERATE, Plan};
use crate::figures::{Figure, Figures};
use crate::queue::MIX;
use crate::queue::table::{grid, milliseconds, quantile};
use crate::queue::turn::Turn;
use crate::rounds::progress;

/// So many at once, every so many seconds of a job's time.
const AT_ONCE: usize = 20;
const EVERY: f64 = 10.0;

/// Of which part of the mix they are. Of the longest part but one, so many so often would be as much work as eight cards do, and
/// with the others more than the fleet can.
const CLASS: usize = 0;

/// One turn of each.
pub async fn run(plan: &Plan, field: &mut Field<'_>, figures: &mut Figures) {
    let others = plan.record(Fleet::Mixed, MODERATE, plan.jobs, 997);
    let seconds = MIX[CLASS].1;
    let key_frame = Arrival { at: Duration::ZERO, length: plan.second.mul_f64(seconds), class: CLASS };
    let with_bursts = Bursts::over(&others, plan.second.mul_f64(EVERY), AT_ONCE, key_frame);
    let speeds = Fleet::Mixed.speeds();
    let load = MODERATE + AT_ONCE as f64 * seconds / EVERY / speeds.iter().sum::<f64>();
    figures.note(format!(
        "bursts: the mixed fleet at load {MODERATE}, and {AT_ONCE} key frames (class {}, {seconds} s) at once every {EVERY} s, scaled as the others: together a load of {load:.2}; {} jobs, {} bursts, one turn each",
        CLASSES[CLASS],
        with_bursts.arrivals.len(),
        with_bursts.bursts.len()
    ));
    let limit = earliest_completion(&with_bursts.arrivals, &speeds);
    let limit = Shape::of(&Turn::simulated(&limit, speeds.len(), Duration::ZERO), &with_bursts);
    let mut rows = vec![("the limit", limit.row(&limit, 0))];
    for index in 0..field.systems.len() {
        let kind = field.systems[index].kind.kind;
        progress(format_args!("bursts: {}", kind.name()));
        let turn = field.turn(index, &with_bursts.arrivals).await;
        fail_on_errors(kind.name(), &turn, figures);
        let shape = Shape::of(&turn, &with_bursts);
        for (what, value, limit) in [
            ("p99", shape.p99, limit.p99),
            ("makespan_p50", shape.half, limit.half),
            ("makespan_max", shape.longest, limit.longest),
        ] {
            let words = format!("bursts, {}, {}, over the limit", what.replace('_', " "), kind.name());
            figures.add_unprinted(Figure::new(format!("bursts.{what}_over_limit.{}", kind.key()), words, "×", &[value / limit]));
            let words = format!("bursts, {}, {}", what.replace('_', " "), kind.name());
            figures.add_unprinted(Figure::new(format!("bursts.{what}_ms.{}", kind.key()), words, "ms", &[value * 1e3]));
        }
        rows.push((kind.name(), shape.row(&limit, turn.errors)));
    }
    progress(format_args!(""));
    let head = ["P99 ms", "P99/limit", "makespan P50 ms", "/limit", "max", "/limit", "errors"];
    let corner = format!("bursts of {AT_ONCE} key frames, mixed");
    let text = grid(&corner, &head, &rows);
    figures.table(text + "makespan: from a burst to the answer of its last key frame; P99 is of all jobs\n");
}

/// In seconds.
struct Shape {
    p99: f64,
    half: f64,
    longest: f64,
}

impl Shape {
    fn of(turn: &Turn, with_bursts: &Bursts) -> Self {
        let makespans = with_bursts.makespans(&turn.answered);
        Self { p99: p99(turn), half: quantile(&makespans, 0.5), longest: quantile(&makespans, 1.0) }
    }

    fn row(&self, limit: &Self, errors: usize) -> Vec<String> {
        let pair = |own: f64, limit: f64| [milliseconds(own), format!("{:.2}", own / limit)];
        let mut row: Vec<String> =
            [pair(self.p99, limit.p99), pair(self.half, limit.half), pair(self.longest, limit.longest)].concat();
        row.push(errors.to_string());
        row
    }
}
