//! The device that tests run kernels on: the requested one, never another.

use std::sync::OnceLock;

use rocmforge::backend::hip::{ArenaOptions, Buffer, Device, DeviceOptions, Purpose, Stream, StreamPriority};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::gpu;
pub use crate::gpu::{is_lookalike, library};

/// A device and a stream on it.
pub struct Rig {
    pub device: Device,
    pub stream: Stream,
}

/// The rig of this process; `None` after [`skip`]. Each buffer is its own allocation, so that the look-alike detects
/// every access outside it.
pub fn rig() -> Option<&'static Rig> {
    static RIG: OnceLock<Option<Rig>> = OnceLock::new();
    RIG.get_or_init(|| open(ArenaOptions { chunk_bytes: 0, ..ArenaOptions::default() })).as_ref()
}

/// A separate rig with these options; `None` after [`skip`].
pub fn rig_with(arena: ArenaOptions) -> Option<Rig> {
    open(arena)
}

fn open(arena: ArenaOptions) -> Option<Rig> {
    let runtime = gpu::runtime()?;
    let device = Device::open(&runtime, &DeviceOptions { arena, ..DeviceOptions::default() }).unwrap();
    let stream = device.stream(StreamPriority::High).unwrap();
    Some(Rig { device, stream })
}

impl Rig {
    /// Device memory filled with these values.
    pub fn upload<T: IntoBytes + Immutable>(&self, values: &[T]) -> Buffer {
        let buffer = self.device.take(size_of_val(values), Purpose::Scratch).unwrap();
        self.stream.upload(buffer.all(), values).unwrap();
        buffer
    }

    /// Device memory for `count` values, filled with 0xff bytes: NaN as a float, so that an unwritten value shows.
    pub fn output<T>(&self, count: usize) -> Buffer {
        let buffer = self.device.take(count * size_of::<T>(), Purpose::Scratch).unwrap();
        self.stream.fill(buffer.all(), 0xff).unwrap();
        buffer
    }

    /// The buffer's content after all work on the stream.
    pub fn download<T: FromBytes + IntoBytes + Clone>(&self, buffer: &Buffer) -> Vec<T> {
        assert_eq!(buffer.len() % size_of::<T>(), 0);
        let mut values = vec![T::new_zeroed(); buffer.len() / size_of::<T>()];
        self.stream.download(buffer.all(), values.as_mut_slice()).unwrap();
        values
    }
}
