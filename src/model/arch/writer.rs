//! Writes a decoder as a program: finds tensors by role and appends the operations that architectures share.
//!
//! A missing tensor does not stop the writing, so that [`Writer::finish`] reports all of them at once. The partial
//! program is then dropped.

mod encoders;
mod experts;
mod head;
mod recurrent;
mod streams;

use std::sync::Arc;

use super::metadata::Metadata;
use super::rope::Rope;
use super::tensors::{Tensors, Want};
use crate::model::embedding::Pooling;
use crate::model::files::ModelFiles;
use crate::model::plan::{ExecutionPlan, PlanError, Shape};
use crate::program::{
    Activation, Builder, HeadPart, NormKind, Op, Output, PartKind, Residence, RopeId, RopeSpec, State,
    StateId, TableRow, TensorId, ValueId,
};
use crate::tensor::LazyTensor;

/// Says whether files of an architecture have a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// None; a file that has the tensor is refused.
    Never,
    /// Some files have it.
    Optional,
    /// All files have it.
    Required,
}

/// Counts and width of attention heads.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    /// Query heads.
    pub queries: usize,
    /// Key and value heads; a divisor of `queries`.
    pub keys: usize,
    /// Values of a head.
    pub dim: usize,
}

impl Heads {
    /// Values of all query heads in a row.
    pub fn query_width(&self) -> usize {
        self.queries * self.dim
    }

    /// Values of all key heads, or all value heads, in a row.
    pub fn key_width(&self) -> usize {
        self.keys * self.dim
    }

    /// Factor of the scores, `1 / sqrt(dim)`: keeps their spread independent of the head width.
    pub fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
}

/// A norm of an architecture.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    /// RMSNorm or LayerNorm.
    pub kind: NormKind,
    /// Added before the square root.
    pub eps: f32,
    /// True when files have a bias beside the weight.
    pub bias: bool,
}

/// Queries, keys and values of a row.
#[derive(Clone, Copy)]
pub(super) struct Qkv {
    /// Queries.
    pub q: ValueId,
    /// Keys.
    pub k: ValueId,
    /// Values.
    pub v: ValueId,
}

/// Attributes of [`Op::Attend`].
pub(super) struct Attention {
    pub scale: f32,
    pub window: Option<u32>,
    pub both_ways: bool,
    pub cap: Option<f32>,
    pub alibi: bool,
    pub sinks: Option<TensorId>,
}

impl Attention {
    /// Attention to earlier positions with plain scores.
    pub fn of(scale: f32, window: Option<u32>) -> Self {
        Self { scale, window, both_ways: false, cap: None, alibi: false, sinks: None }
    }
}

/// A program under construction, written from a file's header.
pub(super) struct Writer<'a> {
    /// Metadata keys of the architecture.
    pub metadata: Metadata<'a>,
    tensors: Tensors<'a>,
    program: Builder,
    /// Name prefix of the current part's tensors.
    prefix: String,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    embedding: Option<LazyTensor>,
}

/// Placeholder for a tensor that the file lacks.
const MISSING: TensorId = TensorId(u32::MAX);

impl<'a> Writer<'a> {
    /// A writer for architecture `name` and a vocabulary of `vocab` tokens.
    pub fn new(files: &'a ModelFiles, name: &'static str, vocab: usize) -> Self {
        Self {
            metadata: Metadata::new(files.header(), name),
            tensors: Tensors::new(files),
            program: Builder::new(vocab),
            prefix: String::new(),
            vocab,
            embedding: None,
        }
    }

    /// Writes the first part: the token embeddings, times `scale`. Returns the residual stream.
    pub fn embedding(&mut self, hidden: usize, scale: f32) -> ValueId {
        self.program.part(PartKind::Embedding);
        let want = Want::Matrix { rows: self.vocab, cols: hidden };
        self.embedding = self.tensors.required("token embedding", "token_embd.weight", want);
        let table = self.put(self.embedding.clone(), Residence::Host);
        let out = self.program.value(hidden);
        self.program.push(Op::Embed { table, scale, out });
        out
    }

