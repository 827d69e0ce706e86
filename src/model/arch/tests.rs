//! Plans of forged headers: a sound header, and headers with one fault each.

use std::io::Write;
use std::path::Path;

use crate::model::files::ModelFiles;
use crate::model::plan::{ExecutionPlan, ExpertShape, PlanError};
use crate::program::{NormKind, Op, Residence, RopeLayout, RopeScaling, RopeSpec, Yarn};
use crate::tensor::DType;

/// A metadata value that the writer below can write.
#[derive(Clone)]
enum Meta {
    Number(u32),
    Real(f32),
    Text(&'static str),
    Flag(bool),
    Numbers(Vec<i32>),
}

/// A header to write. Format: ggml `docs/gguf.md`. The data section is zeros.
#[derive(Clone)]
struct Forge {
    keys: Vec<(String, Meta)>,
    tensors: Vec<(String, Vec<u64>, DType)>,
}

const VOCAB: usize = 40;

impl Forge {
    /// Two layers, width 64, 4 query heads and 2 key/value heads of 16, feed-forward width 96.
    fn llama() -> Self {
        Self::of("llama")
    }

    fn of(architecture: &'static str) -> Self {
        let number = |name: &str, n| (format!("{architecture}.{name}"), Meta::Number(n));
        let mut forge = Self {
            keys: vec![
                ("general.architecture".into(), Meta::Text(architecture)),
                number("block_count", 2),
                number("context_length", 512),
                number("embedding_length", 64),
                number("feed_forward_length", 96),
                number("attention.head_count", 4),
                number("attention.head_count_kv", 2),
                (format!("{architecture}.attention.layer_norm_rms_epsilon"), Meta::Real(1e-5)),
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
                Meta::Flag(f) => out.extend([&7u32.to_le_bytes()[..], &[(*f).into()]].concat()),
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
        let files = ModelFiles::open(vec![std::fs::File::open(file.path()).unwrap()]).unwrap();
        ExecutionPlan::build(&files, vocab)
    }

    fn fails(&self, want: PlanError) {
        assert_eq!(self.plan().unwrap_err(), want);
    }
}

/// Names of all tensors, in the order in which a step needs them.
fn names(plan: &ExecutionPlan) -> Vec<&str> {
    plan.program.tensors().iter().map(|tensor| tensor.lazy.name()).collect()
}

fn rope(plan: &ExecutionPlan) -> &RopeSpec {
    &plan.program.ropes()[0].spec
}

fn number(key: &str, n: u32) -> Forge {
    Forge::llama().with(&format!("llama.{key}"), Meta::Number(n))
}

#[test]
fn a_sound_header_becomes_a_plan() {
    let plan = Forge::llama().plan().unwrap();
    let shape = &plan.shape;
    assert_eq!((shape.hidden, plan.program.layer_count(), shape.ffn), (64, 2, 96));
    assert_eq!((shape.heads, shape.kv_heads, shape.head_dim, plan.program.vocab()), (4, 2, 16, VOCAB));
    let rope = rope(&plan);
    assert_eq!((rope.layout, rope.dims, rope.theta), (RopeLayout::Interleaved, 16, 10_000.0));
    assert_eq!((rope.scaling, plan.context_length), (RopeScaling::None, 512));
    let norms = plan.program.parts()[1].ops.iter().filter_map(|op| match op {
        Op::Norm { kind, eps, .. } => Some((*kind, *eps)),
        _ => None,
    });
    assert_eq!(norms.collect::<Vec<_>>(), [(NormKind::Rms, 1e-5); 2]);
    let names = names(&plan);
    assert_eq!((names[0], names[names.len() - 1]), ("token_embd.weight", "token_embd.weight"), "tied");
    assert_eq!(names.len(), 2 + 2 * 9 + 1);
    assert_eq!(plan.program.part_tensors(2).last().unwrap().1.lazy.name(), "blk.1.ffn_down.weight");
    let dtypes = plan.program.dtypes();
    let used: Vec<_> = dtypes.iter().map(|(dtype, tensor)| (*dtype, tensor.name())).collect();
    assert_eq!(used[0], (DType::Q8_0, "token_embd.weight"));
    assert_eq!(used[1], (DType::F32, "blk.0.attn_norm.weight"));
    assert_eq!(used[2], (DType::Q4_0, "blk.0.attn_q.weight"));
    let weights: u64 = 68 * 40 + 256 + 2 * ((64 + 64 + 32 + 32 + 96 + 96) * 36 + 64 * 54 + 512);
    assert_eq!(plan.program.weight_bytes(), weights);
}

#[test]
fn optional_tensors_are_taken() {
    let plan = Forge::llama()
        .tensor("output.weight", &[64, VOCAB as u64], DType::Q8_0)
        .tensor("rope_freqs.weight", &[8], DType::F32)
        .tensor("blk.1.attn_k.bias", &[32], DType::F32)
        .plan()
        .unwrap();
    let names = names(&plan);
    assert_eq!((names[1], names[names.len() - 1]), ("rope_freqs.weight", "output.weight"));
    assert!(plan.program.ropes()[0].factors.is_some() && names.contains(&"blk.1.attn_k.bias"));
    assert!(!names.contains(&"blk.0.attn_k.bias"));
}

#[test]
fn numbers_stated_otherwise_are_read() {
    let forge = number("attention.key_length", 16)
        .with("llama.attention.head_count", Meta::Numbers(vec![4, 4]))
        .with("llama.rope.dimension_count", Meta::Number(8))
        .with("llama.rope.freq_base", Meta::Real(5e5))
        .with("llama.rope.scaling.type", Meta::Text("linear"))
        .with("llama.rope.scaling.factor", Meta::Real(4.0));
    let plan = forge.plan().unwrap();
    let rope = rope(&plan);
    assert_eq!((rope.dims, rope.theta, rope.scaling), (8, 5e5, RopeScaling::Linear { factor: 4.0 }));
    let scale = |kind, factor| {
        let forge = Forge::llama().with("llama.rope.scaling.type", Meta::Text(kind));
        let forge = forge.with("llama.rope.scaling.factor", Meta::Real(factor));
        super::tests::rope(&forge.plan().unwrap()).scaling
    };
    assert_eq!((scale("linear", 0.0), scale("none", 8.0)), (RopeScaling::None, RopeScaling::None));
    let legacy = Forge::llama().with("llama.rope.scale_linear", Meta::Real(2.0));
    assert_eq!(super::tests::rope(&legacy.plan().unwrap()).scaling, RopeScaling::Linear { factor: 2.0 });
    let shared = Forge::llama().without("llama.attention.head_count_kv").plan().unwrap_err();
    assert!(matches!(shared, PlanError::Shape { .. }), "4 kv heads without the key: {shared}");
}

#[test]
fn combinations_without_a_computation_are_refused_by_key() {
    let says = |forge: Forge, text: &str| {
        let error = forge.plan().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    // The window decides which layers use positions.
    says(Forge::of("cohere2"), "cohere2.attention.sliding_window");
    let growing = Forge::of("mistral3").with("mistral3.attention.temperature_scale", Meta::Real(0.1));
    says(
        growing.clone().with("mistral3.rope.dimension_count", Meta::Number(8)),
        "attention.temperature_scale",
    );
    let ropes = growing.plan().unwrap().program.ropes().len();
    assert_eq!((ropes, Forge::of("mistral3").plan().unwrap().program.ropes().len()), (2, 1));
    let scaled = Forge::of("command-r").with("command-r.attention.layer_norm_epsilon", Meta::Real(1e-5));
    let normed = scaled.tensor("blk.0.attn_q_norm.weight", &[16, 4], DType::F32);
    says(
        normed.without("blk.0.ffn_norm.weight").without("blk.1.ffn_norm.weight"),
        "blk.0.attn_q_norm.weight",
    );
}

#[test]
fn unknown_architectures_are_named() {
    let other = Forge::llama().with("general.architecture", Meta::Text("mamba"));
    let encoders = super::ENCODERS.iter().map(|a| a.name);
    let supported: Vec<&str> = super::ARCHITECTURES.iter().map(|a| a.name).chain(encoders).collect();
    let readme = include_str!("../../../README.md");
    for name in &supported {
        assert!(readme.contains(&format!("`{name}`")), "README.md does not list {name}");
    }
    other.fails(PlanError::Architecture { found: "mamba".into(), supported });
    Forge::llama().without("general.architecture").fails(PlanError::NoArchitecture);
    let text = Forge::of("qwen2").with("qwen2.expert_count", Meta::Number(8)).plan().unwrap_err().to_string();
    assert_eq!(text, "architecture \"qwen2\" with 8 experts (qwen2.expert_count) is not supported");
    let other = Forge::llama().with("llama.rope.scaling.type", Meta::Text("dynamic")).plan().unwrap_err();
    assert!(
        matches!(&other, PlanError::Feature { feature, .. } if feature.contains("\"dynamic\"")),
        "{other}"
    );
    let later = Forge::llama().with("llama.attention.causal", Meta::Flag(false)).plan().unwrap_err();
    assert!(matches!(&later, PlanError::Feature { feature, .. } if feature.contains("attention.causal")));
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
    // As of a file that has a vocabulary alone.
    let all = vec![missing("output norm", "output_norm.weight"); 290];
    let text = PlanError::MissingTensors { missing: all }.to_string();
    assert!(text.starts_with("290 required tensors are missing: output norm (tried "), "{text}");
    assert!(text.ends_with("; and 286 more") && text.len() < 300, "{text}");
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

/// Replaces the dense halves of layer 0 by `count` experts of width 32.
fn with_experts(architecture: &'static str, count: u32, used: u32) -> Forge {
    let key = |name: &str| format!("{architecture}.{name}");
    let mut forge = Forge::of(architecture)
        .with(&key("expert_count"), Meta::Number(count))
        .with(&key("expert_used_count"), Meta::Number(used))
        .with(&key("expert_feed_forward_length"), Meta::Number(32));
    for part in ["gate", "up", "down"] {
        forge = forge.without(&format!("blk.0.ffn_{part}.weight"));
    }
    let count = u64::from(count);
    forge
        .tensor("blk.0.ffn_gate_inp.weight", &[64, count], DType::F32)
        .tensor("blk.0.ffn_gate_exps.weight", &[64, 32, count], DType::Q4_0)
        .tensor("blk.0.ffn_up_exps.weight", &[64, 32, count], DType::Q4_0)
        .tensor("blk.0.ffn_down_exps.weight", &[32, 64, count], DType::Q8_0)
}

#[test]
fn experts_are_parts_of_the_tensors_that_hold_all() {
    let plan = with_experts("llama", 6, 2).plan().unwrap();
    let want = ExpertShape { count: 6, used: 2, ffn: 32 };
    assert_eq!((plan.shape.experts, plan.shape.ffn), (Some(want), 96));
    let layer = &plan.program.parts()[1];
    let experts = layer.ops.iter().find_map(|op| match op {
        Op::Experts { experts, .. } => Some(*experts),
        _ => None,
    });
    let experts = experts.unwrap();
    assert!(layer.ops.iter().any(|op| matches!(op, Op::Route { normalise: true, scale: 1.0, .. })));
    assert!(names(&plan).contains(&"blk.0.ffn_gate_inp.weight"));
    assert_eq!(experts.count, 6);
    let of = |expert| experts.tensors(expert).map(|id| &plan.program.tensor(id).unwrap().lazy);
    let ([_, first_up, _], [gate, up, down]) = (of(0), of(5));
    assert_eq!(down.name(), "blk.0.ffn_down_exps.weight[5]");
    assert_eq!((gate.shape().dims(), down.shape().dims()), (&[64, 32][..], &[32, 64][..]));
    assert_eq!(up.range().start - first_up.range().start, 5 * 32 * 36);
    assert_eq!(down.byte_len(), 64 * 34);
    let dense = &plan.program.parts()[2].ops;
    assert!(dense.iter().any(|op| matches!(op, Op::Gate { .. })), "models may mix both");
    assert_eq!(plan.program.dtypes().len(), 3);
    let experts: u64 = 6 * (2 * 32 * 36 + 64 * 34);
    assert_eq!(
        experts,
        plan.program.part_tensors(1).skip(7).map(|(_, tensor)| tensor.lazy.byte_len()).sum::<u64>()
    );
}

#[test]
fn gates_and_ups_may_be_halves_of_one_tensor() {
    let of = |forge: Forge| -> Vec<_> {
        let plan = forge.plan().unwrap();
        let experts =
            plan.program.part_tensors(1).filter(|(_, tensor)| tensor.residence == Residence::Chosen);
        experts.map(|(_, tensor)| (tensor.lazy.name().to_owned(), tensor.lazy.range())).collect()
    };
    let apart = with_experts("llama", 4, 2);
    let merged = apart.clone().without("blk.0.ffn_gate_exps.weight").without("blk.0.ffn_up_exps.weight");
    let merged = merged.tensor("blk.0.ffn_gate_up_exps.weight", &[64, 64, 4], DType::Q4_0);
    let (found, halves) = (of(merged), 32 * 36);
    assert_eq!((found.len(), of(apart.clone()).len()), (12, 12));
    assert_eq!(found[0].0, "blk.0.ffn_gate_up_exps.weight[0].gate");
    assert_eq!(
        (found[10].0.as_str(), found[11].0.as_str()),
        ("blk.0.ffn_gate_up_exps.weight[3].up", "blk.0.ffn_down_exps.weight[3]")
    );
    let first = found[0].1.start;
    for (number, expert) in (0..).zip(found.chunks_exact(3)) {
        assert_eq!(expert[0].1, first + 2 * number * halves..first + (2 * number + 1) * halves);
        assert_eq!(expert[1].1, first + (2 * number + 1) * halves..first + (2 * number + 2) * halves);
    }
    let both = apart.tensor("blk.0.ffn_gate_up_exps.weight", &[64, 64, 4], DType::Q4_0);
    let error = both.plan().unwrap_err().to_string();
    assert!(error.contains("2 tensors are unknown"), "{error}");
}

#[test]
fn numbers_of_experts_that_contradict_each_other_are_refused() {
    let used = |used| with_experts("llama", 4, 2).with("llama.expert_used_count", Meta::Number(used));
    used(0).fails(PlanError::Experts { used: 0, count: 4 });
    used(5).fails(PlanError::Experts { used: 5, count: 4 });
    let without = with_experts("llama", 4, 2).without("llama.expert_used_count");
    without.fails(PlanError::Key { key: "llama.expert_used_count".into(), want: "an unsigned integer" });
    let many = number("expert_count", 5000);
    many.fails(PlanError::Range { key: "llama.expert_count".into(), value: 5000, min: 0, max: 512 });
    for (name, value) in [("expert_gating_func", 2), ("expert_shared_count", 1), ("expert_group_count", 2)] {
        let other = with_experts("llama", 4, 2).with(&format!("llama.{name}"), Meta::Number(value));
        let error = other.plan().unwrap_err();
        assert!(matches!(&error, PlanError::Feature { feature, .. } if feature.contains(name)), "{error}");
    }
    let short = with_experts("llama", 4, 2).tensor("blk.0.ffn_up_exps.weight", &[64, 32, 3], DType::Q4_0);
    let PlanError::Shape { tensor, want, .. } = short.plan().unwrap_err() else { panic!("a shape") };
    assert_eq!((tensor.as_str(), want.as_str()), ("blk.0.ffn_up_exps.weight", "[64, 32, 4]"));
    // The same number of values in another shape.
    let crossed = with_experts("llama", 4, 2).tensor("blk.0.ffn_up_exps.weight", &[64, 4, 32], DType::Q4_0);
    assert!(matches!(crossed.plan(), Err(PlanError::Shape { .. })));
    let error = with_experts("llama", 4, 2).without("blk.0.ffn_gate_inp.weight").plan().unwrap_err();
    let PlanError::MissingTensors { missing } = error else { panic!("{error}") };
    assert_eq!(missing[0].tried, ["blk.0.ffn_gate_inp.weight"]);
}

#[test]
fn tensors_are_required_or_refused_by_architecture() {
    let error = Forge::of("qwen2").plan().unwrap_err();
    let PlanError::MissingTensors { missing } = &error else { panic!("{error}") };
    let tried: Vec<&str> = missing.iter().map(|m| m.tried[0].as_str()).collect();
    assert_eq!(tried.len(), 6);
    assert_eq!(tried[0], "blk.0.attn_q.bias");
    let error = Forge::of("qwen3").plan().unwrap_err().to_string();
    assert!(error.starts_with("4 required tensors are missing: query norm (tried blk.0.attn_q_norm.weight)"));

    let with_norms = |architecture| {
        (0..2).fold(Forge::of(architecture), |forge, i| {
            forge.tensor(&format!("blk.{i}.attn_q_norm.weight"), &[16], DType::F32).tensor(
                &format!("blk.{i}.attn_k_norm.weight"),
                &[16],
                DType::F32,
            )
        })
    };
    let plan = with_norms("qwen3").plan().unwrap();
    assert_eq!((plan.architecture.as_str(), rope(&plan).layout), ("qwen3", RopeLayout::Halves));
    let names = names(&plan);
    assert!(names.contains(&"blk.1.attn_k_norm.weight") && !names.contains(&"blk.0.attn_q.bias"));
    let error = with_norms("llama").plan().unwrap_err();
    assert!(matches!(&error, PlanError::UnknownTensors { count: 4, .. }), "{error}");
}

#[test]
fn layers_that_only_predict_are_left_alone() {
    let forge = number("block_count", 3).with("llama.nextn_predict_layers", Meta::Number(1));
    let plan = forge.clone().tensor("blk.2.nextn.eh_proj.weight", &[128, 64], DType::Q4_0).plan().unwrap();
    assert_eq!(plan.program.layer_count(), 2);
    assert!(names(&plan).iter().all(|name| !name.starts_with("blk.2.")));
    // A layer past the header's count is unknown.
    let error = forge.tensor("blk.3.attn_norm.weight", &[64], DType::F32).plan().unwrap_err();
    assert!(matches!(error, PlanError::UnknownTensors { count: 1, .. }), "{error}");
    let key = "llama.nextn_predict_layers".to_owned();
    let all = Forge::llama().with(&key, Meta::Number(2));
    all.fails(PlanError::Range { key, value: 2, min: 0, max: 1 });
}

#[test]
fn every_scaling_of_positions_is_read() {
    let scaled = |kind, factor| {
        Forge::llama()
            .with("llama.rope.scaling.type", Meta::Text(kind))
            .with("llama.rope.scaling.factor", Meta::Real(factor))
            .with("llama.rope.scaling.original_context_length", Meta::Number(128))
    };
    let mut want = Yarn {
        factor: 4.0,
        original_context: 128,
        ext_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        log_multiplier: 0.0,
        whole_pairs: true,
    };
    let rope = |forge: &Forge| rope(&forge.plan().unwrap()).clone();
    assert_eq!(rope(&scaled("yarn", 4.0)).scaling, RopeScaling::Yarn(want));
    let stated = scaled("yarn", 4.0)
        .with("llama.rope.scaling.yarn_ext_factor", Meta::Real(0.5))
        .with("llama.rope.scaling.yarn_beta_fast", Meta::Real(16.0))
        .with("llama.rope.scaling.yarn_beta_slow", Meta::Real(2.0))
        .with("llama.rope.scaling.yarn_log_multiplier", Meta::Real(0.7))
        .with("llama.rope.scaling.attn_factor", Meta::Real(1.25));
    (want.ext_factor, want.beta_fast, want.beta_slow, want.log_multiplier) = (0.5, 16.0, 2.0, 0.7);
    assert_eq!((rope(&stated).scaling, rope(&stated).magnitude), (RopeScaling::Yarn(want), 1.25));
    let unset = scaled("yarn", 0.0).with("llama.rope.scaling.yarn_ext_factor", Meta::Real(-1.0));
    let unset = unset.without("llama.rope.scaling.original_context_length");
    let RopeScaling::Yarn(yarn) = rope(&unset).scaling else { panic!("yarn") };
    assert_eq!((yarn.factor, yarn.ext_factor, yarn.original_context), (1.0, 1.0, 512));

    let longrope = |original: u32| {
        scaled("longrope", 0.0)
            .with("llama.rope.scaling.original_context_length", Meta::Number(original))
            .tensor("rope_factors_long.weight", &[8], DType::F32)
            .tensor("rope_factors_short.weight", &[8], DType::F32)
    };
    for (original, name) in [(128, "rope_factors_long.weight"), (512, "rope_factors_short.weight")] {
        let plan = longrope(original).plan().unwrap();
        let factors = plan.program.ropes()[0].factors.unwrap();
        assert_eq!(plan.program.tensor(factors).unwrap().lazy.name(), name);
    }
    let error = longrope(128).without("rope_factors_long.weight").plan().unwrap_err();
    assert!(matches!(error, PlanError::MissingTensors { .. }), "{error}");
    for name in ["rope.scaling.yarn_beta_fast", "rope.scaling.attn_factor"] {
        let forge = scaled("yarn", 4.0).with(&format!("llama.{name}"), Meta::Real(0.0));
        forge.fails(PlanError::Float { key: format!("llama.{name}"), value: 0.0, want: "above 0" });
    }
}

#[test]
fn the_kept_model_has_the_plan_its_origin_states() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tinystories-260k-f32.gguf");
    let files = ModelFiles::open(vec![std::fs::File::open(path).unwrap()]).unwrap();
    let plan = ExecutionPlan::build(&files, 512).unwrap();
    let shape = &plan.shape; // tests/models/README.md
    assert_eq!((plan.program.layer_count(), shape.hidden, shape.heads, shape.kv_heads), (5, 64, 8, 4));
    assert_eq!((shape.head_dim, rope(&plan).dims), (8, 8));
    let bytes = plan.program.weight_bytes();
    assert!((250_000..300_000).contains(&(bytes / 4)), "{bytes} B");
}
