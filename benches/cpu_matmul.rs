//! CPU matmuls: weight bytes and multiply-adds per second, per type and number of activation rows.
//!
//! `cargo bench --bench cpu_matmul -- [--isa NAME] [--threads N] [--cols K] [--quick] [TYPE...]`
//!
//! M = 1 and 2 walk a matrix of 128 MiB, far beyond the caches, so that the share of the read ceiling says how near
//! decode is to memory. The ceiling is a plain read of the same bytes by the same threads, measured in turns with the
//! product; both report their fastest round. Larger M take a matrix of 4 MiB. Every product is checked against f64
//! sums at some places, in the checked build too: without `--bench` (as `cargo test --benches` runs it) it is quick.

#![allow(clippy::expect_used)] // sizes that this file itself makes

use std::hint::black_box;
use std::time::Instant;

use rocmforge::backend::Activations;
use rocmforge::backend::cpu::activations::ActivationBuffer;
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
        let number =
            |text: String| text.parse::<usize>().ok().filter(|&n| n > 0).ok_or(format!("{text}: no number"));
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
                let dtype = SUPPORTED.into_iter().find(|t| t.name().eq_ignore_ascii_case(name));
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
    /// About `size` bytes of random codes whose f16 scales are 2^-7 or so: no infinities among them.
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
        // The high byte of every float of a block.
        let floats: &[usize] = match dtype {
            DType::F32 => &[3],
            DType::F16 | DType::BF16 | DType::Q8_0 | DType::Q4_0 => &[1],
            DType::Q6_K => &[209],
            _ => &[1, 3],
        };
        let byte = if matches!(dtype, DType::F32 | DType::BF16) { 0x3c } else { 0x20 };
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            floats.iter().for_each(|&at| block[at] = byte);
        }
        Self { dtype, rows, cols, bytes }
    }
}

fn measure(options: &Options, matrix: &Matrix, m: usize) {
    let mut acts = ActivationBuffer::new();
    acts.reset(m, matrix.cols);
    for (i, mut row) in acts.rows_mut().enumerate() {
        row.values_mut()
            .iter_mut()
            .enumerate()
            .for_each(|(k, v)| *v = ((i * 31 + k * 17) % 101) as f32 / 25.0 - 2.0);
        row.quantize(options.kernels);
    }
    let mut out = vec![f32::NAN; m * matrix.rows];
    let mut best = (f64::MAX, f64::MAX);
    let rounds = if options.quick { 1 } else { 7 };
    for _ in 0..rounds {
        best.0 = best.0.min(timed(|| read(matrix, options.threads)));
        best.1 = best.1.min(timed(|| multiply(options, matrix, &acts, &mut out)));
    }
    check(matrix, &acts, &out, options.threads);
    let rate = |seconds: f64| matrix.bytes.len() as f64 / seconds / 1e9;
    println!(
        "{:6} {:>4} {:>9.1} {:>9.2} {:>9.2} {:>6.2} {:>9.1}",
        matrix.dtype.name(),
        m,
        matrix.bytes.len() as f64 / f64::from(1 << 20),
        rate(best.1),
        rate(best.0),
        best.0 / best.1,
        (m * matrix.rows * matrix.cols) as f64 / best.1 / 1e9,
    );
}

fn timed(mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// Reads every byte once: eight 64-bit words at a time, so that loads and nothing else limit it.
fn read(matrix: &Matrix, threads: usize) {
    std::thread::scope(|scope| {
        for part in matrix.bytes.chunks(matrix.bytes.len().div_ceil(threads)) {
            scope.spawn(|| {
                let mut sums = [0u64; 32];
                for chunk in part.as_chunks::<256>().0 {
                    for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                        *sum ^= u64::from_ne_bytes(*word);
                    }
                }
                black_box(sums);
            });
        }
    });
}

/// Every thread takes a contiguous part of the weight rows, in tiles of at most 64 of them.
fn multiply(options: &Options, matrix: &Matrix, acts: &ActivationBuffer, out: &mut [f32]) {
    let weight = MatrixView::new(matrix.dtype, matrix.rows, matrix.cols, &matrix.bytes).expect("sizes agree");
    let part_rows = matrix.rows.div_ceil(options.threads).next_multiple_of(64);
    let m = acts.rows();
    std::thread::scope(|scope| {
        for (t, part) in out.chunks_mut(part_rows * m).enumerate() {
            let (weight, acts) = (&weight, acts.view());
            scope.spawn(move || {
                let mut scratch = MatmulScratch::new();
                let rows = t * part_rows..t * part_rows + part.len() / m;
                for (start, tile) in rows.clone().step_by(64).zip(part.chunks_mut(64 * m)) {
                    let range = start..start + tile.len() / m;
                    let mode = Activations::Int8;
                    let stride = range.len();
                    let done =
                        options.kernels.matmul_rows(weight, range, &acts, mode, &mut scratch, tile, stride);
                    done.expect("shapes agree");
                }
            });
        }
    });
}

/// Some outputs against f64 sums over the same inputs; the bound is that of the unit tests.
fn check(matrix: &Matrix, acts: &ActivationBuffer, out: &[f32], threads: usize) {
    let acts = acts.view();
    let m_count = acts.rows();
    let part_rows = matrix.rows.div_ceil(threads).next_multiple_of(64);
    let mut values = vec![0.0; matrix.cols];
    let row_bytes = matrix.bytes.len() / matrix.rows;
    for row in [0, 1, matrix.rows / 2 + 5, matrix.rows - 1] {
        let bytes = &matrix.bytes[row * row_bytes..][..row_bytes];
        dequantize_row(matrix.dtype, bytes, &mut values).expect("sizes agree");
        for m in [0, m_count / 2, m_count - 1] {
            let (mut sum, mut size) = (0f64, 0f64);
            for (k, &w) in values.iter().enumerate() {
                let x = match GroupKind::of(matrix.dtype) {
                    Some(_) => f64::from(acts.codes(m)[k]) * f64::from(acts.scales(m)[k / 32]),
                    None => f64::from(acts.values(m)[k]),
                };
                sum += f64::from(w) * x;
                size += (f64::from(w) * x).abs();
            }
            let (part, in_part) = (row / part_rows, row % part_rows);
            let tile = part * part_rows * m_count + in_part / 64 * 64 * m_count;
            let tile_rows = 64.min(matrix.rows - part * part_rows - in_part / 64 * 64);
            let got = f64::from(out[tile + m * tile_rows + in_part % 64]);
            assert!(
                (got - sum).abs() <= 2e-6 * size + 1e-30,
                "{} row {row} m {m}: {got} not {sum}",
                matrix.dtype
            );
        }
    }
}
