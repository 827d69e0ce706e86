//! A program with recurrent states on a GPU or the look-alike: the CPU backend's logits, which other tests compare with f64.

use std::io::Write;
use std::sync::Arc;

use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::backend::hip::{HipBackend, HipOptions};
use rocmforge::backend::{
    ActivationType, Backend, KvType, RECURRENT_PLACES_MAX, RecurrentPlace, StepBatch, StepLimits,
};
use rocmforge::program::{
    Activation, Builder, DeltaHeads, NormKind, Op, Output, PartKind, Program, Residence, State, StateId,
    TensorId, ValueId,
};
use rocmforge::tensor::{DType, LazyTensor, MappedFile, Shape};

use crate::gpu;
use crate::loaded::{Device, Loaded};
use crate::small::Random;

const HIDDEN: usize = 64;
const VOCAB: usize = 96;
/// Values of the file that all tensors share.
const VALUES: usize = 1 << 19;
const LIMITS: StepLimits = StepLimits { rows: 128, wanted_rows: 128 };
/// Error limit of logits in single precision, relative to their norm.
const EXACT: f64 = 2e-5;

/// Writes a program over random weights.
struct Writer {
    builder: Builder,
    file: Arc<MappedFile>,
    used: usize,
}

impl Writer {
    fn new() -> Self {
        let mut random = Random::new(77);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..VALUES).flat_map(|_| (0.3 * random.value()).to_le_bytes()).collect();
        file.write_all(&bytes).unwrap();
        let file = MappedFile::map(std::fs::File::open(file.path()).unwrap()).unwrap();
        Self { builder: Builder::new(VOCAB), file, used: 0 }
    }

    fn tensor(&mut self, rows: usize, cols: usize, residence: Residence) -> TensorId {
        let dims = [cols as u64, rows as u64];
        let shape = Shape::new(if rows == 1 { &dims[..1] } else { &dims }).unwrap();
        let start = 4 * self.used as u64;
        self.used += (rows * cols).next_multiple_of(8);
        let bytes = start..start + 4 * (rows * cols) as u64;
        let lazy = LazyTensor::new("a test's", DType::F32, shape, bytes, Arc::clone(&self.file)).unwrap();
        self.builder.tensor(lazy, residence)
    }

    fn floats(&mut self, rows: usize, cols: usize) -> TensorId {
        self.tensor(rows, cols, Residence::Device)
    }

    fn state(&mut self, values: usize) -> StateId {
        self.builder.state(State::Recurrent { values: values as u32 })
    }

    fn project(&mut self, from: ValueId, width: usize) -> ValueId {
        let out = self.builder.value(width);
        self.push(from, out, false);
        out
    }

    fn push(&mut self, from: ValueId, out: ValueId, add: bool) {
        let weight = self.floats(self.builder.width(out), self.builder.width(from));
        self.builder.push(Op::Project { weight, bias: None, from, out, add });
    }

    fn norm(&mut self, from: ValueId, out: ValueId, groups: usize) {
        let group = self.builder.width(from) / groups;
        let weight = self.floats(groups, group);
        self.builder.push(Op::Norm {
            kind: NormKind::Rms,
            eps: 1e-5,
            weight,
            bias: None,
            from,
            out,
            add: false,
        });
    }

    fn layer(&mut self, number: u32, x: ValueId) -> ValueId {
        self.builder.part(PartKind::Layer(number));
        let normed = self.builder.value(HIDDEN);
        self.norm(x, normed, 1);
        normed
    }

    fn convolve(&mut self, from: ValueId, taps: usize, activation: Option<Activation>) -> ValueId {
        let width = self.builder.width(from);
        let (state, weight) = (self.state((taps - 1) * width), self.floats(width, taps));
        let (bias, out) = (activation.map(|_| self.floats(1, width)), self.builder.value(width));
        self.builder.push(Op::Convolve { state, weight, bias, activation, from, out });
        out
    }

    /// A short convolution between two gates.
    fn short(&mut self, normed: ValueId) -> ValueId {
        let [gate, up, after] = [72; 3].map(|width| self.project(normed, width));
        let gated = self.builder.value(72);
        self.builder.push(Op::Gate { activation: Activation::Linear, gate, up, out: gated });
        let convolved = self.convolve(gated, 3, None);
        let out = self.builder.value(72);
        self.builder.push(Op::Gate { activation: Activation::Linear, gate: after, up: convolved, out });
        out
    }

    /// A scan of six heads in two groups, whose result has a norm with weights for each group.
    fn scan(&mut self, normed: ValueId) -> ValueId {
        let (heads, head_dim, groups, columns) = (6, 20, 2, 24);
        let width = heads * head_dim;
        let from = self.project(normed, width + 2 * groups * columns);
        let from = self.convolve(from, 4, Some(Activation::Silu));
        let steps = self.project(normed, heads);
        let state = self.state(width * columns);
        let (step_bias, rate) = (self.floats(1, heads), self.floats(heads, 1));
        let (skip, out) = (self.floats(1, heads), self.builder.value(width));
        let (heads, groups) = (heads as u32, groups as u32);
        self.builder.push(Op::SelectiveScan {
            state,
            heads,
            groups,
            from,
            steps,
            step_bias,
            rate,
            skip,
            out,
        });
        self.norm(out, out, groups as usize);
        out
    }

    /// A delta rule of six heads, whose result has a gate.
    fn delta(&mut self, normed: ValueId) -> ValueId {
        let heads = DeltaHeads { keys: 2, key_dim: 36, values: 6, value_dim: 20, in_turn: true };
        let from = self.project(normed, heads.width().unwrap() as usize);
        let from = self.convolve(from, 4, Some(Activation::Silu));
        let [decay, amount] = [6; 2].map(|width| self.project(normed, width));
        let state = self.state(120 * 36);
        let (decay_bias, rate) = (self.floats(1, 6), self.floats(6, 1));
        let (eps, out) = (1e-6, self.builder.value(120));
        self.builder.push(Op::DeltaRule { state, heads, from, eps, decay, decay_bias, rate, amount, out });
        self.norm(out, out, 6);
        let (gate, opened) = (self.project(normed, 120), self.builder.value(120));
        self.builder.push(Op::Gate { activation: Activation::Sigmoid, gate, up: out, out: opened });
        opened
    }

    fn attend(&mut self, normed: ValueId) -> ValueId {
        let [queries, keys, values] = [64, 32, 32].map(|width| self.project(normed, width));
        let state = self.builder.state(State::Kv { heads: 2, head_dim: 16 });
        self.builder.push(Op::Store { state, keys, values });
        let out = self.builder.value(64);
        let (scale, window, both_ways, cap, alibi, sinks) = (0.25, None, false, None, false, None);
        self.builder.push(Op::Attend { state, queries, scale, window, both_ways, cap, alibi, sinks, out });
        out
    }

    /// A gate of two products, and an activation alone.
    fn feed_forward(&mut self, normed: ValueId, out: ValueId) {
        let [gate, up] = [96; 2].map(|width| self.project(normed, width));
        let gated = self.builder.value(96);
        self.builder.push(Op::Gate { activation: Activation::Sigmoid, gate, up, out: gated });
        self.push(gated, out, true);
        let (up, squared) = (self.project(normed, 48), self.builder.value(48));
        self.builder.push(Op::Activate { activation: Activation::SquaredRelu, from: up, out: squared });
        self.push(squared, out, true);
    }
}

