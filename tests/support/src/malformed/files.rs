//! Classes 7 and 8: sparse files that claim to be huge, parts that do not fit together, and paths that are not files.

use rocmforge_client::wire::ErrorCode;

use super::{CORRUPT, Cases, Content, Files, NO_MODEL, good};
use crate::forge::{Forge, Value, kind, split};

const TIB: u64 = 1 << 40;

pub fn add(cases: &mut Cases) {
    bombs(cases);
    parts(cases);
    no_files(cases);
}

fn sparse(cases: &mut Cases, what: &str, forge: &Forge) {
    let start = forge.build().bytes;
    cases.one(7, format!("a TiB: {what}"), CORRUPT, Content::Sparse { start, length: TIB });
}

fn bombs(cases: &mut Cases) {
    let whole = Content::Sparse { start: good().build().bytes, length: TIB };
    cases.files(7, "a TiB, of which the model is the start", None, vec![(".gguf".into(), whole)]);
    for element in [kind::U8, kind::BOOL, kind::F64, kind::STRING] {
        for count in [1 << 28, 1 << 36, 1 << 39] {
            let forge = Forge::new(0).add(b"bomb", Value::array(element, count, &[]));
            sparse(cases, &format!("{count:#x} elements of type {element}, none there"), &forge);
        }
    }
    let mut rows = Forge::new(0);
    rows.n_tensors = Some(1 << 18);
    sparse(cases, "2^18 rows of tensors, none there", &rows);
    let mut entries = Forge::new(0);
    entries.n_entries = Some(1 << 16);
    sparse(cases, "2^16 entries, none there", &entries);
    let tensor = good().filled().with_tensor("output.weight", |t| t.dims = vec![32, 1 << 38]);
    sparse(cases, "a tensor of 2^45 bytes", &tensor);

    let strings = vec!["x"; 1 << 20];
    cases.good(7, "2^20 strings of one byte", &good().add(b"many", Value::strings(&strings)));
    let tokens = good().set("tokenizer.ggml.tokens", Value::strings(&strings));
    cases.forge(7, "2^20 tokens of one text", CORRUPT, &tokens);
    let merges = good()
        .set("tokenizer.ggml.model", Value::string("gpt2"))
        .set("tokenizer.ggml.pre", Value::string("gpt-2"))
        .without("tokenizer.ggml.scores")
        .set("tokenizer.ggml.merges", Value::strings(&vec!["a b"; 1 << 18]));
    cases.good(7, "2^18 merges, all of them one", &merges);
}

fn part(number: usize, count: usize) -> String {
    format!("-{number:05}-of-{count:05}.gguf")
}

fn parts(cases: &mut Cases) {
    let built = |forge: &Forge| Content::Bytes(forge.build().bytes);
    let cut = split(&good(), 3);
    let all =
        || -> Files { (1..).zip(&cut).map(|(number, forge)| (part(number, 3), built(forge))).collect() };
    cases.files(7, "three parts", None, all());
    let mut add = |what: &str, code, change: &dyn Fn(&mut Files)| {
        let mut files = all();
        change(&mut files);
        cases.files(7, what, Some(code), files);
    };
    for gap in 0..3 {
        add(&format!("parts without the one at {gap}"), NO_MODEL, &|files| drop(files.remove(gap)));
    }
    add("a part twice", CORRUPT, &|files| files[1].1 = files[2].1.clone());
    add("the first part twice", CORRUPT, &|files| files[1].1 = files[0].1.clone());
    add("parts in another order", CORRUPT, &|files| {
        let second = files[1].1.clone();
        files[1].1 = std::mem::replace(&mut files[2].1, second);
    });
    for count in [0, 1, 2, 4, u16::MAX] {
        let last = cut[2].clone().set("split.count", Value::u16(count));
        add(&format!("a last part of {count}"), CORRUPT, &|files| files[2].1 = built(&last));
    }
    for number in [0, 1, 3, u16::MAX] {
        let last = cut[2].clone().set("split.no", Value::u16(number));
        add(&format!("a last part that says {number}"), CORRUPT, &|files| files[2].1 = built(&last));
    }
    let silent = cut[1].clone().without("split.no");
    add("a part that says nothing of itself", CORRUPT, &|files| files[1].1 = built(&silent));
    for tensors in [0, 20, 22, i32::MAX] {
        let first = cut[0].clone().set("split.tensors.count", Value::i32(tensors));
        add(&format!("parts of {tensors} tensors"), CORRUPT, &|files| files[0].1 = built(&first));
    }
    let mut twice = cut[2].clone();
    twice.tensors[0] = cut[0].tensors[0].clone();
    add("a tensor in two parts", CORRUPT, &|files| files[2].1 = built(&twice));
    let cropped = {
        let bytes = cut[2].build().bytes;
        Content::Bytes(bytes[..bytes.len() - 33].to_vec())
    };
    add("a last part cut short", CORRUPT, &|files| files[2].1 = cropped.clone());
    add("a part that is a directory", NO_MODEL, &|files| files[1].1 = Content::Directory);

    let whole = good().set("split.count", Value::u16(1000)).set("split.no", Value::u16(0));
    let file = (part(1, 1000), built(&whole));
    // More parts than a model may have, so the name has no special meaning and the model is requested by it.
    cases.files(7, "one of a thousand parts, by itself", Some(NO_MODEL), vec![(".gguf".into(), file.1)]);
    let many = (1..=256).map(|number| {
        let forge = Forge::new(0).set("split.no", Value::u16(number - 1)).set("split.count", Value::u16(255));
        (part(number.into(), 256), built(&forge))
    });
    cases.files(7, "256 parts that say they are 255", Some(CORRUPT), many.collect());
}

fn no_files(cases: &mut Cases) {
    for path in
        ["/dev/zero", "/dev/urandom", "/dev/null", "/dev/tty", "/proc/self/mem", "/proc/self/maps", "/"]
    {
        cases.one(8, format!("a link to {path}"), NO_MODEL, Content::Link(path.into()));
    }
    cases.one(8, "a link to nowhere", ErrorCode::ModelNotFound, Content::Link("nowhere".into()));
    cases.one(8, "a FIFO", NO_MODEL, Content::Fifo);
    cases.one(8, "a directory", NO_MODEL, Content::Directory);
    cases.one(8, "a link to itself", NO_MODEL, Content::Loop);
}
