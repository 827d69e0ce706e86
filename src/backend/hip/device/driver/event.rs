//! Points in a stream's work.

use std::ffi::c_void;
use std::sync::Arc;

use super::context::Context;
use crate::backend::hip::device::binding::{Raw, sys};
use crate::backend::hip::device::error::HipError;

/// A point in a stream's work that the host and other streams can wait for.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: usize,
}

impl Event {
    pub(in crate::backend::hip) fn new(context: &Arc<Context>, timing: bool) -> Result<Self, HipError> {
        let mut handle: sys::hipEvent_t = std::ptr::null_mut();
        let flags = if timing { sys::hipEventDefault } else { sys::hipEventDisableTiming };
        // SAFETY: a place for one handle is passed.
        context.call("hipEventCreateWithFlags", |api| unsafe {
            (api.hipEventCreateWithFlags)(&raw mut handle, flags)
        })?;
        Ok(Self { context: context.clone(), handle: handle.addr() })
    }

    pub(super) fn handle(&self) -> sys::hipEvent_t {
        self.handle as *mut c_void as sys::hipEvent_t
    }

    /// Whether the work before the event is done. An event that was never recorded is done.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn is_done(&self) -> Result<bool, HipError> {
        // SAFETY: the handle is live until `self` is dropped.
        let code = self.context.code(|api| unsafe { (api.hipEventQuery)(self.handle()) })?;
        if code == sys::hipError_t::hipErrorNotReady as Raw {
            return Ok(false);
        }
        self.context.check("hipEventQuery", code).map(|()| true)
    }

    /// Waits until the work before the event is done.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn synchronize(&self) -> Result<(), HipError> {
        // SAFETY: as above.
        self.context.call("hipEventSynchronize", |api| unsafe { (api.hipEventSynchronize)(self.handle()) })
    }

    /// Milliseconds from `earlier` to this event. Both must be made for timing, recorded and done.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, HipError> {
        let mut time = 0f32;
        // SAFETY: both handles are live; a place for one number is passed.
        self.context.call("hipEventElapsedTime", |api| unsafe {
            (api.hipEventElapsedTime)(&raw mut time, earlier.handle(), self.handle())
        })?;
        Ok(time)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle came from the driver and is freed once, here. Work recorded before continues.
        self.context.give_back("hipEventDestroy", |api| unsafe { (api.hipEventDestroy)(self.handle()) });
    }
}
