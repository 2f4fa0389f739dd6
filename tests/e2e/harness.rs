//! The harness itself: what the other tests rely on. Of our filter it needs only what its configuration tests say.

mod endpoints;
mod envoy;
mod hosts;
mod load;
