//! Matmuls of an 8B model on a GPU, without the engine: time per step, and the share of the device's read rate.
//!
//! `cargo bench --bench hip_matmul -- [--layers N] [--rows M]... [--prefill M]... [--replays N] [--device I] [--of-wave]
//! [--json] [TYPE...]`
//!
//! Every tensor of every layer has its own memory, so caches help no more than in a real model. One captured graph
//! holds a step's launches, as in decode; the median of its replays counts. `parts` are graphs of one of the step's
//! launches, for all layers; gate+up is without its activation where that is another launch. The read rate is
//! `probe_read` over the same memory in the same run. Prefill converts the weights to f16 and multiplies, uncaptured;
//! `--prefill 0` skips it. Results are not checked here: tests/kernels does that. With `--json`, each value is also
//! printed as a line `measured {...}` for programs. `--of-wave` takes the kernels of a wave's matrix unit on a device that has one
//! across waves too.
//!
//! Without `--bench`, as `cargo test --benches` runs it, or without a working runtime, it says so and ends.

use rocmforge::backend::ActivationType;
use rocmforge::backend::hip::kernels::MatrixUnit;
use rocmforge::backend::hip::kernels::matmul::{
    Dequant, GemmF16, GemmQuant, GemmWide, GemvA8, GemvF32, GemvGatedA8, GemvGatedF32, choice, planes::planes,
};
use rocmforge::backend::hip::kernels::ops::SILU;
use rocmforge::backend::hip::kernels::probe::ProbeRead;
use rocmforge::backend::hip::kernels::thresholds::{self, Family, Order};
use rocmforge::backend::hip::{
    ArenaOptions, Buffer, Device, DeviceOptions, DevicePtr, Grid, HipError, Purpose, Runtime, Stream,
    StreamPriority,
};
use rocmforge::tensor::DType;
use serde_json::json;

use options::{Options, options};

mod options;

const HIDDEN: u32 = 4096;
const KV: u32 = 1024;
const FFN: u32 = 14336;
const VOCAB: u32 = 128_256;

fn main() -> Result<(), String> {
    let Some(options) = options()? else {
        println!("hip_matmul: measures only under `cargo bench`");
        return Ok(());
    };
    let runtime = match Runtime::find() {
        Ok(runtime) => runtime,
        Err(error) => {
            println!("hip_matmul: {error}");
            return Ok(());
        }
    };
    run(&runtime, &options).map_err(|error| error.to_string())
}

fn run(runtime: &Runtime, options: &Options) -> Result<(), HipError> {
    let device_options =
        DeviceOptions { index: options.device, arena: ArenaOptions::default(), ..DeviceOptions::default() };
    let device = Device::open(runtime, &device_options)?;
    let description = device.description();
    println!(
        "hip, {} ({}), runtime {}, {}, graphs replayed {} times",
        description.name,
        device.code(),
        runtime.version(),
        runtime.path().display(),
        options.replays
    );
    let place = format!("{} at {}", description.name, description.pci);
    measured(options.json, json!({ "what": "device", "device": place }));
    for &dtype in &options.dtypes {
        let model = Model::new(device.clone(), dtype, options)?;
        let ceiling = model.read_rate()?;
        println!("{dtype}: {:.2} GB of weights, read at {ceiling:.0} GB/s", model.bytes() / 1e9);
        let read =
            json!({ "what": "memory", "type": dtype.name(), "gb": model.bytes() / 1e9, "gb_s": ceiling });
        measured(options.json, read);
        for &rows in &options.rows {
            model.report(
                "step",
                rows,
                &[Part::Qkv, Part::Output, Part::GateUp, Part::Down],
                true,
                ceiling,
            )?;
            for (name, part) in [
                ("qkv", Part::Qkv),
                ("output", Part::Output),
                ("gate+up", Part::GateUp),
                ("down", Part::Down),
            ] {
                model.report(name, rows, &[part], false, ceiling)?;
            }
        }
        for &rows in &options.prefill {
            model.prefill(rows)?;
        }
    }
    Ok(())
}

