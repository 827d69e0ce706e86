//! Writes residual streams that run beside each other (AltUp), and what belongs to them.

use super::{Norm, Presence, Want, Writer};
use crate::program::{HeadPart, Op, Residence, TensorId, ValueId};

/// Added to the mean square of a row that gets the size of another one: it keeps rows of zeros.
const NO_SIZE: f32 = f32::MIN_POSITIVE;

/// The router of a layer, which reads a row of one stream and gives a number for each stream.
#[derive(Clone, Copy)]
pub(in crate::model::arch) struct Router {
    norm: Norm,
    norm_weight: TensorId,
    weight: TensorId,
    streams: usize,
}

impl Writer<'_> {
    /// Rows of another table of the tokens, times `scale`, in the first part.
    pub fn embed_beside(&mut self, role: &'static str, stem: &str, width: usize, scale: f32) -> ValueId {
        let want = Want::Matrix { rows: self.vocab, cols: width };
        let table = self.tensors.required(role, &format!("{stem}.weight"), want);
        let table = self.put(table, Residence::Host);
        let out = self.program.value(width);
        self.program.push(Op::Embed { table, scale, out });
        out
    }

    /// Writes operations of the current part whose tensors belong to no layer.
    pub fn outside_layer<R>(&mut self, write: impl FnOnce(&mut Self) -> R) -> R {
        let prefix = std::mem::take(&mut self.prefix);
        let result = write(self);
        self.prefix = prefix;
        result
    }

    /// `x`, then products of `x` with each of the other streams' matrices, `STEM.weight`, as large as `x`.
    pub fn streams_of(&mut self, stem: &str, x: ValueId, streams: usize) -> ValueId {
        let (hidden, others) = (self.program.width(x), streams - 1);
        let want = Want::Matrices { count: others, rows: hidden, cols: hidden };
        let weight = self.required("projections to the other streams", &format!("{stem}.weight"), want);
        let added = self.program.value(others * hidden);
        self.program.push(Op::Project { weight, bias: None, from: x, out: added, add: false });
        self.resize(added, hidden, x);
        let whole = |width: usize| HeadPart::whole(width as u32); // at most STREAMS_MAX * WIDTH_MAX
        self.join_heads([(x, whole(hidden)), (added, whole(others * hidden))])
    }

    /// The mean of the first stream and of products of the others with a matrix each, `STEM.weight`, as large as the first.
    pub fn merge_streams(&mut self, stem: &str, from: ValueId, streams: usize) -> ValueId {
        let (hidden, others) = (self.program.width(from) / streams, streams - 1);
        let first = self.slice(from, 0, hidden);
        let rest = self.slice(from, hidden, others * hidden);
        let heads = (others, HeadPart::whole(hidden as u32)); // at most WIDTH_MAX
        let merged = self.project_heads("projections of the other streams", stem, rest, heads, hidden);
        self.resize(merged, hidden, first);
        let each: Vec<_> = (0..others).map(|stream| self.slice(merged, stream * hidden, hidden)).collect();
        each.into_iter().for_each(|stream| self.add(stream, 1.0, first));
        self.scale(first, 1.0 / streams as f32);
        first
    }

    fn resize(&mut self, value: ValueId, group: usize, like: ValueId) {
        let group = group as u32; // at most WIDTH_MAX
        self.program.push(Op::Rescale { group, eps: NO_SIZE, like: Some(like), value });
    }

    /// The layer's router among `streams`.
    pub fn router(&mut self, norm: Norm, hidden: usize, streams: usize) -> Router {
        let want = Want::Vector(hidden);
        let norm_weight = self.required("norm of the streams' router", "altup_router_norm.weight", want);
        let want = Want::Matrix { rows: streams, cols: hidden };
        let weight = self.required("streams' router", "altup_router.weight", want);
        Router { norm, norm_weight, weight, streams }
    }

    /// Numbers between -1 and 1 that the router gives for `x`, one for each stream.
    pub fn route_streams(&mut self, router: Router, x: ValueId) -> ValueId {
        let Router { norm: Norm { kind, eps, .. }, norm_weight, weight, streams } = router;
        let hidden = self.program.width(x);
        let normed = self.program.value(hidden);
        let norm = Op::Norm { kind, eps, weight: norm_weight, bias: None, from: x, out: normed, add: false };
        self.program.push(norm);
        let out = self.program.value(streams);
        self.program.push(Op::Project { weight, bias: None, from: normed, out, add: false });
        self.scale(out, 1.0 / hidden as f32);
        self.cap(out, 1.0);
        out
    }

    /// Each stream of `from`, and the weighted sum of all: the amounts are the projection `STEM.weight` of `routed`.
    pub fn mix_streams(&mut self, stem: &str, routed: ValueId, from: ValueId) -> ValueId {
        let streams = self.program.width(routed);
        let role = "amounts of the streams' mix";
        let amounts = self.project(role, stem, routed, streams * streams, Presence::Never);
        let out = self.program.value(self.program.width(from));
        self.program.push(Op::MixStreams { amounts, from, out });
        out
    }

    /// See [`Op::AddToStreams`].
    pub fn add_to_streams(&mut self, from: ValueId, amounts: Option<ValueId>, first: u32, out: ValueId) {
        self.program.push(Op::AddToStreams { from, amounts, first, out });
    }

    /// `width` neighbouring values of each row, from `first` on.
    pub fn slice(&mut self, from: ValueId, first: usize, width: usize) -> ValueId {
        let out = self.program.value_beside(from, width);
        let first = u32::try_from(first).unwrap_or(u32::MAX); // the program's check refuses it
        self.program.push(Op::Slice { from, first, out });
        out
    }

    /// `value *=` the vector `NAME`.
    pub fn multiply(&mut self, role: &'static str, name: &str, value: ValueId) {
        let weight = self.required(role, name, Want::Vector(self.program.width(value)));
        self.program.push(Op::Multiply { weight, value });
    }

    /// Divides each head by the root of its mean square.
    pub fn norm_heads_without_weights(&mut self, norm: Norm, head_dim: usize, value: ValueId) {
        let group = head_dim as u32; // at most HEAD_DIM_MAX
        self.program.push(Op::Rescale { group, eps: norm.eps.max(NO_SIZE), like: None, value });
    }

    /// See [`Op::Sparsify`].
    pub fn sparsify(&mut self, deviations: f32, value: ValueId) {
        self.program.push(Op::Sparsify { deviations, value });
    }
}
