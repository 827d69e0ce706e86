//! Writes the ends of encoders: a norm after the last layer, and a classifier.

use super::{Norm, Want, Writer};
use crate::program::{Classifier, Linear, PartKind, Residence, ValueId};

impl Writer<'_> {
    /// The norm of an encoder's rows after its last layer, in place.
    pub fn norm_last(&mut self, norm: Norm, x: ValueId) {
        self.prefix.clear();
        self.norm_groups("output norm", "output_norm", norm, self.program.width(x), x);
    }

    /// Writes the last part of an encoder, which has no operations: its classifier, if the file has one.
    pub fn classifier(&mut self, hidden: usize) -> Option<Classifier> {
        self.program.part(PartKind::Head);
        self.prefix.clear();
        if !self.has("cls.output.weight") {
            return None;
        }
        let output = self.classifier_layer("classifier", "cls.output", 1, hidden);
        let dense = self.has("cls.weight");
        let dense = dense.then(|| self.classifier_layer("classifier's first layer", "cls", hidden, hidden));
        Some(Classifier { dense, output })
    }

    fn classifier_layer(&mut self, role: &'static str, stem: &str, rows: usize, cols: usize) -> Linear {
        let want = Want::Matrix { rows, cols };
        let weight = self.tensors.required(role, &format!("{stem}.weight"), want);
        let bias = self.tensors.optional(role, &format!("{stem}.bias"), Want::Vector(rows));
        let bias = bias.map(|bias| self.put(Some(bias), Residence::Host));
        Linear { weight: self.put(weight, Residence::Host), bias }
    }
}
