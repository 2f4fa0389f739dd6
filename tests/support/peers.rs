//! Load balancers that are no Envoy, as benchmarks compare them: nginx and HAProxy, on a free port of loopback.
//!
//! `scripts/bench` fetches them and says where they are. Each is set up as well as it can be for what is compared: one count of
//! the jobs for all workers, connections that are kept on both sides, and no timeout that a waiting job could meet.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, getuid, kill_process};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::envoy::die_with_parent;
use crate::gpu::Port;
use crate::{DEADLINE, Target, Times};

/// A running nginx or HAProxy; it ends when dropped, and with the thread that started it.
pub struct Peer {
    child: Child,
    port: Port,
    directory: TempDir,
    version: String,
}

impl Target for Peer {
    fn address(&self) -> SocketAddr {
        self.port.address()
    }
}

impl Peer {
    /// nginx with two workers in front of these hosts, `least_conn`.
    ///
    /// # Errors
    /// There is none here, or it does not start; the text says why.
    pub async fn nginx(hosts: &[SocketAddr]) -> Result<Self, String> {
        let binary = binary("PLIMSOLL_NGINX")?;
        let version = says(&binary, "-v")?;
        Self::start(&binary, version, |directory, address| (nginx_file(directory, address, hosts), &["-e", "stderr", "-c"][..]))
            .await
    }

    /// HAProxy with two threads in front of these hosts, `leastconn`; with `maxconn` jobs on each at most, if so, and the
    /// others in its own queue.
    ///
    /// # Errors
    /// There is none here, or it does not start; the text says why.
    pub async fn haproxy(hosts: &[SocketAddr], maxconn: Option<usize>) -> Result<Self, String> {
        let binary = binary("PLIMSOLL_HAPROXY")?;
        let version = says(&binary, "-v")?;
        Self::start(&binary, version, |_, address| (haproxy_file(address, hosts, maxconn), &["-db", "-f"][..])).await
    }

    async fn start(
        binary: &Path,
        version: String,
        file: impl FnOnce(&Path, SocketAddr) -> (String, &'static [&'static str]),
    ) -> Result<Self, String> {
        let directory = tempfile::Builder::new().prefix("plimsoll-peer-").tempdir().expect("a temporary directory");
        let port = Port::reserve(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        let (text, arguments) = file(directory.path(), port.address());
        let path = directory.path().join("peer.conf");
        std::fs::write(&path, text).expect("a file in a fresh directory");
        let log = std::fs::File::create(directory.path().join("log")).expect("a file in a fresh directory");
        let mut command = command(binary);
        command.args(arguments).arg(&path).stdin(Stdio::null()).stdout(log.try_clone().expect("a second handle")).stderr(log);
        // nginx's master ends its workers on this one.
        die_with_parent(&mut command, Signal::TERM);
        let child = command.spawn().map_err(|error| format!("{}: {error}", binary.display()))?;
        let mut peer = Self { child, port, directory, version };
        let started = Instant::now();
        while TcpStream::connect(peer.address()).await.is_err() {
            let ended = peer.child.try_wait().expect("our own child");
            if ended.is_some() || started.elapsed() > DEADLINE {
                return Err(format!("{} does not start: {}", binary.display(), peer.log().trim_end()));
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        Ok(peer)
    }

    /// As it says itself.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// All that it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// What the scheduler says of all its processes so far.
    pub fn times(&self) -> Times {
        let pid = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|child| child.parse().ok());
        std::iter::once(pid).chain(children).map(Times::of_process).sum()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// Where it is.
fn binary(variable: &str) -> Result<PathBuf, String> {
    std::env::var_os(variable).map(PathBuf::from).ok_or_else(|| "it is not here, and could not be fetched".to_owned())
}

/// With the libraries that were fetched with it.
fn command(binary: &Path) -> Command {
    let mut command = Command::new(binary);
    if let Some(libraries) = std::env::var_os("PLIMSOLL_PEERS_LIBRARIES").filter(|libraries| !libraries.is_empty()) {
        command.env("LD_LIBRARY_PATH", libraries);
    }
    command
}

/// The first line of what it prints.
fn says(binary: &Path, argument: &str) -> Result<String, String> {
    let output = command(binary).arg(argument).output().map_err(|error| format!("{}: {error}", binary.display()))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    if output.status.success() { Ok(text.lines().next().unwrap_or_default().to_owned()) } else { Err(text.trim_end().to_owned()) }
}

fn nginx_file(directory: &Path, address: SocketAddr, hosts: &[SocketAddr]) -> String {
    let at = directory.display();
    let mut text = format!("daemon off;\nworker_processes 2;\npid {at}/pid;\nerror_log stderr warn;\n");
    // Its own choice may be a user that this machine does not have.
    if getuid().is_root() {
        text += "user root root;\n";
    }
    text += "events { worker_connections 2048; }\nhttp {\n  access_log off;\n  keepalive_timeout 600s;\n  keepalive_requests 1000000;\n";
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        let _ = writeln!(text, "  {kind}_temp_path {at}/{kind};");
    }
    // The zone is what lets both workers count together.
    text += "  upstream gpu {\n    zone gpu 256k;\n    least_conn;\n";
    for host in hosts {
        let _ = writeln!(text, "    server {host} max_fails=0;");
    }
    text += "    keepalive 512;\n    keepalive_requests 1000000;\n    keepalive_timeout 600s;\n  }\n  server {\n";
    let _ = writeln!(text, "    listen {address} reuseport;");
    text += "    location / {\n      proxy_pass http://gpu;\n      proxy_http_version 1.1;\n      proxy_set_header Connection \"\";\n";
    text += "      proxy_read_timeout 600s;\n    }\n  }\n}\n";
    text
}

fn haproxy_file(address: SocketAddr, hosts: &[SocketAddr], maxconn: Option<usize>) -> String {
    // "http-reuse always" makes the queue slower: threads then take connections from each other.
    let mut text = "global\n  nbthread 2\n  maxconn 2000\ndefaults\n  mode http\n".to_owned();
    for (what, seconds) in [("connect", 5), ("client", 600), ("server", 600), ("queue", 600), ("http-keep-alive", 600)] {
        let _ = writeln!(text, "  timeout {what} {seconds}s");
    }
    let _ = writeln!(text, "frontend ingress\n  bind {address}\n  default_backend gpu\nbackend gpu\n  balance leastconn");
    for (n, host) in hosts.iter().enumerate() {
        let _ = write!(text, "  server gpu{n} {host} pool-purge-delay 600s");
        if let Some(maxconn) = maxconn {
            let _ = write!(text, " maxconn {maxconn}");
        }
        text.push('\n');
    }
    text
}
