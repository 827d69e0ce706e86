//! `cargo xtask synthetic`: writes model files of real shapes with random weights. The cost of running a model
//! depends on its shape, and a real model's bytes would have to be downloaded. The answers of such a model are
//! meaningless.
//!
//! The mixture of types is that of files called Q4_K_M, Q8_0 or F16. Weights are random and distributed like trained
//! ones, so that values in the model stay as large as in a real one. Memory: a few pools of 8 MiB, whatever the
//! file's size.

mod pool;
mod shape;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use xtask::error::{Error, Result};
use xtask::host;
use xtask::progress::Progress;

use crate::whole;
use pool::{Pool, Pools};
use shape::Tensor;
pub use shape::{LARGE, MODEST, Mixture, SHAPES, SMALL, Shape, TINY, WORDY};

const EXAMPLES: &str = "Examples:\n  cargo xtask synthetic 8B Q4_K_M /tmp/8b.gguf\n  \
    cargo xtask synthetic 30B-A3B Q8_0 /tmp/experts.gguf && rocmforge-client load /tmp/experts.gguf\n  \
    cargo xtask synthetic tiny F16 target/tiny.gguf\n  \
    cargo xtask synthetic 1B Q4_K_M /tmp/deep.gguf --silent-layers 112   # answers as 1B at eight times its price: for drafts";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Shape of the model: Llama's 1B, 8B and 70B, Qwen3's 30B-A3B, Qwen3.5's 4B, Gemma 3n's E2B, or small ones of the
    /// same structure
    #[arg(value_name = "SHAPE", ignore_case = true, value_parser = shapes())]
    shape: Shape,
    /// Types of its tensors
    #[arg(value_name = "TYPE", ignore_case = true)]
    mixture: Mixture,
    /// Output file; an existing file is replaced once the new one is complete
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// So many layers more that change nothing, so that the model answers as the one without, at a higher price
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=500))]
    silent_layers: u64,
}

fn shapes() -> impl TypedValueParser<Value = Shape> {
    let named = |name: String| SHAPES.into_iter().find(|shape| shape.name.eq_ignore_ascii_case(&name));
    PossibleValuesParser::new(SHAPES.map(|shape| shape.name))
        .try_map(move |name| named(name).ok_or("unknown shape"))
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let Args { mixture, file, .. } = args;
    if args.silent_layers > 0 && !args.shape.may_be_silent() {
        let why = format!("each layer of {} changes all of its streams", args.shape.name);
        return Err(Error::Unavailable { what: "--silent-layers", why });
    }
    let shape = &args.shape.with_silent(args.silent_layers);
    let name = format!("{} {}", shape.name, mixture.name());
    let mut progress = Progress::new(&name, bytes(shape, *mixture));
    match write(file, shape, *mixture, |written| progress.at(written)) {
        Ok(()) => progress.done(),
        Err(error) => {
            progress.fail();
            return Err(error);
        }
    }
    println!("{}", file.display());
    Ok(())
}

/// Bytes of the file without its header.
pub fn bytes(shape: &Shape, mixture: Mixture) -> u64 {
    shape::tensors(shape, mixture).iter().map(|tensor| tensor.bytes() + tensor.padding()).sum()
}

/// Writes a temporary file, then renames it to `path`. Calls `progress` with the bytes of tensors written so far.
///
/// # Errors
/// [`Error::Io`], [`Error::DiskFull`] before anything is written, [`Error::Interrupted`]; no file is left then.
pub fn write(path: &Path, shape: &Shape, mixture: Mixture, mut progress: impl FnMut(u64)) -> Result<()> {
    whole::write(path, bytes(shape, mixture), |file| fill(file, shape, mixture, &mut progress))
}

/// Writes only the header of such a model to each of these files, and makes them as long as the model's. Their weights
/// are zeros and take no space on the disk.
///
/// # Errors
/// [`Error::Io`].
pub fn write_sparse(paths: &[PathBuf], shape: &Shape, mixture: Mixture) -> Result<()> {
    let header = shape::header(shape, &shape::tensors(shape, mixture));
    let length = (header.len() as u64).saturating_add(bytes(shape, mixture));
    let write = |path: &Path| {
        let mut file = File::create(path)?;
        file.write_all(&header)?;
        file.set_len(length)
    };
    paths.iter().try_for_each(|path| write(path).map_err(Error::at(path)))
}

fn fill(file: &mut File, shape: &Shape, mixture: Mixture, progress: &mut impl FnMut(u64)) -> Result<()> {
    let tensors = shape::tensors(shape, mixture);
    // Buffers paddings and norms; larger writes bypass the buffer.
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&shape::header(shape, &tensors)).map_err(Error::io("header"))?;
    let (mut pools, mut written) = (Pools::default(), 0);
    for (index, tensor) in tensors.iter().enumerate() {
        let pool = pools.of(tensor.dtype, tensor.fill);
        data(&mut out, tensor, pool, index, |piece| {
            written += piece;
            progress(written);
        })?;
    }
    out.flush().map_err(Error::io("the last bytes"))
}

