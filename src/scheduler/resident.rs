//! A plan's tensors as a device has them, resolved layer by layer when a layer first runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{
    AttentionInput, Backend, BackendError, DeviceTensor, Expert, Experts, FfnInput, Projection, Router,
};
use crate::cache::TensorCache;
use crate::model::Model;
use crate::model::plan::{ExecutionPlan, ExpertPlan, FfnPlan, LayerPlan, LazyProjection};
use crate::tensor::LazyTensor;

/// Handles of one model's tensors on one device. What was resolved once costs a comparison per layer, no lookup.
#[derive(Debug)]
pub(super) struct ResidentModel {
    model: Arc<Model>,
    first: Option<First>,
    /// Layers `0..layers.len()`: they are resolved in order.
    layers: Vec<ResidentLayer>,
    head: Option<Head>,
}

#[derive(Debug)]
pub(super) struct First {
    pub embedding: DeviceTensor,
    pub rope_factors: Option<DeviceTensor>,
}

#[derive(Debug)]
pub(super) struct Head {
    pub norm: DeviceTensor,
    pub output: DeviceTensor,
}

#[derive(Debug)]
struct ResidentProjection {
    weight: DeviceTensor,
    bias: Option<DeviceTensor>,
}

impl ResidentProjection {
    fn view(&self) -> Projection<'_> {
        Projection { weight: &self.weight, bias: self.bias.as_ref() }
    }
}

#[derive(Debug)]
pub(super) struct ResidentLayer {
    attn_norm: DeviceTensor,
    q: ResidentProjection,
    k: ResidentProjection,
    v: ResidentProjection,
    q_norm: Option<DeviceTensor>,
    k_norm: Option<DeviceTensor>,
    attn_output: ResidentProjection,
    ffn_norm: DeviceTensor,
    ffn: ResidentFfn,
}

#[derive(Debug)]
enum ResidentFfn {
    Dense { gate: ResidentProjection, up: ResidentProjection, down: ResidentProjection },
    Experts { router: ResidentProjection, experts: ResidentExperts },
}

/// A layer's experts: each is loaded when a row first uses it.
#[derive(Debug)]
struct ResidentExperts {
    loaded: Vec<Option<Expert>>,
    missing: usize,
    version: u64,
}

/// What runs the second half of a layer.
pub(super) enum Ffn<'a> {
    /// `ffn_input`, then `ffn_output`.
    Dense(FfnInput<'a>, Projection<'a>),
    /// `route`, then the [experts](ResidentModel::experts) that it chose.
    Experts(Router<'a>),
}

impl ResidentLayer {
    pub fn attention_input<'a>(&'a self, rope_factors: Option<&'a DeviceTensor>) -> AttentionInput<'a> {
        AttentionInput {
            norm: &self.attn_norm,
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            q_norm: self.q_norm.as_ref(),
            k_norm: self.k_norm.as_ref(),
            rope_factors,
        }
    }

    pub fn attention_output(&self) -> Projection<'_> {
        self.attn_output.view()
    }

    /// Whether none of its experts is left to be loaded.
    fn is_whole(&self) -> bool {
        match &self.ffn {
            ResidentFfn::Dense { .. } => true,
            ResidentFfn::Experts { experts, .. } => experts.missing == 0,
        }
    }

    pub fn ffn(&self) -> Ffn<'_> {
        let norm = &self.ffn_norm;
        match &self.ffn {
            ResidentFfn::Dense { gate, up, down } => {
                Ffn::Dense(FfnInput { norm, gate: gate.view(), up: up.view() }, down.view())
            }
            ResidentFfn::Experts { router, .. } => Ffn::Experts(Router { norm, logits: router.view() }),
        }
    }
}

impl ResidentExperts {
    fn new(count: usize) -> Self {
        Self { loaded: vec![None; count], missing: count, version: version() }
    }

    fn view(&self) -> Experts<'_> {
        Experts { loaded: &self.loaded, version: self.version }
    }
}

/// A number that no table of experts had before.
fn version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Loads through the cache.
struct Loader<'a> {
    cache: &'a mut TensorCache,
    backend: &'a mut dyn Backend,
}

impl Loader<'_> {
    fn table(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.cache.load_table(self.backend, tensor)
    }

    fn tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.cache.load_tensor(self.backend, tensor)
    }

    fn optional(&mut self, tensor: Option<&LazyTensor>) -> Result<Option<DeviceTensor>, BackendError> {
        tensor.map(|t| self.tensor(t)).transpose()
    }

    fn projection(&mut self, lazy: &LazyProjection) -> Result<ResidentProjection, BackendError> {
        Ok(ResidentProjection {
            weight: self.tensor(&lazy.weight)?,
            bias: self.optional(lazy.bias.as_ref())?,
        })
    }

    fn head(&mut self, plan: &ExecutionPlan) -> Result<Head, BackendError> {
        Ok(Head { norm: self.tensor(&plan.output_norm)?, output: self.tensor(&plan.output)? })
    }

    fn layer(&mut self, plan: &LayerPlan) -> Result<ResidentLayer, BackendError> {
        Ok(ResidentLayer {
            attn_norm: self.tensor(&plan.attn_norm)?,
            q: self.projection(&plan.q)?,
            k: self.projection(&plan.k)?,
            v: self.projection(&plan.v)?,
            q_norm: self.optional(plan.q_norm.as_ref())?,
            k_norm: self.optional(plan.k_norm.as_ref())?,
            attn_output: self.projection(&plan.attn_output)?,
            ffn_norm: self.tensor(&plan.ffn_norm)?,
            ffn: match &plan.ffn {
                FfnPlan::Dense { gate, up, down } => ResidentFfn::Dense {
                    gate: self.projection(gate)?,
                    up: self.projection(up)?,
                    down: self.projection(down)?,
                },
                FfnPlan::Experts { router, experts } => ResidentFfn::Experts {
                    router: self.projection(router)?,
                    experts: ResidentExperts::new(experts.len()),
                },
            },
        })
    }

    fn expert(&mut self, plan: &ExpertPlan) -> Result<Expert, BackendError> {
        Ok(Expert {
            gate: self.tensor(&plan.gate)?,
            up: self.tensor(&plan.up)?,
            down: self.tensor(&plan.down)?,
        })
    }
}

