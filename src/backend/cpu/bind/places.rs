//! Which plane holds each value, and where: values that are written together lie side by side.

use super::{Outline, Place, PlaneSpec, Stretch};
use crate::program::{Content, Op, ValueId};

/// Values that lie side by side in one plane, and the first and last stretch that uses them.
struct Bundle {
    spec: PlaneSpec,
    first: usize,
    last: usize,
}

/// Gives each kept value a place. A plane is reused for values of the same size after the last read of its values.
pub struct Places {
    bundles: Vec<Bundle>,
    /// By value: bundle number and first column.
    pub of: Vec<Option<(usize, usize)>>,
    /// Plane number by bundle.
    planes: Vec<usize>,
}

impl Places {
    /// Places of a program with so many values.
    pub fn new(values: usize) -> Self {
        Self { bundles: Vec::new(), of: vec![None; values], planes: Vec::new() }
    }

    /// Records that stretch `at` uses these values. New ones are placed side by side.
    fn used(&mut self, outline: &Outline<'_>, values: &[ValueId], at: usize) {
        let mut fresh = None;
        for value in values {
            let slot = &mut self.of[value.0 as usize];
            let (bundle, _) = *slot.get_or_insert_with(|| {
                let number = *fresh.get_or_insert_with(|| {
                    let spec = PlaneSpec { cols: 0, rows: outline.rows(*value) };
                    self.bundles.push(Bundle { spec, first: at, last: at });
                    self.bundles.len() - 1
                });
                let spec = &mut self.bundles[number].spec;
                spec.cols += outline.width(*value);
                (number, spec.cols - outline.width(*value))
            });
            self.bundles[bundle].last = at;
        }
    }

    /// Gives each bundle a plane, and returns all planes.
    pub fn planes(&mut self) -> Vec<PlaneSpec> {
        let mut planes: Vec<(PlaneSpec, usize)> = Vec::new();
        for bundle in &self.bundles {
            // Bundles are in order of first use.
            let free = planes.iter().position(|(spec, last)| *spec == bundle.spec && *last < bundle.first);
            let plane = free.unwrap_or_else(|| {
                planes.push((bundle.spec, 0));
                planes.len() - 1
            });
            planes[plane].1 = bundle.last;
            self.planes.push(plane);
        }
        planes.into_iter().map(|(spec, _)| spec).collect()
    }
}

/// Records the values that a stretch keeps. Values within the stretch and choices have no place.
pub fn note_values(places: &mut Places, outline: &Outline<'_>, ops: &[Op], stretch: &Stretch, at: usize) {
    let (folded, kept) = match stretch {
        Stretch::Product { folded, .. } => (*folded, &ops[*folded..]),
        Stretch::Gated { folded } => (*folded, &ops[folded + 2..]),
        Stretch::RowOps { .. } | Stretch::Single => (0, ops),
    };
    let real = |value: &ValueId| outline.program.values()[value.0 as usize].content == Content::Real;
    let values = |ops: &[Op], reads: bool| -> Vec<ValueId> {
        let of = ops.iter().flat_map(Op::values).filter(|(_, access)| access.reads() == reads);
        of.map(|(value, _)| value).filter(real).collect()
    };
    if folded > 0 {
        places.used(outline, &values(&ops[..1], true), at);
    }
    match stretch {
        Stretch::Product { folded: 0, .. } => places.used(outline, &values(kept, true), at),
        Stretch::Gated { folded: 0 } => places.used(outline, &values(&ops[..1], true), at),
        // The values that a product is added to.
        Stretch::Product { .. } => {
            let input = kept.first().and_then(|op| op.values().next()).map(|(value, _)| value);
            let others: Vec<_> =
                values(kept, true).into_iter().filter(|value| Some(*value) != input).collect();
            places.used(outline, &others, at);
        }
        Stretch::Gated { .. } => {}
        Stretch::RowOps { .. } | Stretch::Single => {
            values(kept, true).iter().for_each(|value| places.used(outline, &[*value], at));
            return values(kept, false).iter().for_each(|value| places.used(outline, &[*value], at));
        }
    }
    places.used(outline, &values(kept, false), at);
}

/// The place of a value that a stretch keeps.
pub fn place(outline: &Outline<'_>, places: &Places, value: ValueId) -> Place {
    let (bundle, first) = places.of[value.0 as usize].unwrap_or_default();
    let plane = places.planes.get(bundle).copied().unwrap_or_default();
    Place { plane, first, width: outline.width(value) }
}
