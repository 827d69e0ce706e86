//! Binding of streams, of several embedding tables, and of sizes of heads.

use super::*;
use crate::program::TableRow;

impl Writer {
    /// Rows of another table, `width` values wide.
    fn embed_beside(&mut self, width: usize) -> ValueId {
        let table = self.lazy(DType::Q8_0, VOCAB, width);
        let table = self.builder.tensor(table, Residence::Host);
        let out = self.builder.value(width);
        self.builder.push(Op::Embed { table, scale: 2.0, out });
        out
    }

    fn add_row(&mut self, out: ValueId) {
        let table = self.lazy(DType::F32, 1, HIDDEN);
        let table = self.builder.tensor(table, Residence::Host);
        self.builder.push(Op::AddRow { table, row: TableRow::First, out });
    }
}

#[test]
fn rows_of_several_tables_lie_one_after_the_other() {
    let mut w = Writer::new(DType::Q4_K);
    let x = w.embed();
    let other = w.embed_beside(FFN);
    let third = w.embed_beside(HIDDEN);
    w.add_row(third);
    w.layer(0);
    w.push_project(other, x, true);
    w.builder.push(Op::Add { from: third, scale: 1.0, out: x });
    let bound = bound(&w.head(x), 8);
    // A row of Q4_K has 144 bytes, one of Q8_0 544, and one that others are added to is f32.
    let tables: Vec<_> =
        bound.tables.iter().map(|rows| (rows.first, rows.row_bytes, rows.added.len())).collect();
    assert_eq!(tables, [(0, 144, 0), (144, 544, 0), (688, 4 * HIDDEN, 1)]);
    let first = |unit: &Unit| match &unit.work {
        Work::Embed(embed) => Some(embed.first),
        _ => None,
    };
    let firsts: Vec<u32> = bound.parts[0].units.iter().filter_map(first).collect();
    assert_eq!(firsts, [0, 144, 688]);
}

#[test]
fn rows_are_added_to_the_last_embeddings_alone() {
    let mut w = Writer::new(DType::Q4_K);
    let x = w.embed();
    w.embed_beside(HIDDEN);
    w.add_row(x);
    let refused = bind(&w.head(x), StepLimits { rows: 8, wanted_rows: 8 }, MODES).unwrap_err().to_string();
    assert!(refused.contains("anything but the last embeddings"), "{refused}");
}

#[test]
fn values_that_get_another_size_stay_beside_their_keys() {
    let mut w = Writer::new(DType::Q4_K);
    let x = w.embed();
    let rope = w.rope(HEAD_DIM);
    w.layer(0);
    let normed = w.norm(x);
    let [q, k, v] = w.qkv(normed);
    let group = HEAD_DIM as u32;
    w.builder.push(Op::Rescale { group, eps: 1e-6, like: None, value: v });
    let attended = w.attend(Some(rope), [q, k, v]);
    w.push_project(attended, x, true);
    let bound = bound(&w.head(x), 8);
    assert_eq!(names(&bound.parts[1])[..4], ["norm", "products", "rescale", "attend"], "no value is copied");
    let units = &bound.parts[1].units;
    let (Work::Rescale(rescale), Work::Attend(attend)) = (&units[2].work, &units[3].work) else { panic!() };
    let heads = attend.source.unwrap();
    assert_eq!((rescale.rows.plane, rescale.groups), (heads.from.plane, KV_HEADS as u32));
    assert_eq!(rescale.rows.column, ((HEADS + KV_HEADS) * HEAD_DIM) as u32);
}
