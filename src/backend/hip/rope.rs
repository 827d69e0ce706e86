//! Cosines and sines of all positions so far, on the device.

use super::{Buffer, Device, Owner, Stream};
use crate::backend::{BackendError, RopeAngles, RopeSpec};
use crate::tensor::LazyTensor;

/// Positions made at first: some 5 ms of the host's time for heads of 128.
const POSITIONS_MIN: u32 = 2048;

/// The rotary table of one model: `f32[positions][dims / 2][2]`.
#[derive(Debug, Default)]
pub struct RopeTable {
    made: Option<Made>,
}

#[derive(Debug)]
struct Made {
    factors: Option<LazyTensor>,
    positions: u32,
    buffer: Buffer,
}

impl RopeTable {
    /// The table, made anew when it ends before `positions` or was made with other factors. `read` gives the factors'
    /// values. True when it moved. No work that uses the old one may be under way then, which is why `settle` comes first.
    ///
    /// # Errors
    /// [`BackendError`] of the device, of `read` and `settle`.
    pub fn cover(
        &mut self,
        device: &Device,
        stream: &Stream,
        spec: &RopeSpec,
        positions: u32,
        factors: Option<&LazyTensor>,
    ) -> Result<(&Buffer, bool), BackendError> {
        let fits = |made: &Made| {
            let same = match (&made.factors, factors) {
                (None, None) => true,
                (Some(a), Some(b)) => a.same(b),
                _ => false,
            };
            same && made.positions >= positions
        };
        let moved = !self.made.as_ref().is_some_and(fits);
        if moved {
            let room = positions.max(POSITIONS_MIN).checked_next_power_of_two();
            let room = room.ok_or(BackendError::Batch("a position past 2^31"))?;
            let values = factors.map(floats).transpose()?;
            let angles = RopeAngles::new(spec, values.as_deref());
            let mut table = Vec::with_capacity(room as usize * angles.pairs());
            (0..room).for_each(|position| angles.append(position, &mut table));
            let bytes = table.len() * size_of::<[f32; 2]>();
            let buffer = device.take(bytes, Owner::Scratch)?;
            if bytes > 0 {
                stream.upload(buffer.all(), table.as_slice())?; // waits, so nothing uses the old one any more
            }
            self.made = Some(Made { factors: factors.cloned(), positions: room, buffer });
        }
        let made = self.made.as_ref().ok_or(BackendError::Batch("no rotary table"))?;
        Ok((&made.buffer, moved))
    }
}

/// The values of an F32 vector of the file.
fn floats(tensor: &LazyTensor) -> Result<Vec<f32>, BackendError> {
    let (words, rest) = tensor.bytes().as_chunks::<4>();
    if !rest.is_empty() || tensor.dtype() != crate::tensor::DType::F32 {
        let why = "rotary factors have to be F32".to_owned();
        return Err(BackendError::Upload { tensor: tensor.name().to_owned(), why });
    }
    Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}
