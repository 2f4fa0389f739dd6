//! The modules that are compared with ours; `scripts/bench` builds them.

use std::path::PathBuf;

/// The floor filter.
pub fn floor() -> PathBuf {
    named("PLIMSOLL_FLOOR")
}

/// The floor filter without the callbacks that it does nothing in, as ours is without them.
pub fn trimmed_floor() -> PathBuf {
    named("PLIMSOLL_FLOOR_TRIMMED")
}

fn named(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable).unwrap_or_else(|| panic!("{variable} names no module: run scripts/bench"));
    std::path::absolute(path).expect("a path")
}
