//! Plans of forged headers: a sound one, and one lie at a time.

use std::io::Write;
use std::path::Path;

use super::*;
use crate::backend::{RopeLayout, RopeScaling};
use crate::model::plan::FfnPlan;
use crate::tensor::DType;

/// A metadata value as the writer below knows it.
#[derive(Clone)]
enum Meta {
    Number(u32),
    Real(f32),
    Text(&'static str),
    Numbers(Vec<i32>),
}

/// A header to be written; format: ggml `docs/gguf.md`. The data section is zeros.
#[derive(Clone)]
struct Forge {
    keys: Vec<(String, Meta)>,
    tensors: Vec<(String, Vec<u64>, DType)>,
}

const VOCAB: usize = 40;

impl Forge {
    /// Two layers, width 64, 4 query heads and 2 key/value heads of 16, feed-forward width 96.
    fn llama() -> Self {
        let number = |name: &str, n| (format!("llama.{name}"), Meta::Number(n));
        let mut forge = Self {
            keys: vec![
                ("general.architecture".into(), Meta::Text("llama")),
                number("block_count", 2),
                number("context_length", 512),
                number("embedding_length", 64),
                number("feed_forward_length", 96),
                number("attention.head_count", 4),
                number("attention.head_count_kv", 2),
                ("llama.attention.layer_norm_rms_epsilon".into(), Meta::Real(1e-5)),
            ],
            tensors: Vec::new(),
        };
        forge.add("token_embd.weight", &[64, VOCAB as u64], DType::Q8_0);
        forge.add("output_norm.weight", &[64], DType::F32);
        for i in 0..2 {
            for (part, dims) in [
                ("attn_q", [64, 64]),
                ("attn_k", [64, 32]),
                ("attn_v", [64, 32]),
                ("attn_output", [64, 64]),
                ("ffn_gate", [64, 96]),
                ("ffn_up", [64, 96]),
                ("ffn_down", [96, 64]),
            ] {
                forge.add(&format!("blk.{i}.{part}.weight"), &dims, DType::Q4_0);
            }
            forge.add(&format!("blk.{i}.attn_norm.weight"), &[64], DType::F32);
            forge.add(&format!("blk.{i}.ffn_norm.weight"), &[64], DType::F32);
        }
        forge
    }

    fn add(&mut self, name: &str, dims: &[u64], dtype: DType) {
        self.tensors.retain(|t| t.0 != name);
        self.tensors.push((name.into(), dims.to_vec(), dtype));
    }

    fn with(mut self, key: &str, value: Meta) -> Self {
        self.keys.retain(|k| k.0 != key);
        self.keys.push((key.into(), value));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.keys.retain(|k| k.0 != name);
        self.tensors.retain(|t| t.0 != name);
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], dtype: DType) -> Self {
        self.add(name, dims, dtype);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        let text = |out: &mut Vec<u8>, t: &str| {
            out.extend((t.len() as u64).to_le_bytes());
            out.extend(t.as_bytes());
        };
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            text(&mut out, key);
            match value {
                Meta::Number(n) => out.extend([4u32.to_le_bytes(), n.to_le_bytes()].concat()),
                Meta::Real(n) => out.extend([6u32.to_le_bytes(), n.to_le_bytes()].concat()),
                Meta::Text(t) => {
                    out.extend(8u32.to_le_bytes());
                    text(&mut out, t);
                }
                Meta::Numbers(all) => {
                    out.extend([9u32.to_le_bytes(), 5u32.to_le_bytes()].concat());
                    out.extend((all.len() as u64).to_le_bytes());
                    all.iter().for_each(|n| out.extend(n.to_le_bytes()));
                }
            }
        }
        let mut offset = 0u64;
        for (name, dims, dtype) in &self.tensors {
            text(&mut out, name);
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(dtype.ggml().to_le_bytes());
            out.extend(offset.to_le_bytes());
            let bytes = dtype.row_bytes(dims[0]).unwrap() * dims[1..].iter().product::<u64>();
            offset += bytes.next_multiple_of(32);
        }
        out.resize(out.len().next_multiple_of(32) + offset as usize, 0);
        out
    }

    fn plan(&self) -> Result<ExecutionPlan, PlanError> {
        self.plan_with(VOCAB)
    }

    fn plan_with(&self, vocab: usize) -> Result<ExecutionPlan, PlanError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&self.bytes()).unwrap();
        let (gguf, file) = Gguf::open(std::fs::File::open(file.path()).unwrap()).unwrap();
        ExecutionPlan::build(&gguf, &file, vocab)
    }

    fn fails(&self, want: PlanError) {
        assert_eq!(self.plan().unwrap_err(), want);
    }
}

