//! Planes: rows of numbers between units, and the memory slots that they share.
//!
//! A plane lives from the first unit that writes it to the last unit that reads it. Planes with equal row lengths and
//! disjoint lives share one slot, so all layers use the same memory.

use crate::program::Rows;

/// Number of a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneId(pub u32);

/// Memory that planes use in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Bytes per row.
    pub row_bytes: usize,
    /// Kind of rows it holds.
    pub rows: Rows,
}

#[derive(Clone, Copy, Debug)]
struct Plane {
    slot: Slot,
    first: u32,
    last: u32,
}

/// The planes of a program, in order of their first use.
#[derive(Debug, Default)]
pub struct Planes {
    all: Vec<Plane>,
}

impl Planes {
    /// Adds a plane that unit number `now` writes first.
    pub fn add(&mut self, row_bytes: usize, rows: Rows, now: u32) -> PlaneId {
        let id = PlaneId(self.all.len() as u32); // small: a few planes per operation
        self.all.push(Plane { slot: Slot { row_bytes, rows }, first: now, last: now });
        id
    }

    /// Extends the plane's life to unit number `now`.
    pub fn touch(&mut self, id: PlaneId, now: u32) {
        if let Some(plane) = self.all.get_mut(id.0 as usize) {
            plane.last = plane.last.max(now);
        }
    }

    /// Keeps the plane until after the last unit.
    pub fn keep(&mut self, id: PlaneId) {
        self.touch(id, u32::MAX);
    }

    /// Assigns slots. Returns the slots and the slot number of each plane.
    pub fn place(&self) -> (Vec<Slot>, Vec<u32>) {
        let mut slots: Vec<(Slot, u32)> = Vec::new();
        let mut places = Vec::with_capacity(self.all.len());
        for plane in &self.all {
            let free = |(slot, last): &(Slot, u32)| *slot == plane.slot && *last < plane.first;
            let found = slots.iter().position(free).unwrap_or(slots.len());
            match slots.get_mut(found) {
                Some((_, last)) => *last = plane.last,
                None => slots.push((plane.slot, plane.last)),
            }
            places.push(found as u32);
        }
        (slots.into_iter().map(|(slot, _)| slot).collect(), places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_share_a_slot_only_where_their_lives_do_not_touch() {
        let mut planes = Planes::default();
        let a = planes.add(16, Rows::All, 0);
        planes.touch(a, 3);
        planes.add(16, Rows::All, 3); // one unit reads the first plane and writes this one
        planes.add(16, Rows::Wanted, 4);
        planes.add(32, Rows::All, 4);
        let kept = planes.add(16, Rows::All, 5);
        planes.keep(kept);
        planes.add(16, Rows::All, 9);
        let (slots, places) = planes.place();
        assert_eq!(places, [0, 1, 2, 3, 0, 1]);
        assert_eq!(slots.len(), 4);
        assert_eq!(slots[2], Slot { row_bytes: 16, rows: Rows::Wanted });
    }
}
