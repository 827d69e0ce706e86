//! Exhaustive damage: every number of a good file set to every tempting value, and every cut of a real file. Also
//! sparse files that claim to be huge, and paths that are not files.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};

use rocmforge::model::gguf::{Gguf, GgufError};
use rocmforge::tensor::{HostPages, MapError};

use crate::allocations::peak_of;
use crate::common::tinystories;
use crate::forge::{Forge, Value, every_type, ggml, kind, tiny_llama};

/// Checks the promises of an accepted header without using the parser's code.
fn holds(gguf: &Gguf, file_bytes: u64) {
    let mut ranges: Vec<_> = gguf.tensors().iter().map(|t| t.range.clone()).collect();
    for (tensor, range) in gguf.tensors().iter().zip(&ranges) {
        assert!(range.start < range.end && range.end <= file_bytes, "{tensor:?}");
        assert!(
            range.start >= gguf.header_bytes() && range.start % u64::from(gguf.alignment()) == 0,
            "{tensor:?}"
        );
        let elements: u128 = tensor.shape.dims().iter().map(|&d| u128::from(d)).product();
        let blocks = elements / tensor.dtype.block_len() as u128;
        assert_eq!(
            blocks * tensor.dtype.block_bytes() as u128,
            u128::from(range.end - range.start),
            "{tensor:?}"
        );
        assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
    }
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    for (key, value) in gguf.metadata() {
        assert_eq!(gguf.get(key).map(|v| v.describe()), Some(value.describe()));
    }
}

