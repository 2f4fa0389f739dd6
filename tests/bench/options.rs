//! What may be said on the command line to the comparisons of recorded jobs.

use std::path::PathBuf;

/// What is not said is the comparison's own to choose.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub second_ms: Option<f64>,
    pub rounds: Option<usize>,
    pub jobs: Option<usize>,
    pub seed: Option<u64>,
    /// Keys of systems.
    pub only: Option<Vec<String>>,
    /// Keys of fleets, of loads and of parts, of the comparison of choices.
    pub fleet: Option<Vec<String>>,
    pub load: Option<Vec<String>>,
    pub part: Option<Vec<String>>,
    pub svg: Option<PathBuf>,
}

impl Options {
    pub const HELP: &str = "\
queue, choice: --second-ms MS (what a second of a job becomes) --rounds N --jobs N (in a round) --seed N --only KEY,… (systems)
choice: --fleet equal,mixed --load 0.7,0.85,0.95 --part points,bursts,two_envoys --svg FILE";

    /// Takes an option and its value; false if there is no such option, or its value is none.
    pub fn take(&mut self, option: &str, value: Option<&str>) -> bool {
        let Some(value) = value else { return false };
        let keys = || Some(value.split(',').map(str::to_owned).collect());
        match option {
            "--second-ms" => self.second_ms = value.parse().ok().filter(|ms| (0.1..=1000.0).contains(ms)),
            "--rounds" => self.rounds = value.parse().ok().filter(|rounds| *rounds > 0),
            "--jobs" => self.jobs = value.parse().ok().filter(|jobs| *jobs > 0),
            "--seed" => self.seed = value.parse().ok(),
            "--only" => self.only = keys(),
            "--fleet" => self.fleet = keys(),
            "--load" => self.load = keys(),
            "--part" => self.part = keys(),
            "--svg" => self.svg = Some(value.into()),
            _ => return false,
        }
        match option {
            "--second-ms" => self.second_ms.is_some(),
            "--rounds" => self.rounds.is_some(),
            "--jobs" => self.jobs.is_some(),
            "--seed" => self.seed.is_some(),
            _ => true,
        }
    }

    /// The first key that none of these knows.
    pub fn unknown(keys: Option<&[String]>, known: &[&str]) -> Option<String> {
        keys?.iter().find(|key| !known.contains(&key.as_str())).cloned()
    }
}

/// Of all, those whose keys are among these; all of them if nothing is said.
pub fn chosen<T: Copy>(all: &[T], key: impl Fn(T) -> &'static str, keys: Option<&[String]>) -> Vec<T> {
    let wanted = |one: &T| keys.is_none_or(|keys| keys.iter().any(|wanted| wanted == key(*one)));
    all.iter().copied().filter(wanted).collect()
}
