//! `cargo xtask requantize`: writes a model's file again with 6-bit weights (MXFP6), which no other tool writes.
//!
//! Only matrices change: those of products, of experts and of token embeddings. They must take more bits than the new type, and
//! their rows must be whole blocks. Everything else is copied. Memory: a few rows, whatever the file's size.

mod encode;

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use rocmforge::backend::cpu::quant::{dequantize_row, is_supported};
use rocmforge::model::gguf::{Array, Value};
use rocmforge::model::{Model, ModelId};
use rocmforge::program::{Op, Program, Residence};
use rocmforge::tensor::{DType, LazyTensor};
use rocmforge_test_support::forge::{self, Forge, kind};
use xtask::error::{Error, Result};
use xtask::host;
use xtask::progress::Progress;

use crate::whole;
use encode::{BLOCK, Elements};

const EXAMPLES: &str = "Examples:\n  cargo xtask requantize model-f16.gguf model-mxfp6.gguf --type MXFP6_E2M3\n  \
    cargo xtask requantize model-00001-of-00002.gguf model-00002-of-00002.gguf whole.gguf --type MXFP6_E3M2\n  \
    cargo xtask requantize model.gguf out.gguf --type MXFP6_E2M3 --json | jq .relative_error";

/// Alignment of tensors in the file.
const ALIGNMENT: u64 = 32;

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The model's file or, in order, its parts; then the file to write, which is replaced once the new one is complete
    #[arg(value_name = "FILE", required = true, num_args = 2..)]
    files: Vec<PathBuf>,
    /// Type of the new weights: MXFP6_E2M3 keeps more digits, MXFP6_E3M2 a wider range within 32 weights
    #[arg(long = "type", value_name = "TYPE", ignore_case = true)]
    to: To,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum To {
    #[value(name = "MXFP6_E2M3")]
    E2m3,
    #[value(name = "MXFP6_E3M2")]
    E3m2,
}

impl To {
    fn dtype(self) -> DType {
        match self {
            Self::E2m3 => DType::MXFP6_E2M3,
            Self::E3m2 => DType::MXFP6_E3M2,
        }
    }
}

/// A tensor of the new file.
struct Planned {
    from: LazyTensor,
    dtype: DType,
    bytes: u64,
}

impl Planned {
    fn padding(&self) -> u64 {
        self.bytes.next_multiple_of(ALIGNMENT) - self.bytes
    }
}

/// Result of the command.
#[derive(Default, serde::Serialize)]
struct Report {
    changed_tensors: usize,
    kept_tensors: usize,
    bytes_before: u64,
    bytes_after: u64,
    /// Root of the mean square error of changed weights, over that of the weights.
    relative_error: f64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let (out, files) = args.files.split_last().unwrap_or_else(|| unreachable!("clap wants two"));
    let open = |path: &PathBuf| File::open(path).map_err(Error::at(path));
    let opened = files.iter().map(open).collect::<Result<_>>()?;
    let refused =
        |error: &dyn std::fmt::Display| Error::Unexpected { what: "the model", text: error.to_string() };
    let model = Model::open(ModelId(1), "source", opened).map_err(|error| refused(&error))?;
    let planned = plan(&model, args.to.dtype());
    let name = format!("{} {}", out.display(), args.to.dtype());
    let mut progress = Progress::new(&name, bytes(&planned));
    match write(out, &model, &planned, |written| progress.at(written)) {
        Ok(report) => {
            progress.done();
            show(&report, args.json)
        }
        Err(error) => {
            progress.fail();
            Err(error)
        }
    }
}

/// Bytes of the new file without its header.
fn bytes(planned: &[Planned]) -> u64 {
    planned.iter().map(|tensor| tensor.bytes + tensor.padding()).sum()
}

/// Writes the new file as a whole. Calls `progress` with the bytes of tensors written so far.
fn write(out: &Path, model: &Model, planned: &[Planned], progress: impl FnMut(u64)) -> Result<Report> {
    let header = header(model, planned);
    let mut report = Report::default();
    whole::write(out, bytes(planned).saturating_add(header.len() as u64), |file| {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&header).map_err(Error::io("header"))?;
        report = copy(&mut out, planned, progress)?;
        out.flush().map_err(Error::io("the last bytes"))
    })?;
    Ok(report)
}

