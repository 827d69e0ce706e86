//! Metadata reads back with the value and type that the file states. Known values are shared, and sharing changes no
//! read.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use rocmforge::model::gguf::{Array, FromValue, Gguf, GgufError, ReadAt, Strings, Value as Read};

use crate::forge::{Forge, Part, Value, every_type, kind};

fn parsed(forge: &Forge) -> Gguf {
    Gguf::parse(&forge.build().bytes[..]).unwrap()
}

/// One number of each type: its name, type number, bytes and value.
fn numbers() -> Vec<(&'static str, u32, Vec<u8>, Read)> {
    vec![
        ("u8", kind::U8, vec![200], Read::U8(200)),
        ("i8", kind::I8, vec![100], Read::I8(100)),
        ("u16", kind::U16, 60_000u16.to_le_bytes().into(), Read::U16(60_000)),
        ("i16", kind::I16, 30_000i16.to_le_bytes().into(), Read::I16(30_000)),
        ("u32", kind::U32, 4_000_000_000u32.to_le_bytes().into(), Read::U32(4_000_000_000)),
        ("i32", kind::I32, 2_000_000_000i32.to_le_bytes().into(), Read::I32(2_000_000_000)),
        ("u64", kind::U64, u64::MAX.to_le_bytes().into(), Read::U64(u64::MAX)),
        ("i64", kind::I64, i64::MAX.to_le_bytes().into(), Read::I64(i64::MAX)),
        ("f32", kind::F32, 1.5f32.to_le_bytes().into(), Read::F32(1.5)),
        ("f64", kind::F64, 2.5f64.to_le_bytes().into(), Read::F64(2.5)),
        ("bool", kind::BOOL, vec![1], Read::Bool(true)),
    ]
}

#[test]
fn each_type_is_read_alone_and_in_arrays() {
    for (name, number, bytes, value) in numbers() {
        let alone = Forge::new(0).add(b"k", Value(number, Part::default().raw(&bytes)));
        assert_eq!(parsed(&alone).get("k"), Some(&value));
        let three = parsed(&Forge::new(0).add(b"k", Value::array(number, 3, &bytes.repeat(3))));
        let array = three.array("k").unwrap();
        assert_eq!((array.element_type(), array.len(), array.is_empty()), (name, 3, false));
        let text = three.get("k").unwrap().describe();
        assert_eq!(text, format!("an array of 3 {name}"));
        assert!(value.describe().starts_with(name), "{}", value.describe());
        let none = parsed(&Forge::new(0).add(b"k", Value::array(number, 0, &[])));
        assert!(none.array("k").unwrap().is_empty());
    }
    let array = |gguf: &Gguf| gguf.array("k").unwrap().clone();
    let words = Value::array(kind::U32, 2, &[1, 0, 0, 0, 255, 255, 255, 255]);
    assert_eq!(array(&parsed(&Forge::new(0).add(b"k", words))), Array::U32(vec![1, u32::MAX]));
    let bytes = Value::array(kind::I8, 2, &[1, 255]);
    assert_eq!(array(&parsed(&Forge::new(0).add(b"k", bytes))), Array::I8(vec![1, -1]));
}

/// Arrays longer than one read.
#[test]
fn long_arrays_are_read_whole() {
    let bytes: Vec<u8> = (0..300_001u32).flat_map(u32::to_le_bytes).collect();
    let gguf = parsed(&Forge::new(0).add(b"k", Value::array(kind::U32, 300_001, &bytes)));
    assert_eq!(gguf.array("k"), Some(&Array::U32((0..300_001).collect())));
    let flags = parsed(&Forge::new(0).add(b"k", Value::array(kind::BOOL, 200_000, &[0, 1].repeat(100_000))));
    assert_eq!(flags.array("k"), Some(&Array::Bool([false, true].repeat(100_000))));
    let text = "0123456789".repeat(30_000);
    let gguf = parsed(&Forge::new(0).add(b"k", Value::string(&text)));
    assert_eq!(gguf.string("k"), Some(text.as_str()));
}

