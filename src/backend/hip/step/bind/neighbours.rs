//! Units that the unit after them takes over: heads before attention, and routers before the choice of experts.
//!
//! Whether a kernel computes both depends on the rows of a step. So the reader keeps the unit before it, and launches
//! it first where no kernel does.

use super::limits::is_wide;
use super::planes::Planes;
use super::unit::{Attend, Heads, Norm, Route, Router, Unit, View, Work};
use super::{BoundPart, PlaneId};
use crate::tensor::DType;

/// Units that touch each plane, by plane number.
struct Uses(Vec<u32>);

impl Uses {
    fn of(parts: &[BoundPart]) -> Self {
        let mut uses = Vec::new();
        for unit in parts.iter().flat_map(|part| &part.units) {
            let mut planes: Vec<usize> = unit.work.planes().iter().map(|plane| plane.0 as usize).collect();
            planes.sort_unstable();
            planes.dedup();
            for plane in planes {
                uses.resize(uses.len().max(plane + 1), 0);
                if let Some(count) = uses.get_mut(plane) {
                    *count += 1;
                }
            }
        }
        Self(uses)
    }

    /// Whether only two units touch a plane: its writer and one reader.
    fn is_read_once(&self, plane: PlaneId) -> bool {
        self.0.get(plane.0 as usize) == Some(&2)
    }
}

/// Hands units over to their readers, and keeps what they read until then.
pub fn hand_over(parts: &mut [BoundPart], planes: &mut Planes) {
    let uses = Uses::of(parts);
    let mut number = 0;
    for part in parts {
        let mut units: Vec<Unit> = Vec::with_capacity(part.units.len());
        for unit in std::mem::take(&mut part.units) {
            let joined = joined(&units, &unit, &uses);
            if let Some((taken, work)) = joined {
                units.truncate(units.len() - taken);
                work.planes().into_iter().for_each(|plane| planes.touch(plane, number));
                units.push(Unit { work, ..unit });
            } else {
                units.push(unit);
            }
            number += 1;
        }
        part.units = units;
    }
}

/// How many of the units before it a unit takes over, and all as one; `None` for none.
fn joined(before: &[Unit], unit: &Unit, uses: &Uses) -> Option<(usize, Work)> {
    let [.., last] = before else { return None };
    if last.rows != unit.rows {
        return None;
    }
    if let (Work::Products(product), Work::Route(route)) = (&last.work, &unit.work) {
        let [.., first, _] = before else { return None };
        let Work::Norm(norm) = &first.work else { return None };
        let router = Router { norm: *norm, product: product.clone() };
        let joins = first.rows == unit.rows && is_router(&router, route, uses);
        return joins.then(|| (2, Work::Route(Route { router: Some(router), ..route.clone() })));
    }
    match (&last.work, &unit.work) {
        (Work::Heads(heads), Work::Attend(attend)) if is_source(heads, attend, uses) => {
            Some((1, Work::Attend(Attend { source: Some(*heads), ..*attend })))
        }
        _ => None,
    }
}

/// Whether the kernel of routers computes this norm too: an RMS norm of whole rows.
fn is_plain(norm: &Norm) -> bool {
    let whole = norm.groups == 1 && norm.from.column == 0 && norm.from.stride == norm.group;
    whole && !norm.centre && norm.bias.is_none() && !norm.add && !norm.takes
}

/// Whether attention reads the queries, keys and values of these heads, and nothing else reads the queries.
fn is_source(heads: &Heads, attend: &Attend, uses: &Uses) -> bool {
    heads.queries == Some((attend.heads, attend.queries))
        && heads.kv == Some(attend.kv)
        && heads.head_dim == attend.head_dim
        && !is_wide(heads.head_dim)
        && uses.is_read_once(attend.queries.plane)
}

/// Whether a choice reads logits that a norm and one product of f32 weights make, and nothing else reads these or the f32
/// rows between.
fn is_router(router: &Router, route: &Route, uses: &Uses) -> bool {
    let Router { norm, product } = router;
    let [matrix] = product.matrices.as_slice() else { return false };
    let once = |view: Option<View>| view.is_some_and(|view| uses.is_read_once(view.plane));
    is_plain(norm)
        && matrix.dtype == DType::F32
        && route.groups.is_none()
        && !product.add
        && product.out == route.logits
        && product.from.float == norm.out.float
        && norm.out.a8.is_some()
        && once(norm.out.float)
        && once(Some(product.out))
}
