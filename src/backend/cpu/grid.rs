//! A row-major matrix cut into blocks, so that the chunks of a phase write without overlap.

use std::marker::PhantomData;
use std::ops::Range;

use super::pool::Pool;

/// Some rows of a matrix, and some columns of each.
pub struct Block<'a> {
    base: *mut f32,
    stride: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    matrix: PhantomData<&'a mut [f32]>,
}

impl Block<'_> {
    /// The matrix rows of this block.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The matrix columns of this block.
    pub fn cols(&self) -> Range<usize> {
        self.cols.clone()
    }

    /// The block's part of matrix row `row`, which must be one of [`rows`](Self::rows).
    pub fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(self.rows.contains(&row), "row outside the block");
        let start = row * self.stride + self.cols.start;
        // SAFETY: `run` checked that rows and columns lie in the matrix that the block borrows. No two blocks share an
        // element, and `&mut self` keeps the block's own rows apart.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), self.cols.len()) }
    }
}

/// How a matrix is cut.
pub struct Grid<'a> {
    /// Values per row of the matrix.
    pub stride: usize,
    /// Row ranges, rising and disjoint.
    pub rows: &'a [Range<usize>],
    /// Columns to write.
    pub cols: Range<usize>,
    /// Columns per block; the last block of a row may be narrower.
    pub block_cols: usize,
    /// Columns of the first blocks, as many as there are workers; 0 for none. They are claimed first.
    pub wide_cols: usize,
}

impl Grid<'_> {
    /// The columns in wide blocks, and the number of those, for so many workers.
    fn wide(&self, workers: usize) -> (usize, usize) {
        let blocks = self.cols.len().checked_div(self.wide_cols).unwrap_or(0).min(workers);
        (blocks * self.wide_cols, blocks)
    }
    fn blocks_across(&self, workers: usize) -> usize {
        let (cols, blocks) = self.wide(workers);
        blocks + (self.cols.len() - cols).div_ceil(self.block_cols.max(1))
    }
    /// The columns of a block.
    fn block(&self, index: usize, workers: usize) -> Range<usize> {
        let (cols, blocks) = self.wide(workers);
        let (first, width) = match index.checked_sub(blocks) {
            None => (index * self.wide_cols, self.wide_cols),
            Some(index) => (cols + index * self.block_cols, self.block_cols),
        };
        let start = self.cols.start + first;
        start..(start + width).min(self.cols.end)
    }

    /// Calls `work` once for each block of `matrix`, on all workers of `pool`, with the worker's own local.
    ///
    /// Blocks that are neighbours in a row of blocks are claimed one after the other.
    ///
    /// # Panics
    /// If row ranges overlap or the grid exceeds the matrix (a broken invariant of this backend), or if `work`
    /// panics.
    pub fn run<L: Send>(
        &self,
        pool: &mut Pool,
        locals: &mut [L],
        matrix: &mut [f32],
        work: impl Fn(&mut L, Block<'_>) + Sync,
    ) {
        assert!(self.rows.iter().all(|r| r.start <= r.end), "row range runs backwards");
        assert!(self.rows.windows(2).all(|w| w[0].end <= w[1].start), "row ranges overlap");
        let end = self.rows.last().map_or(0, |r| r.end);
        assert!(
            self.cols.end <= self.stride && end * self.stride <= matrix.len(),
            "grid larger than the matrix"
        );
        let workers = pool.threads();
        let across = self.blocks_across(workers);
        let base = Base(matrix.as_mut_ptr());
        pool.run_with(locals, self.rows.len() * across, |local, chunk| {
            work(
                local,
                Block {
                    base: base.pointer(),
                    stride: self.stride,
                    rows: self.rows[chunk / across].clone(),
                    cols: self.block(chunk % across, workers),
                    matrix: PhantomData,
                },
            );
        });
    }
}

/// Start of the matrix, shared by the workers.
struct Base(*mut f32);

impl Base {
    fn pointer(&self) -> *mut f32 {
        self.0
    }
}

// SAFETY: it stands for the `&mut [f32]` that `Grid::run` holds; each chunk gets a different block of it, and f32 is
// Send.
unsafe impl Sync for Base {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_columns_once() {
        let mut pool = Pool::new(3).unwrap();
        let mut matrix = vec![0.0; 7 * 10];
        let rows = [0..2, 2..3, 5..7];
        for wide_cols in [0, 1, 2, 3, 4, 7, 8] {
            matrix.fill(0.0);
            let grid = Grid { stride: 10, rows: &rows, cols: 2..9, block_cols: 4, wide_cols };
            grid.run(&mut pool, &mut [(); 3], &mut matrix, |(), mut block| {
                for row in block.rows() {
                    let first = block.cols().start;
                    for (i, x) in block.row(row).iter_mut().enumerate() {
                        *x += (row * 10 + first + i) as f32 + 1.0;
                    }
                }
            });
            for (i, &x) in matrix.iter().enumerate() {
                let inside = ![3, 4].contains(&(i / 10)) && (2..9).contains(&(i % 10));
                assert_eq!(
                    x,
                    if inside { i as f32 + 1.0 } else { 0.0 },
                    "element {i}, first blocks of {wide_cols}"
                );
            }
        }
        let grid = Grid { stride: 99, rows: &rows, cols: 9..99, block_cols: 16, wide_cols: 32 };
        let blocks: Vec<_> = (0..grid.blocks_across(2)).map(|index| grid.block(index, 2)).collect();
        assert_eq!(blocks, [9..41, 41..73, 73..89, 89..99]);
    }

    #[test]
    #[should_panic(expected = "row ranges overlap")]
    fn overlapping_rows_are_refused() {
        let rows = [0..2, 1..3];
        let grid = Grid { stride: 4, rows: &rows, cols: 0..4, block_cols: 4, wide_cols: 0 };
        grid.run(&mut Pool::new(1).unwrap(), &mut [()], &mut [0.0; 16], |(), _| {});
    }
}
