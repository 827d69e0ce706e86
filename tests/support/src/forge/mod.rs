//! Makes GGUF files, good ones and broken ones. It writes exactly what a test asks for, and records where each number
//! lies.
//!
//! Written from ggml's `docs/gguf.md`; shares no code with the parser under test.

use std::ops::Range;

mod decoders;
mod llama;
mod split;

pub use decoders::{decoders, encoders, newer_decoders, rankers, wide_latent};
pub use llama::{shaped_llama, tiny_llama, wide_llama};
pub use split::split;

/// Metadata type numbers of the format.
pub mod kind {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// Tensor type numbers of ggml.
pub mod ggml {
    pub const F32: u32 = 0;
    pub const F16: u32 = 1;
    pub const Q4_0: u32 = 2;
    pub const Q4_K: u32 = 12;
    pub const F64: u32 = 28;
}

/// A number in the file: its offset and width, for tests that replace each number.
#[derive(Clone, Debug)]
pub struct Field {
    pub what: String,
    pub at: usize,
    /// Width: 4 or 8 bytes.
    pub bytes: usize,
}

/// A part of the file under construction: bytes, and the numbers in them.
#[derive(Clone, Debug, Default)]
pub struct Part {
    pub bytes: Vec<u8>,
    pub fields: Vec<Field>,
}

impl Part {
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub fn u32(mut self, what: &str, value: u32) -> Self {
        self.fields.push(Field { what: what.into(), at: self.bytes.len(), bytes: 4 });
        self.raw(&value.to_le_bytes())
    }

    pub fn u64(mut self, what: &str, value: u64) -> Self {
        self.fields.push(Field { what: what.into(), at: self.bytes.len(), bytes: 8 });
        self.raw(&value.to_le_bytes())
    }

    /// Appends the length and the bytes of `text`.
    pub fn text(self, what: &str, text: &[u8]) -> Self {
        self.u64(&format!("{what} length"), text.len() as u64).raw(text)
    }

    fn append(&mut self, prefix: &str, part: &Self) {
        let base = self.bytes.len();
        self.fields.extend(part.fields.iter().map(|f| Field {
            what: format!("{prefix} {}", f.what),
            at: base + f.at,
            bytes: f.bytes,
        }));
        self.bytes.extend_from_slice(&part.bytes);
    }
}

/// A metadata value: type number and payload.
#[derive(Clone, Debug)]
pub struct Value(pub u32, pub Part);

impl Value {
    pub fn u32(value: u32) -> Self {
        Self(kind::U32, Part::default().u32("value", value))
    }

    pub fn i32(value: i32) -> Self {
        Self(kind::I32, Part::default().u32("value", value as u32))
    }

    pub fn u64(value: u64) -> Self {
        Self(kind::U64, Part::default().u64("value", value))
    }

    pub fn u16(value: u16) -> Self {
        Self(kind::U16, Part::default().raw(&value.to_le_bytes()))
    }

    pub fn f32(value: f32) -> Self {
        Self(kind::F32, Part::default().u32("value", value.to_bits()))
    }

    pub fn bool(value: bool) -> Self {
        Self(kind::BOOL, Part::default().raw(&[value.into()]))
    }

    pub fn string(value: &str) -> Self {
        Self(kind::STRING, Part::default().text("string", value.as_bytes()))
    }

    /// An array of `count` elements whose bytes are `payload`.
    pub fn array(element: u32, count: u64, payload: &[u8]) -> Self {
        let head = Part::default().u32("element type", element).u64("array count", count);
        Self(kind::ARRAY, head.raw(payload))
    }

    pub fn strings<S: AsRef<[u8]>>(strings: &[S]) -> Self {
        let head = Part::default().u32("element type", kind::STRING).u64("array count", strings.len() as u64);
        Self(kind::ARRAY, strings.iter().fold(head, |part, s| part.text("element", s.as_ref())))
    }

