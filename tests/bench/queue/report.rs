//! What a card says of its own load: in each answer, as an ORCA report, and on a metrics page, as vLLM has it.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// A report is about so many jobs, the last: the mean length of so many is within a tenth of the mix's, and with it the weight that
/// Envoy makes of the report.
const JOBS: usize = 100;

/// A card's books for its reports.
#[derive(Default)]
pub struct Meter {
    /// Running and waiting.
    held: usize,
    running: bool,
    /// When each of the last jobs started, and for how long it ran.
    ran: VecDeque<(Instant, Duration)>,
}

impl Meter {
    pub fn reached(&mut self) {
        self.held += 1;
    }

    pub fn started(&mut self) {
        self.running = true;
    }

    pub fn ended(&mut self, started: Instant, ended: Instant) {
        self.held -= 1;
        self.running = false;
        self.ran.push_back((started, ended - started));
        if self.ran.len() > JOBS {
            self.ran.pop_front();
        }
    }

    /// A header line: the part of the time in which the card was busy, and its jobs a second.
    pub fn report(&self, now: Instant) -> String {
        let Some((first, _)) = self.ran.front() else { return String::new() };
        let span = (now - *first).as_secs_f64();
        let busy: Duration = self.ran.iter().map(|(_, ran)| *ran).sum();
        let (utilization, rate) = (busy.as_secs_f64() / span, self.ran.len() as f64 / span);
        format!("endpoint-load-metrics: TEXT application_utilization={utilization:.6},rps_fractional={rate:.6},eps=0\r\n")
    }

    /// The metrics page.
    pub fn page(&self) -> String {
        let running = usize::from(self.running);
        let mut page = String::new();
        for (name, help, value) in [
            ("vllm:num_requests_running", "Number of requests in model execution batches.", running),
            ("vllm:num_requests_waiting", "Number of requests waiting to be processed.", self.held - running),
        ] {
            let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} gauge");
            let _ = writeln!(page, "{name}{{engine=\"0\",model_name=\"bench\"}} {value}.0");
        }
        page
    }
}