#[test]
fn any_integer_that_is_not_negative_is_a_number() {
    for (name, _, _, value) in numbers() {
        let wanted = match value {
            Read::F32(_) | Read::F64(_) | Read::Bool(_) => None,
            _ => Some(value.describe().split_once(' ').unwrap().1.parse::<u64>().unwrap()),
        };
        assert_eq!(value.unsigned(), wanted, "{name}");
    }
    for negative in [Read::I8(-1), Read::I16(-1), Read::I32(-1), Read::I64(-1)] {
        assert_eq!(negative.unsigned(), None);
    }
    assert_eq!(u32::from_value(&Read::U64(1 << 32)), None);
    assert_eq!(u32::from_value(&Read::U64(u64::from(u32::MAX))), Some(u32::MAX));
}

#[test]
fn values_are_asked_for_by_key_and_type() {
    let forge = every_type(3)
        .set("n.f32", Value::f32(1.5))
        .set("n.yes", Value::bool(true))
        .set("n.no", Value::bool(false))
        .set("n.i32s", Value::i32s(&[-7, 8]))
        .set("n.f32s", Value::f32s(&[0.5, -0.25]))
        .set("n.text", Value::string("text"))
        .set("n.u32", Value::u32(77));
    let gguf = parsed(&forge);
    assert_eq!(
        (gguf.string("n.text"), gguf.string("n.u32"), gguf.string("none")),
        (Some("text"), None, None)
    );
    assert_eq!(
        (gguf.unsigned("n.u32"), gguf.unsigned("n.text"), gguf.unsigned("none")),
        (Some(77), None, None)
    );
    assert_eq!((gguf.float("n.f32"), gguf.float("t.f64"), gguf.float("n.u32")), (Some(1.5), Some(2.5), None));
    let boolean = |key| gguf.boolean(key);
    assert_eq!((boolean("n.yes"), boolean("n.no"), boolean("n.u32")), (Some(true), Some(false), None));
    assert_eq!(gguf.array("n.i32s"), Some(&Array::I32(vec![-7, 8])));
    assert_eq!((gguf.array("n.u32"), gguf.strings("n.i32s").is_none()), (None, true));
    assert_eq!(gguf.strings("a.string").unwrap().get(2), Some("zwölf"));

    assert_eq!(gguf.required::<&[i32]>("n.i32s").unwrap(), [-7, 8]);
    assert_eq!(gguf.required::<&[f32]>("n.f32s").unwrap(), [0.5, -0.25]);
    assert_eq!(gguf.required::<&Array>("n.i32s").unwrap().len(), 2);
    assert_eq!(gguf.required::<&Strings>("a.string").unwrap().len(), 4);
    assert_eq!(gguf.required::<f32>("t.f64").unwrap(), 2.5);
    assert!(gguf.required::<bool>("n.yes").unwrap() && !gguf.required::<bool>("n.no").unwrap());
    assert_eq!((gguf.required::<u32>("n.u32").unwrap(), gguf.required::<u64>("n.u32").unwrap()), (77, 77));
    assert_eq!(gguf.optional::<&str>("n.text").unwrap(), Some("text"));
    assert_eq!(gguf.optional::<&str>("none").unwrap(), None);
    let refused = |error: GgufError, wanted: &str| assert!(error.to_string().contains(wanted), "{error}");
    refused(gguf.required::<&[i32]>("n.f32s").unwrap_err(), "an array of 2 f32, expected an array of i32");
    refused(gguf.required::<&[f32]>("n.i32s").unwrap_err(), "an array of 2 i32, expected an array of f32");
    refused(
        gguf.required::<&Strings>("n.i32s").unwrap_err(),
        "an array of 2 i32, expected an array of strings",
    );
    refused(gguf.required::<&Array>("n.text").unwrap_err(), "a string of 4 bytes, expected an array");
    refused(gguf.optional::<u32>("n.text").unwrap_err(), "a string of 4 bytes, expected an integer");

    let wanted: Vec<_> = gguf.entries(|key| key.starts_with("n.")).into_iter().map(|(key, _)| key).collect();
    let asked = ["n.f32", "n.yes", "n.no", "n.i32s", "n.f32s", "n.text", "n.u32"];
    assert!(wanted.iter().map(|key| &**key).eq(asked), "{wanted:?}");
}