fn number(key: &str, n: u32) -> Forge {
    Forge::llama().with(&format!("llama.{key}"), Meta::Number(n))
}

#[test]
fn a_sound_header_becomes_a_plan() {
    let plan = Forge::llama().plan().unwrap();
    let dims = &plan.dims;
    assert_eq!((dims.hidden, dims.n_layers, dims.ffn, dims.vocab), (64, 2, 96, VOCAB));
    assert_eq!((dims.n_heads, dims.n_kv_heads, dims.head_dim, dims.norm_eps), (4, 2, 16, 1e-5));
    let rope = &dims.rope;
    assert_eq!((rope.layout, rope.dims, rope.theta), (RopeLayout::Interleaved, 16, 10_000.0));
    assert_eq!((rope.scaling, plan.context_length, plan.layers.len()), (RopeScaling::None, 512, 2));
    assert!(plan.output.same(&plan.embedding) || plan.output.range() == plan.embedding.range(), "tied");
    let FfnPlan::Dense { down, .. } = &plan.layers[1].ffn else { panic!("a dense layer") };
    assert_eq!(down.weight.name(), "blk.1.ffn_down.weight");
    assert_eq!(plan.tensors().count(), 2 + 2 * 9 + 1);
    let used = plan.dtypes();
    assert_eq!(used[0], (DType::Q8_0, "token_embd.weight".to_owned()));
    assert_eq!(used[1], (DType::F32, "blk.0.attn_norm.weight".to_owned()));
    assert_eq!(used[2], (DType::Q4_0, "blk.0.attn_q.weight".to_owned()));
    let weights: u64 = 68 * 40 + 256 + 2 * ((64 + 64 + 32 + 32 + 96 + 96) * 36 + 64 * 54 + 512);
    assert_eq!(plan.weight_bytes(), weights);
}

#[test]
fn optional_tensors_are_taken() {
    let plan = Forge::llama()
        .tensor("output.weight", &[64, VOCAB as u64], DType::Q8_0)
        .tensor("rope_freqs.weight", &[8], DType::F32)
        .tensor("blk.1.attn_k.bias", &[32], DType::F32)
        .tensor("blk.0.attn_q_norm.weight", &[16], DType::F32)
        .plan()
        .unwrap();
    assert_eq!(plan.output.name(), "output.weight");
    assert!(plan.rope_factors.is_some() && plan.layers[1].k.bias.is_some());
    assert!(plan.layers[0].q_norm.is_some() && plan.layers[0].k.bias.is_none());
}