/// A layer of each operation, and one of attention unless there is to be none.
fn program(attends: bool) -> Program {
    let mut w = Writer::new();
    w.builder.part(PartKind::Embedding);
    let table = w.tensor(VOCAB, HIDDEN, Residence::Host);
    let x = w.builder.value(HIDDEN);
    w.builder.push(Op::Embed { table, scale: 1.0, out: x });
    type Mixer = fn(&mut Writer, ValueId) -> ValueId;
    let mixers: [Mixer; 4] = [Writer::short, Writer::scan, Writer::delta, Writer::attend];
    for (number, mixer) in mixers.into_iter().take(if attends { 4 } else { 3 }).enumerate() {
        let normed = w.layer(number as u32, x);
        let mixed = mixer(&mut w, normed);
        w.push(mixed, x, true);
        w.feed_forward(normed, x);
    }
    w.builder.part(PartKind::Head);
    let [last, normed] = [HIDDEN; 2].map(|width| w.builder.wanted_value(width));
    w.builder.push(Op::Take { from: x, out: last });
    w.norm(last, normed, 1);
    let logits = w.builder.wanted_value(VOCAB);
    w.push(normed, logits, false);
    assert!(w.used < VALUES);
    w.builder.finish(Output::Logits(logits)).unwrap()
}

