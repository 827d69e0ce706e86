//! Limits of an answer's tokens, checked and compiled: its form, penalties and biases.

use std::time::Instant;

use rocmforge_client::wire::{self, ErrorCode, FormKind, GenerateRequest, limits};

use super::Call;
use super::error::{Failure, failure, of_constraint, of_refusal};
use super::samplers::{self, Samplers};
use super::text::check_ids;
use crate::model::Model;
use crate::model::constraint::{Constraint, ConstraintKind, ConstraintSource};
use crate::model::tokenizer::SharedTokenizer;
use crate::scheduler::{Penalties, Steering};
use crate::share::{Charge, Taker};

/// Largest repetition penalty; the smallest is 1 divided by it.
const REPEAT_MAX: f32 = 100.0;
/// Largest frequency and presence penalty, and their smallest without the sign.
const PENALTY_MAX: f32 = 100.0;
/// Largest bias, and the smallest without the sign: logits of models are far below.
const BIAS_MAX: f32 = 1000.0;

/// Compiling a constraint takes about as long as tokenising so many bytes for each of its text: 1 ms for 200 bytes.
const COMPILING_BYTES: usize = 25;

/// A request's limits before its model is known.
#[derive(Debug)]
pub(super) struct Asked {
    penalties: Option<Penalties>,
    samplers: Samplers,
    form: Option<ConstraintSource>,
}

impl Asked {
    /// Reads and checks what the request states.
    ///
    /// # Errors
    /// `InvalidArgument` for bytes that are no form or no penalties, and for numbers out of range.
    pub fn of(request: &GenerateRequest) -> Result<Self, Failure> {
        let bad = |error: wire::BadSteering| failure(ErrorCode::InvalidArgument, &error.to_string());
        let penalties = request.penalties().map_err(bad)?.map(penalties).transpose()?;
        let samplers =
            request.samplers().map_err(bad)?.map(samplers::checked).transpose()?.unwrap_or_default();
        let form = request.form().map_err(bad)?.map(|form| ConstraintSource {
            kind: match form.kind {
                FormKind::JsonSchema => ConstraintKind::JsonSchema,
                FormKind::Regex => ConstraintKind::Regex,
                FormKind::Lark => ConstraintKind::Lark,
                FormKind::Gbnf => ConstraintKind::Gbnf,
            },
            text: form.text,
        });
        Ok(Self { penalties, samplers, form })
    }

    /// Checks ids against the model, and compiles the form for its vocabulary.
    pub async fn for_model(self, call: &Call, model: &Model) -> Result<Steering, Failure> {
        if let Some(penalties) = &self.penalties {
            let ids: Vec<u32> = penalties.bias.keys().copied().collect();
            check_ids(&ids, model.plan.program.vocab())?;
        }
        let Samplers { chain, mirostat, dry } = self.samplers;
        let steering = Steering { penalties: self.penalties, chain, mirostat, dry, ..Steering::default() };
        let Some(source) = self.form else { return Ok(steering) };
        let held = call.service().budget.form(call.peer().uid);
        let held = held
            .map_err(|refusal| of_refusal(&refusal, "there is no room for the answer's form", 1, "forms"))?;
        let vocabulary = (model.tokenizer.clone(), model.files.room());
        let constraint = Some(compile(call, vocabulary, source).await?);
        Ok(Steering { constraint, held: Some(held), ..steering })
    }
}

/// Compiles on the threads for blocking work, within the user's allowance for texts or in the background.
async fn compile(
    call: &Call,
    (tokenizer, room): (SharedTokenizer, Option<Charge>),
    source: ConstraintSource,
) -> Result<Constraint, Failure> {
    let bytes = source.text.len().saturating_mul(COMPILING_BYTES);
    let work = move |call: &Call, ()| {
        let begun = Instant::now();
        let taker = Taker::of(call.peer().uid);
        let compiler = tokenizer.constraints_charged(room);
        let trial = call.service().trial.clone();
        let compiled = compiler.and_then(|compiler| compiler.compile(&source, taker, trial));
        // The compiling thread is another one.
        call.service().text_time.charge(call.peer().uid, begun.elapsed());
        compiled.map_err(|error| of_constraint(&error))
    };
    call.text_work(bytes, |_| Ok(()), work).await
}

pub(super) fn range(name: &str, value: f32, min: f32, max: f32) -> Result<f32, Failure> {
    if (min..=max).contains(&value) {
        return Ok(value); // NaN is in no range
    }
    Err(failure(ErrorCode::InvalidArgument, &format!("{name} = {value} is not in {min}..={max}")))
}

fn penalties(asked: wire::Penalties) -> Result<Penalties, Failure> {
    let wire::Penalties { repeat, frequency, presence, last, prompt, bias } = asked;
    let last_max = limits::PENALTY_TOKENS_MAX;
    if last > last_max {
        let text = format!("the penalties' last tokens = {last} is not in 0..={last_max}");
        return Err(failure(ErrorCode::InvalidArgument, &text));
    }
    let mut biases = std::collections::BTreeMap::new();
    for (id, value) in bias {
        let value = range(&format!("the bias of token {id}"), value, -BIAS_MAX, BIAS_MAX)?;
        if biases.insert(id, value).is_some() {
            let text = format!("token {id} has two biases: leave one of them out");
            return Err(failure(ErrorCode::InvalidArgument, &text));
        }
    }
    Ok(Penalties {
        repeat: range("the repetition penalty", repeat, 1.0 / REPEAT_MAX, REPEAT_MAX)?,
        frequency: range("the frequency penalty", frequency, -PENALTY_MAX, PENALTY_MAX)?,
        presence: range("the presence penalty", presence, -PENALTY_MAX, PENALTY_MAX)?,
        last,
        prompt,
        bias: biases,
    })
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire::Prompt;

    use super::*;

    fn asked(penalties: &wire::Penalties) -> Result<Asked, Failure> {
        let request = GenerateRequest::new("m", Prompt::Text("p".into()));
        Asked::of(&request.with_penalties(penalties))
    }

    #[test]
    fn penalties_out_of_range_are_refused_by_name() {
        let usual = wire::Penalties { bias: vec![(3, 5.0), (4, -1000.0)], ..wire::Penalties::default() };
        assert!(asked(&usual).unwrap().penalties.is_some());
        type Change = fn(&mut wire::Penalties);
        let bad: [(&str, Change); 8] = [
            ("the repetition penalty", |p| p.repeat = 0.0),
            ("the repetition penalty", |p| p.repeat = f32::NAN),
            ("the frequency penalty", |p| p.frequency = 101.0),
            ("the presence penalty", |p| p.presence = f32::NEG_INFINITY),
            ("the penalties' last tokens", |p| p.last = 4097),
            ("the bias of token 3", |p| p.bias[0].1 = 1001.0),
            ("the bias of token 4", |p| p.bias[1].1 = f32::NAN),
            ("token 4 has two biases", |p| p.bias.push((4, 0.0))),
        ];
        for (name, change) in bad {
            let mut penalties = usual.clone();
            change(&mut penalties);
            let error = asked(&penalties).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument as u16);
            assert!(error.message.starts_with(name), "{}", error.message);
        }
    }
}
