//! What the systems showed, beside each other and beside the ideal.

use std::fmt::Write as _;
use std::time::Duration;

use support::trace::{Account, Arrival};

use super::systems::{Compared, Kind};
use super::turn::Turn;
use super::{Shown, ideal as idealised};
use crate::figures::{Figure, Figures, Spread, Target};

/// Ours with a queue, beside the ideal.
const TARGET: f64 = 1.08;

/// Nearest rank, in seconds; 0 of none.
pub fn quantile(times: &[Duration], quantile: f64) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() as f64 * quantile).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).map_or(0.0, Duration::as_secs_f64)
}

pub fn mean(times: &[Duration]) -> f64 {
    times.iter().sum::<Duration>().as_secs_f64() / times.len().max(1) as f64
}

/// One line: a system at one load, all rounds together.
pub struct Line {
    pub name: String,
    /// For the names of figures.
    pub key: String,
    pub latencies: Vec<Duration>,
    /// Of each round, in seconds.
    pub p99s: Vec<f64>,
    pub account: Account,
}

impl Line {
    pub fn of(name: impl Into<String>, key: &str, turns: &[Turn]) -> Self {
        let mut account = Account::default();
        turns.iter().for_each(|turn| account.add(&turn.account));
        Self {
            name: name.into(),
            key: key.to_owned(),
            latencies: all(turns, |turn| &turn.latencies),
            p99s: turns.iter().map(|turn| quantile(&turn.latencies, 0.99)).collect(),
            account,
        }
    }

    pub fn p99(&self) -> f64 {
        quantile(&self.latencies, 0.99)
    }

    /// Its P99 as a ratio to the other's, and that of each round.
    pub fn over(&self, other: &Self) -> (f64, Vec<f64>) {
        (self.p99() / other.p99(), self.p99s.iter().zip(&other.p99s).map(|(own, other)| own / other).collect())
    }
}

/// Of all turns.
pub fn all(turns: &[Turn], of: impl Fn(&Turn) -> &Vec<Duration>) -> Vec<Duration> {
    turns.iter().flat_map(of).copied().collect()
}

/// All systems at one load.
pub struct Table<'a> {
    load: f64,
    shown: &'a [Shown],
    ideal: Line,
    lines: Vec<Line>,
    /// What the ideal would be if it lost what ours loses.
    explained: Vec<Line>,
}

impl<'a> Table<'a> {
    pub fn new(load: f64, records: &[Vec<Arrival>], shown: &'a [Shown]) -> Self {
        let ideal = |name: &str, key: &str, hop, pause| {
            let turns: Vec<Turn> = records.iter().map(|record| idealised(record, hop, pause)).collect();
            Line::of(name, key, &turns)
        };
        let lines: Vec<Line> = shown.iter().map(|shown| Line::of(shown.kind.name(), shown.kind.key(), &shown.turns)).collect();
        let mut explained = Vec::new();
        if let Some(ours) = shown.iter().find(|shown| shown.kind == Kind::Ours) {
            let hop = Duration::from_secs_f64(quantile(&all(&ours.turns, |turn| &turn.hops), 0.5));
            let gap = Duration::from_secs_f64(mean(&all(&ours.turns, |turn| &turn.account.gaps)));
            explained.push(ideal("the ideal + our hop", "ideal_with_hop", hop, Duration::ZERO));
            explained.push(ideal("the ideal + our hop, gap", "ideal_with_hop_and_gap", hop, gap));
        }
        Self { load, shown, ideal: ideal("the ideal", "ideal", Duration::ZERO, Duration::ZERO), lines, explained }
    }

    /// Hands over the table and its figures.
    pub fn give(&self, figures: &mut Figures) {
        figures.table(self.latencies());
        figures.table(self.losses());
        let load = format!("load_{:.0}", self.load * 100.0);
        for line in self.lines.iter().chain([&self.ideal]).chain(&self.explained) {
            self.latency_figures(&load, line, figures);
        }
        for shown in self.shown {
            loss_figures(&load, shown, figures);
        }
    }

