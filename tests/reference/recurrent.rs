//! Recurrent states on the CPU: several sequences in a step, two of them that begin at one state, and steps that run again.
//! Batches and headers that are refused.

use std::fs;
use std::io::Write;

use rocmforge::backend::cpu::CpuBackend;
use rocmforge::backend::{
    Backend, BackendError, RECURRENT_PLACES_MAX, RecurrentPlace, StepBatch, StepLimits,
};
use rocmforge::model::{Model, ModelId};

use crate::forge::{self, Value};
use crate::loaded::Loaded;
use crate::steps::FLOAT;

/// Pages of a sequence.
const PAGES: usize = 2;

/// Rows of one sequence in a step.
#[derive(Clone)]
struct Rows {
    /// Sequence number, which gives its pages.
    sequence: u32,
    ids: Vec<u32>,
    first: u32,
    place: RecurrentPlace,
}

fn rows(sequence: u32, all: &[u32], range: std::ops::Range<usize>, before: Option<u32>, after: u32) -> Rows {
    let ids = all[range.clone()].to_vec();
    Rows { sequence, ids, first: range.start as u32, place: RecurrentPlace { before, after } }
}

fn text(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 53 + salt * 31 + 7) % 250 + 3).collect()
}

/// The first decoder of that name on the CPU.
fn open(name: &str, threads: usize) -> Loaded<CpuBackend> {
    let mut all = forge::newer_decoders().into_iter();
    let (_, forge) = all.find(|(known, _)| *known == name).expect("no such decoder");
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("model");
    fs::write(&path, forge.build().bytes).unwrap();
    let model = Model::open(ModelId(1), name, vec![fs::File::open(&path).unwrap()]).unwrap();
    let limits = StepLimits { rows: 128, wanted_rows: 8 };
    let backend = CpuBackend::with_exact_threads(FLOAT, threads).unwrap();
    Loaded::new(model.plan.program.as_ref().clone(), backend, limits, 64)
}

fn begin(loaded: &mut Loaded<CpuBackend>, step: &[Rows]) -> Result<(), BackendError> {
    let of = |rows: &Rows| rows.first..rows.first + rows.ids.len() as u32;
    let mut ends = step.iter().scan(0, |end, rows| {
        *end += rows.ids.len() as u32;
        Some(*end)
    });
    let batch = StepBatch {
        token_ids: &step.iter().flat_map(|rows| rows.ids.clone()).collect::<Vec<_>>(),
        positions: &step.iter().flat_map(of).collect::<Vec<_>>(),
        row_sequences: &(0u32..).zip(step).flat_map(|(i, rows)| vec![i; rows.ids.len()]).collect::<Vec<_>>(),
        page_tables: &step
            .iter()
            .flat_map(|rows| [0, 1].map(|page| rows.sequence * PAGES as u32 + page))
            .collect::<Vec<_>>(),
        page_table_stride: PAGES,
        logits_rows: &ends.by_ref().map(|end| end - 1).collect::<Vec<_>>(),
        recurrent: &step.iter().map(|rows| rows.place).collect::<Vec<_>>(),
    };
    loaded.backend.begin_step(loaded.slot, &batch)
}

/// Logits after the last row of each sequence.
fn run(loaded: &mut Loaded<CpuBackend>, step: &[Rows]) -> Vec<Vec<f32>> {
    begin(loaded, step).expect("the batch was refused");
    (0..=loaded.program.head_part()).for_each(|part| loaded.run(part));
    (0..step.len()).map(|row| loaded.backend.logits(row).expect("the logits are not finite")).collect()
}

#[test]
fn other_sequences_of_a_step_change_no_bit() {
    for name in ["lfm2", "qwen35moe", "nemotron_h", "nemotron_h_moe"] {
        let texts = [text(1, 40), text(2, 23), text(3, 12)];
        let alone: Vec<_> = texts
            .iter()
            .map(|ids| {
                let mut loaded = open(name, 1);
                let first = run(&mut loaded, &[rows(0, ids, 0..9, None, 7)]);
                let rest = run(&mut loaded, &[rows(0, ids, 9..ids.len(), Some(7), 3)]);
                [first, rest].concat()
            })
            .collect();
        let mut loaded = open(name, 3);
        let [a, b, c] = &texts;
        let first = run(&mut loaded, &[rows(1, a, 0..9, None, 4), rows(0, b, 0..9, None, 9)]);
        assert!(first[0] == alone[0][0] && first[1] == alone[1][0], "{name}");
        let step = [rows(3, c, 0..9, None, 0), rows(1, a, 9..40, Some(4), 5), rows(0, b, 9..23, Some(9), 1)];
        let second = run(&mut loaded, &step);
        assert!(second[0] == alone[2][0] && second[1] == alone[0][1] && second[2] == alone[1][1], "{name}");
        // A step that runs again reads what it read before.
        assert!(run(&mut loaded, &step) == second, "{name} again");
        let third = run(&mut loaded, &[rows(3, c, 9..12, Some(0), 2)]);
        assert!(third[0] == alone[2][1], "{name}");
    }
}

