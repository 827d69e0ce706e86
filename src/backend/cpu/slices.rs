//! Cuts long units into slices, so that a part can pause between two of them: products by columns, attention by tiles of
//! rows.
//!
//! A product of a gigabyte of weights, or of a long prompt, takes seconds; other users' models would wait for it. Results
//! do not depend on the cuts: each column and each tile is computed by itself.

use std::ops::Range;
use std::time::{Duration, Instant};

/// The columns or tiles of a unit that are computed now: from this one on, until all are done or that time has passed.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// The first one.
    pub from: usize,
    /// When to stop, after at least one slice.
    pub until: Instant,
}

/// A unit's columns or tiles.
#[derive(Clone, Copy, Debug)]
pub struct Cuttable {
    /// Their number.
    pub count: usize,
    /// Slices have a multiple of so many.
    pub multiple: usize,
    /// Multiplications of one.
    pub work: usize,
}

/// How units are cut.
#[derive(Clone, Copy, Debug)]
pub struct Slices {
    /// A unit of at most so many multiplications is never cut: 5 to 30 ms.
    pub whole: usize,
    /// Multiplications of the first slice, which shows how fast this unit runs.
    pub first: usize,
    /// Time of each further slice. The threads wait for the slowest of them at its end: half a millisecond.
    pub time: Duration,
    /// A part that has taken this long pauses: parts of large models take seconds.
    pub pause: Duration,
}

impl Default for Slices {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { whole: 1 << 28, first: 1 << 25, time: ms(30), pause: ms(20) }
    }
}

impl Slices {
    /// Calls `slice` with one range of the unit after the other, until all are done or the stretch ends. Returns the first
    /// one that is left, if any.
    pub fn run(
        &self,
        stretch: Stretch,
        unit: Cuttable,
        mut slice: impl FnMut(Range<usize>),
    ) -> Option<usize> {
        let (mut at, work) = (stretch.from, unit.work.max(1));
        if unit.count.saturating_sub(at) <= self.whole / work {
            slice(at..unit.count);
            return None;
        }
        let mut width = self.first / work;
        while at < unit.count {
            let end = unit.count.min(at.saturating_add(width.max(1).next_multiple_of(unit.multiple.max(1))));
            let begun = Instant::now();
            slice(at..end);
            let now = Instant::now();
            // Wider by a factor of at most 64: a short slice is measured badly.
            let times = self.time.as_secs_f64() / (now - begun).as_secs_f64().max(1e-9);
            width = ((end - at) as f64 * times.min(64.0)) as usize;
            at = end;
            if now >= stretch.until && at < unit.count {
                return Some(at);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(
        slices: &Slices,
        stretch: Stretch,
        columns: usize,
        work: usize,
    ) -> (Vec<Range<usize>>, Option<usize>) {
        let mut ranges = Vec::new();
        let left = slices.run(stretch, Cuttable { count: columns, multiple: 16, work }, |range| {
            ranges.push(range.clone());
            let begun = Instant::now();
            // A nanosecond for each multiplication.
            while begun.elapsed() < Duration::from_nanos((range.len() * work) as u64) {}
        });
        (ranges, left)
    }

    #[test]
    fn short_units_are_whole_and_long_ones_are_cut_by_time() {
        let slices =
            Slices { whole: 1 << 20, first: 1 << 16, time: Duration::from_millis(2), ..Slices::default() };
        let late = Instant::now() + Duration::from_secs(60);
        let (ranges, left) = cut(&slices, Stretch { from: 0, until: late }, 1024, 1024);
        assert!(left.is_none() && ranges.len() == 1 && ranges[0] == (0..1024), "{ranges:?}");
        let (ranges, left) = cut(&slices, Stretch { from: 0, until: late }, 20_000, 1024);
        assert_eq!((ranges[0].clone(), left, ranges.last().unwrap().end), (0..64, None, 20_000));
        assert!(ranges.windows(2).all(|two| two[0].end == two[1].start && two[0].end % 16 == 0));
        // Two milliseconds are some 1,950 columns; a busy machine makes slices shorter.
        assert!(ranges[1].len() <= 2048 && ranges.len() >= 10, "{ranges:?}");
    }

    #[test]
    fn a_stretch_ends_after_a_slice_and_the_next_goes_on() {
        let slices = Slices { whole: 0, first: 1, ..Slices::default() };
        let mut from = 0;
        let mut all = Vec::new();
        loop {
            let (ranges, left) = cut(&slices, Stretch { from, until: Instant::now() }, 100, 1);
            all.extend(ranges);
            let Some(left) = left else { break };
            from = left;
        }
        assert_eq!(all[..2], [0..16, 16..32]);
        assert_eq!((all.len(), all.last().unwrap().clone()), (7, 96..100));
        assert_eq!(cut(&slices, Stretch { from: 0, until: Instant::now() }, 0, 1).1, None, "nothing to do");
    }
}