/// Writes a tensor from pieces of its pool.
fn data(
    out: &mut impl Write,
    tensor: &Tensor,
    pool: &Pool,
    index: usize,
    mut progress: impl FnMut(u64),
) -> Result<()> {
    let block = tensor.dtype.block_bytes();
    let blocks = pool.bytes.len() / block;
    // Starts each tensor at another place in the pool; 7919 is prime, so that few tensors begin alike.
    let mut at = index * 7919 % blocks * block;
    let mut left = tensor.bytes();
    while left > 0 {
        host::check_interrupted()?;
        let piece = left.min((pool.bytes.len() - at) as u64) as usize;
        out.write_all(&pool.bytes[at..at + piece]).map_err(Error::io("weights"))?;
        left -= piece as u64;
        at = 0;
        progress(piece as u64);
    }
    let padding = tensor.padding();
    out.write_all(&vec![0; padding as usize]).map_err(Error::io("weights"))?;
    progress(padding);
    Ok(())
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use rocmforge::backend::cpu::Isa;
    use rocmforge::backend::{ActivationType, KvType};

    use super::runner::Runner;
    use super::*;

    fn shape(name: &str) -> Shape {
        SHAPES.into_iter().find(|shape| shape.name == name).expect("a shape")
    }

    #[test]
    fn a_written_file_is_a_model_of_that_shape_and_runs() {
        for mixture in [Mixture::Q4KM, Mixture::Q8, Mixture::F16] {
            let recurrent = shape("tiny-recurrent");
            let streams = shape("tiny-streams");
            let experts = (shape("tiny-experts"), Some((8, 2)));
            for (shape, experts) in [(TINY, None), (recurrent, None), (streams, None), experts] {
                let dir = tempfile::tempdir().expect("a folder");
                let path = dir.path().join("model.gguf");
                let mut written = 0;
                write(&path, &shape, mixture, |bytes| written = bytes).expect("written");
                assert_eq!(written, bytes(&shape, mixture));
                let header = path.metadata().expect("written above").len() - written;
                assert!(header < 100_000, "{header}");
                assert_eq!(dir.path().read_dir().expect("a folder").count(), 1, "nothing lies beside it");

                let mut runner = Runner::open(&path, Isa::Portable, ActivationType::F32, KvType::F32);
                let plan = &runner.model.plan;
                assert_eq!(plan.program.layer_count(), 2);
                assert_eq!(plan.shape.experts.as_ref().map(|experts| (experts.count, experts.used)), experts);
                let (first, second) = (runner.feed(&[1, 300, 301]), runner.feed(&[302]));
                assert_eq!(first.len(), 512);
                let spread = |x: &[f32]| x.iter().fold(0f32, |most, x| most.max(x.abs()));
                assert!((0.05..50.0).contains(&spread(&first)), "logits of up to {}", spread(&first));
                assert_ne!(first, second);
            }
        }
    }

    #[test]
    fn silent_layers_cost_time_and_change_nothing() {
        for shape in [TINY, shape("tiny-experts"), shape("tiny-recurrent")] {
            let dir = tempfile::tempdir().expect("a folder");
            let logits = [0, 4].map(|silent| {
                let path = dir.path().join(format!("{silent}.gguf"));
                write(&path, &shape.with_silent(silent), Mixture::Q4KM, |_| ()).expect("written");
                let mut runner = Runner::open(&path, Isa::Portable, ActivationType::F32, KvType::F32);
                assert_eq!(u64::from(runner.model.plan.program.layer_count()), 2 + silent);
                runner.feed(&[1, 300, 301])
            });
            assert_eq!(logits[0], logits[1], "{}", shape.name);
        }
    }

    #[test]
    fn nothing_is_left_of_a_file_that_cannot_be_written() {
        let dir = tempfile::tempdir().expect("a folder");
        let taken = dir.path().join("a folder of that name");
        std::fs::create_dir(&taken).expect("made");
        assert!(matches!(write(&taken, &TINY, Mixture::Q8, |_| ()), Err(Error::Io { .. })));
        assert_eq!(dir.path().read_dir().expect("a folder").count(), 1);
        let nowhere = dir.path().join("nowhere/model.gguf");
        assert!(matches!(write(&nowhere, &TINY, Mixture::Q8, |_| ()), Err(Error::Io { .. })));
    }

    #[test]
    fn large_ones_are_as_large_as_real_files() {
        // GB of files that llama.cpp made from models of these shapes.
        for (shape, mixture, real) in [
            ("8B", Mixture::Q4KM, 4.92),
            ("8B", Mixture::Q8, 8.54),
            ("8B", Mixture::F16, 16.07),
            ("70B", Mixture::Q4KM, 42.52),
            ("70B", Mixture::Q8, 74.98),
            ("30B-A3B", Mixture::Q4KM, 18.56),
            ("30B-A3B", Mixture::Q8, 32.48),
        ] {
            let gb = bytes(&self::shape(shape), mixture) as f64 / 1e9;
            assert!((gb / real - 1.0).abs() < 0.01, "{shape} {}: {gb} GB, {real} are real", mixture.name());
        }
    }
}

/// Loads a program's weights; shared with the reference tests.
#[cfg(test)]
#[path = "../../../../tests/reference/loaded.rs"]
#[allow(clippy::expect_used, clippy::unwrap_used)] // shared with the tests
mod loaded;

/// Runs a sequence through a model's parts; shared with the reference tests.
#[cfg(test)]
#[path = "../../../../tests/reference/runner.rs"]
#[allow(clippy::expect_used, dead_code)] // shared with the tests
pub mod runner;
