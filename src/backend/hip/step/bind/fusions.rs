//! Operations that one kernel computes together.
//!
//! Heads: norms of query and key heads, their rotation, and the store of keys and values. The fused unit runs where
//! the last of them stood. Gates: two products of one input, and their gate. Rows with logits: their copy, and the norm
//! that reads it.

use super::uses::{Uses, VersionId};
use crate::program::{NormKind, Op, Program, RopeId, State, StateId, TensorId};

/// Operations fused into one unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fusion {
    /// Norm, rotation and store of heads.
    Heads(HeadsFusion),
    /// Operation numbers of the two products: the gate's, and the one multiplied with it.
    Gated([usize; 2]),
}

/// Heads that are normed, rotated and stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadsFusion {
    /// Values of a head.
    pub head_dim: u32,
    /// Rotary embedding, if the heads rotate.
    pub rope: Option<RopeId>,
    /// Query heads.
    pub queries: Option<Chain>,
    /// State that receives keys and values, the keys' chain, and the values' version.
    pub kv: Option<(StateId, Chain, VersionId)>,
}

/// Operations on heads: an optional norm, then an optional rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chain {
    /// Version before the chain.
    pub from: VersionId,
    /// Version after the chain.
    pub to: VersionId,
    /// Weights of the norm, and its epsilon.
    pub norm: Option<(TensorId, f32)>,
    rope: Option<RopeId>,
    /// Operation numbers of the norm and the rotation.
    ops: [Option<usize>; 2],
}

impl Chain {
    fn none(version: VersionId) -> Self {
        Self { from: version, to: version, norm: None, rope: None, ops: [None; 2] }
    }

    fn ops(&self) -> impl Iterator<Item = usize> {
        self.ops.into_iter().flatten()
    }
}

/// Fusions of a program's operations.
#[derive(Debug)]
pub struct Fusions {
    /// Fused units, by the operation whose place they take.
    at: Vec<Vec<Fusion>>,
    /// Operations that are part of a fused unit.
    absorbed: Vec<bool>,
}

impl Fusions {
    /// Finds the operations that can be fused.
    pub fn find(program: &Program, uses: &Uses<'_>) -> Self {
        let count = uses.ops.len();
        let mut fusions = Self { at: vec![Vec::new(); count], absorbed: vec![false; count] };
        for (number, place) in uses.ops.iter().enumerate() {
            match *place.op {
                Op::Attend { state, queries, .. } => {
                    if let Some(version) = uses.read(number, queries) {
                        fusions.attention(program, uses, number, state, version);
                    }
                }
                Op::Gate { .. } => fusions.gate(uses, number),
                Op::Take { .. } => fusions.take(uses, number),
                _ => {}
            }
        }
        for (number, place) in uses.ops.iter().enumerate() {
            if matches!(place.op, Op::Store { .. }) && !fusions.is_absorbed(number) {
                fusions.store_alone(program, uses, number);
            }
        }
        fusions
    }

    /// Whether an operation is part of a fused unit.
    pub fn is_absorbed(&self, op: usize) -> bool {
        self.absorbed.get(op).copied().unwrap_or(false)
    }

    /// Fused units in the place of an operation.
    pub fn at(&self, op: usize) -> &[Fusion] {
        self.at.get(op).map_or(&[], Vec::as_slice)
    }

    fn put(&mut self, op: usize, fusion: Fusion, absorbed: impl Iterator<Item = usize>) {
        if let Some(all) = self.at.get_mut(op) {
            all.push(fusion);
        }
        absorbed.for_each(|op| self.absorb(op));
    }

    fn absorb(&mut self, op: usize) {
        if let Some(absorbed) = self.absorbed.get_mut(op) {
            *absorbed = true;
        }
    }

