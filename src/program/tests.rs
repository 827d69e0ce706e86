//! Inconsistent programs, one fault each, are refused with the fault's place.

mod streams;

use std::io::Write;
use std::sync::Arc;

use super::*;
use crate::tensor::{MappedFile, Shape};

const VOCAB: usize = 8;
const WIDTH: usize = 4;

/// A file of zeros that holds the tensors.
fn file() -> Arc<MappedFile> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[0; 4096]).unwrap();
    MappedFile::map(std::fs::File::open(file.path()).unwrap()).unwrap()
}

fn tensor(dtype: DType, dims: &[u64]) -> LazyTensor {
    let shape = Shape::new(dims).unwrap();
    let bytes = dtype.row_bytes(shape.cols()).unwrap() * shape.rows();
    LazyTensor::new(&format!("{dtype} {shape}"), dtype, shape, 0..bytes, file()).unwrap()
}

/// Builds the layer of an otherwise sound program.
struct Rig {
    builder: Builder,
    /// A value of all rows, already written.
    x: ValueId,
}

impl Rig {
    fn matrix(&mut self, rows: u64, cols: u64) -> TensorId {
        self.builder.tensor(tensor(DType::F32, &[cols, rows]), Residence::Device)
    }

    fn vector(&mut self, len: u64) -> TensorId {
        self.builder.tensor(tensor(DType::F32, &[len]), Residence::Device)
    }

    fn project(&mut self, rows: usize) -> ValueId {
        let (weight, out) = (self.matrix(rows as u64, WIDTH as u64), self.builder.value(rows));
        self.builder.push(Op::Project { weight, bias: None, from: self.x, out, add: false });
        out
    }
}

/// The error of a program whose one layer `write` fills; `None` where it is sound.
fn fault(write: impl FnOnce(&mut Rig)) -> Option<String> {
    let mut builder = Builder::new(VOCAB);
    builder.part(PartKind::Embedding);
    let table = builder.tensor(tensor(DType::F32, &[WIDTH as u64, VOCAB as u64]), Residence::Host);
    let x = builder.value(WIDTH);
    builder.push(Op::Embed { table, scale: 1.0, out: x });
    builder.part(PartKind::Layer(0));
    let mut rig = Rig { builder, x };
    write(&mut rig);
    let mut builder = rig.builder;
    builder.part(PartKind::Head);
    let weight = builder.tensor(tensor(DType::F16, &[WIDTH as u64, VOCAB as u64]), Residence::Device);
    let (last, logits) = (builder.wanted_value(WIDTH), builder.wanted_value(VOCAB));
    builder.push(Op::Take { from: x, out: last });
    builder.push(Op::Project { weight, bias: None, from: last, out: logits, add: false });
    builder.finish(Output::Logits(logits)).err().map(|error| error.to_string())
}

#[track_caller]
fn refused(says: &str, write: impl FnOnce(&mut Rig)) {
    let text = fault(write).unwrap_or_else(|| panic!("nothing is wrong, and it should say {says:?}"));
    assert!(text.contains(says) && text.contains("layer 0"), "{text:?} does not say {says:?}");
}

#[test]
fn a_sound_program_has_its_parts_and_sizes() {
    assert_eq!(fault(|_| ()), None);
    assert_eq!(
        fault(|rig| {
            let [q, k, v] = [8, 4, 4].map(|width| rig.project(width));
            let state = rig.builder.state(State::Kv { heads: 2, head_dim: 2 });
            rig.builder.push(Op::Store { state, keys: k, values: v });
            let out = rig.builder.value(8);
            rig.builder.push(Op::Attend {
                state,
                queries: q,
                scale: 1.0,
                window: Some(1),
                both_ways: false,
                alibi: false,
                cap: None,
                sinks: None,
                out,
            });
        }),
        None
    );
}

