//! Numbers in JSON, as servers and proto3 write them.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

/// A number, or a string that holds one such as `"0.5"` or `"NaN"`; `null` is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Number(pub Option<f64>);

/// Longer text is no number that anybody writes: 1.8e308 without an exponent has 309 digits, and 5e-324 has 326.
const LONGEST: usize = 400;

/// The number that some text holds, also `NaN`, `+Inf` and the like.
pub fn parse(text: &[u8]) -> Option<f64> {
    Some(text).filter(|text| text.len() <= LONGEST).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok())
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor)
    }
}

struct NumberVisitor;

impl Visitor<'_> for NumberVisitor {
    type Value = Number;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a number")
    }

    fn visit_unit<E>(self) -> Result<Number, E> {
        Ok(Number(None))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Number, E> {
        Ok(Number(Some(value as f64)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Number, E> {
        Ok(Number(Some(value as f64)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Number, E> {
        Ok(Number(Some(value)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Number, E> {
        parse(text.as_bytes()).map(|value| Number(Some(value))).ok_or_else(|| E::custom("a text that is no number"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_texts_that_hold_one_are_read() {
        let read = |json: &str| serde_json::from_str::<Number>(json).unwrap().0;
        assert_eq!(["7", "-1", "0.5", "1e3", "\"0.25\""].map(read), [7.0, -1.0, 0.5, 1000.0, 0.25].map(Some));
        assert_eq!(["\"Infinity\"", "\"-Infinity\""].map(read), [f64::INFINITY, f64::NEG_INFINITY].map(Some));
        assert!(read("\"NaN\"").unwrap().is_nan());
        assert_eq!(read("null"), None);
    }

    #[test]
    fn all_else_is_refused() {
        let long = format!("\"{}\"", "1".repeat(401));
        for json in ["true", "\"\"", "\"half\"", "[]", "{}", "1e999", "\"1 2\"", &long] {
            assert!(serde_json::from_str::<Number>(json).is_err(), "{json}");
        }
        assert_eq!((parse(b"+Inf"), parse(b"\xff")), (Some(f64::INFINITY), None));
    }
}
