//! What the roles need of Envoy: the seam between the callbacks and the hostcalls.
//!
//! Envoy's implementation is `hostcalls.rs`; tests bring their own, which may answer anything.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use crate::core::time::Instant;

/// Envoy refused a hostcall. It is handled where it is met, never unwrapped; the number is the ABI's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault(pub u32);

/// A value of the process's shared data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shared {
    /// `None`: the key does not exist.
    pub value: Option<Vec<u8>>,
    /// The value's version, for [`Host::store`].
    pub cas: u32,
}

/// For [`Host::store`]: store only if the key does not exist. (On a missing key Envoy ignores the version, and no value has this one.)
pub const IF_ABSENT: u32 = u32::MAX;

/// How important a line of the log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// A change that an operator may want to see.
    Info,
    /// Something that an operator should look at.
    Warn,
    /// A refused configuration.
    Error,
}

/// A line of the log as it is written: what comes from outside, such as a pool's name or a host's word, can begin no line of its own.
pub fn on_one_line(text: &str) -> Cow<'_, str> {
    // The two that are no control characters end lines all the same, for those who read logs in Unicode.
    let ends = |char: char| char.is_control() || matches!(char, '\u{2028}' | '\u{2029}');
    if !text.contains(ends) {
        return Cow::Borrowed(text);
    }
    let mut line = String::with_capacity(text.len() + 8);
    for char in text.chars() {
        if ends(char) { line.extend(char.escape_default()) } else { line.push(char) }
    }
    Cow::Owned(line)
}

/// One of the header maps of the current stream, or of the call that has just been answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// The response's headers: in the callbacks for the response and for the log.
    Response,
    /// The response's trailers: in the callback for the log.
    Trailers,
    /// The headers of the answer to a call of our own.
    Call,
}

/// A kind of metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// It only rises.
    Counter,
    /// It is set.
    Gauge,
    /// It has many values.
    Histogram,
}

/// Envoy, as the roles see it.
pub trait Host: Clone + 'static {
    /// The monotonic clock.
    fn now(&self) -> Instant;
    /// The wall clock, for people.
    fn wall(&self) -> SystemTime;
    /// Random bits.
    fn random(&self) -> u64;
    /// Writes a line to Envoy's log; see [`on_one_line`].
    fn log(&self, level: Level, line: &str);
    /// Reads shared data.
    fn load(&self, key: &str) -> Result<Shared, Fault>;
    /// Writes shared data if its version is still `cas`; `false`: it is not.
    fn store(&self, key: &str, value: &[u8], cas: u32) -> Result<bool, Fault>;
    /// A property of the current stream; its path's parts are separated by NUL. `None` where it is absent, empty, or refused.
    fn property(&self, path: &str) -> Option<Vec<u8>>;
    /// The request's headers: only while they are being handled.
    fn request_headers(&self) -> Result<Headers, Fault>;
    /// Sets a request header, or removes it.
    fn set_request_header(&self, name: &[u8], value: Option<&[u8]>) -> Result<(), Fault>;
    /// The first value of a header of this map; `None` where it is absent, empty, or refused.
    fn header(&self, map: Map, name: &str) -> Option<Vec<u8>>;
    /// Removes a header of this map, if it is there.
    fn remove_header(&self, map: Map, name: &str) -> Result<(), Fault>;
    /// Sets a response header, or removes it.
    fn set_response_header(&self, name: &[u8], value: Option<&[u8]>) -> Result<(), Fault>;
    /// Writes `wasm.<name>` into the stream's filter state.
    fn set_filter_state(&self, name: &str, value: &[u8]) -> Result<(), Fault>;
    /// Sends a request to a cluster, from a root's callback; the token comes back with the answer.
    fn call(&self, cluster: &str, headers: &[(&str, &str)], body: &[u8], timeout: Duration) -> Result<u32, Fault>;
    /// The first so many bytes of the answer to a call, while it is being handled; `None` where it is empty, or refused.
    fn body(&self, size: usize) -> Option<Vec<u8>>;
    /// The first so many bytes of the piece of the request's body that has come, while it is being handled; `None` where it is empty, or refused.
    fn request_body(&self, size: usize) -> Option<Vec<u8>>;
    /// The id of a metric. To be asked for once and kept: Envoy makes a new one each time.
    fn metric(&self, kind: Metric, name: &str) -> Result<u32, Fault>;
    /// Raises a counter by so much, which is not 0, for all workers.
    fn add(&self, metric: u32, by: u64);
    /// Sets a gauge, for all workers: the last word counts. To a histogram it adds the value.
    fn record(&self, metric: u32, value: u64);
    /// Answers the request.
    fn reply(&self, status: u16, headers: &[(&str, &str)], body: &[u8]) -> Result<(), Fault>;
    /// Lets the current stream, which is paused at its request's headers, go on; not before the callback has ended.
    fn resume(&self) -> Result<(), Fault>;
    /// Asks for a tick of the current root, or of the current stream's, each such period from now on.
    fn tick_each(&self, period: Duration);
    /// Makes a shared queue of this name, of which Envoy tells the current root when something is put in. It takes the place of the root that asked before.
    fn register_bell(&self, name: &str) -> Result<u32, Fault>;
    /// Puts something in a shared queue, so that its root is told.
    fn ring(&self, bell: u32) -> Result<(), Fault>;
    /// Empties a shared queue.
    fn silence_bell(&self, bell: u32);
    /// Makes a stream the current one, inside a callback of its root. Refused if the stream has gone.
    fn enter(&self, stream: u32) -> Result<(), Fault>;
}