#[test]
fn values_are_written_before_they_are_read_and_are_of_the_same_rows() {
    refused("read before it is written", |rig| {
        let from = rig.builder.value(WIDTH);
        rig.builder.push(Op::Add { from, scale: 1.0, out: rig.x });
    });
    refused("no value 77", |rig| rig.builder.push(Op::Scale { by: 2.0, value: ValueId(77) }));
    refused("mixes values of different rows", |rig| {
        let out = rig.builder.wanted_value(WIDTH);
        rig.builder.push(Op::Activate { activation: Activation::Gelu, from: rig.x, out });
    });
    refused("must copy all rows to wanted rows", |rig| {
        let out = rig.builder.value(WIDTH);
        rig.builder.push(Op::Take { from: rig.x, out });
    });
    refused("mixes numbers and choices", |rig| {
        let out = rig.builder.choice(WIDTH);
        rig.builder.push(Op::Activate { activation: Activation::Silu, from: rig.x, out });
    });
    refused("widths 8 and 4 differ", |rig| {
        let from = rig.project(8);
        rig.builder.push(Op::Add { from, scale: 1.0, out: rig.x });
    });
}

#[test]
fn weights_have_the_shapes_that_operations_need() {
    refused("must have shape [4, 5]", |rig| {
        let (weight, out) = (rig.matrix(6, 4), rig.builder.value(5));
        rig.builder.push(Op::Project { weight, bias: None, from: rig.x, out, add: false });
    });
    refused("must have shape [5]", |rig| {
        let (weight, bias, out) = (rig.matrix(5, 4), rig.vector(6), rig.builder.value(5));
        rig.builder.push(Op::Project { weight, bias: Some(bias), from: rig.x, out, add: false });
    });
    refused("must be F32", |rig| {
        let weight = rig.builder.tensor(tensor(DType::F16, &[4]), Residence::Device);
        let (from, out) = (rig.x, rig.builder.value(WIDTH));
        rig.builder.push(Op::Norm {
            kind: NormKind::Rms,
            eps: 0.0,
            weight,
            bias: None,
            from,
            out,
            add: false,
        });
    });
    refused("the group of a norm", |rig| {
        let weight = rig.vector(3);
        let (from, out) = (rig.x, rig.builder.value(WIDTH));
        rig.builder.push(Op::Norm {
            kind: NormKind::Layer,
            eps: 0.0,
            weight,
            bias: None,
            from,
            out,
            add: false,
        });
    });
    refused("does not belong to this part", |rig| {
        let out = rig.builder.value(VOCAB);
        rig.builder.push(Op::Project { weight: TensorId(0), bias: None, from: rig.x, out, add: false });
    });
    refused("must be a host tensor", |rig| {
        let (table, out) = (rig.matrix(8, 4), rig.builder.value(WIDTH));
        rig.builder.push(Op::Embed { table, scale: 1.0, out });
    });
}

/// A norm of groups of a value of 8, with a weight of these sizes.
fn grouped(dims: &'static [u64]) -> impl FnOnce(&mut Rig) {
    move |rig| {
        let from = rig.project(8);
        let weight = rig.builder.tensor(tensor(DType::F32, dims), Residence::Device);
        let kind = NormKind::Rms;
        rig.builder.push(Op::Norm { kind, eps: 0.0, weight, bias: None, from, out: from, add: false });
    }
}

#[test]
fn groups_of_a_norm_share_a_weight_or_have_one_each() {
    for sound in [&[8][..], &[2], &[2, 4], &[4, 2], &[8, 1]] {
        assert_eq!(fault(grouped(sound)), None, "{sound:?}");
    }
    for other in [&[3][..], &[16], &[2, 2], &[2, 8]] {
        refused("the group of a norm", grouped(other));
    }
}

