//! Device names from `hipGetDeviceProperties`, and numbers through calls whose layout is stable.
//!
//! ROCm 6 changed the structure under a new function name (`hipGetDevicePropertiesR0600`). The old name kept the old
//! structure, which is hip-sys'. Only the two name fields are read here. Numbers come from `hipDeviceGetAttribute`,
//! whose codes have not changed.

use std::ffi::{c_int, c_void};

use libloading::Symbol;

use super::api::Raw;
use super::sys::hipDeviceProp_t;

/// Larger than every version of the structure so far (792 and 1472 bytes).
const ROOM: usize = 4096;

/// Offset of the architecture in the R0600 structure, unchanged from ROCm 6.2 to 7.14. The name is 256 bytes at 0, the
/// architecture 256 bytes at 1160.
const R0600_ARCH: usize = 1160;
const TEXT: usize = 256;

type Function = unsafe extern "C" fn(*mut c_void, c_int) -> Raw;

/// The function, and the offset of the architecture in its structure.
#[derive(Clone, Copy)]
pub(in crate::backend::hip) struct PropertiesFn {
    function: Function,
    arch_at: usize,
}

/// Names of a device.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::backend::hip) struct DeviceNames {
    /// Product name.
    pub name: String,
    /// `gcnArchName`, such as `gfx90a:sramecc+:xnack-`.
    pub arch: String,
}

impl PropertiesFn {
    pub(super) fn load(library: &libloading::Library) -> Option<Self> {
        let known: [(&[u8], usize); 2] = [
            (b"hipGetDevicePropertiesR0600\0", R0600_ARCH),
            (b"hipGetDeviceProperties\0", std::mem::offset_of!(hipDeviceProp_t, gcnArchName)),
        ];
        known.into_iter().find_map(|(name, arch_at)| {
            // SAFETY: both take a pointer to their structure and a device number; the structure is given as room that
            // holds either.
            let symbol: Symbol<'_, Function> = unsafe { library.get(name) }.ok()?;
            Some(Self { function: *symbol, arch_at })
        })
    }

    /// Names of device `index`, or the code of the failed call.
    pub fn names(self, index: c_int) -> Result<DeviceNames, Raw> {
        let mut room = [0u64; ROOM / 8];
        // SAFETY: `room` is aligned for any field and larger than either form of the structure.
        let code = unsafe { (self.function)(room.as_mut_ptr().cast(), index) };
        if code != 0 {
            return Err(code);
        }
        let bytes: Vec<u8> = room.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let text = |at: usize| {
            let field = &bytes[at..at + TEXT];
            let end = field.iter().position(|byte| *byte == 0).unwrap_or(TEXT);
            String::from_utf8_lossy(&field[..end]).into_owned()
        };
        Ok(DeviceNames { name: text(0), arch: text(self.arch_at) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn newer(room: *mut c_void, _: c_int) -> Raw {
        let mut bytes = [0u8; 1472];
        bytes[..7].copy_from_slice(b"A card\0");
        bytes[R0600_ARCH..R0600_ARCH + 8].copy_from_slice(b"gfx90a:x");
        // SAFETY: the caller gives room of 4096 bytes.
        unsafe { room.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        0
    }

    extern "C" fn failing(_: *mut c_void, _: c_int) -> Raw {
        101
    }

    #[test]
    fn names_are_read_at_their_places() {
        let found = PropertiesFn { function: newer, arch_at: R0600_ARCH }.names(0);
        assert_eq!(found, Ok(DeviceNames { name: "A card".into(), arch: "gfx90a:x".into() }));
        assert_eq!(PropertiesFn { function: failing, arch_at: R0600_ARCH }.names(0), Err(101));
        assert_eq!(std::mem::offset_of!(hipDeviceProp_t, gcnArchName), 396);
    }
}
