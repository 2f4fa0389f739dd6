//! A host's port and its connections: opened, closed, frozen and cut on command.

use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

use super::Door;

/// What the host's tasks are to be.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    pub door: Door,
    pub frozen: bool,
    /// Goes up when the host dies; what belongs to an earlier life ends.
    pub life: u64,
}

/// A port that stays the host's while nobody listens on it.
pub(crate) struct Port {
    address: SocketAddr,
    /// Bound and never listening: connections are refused, and no other process is given the port.
    _held: TcpSocket,
}

impl Port {
    pub fn reserve(address: SocketAddr) -> std::io::Result<Self> {
        let held = Self::bind(address)?;
        let port = Self { address: held.local_addr()?, _held: held };
        // Only listening tells whether somebody else does.
        drop(port.listen()?);
        Ok(port)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn listen(&self) -> std::io::Result<TcpListener> {
        Self::bind(self.address)?.listen(4096)
    }

    fn bind(address: SocketAddr) -> std::io::Result<TcpSocket> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(socket)
    }
}

/// Runs `future` only while the host is not frozen, and no longer than the life in which it began.
pub(super) async fn gated<F: Future>(mut wanted: watch::Receiver<Wanted>, future: F) -> Option<F::Output> {
    let life = wanted.borrow().life;
    let mut future = pin!(future);
    loop {
        let now = *wanted.borrow_and_update();
        if now.life != life {
            return None;
        }
        tokio::select! {
            biased;
            changed = wanted.changed() => changed.ok()?,
            output = &mut future, if !now.frozen => return Some(output),
        }
    }
}

/// hyper's HTTP/2 streams run as tasks of their own; they freeze and die with the host as well.
#[derive(Clone)]
pub(super) struct GatedExecutor(pub watch::Receiver<Wanted>);

impl<F> hyper::rt::Executor<F> for GatedExecutor
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        tokio::spawn(gated(self.0.clone(), future));
    }
}

/// One connection, as the requests on it know it.
#[derive(Debug)]
pub(super) struct Line {
    /// The host's end of it: what the client connected to, also where the host listens on every address.
    pub local: SocketAddr,
    /// A second handle on the socket, for its options; gone once the connection has ended.
    socket: Mutex<Option<OwnedFd>>,
    cut: watch::Sender<bool>,
    active: watch::Sender<usize>,
}

impl Line {
    pub fn new(stream: &TcpStream) -> std::io::Result<Arc<Self>> {
        let socket = stream.as_fd().try_clone_to_owned()?;
        Ok(Arc::new(Self {
            local: stream.local_addr()?,
            socket: Mutex::new(Some(socket)),
            cut: watch::Sender::new(false),
            active: watch::Sender::new(0),
        }))
    }

    /// Ends the connection with a TCP RST.
    pub fn reset(&self) {
        if let Some(socket) = self.socket.lock().unwrap().take() {
            let _ = rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
        }
        self.cut.send_replace(true);
    }

    /// Lets go of the socket, so that it closes with the connection.
    pub fn release(&self) {
        self.socket.lock().unwrap().take();
    }

    /// Returns when [`Line::reset`] was called.
    pub async fn was_cut(&self) {
        let _ = self.cut.subscribe().wait_for(|cut| *cut).await;
    }

    /// Returns when the connection has carried no request for `idle`; without one, never.
    pub async fn was_idle(&self, idle: Option<Duration>) {
        let Some(idle) = idle else {
            return std::future::pending().await;
        };
        let mut active = self.active.subscribe();
        loop {
            let _ = active.wait_for(|active| *active == 0).await;
            active.mark_unchanged();
            if tokio::time::timeout(idle, active.changed()).await.is_err() {
                return;
            }
        }
    }

    /// The connection carries a request until this is dropped.
    pub fn busy(self: &Arc<Self>) -> Busy {
        self.active.send_modify(|active| *active += 1);
        Busy(self.clone())
    }
}

#[derive(Debug)]
pub(super) struct Busy(Arc<Line>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.active.send_modify(|active| *active -= 1);
    }
}
