//! Whether a program agrees with itself: numbers exist, shapes fit, values are written before they are read.
//!
//! Backends rely on it: once a program is made, no operation of it needs another look at a shape.

use super::{
    Content, Op, Part, PartKind, Program, Residence, RopeId, Rows, State, StateId, TensorId, Value, ValueId,
};
use crate::tensor::DType;

/// A program that contradicts itself: a fault of the architecture that wrote it, not of the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("internal error: the program's {part}, operation {op}: {why}")]
pub struct ProgramError {
    /// Where.
    pub part: String,
    /// Number and name of the operation; of the part as a whole, empty.
    pub op: String,
    /// What is wrong.
    pub why: String,
}

/// What an operation is checked against.
struct Checker<'a> {
    program: &'a Program,
    part: &'a Part,
    /// By value: whether something has written it.
    written: &'a mut [bool],
}

type Found = Result<(), String>;

fn demand(holds: bool, why: impl FnOnce() -> String) -> Found {
    if holds { Ok(()) } else { Err(why()) }
}

impl Program {
    /// Refuses what does not hold.
    pub(super) fn check(&self) -> Result<(), ProgramError> {
        let whole = |why: &str| ProgramError { part: "outline".into(), op: "-".into(), why: why.into() };
        let (Some(first), Some(last)) = (self.parts.first(), self.parts.last()) else {
            return Err(whole("it has no parts"));
        };
        if first.kind != PartKind::Embedding || last.kind != PartKind::Head || self.parts.len() < 2 {
            return Err(whole("parts are the embedding, layers, and the head"));
        }
        let mut written = vec![false; self.values.len()];
        for part in &self.parts {
            for (number, op) in part.ops.iter().enumerate() {
                let mut checker = Checker { program: self, part, written: &mut written };
                checker.op(op).map_err(|why| ProgramError {
                    part: part.kind.to_string(),
                    op: format!("{number} ({})", op.name()),
                    why,
                })?;
            }
        }
        self.check_ropes().map_err(|why| whole(&why))?;
        let logits = self.values.get(self.logits.0 as usize).ok_or_else(|| whole("it has no logits"))?;
        let made = written.get(self.logits.0 as usize) == Some(&true);
        if !made || (logits.rows, logits.width, logits.content) != (Rows::Wanted, self.vocab, Content::Real) {
            return Err(whole("logits are one number for each token, of the wanted rows"));
        }
        Ok(())
    }

    fn check_ropes(&self) -> Found {
        for rope in &self.ropes {
            demand(rope.spec.dims.is_multiple_of(2), || "rotated values form pairs".into())?;
            let Some(factors) = rope.factors else { continue };
            let tensor = self.tensor(factors).ok_or("no such rotary factors")?;
            let first = self.parts.first().is_some_and(|part| part.tensors.contains(&factors.0));
            demand(first && tensor.residence == Residence::Host, || {
                "rotary factors are the host's, of the first part".into()
            })?;
            let shape = tensor.lazy.shape();
            demand(shape.elements() == rope.spec.dims as u64 / 2, || {
                "another number of rotary factors".into()
            })?;
        }
        Ok(())
    }
}

