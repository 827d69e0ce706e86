//! An open device: the runtime's library and objects, its memory, its code, launches and waits.

pub mod arena;
#[allow(unsafe_code)] // foreign functions; layers.rs lists this module
pub mod binding;
#[allow(unsafe_code)] // as above
pub mod driver;
pub mod error;
pub mod launch;
pub mod memory;
pub mod pointer;
pub mod sysfs;
pub mod topology;
pub mod wait;

use std::ops::Range;
use std::sync::Arc;

use crate::backend::hip::device::arena::{Arena, ArenaOptions, Buffer, Ledger, Purpose};
use crate::backend::hip::device::driver::{
    Context, DeviceDescription, Event, Function, HostWords, Module, PinnedBuffer, RegisteredPages, Runtime,
    Stream, StreamPriority,
};
use crate::backend::hip::device::error::HipError;
use crate::backend::hip::kernels;
use crate::backend::hip::kernels::objects::{CodeObject, CodeSource, ObjectError};
use crate::tensor::MappedFile;

/// Options for opening a device.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// Device number.
    pub index: u32,
    /// How the arena requests memory.
    pub arena: ArenaOptions,
    /// Source of the code objects.
    pub code: CodeSource,
}

/// An open device. Cheap to clone; all clones share it, and everything they create keeps it open.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    arena: Arc<Arena>,
    module: Module,
    /// Name of the chosen code object.
    code: String,
}

impl Device {
    /// Opens a device and loads the code built for it.
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

    /// The matrix unit that the device's code uses.
    pub fn unit(&self) -> kernels::MatrixUnit {
        kernels::types::unit(|name| self.inner.module.function(name).is_some())
    }

    /// Whether the device's code contains a kernel. It has all but those that need what the device lacks.
    pub fn has<A: kernels::Arguments>(&self, kernel: kernels::Kernel<A>) -> bool {
        self.inner.module.function(kernel.name()).is_some()
    }

    /// The device's properties.
    pub fn description(&self) -> &DeviceDescription {
        self.inner.context.description()
    }

    /// The code object in use: its source and target.
    pub fn code(&self) -> &str {
        &self.inner.code
    }

    /// Fails when the device is lost. Makes no driver call.
    ///
    /// # Errors
    /// [`HipError::Lost`].
    pub fn alive(&self) -> Result<(), HipError> {
        self.inner.context.alive()
    }

    /// Marks the device as lost when the driver did not report it: `call` got no answer.
    pub fn lose(&self, call: &'static str, why: &str) -> HipError {
        self.inner.context.lose(call, why)
    }

    /// The device's memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.inner.arena
    }

    /// Bytes of device memory per purpose.
    pub fn ledger(&self) -> Ledger {
        self.inner.arena.ledger()
    }

    /// Allocates `bytes` bytes of device memory.
    ///
    /// # Errors
    /// As [`Arena::take`].
    pub fn take(&self, bytes: usize, purpose: Purpose) -> Result<Buffer, HipError> {
        self.inner.arena.take(bytes, purpose)
    }

    /// Allocates pinned host memory for transfers.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn pinned(&self, bytes: usize) -> Result<PinnedBuffer, HipError> {
        PinnedBuffer::new(&self.inner.context, bytes)
    }

    /// Pins whole pages of a mapped file in place, for transfers.
    ///
    /// # Errors
    /// [`HipError::Refused`] when the range is not whole pages of the file. [`HipError::Call`] when the driver refuses
    /// to pin such pages or the file no longer has them. [`HipError::Lost`].
    pub fn register(&self, file: &Arc<MappedFile>, pages: Range<u64>) -> Result<RegisteredPages, HipError> {
        RegisteredPages::new(&self.inner.context, file, pages)
    }

    /// Allocates host words that the device can access.
    ///
    /// # Errors
    /// [`HipError::Refused`] for 0 words, [`HipError::Call`], [`HipError::Lost`].
    pub fn host_words(&self, words: usize) -> Result<Arc<HostWords>, HipError> {
        HostWords::new(&self.inner.context, words).map(Arc::new)
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn stream(&self, priority: StreamPriority) -> Result<Stream, HipError> {
        Stream::new(&self.inner.context, priority)
    }

    /// Creates an event; only events made for `timing` measure time.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn event(&self, timing: bool) -> Result<Event, HipError> {
        Event::new(&self.inner.context, timing)
    }

    /// Free and total bytes of device memory. The driver counts all programs together.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn memory(&self) -> Result<(u64, u64), HipError> {
        self.inner.context.memory()
    }

    /// Waits for all work on the device.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn synchronize(&self) -> Result<(), HipError> {
        self.inner.context.synchronize()
    }

    /// The device's kernels and how often each was launched or captured.
    pub fn launches(&self) -> Vec<(&'static str, u64)> {
        let mut all: Vec<_> = self.inner.module.launches().collect();
        all.sort_unstable();
        all
    }
}
