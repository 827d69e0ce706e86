//! Forged GGUF files, class by class, and the error that each must cause. The classes follow what has broken other
//! parsers: unchecked counts, wrapping products, trusted offsets, believed types.

use rocmforge::model::gguf::{Array, Gguf, GgufError, Place, ReadAt, Value as Read, limits};

use crate::allocations::peak_of;
use crate::forge::{Forge, Part, Value, every_type, ggml, kind, tiny_llama};

const SEED: u64 = 7;

/// Heap limit for parsing a file of some KiB: one read chunk and the file's content.
const HEAP_BYTES_MAX: usize = 1 << 20;

#[track_caller]
fn error_of(bytes: &[u8]) -> GgufError {
    let (result, peak) = peak_of(|| Gguf::parse(bytes));
    assert!(peak <= HEAP_BYTES_MAX, "parsing took {peak} bytes of heap for a file of {} bytes", bytes.len());
    let error = result.map(|_| ()).unwrap_err();
    assert!(error.to_string().len() > 20, "{error}");
    error
}

/// `refused!(forge, pattern)`: the parser refuses the file that `forge` builds, with an error of that pattern.
macro_rules! refused {
    ($forge:expr, $pattern:pat $(if $guard:expr)?) => {
        match error_of(&$forge.build().bytes) {
            $pattern $(if $guard)? => {}
            other => panic!("got {other:?} instead of {}", stringify!($pattern $(if $guard)?)),
        }
    };
}

fn good() -> Forge {
    every_type(SEED)
}

#[test]
fn the_good_files_are_good() {
    let built = good().build();
    let gguf = Gguf::parse(&built.bytes[..]).unwrap();
    assert_eq!(gguf.header_bytes(), built.header.end as u64);
    assert_eq!(gguf.metadata().len(), good().entries.len());
    assert_eq!(gguf.get("t.i16"), Some(&Read::I16(i16::MIN)));
    assert_eq!(gguf.get("t.f64"), Some(&Read::F64(2.5)));
    assert_eq!(gguf.get("a.bool"), Some(&Read::Array(Array::Bool(vec![true, false, true]))));
    assert_eq!(gguf.get("a.u16"), Some(&Read::Array(Array::U16(vec![1, 2]))));
    let strings: Vec<&str> = gguf.strings("a.string").unwrap().iter().collect();
    assert_eq!(strings, ["one", "", "zwölf", "\u{1f600}"]);
    assert_eq!(gguf.strings("a.none").unwrap().len(), 0);
    assert_eq!(gguf.unsigned("t.u64"), Some(1 << 40));
    assert_eq!(gguf.unsigned("t.i32"), None, "negative");
    assert_eq!(gguf.tensor("third.weight").unwrap().shape.dims(), [3, 2, 2, 2]);

    let mut old = good();
    old.version = 2;
    assert_eq!(Gguf::parse(&old.build().bytes[..]).unwrap().version(), 2);
    let mut wide = good().set("general.alignment", Value::u32(64));
    wide.alignment = 64;
    assert_eq!(Gguf::parse(&wide.build().bytes[..]).unwrap().alignment(), 64);
    assert!(
        Gguf::parse(&Forge::new(0).build().bytes[..]).is_ok(),
        "a file without metadata and tensors was refused"
    );
    assert_eq!(Gguf::parse(&tiny_llama(SEED).build().bytes[..]).unwrap().tensors().len(), 21);
}

