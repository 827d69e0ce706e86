//! The part of a device that all its objects share: its number, its functions, and whether it is lost.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::runtime::{DeviceDescription, Runtime, failure};
use crate::backend::hip::device::binding::{Api, Raw, sys};
use crate::backend::hip::device::error::{CallFailure, HipError, means_lost};

thread_local! {
    /// The context of the calling thread's current device; the driver keeps one device per thread.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Forgets the cached device, because other code than [`Context::code`] set it.
pub(super) fn forget_current() {
    CURRENT.set(0);
}

/// Next context number, from 1. Two contexts may belong to one device, or to two runtimes.
static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Debug)]
pub(in crate::backend::hip) struct Context {
    runtime: Runtime,
    description: DeviceDescription,
    number: u64,
    lost: OnceLock<CallFailure>,
}

impl Context {
    pub fn new(runtime: &Runtime, index: u32) -> Result<Self, HipError> {
        let description = runtime.describe(index)?;
        Ok(Self {
            runtime: runtime.clone(),
            description,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            lost: OnceLock::new(),
        })
    }

    pub fn description(&self) -> &DeviceDescription {
        &self.description
    }

    pub fn index(&self) -> u32 {
        self.description.index
    }

    /// Fails at once when the device is already lost.
    pub fn alive(&self) -> Result<(), HipError> {
        match self.lost.get() {
            Some(failure) => Err(HipError::Lost { failure: failure.clone() }),
            None => Ok(()),
        }
    }

    /// Calls the driver with this device as the thread's current one.
    pub fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Raw) -> Result<(), HipError> {
        let code = self.code(call)?;
        self.check(name, code)
    }

    /// Like [`Context::call`], for calls whose code means more than success or failure.
    pub fn code(&self, call: impl FnOnce(&Api) -> Raw) -> Result<Raw, HipError> {
        self.alive()?;
        if CURRENT.get() != self.number {
            let device = self.index() as c_int;
            // SAFETY: a number is passed.
            let code = unsafe { (self.runtime.api().hipSetDevice)(device) };
            self.check("hipSetDevice", code)?;
            CURRENT.set(self.number);
        }
        Ok(call(self.runtime.api()))
    }

    pub fn check(&self, name: &'static str, code: Raw) -> Result<(), HipError> {
        if code == 0 {
            return Ok(());
        }
        let failure = failure(self.runtime.api(), Some(self.index()), name, code);
        if means_lost(code) {
            let failure = self.lost.get_or_init(|| failure).clone();
            return Err(HipError::Lost { failure });
        }
        Err(HipError::Call { failure })
    }

    /// Marks the device as lost when it does not answer and the driver has not reported it. `why` replaces the name of
    /// the code.
    pub fn lose(&self, call: &'static str, why: &str) -> HipError {
        let code = sys::hipError_t::hipErrorLaunchTimeOut as Raw;
        let failure = || CallFailure { device: Some(self.index()), call, code, name: why.to_owned() };
        HipError::Lost { failure: self.lost.get_or_init(failure).clone() }
    }

    /// Frees a driver object. A failure is only logged, and a lost device is skipped.
    pub fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Raw) {
        if let Err(error) = self.call(name, call) {
            tracing::debug!(%error, "the driver did not free an object");
        }
    }

    /// Free and total bytes of the device's memory.
    pub fn memory(&self) -> Result<(u64, u64), HipError> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: two places for sizes are passed.
        self.call("hipMemGetInfo", |api| unsafe { (api.hipMemGetInfo)(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Waits for all work on the device.
    pub fn synchronize(&self) -> Result<(), HipError> {
        // SAFETY: nothing is passed.
        self.call("hipDeviceSynchronize", |api| unsafe { (api.hipDeviceSynchronize)() })
    }
}
