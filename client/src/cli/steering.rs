//! Options of `run` that limit the answer's tokens: its form, penalties and biases.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use rocmforge_client::wire::limits::{FORM_BYTES_MAX, PENALTY_TOKENS_MAX};
use rocmforge_client::wire::{AnswerForm, FormKind, GenerateRequest, Penalties};

use super::report::Failure;
use super::samplers::Samplers;

/// The form of the answer, penalties and biases.
#[derive(Debug, Args)]
pub struct Steering {
    /// Answer in JSON by the schema in this file; the answer ends when it is complete
    #[arg(long, value_name = "FILE", conflicts_with_all = ["regex", "grammar", "gbnf"])]
    pub schema: Option<PathBuf>,
    /// Answer with a text that matches this regular expression as a whole
    #[arg(long, value_name = "R", conflicts_with_all = ["grammar", "gbnf"])]
    pub regex: Option<String>,
    /// Answer by the grammar in this file, in GBNF, the syntax of llama.cpp, from its rule `root`
    #[arg(long, value_name = "FILE", conflicts_with = "grammar")]
    pub gbnf: Option<PathBuf>,
    /// Answer by the grammar in this file, in Lark's syntax, from its rule `start`
    #[arg(long, value_name = "FILE")]
    pub grammar: Option<PathBuf>,
    /// Make tokens less likely that are among the last --repeat-last ones, above 1; 1: do not
    #[arg(long, default_value_t = 1.0, value_name = "X", allow_negative_numbers = true)]
    pub repeat_penalty: f32,
    /// Make such tokens less likely, the more so the more often they are there; 0: do not
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Make such tokens less likely, once; 0: do not
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// So many last tokens of prompt and answer count for the penalties, 0 to 4096
    #[arg(long, default_value_t = 64, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(0..=i64::from(PENALTY_TOKENS_MAX)))]
    pub repeat_last: u32,
    /// Make a token more likely, or less with a negative value; -1000 never takes it; may be given several times
    #[arg(long, value_name = "ID=VALUE", value_parser = bias)]
    pub logit_bias: Vec<(u32, f32)>,
    #[command(flatten)]
    pub samplers: Box<Samplers>,
}

impl Steering {
    /// Whether any of them is stated.
    pub fn is_any(&self) -> bool {
        let Self { schema, regex, grammar, gbnf, logit_bias, .. } = self;
        let penalties =
            [self.repeat_penalty != 1.0, self.frequency_penalty != 0.0, self.presence_penalty != 0.0];
        let forms = schema.is_some() || regex.is_some() || grammar.is_some() || gbnf.is_some();
        forms || self.samplers.is_any() || !logit_bias.is_empty() || penalties.contains(&true)
    }

    /// The request with these options.
    ///
    /// # Errors
    /// A file that cannot be read, or is too long.
    pub fn fill(&self, request: GenerateRequest) -> Result<GenerateRequest, Failure> {
        let form = match self {
            Self { schema: Some(path), .. } => {
                Some(AnswerForm::new(FormKind::JsonSchema, &read("--schema", path)?))
            }
            Self { regex: Some(regex), .. } => Some(AnswerForm::new(FormKind::Regex, regex)),
            Self { grammar: Some(path), .. } => {
                Some(AnswerForm::new(FormKind::Lark, &read("--grammar", path)?))
            }
            Self { gbnf: Some(path), .. } => Some(AnswerForm::new(FormKind::Gbnf, &read("--gbnf", path)?)),
            _ => None,
        };
        let request = match form {
            Some(form) => request.with_form(&form),
            None => request,
        };
        let penalties = Penalties {
            repeat: self.repeat_penalty,
            frequency: self.frequency_penalty,
            presence: self.presence_penalty,
            last: self.repeat_last,
            prompt: true,
            bias: self.logit_bias.clone(),
        };
        let request = self.samplers.fill(request);
        Ok(if penalties.change_nothing() { request } else { request.with_penalties(&penalties) })
    }
}

/// Text of a file that fits a request.
///
/// # Errors
/// A file that cannot be read, is too long or is no text.
pub fn read(option: &str, path: &Path) -> Result<String, Failure> {
    let refused =
        |why: &dyn std::fmt::Display| Failure::usage(&format!("{option} {}: {why}", path.display()));
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| refused(&error))?;
    file.take(FORM_BYTES_MAX as u64).read_to_end(&mut bytes).map_err(|error| refused(&error))?;
    if bytes.len() >= FORM_BYTES_MAX {
        return Err(refused(&format!("it has more than {} bytes", FORM_BYTES_MAX - 1)));
    }
    String::from_utf8(bytes).map_err(|error| refused(&format!("it is not UTF-8: {error}")))
}

/// Parses a bias, `ID=VALUE`.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, value) = text.split_once('=').ok_or("not of the form ID=VALUE")?;
    let id = id.trim().parse().map_err(|_| format!("{id:?} is not a token id"))?;
    let value: f32 = value.trim().parse().map_err(|_| format!("{value:?} is not a number"))?;
    if value.is_finite() { Ok((id, value)) } else { Err(format!("{value} is not finite")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_is_an_id_and_a_finite_number() {
        assert_eq!(bias("17=-2.5"), Ok((17, -2.5)));
        for bad in ["17", "x=1", "17=y", "17=inf", "17=NaN", "-1=2"] {
            assert!(bias(bad).is_err(), "{bad}");
        }
    }
}