/// A sequence in the pools of a model.
#[derive(Clone, Copy, Default)]
struct Sequence {
    position: u32,
    /// Number of its states.
    place: Option<u32>,
}

/// Runs so many rows of some sequences. The logits of all rows, one after the other.
fn step<B: Device>(loaded: &mut Loaded<B>, all: &mut [Sequence], counts: &[(usize, u32)]) -> Vec<f32> {
    let (mut tokens, mut positions, mut rows, mut recurrent) = (vec![], vec![], vec![], vec![]);
    for (number, &(sequence, count)) in counts.iter().enumerate() {
        let at = &mut all[sequence];
        // Each has two places and takes them in turn.
        let numbers = [2 * sequence as u32, 2 * sequence as u32 + 1];
        let after = numbers[usize::from(at.place == Some(numbers[0]))];
        recurrent.push(RecurrentPlace { before: at.place, after });
        for position in at.position..at.position + count {
            tokens.push((position * 31 + sequence as u32 * 7) % VOCAB as u32);
            positions.push(position);
            rows.push(number as u32);
        }
        *at = Sequence { position: at.position + count, place: Some(after) };
    }
    let tables: Vec<u32> =
        counts.iter().flat_map(|(s, _)| [0, 1, 2, 3].map(|page| 4 * *s as u32 + page)).collect();
    let batch = StepBatch {
        token_ids: &tokens,
        positions: &positions,
        row_sequences: &rows,
        page_tables: &tables,
        page_table_stride: 4,
        logits_rows: &(0..tokens.len() as u32).collect::<Vec<_>>(),
        recurrent: &recurrent,
    };
    let slot = loaded.slot;
    loaded.backend.get().begin_step(slot, &batch).unwrap();
    (0..=loaded.program.head_part()).for_each(|part| loaded.run(part));
    let backend = loaded.backend.get();
    (0..tokens.len()).flat_map(|row| backend.logits(row).unwrap()).collect()
}

/// Steps: (sequence, rows) of each. Prompts cut anywhere, and rows alone often enough to be recorded and replayed.
fn steps() -> Vec<Vec<(usize, u32)>> {
    let mut all = vec![vec![(0, 37)], vec![(1, 3), (0, 1)], vec![(2, 70), (1, 2), (0, 20)]];
    all.extend((0..5).map(|_| vec![(1, 1), (2, 1), (0, 1)]));
    all.push(vec![(3, 2), (1, 1)]);
    all.extend((0..4).map(|_| vec![(2, 1), (3, 1), (0, 1), (1, 1)]));
    all
}

fn on_gpu() -> Option<HipBackend> {
    let (activations, kv) = (ActivationType::F32, KvType::F32);
    let options = HipOptions { activations, kv, upload_threads: 1, ..HipOptions::default() };
    Some(HipBackend::with_runtime(gpu::runtime()?, options).expect("the device did not open"))
}

