//! What hosts tell of themselves in their answers: ORCA load reports. They are for us, and do not reach the client.

use super::Stream;
use crate::host::{Host, Map};
use crate::telemetry::orca;

impl<H: Host> Stream<H> {
    /// Reads the report in the response's headers or trailers, and removes it.
    pub(super) fn take_report(&mut self, map: Map) {
        let Some(pool) = self.reports_to.clone() else { return };
        let [text, binary] = [orca::TEXT, orca::BINARY].map(|name| {
            let value = self.host.header(map, name);
            // Also one without a value. What cannot be removed is no secret.
            let _ = self.host.remove_header(map, name);
            value
        });
        match orca::read(text.as_deref(), binary.as_deref()) {
            // Trailers say more than headers did: the job has ended.
            Ok(reading) => self.reading = reading.map(|reading| (reading, self.host.now())).or(self.reading),
            Err(what) => {
                if let Ok(mut worker) = self.worker.try_borrow_mut() {
                    worker.cannot_read_report(&pool, what);
                }
            }
        }
    }
}
