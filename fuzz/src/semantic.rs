//! Target `gguf_semantic`: a valid model file with some numbers, keys and tensors changed, opened as the daemon does.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

use rocmforge::model::{Model, ModelId};
use rustix::fs::MemfdFlags;

use crate::allocations::peak_of;
use crate::forge::{Built, decoders};

/// Most changes in one file.
const CHANGES_MAX: usize = 8;

/// The first byte chooses a model; every 10 bytes after it choose a number of the file and its new value. For any
/// input: no panic, heap proportional to the file, and a model that opens has a plan whose tensors lie in its file.
pub fn gguf_semantic(data: &[u8], plant: bool) {
    static MODELS: OnceLock<Vec<Built>> = OnceLock::new();
    let models = MODELS.get_or_init(|| decoders().into_iter().map(|(_, forge)| forge.build()).collect());
    let Some((&which, changes)) = data.split_first() else { return };
    let built = &models[usize::from(which) % models.len()];
    let mut bytes = built.bytes.clone();
    for change in changes.chunks_exact(10).take(CHANGES_MAX) {
        apply(built, change, &mut bytes);
    }
    let file = memory_file(&bytes);
    let (result, peak) = peak_of(|| Model::open(ModelId(1), "fuzzed", vec![file]));
    // Bound: vocabulary and plan, a few times over.
    assert!(peak <= (2 << 20) + 32 * bytes.len(), "{peak} bytes of heap for a file of {}", bytes.len());
    let model = match result {
        Ok(model) => model,
        Err(error) => return assert!(!error.to_string().is_empty() && !changes.is_empty(), "{error}"),
    };
    let (shape, program) = (&model.plan.shape, &model.plan.program);
    let rope = &program.ropes()[0].spec;
    assert!(shape.heads % shape.kv_heads == 0 && rope.dims <= shape.head_dim);
    assert!(program.tensors().iter().all(|tensor| tensor.lazy.range().end <= bytes.len() as u64));
    assert_eq!(model.tokenizer.vocab_size(), program.vocab());
    // A valid number of a model that still opens.
    if plant && rope.theta < 1.0 {
        crate::planted(b"ROCm");
    }
}

/// Two bytes choose a number of the file; eight are its new value, or an offset to the old one.
fn apply(built: &Built, change: &[u8], bytes: &mut [u8]) {
    let (which, value) = change.split_at(2);
    let which = u16::from_le_bytes([which[0], which[1]]);
    let field = &built.fields[usize::from(which & 0x3fff) % built.fields.len()];
    let mut value: [u8; 8] = value.try_into().expect("ten bytes less two");
    if which & 0x4000 != 0 {
        let mut was = [0; 8];
        was[..field.bytes].copy_from_slice(&built.bytes[field.at..field.at + field.bytes]);
        let near = i64::from(i16::from_le_bytes([value[0], value[1]]));
        value = u64::from_le_bytes(was).wrapping_add_signed(near).to_le_bytes();
    }
    bytes[field.at..field.at + field.bytes].copy_from_slice(&value[..field.bytes]);
}

/// A private file, opened read-only as the daemon requires.
fn memory_file(bytes: &[u8]) -> File {
    let file = rustix::fs::memfd_create("fuzzed", MemfdFlags::CLOEXEC).expect("memory for a small file");
    let mut file = File::from(file);
    file.write_all(bytes).expect("memory for a small file");
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("an own file")
}
