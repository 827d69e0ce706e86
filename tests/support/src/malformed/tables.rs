//! Classes 3 and 4: metadata entries and rows of the tensor table.

use super::{CORRUPT, Cases, UNSUPPORTED, good};
use crate::forge::{Forge, Part, Tensor, Value, ggml, kind};

pub fn add(cases: &mut Cases) {
    keys(cases);
    values(cases);
    alignments(cases);
    names_and_shapes(cases);
    types(cases);
    offsets(cases);
}

fn keys(cases: &mut Cases) {
    let value = || Value::u32(1);
    for (what, key) in [
        ("an empty key", &b""[..]),
        ("a key of 65,536 bytes", &[b'k'; 65_536]),
        ("a key that is no UTF-8", b"a\xff"),
        ("a key that is no ASCII", "schlüssel".as_bytes()),
        ("a key with a zero byte", b"a\0b"),
        ("a key with an escape sequence", b"a\x1b[2J"),
        ("a key twice", b"general.name"),
        ("the alignment's key twice", b"general.alignment"),
    ] {
        let forge = good().set("general.alignment", Value::u32(32));
        cases.forge(3, what, CORRUPT, &forge.add(key, value()));
    }
    cases.good(3, "a key of 65,535 bytes", &good().add(&[b'k'; 65_535], value()));
    // A false key length, in the last entry so that the parser meets no other field first.
    let built = good().add(b"last", value()).build();
    let at = built.fields.iter().find(|f| f.what == "last key length").unwrap().at;
    for length in [1 << 20, 1 << 31, 1 << 63, u64::MAX] {
        let mut bytes = built.bytes.clone();
        bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(length));
        cases.bytes(3, format!("a key of {length:#x} bytes that are not there"), CORRUPT, bytes);
    }
}

fn values(cases: &mut Cases) {
    let bad = |kind, payload: Part| good().add(b"bad", Value(kind, payload));
    for number in [13, 14, 255, 1 << 31, u32::MAX] {
        cases.forge(3, format!("type {number}"), CORRUPT, &bad(number, Part::default()));
        let array = good().add(b"bad", Value::array(number, 1 << 60, &[0; 64]));
        cases.forge(3, format!("2^60 elements of type {number}"), CORRUPT, &array);
        let array = good().add(b"bad", Value::array(number, 0, &[]));
        cases.forge(3, format!("no elements of type {number}"), CORRUPT, &array);
    }
    let length = |n| Part::default().u64("length", n).raw(b"abc");
    for n in [1 << 20, (16 << 20) + 1, 1 << 31, 1 << 32, 1 << 63, u64::MAX - 7, u64::MAX] {
        cases.forge(3, format!("a string of {n:#x} bytes"), CORRUPT, &bad(kind::STRING, length(n)));
    }
    cases.forge(
        3,
        "a string that is no UTF-8",
        CORRUPT,
        &bad(kind::STRING, Part::default().text("text", b"\xc3")),
    );
    for byte in [2, 0x80, 0xff] {
        cases.forge(3, format!("a bool of {byte}"), CORRUPT, &bad(kind::BOOL, Part::default().raw(&[byte])));
        let array = good().add(b"bad", Value::array(kind::BOOL, 2, &[1, byte]));
        cases.forge(3, format!("a bool of {byte} in an array"), CORRUPT, &array);
    }
    let mut nested = Part::default();
    for _ in 0..1000 {
        nested = nested.u32("element", kind::ARRAY).u64("count", 1);
    }
    cases.forge(3, "arrays nested a thousand deep", CORRUPT, &bad(kind::ARRAY, nested));
    for element in [kind::U8, kind::BOOL, kind::I16, kind::F32, kind::STRING, kind::F64] {
        for count in [1 << 20, 1 << 31, 1 << 32, 1 << 61, 1 << 63, u64::MAX] {
            let forge = good().add(b"bad", Value::array(element, count, &[0; 64]));
            cases.forge(3, format!("{count:#x} elements of type {element}"), CORRUPT, &forge);
        }
    }
    let strings = good().add(b"bad", Value::strings(&[&b"ok"[..], b"\xff"]));
    cases.forge(3, "a string in an array that is no UTF-8", CORRUPT, &strings);
    let strings = good().add(b"bad", Value::strings(&[&b"a\xc3"[..], b"\xa4b"]));
    cases.forge(3, "a character over two strings", CORRUPT, &strings);
}

fn alignments(cases: &mut Cases) {
    let with = |value| good().set("general.alignment", value);
    for bad in [0, 1, 3, 4, 24, 33, 1 << 17, 1 << 31, u32::MAX] {
        cases.forge(3, format!("an alignment of {bad}"), CORRUPT, &with(Value::u32(bad)));
    }
    for (what, bad) in [
        ("i32", Value::i32(32)),
        ("u64", Value::u64(32)),
        ("a string", Value::string("32")),
        ("a float", Value::f32(32.0)),
        ("an array", Value::i32s(&[32])),
    ] {
        cases.forge(3, format!("an alignment that is {what}"), CORRUPT, &with(bad));
    }
    let mut wide = with(Value::u32(65_536));
    wide.alignment = 65_536;
    cases.good(3, "an alignment of 65,536", &wide);
}

