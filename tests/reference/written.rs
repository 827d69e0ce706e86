//! Files of an independent writer: names, shapes, types, values and bytes are what that writer's own reader reads.
//!
//! `cargo xtask models` has tests/models/write-gguf.py write them. tests/scenario/good_models.rs runs the whole models.

use std::fs::File;
use std::path::{Path, PathBuf};

use rocmforge::model::gguf::{Array, Gguf, Value};
use rocmforge::tensor::MappedFile;
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

use crate::good;

/// Whether a value is the described one; floats are compared by their bits.
fn same(value: &Value, kind: &str, want: &Json) -> bool {
    let one = |name: &str, found: Json| kind == name && found == *want;
    match value {
        Value::U8(v) => one("UINT8", json!(v)),
        Value::I8(v) => one("INT8", json!(v)),
        Value::U16(v) => one("UINT16", json!(v)),
        Value::I16(v) => one("INT16", json!(v)),
        Value::U32(v) => one("UINT32", json!(v)),
        Value::I32(v) => one("INT32", json!(v)),
        Value::U64(v) => one("UINT64", json!(v)),
        Value::I64(v) => one("INT64", json!(v)),
        Value::F32(v) => kind == "FLOAT32" && same_single(*v, want),
        Value::F64(v) => kind == "FLOAT64" && same_double(*v, want),
        Value::Bool(v) => one("BOOL", json!(v)),
        Value::String(v) => one("STRING", json!(v)),
        Value::Array(array) => kind.strip_prefix("ARRAY ").is_some_and(|kind| same_array(array, kind, want)),
    }
}

fn same_array(array: &Array, kind: &str, want: &Json) -> bool {
    let all = |name: &str, found: Json| kind == name && found == *want;
    let each = |count: usize, same: &dyn Fn(usize, &Json) -> bool| {
        want.as_array().is_some_and(|want| {
            want.len() == count && want.iter().enumerate().all(|(index, want)| same(index, want))
        })
    };
    match array {
        Array::U8(v) => all("UINT8", json!(v)),
        Array::I8(v) => all("INT8", json!(v)),
        Array::U16(v) => all("UINT16", json!(v)),
        Array::I16(v) => all("INT16", json!(v)),
        Array::U32(v) => all("UINT32", json!(v)),
        Array::I32(v) => all("INT32", json!(v)),
        Array::U64(v) => all("UINT64", json!(v)),
        Array::I64(v) => all("INT64", json!(v)),
        Array::F32(v) => kind == "FLOAT32" && each(v.len(), &|at, want| same_single(v[at], want)),
        Array::F64(v) => kind == "FLOAT64" && each(v.len(), &|at, want| same_double(v[at], want)),
        Array::Bool(v) => all("BOOL", json!(v)),
        Array::String(v) => all("STRING", json!(v.iter().collect::<Vec<_>>())),
    }
}

/// The description has a word for a non-finite number; its other bits are not compared.
fn same_single(value: f32, want: &Json) -> bool {
    match want {
        Json::String(word) => {
            word.parse::<f32>().is_ok_and(|want| same_double(value.into(), &json!(want.to_string())))
        }
        // JSON gives the f64 of this single or the one next to it; rounding to f32 gives the single again.
        _ => want.as_f64().is_some_and(|want| (want as f32).to_bits() == value.to_bits()),
    }
}

fn same_double(value: f64, want: &Json) -> bool {
    let want = want.as_str().and_then(|text| text.parse::<f64>().ok());
    want.is_some_and(|want| want.to_bits() == value.to_bits() || (want.is_nan() && value.is_nan()))
}

