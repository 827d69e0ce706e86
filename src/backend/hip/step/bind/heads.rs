//! Heads before attention: queries, keys and values side by side in one plane, and the unit that takes them.

use super::fusions::{Chain, Fusion, HeadsFusion};
use super::limits;
use super::lower::Lower;
use super::unit::{Heads, HeadsView, Home, JoinHeads, Kv, Operand, ProjectHeads, Turn, View, Work};
use super::uses::VersionId;
use crate::backend::BackendError;
use crate::program::{HeadPart, Op, RopeId, Rows, State, StateId, ValueId};

/// A plane with rows `[queries | keys | values]`.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    width: u32,
    /// `None` until a unit first writes to it.
    view: Option<View>,
}

impl Lower<'_> {
    /// Assigns the inputs of each heads unit adjacent columns of one plane.
    pub fn plan_heads(&mut self) -> Result<(), BackendError> {
        for op in 0..self.uses.ops.len() {
            for fusion in self.fusions.at(op).to_vec() {
                let Fusion::Heads(heads) = fusion else { continue };
                let group = self.groups.len();
                let mut width = 0;
                for version in inputs(&heads) {
                    if let Some(root) = self.root(version) {
                        self.planned.entry(root).or_insert((group, width));
                    }
                    width += self.value(self.version(version)?.value)?.width;
                }
                self.groups.push(Group { width: limits::width(width)?, view: None });
            }
        }
        Ok(())
    }

    /// The version in which a value was first written, if all later writers accept rows with gaps.
    fn root(&self, version: VersionId) -> Option<VersionId> {
        let mut version = version;
        loop {
            let (_, place) = self.uses.maker(version)?;
            match *place.op {
                Op::Project { add: false, .. } => return Some(version),
                Op::Norm { add: false, from, out, .. } if from != out => return Some(version),
                Op::Project { .. }
                | Op::Norm { .. }
                | Op::Add { .. }
                | Op::Cap { .. }
                | Op::Rescale { .. }
                | Op::Multiply { .. }
                | Op::Sparsify { .. }
                | Op::Scale { .. } => {
                    version = self.uses.versions.get(version)?.before?;
                }
                _ => return None,
            }
        }
    }

    /// Columns of a heads plane, from `column` on.
    pub fn beside(&mut self, group: usize, column: u32) -> View {
        let (width, view) = self.groups.get(group).map_or((0, None), |group| (group.width, group.view));
        let view = view.unwrap_or_else(|| self.plane(width, Rows::All));
        if let Some(group) = self.groups.get_mut(group) {
            group.view = Some(view);
        }
        View { column, ..view }
    }

    /// Emits the unit that norms, rotates and stores heads.
    pub fn heads(&mut self, heads: HeadsFusion) -> Result<(), BackendError> {
        limits::head(heads.head_dim)?;
        let group = self.groups_used;
        self.groups_used += 1;
        let mut column = 0;
        for version in inputs(&heads) {
            column += self.gather(version, group, column)?;
        }
        let from = self.beside(group, 0);
        let chains = [heads.queries, heads.kv.map(|(_, keys, _)| keys)];
        let norm = |chain: Option<Chain>| chain.and_then(|chain| chain.norm);
        let eps = chains.into_iter().find_map(norm).map_or(0.0, |(_, eps)| eps);
        let norms = chains.map(|chain| norm(chain).map(|(weight, _)| self.operand(weight)));
        if limits::is_wide(heads.head_dim) && norms != [None; 2] {
            return Err(limits::operation(format!("norms of heads of {} values", heads.head_dim)));
        }
        let kv = heads.kv.map(|(state, ..)| self.kv(state)).transpose()?;
        let queries = match heads.queries {
            None => None,
            Some(queries) => {
                let width = self.value(self.version(queries.to)?.value)?.width;
                let view = self.fresh(queries.to, true)?.float;
                view.map(|view| (width / heads.head_dim, view))
            }
        };
        let rope = heads.rope.map(|rope| self.turn(rope)).transpose()?;
        let unit = Heads { from, head_dim: heads.head_dim, rope, queries, kv, norms, eps };
        self.emit(Work::Heads(unit), Rows::All);
        heads.queries.map_or(Ok(()), |queries| self.convert(queries.to))
    }

    /// Emits a rotation that is not fused.
    pub fn rope(&mut self, number: usize, rope: RopeId, head_dim: u32) -> Result<(), BackendError> {
        limits::head(head_dim)?;
        let wrote = self.wrote(number)?;
        let version = self.version(wrote)?;
        let value = self.value(version.value)?;
        if value.rows != Rows::All {
            return Err(limits::operation("a rotation of only the rows with logits"));
        }
        let from = self.float(version.before.unwrap_or(wrote))?;
        let from = self.whole(from, value.width, value.rows);
        let Home { float: out, .. } = self.fresh(wrote, true)?;
        let rope = Some(self.turn(rope)?);
        let queries = out.map(|out| (value.width / head_dim, out));
        let unit = Heads { from, head_dim, rope, queries, kv: None, norms: [None::<Operand>; 2], eps: 0.0 };
        self.emit(Work::Heads(unit), Rows::All);
        self.convert(wrote)
    }

    /// Emits the product of each head's part with its matrix.
    pub fn project_heads(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::ProjectHeads { weight, from, part, out } = *op else { return Ok(()) };
        let tensor = limits::tensor(self.program, weight)?;
        limits::matrix(tensor)?;
        limits::part(part)?;
        let dtype = tensor.dtype();
        let (from, heads) = self.part_of_heads(number, from, part)?;
        let value = self.value(out)?;
        limits::heads(heads)?;
        let (weight, wrote) = (self.operand(weight), self.wrote(number)?);
        if let Some(out) = self.fresh(wrote, true)?.float {
            let out_of_head = value.width / heads.max(1);
            let unit = ProjectHeads { from, heads, weight, dtype, outputs: out_of_head, out };
            self.emit(Work::ProjectHeads(unit), value.rows);
        }
        self.convert(wrote)
    }

    /// Emits the join of two parts of heads.
    pub fn join_heads(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::JoinHeads { first, first_part, second, second_part, out } = *op else { return Ok(()) };
        let (first, heads) = self.part_of_heads(number, first, first_part)?;
        let (second, _) = self.part_of_heads(number, second, second_part)?;
        let (wrote, rows) = (self.wrote(number)?, self.value(out)?.rows);
        if let Some(out) = self.fresh(wrote, true)?.float {
            self.emit(Work::JoinHeads(JoinHeads { first, second, heads, out }), rows);
        }
        self.convert(wrote)
    }

    /// A part of all heads of a value that an operation reads, and their number.
    fn part_of_heads(
        &mut self,
        number: usize,
        value: ValueId,
        part: HeadPart,
    ) -> Result<(HeadsView, u32), BackendError> {
        let HeadPart { head_dim, first, width } = part;
        let view = self.float(self.read(number, value)?)?;
        let value = self.value(value)?;
        let view = self.whole(view, value.width, value.rows);
        let rows = View { column: view.column + first, ..view };
        Ok((HeadsView { rows, head_dim, width }, value.width / head_dim.max(1)))
    }

    /// Copies a version into a heads plane unless it is there. Returns its width.
    fn gather(&mut self, version: VersionId, group: usize, column: u32) -> Result<u32, BackendError> {
        let value = self.value(self.version(version)?.value)?;
        if value.rows != Rows::All {
            return Err(limits::operation("attention of only the rows with logits"));
        }
        let (view, wanted) = (self.float(version)?, self.beside(group, column));
        if view != wanted {
            self.copy(view, wanted, value.width, Rows::All);
        }
        Ok(value.width)
    }

    fn turn(&self, rope: RopeId) -> Result<Turn, BackendError> {
        let spec = self.program.ropes().get(rope.0 as usize).map(|rope| &rope.spec);
        let spec =
            spec.ok_or_else(|| BackendError::Internal("there is no such rotary embedding".to_owned()))?;
        Ok(Turn { rope, dims: spec.dims as u32, layout: spec.layout })
    }

    /// Page offset and heads of a state.
    pub fn kv(&self, state: StateId) -> Result<Kv, BackendError> {
        let missing = || BackendError::Internal("there is no such KV state".to_owned());
        let offset = self.kv.offsets.get(state.0 as usize).copied().ok_or_else(missing)?;
        match self.program.states().get(state.0 as usize) {
            Some(&State::Kv { heads, .. }) => Ok(Kv { offset, heads }),
            Some(State::Recurrent { .. }) | None => Err(missing()),
        }
    }
}

/// Inputs of a heads unit, in the order of its plane.
fn inputs(heads: &HeadsFusion) -> impl Iterator<Item = VersionId> + use<> {
    let queries = heads.queries.map(|queries| queries.from);
    let kv = heads.kv.map(|(_, keys, values)| [keys.from, values]);
    queries.into_iter().chain(kv.into_iter().flatten())
}
