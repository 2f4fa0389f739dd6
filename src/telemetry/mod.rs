//! What others tell of the hosts: bytes in, values out.

pub mod base64;
pub mod clusters;
mod comfyui;
pub mod mapping;
mod number;
pub mod orca;
pub mod preset;
pub mod prometheus;
