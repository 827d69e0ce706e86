//! Operations with recurrent states: against f64, and to the bit against other cuts of the same rows.

mod convolve;
mod delta;
mod scan;

use rocmforge::backend::hip::Buffer;

use crate::random::Random;
use crate::rig::Rig;

/// Values of an array before the state of the tested operation. They stay as they are, and so do the values after it.
const FRONT: usize = 8;
const BEHIND: usize = 5;
/// Values of a row of results after them, which stay as they are.
const GAP: usize = 4;
/// In `row_seq`: a padding row.
const NO_SEQUENCE: u32 = u32::MAX;

/// Values and how far a kernel's may be from each.
type Bounded = Vec<(f64, f64)>;

/// An operation whose rows depend on those before.
trait Recurrence {
    /// Values of a row of inputs, and of its results, and of the state.
    fn sizes(&self) -> [usize; 3];

    /// A row of inputs, with NaN in its gaps.
    fn row(&self, random: &mut Random) -> Vec<f32>;

    /// A state that some rows could have left.
    fn state(&self, random: &mut Random) -> Vec<f32>;

    /// Results of rows, and the state after them, in f64.
    fn reference(&self, rows: &[Vec<f32>], before: Option<&[f32]>) -> (Bounded, Bounded);

    /// Launches the kernel for the rows in `input`. `shape` chooses among launches of equal results.
    fn launch(&self, rig: &Rig, input: &Buffer, out: &Buffer, step: &Step, shape: usize);
}

/// The rows of one sequence in a step, and its state before.
struct Sequence {
    rows: Vec<Vec<f32>>,
    before: Option<Vec<f32>>,
}

/// Arrays of a step.
struct Step {
    /// First row of each sequence.
    first: Vec<usize>,
    /// Rows, those of padding included.
    rows: usize,
    /// Sequences, those of padding included.
    sequences: usize,
    row_seq: Buffer,
    runs: Buffer,
    before: Vec<Option<(Buffer, Vec<f32>)>>,
    after: Vec<Buffer>,
}

fn array(state: &[f32]) -> Vec<f32> {
    [&[f32::NAN; FRONT], state, &[f32::NAN; BEHIND]].concat()
}

impl Step {
    /// Places sequences in a random order, with some padding rows at the end.
    fn new(rig: &Rig, random: &mut Random, all: &[Sequence], state: usize, padding: usize) -> Self {
        let mut first = vec![0; all.len()];
        let mut row_seq = Vec::new();
        for sequence in random.shuffled(all.len()) {
            first[sequence] = row_seq.len();
            row_seq.extend(std::iter::repeat_n(sequence as u32, all[sequence].rows.len()));
        }
        let own = row_seq.len();
        row_seq.extend(std::iter::repeat_n(NO_SEQUENCE, padding));
        let before: Vec<_> = all
            .iter()
            .map(|sequence| sequence.before.as_ref().map(|state| array(state)))
            .map(|array| array.map(|array| (rig.upload(&array), array)))
            .collect();
        let after: Vec<Buffer> = all.iter().map(|_| rig.output::<f32>(FRONT + state + BEHIND)).collect();
        let address = |buffer: &Buffer| buffer.ptr::<u8>().address();
        let mut runs = Vec::new();
        for (number, sequence) in all.iter().enumerate() {
            let old = before[number].as_ref().map_or(0, |(buffer, _)| address(buffer));
            runs.extend(run(first[number], sequence.rows.len(), old, address(&after[number])));
        }
        (own..row_seq.len()).for_each(|row| runs.extend(run(row, 1, 0, 0)));
        // One more than there are rows for: a launch of a recorded size.
        runs.extend(run(0, 0, 0, 0));
        Self {
            first,
            rows: row_seq.len(),
            sequences: runs.len() / 8,
            row_seq: rig.upload(&row_seq),
            runs: rig.upload(&runs),
            before,
            after,
        }
    }

    /// The states that the sequences have now. All else is as it was before the step.
    fn states(&self, rig: &Rig) -> Vec<Vec<f32>> {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for (buffer, old) in self.before.iter().flatten() {
            assert_eq!(
                bits(&rig.download::<f32>(buffer)),
                bits(old),
                "a state that is only read was written"
            );
        }
        let read = |buffer| {
            let mut values = rig.download::<f32>(buffer);
            let behind = values.split_off(values.len() - BEHIND);
            let state = values.split_off(FRONT);
            assert!(
                values.iter().chain(&behind).all(|value| value.to_bits() == u32::MAX),
                "written beside the state"
            );
            state
        };
        self.after.iter().map(read).collect()
    }
}

