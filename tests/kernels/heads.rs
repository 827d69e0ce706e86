//! Heads joined from parts of others.

use rocmforge::backend::hip::Grid;
use rocmforge::backend::hip::kernels::heads::JoinHeads;

use crate::random::Random;
use crate::rig::rig;

/// Values of a head, the first of the part, its values, and values between rows.
#[derive(Clone, Copy)]
struct Part {
    head_dim: usize,
    first: usize,
    width: usize,
    gap: usize,
}

const fn part(head_dim: usize, first: usize, width: usize, gap: usize) -> Part {
    Part { head_dim, first, width, gap }
}

impl Part {
    fn stride(&self, heads: usize) -> usize {
        heads * self.head_dim + self.gap
    }

    /// Rows of random parts, and NaN around them.
    fn rows(&self, random: &mut Random, rows: usize, heads: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; rows * self.stride(heads)];
        for row in 0..rows {
            for head in 0..heads {
                let at = row * self.stride(heads) + head * self.head_dim + self.first;
                values[at..at + self.width].fill_with(|| random.normal());
            }
        }
        values
    }
}

#[test]
fn heads_are_joined_from_parts() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (rows, heads, first, second) in [
        (1, 1, part(1, 0, 1, 0), part(1, 0, 1, 0)),
        (3, 5, part(24, 16, 8, 0), part(24, 0, 24, 0)),
        (2, 16, part(192, 128, 64, 0), part(512, 0, 512, 0)),
        (7, 3, part(7, 2, 5, 3), part(11, 1, 9, 1)),
        (300, 1, part(64, 0, 64, 512), part(512, 0, 512, 64)),
    ] {
        let (a, b) = (first.rows(&mut random, rows, heads), second.rows(&mut random, rows, heads));
        let width = first.width + second.width;
        let (from_a, from_b) = (rig.upload(&a), rig.upload(&b));
        let out = rig.output::<f32>(rows * heads * width);
        let arguments = JoinHeads {
            first: from_a.ptr::<f32>().offset(first.first),
            second: from_b.ptr::<f32>().offset(second.first),
            out: out.ptr(),
            first_stride: first.stride(heads) as u32,
            first_head: first.head_dim as u32,
            first_width: first.width as u32,
            second_stride: second.stride(heads) as u32,
            second_head: second.head_dim as u32,
            second_width: second.width as u32,
            heads: heads as u32,
        };
        let grid = Grid::xy((heads * width).div_ceil(1024) as u32, rows as u32);
        rig.device.launch(&rig.stream, JoinHeads::join_heads, grid, &arguments).unwrap();
        let got = rig.download::<f32>(&out);
        assert_eq!(got.len(), rows * heads * width);
        for (number, got) in got.chunks_exact(width).enumerate() {
            let (row, head) = (number / heads, number % heads);
            let of = |part: &Part, rows: &[f32]| {
                let at = row * part.stride(heads) + head * part.head_dim + part.first;
                rows[at..at + part.width].to_vec()
            };
            let want = [of(&first, &a), of(&second, &b)].concat();
            assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "row {row}, head {head}");
        }
    }
}
