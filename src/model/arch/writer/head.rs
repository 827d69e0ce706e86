//! Writes the last part of a decoder: the wanted rows, their norm, and their logits.

use super::{Norm, Presence, Want, Writer};
use crate::program::{Op, PartKind, Residence, ValueId};

impl Writer<'_> {
    /// Writes the last part: the norm of the wanted rows and the logits. Uses the embedding where the file has no
    /// output matrix.
    pub fn head(&mut self, norm: Norm, x: ValueId) -> ValueId {
        self.head_with(norm, x, Presence::Optional, Presence::Never)
    }

    /// As [`Writer::head`], where files call the norm `STEM`.
    pub fn head_after(&mut self, stem: &str, norm: Norm, x: ValueId) -> ValueId {
        self.head_of(stem, norm, x, [Presence::Optional, Presence::Never])
    }

    /// As [`Writer::head`]; `output` and `bias` say whether files have the matrix and the bias.
    pub fn head_with(&mut self, norm: Norm, x: ValueId, output: Presence, bias: Presence) -> ValueId {
        self.head_of("output_norm", norm, x, [output, bias])
    }

    fn head_of(&mut self, stem: &str, norm: Norm, x: ValueId, has: [Presence; 2]) -> ValueId {
        let last = self.take(x);
        self.logits(stem, norm, last, has)
    }

    /// Begins the last part with the wanted rows of `x`.
    pub fn take(&mut self, x: ValueId) -> ValueId {
        self.program.part(PartKind::Head);
        self.prefix.clear();
        let last = self.program.wanted_value(self.program.width(x));
        self.program.push(Op::Take { from: x, out: last });
        last
    }

    /// The norm `STEM` of the wanted rows, and their logits. `output` and `bias` say whether files have the matrix, in
    /// whose place the embedding stands, and the bias.
    pub fn logits(
        &mut self,
        stem: &str,
        norm: Norm,
        last: ValueId,
        [output, bias]: [Presence; 2],
    ) -> ValueId {
        let hidden = self.program.width(last);
        let normed = self.program.wanted_value(hidden);
        let op = self.norm_op("output norm", stem, norm, hidden, last, normed);
        self.program.push(op);
        let want = Want::Matrix { rows: self.vocab, cols: hidden };
        let output = self.tensors.present("output", "output.weight", want, output);
        let output = output.or_else(|| self.embedding.clone());
        let weight = self.put(output, Residence::Device);
        let bias = self.present("output bias", "output.bias", Want::Vector(self.vocab), bias);
        let logits = self.program.wanted_value(self.vocab);
        let by = self.matrix_scale("output", "output", bias.is_some());
        self.push_scaled((weight, bias, by), normed, logits, false);
        logits
    }
}