const VICTIM: &str = "blk.1.ffn_up.weight";

fn changed(change: impl FnOnce(&mut Tensor)) -> Forge {
    good().filled().with_tensor(VICTIM, change)
}

fn names_and_shapes(cases: &mut Cases) {
    for (what, name) in [
        ("an empty name", &b""[..]),
        ("a name of 65 bytes", &[b'n'; 65]),
        ("a name with a zero byte", b"blk.1.ffn_up.weight\0"),
        ("a name that is no UTF-8", b"\xff"),
        ("a name twice", b"blk.0.ffn_up.weight"),
    ] {
        cases.forge(4, what, CORRUPT, &changed(|t| t.name = name.into()));
    }
    let length = good().filled().build();
    let at = length.fields.iter().find(|f| f.what == format!("{VICTIM} name length")).unwrap().at;
    for bad in [1 << 31, 1 << 63, u64::MAX] {
        let mut bytes = length.bytes.clone();
        bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(bad));
        cases.bytes(4, format!("a name of {bad:#x} bytes"), CORRUPT, bytes);
    }
    for n_dims in [0, 5, 1 << 16, 1 << 31, u32::MAX] {
        cases.forge(4, format!("{n_dims} dimensions"), CORRUPT, &changed(|t| t.n_dims = Some(n_dims)));
    }
    for dims in [
        &[0][..],
        &[32, 0],
        &[1 << 63],
        &[u64::MAX],
        &[u64::MAX, 64],
        &[1 << 32, 1 << 32],
        &[1 << 16, 1 << 16, 1 << 16, 1 << 16],
        &[1 << 61, 2],
        &[(1 << 62) - 1, 4],
        &[32, 63],
        &[33, 64],
        &[64, 32],
        &[32],
        &[32, 64, 2],
        &[32, 64, 1, 2],
    ] {
        cases.forge(4, format!("dimensions {dims:?}"), CORRUPT, &changed(|t| t.dims = dims.into()));
    }
    cases.good(4, "trailing dimensions of 1", &changed(|t| t.dims = vec![32, 64, 1, 1]));
}

fn types(cases: &mut Cases) {
    // Removed by ggml: Q4_2, Q4_3, the interleaved Q4_0 and IQ4_NL; the other numbers never existed.
    for number in [4, 5, 31, 32, 33, 36, 37, 38, 42, 255, 1 << 31, u32::MAX] {
        cases.forge(4, format!("tensor type {number}"), UNSUPPORTED, &changed(|t| t.ggml = number));
    }
    let typed = |ggml, dims: &[u64]| changed(|t| (t.ggml, t.dims) = (ggml, dims.into()));
    for (what, forge) in [
        ("rows that are not whole blocks", typed(ggml::Q4_K, &[128, 16])),
        ("rows of one value in blocks of 32", typed(ggml::Q4_0, &[1, 64])),
        ("bytes that wrap", typed(ggml::F64, &[1 << 61, 4])),
        ("bytes that wrap to 0", typed(ggml::F32, &[1 << 62])),
        ("bytes whose padding wraps", typed(ggml::F64, &[(1 << 61) - 1])),
        ("blocks past any file", typed(ggml::Q4_K, &[1 << 62])),
        ("a type twice as wide as its data", typed(ggml::F64, &[32, 64])),
    ] {
        cases.forge(4, what, CORRUPT, &forge);
    }
}

fn offsets(cases: &mut Cases) {
    let last = "blk.1.ffn_down.weight";
    let built = good().filled().build();
    let at = |what: &str| built.fields.iter().find(|f| f.what == format!("{last} {what}")).unwrap().at;
    let was = u64::from_le_bytes(built.bytes[at("offset")..][..8].try_into().unwrap());
    for (what, offset) in [
        ("unaligned by one", was + 1),
        ("unaligned by eight", was - 8),
        ("past the end by one step", was + 32),
        ("before the end, over another tensor", was - 32),
        ("over the first tensor", 0),
        ("2^63", 1 << 63),
        ("the last that is aligned", u64::MAX - 31),
        ("2^64 - 1", u64::MAX),
        // Wraps to the header at the start of the file.
        ("0 - the header, in 64 bits", 0u64.wrapping_sub(built.header.end.next_multiple_of(32) as u64)),
    ] {
        let forge = good().filled().with_tensor(last, |t| t.offset = Some(offset));
        cases.forge(4, format!("data at an offset {what}"), CORRUPT, &forge);
    }
    for short in [1, 2, 31, 32, 4096] {
        let bytes = built.bytes[..built.bytes.len() - short].to_vec();
        cases.bytes(4, format!("data short by {short}"), CORRUPT, bytes);
    }
}
