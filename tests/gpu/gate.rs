//! A device whose step stops at a layer until it is let go on.

use std::sync::mpsc::{Receiver, Sender, channel};

use rocmforge::backend::hip::HipBackend;

use crate::hooked::Hooked;

/// The test's side of a device that [`gated`] gave.
pub struct Gate {
    /// A word comes when the step has reached the layer.
    pub reached: Receiver<()>,
    /// A word lets it go on.
    pub open: Sender<()>,
}

/// A GPU that stops once at a layer's attention.
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
