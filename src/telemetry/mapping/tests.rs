use super::*;
use proptest::prelude::*;

fn series(running: &str, memory: &str) -> Mapping {
    let places = Places { running: Series::parse(running), memory: Series::parse(memory), waiting: None, compute: None };
    assert!(places.running.is_some() && places.memory.is_some());
    Mapping::Series(places)
}

fn pointers(places: [&str; 4]) -> Mapping {
    let [running, waiting, memory, compute] = places.map(Pointer::parse);
    Mapping::Pointers(Places { running, waiting, memory, compute })
}

#[test]
fn series_are_found_by_name_and_labels_and_counts_are_summed_and_parts_averaged() {
    let page = br#"
# TYPE jobs gauge
jobs{model="a",gpu="0"} 1
jobs{model="a",gpu="1"} 2
jobs{model="b",gpu="0"} 4
jobs_total{model="a"} 1000
used{gpu="0"} 0.25
used{gpu="1"} 0.75
"#;
    let running = |text: &str| series(text, "used").read(page).unwrap().running;
    assert_eq!(running("jobs"), Some(7.0));
    assert_eq!(running(r#"jobs{model="a"}"#), Some(3.0));
    assert_eq!(running(r#"jobs{ gpu = "0" , model="a", }"#), Some(1.0));
    assert_eq!(running(r#"jobs{model="c"}"#), None);
    assert_eq!(running(r#"jobs{node=""}"#), Some(7.0));
    assert_eq!(series("jobs", "used").read(page).unwrap().memory, Some(0.5));
}

#[test]
fn one_series_that_says_nothing_of_use_makes_the_value_unknown() {
    for value in ["NaN", "-1", "+Inf", "1e308"] {
        let page = format!("jobs 1\njobs {value}\nused 0.5\n");
        assert_eq!(series("jobs", "used").read(page.as_bytes()).unwrap(), Reading::of(None, None, Some(0.5), None), "{value}");
    }
}

#[test]
fn what_is_no_series_is_told_so() {
    let escaped = Series::parse(r#"a{b="\"}\\{"}"#).unwrap();
    assert_eq!(escaped.labels, [("b".to_owned(), br#""}\{"#.to_vec())]);
    assert!(["a", "a:b", "a{}", "a{b=\"\"}"].iter().all(|text| Series::parse(text).is_some()));
    let bad = [
        "",
        "9",
        "a b",
        "a{",
        "a}",
        "a{b}",
        "a{b=c}",
        "a{b=\"c}",
        "a{b=\"c\"",
        "a{b=\"c\" d=\"e\"}",
        "a{b=~\"c\"}",
        "a{b!=\"c\"}",
        "{b=\"c\"}",
    ];
    for text in bad {
        assert_eq!(Series::parse(text), None, "{text}");
    }
}

#[test]
fn pointers_lead_to_numbers_texts_and_the_lengths_of_lists() {
    let page =
        br#"{"queue": {"running": [{"x": [1, 2]}, 7], "waiting": [], "a/b~": "0.5"}, "gpus": [{"used": 0.125}, {"used": 0.25}]}"#;
    let mapping = pointers(["/queue/running", "/queue/waiting", "/queue/a~1b~0", "/gpus/1/used"]);
    assert_eq!(mapping.read(page).unwrap(), Reading::of(Some(2.0), Some(0.0), Some(0.5), Some(0.25)));
    let inside = pointers(["/queue/running", "/queue/running/1", "/queue/running/0/x/0", "/queue/running/0/x"]);
    assert_eq!(inside.read(page).unwrap(), Reading::of(Some(2.0), Some(7.0), Some(1.0), None), "2 is no part");
    let nowhere = pointers(["/queue", "/queue/running/x", "/gpus/2/used", "/other"]);
    assert_eq!(nowhere.read(page).unwrap(), Reading::default());
    assert_eq!(
        pointers(["/0", "/1", "/2", "/3"]).read(b"[3, true, null, \"x\"]").unwrap(),
        Reading::of(Some(3.0), None, None, None)
    );
}

#[test]
fn what_is_no_pointer_is_told_so() {
    assert_eq!(Pointer::parse("/"), Some(Pointer(vec![String::new()])));
    assert!(["", "a", "a/b", "/~", "/~2", "/a~/b"].iter().all(|text| Pointer::parse(text).is_none()));
}

#[test]
fn a_page_that_is_no_json_is_refused_however_deep_or_long() {
    let mapping = pointers(["/a", "/a/a", "/b", "/c"]);
    let deep = format!("{{\"x\": {}", "[".repeat(2 << 20));
    let deep_on_the_way = format!("{{\"a\": {}", "{\"a\":".repeat(400_000));
    for page in ["", "x", "{", "{\"a\": 1} x", "{\"a\": 1e999}", "\u{0}", &deep, &deep_on_the_way] {
        assert!(mapping.read(page.as_bytes()).is_err(), "{}", &page[..page.len().min(40)]);
    }
    let deep_and_whole = format!("{{\"x\": {}{}, \"a\": 1}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(mapping.read(deep_and_whole.as_bytes()).unwrap().running, Some(1.0));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = pointers(["/a", "/a/0", "/b", "/c"]).read(&bytes);
        let _ = series("a", "b").read(&bytes);
        let _ = Series::parse(&String::from_utf8_lossy(&bytes));
        let _ = Pointer::parse(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn any_json_of_likely_parts_is_read_or_refused(json in r#"(\{|\}|\[|\]|,|:|"a"|"b"|0\.5|"NaN"|null|1e308|-1){0,40}"#) {
        let _ = pointers(["/a", "/a/0", "/b", "/a/b"]).read(json.as_bytes());
    }

    #[test]
    fn any_series_of_likely_parts_is_read_or_refused(text in r#"(a|\{|\}|=|"|\\|,| ){0,20}"#) {
        let _ = Series::parse(&text);
    }
}
