//! Pages of a mapped file, pinned by the driver where they lie.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use super::super::binding::sys;
use super::super::error::HipError;
use super::context::Context;
use super::event::Event;
use crate::tensor::MappedFile;

/// Whole pages of a mapped file that the device can read. As long as this lives, so do the pages: a file that is cut short
/// meanwhile loses them only afterwards, and what was copied is what they held. Pages that the file has lost before cannot be
/// pinned, which the driver reports as a failed call.
///
/// Each transfer records an event, and the pages are given back once the last one has happened.
#[derive(Debug)]
pub struct RegisteredPages {
    context: Arc<Context>,
    file: Arc<MappedFile>,
    range: Range<u64>,
    done: Event,
    busy: bool,
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
        let done = Event::new(context, false)?;
        let (start, flags) = (bytes.as_ptr().cast_mut().cast::<c_void>(), sys::hipHostRegisterDefault);
        // SAFETY: the bytes are mapped (checked) and stay so as long as `file`, which the value keeps. The driver pins the
        // pages, of which we and it are readers only: the mapping takes no writes.
        context.call("hipHostRegister", |api| unsafe { (api.hipHostRegister)(start, bytes.len(), flags) })?;
        Ok(Self { context: context.clone(), file: Arc::clone(file), range, done, busy: false })
    }

    /// Where its bytes `part` of the file are, for a transfer that the caller follows by recording the event and
    /// [`RegisteredPages::set_busy`].
    pub(super) fn part(&self, part: &Range<u64>) -> Result<&[u8], HipError> {
        let inside = self.range.start <= part.start && part.end <= self.range.end;
        let bytes = self.file.bytes(part.clone()).ok().filter(|_| inside);
        bytes.ok_or_else(|| HipError::refused("an upload", format!("bytes {part:?} of {:?}", self.range)))
    }

    pub(super) fn done(&self) -> &Event {
        &self.done
    }

    pub(super) fn set_busy(&mut self) {
        self.busy = true;
    }
}

impl Drop for RegisteredPages {
    fn drop(&mut self) {
        // Not before the transfer is over. A lost device transfers no more.
        if self.busy
            && let Err(error) = self.done.synchronize()
        {
            tracing::debug!(%error, "a transfer's end was not seen");
        }
        let Ok(bytes) = self.file.bytes(self.range.clone()) else { return };
        let start = bytes.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: these pages were registered by `new`, are still mapped, and are given back once, here.
        self.context.give_back("hipHostUnregister", |api| unsafe { (api.hipHostUnregister)(start) });
    }
}
