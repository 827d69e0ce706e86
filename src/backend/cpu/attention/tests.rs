//! Results of splits that would not fit into memory.

use super::*;

#[test]
fn results_beyond_memory_are_an_error() {
    let mut partials = Partials::default();
    assert_eq!(partials.resize(3, 18).unwrap().len(), 54);
    for (items, item_len) in [(usize::MAX, 2), (usize::MAX / 4, 1), (1 << 40, 1 << 20)] {
        let refused = partials.resize(items, item_len);
        assert!(matches!(refused, Err(BackendError::OutOfMemory { .. })), "{items} of {item_len}");
    }
    assert_eq!(partials.resize(2, 18).unwrap().len(), 36);
}
