//! Binding of programs, without a device.

mod recurrent;
mod streams;

use std::sync::Arc;

use super::*;
use crate::backend::KvType;
use crate::backend::hip::step::kv::page_bytes;
use crate::backend::hip::step::scratch;
use crate::program::{
    Activation, Builder, ExpertRange, Gating, HeadPart, NormKind, Op, Output, PartKind, Residence, RopeId,
    RopeLayout, RopeScaling, RopeSpec, State, TensorId, ValueId,
};
use crate::tensor::{DType, LazyTensor, MappedFile, Shape};

const HIDDEN: usize = 256;
const FFN: usize = 512;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const VOCAB: usize = 1000;

/// Writes programs over tensors without content.
struct Writer {
    builder: Builder,
    file: Arc<MappedFile>,
    dtype: DType,
}

impl Writer {
    fn new(dtype: DType) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 30).unwrap();
        let file = MappedFile::map(std::fs::File::open(file.path()).unwrap()).unwrap();
        Self { builder: Builder::new(VOCAB), file, dtype }
    }

    fn lazy(&self, dtype: DType, rows: usize, cols: usize) -> LazyTensor {
        let dims = [cols as u64, rows as u64];
        let shape = Shape::new(if rows == 1 { &dims[..1] } else { &dims }).unwrap();
        let bytes = dtype.row_bytes(cols as u64).unwrap() * rows as u64;
        LazyTensor::new("a test's", dtype, shape, 0..bytes, Arc::clone(&self.file)).unwrap()
    }

    fn matrix(&mut self, rows: usize, cols: usize) -> TensorId {
        let lazy = self.lazy(self.dtype, rows, cols);
        self.builder.tensor(lazy, Residence::Device)
    }

    fn vector(&mut self, len: usize) -> TensorId {
        let lazy = self.lazy(DType::F32, 1, len);
        self.builder.tensor(lazy, Residence::Device)
    }

    fn embed(&mut self) -> ValueId {
        self.builder.part(PartKind::Embedding);
        let table = self.lazy(self.dtype, VOCAB, HIDDEN);
        let table = self.builder.tensor(table, Residence::Host);
        let out = self.builder.value(HIDDEN);
        self.builder.push(Op::Embed { table, scale: 1.0, out });
        out
    }

    fn rope(&mut self, dims: usize) -> RopeId {
        let spec = RopeSpec {
            layout: RopeLayout::Halves,
            dims,
            theta: 1e4,
            scaling: RopeScaling::None,
            magnitude: 1.0,
            growth: None,
        };
        self.builder.rope(spec, None)
    }

    fn project(&mut self, from: ValueId, rows: usize) -> ValueId {
        let out = self.builder.value(rows);
        self.push_project(from, out, false);
        out
    }

    fn push_project(&mut self, from: ValueId, out: ValueId, add: bool) {
        let weight = self.matrix(self.builder.width(out), self.builder.width(from));
        self.builder.push(Op::Project { weight, bias: None, from, out, add });
    }

    fn push_norm(&mut self, group: usize, from: ValueId, out: ValueId, add: bool) {
        let weight = self.vector(group);
        let (kind, eps) = (NormKind::Rms, 1e-5);
        self.builder.push(Op::Norm { kind, eps, weight, bias: None, from, out, add });
    }

    fn norm(&mut self, from: ValueId) -> ValueId {
        let width = self.builder.width(from);
        let out = self.builder.value(width);
        self.push_norm(width, from, out, false);
        out
    }

    fn qkv(&mut self, from: ValueId) -> [ValueId; 3] {
        [HEADS, KV_HEADS, KV_HEADS].map(|heads| self.project(from, heads * HEAD_DIM))
    }

    fn attend(&mut self, rope: Option<RopeId>, qkv: [ValueId; 3]) -> ValueId {
        self.attend_with(rope, qkv, false)
    }

    fn attend_with(&mut self, rope: Option<RopeId>, [q, k, v]: [ValueId; 3], alibi: bool) -> ValueId {
        let head_dim = HEAD_DIM as u32;
        for value in [q, k] {
            if let Some(rope) = rope {
                self.builder.push(Op::Rope { rope, head_dim, value });
            }
        }
        let state = self.builder.state(State::Kv { heads: KV_HEADS as u32, head_dim });
        self.builder.push(Op::Store { state, keys: k, values: v });
        let out = self.builder.value(HEADS * HEAD_DIM);
        self.builder.push(Op::Attend {
            state,
            queries: q,
            scale: 0.125,
            window: None,
            both_ways: false,
            alibi,
            cap: None,
            sinks: None,
            out,
        });
        out
    }

    fn gated(&mut self, from: ValueId) -> ValueId {
        let [gate, up] = [FFN; 2].map(|rows| self.project(from, rows));
        let out = self.builder.value(FFN);
        self.builder.push(Op::Gate { activation: Activation::Silu, gate, up, out });
        out
    }

    fn layer(&mut self, number: u32) {
        self.builder.part(PartKind::Layer(number));
    }

    fn head(mut self, x: ValueId) -> Program {
        self.builder.part(PartKind::Head);
        let last = self.builder.wanted_value(HIDDEN);
        self.builder.push(Op::Take { from: x, out: last });
        let normed = self.builder.wanted_value(HIDDEN);
        self.push_norm(HIDDEN, last, normed, false);
        let logits = self.builder.wanted_value(VOCAB);
        self.push_project(normed, logits, false);
        self.builder.finish(Output::Logits(logits)).unwrap()
    }
}

