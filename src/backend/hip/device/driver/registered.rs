//! Pages of a mapped file, pinned in place by the driver.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use super::context::Context;
use super::transfer::Transfer;
use crate::backend::hip::device::binding::sys;
use crate::backend::hip::device::error::HipError;
use crate::tensor::MappedFile;

/// Whole pages of a mapped file that the device can read. Pages that the file has already lost cannot be pinned; the
/// driver reports that as a failed call.
///
/// Where the driver pins, the pages live as long as this value. If the file is truncated meanwhile, it loses them only
/// afterwards, and copies hold the old content. A driver that follows the page table instead, as AMD's can, loses the
/// pages with the file. A device that then reads them may stop. So only an explicit configuration setting enables this
/// (see upload/routes.rs).
///
/// The pages are unregistered after their last transfer.
#[derive(Debug)]
pub struct RegisteredPages {
    context: Arc<Context>,
    file: Arc<MappedFile>,
    range: Range<u64>,
    transfer: Transfer,
}

impl RegisteredPages {
    pub(in crate::backend::hip) fn new(
        context: &Arc<Context>,
        file: &Arc<MappedFile>,
        range: Range<u64>,
    ) -> Result<Self, HipError> {
        let refused = |why: String| HipError::refused("hipHostRegister", why);
        let bytes = file.bytes(range.clone()).map_err(|error| refused(error.to_string()))?;
        let page = rustix::param::page_size();
        if bytes.is_empty() || bytes.as_ptr().addr() % page != 0 || bytes.len() % page != 0 {
            return Err(refused(format!("bytes {range:?} of the file are not whole pages")));
        }
        let transfer = Transfer::new(context)?;
        let (start, flags) = (bytes.as_ptr().cast_mut().cast::<c_void>(), sys::hipHostRegisterDefault);
        // SAFETY: the bytes are mapped (checked) and stay so as long as `file`, which the value keeps. We and
        // the driver are readers only: the mapping takes no writes.
        context.call("hipHostRegister", |api| unsafe { (api.hipHostRegister)(start, bytes.len(), flags) })?;
        Ok(Self { context: context.clone(), file: Arc::clone(file), range, transfer })
    }

    /// The bytes `part` of the file, for a transfer that the caller reports to [`RegisteredPages::transfer`].
    pub(super) fn part(&self, part: &Range<u64>) -> Result<&[u8], HipError> {
        let inside = self.range.start <= part.start && part.end <= self.range.end;
        let bytes = self.file.bytes(part.clone()).ok().filter(|_| inside);
        bytes.ok_or_else(|| {
            HipError::refused(
                "an upload",
                format!("bytes {part:?} are outside the registered {:?}", self.range),
            )
        })
    }

    pub(super) fn transfer(&mut self) -> &mut Transfer {
        &mut self.transfer
    }
}

impl Drop for RegisteredPages {
    fn drop(&mut self) {
        self.transfer.end();
        let Ok(bytes) = self.file.bytes(self.range.clone()) else { return };
        let start = bytes.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: these pages were registered by `new`, are still mapped, and are unregistered once, here.
        self.context.give_back("hipHostUnregister", |api| unsafe { (api.hipHostUnregister)(start) });
    }
}
