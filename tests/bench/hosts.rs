//! Hosts that answer at once and cost next to nothing: what is measured is Envoy. (The simulated GPU hosts keep books, which costs
//! more than the filter does.)

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What every host answers.
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

/// Starts so many hosts on free ports of loopback, HTTP/1.1 with keep-alive. They end with the process.
pub async fn start(hosts: usize) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    for _ in 0..hosts {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        addresses.push(listener.local_addr().expect("a bound socket"));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream));
            }
        });
    }
    addresses
}

/// Answers each request: a job when its head is followed by the two bytes that the clients send as a body, a probe (`GET /health`) when its head
/// is there.
async fn serve(mut stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut request = Vec::with_capacity(2048);
    while stream.read_buf(&mut request).await.is_ok_and(|read| read > 0) {
        let end: &[u8] = if request.starts_with(b"GET ") { b"\r\n\r\n" } else { b"\r\n\r\n{}" };
        if request.ends_with(end) {
            request.clear();
            if stream.write_all(ANSWER).await.is_err() {
                return;
            }
        }
    }
}