/// Parses `bytes`; checks the promises of an accepted file, and that heap use is proportional to the file. True if
/// accepted.
pub fn parse(bytes: &[u8]) -> bool {
    let (result, peak) = peak_of(|| Gguf::parse(bytes));
    // The whole file as one chunk, and its content at up to 16 times its size. A table row of 33 bytes takes up to 200
    // bytes: name, index entry and spare room of vectors. A metadata entry of 14 bytes takes up to 180.
    assert!(
        peak <= 4096 + 17 * bytes.len(),
        "parsing took {peak} bytes of heap for {} bytes of file",
        bytes.len()
    );
    match result {
        Ok(gguf) => {
            holds(&gguf, bytes.len() as u64);
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

fn every_field_set_to_every_tempting_value(forge: &Forge) -> (usize, usize) {
    let built = forge.build();
    assert!(parse(&built.bytes));
    let length = built.bytes.len() as u64;
    let (mut tried, mut refused) = (0, 0);
    for field in &built.fields {
        let at = field.at..field.at + field.bytes;
        let mut raw = [0; 8];
        raw[..field.bytes].copy_from_slice(&built.bytes[at.clone()]);
        let was = u64::from_le_bytes(raw);
        let max = if field.bytes == 4 { u64::from(u32::MAX) } else { u64::MAX };
        let near = [was.wrapping_sub(1), was.wrapping_add(1), length - 1, length, length + 1];
        for value in [0, 1, max, max - 1, max / 2, max / 2 + 1, 1 << 31, 1 << 63].into_iter().chain(near) {
            let mut bytes = built.bytes.clone();
            bytes[at.clone()].copy_from_slice(&value.to_le_bytes()[..field.bytes]);
            tried += 1;
            refused += usize::from(!parse(&bytes));
        }
    }
    (tried, refused)
}

#[test]
fn no_number_of_a_file_can_hurt() {
    let (tried, refused) = every_field_set_to_every_tempting_value(&every_type(1));
    // 63 numbers at 13 values. Accepted values are those that mean nothing to the parser, and those that equal the
    // original.
    assert!(tried > 800 && refused * 2 > tried, "{refused} of {tried} refused");
    let (tried, refused) = every_field_set_to_every_tempting_value(&tiny_llama(1));
    assert!(tried > 5000 && refused * 2 > tried, "{refused} of {tried} refused");
}

#[test]
fn no_byte_of_a_header_can_hurt() {
    let built = every_type(2).build();
    for at in built.header {
        for bit in 0..8 {
            let mut bytes = built.bytes.clone();
            bytes[at] ^= 1 << bit;
            parse(&bytes);
        }
    }
}

#[test]
fn every_cut_of_a_real_file_is_refused() {
    let whole = std::fs::read(tinystories()).unwrap();
    let early = 0..4096.min(whole.len());
    let late = (4096..whole.len()).step_by(1000);
    for cut in early.chain(late) {
        let (result, peak) = peak_of(|| Gguf::parse(&whole[..cut]));
        assert!(peak <= 1 << 20, "parsing took {peak} bytes of heap at cut {cut}");
        match result.map(|_| ()).unwrap_err() {
            GgufError::Truncated { .. } | GgufError::Count { .. } | GgufError::PastEnd { .. } => {}
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
}

/// Runs `open`, which maps too, on a sparse file: `bytes` in front, `length` in all. Returns the result and the peak
/// heap bytes.
fn open_sparse(bytes: &[u8], length: u64) -> (Result<Gguf, GgufError>, usize) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file.as_file().set_len(length).unwrap();
    let file = File::open(file.path()).unwrap();
    let (result, peak) = peak_of(|| Gguf::open(file));
    (
        result.map(|(gguf, mapped)| {
            assert_eq!(mapped.len(), length);
            assert_eq!(
                HostPages::of(std::iter::once(&*mapped)).unwrap().resident_bytes,
                0,
                "opening read through the mapping"
            );
            gguf
        }),
        peak,
    )
}

const TIB: u64 = 1 << 40;

#[test]
fn a_sparse_tebibyte_costs_only_its_header() {
    let (result, peak) = open_sparse(&every_type(3).build().bytes, TIB);
    holds(&result.unwrap(), TIB);
    assert!(peak < 1 << 20, "{peak}");

    // The hole could hold these counts, but a header may not have them: the parser refuses them before it allocates.
    for element in [kind::U8, kind::F64, kind::STRING] {
        let forge = Forge::new(0).add(b"bomb", Value::array(element, 1 << 36, &[]));
        let (result, peak) = open_sparse(&forge.build().bytes, TIB);
        assert!(matches!(result, Err(GgufError::Count { what: "array elements", .. })));
        assert!(peak < 1 << 20, "{peak}");
    }
    // A header may have these, but they are not on disk: refused before 250 MiB of zeros are read.
    for (element, count) in [(kind::U8, 250 << 20), (kind::STRING, 31 << 20), (kind::U64, 31 << 20)] {
        let forge = Forge::new(0).add(b"hole", Value::array(element, count, &[]));
        let (result, peak) = open_sparse(&forge.build().bytes, TIB);
        assert!(matches!(result, Err(GgufError::Sparse { stored_bytes: ..=65_536, .. })), "{result:?}");
        assert!(peak < 1 << 20, "{peak}");
    }
    let mut forge = Forge::new(0);
    forge.n_tensors = Some(1 << 18);
    let (result, peak) = open_sparse(&forge.build().bytes, TIB);
    assert!(
        matches!(result, Err(GgufError::Length { found: 0, .. })),
        "an empty name, read from the hole, was accepted"
    );
    assert!(peak < 1 << 20, "{peak}");
}

#[test]
fn a_header_past_its_limit_is_refused_by_name() {
    // 16 strings of 16 MiB without content; the last ends past the header limit of 256 MiB.
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let mut forge = Forge::new(0);
    forge.n_entries = Some(17);
    let mut ends = Vec::new();
    file.write_all(&forge.build().bytes).unwrap();
    for number in 0..17u64 {
        let mut entry = Vec::new();
        entry.extend_from_slice(&2u64.to_le_bytes());
        entry.extend_from_slice(&[b'k', b'a' + number as u8]);
        entry.extend_from_slice(&kind::STRING.to_le_bytes());
        entry.extend_from_slice(&(16u64 << 20).to_le_bytes());
        file.write_all(&entry).unwrap();
        ends.push(file.seek(SeekFrom::Current(16 << 20)).unwrap());
    }
    // The end of the first string past the limit.
    let end = ends[15];
    file.as_file().set_len(end).unwrap();
    let (result, peak) = peak_of(|| Gguf::open(File::open(file.path()).unwrap()));
    assert!(matches!(result, Err(GgufError::Sparse { .. })), "the strings lie in a hole: {result:?}");
    assert!(peak < 1 << 20, "{peak}");
    rustix::fs::fallocate(file.as_file(), rustix::fs::FallocateFlags::empty(), 0, end).unwrap();
    // First a file far longer than a header may be, then one of exactly the announced length.
    for length in [TIB, end] {
        file.as_file().set_len(length).unwrap();
        let (result, peak) = peak_of(|| Gguf::open(File::open(file.path()).unwrap()));
        match result.map(|_| ()).unwrap_err() {
            GgufError::HeaderTooLong { limit, .. } => assert_eq!(limit, 256 << 20),
            other => panic!("{other}"),
        }
        assert!(peak < 272 << 20, "{peak} bytes of heap: more than one copy of the header");
    }
    file.as_file().set_len(end - 1).unwrap();
    let cut = Gguf::open(File::open(file.path()).unwrap()).map(drop).unwrap_err();
    assert!(matches!(cut, GgufError::Truncated { .. }), "{cut}");
}

#[test]
fn a_million_one_byte_strings_take_room_as_their_bytes() {
    let strings = vec!["x"; 1 << 20];
    let bytes = Forge::new(0).add(b"many", Value::strings(&strings)).build().bytes;
    let (result, peak) = peak_of(|| Gguf::parse(&bytes[..]));
    let gguf = result.unwrap();
    assert_eq!(gguf.strings("many").unwrap().len(), 1 << 20);
    assert_eq!(gguf.strings("many").unwrap().heap_bytes(), 5 << 20);
    assert!(peak < 9 << 20, "{peak} bytes of heap: more than the file's 9 bytes a string");
}

#[test]
fn the_largest_tables_are_read() {
    let mut forge = Forge::new(0);
    for number in 0..20_000 {
        forge = forge.add(format!("k{number}").as_bytes(), Value::bool(true));
        forge.tensors.push(forge_row(number));
    }
    let bytes = forge.build().bytes;
    assert!(parse(&bytes));
}

fn forge_row(number: u64) -> crate::forge::Tensor {
    crate::forge::Tensor {
        name: format!("t{number}").into(),
        dims: vec![1],
        n_dims: None,
        ggml: ggml::F32,
        offset: None,
        data: None,
    }
}

#[test]
fn files_that_are_no_files_are_refused_without_reading() {
    let kind = |path: &str| match Gguf::open(File::open(path).unwrap()).map(|_| ()).unwrap_err() {
        GgufError::Map(MapError::NotRegular { kind }) => kind,
        other => panic!("{path}: {other}"),
    };
    assert_eq!(kind("/"), "a directory");
    assert_eq!(kind("/dev/zero"), "a device");
    assert_eq!(kind("/dev/urandom"), "a device");
    let (read_end, _write_end) = std::io::pipe().unwrap();
    let pipe = File::from(std::os::fd::OwnedFd::from(read_end));
    assert!(matches!(Gguf::open(pipe), Err(GgufError::Map(MapError::NotRegular { kind: "a pipe" }))));
    for path in ["/proc/self/mem", "/proc/self/maps"] {
        assert!(matches!(Gguf::open(File::open(path).unwrap()), Err(GgufError::Map(MapError::Empty))));
    }
    let empty = tempfile::NamedTempFile::new().unwrap();
    assert!(matches!(Gguf::open(File::open(empty.path()).unwrap()), Err(GgufError::Map(MapError::Empty))));
}
