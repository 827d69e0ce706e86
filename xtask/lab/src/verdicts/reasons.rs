//! Reasons for verdicts that differ from llama.cpp's, by the file's name in the tests. tests/README.md has a summary.

/// A group of differences.
struct Reason {
    class: u8,
    /// Beginnings of the files' names.
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
        why: "the format: keys are ASCII, alignments multiples of 8; no page size exceeds 65,536",
    },
    Reason {
        class: 0,
        begins: &["refused/no-dimensions", "refused/no-values"],
        why: "tensors without dimensions or values: no model has one, and the parser guarantees that each has bytes",
    },
    Reason {
        class: 3,
        begins: &["a key of 65,536", "a key that is no", "a key with a"],
        why: "the format: keys are ASCII of 1 to 65,535 bytes; other bytes would reach logs and terminals",
    },
    Reason {
        class: 3,
        begins: &["a string that is no", "a string in an array that is no", "a character over"],
        why: "the format: strings are UTF-8; clients receive tokens' texts as UTF-8",
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
        why: "C reads such a name as a shorter one, which two tensors could share",
    },
    Reason {
        class: 5,
        begins: &["context_length"],
        why: "a limit: 2^30 positions, a thousand times the longest known",
    },
    Reason {
        class: 5,
        begins: &["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"],
        why: "these numbers make every answer noise or NaN; llama.cpp computes with them",
    },
    Reason {
        class: 5,
        begins: &["attention.causal", "expert_gating_func", "expert_shared_count", "model: unknown"],
        why: "arithmetic or a tokenizer that is not implemented: the refusal names it",
    },
    Reason {
        class: 5,
        begins: &["bos_token_id", "eos_token_id", "unknown_token_id", "eot_token_id", "fim_pad_token_id"],
        why: "a special token is outside the vocabulary: llama.cpp warns and uses its default, so answers may never end",
    },
    Reason {
        class: 5,
        begins: &["scores", "token_type", "no scores"],
        why: "scores or types do not match the tokens: text would silently become other tokens",
    },
    Reason {
        class: 5,
        begins: &["a byte token"],
        why: "llama.cpp reads the valid beginning of the number and uses that byte",
    },
    Reason {
        class: 5,
        begins: &["a token of 65,537"],
        why: "a limit: 64 KiB for a token's text, 200 times the longest known",
    },
    Reason {
        class: 5,
        begins: &["a merge"],
        why: "merges of or into unknown tokens; the library that makes vocabularies refuses them too",
    },
    Reason {
        class: 6,
        begins: &["endless", "nested", "recursive", "python", "globals", "include", "syntax", "long output"],
        why: "we run a template only for chats, in a separate process, so prompts still work. llama.cpp \
              runs it when it loads the model, and refuses, hangs or dies",
    },
    Reason {
        class: 7,
        begins: &["a TiB, of which"],
        why: "good: a hole after the tensors costs us nothing; llama.cpp reads it",
    },
    Reason {
        class: 7,
        begins: &["a last part of"],
        why: "a part with another count belongs to another model; llama.cpp checks only the first part",
    },
    Reason { class: 10, begins: &["MXFP6_"], why: "a type of ours, whose number llama.cpp does not know" },
];

/// The reason for a difference on this file; `None` if no reason is recorded.
pub fn of(class: u8, what: &str) -> Option<&'static str> {
    let holds = |reason: &&Reason| {
        reason.class == class && reason.begins.iter().any(|begins| what.starts_with(begins))
    };
    REASONS.iter().find(holds).map(|reason| reason.why)
}

#[cfg(test)]
mod tests {
    use super::REASONS;
    use rocmforge_test_support::malformed::{cases, numbers, templates};

    #[test]
    fn every_reason_is_of_a_file() {
        let malformed = cases().into_iter().map(|case| (case.class, case.what));
        let templates = templates().into_iter().map(|(what, _)| (6, what.to_owned()));
        let numbers = numbers().into_iter().map(|numbers| (10, numbers.what));
        let names: Vec<(u8, String)> = malformed.chain(templates).chain(numbers).collect();
        for reason in REASONS.iter().filter(|reason| reason.class != 0) {
            for begins in reason.begins {
                let named = |(class, what): &(u8, String)| *class == reason.class && what.starts_with(begins);
                assert!(names.iter().any(named), "class {} has no {begins:?}", reason.class);
            }
        }
    }
}