    fn latency_figures(&self, load: &str, line: &Line, figures: &mut Figures) {
        let Line { name, key, latencies, account, .. } = line;
        let at = self.load;
        for (what, value) in [
            ("p50_ms", quantile(latencies, 0.50) * 1e3),
            ("p95_ms", quantile(latencies, 0.95) * 1e3),
            ("p99_ms", line.p99() * 1e3),
            ("mean_ms", mean(latencies) * 1e3),
            ("idle_while_waiting_percent", account.idle_share() * 1e2),
            ("longest_idle_ms", account.longest_idle.as_secs_f64() * 1e3),
            ("most_held", account.most_held as f64),
        ] {
            let words = format!("{} at load {at}, {name}", what.replace('_', " "));
            figures.add_unprinted(Figure::new(format!("{load}.{what}.{key}"), words, "", &[value]));
        }
        if *key == self.ideal.key {
            return;
        }
        let over = |words: String, name: String, (value, each): (f64, Vec<f64>)| Figure {
            value,
            ..Figure::new(name, words, "×", &each)
        };
        let figure = over(
            format!("P99 at load {at}, {name}, over the ideal"),
            format!("{load}.p99_over_ideal.{key}"),
            line.over(&self.ideal),
        );
        if *key == Kind::Ours.key() {
            figures.add(figure.target(Target::AtMost(TARGET)));
        } else {
            figures.add_unprinted(figure);
        }
        let is_peer = self.shown.iter().any(|shown| shown.kind.key() == key) && *key != Kind::Ours.key();
        if let Some(ours) = self.ours().filter(|_| is_peer) {
            let words = format!("P99 at load {at}, ours with queue over {name}");
            figures.add(over(words, format!("{load}.ours_p99_over.{key}"), ours.over(line)));
        }
    }

    fn ours(&self) -> Option<&Line> {
        self.lines.iter().find(|line| line.key == Kind::Ours.key())
    }

    fn latencies(&self) -> String {
        let head = ["P50 ms", "P95", "P99", "mean", "P99/ideal", "in rounds", "ours/it", "idle*", "longest*", "held", "errors"];
        let mut rows = Vec::new();
        for line in [&self.ideal].into_iter().chain(&self.explained).chain(&self.lines) {
            let shown = self.shown.iter().find(|shown| shown.kind.key() == line.key);
            let (ratio, each) = line.over(&self.ideal);
            let spread = Spread::of(&each);
            let ours = self.ours().filter(|_| shown.is_some()).map(|ours| format!("{:.2}", ours.over(line).0));
            let errors = shown.map(|shown| shown.turns.iter().map(|turn| turn.errors).sum::<usize>().to_string());
            rows.push((
                line.name.as_str(),
                vec![
                    milliseconds(quantile(&line.latencies, 0.50)),
                    milliseconds(quantile(&line.latencies, 0.95)),
                    milliseconds(line.p99()),
                    milliseconds(mean(&line.latencies)),
                    format!("{ratio:.3}"),
                    shown.map(|_| format!("{:.2} … {:.2}", spread.min, spread.max)).unwrap_or_default(),
                    ours.unwrap_or_default(),
                    format!("{:.2} %", line.account.idle_share() * 1e2),
                    milliseconds(line.account.longest_idle.as_secs_f64()),
                    line.account.most_held.to_string(),
                    errors.unwrap_or_default(),
                ],
            ));
        }
        let text = grid(&format!("load {}", self.load), &head, &rows);
        text + "* idle: GPU time lost while a job waited, wherever; longest: of one GPU while anybody waited, ms; held: by one host at once\n"
    }

    fn losses(&self) -> String {
        let head = [
            "hop P50 ms",
            "gap P50",
            "mean",
            "P99",
            "sent late P50",
            "P99",
            "ran over P50",
            "P99",
            "CPU µs/job",
            "own CPU",
            "disturbed",
        ];
        let mut rows = Vec::new();
        for Shown { kind, turns } in self.shown {
            let losses = Losses::of(turns);
            let mut row: Vec<String> = losses.times().into_iter().map(|(_, time)| fine(time)).collect();
            row.extend([
                format!("{:.0}", losses.cpu * 1e6),
                format!("{:.1} %", losses.own_cpu * 1e2),
                format!("{:.1} %", losses.disturbed * 1e2),
            ]);
            rows.push((kind.name(), row));
        }
        let text = grid(&format!("load {}, ms", self.load), &head, &rows);
        text + "hop: what a lone job takes longer than on the GPU; gap: of a GPU between two jobs while one waited that no other was free for;\n\
            sent late, ran over: this program's clients and GPUs; own CPU: theirs, of one core; disturbed: time in which others had a core that was wanted;\n\
            above 5 % they are part of what is measured\n"
    }
}

