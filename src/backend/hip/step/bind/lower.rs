//! Lowering: turns operations into units, and gives the values between them homes.

use std::collections::HashMap;

use super::forms::{Form, Forms, Wanted};
use super::fusions::{Fusion, Fusions};
use super::heads::Group;
use super::planes::{PlaneId, Planes};
use super::unit::{Add, Choice, Convert, Home, Operand, TableRows, Unit, View, Work};
use super::uses::{Uses, Version, VersionId};
use super::{Bound, BoundPart, ScratchNeed, limits, neighbours};
use crate::backend::hip::step::Modes;
use crate::backend::hip::step::kv::KvLayout;
use crate::backend::hip::step::scratch::padded;
use crate::backend::hip::step::states::StateLayout;
use crate::backend::{BackendError, StepLimits};
use crate::program::{Program, Rows, TensorId, Value, ValueId};

/// State while a program is lowered.
pub struct Lower<'a> {
    pub program: &'a Program,
    pub limits: StepLimits,
    pub modes: Modes,
    pub uses: Uses<'a>,
    pub fusions: Fusions,
    pub planes: Planes,
    pub parts: Vec<BoundPart>,
    /// Number of units so far, over all parts.
    pub units: u32,
    /// Home of each version, by version number.
    pub homes: Vec<Option<Home>>,
    /// Versions that select rows of another version and are not copied, with the source.
    pub taken: HashMap<VersionId, View>,
    /// Versions placed in a heads plane: the plane's number and the first column.
    pub planned: HashMap<VersionId, (usize, u32)>,
    /// Heads planes.
    pub groups: Vec<Group>,
    /// Number of heads planes used so far.
    pub groups_used: usize,
    /// Expert choices by version, and the index of the unit that makes each in its part.
    pub choices: HashMap<VersionId, (Choice, usize)>,
    /// Input of the last unit, if it is a product that others may join.
    pub joins: Option<VersionId>,
    pub kv: KvLayout,
    pub states: StateLayout,
    pub room: ScratchNeed,
    pub windows: Vec<u32>,
    pub group_max: u32,
    pub tile_queries: u32,
    pub tables: Vec<TableRows>,
    pub both_ways: bool,
    pub around: bool,
    /// The rows that the last take reads, or those of an encoder.
    pub last_rows: Option<View>,
}

/// Lowers a program's operations to units.
///
/// # Errors
/// [`BackendError`] when no kernel computes an operation.
pub fn lower(program: &Program, limits: StepLimits, modes: Modes) -> Result<Bound, BackendError> {
    limits::rows(limits.rows)?;
    limits::rows(limits.wanted_rows)?;
    for value in program.values() {
        limits::width(value.width)?;
    }
    let kv = KvLayout::of(program, modes.kv);
    let kv = kv.ok_or(BackendError::Dims("a KV page exceeds the address space"))?;
    let states = StateLayout::of(program);
    let states = states.ok_or(BackendError::Dims("recurrent states exceed the address space"))?;
    let mut uses = Uses::of(program, limits, modes);
    // The result is read after the last unit, in f32.
    let value = program.logits().or(program.encoder().map(|encoder| encoder.rows));
    let result = uses.versions.iter().rposition(|version| Some(version.value) == value);
    let result = result.ok_or_else(|| BackendError::Internal("the program has no result".to_owned()))?;
    if let Some(version) = uses.versions.get_mut(result) {
        version.wanted = version.wanted.and(Wanted::FLOAT);
    }
    let mut lower = Lower {
        fusions: Fusions::find(program, &uses),
        planes: Planes::default(),
        parts: Vec::with_capacity(program.parts().len()),
        units: 0,
        homes: vec![None; uses.versions.len()],
        taken: HashMap::new(),
        planned: HashMap::new(),
        groups: Vec::new(),
        groups_used: 0,
        choices: HashMap::new(),
        joins: None,
        room: ScratchNeed::default(),
        windows: Vec::new(),
        group_max: 0,
        tile_queries: u32::MAX,
        tables: Vec::new(),
        both_ways: false,
        around: false,
        last_rows: None,
        program,
        limits,
        modes,
        uses,
        kv,
        states,
    };
    lower.plan_heads()?;
    let mut number = 0;
    for part in program.parts() {
        lower.parts.push(BoundPart::default());
        lower.joins = None;
        for op in &part.ops {
            lower.op(number, op)?;
            number += 1;
        }
    }
    lower.finish(result)
}

