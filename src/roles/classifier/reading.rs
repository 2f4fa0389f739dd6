//! Fields of a JSON body: bytes in, values out.
//!
//! The body is what a stranger wrote. It is walked once; what lies on no pointer's way is passed over without being kept, however large or deep. A key that
//! is there twice counts with its last value, as most servers read it. What is not JSON from its first byte to its last says nothing.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Number;

use super::values::{Scalar, class, cost, name, session};
use crate::config::{Classify, Pointer};

/// What a body says of its job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// The values of the class's fields, joined.
    pub class: Option<String>,
    /// The product of the cost's fields.
    pub cost: Option<f64>,
    /// The model's name.
    pub model: Option<String>,
    /// A hash of the session's fields.
    pub session: Option<u64>,
}

/// The fields that are wanted, as the tree that their pointers make.
#[derive(Debug)]
pub struct Wanted {
    tree: Node,
    class: Vec<usize>,
    cost: Vec<usize>,
    model: Option<usize>,
    scalars: usize,
    session: usize,
    session_bytes: usize,
}

/// A place in a document that is a wanted value or on the way to one.
#[derive(Debug, Default)]
struct Node {
    /// Which of the scalars is here.
    scalar: Option<usize>,
    /// Which of the session's values is here.
    session: Option<usize>,
    children: BTreeMap<String, Child>,
}

#[derive(Debug)]
struct Child {
    /// The key as an item's number.
    index: Option<usize>,
    node: Node,
}

/// What has been found so far.
struct Found {
    scalars: Vec<Option<Scalar>>,
    /// The beginnings of the session's values, as compact JSON.
    session: Vec<Option<Vec<u8>>>,
    session_bytes: usize,
}

impl Wanted {
    /// Prepares the reading.
    pub fn new(config: &Classify) -> Self {
        let mut wanted = Self {
            tree: Node::default(),
            class: Vec::new(),
            cost: Vec::new(),
            model: None,
            scalars: 0,
            session: config.session.len(),
            session_bytes: config.session_bytes,
        };
        wanted.class = config.class.iter().map(|pointer| wanted.scalar(pointer)).collect();
        wanted.cost = config.cost.iter().map(|pointer| wanted.scalar(pointer)).collect();
        wanted.model = config.model.as_ref().map(|pointer| wanted.scalar(pointer));
        for (index, pointer) in config.session.iter().enumerate() {
            wanted.tree.at(pointer).session = Some(index);
        }
        wanted
    }

    /// The number of the scalar at this pointer.
    fn scalar(&mut self, pointer: &Pointer) -> usize {
        let node = self.tree.at(pointer);
        if node.scalar.is_none() {
            node.scalar = Some(self.scalars);
            self.scalars += 1;
        }
        node.scalar.unwrap_or_default()
    }

    /// What this body says; nothing if it is not JSON.
    pub fn read(&self, body: &[u8]) -> Said {
        let mut found =
            Found { scalars: vec![None; self.scalars], session: vec![None; self.session], session_bytes: self.session_bytes };
        // All of it: serde_json does not look at the bytes of strings that it passes over.
        let Ok(text) = std::str::from_utf8(body) else {
            return Said::default();
        };
        let mut document = serde_json::Deserializer::from_str(text);
        let walk = Walk { node: Some(&self.tree), told: None, found: &mut found };
        if walk.deserialize(&mut document).and_then(|()| document.end()).is_err() {
            return Said::default();
        }
        Said {
            class: class(self.class.iter().map(|scalar| found.scalar(*scalar))),
            cost: cost(self.cost.iter().map(|scalar| found.scalar(*scalar))),
            model: self.model.and_then(|model| name(found.scalar(model)?)),
            session: session(&found.session),
        }
    }
}

impl Node {
    /// The node at this pointer, made if need be.
    fn at(&mut self, pointer: &Pointer) -> &mut Self {
        pointer.0.iter().fold(self, |node, key| {
            let index = key.parse().ok().filter(|index: &usize| index.to_string() == *key);
            let child = || Child { index, node: Self::default() };
            &mut node.children.entry(key.clone()).or_insert_with(child).node
        })
    }
}

impl Found {
    fn scalar(&self, index: usize) -> Option<&Scalar> {
        self.scalars.get(index)?.as_ref()
    }

    /// A value comes to this place: what was there before does not count.
    fn forget(&mut self, node: &Node) {
        if let Some(place) = node.scalar.and_then(|index| self.scalars.get_mut(index)) {
            *place = None;
        }
        if let Some(place) = node.session.and_then(|index| self.session.get_mut(index)) {
            *place = None;
        }
        node.children.values().for_each(|child| self.forget(&child.node));
    }

