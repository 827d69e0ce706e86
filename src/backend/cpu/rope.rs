//! Rotary position embedding.

use crate::program::{RopeAngles, RopeLayout, RopeSpec};

/// Cosines and sines of a step's rows: `[rows][dims / 2]` pairs.
#[derive(Debug, Default)]
pub struct RopeTable {
    pairs: usize,
    /// [cos, sin], row by row.
    values: Vec<[f32; 2]>,
}

impl RopeTable {
    /// Computes the table for rows at `positions`. Called once per step.
    pub fn fill(&mut self, spec: &RopeSpec, factors: Option<&[f32]>, positions: &[u32]) {
        let angles = RopeAngles::new(spec, factors);
        self.pairs = angles.pairs();
        self.values.clear();
        positions.iter().for_each(|&position| angles.append(position, &mut self.values));
    }

    /// Rotates the first `dims` values of each of a row's heads in place. `heads` holds whole heads of `head_dim`.
    pub fn rotate(&self, layout: RopeLayout, row: usize, heads: &mut [f32], head_dim: usize) {
        let angles = &self.values[row * self.pairs..][..self.pairs];
        for head in heads.chunks_exact_mut(head_dim) {
            let head = &mut head[..2 * self.pairs];
            match layout {
                RopeLayout::Interleaved => {
                    for (pair, &angle) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                        *pair = rotate(pair[0], pair[1], angle);
                    }
                }
                RopeLayout::Halves => {
                    let (low, high) = head.split_at_mut(self.pairs);
                    for ((a, b), &angle) in low.iter_mut().zip(high).zip(angles) {
                        [*a, *b] = rotate(*a, *b, angle);
                    }
                }
            }
        }
    }
}

fn rotate(a: f32, b: f32, [cos, sin]: [f32; 2]) -> [f32; 2] {
    [a * cos - b * sin, a * sin + b * cos]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::RopeScaling;

    fn spec(layout: RopeLayout) -> RopeSpec {
        let scaling = RopeScaling::Linear { factor: 2.0 };
        RopeSpec { layout, dims: 4, theta: 100.0, scaling, magnitude: 1.0, growth: None }
    }

    #[test]
    fn pairs_turn_by_position_and_the_rest_passes() {
        // Frequencies are 1 and 1/10; with the factor 2 the second is 1/20; positions are halved.
        let check = |layout, factors: Option<&[f32]>, pair: usize, partner: usize, angle: f64| {
            let mut table = RopeTable::default();
            table.fill(&spec(layout), factors, &[0, 7]);
            let mut head = [0.0f32; 6];
            head[pair] = 1.0;
            head[5] = 9.0;
            table.rotate(layout, 1, &mut head, 6);
            let mut expect = [0.0; 6];
            (expect[pair], expect[partner], expect[5]) = (angle.cos() as f32, angle.sin() as f32, 9.0);
            assert_eq!(head, expect, "{layout:?}");
        };
        check(RopeLayout::Interleaved, None, 0, 1, 3.5);
        check(RopeLayout::Interleaved, Some(&[1.0, 2.0]), 2, 3, 3.5 / 20.0);
        check(RopeLayout::Halves, None, 0, 2, 3.5);
        check(RopeLayout::Halves, None, 1, 3, 3.5 / 10.0);
    }

    #[test]
    fn position_0_changes_nothing_and_two_heads_turn_alike() {
        let mut table = RopeTable::default();
        table.fill(&spec(RopeLayout::Halves), None, &[0, 3]);
        let mut heads = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0];
        let before = heads;
        table.rotate(RopeLayout::Halves, 0, &mut heads, 4);
        assert_eq!(heads, before);
        table.rotate(RopeLayout::Halves, 1, &mut heads, 4);
        assert_eq!(heads[..4], heads[4..]);
        assert_ne!(heads, before);
    }
}
