//! One file per architecture: its keys, its tensors and the program of its layers.
//!
//! To add an architecture, add a file here that writes its program, and a row in `ARCHITECTURES`. CONTRIBUTING.md lists
//! the other files, in order. Shared steps are functions of `writer::Writer`. Keys and tensor names: ggml `docs/gguf.md` and llama.cpp `src/llama-arch.cpp`.

mod bert;
mod command_r;
mod deepseek2;
mod ernie4_5;
mod exaone4;
mod experts;
mod falcon_h1;
mod gemma2;
mod gemma3;
mod gemma3n;
mod glm4;
mod glm4moe;
mod gpt_oss;
mod granite;
mod hunyuan;
mod lfm2;
mod llama;
mod mamba2;
mod metadata;
mod minimax_m2;
mod mistral3;
mod modern_bert;
mod nemotron_h;
mod olmo2;
mod phi2;
mod phi3;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen3next;
mod recurrent;
mod rope;
mod sizes;
mod smollm3;
mod starcoder2;
mod tensors;
mod unread_keys;
mod window;
mod writer;

use writer::Writer;

use super::files::ModelFiles;
use super::plan::{ExecutionPlan, PlanError, Shape, excerpt};
use crate::program::{Encoder, Output, ValueId};

/// Result of an architecture: its logits, sizes and context length.
struct Written {
    /// The logits.
    logits: ValueId,
    /// Sizes for display.
    shape: Shape,
    /// Context length in tokens, as stated in the file.
    context: u32,
}

/// Result of an encoder's architecture.
struct Encoded {
    /// The value that the last layer leaves.
    rows: ValueId,
    /// Sizes for display.
    shape: Shape,
    /// Most tokens of a text.
    context: u32,
}

/// An architecture: its `general.architecture`, which is also the prefix of its keys, and the writer of its program.
struct Architecture {
    name: &'static str,
    write: fn(&mut Writer<'_>) -> Result<Written, PlanError>,
}

/// All supported architectures.
const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "cohere2", write: command_r::write_cohere2 },
    Architecture { name: "command-r", write: command_r::write },
    Architecture { name: "deepseek2", write: deepseek2::write },
    Architecture { name: "ernie4_5", write: ernie4_5::write },
    Architecture { name: "ernie4_5-moe", write: ernie4_5::write_moe },
    Architecture { name: "exaone4", write: exaone4::write },
    Architecture { name: "falcon-h1", write: falcon_h1::write },
    Architecture { name: "gemma2", write: gemma2::write },
    Architecture { name: "gemma3", write: gemma3::write },
    Architecture { name: "gemma3n", write: gemma3n::write },
    Architecture { name: "glm4", write: glm4::write },
    Architecture { name: "glm4moe", write: glm4moe::write },
    Architecture { name: "gpt-oss", write: gpt_oss::write },
    Architecture { name: "granite", write: granite::write },
    Architecture { name: "granitehybrid", write: granite::write_hybrid },
    Architecture { name: "granitemoe", write: granite::write_moe },
    Architecture { name: "hunyuan-dense", write: hunyuan::write },
    Architecture { name: "hunyuan-moe", write: hunyuan::write_moe },
    Architecture { name: "lfm2", write: lfm2::write },
    Architecture { name: "lfm2moe", write: lfm2::write_moe },
    Architecture { name: "llama", write: llama::write },
    Architecture { name: "mamba2", write: mamba2::write },
    Architecture { name: "minimax-m2", write: minimax_m2::write },
    Architecture { name: "mistral3", write: mistral3::write },
    Architecture { name: "nemotron_h", write: nemotron_h::write },
    Architecture { name: "nemotron_h_moe", write: nemotron_h::write_moe },
    Architecture { name: "olmo2", write: olmo2::write },
    Architecture { name: "phi2", write: phi2::write },
    Architecture { name: "phi3", write: phi3::write },
    Architecture { name: "qwen2", write: qwen2::write },
    Architecture { name: "qwen2moe", write: qwen2moe::write },
    Architecture { name: "qwen3", write: qwen3::write },
    Architecture { name: "qwen35", write: qwen3next::write_later },
    Architecture { name: "qwen35moe", write: qwen3next::write_later_moe },
    Architecture { name: "qwen3moe", write: qwen3::write_moe },
    Architecture { name: "qwen3next", write: qwen3next::write },
    Architecture { name: "smollm3", write: smollm3::write },
    Architecture { name: "starcoder2", write: starcoder2::write },
];

/// An architecture of encoders, as [`Architecture`].
struct EncoderArchitecture {
    name: &'static str,
    write: fn(&mut Writer<'_>) -> Result<Encoded, PlanError>,
}

/// All supported architectures of encoders.
const ENCODERS: &[EncoderArchitecture] = &[
    EncoderArchitecture { name: "bert", write: bert::write },
    EncoderArchitecture { name: "gemma-embedding", write: gemma3::write_encoder },
    EncoderArchitecture { name: "jina-bert-v2", write: bert::write_jina_v2 },
    EncoderArchitecture { name: "jina-bert-v3", write: bert::write_jina },
    EncoderArchitecture { name: "modern-bert", write: modern_bert::write },
    EncoderArchitecture { name: "nomic-bert", write: bert::write_nomic },
];

/// The plan of a model whose vocabulary has `vocab` tokens.
pub(super) fn plan(files: &ModelFiles, vocab: usize) -> Result<ExecutionPlan, PlanError> {
    let name = files.header().string("general.architecture").ok_or(PlanError::NoArchitecture)?;
    if let Some(architecture) = ENCODERS.iter().find(|a| a.name == name) {
        let mut writer = Writer::new(files, architecture.name, vocab);
        let Encoded { rows, shape, context } = (architecture.write)(&mut writer)?;
        let result = Output::Rows(Encoder { rows, text_rows: context });
        return writer.finish(architecture.name, result, shape, context);
    }
    let Some(architecture) = ARCHITECTURES.iter().find(|a| a.name == name) else {
        let supported = ARCHITECTURES.iter().map(|a| a.name).chain(ENCODERS.iter().map(|a| a.name)).collect();
        return Err(PlanError::Architecture { found: excerpt(name), supported });
    };
    let mut writer = Writer::new(files, architecture.name, vocab);
    let Written { logits, shape, context } = (architecture.write)(&mut writer)?;
    writer.finish(architecture.name, Output::Logits(logits), shape, context)
}

#[cfg(test)]
mod tests;
