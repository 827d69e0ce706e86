//! Whether and how much a model shall reason before it answers.

use serde_json::{Map, Value, json};

use crate::failure::Failure;
use crate::params::refused;

/// How much a request wants the model to reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    Off,
    /// As much as the template likes.
    On,
    Low,
    Medium,
    High,
}

/// A field of a request that says how much the model shall reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thinking {
    /// The field, for refusals.
    pub field: &'static str,
    pub effort: Effort,
}

impl Thinking {
    /// Sets the variable of the model's template, which `ShowReply` names. A variable that the request sets itself stays.
    ///
    /// # Errors
    /// A failure of status 400 if the template cannot do what is wanted.
    pub fn apply(self, variable: Option<&str>, variables: &mut Map<String, Value>) -> Result<(), Failure> {
        let Some(name) = variable else {
            return match self.effort {
                // Without a switch, nothing tells such a model to reason.
                Effort::Off => Ok(()),
                _ => Err(refused(
                    self.field,
                    "the model's chat template cannot turn reasoning on: leave it out",
                )),
            };
        };
        let value = match (name, self.effort) {
            ("reasoning_effort", Effort::Off) => {
                let reason =
                    "the model's chat template cannot turn reasoning off: it has low, medium and high";
                return Err(refused(self.field, reason));
            }
            ("reasoning_effort", Effort::On) => return Ok(()),
            ("reasoning_effort", Effort::Low) => json!("low"),
            ("reasoning_effort", Effort::Medium) => json!("medium"),
            ("reasoning_effort", Effort::High) => json!("high"),
            (_, effort) => json!(effort != Effort::Off),
        };
        variables.entry(name).or_insert(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Effort; 5] = [Effort::Off, Effort::On, Effort::Low, Effort::Medium, Effort::High];

    fn applied(effort: Effort, variable: Option<&str>, set: Value) -> Option<Value> {
        let Value::Object(mut variables) = set else { unreachable!("tests pass objects") };
        Thinking { field: "f", effort }
            .apply(variable, &mut variables)
            .ok()
            .map(|()| Value::Object(variables))
    }

    #[test]
    fn templates_with_a_switch_reason_unless_it_is_off() {
        for effort in ALL {
            for name in ["enable_thinking", "thinking"] {
                let on = effort != Effort::Off;
                assert_eq!(applied(effort, Some(name), json!({})), Some(json!({name: on})));
                let own = json!({name: "own"});
                assert_eq!(applied(effort, Some(name), own.clone()), Some(own), "the request's own stays");
            }
        }
    }

    #[test]
    fn templates_with_degrees_get_them_and_others_refuse_to_reason() {
        let expected =
            [None, Some(json!({})), Some("low".into()), Some("medium".into()), Some("high".into())];
        for (effort, expected) in ALL.into_iter().zip(expected) {
            let expected = expected.map(|value: Value| match value {
                Value::String(text) => json!({"reasoning_effort": text}),
                value => value,
            });
            assert_eq!(applied(effort, Some("reasoning_effort"), json!({})), expected, "{effort:?}");
            assert_eq!(applied(effort, None, json!({})), (effort == Effort::Off).then(|| json!({})));
        }
    }
}
