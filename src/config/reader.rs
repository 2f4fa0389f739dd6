//! Reads typed values out of what the user wrote, and notes every fault with its path, its value and what is allowed.
//!
//! A fault does not stop the reading: the value's default stands in for it, so that the user sees all faults at once. Whoever reads takes the
//! result only if [`Faults`] is empty.

use std::cell::RefCell;
use std::fmt;
use std::ops::RangeInclusive;

use super::json::Json;

/// Collects what is wrong, one line per fault.
#[derive(Debug, Default)]
pub struct Faults {
    lines: RefCell<Vec<String>>,
    /// Every key that was asked for, with its default and what is allowed: what the README's table is compared with.
    #[cfg(test)]
    pub asked: RefCell<std::collections::BTreeMap<String, (String, String)>>,
}

impl Faults {
    /// Notes a fault.
    pub fn note(&self, path: &str, what: impl fmt::Display) {
        let path = if path.is_empty() { "configuration" } else { path };
        self.lines.borrow_mut().push(format!("{path}: {what}"));
    }

    /// The lines noted, in the order of reading.
    pub fn into_lines(self) -> Vec<String> {
        self.lines.into_inner()
    }

    fn asked(&self, _path: &str, _default: impl fmt::Display, _allowed: impl fmt::Display) {
        #[cfg(test)]
        self.asked.borrow_mut().insert(_path.to_owned(), (_default.to_string(), _allowed.to_string()));
    }
}

/// One value and its path.
pub struct Reader<'a> {
    faults: &'a Faults,
    path: String,
    value: &'a Json,
}

/// The entries of one object, taken one by one; [`Fields::finish`] refuses what is left.
pub struct Fields<'a> {
    faults: &'a Faults,
    path: String,
    entries: &'a [(String, Json)],
    known: Vec<&'static str>,
    later: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    /// A reader of the whole document.
    pub fn new(faults: &'a Faults, value: &'a Json) -> Self {
        Self { faults, path: String::new(), value }
    }

    /// Notes a fault of this value: `value is not allowed`. Gives `false`, so that a filter can end with it.
    pub fn refuse(&self, allowed: impl fmt::Display) -> bool {
        self.faults.note(&self.path, format_args!("{} is not {allowed}", self.value));
        false
    }

    /// The value as an object, without its repeated keys, each of which is a fault.
    pub fn fields(&self) -> Option<Fields<'a>> {
        let Json::Object(entries) = self.value else {
            self.refuse("an object");
            return None;
        };
        for (index, (key, _)) in entries.iter().enumerate() {
            if entries.iter().take(index).any(|(earlier, _)| earlier == key) {
                self.faults.note(&join(&self.path, key), "the key is there twice; each key is allowed once");
            }
        }
        Some(Fields { faults: self.faults, path: self.path.clone(), entries, known: Vec::new(), later: Vec::new() })
    }

    /// The value as a string.
    pub fn text(&self, allowed: &str) -> Option<&'a str> {
        match self.value {
            Json::Text(text) => Some(text),
            _ => {
                self.refuse(allowed);
                None
            }
        }
    }

    /// The value as text: a string as it is, a whole number in digits.
    pub fn word_or_number(&self, allowed: &str) -> Option<String> {
        match self.value {
            Json::Text(text) => Some(text.clone()),
            Json::Number(number) if number.is_u64() => Some(number.to_string()),
            _ => {
                self.refuse(allowed);
                None
            }
        }
    }

    /// Every item of a list of `count` `things`, read with its own path.
    pub fn items<T>(&self, things: &str, count: RangeInclusive<usize>, mut read: impl FnMut(Reader) -> T) -> Vec<T> {
        let Json::List(items) = self.value else {
            self.refuse(format_args!("a list of {things}"));
            return Vec::new();
        };
        if !count.contains(&items.len()) {
            let (least, most) = count.into_inner();
            self.refuse(format_args!("a list of {least}..={most} {things}: it has {}", items.len()));
        }
        let read = |(index, value)| read(Reader { faults: self.faults, path: format!("{}[{index}]", self.path), value });
        items.iter().enumerate().map(read).collect()
    }

    fn integer(&self, range: &RangeInclusive<u64>) -> Option<u64> {
        let value = match self.value {
            Json::Number(number) => number.as_u64().filter(|value| range.contains(value)),
            _ => None,
        };
        if value.is_none() {
            self.refuse(format_args!("a whole number in {}..={}", range.start(), range.end()));
        }
        value
    }

    fn number(&self, range: &RangeInclusive<f32>) -> Option<f32> {
        let value = match self.value {
            Json::Number(number) => number.as_f64().map(|value| value as f32).filter(|value| range.contains(value)),
            _ => None,
        };
        if value.is_none() {
            let unit = if matches!(self.value, Json::Number(_)) { "in " } else { "a number in " };
            self.refuse(format_args!("{unit}{}..={}", range.start(), range.end()));
        }
        value
    }
}

