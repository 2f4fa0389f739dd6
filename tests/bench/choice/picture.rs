//! The points as a picture: how far each system's P99 is above the limit, by load.

use std::path::Path;

use support::plot::{Line, Panel, Plot};

use super::Fleet;
use super::points::Point;
use super::systems::Kind;

/// Draws it into this file.
pub fn write(points: &[Point], file: &Path) {
    let fleets: Vec<Fleet> = Fleet::ALL.into_iter().filter(|fleet| points.iter().any(|point| point.fleet == *fleet)).collect();
    let panels = fleets.into_iter().map(|fleet| Panel { title: fleet.title(), lines: lines(points, fleet) }).collect();
    let plot = Plot {
        title: "P99 latency, times that of the clairvoyant earliest completion (in strokes: jobs wait inside the hosts)",
        across: "load",
        panels,
    };
    if let Some(directory) = file.parent() {
        std::fs::create_dir_all(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    }
    std::fs::write(file, plot.svg()).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    eprintln!("{} written", file.display());
}

fn lines(points: &[Point], fleet: Fleet) -> Vec<Line<'static>> {
    let line = |kind: Kind| {
        let of = |point: &Point| {
            let (_, over) = point.over_limit.iter().find(|(other, _)| *other == kind)?;
            Some((point.load, *over))
        };
        Line {
            name: kind.name(),
            colour: colour(kind),
            emphasised: kind.is_ours(),
            // Where jobs wait inside the cards.
            dashed: !(kind.has_slots() || kind == Kind::HaproxyQueue),
            points: points.iter().filter(|point| point.fleet == fleet).filter_map(of).collect(),
        }
    };
    Kind::ALL.into_iter().map(line).collect()
}

/// Seen on white and on black.
fn colour(kind: Kind) -> &'static str {
    match kind {
        Kind::LeastTimeQueue | Kind::LeastTime => "#e8590c",
        Kind::LeastScoreQueue | Kind::LeastScore => "#c2820e",
        Kind::RoundRobin | Kind::TwoChoices | Kind::FullScan | Kind::Weighted => "#7f78d2",
        Kind::Nginx => "#2f9e60",
        Kind::Haproxy | Kind::HaproxyQueue => "#3b82c4",
    }
}
