//! Writes the ends of models that give no logits: a norm after the last layer, and a classifier.

use super::{Norm, Want, Writer};
use crate::model::plan::PlanError;
use crate::program::{Classifier, Dense, Linear, PartKind, Residence, RowNorm, Squash, ValueId};

/// Yes and no.
const LABELS: usize = 2;

impl Writer<'_> {
    /// The norm of an encoder's rows after its last layer, in place.
    pub fn norm_last(&mut self, norm: Norm, x: ValueId) {
        self.prefix.clear();
        self.norm_groups("output norm", "output_norm", norm, self.program.width(x), x);
    }

    /// Writes the last part of an encoder, which has no operations: its classifier of first rows, if the file has one.
    pub fn rows_head(&mut self, hidden: usize) {
        self.rows_head_of(hidden, false, |_, linear| Dense { linear, squash: Squash::Tanh, norm: None });
    }

    /// As [`Writer::rows_head`], with a classifier of the mean of all rows. Its first layer has GELU, and may have a norm.
    pub fn mean_head(&mut self, hidden: usize, norm: Norm) {
        self.rows_head_of(hidden, true, |w, linear| {
            let weight = w.tensors.optional("classifier's norm", "cls.norm.weight", Want::Vector(hidden));
            let weight = weight.map(|weight| w.put(Some(weight), Residence::Host));
            let norm = weight.map(|weight| RowNorm { kind: norm.kind, eps: norm.eps, weight, bias: None });
            Dense { linear, squash: Squash::Gelu, norm }
        });
    }

    fn rows_head_of(&mut self, hidden: usize, of_mean: bool, dense: impl FnOnce(&mut Self, Linear) -> Dense) {
        self.program.part(PartKind::Head);
        self.prefix.clear();
        if !self.has("cls.output.weight") {
            return;
        }
        let output = self.classifier_layer("classifier", "cls.output", 1, hidden);
        let first = self.has("cls.weight");
        let first = first.then(|| self.classifier_layer("classifier's first layer", "cls", hidden, hidden));
        let dense = first.map(|linear| dense(self, linear));
        self.program.classifier(Some(Classifier { of_mean, dense, output, labels: 1 }));
    }

    /// Adds a decoder's classifier of yes and no to its head, if the file has one. Its rows are those of two tokens in
    /// the output matrix.
    pub fn yes_or_no(&mut self, hidden: usize) -> Result<(), PlanError> {
        let labels = self.metadata.texts_if_there("classifier.output_labels")?;
        if !self.has("cls.output.weight") {
            let name = self.metadata.key("classifier.output_labels");
            return match labels {
                None => Ok(()),
                Some(_) => Err(self.metadata.unsupported(&format!("{name} and no classifier, cls.output"))),
            };
        }
        if labels.as_ref().is_none_or(|labels| *labels != ["yes", "no"]) {
            let name = self.metadata.key("classifier.output_labels");
            return Err(self
                .metadata
                .unsupported(&format!("a classifier of other labels than yes and no ({name})")));
        }
        let output = self.classifier_layer("classifier", "cls.output", LABELS, hidden);
        self.program.classifier(Some(Classifier {
            of_mean: false,
            dense: None,
            output,
            labels: LABELS as u32,
        }));
        Ok(())
    }

    fn classifier_layer(&mut self, role: &'static str, stem: &str, rows: usize, cols: usize) -> Linear {
        let want = Want::Matrix { rows, cols };
        let weight = self.tensors.required(role, &format!("{stem}.weight"), want);
        let bias = self.tensors.optional(role, &format!("{stem}.bias"), Want::Vector(rows));
        let bias = bias.map(|bias| self.put(Some(bias), Residence::Host));
        Linear { weight: self.put(weight, Residence::Host), bias }
    }
}
