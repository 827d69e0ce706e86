//! Compares the parser with another reader's description of a real file. Broken files: `tests/adversarial/gguf.rs`.

#![allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use serde_json::{Value as Json, json};

use super::*;
use crate::tensor::HostPages;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/tinystories-260k-f32.gguf");
const DESCRIBED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/tinystories-260k-f32.json");

fn open() -> (Gguf, Arc<MappedFile>) {
    Gguf::open(File::open(MODEL).unwrap()).unwrap()
}

/// Type and value as `tests/models/describe-gguf.py` prints them.
fn described(value: &Value) -> [Json; 2] {
    match value {
        Value::U32(v) => [json!("UINT32"), json!(v)],
        Value::F32(v) => [json!("FLOAT32"), json!(f64::from(*v))],
        Value::Bool(v) => [json!("BOOL"), json!(v)],
        Value::String(v) => [json!("STRING"), json!(v)],
        Value::Array(Array::String(v)) => [json!("ARRAY STRING"), json!(v.iter().collect::<Vec<_>>())],
        Value::Array(Array::I32(v)) => [json!("ARRAY INT32"), json!(v)],
        Value::Array(Array::F32(v)) => {
            [json!("ARRAY FLOAT32"), json!(v.iter().map(|&x| f64::from(x)).collect::<Vec<_>>())]
        }
        other => panic!("the file has no {other:?}"),
    }
}

#[test]
fn a_real_file_reads_as_the_gguf_package_reads_it() {
    let want: Json = serde_json::from_slice(&std::fs::read(DESCRIBED).unwrap()).unwrap();
    let (gguf, _) = open();
    assert_eq!(json!([gguf.version(), gguf.alignment()]), json!([want["version"], want["alignment"]]));

    let rows = |key: &str| want[key].as_array().unwrap().clone();
    assert_eq!(gguf.metadata().len(), rows("metadata").len());
    for ((key, value), want) in gguf.metadata().zip(rows("metadata")) {
        let [kind, value] = described(value);
        assert_eq!(json!([key, kind, value]), want);
        assert_eq!(described(gguf.get(key).unwrap()), [kind, value], "looked up by name");
    }
    assert_eq!(gguf.tensors().len(), rows("tensors").len());
    for (info, want) in gguf.tensors().iter().zip(rows("tensors")) {
        let bytes = info.range.end - info.range.start;
        let got = json!([info.name, info.dtype.name(), info.shape.dims(), info.range.start, bytes]);
        assert_eq!(got, want);
        assert_eq!(gguf.tensor(&info.name), Some(info));
    }
}

#[test]
fn opening_touches_no_page_and_a_lazy_tensor_reads_in_place() {
    let (gguf, file) = open();
    assert_eq!(HostPages::of(std::iter::once(&*file)).unwrap().resident_bytes, 0);
    let tensor = gguf.lazy("output_norm.weight", &file).unwrap();
    assert_eq!((tensor.shape().dims(), tensor.byte_len()), (&[64][..], 256));
    let whole = std::fs::read(MODEL).unwrap();
    assert_eq!(tensor.bytes(), &whole[tensor.range().start as usize..tensor.range().end as usize]);
    assert!(gguf.lazy("no.such.weight", &file).is_none());
}

#[test]
fn keys_are_asked_for_by_type_and_the_error_says_what_is_there() {
    let (gguf, _) = open();
    assert_eq!(gguf.required::<&str>("general.architecture").unwrap(), "llama");
    assert_eq!(gguf.required::<u32>("llama.block_count").unwrap(), 5);
    assert_eq!(gguf.optional::<u64>("llama.expert_count").unwrap(), None);
    assert_eq!(gguf.required::<&Strings>("tokenizer.ggml.tokens").unwrap().get(1), Some("<s>"));
    assert_eq!(gguf.float("llama.attention.layer_norm_rms_epsilon"), Some(1e-5));
    assert_eq!(gguf.unsigned("general.architecture"), None);

    let text = |e: GgufError| e.to_string();
    assert_eq!(
        text(gguf.required::<u32>("llama.expert_count").unwrap_err()),
        "the file has no metadata \"llama.expert_count\" (an integer from 0 to 4294967295), which this model needs"
    );
    assert_eq!(
        text(gguf.optional::<bool>("tokenizer.ggml.tokens").unwrap_err()),
        "metadata \"tokenizer.ggml.tokens\" is an array of 512 string, expected a bool"
    );
    assert_eq!(
        text(gguf.required::<&[f32]>("llama.block_count").unwrap_err()),
        "metadata \"llama.block_count\" is u32 5, expected an array of f32"
    );
}

/// Changes every array of the sample model at its beginning, its end and in between. Equal known arrays are shared;
/// others are read as if nothing were known.
#[test]
fn known_arrays_are_taken_where_they_are_equal_and_only_there() {
    let bytes = std::fs::read(MODEL).unwrap();
    let (original, _) = open();
    let known = |key: &str| original.entries(|k| k == key).into_iter().map(|(_, value)| value).collect();
    let again = Gguf::parse_beside(&bytes[..], &known).unwrap();
    let shared = |gguf: &Gguf| {
        let all = gguf.entries(|_| true);
        let pairs = all.iter().zip(original.entries(|_| true)).filter(|(a, b)| Arc::ptr_eq(&a.1, &b.1));
        pairs.map(|(entry, _)| entry.0.to_string()).collect::<Vec<_>>()
    };
    let arrays: Vec<String> = original
        .metadata()
        .filter(|(_, v)| matches!(v, Value::Array(_)))
        .map(|(key, _)| key.into())
        .collect();
    assert!(arrays.len() >= 3, "{arrays:?}");
    assert_eq!(shared(&again), arrays);
    let equal = |a: &Gguf, b: &Gguf| a.metadata().eq(b.metadata()) && a.tensors() == b.tensors();
    assert!(equal(&again, &original));
    let start = bytes.windows(21).position(|window| window == b"tokenizer.ggml.tokens").unwrap();
    let mut broken = 0;
    for at in (start..original.header_bytes() as usize).step_by(61) {
        let mut changed = bytes.clone();
        changed[at] ^= 0x21;
        let wanted = Gguf::parse(&changed[..]);
        let found = Gguf::parse_beside(&changed[..], &known);
        match (&found, &wanted) {
            (Ok(found), Ok(wanted)) => assert!(equal(found, wanted), "byte {at}"),
            (Err(found), Err(wanted)) => assert_eq!(found.to_string(), wanted.to_string(), "byte {at}"),
            _ => panic!("byte {at}: {found:?}, not {wanted:?}"),
        }
        broken += usize::from(found.is_err());
    }
    assert!(broken > 10, "{broken}");
}