    /// Adds rows of a table of `rows` rows, `STEM.weight`, to `out`, which the token embeddings began.
    pub fn add_row(&mut self, role: &'static str, stem: &str, rows: usize, row: TableRow, out: ValueId) {
        let want = Want::Matrix { rows, cols: self.program.width(out) };
        let table = self.required(role, &format!("{stem}.weight"), want);
        self.program.push(Op::AddRow { table, row, out });
    }

    /// Adds a rotary embedding to the first part, with the file's frequency divisors if it has any.
    pub fn rope(&mut self, rope: &Rope) -> RopeId {
        let factors = rope.factors(&mut self.tensors);
        let factors = factors.map(|tensor| self.put(Some(tensor), Residence::Host));
        self.program.rope(rope.spec.clone(), factors)
    }

    /// As [`Writer::rope`], for a file that may have divisors for short and long contexts without saying so in a key.
    pub fn longrope(&mut self, rope: Rope) -> RopeId {
        let rope = rope.longrope_if_there(&self.tensors);
        self.rope(&rope)
    }

    /// Adds a rotary embedding that turns no value, for layers that use no positions.
    pub fn unrotated(&mut self, spec: &RopeSpec) -> RopeId {
        self.plain_rope(&RopeSpec { dims: 0, ..spec.clone() })
    }

    /// The angles for an architecture without frequency divisors.
    pub fn plain_rope(&mut self, spec: &RopeSpec) -> RopeId {
        self.program.rope(spec.clone(), None)
    }

    /// Begins a layer. Tensor names are those of block `index` from here on.
    pub fn layer(&mut self, index: usize) {
        self.program.part(PartKind::Layer(index as u32)); // at most LAYERS_MAX
        self.prefix = format!("blk.{index}.");
    }

    /// Allows tensors of block `index` that are never read.
    pub fn unused_layer(&mut self, index: usize) {
        self.tensors.unused_prefix(&format!("blk.{index}."));
    }

    /// Allows the layer's tensors `STEM*`, which are never read.
    pub fn unused(&mut self, stem: &str) {
        self.tensors.unused_prefix(&self.name(stem));
    }

