//! Classes 1 and 2: magic, version, cuts, and counts larger than the file can hold.

use super::{CORRUPT, Cases, NO_MODEL, UNSUPPORTED, good};
use crate::forge::Forge;

pub fn add(cases: &mut Cases) {
    headers(cases);
    counts(cases);
}

fn headers(cases: &mut Cases) {
    let with = |change: &dyn Fn(&mut Forge)| {
        let mut forge = good();
        change(&mut forge);
        forge
    };
    for magic in [*b"GGML", *b"GGJT", *b"ggla", *b"FUGG", [0; 4], [0xff; 4]] {
        let what = format!("magic {magic:?}");
        cases.forge(1, what, NO_MODEL, &with(&|forge| forge.magic = magic));
    }
    for version in [0, 1, 4, 0x0100_0000, 0x0200_0000, 0x0300_0000, u32::MAX] {
        let what = format!("version {version:#x}");
        cases.forge(1, what, UNSUPPORTED, &with(&|forge| forge.version = version));
    }
    cases.bytes(1, "empty", NO_MODEL, Vec::new());
    let whole = good().build();
    for cut in 1..=32 {
        cases.bytes(1, format!("the first {cut} bytes"), CORRUPT, whole.bytes[..cut].to_vec());
    }
    // Beyond the header's start, one cut in each part of the file.
    for cut in [whole.header.end / 2, whole.header.end, whole.header.end + 31, whole.bytes.len() / 2] {
        cases.bytes(1, format!("the first {cut} bytes"), CORRUPT, whole.bytes[..cut].to_vec());
    }
    for (what, start) in [
        ("safetensors", &b"\x40\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\"}}"[..]),
        ("a zip archive", b"PK\x03\x04aaaaaaaaaaaaaaaaaaaa"),
        ("a script", b"#!/bin/sh\nexit 1\n"),
    ] {
        cases.bytes(1, what, NO_MODEL, start.to_vec());
    }
}

fn counts(cases: &mut Cases) {
    let (entries, tensors) = (good().entries.len() as u64, good().tensors.len() as u64);
    for count in [1 << 16, 1 << 31, 1 << 32, 1 << 60, 1 << 63, u64::MAX] {
        for (what, in_entries) in [("entries", true), ("tensors", false)] {
            let mut forge = good();
            *(if in_entries { &mut forge.n_entries } else { &mut forge.n_tensors }) = Some(count);
            cases.forge(2, format!("{count:#x} {what}"), CORRUPT, &forge);
        }
    }
    for (what, n_entries, n_tensors) in [
        ("one entry more than there are", entries + 1, tensors),
        ("one entry fewer than there are", entries - 1, tensors),
        ("no entries", 0, tensors),
        ("one tensor more than there are", entries, tensors + 1),
        ("one tensor fewer than there are", entries, tensors - 1),
        ("no tensors", entries, 0),
    ] {
        let mut forge = good();
        (forge.n_entries, forge.n_tensors) = (Some(n_entries), Some(n_tensors));
        cases.forge(2, what, CORRUPT, &forge);
    }
}
