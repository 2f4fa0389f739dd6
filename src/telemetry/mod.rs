//! What others tell of the hosts: bytes in, values out.

pub mod clusters;
