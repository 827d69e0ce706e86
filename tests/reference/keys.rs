//! Every key that the reference engine knows is used, refused by name, or has no effect on what is computed.
//!
//! `expected/metadata-keys.txt` lists these keys, each with a value that differs from the small decoders'. A header
//! with one changed key must give another plan, or an error that names the key. The few exceptions stand here with
//! reasons.

use std::collections::BTreeSet;
use std::io::Write;

use rocmforge::model::plan::PlanError;
use rocmforge::model::{Model, ModelError, ModelId};

use crate::forge::{self, Forge, Value, kind};

/// Keys that have no effect on these decoders.
const SAYS_NOTHING: &[(&str, &str)] = &[
    ("expert_group_used_count", "experts have no groups"),
    ("feed_forward_length", "all layers of that decoder have experts"),
    ("expert_shared_count", "files of ernie4_5-moe and nemotron_h_moe state the width too"),
    ("vocab_size", "the token list decides"),
    ("tensor_data_layout", "all files have the same layout"),
    ("rope.scaling.finetuned", "says how a scaling was trained; granite's switches it off and is used"),
    ("expert_weights_norm", "the architecture decides whether weights are normalised"),
    ("use_parallel_residual", "phi2 always has a parallel residual"),
    ("attention.layer_norm_epsilon", "belongs to the other kind of norm"),
    ("attention.layer_norm_rms_epsilon", "belongs to the other kind of norm"),
    ("attention.sliding_window_pattern", "there is no window"),
    ("attention.key_length_swa", "there is no window"),
    ("attention.value_length_swa", "there is no window"),
    ("rope.dimension_count_swa", "there is no window"),
    ("rope.freq_base_swa", "there is no window"),
    ("rope.dimension_count", "nemotron_h and the first granitehybrid rotate no value"),
    ("rope.scale_linear", "mistral3's decoder has the factor under its new name"),
    ("rope.scaling.original_context_length", "positions are not scaled by YaRN"),
    ("rope.scaling.yarn_", "positions are not scaled by YaRN"),
];

/// Changing these keys makes the header contradict the shape or the number of tensors. The error then names a tensor or
/// the contradicting key.
const SHAPES: &[&str] = &[
    "block_count",
    "context_length",
    "embedding_length",
    "embedding_length_per_layer_input",
    "feed_forward_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_shared_count",
    "leading_dense_block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.q_lora_rank",
    "nextn_predict_layers",
    "rope.dimension_count",
    "full_attention_interval",
    "shortconv.l_cache",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
];

/// The first decoder or encoder of each supported architecture.
fn bases() -> Vec<(String, Forge)> {
    let mut seen = BTreeSet::new();
    let all = forge::decoders().into_iter().chain(forge::newer_decoders()).chain(forge::encoders());
    let named = all.map(|(_, forge)| (forge.architecture(), forge));
    named.filter(|(name, _)| seen.insert(name.clone())).collect()
}

/// Names of the supported architectures, from the error about another one.
fn supported(base: &Forge) -> BTreeSet<&'static str> {
    let other = base.clone().set("general.architecture", Value::string("none"));
    match open(&other).unwrap_err() {
        ModelError::Plan(PlanError::Architecture { supported, .. }) => supported.into_iter().collect(),
        error => panic!("{error}"),
    }
}

fn open(forge: &Forge) -> Result<Model, ModelError> {
    let built = forge.build();
    let mut written = tempfile::NamedTempFile::new().unwrap();
    written.write_all(&built.bytes).unwrap();
    let file = std::fs::File::open(written.path()).unwrap();
    Model::open(ModelId(1), "keys", vec![file])
}

/// The parts of a plan that determine the computation, as text.
fn plan(forge: &Forge) -> Result<String, String> {
    let model = open(forge).map_err(|error| error.to_string())?;
    let program = &model.plan.program;
    let tensors =
        program.tensors().iter().map(|t| (t.lazy.name(), t.lazy.dtype(), t.lazy.shape(), t.residence));
    Ok(format!(
        "{:?} {:?} {:?} {:?} {:?} {:?} {:?} {}",
        tensors.collect::<Vec<_>>(),
        program.values(),
        program.states(),
        program.ropes().iter().map(|rope| (&rope.spec, rope.factors)).collect::<Vec<_>>(),
        program.parts(),
        model.plan.shape,
        model.plan.pooling,
        model.plan.context_length,
    ))
}

