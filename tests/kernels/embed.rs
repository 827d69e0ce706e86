//! Embedding rows decoded from the file's bytes, against blocks that ggml quantised and decoded.

use rocmforge::backend::hip::Grid;
use rocmforge::backend::hip::kernels::matmul::choice;
use rocmforge::backend::hip::kernels::ops::EmbedRows;
use rocmforge::backend::hip::kernels::types::WEIGHT_TYPES;
use rocmforge::tensor::DType;
use rocmforge_test_support::quant_blocks::quant_blocks;

use crate::rig::rig;

/// Rows of a type as bytes of a file, and their values.
struct Table {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

impl Table {
    fn row_bytes(&self) -> usize {
        self.bytes.len() / self.rows
    }
}

fn tables() -> Vec<Table> {
    // F32 rows of an odd width too.
    let values: Vec<f32> = (0..3 * 37).map(|i| (i as f32 * 0.7).sin()).collect();
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut all = vec![Table { dtype: DType::F32, rows: 3, cols: 37, bytes, values }];
    all.extend(quant_blocks().into_iter().map(|blocks| Table {
        dtype: DType::from_ggml(blocks.number).unwrap(),
        rows: blocks.rows,
        cols: blocks.cols,
        bytes: blocks.bytes.to_vec(),
        values: blocks.values,
    }));
    all.retain(|table| WEIGHT_TYPES.iter().any(|known| known.dtype == table.dtype));
    // More columns than one workgroup decodes.
    let wide: Vec<Table> = all
        .iter()
        .filter(|t| matches!(t.dtype, DType::F16 | DType::Q4_K | DType::Q8_0))
        .map(widened)
        .collect();
    all.extend(wide);
    all
}

/// The same rows, repeated within one row.
fn widened(table: &Table) -> Table {
    const TIMES: usize = 17;
    let row_bytes = table.row_bytes();
    let pick = |i: usize| (i / TIMES + i % TIMES) % table.rows;
    let picked = || (0..table.rows * TIMES).map(pick);
    Table {
        bytes: picked().flat_map(|row| &table.bytes[row * row_bytes..][..row_bytes]).copied().collect(),
        values: picked().flat_map(|row| &table.values[row * table.cols..][..table.cols]).copied().collect(),
        cols: table.cols * TIMES,
        ..*table
    }
}

#[test]
fn embeddings_are_ggmls_values_times_the_scale() {
    let Some(rig) = rig() else { return };
    let mut seen = 0;
    for table in tables() {
        let Table { dtype, rows, cols, .. } = table;
        let file = rig.upload(&table.bytes);
        // Values are bit-exact to ggml's; the product is rounded once.
        for scale in [1.0, 64.0, 53.066] {
            let x = rig.output::<f32>(rows * cols);
            let (row_bytes, cols_arg) = (table.row_bytes() as u64, cols as u32);
            let arguments = EmbedRows { bytes: file.ptr(), x: x.ptr(), row_bytes, cols: cols_arg, scale };
            let grid = Grid::xy(cols.div_ceil(256) as u32, rows as u32);
            rig.device.launch(&rig.stream, choice::embed(dtype).unwrap(), grid, &arguments).unwrap();
            let want: Vec<f32> = table.values.iter().map(|v| v * scale).collect();
            assert_eq!(rig.download::<f32>(&x), want, "{dtype} times {scale}");
        }
        seen += 1;
    }
    assert_eq!(seen, WEIGHT_TYPES.len() + 3, "not every type was tried");
}
