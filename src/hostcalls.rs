//! Envoy's side of the seam: the one file that makes hostcalls.
//!
//! The SDK's wrappers panic on statuses that they do not expect (92 `unwrap`s and `panic!`s in 0.2.5), and a panic ends the worker's VM with
//! all its streams. So the ABI's functions are declared here once more, and every status becomes a value. This also saves copies:
//! headers are read in the encoding in which they arrive.

// Foreign functions can be called in no other way. Each call passes pointers into slices that outlive it, and takes over a block that
// Envoy allocated through the SDK's allocator with exactly this length.
#![allow(unsafe_code)]

use std::ptr::null_mut;
use std::time::{Duration, SystemTime};

use crate::core::time::Instant;
use crate::host::{Fault, Headers, Host, Level, Map, Metric, Shared, on_one_line};

/// The ABI's statuses that are not faults.
mod status {
    pub const OK: u32 = 0;
    pub const NOT_FOUND: u32 = 1;
    pub const CAS_MISMATCH: u32 = 8;
}

/// The ABI's header maps.
mod map {
    pub const REQUEST_HEADERS: u32 = 0;
    pub const RESPONSE_HEADERS: u32 = 2;
    pub const RESPONSE_TRAILERS: u32 = 3;
    pub const CALL_HEADERS: u32 = 6;
}

/// The ABI's buffers.
mod buffers {
    pub const REQUEST_BODY: u32 = 0;
    pub const CALL_BODY: u32 = 4;
    pub const PLUGIN_CONFIGURATION: u32 = 7;
}

/// WASI's clocks, and how precisely we want them, in nanoseconds.
const REALTIME: (u32, u64) = (0, 1_000_000);
const MONOTONIC: (u32, u64) = (1, 1000);

