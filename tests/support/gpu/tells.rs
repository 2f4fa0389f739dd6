//! What a host tells of itself: pages that are no jobs, and fields of its answers.

use std::collections::BTreeMap;

use bytes::Bytes;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Response, StatusCode};

use super::answer::Answer;
use super::serve::text;
use super::{GpuHost, Shared};

/// What a host tells, and whom it told.
#[derive(Debug, Default)]
pub(super) struct Tells {
    /// By path.
    pages: BTreeMap<String, Page>,
    /// Added to the answer of each job that does not fail as told.
    headers: HeaderMap,
    /// See `headers`; over HTTP/2 only.
    trailers: HeaderMap,
}

#[derive(Debug)]
struct Page {
    status: StatusCode,
    /// `None`: no answer, ever.
    body: Option<Bytes>,
    asked: u64,
}

impl GpuHost {
    /// From now on this path is a page, and no job. In a text `{running}` and `{waiting}` are the host's own numbers at that moment.
    pub fn set_page(&self, path: &str, status: u16, body: impl Into<Bytes>) {
        self.page(path, status, Some(body.into()));
    }

    /// From now on this path never answers.
    pub fn hang_page(&self, path: &str) {
        self.page(path, 200, None);
    }

    fn page(&self, path: &str, status: u16, body: Option<Bytes>) {
        let status = StatusCode::from_u16(status).expect("a status");
        let pages = &mut self.0.controls.lock().unwrap().tells.pages;
        let asked = pages.get(path).map_or(0, |page| page.asked);
        pages.insert(path.to_owned(), Page { status, body, asked });
    }

    /// How often a page was asked for.
    pub fn asked(&self, path: &str) -> u64 {
        self.0.controls.lock().unwrap().tells.pages.get(path).map_or(0, |page| page.asked)
    }

    /// From now on the answers to jobs have these headers, in place of those that were told before. Values are any bytes that HTTP allows.
    pub fn tell(&self, headers: &[(&str, impl AsRef<[u8]>)]) {
        self.0.controls.lock().unwrap().tells.headers = fields(headers);
    }

    /// From now on the answers to jobs over HTTP/2 have these trailers, in place of those that were told before.
    pub fn tell_at_the_end(&self, trailers: &[(&str, impl AsRef<[u8]>)]) {
        self.0.controls.lock().unwrap().tells.trailers = fields(trailers);
    }
}

fn fields(fields: &[(&str, impl AsRef<[u8]>)]) -> HeaderMap {
    let field = |(name, value): &(&str, _)| {
        let value: &[u8] = AsRef::<[u8]>::as_ref(value);
        (HeaderName::try_from(*name).expect("a name"), HeaderValue::from_bytes(value).expect("a value"))
    };
    fields.iter().map(field).collect()
}

/// The answer of a page, if this path is one.
pub(super) async fn page(shared: &Shared, path: &str) -> Option<Response<Answer>> {
    let (status, body) = {
        let mut controls = shared.controls.lock().unwrap();
        let page = controls.tells.pages.get_mut(path)?;
        page.asked += 1;
        (page.status, page.body.clone())
    };
    let Some(body) = body else { return std::future::pending().await };
    let counts = shared.books.counts();
    let body = match std::str::from_utf8(&body) {
        Ok(page) if page.contains("{running}") || page.contains("{waiting}") => {
            let page = page.replace("{running}", &counts.running.to_string());
            page.replace("{waiting}", &counts.waiting.to_string()).into()
        }
        _ => body,
    };
    let mut response = text("text/plain; version=0.0.4", body);
    *response.status_mut() = status;
    Some(response)
}

/// The answer to a job, with what the host tells.
pub(super) fn told(shared: &Shared, mut response: Response<Answer>) -> Response<Answer> {
    let tells = &shared.controls.lock().unwrap().tells;
    response.headers_mut().extend(tells.headers.clone());
    if !tells.trailers.is_empty() {
        response.body_mut().end_with(tells.trailers.clone());
    }
    response
}
