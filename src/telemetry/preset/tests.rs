use super::*;
use crate::telemetry::mapping::{Places, Pointer, Series};
use proptest::prelude::*;

const VLLM_PAGE: &str = include_str!("../samples/vllm.txt");

fn read(preset: Preset, page: &str) -> Reading {
    preset.read(page.as_bytes()).unwrap()
}

fn series() -> Preset {
    Preset::Custom(Mapping::Series(Places { running: Series::parse("jobs"), waiting: None, memory: None, compute: None }))
}

fn pointers() -> Preset {
    Preset::Custom(Mapping::Pointers(Places {
        waiting: Pointer::parse("/queue/waiting"),
        running: None,
        memory: None,
        compute: None,
    }))
}

fn all() -> Vec<Preset> {
    Preset::WORDS.into_iter().map(|word| Preset::parse(word).unwrap()).chain([series(), pointers()]).collect()
}

#[test]
fn each_servers_page_is_read() {
    let of = |running: Option<f64>, waiting: Option<f64>, memory: Option<f64>, compute: Option<f64>| {
        Reading::of(running, waiting, memory, compute)
    };
    assert_eq!(read(Preset::Vllm, VLLM_PAGE), of(Some(8.0), Some(2.0), Some(0.25), None));
    let old = read(Preset::Vllm, include_str!("../samples/vllm_old.txt"));
    assert_eq!(old, of(Some(4.0), Some(1.0), Some(0.75), None));
    let sglang = read(Preset::Sglang, include_str!("../samples/sglang.txt"));
    assert_eq!(sglang, of(Some(162.0), Some(28.0), Some(0.28), None));
    let triton = read(Preset::Triton, include_str!("../samples/triton.txt"));
    assert_eq!(triton, of(None, Some(4.0), Some(0.125), Some(0.75)));
    assert_eq!(read(Preset::Tgi, include_str!("../samples/tgi.txt")), of(Some(12.0), Some(7.0), None, None));
    let dcgm = read(Preset::Dcgm, include_str!("../samples/dcgm.txt"));
    assert_eq!(dcgm, of(None, None, Some(35.0 / 90.0), Some(0.49)));
    let queue = read(Preset::Comfyui, include_str!("../samples/comfyui_queue.json"));
    assert_eq!(queue, of(Some(1.0), Some(2.0), None, None));
    let stats = read(Preset::Comfyui, include_str!("../samples/comfyui_system_stats.json"));
    assert_eq!(stats, of(None, None, Some(0.75), None));
}

#[test]
fn of_ranks_that_work_at_the_same_jobs_one_counts() {
    let reading = read(Preset::Sglang, include_str!("../samples/sglang_ranks.txt"));
    assert_eq!(reading, Reading::of(Some(10.0), Some(3.0), Some(0.375), None));
}

#[test]
fn where_both_names_of_a_value_are_there_the_newer_one_stands() {
    let page = format!("{VLLM_PAGE}vllm:gpu_cache_usage_perc{{engine=\"0\"}} 0.9\n");
    assert_eq!(read(Preset::Vllm, &page).memory, Some(0.25));
}

#[test]
fn words_and_paths_are_those_of_the_configuration() {
    assert_eq!(Preset::parse("custom"), None);
    assert_eq!((Preset::Vllm.paths(), Preset::Comfyui.paths()), (&["/metrics"][..], &["/queue", "/system_stats"][..]));
}

#[test]
fn a_value_that_cannot_be_true_is_unknown_and_the_others_stand() {
    for value in ["NaN", "-1", "+Inf", "1e308", "-1e308"] {
        let page = VLLM_PAGE.replace("} 3.0", &format!("}} {value}"));
        assert_eq!(read(Preset::Vllm, &page), Reading::of(None, Some(2.0), Some(0.25), None), "{value}");
    }
    for value in ["NaN", "-1", "+Inf", "-1e308"] {
        let page = format!("DCGM_FI_DEV_GPU_UTIL 50\nDCGM_FI_DEV_FB_USED {value}\nDCGM_FI_DEV_FB_FREE 1\n");
        assert_eq!(read(Preset::Dcgm, &page), Reading::of(None, None, None, Some(0.5)), "{value}");
    }
    assert_eq!(read(Preset::Dcgm, "DCGM_FI_DEV_GPU_UTIL 1\nDCGM_FI_DEV_FB_USED 0\nDCGM_FI_DEV_FB_FREE 0\n").memory, None);
    let percent = "nv_gpu_utilization 98\nnv_inference_pending_request_count 1\n";
    assert_eq!(read(Preset::Triton, percent).compute, None, "it is not guessed what 98 means where it should be a part");
}

