//! CPU matmuls: weight bytes and multiply-adds per second, per type and number of activation rows.
//!
//! `cargo bench --bench cpu_matmul -- [--isa NAME] [--threads N] [--cols K] [--quick] [TYPE...]`
//!
//! M = 1 and 2 walk a matrix of 128 MiB per thread, far beyond the caches. So the share of the read ceiling shows how
//! near decode is to memory speed. Larger M use 4 MiB. The ceiling is a plain read of the same bytes by the same
//! threads in the same run. Both are timed by slices and report the median slice, so that other work on the machine
//! disturbs them little. The threads' rates are summed. Outputs of every product are checked against f64 sums. Without
//! `--bench`, as `cargo test --benches` runs it, matrices are small and rounds few.

#![allow(clippy::expect_used, clippy::panic)] // all sizes are made in this file

use std::hint::black_box;
use std::time::Instant;

use rocmforge::backend::ActivationType;
use rocmforge::backend::cpu::activations::{ActivationBuffer, FINE_ABOVE};
use rocmforge::backend::cpu::matmul::{MatmulScratch, MatrixView};
use rocmforge::backend::cpu::quant::{GroupKind, SUPPORTED, dequantize_row};
use rocmforge::backend::cpu::{Isa, Kernels};
use rocmforge::tensor::DType;

struct Options {
    kernels: Kernels,
    threads: usize,
    cols: usize,
    quick: bool,
    dtypes: Vec<DType>,
}

fn main() -> Result<(), String> {
    let options = options()?;
    println!("{} x {} threads, {} columns", options.kernels.isa(), options.threads, options.cols);
    println!(
        "{:6} {:>4} {:>9} {:>9} {:>9} {:>6} {:>9}",
        "type", "M", "MiB", "GB/s", "ceiling", "share", "GMAC/s"
    );
    for &dtype in &options.dtypes {
        let cols = options.cols.next_multiple_of(dtype.block_len());
        let large = if options.quick { 1 << 20 } else { 128 << 20 };
        for (bytes, batches) in
            [(large, &[1, 2][..]), (large.min(4 << 20), &[4, 8, 16, 32, 64, 128, 256][..])]
        {
            let matrix = Matrix::random(dtype, cols, bytes);
            for &m in batches {
                measure(&options, &matrix, m);
            }
        }
    }
    Ok(())
}

fn options() -> Result<Options, String> {
    let mut options =
        Options { kernels: Kernels::detect(), threads: 1, cols: 576, quick: true, dtypes: Vec::new() };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: String| {
            text.parse::<usize>().ok().filter(|&n| n > 0).ok_or(format!("{text}: not a number"))
        };
        match arg.as_str() {
            "--bench" => options.quick = false,
            "--quick" => options.quick = true,
            "--isa" => {
                let isa: Isa = value()?.parse().map_err(|e| format!("{e}"))?;
                options.kernels = Kernels::new(isa).map_err(|e| e.to_string())?;
            }
            "--threads" => options.threads = number(value()?)?,
            "--cols" => options.cols = number(value()?)?,
            name => {
                let dtype = SUPPORTED.iter().copied().find(|t| t.name().eq_ignore_ascii_case(name));
                options.dtypes.push(dtype.ok_or(format!("{name}: no such option or type"))?);
            }
        }
    }
    if options.dtypes.is_empty() {
        options.dtypes = SUPPORTED.to_vec();
    }
    Ok(options)
}

struct Matrix {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
}

impl Matrix {
    fn row_bytes(&self) -> usize {
        self.bytes.len() / self.rows
    }

    /// About `size` bytes of random codes with f16 scales near 2^-7, so that none is infinite.
    fn random(dtype: DType, cols: usize, size: usize) -> Self {
        let row_bytes = cols / dtype.block_len() * dtype.block_bytes();
        let rows = (size / row_bytes).next_multiple_of(64);
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut bytes: Vec<u8> = (0..rows * row_bytes)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        // Offset of the high byte of every float of a quant block.
        let floats: &[usize] = match dtype {
            DType::F32 => &[3],
            DType::F16 | DType::BF16 | DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => &[1],
            DType::MXFP4 | DType::MXFP6_E2M3 | DType::MXFP6_E3M2 => &[0],
            DType::NVFP4 => &[0, 1, 2, 3],
            DType::Q6_K => &[209],
            DType::Q2_K => &[81, 83],
            DType::Q3_K => &[109],
            DType::IQ4_NL | DType::IQ4_XS | DType::IQ3_XXS | DType::IQ3_S => &[1],
            DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ1_S => &[1],
            DType::IQ1_M => &[49, 51, 53, 55],
            DType::TQ1_0 => &[53],
            DType::TQ2_0 => &[65],
            DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[1, 3],
            other => panic!("say where {other} has its scales"),
        };
        let byte = match dtype {
            DType::F32 | DType::BF16 => 0x3c,
            DType::MXFP4 | DType::MXFP6_E2M3 | DType::MXFP6_E3M2 => 120,
            DType::NVFP4 => 24,
            _ => 0x20,
        };
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            floats.iter().for_each(|&at| block[at] = byte);
        }
        Self { dtype, rows, cols, bytes }
    }
}

