//! Work recorded once and submitted many times.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use super::context::Context;
use super::stream::Stream;
use crate::backend::hip::device::binding::{Raw, sys};
use crate::backend::hip::device::error::HipError;

/// A buffer or host words that must outlive a graph.
pub(super) type Kept = Arc<dyn Any + Send + Sync>;

/// Captured launches and copies, with their arguments.
pub struct Graph {
    pub(super) context: Arc<Context>,
    pub(super) handle: usize,
    pub(super) kept: Vec<Kept>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("kept", &self.kept.len()).finish_non_exhaustive()
    }
}

impl Graph {
    fn raw(&self) -> sys::hipGraph_t {
        self.handle as *mut c_void as sys::hipGraph_t
    }

    /// Number of launches and copies.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn nodes(&self) -> Result<usize, HipError> {
        let mut count = 0usize;
        // SAFETY: the graph is live; with no room for nodes only their number is written.
        self.context.call("hipGraphGetNodes", |api| unsafe {
            (api.hipGraphGetNodes)(self.raw(), std::ptr::null_mut(), &raw mut count)
        })?;
        Ok(count)
    }

    /// Makes the graph runnable.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn instantiate(self) -> Result<GraphExec, HipError> {
        let mut handle: sys::hipGraphExec_t = std::ptr::null_mut();
        // SAFETY: the graph is live, a place for one handle is passed; a null log of no length is allowed.
        self.context.call("hipGraphInstantiate", |api| unsafe {
            let none = std::ptr::null_mut();
            (api.hipGraphInstantiate)(&raw mut handle, self.raw(), none, std::ptr::null_mut(), 0)
        })?;
        Ok(GraphExec { context: self.context.clone(), handle: handle.addr(), graph: self })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the handle came from the driver and is freed once, here.
        self.context.give_back("hipGraphDestroy", |api| unsafe { (api.hipGraphDestroy)(self.raw()) });
    }
}

/// A graph that can be launched. It keeps alive the objects that its work uses.
#[derive(Debug)]
pub struct GraphExec {
    context: Arc<Context>,
    handle: usize,
    graph: Graph,
}

impl GraphExec {
    fn raw(&self) -> sys::hipGraphExec_t {
        self.handle as *mut c_void as sys::hipGraphExec_t
    }

    /// Submits all its work to `stream`.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn launch(&self, stream: &Stream) -> Result<(), HipError> {
        // SAFETY: both handles are live. Memory that the work refers to is kept by `self`, or is device memory.
        self.context.call("hipGraphLaunch", |api| unsafe { (api.hipGraphLaunch)(self.raw(), stream.raw()) })
    }

    /// Takes over the arguments of `graph`, which must come from the same sequence of launches. Returns `false` when
    /// the shape differs and a new graph must be instantiated. No launch of this graph may be in flight.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn update(&mut self, graph: Graph) -> Result<bool, HipError> {
        let mut node: sys::hipGraphNode_t = std::ptr::null_mut();
        let mut result = std::mem::MaybeUninit::<sys::hipGraphExecUpdateResult>::uninit();
        // SAFETY: the handles are live, places for one node and one result are passed. The result is not read: a code that
        // the enum lacks would be undefined behaviour, and the call's own code says the same.
        let code = self.context.code(|api| unsafe {
            (api.hipGraphExecUpdate)(self.raw(), graph.raw(), &raw mut node, result.as_mut_ptr())
        })?;
        if code == sys::hipError_t::hipErrorGraphExecUpdateFailure as Raw {
            return Ok(false);
        }
        self.context.check("hipGraphExecUpdate", code)?;
        self.graph = graph;
        Ok(true)
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: the handle came from the driver and is freed once, here.
        self.context.give_back("hipGraphExecDestroy", |api| unsafe { (api.hipGraphExecDestroy)(self.raw()) });
    }
}
