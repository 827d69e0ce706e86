//! A device as all its objects share it: which, through what functions, and whether it is still there.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::binding::{Api, Raw, sys};
use super::super::error::{CallFailure, HipError, means_lost};
use super::runtime::{DeviceDescription, Runtime, failure};

thread_local! {
    /// The context whose device is the calling thread's: the driver keeps one per thread.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// The calling thread's device was set by other means than [`Context::code`].
pub(super) fn forget_current() {
    CURRENT.set(0);
}

/// Numbers contexts, from 1: two of them may be of the same device, or of two runtimes.
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

    /// An error at once when the device was lost before.
    pub fn alive(&self) -> Result<(), HipError> {
        match self.lost.get() {
            Some(failure) => Err(HipError::Lost { failure: failure.clone() }),
            None => Ok(()),
        }
    }

    /// Calls the driver with this device as the thread's own.
    pub fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Raw) -> Result<(), HipError> {
        let code = self.code(call)?;
        self.check(name, code)
    }

    /// As [`Context::call`] for calls whose codes say more than success and failure.
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

    /// Counts the device as lost without the driver having said so: it does not answer. `why` stands where the name of its
    /// code would.
    pub fn lose(&self, call: &'static str, why: &str) -> HipError {
        let code = sys::hipError_t::hipErrorLaunchTimeOut as Raw;
        let failure = || CallFailure { device: Some(self.index()), call, code, name: why.to_owned() };
        HipError::Lost { failure: self.lost.get_or_init(failure).clone() }
    }

    /// Gives something back. There is nobody to tell of a failure; a lost device has nothing to give back to.
    pub fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Raw) {
        if let Err(error) = self.call(name, call) {
            tracing::debug!(%error, "something was not given back");
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
