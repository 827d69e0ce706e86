//! Memory from the driver: device memory and pinned host memory.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::context::Context;
use super::transfer::Transfer;
use crate::backend::hip::device::binding::sys;
use crate::backend::hip::device::error::HipError;
use crate::backend::hip::device::pointer::DevicePtr;

/// Device memory allocated by the driver.
#[derive(Debug)]
pub(in crate::backend::hip) struct Chunk {
    context: Arc<Context>,
    address: u64,
}

impl Chunk {
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, HipError> {
        let mut place: *mut c_void = std::ptr::null_mut();
        // SAFETY: a place for one pointer is passed.
        context.call("hipMalloc", |api| unsafe { (api.hipMalloc)(&raw mut place, bytes) })?;
        if place.is_null() {
            return Err(HipError::refused(
                "hipMalloc",
                format!("the driver returned no address for {bytes} bytes"),
            ));
        }
        Ok(Self { context: context.clone(), address: place.addr() as u64 })
    }

    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let place = self.address as *mut c_void;
        // SAFETY: the address came from hipMalloc and is freed once, here. The driver waits for work that uses it.
        self.context.give_back("hipFree", |api| unsafe { (api.hipFree)(place) });
    }
}

/// Pinned host memory allocated by the driver.
#[derive(Debug)]
struct Pinned {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: this is plain memory of the process, freed through a driver that any thread may call. The two purposes below
// decide which thread may touch its bytes, and when.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(context: &Arc<Context>, bytes: usize, flags: u32) -> Result<Self, HipError> {
        let mut place: *mut c_void = std::ptr::null_mut();
        // SAFETY: a place for one pointer is passed.
        context.call("hipHostMalloc", |api| unsafe {
            (api.hipHostMalloc)(&raw mut place, bytes.max(1), flags)
        })?;
        let start = NonNull::new(place.cast::<u8>()).filter(|start| start.addr().get() % 64 == 0);
        let start = start.ok_or_else(|| {
            HipError::refused(
                "hipHostMalloc",
                format!("the driver returned no 64-byte aligned address for {bytes} bytes"),
            )
        })?;
        // SAFETY: the driver returned `bytes` bytes at `start`, and nothing else refers to them yet.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), start, bytes })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let place = self.start.as_ptr().cast::<c_void>();
        // SAFETY: the address came from hipHostMalloc and is freed once, here.
        self.context.give_back("hipHostFree", |api| unsafe { (api.hipHostFree)(place) });
    }
}

/// Pinned host memory for transfers. Its bytes are accessible only while no transfer of it is in flight: each transfer
/// records an event, and access waits for that event.
#[derive(Debug)]
pub struct PinnedBuffer {
    memory: Pinned,
    transfer: Transfer,
}

impl PinnedBuffer {
    pub(in crate::backend::hip) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, HipError> {
        let memory = Pinned::new(context, bytes, sys::hipHostMallocDefault)?;
        Ok(Self { memory, transfer: Transfer::new(context)? })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.memory.bytes
    }

    /// Whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.memory.bytes == 0
    }

    /// Whether the last transfer is done, so that [`PinnedBuffer::bytes_mut`] does not wait.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn is_idle(&self) -> Result<bool, HipError> {
        self.transfer.is_over()
    }

    /// The bytes, after waiting for the last transfer.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], HipError> {
        self.transfer.wait()?;
        // SAFETY: `bytes` bytes lie there, written at least once. No transfer is in flight, and starting one takes
        // `&mut`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.start.as_ptr(), self.memory.bytes) })
    }

    /// Address of the bytes, for a transfer that the caller reports to [`PinnedBuffer::transfer`].
    pub(super) fn start(&self) -> *mut u8 {
        self.memory.start.as_ptr()
    }

    pub(super) fn transfer(&mut self) -> &mut Transfer {
        &mut self.transfer
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.transfer.end(); // the memory is freed right after
    }
}

/// Pinned host memory that host and device access at the same time, as words: a step's inputs and its answers.
///
/// The host reads and writes the words as atomics, so a concurrent device write changes values and nothing else.
#[derive(Debug)]
pub struct HostWords {
    memory: Pinned,
    device: u64,
}

// SAFETY: shared access reaches the memory as `AtomicU32` only.
unsafe impl Sync for HostWords {}

impl HostWords {
    pub(in crate::backend::hip) fn new(context: &Arc<Context>, words: usize) -> Result<Self, HipError> {
        let bytes = words.checked_mul(4).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| HipError::refused("host words", format!("{words} words")))?;
        let memory = Pinned::new(context, bytes, sys::hipHostMallocMapped)?;
        let mut device: *mut c_void = std::ptr::null_mut();
        let host = memory.start.as_ptr().cast::<c_void>();
        // SAFETY: `host` came from hipHostMalloc with the flag that this call asks for; a place for one pointer is passed.
        context.call("hipHostGetDevicePointer", |api| unsafe {
            (api.hipHostGetDevicePointer)(&raw mut device, host, 0)
        })?;
        Ok(Self { memory, device: device.addr() as u64 })
    }

    /// The words.
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: the memory is aligned to 64 bytes, was zeroed, lives as long as `self`, and is only ever seen as atomics.
        unsafe { std::slice::from_raw_parts(self.memory.start.as_ptr().cast(), self.memory.bytes / 4) }
    }

    /// Device address of the words from number `index` on.
    ///
    /// # Errors
    /// [`HipError::Refused`] for an index past the end.
    pub fn device_ptr(&self, index: usize) -> Result<DevicePtr<u32>, HipError> {
        let all = self.words().len();
        if index >= all {
            return Err(HipError::refused("host words", format!("there is no word {index}, only {all}")));
        }
        Ok(DevicePtr::new(self.device + index as u64 * 4, (all - index) as u64 * 4))
    }

    /// Host address of the words, for copies.
    pub(super) fn start(&self) -> *mut u8 {
        self.memory.start.as_ptr()
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        // The memory is freed right after, so copies and kernels that use it must be done first.
        if let Err(error) = self.memory.context.synchronize() {
            tracing::debug!(%error, "waiting for work on host words failed");
        }
    }
}