/// Seconds of the median slice.
#[derive(Clone, Copy)]
struct Median(f64);

fn measure(options: &Options, matrix: &Matrix, m: usize) {
    let mut acts = ActivationBuffer::new();
    acts.reset(m, matrix.cols);
    for (i, mut row) in acts.rows_mut().enumerate() {
        row.values_mut()
            .iter_mut()
            .enumerate()
            .for_each(|(k, v)| *v = ((i * 31 + k * 17) % 101) as f32 / 25.0 - 2.0);
        // An outlier in one group of 13, as in real rows.
        row.values_mut().iter_mut().skip(40).step_by(13 * 32).for_each(|v| *v = 12.0);
        row.quantize(options.kernels, FINE_ABOVE);
    }
    // About 1 MiB for decode. For prefill 64 rows: a few hundred microseconds at most.
    let slice = if m <= 2 { ((1 << 20) / matrix.row_bytes()).next_multiple_of(64) } else { 64 };
    let slice = slice.min(matrix.rows);
    let threads: Vec<(Median, Median)> = std::thread::scope(|scope| {
        let acts = &acts;
        let all: Vec<_> =
            (0..options.threads).map(|_| scope.spawn(move || rounds(options, matrix, acts, slice))).collect();
        all.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let bytes = (slice * matrix.row_bytes()) as f64;
    let rate = |of: fn(&(Median, Median)) -> Median| -> f64 { threads.iter().map(|t| bytes / of(t).0).sum() };
    let (read, product) = (rate(|t| t.0), rate(|t| t.1));
    println!(
        "{:6} {:>4} {:>9.1} {:>9.2} {:>9.2} {:>6.2} {:>9.1}",
        matrix.dtype.name(),
        m,
        matrix.bytes.len() as f64 / f64::from(1 << 20),
        product / 1e9,
        read / 1e9,
        product / read,
        product / matrix.row_bytes() as f64 * (matrix.cols * m) as f64 / 1e9,
    );
}

/// The work of one thread: in each round, reads all slices of its own copy, then multiplies all slices.
fn rounds(options: &Options, matrix: &Matrix, acts: &ActivationBuffer, slice: usize) -> (Median, Median) {
    let bytes = matrix.bytes.clone();
    let weight = MatrixView::new(matrix.dtype, matrix.rows, matrix.cols, &bytes).expect("sizes agree");
    let mut scratch = MatmulScratch::new();
    let m = acts.rows();
    let mut out = vec![f32::NAN; m * slice];
    let (mut reads, mut products) = (Vec::new(), Vec::new());
    for round in 0..if options.quick { 1 } else { 5 } {
        for slice in bytes.chunks_exact(slice * matrix.row_bytes()) {
            reads.push(timed(|| read(slice)));
        }
        for first in (0..=matrix.rows - slice).step_by(slice) {
            let range = first..first + slice;
            products.push(timed(|| {
                let mode = ActivationType::Int8;
                let view = acts.view();
                // Tiles of 64 rows, as a pool's thread takes them.
                for start in range.clone().step_by(64) {
                    let rows = start..(start + 64).min(range.end);
                    let tile = &mut out[start - first..];
                    options
                        .kernels
                        .matmul_rows(&weight, rows, &view, mode, &mut scratch, tile, slice)
                        .expect("shapes agree");
                }
            }));
            if round == 0 && (first / slice).is_multiple_of(16) {
                check(matrix, acts, first, slice, &out);
            }
        }
    }
    (median(reads), median(products))
}

fn median(mut seconds: Vec<f64>) -> Median {
    seconds.sort_by(f64::total_cmp);
    Median(seconds[seconds.len() / 2])
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// Reads every byte once: 32 words of 64 bits at a time, so that only loads limit it.
fn read(bytes: &[u8]) {
    let mut sums = [0u64; 32];
    for chunk in bytes.as_chunks::<256>().0 {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum ^= u64::from_ne_bytes(*word);
        }
    }
    black_box(sums);
}

/// Checks outputs of some of `count` rows from `first` on against f64 sums over the same inputs, with the unit tests'
/// bound.
fn check(matrix: &Matrix, acts: &ActivationBuffer, first: usize, count: usize, out: &[f32]) {
    let acts = acts.view();
    let mut values = vec![0.0; matrix.cols];
    for i in [0, 1, count / 2, count - 1] {
        let bytes = &matrix.bytes[(first + i) * matrix.row_bytes()..][..matrix.row_bytes()];
        dequantize_row(matrix.dtype, bytes, &mut values).expect("sizes agree");
        for m in [0, acts.rows() / 2, acts.rows() - 1] {
            let (mut sum, mut size) = (0f64, 0f64);
            for (k, &w) in values.iter().enumerate() {
                let x = match GroupKind::of(matrix.dtype) {
                    Some(_) => acts.decoded(m, k),
                    None => f64::from(acts.values(m)[k]),
                };
                sum += f64::from(w) * x;
                size += (f64::from(w) * x).abs();
            }
            let got = f64::from(out[m * count + i]);
            let row = first + i;
            assert!(
                (got - sum).abs() <= 2e-6 * size + 1e-30,
                "{} row {row} m {m}: {got} not {sum}",
                matrix.dtype
            );
        }
    }
}
