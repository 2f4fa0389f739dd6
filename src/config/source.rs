//! Where something is written that the operator's own stack says of a request.

use super::is_header_name;
use super::reader::{Fields, Reader};

/// Where something is written that the operator's own stack says of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A request header, lower case.
    Header(String),
    /// A claim that Envoy's `jwt_authn` has verified: the property's path, its parts separated by NUL.
    Claim(String),
    /// What the classifier found in the request's body: the name of its filter state.
    Classified(String),
}

/// Where Envoy's `jwt_authn` puts what it has verified, in the stream's dynamic metadata.
const VERIFIED: &str = "metadata\0filter_metadata\0envoy.filters.http.jwt_authn";

/// What is allowed as the name of a claim, or of the metadata that it is in.
const NAME: &str = "a name of at least one character, none of them a control character";

impl Source {
    /// Where a job's `class`, `cost` or `session` is written.
    pub(super) fn of_job(fields: &mut Fields, what: &'static str, trusts_headers: bool) -> Option<Self> {
        fields.optional(what, |fields| Self::read_of_job(fields, what, trusts_headers)).flatten()
    }

    pub(super) fn read_of_job(fields: &mut Fields, what: &str, trusts_headers: bool) -> Option<Self> {
        const FROM: &str = "\"classifier\"";
        let example = if what == "session" { "x-session".to_owned() } else { format!("x-job-{what}") };
        let header = fields.take("header", |value| header(&value, &example));
        let from =
            fields.take("from", |value| value.text(FROM).filter(|text| *text == "classifier" || value.refuse(FROM)).is_some());
        match (header, from) {
            (Some(header), None) => {
                refuse_unless(trusts_headers, fields);
                Some(Self::Header(header?))
            }
            (None, Some(is_right)) => is_right.then(|| Self::Classified(format!("plimsoll.{what}"))),
            (Some(_), Some(_)) => {
                fields.note("header", "it is there together with from; one of them is allowed");
                None
            }
            (None, None) => {
                fields.note("header", format_args!("it is missing; say \"header\": \"{example}\", or \"from\": \"classifier\""));
                None
            }
        }
    }

    pub(super) fn read(fields: &mut Fields, trusts_headers: bool, header_example: &str, claim_example: &str) -> Option<Self> {
        let header = fields.take("header", |value| header(&value, header_example));
        let claim = fields.take("jwt_claim", name);
        let metadata = fields.take("metadata", name);
        match (header, claim, metadata) {
            (Some(header), None, None) => {
                refuse_unless(trusts_headers, fields);
                Some(Self::Header(header?))
            }
            (None, Some(claim), Some(metadata)) => Some(Self::Claim(format!("{VERIFIED}\0{}\0{}", metadata?, claim?))),
            (Some(_), ..) => {
                fields.note("header", "it is there together with jwt_claim or metadata; a header or a claim is allowed");
                None
            }
            (None, Some(_), None) => {
                fields.note("metadata", "it is missing; say what payload_in_metadata of jwt_authn says, such as \"jwt_payload\"");
                None
            }
            (None, None, Some(_)) => {
                fields.note("jwt_claim", format_args!("it is missing; say which claim, such as \"{claim_example}\""));
                None
            }
            (None, None, None) => {
                let claim = "\"jwt_claim\": \"<claim>\" with \"metadata\": \"jwt_payload\"";
                fields.note("header", format_args!("it is missing; say \"header\": \"{header_example}\", or {claim}"));
                None
            }
        }
    }
}

fn name(value: Reader) -> Option<String> {
    let is_allowed = |name: &str| !name.is_empty() && !name.contains(char::is_control);
    value.text(NAME).filter(|name| is_allowed(name) || value.refuse(NAME)).map(str::to_owned)
}

fn header(value: &Reader, example: &str) -> Option<String> {
    let allowed = format!("a header name in lower case that does not start with x-plimsoll-, such as {example}");
    let is_allowed = |name: &str| is_header_name(name) && !name.starts_with("x-plimsoll-");
    value.text(&allowed).filter(|name| is_allowed(name) || value.refuse(&allowed)).map(str::to_owned)
}

fn refuse_unless(trusts_headers: bool, fields: &Fields) {
    if !trusts_headers {
        fields.note(
            "header",
            "a client could write it; say \"trusted_headers\": true if an earlier part of your own stack sets it",
        );
    }
}