fn show(report: &Report, json: bool) -> Result<()> {
    if json {
        let text = serde_json::to_string(report).map_err(|error| Error::io("the result")(error.into()))?;
        println!("{text}");
        return Ok(());
    }
    println!(
        "{} tensors changed, {} kept; weights took {:.1} MB, take {:.1} MB; relative error {:.4}",
        report.changed_tensors,
        report.kept_tensors,
        report.bytes_before as f64 / 1e6,
        report.bytes_after as f64 / 1e6,
        report.relative_error
    );
    Ok(())
}

/// The tensors of the new file, in the order of the old one.
fn plan(model: &Model, to: DType) -> Vec<Planned> {
    let matrices = matrices(&model.plan.program);
    let names = model.files.tensors().map(|info| info.name.clone());
    let tensors = names.filter_map(|name| model.files.lazy(&name));
    tensors
        .map(|from| {
            let is_matrix = matrices.contains(from.name()) && is_supported(from.dtype());
            let bytes =
                to.row_bytes(from.shape().cols()).and_then(|row| row.checked_mul(from.shape().rows()));
            match bytes.filter(|bytes| is_matrix && *bytes < from.byte_len()) {
                Some(bytes) => Planned { from, dtype: to, bytes },
                None => Planned { dtype: from.dtype(), bytes: from.byte_len(), from },
            }
        })
        .collect()
}

/// Names of the matrices that a program multiplies or takes token embeddings from.
fn matrices(program: &Program) -> HashSet<String> {
    let ops = program.parts().iter().flat_map(|part| &part.ops);
    let named = ops.filter_map(|op| match op {
        Op::Project { weight: tensor, .. } | Op::Embed { table: tensor, .. } => program.tensor(*tensor),
        _ => None,
    });
    let experts = program.tensors().iter().filter(|tensor| tensor.residence == Residence::Chosen);
    // A part of a tensor has the tensor's name before a bracket.
    let whole = |name: &str| name.split('[').next().unwrap_or(name).to_owned();
    named.chain(experts).map(|tensor| whole(tensor.lazy.name())).collect()
}

/// The new file's bytes before its tensors.
fn header(model: &Model, planned: &[Planned]) -> Vec<u8> {
    let mut forge = Forge::new(0);
    forge.alignment = ALIGNMENT;
    // One file with this alignment, of types that no number for a whole file stands for.
    let replaced =
        |key: &str| key.starts_with("split.") || matches!(key, "general.alignment" | "general.file_type");
    for (key, value) in model.files.header().metadata().filter(|(key, _)| !replaced(key)) {
        forge.entries.push((key.as_bytes().to_vec(), encoded(value)));
    }
    let mut offset = 0;
    for tensor in planned {
        forge.tensors.push(forge::Tensor {
            name: tensor.from.name().into(),
            dims: tensor.from.shape().dims().to_vec(),
            n_dims: None,
            ggml: tensor.dtype.ggml(),
            offset: Some(offset),
            data: Some(Vec::new()), // written after the header
        });
        offset += tensor.bytes + tensor.padding();
    }
    forge.build().bytes
}

/// A metadata value in the file's form.
fn encoded(value: &Value) -> forge::Value {
    let raw = |kind: u32, bytes: &[u8]| forge::Value(kind, forge::Part::default().raw(bytes));
    match value {
        Value::U8(v) => raw(kind::U8, &v.to_le_bytes()),
        Value::I8(v) => raw(kind::I8, &v.to_le_bytes()),
        Value::U16(v) => raw(kind::U16, &v.to_le_bytes()),
        Value::I16(v) => raw(kind::I16, &v.to_le_bytes()),
        Value::U32(v) => raw(kind::U32, &v.to_le_bytes()),
        Value::I32(v) => raw(kind::I32, &v.to_le_bytes()),
        Value::U64(v) => raw(kind::U64, &v.to_le_bytes()),
        Value::I64(v) => raw(kind::I64, &v.to_le_bytes()),
        Value::F32(v) => raw(kind::F32, &v.to_le_bytes()),
        Value::F64(v) => raw(kind::F64, &v.to_le_bytes()),
        Value::Bool(v) => raw(kind::BOOL, &[(*v).into()]),
        Value::String(v) => forge::Value::string(v),
        Value::Array(array) => encoded_array(array),
    }
}