#[test]
fn two_sequences_begin_at_one_state_and_memory_is_given_back() {
    let ids = text(5, 30);
    let other = [&ids[..20], &text(6, 10)].concat();
    let whole = |ids: &[u32]| run(&mut open("mamba2", 1), &[rows(0, ids, 0..30, None, 1)]).remove(0);
    let mut loaded = open("mamba2", 2);
    let each = loaded.program.recurrent_bytes();
    let pages =
        |loaded: &Loaded<CpuBackend>, states: u64| loaded.backend.kv_bytes(loaded.slot) - states * each;
    run(&mut loaded, &[rows(0, &ids, 0..20, None, 8)]);
    let taken = pages(&loaded, 1);
    // Without attention, both may have one page table.
    let both = run(&mut loaded, &[rows(0, &ids, 20..30, Some(8), 2), rows(0, &other, 20..30, Some(8), 3)]);
    assert!(both[0] == whole(&ids) && both[1] == whole(&other) && both[0] != both[1]);
    assert_eq!(pages(&loaded, 3), taken, "a state takes what the program says");
    loaded.backend.release_states(loaded.slot, &[8, 3, 77]);
    assert_eq!(pages(&loaded, 1), taken);
    let gone = begin(&mut loaded, &[rows(0, &ids, 29..30, Some(8), 3)]);
    assert!(matches!(gone, Err(BackendError::Batch("a recurrent state was never written"))), "{gone:?}");
}

#[test]
fn a_state_that_was_copied_out_and_back_goes_on_without_a_change_of_a_bit() {
    for name in ["lfm2", "mamba2", "qwen35"] {
        let ids = text(7, 30);
        let whole = run(&mut open(name, 1), &[rows(0, &ids, 0..30, None, 1)]);
        let mut loaded = open(name, 2);
        run(&mut loaded, &[rows(0, &ids, 0..20, None, 8)]);
        let state = loaded.backend.read_state(loaded.slot, 8).unwrap();
        assert_eq!(state.len() as u64, loaded.program.recurrent_bytes());
        run(&mut loaded, &[rows(1, &text(8, 5), 0..5, None, 8)]); // another one has the place now
        loaded.backend.write_state(loaded.slot, 3, &state).unwrap();
        assert!(run(&mut loaded, &[rows(0, &ids, 20..30, Some(3), 4)]) == whole, "{name}");
        let short = loaded.backend.write_state(loaded.slot, 3, &state[1..]);
        assert!(matches!(short, Err(BackendError::Batch(text)) if text.contains("another number of bytes")));
        let absent = loaded.backend.read_state(loaded.slot, 9);
        assert!(matches!(absent, Err(BackendError::Batch(text)) if text.contains("without memory")));
    }
}