impl Checker<'_> {
    fn op(&mut self, op: &Op) -> Found {
        let mut rows = None;
        for (id, access) in op.values() {
            let value = self.value(id)?;
            let known = self.written.get(id.0 as usize).copied().unwrap_or(false);
            demand(known || !access.reads(), || format!("value {} is read before it is written", id.0))?;
            let choice = matches!(op, Op::Route { out, .. } if *out == id)
                || matches!(op, Op::Experts { choice, .. } if *choice == id);
            demand((value.content == Content::Choice) == choice, || "numbers and choices are mixed".into())?;
            let same = *rows.get_or_insert(value.rows) == value.rows;
            demand(same || matches!(op, Op::Take { .. }), || "values of other rows are mixed".into())?;
        }
        self.shapes(op)?;
        for (id, access) in op.values() {
            if let Some(known) = self.written.get_mut(id.0 as usize) {
                *known |= access.writes();
            }
        }
        Ok(())
    }

    fn shapes(&self, op: &Op) -> Found {
        match *op {
            Op::Embed { table, out, .. } => {
                self.host(table)?;
                self.shape(table, self.program.vocab, self.width(out)?)
            }
            Op::Take { from, out } => {
                let (all, wanted) = (self.value(from)?, self.value(out)?);
                demand((all.rows, wanted.rows) == (Rows::All, Rows::Wanted), || {
                    "wanted rows are taken of all rows".into()
                })?;
                self.same_width(&[from, out])
            }
            Op::Norm { weight, bias, from, out, add, .. } => {
                demand(!add || from != out, || "a norm is not added to its own input".into())?;
                self.norm(weight, bias, from, out)
            }
            Op::Project { weight, bias, from, out, .. } => {
                demand(from != out, || "a projection has another output than its input".into())?;
                let rows = self.width(out)?;
                self.shape(weight, rows, self.width(from)?)?;
                bias.map_or(Ok(()), |bias| self.vector(bias, rows))
            }
            Op::Rope { rope, head_dim, value } => self.rope(rope, head_dim, value),
            Op::Store { state, keys, values } => {
                let (heads, head_dim) = self.kv(state)?;
                self.same_width(&[keys, values])?;
                demand(Some(self.width(keys)?) == heads.checked_mul(head_dim), || {
                    "keys are not as wide as their state".into()
                })
            }
            Op::Attend { state, queries, window, out, scale } => {
                let (heads, head_dim) = self.kv(state)?;
                let whole = heads
                    .checked_mul(head_dim)
                    .is_some_and(|w| self.width(queries).is_ok_and(|q| q.is_multiple_of(w)));
                demand(whole, || "query heads are no multiple of the state's heads".into())?;
                demand(window != Some(0) && scale.is_finite(), || "a row sees itself".into())?;
                self.same_width(&[queries, out])
            }
            Op::Gate { gate, up, out, .. } => {
                demand(gate != out && up != out, || "a gate has an output of its own".into())?;
                self.same_width(&[gate, up, out])
            }
            Op::Activate { from, out, .. } => self.same_width(&[from, out]),
            Op::Add { from, out, .. } => {
                demand(from != out, || "a value is added to another".into())?;
                self.same_width(&[from, out])
            }
            Op::Route { logits, out, .. } => {
                let (count, used) = (self.width(logits)?, self.width(out)?);
                demand((1..=count).contains(&used), || format!("{used} experts of {count} are chosen"))
            }
            Op::Experts { experts, from, out, .. } => self.experts(experts, from, out),
            Op::Cap { cap, .. } => {
                demand(cap > 0.0 && cap.is_finite(), || "a cap is a number above 0".into())
            }
            Op::Scale { .. } => Ok(()),
        }
    }

    fn norm(&self, weight: TensorId, bias: Option<TensorId>, from: ValueId, out: ValueId) -> Found {
        self.same_width(&[from, out])?;
        let group = self.tensor(weight)?.lazy.shape().elements();
        let width = u64::from(self.width(from)?);
        demand(group > 0 && width.is_multiple_of(group), || "groups of a norm are not whole".into())?;
        let group = u32::try_from(group).map_err(|_| "a norm wider than a row")?;
        self.vector(weight, group)?;
        bias.map_or(Ok(()), |bias| self.vector(bias, group))
    }

    fn rope(&self, rope: RopeId, head_dim: u32, value: ValueId) -> Found {
        let rope = self.program.ropes.get(rope.0 as usize).ok_or("no such rotary embedding")?;
        let whole = head_dim > 0 && self.width(value)?.is_multiple_of(head_dim);
        demand(whole && rope.spec.dims <= head_dim as usize, || {
            "heads are not whole, or shorter than what turns".into()
        })
    }

    fn experts(&self, experts: super::ExpertRange, from: ValueId, out: ValueId) -> Found {
        demand(from != out, || "experts have another output than their input".into())?;
        let (from, out) = (self.width(from)?, self.width(out)?);
        let last = experts.count.checked_sub(1).ok_or("a layer of no experts")?;
        let [_, _, end] = experts.tensors(last);
        self.tensor(end)?;
        let [gate, ..] = experts.tensors(0);
        let ffn = self.tensor(gate)?.lazy.shape().rows() as u32;
        let mut types = None;
        for expert in 0..experts.count {
            let all = experts.tensors(expert);
            for id in all {
                demand(self.tensor(id)?.residence == Residence::Chosen, || {
                    "an expert comes when chosen".into()
                })?;
            }
            let of = |id| self.tensor(id).map(|tensor| tensor.lazy.dtype());
            let found = (of(all[0])?, of(all[1])?, of(all[2])?);
            demand(*types.get_or_insert(found) == found, || "experts of one layer differ in type".into())?;
            self.shape(all[0], ffn, from)?;
            self.shape(all[1], ffn, from)?;
            self.shape(all[2], out, ffn)?;
        }
        Ok(())
    }

    fn value(&self, id: ValueId) -> Result<Value, String> {
        self.program.values.get(id.0 as usize).copied().ok_or_else(|| format!("no value {}", id.0))
    }

    fn width(&self, id: ValueId) -> Result<u32, String> {
        Ok(self.value(id)?.width)
    }

    fn same_width(&self, ids: &[ValueId]) -> Found {
        let mut widths = ids.iter().map(|id| self.width(*id));
        let first = widths.next().unwrap_or(Ok(0))?;
        for width in widths {
            let width = width?;
            demand(width == first, || format!("values of {first} and of {width} numbers"))?;
        }
        Ok(())
    }

    fn kv(&self, id: StateId) -> Result<(u32, u32), String> {
        match self.program.states.get(id.0 as usize) {
            Some(&State::Kv { heads: heads @ 1.., head_dim: head_dim @ 1.. }) => Ok((heads, head_dim)),
            _ => Err("no such keys and values".into()),
        }
    }

    /// A tensor of the part at hand.
    fn tensor(&self, id: TensorId) -> Result<&super::Tensor, String> {
        demand(self.part.tensors.contains(&id.0), || format!("tensor {} is not of this part", id.0))?;
        self.program.tensor(id).ok_or_else(|| format!("no tensor {}", id.0))
    }

    fn host(&self, id: TensorId) -> Found {
        demand(self.tensor(id)?.residence == Residence::Host, || {
            "rows of a table are the host's to read".into()
        })
    }

    fn shape(&self, id: TensorId, rows: u32, cols: u32) -> Found {
        let lazy = &self.tensor(id)?.lazy;
        let found = (lazy.shape().rows(), lazy.shape().cols());
        demand(found == (rows.into(), cols.into()), || {
            let fits = if rows == 1 { format!("[{cols}]") } else { format!("[{cols}, {rows}]") };
            format!("tensor {} is {} where {fits} fits", lazy.name(), lazy.shape())
        })
    }

    fn vector(&self, id: TensorId, len: u32) -> Found {
        self.shape(id, 1, len)?;
        let lazy = &self.tensor(id)?.lazy;
        demand(lazy.dtype() == DType::F32, || format!("tensor {} is no vector of F32", lazy.name()))
    }
}