#[test]
fn recurrent_programs_have_the_cpu_backends_logits() {
    for attends in [true, false] {
        let Some(gpu) = on_gpu() else { return };
        let (activations, kv) = (ActivationType::F32, KvType::F32);
        let options = CpuOptions { activations, kv, ..CpuOptions::default() };
        let cpu = CpuBackend::new(options).expect("the CPU backend did not start");
        let mut gpu = Loaded::new(program(attends), gpu, LIMITS, 64);
        let mut cpu = Loaded::new(program(attends), cpu, LIMITS, 64);
        let mut sequences = [[Sequence::default(); 4]; 2];
        let mut worst = 0f64;
        for (number, counts) in steps().into_iter().enumerate() {
            if let (6, Some(place)) = (number, sequences[0][1].place) {
                goes_to_the_host_and_back(&mut gpu, place);
            }
            let got = step(&mut gpu, &mut sequences[0], &counts);
            let want = step(&mut cpu, &mut sequences[1], &counts);
            for (got, want) in got.chunks_exact(VOCAB).zip(want.chunks_exact(VOCAB)) {
                let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                let both = got.iter().zip(want);
                let far = norm(&mut both.map(|(g, w)| f64::from(*g) - f64::from(*w)))
                    / norm(&mut want.iter().map(|w| f64::from(*w)));
                assert!(far.is_finite(), "{counts:?}: the logits are not finite");
                worst = worst.max(far);
            }
        }
        println!("attends {attends}: off by {worst:.1e}");
        assert!(worst <= EXACT, "off by {worst:e} of their norm");
        assert!(gpu.backend.counters().graph_replays > 0, "no step was replayed");
        gives_back(&mut gpu, &mut sequences[0]);
    }
}

/// The next steps, which go on from there, have the same logits.
fn goes_to_the_host_and_back(gpu: &mut Loaded<HipBackend>, place: u32) {
    let (slot, before) = (gpu.slot, gpu.backend.kv_bytes(gpu.slot));
    let mut bytes = gpu.backend.read_state(slot, place).unwrap();
    assert_eq!(bytes.len() as u64, gpu.backend.recurrent_bytes()(&gpu.program));
    gpu.backend.release_states(slot, &[place]);
    let gone = gpu.backend.read_state(slot, place).unwrap_err();
    assert!(gone.to_string().contains("without memory is read"), "{gone}");
    gpu.backend.write_state(slot, place, &bytes).unwrap();
    assert!(gpu.backend.read_state(slot, place).unwrap() == bytes && gpu.backend.kv_bytes(slot) == before);
    bytes.pop();
    let short = gpu.backend.write_state(slot, place, &bytes).unwrap_err();
    assert!(short.to_string().contains("another number of bytes"), "{short}");
}

/// Both places of a sequence take memory until they are released, and a step cannot begin at a place without memory.
fn gives_back(gpu: &mut Loaded<HipBackend>, sequences: &mut [Sequence; 4]) {
    let (slot, before) = (gpu.slot, gpu.backend.kv_bytes(gpu.slot));
    gpu.backend.release_states(slot, &[0, 1, 77]);
    let array = gpu.backend.recurrent_bytes()(&gpu.program);
    assert_eq!(gpu.backend.kv_bytes(slot), before - 2 * array);
    let place = sequences[0].place.map(|before| RecurrentPlace { before: Some(before), after: 1 - before });
    let batch = StepBatch {
        token_ids: &[1],
        positions: &[sequences[0].position],
        row_sequences: &[0],
        page_tables: &[0, 1, 2, 3],
        page_table_stride: 4,
        logits_rows: &[0],
        recurrent: &[place.unwrap()],
    };
    let error = gpu.backend.begin_step(slot, &batch).unwrap_err();
    assert!(error.to_string().contains("a recurrent state was never written"), "{error}");
    let far = RecurrentPlace { before: None, after: RECURRENT_PLACES_MAX };
    let batch = StepBatch { positions: &[0], recurrent: &[far], ..batch };
    let error = gpu.backend.begin_step(slot, &batch).unwrap_err();
    assert!(error.to_string().contains("outside the pool"), "{error}");
}
