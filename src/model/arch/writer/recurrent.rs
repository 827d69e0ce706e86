//! Writes the recurrent parts of layers.

use super::{Norm, Presence, Want, Writer};
use crate::model::arch::recurrent::{DeltaNet, Mamba};
use crate::program::{Activation, Op, State, TensorId, ValueId};

impl Writer<'_> {
    /// The convolution `STEM.weight` of the last `taps` rows, with the bias `STEM.bias` as `bias` demands.
    pub fn convolve(
        &mut self,
        stem: &str,
        taps: usize,
        bias: Presence,
        activation: Option<Activation>,
        from: ValueId,
    ) -> ValueId {
        let width = self.program.width(from);
        let want = Want::Vectors { count: width, len: taps };
        let weight = self.required("convolution", &format!("{stem}.weight"), want);
        let bias =
            self.present("bias of the convolution", &format!("{stem}.bias"), Want::Vector(width), bias);
        let state = self.recurrent_state((taps - 1) * width);
        let out = self.program.value(width);
        self.program.push(Op::Convolve { state, weight, bias, activation, from, out });
        out
    }

    /// Mamba 2, from its input projection to the gate. `convolved` and `normed` say whether files have the bias of the
    /// convolution and the norm behind the gate. Returns the input of the output projection.
    pub fn mamba(
        &mut self,
        of: &Mamba,
        norm: Norm,
        [convolved, normed]: [Presence; 2],
        from: ValueId,
    ) -> ValueId {
        let Mamba { width, heads, groups, columns, .. } = *of;
        let rows = [width, width + 2 * groups * columns, heads];
        let [z, mixed, steps] = self.project_pieces("recurrent input", "ssm_in", from, rows, Presence::Never);
        let mixed = self.convolve("ssm_conv1d", of.taps, convolved, Some(Activation::Silu), mixed);
        let step_bias = self.required("bias of steps", "ssm_dt.bias", Want::Vector(heads));
        let each = Want::Vectors { count: heads, len: 1 };
        let rate = self.required("decay of heads", "ssm_a", each);
        let skip = self.required("skips of heads", "ssm_d", each);
        let state = self.recurrent_state(width * columns);
        let out = self.program.value(width);
        let (heads, groups) = (heads as u32, groups as u32); // at most HEADS_MAX
        self.program.push(Op::SelectiveScan {
            state,
            heads,
            groups,
            from: mixed,
            steps,
            step_bias,
            rate,
            skip,
            out,
        });
        let gated = self.gate(Activation::Silu, z, out);
        let want = Want::Vectors { count: of.groups, len: width / of.groups };
        if let Some(weight) = self.present("norm of groups", "ssm_norm.weight", want, normed) {
            self.program.push(Op::Norm {
                kind: norm.kind,
                eps: norm.eps,
                weight,
                bias: None,
                from: gated,
                out: gated,
                add: false,
            });
        }
        gated
    }

    /// The gated delta rule and its norm, up to the gate. `decay` and `amount` have a number for each value head. Returns the
    /// input of the output projection.
    pub fn delta_net(
        &mut self,
        of: &DeltaNet,
        norm: Norm,
        from: ValueId,
        [decay, amount, gate]: [ValueId; 3],
    ) -> ValueId {
        let (heads, values) = (of.heads, of.heads.values as usize);
        let mixed = self.convolve("ssm_conv1d", of.taps, Presence::Never, Some(Activation::Silu), from);
        let decay_bias = self.required("bias of decays", "ssm_dt.bias", Want::Vector(values));
        let rate = self.required("decay of heads", "ssm_a", Want::Vector(values));
        let width = values * heads.value_dim as usize;
        let state = self.recurrent_state(width * heads.key_dim as usize);
        let out = self.program.value(width);
        let eps = norm.eps;
        self.program.push(Op::DeltaRule {
            state,
            heads,
            from: mixed,
            eps,
            decay,
            decay_bias,
            rate,
            amount,
            out,
        });
        self.norm_groups("norm of heads", "ssm_norm", norm, heads.value_dim as usize, out);
        self.gate(Activation::Silu, gate, out)
    }

    /// The norm `NAME`, a tensor that has no suffix.
    pub fn norm_named(&mut self, role: &'static str, name: &str, norm: Norm, from: ValueId) -> ValueId {
        let width = self.program.width(from);
        let weight: TensorId = self.required(role, name, Want::Vector(width));
        let out = self.program.value(width);
        self.program.push(Op::Norm {
            kind: norm.kind,
            eps: norm.eps,
            weight,
            bias: None,
            from,
            out,
            add: false,
        });
        out
    }

    fn recurrent_state(&mut self, values: usize) -> crate::program::StateId {
        // The limits of sizes keep it below 2^30; another number does not pass the program's check.
        self.program.state(State::Recurrent { values: u32::try_from(values).unwrap_or(u32::MAX) })
    }
}