/// A common decoder.
fn llama(dtype: DType, layers: u32) -> Program {
    let mut w = Writer::new(dtype);
    let x = w.embed();
    let rope = w.rope(HEAD_DIM);
    for number in 0..layers {
        w.layer(number);
        let normed = w.norm(x);
        let qkv = w.qkv(normed);
        let attended = w.attend(Some(rope), qkv);
        w.push_project(attended, x, true);
        let normed = w.norm(x);
        let gated = w.gated(normed);
        w.push_project(gated, x, true);
    }
    w.head(x)
}

const MODES: Modes = Modes {
    unit: crate::backend::hip::kernels::MatrixUnit::None,
    activations: crate::backend::ActivationType::Int8,
    kv: KvType::F16,
    order: crate::backend::hip::kernels::thresholds::Order::ByRows,
};

fn bound(program: &Program, rows: usize) -> Bound {
    bind(program, StepLimits { rows, wanted_rows: rows.min(16) }, MODES).unwrap()
}

fn names(part: &BoundPart) -> Vec<&'static str> {
    let name = |unit: &Unit| match &unit.work {
        Work::Embed(_) => "embed",
        Work::Take(_) => "take",
        Work::Norm(_) => "norm",
        Work::Convert(_) => "convert",
        Work::Products(_) => "products",
        Work::Heads(_) => "heads",
        Work::ProjectHeads(_) => "project heads",
        Work::JoinHeads(_) => "join heads",
        Work::Attend(_) => "attend",
        Work::GatedProducts(_) => "gated products",
        Work::Gate(_) => "gate",
        Work::Route(_) => "route",
        Work::Experts(_) => "experts",
        Work::Add(_) => "add",
        Work::Cap(_) => "cap",
        Work::Open(_) => "open",
        Work::Convolve(_) => "convolve",
        Work::SelectiveScan(_) => "selective scan",
        Work::DeltaRule(_) => "delta rule",
        Work::Multiply(_) => "multiply",
        Work::Rescale(_) => "rescale",
        Work::Sparsify(_) => "sparsify",
        Work::MixStreams(_) => "mix streams",
        Work::AddToStreams(_) => "add to streams",
    };
    part.units.iter().map(name).collect()
}

