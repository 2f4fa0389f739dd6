use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::config::Role;

fn wanted(keys: &Value) -> Wanted {
    match Role::parse(json!({ "classify": keys }).to_string().as_bytes()) {
        Ok(Role::Classifier(config)) => Wanted::new(&config),
        other => panic!("{keys}: {other:?}"),
    }
}

fn read(keys: Value, body: &str) -> Said {
    wanted(&keys).read(body.as_bytes())
}

fn class(pointers: &[&str], body: &str) -> Option<String> {
    read(json!({ "class": pointers }), body).class
}

fn cost(pointers: &[&str], body: &str) -> Option<f64> {
    read(json!({ "cost": pointers }), body).cost
}

fn session(pointers: &[&str], bytes: usize, body: &str) -> Option<u64> {
    read(json!({ "session": pointers, "session_bytes": bytes }), body).session
}

#[test]
fn a_class_is_its_values_in_the_order_of_the_list() {
    let body = r#"{"steps": 20, "hd": true, "size": "1024x1024", "n": 1.50, "sub": {"a/b": ["x", {"~": "deep"}]}, "none": null, "list": []}"#;
    assert_eq!(class(&["/size", "/steps"], body).as_deref(), Some("1024x1024,20"));
    assert_eq!(class(&["/steps", "/size", "/hd", "/n"], body).as_deref(), Some("20,1024x1024,true,1.5"));
    assert_eq!(class(&["/sub/a~1b/1/~0", "/sub/a~1b/0"], body).as_deref(), Some("deep,x"));
    assert_eq!(class(&["/size", "/missing", "/steps"], body).as_deref(), Some("1024x1024,-,20"));
    assert_eq!(class(&["/none", "/list", "/sub", "/size"], body).as_deref(), Some("-,-,-,1024x1024"));
    assert_eq!(class(&["/size", "/size"], body).as_deref(), Some("1024x1024,1024x1024"));
    assert_eq!(class(&["/missing", "/none", "/list", "/sub/a~1b", "/sub/a~1b/2", "/sub/a~1b/01", "/size/0"], body), None);
    assert_eq!(class(&["/0/size"], r#"[{"size": 1}]"#).as_deref(), Some("1"));
    assert_eq!(class(&["/0"], r#"{"0": "a key"}"#).as_deref(), Some("a key"));
    assert_eq!(class(&["/a"], r#"{"a": ""}"#), None);
}

#[test]
fn a_long_class_is_cut_and_told_from_others_that_begin_alike() {
    let of = |text: &str| class(&["/a", "/b"], &json!({ "a": text, "b": 7 }).to_string()).unwrap();
    let exact = "x".repeat(62);
    assert_eq!(of(&exact), format!("{exact},7"));
    let (one, other) = (of(&format!("{exact}y")), of(&format!("{exact}z")));
    assert_eq!((one.len(), &one[..56]), (64, format!("{}~", "x".repeat(55)).as_str()));
    assert_ne!(one, other);
    assert_eq!(one, of(&format!("{exact}y")), "the same again");
    // A character that would be cut goes as a whole.
    let wide = of(&"€".repeat(1000));
    assert_eq!((wide.len(), &wide[..55]), (63, format!("{}~", "€".repeat(18)).as_str()));
    assert!(of(&"€".repeat(20)).len() <= 64);
}

#[test]
fn a_class_has_no_control_characters() {
    assert_eq!(
        class(&["/a"], r#"{"a": "x\n\u0000\u001b[31m\u007f\u0085\ty"}"#).as_deref(),
        Some("x??".to_owned() + "?[31m???y").as_deref()
    );
}

#[test]
fn a_cost_is_the_product_of_numbers_also_of_those_in_digits() {
    let three = ["/width", "/height", "/steps"];
    assert_eq!(cost(&three, r#"{"width": 512, "height": "1024", "steps": 20}"#), Some(512.0 * 1024.0 * 20.0));
    assert_eq!(cost(&["/size", "/steps"], r#"{"size": "512x768", "steps": 0.5}"#), Some(512.0 * 768.0 * 0.5));
    assert_eq!(cost(&["/n"], r#"{"n": 1e300}"#), Some(1e12));
    assert_eq!(cost(&["/n"], r#"{"n": 1e-300}"#), Some(1e-6));
    assert_eq!(cost(&["/n", "/n"], r#"{"n": 1e-200}"#), Some(1e-6));
    assert_eq!(cost(&["/n", "/n"], r#"{"n": 1e200}"#), Some(1e12));
    let none = [
        r#"{"width": 512, "height": 512}"#,
        r#"{"width": 512, "height": 512, "steps": 0}"#,
        r#"{"width": -1, "height": -1, "steps": 1}"#,
        r#"{"width": 512, "height": 512, "steps": "many"}"#,
        r#"{"width": 512, "height": 512, "steps": true}"#,
        r#"{"width": 512, "height": 512, "steps": [1]}"#,
        r#"{"width": 512, "height": 512, "steps": null}"#,
    ];
    for body in none {
        assert_eq!(cost(&three, body), None, "{body}");
    }
    for text in
        ["", "x", "512x", "x512", "512X512", "1.5", "-1", "+1", "1e3", " 1", "inf", "NaN", "0x10", "512×512", &"9".repeat(33)]
    {
        assert_eq!(cost(&["/n"], &json!({ "n": text }).to_string()), None, "{text}");
    }
}

#[test]
fn a_model_is_a_string_of_at_most_256_bytes() {
    let model = |value: Value| read(json!({ "model": "/model" }), &json!({ "model": value }).to_string()).model;
    assert_eq!(model(json!("meta/llama-3.1")).as_deref(), Some("meta/llama-3.1"));
    assert_eq!(model(json!("x".repeat(256))), Some("x".repeat(256)));
    for value in [json!("x".repeat(257)), json!(""), json!("a\nb"), json!(3), json!(null), json!(["a"])] {
        assert_eq!(model(value.clone()), None, "{value}");
    }
}

#[test]
fn a_session_is_told_by_the_beginning_of_its_values_however_they_are_written() {
    let of = |body: &str| session(&["/messages"], 16, body);
    let first = of(r#"{"messages": [{"role": "system"}], "n": 1}"#);
    assert!(first.is_some());
    assert_eq!(
        first,
        of("{\"n\": 2, \"messages\" :\n [ {\"\\u0072ole\" : \"system\", \"x\": [1, 2]}, 3 ] }"),
        "the first 16 bytes are the same"
    );
    assert_ne!(first, of(r#"{"messages": [{"role": "user"}]}"#));
    assert_eq!(of("{}"), None);
    assert_eq!(of(r#"{"messages": null}"#), None);
    let of = |body: &str| session(&["/a", "/b"], 512, body);
    let all = [
        r#"{"a": 1}"#,
        r#"{"b": 1}"#,
        r#"{"a": 1, "b": 1}"#,
        r#"{"a": "1"}"#,
        r#"{"a": [1]}"#,
        r#"{"a": {"1": null}}"#,
        r#"{"a": 11}"#,
    ];
    let hashes: std::collections::BTreeSet<_> = all.iter().map(|body| of(body).unwrap()).collect();
    assert_eq!(hashes.len(), all.len(), "each is another session");
    // The first bytes of FNV-1a, known from elsewhere: fixed for all builds.
    assert_eq!(session(&["/u"], 512, r#"{"u": "x"}"#), Some(fnv(b"=\"x\"\0")));
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(14_695_981_039_346_656_037, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(1_099_511_628_211))
}

#[test]
fn what_is_asked_for_twice_and_within_something_is_found_each_time() {
    let keys = json!({ "class": ["/m/0/role", "/n"], "cost": ["/n"], "model": "/m/0/role", "session": ["/m"] });
    let said = read(keys, r#"{"m": [{"role": "user", "content": [1]}, "x"], "n": 2}"#);
    assert_eq!((said.class.as_deref(), said.cost, said.model.as_deref()), (Some("user,2"), Some(2.0), Some("user")));
    assert_eq!(said.session, Some(fnv(b"=[{\"role\":\"user\",\"content\":[1]},\"x\"]\0")));
}

#[test]
fn of_a_key_that_is_there_twice_the_last_value_counts() {
    assert_eq!(class(&["/a"], r#"{"a": 1, "b": 0, "a": 2}"#).as_deref(), Some("2"));
    assert_eq!(class(&["/a"], r#"{"a": 1, "a": [2]}"#), None);
    assert_eq!(class(&["/a/b", "/a/c"], r#"{"a": {"b": 1}, "a": {"c": 2}}"#).as_deref(), Some("-,2"));
    assert_eq!(class(&["/a/0"], r#"{"a": [1], "a": []}"#), None);
    assert_eq!(session(&["/a"], 512, r#"{"a": 1, "a": null}"#), None);
    assert_eq!(session(&["/a"], 512, r#"{"a": 1, "a": 2}"#), session(&["/a"], 512, r#"{"a": 2}"#));
}

#[test]
fn what_is_no_json_says_nothing() {
    let wanted = wanted(&json!({ "class": ["/a"], "session": [""] }));
    assert_eq!(wanted.read(br#"{"a": 1}"#).class.as_deref(), Some("1"));
    assert_eq!(wanted.read(b" \n{\"a\": 1}\r\n\t ").class.as_deref(), Some("1"));
    let bad: [&[u8]; 12] = [
        b"",
        b"{",
        b"{\"a\": 1",
        b"{\"a\": 1}}",
        b"{\"a\": 1} x",
        b"{\"a\": 1}\0",
        b"\xef\xbb\xbf{\"a\": 1}",
        b"{\"a\": 1, \"b\": \"\xff\"}",
        b"{'a': 1}",
        b"{\"a\": 1,}",
        b"{\"a\": 01}",
        b"{\"a\": NaN}",
    ];
    for body in bad {
        assert_eq!(wanted.read(body), Said::default(), "{body:?}");
    }
}

#[test]
fn depth_ends_the_reading_and_no_stack() {
    let deep = |key: &str, depth: usize| format!(r#"{{"{key}": {}{}, "a": 1}}"#, "[".repeat(depth), "]".repeat(depth));
    assert_eq!(class(&["/a"], &deep("b", 500_000)).as_deref(), Some("1"), "what nobody asked for may be as deep as it likes");
    assert!(session(&["/b"], 65_536, &deep("b", 100)).is_some());
    assert_eq!(session(&["/b"], 65_536, &deep("b", 500_000)), None);
    let unclosed = format!("{{\"a\": 1, \"b\": {}", "[{\"c\":".repeat(100_000));
    assert_eq!(class(&["/a"], &unclosed), None);
}

/// The same by another way: the whole document as a value.
fn looked_up<'a>(document: &'a Value, pointer: &str) -> Option<&'a Value> {
    document.pointer(pointer).filter(|value| !value.is_null())
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e6..1e6f64).prop_map(Value::from),
        "[ax0-9é\"\\\\\n]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 5, |inner| {
        let object = prop::collection::vec(("[ab01]", inner.clone()), 0..5);
        prop_oneof![
            prop::collection::vec(inner, 0..5).prop_map(Value::from),
            object.prop_map(|entries| entries.into_iter().collect())
        ]
    })
}

proptest! {
    #[test]
    fn a_body_says_what_its_document_holds(document in any_json(), pointers in prop::collection::vec("(/[ab01]){0,3}", 1..4), most in 1usize..40) {
        let keys = json!({ "class": pointers, "cost": pointers, "session": [pointers[0]], "session_bytes": most });
        let text = serde_json::to_string_pretty(&document).unwrap();
        let said = read(keys, &text);
        // A fraction is not always read as the one that was written.
        let document: Value = serde_json::from_str(&text).unwrap();
        let scalar = |value: &&Value| !value.is_array() && !value.is_object();
        let parts: Vec<Option<String>> = pointers.iter().map(|pointer| {
            let value = looked_up(&document, pointer).filter(scalar)?;
            Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned).replace('\n', "?"))
        }).collect();
        let joined = parts.iter().map(|part| part.as_deref().unwrap_or("-")).collect::<Vec<_>>().join(",");
        let is_there = parts.iter().any(Option::is_some) && !joined.is_empty();
        if joined.len() <= 64 {
            prop_assert_eq!(said.class, is_there.then_some(joined));
        }
        let mut hash = None;
        if let Some(value) = looked_up(&document, &pointers[0]) {
            let text = value.to_string();
            let text = &text.as_bytes()[..text.len().min(most)];
            hash = Some(fnv(&[b"=", text, b"\0"].concat()));
        }
        prop_assert_eq!(said.session, hash);
    }

    #[test]
    fn any_bytes_end_and_stay_within_their_limits(body in prop::collection::vec(any::<u8>(), 0..200)) {
        let said = wanted(&json!({ "class": [""], "cost": [""], "model": "", "session": [""] })).read(&body);
        prop_assert!(said.class.is_none_or(|class| class.len() <= 64));
    }

    #[test]
    fn any_json_like_text_ends(body in r#"(\{|\}|\[|\]|,|:|"a"|"b"|"\\u0000"|1|-1|1e9|1e999|true|null| ){0,40}"#) {
        let said = wanted(&json!({ "class": ["/a", "/b"], "cost": ["/a"], "session": ["/a/a", "/b"] })).read(body.as_bytes());
        prop_assert_eq!(said == Said::default() || serde_json::from_str::<Value>(&body).is_ok() || body.contains("1e999"), true);
    }
}
