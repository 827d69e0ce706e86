//! The HIP runtime: its version and its devices.

use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::context::forget_current;
use crate::backend::hip::device::binding::{Api, Library, Raw, sys};
use crate::backend::hip::device::error::{CallFailure, HipError};
use crate::backend::hip::device::topology;
use sys::hipDeviceAttribute_t as Attribute;

/// An initialised HIP runtime. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Runtime {
    library: Arc<Library>,
    version: u32,
    devices: u32,
}

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Device number.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Architecture. The runtime reports it with features, such as `gfx90a:sramecc+:xnack-`. Otherwise the kernel's
    /// driver reports it without. Empty when neither does.
    pub arch: String,
    /// PCI address, such as `0000:03:00.0`; empty when the runtime reports none.
    pub pci: String,
    /// Lanes per wave.
    pub wave: u32,
    /// Compute units.
    pub units: u32,
    /// Total bytes of memory.
    pub memory_bytes: u64,
    /// Most LDS bytes per workgroup.
    pub lds_max: u32,
    /// Most threads per workgroup.
    pub threads_max: u32,
    /// Bytes of the last cache level that the runtime reports.
    pub l2_bytes: u64,
    /// Whether the device shares the host's memory.
    pub integrated: bool,
}

impl DeviceDescription {
    /// The architecture without its features: `gfx90a` of `gfx90a:sramecc+:xnack-`.
    pub fn arch_name(&self) -> &str {
        self.arch.split(':').next().unwrap_or_default()
    }
}

impl Runtime {
    /// Finds the runtime (see [`Library::find`]) and initialises it.
    ///
    /// # Errors
    /// [`HipError::Library`], [`HipError::NoDevice`], [`HipError::Call`].
    pub fn find() -> Result<Self, HipError> {
        Self::start(Library::find()?)
    }

    /// Initialises the runtime in this file.
    ///
    /// # Errors
    /// As [`Runtime::find`].
    pub fn open(path: &Path) -> Result<Self, HipError> {
        Self::start(Library::open(path)?)
    }

    fn start(library: Library) -> Result<Self, HipError> {
        let api = library.api();
        let mut count: c_int = 0;
        let mut version: c_int = 0;
        // Count devices first: without a device, some versions of hipInit return «invalid device».
        // SAFETY: each takes a place for one integer, which is there.
        let counted = unsafe { (api.hipGetDeviceCount)(&raw mut count) };
        if counted == sys::hipError_t::hipErrorNoDevice as Raw || (counted == 0 && count <= 0) {
            return Err(HipError::NoDevice);
        }
        ok(api, None, "hipGetDeviceCount", counted)?;
        // SAFETY: no pointer is passed.
        ok(api, None, "hipInit", unsafe { (api.hipInit)(0) })?;
        // SAFETY: as above.
        ok(api, None, "hipRuntimeGetVersion", unsafe { (api.hipRuntimeGetVersion)(&raw mut version) })?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok(Self { devices: u32::try_from(count).unwrap_or(0), version, library: Arc::new(library) })
    }

    /// Path of the library.
    pub fn path(&self) -> PathBuf {
        self.library.path().into()
    }

    /// The runtime's version: `major * 10^7 + minor * 10^5 + patch`.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Number of devices.
    pub fn device_count(&self) -> u32 {
        self.devices
    }

    pub(super) fn api(&self) -> &Api {
        self.library.api()
    }

