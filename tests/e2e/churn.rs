//! A fleet that grows, shrinks and changes at random under load, and nothing is lost.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use support::{Endpoint, Fleet, Gpu, Load, eventually};

use crate::discovery::addresses;
use crate::fleet::{SOON, follow};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    In,
    Draining,
    Out,
}

/// What the updates wanted of one host.
struct Host {
    place: Place,
    /// Since when it should get no job, and until when.
    closed: Vec<(Instant, Option<Instant>)>,
}

impl Host {
    fn new(place: Place) -> Self {
        let closed = if place == Place::In { vec![] } else { vec![(Instant::now(), None)] };
        Self { place, closed }
    }

    /// From `at` on it is in this place. It may get jobs again as soon as an update is being written, not later.
    fn become_at(&mut self, place: Place, at: Instant) {
        match (self.place == Place::In, place == Place::In) {
            (true, false) => self.closed.push((at, None)),
            (false, true) => self.closed.last_mut().expect("it was closed").1 = Some(at),
            _ => {}
        }
        self.place = place;
    }

    fn is_late(&self, arrival: Instant) -> bool {
        self.closed.iter().any(|(from, to)| arrival > *from + SOON && to.is_none_or(|to| arrival < to))
    }
}

/// Changes a random host, so that more or fewer serve, or (`None`) either.
fn step(random: &mut StdRng, hosts: &[Host], more: Option<bool>) -> (usize, Place) {
    let serving = hosts.iter().filter(|host| host.place == Place::In).count();
    loop {
        let which = random.random_range(0..hosts.len());
        let place = *[Place::In, Place::Draining, Place::Out].choose(random).expect("three");
        let change = i32::from(place == Place::In) - i32::from(hosts[which].place == Place::In);
        let wanted = match more {
            // What neither adds nor takes a host is a change, too: draining ones leave, and those that left come back as draining.
            Some(true) => change >= 0,
            Some(false) => change <= 0,
            None => true,
        };
        if place != hosts[which].place && wanted && (serving > 3 || change >= 0) {
            return (which, place);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_of_four_to_eight_to_three_hosts_loses_no_job_whatever_comes_and_goes() {
    const SEED: u64 = 2026;
    println!("seed {SEED}");
    let mut random = StdRng::seed_from_u64(SEED);
    let fleet = Fleet::start(8, Gpu::new().slots(200).remember(30_000)).await;
    let envoy = follow(&fleet, 4, json!({})).await;
    let clients = envoy.pool_over_workers(64).await;
    let work: Vec<u32> = (0..18_000).map(|_| random.random_range(20..=50)).collect();
    let load = Load::rate(300.0, work.len()).each(|n, shot| shot.call.add_header("x-sim-ms", work[n].to_string()));
    let load = load.over(&clients).start(&envoy);
    let began = Instant::now();
    let mut hosts: Vec<Host> = (0..8).map(|n| Host::new(if n < 4 { Place::In } else { Place::Out })).collect();
    let (mut steps, mut most) = (0, 0);
    while !load.is_finished() {
        let second = began.elapsed().as_secs();
        let more = match second {
            0..20 => Some(true),
            20..42 => None,
            _ => Some(false),
        };
        let serving = hosts.iter().filter(|host| host.place == Place::In).count();
        most = most.max(serving);
        if second < 57 && (more != Some(true) || serving < 8) {
            let (which, place) = step(&mut random, &hosts, more);
            // Before the update is written: a host may serve from that moment on.
            hosts[which].become_at(place, Instant::now());
            let endpoints = fleet.iter().zip(&hosts).filter_map(|(host, wanted)| match wanted.place {
                Place::In => Some(Endpoint::at(host.address())),
                Place::Draining => Some(Endpoint::at(host.address()).health("DRAINING")),
                Place::Out => None,
            });
            envoy.set_endpoints(endpoints).await;
            steps += 1;
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(100..1200))).await;
    }
    let report = load.await.expect("the load ran");
    println!("{steps} updates, up to {most} hosts at once\n{report}");
    report.assert_served();
    assert!(steps > 40 && most == 8, "{steps} updates, up to {most} hosts: too little has happened");
    // What clients got is what hosts did.
    assert_eq!(fleet.jobs().iter().sum::<u64>(), work.len() as u64);
    for (host, wanted) in fleet.iter().zip(&hosts) {
        let late: Vec<Duration> =
            host.requests().iter().filter(|seen| wanted.is_late(seen.arrived)).map(|seen| seen.arrived - began).collect();
        assert!(late.is_empty(), "{} got jobs later than {SOON:?} after it was taken out: {late:?}", host.address());
    }
    fleet.idle().await;
    envoy.settled().await;
    let members = hosts.iter().filter(|host| host.place != Place::Out).count();
    eventually("the last update is followed", async || envoy.books().await.len() == members).await;
    let pool = envoy.pool_status().await;
    let books = pool["hosts"].as_array().expect("hosts");
    let zeros = ["drift", "dead_workers", "unleased"].map(|name| pool[name].clone());
    assert_eq!((zeros, &pool["discovery"]["hosts"]), ([json!(0), json!(0), json!(0)], &json!(members)), "{pool:#}");
    for (host, wanted) in fleet.iter().zip(&hosts) {
        let address = host.address().to_string();
        assert_eq!(addresses(books).contains(&address.as_str()), wanted.place != Place::Out, "{address} in {books:#?}");
    }
    assert_eq!(hosts.iter().filter(|host| host.place == Place::In).count(), 3);
    // And they serve.
    fleet.clear_books();
    Load::burst(30).header("x-sim-ms", "300").run(&envoy).await.assert_served();
    for (host, wanted) in fleet.iter().zip(&hosts) {
        assert_eq!(host.jobs() > 0, wanted.place == Place::In, "{}: {:?}", host.address(), fleet.jobs());
    }
}