/// Panics if the header of `path`, or a byte of its tensors, differs from the description beside it.
fn assert_reads_as_described(path: &Path) {
    let described: Json =
        serde_json::from_slice(&std::fs::read(path.with_extension("json")).unwrap()).unwrap();
    let (gguf, file) =
        Gguf::open(File::open(path).unwrap()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let shown = path.display();
    assert_eq!(
        json!([gguf.version(), gguf.alignment()]),
        json!([described["version"], described["alignment"]]),
        "{shown}"
    );
    let entries = described["metadata"].as_array().unwrap();
    assert_eq!(gguf.metadata().len(), entries.len(), "{shown}");
    for ((key, value), want) in gguf.metadata().zip(entries) {
        let (name, kind) = (want[0].as_str().unwrap(), want[1].as_str().unwrap());
        assert!(
            key == name && same(value, kind, &want[2]),
            "{shown}: {key} is {}, not {name} {kind}",
            value.describe()
        );
        assert_eq!(
            gguf.get(key).map(Value::describe),
            Some(value.describe()),
            "{shown}: {key} looked up by name has another value"
        );
    }
    let tensors = described["tensors"].as_array().unwrap();
    assert_eq!(gguf.tensors().len(), tensors.len(), "{shown}");
    for (info, want) in gguf.tensors().iter().zip(tensors) {
        let bytes = info.range.end - info.range.start;
        let found = json!([info.name, info.dtype.name(), info.shape.dims(), info.range.start, bytes]);
        let want = want.as_array().unwrap();
        assert_eq!(found.as_array().unwrap()[..], want[..5], "{shown}");
        assert_eq!(sha256(&gguf, &file, &info.name), want[5], "{shown}: {}", info.name);
    }
}

fn sha256(gguf: &Gguf, file: &std::sync::Arc<MappedFile>, name: &str) -> String {
    let tensor = gguf.lazy(name, file).expect("a tensor of the table is not found by name");
    Sha256::digest(tensor.bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn files(below: &str, least: usize) -> Vec<PathBuf> {
    let Some(written) = good::written() else { return Vec::new() };
    let entries = std::fs::read_dir(written.join(below)).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "gguf")).collect();
    files.sort();
    assert!(files.len() >= least, "{below}: {files:?}");
    files
}

#[test]
fn every_kind_of_header_reads_as_its_writer_reads_it() {
    files("headers", 17).iter().for_each(|path| assert_reads_as_described(path));
}

#[test]
fn every_kind_of_model_reads_as_its_writer_reads_it() {
    files("models", 64).iter().for_each(|path| assert_reads_as_described(path));
}

/// The package writes more than the format allows, and more than any reader supports.
#[test]
fn files_that_the_format_does_not_allow_are_refused_by_name() {
    for path in files("refused", 10) {
        let want = match path.file_stem().unwrap().to_str().unwrap() {
            "nested" => "arrays of arrays are not",
            "big-endian" => "big-endian",
            "key" => "printable ASCII",
            "five-dimensions" => "5 dimensions",
            "no-dimensions" => "0 dimensions",
            "no-values" => "[4, 0]",
            "long-name" => "65 bytes",
            "aligned-1" => "alignment is 1;",
            "aligned-4" => "alignment is 4;",
            "aligned-131072" => "alignment is 131072;",
            other => panic!("the test has no expected error for {other}"),
        };
        let error = Gguf::open(File::open(&path).unwrap()).map(drop).unwrap_err().to_string();
        assert!(error.contains(want), "{}: {error}", path.display());
    }
}

#[test]
fn another_value_is_noticed() {
    for (value, kind, want) in [
        (Value::U32(7), "UINT32", json!(8)),
        (Value::U32(7), "INT32", json!(7)),
        (Value::F32(0.0), "FLOAT32", json!(-0.0)),
        (Value::F32(f32::INFINITY), "FLOAT32", json!("-inf")),
        (Value::F64(0.1), "FLOAT64", json!("0.10000000000000002")),
        (Value::Array(Array::F32(vec![1.0, 2.0])), "ARRAY FLOAT32", json!([1.0])),
        (Value::Array(Array::Bool(vec![true])), "ARRAY BOOL", json!([false])),
    ] {
        assert!(!same(&value, kind, &want), "{value:?} is not {kind} {want}");
    }
    assert!(same(&Value::F32(f32::NAN), "FLOAT32", &json!("nan")));
    assert!(same(&Value::F64(-0.0), "FLOAT64", &json!("-0.0")));
    assert!(same(&Value::F32(f32::from_bits(1)), "FLOAT32", &json!(1.401_298_464_324_817e-45)));
}