/// Prints a JSON line for programs.
fn measured(json: bool, value: serde_json::Value) {
    if json {
        println!("measured {value}");
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Qkv,
    Output,
    GateUp,
    Down,
}

struct Layer {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    output: Buffer,
    gate: Buffer,
    up: Buffer,
    down: Buffer,
}

struct Model {
    device: Device,
    stream: Stream,
    dtype: DType,
    layers: Vec<Layer>,
    head: Buffer,
    /// Scratch memory: activations in all forms, and all other outputs.
    scratch: Buffer,
    slab: Buffer,
    /// Sums of products that are split, and how many of a tile's splits have ended.
    parts: Buffer,
    counters: Buffer,
    unit: MatrixUnit,
    replays: usize,
    json: bool,
}

fn size(dtype: DType, rows: u32, cols: u32) -> usize {
    planes(dtype, u64::from(rows), u64::from(cols)).map_or(0, |p| p.bytes as usize)
}

impl Model {
    fn new(device: Device, dtype: DType, options: &Options) -> Result<Self, HipError> {
        let stream = device.stream(StreamPriority::High)?;
        // Bits from xorshift64*: to the memory, as random as weights. Without three of each half's bits, scales are as small
        // as a model's: products of large ones are decoded in a slower way.
        const SMALL: u64 = 0x8fff_8fff_8fff_8fff;
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let noise: Vec<u64> = (0..1 << 21)
            .map(|_| {
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                state.wrapping_mul(0x2545_f491_4f6c_dd1d) & SMALL
            })
            .collect();
        let source = device.take(size_of_val(&noise[..]), Purpose::Scratch)?;
        stream.upload(source.all(), &noise[..])?;
        let tensor = |rows: u32, cols: u32| -> Result<Buffer, HipError> {
            let buffer = device.take(size(dtype, rows, cols), Purpose::Weights)?;
            for start in (0..buffer.len()).step_by(source.len()) {
                let bytes = source.len().min(buffer.len() - start);
                stream.copy(buffer.range(start, bytes)?, source.range(0, bytes)?)?;
            }
            Ok(buffer)
        };
        let mut layers = Vec::new();
        for _ in 0..options.layers {
            layers.push(Layer {
                q: tensor(HIDDEN, HIDDEN)?,
                k: tensor(KV, HIDDEN)?,
                v: tensor(KV, HIDDEN)?,
                output: tensor(HIDDEN, HIDDEN)?,
                gate: tensor(FFN, HIDDEN)?,
                up: tensor(FFN, HIDDEN)?,
                down: tensor(HIDDEN, FFN)?,
            });
        }
        let head = tensor(VOCAB, HIDDEN)?;
        let most = options.rows.iter().chain(&options.prefill).copied().max().unwrap_or(1) as usize;
        // Room for inputs and outputs of the widest kind: f32 rows of a feed-forward layer, twice, and a few rows of
        // the head.
        let wide = most * FFN as usize * 8;
        let few = options.rows.iter().copied().max().unwrap_or(1) as usize * VOCAB as usize * 4;
        let scratch = device.take(wide.max(few) * 2, Purpose::Scratch)?;
        stream.fill(scratch.all(), 0)?;
        let slab = device.take(FFN as usize * HIDDEN as usize * 2, Purpose::Scratch)?;
        let unit = if options.of_wave { MatrixUnit::OfWave } else { device.unit() };
        let order = Order::ByRows;
        let shapes = [(HIDDEN, HIDDEN), (KV, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN), (VOCAB, HIDDEN)];
        let sums = shapes.into_iter().map(|(n, cols)| choice::gemm_sums(n, cols)).max().unwrap_or(0);
        let parts = device.take(choice::gemm_parts(unit, order, sums, most).max(256), Purpose::Scratch)?;
        let counters = device.take(4 * choice::gemm_counters(order, most), Purpose::Scratch)?;
        stream.fill(counters.all(), 0)?;
        stream.synchronize()?;
        let (replays, json) = (options.replays, options.json);
        Ok(Self { device, stream, dtype, layers, head, scratch, slab, parts, counters, unit, replays, json })
    }

    fn layer_tensors(layer: &Layer) -> [&Buffer; 7] {
        [&layer.q, &layer.k, &layer.v, &layer.output, &layer.gate, &layer.up, &layer.down]
    }

    fn bytes(&self) -> f64 {
        let layers: usize = self.layers.iter().flat_map(Self::layer_tensors).map(Buffer::len).sum();
        (layers + self.head.len()) as f64
    }

    /// Inputs lie in the first half of the scratch memory, outputs in the second.
    fn input<T>(&self) -> DevicePtr<T> {
        self.scratch.ptr()
    }

    fn output<T>(&self) -> Result<DevicePtr<T>, HipError> {
        self.scratch.ptr_at(self.scratch.len() / 2)
    }

    /// The family of a step of so many rows.
    fn family(&self, rows: u32) -> Family {
        let thresholds = thresholds::of(self.unit, Order::ByRows);
        thresholds::family(thresholds, ActivationType::Int8, self.dtype, rows as usize, HIDDEN)
    }

    fn wide(&self, rows: u32) -> Option<choice::Columns<GemmWide>> {
        let is_wide = self.family(rows) == Family::GemmWide;
        is_wide.then(|| choice::gemm_wide(self.dtype, self.dtype, rows))?
    }

    fn of_wave(&self, rows: u32) -> Option<choice::Columns<GemmQuant>> {
        let is_of_wave = self.family(rows) == Family::GemmQuant;
        is_of_wave.then(|| choice::gemm_quant(self.dtype, self.dtype, rows))?
    }

    fn gemv(
        &self,
        w: [Option<&Buffer>; 3],
        n: [u32; 3],
        cols: u32,
        rows: u32,
        add: u32,
    ) -> Result<(), HipError> {
        let [w0, w1, w2] = w.map(|w| w.map_or(DevicePtr::NULL, Buffer::ptr));
        let ([n0, n1, n2], out) = (n, self.output()?);
        let (bias0, bias1, bias2) = (DevicePtr::NULL, DevicePtr::NULL, DevicePtr::NULL);
        let out_stride = n0 + n1 + n2;
        if let Some(chosen) = self.wide(rows) {
            let arguments = GemmWide {
                w0,
                w1,
                w2,
                n0,
                n1,
                n2,
                bias0,
                bias1,
                bias2,
                cols,
                x: self.input(),
                x_scale: self.input(),
                rows,
                out,
                out_stride,
                add,
                parts: self.parts.ptr(),
                counters: self.counters.ptr(),
            };
            let grid = choice::gemm_wide_grid(n, cols, rows, chosen.columns, Order::ByRows);
            return self.device.launch(&self.stream, chosen.kernel, grid, &arguments);
        }
        if let Some(chosen) = self.of_wave(rows) {
            let arguments = GemmQuant {
                w0,
                w1,
                w2,
                n0,
                n1,
                n2,
                bias0,
                bias1,
                bias2,
                cols,
                x: self.input(),
                x_stride: cols,
                x_scale: self.input(),
                rows,
                out,
                out_stride,
                add,
                parts: self.parts.ptr(),
                counters: self.counters.ptr(),
            };
            let grid = choice::gemm_quant_grid(n, cols, rows, chosen.columns);
            return self.device.launch(&self.stream, chosen.kernel, grid, &arguments);
        }
        if let Some(chosen) = choice::gemv_a8(self.dtype, self.dtype, rows) {
            let (codes, scales, sums) = (self.input(), self.input(), self.input());
            let arguments = GemvA8 {
                w0,
                w1,
                w2,
                n0,
                n1,
                n2,
                bias0,
                bias1,
                bias2,
                cols,
                codes,
                scales,
                sums,
                rows,
                out,
                out_stride,
                add,
            };
            let grid = choice::gemv_grid(n, rows, chosen.columns);
            return self.device.launch(&self.stream, chosen.kernel, grid, &arguments);
        }
        let Some(chosen) = choice::gemv_f32(self.dtype, rows) else { return Ok(()) };
        let arguments = GemvF32 {
            w0,
            w1,
            w2,
            n0,
            n1,
            n2,
            bias0,
            bias1,
            bias2,
            cols,
            x: self.input(),
            x_stride: cols,
            rows,
            out,
            out_stride,
            add,
        };
        let grid = choice::gemv_grid(n, rows, chosen.columns);
        self.device.launch(&self.stream, chosen.kernel, grid, &arguments)
    }

    fn gated(&self, layer: &Layer, rows: u32) -> Result<(), HipError> {
        if self.wide(rows).is_some() || self.of_wave(rows).is_some() {
            return self.gemv([Some(&layer.gate), Some(&layer.up), None], [FFN, FFN, 0], HIDDEN, rows, 0);
        }
        let (gate, up, n, cols) = (layer.gate.ptr(), layer.up.ptr(), FFN, HIDDEN);
        let (gate_bias, up_bias) = (DevicePtr::NULL, DevicePtr::NULL);
        let (out_codes, out_scales, out_sums) = (self.output()?, self.output()?, self.output()?);
        if let Some(chosen) = choice::gated_a8(self.dtype, rows) {
            let (codes, scales, sums) = (self.input(), self.input(), self.input());
            let arguments = GemvGatedA8 {
                gate,
                up,
                n,
                gate_bias,
                up_bias,
                cols,
                codes,
                scales,
                sums,
                rows,
                activation: SILU,
                out_codes,
                out_scales,
                out_sums,
                out: DevicePtr::NULL,
            };
            let grid = choice::gated_grid(n, rows, chosen.columns);
            return self.device.launch(&self.stream, chosen.kernel, grid, &arguments);
        }
        let Some(chosen) = choice::gated_f32(self.dtype, rows) else { return Ok(()) };
        let arguments = GemvGatedF32 {
            gate,
            up,
            n,
            gate_bias,
            up_bias,
            cols,
            x: self.input(),
            x_stride: cols,
            rows,
            activation: SILU,
            out_codes,
            out_scales,
            out_sums,
            out: self.output()?,
        };
        let grid = choice::gated_grid(n, rows, chosen.columns);
        self.device.launch(&self.stream, chosen.kernel, grid, &arguments)
    }

    fn part(&self, layer: &Layer, part: Part, rows: u32) -> Result<(), HipError> {
        match part {
            Part::Qkv => {
                let w = [Some(&layer.q), Some(&layer.k), Some(&layer.v)];
                self.gemv(w, [HIDDEN, KV, KV], HIDDEN, rows, 0)
            }
            Part::Output => self.gemv([Some(&layer.output), None, None], [HIDDEN, 0, 0], HIDDEN, rows, 1),
            Part::GateUp => self.gated(layer, rows),
            Part::Down => self.gemv([Some(&layer.down), None, None], [HIDDEN, 0, 0], FFN, rows, 1),
        }
    }

    /// Weight bytes of a part of a layer.
    fn part_bytes(layer: &Layer, part: Part) -> usize {
        match part {
            Part::Qkv => layer.q.len() + layer.k.len() + layer.v.len(),
            Part::Output => layer.output.len(),
            Part::GateUp => layer.gate.len() + layer.up.len(),
            Part::Down => layer.down.len(),
        }
    }

    fn report(
        &self,
        name: &str,
        rows: u32,
        parts: &[Part],
        head: bool,
        ceiling: f64,
    ) -> Result<(), HipError> {
        let graph = self.stream.capture(|| -> Result<(), HipError> {
            for layer in &self.layers {
                for &part in parts {
                    self.part(layer, part, rows)?;
                }
            }
            if head {
                self.gemv([Some(&self.head), None, None], [VOCAB, 0, 0], HIDDEN, rows, 0)?;
            }
            Ok(())
        })?;
        let exec = graph.instantiate()?;
        let milliseconds = self.median(self.replays, || exec.launch(&self.stream))?;
        let layers: usize = self
            .layers
            .iter()
            .flat_map(|layer| parts.iter().map(move |&part| Self::part_bytes(layer, part)))
            .sum();
        let bytes = layers + if head { self.head.len() } else { 0 };
        let rate = bytes as f64 / 1e6 / f64::from(milliseconds);
        println!(
            "  {name:8} M {rows:2}: {milliseconds:8.3} ms {rate:6.0} GB/s {:5.2} of reading{}",
            rate / ceiling,
            if head { format!(", {:.0} steps/s", 1000.0 / milliseconds) } else { String::new() }
        );
        measured(
            self.json,
            json!({
                "what": "decode", "type": self.dtype.name(), "launches": name, "rows": rows, "layers": self.layers.len(),
                "ms": milliseconds, "gb_s": rate, "of_reading": rate / ceiling,
            }),
        );
        Ok(())
    }

    fn median(&self, times: usize, mut work: impl FnMut() -> Result<(), HipError>) -> Result<f32, HipError> {
        let mut measured = Vec::new();
        let warm = times.min(3);
        for round in 0..times + warm {
            let (start, end) = (self.device.event(true)?, self.device.event(true)?);
            self.stream.record(&start)?;
            work()?;
            self.stream.record(&end)?;
            end.synchronize()?;
            if round >= warm {
                measured.push(end.milliseconds_since(&start)?);
            }
        }
        measured.sort_by(f32::total_cmp);
        Ok(measured[measured.len() / 2])
    }

    /// GB/s of reading each tensor once, all in one graph.
    fn read_rate(&self) -> Result<f64, HipError> {
        let graph = self.stream.capture(|| -> Result<(), HipError> {
            let tensors = self.layers.iter().flat_map(Self::layer_tensors).chain([&self.head]);
            for tensor in tensors.filter(|t| t.len() >= 16 << 20) {
                let arguments = ProbeRead {
                    input: tensor.ptr(),
                    output: self.output()?,
                    count: tensor.len() as u64 / 16,
                };
                self.device.launch(&self.stream, ProbeRead::probe_read, Grid::x(2048), &arguments)?;
            }
            Ok(())
        })?;
        let exec = graph.instantiate()?;
        let milliseconds = self.median(self.replays, || exec.launch(&self.stream))?;
        let tensors = self.layers.iter().flat_map(Self::layer_tensors).chain([&self.head]);
        let bytes: usize = tensors.map(Buffer::len).filter(|&len| len >= 16 << 20).sum();
        Ok(bytes as f64 / 1e6 / f64::from(milliseconds))
    }

    /// Multiplies `rows` rows with one tensor: converts it to f16 in slabs, then multiplies.
    fn product(&self, w: &Buffer, n: u32, cols: u32, rows: u32) -> Result<(), HipError> {
        let mut from: DevicePtr<u16> = w.ptr();
        if let Some(kernel) = choice::dequant(self.dtype) {
            let arguments = Dequant {
                planes: w.ptr(),
                weights: u64::from(n) * u64::from(cols),
                cols,
                first: 0,
                rows: n,
                out: self.slab.ptr(),
            };
            let groups = (n * (cols / 32)).div_ceil(256);
            self.device.launch(&self.stream, kernel, Grid::x(groups), &arguments)?;
            from = self.slab.ptr();
        }
        let arguments = GemmF16 {
            w: from,
            w_stride: cols,
            n,
            x: self.input(),
            x_stride: cols,
            x_scale: self.input(),
            k: cols,
            rows,
            out: self.output()?,
            out_stride: n,
            bias: DevicePtr::NULL,
            add: 0,
        };
        let (kernel, grid) = choice::gemm(n, rows);
        self.device.launch(&self.stream, kernel, grid, &arguments)
    }

    fn prefill(&self, rows: u32) -> Result<(), HipError> {
        let milliseconds = self.median(self.replays.min(5), || {
            for layer in &self.layers {
                for (w, n, cols) in [
                    (&layer.q, HIDDEN, HIDDEN),
                    (&layer.k, KV, HIDDEN),
                    (&layer.v, KV, HIDDEN),
                    (&layer.output, HIDDEN, HIDDEN),
                    (&layer.gate, FFN, HIDDEN),
                    (&layer.up, FFN, HIDDEN),
                    (&layer.down, HIDDEN, FFN),
                ] {
                    self.product(w, n, cols, rows)?;
                }
            }
            Ok(())
        })?;
        let per_layer = f64::from(HIDDEN) * f64::from(2 * HIDDEN + 2 * KV + 3 * FFN);
        let flops = 2.0 * f64::from(rows) * per_layer * self.layers.len() as f64;
        println!(
            "  prefill  M {rows}: {milliseconds:.1} ms, {:.0} TFLOP/s, {:.0} rows/s",
            flops / 1e9 / f64::from(milliseconds),
            1000.0 * f64::from(rows) / f64::from(milliseconds)
        );
        measured(
            self.json,
            json!({
                "what": "prefill", "type": self.dtype.name(), "rows": rows, "layers": self.layers.len(),
                "ms": milliseconds, "tflop_s": flops / 1e9 / f64::from(milliseconds),
            }),
        );
        Ok(())
    }
}
