//! Where a page says what, in the user's own words: a series of a Prometheus page, or a JSON pointer.

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::number;
use super::prometheus::{Sample, is_name, samples, unescaped};
use crate::core::reading::Reading;

/// Where the page says each value; `None`: nowhere.
#[derive(Clone, Debug, PartialEq)]
pub enum Mapping {
    /// On a Prometheus page.
    Series(Places<Series>),
    /// On a JSON page.
    Pointers(Places<Pointer>),
}

/// One place for each value of a [`Reading`].
#[derive(Clone, Debug, PartialEq)]
pub struct Places<T> {
    /// Of [`Reading::running`].
    pub running: Option<T>,
    /// Of [`Reading::waiting`].
    pub waiting: Option<T>,
    /// Of [`Reading::memory`].
    pub memory: Option<T>,
    /// Of [`Reading::compute`].
    pub compute: Option<T>,
}

/// All series of a name that have some labels: `jobs{model="a"}`.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    name: String,
    labels: Vec<(String, Vec<u8>)>,
}

/// A JSON pointer (RFC 6901), taken apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Pointer(Vec<String>);

/// What several series of one value come to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Total {
    sum: f64,
    count: f64,
}

impl Total {
    /// Adds one. A value that is no size of anything makes the whole unknown: the sum of the others would be too little.
    pub fn add(&mut self, value: f64) {
        self.sum += if value >= 0.0 { value } else { f64::NAN };
        self.count += 1.0;
    }

    /// The sum, if there were any.
    pub fn sum(self) -> Option<f64> {
        (self.count > 0.0).then_some(self.sum)
    }

    /// The mean, if there were any.
    pub fn mean(self) -> Option<f64> {
        self.sum().map(|sum| sum / self.count)
    }
}

impl Series {
    /// A series as the user writes it; `None`: it is none.
    pub fn parse(text: &str) -> Option<Self> {
        let (name, labels) = match text.split_once('{') {
            Some((name, rest)) => (name, rest.strip_suffix('}')?),
            None => (text, ""),
        };
        let mut series = Self { name: Some(name).filter(|name| is_name(name.as_bytes()))?.to_owned(), labels: Vec::new() };
        let mut rest = labels.trim_start();
        while !rest.is_empty() {
            let (label, value) = rest.split_once('=')?;
            let label = Some(label.trim_end()).filter(|label| is_name(label.as_bytes()) && !label.contains(':'))?;
            let value = value.trim_start().strip_prefix('"')?;
            let mut is_escaped = false;
            let end = value.find(|letter| {
                let is_end = letter == '"' && !is_escaped;
                is_escaped = letter == '\\' && !is_escaped;
                is_end
            })?;
            let (value, after) = value.split_at_checked(end)?;
            series.labels.push((label.to_owned(), unescaped(value.as_bytes()).collect()));
            let after = after.get(1..)?.trim_start();
            rest = match after.strip_prefix(',') {
                Some(more) => more.trim_start(),
                None if after.is_empty() => after,
                None => return None,
            };
        }
        Some(series)
    }

    fn is_of(&self, sample: &Sample) -> bool {
        sample.name == self.name.as_bytes() && self.labels.iter().all(|(label, value)| sample.has(label.as_bytes(), value))
    }
}

impl Pointer {
    /// A pointer as the user writes it; `None`: it is none.
    pub fn parse(text: &str) -> Option<Self> {
        let parts = text.strip_prefix('/')?.split('/').map(|part| {
            let is_whole = part.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
            is_whole.then(|| part.replace("~1", "/").replace("~0", "~"))
        });
        parts.collect::<Option<_>>().map(Self)
    }
}

impl<T> Places<T> {
    fn each(&self) -> [Option<&T>; 4] {
        [&self.running, &self.waiting, &self.memory, &self.compute].map(Option::as_ref)
    }
}

impl Mapping {
    /// What a page says.
    pub fn read(&self, page: &[u8]) -> Result<Reading, serde_json::Error> {
        match self {
            Self::Series(places) => Ok(places.read(page)),
            Self::Pointers(places) => places.read(page),
        }
    }

