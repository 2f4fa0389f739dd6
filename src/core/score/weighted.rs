//! `weighted`: at random, by what hosts tell of themselves.
//!
//! ```text
//! chance ∝ weight × (0.4 · (1 − memory) + 0.4 · (1 − compute) + 0.2 / (latency in s + 1)) / penalty
//! ```
//!
//! A host that does not tell one of the two is taken for the mean of those that do; if none does, that part is the same for all. A pool of which nobody tells anything is balanced by least in-flight.
//!
//! Each host draws `−ln(u) / chance`, and the lowest number wins: that is a draw by these chances (Efraimidis and Spirakis 2006), the next lowest is one among the others, and so on for the alternates.

use crate::config::Weights;
use crate::core::random::Random;

/// No host is without any chance, or its numbers would never change.
const LEAST: f64 = 1e-4;

/// The chance of a host, before it is made part of the pool's sum; `memory` and `compute` in 0..=1, the latency in milliseconds.
pub fn chance(weights: &Weights, memory: f32, compute: f32, latency: f32) -> f64 {
    let free = |used: f32| f64::from(1.0 - used.clamp(0.0, 1.0));
    let quick = 1.0 / (f64::from(latency.max(0.0)) / 1e3 + 1.0);
    let sum = f64::from(weights.memory) * free(memory)
        + f64::from(weights.compute) * free(compute)
        + f64::from(weights.latency) * quick;
    if sum.is_finite() { sum.max(LEAST) } else { LEAST }
}

/// A host's draw: the lowest wins.
pub fn draw(chance: f64, random: &mut Random) -> f64 {
    // In 0..1; 1 − u is never 0.
    -(1.0 - random.unit()).ln() / chance.max(LEAST * 1e-3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: Weights = Weights { memory: 0.4, compute: 0.4, latency: 0.2 };

    #[test]
    fn the_formula_is_that_of_the_design() {
        assert!((chance(&WEIGHTS, 0.0, 0.0, 0.0) - 1.0).abs() < 1e-6);
        assert!((chance(&WEIGHTS, 0.5, 0.25, 1000.0) - (0.2 + 0.3 + 0.1)).abs() < 1e-6);
        assert!((chance(&WEIGHTS, 1.0, 1.0, 3000.0) - 0.05).abs() < 1e-6);
    }

    #[test]
    fn whatever_is_told_it_is_a_chance() {
        for value in [f32::NAN, f32::INFINITY, -1.0, 1e38] {
            let chance = chance(&WEIGHTS, value, value, value);
            assert!(chance >= LEAST && chance.is_finite(), "{value}: {chance}");
        }
    }

    #[test]
    fn the_lowest_draw_falls_to_each_by_its_chance() {
        let (chances, mut won, mut random) = ([0.6, 0.3, 0.1], [0u32; 3], Random::new(1));
        for _ in 0..20_000 {
            let draws = chances.map(|chance| draw(chance, &mut random));
            let best = (0..3).min_by(|a, b| draws[*a].total_cmp(&draws[*b])).unwrap();
            won[best] += 1;
        }
        let parts = won.map(|won| f64::from(won) / 20_000.0);
        assert!(chances.iter().zip(parts).all(|(chance, part)| (chance - part).abs() < 0.015), "{parts:?}");
    }
}
