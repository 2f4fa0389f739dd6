//! How long a host asks us to wait: the `Retry-After` header (RFC 9110, section 10.2.3), in seconds or as a date.

use std::time::Duration;

/// What a host that asks us to wait, but not in a way that can be read, is given: as much as one that says nothing.
const UNREADABLE: Duration = Duration::from_secs(1);

/// Reads the header. A date is compared with the response's own `date`, so that the clocks of host and proxy need not agree.
pub fn read(value: &[u8], date: Option<&[u8]>) -> Duration {
    let value = value.trim_ascii();
    if !value.is_empty() && value.iter().all(u8::is_ascii_digit) {
        // More than fits is more than anybody is given.
        return std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).map_or(Duration::MAX, Duration::from_secs);
    }
    let time = |bytes: &[u8]| httpdate::parse_http_date(std::str::from_utf8(bytes).ok()?).ok();
    match (time(value), date.and_then(time)) {
        (Some(then), Some(now)) => then.duration_since(now).unwrap_or_default(),
        _ => UNREADABLE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn seconds_and_dates_are_read_and_all_else_is_a_second() {
        let date: Option<&[u8]> = Some(b"Sun, 29 Nov 2026 12:00:00 GMT");
        let cases: [(&[u8], u64); 10] = [
            (b"0", 0),
            (b" 7 ", 7),
            (b"120", 120),
            (b"Sun, 29 Nov 2026 12:00:09 GMT", 9),
            (b"Sun, 29 Nov 2026 11:00:00 GMT", 0),
            (b"-3", 1),
            (b"1.5", 1),
            (b"soon", 1),
            (b"", 1),
            (b"\xff\x00", 1),
        ];
        for (value, seconds) in cases {
            assert_eq!(read(value, date), Duration::from_secs(seconds), "{}", String::from_utf8_lossy(value));
        }
        assert_eq!(read(b"Sun, 29 Nov 2026 12:00:09 GMT", None), UNREADABLE);
        assert!(read(b"99999999999999999999999", date) > Duration::from_secs(1 << 40));
    }

    proptest! {
        #[test]
        fn any_bytes_are_some_time(value in prop::collection::vec(any::<u8>(), 0..40), date in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = read(&value, Some(&date));
        }
    }
}