/// Where the time goes, and what the measurement itself adds; in seconds.
pub struct Losses {
    pub hop: f64,
    pub gap: [f64; 3],
    pub sent_late: [f64; 2],
    pub ran_over: [f64; 2],
    /// Of the system, for each job.
    pub cpu: f64,
    pub own_cpu: f64,
    pub disturbed: f64,
}

impl Losses {
    pub fn of(turns: &[Turn]) -> Self {
        let gaps = all(turns, |turn| &turn.account.gaps);
        let sent_late = all(turns, |turn| &turn.sent_late);
        let ran_over = all(turns, |turn| &turn.ran_over);
        let sum = |of: fn(&Turn) -> Duration| turns.iter().map(of).sum::<Duration>().as_secs_f64();
        let took = sum(|turn| turn.took);
        Self {
            hop: quantile(&all(turns, |turn| &turn.hops), 0.5),
            gap: [quantile(&gaps, 0.5), mean(&gaps), quantile(&gaps, 0.99)],
            sent_late: [quantile(&sent_late, 0.5), quantile(&sent_late, 0.99)],
            ran_over: [quantile(&ran_over, 0.5), quantile(&ran_over, 0.99)],
            cpu: sum(|turn| turn.cpu) / sent_late.len().max(1) as f64,
            own_cpu: sum(|turn| turn.own_cpu) / took,
            disturbed: sum(|turn| turn.disturbed) / took,
        }
    }

    fn times(&self) -> [(&'static str, f64); 8] {
        [
            ("hop_ms.p50", self.hop),
            ("gap_ms.p50", self.gap[0]),
            ("gap_ms.mean", self.gap[1]),
            ("gap_ms.p99", self.gap[2]),
            ("sent_late_ms.p50", self.sent_late[0]),
            ("sent_late_ms.p99", self.sent_late[1]),
            ("ran_over_ms.p50", self.ran_over[0]),
            ("ran_over_ms.p99", self.ran_over[1]),
        ]
    }
}

fn loss_figures(load: &str, shown: &Shown, figures: &mut Figures) {
    let losses = Losses::of(&shown.turns);
    let (key, name) = (shown.kind.key(), shown.kind.name());
    let mut add = |what: &str, value: f64| {
        let words = format!("{} at {load}, {name}", what.replace('_', " "));
        figures.add_unprinted(Figure::new(format!("{load}.{what}.{key}"), words, "", &[value]));
    };
    losses.times().into_iter().for_each(|(what, time)| add(what, time * 1e3));
    add("cpu_us_per_job", losses.cpu * 1e6);
    add("own_cpu_percent", losses.own_cpu * 1e2);
    add("disturbed_percent", losses.disturbed * 1e2);
    add("errors", shown.turns.iter().map(|turn| turn.errors).sum::<usize>() as f64);
}

pub fn milliseconds(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e3)
}

pub fn fine(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e3)
}

/// Columns as wide as they need to be; the first to the left, the others to the right.
pub fn grid(corner: &str, head: &[&str], rows: &[(&str, Vec<String>)]) -> String {
    let name = rows.iter().map(|(name, _)| name.chars().count()).chain([corner.chars().count()]).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().map(|(_, cells)| cells[column].chars().count());
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let mut text = format!("{corner:name$}");
    for (column, title) in head.iter().enumerate() {
        let _ = write!(text, "  {title:>width$}", width = width(column));
    }
    for (title, cells) in rows {
        let _ = write!(text, "\n{title:name$}");
        for (column, cell) in cells.iter().enumerate() {
            let _ = write!(text, "  {cell:>width$}", width = width(column));
        }
    }
    // Empty cells at the end of a line are none.
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