/// Parses a value of metadata-keys.txt.
fn value(of: &str, text: &str) -> Value {
    let parts = || text.split(',');
    match of {
        "u32" => Value::u32(text.parse().unwrap()),
        "f32" => Value::f32(text.parse().unwrap()),
        "bool" => Value::bool(text.parse().unwrap()),
        "string" => Value::string(text),
        "array:i32" => Value::i32s(&parts().map(|part| part.parse().unwrap()).collect::<Vec<_>>()),
        "array:f32" => Value::f32s(&parts().map(|part| part.parse().unwrap()).collect::<Vec<_>>()),
        "array:string" => Value::strings(&parts().collect::<Vec<_>>()),
        "array:bool" => {
            let flags: Vec<u8> = parts().map(|part| u8::from(part == "true")).collect();
            Value::array(kind::BOOL, flags.len() as u64, &flags)
        }
        "array:u32" => {
            let numbers: Vec<u32> = parts().map(|part| part.parse().unwrap()).collect();
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            Value::array(kind::U32, numbers.len() as u64, &bytes)
        }
        "array:u64" => {
            let numbers: Vec<u64> = parts().map(|part| part.parse().unwrap()).collect();
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            Value::array(kind::U64, numbers.len() as u64, &bytes)
        }
        other => panic!("metadata-keys.txt has an unknown value kind {other}"),
    }
}

#[test]
fn every_key_of_the_reference_engine_is_used_or_refused_by_name() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/expected/metadata-keys.txt");
    let list = std::fs::read_to_string(path).unwrap();
    let (mut used, mut named, mut shapes) = (0, 0, BTreeSet::new());
    let mut nothing = BTreeSet::new();
    let mut faults = Vec::new();
    let bases = bases();
    let covered: BTreeSet<&str> = bases.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(covered, supported(&bases[0].1), "one decoder for each supported architecture");
    for (architecture, base) in &bases {
        let sound = plan(base).unwrap();
        let lines = || list.lines().filter(|line| !line.starts_with('#'));
        for line in lines() {
            let mut words = line.splitn(3, ' ');
            let (key, kind, text) =
                (words.next().unwrap(), words.next().unwrap(), words.next().unwrap_or_default());
            let Some(name) = key.strip_prefix("%s.") else { continue };
            let own = format!("{architecture}.{name} {kind} ");
            let text = lines().find_map(|line| line.strip_prefix(&own)).unwrap_or(text);
            let changed = base.clone().set(&format!("{architecture}.{name}"), value(kind, text));
            match plan(&changed) {
                Ok(plan) if plan != sound => used += 1,
                Ok(_) => match SAYS_NOTHING.iter().find(|(known, _)| name.starts_with(known)) {
                    Some((known, _)) => drop(nothing.insert(*known)),
                    None => faults.push(format!("{architecture}.{name} = {text} changes nothing")),
                },
                Err(error) if error.contains(name) => named += 1,
                Err(_) if SHAPES.contains(&name) => drop(shapes.insert(name)),
                Err(error) => faults.push(format!("{architecture}.{name} = {text}: {error}")),
            }
        }
    }
    println!(
        "{used} used, {named} refused by name, {} without effect, {} change shapes",
        nothing.len(),
        shapes.len()
    );
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(used > 90 && named > 1000, "too few keys: {used} used, {named} refused by name");
    let stale: Vec<_> = SAYS_NOTHING.iter().filter(|(known, _)| !nothing.contains(known)).collect();
    assert!(stale.is_empty(), "exceptions that no key needs: {stale:?}");
}

