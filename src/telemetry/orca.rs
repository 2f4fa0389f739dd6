//! ORCA load reports: what a host says of its load in the headers or trailers of a response.
//!
//! Format: `xds.data.orca.v3.OrcaLoadReport`, in one of two headers. As in Envoy, [`BINARY`] is read where it is there (base64 of the message), else
//! [`TEXT`], which says by its first word what follows: `BIN` the same, `JSON` the message as JSON, `TEXT` a list of `name=value`, also written
//! `name:value`, where entries of maps have the map's name in front (`named_metrics.running=3`). Other than in Envoy, a name that nobody asks for is passed over.
//!
//! What is made of a report:
//!
//! | | the host's own word, from either map | names that servers use | else |
//! |---|---|---|---|
//! | running | `running` | `num_requests_running` | |
//! | waiting | `waiting` | `num_requests_waiting` (vLLM) | |
//! | memory | `memory` | `kv_cache_usage_perc`, `kv_cache_utilization` (vLLM, Triton) | `mem_utilization` |
//! | compute | `compute` | | `application_utilization` if it is above 0, else `cpu_utilization`, as Envoy's own policies do |

mod protobuf;

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::base64;
use super::number::{self, Number};
use crate::core::reading::Reading;

/// The header whose first word is its format.
pub const TEXT: &str = "endpoint-load-metrics";

/// The header that holds the message.
pub const BINARY: &str = "endpoint-load-metrics-bin";

/// A longer report is not read. Envoy allows 60 KB of headers unless it is told otherwise.
const MOST_BYTES: usize = 64 << 10;

/// What the two headers of a response say; `None`: nothing that is of use. The error says what is wrong with a report that is there and cannot be read.
pub fn read(text: Option<&[u8]>, binary: Option<&[u8]>) -> Result<Option<Reading>, &'static str> {
    let Some(header) = binary.or(text) else {
        return Ok(None);
    };
    if header.len() > MOST_BYTES {
        return Err("it is longer than 64 KB");
    }
    let report = match (binary, header.split_first_chunk()) {
        (Some(_), _) => message(header),
        (None, Some((b"BIN ", message_text))) => message(message_text),
        (None, _) => match header.split_first_chunk() {
            Some((b"TEXT ", list)) => Report::of_list(list),
            Some((b"JSON ", json)) => Report::of_json(json),
            _ => Err("it does not start with TEXT, JSON or BIN"),
        },
    };
    report.map(|report| Some(report.reading()).filter(|reading| !reading.is_empty()))
}

fn message(header: &[u8]) -> Result<Report, &'static str> {
    // Envoy joins several headers of a name with commas; the first one stands.
    let first = header.split(|byte| *byte == b',').next().unwrap_or_default().trim_ascii();
    let bytes = base64::decode(first).filter(|bytes| !bytes.is_empty()).ok_or("it is no base64")?;
    protobuf::report(&bytes).ok_or("it holds no OrcaLoadReport")
}

/// What is asked of a report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Report {
    cpu: Option<f64>,
    memory: Option<f64>,
    application: Option<f64>,
    own: Values,
    servers: Values,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Values {
    running: Option<f64>,
    waiting: Option<f64>,
    memory: Option<f64>,
    compute: Option<f64>,
}

impl Report {
    fn reading(&self) -> Reading {
        let Self { own, servers, .. } = self;
        let compute = self.application.filter(|part| *part > 0.0).or(self.cpu);
        Reading::of(own.running, own.waiting, own.memory, own.compute)
            .and(Reading::of(servers.running, servers.waiting, servers.memory, None))
            .and(Reading::of(None, None, self.memory, compute))
    }

    /// Takes an entry of one of the maps.
    fn take_named(&mut self, name: &[u8], value: f64) {
        let slot = match name {
            b"running" => &mut self.own.running,
            b"waiting" => &mut self.own.waiting,
            b"memory" => &mut self.own.memory,
            b"compute" => &mut self.own.compute,
            b"num_requests_running" => &mut self.servers.running,
            b"num_requests_waiting" => &mut self.servers.waiting,
            b"kv_cache_usage_perc" | b"kv_cache_utilization" => &mut self.servers.memory,
            _ => return,
        };
        *slot = Some(value);
    }

    /// The field of this name, as proto3 writes it in text or in JSON.
    fn field(&mut self, name: &[u8]) -> Option<&mut Option<f64>> {
        match name {
            b"cpu_utilization" | b"cpuUtilization" => Some(&mut self.cpu),
            b"mem_utilization" | b"memUtilization" => Some(&mut self.memory),
            b"application_utilization" | b"applicationUtilization" => Some(&mut self.application),
            _ => None,
        }
    }

    fn of_list(list: &[u8]) -> Result<Self, &'static str> {
        let mut report = Self::default();
        let entries = list.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|entry| !entry.is_empty());
        for entry in entries {
            let between = entry.iter().position(|byte| matches!(byte, b'=' | b':'));
            let (name, value) = between.and_then(|between| entry.split_at_checked(between)).ok_or("an entry has no value")?;
            let value = value.get(1..).and_then(|value| number::parse(value.trim_ascii()));
            let (name, value) = (name.trim_ascii(), value.ok_or("a value is no number")?);
            if let Some(field) = report.field(name) {
                *field = Some(value);
            } else {
                let in_map = name.strip_prefix(b"named_metrics.").or_else(|| name.strip_prefix(b"utilization."));
                report.take_named(in_map.unwrap_or(name), value);
            }
        }
        Ok(report)
    }

    fn of_json(json: &[u8]) -> Result<Self, &'static str> {
        let mut report = Self::default();
        let mut json = serde_json::Deserializer::from_slice(json);
        let read = Entries { report: &mut report, is_map: false }.deserialize(&mut json).and_then(|()| json.end());
        read.map_err(|_| "it holds no OrcaLoadReport as JSON")?;
        Ok(report)
    }
}

/// Reads an object into a report: the message, or one of its maps.
struct Entries<'a> {
    report: &'a mut Report,
    is_map: bool,
}

impl<'de> DeserializeSeed<'de> for Entries<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    /// A map that is `null` is an empty one.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let Self { report, is_map } = self;
        while let Some(name) = entries.next_key::<String>()? {
            match name.as_str() {
                _ if is_map => {
                    if let Number(Some(value)) = entries.next_value()? {
                        report.take_named(name.as_bytes(), value);
                    }
                }
                "named_metrics" | "namedMetrics" | "utilization" => {
                    entries.next_value_seed(Entries { report: &mut *report, is_map: true })?;
                }
                _ => match report.field(name.as_bytes()) {
                    Some(field) => *field = entries.next_value::<Number>()?.0,
                    None => _ = entries.next_value::<IgnoredAny>()?,
                },
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
