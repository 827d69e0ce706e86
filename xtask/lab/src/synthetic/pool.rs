//! Random weights of each type, distributed like trained ones: all tensors take pieces of a few MiB.

use rocmforge::tensor::DType;

use super::shape::Fill;

/// Bytes of random blocks per type. Each tensor repeats them from a different start.
const POOL_BYTES: usize = 8 << 20;

/// Bytes from which tensors of one kind are written.
pub struct Pool {
    dtype: DType,
    fill: Fill,
    pub bytes: Vec<u8>,
}

/// All pools needed so far.
#[derive(Default)]
pub struct Pools(Vec<Pool>);

impl Pools {
    /// The pool for tensors of this kind.
    pub fn of(&mut self, dtype: DType, fill: Fill) -> &Pool {
        let found = self.0.iter().position(|pool| (pool.dtype, pool.fill) == (dtype, fill));
        let index = found.unwrap_or_else(|| {
            let bytes = match fill {
                Fill::Random => weights(dtype),
                Fill::Ones => 1f32.to_le_bytes().repeat(POOL_BYTES / 4),
                Fill::Zeros => vec![0; POOL_BYTES / dtype.block_bytes() * dtype.block_bytes()],
                Fill::Negative => (-0.1f32).to_le_bytes().repeat(POOL_BYTES / 4),
            };
            self.0.push(Pool { dtype, fill, bytes });
            self.0.len() - 1
        });
        &self.0[index]
    }
}

/// Blocks whose weights have a mean near 0 and a standard deviation near 0.015, one over the root of 4096.
fn weights(dtype: DType) -> Vec<u8> {
    /// Half-precision 2.0e-4: codes have a deviation of 74.
    const Q8_0_SCALE: [u8; 2] = 0x0a8e_u16.to_le_bytes();
    /// Half-precision 1.0e-4: codes have a deviation of 4.6, scales a mean of 32.
    const Q4_K_SCALE: [u8; 2] = 0x068e_u16.to_le_bytes();
    /// 7.5 times [`Q4_K_SCALE`]: 7.5 is the mean code.
    const Q4_K_MIN: [u8; 2] = 0x1225_u16.to_le_bytes();
    /// Half-precision 1.1e-5: codes have a deviation of 18, scales of 74.
    const Q6_K_SCALE: [u8; 2] = 0x00b8_u16.to_le_bytes();
    let block = dtype.block_bytes();
    let mut bytes = noise(POOL_BYTES / block * block);
    for one in bytes.chunks_exact_mut(block) {
        match dtype {
            DType::Q8_0 => one[..2].copy_from_slice(&Q8_0_SCALE),
            DType::Q4_K => {
                one[..2].copy_from_slice(&Q4_K_SCALE);
                one[2..4].copy_from_slice(&Q4_K_MIN);
            }
            DType::Q6_K => one[208..].copy_from_slice(&Q6_K_SCALE),
            DType::F16 => {
                // A sign, 1/128 or 1/64, and a fraction: the deviation is 0.018.
                let bits = u16::from_le_bytes([one[0], one[1]]) & 0x87ff | 0x2000;
                one.copy_from_slice(&bits.to_le_bytes());
            }
            // Routers, as f32.
            _ => {
                let share = f32::from(i16::from_le_bytes([one[0], one[1]])) / 32_768.0;
                one.copy_from_slice(&(share * 0.026).to_le_bytes());
            }
        }
    }
    bytes
}

/// Bytes of xorshift64*.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut bytes: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| draw().to_le_bytes()).collect();
    bytes.truncate(count);
    bytes
}
