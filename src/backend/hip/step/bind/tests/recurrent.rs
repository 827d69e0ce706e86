//! Binding of operations with recurrent states.

use super::*;
use crate::backend::hip::step::states::array_bytes;
use crate::program::DeltaHeads;

/// Value heads of a delta rule, and heads of a scan.
const STATE_HEADS: usize = 6;

impl Writer {
    /// A tensor of f32.
    fn floats(&mut self, rows: usize, cols: usize) -> TensorId {
        let lazy = self.lazy(DType::F32, rows, cols);
        self.builder.tensor(lazy, Residence::Device)
    }

    fn state_of(&mut self, values: usize) -> crate::program::StateId {
        self.builder.state(State::Recurrent { values: values as u32 })
    }

    fn convolve(&mut self, from: ValueId, taps: usize) -> ValueId {
        let width = self.builder.width(from);
        let (state, weight) = (self.state_of((taps - 1) * width), self.floats(width, taps));
        let (bias, activation, out) = (None, None, self.builder.value(width));
        self.builder.push(Op::Convolve { state, weight, bias, activation, from, out });
        out
    }

    fn scan(&mut self, from: ValueId, steps: ValueId, columns: usize) -> ValueId {
        let width = self.builder.width(from) - 4 * columns;
        let state = self.state_of(width * columns);
        let [step_bias, rate] = [1; 2].map(|rows| self.floats(rows, STATE_HEADS));
        let skip = self.floats(STATE_HEADS, 1);
        let (heads, groups, out) = (STATE_HEADS as u32, 2, self.builder.value(width));
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
        out
    }

    fn delta(&mut self, from: ValueId, [decay, amount]: [ValueId; 2], key_dim: usize) -> ValueId {
        let width = self.builder.width(from) - 4 * key_dim;
        let state = self.state_of(width * key_dim);
        let (decay_bias, rate) = (self.floats(1, STATE_HEADS), self.floats(STATE_HEADS, 1));
        let (key_dim, value_dim) = (key_dim as u32, (width / STATE_HEADS) as u32);
        let heads = DeltaHeads { keys: 2, key_dim, values: STATE_HEADS as u32, value_dim, in_turn: true };
        let (eps, out) = (1e-6, self.builder.value(width));
        self.builder.push(Op::DeltaRule { state, heads, from, eps, decay, decay_bias, rate, amount, out });
        out
    }
}

/// A layer of each operation. Nothing attends.
fn program(taps: usize, columns: usize, key_dim: usize) -> Program {
    let mut w = Writer::new(DType::Q8_0);
    let x = w.embed();
    w.layer(0);
    let from = w.project(x, 96);
    let out = w.convolve(from, taps);
    w.push_project(out, x, true);
    w.layer(1);
    let (from, steps) = (w.project(x, 6 * 32 + 4 * columns), w.project(x, STATE_HEADS));
    let out = w.scan(from, steps, columns);
    w.push_project(out, x, true);
    w.layer(2);
    let from = w.project(x, 6 * 16 + 4 * key_dim);
    let numbers = [STATE_HEADS; 2].map(|width| w.project(x, width));
    let out = w.delta(from, numbers, key_dim);
    w.push_project(out, x, true);
    w.head(x)
}

fn work(found: &Bound, layer: usize) -> &Work {
    let is_recurrent =
        |work: &&Work| matches!(work, Work::Convolve(_) | Work::SelectiveScan(_) | Work::DeltaRule(_));
    found.parts[layer + 1].units.iter().map(|unit| &unit.work).find(is_recurrent).unwrap()
}

