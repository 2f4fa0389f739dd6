//! A hash that is the same in every build and on every Envoy of a fleet.

/// FNV-1a of 64 bits. It need not withstand anybody: who makes two names collide has them share a class or a host.
#[derive(Clone, Copy, Debug)]
pub struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }
}

impl Hash {
    /// Of these bytes alone.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut hash = Self::default();
        hash.add(bytes);
        hash.value()
    }

    /// More bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3));
    }

    /// Of all that were added.
    pub fn value(self) -> u64 {
        self.0
    }
}
