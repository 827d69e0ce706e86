//! A device with its memory and its code.

use std::ops::Range;
use std::sync::Arc;

use super::arena::{Arena, ArenaOptions, Buffer, Ledger, Owner};
use super::driver::{
    Context, DeviceDescription, Event, Function, HostWords, Module, PinnedBuffer, RegisteredPages, Runtime,
    Stream, StreamPriority,
};
use super::error::HipError;
use super::kernels;
use super::objects::{CodeObject, CodeSource, ObjectError};
use crate::tensor::MappedFile;

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// Which.
    pub index: u32,
    /// How its memory is asked for.
    pub arena: ArenaOptions,
    /// Where its code comes from.
    pub code: CodeSource,
}

/// An open device. Cheap to clone; all clones are the same device, and what they make keeps it open.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    arena: Arc<Arena>,
    module: Module,
    /// Which code object was chosen.
    code: String,
}

impl Device {
    /// Opens a device and loads the code made for it.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn open(runtime: &Runtime, options: &DeviceOptions) -> Result<Self, HipError> {
        let context = Arc::new(Context::new(runtime, options.index)?);
        let object = CodeObject::choose(&options.code, context.description().arch_name())?;
        let names = kernels::declared().map(|kernel| kernel.name);
        let module = Module::load(&context, &object.images, names)?;
        let arena = Arc::new(Arena::new(&context, options.arena));
        Ok(Self { inner: Arc::new(Inner { context, arena, module, code: object.name }) })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.inner.context
    }

    pub(super) fn function(&self, name: &'static str) -> Result<&Function, HipError> {
        let missing = || ObjectError::NoKernel { kernel: name, object: self.inner.code.clone() };
        Ok(self.inner.module.function(name).ok_or_else(missing)?)
    }

    /// What it is.
    pub fn description(&self) -> &DeviceDescription {
        self.inner.context.description()
    }

    /// Which code object runs on it: where from, and for what.
    pub fn code(&self) -> &str {
        &self.inner.code
    }

    /// An error, at once, when the device was lost.
    ///
    /// # Errors
    /// [`HipError::Lost`].
    pub fn alive(&self) -> Result<(), HipError> {
        self.inner.context.alive()
    }

    /// Counts it as lost although the driver has not said so: `call` got no answer.
    pub fn lose(&self, call: &'static str, why: &str) -> HipError {
        self.inner.context.lose(call, why)
    }

    /// Its memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.inner.arena
    }

    /// Who has how much of its memory.
    pub fn ledger(&self) -> Ledger {
        self.inner.arena.ledger()
    }

    /// `bytes` bytes of its memory.
    ///
    /// # Errors
    /// As [`Arena::take`].
    pub fn take(&self, bytes: usize, owner: Owner) -> Result<Buffer, HipError> {
        self.inner.arena.take(bytes, owner)
    }

    /// Pinned host memory for transfers.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn pinned(&self, bytes: usize) -> Result<PinnedBuffer, HipError> {
        PinnedBuffer::new(&self.inner.context, bytes)
    }

    /// Whole pages of a mapped file, pinned for transfers where they lie.
    ///
    /// # Errors
    /// [`HipError::Refused`] for what are not whole pages of it, [`HipError::Call`] where the driver does not pin such pages or
    /// the file has lost them, [`HipError::Lost`].
    pub fn register(&self, file: &Arc<MappedFile>, pages: Range<u64>) -> Result<RegisteredPages, HipError> {
        RegisteredPages::new(&self.inner.context, file, pages)
    }

    /// Host words that the device sees.
    ///
    /// # Errors
    /// [`HipError::Refused`] for none, [`HipError::Call`], [`HipError::Lost`].
    pub fn host_words(&self, words: usize) -> Result<Arc<HostWords>, HipError> {
        HostWords::new(&self.inner.context, words).map(Arc::new)
    }

    /// A new stream.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn stream(&self, priority: StreamPriority) -> Result<Stream, HipError> {
        Stream::new(&self.inner.context, priority)
    }

    /// An event; only one made for `timing` tells times.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn event(&self, timing: bool) -> Result<Event, HipError> {
        Event::new(&self.inner.context, timing)
    }

    /// Free and total bytes of the device's memory, as the driver counts, all programs together.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn memory(&self) -> Result<(u64, u64), HipError> {
        self.inner.context.memory()
    }

    /// Waits for all its work.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn synchronize(&self) -> Result<(), HipError> {
        self.inner.context.synchronize()
    }

    /// Its kernels and how often each was launched or captured.
    pub fn launches(&self) -> Vec<(&'static str, u64)> {
        let mut all: Vec<_> = self.inner.module.launches().collect();
        all.sort_unstable();
        all
    }
}