#[test]
fn recurrent_operations_have_states_and_weights_of_their_sizes() {
    let convolve = |values, taps| {
        move |rig: &mut Rig| {
            let (state, weight) = (rig.builder.state(State::Recurrent { values }), rig.matrix(4, taps));
            let (from, out) = (rig.x, rig.builder.value(WIDTH));
            rig.builder.push(Op::Convolve { state, weight, bias: None, activation: None, from, out });
        }
    };
    assert_eq!(fault(convolve(8, 3)), None);
    refused("recurrent state of Some(8) values", convolve(12, 3));
    refused("must look back", convolve(0, 1));
    // Two heads of 4 values in a group, with 3 columns.
    let scan = |values, heads, groups, all, small: u64| {
        move |rig: &mut Rig| {
            let state = rig.builder.state(State::Recurrent { values });
            let [from, steps] = [all, 2].map(|width| rig.project(width));
            let [step_bias, rate, skip] = [small; 3].map(|len| rig.matrix(len, 1));
            let out = rig.builder.value(8);
            rig.builder.push(Op::SelectiveScan {
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
        }
    };
    assert_eq!(fault(scan(24, 2, 1, 14, 2)), None);
    refused("recurrent state of Some(24) values", scan(25, 2, 1, 14, 2));
    refused("no 3 heads", scan(24, 3, 1, 14, 2));
    refused("no 2 heads in 0 groups", scan(24, 2, 0, 14, 2));
    refused("values of each group", scan(24, 2, 1, 15, 2));
    refused("values of each group", scan(24, 2, 1, 8, 2));
    refused("a step for each head", scan(24, 4, 1, 14, 4));
    refused("must have shape", scan(24, 2, 1, 14, 3));
    // A key head of 3 values, two value heads of 4.
    let heads = DeltaHeads { keys: 1, key_dim: 3, values: 2, value_dim: 4, in_turn: true };
    let delta = |values, heads, all, each, eps| {
        move |rig: &mut Rig| {
            let state = rig.builder.state(State::Recurrent { values });
            let [from, decay, amount] = [all, each, 2].map(|width| rig.project(width));
            let [decay_bias, rate] = [rig.vector(2), rig.vector(2)];
            let out = rig.builder.value(8);
            rig.builder.push(Op::DeltaRule { state, heads, from, eps, decay, decay_bias, rate, amount, out });
        }
    };
    assert_eq!(fault(delta(24, heads, 14, 2, 1e-6)), None);
    refused("recurrent state of Some(24) values", delta(23, heads, 14, 2, 1e-6));
    refused("are no heads", delta(24, DeltaHeads { keys: 0, ..heads }, 14, 2, 1e-6));
    refused("its queries, keys and values", delta(24, heads, 13, 2, 1e-6));
    refused("a decay and an amount", delta(24, heads, 14, 3, 1e-6));
    refused("eps of a delta rule", delta(24, heads, 14, 2, 0.0));
}

#[test]
fn heads_are_whole_and_a_row_sees_itself() {
    let spec = |dims| RopeSpec {
        layout: RopeLayout::Halves,
        dims,
        theta: 1e4,
        scaling: RopeScaling::None,
        magnitude: 1.0,
        growth: None,
    };
    refused("at least the rotated values", |rig| {
        let rope = rig.builder.rope(spec(4), None);
        rig.builder.push(Op::Rope { rope, head_dim: 2, value: rig.x });
    });
    refused("head_dim must divide the width", |rig| {
        let rope = rig.builder.rope(spec(2), None);
        rig.builder.push(Op::Rope { rope, head_dim: 3, value: rig.x });
    });
    refused("no such rotary", |rig| {
        rig.builder.push(Op::Rope { rope: RopeId(1), head_dim: 4, value: rig.x })
    });
    refused("keys must be as wide as their state", |rig| {
        let state = rig.builder.state(State::Kv { heads: 2, head_dim: 4 });
        rig.builder.push(Op::Store { state, keys: rig.x, values: rig.x });
    });
    let attend = |heads, head_dim, window| {
        move |rig: &mut Rig| {
            let (state, out) = (rig.builder.state(State::Kv { heads, head_dim }), rig.builder.value(WIDTH));
            rig.builder.push(Op::Attend {
                state,
                queries: rig.x,
                scale: 1.0,
                window,
                both_ways: false,
                alibi: false,
                cap: None,
                sinks: None,
                out,
            });
        }
    };
    let with_sinks = |count| {
        move |rig: &mut Rig| {
            let state = rig.builder.state(State::Kv { heads: 1, head_dim: 2 });
            let (sinks, out) = (Some(rig.vector(count)), rig.builder.value(WIDTH));
            rig.builder.push(Op::Attend {
                state,
                queries: rig.x,
                scale: 1.0,
                window: None,
                both_ways: false,
                alibi: false,
                cap: None,
                sinks,
                out,
            });
        }
    };
    assert_eq!(fault(with_sinks(2)), None);
    refused("must have shape [2]", with_sinks(1));
    refused("must be a multiple of the state's width", attend(3, 1, None));
    refused("no such keys", attend(0, 1, None));
    refused("window must include the row", attend(2, 2, Some(0)));
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused("must be finite and above 0", move |rig| rig.builder.push(Op::Cap { cap, value: rig.x }));
        refused("must be finite and above 0", move |rig| {
            let state = rig.builder.state(State::Kv { heads: 1, head_dim: 4 });
            let (queries, out) = (rig.x, rig.builder.value(WIDTH));
            let (scale, window, both_ways, cap, alibi, sinks) = (1.0, None, false, Some(cap), false, None);
            rig.builder.push(Op::Attend { state, queries, scale, window, both_ways, cap, alibi, sinks, out });
        });
    }
    let text = fault(|rig| {
        rig.builder.rope(spec(3), None);
    })
    .unwrap();
    assert!(text.contains("must be even"), "{text}");
    let text = fault(|rig| {
        let factors = rig.vector(1);
        rig.builder.rope(spec(2), Some(factors));
    });
    assert!(text.unwrap().contains("belong to the first part"));
}

/// A choice of `used` of two experts.
fn route(rig: &mut Rig, used: usize) -> ValueId {
    let (logits, out) = (rig.project(2), rig.builder.choice(used));
    let (gating, bias, groups, normalise, scale) = (Gating::Softmax, None, None, true, 1.0);
    rig.builder.push(Op::Route { logits, gating, bias, groups, normalise, scale, out });
    out
}

#[test]
fn experts_are_alike_and_come_when_chosen() {
    // `width`: that of down's biases, if there are biases.
    let biased = |count: u32, used: usize, last: DType, residence, width: Option<u64>| {
        move |rig: &mut Rig| {
            let choice = route(rig, used);
            let first = rig.builder.next_tensor();
            for expert in 0..2 {
                let dtype = if expert == 0 { DType::F32 } else { last };
                for dims in [[4, 6], [4, 6], [6, 4]] {
                    rig.builder.tensor(tensor(dtype, &dims), residence);
                }
            }
            let (from, out) = (rig.project(WIDTH), rig.x);
            let experts = ExpertRange { first, count, gated: true };
            let mut bias = |width| rig.builder.tensor(tensor(DType::F32, &[width, 2]), Residence::Device);
            let biases = width.map(|width| [bias(6), bias(6), bias(width)]);
            let (activation, factors) = (Activation::Clamped, [None; 3]);
            rig.builder.push(Op::Experts { experts, factors, biases, choice, activation, from, out });
        }
    };
    let layer = |count, used, last, residence| biased(count, used, last, residence, None);
    assert_eq!(fault(biased(2, 1, DType::F32, Residence::Chosen, Some(4))), None);
    refused("must have shape [4, 2]", biased(2, 1, DType::F32, Residence::Chosen, Some(5)));
    assert_eq!(fault(layer(2, 2, DType::F32, Residence::Chosen)), None);
    refused("3 of 2 experts", layer(2, 3, DType::F32, Residence::Chosen));
    refused("the layer has no experts", layer(0, 1, DType::F32, Residence::Chosen));
    refused("differ in type", layer(2, 1, DType::F16, Residence::Chosen));
    refused("must be loaded when chosen", layer(2, 1, DType::F32, Residence::Device));
    refused("does not belong to this part", layer(4, 1, DType::F32, Residence::Chosen));
    // Two tensors of each of two experts.
    let with_factors = |activation, biased: bool, factors: [Option<u64>; 3]| {
        move |rig: &mut Rig| {
            let choice = route(rig, 1);
            let first = rig.builder.next_tensor();
            for dims in [[4, 6], [6, 4], [4, 6], [6, 4]] {
                rig.builder.tensor(tensor(DType::F32, &dims), Residence::Chosen);
            }
            let experts = ExpertRange { first, count: 2, gated: false };
            assert!(experts.each(1).eq([2, 3].map(|role| TensorId(first.0 + role))));
            let bias = rig.builder.tensor(tensor(DType::F32, &[6, 2]), Residence::Device);
            let mut vector = |len| rig.builder.tensor(tensor(DType::F32, &[len]), Residence::Device);
            let factors = factors.map(|len| len.map(&mut vector));
            let (from, out, biases) = (rig.project(WIDTH), rig.x, biased.then_some([bias; 3]));
            rig.builder.push(Op::Experts { experts, factors, biases, choice, activation, from, out });
        }
    };
    let ungated = |activation, biased| with_factors(activation, biased, [None; 3]);
    assert_eq!(fault(with_factors(Activation::SquaredRelu, false, [None, Some(2), Some(2)])), None);
    refused("must have shape [2]", with_factors(Activation::SquaredRelu, false, [None, Some(2), Some(1)]));
    refused("no factors of gates", with_factors(Activation::SquaredRelu, false, [Some(2), None, None]));
    assert_eq!(fault(ungated(Activation::SquaredRelu, false)), None);
    refused("experts without gates have no biases", ungated(Activation::Linear, false));
    refused("experts without gates have no biases", ungated(Activation::SquaredRelu, true));
    refused("of a gate and its up", |rig| {
        let out = rig.builder.value(WIDTH);
        rig.builder.push(Op::Activate { activation: Activation::Clamped, from: rig.x, out });
    });
}

#[test]
fn groups_have_equally_many_experts_and_enough_of_them() {
    let route = |count, used, experts: usize| {
        move |rig: &mut Rig| {
            let (logits, out) = (rig.project(6), rig.builder.choice(experts));
            let groups = Some(ExpertGroups { count, used });
            let (gating, bias, normalise, scale) = (Gating::Sigmoid, None, true, 1.0);
            rig.builder.push(Op::Route { logits, gating, bias, groups, normalise, scale, out });
        }
    };
    assert_eq!(fault(route(3, 2, 4)), None);
    assert_eq!(fault(route(3, 3, 6)), None);
    for (count, used, experts) in [(0, 1, 1), (4, 1, 1), (6, 1, 1), (3, 4, 1), (3, 0, 1), (3, 2, 5)] {
        refused("experts are chosen of", route(count, used, experts));
    }
}

#[test]
fn a_row_is_opened_by_one_number() {
    let open = |width| {
        move |rig: &mut Rig| {
            let gate = rig.project(width);
            rig.builder.push(Op::Open { gate, value: rig.x });
        }
    };
    assert_eq!(fault(open(1)), None);
    refused("must be one number", open(2));
    refused("its own gate", |rig| {
        let gate = rig.project(1);
        rig.builder.push(Op::Open { gate, value: gate });
    });
}

#[test]
fn heads_have_the_parts_that_are_projected_or_joined() {
    let part = |head_dim, first, width| HeadPart { head_dim, first, width };
    let project = |of: HeadPart, rows: u64, width: usize| {
        move |rig: &mut Rig| {
            let weight = rig.matrix(rows, of.width.max(1).into());
            let out = rig.builder.value(width);
            rig.builder.push(Op::ProjectHeads { weight, from: rig.x, part: of, out });
        }
    };
    assert_eq!(fault(project(part(2, 1, 1), 6, 6)), None);
    refused("must have shape [1, 6]", project(part(2, 1, 1), 4, 6));
    refused("equally many outputs", project(part(2, 1, 1), 5, 5));
    for bad in [part(3, 0, 1), part(2, 1, 2), part(2, 0, 0), part(0, 0, 1), part(2, u32::MAX, 1)] {
        refused("heads must divide the width", project(bad, 6, 6));
    }
    let join = |first: HeadPart, second: HeadPart, width: usize| {
        move |rig: &mut Rig| {
            let (other, out) = (rig.project(6), rig.builder.value(width));
            let [first_part, second_part] = [first, second];
            rig.builder.push(Op::JoinHeads { first: rig.x, first_part, second: other, second_part, out });
        }
    };
    assert_eq!(fault(join(part(2, 1, 1), HeadPart::whole(3), 8)), None);
    refused("must have both parts", join(part(2, 1, 1), HeadPart::whole(3), 6));
    refused("numbers of heads differ", join(part(2, 1, 1), HeadPart::whole(6), 8));
    refused("their own parts", |rig| {
        let (first, second) = (rig.x, rig.project(4));
        let whole = HeadPart::whole(4);
        rig.builder.push(Op::JoinHeads { first, first_part: whole, second, second_part: whole, out: first });
    });
}

#[test]
fn logits_are_one_number_for_each_token() {
    let mut builder = Builder::new(VOCAB);
    assert!(builder.finish(Output::Logits(ValueId(0))).unwrap_err().to_string().contains("has no parts"));
    builder = Builder::new(VOCAB);
    builder.part(PartKind::Embedding);
    builder.part(PartKind::Head);
    let logits = builder.wanted_value(VOCAB);
    assert!(builder.finish(Output::Logits(logits)).unwrap_err().to_string().contains("one number per token"));
}

/// The error of an encoder of texts of `text_rows` tokens, whose one layer `write` fills.
fn encoder_fault(text_rows: u32, write: impl FnOnce(&mut Rig)) -> Option<String> {
    let mut builder = Builder::new(VOCAB);
    builder.part(PartKind::Embedding);
    let table = builder.tensor(tensor(DType::F32, &[WIDTH as u64, VOCAB as u64]), Residence::Host);
    let positions = builder.tensor(tensor(DType::F16, &[WIDTH as u64, 6]), Residence::Device);
    let x = builder.value(WIDTH);
    builder.push(Op::Embed { table, scale: 1.0, out: x });
    builder.push(Op::AddRow { table: positions, row: TableRow::Position, out: x });
    builder.push(Op::AddRow { table: positions, row: TableRow::First, out: x });
    builder.part(PartKind::Layer(0));
    let mut rig = Rig { builder, x };
    write(&mut rig);
    let mut builder = rig.builder;
    builder.part(PartKind::Head);
    let program = builder.finish(Output::Rows(Encoder { rows: x, text_rows }));
    program.err().map(|error| error.to_string())
}

fn attend_to(rig: &mut Rig, both_ways: bool, window: Option<u32>) {
    let state = rig.builder.state(State::Kv { heads: 1, head_dim: 4 });
    rig.builder.push(Op::Store { state, keys: rig.x, values: rig.x });
    let out = rig.builder.value(WIDTH);
    rig.builder.push(Op::Attend {
        state,
        queries: rig.x,
        scale: 1.0,
        window,
        both_ways,
        cap: None,
        alibi: false,
        sinks: None,
        out,
    });
}

#[test]
fn an_encoder_has_rows_of_whole_texts() {
    let says = |fault: Option<String>, text: &str| {
        assert!(fault.as_ref().is_some_and(|fault| fault.contains(text)), "{fault:?}, not {text:?}");
    };
    assert_eq!(encoder_fault(6, |rig| attend_to(rig, true, None)), None);
    says(encoder_fault(7, |_| ()), "for 7 rows or more");
    says(encoder_fault(0, |_| ()), "texts of some");
    assert_eq!(encoder_fault(6, |rig| attend_to(rig, true, Some(2))), None);
    let taken = encoder_fault(6, |rig| {
        let out = rig.builder.wanted_value(WIDTH);
        rig.builder.push(Op::Take { from: rig.x, out });
    });
    says(taken, "must not take rows");
    says(fault(|rig| attend_to(rig, true, None)), "must not attend to later rows");
    refused("in an encoder alone", |rig| {
        let table = rig.matrix(9, WIDTH as u64);
        rig.builder.push(Op::AddRow { table, row: TableRow::Position, out: rig.x });
    });
    refused("rows are added to all rows", |rig| {
        let (table, out) = (rig.matrix(9, WIDTH as u64), rig.builder.wanted_value(WIDTH));
        rig.builder.push(Op::Take { from: rig.x, out });
        rig.builder.push(Op::AddRow { table, row: TableRow::First, out });
    });
}

/// As the paper states for eight heads: powers of 1/2. Further heads lie halfway between the first ones.
#[test]
fn slopes_of_heads_fall_by_powers() {
    let eight: Vec<f32> = (0..8).map(|head| alibi_slope(head, 8)).collect();
    assert_eq!(eight, [1, 2, 3, 4, 5, 6, 7, 8].map(|power| 0.5f32.powi(power)));
    let twelve: Vec<f32> = (0..12).map(|head| alibi_slope(head, 12)).collect();
    assert_eq!(twelve[..8], eight[..]);
    let between = [0.5, 1.5, 2.5, 3.5].map(|power: f32| (-power).exp2());
    assert!(twelve[8..].iter().zip(between).all(|(slope, want)| (slope / want - 1.0).abs() < 1e-6));
}