#[test]
fn a_usual_layer_is_seven_units_and_layers_share_their_memory() {
    let program = llama(DType::Q4_K, 2);
    let found = bound(&program, 128);
    let layer = ["norm", "products", "attend", "products", "norm", "gated products", "products"];
    assert_eq!(names(&found.parts[0]), ["embed"]);
    assert_eq!((names(&found.parts[1]), names(&found.parts[2])), (layer.to_vec(), layer.to_vec()));
    assert_eq!(names(&found.parts[3]), ["norm", "products"]);
    assert_eq!(bound(&llama(DType::Q4_K, 1), 128).slots, found.slots);
    // Operands are in the order of use, and each unit knows how many it needs.
    let part = &found.parts[2];
    assert_eq!(part.units.iter().map(|unit| unit.operands).collect::<Vec<_>>(), [1, 4, 4, 5, 6, 8, 9]);
    let numbers: Vec<u32> = part.operands.iter().map(|id| id.0).collect();
    assert_eq!(numbers, (part.operands[0].0..).take(9).collect::<Vec<_>>());
    assert_eq!(found.kv.offsets, [0, 32 * 2 * 2 * 64 * 2]);
}

#[test]
fn pages_hold_codes_where_heads_are_whole_groups_and_f16_elsewhere() {
    let codes = Modes { kv: KvType::Int8, ..MODES };
    let bind = |program: &Program| bind(program, StepLimits { rows: 8, wanted_rows: 8 }, codes).unwrap();
    let (usual, wide) = (llama(DType::Q4_K, 2), latent(0));
    // Keys and values of 32 tokens and 2 heads of 64 values, with an f16 scale for each 32.
    let state = 2 * 32 * 2 * (64 + 2 * 2);
    let found = bind(&usual);
    assert_eq!((found.modes.kv, found.kv.offsets), (KvType::Int8, vec![0, state]));
    assert_eq!(page_bytes(&usual, KvType::Int8), 2 * state);
    assert_eq!(bind(&wide).modes.kv, KvType::F16);
    assert_eq!(page_bytes(&wide, KvType::Int8), page_bytes(&wide, KvType::F16));
}

#[test]
fn queries_keys_and_values_lie_side_by_side() {
    let found = bound(&llama(DType::Q4_K, 1), 8);
    let [_, products, attend, ..] = &found.parts[1].units[..] else { panic!("a layer of fewer units") };
    let (Work::Products(products), Work::Attend(attend)) = (&products.work, &attend.work) else { panic!() };
    let heads = attend.source.unwrap();
    assert_eq!(products.matrices.iter().map(|m| m.rows).collect::<Vec<_>>(), [256, 128, 128]);
    assert_eq!((products.out.stride, products.out), (512, heads.from));
    assert_eq!(heads.queries, Some((4, attend.queries)));
    assert!(attend.out.float.is_none() && attend.out.a8.is_some(), "no f32 rows are left behind");
}

/// Heads that attention takes over may be made by its launch: the rows that they read must be kept until then.
#[test]
fn heads_are_kept_until_the_attention_that_makes_them() {
    let found = bound(&llama(DType::Q4_K, 1), 8);
    let Work::Attend(attend) = &found.parts[1].units[2].work else { panic!() };
    let slot = |plane: PlaneId| found.places[plane.0 as usize];
    let (heads, out) = (attend.source.unwrap(), attend.out.a8.unwrap());
    assert!(out.iter().all(|plane| slot(*plane) != slot(heads.from.plane)));
}

#[test]
fn room_is_no_more_than_what_a_fixed_decoder_took() {
    // Size for 128 rows and 16 rows of logits, measured before binding existed.
    const BEFORE: u64 = 36_593_920;
    let now = scratch::bytes(&bound(&llama(DType::Q4_K, 4), 128));
    assert!(now <= BEFORE, "{now} bytes");
    let few = scratch::bytes(&bound(&llama(DType::Q4_K, 4), 8));
    assert!(few < now / 8, "{few} bytes for few rows");
}