/// Neutral values must be accepted: without this test a rule that refuses everything would pass.
#[test]
fn keys_with_values_that_change_nothing_are_let_through() {
    for (architecture, base) in bases() {
        let sound = plan(&base).unwrap();
        for (name, value) in [
            ("attention.clamp_kqv", Value::f32(0.0)),
            ("attention.sliding_window", Value::u32(0)),
            ("expert_gating_func", Value::u32(1)),
            ("expert_group_count", Value::u32(1)),
            ("logit_scale", Value::f32(1.0)),
            ("pooling_type", Value::u32(0)),
            ("rope.scaling.alpha", Value::f32(0.0)),
            ("rope.dimension_sections", Value::i32s(&[0, 0, 0, 0])),
            ("deepstack_mapping", Value::i32s(&[-1, -1])),
            ("vision.block_count", Value::u32(27)),
        ] {
            let other_values: &[&str] = match name {
                "logit_scale" => &["granite", "granitehybrid", "granitemoe", "command-r", "cohere2"],
                "attention.sliding_window" => {
                    &["gemma2", "gemma3", "gemma3n", "cohere2", "gpt-oss", "modern-bert", "gemma-embedding"]
                }
                "expert_gating_func" => &["glm4moe", "lfm2moe", "minimax-m2", "nemotron_h_moe"],
                "rope.dimension_sections" => &["qwen35", "qwen35moe"],
                "pooling_type" => {
                    &["bert", "nomic-bert", "jina-bert-v2", "jina-bert-v3", "modern-bert", "gemma-embedding"]
                }
                _ => &[],
            };
            if other_values.contains(&architecture.as_str()) {
                continue;
            }
            let changed = base.clone().set(&format!("{architecture}.{name}"), value);
            assert_eq!(plan(&changed).as_ref(), Ok(&sound), "{architecture}.{name}");
        }
        let unknown = base.set(&format!("{architecture}.attention.something_new"), Value::u32(1));
        let error = plan(&unknown).unwrap_err();
        assert!(error.contains("attention.something_new = "), "{error}");
    }
}

/// A changed key of gemma3n must give another plan, or an error that says `why`.
#[test]
fn numbers_of_streams_and_shared_keys_are_read_or_refused() {
    let (_, base) = forge::newer_decoders().into_iter().find(|(name, _)| *name == "gemma3n").unwrap();
    let sound = plan(&base).unwrap();
    let sparse = |first: f32, count| {
        let each: Vec<f32> =
            (0..count).map(|layer| if layer == 0 { first } else { f32::NEG_INFINITY }).collect();
        Value::f32s(&each)
    };
    for (name, value, why) in [
        ("altup.active_idx", Value::u32(1), "another active stream than the first"),
        ("altup.num_inputs", Value::u32(9), "allowed: 2 to 8"),
        ("altup.num_inputs", Value::u32(3), "altup_proj.weight"),
        ("activation_sparsity_scale", sparse(1.0, 24), "one number for each layer"),
        ("activation_sparsity_scale", sparse(f32::NAN, 25), "finite, or minus infinity"),
        ("activation_sparsity_scale", sparse(f32::INFINITY, 25), "finite, or minus infinity"),
        ("activation_sparsity_scale", Value::f32(1.0), "an array of real numbers"),
        ("attention.shared_kv_layers", Value::u32(25), "allowed: 0 to 24"),
        ("attention.shared_kv_layers", Value::f32(25.0), "allowed: 0 to 24"),
        ("attention.shared_kv_layers", Value::f32(4.5), "a whole number"),
        ("attention.shared_kv_layers", Value::f32(-1.0), "a whole number"),
        ("feed_forward_length", Value::u32(1), "sparse gates of one value"),
        // Layers 0 to 3 have windows, and layer 4 has none.
        ("attention.shared_kv_layers", Value::u32(21), "keys and values of layer 4 shared"),
    ] {
        let error = plan(&base.clone().set(&format!("gemma3n.{name}"), value)).unwrap_err();
        assert!(error.contains(why), "{name}: {error}");
    }
    for (name, value) in [
        ("activation_sparsity_scale", sparse(f32::NEG_INFINITY, 25)),
        ("activation_sparsity_scale", sparse(0.5, 25)),
        ("attention.shared_kv_layers", Value::u32(20)),
    ] {
        let changed = plan(&base.clone().set(&format!("gemma3n.{name}"), value));
        assert!(changed.is_ok_and(|changed| changed != sound), "{name} changes nothing");
    }
    let real = base.clone().set("gemma3n.attention.shared_kv_layers", Value::f32(5.0));
    assert_eq!(plan(&real).as_ref(), Ok(&sound), "a real number, as early converters wrote it");
    // Without these keys a file has the published models' values.
    let keys = ["altup.num_inputs", "altup.active_idx", "embedding_length_per_layer_input"];
    let bare = keys.iter().fold(base, |base, name| base.without(&format!("gemma3n.{name}")));
    let shared = ["attention.shared_kv_layers", "activation_sparsity_scale", "final_logit_softcapping"];
    let bare = shared.iter().fold(bare, |base, name| base.without(&format!("gemma3n.{name}")));
    assert_eq!(plan(&bare).as_ref(), Ok(&sound));
}
