//! Which server a host runs, and so which pages it has and what they say.
//!
//! | | running | waiting | memory | compute |
//! |---|---|---|---|---|
//! | vLLM | `vllm:num_requests_running` | `vllm:num_requests_waiting` | `vllm:kv_cache_usage_perc`, before 0.10 `vllm:gpu_cache_usage_perc` | |
//! | SGLang | `sglang:num_running_reqs` | `sglang:num_queue_reqs` | `sglang:token_usage` | |
//! | Triton | | `nv_inference_pending_request_count` | `nv_gpu_memory_used_bytes` of `nv_gpu_memory_total_bytes` | `nv_gpu_utilization` |
//! | TGI | `tgi_batch_current_size` | `tgi_queue_size` | | |
//! | DCGM exporter | | | `DCGM_FI_DEV_FB_USED` of that and `DCGM_FI_DEV_FB_FREE` | `DCGM_FI_DEV_GPU_UTIL`, in percent |
//! | ComfyUI | `queue_running` | `queue_pending` | `vram_total` less `vram_free` of `vram_total` | |
//!
//! Where a page has several series of a name (a host with several engines, models or GPUs), jobs and bytes are summed and parts averaged.

use super::comfyui;
use super::mapping::{Mapping, Total};
use super::prometheus::{Sample, samples};
use crate::core::reading::Reading;

/// What pages a host has.
#[derive(Clone, Debug, PartialEq)]
pub enum Preset {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// NVIDIA Triton.
    Triton,
    /// Hugging Face's Text Generation Inference.
    Tgi,
    /// NVIDIA's exporter of what the GPU's own management says.
    Dcgm,
    /// ComfyUI.
    Comfyui,
    /// A page of which the user says what it says.
    Custom(Mapping),
}

/// Most characters of what is wrong with a page.
const MOST_SAID: usize = 200;

impl Preset {
    /// The words of a configuration for those that need no mapping.
    pub const WORDS: [&str; 6] = ["vllm", "sglang", "triton", "tgi", "dcgm", "comfyui"];

    /// The preset of this word.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "vllm" => Self::Vllm,
            "sglang" => Self::Sglang,
            "triton" => Self::Triton,
            "tgi" => Self::Tgi,
            "dcgm" => Self::Dcgm,
            "comfyui" => Self::Comfyui,
            _ => return None,
        })
    }

    /// Where its pages are, unless the user says otherwise.
    pub fn paths(&self) -> &'static [&'static str] {
        match self {
            Self::Comfyui => &comfyui::PATHS,
            _ => &["/metrics"],
        }
    }

    /// What one of the pages says, which is at least something. The error says what is wrong with it.
    pub fn read(&self, page: &[u8]) -> Result<Reading, String> {
        let no_json = |error: serde_json::Error| {
            // It quotes what it stumbled over, however long that is.
            let error: String = error.to_string().chars().take(MOST_SAID).collect();
            format!("the page is not what it should be ({error})")
        };
        let reading = match self {
            Self::Custom(mapping) => mapping.read(page).map_err(no_json)?,
            Self::Comfyui => comfyui::read(page).map_err(no_json)?,
            Self::Vllm => VLLM.read(page),
            Self::Sglang => SGLANG.read(page),
            Self::Triton => TRITON.read(page),
            Self::Tgi => TGI.read(page),
            Self::Dcgm => DCGM.read(page),
        };
        match reading.is_empty() {
            true => Err(format!("the page holds no value of use of {}", self.names().join(", "))),
            false => Ok(reading),
        }
    }

    fn names(&self) -> Vec<String> {
        let rules = match self {
            Self::Custom(mapping) => return mapping.names(),
            Self::Comfyui => return ["queue_running", "queue_pending", "devices"].map(str::to_owned).into(),
            Self::Vllm => &VLLM,
            Self::Sglang => &SGLANG,
            Self::Triton => &TRITON,
            Self::Tgi => &TGI,
            Self::Dcgm => &DCGM,
        };
        rules.names().map(str::to_owned).collect()
    }
}