/// A header map in the ABI's encoding: a count, the lengths of each name and value, then the bytes, each with a NUL behind it.
#[derive(Clone, Debug, Default)]
pub struct Headers(pub Vec<u8>);

impl Headers {
    /// The headers in order. Whatever the bytes are, this ends, and gives no more than lies in them.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let bytes = self.0.as_slice();
        let number = |at: usize| -> Option<usize> {
            let four = bytes.get(at..)?.first_chunk()?;
            usize::try_from(u32::from_le_bytes(*four)).ok()
        };
        let count = number(0).unwrap_or(0).min(bytes.len() / 8);
        let mut at = 4 + count * 8;
        (0..count).map_while(move |index| {
            let mut part = |length: usize| {
                let part = bytes.get(at..at.checked_add(length)?)?;
                at += length + 1;
                Some(part)
            };
            let name = part(number(4 + index * 8)?)?;
            let value = part(number(8 + index * 8)?)?;
            Some((name, value))
        })
    }

    /// The map that these headers make.
    pub fn encode(pairs: &[(&[u8], &[u8])]) -> Self {
        let mut bytes = (pairs.len() as u32).to_le_bytes().to_vec();
        for (name, value) in pairs {
            bytes.extend((name.len() as u32).to_le_bytes());
            bytes.extend((value.len() as u32).to_le_bytes());
        }
        for part in pairs.iter().flat_map(|(name, value)| [name, value]) {
            bytes.extend_from_slice(part);
            bytes.push(0);
        }
        Self(bytes)
    }

    /// The value of this name, if there is one only: of several nobody can say whose each is.
    pub fn only(&self, wanted: &[u8]) -> Option<&[u8]> {
        let mut values = self.iter().filter(|(name, _)| *name == wanted).map(|(_, value)| value);
        values.next().filter(|_| values.next().is_none())
    }

    /// The first value of this name; empty if there is none.
    pub fn value(&self, wanted: &[u8]) -> &[u8] {
        self.iter().find(|(name, _)| *name == wanted).map_or(&[], |(_, value)| value)
    }
}

/// A property that holds a number: 8 bytes, little-endian.
pub fn number(property: Option<Vec<u8>>) -> Option<u64> {
    property?.as_slice().try_into().map(u64::from_le_bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn headers_come_back_as_they_were_encoded_whatever_their_bytes() {
        let pairs: [(&[u8], &[u8]); 4] = [(b":path", b"/"), (b"x", b""), (b"x", b"\xff\x00\x80"), (b"", b"y")];
        assert_eq!(Headers::encode(&pairs).iter().collect::<Vec<_>>(), pairs);
    }

    #[test]
    fn a_line_of_the_log_is_one_whatever_its_text() {
        let forged = "pool a\n[error] b\r\u{1b}[2K\u{85}\u{2028}c";
        assert_eq!(on_one_line(forged), r"pool a\n[error] b\r\u{1b}[2K\u{85}\u{2028}c");
        assert!(matches!(on_one_line("Zürich – ok"), Cow::Borrowed("Zürich – ok")));
    }

    #[test]
    fn a_header_that_is_there_twice_has_no_only_value() {
        let headers = Headers::encode(&[(b"a", b"1"), (b"b", b"2"), (b"b", b"3")]);
        assert_eq!([b"a", b"b", b"c"].map(|name| headers.only(name)), [Some(b"1".as_slice()), None, None]);
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read_as_headers(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let headers = Headers(bytes);
            prop_assert!(headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() <= headers.0.len());
        }

        #[test]
        fn a_count_that_lies_gives_no_more_than_there_is(count in any::<u32>(), length in any::<u32>()) {
            let mut bytes = count.to_le_bytes().to_vec();
            bytes.extend([length.to_le_bytes(), length.to_le_bytes(), *b"abcd"].concat());
            let headers = Headers(bytes);
            prop_assert!(headers.iter().count() <= headers.0.len() / 8);
        }
    }
}