impl ResidentModel {
    pub fn new(model: Arc<Model>) -> Self {
        Self { model, first: None, layers: Vec::new(), head: None }
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// True when every load was begun in an earlier step: nothing is left to wait for that a step could be given up over.
    pub fn is_resolved(&self) -> bool {
        self.head.is_some() && self.layers.iter().all(ResidentLayer::is_whole)
    }

    pub fn layer_count(&self) -> usize {
        self.model.plan.layers.len()
    }

    /// Forgets all handles, so that the cache can let the tensors go.
    pub fn forget(&mut self) {
        self.first = None;
        self.layers.clear();
        self.head = None;
    }

    /// What the first unit of a step needs.
    ///
    /// # Errors
    /// [`BackendError`] of a load, here and below; what was resolved stays so.
    pub fn first(
        &mut self,
        backend: &mut dyn Backend,
        cache: &mut TensorCache,
    ) -> Result<&First, BackendError> {
        if self.first.is_none() {
            let plan = &self.model.plan;
            let mut loader = Loader { cache, backend };
            let embedding = loader.table(&plan.embedding)?;
            let rope_factors = loader.optional(plan.rope_factors.as_ref())?;
            self.first = Some(First { embedding, rope_factors });
        }
        self.first.as_ref().ok_or(BackendError::Batch("the first tensors are not resolved"))
    }

    /// A layer's handles and the rotary factors. Layers are asked for in order; loads begin as many layers ahead as the
    /// backend finds worth it, the head's after those of the last layer.
    pub fn layer(
        &mut self,
        index: usize,
        backend: &mut dyn Backend,
        cache: &mut TensorCache,
    ) -> Result<(&ResidentLayer, Option<&DeviceTensor>), BackendError> {
        if self.head.is_none() {
            self.load_through(index + backend.layers_ahead(), backend, cache)?;
        }
        let rope_factors = self.first.as_ref().and_then(|f| f.rope_factors.as_ref());
        let layer =
            self.layers.get(index).ok_or(BackendError::Batch("layers were asked for out of order"))?;
        Ok((layer, rope_factors))
    }

    /// A layer's experts after `route`: those that it chose are loaded now, if they were not.
    pub fn experts(
        &mut self,
        index: usize,
        backend: &mut dyn Backend,
        cache: &mut TensorCache,
    ) -> Result<Experts<'_>, BackendError> {
        let plan = self.model.plan.layers.get(index).map(|layer| &layer.ffn);
        let layer = self.layers.get_mut(index).map(|layer| &mut layer.ffn);
        let (Some(FfnPlan::Experts { experts: plans, .. }), Some(ResidentFfn::Experts { experts, .. })) =
            (plan, layer)
        else {
            return Err(BackendError::Batch("experts of a layer that has none"));
        };
        if experts.missing > 0 {
            let chosen = backend.routed()?;
            let mut loader = Loader { cache, backend };
            for number in chosen {
                let number = number as usize;
                let (Some(slot), Some(plan)) = (experts.loaded.get_mut(number), plans.get(number)) else {
                    return Err(BackendError::Batch("an expert was chosen that the layer does not have"));
                };
                if slot.is_none() {
                    *slot = Some(loader.expert(plan)?);
                    experts.missing -= 1;
                    experts.version = version();
                }
            }
        }
        Ok(experts.view())
    }

    /// Begins the loads of all layers up to `last`, and of the head where that is past the last layer.
    fn load_through(
        &mut self,
        last: usize,
        backend: &mut dyn Backend,
        cache: &mut TensorCache,
    ) -> Result<(), BackendError> {
        let plan = &self.model.plan;
        for plan in plan.layers.iter().take(last + 1).skip(self.layers.len()) {
            let layer = Loader { cache, backend }.layer(plan)?;
            self.layers.push(layer);
        }
        if last >= plan.layers.len() {
            self.head = Some(Loader { cache, backend }.head(plan)?);
        }
        Ok(())
    }

    /// What the last unit of a step needs.
    pub fn head(
        &mut self,
        backend: &mut dyn Backend,
        cache: &mut TensorCache,
    ) -> Result<&Head, BackendError> {
        if self.head.is_none() {
            self.load_through(self.layer_count(), backend, cache)?;
        }
        self.head.as_ref().ok_or(BackendError::Batch("the head is not resolved"))
    }
}
