//! Free pieces of each chunk: best fit, with neighbours joined. This module counts bytes and touches no memory.

use std::collections::{BTreeMap, BTreeSet};

/// A piece taken from a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub chunk: u32,
    pub start: usize,
    pub bytes: usize,
}

/// The free pieces of all chunks, by size and by place.
#[derive(Debug, Default)]
pub(super) struct Spans {
    /// (bytes, chunk, start). The first entry that is large enough is the best fit; among equal sizes the lowest place
    /// wins.
    by_size: BTreeSet<(usize, u32, usize)>,
    /// (chunk, start) -> bytes. No two free pieces of a chunk touch.
    by_place: BTreeMap<(u32, usize), usize>,
    /// Bytes of each chunk.
    chunks: BTreeMap<u32, usize>,
}

impl Spans {
    /// Adds a new chunk, all of it free.
    pub fn add(&mut self, chunk: u32, bytes: usize) {
        self.chunks.insert(chunk, bytes);
        self.insert(chunk, 0, bytes);
    }

    /// Removes an empty chunk; a chunk in use stays.
    pub fn remove(&mut self, chunk: u32) {
        if self.is_empty(chunk)
            && let Some(bytes) = self.chunks.remove(&chunk)
        {
            self.delete(chunk, 0, bytes);
        }
    }

    pub fn is_empty(&self, chunk: u32) -> bool {
        self.chunks.get(&chunk).is_some_and(|bytes| self.by_place.get(&(chunk, 0)) == Some(bytes))
    }

    pub fn empty_chunks(&self) -> impl Iterator<Item = u32> {
        self.chunks.keys().copied().filter(|chunk| self.is_empty(*chunk))
    }

    /// Takes exactly `bytes` bytes from the smallest free piece that holds them.
    pub fn take(&mut self, bytes: usize) -> Option<Place> {
        let (size, chunk, start) = *self.by_size.range((bytes, 0, 0)..).next()?;
        Some(self.cut(chunk, start, size, bytes))
    }

    /// The empty chunk that [`Spans::take`] would cut `bytes` bytes from, and its size.
    pub fn whole(&self, bytes: usize) -> Option<(u32, usize)> {
        let (size, chunk, _) = *self.by_size.range((bytes, 0, 0)..).next()?;
        (self.chunks.get(&chunk) == Some(&size)).then_some((chunk, size))
    }

    /// Like [`Spans::take`], but from this chunk.
    pub fn take_in(&mut self, chunk: u32, bytes: usize) -> Option<Place> {
        let of_chunk = self.by_place.range((chunk, 0)..=(chunk, usize::MAX));
        let (start, size) = of_chunk
            .filter(|(_, size)| **size >= bytes)
            .map(|((_, start), size)| (*start, *size))
            .min_by_key(|(start, size)| (*size, *start))?;
        Some(self.cut(chunk, start, size, bytes))
    }

    fn cut(&mut self, chunk: u32, start: usize, size: usize, bytes: usize) -> Place {
        self.delete(chunk, start, size);
        if size > bytes {
            self.insert(chunk, start + bytes, size - bytes);
        }
        Place { chunk, start, bytes }
    }

    /// Frees a piece and joins it with its free neighbours.
    pub fn give(&mut self, place: Place) {
        let Place { chunk, mut start, mut bytes } = place;
        let before = self.by_place.range((chunk, 0)..(chunk, start)).next_back();
        if let Some((at, size)) =
            before.map(|((_, at), size)| (*at, *size)).filter(|(at, size)| at + size == start)
        {
            self.delete(chunk, at, size);
            (start, bytes) = (at, bytes + size);
        }
        if let Some(size) = self.by_place.get(&(chunk, start + bytes)).copied() {
            self.delete(chunk, start + bytes, size);
            bytes += size;
        }
        self.insert(chunk, start, bytes);
    }

    fn insert(&mut self, chunk: u32, start: usize, bytes: usize) {
        self.by_size.insert((bytes, chunk, start));
        self.by_place.insert((chunk, start), bytes);
    }

    fn delete(&mut self, chunk: u32, start: usize, bytes: usize) {
        self.by_size.remove(&(bytes, chunk, start));
        self.by_place.remove(&(chunk, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_smallest_hole_that_fits_is_taken() {
        let mut spans = Spans::default();
        spans.add(0, 1000);
        let places: Vec<Place> =
            [100, 300, 100, 200, 100].map(|bytes| spans.take(bytes).expect("free")).into();
        spans.give(places[1]);
        spans.give(places[3]);
        assert_eq!(spans.take(150), Some(Place { chunk: 0, start: 500, bytes: 150 }));
        assert_eq!(spans.take(201), Some(Place { chunk: 0, start: 100, bytes: 201 }));
        assert_eq!(spans.take(201), None);
    }

    #[test]
    fn a_chunk_that_would_be_cut_first_is_known() {
        let mut spans = Spans::default();
        spans.add(0, 1000);
        spans.add(1, 300);
        assert_eq!(
            (spans.whole(200), spans.whole(400), spans.whole(2000)),
            (Some((1, 300)), Some((0, 1000)), None)
        );
        let place = spans.take(200).expect("free");
        assert_eq!(
            (spans.whole(50), spans.whole(150)),
            (None, Some((0, 1000))),
            "the rest of the other is cut"
        );
        spans.give(place);
        assert_eq!(spans.whole(50), Some((1, 300)));
    }

    proptest! {
        /// Checks against a map of every byte. Pieces never overlap, freed pieces join to whole chunks, and best fit
        /// finds any room there is.
        #[test]
        fn pieces_never_overlap_and_come_back_whole(
            ops in prop::collection::vec((1usize..40, any::<bool>(), any::<prop::sample::Index>()), 1..120),
            chunks in prop::collection::vec(20usize..100, 1..4),
        ) {
            let mut spans = Spans::default();
            let mut bytes: Vec<Vec<bool>> = Vec::new();
            for (id, size) in chunks.iter().enumerate() {
                spans.add(id as u32, *size);
                bytes.push(vec![false; *size]);
            }
            let mut taken: Vec<Place> = Vec::new();
            for (size, take, which) in ops {
                if take || taken.is_empty() {
                    let longest = |chunk: &Vec<bool>| chunk.split(|used| *used).map(<[bool]>::len).max().unwrap_or(0);
                    let fits = bytes.iter().map(longest).max().unwrap_or(0) >= size;
                    let got = spans.take(size);
                    prop_assert_eq!(got.is_some(), fits);
                    if let Some(place) = got {
                        let range = &mut bytes[place.chunk as usize][place.start..place.start + place.bytes];
                        prop_assert!(place.bytes == size && range.iter().all(|used| !*used));
                        range.fill(true);
                        taken.push(place);
                    }
                } else {
                    let place = taken.swap_remove(which.index(taken.len()));
                    bytes[place.chunk as usize][place.start..place.start + place.bytes].fill(false);
                    spans.give(place);
                }
                for (id, chunk) in bytes.iter().enumerate() {
                    prop_assert_eq!(spans.is_empty(id as u32), chunk.iter().all(|used| !*used));
                }
            }
            for place in taken {
                spans.give(place);
            }
            prop_assert_eq!(spans.empty_chunks().count(), chunks.len());
            prop_assert_eq!(spans.by_place.len(), chunks.len());
            prop_assert_eq!(spans.by_size.len(), chunks.len());
        }
    }
}