    /// Fuses the queries of an attention with the keys and values stored for it.
    fn attention(
        &mut self,
        program: &Program,
        uses: &Uses<'_>,
        attend: usize,
        state: StateId,
        queries: VersionId,
    ) {
        let Some(&State::Kv { head_dim, .. }) = program.states().get(state.0 as usize) else { return };
        let queries = chain(program, uses, queries, head_dim, attend);
        let turned = queries.ops().next().is_some();
        let stored = self.stored(uses, attend, state);
        let keys = stored.and_then(|store| stored_chain(program, uses, store, head_dim));
        if let (true, Some(store), Some((keys, values))) = (turned, stored, keys) {
            let heads = HeadsFusion {
                head_dim,
                rope: queries.rope,
                queries: Some(queries),
                kv: Some((state, keys, values)),
            };
            if self.together(uses, store, heads) {
                return;
            }
        }
        if turned {
            let at = queries.ops().last().unwrap_or(attend);
            if self.holds(uses, &queries, at) {
                let heads = HeadsFusion { head_dim, rope: queries.rope, queries: Some(queries), kv: None };
                self.put(at, Fusion::Heads(heads), queries.ops());
            }
        }
    }

    /// Fuses queries, keys and values into one unit if that keeps the results. True when it did.
    fn together(&mut self, uses: &Uses<'_>, store: usize, heads: HeadsFusion) -> bool {
        let (Some(queries), Some((_, keys, values))) = (heads.queries, heads.kv) else { return false };
        let eps = |chain: &Chain| chain.norm.map(|(_, eps)| eps);
        let alike = queries.rope == keys.rope
            && (eps(&queries).is_none() || eps(&keys).is_none() || eps(&queries) == eps(&keys));
        let at = queries.ops().last().map_or(store, |last| last.max(store));
        let lasts = uses.versions.get(values).is_some_and(|version| version.gone > at);
        let unread = uses.versions.get(queries.to).is_some_and(|version| version.first_reader > at);
        if !alike || !lasts || !unread || !self.holds(uses, &queries, at) || !self.holds(uses, &keys, at) {
            return false;
        }
        self.put(at, Fusion::Heads(heads), queries.ops().chain(keys.ops()).chain([store]));
        true
    }

    /// The last store to this state before an attention, in the same part, unless another attention has taken it.
    fn stored(&self, uses: &Uses<'_>, attend: usize, state: StateId) -> Option<usize> {
        let part = uses.ops.get(attend)?.part;
        let before = uses.ops.iter().enumerate().take(attend).rev();
        let mut in_part = before.take_while(|(_, place)| place.part == part);
        let found = in_part
            .find(|(_, place)| matches!(place.op, Op::Store { state: stored, .. } if *stored == state));
        found.map(|(number, _)| number).filter(|number| !self.is_absorbed(*number))
    }

    /// Fuses a store of keys and values without any queries.
    fn store_alone(&mut self, program: &Program, uses: &Uses<'_>, store: usize) {
        let Some(&Op::Store { state, keys, values }) = uses.ops.get(store).map(|place| place.op) else {
            return;
        };
        let Some(&State::Kv { head_dim, .. }) = program.states().get(state.0 as usize) else { return };
        let (Some(keys), Some(values)) = (uses.read(store, keys), uses.read(store, values)) else { return };
        let chain = stored_chain(program, uses, store, head_dim).map(|(keys, _)| keys);
        let free =
            |chain: &Chain| chain.ops().all(|op| !self.is_absorbed(op)) && self.holds(uses, chain, store);
        let chain = chain.filter(free).unwrap_or(Chain::none(keys));
        let heads =
            HeadsFusion { head_dim, rope: chain.rope, queries: None, kv: Some((state, chain, values)) };
        self.put(store, Fusion::Heads(heads), chain.ops().chain([store]));
    }

    /// Whether a chain can run in the place of operation `at`: nothing else may overwrite its input before.
    fn holds(&self, uses: &Uses<'_>, chain: &Chain, at: usize) -> bool {
        let Some(from) = uses.versions.get(chain.from) else { return false };
        let part = uses.ops.get(at).map(|place| place.part);
        let here = |op: usize| uses.ops.get(op).map(|place| place.part) == part && !self.is_absorbed(op);
        (from.gone > at || chain.ops().any(|op| op == from.gone)) && chain.ops().all(here)
    }

