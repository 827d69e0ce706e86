//! Golden quant blocks, which other programs quantised and decoded. `tests/reference/make_quant_blocks.py` writes the file and says
//! what is in it.

const FILE: &[u8] = include_bytes!("../../golden/quant-blocks.bin");

/// Rows of one type.
#[derive(Clone, Debug)]
pub struct QuantBlocks {
    /// ggml's number of the type, or ours.
    pub number: u32,
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
    /// The rows' bytes, one after the other.
    pub bytes: &'static [u8],
    /// Their values.
    pub values: Vec<f32>,
}

/// The golden rows of all types.
pub fn quant_blocks() -> Vec<QuantBlocks> {
    let mut all = Vec::new();
    let mut rest = FILE;
    while !rest.is_empty() {
        let word = |i: usize| u32::from_le_bytes(rest[4 * i..][..4].try_into().unwrap());
        let (number, rows, cols, row_bytes) = (word(0), word(1) as usize, word(2) as usize, word(3) as usize);
        let (bytes, after) = rest[16..].split_at(rows * row_bytes);
        let (values, after) = after.split_at(rows * cols * 4);
        let values = values.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        all.push(QuantBlocks { number, rows, cols, bytes, values });
        rest = after;
    }
    all
}
