use super::*;
use proptest::prelude::*;

fn text(header: &str) -> Result<Option<Reading>, &'static str> {
    read(Some(header.as_bytes()), None)
}

fn encode(bytes: &[u8]) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let groups = bytes.chunks(3).flat_map(|group| {
        let mut bits = [0u8; 4];
        bits[1..=group.len()].copy_from_slice(group);
        let bits = u32::from_be_bytes(bits);
        (0..=group.len()).map(move |at| LETTERS[(bits >> (18 - 6 * at) & 63) as usize] as char)
    });
    groups.collect()
}

fn double(number: u8, value: f64) -> Vec<u8> {
    [&[number << 3 | 1][..], &value.to_le_bytes()].concat()
}

fn bytes(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, bytes.len() as u8][..], bytes].concat()
}

fn entry(map: u8, name: &str, value: f64) -> Vec<u8> {
    bytes(map, &[bytes(1, name.as_bytes()), double(2, value)].concat())
}

fn binary(fields: &[Vec<u8>]) -> Result<Option<Reading>, &'static str> {
    read(None, Some(encode(&fields.concat()).as_bytes()))
}

fn memory_and_compute(memory: f64, compute: f64) -> Result<Option<Reading>, &'static str> {
    Ok(Some(Reading::of(None, None, Some(memory), Some(compute))))
}

#[test]
fn the_three_forms_of_the_documentation_are_read() {
    let list = "TEXT cpu_utilization=0.3, mem_utilization=0.8, rps_fractional=10.0, eps=1, named_metrics.custom_metric_util=0.4";
    assert_eq!(text(list), memory_and_compute(0.8, 0.3));
    assert_eq!(text("TEXT cpu_utilization:0.3,mem_utilization:0.8"), memory_and_compute(0.8, 0.3), "as Envoy's parser has it");
    let json =
        r#"JSON {"cpu_utilization": 0.3, "mem_utilization": 0.8, "rps_fractional": 10.0, "eps": 1, "named_metrics": {"x": 0.4}}"#;
    assert_eq!(text(json), memory_and_compute(0.8, 0.3));
    // cpu_utilization 0.1, rps_fractional 2, two named metrics: from the ORCA documentation.
    let message = "CZqZmZmZmbk/MQAAAAAAAABAQg4KA2ZvbxGamZmZmZm5P0IOCgNiYXIRmpmZmZmZyT8=";
    let expected = Ok(Some(Reading::of(None, None, None, Some(0.1))));
    assert_eq!(text(&format!("BIN {message}")), expected);
    assert_eq!(read(None, Some(message.as_bytes())), expected);
    assert_eq!(read(None, Some(message.trim_end_matches('=').as_bytes())), expected);
    assert_eq!(read(None, Some(format!("{message},AAAA").as_bytes())), expected, "of two headers the first");
}

#[test]
fn no_header_is_no_report_and_the_binary_one_goes_first() {
    assert_eq!(read(None, None), Ok(None));
    let message = encode(&double(1, 0.25));
    let both = read(Some(b"TEXT cpu_utilization=0.5"), Some(message.as_bytes()));
    assert_eq!(both, Ok(Some(Reading::of(None, None, None, Some(0.25)))));
}

#[test]
fn the_application_speaks_before_the_processor_unless_it_says_nothing() {
    let compute = |list: &str| text(&format!("TEXT {list}")).unwrap().and_then(|reading| reading.compute);
    assert_eq!(compute("cpu_utilization=0.3, application_utilization=0.9"), Some(0.9));
    assert_eq!(compute("application_utilization=0, cpu_utilization=0.3"), Some(0.3));
    assert_eq!(compute("application_utilization=0"), None);
    assert_eq!(compute("cpu_utilization=0"), Some(0.0));
    assert_eq!(binary(&[double(9, 0.9), double(1, 0.3)]).unwrap().unwrap().compute, Some(0.9));
}

#[test]
fn named_metrics_say_how_many_jobs_there_are_and_override_the_fields() {
    let expected = Ok(Some(Reading::of(Some(3.0), Some(7.0), Some(0.5), Some(0.25))));
    let list = "mem_utilization=0.9, cpu_utilization=0.9, named_metrics.running=3, waiting=7, utilization.memory=0.5, \
                named_metrics.compute=0.25";
    assert_eq!(text(&format!("TEXT {list}")), expected);
    for (named, memory, cpu) in
        [("named_metrics", "mem_utilization", "cpu_utilization"), ("namedMetrics", "memUtilization", "cpuUtilization")]
    {
        let json = format!(
            r#"JSON {{"{named}": {{"running": 3, "waiting": "7"}}, "{memory}": 0.9, "{cpu}": "NaN", "requestCost": {{"running": 9}},
                "utilization": {{"memory": 0.5, "compute": 0.25, "other": null}}, "new": [{{"running": 1}}], "rps": "12"}}"#
        );
        assert_eq!(text(&json), expected);
    }
    let fields = [
        double(2, 0.9),
        entry(8, "running", 3.0),
        entry(8, "waiting", 7.0),
        entry(4, "running", 99.0),
        entry(5, "memory", 0.5),
        entry(5, "compute", 0.25),
        vec![3 << 3, 0xFF, 0x01],
        bytes(14, b"unknown"),
        vec![13 << 3 | 5, 1, 2, 3, 4],
    ];
    assert_eq!(binary(&fields), expected);
}

