//! What a pool's configuration says of what hosts tell of themselves.

use std::time::Duration;

use super::is_path;
use super::reader::{Fields, Reader};
use crate::telemetry::mapping::{Mapping, Places, Pointer, Series};
use crate::telemetry::preset::Preset;

/// How it is learned what hosts tell of themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct Telemetry {
    /// Whether load reports are read from responses: see [`crate::telemetry::orca`].
    pub orca: bool,
    /// How hosts are asked; `None`: not at all.
    pub scrape: Option<Scrape>,
}

/// How hosts are asked what they have to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Scrape {
    /// What their pages say.
    pub preset: Preset,
    /// Where their pages are: at least one.
    pub paths: Vec<String>,
    /// The time from one question to the next.
    pub interval: Duration,
    /// A question that takes longer has failed.
    pub timeout: Duration,
}

/// A value as the user writes where it is.
enum Place {
    Series(Series),
    Pointer(Pointer),
}

/// For so long a load report is believed where hosts are not asked.
const REPORTS_HOLD: Duration = Duration::from_secs(10);

impl Telemetry {
    /// For so long what hosts told is believed.
    pub fn patience(&self) -> Duration {
        self.scrape.as_ref().map_or(REPORTS_HOLD, Scrape::stale_after)
    }

    pub(super) fn read(fields: &mut Fields) -> Self {
        let orca = fields.boolean("orca", true);
        let is_asked = fields.has("scrape");
        let scrape = fields.optional("scrape", Scrape::read).flatten();
        if !orca && !is_asked {
            fields.note("orca", "false without scrape is no telemetry; leave telemetry out instead, or say \"scrape\": {…}");
        }
        Self { orca, scrape }
    }
}

impl Scrape {
    /// For so long what a page said is believed: three questions may stay without an answer. Afterwards the host is one that says nothing.
    pub fn stale_after(&self) -> Duration {
        self.interval * 3 + self.timeout
    }

    fn read(fields: &mut Fields) -> Option<Self> {
        let word = fields.take("preset", |value| {
            let allowed = format!("\"{}\" or \"custom\"", Preset::WORDS.join("\" or \""));
            let is_known = |word: &str| Preset::WORDS.contains(&word) || word == CUSTOM;
            value.text(&allowed).filter(|word| is_known(word) || value.refuse(&allowed)).map(str::to_owned)
        });
        let path = fields.take("path", |value| {
            const ALLOWED: &str = "a path that starts with /, such as \"/metrics\"";
            value.text(ALLOWED).filter(|text| is_path(text) || value.refuse(ALLOWED)).unwrap_or_default().to_owned()
        });
        let interval = Duration::from_millis(fields.integer("interval_ms", 200..=3_600_000, 1000));
        let timeout = Duration::from_millis(fields.integer("timeout_ms", 1..=60_000, 1000));
        let has_metrics = fields.has("metrics");
        let mapping = fields.optional("metrics", read_mapping).flatten();
        let preset = match word {
            // Refused already.
            Some(None) => return None,
            Some(Some(word)) if word != CUSTOM => {
                if has_metrics {
                    let why =
                        format!("it is there together with preset: \"{word}\"; leave one out, or say \"preset\": \"{CUSTOM}\"");
                    fields.note("metrics", why);
                }
                Preset::parse(&word)?
            }
            None if !has_metrics => {
                let words = Preset::WORDS.get(1..)?.join(", ");
                fields.note(
                    "preset",
                    format_args!("it is missing; say \"preset\": \"vllm\" (or {words}), or \"metrics\": {EXAMPLE}"),
                );
                return None;
            }
            _ => {
                if !has_metrics {
                    fields.note("metrics", format_args!("it is missing; say \"metrics\": {EXAMPLE}, or another preset"));
                }
                Preset::Custom(mapping?)
            }
        };
        if preset == Preset::Comfyui && path.is_some() {
            let paths = preset.paths().join(" and ");
            fields.note("path", format_args!("it is there together with preset: \"comfyui\", which has the paths {paths}"));
        }
        if matches!(preset, Preset::Custom(Mapping::Pointers(_))) && path.is_none() {
            fields.note("path", "it is missing; say where the JSON is, such as \"path\": \"/status\"");
        }
        let paths = path.map_or_else(|| preset.paths().iter().map(|path| (*path).to_owned()).collect(), |path| vec![path]);
        Some(Self { preset, paths, interval, timeout })
    }
}

/// The word for a page of which the user says what it says.
const CUSTOM: &str = "custom";

/// What may be said of it.
const EXAMPLE: &str = "{\"running\": \"my_jobs_running\"}";

/// `None`: it cannot be read, and that was noted.
fn read_mapping(fields: &mut Fields) -> Option<Mapping> {
    let places = ["running", "waiting", "memory", "compute"].map(|key| fields.take(key, read_place));
    if places.iter().all(Option::is_none) {
        fields.note("running", "it is missing, and so are waiting, memory and compute; at least one of them is needed");
    }
    if places.iter().flatten().any(Option::is_none) {
        return None;
    }
    let places = places.map(Option::flatten);
    let is_pointer = |place: &Option<Place>| place.as_ref().map(|place| matches!(place, Place::Pointer(_)));
    let kinds: Vec<bool> = places.iter().filter_map(is_pointer).collect();
    match kinds.split_first()? {
        (first, rest) if rest.iter().any(|kind| kind != first) => {
            let other = ["running", "waiting", "memory", "compute"].into_iter().rfind(|key| fields.has(key)).unwrap_or_default();
            let why = "names of metrics and JSON pointers are there together; a page is either Prometheus text or JSON";
            fields.note(other, why);
            None
        }
        (true, _) => {
            let [running, waiting, memory, compute] = places.map(|place| match place {
                Some(Place::Pointer(pointer)) => Some(pointer),
                _ => None,
            });
            Some(Mapping::Pointers(Places { running, waiting, memory, compute }))
        }
        (false, _) => {
            let [running, waiting, memory, compute] = places.map(|place| match place {
                Some(Place::Series(series)) => Some(series),
                _ => None,
            });
            Some(Mapping::Series(Places { running, waiting, memory, compute }))
        }
    }
}

fn read_place(value: Reader) -> Option<Place> {
    const ALLOWED: &str = "a metric such as \"jobs\" or \"jobs{model=\\\"a\\\"}\", or a JSON pointer such as \"/queue/running\"";
    let text = value.text(ALLOWED)?;
    let place = match text.starts_with('/') {
        true => Pointer::parse(text).map(Place::Pointer),
        false => Series::parse(text).map(Place::Series),
    };
    if place.is_none() {
        value.refuse(ALLOWED);
    }
    place
}