#[test]
fn strings_are_as_many_and_as_long_as_they_were() {
    let strings: Strings = ["one", "", "zwölf"].into_iter().collect();
    assert_eq!((strings.len(), strings.is_empty()), (3, false));
    assert_eq!(
        (strings.get(0), strings.get(1), strings.get(2), strings.get(3)),
        (Some("one"), Some(""), Some("zwölf"), None)
    );
    assert_eq!(format!("{strings:?}"), r#"["one", "", "zwölf"]"#);
    let none: Strings = [].into_iter().collect();
    assert_eq!((none.len(), none.is_empty(), none.get(0)), (0, true, None));
}

#[test]
fn equal_values_have_one_hash_and_others_another() {
    let hash = |value: &Read| {
        let mut state = DefaultHasher::new();
        value.hash_to(&mut state);
        state.finish()
    };
    let strings = |texts: &[&str]| Read::Array(Array::String(texts.iter().copied().collect()));
    let different = [
        Read::String("a".into()),
        Read::String("b".into()),
        strings(&["a"]),
        strings(&["b"]),
        strings(&["a", "b"]),
        Read::Array(Array::I32(vec![1])),
        Read::Array(Array::I32(vec![2])),
        Read::Array(Array::F32(vec![1.0])),
        Read::Array(Array::F32(vec![1.0, 2.0])),
        Read::U32(1),
        Read::U32(2),
        Read::Bool(true),
        Read::F32(0.0),
    ];
    let hashes: HashSet<u64> = different.iter().map(hash).collect();
    assert_eq!(hashes.len(), different.len());
    assert_eq!(
        hash(&Read::F32(0.0)),
        hash(&Read::F32(-0.0)),
        "0.0 and -0.0 are equal but have different hashes"
    );
    assert_eq!(hash(&strings(&["a", "b"])), hash(&strings(&["a", "b"])));
}

#[test]
fn a_header_holds_the_values_that_it_is_given() {
    let (mut one, other) = (parsed(&every_type(3)), parsed(&every_type(3)));
    let entries = other.entries(|key| key.starts_with("a."));
    assert!(entries.len() > 3);
    one.share(&entries);
    let mut shared = 0;
    for ((key, mine), (_, its)) in one.entries(|_| true).iter().zip(other.entries(|_| true)) {
        assert_eq!(Arc::ptr_eq(mine, &its), key.starts_with("a."), "{key}");
        shared += usize::from(Arc::ptr_eq(mine, &its));
    }
    assert_eq!(shared, entries.len());
}

#[test]
fn a_tensor_of_a_mapped_file_is_its_bytes() {
    let built = every_type(5).build();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&built.bytes).unwrap();
    let (gguf, mapped) = Gguf::open(File::open(file.path()).unwrap()).unwrap();
    assert_eq!(gguf.tensors().len(), 3);
    for info in gguf.tensors() {
        let tensor = gguf.lazy(&info.name, &mapped).unwrap();
        assert_eq!((tensor.shape(), tensor.dtype()), (info.shape, info.dtype));
        assert_eq!(tensor.bytes(), &built.bytes[info.range.start as usize..info.range.end as usize]);
    }
    assert!(gguf.lazy("fourth.weight", &mapped).is_none());
}

/// A source of bytes that records the ranges read from it.
struct Watched<'b> {
    bytes: &'b [u8],
    reads: RefCell<Vec<Range<u64>>>,
}

impl ReadAt for Watched<'_> {
    fn byte_len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let count = self.bytes.read_at(buf, offset)?;
        self.reads.borrow_mut().push(offset..offset + count as u64);
        Ok(count)
    }
}

