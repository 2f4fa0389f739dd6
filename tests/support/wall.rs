//! Dates as people and protocols write them.

use std::time::{SystemTime, UNIX_EPOCH};

/// A moment in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utc {
    days: u64,
    second: u64,
}

impl From<SystemTime> for Utc {
    fn from(time: SystemTime) -> Self {
        let seconds = time.duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        Self { days: seconds / 86_400, second: seconds % 86_400 }
    }
}

impl Utc {
    /// `Sun, 06 Nov 1994 08:49:37 GMT`, as HTTP writes it.
    pub fn http(self) -> String {
        const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
        const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
        let ((year, month, day), (hour, minute, second)) = (self.date(), self.time());
        let (weekday, month) = (DAYS[self.days as usize % 7], MONTHS[month as usize - 1]);
        format!("{weekday}, {day:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT")
    }

    /// `1994-11-06T08:49:37`, as RFC 3339 begins. Later is greater, as text too.
    pub fn rfc3339(self) -> String {
        let ((year, month, day), (hour, minute, second)) = (self.date(), self.time());
        format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
    }

    /// Year, month and day by Howard Hinnant's `civil_from_days`, whose years begin in March.
    fn date(self) -> (u64, u64, u64) {
        let days = self.days + 719_468;
        let (era, of_era) = (days / 146_097, days % 146_097);
        let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        (era * 400 + year + u64::from(month >= 10), (month + 2) % 12 + 1, day)
    }

    fn time(self) -> (u64, u64, u64) {
        (self.second / 3_600, self.second / 60 % 60, self.second % 60)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| Utc::from(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0).http(), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(at(784_111_777).http(), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(at(951_827_696).rfc3339(), "2000-02-29T12:34:56");
        assert_eq!(at(1_798_761_599).rfc3339(), "2026-12-31T23:59:59");
    }
}