#[test]
fn headers() {
    let with = |change: fn(&mut Forge)| {
        let mut forge = good();
        change(&mut forge);
        forge
    };
    refused!(with(|f| f.magic = *b"GGML"), GgufError::Magic { found } if found == *b"GGML");
    refused!(with(|f| f.version = 0), GgufError::Version { found: 0 });
    refused!(with(|f| f.version = 1), GgufError::Version { found: 1 });
    refused!(with(|f| f.version = 4), GgufError::Version { found: 4 });
    refused!(with(|f| f.version = 0x0300_0000), GgufError::BigEndian { version: 3 });
    refused!(with(|f| f.version = 0x0200_0000), GgufError::BigEndian { version: 2 });
    let built = good().build();
    for cut in 0..=32 {
        match error_of(&built.bytes[..cut]) {
            GgufError::Truncated { file_bytes, .. } => assert_eq!(file_bytes, cut as u64),
            GgufError::Count { offset: 8 | 16, .. } => assert!(cut >= 16),
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
    // Neighbours of the format: safetensors, a zip (PyTorch), text.
    for start in [&b"\x40\0\0\0\0\0\0\0{\"a\""[..], b"PK\x03\x04aaaaaaaa", b"#!/bin/sh\nexit 1\n"] {
        assert!(matches!(error_of(start), GgufError::Magic { .. }));
    }
}

#[test]
fn counts() {
    for count in [1 << 16, 1 << 31, 1 << 32, 1 << 60, 1 << 63, u64::MAX] {
        let mut forge = good();
        forge.n_entries = Some(count);
        refused!(forge, GgufError::Count { what: "metadata entries", offset: 16, found, .. } if found == count);
        let mut forge = good();
        forge.n_tensors = Some(count);
        refused!(forge, GgufError::Count { what: "tensors", offset: 8, found, .. } if found == count);
    }
    // With a count one too high the parser reads the next bytes as a record; that record's first field is invalid.
    let mut forge = good();
    forge.n_entries = Some(forge.entries.len() as u64 + 1);
    refused!(
        forge,
        GgufError::Truncated { .. }
            | GgufError::ValueType { .. }
            | GgufError::Length { .. }
            | GgufError::Text { .. }
    );
    let mut forge = good();
    forge.n_tensors = Some(4);
    refused!(
        forge,
        GgufError::Length { place: Place::TensorName(3), .. }
            | GgufError::Truncated { place: Place::TensorName(3), .. }
    );
    // With a count one too low the last row becomes padding, so the data starts elsewhere; all ranges still lie in the
    // file.
    let mut forge = good();
    forge.n_tensors = Some(2);
    assert_eq!(Gguf::parse(&forge.build().bytes[..]).unwrap().tensors().len(), 2);
}

/// The limit of a count is what the rest of the file can hold, to the last record.
#[test]
fn counts_go_up_to_what_the_file_can_hold() {
    let built = good().build();
    let left = |from| (built.bytes.len() - from) as u64;
    let limit_of = |change: fn(&mut Forge)| {
        let mut forge = good();
        change(&mut forge);
        match error_of(&forge.build().bytes) {
            GgufError::Count { limit, .. } => limit,
            other => panic!("{other:?}"),
        }
    };
    // An entry: length 8 bytes, key 1, type 4, value 1. A tensor row: length 8, name 1, count 4, dimension 8, type 4,
    // offset 8.
    assert_eq!(limit_of(|f| f.n_entries = Some(1 << 40)), left(24) / 14);
    assert_eq!(limit_of(|f| f.n_tensors = Some(1 << 40)), left(16) / 33);
    let smallest = |count: u8| {
        let byte = Value(kind::U8, Part::default().raw(&[1]));
        (0..count).fold(Forge::new(0), |forge, n| forge.add(&[b'A' + n], byte.clone()))
    };
    assert_eq!(Gguf::parse(&smallest(40).build().bytes[..]).unwrap().metadata().len(), 40);
    let mut more = smallest(40);
    more.n_entries = Some(41);
    refused!(more, GgufError::Count { found: 41, limit: 40, .. });
    for (element, bytes) in [(kind::U8, 1), (kind::I16, 2), (kind::F32, 4), (kind::U64, 8), (kind::STRING, 8)]
    {
        let to_the_end =
            |count| Forge::new(0).add(b"last", Value::array(element, count, &vec![0; 3 * bytes]));
        let gguf = Gguf::parse(&to_the_end(3).build().bytes[..]).unwrap();
        assert_eq!(gguf.array("last").unwrap().len(), 3);
        refused!(to_the_end(4), GgufError::Count { found: 4, limit: 3, .. });
    }
}

/// Returns one byte per read, is interrupted before each read, and fails at one offset.
struct Unwilling<'b> {
    bytes: &'b [u8],
    calls: std::cell::Cell<usize>,
    fails_at: u64,
}

impl ReadAt for Unwilling<'_> {
    fn byte_len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.calls.set(self.calls.get() + 1);
        if self.calls.get().is_multiple_of(2) {
            return Err(std::io::ErrorKind::Interrupted.into());
        }
        if offset >= self.fails_at {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        let count = buf.len().min(1);
        self.bytes.read_at(&mut buf[..count], offset)
    }
}

