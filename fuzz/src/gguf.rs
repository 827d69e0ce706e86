//! Target `gguf_parse`: a model file's header.

use rocmforge::model::gguf::{Gguf, Value};

use crate::allocations::peak_of;

/// Parses `data` as a file. For any input: no panic, heap proportional to the input, and accepted files keep the
/// invariants.
pub fn gguf_parse(data: &[u8], plant: bool) {
    let (result, peak) = peak_of(|| Gguf::parse(data));
    // The same bound as the tests in tests/adversarial/gguf_fields.rs.
    assert!(peak <= 4096 + 17 * data.len(), "{peak} bytes of heap for {} bytes of file", data.len());
    match result {
        Ok(gguf) => {
            holds(&gguf, data.len() as u64);
            if plant {
                gguf.metadata().for_each(|(key, _)| crate::planted(key.as_bytes()));
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn holds(gguf: &Gguf, file_bytes: u64) {
    let mut ranges: Vec<_> = gguf.tensors().iter().map(|t| t.range.clone()).collect();
    for tensor in gguf.tensors() {
        let range = &tensor.range;
        assert!(gguf.header_bytes() <= range.start && range.start < range.end && range.end <= file_bytes);
        assert!(range.start % u64::from(gguf.alignment()) == 0);
        let elements: u128 = tensor.shape.dims().iter().map(|&d| u128::from(d)).product();
        let bytes = elements / tensor.dtype.block_len() as u128 * tensor.dtype.block_bytes() as u128;
        assert_eq!(bytes, u128::from(range.end - range.start));
        assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
    }
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    for (key, value) in gguf.metadata() {
        // Compared by description: NaN does not equal itself.
        assert_eq!(gguf.get(key).map(Value::describe), Some(value.describe()));
        if let Some(strings) = gguf.strings(key) {
            assert_eq!(strings.iter().count(), strings.len());
            assert!((0..strings.len()).all(|index| strings.get(index).is_some()));
        }
    }
}