    /// True when the part has the tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.has(&self.name(name))
    }

    /// Rows of a tensor of the part; `None` where the file has no such tensor.
    pub fn rows(&self, name: &str) -> Option<u64> {
        self.tensors.rows(&self.name(name))
    }

    /// Numbers per row of a value.
    pub fn width(&self, value: ValueId) -> usize {
        self.program.width(value)
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn put(&mut self, tensor: Option<LazyTensor>, residence: Residence) -> TensorId {
        tensor.map_or(MISSING, |tensor| self.program.tensor(tensor, residence))
    }

    fn required(&mut self, role: &'static str, name: &str, want: Want) -> TensorId {
        let name = self.name(name);
        let tensor = self.tensors.required(role, &name, want);
        self.put(tensor, Residence::Device)
    }

    fn present(
        &mut self,
        role: &'static str,
        name: &str,
        want: Want,
        presence: Presence,
    ) -> Option<TensorId> {
        let name = self.name(name);
        let tensor = self.tensors.present(role, &name, want, presence);
        tensor.map(|tensor| self.put(Some(tensor), Residence::Device))
    }

    /// Weight and bias of a norm over `group` neighbouring values.
    fn norm_op(
        &mut self,
        role: &'static str,
        stem: &str,
        norm: Norm,
        group: usize,
        from: ValueId,
        out: ValueId,
    ) -> Op {
        let want = Want::Vector(group);
        let weight = self.required(role, &format!("{stem}.weight"), want);
        let presence = if norm.bias { Presence::Required } else { Presence::Never };
        let bias = self.present(role, &format!("{stem}.bias"), want, presence);
        Op::Norm { kind: norm.kind, eps: norm.eps, weight, bias, from, out, add: false }
    }

    /// The norm `STEM` of whole rows.
    pub fn norm(&mut self, role: &'static str, stem: &str, norm: Norm, from: ValueId) -> ValueId {
        let width = self.program.width(from);
        let out = self.program.value(width);
        let op = self.norm_op(role, stem, norm, width, from, out);
        self.program.push(op);
        out
    }

    /// `out +=` the norm `STEM` of whole rows of `from`: a norm after a block, before the residual stream.
    pub fn add_norm(&mut self, role: &'static str, stem: &str, norm: Norm, from: ValueId, out: ValueId) {
        let op = self.norm_op(role, stem, norm, self.program.width(from), from, out);
        let Op::Norm { kind, eps, weight, bias, .. } = op else { return };
        self.program.push(Op::Norm { kind, eps, weight, bias, from, out, add: true });
    }

    /// The norm `STEM` of each group of `group` values, in place.
    pub fn norm_groups(&mut self, role: &'static str, stem: &str, norm: Norm, group: usize, value: ValueId) {
        let op = self.norm_op(role, stem, norm, group, value, value);
        self.program.push(op);
    }

    /// Projects by the matrix `STEM.weight` of `rows` outputs and the bias `STEM.bias`, as `bias` demands.
    pub fn project(
        &mut self,
        role: &'static str,
        stem: &str,
        from: ValueId,
        rows: usize,
        bias: Presence,
    ) -> ValueId {
        let out = self.program.value(rows);
        self.push_projection(role, stem, from, out, bias, false);
        out
    }

    /// As [`Writer::project`], and adds the result to `out`.
    pub fn add_projection(
        &mut self,
        role: &'static str,
        stem: &str,
        from: ValueId,
        out: ValueId,
        bias: Presence,
    ) {
        self.push_projection(role, stem, from, out, bias, true);
    }

    fn push_projection(
        &mut self,
        role: &'static str,
        stem: &str,
        from: ValueId,
        out: ValueId,
        bias: Presence,
        add: bool,
    ) {
        let (rows, cols) = (self.program.width(out), self.program.width(from));
        let weight = self.required(role, &format!("{stem}.weight"), Want::Matrix { rows, cols });
        let bias = self.present(role, &format!("{stem}.bias"), Want::Vector(rows), bias);
        let by = self.matrix_scale(role, stem, bias.is_some());
        self.push_scaled((weight, bias, by), from, out, add);
    }

    /// Appends the product with a matrix and its bias, times a factor if it has one.
    fn push_scaled(
        &mut self,
        (weight, bias, by): (TensorId, Option<TensorId>, Option<f32>),
        from: ValueId,
        out: ValueId,
        add: bool,
    ) {
        let Some(by) = by else { return self.program.push(Op::Project { weight, bias, from, out, add }) };
        let product = if add { self.program.value(self.program.width(out)) } else { out };
        self.program.push(Op::Project { weight, bias, from, out: product, add: false });
        self.program.push(match add {
            true => Op::Add { from: product, scale: by, out },
            false => Op::Scale { by, value: out },
        });
    }

    /// The factor `STEM.scale` of a whole matrix, as files with NVFP4 weights have it. It is a number of the computation, so it is read
    /// here. A matrix with a bias has none: the factor comes before the bias. `STEM.input_scale` is for activations in NVFP4.
    fn matrix_scale(&mut self, role: &'static str, stem: &str, has_bias: bool) -> Option<f32> {
        let [scale, input_scale] = ["scale", "input_scale"].map(|kind| self.name(&format!("{stem}.{kind}")));
        self.tensors.unused(&input_scale);
        if has_bias {
            return None;
        }
        let tensor = self.tensors.optional(role, &scale, Want::Vector(1))?;
        tensor.bytes().first_chunk().map(|bytes| f32::from_le_bytes(*bytes))
    }

    /// Cuts the matrix `STEM.weight` and the bias `STEM.bias` into pieces of `rows[i]` outputs, one projection each.
    pub fn project_pieces<const N: usize>(
        &mut self,
        role: &'static str,
        stem: &str,
        from: ValueId,
        rows: [usize; N],
        bias: Presence,
    ) -> [ValueId; N] {
        let (all, cols) = (rows.iter().sum(), self.program.width(from));
        let [weight_name, bias_name] = ["weight", "bias"].map(|kind| self.name(&format!("{stem}.{kind}")));
        let weight = self.tensors.required(role, &weight_name, Want::Matrix { rows: all, cols });
        let bias = self.tensors.present(role, &bias_name, Want::Vector(all), bias);
        let by = self.matrix_scale(role, stem, bias.is_some());
        let mut first = 0;
        rows.map(|rows| {
            let range = first..first + rows as u64;
            first = range.end;
            let name = |tensor: &LazyTensor| format!("{}[{}..{}]", tensor.name(), range.start, range.end);
            // A misshapen tensor has no such pieces; `finish` reports it.
            let weight = weight.as_ref().and_then(|all| all.part(&name(all), range.clone()).ok());
            let bias = bias.as_ref().and_then(|all| all.columns(&name(all), range.clone()).ok());
            let weight = self.put(weight, Residence::Device);
            let bias = bias.map(|bias| self.put(Some(bias), Residence::Device));
            let out = self.program.value(rows);
            self.push_scaled((weight, bias, by), from, out, false);
            out
        })
    }

    /// The three projections of attention, from one tensor or three.
    pub fn qkv(&mut self, heads: Heads, from: ValueId, bias: Presence) -> Qkv {
        if self.has("attn_qkv.weight") {
            let rows = [heads.query_width(), heads.key_width(), heads.key_width()];
            let role = "query, key and value projections";
            let [q, k, v] = self.project_pieces(role, "attn_qkv", from, rows, bias);
            return Qkv { q, k, v };
        }
        Qkv {
            q: self.project("query projection", "attn_q", from, heads.query_width(), bias),
            k: self.project("key projection", "attn_k", from, heads.key_width(), bias),
            v: self.project("value projection", "attn_v", from, heads.key_width(), bias),
        }
    }

    /// Multiplies a part of each of `heads` heads with a matrix of its own, of `rows` outputs. `STEM.weight` has all matrices.
    pub fn project_heads(
        &mut self,
        role: &'static str,
        stem: &str,
        from: ValueId,
        (heads, part): (usize, HeadPart),
        rows: usize,
    ) -> ValueId {
        let want = Want::Matrices { count: heads, rows, cols: part.width as usize };
        let weight = self.required(role, &format!("{stem}.weight"), want);
        let out = self.program.value_beside(from, heads * rows);
        self.program.push(Op::ProjectHeads { weight, from, part, out });
        out
    }

    /// Heads of two parts, of which each has values of its own.
    pub fn join_heads(
        &mut self,
        [(first, first_part), (second, second_part)]: [(ValueId, HeadPart); 2],
    ) -> ValueId {
        let heads = self.program.width(first) / (first_part.head_dim as usize).max(1);
        let out = self.program.value(heads * (first_part.width + second_part.width) as usize);
        self.program.push(Op::JoinHeads { first, first_part, second, second_part, out });
        out
    }

    /// Norms of each query and key head.
    pub fn head_norms(&mut self, norm: Norm, heads: Heads, qkv: Qkv) {
        self.norm_groups("query norm", "attn_q_norm", norm, heads.dim, qkv.q);
        self.norm_groups("key norm", "attn_k_norm", norm, heads.dim, qkv.k);
    }

    /// Rotates queries and keys, stores keys and values, and attends. Returns the attention output of each query head.
    pub fn attend(
        &mut self,
        heads: Heads,
        rope: RopeId,
        qkv: Qkv,
        scale: f32,
        window: Option<u32>,
    ) -> ValueId {
        self.rotate(heads, [rope, rope], qkv);
        self.attend_rotated(heads, qkv, scale, window)
    }

    /// The sinks of a layer's query heads, `attn_sinks.weight`: one number for each.
    pub fn sinks(&mut self, heads: Heads) -> TensorId {
        self.required("attention sinks", "attn_sinks.weight", Want::Vector(heads.queries))
    }

    /// Rotates queries by the first embedding and keys by the second.
    pub fn rotate(&mut self, heads: Heads, ropes: [RopeId; 2], Qkv { q, k, .. }: Qkv) {
        ropes.into_iter().zip([q, k]).for_each(|(rope, value)| self.rotate_value(heads, rope, value));
    }

    /// Rotates queries or keys.
    pub fn rotate_value(&mut self, heads: Heads, rope: RopeId, value: ValueId) {
        let head_dim = heads.dim as u32; // at most HEAD_DIM_MAX
        self.program.push(Op::Rope { rope, head_dim, value });
    }

    /// As [`Writer::attend`], with queries and keys that were rotated before.
    pub fn attend_rotated(&mut self, heads: Heads, qkv: Qkv, scale: f32, window: Option<u32>) -> ValueId {
        self.store_and_attend(heads, qkv, Attention::of(scale, window))
    }

    /// As [`Writer::attend_rotated`], with all attributes.
    pub fn store_and_attend(&mut self, heads: Heads, qkv: Qkv, how: Attention) -> ValueId {
        let state = self.store(heads, qkv.k, qkv.v);
        self.attend_to(state, qkv.q, how)
    }

    /// Stores keys and values in a state of their own.
    pub fn store(&mut self, heads: Heads, keys: ValueId, values: ValueId) -> StateId {
        let head_dim = heads.dim as u32; // at most HEAD_DIM_MAX
        let state = self.program.state(State::Kv { heads: heads.keys as u32, head_dim });
        self.program.push(Op::Store { state, keys, values });
        state
    }

    /// Attends to keys and values that this layer or an earlier one stores. Returns the output of each query head.
    pub fn attend_to(&mut self, state: StateId, queries: ValueId, how: Attention) -> ValueId {
        let out = self.program.value(self.program.width(queries));
        let Attention { scale, window, both_ways, cap, alibi, sinks } = how;
        self.program.push(Op::Attend { state, queries, scale, window, both_ways, cap, alibi, sinks, out });
        out
    }

    /// `activation(gate) * up`.
    pub fn gate(&mut self, activation: Activation, gate: ValueId, up: ValueId) -> ValueId {
        let out = self.program.value(self.program.width(gate));
        self.program.push(Op::Gate { activation, gate, up, out });
        out
    }

    /// `activation(from)`.
    pub fn activate(&mut self, activation: Activation, from: ValueId) -> ValueId {
        let out = self.program.value(self.program.width(from));
        self.program.push(Op::Activate { activation, from, out });
        out
    }

    /// Gate and up projections, combined. Returns the input of the down projection.
    pub fn gated(&mut self, from: ValueId, ffn: usize, activation: Activation, bias: Presence) -> ValueId {
        let gate = self.project("feed-forward gate", "ffn_gate", from, ffn, bias);
        let up = self.project("feed-forward up", "ffn_up", from, ffn, bias);
        self.gate(activation, gate, up)
    }

    /// As [`Writer::gated`], for files with gate and up in one tensor, `ffn_up`.
    pub fn gated_pieces(&mut self, from: ValueId, ffn: usize, activation: Activation) -> ValueId {
        let role = "feed-forward gate and up";
        let [gate, up] = self.project_pieces(role, "ffn_up", from, [ffn, ffn], Presence::Never);
        self.gate(activation, gate, up)
    }

    /// `out += scale * from`.
    pub fn add(&mut self, from: ValueId, scale: f32, out: ValueId) {
        self.program.push(Op::Add { from, scale, out });
    }

    /// The rest of a layer of Gemma after its attention: the output, and a feed-forward with GELU. Each has a norm of its own before
    /// it is added to `x`.
    pub fn add_normed_halves(&mut self, norm: Norm, attended: ValueId, x: ValueId, ffn: usize) {
        let hidden = self.program.width(x);
        let out = self.project("attention output", "attn_output", attended, hidden, Presence::Never);
        self.add_norm("norm after attention", "post_attention_norm", norm, out, x);
        let normed = self.norm("feed-forward norm", "ffn_norm", norm, x);
        let gated = self.gated(normed, ffn, Activation::Gelu, Presence::Never);
        let out = self.project("feed-forward down", "ffn_down", gated, hidden, Presence::Never);
        self.add_norm("norm after feed-forward", "post_ffw_norm", norm, out, x);
    }

    /// The attention half of a layer without a window: the norm of `x`, attention rotated by `rope`, and what the output adds to
    /// `x`. The first bias is that of queries, keys and values, the second the output's.
    pub fn self_attention(
        &mut self,
        norm: Norm,
        x: ValueId,
        heads: Heads,
        rope: RopeId,
        [qkv, out]: [Presence; 2],
    ) {
        let normed = self.norm("attention norm", "attn_norm", norm, x);
        let qkv = self.qkv(heads, normed, qkv);
        let attended = self.attend(heads, rope, qkv, heads.scale(), None);
        self.add_projection("attention output", "attn_output", attended, x, out);
    }

    /// The feed-forward half of a layer: the norm of `x`, gate and up with `bias`, and what down adds to `x`.
    pub fn feed_forward(&mut self, norm: Norm, x: ValueId, ffn: usize, bias: Presence) {
        let normed = self.norm("feed-forward norm", "ffn_norm", norm, x);
        let gated = self.gated(normed, ffn, Activation::Silu, bias);
        self.add_projection("feed-forward down", "ffn_down", gated, x, bias);
    }

    /// `value *= 1 / (1 + e^-gate)`, where the projection `STEM.weight` of `from` gives one `gate` for each row.
    pub fn open(&mut self, role: &'static str, stem: &str, from: ValueId, value: ValueId) {
        let gate = self.project(role, stem, from, 1, Presence::Never);
        self.program.push(Op::Open { gate, value });
    }

    /// `value = cap * tanh(value / cap)`.
    pub fn cap(&mut self, value: ValueId, cap: f32) {
        self.program.push(Op::Cap { cap, value });
    }

    /// `value *= by`.
    pub fn scale(&mut self, value: ValueId, by: f32) {
        if by != 1.0 {
            self.program.push(Op::Scale { by, value });
        }
    }

    /// Checks everything written so far and returns the plan.
    ///
    /// # Errors
    /// [`PlanError`]: all missing tensors, the first misshapen tensor, unknown tensors, or an unread key that may
    /// change the computation.
    pub fn finish(
        self,
        name: &'static str,
        result: Output,
        shape: Shape,
        context_length: u32,
    ) -> Result<ExecutionPlan, PlanError> {
        self.tensors.finish(name)?;
        let pooling = self.metadata.count_if_there("pooling_type", 0..=4)?.map_or(0, |number| number as u64);
        let wanted = Pooling::of_file(pooling);
        if pooling != 0 && wanted.is_none() && !self.program.scores() {
            return Err(self.metadata.unsupported("scores and no classifier, cls.output (pooling_type = 4)"));
        }
        super::unread_keys::check(&self.metadata, shape.hidden, context_length)?;
        let program = self.program.finish(result)?;
        Ok(ExecutionPlan {
            architecture: name.to_owned(),
            program: Arc::new(program),
            shape,
            context_length,
            pooling: wanted,
        })
    }
}
