//! A router in one launch, against the launches that it stands for: to the bit.

use rocmforge::backend::hip::kernels::experts::{ROUTER_EXPERTS, Route, Router};
use rocmforge::backend::hip::kernels::matmul::{GemvF32, choice};
use rocmforge::backend::hip::kernels::ops::{NormA8, NormF32};
use rocmforge::backend::hip::{DevicePtr, Grid};
use rocmforge::tensor::DType;

use crate::random::Random;
use crate::rig::rig;

const EPS: f32 = 1e-5;

#[test]
fn a_router_is_a_norm_a_product_and_a_choice() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (rows, cols, count, used, normalise, sigmoid, biased) in [
        (1, 4, 1, 1, true, false, false),
        (3, 36, 9, 2, false, false, true),
        (1, 2048, 128, 8, true, false, false),
        (8, 260, 60, 4, true, true, true),
        (2, 4092, 33, 3, true, false, false),
        (1, 4096, 512, 8, false, true, false),
    ] {
        let padded = usize::next_multiple_of(cols, 256);
        let (x, gain) = (rig.upload(&random.normals(rows * cols)), rig.upload(&random.normals(cols)));
        let w = rig.upload(&random.normals(count * cols));
        let added = [(); 2].map(|()| rig.upload(&random.normals(count)));
        let added = [0, 1].map(|i| if biased { added[i].ptr() } else { DevicePtr::NULL });
        // The last of several rows is padding; every fifth expert is absent.
        let last = rows as u32 - 1;
        let sequences: Vec<u32> =
            (0..rows as u32).map(|row| if row == last && row > 0 { u32::MAX } else { row }).collect();
        let addresses: Vec<u64> =
            (0..count as u64).map(|expert| if expert % 5 == 4 { 0 } else { 256 }).collect();
        let (row_seq, table) = (rig.upload(&sequences), rig.upload(&addresses));
        let [rows32, cols32, count32, used32] = [rows, cols, count, used].map(|size| size as u32);
        let outputs = [(); 2].map(|()| {
            (
                rig.output::<i8>(rows * padded),
                rig.output::<f32>(rows * padded / 32),
                rig.output::<i16>(rows * padded / 16),
                rig.output::<u32>(rows * used),
                rig.output::<f32>(rows * used),
                rig.upload(&[0u32]),
                rig.output::<f32>(rows * count),
            )
        });
        let (codes, scales, sums, experts, weights, absent, logits) = &outputs[0];
        let normed = rig.output::<f32>(rows * cols);
        let norm = NormA8 {
            x: x.ptr(),
            weight: gain.ptr(),
            bias: DevicePtr::NULL,
            rows: DevicePtr::NULL,
            codes: codes.ptr(),
            scales: scales.ptr(),
            sums: sums.ptr(),
            also: DevicePtr::NULL,
            eps: EPS,
            cols: cols32,
            padded: padded as u32,
            centre: 0,
            also_stride: 0,
        };
        let grid = Grid::x(rows32);
        rig.device.launch(&rig.stream, NormA8::norm_a8, grid, &norm).unwrap();
        let norm = NormF32 {
            x: x.ptr(),
            weight: gain.ptr(),
            bias: DevicePtr::NULL,
            rows: DevicePtr::NULL,
            out: normed.ptr(),
            eps: EPS,
            cols: cols32,
            x_stride: cols32,
            out_stride: cols32,
            centre: 0,
            add: 0,
        };
        rig.device.launch(&rig.stream, NormF32::norm_f32, grid, &norm).unwrap();
        let product = GemvF32 {
            w0: w.ptr(),
            w1: DevicePtr::NULL,
            w2: DevicePtr::NULL,
            n0: count32,
            n1: 0,
            n2: 0,
            bias0: added[0],
            bias1: DevicePtr::NULL,
            bias2: DevicePtr::NULL,
            cols: cols32,
            x: normed.ptr(),
            x_stride: cols32,
            rows: rows32,
            out: logits.ptr(),
            out_stride: count32,
            add: 0,
        };
        let chosen = choice::gemv_f32_of(DType::F32, [count32, 0, 0], rows32).unwrap();
        let grid = choice::gemv_grid([count32, 0, 0], rows32, chosen.columns);
        rig.device.launch(&rig.stream, chosen.kernel, grid, &product).unwrap();
        let route = Route {
            logits: logits.ptr(),
            bias: added[1],
            row_seq: row_seq.ptr(),
            table: table.ptr(),
            experts: experts.ptr(),
            weights: weights.ptr(),
            absent: absent.ptr(),
            scale: 1.5,
            rows: rows32,
            count: count32,
            used: used32,
            normalise: u32::from(normalise),
            sigmoid: u32::from(sigmoid),
        };
        rig.device.launch(&rig.stream, Route::route, Grid::x(rows32), &route).unwrap();

        let (codes, scales, sums, experts, weights, absent, logits) = &outputs[1];
        let counters = rig.upload(&vec![0u32; rows]);
        let router = Router {
            x: x.ptr(),
            gain: gain.ptr(),
            w: w.ptr(),
            w_bias: added[0],
            codes: codes.ptr(),
            scales: scales.ptr(),
            sums: sums.ptr(),
            logits: logits.ptr(),
            counters: counters.ptr(),
            bias: added[1],
            row_seq: row_seq.ptr(),
            table: table.ptr(),
            experts: experts.ptr(),
            weights: weights.ptr(),
            absent: absent.ptr(),
            eps: EPS,
            scale: 1.5,
            cols: cols32,
            padded: padded as u32,
            count: count32,
            used: used32,
            normalise: u32::from(normalise),
            sigmoid: u32::from(sigmoid),
        };
        let grid = Grid::xy(count32.div_ceil(ROUTER_EXPERTS), rows32);
        for _ in 0..2 {
            // Launched twice: the counters must be 0 again.
            rig.device.launch(&rig.stream, Router::router, grid, &router).unwrap();
        }
        assert!(rig.download::<u32>(&counters).iter().all(|&count| count == 0));
        let [want, got] = [0, 1].map(|i| {
            let (codes, scales, sums, experts, weights, absent, logits) = &outputs[i];
            let bits = [scales, weights, logits].map(|floats| rig.download::<u32>(floats));
            let whole = [experts, absent].map(|words| rig.download::<u32>(words));
            (rig.download::<i8>(codes), rig.download::<i16>(sums), bits, whole)
        });
        assert!(got == want, "{rows} rows, {cols} columns, {count} experts");
    }
}
