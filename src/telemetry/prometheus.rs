//! The Prometheus text format, and what OpenMetrics adds to it: samples, one a line.
//!
//! ```text
//! # TYPE vllm:num_requests_running gauge
//! vllm:num_requests_running{engine="0",model_name="a \"quoted\" name"} 3.0 1712000000000
//! request_seconds_bucket{le="+Inf"} 17 # {trace_id="a"} 0.67
//! ```
//!
//! Pages are long (2 MB of histograms) and few of their samples are wanted, so that a line is looked at only as far as its name, unless that is wanted.
//! A line that cannot be read is passed over, and so is what follows a value.

use super::number;

/// A sample.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The metric's name.
    pub name: &'a [u8],
    /// What is between the braces.
    labels: &'a [u8],
    /// Its value: any, also NaN or infinity.
    pub value: f64,
}

/// The samples of a page whose names are wanted, in their order.
pub fn samples<'a>(page: &'a [u8], is_wanted: impl Fn(&[u8]) -> bool) -> impl Iterator<Item = Sample<'a>> {
    lines(page).filter_map(move |line| {
        let line = line.trim_ascii();
        let (name, rest) = line.split_at_checked(line.iter().position(|byte| matches!(byte, b'{' | b' ' | b'\t'))?)?;
        if name.starts_with(b"#") || !is_wanted(name) {
            return None;
        }
        let (labels, rest) = labels_and_rest(rest.trim_ascii_start())?;
        let value = rest.trim_ascii_start().split(|byte| matches!(byte, b' ' | b'\t' | b'#')).next()?;
        Some(Sample { name, labels, value: number::parse(value)? })
    })
}

fn lines(page: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(page);
    std::iter::from_fn(move || {
        let text = rest?;
        let (line, after) = line_end(text).and_then(|end| text.split_at_checked(end)).unwrap_or((text, &[]));
        rest = after.get(1..);
        Some(line)
    })
}

/// Where the first line feed is. Most of a long page is passed over here, and so it is looked for in eight bytes at once (Mycroft's test for a zero byte).
fn line_end(text: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::MAX / 255;
    let (words, tail) = text.as_chunks::<8>();
    for (at, word) in words.iter().enumerate() {
        let differs = u64::from_le_bytes(*word) ^ (ONES * u64::from(b'\n'));
        let zeros = differs.wrapping_sub(ONES) & !differs & (ONES << 7);
        if zeros != 0 {
            return Some(at * 8 + zeros.trailing_zeros() as usize / 8);
        }
    }
    tail.iter().position(|byte| *byte == b'\n').map(|at| words.len() * 8 + at)
}

/// What stands between the braces, if there are any, and what comes after them; `None`: they do not end.
fn labels_and_rest(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let Some(inside) = text.strip_prefix(b"{") else {
        return Some((&[], text));
    };
    let (mut is_quoted, mut is_escaped) = (false, false);
    let end = inside.iter().position(|byte| {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_quoted,
            b'"' => is_quoted = !is_quoted,
            b'}' => return !is_quoted,
            _ => {}
        }
        false
    })?;
    let (labels, rest) = inside.split_at_checked(end)?;
    Some((labels, rest.get(1..)?))
}

impl<'a> Sample<'a> {
    /// Whether it has a label of this value. As for Prometheus, a label that is not there is an empty one.
    pub fn has(&self, label: &[u8], value: &[u8]) -> bool {
        match self.labels().find(|(name, _)| *name == label) {
            Some((_, escaped)) => unescaped(escaped).eq(value.iter().copied()),
            None => value.is_empty(),
        }
    }

    /// Its labels: names, and values as they are written, as far as they can be read.
    fn labels(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let mut rest = self.labels;
        std::iter::from_fn(move || {
            let name = rest.trim_ascii_start();
            let (name, value) = name.split_at_checked(name.iter().position(|byte| *byte == b'=')?)?;
            let value = value.get(1..)?.trim_ascii_start().strip_prefix(b"\"")?;
            let mut is_escaped = false;
            let end = value.iter().position(|byte| {
                let is_end = *byte == b'"' && !is_escaped;
                is_escaped = *byte == b'\\' && !is_escaped;
                is_end
            })?;
            let (value, after) = value.split_at_checked(end)?;
            let after = after.get(1..)?.trim_ascii_start();
            rest = after.strip_prefix(b",").unwrap_or(after);
            Some((name.trim_ascii_end(), value))
        })
    }
}

/// The value of a label, or of a text in quotes, whose escapes are `\\`, `\"` and `\n`.
pub fn unescaped(text: &[u8]) -> impl Iterator<Item = u8> {
    let mut bytes = text.iter().copied();
    std::iter::from_fn(move || match bytes.next()? {
        b'\\' => match bytes.next() {
            Some(b'n') => Some(b'\n'),
            escaped => escaped,
        },
        byte => Some(byte),
    })
}

