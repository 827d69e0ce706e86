//! Class 10: weights that are NaN, infinite or too large, in every type that is computed. The file is well-formed; the
//! answer is finite or refused.

use crate::forge::{Forge, Random};

/// A model whose matrices all have one type and repeat one kind of block.
pub struct Numbers {
    pub what: String,
    pub forge: Forge,
    /// True if no token of a request touches the bad block: the answer is as without it.
    pub answers: bool,
}

const HIDDEN: u64 = 256;
/// A token that no test's text contains.
const UNUSED: u64 = 100;

/// For each type: name, number, values and bytes of a block, and offsets of its half-precision scales. MXFP4's and NVFP4's
/// are bytes, IQ1_M's is split.
const TYPES: &[(&str, u32, u64, usize, &[usize])] = &[
    ("F32", 0, 1, 4, &[]),
    ("F16", 1, 1, 2, &[0]),
    ("Q4_0", 2, 32, 18, &[0]),
    ("Q4_1", 3, 32, 20, &[0, 2]),
    ("Q5_0", 6, 32, 22, &[0]),
    ("Q5_1", 7, 32, 24, &[0, 2]),
    ("Q8_0", 8, 32, 34, &[0]),
    ("Q4_K", 12, 256, 144, &[0, 2]),
    ("Q5_K", 13, 256, 176, &[0, 2]),
    ("Q6_K", 14, 256, 210, &[208]),
    ("BF16", 30, 1, 2, &[]),
    ("MXFP4", 39, 32, 17, &[]),
    ("MXFP6_E2M3", 6023, 32, 25, &[]),
    ("MXFP6_E3M2", 6032, 32, 25, &[]),
    ("NVFP4", 40, 64, 36, &[]),
    ("Q2_K", 10, 256, 84, &[80, 82]),
    ("Q3_K", 11, 256, 110, &[108]),
    ("IQ4_NL", 20, 32, 18, &[0]),
    ("IQ4_XS", 23, 256, 136, &[0]),
    ("IQ3_XXS", 18, 256, 98, &[0]),
    ("IQ3_S", 21, 256, 110, &[0]),
    ("IQ2_XXS", 16, 256, 66, &[0]),
    ("IQ2_XS", 17, 256, 74, &[0]),
    ("IQ2_S", 22, 256, 82, &[0]),
    ("IQ1_S", 19, 256, 50, &[0]),
    ("IQ1_M", 29, 256, 56, &[]),
    ("TQ1_0", 34, 256, 54, &[52]),
    ("TQ2_0", 35, 256, 66, &[64]),
];

const INFINITY: u16 = 0x7c00;
const NAN: u16 = 0x7e00;
const LARGEST: u16 = 0x7bff;

/// One model for each type and each kind of block.
pub fn numbers() -> Vec<Numbers> {
    let mut all = Vec::new();
    for &kind in TYPES {
        for (what, scale) in [("infinite", INFINITY), ("not a number", NAN), ("the largest", LARGEST)] {
            all.push(model(kind, what, &|_, block, _| scaled(kind, block, scale)));
        }
        all.push(model(kind, "all ones", &|_, block, _| block.fill(0xff)));
        all.push(model(kind, "random bits", &|_, block, random| {
            block.fill_with(|| random.draw() as u8);
        }));
        // One bad block in the embedding, in the row of a byte token that the request's text does not contain.
        let unused = |unused: bool, block: &mut [u8], _: &mut Random| match unused {
            true => scaled(kind, block, NAN),
            false => block.fill(0),
        };
        let mut one = model(kind, "not a number in a row that is not used", &unused);
        one.forge = one.forge.with_tensor("output.weight", |t| t.data.as_mut().unwrap().fill(0));
        for tensor in
            one.forge.tensors.iter_mut().filter(|t| t.name.starts_with(b"blk.") && t.dims.len() == 2)
        {
            tensor.data.as_mut().unwrap().fill(0);
        }
        all.push(Numbers { answers: true, ..one });
    }
    all
}

/// Constant values under a scale of these bits. A type without a half-precision scale gets the same value in its own
/// format.
fn scaled((name, _, _, _, scales): (&str, u32, u64, usize, &[usize]), block: &mut [u8], bits: u16) {
    block.fill(0x35);
    match name {
        "F32" => {
            let wide = [(INFINITY, f32::INFINITY), (NAN, f32::NAN), (LARGEST, f32::MAX)];
            let value = wide.iter().find(|(half, _)| *half == bits).unwrap().1;
            block.copy_from_slice(&value.to_le_bytes());
        }
        "BF16" => {
            let wide = [(INFINITY, 0x7f80u16), (NAN, 0x7fc0), (LARGEST, 0x7f7f)];
            block.copy_from_slice(&wide.iter().find(|(half, _)| *half == bits).unwrap().1.to_le_bytes());
        }
        "NVFP4" => block[..4].fill(if bits == LARGEST { 0x7e } else { 0xff }),
        "MXFP4" | "MXFP6_E2M3" | "MXFP6_E3M2" => block[0] = if bits == LARGEST { 0xfe } else { 0xff },
        // Four bits of the scale in the top of each of the last four 16-bit words.
        "IQ1_M" => (0..4).for_each(|i| block[49 + 2 * i] = 5 | (bits >> (4 * i) << 4) as u8),
        _ => {
            assert!(!scales.is_empty(), "say where {name} has its scales");
            scales.iter().for_each(|&at| block[at..at + 2].copy_from_slice(&bits.to_le_bytes()));
        }
    }
}

fn model(
    (name, number, values, bytes, _): (&str, u32, u64, usize, &[usize]),
    what: &str,
    fill: &dyn Fn(bool, &mut [u8], &mut Random),
) -> Numbers {
    let mut random = Random(u64::from(number) * 1000 + what.len() as u64);
    let mut forge = crate::forge::shaped_llama(9, HIDDEN, 256).filled();
    for tensor in forge.tensors.iter_mut().filter(|t| t.dims.len() == 2) {
        let blocks = (tensor.dims.iter().product::<u64>() / values) as usize;
        let mut data = vec![0; blocks * bytes];
        for (number, block) in data.chunks_exact_mut(bytes).enumerate() {
            fill(number as u64 == UNUSED * HIDDEN / values, block, &mut random);
        }
        (tensor.ggml, tensor.data) = (number, Some(data));
    }
    Numbers { what: format!("{name}: {what}"), forge, answers: false }
}