    /// The places, for people.
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::Series(places) => places.each().into_iter().flatten().map(|series| series.name.clone()).collect(),
            Self::Pointers(places) => {
                places.each().into_iter().flatten().map(|Pointer(parts)| format!("/{}", parts.join("/"))).collect()
            }
        }
    }
}

impl Places<Series> {
    fn read(&self, page: &[u8]) -> Reading {
        let (wanted, mut totals) = (self.each(), [Total::default(); 4]);
        let is_wanted = |name: &[u8]| wanted.iter().flatten().any(|series| series.name.as_bytes() == name);
        for sample in samples(page, is_wanted) {
            for (series, total) in wanted.iter().zip(&mut totals) {
                if series.is_some_and(|series| series.is_of(&sample)) {
                    total.add(sample.value);
                }
            }
        }
        let [running, waiting, memory, compute] = totals;
        Reading::of(running.sum(), waiting.sum(), memory.mean(), compute.mean())
    }
}

impl Places<Pointer> {
    fn read(&self, page: &[u8]) -> Result<Reading, serde_json::Error> {
        let mut found = [None; 4];
        let ways = self.each().into_iter().zip(0..).filter_map(|(place, value)| Some((value, place?.0.as_slice()))).collect();
        let mut json = serde_json::Deserializer::from_slice(page);
        At { ways, found: &mut found }.deserialize(&mut json)?;
        json.end()?;
        let [running, waiting, memory, compute] = found;
        Ok(Reading::of(running, waiting, memory, compute))
    }
}

/// For each value that lies at a place of the page or below it, which value that is and the way that is left.
type Ways<'a> = Vec<(usize, &'a [String])>;

/// Reads what lies at a place of the page, without building anything.
struct At<'a, 'b> {
    ways: Ways<'a>,
    found: &'b mut [Option<f64>; 4],
}

impl<'a> At<'a, '_> {
    fn found(&mut self, value: Option<f64>) {
        for (which, _) in self.ways.iter().filter(|(_, way)| way.is_empty()) {
            if let Some(found) = self.found.get_mut(*which) {
                *found = value;
            }
        }
    }

    fn below(ways: &[(usize, &'a [String])], step: &str) -> Ways<'a> {
        ways.iter()
            .filter_map(|(which, way)| way.split_first().filter(|(next, _)| *next == step).map(|(_, way)| (*which, way)))
            .collect()
    }
}

impl<'de> DeserializeSeed<'de> for At<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.ways.is_empty() {
            true => IgnoredAny::deserialize(deserializer).map(|_| ()),
            false => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for At<'_, '_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(mut self, value: i64) -> Result<(), E> {
        self.found(Some(value as f64));
        Ok(())
    }

    fn visit_u64<E>(mut self, value: u64) -> Result<(), E> {
        self.found(Some(value as f64));
        Ok(())
    }

    fn visit_f64<E>(mut self, value: f64) -> Result<(), E> {
        self.found(Some(value));
        Ok(())
    }

    fn visit_str<E>(mut self, text: &str) -> Result<(), E> {
        self.found(number::parse(text.as_bytes()));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        let mut length = 0usize;
        let last = self.ways.iter().filter_map(|(_, way)| way.first()?.parse::<usize>().ok()).max();
        loop {
            let leads_on = last.is_some_and(|last| length <= last);
            let ways = if leads_on { Self::below(&self.ways, &length.to_string()) } else { Ways::new() };
            if items.next_element_seed(At { ways, found: &mut *self.found })?.is_none() {
                break;
            }
            length += 1;
        }
        self.found(Some(length as f64));
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(ways) = entries.next_key_seed(Step(&self.ways))? {
            entries.next_value_seed(At { ways, found: &mut *self.found })?;
        }
        Ok(())
    }
}

/// Reads a key: which ways lead there.
struct Step<'a, 'b>(&'b [(usize, &'a [String])]);

impl<'a, 'de> DeserializeSeed<'de> for Step<'a, '_> {
    type Value = Ways<'a>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Ways<'a>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'a> Visitor<'_> for Step<'a, '_> {
    type Value = Ways<'a>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Ways<'a>, E> {
        Ok(At::below(self.0, key))
    }
}

#[cfg(test)]
mod tests;