fn encoded_array(array: &Array) -> forge::Value {
    macro_rules! numbers {
        ($kind:ident, $values:expr) => {{
            let bytes: Vec<u8> = $values.iter().flat_map(|v| v.to_le_bytes()).collect();
            forge::Value::array(kind::$kind, $values.len() as u64, &bytes)
        }};
    }
    match array {
        Array::U8(v) => numbers!(U8, v),
        Array::I8(v) => numbers!(I8, v),
        Array::U16(v) => numbers!(U16, v),
        Array::I16(v) => numbers!(I16, v),
        Array::U32(v) => numbers!(U32, v),
        Array::I32(v) => numbers!(I32, v),
        Array::U64(v) => numbers!(U64, v),
        Array::I64(v) => numbers!(I64, v),
        Array::F32(v) => numbers!(F32, v),
        Array::F64(v) => numbers!(F64, v),
        Array::Bool(v) => forge::Value::array(
            kind::BOOL,
            v.len() as u64,
            &v.iter().map(|b| (*b).into()).collect::<Vec<_>>(),
        ),
        Array::String(v) => forge::Value::strings(&v.iter().collect::<Vec<_>>()),
    }
}

/// Writes the tensors' bytes. Calls `progress` with the bytes written so far.
fn copy(out: &mut impl Write, planned: &[Planned], mut progress: impl FnMut(u64)) -> Result<Report> {
    let (mut report, mut written) = (Report::default(), 0);
    let (mut squares, mut errors) = (0.0, 0.0);
    for tensor in planned {
        let row_bytes = (tensor.from.byte_len() / tensor.from.shape().rows().max(1)).max(1) as usize;
        let elements = Elements::of(tensor.dtype).filter(|_| tensor.dtype != tensor.from.dtype());
        let mut recoder = elements.map(|elements| Recoder::new(&tensor.from, tensor.dtype, elements));
        for row in tensor.from.bytes().chunks(row_bytes) {
            host::check_interrupted()?;
            let bytes = match &mut recoder {
                Some(recoder) => recoder.row(row)?,
                None => row,
            };
            out.write_all(bytes).map_err(Error::io("weights"))?;
            written += bytes.len() as u64;
            progress(written);
        }
        let padding = tensor.padding();
        out.write_all(&vec![0; padding as usize]).map_err(Error::io("weights"))?;
        written += padding;
        report.bytes_before += tensor.from.byte_len();
        report.bytes_after += tensor.bytes;
        match recoder {
            Some(recoder) => {
                report.changed_tensors += 1;
                squares += recoder.squares;
                errors += recoder.errors;
            }
            None => report.kept_tensors += 1,
        }
        check_whole(&tensor.from)?;
    }
    report.relative_error = if squares > 0.0 { (errors / squares).sqrt() } else { 0.0 };
    Ok(report)
}

/// An error if the file lost bytes while it was read: they read as zeros.
fn check_whole(tensor: &LazyTensor) -> Result<()> {
    tensor
        .file()
        .check_poison()
        .map_err(|error| Error::Unexpected { what: "the model", text: error.to_string() })
}

/// Makes a tensor's rows again in another type.
struct Recoder<'a> {
    from: &'a LazyTensor,
    to: DType,
    elements: Elements,
    values: Vec<f32>,
    again: Vec<f32>,
    bytes: Vec<u8>,
    /// Sums of the squares of values and of their errors so far.
    squares: f64,
    errors: f64,
}

impl<'a> Recoder<'a> {
    fn new(from: &'a LazyTensor, to: DType, elements: Elements) -> Self {
        let values = vec![0.0; from.shape().cols() as usize];
        Self {
            from,
            to,
            elements,
            again: values.clone(),
            values,
            bytes: Vec::new(),
            squares: 0.0,
            errors: 0.0,
        }
    }

    /// The bytes of a row whose bytes in the old file are `row`.
    fn row(&mut self, row: &[u8]) -> Result<&[u8]> {
        let refused = |text: String| Error::Unexpected { what: "the model", text };
        dequantize_row(self.from.dtype(), row, &mut self.values)
            .map_err(|error| refused(error.to_string()))?;
        if let Some(value) = self.values.iter().find(|value| !value.is_finite()) {
            return Err(refused(format!("tensor {} has a weight of {value}", self.from.name())));
        }
        self.bytes.clear();
        for block in self.values.as_chunks::<BLOCK>().0 {
            self.bytes.extend(self.elements.encode(block));
        }
        dequantize_row(self.to, &self.bytes, &mut self.again).map_err(|error| refused(error.to_string()))?;
        for (value, again) in self.values.iter().zip(&self.again) {
            let (value, again) = (f64::from(*value), f64::from(*again));
            self.squares += value * value;
            self.errors += (value - again) * (value - again);
        }
        Ok(&self.bytes)
    }
}

#[cfg(test)]
mod tests;