    pub fn i32s(values: &[i32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::array(kind::I32, values.len() as u64, &bytes)
    }

    pub fn f32s(values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::array(kind::F32, values.len() as u64, &bytes)
    }
}

/// A row of the tensor table.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: Vec<u8>,
    pub dims: Vec<u64>,
    /// Number of dimensions that the file states; the length of `dims` if `None`.
    pub n_dims: Option<u32>,
    pub ggml: u32,
    /// Offset in the data section; if `None`, the next aligned offset after the tensor before.
    pub offset: Option<u64>,
    /// Data; if `None`, `bytes_of` of small random numbers.
    pub data: Option<Vec<u8>>,
}

/// A GGUF file under construction: change any part, then [`Forge::build`].
#[derive(Clone, Debug)]
pub struct Forge {
    pub magic: [u8; 4],
    pub version: u32,
    /// Alignment of the data layout; the `general.alignment` entry is set separately.
    pub alignment: u64,
    /// Counts in the header; the true ones if `None`.
    pub n_entries: Option<u64>,
    pub n_tensors: Option<u64>,
    pub entries: Vec<(Vec<u8>, Value)>,
    pub tensors: Vec<Tensor>,
    seed: u64,
}

/// A finished file.
#[derive(Clone, Debug)]
pub struct Built {
    pub bytes: Vec<u8>,
    pub fields: Vec<Field>,
    /// From the start of the file to the end of the tensor table.
    pub header: Range<usize>,
}

impl Forge {
    /// A file without metadata and tensors. `seed` determines the numbers in the tensors.
    pub fn new(seed: u64) -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            alignment: 32,
            n_entries: None,
            n_tensors: None,
            entries: Vec::new(),
            tensors: Vec::new(),
            seed,
        }
    }

    /// The value of `general.architecture`, which must be the first entry.
    pub fn architecture(&self) -> String {
        let (_, Value(_, value)) = &self.entries[0];
        String::from_utf8(value.bytes[8..].to_vec()).unwrap() // 8 bytes of length, then the text
    }

    /// Adds an entry, or replaces the entry of that key.
    pub fn set(mut self, key: &str, value: Value) -> Self {
        match self.entries.iter_mut().find(|(k, _)| k == key.as_bytes()) {
            Some(entry) => entry.1 = value,
            None => self.entries.push((key.into(), value)),
        }
        self
    }

    /// Adds an entry with any key, even a duplicate.
    pub fn add(mut self, key: &[u8], value: Value) -> Self {
        self.entries.push((key.into(), value));
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.entries.retain(|(k, _)| k != key.as_bytes());
        self.tensors.retain(|t| t.name != key.as_bytes());
        self
    }

    pub fn tensor(mut self, name: &str, dims: &[u64], ggml: u32) -> Self {
        self.tensors.push(Tensor {
            name: name.into(),
            dims: dims.into(),
            n_dims: None,
            ggml,
            offset: None,
            data: None,
        });
        self
    }

    /// Changes the tensor `name`.
    pub fn with_tensor(mut self, name: &str, change: impl FnOnce(&mut Tensor)) -> Self {
        change(self.tensors.iter_mut().find(|t| t.name == name.as_bytes()).unwrap());
        self
    }

    /// Fills in the data that [`Forge::build`] would generate, so that tensors keep it whatever is added beside them.
    pub fn filled(mut self) -> Self {
        let mut random = Random(self.seed);
        for tensor in &mut self.tensors {
            if tensor.data.is_none() {
                tensor.data = Some(random.data(tensor));
            }
        }
        self
    }

    /// Builds the file.
    pub fn build(&self) -> Built {
        let mut random = Random(self.seed);
        let mut all = Part::default()
            .raw(&self.magic)
            .u32("version", self.version)
            .u64("tensor count", self.n_tensors.unwrap_or(self.tensors.len() as u64))
            .u64("entry count", self.n_entries.unwrap_or(self.entries.len() as u64));
        for (key, Value(kind, payload)) in &self.entries {
            let shown = String::from_utf8_lossy(key);
            all.append(&shown, &Part::default().text("key", key).u32("type", *kind));
            all.append(&shown, payload);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            let offset = data.len() as u64;
            let bytes = tensor.data.clone().unwrap_or_else(|| random.data(tensor));
            data.extend_from_slice(&bytes);
            data.resize(data.len().next_multiple_of(self.alignment as usize), 0);
            let shown = String::from_utf8_lossy(&tensor.name);
            let n_dims = tensor.n_dims.unwrap_or(tensor.dims.len() as u32);
            let row = Part::default().text("name", &tensor.name).u32("dimension count", n_dims);
            let row = tensor.dims.iter().fold(row, |row, &d| row.u64("dimension", d));
            let row = row.u32("tensor type", tensor.ggml).u64("offset", tensor.offset.unwrap_or(offset));
            all.append(&shown, &row);
        }
        let header = 0..all.bytes.len();
        if !self.tensors.is_empty() {
            all.bytes.resize(header.end.next_multiple_of(self.alignment as usize), 0);
            all.bytes.extend_from_slice(&data);
        }
        Built { bytes: all.bytes, fields: all.fields, header }
    }
}

