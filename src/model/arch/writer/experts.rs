//! Writes the experts of a layer.

use super::{Presence, Want, Writer};
use crate::model::arch::experts::Experts;
use crate::program::{Activation, ExpertRange, Op, Residence, TensorId, ValueId};

impl Writer<'_> {
    /// Adds the weighted sum of a layer's experts to `out`. Cuts the tensors of each role into one per expert.
    pub fn experts(&mut self, experts: &Experts, from: ValueId, out: ValueId) {
        let logits = self.project("router", "ffn_gate_inp", from, experts.count, experts.biases);
        let want = Want::Vector(experts.count);
        let bias = self.present("bias of experts' chances", "exp_probs_b.bias", want, experts.bias);
        let choice = self.program.choice(experts.used);
        self.program.push(Op::Route {
            logits,
            gating: experts.gating,
            bias,
            groups: experts.groups,
            normalise: experts.normalise,
            scale: experts.scale,
            out: choice,
        });
        let hidden = self.program.width(from);
        let biases = self.expert_biases(experts, hidden);
        let factors = self.expert_factors(experts);
        let found = experts.find(&mut self.tensors, &self.prefix, hidden);
        let first = self.program.next_tensor();
        for tensor in found.into_iter().flatten() {
            self.put(Some(tensor), Residence::Chosen);
        }
        let &Experts { activation, gated, .. } = experts;
        let experts = ExpertRange { first, count: experts.count as u32, gated }; // at most EXPERTS_MAX
        self.program.push(Op::Experts { experts, factors, biases, choice, activation, from, out });
    }

    /// Biases of gate, up and down of all experts, if files have them.
    fn expert_biases(&mut self, experts: &Experts, hidden: usize) -> Option<[TensorId; 3]> {
        let mut of = |role, stem: &str, len| {
            let want = Want::Vectors { count: experts.count, len };
            self.present(role, &format!("{stem}.bias"), want, experts.biases)
        };
        let gate = of("biases of expert gates", "ffn_gate_exps", experts.ffn);
        let up = of("biases of expert up projections", "ffn_up_exps", experts.ffn);
        let down = of("biases of expert down projections", "ffn_down_exps", hidden);
        Some([gate?, up?, down?])
    }

    /// Factors of all experts' gates, ups and downs, `STEM.scale`, as files with NVFP4 weights have them. `STEM.input_scale` is for
    /// activations in NVFP4.
    fn expert_factors(&mut self, experts: &Experts) -> [Option<TensorId>; 3] {
        let stems = [
            ("factors of expert gates", "ffn_gate_exps", experts.gated),
            ("factors of expert up projections", "ffn_up_exps", true),
            ("factors of expert down projections", "ffn_down_exps", true),
        ];
        stems.map(|(role, stem, there)| {
            self.tensors.unused(&self.name(&format!("{stem}.input_scale")));
            let presence = if there { Presence::Optional } else { Presence::Never };
            self.present(role, &format!("{stem}.scale"), Want::Vector(experts.count), presence)
        })
    }

    /// The expert that all rows share, of width `ffn`.
    pub fn shared_expert(&mut self, from: ValueId, ffn: usize) -> ValueId {
        let gate = self.project("shared expert's gate", "ffn_gate_shexp", from, ffn, Presence::Never);
        let up = self.project("shared expert's up projection", "ffn_up_shexp", from, ffn, Presence::Never);
        let gated = self.gate(Activation::Silu, gate, up);
        let hidden = self.program.width(from);
        self.project("shared expert's down projection", "ffn_down_shexp", gated, hidden, Presence::Never)
    }

    /// As [`Writer::shared_expert`], with squared ReLU and no gate.
    pub fn shared_expert_without_gate(&mut self, from: ValueId, ffn: usize) -> ValueId {
        let up = self.project("shared expert's up projection", "ffn_up_shexp", from, ffn, Presence::Never);
        let active = self.activate(Activation::SquaredRelu, up);
        let hidden = self.program.width(from);
        self.project("shared expert's down projection", "ffn_down_shexp", active, hidden, Presence::Never)
    }

    /// Adds the weighted sum of a layer's experts to `x`, and the output of one of width `shared` for all rows.
    pub fn experts_and_shared(&mut self, experts: &Experts, from: ValueId, shared: usize, x: ValueId) {
        self.experts(experts, from, x);
        let out = self.shared_expert(from, shared);
        self.add(out, 1.0, x);
    }
}