/// The words of kernels/recurrent/runs.h.
fn run(first: usize, rows: usize, before: u64, after: u64) -> [u32; 8] {
    let high = |address: u64| (address >> 32) as u32;
    [first as u32, rows as u32, 0, 0, before as u32, high(before), after as u32, high(after)]
}

/// Results of each sequence's rows in one step, and the states after it.
fn results(
    rig: &Rig,
    random: &mut Random,
    of: &impl Recurrence,
    all: &[Sequence],
    (padding, shape): (usize, usize),
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let [inputs, outputs, state] = of.sizes();
    let step = Step::new(rig, random, all, state, padding);
    let mut input = vec![f32::NAN; step.rows * inputs];
    for (sequence, &first) in all.iter().zip(&step.first) {
        for (row, values) in sequence.rows.iter().enumerate() {
            input[(first + row) * inputs..][..inputs].copy_from_slice(values);
        }
    }
    let (input, out) = (rig.upload(&input), rig.output::<f32>(step.rows * (outputs + GAP)));
    of.launch(rig, &input, &out, &step, shape);
    let got = rig.download::<f32>(&out);
    let rows: Vec<&[f32]> = got.chunks_exact(outputs + GAP).collect();
    assert!(rows.iter().all(|row| row[outputs..].iter().all(|value| value.to_bits() == u32::MAX)));
    let zero = |row: &&[f32]| row[..outputs].iter().all(|value| value.to_bits() == 0);
    assert!(rows[step.rows - padding..].iter().all(zero), "a padding row has results");
    let of_sequence = |(sequence, &first): (&Sequence, &usize)| {
        rows[first..first + sequence.rows.len()].iter().flat_map(|row| &row[..outputs]).copied().collect()
    };
    (all.iter().zip(&step.first).map(of_sequence).collect(), step.states(rig))
}

fn check_values(what: &str, got: &[f32], want: &Bounded) {
    assert_eq!(got.len(), want.len());
    for (at, (&got, &(want, bound))) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(got) - want).abs() <= bound,
            "{what} {at}: {got} instead of {want}, within {bound}"
        );
    }
}

fn sequence(random: &mut Random, of: &impl Recurrence, rows: usize, begins: bool) -> Sequence {
    Sequence {
        rows: (0..rows).map(|_| of.row(random)).collect(),
        before: (!begins).then(|| of.state(random)),
    }
}

/// Compares sequences of these many rows with f64: some begin, some go on.
fn check(rig: &Rig, random: &mut Random, of: &impl Recurrence, lengths: &[usize], shape: usize) {
    let all: Vec<Sequence> =
        lengths.iter().map(|&rows| sequence(random, of, rows, random_bit(rows))).collect();
    let (got, states) = results(rig, random, of, &all, (lengths.len() % 3, shape));
    for (number, sequence) in all.iter().enumerate() {
        let (want, state) = of.reference(&sequence.rows, sequence.before.as_deref());
        check_values("result", &got[number], &want);
        check_values("state", &states[number], &state);
    }
}

/// Sequences of an even number of rows begin.
fn random_bit(rows: usize) -> bool {
    rows.is_multiple_of(2)
}

/// Rows of a sequence have the same bits however they are cut into steps, in any company and shape of the launch.
fn check_bits(rig: &Rig, random: &mut Random, of: &impl Recurrence, rows: usize, shapes: usize) {
    let whole = sequence(random, of, rows, true);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let mut known = None;
    for shape in 0..shapes {
        for cut in [rows, 1, 7, 11] {
            let (mut out, mut before) = (Vec::new(), None);
            for part in whole.rows.chunks(cut) {
                let mut all = vec![Sequence { rows: part.to_vec(), before: before.clone() }];
                // Others beside it, except where the step has all rows.
                if cut != rows {
                    all.extend([3, 1].map(|rows| sequence(random, of, rows, rows == 1)));
                }
                let (mut got, mut states) = results(rig, random, of, &all, (0, shape));
                out.append(&mut got[0]);
                before = Some(states.swap_remove(0));
            }
            let now = (bits(&out), bits(&before.unwrap_or_default()));
            let first = known.get_or_insert_with(|| now.clone());
            assert!(*first == now, "{rows} rows in steps of {cut}, shape {shape}: other bits");
        }
    }
}

/// `ln(1 + e^x)`.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
