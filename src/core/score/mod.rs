//! The scores of hosts, one file for each policy. The lowest wins.

pub mod least_score;
pub mod least_time;
pub mod weighted;

use super::ewma::Fading;
use super::penalty::{self, Fade};
use super::record::{Host, Record};
use super::time::Instant;
use least_score::Latency;

/// The `least_score` of all hosts by slot, with the parameters that the record shows: for the status page.
pub fn scores(record: &Record, now: Instant) -> Vec<f64> {
    let score = record.header.score();
    let averages = record.hosts().map(|host| host.ewma());
    let fade = Fade::new(record.header.time_constant(), &record.header);
    let latency = Latency::new(&score, averages, now, Fading::new(record.header.time_constant()));
    let slow_start = record.header.slow_start();
    let weight = |host: &Host| f64::from(host.weight) * host.ramp(slow_start, now);
    let per_job = |host: &Host| f64::from(score.in_flight_weight) / weight(host);
    let of_host = |host: Host| {
        (least_score::of_jobs(host.load(), per_job(&host)) + latency.of(host.ewma())) * penalty::factor(&host, now, fade)
    };
    record.hosts().map(of_host).collect()
}