    /// Tells more of this one of the session's values, as far as it counts.
    fn tell(&mut self, told: Option<usize>, text: &[u8]) {
        let room = self.room(told);
        if let Some(Some(so_far)) = told.and_then(|index| self.session.get_mut(index)) {
            so_far.extend(text.iter().take(room));
        }
    }

    fn tell_text(&mut self, told: Option<usize>, text: &str) {
        let room = self.room(told);
        if room > 0 {
            // Escaped, and with its first quote, what is left of it here is still more than counts.
            let text = text.get(..text.ceil_char_boundary(room)).unwrap_or_default();
            self.tell(told, &serde_json::to_vec(text).unwrap_or_default());
        }
    }

    /// How much more of this one of the session's values counts.
    fn room(&self, told: Option<usize>) -> usize {
        let so_far = told.and_then(|index| self.session.get(index)?.as_ref());
        so_far.map_or(0, |so_far| self.session_bytes.saturating_sub(so_far.len()))
    }
}

/// Reads the value at one place.
struct Walk<'a> {
    /// Where, if anything is wanted of it.
    node: Option<&'a Node>,
    /// Which of the session's values it is, or is in.
    told: Option<usize>,
    found: &'a mut Found,
}

impl<'a> Walk<'a> {
    fn scalar(self, value: Scalar) {
        match &value {
            Scalar::Text(text) => self.found.tell_text(self.told, text),
            Scalar::Number(number) => self.found.tell(self.told, number.to_string().as_bytes()),
            Scalar::Bool(flag) => self.found.tell(self.told, flag.to_string().as_bytes()),
        }
        if let Some(place) = self.node.and_then(|node| self.found.scalars.get_mut(node.scalar?)) {
            *place = Some(value);
        }
    }

    /// Reads a value within this one.
    fn inner(&mut self, find: impl FnOnce(&'a Node) -> Option<&'a Child>) -> Walk<'_> {
        let child = self.node.and_then(find).map(|child| &child.node);
        if let Some(child) = child {
            self.found.forget(child);
        }
        Walk { node: child, told: self.told, found: self.found }
    }

    /// Reads an item of this list.
    fn item(&mut self, index: usize) -> Walk<'_> {
        self.inner(|node| node.children.values().find(|child| child.index == Some(index)))
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(mut self, value: D) -> Result<(), D::Error> {
        if let Some(session) = self.node.and_then(|node| node.session) {
            self.told = Some(session);
            if let Some(place) = self.found.session.get_mut(session) {
                *place = Some(Vec::new());
            }
        }
        if self.node.is_none() && self.found.room(self.told) == 0 {
            return value.deserialize_ignored_any(IgnoredAny).map(|_| ());
        }
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("JSON")
    }

    /// `null` is as good as nothing.
    fn visit_unit<E>(self) -> Result<(), E> {
        match self.node.and_then(|node| node.session) {
            Some(session) => self.found.session.iter_mut().skip(session).take(1).for_each(|place| *place = None),
            None => self.found.tell(self.told, b"null"),
        }
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.scalar(Scalar::Bool(value));
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.scalar(Scalar::Number(value.into()));
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.scalar(Scalar::Number(value.into()));
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        if let Some(number) = Number::from_f64(value) {
            self.scalar(Scalar::Number(number));
        }
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        match self.node.and_then(|node| node.scalar) {
            Some(_) => self.scalar(Scalar::Text(value.to_owned())),
            // A copy only of what was asked for.
            None => self.found.tell_text(self.told, value),
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        let told = self.told;
        self.found.tell(told, b"[");
        let mut index = 0;
        while items.next_element_seed(Separated(index > 0, self.item(index)))?.is_some() {
            index += 1;
        }
        self.found.tell(told, b"]");
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        let told = self.told;
        let mut between: &[u8] = b"{";
        while let Some(key) = entries.next_key::<String>()? {
            self.found.tell(told, between);
            self.found.tell_text(told, &key);
            self.found.tell(told, b":");
            entries.next_value_seed(self.inner(|node| node.children.get(&key)))?;
            between = b",";
        }
        self.found.tell(told, if between == b"{" { b"{}" } else { b"}" });
        Ok(())
    }
}

/// An item of a list, which may have a comma before it. (Whether there is one more item is known only when it is read.)
struct Separated<'a>(bool, Walk<'a>);

impl<'de> DeserializeSeed<'de> for Separated<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        let Self(is_next, walk) = self;
        if is_next {
            walk.found.tell(walk.told, b",");
        }
        walk.deserialize(value)
    }
}

#[cfg(test)]
mod tests;