/// Parses `bytes` with the `known` values as candidates for every key. Returns the header and the ranges read.
fn beside(bytes: &[u8], known: &[Read]) -> (Gguf, Vec<Range<u64>>) {
    let known: Vec<Arc<Read>> = known.iter().cloned().map(Arc::new).collect();
    let watched = Watched { bytes, reads: RefCell::default() };
    let gguf = Gguf::parse_beside(&watched, &|_| known.clone()).unwrap();
    for (key, value) in gguf.entries(|_| true) {
        let equal = known.iter().any(|known| **known == *value);
        assert_eq!(known.iter().any(|known| Arc::ptr_eq(known, &value)), equal, "{key}");
    }
    (gguf, watched.reads.into_inner())
}

/// The array is longer than the largest read, 1 MiB: when its end differs, the compared start has left the buffer.
#[test]
fn long_known_arrays_are_taken_where_they_are_equal_to_the_end() {
    const COUNT: u32 = 300_001;
    let words: Vec<u8> = (0..COUNT).flat_map(u32::to_le_bytes).collect();
    let floats: Vec<f32> = (0..COUNT).map(|n| n as f32).collect();
    let long = "x".repeat(3 << 19);
    for (value, same, other) in [
        (
            Value::array(kind::U32, COUNT.into(), &words),
            Array::U32((0..COUNT).collect()),
            Array::U32((0..COUNT - 1).chain([0]).collect()),
        ),
        (
            Value::array(kind::I32, COUNT.into(), &words),
            Array::I32((0..COUNT as i32).collect()),
            Array::I32((0..COUNT as i32 - 1).chain([0]).collect()),
        ),
        (
            Value::f32s(&floats),
            Array::F32(floats.clone()),
            Array::F32(floats[1..].iter().copied().chain([0.0]).collect()),
        ),
        (
            Value::strings(&["a", &long, "b"]),
            Array::String(["a", &long, "b"].into_iter().collect()),
            Array::String(["a", &long, "c"].into_iter().collect()),
        ),
    ] {
        let bytes = Forge::new(0).add(b"k", value).add(b"z", Value::u32(7)).build().bytes;
        let (same, other) = (Read::Array(same), Read::Array(other));
        for known in [&[][..], std::slice::from_ref(&other), &[other.clone(), same.clone()]] {
            let (gguf, _) = beside(&bytes, known);
            assert_eq!((gguf.get("k"), gguf.unsigned("z")), (Some(&same), Some(7)));
        }
    }
}

/// Candidates of another length, of another type, or with another value among the bytes still buffered.
#[test]
fn known_arrays_that_differ_cost_no_second_read() {
    let array = |numbers: &[i32]| Read::Array(Array::I32(numbers.into()));
    let bytes = Forge::new(0).add(b"k", Value::i32s(&[1, 2, 3])).build().bytes;
    let others = [
        array(&[1, 2]),
        array(&[1, 2, 3, 4]),
        array(&[1, 2, 4]),
        Read::Array(Array::U32(vec![1, 2, 3])),
        Read::Array(Array::U8(vec![1, 2, 3])),
        Read::Array(Array::String(["1", "2", "3"].into_iter().collect())),
        Read::U32(1),
    ];
    let (alone, reads) = beside(&bytes, &[]);
    assert_eq!(alone.get("k"), Some(&array(&[1, 2, 3])));
    assert_eq!(reads, std::slice::from_ref(&(0..bytes.len() as u64)));
    for known in others.chunks(1).chain([&others[..]]) {
        let (gguf, reads) = beside(&bytes, known);
        assert_eq!(gguf.get("k"), alone.get("k"));
        assert_eq!(reads, std::slice::from_ref(&(0..bytes.len() as u64)), "{known:?}");
    }
    // The parser compares eight candidates; the equal one is ninth, so it is not compared.
    let mut many = vec![array(&[0, 0, 0]); 8];
    many.push(array(&[1, 2, 3]));
    let known: Vec<Arc<Read>> = many.into_iter().map(Arc::new).collect();
    let gguf = Gguf::parse_beside(&bytes[..], &|_| known.clone()).unwrap();
    assert!(!Arc::ptr_eq(&gguf.entries(|_| true)[0].1, &known[8]));
}
