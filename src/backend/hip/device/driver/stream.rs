//! Ordered work on a device.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::context::Context;
use super::event::Event;
use super::graph::{Graph, Kept};
use super::memory::{HostWords, PinnedBuffer};
use super::module::Function;
use super::registered::RegisteredPages;
use crate::backend::hip::device::arena::DeviceRange;
use crate::backend::hip::device::binding::{Raw, sys};
use crate::backend::hip::device::error::HipError;
use crate::lock::{Mutex, Rank};
use sys::hipMemcpyKind as Kind;

/// Which of two busy streams runs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamPriority {
    /// Compute steps: a client waits for them.
    High,
    /// Uploads.
    Low,
}

/// Ordered work. Calls return once the work is submitted, unless they say that they wait.
///
/// Device memory must outlive the submitted work that uses it: after an early drop, the arena may give it to another
/// purpose.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: usize,
    /// Objects that captured work uses; `Some` while capturing.
    captured: Mutex<Option<Vec<Kept>>>,
}

/// Shape of a launch as the driver takes it: workgroups, threads per workgroup (both x, y, z) and bytes of dynamic LDS.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub workgroups: [u32; 3],
    pub threads: [u32; 3],
    pub lds: u32,
}

impl Stream {
    pub(in crate::backend::hip) fn new(
        context: &Arc<Context>,
        priority: StreamPriority,
    ) -> Result<Self, HipError> {
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        // SAFETY: two places for integers are passed.
        context.call("hipDeviceGetStreamPriorityRange", |api| unsafe {
            (api.hipDeviceGetStreamPriorityRange)(&raw mut least, &raw mut greatest)
        })?;
        let level = if priority == StreamPriority::High { greatest } else { least };
        let mut handle: sys::hipStream_t = std::ptr::null_mut();
        // No ordering against the default stream, which this backend does not use.
        let flags = sys::hipStreamNonBlocking;
        // SAFETY: a place for one handle is passed.
        context.call("hipStreamCreateWithPriority", |api| unsafe {
            (api.hipStreamCreateWithPriority)(&raw mut handle, flags, level)
        })?;
        Ok(Self {
            context: context.clone(),
            handle: handle.addr(),
            captured: Mutex::new(Rank::Capture, None),
        })
    }

    pub(super) fn raw(&self) -> sys::hipStream_t {
        self.handle as *mut c_void as sys::hipStream_t
    }

    pub(in crate::backend::hip) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Copies `from` to the device and waits until the copy is done.
    ///
    /// # Errors
    /// [`HipError::Refused`] when the lengths differ, [`HipError::Call`], [`HipError::Lost`].
    pub fn upload<T: IntoBytes + Immutable + ?Sized>(
        &self,
        to: DeviceRange<'_>,
        from: &T,
    ) -> Result<(), HipError> {
        let from = from.as_bytes();
        same_length("an upload", to.len(), from.len())?;
        // SAFETY: `from` holds that many bytes and stays borrowed until the wait below is over; `to` is live device memory.
        unsafe { self.copy_raw(to.raw(), from.as_ptr().cast(), from.len(), Kind::hipMemcpyHostToDevice) }?;
        self.synchronize()
    }

    /// Waits for all work submitted so far, then copies from the device.
    ///
    /// # Errors
    /// As [`Stream::upload`].
    pub fn download<T: FromBytes + IntoBytes + ?Sized>(
        &self,
        from: DeviceRange<'_>,
        to: &mut T,
    ) -> Result<(), HipError> {
        let to = to.as_mut_bytes();
        same_length("a download", from.len(), to.len())?;
        // SAFETY: `to` has room for that many bytes and stays borrowed until the wait below is over.
        unsafe { self.copy_raw(to.as_mut_ptr().cast(), from.raw(), to.len(), Kind::hipMemcpyDeviceToHost) }?;
        self.synchronize()
    }

    /// Starts copying bytes of `from`, beginning at `start`, to the device.
    ///
    /// # Errors
    /// [`HipError::Refused`] when the range exceeds the buffer, [`HipError::Call`], [`HipError::Lost`].
    pub fn upload_pinned(
        &self,
        to: DeviceRange<'_>,
        from: &mut PinnedBuffer,
        start: usize,
    ) -> Result<(), HipError> {
        inside("an upload", start, to.len(), from.len())?;
        let source = from.start().wrapping_add(start).cast::<c_void>();
        // SAFETY: the bytes lie within the buffer (checked). The buffer stays alive and untouched until the event
        // recorded next has happened.
        unsafe { self.copy_raw(to.raw(), source, to.len(), Kind::hipMemcpyHostToDevice) }?;
        from.transfer().begun(self)
    }

