//! Checks that a program is consistent: numbers exist, shapes fit, values are written before they are read.
//!
//! Backends rely on this: they need not check any shape of a finished program again.

use super::{
    Activation, Classifier, Content, DeltaHeads, Encoder, HeadPart, Linear, Op, Output, Part, PartKind,
    Program, Residence, RopeId, Rows, State, StateId, TableRow, TensorId, Value, ValueId,
};
use crate::tensor::DType;

/// An inconsistent program: a bug in the architecture that wrote it, not a fault of the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("internal error: the program's {part}, operation {op}: {why}")]
pub struct ProgramError {
    /// The part.
    pub part: String,
    /// Number and name of the operation; empty for the part as a whole.
    pub op: String,
    /// The fault.
    pub why: String,
}

/// The context that an operation is checked against.
struct Checker<'a> {
    program: &'a Program,
    part: &'a Part,
    /// Per value: true when an operation has written it.
    written: &'a mut [bool],
}

type Found = Result<(), String>;

fn demand(holds: bool, why: impl FnOnce() -> String) -> Found {
    if holds { Ok(()) } else { Err(why()) }
}

fn finite_cap(cap: f32) -> Found {
    demand(cap > 0.0 && cap.is_finite(), || "a cap must be finite and above 0".into())
}

impl Program {
    /// Fails at the first inconsistency.
    pub(super) fn check(&self) -> Result<(), ProgramError> {
        let whole = |why: &str| ProgramError { part: "outline".into(), op: "-".into(), why: why.into() };
        let (Some(first), Some(last)) = (self.parts.first(), self.parts.last()) else {
            return Err(whole("the program has no parts"));
        };
        if first.kind != PartKind::Embedding || last.kind != PartKind::Head || self.parts.len() < 2 {
            return Err(whole("parts must be the embedding, the layers and the head, in order"));
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
        self.check_result(&written).map_err(|why| whole(&why))?;
        self.check_classifier().map_err(|why| whole(&why))
    }

    /// Checks the value that the program computes, and that rows see later ones in an encoder alone.
    fn check_result(&self, written: &[bool]) -> Found {
        let (Output::Logits(id) | Output::Rows(Encoder { rows: id, .. })) = self.result;
        let value = self.values.get(id.0 as usize).ok_or("the program has no result")?;
        let made = written.get(id.0 as usize) == Some(&true) && value.content == Content::Real;
        let ops = || self.parts.iter().flat_map(|part| &part.ops);
        match self.result {
            Output::Logits(_) => {
                demand(made && (value.rows, value.width) == (Rows::Wanted, self.vocab), || {
                    "logits must have one number per token, for the wanted rows".into()
                })?;
                demand(!ops().any(|op| matches!(op, Op::Attend { both_ways: true, .. })), || {
                    "a program with logits must not attend to later rows".into()
                })
            }
            Output::Rows(encoder) => {
                demand(made && value.rows == Rows::All && encoder.text_rows > 0, || {
                    "an encoder must have all rows, and texts of some".into()
                })?;
                demand(!ops().any(|op| matches!(op, Op::Take { .. })), || {
                    "an encoder must not take rows with logits".into()
                })
            }
        }
    }

    fn check_classifier(&self) -> Found {
        let Some(Classifier { of_mean, dense, output, labels, .. }) = self.classifier else { return Ok(()) };
        demand(!of_mean || self.encoder().is_some(), || "only rows of an encoder have a mean".into())?;
        let rows = self.last_rows().ok_or("a classifier needs rows of the last layer")?.value;
        let width = self.values.get(rows.0 as usize).map_or(0, |value| value.width);
        demand(labels > 0, || "a classifier must have a label".into())?;
        let last = self.parts.last().map_or(0..0, |part| part.tensors.clone());
        let of = |id: TensorId, rows: u32, cols: u32| {
            let tensor =
                self.tensor(id).filter(|_| last.contains(&id.0)).ok_or("no such classifier tensor")?;
            let (shape, host) = (tensor.lazy.shape(), tensor.residence == Residence::Host);
            demand(host && (shape.rows(), shape.cols()) == (rows.into(), cols.into()), || {
                format!("a classifier's tensor is {shape}, but must be the host's [{cols}, {rows}]")
            })
        };
        for (Linear { weight, bias }, rows) in
            dense.map(|dense| (dense.linear, width)).into_iter().chain([(output, labels)])
        {
            of(weight, rows, width)?;
            bias.map_or(Ok(()), |bias| of(bias, 1, rows))?;
        }
        let Some(norm) = dense.and_then(|dense| dense.norm) else { return Ok(()) };
        [Some(norm.weight), norm.bias].into_iter().flatten().try_for_each(|id| of(id, 1, width))
    }

    fn check_ropes(&self) -> Found {
        for rope in &self.ropes {
            demand(rope.spec.dims.is_multiple_of(2), || "the number of rotated values must be even".into())?;
            let Some(factors) = rope.factors else { continue };
            let tensor = self.tensor(factors).ok_or("no such rotary factors")?;
            let first = self.parts.first().is_some_and(|part| part.tensors.contains(&factors.0));
            demand(first && tensor.residence == Residence::Host, || {
                "rotary factors must be host tensors and belong to the first part".into()
            })?;
            let shape = tensor.lazy.shape();
            demand(shape.elements() == rope.spec.dims as u64 / 2, || {
                "the number of rotary factors must be half the rotated values".into()
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
            demand((value.content == Content::Choice) == choice, || {
                "the operation mixes numbers and choices".into()
            })?;
            let same = *rows.get_or_insert(value.rows) == value.rows;
            demand(same || matches!(op, Op::Take { .. }), || {
                "the operation mixes values of different rows".into()
            })?;
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
            Op::AddRow { table, row, out } => {
                demand(self.value(out)?.rows == Rows::All, || "rows are added to all rows".into())?;
                let least = match (row, self.program.result) {
                    (TableRow::Position, Output::Rows(encoder)) => encoder.text_rows,
                    (TableRow::Position, Output::Logits(_)) => {
                        return Err("rows of positions are added in an encoder alone".into());
                    }
                    (TableRow::First, _) => 1,
                };
                let shape = self.tensor(table)?.lazy.shape();
                let fits = shape.cols() == u64::from(self.width(out)?) && shape.rows() >= u64::from(least);
                demand(fits, || format!("the table has shape {shape}, for {least} rows or more"))
            }
            Op::Take { from, out } => {
                let (all, wanted) = (self.value(from)?, self.value(out)?);
                demand((all.rows, wanted.rows) == (Rows::All, Rows::Wanted), || {
                    "a take must copy all rows to wanted rows".into()
                })?;
                self.same_width(&[from, out])
            }
            Op::Norm { weight, bias, from, out, add, .. } => {
                demand(!add || from != out, || "a norm must not be added to its own input".into())?;
                self.norm(weight, bias, from, out)
            }
            Op::Project { weight, bias, from, out, .. } => {
                demand(from != out, || "a projection must not write its input".into())?;
                let rows = self.width(out)?;
                self.shape(weight, rows, self.width(from)?)?;
                bias.map_or(Ok(()), |bias| self.vector(bias, rows))
            }
            Op::ProjectHeads { weight, from, part, out } => {
                demand(from != out, || "a projection must not write its input".into())?;
                let (heads, rows) = (self.heads(from, part)?, self.width(out)?);
                demand(rows.is_multiple_of(heads), || "all heads must have equally many outputs".into())?;
                self.shape(weight, rows, part.width)
            }
            Op::JoinHeads { first, first_part, second, second_part, out } => {
                demand(first != out && second != out, || "joined heads must not be their own parts".into())?;
                let heads = self.heads(first, first_part)?;
                demand(self.heads(second, second_part)? == heads, || "the numbers of heads differ".into())?;
                let joined = first_part.width.checked_add(second_part.width);
                let width = joined.and_then(|joined| joined.checked_mul(heads));
                demand(width == Some(self.width(out)?), || "joined heads must have both parts".into())
            }
            Op::Rope { rope, head_dim, value } => self.rope(rope, head_dim, value),
            Op::Store { state, keys, values } => {
                let (heads, head_dim) = self.kv(state)?;
                self.same_width(&[keys, values])?;
                demand(Some(self.width(keys)?) == heads.checked_mul(head_dim), || {
                    "keys must be as wide as their state".into()
                })
            }
            Op::Attend { state, queries, window, cap, sinks, out, scale, .. } => {
                let (heads, head_dim) = self.kv(state)?;
                let whole = heads
                    .checked_mul(head_dim)
                    .is_some_and(|w| self.width(queries).is_ok_and(|q| q.is_multiple_of(w)));
                demand(whole, || "the width of the queries must be a multiple of the state's width".into())?;
                demand(window != Some(0) && scale.is_finite(), || {
                    "the window must include the row, and the scale must be finite".into()
                })?;
                cap.map_or(Ok(()), finite_cap)?;
                let query_heads = self.width(queries)? / head_dim;
                sinks.map_or(Ok(()), |sinks| self.vector(sinks, query_heads))?;
                self.same_width(&[queries, out])
            }
            Op::Gate { gate, up, out, .. } => {
                demand(gate != out && up != out, || "a gate must not write its inputs".into())?;
                self.same_width(&[gate, up, out])
            }
            Op::Activate { activation, from, out } => {
                demand(!matches!(activation, Activation::Clamped | Activation::Linear), || {
                    "this activation is of a gate and its up".into()
                })?;
                self.same_width(&[from, out])
            }
            Op::Add { from, out, .. } => {
                demand(from != out, || "a value must not be added to itself".into())?;
                self.same_width(&[from, out])
            }
            Op::Route { logits, out, bias, groups, .. } => {
                let (count, used) = (self.width(logits)?, self.width(out)?);
                bias.map_or(Ok(()), |bias| self.vector(bias, count))?;
                demand((1..=count).contains(&used), || format!("{used} of {count} experts are chosen"))?;
                groups.map_or(Ok(()), |groups| {
                    let known = groups.count > 0 && count.is_multiple_of(groups.count);
                    let size = if known { count / groups.count } else { 0 };
                    let enough = size >= 2 && u64::from(size) * u64::from(groups.used) >= u64::from(used);
                    demand(enough && groups.used <= groups.count, || {
                        format!("{used} of {count} experts are chosen of {groups:?}")
                    })
                })
            }
            Op::Experts { experts, factors, biases, activation, from, out, .. } => {
                let ffn = self.experts(experts, from, out)?;
                factors.into_iter().flatten().try_for_each(|factor| self.vector(factor, experts.count))?;
                let of_gates = matches!(activation, Activation::Clamped | Activation::Linear);
                let ungated = biases.is_none() && factors[0].is_none() && !of_gates;
                demand(experts.gated || ungated, || {
                    "experts without gates have no biases, no factors of gates, and no activation of a gate alone".into()
                })?;
                let widths = [ffn, ffn, self.width(out)?];
                let mut each = biases.into_iter().flatten().zip(widths);
                each.try_for_each(|(bias, width)| self.numbers(bias, experts.count, width))
            }
            Op::Cap { cap, .. } => finite_cap(cap),
            Op::Open { gate, value } => {
                demand(gate != value, || "a value must not be its own gate".into())?;
                demand(self.width(gate)? == 1, || "the gate of a row must be one number".into())
            }
            Op::Scale { .. } => Ok(()),
            Op::Slice { from, first, out } => {
                demand(from != out, || "a slice must not write its input".into())?;
                let end = first.checked_add(self.width(out)?);
                let inside = end.is_some_and(|end| self.width(from).is_ok_and(|width| end <= width));
                demand(inside, || "a slice must lie inside its input".into())
            }
            Op::Multiply { weight, value } => self.vector(weight, self.width(value)?),
            Op::Rescale { group, eps, like, value } => {
                demand(like != Some(value), || "a value must not be rescaled to itself".into())?;
                let whole = group > 0 && self.width(value)?.is_multiple_of(group);
                demand(whole, || "the groups of a rescaling must divide the width".into())?;
                demand(eps.is_finite() && eps > 0.0, || "the eps of a rescaling must be above 0".into())
            }
            Op::Sparsify { deviations, value } => {
                demand(deviations.is_finite(), || "the number of deviations must be finite".into())?;
                demand(self.width(value)? >= 2, || "one value has no deviation".into())
            }
            Op::MixStreams { amounts, from, out } => {
                demand(amounts != out && from != out, || "mixed streams must not be their own input".into())?;
                self.same_width(&[from, out])?;
                let (streams, width) = (self.width(amounts)?.isqrt(), self.width(from)?);
                let whole = streams > 0 && width.is_multiple_of(streams);
                demand(whole && streams * streams == self.width(amounts)?, || {
                    "streams must divide the width, with an amount for each pair of them".into()
                })
            }
            Op::AddToStreams { from, amounts, first, out } => {
                demand(from != out && amounts != Some(out), || "a value must not be added to itself".into())?;
                let (each, width) = (self.width(from)?, self.width(out)?);
                let streams = width.checked_div(each).filter(|streams| streams * each == width);
                let streams = streams.ok_or("streams must be as wide as what is added to them")?;
                demand(first < streams, || format!("there are only {streams} streams"))?;
                let known = amounts.map_or(Ok(streams), |amounts| self.width(amounts))?;
                demand(known == streams, || "there must be an amount for each stream".into())
            }
            Op::Convolve { state, weight, bias, from, out, .. } => {
                demand(from != out, || "a convolution must not write its input".into())?;
                self.same_width(&[from, out])?;
                let width = self.width(from)?;
                let taps = u32::try_from(self.tensor(weight)?.lazy.shape().cols()).unwrap_or(u32::MAX);
                demand(taps >= 2, || "a convolution must look back".into())?;
                self.numbers(weight, width, taps)?;
                bias.map_or(Ok(()), |bias| self.vector(bias, width))?;
                self.recurrent(state, (taps - 1).checked_mul(width))
            }
            Op::SelectiveScan { state, heads, groups, from, steps, step_bias, rate, skip, out } => {
                demand(from != out && steps != out, || "a scan must not write its inputs".into())?;
                let (width, all) = (self.width(out)?, self.width(from)?);
                let whole =
                    heads > 0 && width.is_multiple_of(heads) && groups > 0 && heads.is_multiple_of(groups);
                demand(whole, || format!("{width} values are no {heads} heads in {groups} groups"))?;
                let of_groups = all.checked_sub(width).filter(|rest| *rest > 0);
                let twice = groups.checked_mul(2);
                let columns = of_groups.zip(twice).filter(|(rest, twice)| rest.is_multiple_of(*twice));
                let columns = columns.map(|(rest, twice)| rest / twice);
                let columns = columns.ok_or("the input of a scan must have values of each group")?;
                demand(self.width(steps)? == heads, || "a scan must have a step for each head".into())?;
                [step_bias, rate, skip].into_iter().try_for_each(|id| self.each(id, heads))?;
                self.recurrent(state, width.checked_mul(columns))
            }
            Op::DeltaRule { state, heads, from, eps, decay, decay_bias, rate, amount, out } => {
                demand(from != out && decay != out && amount != out, || {
                    "a delta rule must not write its inputs".into()
                })?;
                let DeltaHeads { keys, key_dim, values, value_dim, .. } = heads;
                demand(
                    keys > 0 && values > 0 && values.is_multiple_of(keys) && key_dim > 0 && value_dim > 0,
                    || format!("{heads:?} are no heads"),
                )?;
                demand(heads.width() == Some(self.width(from)?), || {
                    "the input of a delta rule must be its queries, keys and values".into()
                })?;
                demand(values.checked_mul(value_dim) == Some(self.width(out)?), || {
                    "the result of a delta rule must have all value heads".into()
                })?;
                demand(eps.is_finite() && eps > 0.0, || "the eps of a delta rule must be above 0".into())?;
                demand([self.width(decay)?, self.width(amount)?] == [values; 2], || {
                    "a delta rule must have a decay and an amount for each value head".into()
                })?;
                [decay_bias, rate].into_iter().try_for_each(|id| self.each(id, values))?;
                self.recurrent(state, self.width(out)?.checked_mul(key_dim))
            }
        }
    }

    /// A state of so many values.
    fn recurrent(&self, id: StateId, expected: Option<u32>) -> Found {
        let found = match self.program.states.get(id.0 as usize) {
            Some(&State::Recurrent { values }) => Some(values),
            _ => None,
        };
        demand(found.is_some() && found == expected, || {
            format!("the operation needs a recurrent state of {expected:?} values")
        })
    }

    fn norm(&self, weight: TensorId, bias: Option<TensorId>, from: ValueId, out: ValueId) -> Found {
        self.same_width(&[from, out])?;
        let shape = self.tensor(weight)?.lazy.shape();
        let (group, rows) = (shape.cols(), shape.rows());
        let width = u64::from(self.width(from)?);
        let groups = width.checked_div(group).filter(|groups| groups * group == width);
        demand(groups.is_some_and(|groups| rows == 1 || rows == groups), || {
            format!("the group of a norm must divide the width {width}, but its weight is {shape}")
        })?;
        let [rows, group] = [rows, group].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        self.numbers(weight, rows, group)?;
        bias.map_or(Ok(()), |bias| self.numbers(bias, rows, group))
    }

    fn rope(&self, rope: RopeId, head_dim: u32, value: ValueId) -> Found {
        let rope = self.program.ropes.get(rope.0 as usize).ok_or("no such rotary embedding")?;
        let whole = head_dim > 0 && self.width(value)?.is_multiple_of(head_dim);
        demand(whole && rope.spec.dims <= head_dim as usize, || {
            "head_dim must divide the width and be at least the rotated values".into()
        })
    }

    /// Returns the number of heads, of which each has the part.
    fn heads(&self, value: ValueId, part: HeadPart) -> Result<u32, String> {
        let HeadPart { head_dim, first, width: of_part } = part;
        let width = self.width(value)?;
        let inside = of_part > 0 && first.checked_add(of_part).is_some_and(|end| end <= head_dim);
        demand(inside && width > 0 && width.is_multiple_of(head_dim), || {
            "heads must divide the width, and have the part".into()
        })?;
        Ok(width / head_dim)
    }

    /// Returns the width of the experts' hidden layer.
    fn experts(&self, experts: super::ExpertRange, from: ValueId, out: ValueId) -> Result<u32, String> {
        demand(from != out, || "experts must not write their input".into())?;
        let (from, out) = (self.width(from)?, self.width(out)?);
        let last = experts.count.checked_sub(1).ok_or("the layer has no experts")?;
        let [_, _, end] = experts.tensors(last);
        self.tensor(end)?;
        let [gate, ..] = experts.tensors(0);
        let ffn = self.tensor(gate)?.lazy.shape().rows() as u32;
        let mut types = None;
        for expert in 0..experts.count {
            let all = experts.tensors(expert);
            for id in all {
                demand(self.tensor(id)?.residence == Residence::Chosen, || {
                    "an expert must be loaded when chosen".into()
                })?;
            }
            let of = |id| self.tensor(id).map(|tensor| tensor.lazy.dtype());
            let found = (of(all[0])?, of(all[1])?, of(all[2])?);
            demand(*types.get_or_insert(found) == found, || "the experts of a layer differ in type".into())?;
            self.shape(all[0], ffn, from)?;
            self.shape(all[1], ffn, from)?;
            self.shape(all[2], out, ffn)?;
        }
        Ok(ffn)
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
            demand(width == first, || format!("widths {first} and {width} differ"))?;
        }
        Ok(())
    }

    fn kv(&self, id: StateId) -> Result<(u32, u32), String> {
        match self.program.states.get(id.0 as usize) {
            Some(&State::Kv { heads: heads @ 1.., head_dim: head_dim @ 1.. }) => Ok((heads, head_dim)),
            _ => Err("no such keys and values".into()),
        }
    }

    /// A tensor of the current part.
    fn tensor(&self, id: TensorId) -> Result<&super::Tensor, String> {
        demand(self.part.tensors.contains(&id.0), || {
            format!("tensor {} does not belong to this part", id.0)
        })?;
        self.program.tensor(id).ok_or_else(|| format!("no tensor {}", id.0))
    }

    fn host(&self, id: TensorId) -> Found {
        demand(self.tensor(id)?.residence == Residence::Host, || {
            "an embedding table must be a host tensor".into()
        })
    }

    fn shape(&self, id: TensorId, rows: u32, cols: u32) -> Found {
        let lazy = &self.tensor(id)?.lazy;
        let found = (lazy.shape().rows(), lazy.shape().cols());
        demand(found == (rows.into(), cols.into()), || {
            let fits = if rows == 1 { format!("[{cols}]") } else { format!("[{cols}, {rows}]") };
            format!("tensor {} is {}, but must have shape {fits}", lazy.name(), lazy.shape())
        })
    }

    fn vector(&self, id: TensorId, len: u32) -> Found {
        self.numbers(id, 1, len)
    }

    /// As [`Checker::vector`], also as a column: files have either.
    fn each(&self, id: TensorId, len: u32) -> Found {
        let cols = self.tensor(id)?.lazy.shape().cols();
        if cols == 1 { self.numbers(id, len, 1) } else { self.vector(id, len) }
    }

    /// A tensor that is used as it is.
    fn numbers(&self, id: TensorId, rows: u32, cols: u32) -> Found {
        self.shape(id, rows, cols)?;
        let lazy = &self.tensor(id)?.lazy;
        demand(lazy.dtype() == DType::F32, || format!("tensor {} must be F32", lazy.name()))
    }
}
