//! Plimsoll: an Envoy proxy-wasm filter that sends each request to the GPU host that will serve it best.
//!
//! ```text
//!  Envoy ──► sdk ──► roles ──► core          callback ─► event ─► decision
//!    ▲        │        │
//!    └────────┴── hostcalls (host::Host) ◄── effect
//! ```
//!
//! - [`core`]: the books of a pool and the choice; pure.
//! - [`config`]: what the user wrote, and what the program runs on.
//! - [`roles`]: the balancer, the status page, and what one worker does for all (`watch`): callbacks to events, decisions to effects.
//! - [`telemetry`]: what others tell of the hosts; bytes in, values out.
//! - [`host`]: what the roles need of Envoy; `hostcalls` is Envoy's side of it, `sdk` connects the SDK's callbacks. Both
//!   exist only in the module: everything else is built, and tested, natively too.

#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "a test may fail loudly")
)]

pub mod config;
pub mod core;
pub mod host;
pub mod roles;
pub mod telemetry;

#[cfg(target_arch = "wasm32")]
mod hostcalls;
#[cfg(target_arch = "wasm32")]
mod sdk;
