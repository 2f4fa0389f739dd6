//! The generator that breaks ties.

/// SplitMix64 (Steele, Lea and Flood 2014): eight bytes of state, no bad seed, and good enough to spread load. It guards
/// nothing: a client that could predict it would learn which of several equally loaded hosts comes next.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that gives the same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A whole number below `bound`, all equally likely to within 2⁻³²; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let wide = u128::from(self.bits()) * bound as u128;
        (wide >> 64) as usize
    }

    /// A number in 0..1.
    pub fn unit(&mut self) -> f64 {
        // As many bits as a fraction has.
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Moves `count` randomly chosen items to the front, in random order (a partial Fisher–Yates shuffle).
    pub fn shuffle_front<T>(&mut self, items: &mut [T], count: usize) {
        for front in 0..count.min(items.len().saturating_sub(1)) {
            let other = front + self.below(items.len() - front);
            items.swap(front, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_comes_to_the_front_equally_often() {
        let mut random = Random::new(7);
        let mut seen = [0u32; 5];
        for _ in 0..10_000 {
            let mut items = [0usize, 1, 2, 3, 4];
            random.shuffle_front(&mut items, 1);
            seen[items[0]] += 1;
        }
        assert!(seen.iter().all(|&n| (1_850..2_150).contains(&n)), "{seen:?}");
    }

    #[test]
    fn a_shuffle_of_nothing_or_of_one_is_harmless() {
        Random::new(1).shuffle_front::<u8>(&mut [], 3);
        let mut one = [9];
        Random::new(1).shuffle_front(&mut one, 3);
        assert_eq!(one, [9]);
    }
}