impl<'a> Fields<'a> {
    /// The path of a key of this object.
    pub fn path(&self, key: &str) -> String {
        join(&self.path, key)
    }

    /// Notes a fault of a key of this object.
    pub fn note(&self, key: &str, what: impl fmt::Display) {
        self.faults.note(&self.path(key), what);
    }

    /// Notes a fault of a key of an item in a list of this object.
    pub fn note_item(&self, list: &str, index: usize, key: &str, what: impl fmt::Display) {
        self.faults.note(&format!("{}[{index}].{key}", self.path(list)), what);
    }

    /// Whether the key is there.
    pub fn has(&self, key: &str) -> bool {
        self.entries.iter().any(|(name, _)| name == key)
    }

    /// Takes a key, and gives what `read` makes of it, if the key is there.
    pub fn take<T>(&mut self, key: &'static str, read: impl FnOnce(Reader<'a>) -> T) -> Option<T> {
        self.known.push(key);
        let path = self.path(key);
        let (_, value) = self.entries.iter().find(|(name, _)| name == key)?;
        Some(read(Reader { faults: self.faults, path, value }))
    }

    fn take_or<T: fmt::Display>(
        &mut self,
        key: &'static str,
        default: T,
        allowed: impl fmt::Display,
        read: impl FnOnce(Reader) -> Option<T>,
    ) -> T {
        self.faults.asked(&self.path(key), &default, allowed);
        self.take(key, read).flatten().unwrap_or(default)
    }

    /// A whole number.
    pub fn integer(&mut self, key: &'static str, range: RangeInclusive<u64>, default: u64) -> u64 {
        let allowed = format!("{}..={}", range.start(), range.end());
        self.take_or(key, default, allowed, |value| value.integer(&range))
    }

    /// A number.
    pub fn number(&mut self, key: &'static str, range: RangeInclusive<f32>, default: f32) -> f32 {
        let allowed = format!("{}..={}", range.start(), range.end());
        self.take_or(key, default, allowed, |value| value.number(&range))
    }

    /// `true` or `false`.
    pub fn boolean(&mut self, key: &'static str, default: bool) -> bool {
        self.take_or(key, default, "true or false", |value| match value.value {
            Json::Bool(flag) => Some(*flag),
            _ => {
                value.refuse("true or false");
                None
            }
        })
    }

    /// One of some words; those that a later version will know are refused as such.
    pub fn word(&mut self, key: &'static str, now: &[&'static str], later: &[&str], default: &'static str) -> &'static str {
        let allowed = now.join(" or ");
        self.take_or(key, default, &allowed, |value| {
            let text = value.text(&format!("\"{}\"", now.join("\" or \"")))?;
            let word = now.iter().find(|word| **word == text).copied();
            if word.is_none() {
                match later.contains(&text) {
                    true => value.refuse(format_args!("supported yet; allowed now: {allowed}")),
                    false => value.refuse(&allowed),
                };
            }
            word
        })
    }

    /// A list of at most so many `things`, each as `read` makes it; it may be empty. The default is shown as its text.
    pub fn list<T: Clone>(
        &mut self,
        key: &'static str,
        (shown, default): (&str, &[T]),
        things: &str,
        read: impl Fn(&Reader) -> Option<T>,
    ) -> Vec<T> {
        const MOST: usize = 100;
        self.faults.asked(&self.path(key), shown, format_args!("0..={MOST} {things}"));
        let list = self.take(key, |value| value.items(things, 0..=MOST, |item| read(&item)));
        list.map_or_else(|| default.to_vec(), |items| items.into_iter().flatten().collect())
    }

    /// A list of strings that pass `is_valid`; `things` names them, `example` is one.
    pub fn texts(
        &mut self,
        key: &'static str,
        default: &[&str],
        (things, example): (&str, &str),
        is_valid: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        const MOST: usize = 100;
        self.faults.asked(&self.path(key), default.join(", "), format_args!("1..={MOST} {things}"));
        let list = self.take(key, |value| {
            value.items(things, 1..=MOST, |item| {
                let text = item.text(example).filter(|text| is_valid(text) || item.refuse(example));
                text.map(str::to_owned)
            })
        });
        match list {
            Some(texts) => texts.into_iter().flatten().collect(),
            None => default.iter().map(|text| (*text).to_owned()).collect(),
        }
    }

    /// A string that passes `is_valid`.
    pub fn text(&mut self, key: &'static str, default: &str, allowed: &str, is_valid: impl Fn(&str) -> bool) -> String {
        self.take_or(key, default.to_owned(), allowed, |value| {
            let text = value.text(allowed).filter(|text| is_valid(text) || value.refuse(allowed));
            text.map(str::to_owned)
        })
    }

    /// An object in which every key may be left out; an absent one gives the same as an empty one.
    pub fn section<T>(&mut self, key: &'static str, read: impl FnOnce(&mut Fields) -> T) -> T {
        let entries = self.take(key, |value| value.fields().map(|fields| fields.entries));
        self.inside(key, entries.flatten().unwrap_or_default(), read)
    }

    /// An object whose presence switches a feature on.
    pub fn optional<T>(&mut self, key: &'static str, read: impl FnOnce(&mut Fields) -> T) -> Option<T> {
        let entries = self.take(key, |value| value.fields().map(|fields| fields.entries)).flatten()?;
        Some(self.inside(key, entries, read))
    }

    fn inside<T>(&self, key: &str, entries: &[(String, Json)], read: impl FnOnce(&mut Fields) -> T) -> T {
        let mut fields = Fields { faults: self.faults, path: self.path(key), entries, known: Vec::new(), later: Vec::new() };
        let read = read(&mut fields);
        fields.finish();
        read
    }

    /// A key whose behaviour comes with a later version.
    pub fn later(&mut self, key: &'static str) {
        self.take(key, |value| value.faults.note(&value.path, "not supported yet"));
        self.later.push(key);
    }

    /// Every entry of an object whose keys are names that the user chose.
    pub fn each(self, mut read: impl FnMut(&str, Reader)) {
        for (name, value) in self.entries {
            read(name, Reader { faults: self.faults, path: self.path(name), value });
        }
    }

    /// Refuses every key that nobody asked for.
    pub fn finish(self) {
        for (key, _) in self.entries {
            if !self.known.contains(&key.as_str()) {
                let known: Vec<&str> = self.known.iter().filter(|key| !self.later.contains(key)).copied().collect();
                let known = known.join(", ");
                self.faults.note(&self.path(key), format_args!("there is no such key; allowed here: {known}"));
            }
        }
    }
}

/// `a.b`, and `a["b.c"]` where a name holds what a path is made of.
fn join(path: &str, key: &str) -> String {
    let plain = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '@'));
    match (path.is_empty(), plain) {
        (true, true) => key.to_owned(),
        (false, true) => format!("{path}.{key}"),
        (_, false) => format!("{path}[{}]", Json::Text(key.to_owned())),
    }
}
