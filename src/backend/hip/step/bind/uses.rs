//! Tracks which operations write and read each value.
//!
//! Every write makes a new version of the value, and a reader sees the last version before it. A version that updates
//! another keeps its place.

use super::forms::{Form, Wanted};
use crate::backend::StepLimits;
use crate::backend::hip::step::Modes;
use crate::program::{Access, Op, Program, Rows, ValueId};

/// Number of a version.
pub type VersionId = usize;

/// Greater than every operation number: the value is never read or overwritten.
const NEVER: usize = usize::MAX;

/// One version of a value.
#[derive(Clone, Copy, Debug)]
pub struct Version {
    /// The value.
    pub value: ValueId,
    /// Number of the operation that writes it.
    pub made: usize,
    /// The version that it updates.
    pub before: Option<VersionId>,
    /// Number of the operation that overwrites the value; `NEVER` if none does.
    pub gone: usize,
    /// Number of reads.
    pub readers: u32,
    /// First operation that reads it; `NEVER` if none does.
    pub first_reader: usize,
    /// Forms that its readers want.
    pub wanted: Wanted,
}

/// An operation and its part.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Number of its part.
    pub part: u32,
    /// The operation.
    pub op: &'a Op,
    reads: [Option<VersionId>; 3],
    /// The version that it writes.
    pub wrote: Option<VersionId>,
}

/// All versions of a program's values.
#[derive(Debug)]
pub struct Uses<'a> {
    /// Versions by number.
    pub versions: Vec<Version>,
    /// The operations of all parts, in order.
    pub ops: Vec<Place<'a>>,
}

impl<'a> Uses<'a> {
    /// Collects the versions of a program's values.
    pub fn of(program: &'a Program, limits: StepLimits, modes: Modes) -> Self {
        let mut uses = Self { versions: Vec::new(), ops: Vec::new() };
        let mut now: Vec<Option<VersionId>> = vec![None; program.values().len()];
        for (part, ops) in (0..).zip(program.parts()) {
            for op in &ops.ops {
                uses.add(program, part, op, &mut now, (limits, modes));
            }
        }
        uses
    }

    fn add(
        &mut self,
        program: &Program,
        part: u32,
        op: &'a Op,
        now: &mut [Option<VersionId>],
        (limits, modes): (StepLimits, Modes),
    ) {
        let number = self.ops.len();
        let mut place = Place { part, op, reads: [None; 3], wrote: None };
        for (slot, (value, access)) in place.reads.iter_mut().zip(op.values()) {
            if !access.reads() {
                continue;
            }
            *slot = now.get(value.0 as usize).copied().flatten();
            let wanted = wanted(program, op, value, access, limits, modes);
            if let Some(version) = slot.and_then(|id| self.versions.get_mut(id)) {
                version.readers += 1;
                version.first_reader = version.first_reader.min(number);
                version.wanted = version.wanted.and(wanted);
            }
        }
        for (value, access) in op.values().filter(|(_, access)| access.writes()) {
            let id = self.versions.len();
            let old = now.get_mut(value.0 as usize).and_then(|slot| slot.replace(id));
            if let Some(old) = old.and_then(|old| self.versions.get_mut(old)) {
                old.gone = number;
            }
            self.versions.push(Version {
                value,
                made: number,
                before: old.filter(|_| access == Access::Update),
                gone: NEVER,
                readers: 0,
                first_reader: NEVER,
                wanted: Wanted::default(),
            });
            place.wrote = Some(id);
        }
        self.ops.push(place);
    }

    /// The version of a value that an operation reads.
    pub fn read(&self, op: usize, value: ValueId) -> Option<VersionId> {
        let place = self.ops.get(op)?;
        place.reads.into_iter().flatten().find(|id| self.versions.get(*id).is_some_and(|v| v.value == value))
    }

    /// The operation that writes a version.
    pub fn maker(&self, version: VersionId) -> Option<(usize, Place<'a>)> {
        let made = self.versions.get(version)?.made;
        Some((made, *self.ops.get(made)?))
    }

    /// Whether `op` is the only reader of a version.
    pub fn is_read_by(&self, version: VersionId, op: usize) -> bool {
        self.versions.get(version).is_some_and(|v| v.readers == 1 && v.first_reader == op)
    }
}

/// Forms in which an operation wants a value.
fn wanted(
    program: &Program,
    op: &Op,
    value: ValueId,
    access: Access,
    limits: StepLimits,
    modes: Modes,
) -> Wanted {
    let dtype = |id| program.tensor(id).map(|tensor| tensor.lazy.dtype());
    let by = match op {
        Op::Project { weight, from, .. } if *from == value && access == Access::Read => {
            let of = program.values().get(value.0 as usize);
            let rows = match of.map(|value| value.rows) {
                Some(Rows::Wanted) => limits.wanted_rows,
                _ => limits.rows,
            };
            of.zip(dtype(*weight)).map(|(of, dtype)| Wanted::by_product(modes, dtype, of.width, rows))
        }
        Op::Experts { experts, from, .. } if *from == value => {
            let [gate, _, down] = experts.tensors(0);
            let dtypes = dtype(gate).zip(dtype(down));
            dtypes.map(|(gate, down)| Wanted::by_experts(modes, [gate, down], gate, limits.rows))
        }
        _ => None,
    };
    by.unwrap_or(Wanted::always(Form::Float))
}
