//! Envoy as a process: found, started, measured, stopped, and always ended.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use super::root;

pub(super) const BOOTSTRAP: &str = "bootstrap.json";
pub(super) const ADMIN_ADDRESS: &str = "admin.txt";
const LOG: &str = "envoy.log";

/// Envoy wants one where a configuration is discovered.
const NAME: [&str; 4] = ["--service-node", "test", "--service-cluster", "test"];

/// The Envoy binary: `PLIMSOLL_ENVOY`, or where `scripts/test` puts it.
pub(super) fn binary() -> PathBuf {
    found("PLIMSOLL_ENVOY", ".tools/envoy-1.40.0/envoy", "scripts/test")
}

/// The module: `PLIMSOLL_WASM`, or where `scripts/build` puts it.
pub(super) fn module() -> PathBuf {
    found("PLIMSOLL_WASM", "dist/plimsoll.wasm", "scripts/build")
}

fn found(variable: &str, usual: &str, script: &str) -> PathBuf {
    let path = std::env::var_os(variable).map_or_else(|| root().join(usual), PathBuf::from);
    let path = std::path::absolute(&path).expect("a path");
    assert!(path.is_file(), "{} is missing: run {script}, or set {variable}", path.display());
    path
}

/// What the scheduler counts, in nanoseconds. A thread that is running adds what it ran only at the kernel's next tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// User and system time.
    pub ran: Duration,
    /// Time in which others had the core that it wanted.
    pub waited: Duration,
}

impl Times {
    /// Of a thread, by its directory in `/proc`.
    fn read(thread: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(thread.join("schedstat")).ok()?;
        let mut nanos = text.split_whitespace().map(|word| word.parse().map(Duration::from_nanos));
        Some(Self { ran: nanos.next()?.ok()?, waited: nanos.next()?.ok()? })
    }

    /// Of all threads of a process.
    pub(crate) fn of_process(pid: u32) -> Self {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
        // A thread that has just ended is gone with its time; those of a server do not end while it serves.
        tasks.filter_map(|task| Self::read(&task.ok()?.path())).sum()
    }

    /// Of the thread that asks.
    pub fn own() -> Self {
        Self::read(Path::new("/proc/thread-self")).expect("Linux with schedstat")
    }
}

impl std::iter::Sum for Times {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self { ran: sum.ran + one.ran, waited: sum.waited + one.waited })
    }
}

/// A running Envoy; killed when dropped, and when the thread that started it ends (the test's own, as long as the fixture is
/// started in the body of the test).
pub(super) struct Process {
    child: Child,
    directory: PathBuf,
}

impl Process {
    /// Starts the bootstrap in `directory`.
    pub fn start(directory: &Path, workers: usize) -> Self {
        let log = std::fs::File::create(directory.join(LOG)).expect("a log in a fresh directory");
        let mut command = Command::new(binary());
        command
            .current_dir(root())
            .arg("-c")
            .arg(directory.join(BOOTSTRAP))
            .arg("--admin-address-path")
            .arg(directory.join(ADMIN_ADDRESS))
            .args(["--concurrency", &workers.to_string(), "--disable-hot-restart", "--log-level", "info"])
            // Access logs: without it their lines come in steps of ten seconds.
            .args(["--file-flush-interval-msec", "100"])
            .args(NAME)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle on the log"))
            .stderr(log);
        die_with_parent(&mut command, Signal::KILL);
        let child = command.spawn().unwrap_or_else(|error| panic!("{}: {error}", binary().display()));
        Self { child, directory: directory.to_owned() }
    }

    /// How the process ended, if it has.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().expect("our own child")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Sends SIGSTOP and waits until every thread has stopped: on a busy machine a thread may run on for some time.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let deadline = std::time::Instant::now() + crate::DEADLINE;
        let stands_still = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("Envoy runs");
            // The state is the word behind the name, which stands in parentheses.
            tasks.flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
            })
        };
        while !stands_still() {
            assert!(std::time::Instant::now() < deadline, "Envoy was not stopped");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What the scheduler says of all its threads so far.
    pub fn times(&self) -> Times {
        Times::of_process(self.pid())
    }

    /// Resident memory in bytes.
    pub fn rss(&self) -> u64 {
        let status = self.proc("status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("kibibytes") * 1024
    }

    fn proc(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.pid())).expect("Envoy runs")
    }

    /// All that it has logged.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.directory.join(LOG)).unwrap_or_default()).into_owned()
    }

    /// The last of it, without what Envoy says of itself as it starts.
    pub fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().filter(|line| !line.contains("[info][main]")).collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[allow(unsafe_code, reason = "std has no safe way to run something between fork and exec; what runs is a single system call")]
pub(crate) fn die_with_parent(command: &mut Command, signal: Signal) {
    // SAFETY: prctl(PR_SET_PDEATHSIG) is async-signal-safe and touches no memory of the parent.
    unsafe {
        command.pre_exec(move || Ok(set_parent_process_death_signal(Some(signal))?));
    }
}

/// Runs `envoy --mode validate`.
pub(super) async fn validate(file: &Path) -> Result<(), String> {
    let output = tokio::process::Command::new(binary())
        .current_dir(root())
        .args(["--mode", "validate", "--log-level", "warn", "-c"])
        .arg(file)
        .args(NAME)
        .kill_on_drop(true)
        .output()
        .await
        .unwrap_or_else(|error| panic!("{}: {error}", binary().display()));
    if output.status.success() {
        return Ok(());
    }
    let log = String::from_utf8_lossy(&output.stderr);
    // "[time][pid][error][wasm] [source] wasm log plimsoll: what it said"
    let ours: Vec<&str> = log.lines().filter_map(|line| Some(line.split_once("wasm log ")?.1)).collect();
    Err(if ours.is_empty() { log.into_owned() } else { ours.join("\n") })
}
