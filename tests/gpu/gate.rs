//! A device whose step stops at a layer until the test releases it.

use std::sync::mpsc::{Receiver, Sender, channel};

use rocmforge::backend::hip::HipBackend;

use crate::hooked::Hooked;

/// The test's handle on a device from [`gated`].
pub struct Gate {
    /// Receives once the step has reached the layer.
    pub reached: Receiver<()>,
    /// A send releases the step.
    pub open: Sender<()>,
}

/// A GPU that stops once, at the attention of `layer`.
pub fn gated(inner: HipBackend, layer: u32) -> (Hooked, Gate) {
    let ((reached, told), (open, opened)) = (channel(), channel());
    let mut stop = Some((reached, opened));
    let hooked = Hooked::before_layer(inner, move |at| {
        if at == layer
            && let Some((reached, opened)) = stop.take()
        {
            reached.send(()).unwrap();
            opened.recv().unwrap();
        }
        Ok(())
    });
    (hooked, Gate { reached: told, open })
}