#[test]
fn what_one_of_several_devices_does_not_say_is_not_known_of_all() {
    let device = |rest: &str| format!(r#"{{"queue_running": [], "devices": [{{"vram_total": 8, "vram_free": 2}}{rest}]}}"#);
    let memory = |rest: &str| read(Preset::Comfyui, &device(rest)).memory;
    assert_eq!((memory(""), memory(r#", {"vram_total": 8, "vram_free": "6"}"#)), (Some(0.75), Some(0.5)));
    let unknown = [
        r#", {"vram_total": 8}"#,
        r#", {}"#,
        r#", {"vram_total": -8, "vram_free": 1}"#,
        r#", {"vram_total": 8, "vram_free": null}"#,
    ];
    assert_eq!(unknown.map(memory), [None; 4]);
    assert_eq!(read(Preset::Comfyui, r#"{"queue_running": [], "devices": []}"#).memory, None);
    let more_free_than_there_is = r#"{"queue_running": [], "devices": [{"vram_total": 8, "vram_free": 9}]}"#;
    assert_eq!(read(Preset::Comfyui, more_free_than_there_is).memory, None);
}

#[test]
fn a_page_that_says_nothing_of_use_is_an_error_that_says_so() {
    let error = |preset: Preset, page: &str| preset.read(page.as_bytes()).unwrap_err();
    assert_eq!(error(Preset::Tgi, VLLM_PAGE), "the page holds no value of use of tgi_batch_current_size, tgi_queue_size");
    assert_eq!(
        error(Preset::Tgi, "tgi_queue_size NaN\n"),
        "the page holds no value of use of tgi_batch_current_size, tgi_queue_size"
    );
    assert_eq!(error(Preset::Comfyui, "{}"), "the page holds no value of use of queue_running, queue_pending, devices");
    assert_eq!(error(series(), "job 1"), "the page holds no value of use of jobs");
    assert_eq!(error(pointers(), "{}"), "the page holds no value of use of /queue/waiting");
    for page in ["<html></html>", "", r#"{"queue_running": 7}"#, r#"{"queue_running": []"#, r#"{"devices": [7]}"#] {
        assert!(error(Preset::Comfyui, page).starts_with("the page is not what it should be ("), "{page}");
    }
    let long = format!(r#"{{"devices": [{{"vram_total": "{}"}}]}}"#, "x".repeat(100_000));
    assert!(error(Preset::Comfyui, &long).len() < 300);
}

#[test]
fn two_megabytes_of_anything_are_read_or_refused() {
    const LONG: usize = 2 << 20;
    let parts =
        ["[", "{\"devices\":[", "{},", "vllm:num_requests_running 1\n", "a{x=\"", "\u{0}", "{\"queue_running\":", "[[]],"];
    for part in parts {
        let page = part.repeat(LONG / part.len());
        for preset in all() {
            let _ = preset.read(page.as_bytes());
        }
    }
    let workflow = r#"[1, "id", {"3": {"inputs": {"x": [[[["deep"]]]]}}}, {}, []],"#;
    let queue = format!(r#"{{"queue_running": [], "queue_pending": [{}{}]}}"#, workflow.repeat(LONG / workflow.len()), "[]");
    assert_eq!(read(Preset::Comfyui, &queue).waiting, Some((LONG / workflow.len() + 1) as f32));
    let page = VLLM_PAGE.lines().filter(|line| line.contains("_bucket")).collect::<Vec<_>>().join("\n") + "\n";
    let page = page.repeat(LONG / page.len()) + VLLM_PAGE;
    assert_eq!(read(Preset::Vllm, &page).running, Some(8.0));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        for preset in all() {
            let _ = preset.read(&bytes);
        }
    }

    #[test]
    fn whatever_the_values_are_those_that_are_told_are_in_range(values in any::<[f64; 3]>()) {
        let [used, free, percent] = values;
        let page = format!("DCGM_FI_DEV_FB_USED {used}\nDCGM_FI_DEV_FB_FREE {free}\nDCGM_FI_DEV_GPU_UTIL {percent}\n");
        if let Ok(reading) = Preset::Dcgm.read(page.as_bytes()) {
            prop_assert!([reading.memory, reading.compute].iter().flatten().all(|part| (0.0..=1.0).contains(part)));
        }
    }

    #[test]
    fn a_page_of_comfyui_that_is_cut_off_anywhere_is_refused(part in 0.0..1.0f64) {
        let page = include_str!("../samples/comfyui_queue.json").trim_end().as_bytes();
        prop_assert!(Preset::Comfyui.read(&page[..(page.len() as f64 * part) as usize]).is_err());
    }
}