#[test]
fn what_vllm_and_triton_send_is_understood() {
    let header = r#"JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 2.0}}"#;
    let expected = Ok(Some(Reading::of(None, Some(2.0), Some(0.4), None)));
    assert_eq!(text(header), expected);
    assert_eq!(text("TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=2.0"), expected);
    let triton = "TEXT named_metrics.kv_cache_utilization=0.4, named_metrics.max_token_capacity=1024";
    assert_eq!(text(triton), Ok(Some(Reading::of(None, None, Some(0.4), None))));
}

#[test]
fn a_value_that_cannot_be_true_leaves_the_others() {
    assert_eq!(text("TEXT mem_utilization=NaN, cpu_utilization=0.5"), Ok(Some(Reading::of(None, None, None, Some(0.5)))));
    assert_eq!(text("TEXT named_metrics.running=-1, mem_utilization=1e308, cpu_utilization=inf"), Ok(None));
    // The host's own word cannot be true, and then the field's holds.
    assert_eq!(text("TEXT named_metrics.memory=-1, mem_utilization=0.5").unwrap().unwrap().memory, Some(0.5));
    assert_eq!(text("TEXT eps=4"), Ok(None));
    assert_eq!(text("JSON {}"), Ok(None));
    assert_eq!(text("JSON {\"named_metrics\": null, \"cpu_utilization\": null}"), Ok(None));
    assert_eq!(text("TEXT "), Ok(None));
}

#[test]
fn garbage_is_told_from_nothing() {
    let deep = format!("JSON {}", "[".repeat(50_000));
    let deep_unknown = format!("JSON {{\"x\": {}", "[".repeat(50_000));
    let long = format!("TEXT {}", "a=1,".repeat(20_000));
    let texts = [
        "",
        "cpu_utilization=0.5",
        "TEXT",
        "TEXTcpu_utilization=0.5",
        "text cpu_utilization=0.5",
        "TEXT cpu_utilization",
        "TEXT cpu_utilization=",
        "TEXT cpu_utilization=half",
        "TEXT =",
        "JSON",
        "JSON ",
        "JSON []",
        "JSON 7",
        "JSON {\"cpu_utilization\": true}",
        "JSON {\"cpu_utilization\": 0.5",
        "JSON {\"cpu_utilization\": 0.5} x",
        "JSON {\"named_metrics\": 7}",
        "JSON {\"named_metrics\": {\"running\": {}}}",
        "BIN ",
        "BIN !",
        "BIN AAAA",
        &deep,
        &deep_unknown,
        &long,
    ];
    for header in texts {
        assert!(text(header).is_err(), "{}", &header[..header.len().min(60)]);
    }
    let truncated = double(1, 0.5)[..7].to_vec();
    let endless_varint = [vec![3 << 3], vec![0xFF; 10]].concat();
    let too_long = vec![8 << 3 | 2, 100, 1];
    let far_too_long = [vec![8 << 3 | 2], vec![0xFF; 9], vec![1]].concat();
    let bad_entry = bytes(8, &[1 << 3 | 2, 9]);
    for fields in [truncated, endless_varint, too_long, far_too_long, bad_entry, vec![3], vec![7 << 3 | 3], vec![0, 1]] {
        assert!(binary(std::slice::from_ref(&fields)).is_err(), "{fields:?}");
    }
    assert!(read(None, Some(b"")).is_err());
}

#[test]
fn a_field_of_another_type_than_it_should_have_is_skipped() {
    assert_eq!(binary(&[bytes(1, b"0.5"), vec![2 << 3, 7], double(8, 3.0)]), Ok(None));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), form in 0..4usize) {
        let header = [[&b"TEXT "[..], b"JSON ", b"BIN ", b""][form], &bytes[..]].concat();
        let _ = read(Some(&header), None);
        let _ = read(None, Some(&bytes));
        let _ = read(None, Some(encode(&bytes).as_bytes()));
    }

    #[test]
    fn any_values_are_in_range_or_none(values in any::<[f64; 4]>()) {
        let fields = [double(1, values[0]), double(2, values[1]), entry(8, "running", values[2]), entry(5, "waiting", values[3])];
        if let Some(reading) = binary(&fields).unwrap() {
            prop_assert_eq!(reading, Reading::of(Some(values[2]), Some(values[3]), Some(values[1]), Some(values[0])));
        }
    }

    #[test]
    fn any_list_of_likely_parts_is_read_or_refused(list in r#"(named_metrics\.|running|cpu_utilization|=|:|,| |0\.5|NaN|-1|1e308){0,40}"#) {
        let _ = text(&format!("TEXT {list}"));
    }

    #[test]
    fn any_json_of_likely_parts_is_read_or_refused(json in r#"(\{|\}|\[|\]|,|:|"named_metrics"|"running"|"cpu_utilization"|0\.5|"NaN"|null|1e308){0,40}"#) {
        let _ = text(&format!("JSON {json}"));
    }
}