    /// Starts copying bytes `part` of a file to the device; `from` must hold their pages.
    ///
    /// # Errors
    /// [`HipError::Refused`] when `from` does not hold them or `to` has another length, [`HipError::Call`],
    /// [`HipError::Lost`].
    pub fn upload_registered(
        &self,
        to: DeviceRange<'_>,
        from: &mut RegisteredPages,
        part: &Range<u64>,
    ) -> Result<(), HipError> {
        let source = from.part(part)?;
        same_length("an upload", to.len(), source.len())?;
        // SAFETY: these pages are registered, and mapped for reading until the event recorded next has happened.
        unsafe { self.copy_raw(to.raw(), source.as_ptr().cast(), to.len(), Kind::hipMemcpyHostToDevice) }?;
        from.transfer().begun(self)
    }

    /// Starts copying words, from word number `start`, to the device. Can be captured: the graph keeps the words alive.
    ///
    /// # Errors
    /// As [`Stream::upload_pinned`].
    pub fn upload_words(
        &self,
        to: DeviceRange<'_>,
        from: &Arc<HostWords>,
        start: usize,
    ) -> Result<(), HipError> {
        let source = self.words_at("an upload", from, start, to.len())?;
        // SAFETY: the bytes lie within the words (checked). The words wait for the device's work before they are freed,
        // and a captured graph keeps them alive (`words_at`).
        unsafe { self.copy_raw(to.raw(), source, to.len(), Kind::hipMemcpyHostToDevice) }
    }

    /// Address of `bytes` bytes in `words` from word number `start`. Keeps the words alive while capturing.
    fn words_at(
        &self,
        what: &'static str,
        words: &Arc<HostWords>,
        start: usize,
        bytes: usize,
    ) -> Result<*mut c_void, HipError> {
        let offset = start.saturating_mul(4);
        inside(what, offset, bytes, words.words().len() * 4)?;
        if let Some(kept) = &mut *self.captured.lock() {
            kept.push(words.clone());
        }
        Ok(words.start().wrapping_add(offset).cast())
    }

    /// Starts copying within the device.
    ///
    /// # Errors
    /// As [`Stream::upload`].
    pub fn copy(&self, to: DeviceRange<'_>, from: DeviceRange<'_>) -> Result<(), HipError> {
        same_length("a copy", to.len(), from.len())?;
        // SAFETY: both are live device memory of that many bytes.
        unsafe { self.copy_raw(to.raw(), from.raw(), to.len(), Kind::hipMemcpyDeviceToDevice) }
    }

