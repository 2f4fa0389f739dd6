//! What ComfyUI says of itself, on two pages: `/queue`, whose entries hold whole workflows and are counted only, and `/system_stats`.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};

use super::number::Number;
use crate::core::reading::Reading;

/// Its pages.
pub const PATHS: [&str; 2] = ["/queue", "/system_stats"];

/// Either page.
#[derive(Deserialize)]
struct Page {
    queue_running: Option<Length>,
    queue_pending: Option<Length>,
    devices: Option<Devices>,
}

/// The length of a list whose items do not matter.
struct Length(f64);

/// The memory of all devices together, in bytes.
#[derive(Default)]
struct Devices {
    total: f64,
    free: f64,
}

#[derive(Deserialize)]
struct Device {
    #[serde(default)]
    vram_total: Number,
    #[serde(default)]
    vram_free: Number,
}

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Counts;
        impl<'de> Visitor<'de> for Counts {
            type Value = Length;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Length, A::Error> {
                let mut length = 0.0;
                while items.next_element::<IgnoredAny>()?.is_some() {
                    length += 1.0;
                }
                Ok(Length(length))
            }
        }
        deserializer.deserialize_seq(Counts)
    }
}

impl<'de> Deserialize<'de> for Devices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sums;
        impl<'de> Visitor<'de> for Sums {
            type Value = Devices;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a list of devices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Devices, A::Error> {
                let mut sums = Devices::default();
                while let Some(Device { vram_total, vram_free }) = items.next_element()? {
                    // One that does not say how much is one of which nobody knows how much all have.
                    let size = |number: Number| number.0.filter(|size| *size >= 0.0).unwrap_or(f64::NAN);
                    sums.total += size(vram_total);
                    sums.free += size(vram_free);
                }
                Ok(sums)
            }
        }
        deserializer.deserialize_seq(Sums)
    }
}

/// What one of the pages says.
pub fn read(page: &[u8]) -> Result<Reading, serde_json::Error> {
    let page: Page = serde_json::from_slice(page)?;
    let length = |list: Option<Length>| list.map(|Length(length)| length);
    // Of no memory at all no part is used: that is NaN, and no value.
    let used = page.devices.map(|Devices { total, free }| (total - free) / total);
    Ok(Reading::of(length(page.queue_running), length(page.queue_pending), used, None))
}
