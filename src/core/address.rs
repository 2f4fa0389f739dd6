//! Where a host listens.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// An IP address and port; IPv4 is kept as IPv4-mapped IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    ip: u128,
    port: u16,
}

impl Address {
    /// An address from its parts.
    pub fn from_bits(ip: u128, port: u16) -> Self {
        Self { ip, port }
    }

    /// The IPv6 address, or the IPv4-mapped one.
    pub fn ip(self) -> u128 {
        self.ip
    }

    /// The port.
    pub fn port(self) -> u16 {
        self.port
    }

    /// Reads an address as Envoy writes it: `10.0.0.1:8188` or `[fd00::1]:8188`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        std::str::from_utf8(text).ok()?.parse::<SocketAddr>().ok().map(Self::from)
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        Self { ip: ip.to_bits(), port: address.port() }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(Ipv6Addr::from_bits(self.ip).to_canonical(), self.port).fmt(out)
    }
}
