//! The figures: a table for people, `dist/bench.json` for programs.

use std::fmt;
use std::path::Path;

use serde_json::{Value, json};

use crate::Effort;

/// Median and extremes over the rounds.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub rounds: usize,
}

impl Spread {
    /// Of the rounds' values.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Self { median: (low + high) / 2.0, min: sorted[0], max: sorted[sorted.len() - 1], rounds: sorted.len() }
    }
}

/// What a figure should be.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    AtMost(f64),
    AtLeast(f64),
}

impl Target {
    fn met(self, value: f64) -> bool {
        match self {
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }
}

/// One figure.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Stable: programs look for it.
    pub name: String,
    /// In words.
    pub what: String,
    pub unit: &'static str,
    pub value: f64,
    pub spread: Spread,
    /// What it is compared with, and that one's value in the same run and unit.
    pub baseline: Option<(String, f64)>,
    pub target: Option<Target>,
    /// In the list, and not only in the file.
    pub printed: bool,
}

impl Figure {
    /// The median of the rounds' values.
    pub fn new(name: impl Into<String>, what: impl Into<String>, unit: &'static str, values: &[f64]) -> Self {
        let spread = Spread::of(values);
        Self {
            name: name.into(),
            what: what.into(),
            unit,
            value: spread.median,
            spread,
            baseline: None,
            target: None,
            printed: true,
        }
    }

    /// How often `values` hold `others`: the ratio of the medians, and the spread of the rounds' own ratios.
    pub fn ratio(name: impl Into<String>, what: impl Into<String>, values: &[f64], others: &[f64]) -> Self {
        let each: Vec<f64> = values.iter().zip(others).map(|(value, other)| value / other).collect();
        Self { value: Spread::of(values).median / Spread::of(others).median, ..Self::new(name, what, "×", &each) }
    }

    /// Names what it is compared with.
    pub fn beside(mut self, name: impl Into<String>, values: &[f64]) -> Self {
        self.baseline = Some((name.into(), Spread::of(values).median));
        self
    }

    /// Sets what it should be.
    pub fn target(mut self, target: Target) -> Self {
        self.target = Some(target);
        self
    }

    fn json(&self) -> Value {
        let Spread { median, min, max, rounds } = self.spread;
        let target = self.target.map(|target| match target {
            Target::AtMost(most) => json!({"at_most": most, "met": target.met(self.value)}),
            Target::AtLeast(least) => json!({"at_least": least, "met": target.met(self.value)}),
        });
        json!({
            "name": self.name, "what": self.what, "unit": self.unit, "value": rounded(self.value),
            "median": rounded(median), "min": rounded(min), "max": rounded(max), "rounds": rounds,
            "baseline": self.baseline.as_ref().map(|(name, value)| json!({"name": name, "value": rounded(*value)})),
            "target": target,
        })
    }
}

/// All figures of a run.
pub struct Figures {
    effort: Effort,
    scenario: String,
    notes: Vec<String>,
    tables: Vec<String>,
    all: Vec<Figure>,
    failures: Vec<String>,
}

impl Figures {
    pub fn new(effort: Effort) -> Self {
        Self { effort, scenario: String::new(), notes: Vec::new(), tables: Vec::new(), all: Vec::new(), failures: Vec::new() }
    }

    /// The figures that follow are of this scenario.
    pub fn begin(&mut self, scenario: &str) {
        eprintln!("{scenario}");
        scenario.clone_into(&mut self.scenario);
    }

    /// Says under which conditions the scenario's figures were measured.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(format!("{}: {}", self.scenario, text.into()));
    }

    /// As [`Figures::note`], unless it has been said.
    pub fn note_once(&mut self, text: impl Into<String>) {
        let text = format!("{}: {}", self.scenario, text.into());
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    pub fn add(&mut self, mut figure: Figure) {
        figure.name = format!("{}.{}", self.scenario, figure.name);
        self.all.push(figure);
    }

    /// Adds one for programs: people find it in a table.
    pub fn add_unprinted(&mut self, figure: Figure) {
        self.add(Figure { printed: false, ..figure });
    }

    /// Prints this text before the list.
    pub fn table(&mut self, text: String) {
        self.tables.push(text);
    }

    /// Something is wrong, but what was measured is worth printing.
    pub fn fail(&mut self, what: impl Into<String>) {
        self.failures.push(format!("{}: {}", self.scenario, what.into()));
    }

    /// What is wrong.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Writes the file, and makes its directory if need be.
    pub fn write(&self, file: impl AsRef<Path>) {
        let file = file.as_ref();
        let figures: Vec<Value> = self.all.iter().map(Figure::json).collect();
        let all = json!({"quick": self.effort == Effort::Quick, "notes": self.notes, "figures": figures});
        std::fs::create_dir_all(file.parent().expect("a file in a directory")).expect("a directory of our own");
        std::fs::write(file, format!("{all:#}\n")).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        eprintln!("{} written", file.display());
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let printed = || self.all.iter().filter(|figure| figure.printed);
        let what = printed().map(|figure| figure.what.chars().count()).max().unwrap_or(0);
        writeln!(f)?;
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        if self.effort == Effort::Quick {
            writeln!(f, "--quick: too short to mean anything")?;
        }
        for table in &self.tables {
            write!(f, "\n{table}")?;
        }
        writeln!(f, "\n{:what$}  {:>10}  {:>21}  beside", "figure", "value", "rounds: min … max")?;
        for figure in printed() {
            let spread = format!("{} … {}", short(figure.spread.min), short(figure.spread.max));
            let value = format!("{} {:<3}", short(figure.value), figure.unit);
            write!(f, "{:what$}  {value:>10}  {spread:>21}", figure.what)?;
            if let Some((name, value)) = &figure.baseline {
                write!(f, "  {} {} {name}", short(*value), figure.unit)?;
            }
            if let Some(target) = figure.target {
                let (sign, bound) = match target {
                    Target::AtMost(bound) => ('≤', bound),
                    Target::AtLeast(bound) => ('≥', bound),
                };
                write!(f, "  target {sign} {bound}: {}", if target.met(figure.value) { "met" } else { "MISSED" })?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// As many digits as are worth reading.
fn short(value: f64) -> String {
    let digits = if value.abs() >= 1000.0 {
        0
    } else if value.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}")
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
