//! One word, one meaning: names that once stood for several things, and the one file that may still declare each.

use crate::source::{Source, files};

/// A name that was split.
struct Word {
    name: &'static str,
    /// The file whose type of that name keeps the word; empty when none does.
    home: &'static str,
    /// Names of the other meanings.
    instead: &'static str,
}

const WORDS: &[Word] = &[
    Word { name: "Policy", home: "src/session/policy.rs", instead: "the scheduler has a Schedule" },
    Word {
        name: "Answer",
        home: "src/scheduler/sequence.rs",
        instead: "Responder for a stream's frames, Repeatable for a request",
    },
    Word { name: "Sequence", home: "src/scheduler/sequence.rs", instead: "nothing else is one" },
    Word {
        name: "Owner",
        home: "",
        instead: "ModelId for weights, Purpose for device memory, uid for models",
    },
    Word {
        name: "Activations",
        home: "",
        instead: "ActivationType for their form, scratch for their memory",
    },
    Word { name: "Part", home: "src/program/mod.rs", instead: "Shard of a split file, Segment of an upload" },
    Word { name: "Model", home: "src/model/mod.rs", instead: "OpenModel for what a backend holds of one" },
    Word { name: "Room", home: "", instead: "ScratchNeed for memory, RoomMade for what came of a search" },
    Word {
        name: "Form",
        home: "src/backend/hip/step/bind/forms.rs",
        instead: "MatrixShape for type and size",
    },
    Word {
        name: "Residency",
        home: "src/scheduler/residency.rs",
        instead: "PageResidency for pages of the host",
    },
];

/// Functions that did several things by one name.
const FUNCTIONS: [(&str, &str); 3] = [
    ("settle", "say what it does: wait, keep, send"),
    ("load_to_gpu", "preload_all: nothing above the backends knows of GPUs"),
    ("clear_gpu_cache", "evict_weights: nothing above the backends knows of GPUs"),
];

/// Declarations in one file that use a split word again.
fn faults(file: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    for (line, code) in file.code() {
        let words: Vec<&str> =
            code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let (kind, name) = (pair[0], pair[1]);
            let declared = ["struct", "enum", "trait", "type"].contains(&kind);
            let split = WORDS.iter().find(|word| declared && word.name == name && word.home != file.path);
            faults.extend(split.map(|word| format!("{}:{line}: {name}: {}", file.path, word.instead)));
            let function = FUNCTIONS.iter().find(|(split, _)| kind == "fn" && *split == name);
            faults.extend(function.map(|(_, instead)| format!("{}:{line}: fn {name}: {instead}", file.path)));
        }
    }
    faults
}

#[test]
fn words_that_were_split_keep_one_meaning() {
    let of_daemon = |file: &Source| file.path.starts_with("src/");
    let found: Vec<String> = files().iter().filter(|file| of_daemon(file)).flat_map(faults).collect();
    assert!(found.is_empty(), "words with a second meaning:\n{}", found.join("\n"));
    let missing = WORDS.iter().filter(|word| !word.home.is_empty()).filter(|word| {
        let home = files().iter().find(|file| file.path == word.home);
        home.is_none_or(|file| !file.text.contains(&format!(" {} ", word.name)))
    });
    let missing: Vec<&str> = missing.map(|word| word.name).collect();
    assert!(missing.is_empty(), "the table names files that do not declare {missing:?}");
}

#[test]
fn a_second_meaning_is_found() {
    let file = |text: &str| Source::new("src/cache/mod.rs", text);
    assert_eq!(faults(&file("pub struct Part {\n    number: u32,\n}\nfn settle() {}")).len(), 2);
    assert!(faults(&file("let part: Part = model.settle();\nstruct PartId;")).is_empty());
}