/// Norms after sublayers, over whole rows of queries and keys: products read the residual stream directly.
#[test]
fn values_without_a_norm_before_products_are_converted_once_for_all_readers() {
    let mut w = Writer::new(DType::Q4_K);
    let x = w.embed();
    let rope = w.rope(HEAD_DIM);
    w.layer(0);
    let [q, k, v] = w.qkv(x);
    w.push_norm(HEADS * HEAD_DIM, q, q, false);
    w.push_norm(KV_HEADS * HEAD_DIM, k, k, false);
    let attended = w.attend(Some(rope), [q, k, v]);
    let o = w.project(attended, HIDDEN);
    w.push_norm(HIDDEN, o, x, true);
    let gated = w.gated(x);
    let down = w.project(gated, HIDDEN);
    w.push_norm(HIDDEN, down, x, true);
    let found = bound(&w.head(x), 128);
    assert_eq!(names(&found.parts[0]), ["embed", "convert"]);
    let layer = [
        "products",
        "norm",
        "norm",
        "attend",
        "products",
        "norm",
        "convert",
        "gated products",
        "products",
        "norm",
    ];
    assert_eq!(names(&found.parts[1]), layer);
    let Work::Norm(norm) = &found.parts[1].units[1].work else { panic!() };
    assert_eq!((norm.from.stride, norm.out.float, norm.groups), (512, Some(norm.from), 1));
}

/// The rotation kernel takes a norm of heads that precedes the rotation; norms of other widths stay apart.
#[test]
fn norms_of_heads_are_part_of_heads() {
    let mut w = Writer::new(DType::Q8_0);
    let x = w.embed();
    let rope = w.rope(32);
    w.layer(0);
    let normed = w.norm(x);
    let [q, k, v] = w.qkv(normed);
    w.push_norm(HEAD_DIM, q, q, false);
    w.push_norm(HEAD_DIM, k, k, false);
    let attended = w.attend(Some(rope), [q, k, v]);
    w.push_project(attended, x, true);
    let found = bound(&w.head(x), 8);
    assert_eq!(names(&found.parts[1]), ["norm", "products", "attend", "products"]);
    let Work::Attend(attend) = &found.parts[1].units[2].work else { panic!() };
    let heads = attend.source.unwrap();
    assert!(heads.norms.iter().all(Option::is_some) && heads.rope.is_some_and(|turn| turn.dims == 32));
}

#[test]
fn heads_that_do_not_turn_are_attended_to_as_they_are() {
    let mut w = Writer::new(DType::Q8_0);
    let x = w.embed();
    w.layer(0);
    let normed = w.norm(x);
    let qkv = w.qkv(normed);
    let attended = w.attend(None, qkv);
    w.push_project(attended, x, true);
    let found = bound(&w.head(x), 8);
    // Queries have their own plane; keys and values are adjacent.
    let layer = ["norm", "products", "products", "heads", "attend", "products"];
    assert_eq!(names(&found.parts[1]), layer);
    let Work::Heads(heads) = &found.parts[1].units[3].work else { panic!() };
    assert_eq!((heads.queries, heads.rope), (None, None));
}

/// Rotated keys with another reader stay in a plane, and are copied to the store's input.
#[test]
fn keys_that_are_read_again_are_kept() {
    let mut w = Writer::new(DType::F16);
    let x = w.embed();
    let rope = w.rope(HEAD_DIM);
    w.layer(0);
    let normed = w.norm(x);
    let [q, k, v] = w.qkv(normed);
    let attended = w.attend(Some(rope), [q, k, v]);
    w.push_project(attended, x, true);
    w.push_project(k, x, true);
    let found = bound(&w.head(x), 8);
    let names = names(&found.parts[1]);
    assert_eq!(names.iter().filter(|name| **name == "heads").count(), 3, "{names:?}");
    assert!(names.contains(&"add"), "{names:?}");
}

