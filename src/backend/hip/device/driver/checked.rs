//! Launches: the only way to run a kernel. All that the host knows is checked here before the driver sees it.

use std::sync::Arc;

use super::stream::{Shape, Stream};
use crate::backend::hip::device::Device;
use crate::backend::hip::device::error::HipError;
use crate::backend::hip::device::launch::{Grid, Slots};
use crate::backend::hip::kernels::{Arguments, Kernel};

impl Device {
    /// Launches `kernel` on `stream`. Buffers behind the arguments must live until the work is done.
    ///
    /// # Errors
    /// [`HipError::OutOfBounds`] when an argument has fewer elements than the launch may touch.
    /// [`HipError::Refused`] for an invalid shape, [`HipError::Object`] when the code object lacks the kernel,
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn launch<A: Arguments>(
        &self,
        stream: &Stream,
        kernel: Kernel<A>,
        grid: Grid,
        arguments: &A,
    ) -> Result<(), HipError> {
        let device = self.description();
        if let Some(why) = grid.fault(device.wave, device.threads_max, device.lds_max) {
            return Err(HipError::refused(kernel.name(), why));
        }
        if !Arc::ptr_eq(stream.context(), self.context()) {
            return Err(HipError::refused(kernel.name(), "the stream belongs to another device"));
        }
        kernel.check(&grid, arguments)?;
        let function = self.function(kernel.name())?;
        let mut slots = Slots::default();
        arguments.put(&mut slots);
        let shape = Shape { workgroups: grid.workgroups, threads: [grid.threads, 1, 1], lds: grid.lds_bytes };
        // SAFETY:
        // - The function is the kernel's, and the slots are its declaration's. Only `kernels` names a `Kernel`, and
        //   `cargo xtask kernels` compares all declarations with the code objects.
        // - `Grid::fault` found the shape within the device's limits.
        // - `Kernel::check` compared each pointer's length with the extent that the declaration gives. Only buffers and
        //   host words make pointers, with their true length.
        // - Numbers in device memory (row and page numbers, expert tables) are written by `step`, which keeps them
        //   inside what they index.
        // - Memory outlives the work on it. `HipBackend` waits for its stream before it drops a model, a page or itself.
        //   `step` replaces a buffer after such a wait only. An upload into memory with earlier users waits for their
        //   event, and host words wait for the device before they are freed.
        unsafe { stream.launch_function(function, shape, slots.as_mut()) }
    }
}