/// Whether a metric may have this name.
pub fn is_name(name: &[u8]) -> bool {
    let is_start = |byte: &u8| byte.is_ascii_alphabetic() || matches!(byte, b'_' | b':');
    name.first().is_some_and(is_start) && name.iter().all(|byte| is_start(byte) || byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(page: &str) -> Vec<(String, f64)> {
        samples(page.as_bytes(), |_| true)
            .map(|sample| (String::from_utf8_lossy(sample.name).into_owned(), sample.value))
            .collect()
    }

    fn one(line: &str) -> Sample<'_> {
        samples(line.as_bytes(), |_| true).next().unwrap()
    }

    #[test]
    fn each_line_is_a_sample_and_comments_are_none() {
        let page = "# HELP a Something.\n# TYPE a gauge\na 1\na{x=\"y\"} 2.5\r\n\n  b:c\t3e2  \n#a 4\nb{} -1 1712000000000\nc{x=\"1\",} +Inf\nd NaN";
        let read = all(page);
        let expected = [("a", 1.0), ("a", 2.5), ("b:c", 300.0), ("b", -1.0), ("c", f64::INFINITY)];
        assert_eq!(read[..5], expected.map(|(name, value)| (name.to_owned(), value)));
        assert!(read.len() == 6 && read[5].0 == "d" && read[5].1.is_nan(), "{read:?}");
    }

    #[test]
    fn exemplars_and_timestamps_are_no_part_of_the_value() {
        let page = "a_bucket{le=\"0.5\"} 17 # {trace_id=\"1 } 2\"} 0.67 1.5\na_total 5# x\na 3 1712000000.123\n# EOF\n";
        assert_eq!(all(page).iter().map(|(_, value)| *value).collect::<Vec<_>>(), [17.0, 5.0, 3.0]);
    }

    #[test]
    fn only_what_is_wanted_is_read_and_by_its_whole_name() {
        let page = "a 1\na_total 2\nba 3\na{x=\"1\"} 4\na nonsense\n";
        let read: Vec<f64> = samples(page.as_bytes(), |name| name == b"a").map(|sample| sample.value).collect();
        assert_eq!(read, [1.0, 4.0]);
    }

    #[test]
    fn labels_are_compared_by_what_they_say() {
        let sample = one(r#"a{ one="1" , two = "a \"b\" \\ \n}{,=", three="ü",}  7"#);
        assert_eq!(sample.value, 7.0);
        assert!(sample.has(b"one", b"1") && sample.has(b"two", b"a \"b\" \\ \n}{,=") && sample.has(b"three", "ü".as_bytes()));
        assert!(!sample.has(b"one", b"") && !sample.has(b"on", b"1") && !sample.has(b"one", b"11"));
        assert!(sample.has(b"four", b"") && !sample.has(b"four", b"4"));
        assert!(one("a 1").has(b"x", b""));
    }

    #[test]
    fn a_line_that_cannot_be_read_does_not_spoil_the_next() {
        let garbage = [
            "a",
            "a ",
            "{",
            "}",
            "a{",
            "a{x=\"} 1",
            "a{x=\"\\\"} 1",
            "a one",
            "a{} ",
            "a 0x10",
            "a 1_000",
            "\"a\" \"b\"",
            "{\"a.b\"}",
        ];
        for line in garbage {
            let long = format!("{line}\nok 1\n");
            assert_eq!(all(&long).last(), Some(&("ok".to_owned(), 1.0)), "{line}");
            assert!(all(line).iter().all(|(name, _)| name.is_empty()), "{line}: {:?}", all(line));
        }
        let bytes = [&b"\xff\xfe 1\na{x=\"\xff\"} 2\nb \xff\nc 3"[..], &[0; 10]].concat();
        let read: Vec<f64> = samples(&bytes, |name| name == b"a" || name == b"b").map(|sample| sample.value).collect();
        assert_eq!(read, [2.0]);
    }

    #[test]
    fn labels_that_cannot_be_read_are_as_if_they_were_not_there() {
        for line in ["a{x} 1", "a{x=1} 1", "a{=} 1", "a{x=\"1\" \"\"y=\"2\"} 1", "a{,,,} 1"] {
            let sample = one(line);
            assert!(!sample.has(b"y", b"2") && sample.value == 1.0, "{line}");
        }
    }

    #[test]
    fn long_pages_of_garbage_come_to_an_end() {
        const LONG: usize = 2 << 20;
        for part in ["a", "{", "a{", "\"", "\\", "a{x=\"", "a 1 ", "\n", "a\n", "a{x=\"1\",", "1"] {
            let page = part.repeat(LONG / part.len());
            let has_y = samples(page.as_bytes(), |_| true).filter(|sample| sample.has(b"y", b"1")).count();
            assert_eq!(has_y, 0, "{part}");
        }
        let labels = format!("a{{{}}} 1", "x=\"1\",".repeat(LONG / 6));
        assert!(one(&labels).has(b"x", b"1") && !one(&labels).has(b"y", b"1"));
    }

    #[test]
    fn names_are_those_that_prometheus_allows() {
        assert!(["a", "vllm:num_requests_running", "_x9", ":"].iter().all(|name| is_name(name.as_bytes())));
        assert!(["", "9a", "a-b", "a b", "ü", "a.b"].iter().all(|name| !is_name(name.as_bytes())));
    }

    proptest! {
        #[test]
        fn lines_end_where_line_feeds_are(page in r#"[a\n\x0b\x09\x8a]{0,60}"#) {
            let expected: Vec<&[u8]> = page.as_bytes().split(|byte| *byte == b'\n').collect();
            let lines: Vec<&[u8]> = lines(page.as_bytes()).filter(|line| !line.is_empty()).collect();
            prop_assert_eq!(lines, expected.into_iter().filter(|line| !line.is_empty()).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            samples(&bytes, |_| true).for_each(|sample| _ = sample.has(b"x", b"1"));
        }

        #[test]
        fn any_line_of_likely_parts_is_read(page in r#"(a|\{|\}|x|=|"|\\|,| |1|NaN|#|\n){0,60}"#) {
            samples(page.as_bytes(), |_| true).for_each(|sample| _ = sample.has(b"x", b"1"));
        }

        #[test]
        fn any_label_is_found_again(value in any::<String>(), number in any::<f64>()) {
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let page = format!("a{{other=\"}}\\\"\",x=\"{escaped}\",last=\"\"}} {number}");
            let sample = one(&page);
            prop_assert!(sample.has(b"x", value.as_bytes()));
            prop_assert!(sample.value == number || number.is_nan() && sample.value.is_nan());
        }
    }
}