/// Attention and the feed-forward layer read one norm, which makes all forms before the first of them.
#[test]
fn blocks_side_by_side_read_one_norm() {
    let mut w = Writer::new(DType::Q4_K);
    let x = w.embed();
    let rope = w.rope(HEAD_DIM);
    w.layer(0);
    let normed = w.norm(x);
    let qkv = w.qkv(normed);
    let attended = w.attend(Some(rope), qkv);
    w.push_project(attended, x, true);
    let up = w.project(normed, FFN);
    let out = w.builder.value(FFN);
    w.builder.push(Op::Activate { activation: Activation::Gelu, from: up, out });
    w.push_project(out, x, true);
    let found = bound(&w.head(x), 8);
    let layer = ["norm", "products", "attend", "products", "products", "gate", "products"];
    assert_eq!(names(&found.parts[1]), layer);
    let forms: Vec<Home> = found.parts[1]
        .units
        .iter()
        .filter_map(|unit| match &unit.work {
            Work::Products(products) if products.matrices[0].cols == HIDDEN as u32 && !products.add => {
                Some(products.from)
            }
            _ => None,
        })
        .collect();
    assert!(forms.len() == 2 && forms[0] == forms[1], "{forms:?}");
}

#[test]
fn experts_read_the_form_that_their_type_wants_beside_the_routers() {
    let mut w = Writer::new(DType::Q8_0);
    let x = w.embed();
    w.layer(0);
    let normed = w.norm(x);
    w.dtype = DType::F32;
    let logits = w.project(normed, 6);
    w.dtype = DType::Q8_0;
    let choice = w.builder.choice(2);
    w.builder.push(Op::Route {
        logits,
        gating: Gating::Softmax,
        bias: None,
        groups: None,
        normalise: true,
        scale: 1.0,
        out: choice,
    });
    let first = w.builder.next_tensor();
    for _ in 0..6 {
        for [rows, cols] in [[64, HIDDEN], [64, HIDDEN], [HIDDEN, 64]] {
            let lazy = w.lazy(DType::Q8_0, rows, cols);
            w.builder.tensor(lazy, Residence::Chosen);
        }
    }
    let experts = ExpertRange { first, count: 6, gated: true };
    w.builder.push(Op::Experts {
        experts,
        factors: [None; 3],
        biases: None,
        choice,
        activation: Activation::Silu,
        from: normed,
        out: x,
    });
    let found = bound(&w.head(x), 100);
    let part = &found.parts[1];
    assert_eq!(names(part), ["route", "experts"]);
    let Work::Route(route) = &part.units[0].work else { panic!() };
    let norm = route.router.as_ref().unwrap().norm;
    assert!(norm.out.float.is_some() && norm.out.a8.is_some() && norm.out.half.is_none());
    assert_eq!((route.sets.as_slice(), part.operands.len()), (&[0][..], 2));
    assert_eq!(part.experts[0].ffn, 64);
}

/// A decoder with latent attention: 4 heads of 96 values and some more, of which 32 are rotated; a latent vector of 288.
fn latent(more: usize) -> Program {
    let mut w = Writer::new(DType::F16);
    let x = w.embed();
    let rope = w.rope(32);
    w.layer(0);
    let normed = w.norm(x);
    let (plain, rank) = (64 + more, 288);
    let query = w.project(normed, HEADS * (plain + 32));
    let [latent, key] = [rank, 32].map(|width| w.project(normed, width));
    let head_dim = (plain + 32) as u32;
    let [plain_part, turned] =
        [(0, plain as u32), (plain as u32, 32)].map(|(first, width)| HeadPart { head_dim, first, width });
    let project = |w: &mut Writer, from, part: HeadPart, outputs: usize| {
        let weight = w.matrix(HEADS * outputs, part.width as usize);
        let out = w.builder.value(HEADS * outputs);
        w.builder.push(Op::ProjectHeads { weight, from, part, out });
        out
    };
    let of_latent = project(&mut w, query, plain_part, rank);
    let whole = HeadPart::whole(rank as u32);
    let join = |w: &mut Writer, heads: usize, [(first, first_part), (second, second_part)]: [_; 2]| {
        let out = w.builder.value(heads * (32 + rank));
        w.builder.push(Op::JoinHeads { first, first_part, second, second_part, out });
        out
    };
    let q = join(&mut w, HEADS, [(query, turned), (of_latent, whole)]);
    let k = join(&mut w, 1, [(key, HeadPart::whole(32)), (latent, whole)]);
    let stored = (32 + rank) as u32;
    for value in [q, k] {
        w.builder.push(Op::Rope { rope, head_dim: stored, value });
    }
    let state = w.builder.state(State::Kv { heads: 1, head_dim: stored });
    w.builder.push(Op::Store { state, keys: k, values: k });
    let attended = w.builder.value(HEADS * stored as usize);
    let (window, cap, alibi, sinks, both_ways) = (None, None, false, None, false);
    let (scale, queries, out) = (0.125, q, attended);
    w.builder.push(Op::Attend { state, queries, scale, window, both_ways, cap, alibi, sinks, out });
    let part = HeadPart { head_dim: stored, first: 32, width: rank as u32 };
    let values = project(&mut w, attended, part, 16);
    w.push_project(values, x, true);
    w.head(x)
}