/// Bytes of a tensor by its type and dimensions; 0 if it has no valid size.
pub fn bytes_of(dims: &[u64], ggml: u32) -> u64 {
    let (values, bytes) = match ggml {
        ggml::F32 => (1, 4),
        ggml::F16 => (1, 2),
        ggml::Q4_0 => (32, 18),
        ggml::Q4_K => (256, 144),
        ggml::F64 => (1, 8),
        _ => return 0,
    };
    let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).unwrap_or(0);
    // Forged files in memory stay below 16 MiB: larger dimensions are lies, and get no data.
    (elements / values).checked_mul(bytes).filter(|&n| n <= 16 << 20).unwrap_or(0)
}

/// splitmix64: the same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// F32 tensors get numbers from -0.1 to 0.1. All others get zero bytes, which mean the number 0 in each type here.
    fn data(&mut self, tensor: &Tensor) -> Vec<u8> {
        let bytes = bytes_of(&tensor.dims, tensor.ggml) as usize;
        if tensor.ggml != ggml::F32 {
            return vec![0; bytes];
        }
        let number = |r: u64| ((r >> 40) as f32 / (1u32 << 24) as f32 - 0.5) * 0.2;
        (0..bytes / 4).flat_map(|_| number(self.draw()).to_le_bytes()).collect()
    }
}

/// A file with every metadata type and three tensors, which is no runnable model: for tests of the parser.
pub fn every_type(seed: u64) -> Forge {
    let scalar = |kind, bytes: &[u8]| Value(kind, Part::default().raw(bytes));
    Forge::new(seed)
        .set("general.architecture", Value::string("forged"))
        .set("general.alignment", Value::u32(32))
        .set("t.u8", scalar(kind::U8, &[200]))
        .set("t.i8", scalar(kind::I8, &[0x80]))
        .set("t.u16", scalar(kind::U16, &[1, 2]))
        .set("t.i16", scalar(kind::I16, &[0, 0x80]))
        .set("t.i32", Value::i32(-5))
        .set("t.u64", Value::u64(1 << 40))
        .set("t.i64", scalar(kind::I64, &(-7i64).to_le_bytes()))
        .set("t.f32", Value::f32(0.5))
        .set("t.f64", scalar(kind::F64, &2.5f64.to_le_bytes()))
        .set("t.bool", Value::bool(true))
        .set("t.empty", Value::string(""))
        .set("a.u8", Value::array(kind::U8, 3, &[1, 2, 3]))
        .set("a.i8", Value::array(kind::I8, 2, &[1, 0xff]))
        .set("a.u16", Value::array(kind::U16, 2, &[1, 0, 2, 0]))
        .set("a.i16", Value::array(kind::I16, 1, &[0xff, 0xff]))
        .set("a.u32", Value::array(kind::U32, 1, &[1, 0, 0, 0]))
        .set("a.i32", Value::i32s(&[-1, 2]))
        .set("a.u64", Value::array(kind::U64, 1, &[1, 0, 0, 0, 0, 0, 0, 0]))
        .set("a.i64", Value::array(kind::I64, 1, &[0xff; 8]))
        .set("a.f32", Value::f32s(&[1.0, -2.0]))
        .set("a.f64", Value::array(kind::F64, 1, &1f64.to_le_bytes()))
        .set("a.bool", Value::array(kind::BOOL, 3, &[1, 0, 1]))
        .set("a.string", Value::strings(&["one", "", "zwölf", "\u{1f600}"]))
        .set("a.none", Value::array(kind::STRING, 0, &[]))
        .tensor("first.weight", &[32, 3], ggml::F32)
        .tensor("second.weight", &[64, 2], ggml::Q4_0)
        .tensor("third.weight", &[3, 2, 2, 2], ggml::F16)
}
