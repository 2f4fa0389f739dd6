//! A simulated GPU fleet to play with: prints a line for each host when it is ready, and serves until SIGINT or SIGTERM.
//! What can be done to a running host is in the documentation of `support::gpu::control`.
#![allow(clippy::indexing_slicing, reason = "a list of speeds is used round and round")]

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use support::{Gpu, GpuHost};
use tokio::signal::unix::{SignalKind, signal};

const USAGE: &str = "\
usage: gpu-fleet (--listen IP:PORT,… | --count N --base-port PORT [--bind IP]) [options]
  --slots N            jobs that a host runs at once            (1)
  --speeds X,…         speed of each host, used round and round (1)
  --work-ms MS         a job's work at speed 1                  (500)
  --class NAME=MS      work of jobs with this x-job-class; may be repeated
  --chunks N           stream each answer in so many pieces     (0: whole)";

struct Options {
    addresses: Vec<SocketAddr>,
    speeds: Vec<f64>,
    gpu: Gpu,
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut addresses = Vec::new();
    let (mut count, mut base_port, mut bind) = (0u16, None, IpAddr::from([127, 0, 0, 1]));
    let mut speeds = vec![1.0];
    let mut gpu = Gpu::new().work_ms(500).remember(0);
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{option}: needs a value"))?;
        let wrong = || format!("{option} {value}: not understood");
        match option.as_str() {
            "--listen" => addresses = list(&value).ok_or_else(wrong)?,
            "--count" => count = value.parse().map_err(|_| wrong())?,
            "--base-port" => base_port = Some(value.parse::<u16>().map_err(|_| wrong())?),
            "--bind" => bind = value.parse().map_err(|_| wrong())?,
            "--slots" => gpu = gpu.slots(value.parse().map_err(|_| wrong())?),
            "--speeds" => {
                speeds = list(&value)
                    .filter(|all| all.iter().all(|speed| *speed > 0.0 && f64::is_finite(*speed)))
                    .ok_or_else(wrong)?;
            }
            "--work-ms" => gpu = gpu.work_ms(value.parse().map_err(|_| wrong())?),
            "--class" => {
                let (name, ms) = value.split_once('=').ok_or_else(wrong)?;
                gpu = gpu.class(name, ms.parse().map_err(|_| wrong())?);
            }
            "--chunks" => gpu = gpu.chunks(value.parse().map_err(|_| wrong())?),
            _ => return Err(format!("{option}: no such option")),
        }
    }
    if let Some(base_port) = base_port {
        for n in 0..count {
            let port = base_port.checked_add(n).ok_or_else(|| format!("--base-port {base_port}: too high for {count} hosts"))?;
            addresses.push(SocketAddr::new(bind, port));
        }
    }
    if addresses.is_empty() {
        return Err("no addresses".into());
    }
    Ok(Options { addresses, speeds, gpu })
}

fn list<T: std::str::FromStr>(value: &str) -> Option<Vec<T>> {
    value.split(',').map(|item| item.trim().parse().ok()).collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = match options(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("gpu-fleet: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    for (n, address) in options.addresses.iter().enumerate() {
        let speed = options.speeds[n % options.speeds.len()];
        match GpuHost::start_at(*address, options.gpu.clone().speed(speed)).await {
            Ok(_) => println!("gpu {address} ready, speed {speed}"),
            Err(error) => {
                eprintln!("gpu-fleet: {address}: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else {
        return ExitCode::FAILURE;
    };
    tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
    ExitCode::SUCCESS
}
