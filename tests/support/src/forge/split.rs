//! Cuts a model into parts, as `gguf-split` does.

use super::{Forge, Value};

/// The model in `count` parts of about equal numbers of tensors. Each tensor keeps the data that it has in the whole.
pub fn split(whole: &Forge, count: u16) -> Vec<Forge> {
    let whole = whole.clone().filled();
    let each = whole.tensors.len().div_ceil(count.into());
    let mut chunks = whole.tensors.chunks(each);
    (0..count)
        .map(|number| {
            let entries = if number == 0 { whole.entries.clone() } else { Vec::new() };
            let tensors = chunks.next().unwrap_or_default().to_vec();
            Forge { entries, tensors, ..whole.clone() }
                .set("split.no", Value::u16(number))
                .set("split.count", Value::u16(count))
                .set("split.tensors.count", Value::i32(whole.tensors.len() as i32))
        })
        .collect()
}