#[test]
fn numbers_stated_otherwise_are_read() {
    let forge = number("attention.key_length", 16)
        .with("llama.attention.head_count", Meta::Numbers(vec![4, 4]))
        .with("llama.rope.dimension_count", Meta::Number(8))
        .with("llama.rope.freq_base", Meta::Real(5e5))
        .with("llama.rope.scaling.type", Meta::Text("linear"))
        .with("llama.rope.scaling.factor", Meta::Real(4.0));
    let rope = forge.plan().unwrap().dims.rope;
    assert_eq!((rope.dims, rope.theta, rope.scaling), (8, 5e5, RopeScaling::Linear { factor: 4.0 }));
    let scale = |kind, factor| {
        let forge = Forge::llama().with("llama.rope.scaling.type", Meta::Text(kind));
        let forge = forge.with("llama.rope.scaling.factor", Meta::Real(factor));
        forge.plan().unwrap().dims.rope.scaling
    };
    assert_eq!((scale("linear", 0.0), scale("none", 8.0)), (RopeScaling::None, RopeScaling::None));
    let legacy = Forge::llama().with("llama.rope.scale_linear", Meta::Real(2.0));
    assert_eq!(legacy.plan().unwrap().dims.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    let shared = Forge::llama().without("llama.attention.head_count_kv").plan().unwrap_err();
    assert!(matches!(shared, PlanError::Shape { .. }), "4 kv heads without the key: {shared}");
}

#[test]
fn unknown_architectures_are_named() {
    let other = Forge::llama().with("general.architecture", Meta::Text("mamba"));
    other.fails(PlanError::Architecture { found: "mamba".into(), supported: vec!["llama"] });
    Forge::llama().without("general.architecture").fails(PlanError::NoArchitecture);
    let text = number("expert_count", 8).plan().unwrap_err().to_string();
    assert_eq!(text, "architecture \"llama\" with 8 experts (llama.expert_count) is not supported");
    let yarn = Forge::llama().with("llama.rope.scaling.type", Meta::Text("yarn")).plan().unwrap_err();
    assert!(matches!(&yarn, PlanError::Feature { feature, .. } if feature.contains("\"yarn\"")), "{yarn}");
    let wide = number("attention.value_length", 8).plan().unwrap_err();
    assert!(
        matches!(&wide, PlanError::Feature { feature, .. } if feature.contains("value_length")),
        "{wide}"
    );
}

#[test]
fn every_number_has_limits() {
    for (name, bad, min, max) in [
        ("block_count", 0, 1, 512),
        ("block_count", 513, 1, 512),
        ("embedding_length", 0, 1, 1 << 17),
        ("embedding_length", u32::MAX, 1, 1 << 17),
        ("feed_forward_length", 1 << 20, 1, 1 << 19),
        ("attention.head_count", 0, 1, 1024),
        ("attention.head_count_kv", 0, 1, 1024),
        ("attention.key_length", 1025, 1, 1024),
        ("attention.value_length", 0, 1, 1024),
        ("rope.dimension_count", 0, 1, 1024),
        ("context_length", 0, 1, 1 << 30),
        ("context_length", u32::MAX, 1, 1 << 30),
    ] {
        number(name, bad).fails(PlanError::Range {
            key: format!("llama.{name}"),
            value: bad.into(),
            min,
            max,
        });
    }
    let err = Forge::llama().plan_with(0).unwrap_err();
    assert!(matches!(err, PlanError::Range { value: 0, max: 4_194_304, .. }), "{err}");
    for name in ["block_count", "context_length", "attention.head_count", "feed_forward_length"] {
        let key = format!("llama.{name}");
        Forge::llama().without(&key).fails(PlanError::Key { key, want: "an unsigned integer" });
    }
    let key = "llama.attention.layer_norm_rms_epsilon".to_owned();
    Forge::llama().without(&key).fails(PlanError::Key { key, want: "a real number" });
    let key = "llama.rope.scaling.type".to_owned();
    Forge::llama().with(&key, Meta::Number(1)).fails(PlanError::Key { key, want: "a string" });
    let key = "llama.embedding_length".to_owned();
    let want = "an unsigned integer";
    Forge::llama().with(&key, Meta::Real(64.0)).fails(PlanError::Key { key: key.clone(), want });
    Forge::llama().with(&key, Meta::Numbers(vec![-1, -1])).fails(PlanError::Key { key, want });
}

#[test]
fn numbers_that_contradict_each_other_are_refused() {
    number("attention.head_count_kv", 3).fails(PlanError::HeadGroups { heads: 4, kv_heads: 3 });
    number("attention.head_count", 6).fails(PlanError::HeadWidth { hidden: 64, heads: 6 });
    number("rope.dimension_count", 7).fails(PlanError::RopeDims { dims: 7, head_dim: 16 });
    number("rope.dimension_count", 18).fails(PlanError::RopeDims { dims: 18, head_dim: 16 });
    for name in ["attention.head_count", "feed_forward_length"] {
        let key = format!("llama.{name}");
        Forge::llama().with(&key, Meta::Numbers(vec![4, 2])).fails(PlanError::PerLayer { key });
    }
    for (name, bad, want) in [
        ("rope.freq_base", 0.0, "above 0"),
        ("rope.freq_base", -1.0, "above 0"),
        ("rope.freq_base", f32::INFINITY, "finite"),
        ("rope.scaling.factor", -2.0, "at least 0"),
        ("attention.layer_norm_rms_epsilon", -1e-5, "at least 0 and below 1"),
        ("attention.layer_norm_rms_epsilon", 1.0, "at least 0 and below 1"),
    ] {
        let key = format!("llama.{name}");
        let forge = Forge::llama().with(&key, Meta::Real(bad));
        forge.fails(PlanError::Float { key, value: bad, want });
    }
    let nan = Forge::llama().with("llama.rope.freq_base", Meta::Real(f32::NAN)).plan().unwrap_err();
    assert!(matches!(nan, PlanError::Float { want: "finite", .. }), "{nan}");
}

#[test]
fn all_missing_tensors_are_listed_at_once() {
    let forge = Forge::llama()
        .without("token_embd.weight")
        .without("blk.0.attn_k.weight")
        .without("blk.1.ffn_norm.weight");
    let missing = |role, name: &str| crate::model::plan::MissingTensor { role, tried: vec![name.into()] };
    let err = forge.plan().unwrap_err();
    assert_eq!(
        err,
        PlanError::MissingTensors {
            missing: vec![
                missing("token embedding", "token_embd.weight"),
                missing("key projection", "blk.0.attn_k.weight"),
                missing("feed-forward norm", "blk.1.ffn_norm.weight"),
            ]
        }
    );
    let text = err.to_string();
    assert!(text.starts_with("3 required tensors are missing: token embedding (tried token_embd"), "{text}");
    assert!(text.contains("blk.0.attn_k.weight") && text.contains("blk.1.ffn_norm.weight"), "{text}");
}

#[test]
fn tensors_that_do_not_fit_their_role_are_refused() {
    for (name, dims, want) in [
        ("token_embd.weight", &[64, 41][..], "[64, 40]"),
        ("output_norm.weight", &[96], "[64]"),
        ("blk.1.attn_q.weight", &[64, 32], "[64, 64]"),
        ("blk.0.ffn_down.weight", &[64, 96], "[96, 64]"),
        ("blk.0.ffn_up.weight", &[64, 96, 2], "[64, 96]"),
        ("rope_freqs.weight", &[16], "[8]"),
    ] {
        let err = Forge::llama().tensor(name, dims, DType::F32).plan().unwrap_err();
        let PlanError::Shape { tensor, want: wanted, .. } = &err else { panic!("{err}") };
        assert_eq!((tensor.as_str(), wanted.as_str()), (name, want));
    }
    let err = Forge::llama().tensor("blk.0.attn_norm.weight", &[64], DType::F16).plan().unwrap_err();
    assert!(matches!(&err, PlanError::VectorType { dtype: DType::F16, .. }), "{err}");
    let extra = Forge::llama().tensor("blk.0.attn_sinks", &[4], DType::F32).plan().unwrap_err();
    assert!(
        matches!(&extra, PlanError::UnknownTensors { count: 1, first, .. } if first == "blk.0.attn_sinks")
    );
}

#[test]
fn the_kept_model_has_the_plan_its_origin_states() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tinystories-260k-f32.gguf");
    let (gguf, file) = Gguf::open(std::fs::File::open(path).unwrap()).unwrap();
    let plan = ExecutionPlan::build(&gguf, &file, 512).unwrap();
    let dims = &plan.dims; // tests/models/README.md
    assert_eq!((dims.n_layers, dims.hidden, dims.n_heads, dims.n_kv_heads), (5, 64, 8, 4));
    assert_eq!((dims.head_dim, dims.rope.dims), (8, 8));
    assert!((250_000..300_000).contains(&(plan.weight_bytes() / 4)), "{} B", plan.weight_bytes());
}
