//! Why we say something else than llama.cpp, by what a file is called in the tests. tests/README.md has the same in short.

/// A group of differences.
struct Reason {
    class: u8,
    /// How the names of its files begin.
    begins: &'static [&'static str],
    why: &'static str,
}

const REASONS: &[Reason] = &[
    Reason {
        class: 0,
        begins: &["llama-aligned-8"],
        why: "good: the format allows tensors at any multiple of 8; ggml's CPU backend asserts 32",
    },
    Reason {
        class: 0,
        begins: &["refused/key", "refused/aligned"],
        why: "the format: keys are ASCII, alignments multiples of 8; more than 65,536 is no page size",
    },
    Reason {
        class: 0,
        begins: &["refused/no-dimensions", "refused/no-values"],
        why: "tensors of no dimension or no value: no model has one, and the parser's promise is that all have bytes",
    },
    Reason {
        class: 3,
        begins: &["a key of 65,536", "a key that is no", "a key with a"],
        why: "the format: keys are ASCII of 1 to 65,535 bytes; what else is in one would reach logs and terminals",
    },
    Reason {
        class: 3,
        begins: &["a string that is no", "a string in an array that is no", "a character over"],
        why: "the format: strings are UTF-8; tokens' texts are sent to clients as such",
    },
    Reason {
        class: 3,
        begins: &["a bool of"],
        why: "the format: a bool is 0 or 1, and a model with anything else is invalid",
    },
    Reason { class: 3, begins: &["an alignment of 4"], why: "the format: alignments are multiples of 8" },
    Reason {
        class: 4,
        begins: &["a name with a zero byte"],
        why: "a name that C reads as another, shorter one: two tensors could share it",
    },
    Reason {
        class: 5,
        begins: &["context_length"],
        why: "a limit: 2^30 positions, a thousand times the longest",
    },
    Reason {
        class: 5,
        begins: &["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"],
        why: "numbers that make every answer noise or no number; llama.cpp computes with them",
    },
    Reason {
        class: 5,
        begins: &["attention.causal", "expert_gating_func", "expert_shared_count", "model: unknown"],
        why: "arithmetic or a tokenizer that is not here: the refusal names it",
    },
    Reason {
        class: 5,
        begins: &["bos_token_id", "eos_token_id", "unknown_token_id", "eot_token_id", "fim_pad_token_id"],
        why: "a special token outside the vocabulary: llama.cpp warns and takes its default, so answers may never end",
    },
    Reason {
        class: 5,
        begins: &["scores", "token_type", "no scores"],
        why: "scores and types that are not those of the tokens: text would become other tokens without a word",
    },
    Reason {
        class: 5,
        begins: &["a byte token"],
        why: "llama.cpp reads as much of the number as there is, and takes that byte",
    },
    Reason {
        class: 5,
        begins: &["a token of 65,537"],
        why: "a limit: 64 KiB for a token's text, 200 times the longest",
    },
    Reason {
        class: 5,
        begins: &["a merge"],
        why: "merges of or into what is no token; the library that vocabularies come from refuses them too",
    },
    Reason {
        class: 6,
        begins: &["endless", "nested", "recursive", "python", "globals", "include", "syntax", "long output"],
        why: "a template is run when a chat is asked for, in a process of its own: prompts are answered all the same. llama.cpp \
              runs it when it loads the model, and refuses, hangs or dies",
    },
    Reason {
        class: 7,
        begins: &["a TiB, of which"],
        why: "good: a hole behind the tensors costs nothing here; llama.cpp reads it",
    },
    Reason {
        class: 7,
        begins: &["a last part of"],
        why: "a part that says another count is of another model; llama.cpp asks the first alone",
    },
];

/// Why a file of this name is another matter for us; `None` where nobody has said.
pub fn of(class: u8, what: &str) -> Option<&'static str> {
    let holds = |reason: &&Reason| {
        reason.class == class && reason.begins.iter().any(|begins| what.starts_with(begins))
    };
    REASONS.iter().find(holds).map(|reason| reason.why)
}

#[cfg(test)]
mod tests {
    use super::REASONS;
    use crate::malformed::{cases, templates};

    #[test]
    fn every_reason_is_of_a_file() {
        let malformed = cases().into_iter().map(|case| (case.class, case.what));
        let templates = templates().into_iter().map(|(what, _)| (6, what.to_owned()));
        let names: Vec<(u8, String)> = malformed.chain(templates).collect();
        for reason in REASONS.iter().filter(|reason| reason.class != 0) {
            for begins in reason.begins {
                let named = |(class, what): &(u8, String)| *class == reason.class && what.starts_with(begins);
                assert!(names.iter().any(named), "class {} has no {begins:?}", reason.class);
            }
        }
    }
}
