//! A client that speaks bytes, for what no HTTP library would send.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::{DEADLINE, Target};

/// A TCP connection. Every read panics after [`crate::DEADLINE`], with what had come.
pub struct Wire {
    stream: TcpStream,
    /// Received and not yet handed out.
    pending: Vec<u8>,
}

impl Wire {
    /// Connects.
    pub async fn open(target: &impl Target) -> Self {
        let address = target.address();
        let stream = TcpStream::connect(address).await.unwrap_or_else(|error| panic!("{address}: {error}"));
        stream.set_nodelay(true).expect("an open socket");
        Self { stream, pending: Vec::new() }
    }

    /// Connects, sends these bytes and gives the first response.
    pub async fn ask(target: &impl Target, bytes: impl AsRef<[u8]>) -> String {
        let mut wire = Self::open(target).await;
        wire.send(bytes).await;
        wire.receive().await
    }

    /// Sends these bytes. That the other side has closed shows when reading.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref()).await;
    }

    /// One response, head and body; or what came before the connection ended. Text, with replacement characters where it is none.
    pub async fn receive(&mut self) -> String {
        let mut response = self.receive_head().await;
        let head = response.to_ascii_lowercase();
        if let Some(length) = head.lines().find_map(|line| line.strip_prefix("content-length:")) {
            let body = self.receive_exactly(length.trim().parse().expect("a length")).await;
            response += &String::from_utf8_lossy(&body);
        } else if head.contains("transfer-encoding: chunked") {
            response += &self.receive_until(|bytes| find(bytes, b"0\r\n\r\n").map(|at| at + 5)).await;
        } else if !(head.starts_with("http/1.1 1") || head.starts_with("http/1.1 204") || head.starts_with("http/1.1 304")) {
            response += &self.receive_until(|_| None).await;
        }
        response
    }

    /// The head of a response only: for HEAD, 1xx and upgrades.
    pub async fn receive_head(&mut self) -> String {
        self.receive_until(|bytes| find(bytes, b"\r\n\r\n").map(|at| at + 4)).await
    }

    /// So many bytes, or fewer if the connection ends.
    pub async fn receive_exactly(&mut self, length: usize) -> Vec<u8> {
        self.take(|bytes| (bytes.len() >= length).then_some(length)).await
    }

    /// Waits until the other side closes or resets; false if it has not within `time`.
    pub async fn closed_within(&mut self, time: Duration) -> bool {
        let mut rest = Vec::new();
        tokio::time::timeout(time, self.stream.read_to_end(&mut rest)).await.is_ok()
    }

    /// Ends the connection with a TCP RST.
    pub fn reset(self) {
        let _ = self.stream.set_zero_linger();
    }

    async fn receive_until(&mut self, end: impl Fn(&[u8]) -> Option<usize>) -> String {
        String::from_utf8_lossy(&self.take(end).await).into_owned()
    }

    async fn take(&mut self, end: impl Fn(&[u8]) -> Option<usize>) -> Vec<u8> {
        loop {
            if let Some(at) = end(&self.pending) {
                let rest = self.pending.split_off(at);
                return std::mem::replace(&mut self.pending, rest);
            }
            match tokio::time::timeout(DEADLINE, self.stream.read_buf(&mut self.pending)).await {
                Ok(Ok(0) | Err(_)) => return std::mem::take(&mut self.pending),
                Ok(Ok(_)) => {}
                Err(_) => panic!("nothing more within {DEADLINE:?} after {:?}", String::from_utf8_lossy(&self.pending)),
            }
        }
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}