    fn gate(&mut self, uses: &Uses<'_>, gate: usize) {
        let Some(&Op::Gate { gate: left, up: right, .. }) = uses.ops.get(gate).map(|place| place.op) else {
            return;
        };
        let part = uses.ops.get(gate).map(|place| place.part);
        // The product that makes a value only for this gate, and the version it reads.
        let product = |value| {
            let version = uses.read(gate, value).filter(|version| uses.is_read_by(*version, gate))?;
            let (number, place) = uses.maker(version)?;
            match place.op {
                Op::Project { from, add: false, .. } if Some(place.part) == part => {
                    Some((number, uses.read(number, *from)?))
                }
                _ => None,
            }
        };
        let (Some((left, from)), Some((right, other))) = (product(left), product(right)) else { return };
        let lasts = uses.versions.get(from).is_some_and(|version| version.gone > gate);
        if from == other && lasts {
            self.put(gate, Fusion::Gated([left, right]), [left, right, gate].into_iter());
        }
    }

    /// Omits a copy of rows that only one norm reads.
    fn take(&mut self, uses: &Uses<'_>, take: usize) {
        let Some(place) = uses.ops.get(take) else { return };
        let (Op::Take { from, .. }, Some(wrote)) = (place.op, place.wrote) else { return };
        let reader = uses.versions.get(wrote).map_or(usize::MAX, |version| version.first_reader);
        let norm = uses.ops.get(reader).filter(|reader| {
            let reads = matches!(reader.op, Op::Norm { from, .. } if uses.versions.get(wrote).is_some_and(|v| v.value == *from));
            reads && reader.part == place.part
        });
        let from = uses.read(take, *from).and_then(|id| uses.versions.get(id));
        if norm.is_some() && uses.is_read_by(wrote, reader) && from.is_some_and(|from| from.gone > reader) {
            self.absorb(take);
        }
    }
}

/// The chain of a store's keys, and the version of its values.
fn stored_chain(
    program: &Program,
    uses: &Uses<'_>,
    store: usize,
    head_dim: u32,
) -> Option<(Chain, VersionId)> {
    let Op::Store { keys, values, .. } = uses.ops.get(store)?.op else { return None };
    let (keys, values) = (uses.read(store, *keys)?, uses.read(store, *values)?);
    let chain = chain(program, uses, keys, head_dim, store);
    // Keys with another reader must stay in a plane.
    let alone = chain.from == chain.to || uses.is_read_by(chain.to, store);
    (alone && keys != values).then_some((chain, values))
}

/// The norm and rotation that made a version, as long as nothing else reads the versions in between.
fn chain(program: &Program, uses: &Uses<'_>, version: VersionId, head_dim: u32, reader: usize) -> Chain {
    let mut chain = Chain::none(version);
    let mut reader = reader;
    if let Some((number, place)) = uses.maker(version)
        && let Op::Rope { rope, head_dim: dim, .. } = place.op
        && *dim == head_dim
        && let Some(before) = uses.versions.get(version).and_then(|version| version.before)
    {
        chain = Chain { from: before, to: version, norm: None, rope: Some(*rope), ops: [None, Some(number)] };
        reader = number;
    }
    if uses.is_read_by(chain.from, reader)
        && let Some((number, place)) = uses.maker(chain.from)
        && let Op::Norm { kind: NormKind::Rms, eps, weight, bias: None, from, add: false, .. } = place.op
        && program.tensor(*weight).is_some_and(|tensor| {
            let shape = tensor.lazy.shape();
            shape.rows() == 1 && shape.cols() == u64::from(head_dim)
        })
        && let Some(before) = uses.read(number, *from)
    {
        chain.from = before;
        chain.norm = Some((*weight, *eps));
        chain.ops[0] = Some(number);
    }
    chain
}
