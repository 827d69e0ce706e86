//! Extensions of [`GenerateRequest`] that limit an answer's tokens: its form, and penalties and biases.

use super::{EXT_CRITICAL, GenerateRequest};
use crate::wire::validate::limits;

/// Key of [`GenerateRequest`]'s `ext`: the form of the answer, as [`AnswerForm::bytes`] has it.
pub const EXT_GENERATE_FORM: u16 = EXT_CRITICAL | 2;

/// Key of [`GenerateRequest`]'s `ext`: penalties and biases, as [`Penalties::bytes`] has them.
pub const EXT_GENERATE_PENALTIES: u16 = EXT_CRITICAL | 3;

/// Bytes of penalties without biases, and of each bias.
const PENALTIES_BYTES: usize = 17;
const BIAS_BYTES: usize = 8;

/// The kind of an answer's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormKind {
    /// A JSON schema.
    JsonSchema,
    /// A regular expression, which the whole answer matches.
    Regex,
    /// A grammar in Lark's syntax; its rule `start` is the answer.
    Lark,
    /// A grammar in GBNF, llama.cpp's syntax; its rule `root` is the answer.
    Gbnf,
}

impl FormKind {
    const ALL: [Self; 4] = [Self::JsonSchema, Self::Regex, Self::Lark, Self::Gbnf];
}

/// The form of an answer. The answer ends when it is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerForm {
    /// Its kind.
    pub kind: FormKind,
    /// A schema, an expression or a grammar, at most [`limits::FORM_BYTES_MAX`] bytes less one.
    pub text: String,
}

impl AnswerForm {
    /// A form of this kind.
    pub fn new(kind: FormKind, text: &str) -> Self {
        Self { kind, text: text.to_owned() }
    }

    /// Its bytes on the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind as u8];
        bytes.extend_from_slice(self.text.as_bytes());
        bytes
    }

    /// The form of these bytes.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are no form.
    pub fn of(bytes: &[u8]) -> Result<Self, BadSteering> {
        let (kind, text) = bytes.split_first().ok_or(BadSteering::Form)?;
        let kind = FormKind::ALL.get(usize::from(*kind)).copied().ok_or(BadSteering::Form)?;
        let text = std::str::from_utf8(text).map_err(|_| BadSteering::Form)?;
        Ok(Self::new(kind, text))
    }
}

/// Penalties for tokens that were said, and biases, in the order of llama.cpp: bias, `repeat`, `frequency`, `presence`. The daemon
/// checks ranges: `repeat` 0.01..=100, `frequency` and `presence` -100..=100, each bias -1000..=1000.
#[derive(Clone, Debug, PartialEq)]
pub struct Penalties {
    /// Logits of counted tokens are divided by it if above 0, else multiplied; 1 changes nothing.
    pub repeat: f32,
    /// Subtracted from a counted token's logit as often as it is there.
    pub frequency: f32,
    /// Subtracted once from each counted token's logit.
    pub presence: f32,
    /// So many last tokens count, at most [`limits::PENALTY_TOKENS_MAX`].
    pub last: u32,
    /// Whether tokens of the prompt count.
    pub prompt: bool,
    /// Added to logits: token ids, none twice, and their biases. At most [`limits::BIASES_MAX`].
    pub bias: Vec<(u32, f32)>,
}

impl Default for Penalties {
    /// Penalties that change nothing. The last 64 tokens count, those of the prompt too, as in llama.cpp.
    fn default() -> Self {
        Self { repeat: 1.0, frequency: 0.0, presence: 0.0, last: 64, prompt: true, bias: Vec::new() }
    }
}

impl Penalties {
    /// Whether they change anything.
    pub fn change_nothing(&self) -> bool {
        let Self { repeat, frequency, presence, bias, .. } = self;
        *repeat == 1.0 && *frequency == 0.0 && *presence == 0.0 && bias.is_empty()
    }

    /// Their bytes on the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let Self { repeat, frequency, presence, last, prompt, bias } = self;
        let mut bytes = Vec::with_capacity(PENALTIES_BYTES + BIAS_BYTES * bias.len());
        for number in [repeat, frequency, presence] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&last.to_le_bytes());
        bytes.push(u8::from(*prompt));
        for (id, value) in bias {
            bytes.extend_from_slice(&id.to_le_bytes());
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// The penalties of these bytes.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are none.
    pub fn of(bytes: &[u8]) -> Result<Self, BadSteering> {
        let (fixed, biases) = bytes.split_at_checked(PENALTIES_BYTES).ok_or(BadSteering::Penalties)?;
        let (words, prompt) = fixed.as_chunks::<4>();
        let ([repeat, frequency, presence, last], [prompt @ (0 | 1)]) = (words, prompt) else {
            return Err(BadSteering::Penalties);
        };
        let (biases, rest) = biases.as_chunks::<BIAS_BYTES>();
        if !rest.is_empty() || biases.len() > limits::BIASES_MAX {
            return Err(BadSteering::Penalties);
        }
        let bias = |[a, b, c, d, e, f, g, h]: &[u8; BIAS_BYTES]| {
            (u32::from_le_bytes([*a, *b, *c, *d]), f32::from_le_bytes([*e, *f, *g, *h]))
        };
        Ok(Self {
            repeat: f32::from_le_bytes(*repeat),
            frequency: f32::from_le_bytes(*frequency),
            presence: f32::from_le_bytes(*presence),
            last: u32::from_le_bytes(*last),
            prompt: *prompt == 1,
            bias: biases.iter().map(bias).collect(),
        })
    }
}

