//! The scores of hosts, one file for each policy. The lowest wins.

pub mod least_score;
pub mod least_time;
pub mod weighted;

use super::choice::Load;
use super::ewma::Fading;
use super::learning;
use super::penalty::{self, Fade};
use super::record::{Host, Record};
use super::report::Told;
use super::time::Instant;
use crate::config::Policy;
use least_score::Latency;

/// The scores of all hosts by slot, with the parameters that the record shows, for a job of which nothing is known: for the status page. Of `least_time` milliseconds, of `weighted` the chance, before it
/// is made part of the pool's sum; where these know too little, the jobs in flight.
pub fn scores(record: &Record, now: Instant) -> Vec<f64> {
    let header = &record.header;
    let averages = record.hosts().map(|host| host.ewma());
    let fade = Fade::new(header.time_constant(), header);
    let latency = Latency::new(&header.score(), averages, now, Fading::new(header.time_constant()));
    let weight = |host: &Host| f64::from(host.weight) * host.ramp(header.slow_start(), now);
    let penalty = |host: &Host| penalty::factor(host, now, fade);
    let jobs = |host: Host| (f64::from(host.load()) + 1.0) * penalty(&host);
    let [_, least_time, weighted] = Policy::WORDS;
    let hosts = || record.hosts().zip(0..);
    if header.policy() == least_time {
        let Some(mean) = learning::mean_work(record).map(f64::from) else { return record.hosts().map(jobs).collect() };
        let fading = learning::fading(header.time_constant());
        let time = |(host, slot): (Host, u32)| {
            let insight = record.insight(slot);
            let speed = weight(&host) * f64::from(insight.speed(now, fading));
            let at_once = header.runs_at_once(host.max_in_flight);
            let counted = host.load();
            let load = Load { counted, jobs: insight.jobs(counted, now, header.patience()) };
            least_time::time(insight.ahead(load, mean, speed, now), mean, at_once, speed) * penalty(&host)
        };
        return hosts().map(time).collect();
    }
    if header.policy() == weighted {
        let told = Told::new((0..header.hosts).map(|slot| record.insight(slot).told(now, header.patience())));
        if !told.is_any() {
            return record.hosts().map(jobs).collect();
        }
        let chance = |(host, slot): (Host, u32)| {
            let [memory, compute] = told.of(slot as usize);
            weight(&host) * weighted::chance(&header.weights(), memory, compute, latency.faded(host.ewma())) / penalty(&host)
        };
        return hosts().map(chance).collect();
    }
    let per_job = |host: &Host| f64::from(header.score().in_flight_weight) / weight(host);
    let score = |host: Host| (least_score::of_jobs(host.load(), per_job(&host)) + latency.of(host.ewma())) * penalty(&host);
    record.hosts().map(score).collect()
}
