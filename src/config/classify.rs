//! The classifier's configuration: which fields of a request's JSON body say what the job is.

use super::reader::{Fields, Reader};

/// Most pointers of one list: each is looked for in every body.
const MOST_POINTERS: usize = 8;

/// Longest pointer, in bytes.
const LONGEST_POINTER: usize = 256;

/// Largest body that may be read. It is held in the VM's memory, which never shrinks.
const LARGEST_BODY: u64 = 16 << 20;

/// What the classifier reads out of a body.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Classify {
    /// The fields whose values are the job's class.
    pub class: Vec<Pointer>,
    /// The fields whose numbers make up the job's cost.
    pub cost: Vec<Pointer>,
    /// The field that names the model.
    pub model: Option<Pointer>,
    /// The fields that tell the session, or a prefix that jobs share; none of them lies within another.
    pub session: Vec<Pointer>,
    /// How many bytes of each of those count.
    pub session_bytes: usize,
    /// A larger body is not read.
    pub max_body_bytes: usize,
}

/// A JSON pointer (RFC 6901): the keys, and numbers of items, on the way to a value. Empty: the whole document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pointer(pub Vec<String>);

impl Classify {
    pub(super) fn read(fields: &mut Fields) -> Self {
        let class = pointers(fields, "class");
        let cost = pointers(fields, "cost");
        let model = fields.take("model", pointer);
        let session = pointers(fields, "session");
        if class.is_none() && cost.is_none() && model.is_none() && session.is_none() {
            fields.note(
                "class",
                "it is missing, and so are cost, model and session; say one of them, such as \"class\": [\"/size\"]",
            );
        }
        if session.is_none() && fields.has("session_bytes") {
            fields.note("session_bytes", "it is there without session");
        }
        let session = session.unwrap_or_default();
        if let Some(inner) = session.iter().enumerate().find_map(|(index, one)| one.within(session.get(..index)?, index)) {
            fields.note("session", inner);
        }
        let session_bytes = fields.integer("session_bytes", 1..=65_536, 512) as usize;
        let max_body_bytes = fields.integer("max_body_bytes", 1..=LARGEST_BODY, 1 << 20) as usize;
        Self {
            class: class.unwrap_or_default(),
            cost: cost.unwrap_or_default(),
            model: model.flatten(),
            session,
            session_bytes,
            max_body_bytes,
        }
    }
}

impl Pointer {
    /// Reads a pointer as RFC 6901 writes it.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() > LONGEST_POINTER {
            return None;
        }
        let mut parts = text.split('/');
        if parts.next() != Some("") {
            return None;
        }
        let unescape = |part: &str| {
            let is_escaped = part.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
            is_escaped.then(|| part.replace("~1", "/").replace("~0", "~"))
        };
        parts.map(unescape).collect::<Option<_>>().map(Self)
    }

    /// The fault that there is if this one, at `index`, is the same as one of the earlier ones, or lies within it or around it.
    fn within(&self, earlier: &[Self], index: usize) -> Option<String> {
        let other = earlier.iter().position(|other| self.0.starts_with(&other.0) || other.0.starts_with(&self.0))?;
        Some(format!("one of the values at [{other}] and [{index}] lies within the other; each may be told once"))
    }
}

fn pointers(fields: &mut Fields, key: &'static str) -> Option<Vec<Pointer>> {
    let list = fields.take(key, |value| value.items("JSON pointers", 1..=MOST_POINTERS, pointer))?;
    Some(list.into_iter().flatten().collect())
}

fn pointer(value: Reader) -> Option<Pointer> {
    let allowed = format!("a JSON pointer of at most {LONGEST_POINTER} bytes, such as /size");
    let text = value.text(&allowed)?;
    let pointer = Pointer::parse(text);
    if pointer.is_none() {
        value.refuse(&allowed);
    }
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_are_read_as_rfc_6901_writes_them() {
        let parts = |text: &str| Pointer::parse(text).map(|pointer| pointer.0.join("|"));
        let cases = [
            ("", Some("")),
            ("/", Some("")),
            ("/foo/0", Some("foo|0")),
            ("/a~1b/m~0n/~01", Some("a/b|m~n|~1")),
            ("/ /\"", Some(" |\"")),
            ("//a", Some("|a")),
            ("size", None),
            ("/a~", None),
            ("/a~2", None),
        ];
        for (text, expected) in cases {
            assert_eq!(parts(text).as_deref(), expected, "{text}");
        }
        assert_eq!(Pointer::parse("").unwrap().0.len(), 0);
        assert_eq!(Pointer::parse("/").unwrap().0, [""]);
        assert!(Pointer::parse(&format!("/{}", "x".repeat(255))).is_some());
        assert!(Pointer::parse(&format!("/{}", "x".repeat(256))).is_none());
    }
}