/// Bytes of an extension that are not what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSteering {
    /// Of [`EXT_GENERATE_FORM`].
    #[error(
        "the answer's form is a byte 0 (JSON schema), 1 (regular expression), 2 (Lark grammar) or 3 (GBNF), then text in UTF-8"
    )]
    Form,
    /// Of [`EXT_GENERATE_PENALTIES`].
    #[error(
        "penalties are 17 bytes (three f32, a u32, a 0 or 1), then at most {max} pairs of a u32 and an f32",
        max = limits::BIASES_MAX
    )]
    Penalties,
    /// Of [`EXT_GENERATE_SAMPLERS`](super::EXT_GENERATE_SAMPLERS).
    #[error(
        "samplers are 49 bytes (six f32, a 0 or 2, four f32, two u32), then at most {max} texts of 1 to {bytes} bytes, each \
         after its length as a u8",
        max = limits::BREAKERS_MAX,
        bytes = limits::BREAKER_BYTES_MAX
    )]
    Samplers,
    /// Of [`EXT_GENERATE_SCORES`](super::EXT_GENERATE_SCORES).
    #[error("log-probabilities of the prompt have one byte, a number of alternatives in 0..={max}", max = limits::TOP_LOGPROBS_MAX)]
    Scores,
    /// Of [`EXT_GENERATE_EMBEDDING`](super::EXT_GENERATE_EMBEDDING).
    #[error(
        "an embedding has two bytes: 0 (the file's pooling), 1 (mean), 2 (first) or 3 (last), then 0 or 1 for a normalised one"
    )]
    Embedding,
    /// Of [`EXT_GENERATE_DOCUMENT`](super::EXT_GENERATE_DOCUMENT).
    #[error("a document is text in UTF-8")]
    Document,
}

impl GenerateRequest {
    /// The same request, whose answer has this form.
    #[must_use]
    pub fn with_form(mut self, form: &AnswerForm) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_FORM);
        self.ext.push((EXT_GENERATE_FORM, form.bytes()));
        self
    }

    /// The form of the answer, if the request states one.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are no form.
    pub fn form(&self) -> Result<Option<AnswerForm>, BadSteering> {
        self.bytes_of(EXT_GENERATE_FORM).map(AnswerForm::of).transpose()
    }

    /// The same request with these penalties and biases.
    #[must_use]
    pub fn with_penalties(mut self, penalties: &Penalties) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_PENALTIES);
        self.ext.push((EXT_GENERATE_PENALTIES, penalties.bytes()));
        self
    }

    /// Penalties and biases, if the request states any.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are none.
    pub fn penalties(&self) -> Result<Option<Penalties>, BadSteering> {
        self.bytes_of(EXT_GENERATE_PENALTIES).map(Penalties::of).transpose()
    }

    pub(super) fn bytes_of(&self, key: u16) -> Option<&[u8]> {
        self.ext.iter().find(|(of, _)| *of == key).map(|(_, bytes)| bytes.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Prompt, Validate, Violation};

    fn request() -> GenerateRequest {
        GenerateRequest::new("m", Prompt::Text("p".into()))
    }

    #[test]
    fn forms_and_penalties_are_read_as_they_were_written() {
        let form = AnswerForm::new(FormKind::Regex, "[a-zß]+");
        let penalties = Penalties {
            repeat: 1.5,
            prompt: false,
            bias: vec![(7, -100.0), (9, 0.5)],
            ..Penalties::default()
        };
        let asked =
            request().with_form(&form).with_penalties(&Penalties::default()).with_penalties(&penalties);
        assert_eq!((asked.form(), asked.penalties()), (Ok(Some(form)), Ok(Some(penalties))));
        assert_eq!(asked.validate(), Ok(()));
        assert_eq!((request().form(), request().penalties()), (Ok(None), Ok(None)));
        assert!(Penalties::default().change_nothing());
    }

    #[test]
    fn bytes_that_are_none_are_refused() {
        for bad in [&b""[..], b"\x04a", b"\x00\xff"] {
            assert_eq!(AnswerForm::of(bad), Err(BadSteering::Form), "{bad:?}");
        }
        let good = Penalties::default().bytes();
        for cut in 0..good.len() {
            assert_eq!(Penalties::of(&good[..cut]), Err(BadSteering::Penalties));
        }
        let more = [good.as_slice(), &[0; 7]].concat();
        assert_eq!(Penalties::of(&more), Err(BadSteering::Penalties));
        let mut flag = good;
        flag[16] = 2;
        assert_eq!(Penalties::of(&flag), Err(BadSteering::Penalties));
        let many = Penalties { bias: vec![(0, 0.0); limits::BIASES_MAX + 1], ..Penalties::default() };
        assert_eq!(Penalties::of(&many.bytes()), Err(BadSteering::Penalties));
    }

    #[test]
    fn a_form_may_be_longer_than_other_extensions() {
        let of = |bytes: usize| {
            request().with_form(&AnswerForm::new(FormKind::Lark, &"a".repeat(bytes))).validate()
        };
        assert_eq!(of(limits::FORM_BYTES_MAX - 1), Ok(()));
        assert!(matches!(of(limits::FORM_BYTES_MAX), Err(Violation::TooLong { .. })));
    }
}
