//! What a client says of its request that the judgement of the host needs later, when the request's headers cannot be read any more.

use std::time::Duration;

/// What a request's headers say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// It is a gRPC call: its end is a status of its own.
    pub is_grpc: bool,
    /// How long it is ready to wait, if it says so: the shortest of its deadlines.
    pub patience: Option<Duration>,
    /// The length of its body, where it says so.
    pub length: Option<u64>,
    /// Its authority is none that HTTP allows. Envoy passes some of these on, and a host that breaks off then is right to.
    pub is_malformed: bool,
    /// It asks for a WebSocket.
    pub is_websocket: bool,
    /// It says itself what Envoy is to retry, and when: then a retry does not show that a host has failed.
    pub sets_retries: bool,
}

impl Client {
    /// Reads one of the request's headers.
    pub fn says(&mut self, name: &[u8], value: &[u8]) {
        let patience = match name {
            b"content-type" => {
                self.is_grpc = is_grpc(value);
                None
            }
            b"grpc-timeout" => grpc_timeout(value),
            // Envoy's router takes a client's word for these, unless it comes from outside (`use_remote_address`). It also reads some that we
            // cannot, such as `+200`: then any timeout may be the client's.
            b"x-envoy-upstream-rq-timeout-ms" | b"x-envoy-upstream-rq-per-try-timeout-ms" => {
                Some(digits(value).map_or(Duration::ZERO, Duration::from_millis))
            }
            b"content-length" => {
                self.length = digits(value);
                None
            }
            b"upgrade" => {
                self.is_websocket = value.eq_ignore_ascii_case(b"websocket");
                None
            }
            b":authority" => {
                self.is_malformed = !is_authority(value);
                None
            }
            _ => None,
        };
        self.patience = self.patience.into_iter().chain(patience).min();
        self.sets_retries |= sets_retries(name);
    }
}

/// Envoy's router takes a client's word for these too: with `x-envoy-retriable-status-codes: 200` every host would fail.
fn sets_retries(name: &[u8]) -> bool {
    let Some(rest) = name.strip_prefix(b"x-envoy-") else {
        return false;
    };
    rest == b"upstream-rq-per-try-timeout-ms"
        || rest.starts_with(b"retry-")
        || rest.starts_with(b"retriable-")
        || rest.starts_with(b"hedge-")
}

/// A host and perhaps a port (RFC 3986, section 3.2), as far as a host may refuse another by breaking off.
fn is_authority(value: &[u8]) -> bool {
    let host = match value.iter().position(|byte| *byte == b']') {
        Some(end) if value.first() == Some(&b'[') => {
            let inside = value.get(1..end).unwrap_or_default();
            return !inside.is_empty() && is_port(value.get(end + 1..).unwrap_or_default());
        }
        _ => value,
    };
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:".contains(byte);
    !host.is_empty() && host.iter().all(is_plain)
}

fn is_port(value: &[u8]) -> bool {
    value.is_empty() || value.strip_prefix(b":").is_some_and(|port| port.iter().all(u8::is_ascii_digit))
}

/// `application/grpc`, alone or with a codec; not `application/grpc-web`, whose status stands in its body.
fn is_grpc(content_type: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    content_type.strip_prefix(GRPC).is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
}

/// gRPC over HTTP/2, "Timeout": up to eight digits and a unit.
fn grpc_timeout(value: &[u8]) -> Option<Duration> {
    let (unit, number) = value.split_last()?;
    let number = digits(number)?;
    match unit {
        b'H' => Some(Duration::from_secs(number.saturating_mul(3600))),
        b'M' => Some(Duration::from_secs(number.saturating_mul(60))),
        b'S' => Some(Duration::from_secs(number)),
        b'm' => Some(Duration::from_millis(number)),
        b'u' => Some(Duration::from_micros(number)),
        b'n' => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

/// A number of digits alone; `None` for anything else.
pub fn digits(value: &[u8]) -> Option<u64> {
    let is_number = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(value).ok().filter(|_| is_number)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(headers: &[(&str, &str)]) -> Client {
        let mut client = Client::default();
        headers.iter().for_each(|(name, value)| client.says(name.as_bytes(), value.as_bytes()));
        client
    }

    #[test]
    fn a_grpc_call_is_told_by_its_content_type() {
        for (content_type, is_grpc) in [
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("application/grpc;charset=utf-8", true),
            ("application/grpc-web", false),
            ("application/grpc-web+proto", false),
            ("application/json", false),
            ("", false),
        ] {
            assert_eq!(client(&[("content-type", content_type)]).is_grpc, is_grpc, "{content_type}");
        }
    }

    #[test]
    fn the_shortest_of_its_deadlines_is_the_clients_patience() {
        let patience = |headers: &[(&str, &str)]| client(headers).patience.map(|patience| patience.as_micros());
        assert_eq!(patience(&[]), None);
        let units = [("2H", 7_200_000_000), ("3M", 180_000_000), ("4S", 4_000_000), ("5m", 5000), ("6u", 6), ("7000n", 7)];
        for (text, micros) in units {
            assert_eq!(patience(&[("grpc-timeout", text)]), Some(micros), "{text}");
        }
        for text in ["", "S", "5", "5x", "-5S", "99999999999999999999S", "\u{ff}S"] {
            assert_eq!(patience(&[("grpc-timeout", text)]), None, "{text}");
        }
        let both = [("x-envoy-upstream-rq-timeout-ms", "300"), ("x-envoy-upstream-rq-per-try-timeout-ms", "20")];
        assert_eq!(patience(&both), Some(20_000));
        assert_eq!(patience(&[("x-envoy-upstream-rq-timeout-ms", "+200")]), Some(0), "Envoy reads it, and we do not");
    }

    #[test]
    fn an_authority_that_is_none_is_known() {
        for authority in ["gpu", "gpu.example:8080", "10.0.0.1:80", "[fd00::1]", "[fd00::1]:80", "a_b"] {
            assert!(!client(&[(":authority", authority)]).is_malformed, "{authority}");
        }
        for authority in ["", "[::1", "::1]", "[]", "a%zz", "a b", "a/b", "user@host", "\u{e4}", "[::1]x"] {
            assert!(client(&[(":authority", authority)]).is_malformed, "{authority}");
        }
    }

    #[test]
    fn a_client_that_sets_its_own_retries_is_known() {
        for (name, sets_retries) in [
            ("x-envoy-retry-on", true),
            ("x-envoy-retry-grpc-on", true),
            ("x-envoy-retriable-status-codes", true),
            ("x-envoy-retriable-header-names", true),
            ("x-envoy-upstream-rq-per-try-timeout-ms", true),
            ("x-envoy-hedge-on-per-try-timeout", true),
            ("x-envoy-upstream-rq-timeout-ms", false),
            ("x-envoy-attempt-count", false),
            ("retry-after", false),
        ] {
            assert_eq!(client(&[(name, "1")]).sets_retries, sets_retries, "{name}");
        }
    }
}
