//! What the systems showed at one load of one fleet, beside each other and beside the limit.

use support::trace::Arrival;

use super::points::{limit, queue};
use super::systems::Kind;
use super::{Fleet, Shown};
use crate::figures::{Figure, Figures, Spread, Target};
use crate::queue::table::{Line, Losses, fine, grid, mean, milliseconds, quantile};
use crate::queue::turn::Turn;

/// All systems at one load of one fleet.
pub struct Table<'a> {
    fleet: Fleet,
    load: f64,
    shown: &'a [Shown<Kind>],
    limit: Line,
    queue: Line,
    lines: Vec<Line>,
}

impl<'a> Table<'a> {
    pub fn new(fleet: Fleet, load: f64, records: &[Vec<Arrival>], shown: &'a [Shown<Kind>]) -> Self {
        let simulated = |name: &str, key: &str, turn: fn(&[Arrival], Fleet) -> Turn| {
            let turns: Vec<Turn> = records.iter().map(|record| turn(record, fleet)).collect();
            Line::of(name, key, &turns)
        };
        let lines = shown.iter().map(|shown| Line::of(shown.kind.name(), shown.kind.key(), &shown.turns)).collect();
        Self {
            fleet,
            load,
            shown,
            limit: simulated("the limit", "limit", limit),
            queue: simulated("one queue, simulated", "one_queue", queue),
            lines,
        }
    }

    /// The P99 of each system over the limit's.
    pub fn over_limit(&self) -> Vec<(Kind, f64)> {
        self.shown.iter().zip(&self.lines).map(|(shown, line)| (shown.kind, line.over(&self.limit).0)).collect()
    }

    /// Hands over the table and its figures; with targets, if so.
    pub fn give(&self, with_targets: bool, figures: &mut Figures) {
        figures.table(self.latencies());
        let (fleet, load) = (self.fleet.key(), format!("{}.load_{:.0}", self.fleet.key(), self.load * 100.0));
        for line in self.lines.iter().chain([&self.limit, &self.queue]) {
            for (what, value) in [
                ("p50_ms", quantile(&line.latencies, 0.50) * 1e3),
                ("p95_ms", quantile(&line.latencies, 0.95) * 1e3),
                ("p99_ms", line.p99() * 1e3),
                ("mean_ms", mean(&line.latencies) * 1e3),
            ] {
                let words = format!("{} at load {}, {fleet}, {}", what.replace('_', " "), self.load, line.name);
                figures.add_unprinted(Figure::new(format!("{load}.{what}.{}", line.key), words, "", &[value]));
            }
            if line.key != self.limit.key {
                let words = format!("P99 at load {}, {fleet}, {} over the limit", self.load, line.name);
                figures.add_unprinted(over(format!("{load}.p99_over_limit.{}", line.key), words, line, &self.limit));
            }
        }
        for shown in self.shown {
            let losses = Losses::of(&shown.turns);
            for (what, value) in [
                ("sent_late_ms.p99", losses.sent_late[1] * 1e3),
                ("ran_over_ms.p99", losses.ran_over[1] * 1e3),
                ("cpu_us_per_job", losses.cpu * 1e6),
                ("disturbed_percent", losses.disturbed * 1e2),
            ] {
                let words = format!("{} at load {}, {fleet}, {}", what.replace('_', " "), self.load, shown.kind.name());
                figures.add_unprinted(Figure::new(format!("{load}.{what}.{}", shown.kind.key()), words, "", &[value]));
            }
        }
        if with_targets {
            self.give_targets(&load, figures);
        }
    }

    /// Of the best of ours.
    fn give_targets(&self, load: &str, figures: &mut Figures) {
        let Some(best) = self.best() else { return };
        let beside = |key| self.lines.iter().find(|line| line.key == key);
        let targets: &[(&str, Option<&Line>, f64)] = match self.fleet {
            Fleet::Mixed => &[
                ("limit", Some(&self.limit), 1.10),
                ("full_scan", beside(Kind::FullScan.key()), 0.60),
                ("haproxy_queue", beside(Kind::HaproxyQueue.key()), 0.75),
            ],
            Fleet::Equal => &[("limit", Some(&self.limit), 1.08)],
        };
        for (key, other, most) in targets {
            let Some(other) = other else { continue };
            let words =
                format!("P99 at load {}, {}, best of ours ({}) over {}", self.load, self.fleet.key(), best.name, other.name);
            let figure = over(format!("{load}.best_of_ours_over.{key}"), words, best, other);
            figures.add(figure.target(Target::AtMost(*most)));
        }
    }

    /// That of ours whose P99 is the lowest.
    fn best(&self) -> Option<&Line> {
        let ours = self.shown.iter().zip(&self.lines).filter(|(shown, _)| shown.kind.is_ours()).map(|(_, line)| line);
        ours.min_by(|one, other| one.p99().total_cmp(&other.p99()))
    }

    fn latencies(&self) -> String {
        let head = [
            "P50 ms",
            "P95",
            "P99",
            "mean",
            "P99/limit",
            "in rounds",
            "best/it",
            "idle*",
            "held*",
            "late* P99",
            "over* P99",
            "CPU µs/job",
            "disturbed*",
            "errors",
        ];
        let best = self.best();
        let mut rows = Vec::new();
        for line in [&self.limit, &self.queue].into_iter().chain(&self.lines) {
            let (ratio, each) = line.over(&self.limit);
            let spread = Spread::of(&each);
            let mut row = vec![
                milliseconds(quantile(&line.latencies, 0.50)),
                milliseconds(quantile(&line.latencies, 0.95)),
                milliseconds(line.p99()),
                milliseconds(mean(&line.latencies)),
                format!("{ratio:.3}"),
                format!("{:.2} … {:.2}", spread.min, spread.max),
                best.map(|best| format!("{:.2}", best.over(line).0)).unwrap_or_default(),
                format!("{:.2} %", line.account.idle_share() * 1e2),
                line.account.most_held.to_string(),
            ];
            let shown = self.shown.iter().find(|shown| shown.kind.key() == line.key);
            row.extend(match shown {
                None => [const { String::new() }; 5],
                Some(shown) => {
                    let losses = Losses::of(&shown.turns);
                    [
                        fine(losses.sent_late[1]),
                        fine(losses.ran_over[1]),
                        format!("{:.0}", losses.cpu * 1e6),
                        format!("{:.1} %", losses.disturbed * 1e2),
                        shown.turns.iter().map(|turn| turn.errors).sum::<usize>().to_string(),
                    ]
                }
            });
            rows.push((line.name.as_str(), row));
        }
        let text = grid(&format!("{}, load {}", self.fleet.key(), self.load), &head, &rows);
        text + "* idle: GPU time lost while a job waited, wherever (a slow card may well be left idle); held: by one host at once; late, over: jobs that this\n\
            program sent late or ran for too long, ms; disturbed: time in which others had a core that was wanted\n"
    }
}

/// A ratio of P99s.
pub fn over(name: String, words: String, line: &Line, other: &Line) -> Figure {
    let (value, each) = line.over(other);
    Figure { value, ..Figure::new(name, words, "×", &each) }
}