#[test]
fn batches_with_contradictory_places_are_refused() {
    let ids = text(4, 30);
    let mut loaded = open("lfm2", 1);
    run(&mut loaded, &[rows(0, &ids, 0..10, None, 1), rows(1, &ids, 0..10, None, 2)]);
    let mut refused = |step: &[Rows], why: &str| match begin(&mut loaded, step) {
        Err(BackendError::Batch(text)) => assert!(text.contains(why), "{text:?} does not contain {why:?}"),
        other => panic!("{why}: {other:?}"),
    };
    let good = rows(0, &ids, 10..20, Some(1), 3);
    let with = |before, after| Rows { place: RecurrentPlace { before, after }, ..good.clone() };
    refused(&[with(None, 3)], "begin at another position");
    refused(&[rows(0, &ids, 0..10, Some(1), 3)], "begin at another position");
    refused(&[with(Some(1), 1)], "or also read");
    refused(&[with(Some(1), 3), rows(1, &ids, 10..12, Some(2), 3)], "written twice");
    refused(&[with(Some(1), 2), rows(1, &ids, 10..12, Some(2), 3)], "or also read");
    refused(&[with(Some(5), 3)], "never written");
    refused(&[with(Some(1), RECURRENT_PLACES_MAX)], "outside the pool");
    let step = [good];
    let none = StepBatch {
        token_ids: &step[0].ids,
        positions: &(10..20).collect::<Vec<_>>(),
        row_sequences: &[0; 10],
        page_tables: &[0, 1],
        page_table_stride: PAGES,
        logits_rows: &[9],
        recurrent: &[],
    };
    let error = loaded.backend.begin_step(loaded.slot, &none).unwrap_err().to_string();
    assert!(error.contains("no place for its recurrent states"), "{error}");
    let torn = StepBatch {
        row_sequences: &[0, 0, 1, 1, 0, 0, 0, 0, 0, 0],
        positions: &[10, 11, 10, 11, 12, 13, 14, 15, 16, 17],
        page_tables: &[0, 1, 2, 3],
        recurrent: &[step[0].place, RecurrentPlace { before: Some(2), after: 4 }],
        ..none
    };
    let error = loaded.backend.begin_step(loaded.slot, &torn).unwrap_err().to_string();
    assert!(error.contains("not adjacent"), "{error}");
}

#[test]
fn headers_that_ask_for_other_recurrences_are_refused_by_name() {
    let (number, numbers) = (Value::u32, Value::i32s);
    for (name, key, value) in [
        ("qwen35", "rope.dimension_sections", numbers(&[1, 1, 1, 5])),
        ("qwen35", "rope.dimension_sections", numbers(&[8, 0, 0, 0])),
        ("qwen35", "rope.dimension_sections", numbers(&[-1, 3, 6, 0])),
        ("qwen35", "attention.recurrent_layers", numbers(&[1, 0])),
        ("qwen35", "ssm.inner_size", number(128)),
        ("qwen35", "ssm.group_count", number(3)),
        ("qwen3next", "ssm.time_step_rank", number(5)),
        ("lfm2", "attention.head_count_kv", numbers(&[0, 2])),
        ("lfm2", "attention.head_count_kv", numbers(&[1, 2, 0])),
        ("lfm2", "attention.head_count_kv", numbers(&[0, 0, 0])),
        ("lfm2", "attention.head_count_kv", numbers(&[0, -2, 0])),
        ("lfm2", "shortconv.l_cache", number(1)),
        ("lfm2", "shortconv.l_cache", number(1 << 20)),
        ("lfm2", "attention.causal", Value::bool(false)),
        ("granitehybrid", "ssm.group_count", number(3)),
        ("granitehybrid", "expert_shared_feed_forward_length", number(48)),
        ("mamba2", "ssm.time_step_rank", number(5)),
        ("mamba2", "ssm.state_size", number(0)),
        ("mamba2", "attention.head_count", number(4)),
        ("nemotron_h", "feed_forward_length", numbers(&[0, 0, 96])),
        ("nemotron_h", "expert_count", number(4)),
        ("nemotron_h_moe", "moe_latent_size", number(16)),
        ("nemotron_h_moe", "expert_used_count", numbers(&[3, 2, 3, 3])),
        ("nemotron_h_moe", "expert_shared_feed_forward_length", number(0)),
    ] {
        let error = header(name, key, value).unwrap_err();
        assert!(error.contains(key), "{name}.{key}: {error}");
    }
}

/// The converter of Granite 4 without experts names the width of the feed-forward twice.
#[test]
fn a_feed_forward_may_be_called_a_shared_expert() {
    assert_eq!(header("granitehybrid", "expert_shared_feed_forward_length", Value::u32(96)), Ok(()));
}

/// Opens the first decoder of that name with a changed key.
fn header(name: &str, key: &str, value: Value) -> Result<(), String> {
    let mut all = forge::newer_decoders().into_iter();
    let (_, forge) = all.find(|(known, _)| *known == name).expect("no such decoder");
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&forge.set(&format!("{name}.{key}"), value).build().bytes).unwrap();
    let file = fs::File::open(file.path()).unwrap();
    Model::open(ModelId(1), name, vec![file]).map(|_| ()).map_err(|error| error.to_string())
}