#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn proxy_log(level: u32, message: *const u8, size: usize) -> u32;
    fn proxy_set_tick_period_milliseconds(period: u32) -> u32;
    fn proxy_get_shared_data(key: *const u8, size: usize, value: *mut *mut u8, value_size: *mut usize, cas: *mut u32) -> u32;
    fn proxy_set_shared_data(key: *const u8, size: usize, value: *const u8, value_size: usize, cas: u32) -> u32;
    fn proxy_get_property(path: *const u8, size: usize, value: *mut *mut u8, value_size: *mut usize) -> u32;
    fn proxy_get_header_map_pairs(map: u32, pairs: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_header_map_value(map: u32, key: *const u8, size: usize, value: *mut *mut u8, value_size: *mut usize) -> u32;
    fn proxy_replace_header_map_value(map: u32, key: *const u8, size: usize, value: *const u8, value_size: usize) -> u32;
    fn proxy_remove_header_map_value(map: u32, key: *const u8, size: usize) -> u32;
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
    fn proxy_set_property(path: *const u8, size: usize, value: *const u8, value_size: usize) -> u32;
    fn proxy_define_metric(kind: u32, name: *const u8, size: usize, id: *mut u32) -> u32;
    fn proxy_increment_metric(id: u32, by: i64) -> u32;
    fn proxy_record_metric(id: u32, value: u64) -> u32;
    fn proxy_set_effective_context(context: u32) -> u32;
    fn proxy_continue_stream(stream: u32) -> u32;
    fn proxy_register_shared_queue(name: *const u8, size: usize, queue: *mut u32) -> u32;
    fn proxy_enqueue_shared_queue(queue: u32, data: *const u8, size: usize) -> u32;
    fn proxy_dequeue_shared_queue(queue: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_buffer_bytes(buffer: u32, start: usize, most: usize, data: *mut *mut u8, size: *mut usize) -> u32;
}

#[link(wasm_import_module = "wasi_snapshot_preview1")]
unsafe extern "C" {
    fn clock_time_get(clock: u32, precision: u64, time: *mut u64) -> u32;
    fn random_get(bytes: *mut u8, size: usize) -> u32;
}

/// The Envoy that this VM runs in.
#[derive(Clone, Copy, Debug)]
pub struct Envoy;

impl Envoy {
    /// The first `size` bytes of the plugin's configuration, inside `on_configure`.
    pub fn configuration(self, size: usize) -> Result<Vec<u8>, Fault> {
        buffer(buffers::PLUGIN_CONFIGURATION, size).map(Option::unwrap_or_default)
    }
}

fn check(status: u32) -> Result<(), Fault> {
    if status == status::OK { Ok(()) } else { Err(Fault(status)) }
}

/// Calls a function that returns a block of bytes; `None`: there is no such thing, or it is empty.
fn owned(call: impl FnOnce(*mut *mut u8, *mut usize) -> u32) -> Result<Option<Vec<u8>>, Fault> {
    let (mut data, mut size) = (null_mut(), 0);
    match call(&raw mut data, &raw mut size) {
        status::OK if data.is_null() => Ok(None),
        // SAFETY: see the top of this file.
        status::OK => Ok(Some(unsafe { Vec::from_raw_parts(data, size, size) })),
        status::NOT_FOUND => Ok(None),
        other => Err(Fault(other)),
    }
}

/// The first `size` bytes of a buffer.
fn buffer(buffer: u32, size: usize) -> Result<Option<Vec<u8>>, Fault> {
    // SAFETY: see the top of this file.
    owned(|data, length| unsafe { proxy_get_buffer_bytes(buffer, 0, size, data, length) })
}

/// Nanoseconds on one of WASI's clocks.
fn clock((clock, precision): (u32, u64)) -> u64 {
    let mut nanos = 0;
    // SAFETY: the pointer is to a local.
    let _ = unsafe { clock_time_get(clock, precision, &raw mut nanos) };
    nanos
}

/// Sets a header, or removes it.
fn set_header(map: u32, name: &[u8], value: Option<&[u8]>) -> Result<(), Fault> {
    check(match value {
        // SAFETY: see the top of this file.
        Some(value) => unsafe { proxy_replace_header_map_value(map, name.as_ptr(), name.len(), value.as_ptr(), value.len()) },
        // SAFETY: see the top of this file.
        None => unsafe { proxy_remove_header_map_value(map, name.as_ptr(), name.len()) },
    })
}

fn number_of(map: Map) -> u32 {
    match map {
        Map::Response => map::RESPONSE_HEADERS,
        Map::Trailers => map::RESPONSE_TRAILERS,
        Map::Call => map::CALL_HEADERS,
    }
}

impl Host for Envoy {
    fn now(&self) -> Instant {
        Instant((clock(MONOTONIC) / 1000).max(1))
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(clock(REALTIME))
    }

    fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        // SAFETY: the pointer and the size are a local's.
        let _ = unsafe { random_get(bytes.as_mut_ptr(), bytes.len()) };
        u64::from_le_bytes(bytes)
    }

    fn log(&self, level: Level, line: &str) {
        let level = match level {
            Level::Info => 2,
            Level::Warn => 3,
            Level::Error => 4,
        };
        let line = on_one_line(line);
        // SAFETY: see the top of this file.
        let _ = unsafe { proxy_log(level, line.as_ptr(), line.len()) };
    }

    fn load(&self, key: &str) -> Result<Shared, Fault> {
        let mut cas = 0;
        let value = owned(|data, size| {
            // SAFETY: see the top of this file.
            unsafe { proxy_get_shared_data(key.as_ptr(), key.len(), data, size, &raw mut cas) }
        })?;
        // An existing key with an empty value has a version, and no bytes.
        let value = if value.is_none() && cas != 0 { Some(Vec::new()) } else { value };
        Ok(Shared { value, cas })
    }

    fn store(&self, key: &str, value: &[u8], cas: u32) -> Result<bool, Fault> {
        // SAFETY: see the top of this file.
        match unsafe { proxy_set_shared_data(key.as_ptr(), key.len(), value.as_ptr(), value.len(), cas) } {
            status::OK => Ok(true),
            status::CAS_MISMATCH => Ok(false),
            other => Err(Fault(other)),
        }
    }

    fn property(&self, path: &str) -> Option<Vec<u8>> {
        // SAFETY: see the top of this file.
        owned(|data, size| unsafe { proxy_get_property(path.as_ptr(), path.len(), data, size) }).ok().flatten()
    }

    fn request_headers(&self) -> Result<Headers, Fault> {
        // SAFETY: see the top of this file.
        let pairs = owned(|data, size| unsafe { proxy_get_header_map_pairs(map::REQUEST_HEADERS, data, size) })?;
        Ok(Headers(pairs.unwrap_or_default()))
    }

    fn set_request_header(&self, name: &[u8], value: Option<&[u8]>) -> Result<(), Fault> {
        set_header(map::REQUEST_HEADERS, name, value)
    }

    fn header(&self, map: Map, name: &str) -> Option<Vec<u8>> {
        // SAFETY: see the top of this file.
        owned(|data, size| unsafe { proxy_get_header_map_value(number_of(map), name.as_ptr(), name.len(), data, size) })
            .ok()
            .flatten()
    }

    fn remove_header(&self, map: Map, name: &str) -> Result<(), Fault> {
        set_header(number_of(map), name.as_bytes(), None)
    }

    fn set_response_header(&self, name: &[u8], value: Option<&[u8]>) -> Result<(), Fault> {
        set_header(map::RESPONSE_HEADERS, name, value)
    }

    fn set_filter_state(&self, name: &str, value: &[u8]) -> Result<(), Fault> {
        // SAFETY: see the top of this file.
        check(unsafe { proxy_set_property(name.as_ptr(), name.len(), value.as_ptr(), value.len()) })
    }

    fn call(&self, cluster: &str, headers: &[(&str, &str)], body: &[u8], timeout: Duration) -> Result<u32, Fault> {
        // The one wrapper of the SDK's that is used: it alone can tell the SDK of the token, which it would else not know when the answer comes.
        // It panics on statuses other than these two; Envoy gives no other (`Context::httpCall`).
        let body = Some(body).filter(|body| !body.is_empty());
        proxy_wasm::hostcalls::dispatch_http_call(cluster, headers.to_vec(), body, Vec::new(), timeout)
            .map_err(|status| Fault(status as u32))
    }

    fn body(&self, size: usize) -> Option<Vec<u8>> {
        buffer(buffers::CALL_BODY, size).ok().flatten()
    }

    fn request_body(&self, size: usize) -> Option<Vec<u8>> {
        buffer(buffers::REQUEST_BODY, size).ok().flatten()
    }

    fn metric(&self, kind: Metric, name: &str) -> Result<u32, Fault> {
        let kind = match kind {
            Metric::Counter => 0,
            Metric::Gauge => 1,
            Metric::Histogram => 2,
        };
        let mut id = 0;
        // SAFETY: see the top of this file.
        check(unsafe { proxy_define_metric(kind, name.as_ptr(), name.len(), &raw mut id) })?;
        Ok(id)
    }

    fn add(&self, metric: u32, by: u64) {
        // SAFETY: no pointers.
        let _ = unsafe { proxy_increment_metric(metric, i64::try_from(by).unwrap_or(i64::MAX)) };
    }

    fn record(&self, metric: u32, value: u64) {
        // SAFETY: no pointers.
        let _ = unsafe { proxy_record_metric(metric, value) };
    }

    fn reply(&self, status: u16, headers: &[(&str, &str)], body: &[u8]) -> Result<(), Fault> {
        const NO_GRPC_STATUS: i32 = -1;
        let pairs: Vec<(&[u8], &[u8])> = headers.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())).collect();
        let Headers(pairs) = Headers::encode(&pairs);
        // SAFETY: see the top of this file.
        check(unsafe {
            proxy_send_local_response(
                status.into(),
                "plimsoll".as_ptr(),
                "plimsoll".len(),
                body.as_ptr(),
                body.len(),
                pairs.as_ptr(),
                pairs.len(),
                NO_GRPC_STATUS,
            )
        })
    }

    fn resume(&self) -> Result<(), Fault> {
        const REQUEST: u32 = 0;
        // SAFETY: no pointers.
        check(unsafe { proxy_continue_stream(REQUEST) })
    }

    fn tick_each(&self, period: Duration) {
        // SAFETY: no pointers.
        let _ = unsafe { proxy_set_tick_period_milliseconds(period.as_millis() as u32) };
    }

    fn register_bell(&self, name: &str) -> Result<u32, Fault> {
        let mut bell = 0;
        // SAFETY: see the top of this file.
        check(unsafe { proxy_register_shared_queue(name.as_ptr(), name.len(), &raw mut bell) })?;
        Ok(bell)
    }

    fn ring(&self, bell: u32) -> Result<(), Fault> {
        const SOMETHING: &[u8] = b"!";
        // SAFETY: see the top of this file.
        check(unsafe { proxy_enqueue_shared_queue(bell, SOMETHING.as_ptr(), SOMETHING.len()) })
    }

    fn silence_bell(&self, bell: u32) {
        // One at a time; an empty queue is refused.
        // SAFETY: see the top of this file.
        while let Ok(Some(_)) = owned(|data, size| unsafe { proxy_dequeue_shared_queue(bell, data, size) }) {}
    }

    fn enter(&self, stream: u32) -> Result<(), Fault> {
        // SAFETY: no pointers.
        check(unsafe { proxy_set_effective_context(stream) })
    }
}
