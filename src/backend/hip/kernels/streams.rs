//! Kernels of residual streams and of the sizes of rows. Each file in `kernels/` documents its arguments, accepted shapes and launch.

use super::extent::strided;
use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

kernels! { |launch|
    /// `x *= weight`. Grid: 1024 values per workgroup, rows.
    MultiplyRows [multiply_rows] {
        /// f32 `[cols]`.
        weight: DevicePtr<f32> [cols],
        /// f32, row m at `m * stride`.
        x: DevicePtr<f32> [strided(launch.y, stride, cols)],
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
    }

    /// Gives each group of values the root mean square of another row, or 1. Grid: groups, rows.
    RescaleRows [rescale_rows] {
        /// f32, row m at `m * stride`.
        x: DevicePtr<f32> [strided(launch.y, stride, launch.x * group)],
        /// f32, row m at `m * like_stride`, or null.
        like: DevicePtr<f32> [null or strided(launch.y, like_stride, like_cols)],
        /// Added to the mean square of a group; above 0.
        eps: f32,
        /// Values of a group.
        group: u32,
        /// Values from row to row of `x`.
        stride: u32,
        /// Values from row to row of `like`.
        like_stride: u32,
        /// Values of a row of `like`.
        like_cols: u32,
    }

    /// Keeps what exceeds the mean by a number of deviations. Grid: rows.
    SparsifyRows [sparsify_rows] {
        /// f32, row m at `m * stride`.
        x: DevicePtr<f32> [strided(launch.x, stride, cols)],
        /// Number of deviations.
        deviations: f32,
        /// Values from row to row.
        stride: u32,
        /// Values of a row; above 1.
        cols: u32,
    }

    /// Each stream, and a weighted sum of all. Grid: 1024 values of a stream per workgroup, rows.
    MixStreams [mix_streams] {
        /// f32, `[streams][streams]` of row m at `m * amounts_stride`.
        amounts: DevicePtr<f32> [strided(launch.y, amounts_stride, streams * streams)],
        /// f32, `[streams][cols]` of row m at `m * x_stride`.
        x: DevicePtr<f32> [strided(launch.y, x_stride, streams * cols)],
        /// f32, `[streams][cols]` of row m at `m * out_stride`.
        out: DevicePtr<f32> [strided(launch.y, out_stride, streams * cols)],
        /// Number of streams.
        streams: u32,
        /// Values of a stream.
        cols: u32,
        /// Values from row to row of `amounts`.
        amounts_stride: u32,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Values from row to row of `out`.
        out_stride: u32,
    }

    /// Adds a row to each stream from `first` on. Grid: 1024 values of a stream per workgroup, rows.
    AddToStreams [add_to_streams] {
        /// f32, row m at `m * x_stride`.
        x: DevicePtr<f32> [strided(launch.y, x_stride, cols)],
        /// f32, `[streams]` of row m at `m * amounts_stride`, or null.
        amounts: DevicePtr<f32> [null or strided(launch.y, amounts_stride, streams)],
        /// f32, `[streams][cols]` of row m at `m * out_stride`.
        out: DevicePtr<f32> [strided(launch.y, out_stride, streams * cols)],
        /// The first stream that is changed.
        first: u32,
        /// Number of streams.
        streams: u32,
        /// Values of a stream.
        cols: u32,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Values from row to row of `amounts`.
        amounts_stride: u32,
        /// Values from row to row of `out`.
        out_stride: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::super::extent::{OutOfBounds, tests::exact};
    use super::*;
    use crate::backend::hip::Grid;

    #[test]
    fn streams_must_be_all_there() {
        let arguments = MixStreams {
            amounts: DevicePtr::NULL,
            x: DevicePtr::NULL,
            out: DevicePtr::NULL,
            streams: 4,
            cols: 100,
            amounts_stride: 20,
            x_stride: 400,
            out_stride: 404,
        };
        exact!(MixStreams::mix_streams, Grid::xy(1, 3), arguments, [
            amounts: 2 * 20 + 16,
            x: 3 * 400,
            out: 2 * 404 + 400,
        ]);
        let arguments = AddToStreams {
            x: DevicePtr::NULL,
            amounts: DevicePtr::NULL,
            out: DevicePtr::NULL,
            first: 1,
            streams: 4,
            cols: 100,
            x_stride: 128,
            amounts_stride: 4,
            out_stride: 400,
        };
        exact!(AddToStreams::add_to_streams, Grid::xy(1, 3), arguments, [x: 2 * 128 + 100, amounts: 12, out: 1200]);
    }

    #[test]
    fn rows_that_are_rescaled_must_be_all_there() {
        let arguments = RescaleRows {
            x: DevicePtr::NULL,
            like: DevicePtr::NULL,
            eps: 1e-6,
            group: 30,
            stride: 100,
            like_stride: 64,
            like_cols: 60,
        };
        exact!(RescaleRows::rescale_rows, Grid::xy(3, 2), arguments, [x: 100 + 90, like: 64 + 60]);
        let alone = RescaleRows { x: DevicePtr::of_len(190), ..arguments };
        assert_eq!(RescaleRows::rescale_rows.check(&Grid::xy(3, 2), &alone), Ok(()));
    }
}