    /// Properties of device `index`. Does not open it.
    ///
    /// # Errors
    /// [`HipError::NoSuchDevice`], [`HipError::Call`].
    pub fn describe(&self, index: u32) -> Result<DeviceDescription, HipError> {
        let device = c_int::try_from(index).ok().filter(|_| index < self.devices);
        let device = device.ok_or(HipError::NoSuchDevice { device: index, count: self.devices })?;
        let names = match self.library.properties() {
            Some(properties) => properties
                .names(device)
                .map_err(|code| failed(self.api(), Some(index), "hipGetDeviceProperties", code))?,
            None => {
                return Err(HipError::refused(
                    "the HIP runtime",
                    "it has neither hipGetDevicePropertiesR0600 nor hipGetDeviceProperties; ROCm 5.2 or newer is needed",
                ));
            }
        };
        let pci = self.pci(device);
        // Old runtimes report no architecture for some devices; the kernel's driver always does.
        let arch = Some(names.arch).filter(|arch| !arch.is_empty());
        let arch = arch.or_else(|| topology::arch_at(Path::new("/"), &pci)).unwrap_or_default();
        let number = |attribute| self.attribute(device, attribute);
        Ok(DeviceDescription {
            index,
            name: names.name,
            arch,
            pci,
            wave: number(Attribute::hipDeviceAttributeWarpSize)?,
            units: number(Attribute::hipDeviceAttributeMultiprocessorCount)?,
            memory_bytes: self.memory(device)?.1,
            lds_max: number(Attribute::hipDeviceAttributeMaxSharedMemoryPerBlock)?,
            threads_max: number(Attribute::hipDeviceAttributeMaxThreadsPerBlock)?,
            // Optional: not every runtime knows these two.
            l2_bytes: number(Attribute::hipDeviceAttributeL2CacheSize).unwrap_or(0).into(),
            integrated: number(Attribute::hipDeviceAttributeIntegrated).unwrap_or(0) != 0,
        })
    }

    fn attribute(&self, device: c_int, attribute: Attribute) -> Result<u32, HipError> {
        let mut value: c_int = 0;
        // SAFETY: a place for one integer is passed, the rest are numbers.
        let code = unsafe { (self.api().hipDeviceGetAttribute)(&raw mut value, attribute, device) };
        ok(self.api(), u32::try_from(device).ok(), "hipDeviceGetAttribute", code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Free and total bytes. Makes the device the calling thread's current one, which contexts must be told.
    fn memory(&self, device: c_int) -> Result<(u64, u64), HipError> {
        let (mut free, mut total) = (0usize, 0usize);
        let index = u32::try_from(device).ok();
        forget_current();
        // SAFETY: a number is passed.
        ok(self.api(), index, "hipSetDevice", unsafe { (self.api().hipSetDevice)(device) })?;
        // SAFETY: two places for sizes are passed.
        let code = unsafe { (self.api().hipMemGetInfo)(&raw mut free, &raw mut total) };
        ok(self.api(), index, "hipMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }

    fn pci(&self, device: c_int) -> String {
        const ROOM: usize = 64;
        let mut room = [0 as c_char; ROOM];
        // SAFETY: the room's length is passed with it, one byte less so that a zero stays at its end.
        let code = unsafe { (self.api().hipDeviceGetPCIBusId)(room.as_mut_ptr(), ROOM as c_int - 1, device) };
        let text: Vec<u8> = room.iter().take_while(|c| **c != 0).map(|c| c.to_ne_bytes()[0]).collect();
        if code == 0 { String::from_utf8_lossy(&text).into_owned() } else { String::new() }
    }
}

/// An error unless `code` is success.
pub(super) fn ok(api: &Api, device: Option<u32>, call: &'static str, code: Raw) -> Result<(), HipError> {
    if code == 0 { Ok(()) } else { Err(failed(api, device, call, code)) }
}

pub(super) fn failed(api: &Api, device: Option<u32>, call: &'static str, code: Raw) -> HipError {
    HipError::Call { failure: failure(api, device, call, code) }
}

pub(super) fn failure(api: &Api, device: Option<u32>, call: &'static str, code: Raw) -> CallFailure {
    // SAFETY: any number may be asked for; the answer is null or a text that lives as long as the library, which is
    // never unloaded.
    let name = unsafe {
        let text = (api.hipGetErrorName)(code);
        (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    CallFailure { device, call, code, name: name.unwrap_or_else(|| "a code without a name".into()) }
}
