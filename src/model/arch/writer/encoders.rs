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

    /// Writes the last part of an encoder, which has no operations: its classifier, if the file has one. It takes first rows, through
    /// tanh. With `mean` it takes the mean of all rows, through GELU and then this norm, if the file has it. Of first
    /// rows, a first layer of one row without a second one is all of a classifier, as in jina-reranker-v1.
    pub fn rows_head(&mut self, hidden: usize, mean: Option<Norm>) {
        self.program.part(PartKind::Head);
        self.prefix.clear();
        let of_mean = mean.is_some();
        if !self.has("cls.output.weight") {
            if !of_mean && self.rows("cls.weight") == Some(1) {
                let output = self.classifier_layer("classifier", "cls", 1, hidden);
                let squash = Some(Squash::Tanh);
                self.program.classifier(Some(Classifier { of_mean, dense: None, output, squash, labels: 1 }));
            }
            return;
        }
        let output = self.classifier_layer("classifier", "cls.output", 1, hidden);
        let dense = self.has("cls.weight").then(|| {
            let linear = self.classifier_layer("classifier's first layer", "cls", hidden, hidden);
            let squash = if of_mean { Squash::Gelu } else { Squash::Tanh };
            let norm = mean.and_then(|Norm { kind, eps, .. }| {
                let want = Want::Vector(hidden);
                let weight = self.tensors.optional("classifier's norm", "cls.norm.weight", want)?;
                let weight = self.put(Some(weight), Residence::Host);
                Some(RowNorm { kind, eps, weight, bias: None })
            });
            Dense { linear, squash, norm }
        });
        self.program.classifier(Some(Classifier { of_mean, dense, output, squash: None, labels: 1 }));
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
            squash: None,
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