impl Lower<'_> {
    fn op(&mut self, number: usize, op: &crate::program::Op) -> Result<(), BackendError> {
        for fusion in self.fusions.at(number).to_vec() {
            match fusion {
                Fusion::Heads(heads) => self.heads(heads)?,
                Fusion::Gated(products) => self.gated(number, products)?,
            }
        }
        if self.fusions.is_absorbed(number) {
            return self.absorbed(number, op);
        }
        self.single(number, op)
    }

    fn finish(mut self, result: VersionId) -> Result<Bound, BackendError> {
        let view = self.float(result)?;
        let logits = if self.program.logits().is_some() {
            Some(self.whole(view, self.program.vocab() as u32, Rows::Wanted))
        } else {
            self.last_rows = Some(view);
            None
        };
        if let Some(logits) = logits {
            self.planes.keep(logits.plane);
        }
        if let Some(rows) = self.last_rows {
            self.planes.keep(rows.plane);
        }
        neighbours::hand_over(&mut self.parts, &mut self.planes);
        let (slots, places) = self.planes.place();
        Ok(Bound {
            parts: self.parts,
            slots,
            places,
            room: self.room,
            kv: self.kv,
            states: self.states,
            tables: self.tables,
            both_ways: self.both_ways,
            around: self.around,
            logits,
            last_rows: self.last_rows,
            windows: self.windows,
            group_max: self.group_max,
            tile_queries: self.tile_queries,
            limits: self.limits,
            modes: self.modes,
        })
    }

    /// Appends a unit to the current part.
    pub fn emit(&mut self, work: Work, rows: Rows) {
        for plane in work.planes() {
            self.planes.touch(plane, self.units);
        }
        if let Some(part) = self.parts.last_mut() {
            let operands = part.operands.len() as u32; // small: a few operands per operation
            part.units.push(Unit { work, rows, operands });
            self.units += 1;
        }
        self.joins = None;
    }

    /// The operand number of a tensor in the current part; adds the tensor if it is new.
    pub fn operand(&mut self, id: TensorId) -> Operand {
        let Some(part) = self.parts.last_mut() else { return Operand(0) };
        let known = part.operands.iter().position(|known| *known == id);
        let number = known.unwrap_or_else(|| {
            part.operands.push(id);
            part.operands.len() - 1
        });
        Operand(number as u32)
    }

    pub fn value(&self, id: ValueId) -> Result<Value, BackendError> {
        let value = self.program.values().get(id.0 as usize).copied();
        value.ok_or_else(|| BackendError::Internal(format!("there is no value {}", id.0)))
    }

    pub fn version(&self, id: VersionId) -> Result<Version, BackendError> {
        let version = self.uses.versions.get(id).copied();
        version.ok_or_else(|| BackendError::Internal(format!("there is no version {id}")))
    }

    /// The version of a value that an operation reads.
    pub fn read(&self, op: usize, value: ValueId) -> Result<VersionId, BackendError> {
        let missing = || BackendError::Internal(format!("value {} is read before it is written", value.0));
        self.uses.read(op, value).ok_or_else(missing)
    }

    /// The version that an operation writes.
    pub fn wrote(&self, op: usize) -> Result<VersionId, BackendError> {
        let wrote = self.uses.ops.get(op).and_then(|place| place.wrote);
        wrote.ok_or_else(|| BackendError::Internal(format!("operation {op} writes nothing")))
    }

    /// Home of a version.
    pub fn home(&self, version: VersionId) -> Result<Home, BackendError> {
        let home = self.homes.get(version).copied().flatten();
        home.ok_or_else(|| limits::operation("a program that reads a value after storing it in its KV state"))
    }

    /// View of a version in f32.
    pub fn float(&self, version: VersionId) -> Result<View, BackendError> {
        let float = self.home(version)?.float;
        float.ok_or_else(|| BackendError::Internal(format!("version {version} has no f32 form")))
    }

    /// Home of a version, limited to the wanted forms.
    pub fn input(&self, version: VersionId, wanted: Wanted) -> Result<Home, BackendError> {
        let (home, any) = (self.home(version)?, wanted.any());
        Ok(Home {
            float: home.float.filter(|_| any.has(Form::Float)),
            a8: home.a8.filter(|_| any.has(Form::A8)),
            half: home.half.filter(|_| any.has(Form::Half)),
        })
    }

    pub fn set_home(&mut self, version: VersionId, home: Home) {
        if let Some(slot) = self.homes.get_mut(version) {
            *slot = Some(home);
        }
    }

    /// A new plane of f32 rows.
    pub fn plane(&mut self, cols: u32, rows: Rows) -> View {
        let plane = self.planes.add(4 * cols as usize, rows, self.units);
        View { plane, column: 0, stride: cols }
    }

    /// New planes for all forms except f32. Each row of the step takes `times` rows of the planes.
    pub fn other_forms(&mut self, forms: Forms, cols: u32, rows: Rows, times: usize) -> Home {
        let values = padded(cols as usize) * times;
        let mut plane = |bytes: usize| self.planes.add(bytes, rows, self.units);
        let a8 = forms.has(Form::A8).then(|| [plane(values), plane(values / 32 * 4), plane(values / 16 * 2)]);
        let halves = if self.modes.tiled() { (cols as usize).next_multiple_of(128) * times } else { values };
        let half = forms.has(Form::Half).then(|| [plane(2 * halves), plane(4 * times)]);
        Home { float: None, a8, half }
    }

    /// A new home for a version that is written whole. It includes f32 if `float` is set.
    pub fn fresh(&mut self, version: VersionId, float: bool) -> Result<Home, BackendError> {
        let Version { value, wanted, .. } = self.version(version)?;
        let Value { width, rows, .. } = self.value(value)?;
        let mut home = self.other_forms(wanted.any(), width, rows, 1);
        if float || wanted.any().has(Form::Float) {
            home.float = Some(match self.planned.get(&version).copied() {
                Some((group, column)) => self.beside(group, column),
                None => self.plane(width, rows),
            });
        }
        self.set_home(version, home);
        Ok(home)
    }

    /// A home for a version that updates the previous one in place.
    pub fn updated(&mut self, version: VersionId) -> Result<Home, BackendError> {
        let Version { value, wanted, before, .. } = self.version(version)?;
        let before =
            before.ok_or_else(|| BackendError::Internal("there is no version to update".to_owned()))?;
        let Value { width, rows, .. } = self.value(value)?;
        let float = Some(self.float(before)?);
        let home = Home { float, ..self.other_forms(wanted.any(), width, rows, 1) };
        self.set_home(version, home);
        Ok(home)
    }

    /// Emits the conversion of f32 rows to the forms that a version's readers want, if any.
    pub fn convert(&mut self, version: VersionId) -> Result<(), BackendError> {
        let home = self.home(version)?;
        if home.a8.is_none() && home.half.is_none() {
            return Ok(());
        }
        let Version { value, wanted: forms, .. } = self.version(version)?;
        let Value { width: cols, rows, .. } = self.value(value)?;
        self.emit(Work::Convert(Convert { cols, home, forms }), rows);
        Ok(())
    }

    /// Forms for a unit that writes one form at a time: the only wanted one, or f32. True when a conversion must
    /// follow.
    pub fn one_form(&self, version: VersionId) -> Result<(Wanted, bool), BackendError> {
        let wanted = self.version(version)?.wanted;
        Ok(if wanted.is_single() { (wanted, false) } else { (Wanted::FLOAT, true) })
    }

    /// A view of rows without gaps: the same view, or a copy.
    pub fn whole(&mut self, view: View, cols: u32, rows: Rows) -> View {
        if view.stride == cols {
            return view;
        }
        let out = self.plane(cols, rows);
        self.copy(view, out, cols, rows);
        out
    }

    /// Emits a copy of rows.
    pub fn copy(&mut self, from: View, out: View, cols: u32, rows: Rows) {
        self.emit(Work::Add(Add { from, out, scale: 1.0, keep: false, cols }), rows);
    }

    /// A new plane with `row_bytes` bytes per row.
    pub fn bytes(&mut self, row_bytes: usize, rows: Rows) -> PlaneId {
        self.planes.add(row_bytes, rows, self.units)
    }
}
