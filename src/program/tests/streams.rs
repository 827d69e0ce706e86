//! Operations on streams and on the sizes of rows.

use super::{Rig, WIDTH, fault, refused};
use crate::program::{Op, ValueId};

#[test]
fn a_slice_lies_inside_its_input() {
    let slice = |first, width| {
        move |rig: &mut Rig| {
            let out = rig.builder.value(width);
            rig.builder.push(Op::Slice { from: rig.x, first, out });
        }
    };
    assert_eq!(fault(slice(0, WIDTH)), None);
    assert_eq!(fault(slice(3, 1)), None);
    for (first, width) in [(3, 2), (4, 1), (0, WIDTH + 1), (u32::MAX, 1)] {
        refused("must lie inside", slice(first, width));
    }
    refused("must not write its input", |rig| {
        rig.builder.push(Op::Slice { from: rig.x, first: 0, out: rig.x });
    });
}

#[test]
fn streams_divide_the_width_and_have_their_amounts() {
    let mix = |amounts: usize, width: usize| {
        move |rig: &mut Rig| {
            let (amounts, from) = (rig.project(amounts), rig.project(width));
            let out = rig.builder.value(width);
            rig.builder.push(Op::MixStreams { amounts, from, out });
        }
    };
    assert_eq!(fault(mix(9, 6)), None);
    assert_eq!(fault(mix(1, 5)), None);
    for (amounts, width) in [(4, 5), (5, 6), (8, 6), (16, 6)] {
        refused("with an amount for each pair", mix(amounts, width));
    }
    refused("their own input", |rig| {
        let (amounts, value) = (rig.project(4), rig.project(6));
        rig.builder.push(Op::MixStreams { amounts, from: value, out: value });
    });
    let add = |amounts: Option<usize>, first, width: usize| {
        move |rig: &mut Rig| {
            let (amounts, out) = (amounts.map(|amounts| rig.project(amounts)), rig.project(width));
            rig.builder.push(Op::AddToStreams { from: rig.x, amounts, first, out });
        }
    };
    assert_eq!(fault(add(Some(3), 2, 3 * WIDTH)), None);
    assert_eq!(fault(add(None, 0, WIDTH)), None);
    refused("as wide as what is added", add(None, 0, WIDTH + 1));
    refused("there are only 2 streams", add(None, 2, 2 * WIDTH));
    refused("an amount for each stream", add(Some(2), 0, 3 * WIDTH));
    refused("added to itself", |rig| {
        rig.builder.push(Op::AddToStreams { from: rig.x, amounts: None, first: 0, out: rig.x });
    });
}

#[test]
fn sizes_are_of_whole_groups_and_finite() {
    let rescale = |group, eps, like: fn(&mut Rig) -> Option<ValueId>| {
        move |rig: &mut Rig| {
            let (like, value) = (like(rig), rig.x);
            rig.builder.push(Op::Rescale { group, eps, like, value });
        }
    };
    assert_eq!(fault(rescale(2, 1e-6, |_| None)), None);
    assert_eq!(fault(rescale(4, 1e-30, |rig| Some(rig.project(7)))), None);
    for group in [0, 3, 8] {
        refused("must divide the width", rescale(group, 1e-6, |_| None));
    }
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused("must be above 0", rescale(2, eps, |_| None));
    }
    refused("to itself", rescale(4, 1e-6, |rig| Some(rig.x)));
    let sparsify = |width, deviations| {
        move |rig: &mut Rig| {
            let value = rig.project(width);
            rig.builder.push(Op::Sparsify { deviations, value });
        }
    };
    assert_eq!(fault(sparsify(2, -1.5)), None);
    refused("one value has no deviation", sparsify(1, 1.5));
    refused("must be finite", sparsify(2, f32::NEG_INFINITY));
    refused("must have shape", |rig| {
        let weight = rig.vector(WIDTH as u64 + 1);
        rig.builder.push(Op::Multiply { weight, value: rig.x });
    });
}