    /// Starts setting every byte to `value`.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn fill(&self, to: DeviceRange<'_>, value: u8) -> Result<(), HipError> {
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: live device memory of that many bytes.
        self.context.call("hipMemsetAsync", |api| unsafe {
            (api.hipMemsetAsync)(to.raw(), value.into(), to.len(), self.raw())
        })
    }

    /// # Safety
    /// `to` and `from` must be memory of the kind that `kind` names, of `bytes` bytes each. Host code must not touch
    /// them, and they must stay alive, until the copy is done.
    unsafe fn copy_raw(
        &self,
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        kind: Kind,
    ) -> Result<(), HipError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees the memory, see above.
        self.context
            .call("hipMemcpyAsync", |api| unsafe { (api.hipMemcpyAsync)(to, from, bytes, kind, self.raw()) })
    }

    /// Launches a kernel. `slots` holds one argument each. The driver reads as many bytes of a slot as the kernel
    /// declares. That is at most 8 by the rule that all kernels keep.
    ///
    /// # Safety
    /// `slots` must hold the arguments that `function` takes, in order, and `shape` must be one that the kernel and the
    /// device allow. All memory that the kernel reaches through them must be device memory or host words of this
    /// stream's device. It must stay alive, and host code must not touch it except as atomics, until the work is done.
    pub(super) unsafe fn launch_function(
        &self,
        function: &Function,
        shape: Shape,
        slots: &mut [u64],
    ) -> Result<(), HipError> {
        let mut places = [std::ptr::null_mut::<c_void>(); crate::backend::hip::device::launch::MAX_ARGUMENTS];
        if slots.len() > places.len() {
            return Err(HipError::refused(
                "a launch",
                format!("a kernel cannot take {} arguments", slots.len()),
            ));
        }
        for (place, slot) in places.iter_mut().zip(slots) {
            *place = std::ptr::from_mut(slot).cast();
        }
        let ([gx, gy, gz], [bx, by, bz]) = (shape.workgroups, shape.threads);
        // SAFETY: function and stream are live; the places point at the arguments, which the driver copies before it
        // returns. The caller guarantees the rest, see above.
        self.context.call("hipModuleLaunchKernel", |api| unsafe {
            let (places, none) = (places.as_mut_ptr(), std::ptr::null_mut());
            (api.hipModuleLaunchKernel)(
                function.handle(),
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shape.lds,
                self.raw(),
                places,
                none,
            )
        })?;
        function.count();
        Ok(())
    }

    /// Records `event` after all work submitted so far.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn record(&self, event: &Event) -> Result<(), HipError> {
        // SAFETY: both handles are live.
        self.context.call("hipEventRecord", |api| unsafe { (api.hipEventRecord)(event.handle(), self.raw()) })
    }

    /// Work submitted from now on starts after `event`. The host does not wait.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn wait(&self, event: &Event) -> Result<(), HipError> {
        // SAFETY: both handles are live; the driver keeps what it needs of an event that is dropped later.
        self.context.call("hipStreamWaitEvent", |api| unsafe {
            (api.hipStreamWaitEvent)(self.raw(), event.handle(), 0)
        })
    }

    /// Waits until all submitted work is done.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`], also for a failure of earlier work.
    pub fn synchronize(&self) -> Result<(), HipError> {
        // SAFETY: the handle is live.
        self.context.call("hipStreamSynchronize", |api| unsafe { (api.hipStreamSynchronize)(self.raw()) })
    }

    /// Whether all submitted work is done.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn is_done(&self) -> Result<bool, HipError> {
        // SAFETY: the handle is live.
        let code = self.context.code(|api| unsafe { (api.hipStreamQuery)(self.raw()) })?;
        if code == sys::hipError_t::hipErrorNotReady as Raw {
            return Ok(false);
        }
        self.context.check("hipStreamQuery", code).map(|()| true)
    }

    /// Captures what `work` submits to this stream instead of running it. `work` may not allocate device memory or
    /// wait. Other streams join by [`Stream::wait`] and must be joined again before it ends.
    ///
    /// # Errors
    /// Errors of `work`, [`HipError::Call`], [`HipError::Lost`]. The stream is then as before.
    pub fn capture<E: From<HipError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        // Thread-local mode leaves other threads alone: uploads allocate memory meanwhile.
        let mode = sys::hipStreamCaptureMode::hipStreamCaptureModeThreadLocal;
        self.context.call("hipStreamBeginCapture", |api| {
            // SAFETY: the handle is live.
            unsafe { (api.hipStreamBeginCapture)(self.raw(), mode) }
        })?;
        *self.captured.lock() = Some(Vec::new());
        let done = work();
        let kept = self.captured.lock().take().unwrap_or_default();
        let mut handle: sys::hipGraph_t = std::ptr::null_mut();
        // SAFETY: the handle is live, a place for one handle is passed.
        let ended = self.context.call("hipStreamEndCapture", |api| unsafe {
            (api.hipStreamEndCapture)(self.raw(), &raw mut handle)
        });
        // Own the graph at once: a failed `work` may still have left one.
        let graph =
            (!handle.is_null()).then(|| Graph { context: self.context.clone(), handle: handle.addr(), kept });
        done?;
        ended?;
        graph.ok_or_else(|| HipError::refused("a capture", "the driver returned no graph").into())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the handle came from the driver and is freed once, here; submitted work continues.
        self.context.give_back("hipStreamDestroy", |api| unsafe { (api.hipStreamDestroy)(self.raw()) });
    }
}

fn same_length(what: &'static str, to: usize, from: usize) -> Result<(), HipError> {
    if to == from {
        Ok(())
    } else {
        Err(HipError::refused(what, format!("{from} bytes do not match a target of {to} bytes")))
    }
}

fn inside(what: &'static str, start: usize, bytes: usize, all: usize) -> Result<(), HipError> {
    if start.checked_add(bytes).is_some_and(|end| end <= all) {
        Ok(())
    } else {
        Err(HipError::refused(what, format!("{bytes} bytes at offset {start} do not fit in {all} bytes")))
    }
}
