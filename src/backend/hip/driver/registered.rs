//! Pages of a mapped file, pinned by the driver where they lie.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use super::super::binding::sys;
use super::super::error::HipError;
use super::context::Context;
use super::transfer::Transfer;
use crate::tensor::MappedFile;

/// Whole pages of a mapped file that the device can read. Pages that the file has lost before cannot be pinned, which the driver
/// reports as a failed call.
///
/// Where the driver pins, the pages live as long as this does: a file that is cut short meanwhile loses them only afterwards, and
/// what was copied is what they held. A driver that follows the page table instead, as AMD's can, loses them with the file, and
/// a device that reads them then may stop: so this is only for who asked for it by the configuration (see upload/routes.rs).
///
/// The pages are given back once the last transfer of them is over.
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
            return Err(refused(format!("bytes {range:?} are not whole pages")));
        }
        let transfer = Transfer::new(context)?;
        let (start, flags) = (bytes.as_ptr().cast_mut().cast::<c_void>(), sys::hipHostRegisterDefault);
        // SAFETY: the bytes are mapped (checked) and stay so as long as `file`, which the value keeps. We and
        // the driver are readers only: the mapping takes no writes.
        context.call("hipHostRegister", |api| unsafe { (api.hipHostRegister)(start, bytes.len(), flags) })?;
        Ok(Self { context: context.clone(), file: Arc::clone(file), range, transfer })
    }

    /// Where its bytes `part` of the file are, for a transfer of which the caller tells
    /// [`RegisteredPages::transfer`].
    pub(super) fn part(&self, part: &Range<u64>) -> Result<&[u8], HipError> {
        let inside = self.range.start <= part.start && part.end <= self.range.end;
        let bytes = self.file.bytes(part.clone()).ok().filter(|_| inside);
        bytes.ok_or_else(|| HipError::refused("an upload", format!("bytes {part:?} of {:?}", self.range)))
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
        // SAFETY: these pages were registered by `new`, are still mapped, and are given back once, here.
        self.context.give_back("hipHostUnregister", |api| unsafe { (api.hipHostUnregister)(start) });
    }
}
