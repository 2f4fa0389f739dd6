//! What the values that were found in a body are taken for.

use crate::core::hash::Hash;
use serde_json::Number;

/// Longest class, in bytes: as many as the balancer takes.
pub const LONGEST_CLASS: usize = 64;

/// How much of a longer class is kept, before `~` and 8 digits of its hash.
const CUT_AT: usize = LONGEST_CLASS - 9;

/// Longest name of a model, in bytes.
const LONGEST_MODEL: usize = 256;

/// Longest string that may be a number, or a size such as 1024x1024.
const LONGEST_NUMBER: usize = 32;

/// The costs that are told apart.
const COSTS: (f64, f64) = (1e-6, 1e12);

/// A value that has no values in it.
#[derive(Clone, Debug)]
pub enum Scalar {
    /// A string.
    Text(String),
    /// A number.
    Number(Number),
    /// `true` or `false`.
    Bool(bool),
}

/// The values joined by commas, `-` for one that is missing; nothing if all are. It goes into logs and statistics: no control characters, and not too long.
pub fn class<'a>(scalars: impl Iterator<Item = Option<&'a Scalar>>) -> Option<String> {
    let (mut class, mut hash, mut is_there) = (String::new(), Hash::default(), false);
    let mut join = |part: &str| {
        hash.add(part.as_bytes());
        let rest = part.chars().take((LONGEST_CLASS + 1).saturating_sub(class.len()));
        class.extend(rest.map(|c| if c.is_control() { '?' } else { c }));
    };
    for (index, scalar) in scalars.enumerate() {
        if index > 0 {
            join(",");
        }
        is_there |= scalar.is_some();
        match scalar {
            Some(Scalar::Text(text)) => join(text),
            Some(Scalar::Number(number)) => join(&number.to_string()),
            Some(Scalar::Bool(flag)) => join(if *flag { "true" } else { "false" }),
            None => join("-"),
        }
    }
    if class.len() > LONGEST_CLASS {
        class.truncate(class.floor_char_boundary(CUT_AT));
        class += &format!("~{:08x}", hash.value() >> 32);
    }
    Some(class).filter(|class| is_there && !class.is_empty())
}

/// The product of the numbers; nothing if one of them is none, or not above 0.
pub fn cost<'a>(scalars: impl Iterator<Item = Option<&'a Scalar>>) -> Option<f64> {
    let product = scalars.map(|scalar| factor(scalar?)).try_fold(None, |product: Option<f64>, factor| {
        let factor = factor.filter(|factor| factor.is_finite() && *factor > 0.0)?;
        Some(Some(product.unwrap_or(1.0) * factor))
    });
    product?.map(|product| product.clamp(COSTS.0, COSTS.1))
}

/// A number, one in digits, or a size: `1024x1024` is their product.
fn factor(scalar: &Scalar) -> Option<f64> {
    match scalar {
        Scalar::Number(number) => number.as_f64(),
        Scalar::Text(text) if text.len() <= LONGEST_NUMBER => {
            let number = |digits: &str| {
                let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
                digits.parse::<f64>().ok().filter(|_| is_number)
            };
            text.split('x').try_fold(1.0, |product, part| Some(product * number(part)?))
        }
        Scalar::Text(_) | Scalar::Bool(_) => None,
    }
}

/// A model's name: what is longer, or has control characters, is none.
pub fn name(scalar: &Scalar) -> Option<String> {
    let Scalar::Text(text) = scalar else { return None };
    let is_name = (1..=LONGEST_MODEL).contains(&text.len()) && !text.contains(char::is_control);
    is_name.then(|| text.clone())
}

/// A hash of the values' beginnings, and of which are missing; nothing if all are.
pub fn session(values: &[Option<Vec<u8>>]) -> Option<u64> {
    let mut hash = Hash::default();
    for value in values {
        match value {
            Some(value) => {
                hash.add(b"=");
                hash.add(value);
            }
            None => hash.add(b"-"),
        }
        // No byte of a JSON text.
        hash.add(b"\0");
    }
    values.iter().any(Option::is_some).then(|| hash.value())
}