/// How a value comes out of a Prometheus page.
#[derive(Clone, Copy)]
enum Rule {
    /// It is not there.
    Not,
    /// The sum of the series of a name.
    Sum(&'static str),
    /// The mean of the series of the first of these names that is there.
    Mean(&'static [&'static str]),
    /// The mean of the series of a name, which are in percent.
    Percent(&'static str),
    /// The sum of the series of the first name, of the sum of those of the second.
    Of(&'static str, &'static str),
    /// The sum of the series of the first name, of the sum of those of both.
    Beside(&'static str, &'static str),
}

/// What a server's page says.
struct Rules {
    running: Rule,
    waiting: Rule,
    memory: Rule,
    compute: Rule,
    /// Whether a series is to be counted.
    counts: fn(&Sample) -> bool,
}

const VLLM: Rules = Rules {
    running: Rule::Sum("vllm:num_requests_running"),
    waiting: Rule::Sum("vllm:num_requests_waiting"),
    memory: Rule::Mean(&["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"]),
    compute: Rule::Not,
    counts: |_| true,
};

const SGLANG: Rules = Rules {
    running: Rule::Sum("sglang:num_running_reqs"),
    waiting: Rule::Sum("sglang:num_queue_reqs"),
    memory: Rule::Mean(&["sglang:token_usage"]),
    compute: Rule::Not,
    // With `--enable-metrics-for-all-schedulers` each rank of a group that works at the same jobs tells of them, and where there are priorities, the
    // jobs of each are told beside the total.
    counts: |sample| {
        let is_first = |rank: &[u8]| sample.has(rank, b"") || sample.has(rank, b"0");
        let is_a_group = !sample.has(b"dp_rank", b"");
        sample.has(b"priority", b"") && is_first(b"pp_rank") && (is_a_group || is_first(b"tp_rank"))
    },
};

const TRITON: Rules = Rules {
    running: Rule::Not,
    waiting: Rule::Sum("nv_inference_pending_request_count"),
    memory: Rule::Of("nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"),
    compute: Rule::Mean(&["nv_gpu_utilization"]),
    counts: |_| true,
};

const TGI: Rules = Rules {
    running: Rule::Sum("tgi_batch_current_size"),
    waiting: Rule::Sum("tgi_queue_size"),
    memory: Rule::Not,
    compute: Rule::Not,
    counts: |_| true,
};

const DCGM: Rules = Rules {
    running: Rule::Not,
    waiting: Rule::Not,
    memory: Rule::Beside("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"),
    compute: Rule::Percent("DCGM_FI_DEV_GPU_UTIL"),
    counts: |_| true,
};

/// The sums of the series of each name.
struct Totals(Vec<(&'static str, Total)>);

impl Rule {
    fn names(self) -> Vec<&'static str> {
        match self {
            Self::Not => Vec::new(),
            Self::Sum(name) | Self::Percent(name) => vec![name],
            Self::Mean(names) => names.to_vec(),
            Self::Of(one, other) | Self::Beside(one, other) => vec![one, other],
        }
    }

    fn value(self, totals: &Totals) -> Option<f64> {
        let sum = |name| totals.of(name).sum();
        match self {
            Self::Not => None,
            Self::Sum(name) => sum(name),
            Self::Mean(names) => names.iter().find_map(|name| totals.of(name).mean()),
            Self::Percent(name) => totals.of(name).mean().map(|percent| percent / 100.0),
            // Of nothing at all no part is used: that is NaN, and no value.
            Self::Of(used, total) => Some(sum(used)? / sum(total)?),
            Self::Beside(used, free) => Some(sum(used)? / (sum(used)? + sum(free)?)),
        }
    }
}

impl Totals {
    fn of(&self, name: &str) -> Total {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, total)| *total).unwrap_or_default()
    }
}

impl Rules {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.running, self.waiting, self.memory, self.compute].into_iter().flat_map(Rule::names)
    }

    fn read(&self, page: &[u8]) -> Reading {
        let mut totals = Totals(self.names().map(|name| (name, Total::default())).collect());
        let wanted: Vec<&[u8]> = self.names().map(str::as_bytes).collect();
        for sample in samples(page, |name| wanted.contains(&name)).filter(self.counts) {
            if let Some((_, total)) = totals.0.iter_mut().find(|(name, _)| name.as_bytes() == sample.name) {
                total.add(sample.value);
            }
        }
        let value = |rule: Rule| rule.value(&totals);
        Reading::of(value(self.running), value(self.waiting), value(self.memory), value(self.compute))
    }
}

#[cfg(test)]
mod tests;
