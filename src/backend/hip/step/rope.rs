//! Rotary tables on the device: cosines and sines of all positions so far.

use crate::backend::hip::{Buffer, Device, DevicePtr, Purpose, Stream};
use crate::backend::{BackendError, cause};
use crate::program::{Program, Rope, RopeAngles};
use crate::tensor::{DType, LazyTensor};

/// Positions of the first table: about 5 ms of host time for heads of 128.
const POSITIONS_MIN: u32 = 2048;

/// The rotary tables of one model, by number of the rotary embedding; each is `f32[positions][dims / 2][2]`.
#[derive(Debug, Default)]
pub struct RopeTables {
    made: Vec<Made>,
    addresses: Vec<DevicePtr<f32>>,
}

#[derive(Debug)]
struct Made {
    positions: u32,
    _buffer: Buffer,
}

impl RopeTables {
    /// Rebuilds tables that end before `positions`. Waits until no work uses the old ones.
    ///
    /// # Errors
    /// [`BackendError`] of the device, and of rotary factors that are not F32.
    pub fn cover(
        &mut self,
        device: &Device,
        stream: &Stream,
        program: &Program,
        positions: u32,
    ) -> Result<(), BackendError> {
        for (number, rope) in program.ropes().iter().enumerate() {
            if self.made.get(number).is_some_and(|made| made.positions >= positions) {
                continue;
            }
            let (made, address) = make(device, stream, program, rope, positions)?;
            match (self.made.get_mut(number), self.addresses.get_mut(number)) {
                (Some(old), Some(old_address)) => (*old, *old_address) = (made, address),
                _ => {
                    self.made.push(made);
                    self.addresses.push(address);
                }
            }
        }
        Ok(())
    }

    /// Device addresses of the tables.
    pub fn addresses(&self) -> &[DevicePtr<f32>] {
        &self.addresses
    }
}

fn make(
    device: &Device,
    stream: &Stream,
    program: &Program,
    rope: &Rope,
    positions: u32,
) -> Result<(Made, DevicePtr<f32>), BackendError> {
    let room = positions.max(POSITIONS_MIN).checked_next_power_of_two();
    let room = room.ok_or(BackendError::Batch("a position is past 2^31"))?;
    let factors = rope.factors.and_then(|id| program.tensor(id));
    let factors = factors.map(|tensor| floats(&tensor.lazy)).transpose()?;
    let angles = RopeAngles::new(&rope.spec, factors.as_deref());
    let mut table = Vec::with_capacity(room as usize * angles.pairs());
    (0..room).for_each(|position| angles.append(position, &mut table));
    let bytes = table.len() * size_of::<[f32; 2]>();
    let buffer = device.take(bytes, Purpose::Scratch)?;
    if bytes > 0 {
        // The upload waits for the stream, so no kernel still reads the old table.
        stream.upload(buffer.all(), table.as_slice())?;
    }
    let address = buffer.ptr();
    Ok((Made { positions: room, _buffer: buffer }, address))
}

/// The values of an F32 tensor in the file.
fn floats(tensor: &LazyTensor) -> Result<Vec<f32>, BackendError> {
    let (words, rest) = tensor.bytes().as_chunks::<4>();
    if !rest.is_empty() || tensor.dtype() != DType::F32 {
        let why = "the rotary factors are not F32".to_owned();
        return Err(BackendError::Upload { tensor: tensor.name().to_owned(), source: cause(why) });
    }
    Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}