#[test]
fn latent_attention_is_products_and_joins_of_heads() {
    let found = bound(&latent(0), 100);
    let layer = names(&found.parts[1]);
    let count = |name: &str| layer.iter().filter(|unit| **unit == name).count();
    assert_eq!((count("project heads"), count("join heads"), count("attend")), (2, 2, 1), "{layer:?}");
    let attend = found.parts[1].units.iter().find_map(|unit| match &unit.work {
        Work::Attend(attend) => Some(*attend),
        _ => None,
    });
    // Heads of 320 values have kernels of their own, which take no heads that are not made, and no tiles.
    let attend = attend.unwrap();
    assert!((attend.head_dim, attend.source, found.group_max) == (320, None, 0), "{attend:?}");
    let products = found.parts[1].units.iter().filter_map(|unit| match &unit.work {
        Work::ProjectHeads(products) => Some((products.heads, products.outputs, products.from.rows.column)),
        _ => None,
    });
    assert_eq!(products.collect::<Vec<_>>(), [(4, 288, 0), (4, 16, 32)]);
}

#[test]
fn operations_without_a_kernel_are_refused_by_name() {
    let refused = |program: &Program| refuse(program).map(|error| error.to_string()).unwrap_or_default();
    assert_eq!(refused(&llama(DType::Q4_K, 1)), "");
    let text = refused(&llama(DType::Q8_K, 1));
    assert!(text.contains("a test's") && text.contains("Q8_K"), "{text}");
    let mut w = Writer::new(DType::F16);
    let x = w.embed();
    let rope = w.rope(HEAD_DIM);
    w.layer(0);
    let wide = w.project(x, 640);
    w.builder.push(Op::Rope { rope, head_dim: 640, value: wide });
    w.push_project(wide, x, true);
    let text = refused(&w.head(x));
    assert_eq!(text, "the hip backend cannot run attention of heads of 640 values");
    assert_eq!(
        refused(&latent(2)),
        "the hip backend cannot run products of heads of 98 values, of which the part begins at 0"
    );
    let mut w = Writer::new(DType::F16);
    let x = w.embed();
    w.layer(0);
    let qkv = w.qkv(x);
    let attended = w.attend_with(None, qkv, true);
    w.push_project(attended, x, true);
    assert_eq!(
        refused(&w.head(x)),
        "the hip backend cannot run attention to earlier tokens whose scores fall with the distance (ALiBi)"
    );
    // A gate over two products, and one over a value that others read too.
    for shared in [false, true] {
        let mut w = Writer::new(DType::F16);
        let x = w.embed();
        w.layer(0);
        let [gate, up] = [HIDDEN; 2].map(|rows| w.project(x, rows));
        let (activation, out) = (Activation::Clamped, w.builder.value(HIDDEN));
        w.builder.push(Op::Gate { activation, gate, up, out });
        w.builder.push(Op::Add { from: if shared { gate } else { out }, scale: 1.0, out: x });
        assert_eq!(refused(&w.head(x)), "the hip backend cannot run a clamped gate outside experts");
    }
}
