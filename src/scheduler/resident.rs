//! A model's tensors as a device has them: handles by part of its plan, and how they are resolved.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{
    AttentionInput, Backend, BackendError, DeviceTensor, Expert, Experts, FfnInput, Projection, Router,
};
use crate::cache::{Owner, Part, TensorCache};
use crate::model::Model;
use crate::model::plan::{ExecutionPlan, ExpertPlan, FIRST_PART, FfnPlan, LayerPlan, LazyProjection};
use crate::tensor::LazyTensor;

/// Handles of one model's tensors on one device. What was resolved once costs a comparison per layer, no lookup.
#[derive(Debug)]
pub(super) struct ResidentModel {
    model: Arc<Model>,
    first: Option<First>,
    layers: Vec<Option<ResidentLayer>>,
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

/// Loads through the cache, for one part.
pub(super) struct Loader<'a> {
    pub cache: &'a mut TensorCache,
    pub backend: &'a mut dyn Backend,
    pub part: Part,
}

impl Loader<'_> {
    fn tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.cache.load_tensor(self.backend, tensor, self.part)
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

    fn first(&mut self, plan: &ExecutionPlan) -> Result<First, BackendError> {
        let embedding = self.cache.load_table(self.backend, &plan.embedding, self.part)?;
        Ok(First { embedding, rope_factors: self.optional(plan.rope_factors.as_ref())? })
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
        let layers = model.plan.layers.iter().map(|_| None).collect();
        Self { model, first: None, layers, head: None }
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    pub fn owner(&self) -> Owner {
        Owner(self.model.id.0)
    }

    /// True when nothing is left to wait for that a step could be given up over: all was asked for in an earlier step.
    pub fn is_resolved(&self) -> bool {
        let whole = |layer: &Option<ResidentLayer>| layer.as_ref().is_some_and(ResidentLayer::is_whole);
        self.head.is_some() && self.layers.iter().all(whole)
    }

    /// Whether the handles of a part are here.
    pub fn has(&self, part: u32) -> bool {
        match part {
            FIRST_PART => self.first.is_some(),
            _ if part == self.model.plan.head_part() => self.head.is_some(),
            _ => self.layers.get(part as usize - 1).is_some_and(Option::is_some),
        }
    }

    /// Forgets all handles, so that the cache can let the tensors go.
    pub fn forget(&mut self) {
        self.first = None;
        self.layers.iter_mut().for_each(|layer| *layer = None);
        self.head = None;
    }

    /// Forgets the handles of a part.
    pub fn forget_part(&mut self, part: u32) {
        match part {
            FIRST_PART => self.first = None,
            _ if part == self.model.plan.head_part() => self.head = None,
            _ => {
                if let Some(layer) = self.layers.get_mut(part as usize - 1) {
                    *layer = None;
                }
            }
        }
    }

    /// Resolves a part that is not: its loads begin.
    ///
    /// # Errors
    /// [`BackendError`] of a load; what it had begun stays in the cache.
    pub fn resolve(&mut self, part: u32, loader: &mut Loader<'_>) -> Result<(), BackendError> {
        let plan = &self.model.plan;
        match part {
            _ if self.has(part) => {}
            FIRST_PART => self.first = Some(loader.first(plan)?),
            _ if part == plan.head_part() => self.head = Some(loader.head(plan)?),
            _ => {
                let index = part as usize - 1;
                let (Some(plan), Some(layer)) = (plan.layers.get(index), self.layers.get_mut(index)) else {
                    return Err(BackendError::Batch("a part that the model does not have"));
                };
                *layer = Some(loader.layer(plan)?);
            }
        }
        Ok(())
    }

    /// What the first unit of a step needs.
    pub fn first(&self) -> Option<&First> {
        self.first.as_ref()
    }

    /// A layer's handles and the rotary factors.
    pub fn layer(&self, index: usize) -> Option<(&ResidentLayer, Option<&DeviceTensor>)> {
        let rope_factors = self.first.as_ref().and_then(|first| first.rope_factors.as_ref());
        Some((self.layers.get(index)?.as_ref()?, rope_factors))
    }

    /// What the last unit of a step needs.
    pub fn head(&self) -> Option<&Head> {
        self.head.as_ref()
    }

    /// Whether some experts of a layer are not loaded; nothing for a layer without.
    pub fn lacks_experts(&self, index: usize) -> Option<bool> {
        match &self.layers.get(index)?.as_ref()?.ffn {
            ResidentFfn::Experts { experts, .. } => Some(experts.missing > 0),
            ResidentFfn::Dense { .. } => None,
        }
    }

    /// A layer's experts as far as they are loaded.
    pub fn experts(&self, index: usize) -> Option<Experts<'_>> {
        match &self.layers.get(index)?.as_ref()?.ffn {
            ResidentFfn::Experts { experts, .. } => Some(experts.view()),
            ResidentFfn::Dense { .. } => None,
        }
    }

    /// Begins the load of an expert that is not loaded.
    ///
    /// # Errors
    /// [`BackendError`] of a load, and for an expert that there is not.
    pub fn resolve_expert(
        &mut self,
        index: usize,
        number: usize,
        loader: &mut Loader<'_>,
    ) -> Result<(), BackendError> {
        let plan = self.model.plan.layers.get(index).map(|layer| &layer.ffn);
        let layer = self.layers.get_mut(index).and_then(Option::as_mut).map(|layer| &mut layer.ffn);
        let (Some(FfnPlan::Experts { experts: plans, .. }), Some(ResidentFfn::Experts { experts, .. })) =
            (plan, layer)
        else {
            return Err(BackendError::Batch("experts of a layer that has none"));
        };
        let (Some(slot), Some(plan)) = (experts.loaded.get_mut(number), plans.get(number)) else {
            return Err(BackendError::Batch("an expert was chosen that the layer does not have"));
        };
        if slot.is_none() {
            *slot = Some(loader.expert(plan)?);
            experts.missing -= 1;
            experts.version = version();
        }
        Ok(())
    }
}
