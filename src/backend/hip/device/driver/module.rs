//! Loaded code objects and their kernels.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::context::Context;
use crate::backend::hip::device::binding::{Raw, sys};
use crate::backend::hip::device::error::HipError;

/// Code loaded on a device, from one or more objects, with the requested kernels.
#[derive(Debug)]
pub(in crate::backend::hip) struct Module {
    context: Arc<Context>,
    handles: Vec<usize>,
    functions: HashMap<&'static str, Function>,
}

/// A kernel in a loaded module, with its count of launches and captures.
#[derive(Debug)]
pub(in crate::backend::hip) struct Function {
    handle: usize,
    launches: AtomicU64,
}

impl Module {
    /// Loads `images` and looks up each of `names` in them.
    pub fn load(
        context: &Arc<Context>,
        images: &[Vec<u8>],
        names: impl Iterator<Item = &'static str>,
    ) -> Result<Self, HipError> {
        let mut module = Self { context: context.clone(), handles: Vec::new(), functions: HashMap::new() };
        let mut missing: Vec<&'static str> = names.collect();
        for image in images {
            let handle = Self::load_one(context, image)?;
            module.handles.push(handle);
            for name in std::mem::take(&mut missing) {
                match Self::find(context, handle, name)? {
                    Some(function) => drop(module.functions.insert(name, function)),
                    None => missing.push(name),
                }
            }
        }
        Ok(module)
    }

    fn load_one(context: &Context, image: &[u8]) -> Result<usize, HipError> {
        let mut handle: sys::hipModule_t = std::ptr::null_mut();
        // Word-aligned, because the driver reads headers in place. The headers give the length.
        let words: Vec<u64> = image
            .chunks(8)
            .map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_ne_bytes(word)
            })
            .collect();
        let start = words.as_ptr().cast::<c_void>();
        context.call("hipModuleLoadData", |api| {
            // SAFETY: `start` is the copy of a whole code object, ours or named by the administrator; the driver copies it.
            unsafe { (api.hipModuleLoadData)(&raw mut handle, start) }
        })?;
        Ok(handle.addr())
    }

    fn find(context: &Context, module: usize, name: &str) -> Result<Option<Function>, HipError> {
        let text = CString::new(name)
            .map_err(|_| HipError::refused("a kernel's name", "it contains a zero byte"))?;
        let mut handle: sys::hipFunction_t = std::ptr::null_mut();
        let module = module as *mut c_void as sys::hipModule_t;
        // SAFETY: the module is loaded, the name ends with a zero, a place for one handle is passed.
        let code = context
            .code(|api| unsafe { (api.hipModuleGetFunction)(&raw mut handle, module, text.as_ptr()) })?;
        if code == sys::hipError_t::hipErrorNotFound as Raw {
            return Ok(None);
        }
        context.check("hipModuleGetFunction", code)?;
        Ok(Some(Function { handle: handle.addr(), launches: AtomicU64::new(0) }))
    }

    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.get(name)
    }

    /// Kernels and how often each was launched or captured.
    pub fn launches(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.functions.iter().map(|(name, function)| (*name, function.launches.load(Ordering::Relaxed)))
    }
}

impl Function {
    pub(super) fn handle(&self) -> sys::hipFunction_t {
        self.handle as *mut c_void as sys::hipFunction_t
    }

    pub(super) fn count(&self) {
        self.launches.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        for handle in &self.handles {
            let module = *handle as *mut c_void as sys::hipModule_t;
            // SAFETY: the handle came from the driver and is freed once, here; its functions are dropped with `self`.
            self.context.give_back("hipModuleUnload", |api| unsafe { (api.hipModuleUnload)(module) });
        }
    }
}