#[test]
fn recurrent_operations_know_their_sizes_and_where_their_states_are() {
    let program = program(3, 20, 36);
    let found = bound(&program, 100);
    let layer = ["products", "convolve", "convert", "products", "convert"];
    assert_eq!(names(&found.parts[1]), layer);
    let Work::Convolve(convolve) = *work(&found, 0) else { panic!() };
    assert_eq!((convolve.width, convolve.taps, convolve.activation), (96, Taps::Three, Activation::Linear));
    let Work::SelectiveScan(scan) = *work(&found, 1) else { panic!() };
    assert_eq!((scan.head_dim, scan.columns, scan.groups), (32, 20, 2));
    // A column's numbers lie 16 bytes apart.
    assert_eq!([scan.step_bias.stride, scan.rate.stride, scan.skip.stride], [1, 1, 4]);
    let Work::DeltaRule(delta) = *work(&found, 2) else { panic!() };
    assert_eq!([delta.decay_bias.stride, delta.rate.stride], [1, 4]);
    assert_eq!((delta.heads.value_dim, delta.eps), (16, 1e-6));

    let states = [convolve.state, scan.state, delta.state];
    let bytes = [2 * 96, 6 * 32 * 20, 6 * 16 * 36].map(|values: u64| 4 * values);
    assert_eq!(states, [0, bytes[0], bytes[0] + bytes[1]]);
    let all = bytes.iter().sum::<u64>().next_multiple_of(256);
    assert_eq!((found.states.bytes as u64, array_bytes(&program)), (all, all));
    // Pages count positions, although nothing is stored in them.
    assert_eq!((found.kv.page_bytes, page_bytes(&program, KvType::F32)), (256, 256));
    assert_eq!(array_bytes(&llama(DType::Q4_K, 1)), 0);
}

#[test]
fn states_begin_at_multiples_of_sixteen_bytes() {
    let mut w = Writer::new(DType::F16);
    let x = w.embed();
    w.layer(0);
    for _ in 0..3 {
        let from = w.project(x, 36);
        let out = w.convolve(from, 2);
        w.push_project(out, x, true);
    }
    let found = bound(&w.head(x), 4);
    assert_eq!(found.states.offsets, [0, 144, 288]);
    assert_eq!(found.states.bytes, 512);
}

#[test]
fn sizes_of_states_without_a_kernel_are_refused_by_name() {
    let refused = |program: &Program| refuse(program).map(|error| error.to_string()).unwrap_or_default();
    assert_eq!(refused(&program(4, 256, 256)), "");
    let cannot = |what: &str| format!("the hip backend cannot run {what}");
    assert_eq!(refused(&program(5, 16, 16)), cannot("a convolution of 5 taps over rows of 96 values"));
    for columns in [260, 18] {
        let what = format!("a selective scan of heads of 32 values and {columns} columns");
        assert_eq!(refused(&program(4, columns, 16)), cannot(&what));
    }
    for keys in [260, 18] {
        let what = format!("a delta rule of keys of {keys} values and heads of 16");
        assert_eq!(refused(&program(4, 16, keys)), cannot(&what));
    }
}

/// Kernels that compute two products and their gate know the shares of an input alone.
#[test]
fn gates_of_other_activations_are_computed_after_their_products() {
    for (activation, both) in
        [(Activation::Silu, false), (Activation::Sigmoid, true), (Activation::Linear, true)]
    {
        let mut w = Writer::new(DType::Q8_0);
        let x = w.embed();
        w.layer(0);
        let [gate, up] = [FFN; 2].map(|rows| w.project(x, rows));
        let out = w.builder.value(FFN);
        w.builder.push(Op::Gate { activation, gate, up, out });
        w.push_project(out, x, true);
        let found = bound(&w.head(x), 8);
        assert_eq!(names(&found.parts[1]), ["gated products", "products"]);
        let Work::GatedProducts(gated) = &found.parts[1].units[0].work else { panic!() };
        assert_eq!(gated.both.is_some(), both, "{activation:?}");
    }
}

/// A norm with weights for each group of a row, which begin at multiples of 16 bytes.
#[test]
fn norms_find_the_weights_of_each_group() {
    for (rows, stride) in [(1, 0), (3, 32)] {
        let mut w = Writer::new(DType::F16);
        let x = w.embed();
        w.layer(0);
        let value = w.project(x, 3 * 30);
        let weight = w.floats(rows, 30);
        let (kind, bias, add) = (NormKind::Rms, None, false);
        w.builder.push(Op::Norm { kind, eps: 1e-5, weight, bias, from: value, out: value, add });
        w.push_project(value, x, true);
        let found = bound(&w.head(x), 8);
        let Work::Norm(norm) = &found.parts[1].units[1].work else { panic!() };
        assert_eq!((norm.group, norm.groups, norm.weight_stride), (30, 3, stride));
    }
}