#[test]
fn a_file_that_comes_in_small_pieces_is_read_whole_and_its_errors_are_told() {
    let built = good().build();
    let unwilling = |fails_at| Unwilling { bytes: &built.bytes, calls: 0.into(), fails_at };
    let gguf = Gguf::parse(&unwilling(u64::MAX)).unwrap();
    assert_eq!(gguf.tensors(), Gguf::parse(&built.bytes[..]).unwrap().tensors());
    match Gguf::parse(&unwilling(100)).map(drop).unwrap_err() {
        GgufError::Read { offset, source } => {
            assert_eq!((offset, source.kind()), (100, std::io::ErrorKind::PermissionDenied));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn keys() {
    let value = || Value::u32(1);
    refused!(good().add(b"", value()), GgufError::Length { place: Place::Key(_), found: 0, min: 1, .. });
    refused!(
        good().add(&[b'k'; 65_536], value()),
        GgufError::Length { place: Place::Key(_), found: 65_536, limit: 65_535, .. }
    );
    assert!(Gguf::parse(&good().add(&[b'k'; 65_535], value()).build().bytes[..]).is_ok());
    refused!(good().add("schlüssel".as_bytes(), value()), GgufError::Text { place: Place::Key(_), .. });
    refused!(good().add(b"a\xff", value()), GgufError::Text { place: Place::Key(_), .. });
    refused!(good().add(b"a\0b", value()), GgufError::Text { place: Place::Key(_), .. });
    refused!(good().add(b"a\x1b[2J", value()), GgufError::Text { place: Place::Key(_), .. });
    refused!(good().add(b"t.u64", value()), GgufError::DuplicateKey { key, .. } if &*key == "t.u64");
    refused!(good().add(b"general.alignment", Value::u32(64)), GgufError::DuplicateKey { .. });
}

#[test]
fn values() {
    let bad = |kind, payload: Part| good().add(b"bad", Value(kind, payload));
    let empty = Part::default;
    for number in [13, 255, u32::MAX] {
        refused!(bad(number, empty()), GgufError::ValueType { found, .. } if found == number);
        let array = Value::array(number, 1 << 60, &[0; 64]);
        refused!(good().add(b"bad", array), GgufError::ValueType { found, .. } if found == number);
    }
    let length = |n| empty().u64("length", n).raw(b"abc");
    for n in [limits::STRING_BYTES_MAX + 1, 1 << 31, 1 << 63, u64::MAX] {
        refused!(bad(kind::STRING, length(n)), GgufError::Length { found, limit: limits::STRING_BYTES_MAX, .. } if found == n);
    }
    refused!(bad(kind::STRING, length(1 << 20)), GgufError::Truncated { need, .. } if need == 1 << 20);
    refused!(bad(kind::STRING, empty().text("text", b"\xc3")), GgufError::Text { place: Place::Value(key), .. } if &*key == "bad");
    refused!(bad(kind::BOOL, empty().raw(&[2])), GgufError::Bool { found: 2, .. });
    refused!(good().add(b"bad", Value::array(kind::BOOL, 2, &[1, 255])), GgufError::Bool { found: 255, .. });

    let mut nested = Part::default();
    for _ in 0..1000 {
        nested = nested.u32("element", kind::ARRAY).u64("count", 1);
    }
    refused!(bad(kind::ARRAY, nested), GgufError::NestedArray { .. });
    for (element, bytes) in [(kind::U8, 1), (kind::F32, 4), (kind::STRING, 8), (kind::F64, 8)] {
        for count in [1 << 20, 1 << 31, 1 << 61, u64::MAX] {
            let array = Value::array(element, count, &[0; 64]);
            refused!(good().add(b"bad", array), GgufError::Count { what: "array elements", found, limit, .. }
                if found == count && limit < (1 << 14) / bytes);
        }
    }
}

#[test]
fn text_that_is_broken_inside_an_array_is_found_at_its_own_offset() {
    for (strings, at) in [
        (&[&b"ok"[..], b"\xff"][..], 1),
        (&[b"ok", b"fine", b"a\xc3", b"\xa4b"], 2), // one character over two strings
        (&[b"\xa4"], 0),
    ] {
        let built = good().add(b"bad", Value::strings(strings)).build();
        let lengths: Vec<_> = built.fields.iter().filter(|f| f.what == "bad element length").collect();
        match error_of(&built.bytes) {
            GgufError::Text { place: Place::Value(key), offset, .. } => {
                assert_eq!((&*key, offset), ("bad", lengths[at].at as u64 + 8));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn alignments() {
    for bad in [0, 1, 3, 4, 24, 1 << 17, 1 << 31, u32::MAX] {
        refused!(good().set("general.alignment", Value::u32(bad)), GgufError::Alignment { found, .. } if found == bad);
    }
    for bad in [Value::i32(32), Value::u64(32), Value::string("32"), Value::i32s(&[32])] {
        refused!(good().set("general.alignment", bad.clone()), GgufError::KeyType { .. });
    }
}

#[test]
fn tensor_names_and_shapes() {
    let named = |name: &[u8]| good().with_tensor("second.weight", |t| t.name = name.into());
    refused!(named(b""), GgufError::Length { place: Place::TensorName(1), found: 0, .. });
    refused!(named(&[b'n'; 65]), GgufError::Length { place: Place::TensorName(1), found: 65, limit: 64, .. });
    assert!(Gguf::parse(&named(&[b'n'; 64]).build().bytes[..]).is_ok());
    refused!(named(b"a\0b"), GgufError::Text { place: Place::TensorName(1), .. });
    refused!(named(b"\xff"), GgufError::Text { place: Place::TensorName(1), .. });
    refused!(named(b"first.weight"), GgufError::DuplicateTensor { tensor, .. } if &*tensor == "first.weight");

    let shaped = |n_dims, dims: &[u64]| {
        good().with_tensor("second.weight", |t| (t.n_dims, t.dims) = (n_dims, dims.into()))
    };
    for n_dims in [0, 5, u32::MAX] {
        refused!(shaped(Some(n_dims), &[32]), GgufError::Dimensions { found, limit: 4, .. } if found == n_dims);
    }
    refused!(shaped(None, &[32, 0]), GgufError::Shape { dims, .. } if dims == [32, 0]);
    refused!(shaped(None, &[1 << 32, 1 << 32]), GgufError::Shape { .. });
    refused!(shaped(None, &[u64::MAX, 2]), GgufError::Shape { .. });
    refused!(shaped(None, &[33, 2]), GgufError::PartialBlock { cols: 33, .. });
    // Negative as i64; as a count of bytes it fits in 64 bits, but in no file.
    refused!(shaped(None, &[1 << 63]), GgufError::PastEnd { .. });
}

#[test]
fn tensor_types_and_sizes() {
    let typed =
        |ggml, dims: &[u64]| good().with_tensor("second.weight", |t| (t.ggml, t.dims) = (ggml, dims.into()));
    // Removed by ggml: Q4_2, Q4_3, the interleaved Q4_0 and IQ4_NL; the other numbers never existed.
    for number in [4, 5, 31, 32, 33, 36, 37, 38, 255, u32::MAX] {
        refused!(typed(number, &[256]), GgufError::TensorType { number: found, tensor, .. }
            if found == number && &*tensor == "second.weight");
    }
    // The element count fits in 64 bits, the byte count does not.
    refused!(typed(ggml::F64, &[1 << 61, 4]), GgufError::Size { .. });
    refused!(typed(ggml::F32, &[1 << 62]), GgufError::Size { .. });
    refused!(typed(ggml::F64, &[(1 << 61) - 1]), GgufError::PastEnd { .. }); // 2^64 - 8: only its padding wraps
    refused!(typed(ggml::Q4_K, &[128]), GgufError::PartialBlock { cols: 128, .. });
    refused!(typed(ggml::Q4_K, &[1 << 62]), GgufError::PastEnd { .. });
}

#[test]
fn tensor_offsets() {
    let offset = |offset| good().with_tensor("third.weight", |t| t.offset = Some(offset));
    let last = 384 + 96; // two tensors of 384 and 72 bytes, the second padded to 96
    assert!(Gguf::parse(&offset(last).build().bytes[..]).is_ok());
    refused!(offset(last + 1), GgufError::Unaligned { found, alignment: 32, .. } if found == last + 1);
    refused!(offset(last + 8), GgufError::Unaligned { .. });
    refused!(offset(u64::MAX), GgufError::Unaligned { .. });
    refused!(offset(u64::MAX - 31), GgufError::PastEnd { found, .. } if found == u64::MAX - 31);
    refused!(offset(1 << 63), GgufError::PastEnd { .. });
    refused!(offset(last + 32), GgufError::PastEnd { bytes: 48, .. });
    refused!(offset(0), GgufError::Overlap { .. });
    refused!(offset(352), GgufError::Overlap { tensor, other, .. } if &*tensor == "first.weight" && &*other == "third.weight");

    // The order in the table need not be the order in the file.
    let swapped = good()
        .with_tensor("first.weight", |t| t.offset = Some(96))
        .with_tensor("second.weight", |t| t.offset = Some(0));
    assert!(Gguf::parse(&swapped.build().bytes[..]).is_ok());

    // The file may lack padding, but no data byte: the third tensor ends 16 bytes before the file does.
    let whole = good().build().bytes;
    assert!(Gguf::parse(&whole[..whole.len() - 16]).is_ok());
    assert!(
        matches!(error_of(&whole[..whole.len() - 17]), GgufError::PastEnd { tensor, .. } if &*tensor == "third.weight")
    );
}

#[test]
fn every_error_names_what_and_where() {
    let text = |forge: Forge| error_of(&forge.build().bytes).to_string();
    let found = [
        (error_of(b"GGUF").to_string(), "the first 24 bytes"),
        (text(Forge::new(0).add(b"", Value::u32(1))), "metadata key number 0"),
        (
            text(good().add(b"bad", Value(kind::STRING, Part::default().text("text", b"\xc3")))),
            "metadata \"bad\"",
        ),
        (text(good().with_tensor("second.weight", |t| t.name = Vec::new())), "name of tensor number 1"),
        (Place::Tensor("t".into()).to_string(), "tensor \"t\""),
    ];
    for (text, place) in found {
        assert!(text.contains(place), "{text}");
    }
    let error = error_of(&good().with_tensor("second.weight", |t| t.ggml = 99).build().bytes);
    let built = good().build();
    let at = built.fields.iter().find(|f| f.what == "second.weight tensor type").unwrap().at;
    assert_eq!(error.to_string(), format!("tensor \"second.weight\" at byte {at}: unknown tensor type 99"));
}
