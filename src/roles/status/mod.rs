//! The status role: answers the operator's listener from the shared records, and nothing else.
//!
//! ```text
//! GET, HEAD   /             the page, which asks for the JSON each second
//!             /status.json  what the records say
//!             all else      404
//! all else                  405
//! ```

mod json;
mod page;

use super::reply;
use crate::host::{Fault, Host};

/// What every answer carries.
const ALWAYS: [(&str, &str); 3] =
    [("cache-control", "no-store"), ("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer")];

const JSON: (&str, &str) = ("content-type", "application/json");

/// Answers a request of the status listener. (To a HEAD Envoy sends the headers of the whole answer, and no body.)
pub fn answer(host: &impl Host) -> Result<(), Fault> {
    let headers = host.request_headers().unwrap_or_default();
    let path = headers.value(b":path").split(|byte| *byte == b'?').next().unwrap_or_default();
    match (headers.value(b":method"), path) {
        (b"GET" | b"HEAD", b"/") => {
            let own = [("content-type", "text/html; charset=utf-8"), ("content-security-policy", page::POLICY)];
            send(host, 200, &own, page::PAGE)
        }
        (b"GET" | b"HEAD", b"/status.json") => send(host, 200, &[JSON], &json::status(host)),
        (b"GET" | b"HEAD", _) => send(host, 404, &[JSON], &reply::error("not_found", "there are only / and /status.json here")),
        _ => send(
            host,
            405,
            &[JSON, ("allow", "GET, HEAD")],
            &reply::error("method_not_allowed", "only GET and HEAD are allowed here"),
        ),
    }
}

fn send(host: &impl Host, status: u16, headers: &[(&str, &str)], body: &str) -> Result<(), Fault> {
    host.reply(status, &[headers, &ALWAYS].concat(), body.as_bytes())
}

#[cfg(test)]
mod tests;
