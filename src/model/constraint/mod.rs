//! Constraints of answers: JSON schemas, regular expressions, and grammars in Lark's syntax or in GBNF.
//!
//! The crate `llguidance` compiles them and finds the tokens that may follow. Its table of a vocabulary is built once, with the
//! first constraint, and shared by all models of the tokenizer. Compiled constraints are kept for their users. Constraints come from
//! clients, so their size, memory and time are bounded.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use llguidance::api::{ParserLimits, StopReason, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{ParserFactory, TokenParser, panic_utils};
use serde::{Deserialize, Serialize};

use super::tokenizer::{TokenKind, Tokenizer};
use crate::backend::TokenMask;
use crate::lock;
use crate::share::{Charge, Shares, Taker};

mod cache;
mod error;
mod flights;
mod gbnf;
mod schema;
mod standard;
mod trial;

pub use error::ConstraintError;
pub use trial::{SUBCOMMAND, Trial, child_main};

use cache::Cache;
use flights::{Flights, Turn};

/// Longest text of a constraint in bytes.
pub const SOURCE_BYTES_MAX: usize = 64 << 10;

/// Longest time to compile one.
const COMPILE_TIME_MAX: Duration = Duration::from_secs(5);

/// Most threads that compile at once, those included that took too long and are still at work. One user has at most half of
/// them, and the last one is for root.
const COMPILING_MAX: u64 = 16;

/// Stack of a compiling thread: rules that name each other nest as deep as a text has rules. Untouched pages take no memory.
const COMPILE_STACK: usize = 256 << 20;

/// Bytes of all compiled constraints that a vocabulary keeps. Those of schemas that programs use take some 10 KiB to 1 MiB each.
const CACHE_BYTES: usize = 16 << 20;

/// Longest token in bytes that an answer with a constraint may have. Real ones stay below 300.
const TOKEN_BYTES_MAX: usize = 1000;

/// Memory of a vocabulary's table for each byte of its tokens, if none begin alike, and for each token. Measured: 54 for 4,000 tokens of
/// 1,000 bytes.
const TABLE_BYTES_OF_BYTE: usize = 56;
const TABLE_BYTES_OF_TOKEN: usize = 64;

/// Most bytes of a vocabulary: the table's nodes are numbered with 22 bits.
const VOCABULARY_BYTES_MAX: usize = (1 << 22) - 2;

static COMPILING: LazyLock<Arc<Shares>> = LazyLock::new(|| Shares::new(COMPILING_MAX));

/// The kind of a constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ConstraintKind {
    /// A JSON schema.
    JsonSchema,
    /// A regular expression, which the whole answer matches.
    Regex,
    /// A grammar in Lark's syntax; its rule `start` is the answer.
    Lark,
    /// A grammar in GBNF, llama.cpp's syntax; its rule `root` is the answer.
    Gbnf,
}

impl std::fmt::Display for ConstraintKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::JsonSchema => "JSON schema",
            Self::Regex => "regular expression",
            Self::Lark => "grammar",
            Self::Gbnf => "GBNF grammar",
        })
    }
}

/// A constraint as a client states it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstraintSource {
    /// Its kind.
    pub kind: ConstraintKind,
    /// Its text.
    pub text: String,
}

/// Compiles constraints for one vocabulary.
pub struct ConstraintCompiler {
    /// For the table of a passed model's vocabulary.
    _charge: Option<Charge>,
    factory: ParserFactory,
    cache: Cache,
    flights: Arc<Flights>,
}

impl std::fmt::Debug for ConstraintCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConstraintCompiler").finish_non_exhaustive()
    }
}

impl ConstraintCompiler {
    /// Builds the table of a vocabulary. Takes some 100 ms, and the memory that `charge` grows by.
    ///
    /// # Errors
    /// [`ConstraintError::Vocabulary`], if it has no token that ends an answer, or too many bytes; [`ConstraintError::NoRoom`].
    pub fn new(tokenizer: &Tokenizer, mut charge: Option<Charge>) -> Result<Self, ConstraintError> {
        let size = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let Some(&end) = tokenizer.end_of_generation().first() else {
            return Err(ConstraintError::Vocabulary("no token ends an answer"));
        };
        let words: Vec<Vec<u8>> = (0..size).map(|id| text_of(tokenizer, id).to_vec()).collect();
        let bytes = words.iter().map(Vec::len).sum::<usize>();
        if bytes > VOCABULARY_BYTES_MAX {
            return Err(ConstraintError::Vocabulary("its tokens have too many bytes"));
        }
        if let Some(charge) = &mut charge {
            let table = TABLE_BYTES_OF_BYTE * bytes + TABLE_BYTES_OF_TOKEN * words.len();
            charge.grow(table as u64).map_err(ConstraintError::NoRoom)?;
        }
        let factory = factory_of(&words, end, tokenizer.end_of_generation())?;
        Ok(Self { _charge: charge, factory, cache: Cache::new(CACHE_BYTES), flights: Flights::new() })
    }

    /// A constraint at the beginning of its answer. It is compiled, or one that is kept for the user, or that another of its
    /// requests compiles at this moment. Compiling takes from 1 ms to 5 s, on a thread of its own with a large stack, and the trial
    /// before it as long. It counts for that user until it ends.
    ///
    /// # Errors
    /// [`ConstraintError`].
    pub fn compile(
        self: &Arc<Self>,
        source: &ConstraintSource,
        taker: Taker,
        trial: Trial,
    ) -> Result<Constraint, ConstraintError> {
        self.compile_after(source, taker, Some(trial))
    }

    /// The same without a trial.
    ///
    /// # Errors
    /// [`ConstraintError`].
    #[cfg(test)]
    pub fn compile_untried(
        self: &Arc<Self>,
        source: &ConstraintSource,
        taker: Taker,
    ) -> Result<Constraint, ConstraintError> {
        self.compile_after(source, taker, None)
    }

    fn compile_after(
        self: &Arc<Self>,
        source: &ConstraintSource,
        taker: Taker,
        trial: Option<Trial>,
    ) -> Result<Constraint, ConstraintError> {
        let (kind, bytes, limit) = (source.kind, source.text.len(), SOURCE_BYTES_MAX);
        if bytes > limit {
            return Err(ConstraintError::TooLong { kind, bytes, limit });
        }
        let key = cache::key(source, taker.uid);
        let until = lock::now() + COMPILE_TIME_MAX;
        let too_slow = || ConstraintError::TooSlow { kind, seconds: COMPILE_TIME_MAX.as_secs() };
        let flight = loop {
            if let Some(parser) = self.cache.get(&key) {
                return Ok(Constraint::new(parser, kind));
            }
            match self.flights.join(key, until) {
                Turn::Lead(flight) => break flight,
                Turn::Landed => {}
                Turn::Failed(error) => return Err(error),
                Turn::Late => return Err(too_slow()),
            }
        };
        let slot = COMPILING.take(taker, 1).map_err(ConstraintError::Busy)?;
        let (done, result) = sync_channel(1);
        let (compiler, work) = (Arc::clone(self), source.clone());
        let compile = move || {
            // Beside the threads that compute answers: those of four large schemas made others wait for a second.
            if let Err(error) = rustix::process::nice(NICENESS) {
                tracing::debug!(%error, "a constraint is compiled at the usual priority");
            }
            let tried = trial.map_or(Ok(()), |trial| trial.run(&work));
            let compiled = tried.and_then(|()| compiler.compiled(&work, key));
            flight.land(compiled.as_ref().err());
            // Before the answer: one who asks for form after form is never refused for a thread that has yet to end.
            drop(slot);
            let _ = done.send(compiled); // nobody listens after the longest time
        };
        let thread = std::thread::Builder::new().name("constraint".into()).stack_size(COMPILE_STACK);
        let spawned = thread.spawn(compile);
        spawned.map_err(|error| ConstraintError::NoThread { kind, reason: error.to_string() })?;
        match result.recv_timeout(COMPILE_TIME_MAX) {
            Ok(compiled) => compiled,
            Err(RecvTimeoutError::Timeout) => Err(too_slow()),
            Err(RecvTimeoutError::Disconnected) => {
                Err(ConstraintError::Internal("the compiling thread ended".into()))
            }
        }
    }

    /// Answers that follow a kept constraint.
    #[cfg(test)]
    pub fn followers(&self) -> usize {
        self.cache.followers()
    }

    /// Compiles on this thread, and keeps what it compiled.
    fn compiled(&self, source: &ConstraintSource, key: cache::Key) -> Result<Constraint, ConstraintError> {
        let kind = source.kind;
        let parser = parsed(&self.factory, source)?;
        let bytes = parser.parser.lexer_stats().num_bytes;
        let parser = Arc::new(parser);
        self.cache.put(key, bytes.saturating_add(BYTES_OF_SOURCE * source.text.len()), Arc::clone(&parser));
        Ok(Constraint::new(parser, kind))
    }
}

/// Makes parsers for a vocabulary.
/// Those numbered `ends` end an answer, `end` first of all.
fn factory_of(words: &[Vec<u8>], end: u32, ends: &[u32]) -> Result<ParserFactory, ConstraintError> {
    let size = u32::try_from(words.len()).unwrap_or(u32::MAX);
    let built = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let trie = TokTrie::from(&TokRxInfo::new(size, end), words);
        let environment: Arc<dyn TokenizerEnv + Sync> =
            Arc::new(ApproximateTokEnv::new(trie.with_eos_tokens(ends)));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(factory)
    }));
    built.map_err(|error| ConstraintError::Internal(short(&error.to_string())))
}

/// The parser of a constraint at the beginning of its answer.
fn parsed(factory: &ParserFactory, source: &ConstraintSource) -> Result<TokenParser, ConstraintError> {
    let kind = source.kind;
    let grammar = match kind {
        ConstraintKind::JsonSchema => TopLevelGrammar::from_json_schema(schema::checked(&source.text)?),
        ConstraintKind::Regex => TopLevelGrammar::from_regex(&source.text),
        ConstraintKind::Lark => TopLevelGrammar::from_lark(without_complements(&source.text)?.to_owned()),
        ConstraintKind::Gbnf => {
            let lark = gbnf::to_lark(&source.text);
            TopLevelGrammar::from_lark(lark.map_err(|reason| refusal(kind, &reason))?)
        }
    };
    let mut parser = factory.create_parser(grammar).map_err(|error| refusal(kind, &error.to_string()))?;
    parser.start_without_prompt();
    Ok(parser)
}

/// Added to the niceness of threads that compile.
const NICENESS: i32 = 10;

/// Bytes of a compiled grammar for each of its text, beyond the lexer's own count. Measured: 141 to 226 for schemas of 1,400
/// and 3,000 properties. They were 78 for 3,500 words in a regular expression.
const BYTES_OF_SOURCE: usize = 192;

/// Bounds of a constraint's memory and of its work for one token: at most some 12 MiB, and some 10 ms.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: 100_000,
        step_max_items: 50_000,
        max_lexer_states: 6_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// The bytes that a constrained answer sees of a token; none for one that it may not have.
fn text_of(tokenizer: &Tokenizer, id: u32) -> &[u8] {
    let is_text = matches!(
        tokenizer.token_kind(id),
        Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte)
    );
    let bytes = tokenizer.token_bytes(id, false).unwrap_or_default();
    // No UTF-8 text has the byte 0xff, with which the compiler marks special tokens.
    let fits = bytes.len() <= TOKEN_BYTES_MAX && !bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER);
    if is_text && fits && !tokenizer.is_end_of_generation(id) { bytes } else { &[] }
}

/// Refuses complements of terminals. The compiler bounds what an intersection (`&`) costs, but not with a complement in it:
/// `/.*b.{18}/ & /.*c.{17}/ & ~/.*d.{16}/` took a core for minutes and 3 GB. Any `~` counts, so that no reading of quotes can be
/// deceived.
fn without_complements(text: &str) -> Result<&str, ConstraintError> {
    if text.contains('~') {
        let reason = r"a complement (~) may take any time and memory; write \x7E for the character, {2,5} for a repetition";
        return Err(ConstraintError::Invalid { kind: ConstraintKind::Lark, reason: reason.to_owned() });
    }
    Ok(text)
}

/// The compiler tells limits only in words.
fn refusal(kind: ConstraintKind, error: &str) -> ConstraintError {
    let reason = short(error);
    if error.starts_with("panic") {
        return ConstraintError::Internal(reason);
    }
    // The compiler's own advice names a setting of its that no user can change.
    if error.contains("limits.") {
        let reason =
            "its patterns take too much work; shorter ones, and fewer repetitions, take less".to_owned();
        return ConstraintError::TooComplex { kind, reason };
    }
    match ["too big", "too large", "too complex", "too many", "deeply nested"]
        .iter()
        .any(|word| error.contains(word))
    {
        true => ConstraintError::TooComplex { kind, reason },
        false => ConstraintError::Invalid { kind, reason },
    }
}

/// A message in one line, cut where it gets long. Its last line often says what is wrong.
fn short(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect()
}

/// The state of an answer, as its constraint sees it.
pub struct Constraint {
    /// At the beginning of an answer; others use it, too.
    start: Arc<TokenParser>,
    /// From the first token on. A request that waits takes no memory for it: with a copy for each, 256 requests of a costly
    /// constraint took 100 MiB.
    own: Option<Box<TokenParser>>,
    kind: ConstraintKind,
}

impl Constraint {
    fn new(start: Arc<TokenParser>, kind: ConstraintKind) -> Self {
        Self { start, own: None, kind }
    }

    /// The parser of this answer alone.
    fn own(&mut self) -> &mut TokenParser {
        self.own.get_or_insert_with(|| Box::new(self.start.deep_clone()))
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// The tokens that may follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// One of these.
    Tokens(Arc<TokenMask>),
    /// None: the answer is complete.
    Complete,
}

impl Constraint {
    /// A copy that may follow other tokens. Nothing that it does changes this one. Takes some 20 us, and as much memory as this one.
    #[must_use]
    pub fn copy(&self) -> Self {
        let own = self.own.as_deref().unwrap_or(&self.start).deep_clone();
        Self { start: Arc::clone(&self.start), own: Some(Box::new(own)), kind: self.kind }
    }

    /// Takes the answer's next token, if there is one, and finds those that may follow. Takes some 50 us, at most some 20 ms.
    ///
    /// # Errors
    /// [`ConstraintError`]; the constraint is of no use after it.
    pub fn follow(&mut self, token: Option<u32>) -> Result<Allowed, ConstraintError> {
        self.follow_in(token, None)
    }

    /// As [`Constraint::follow`], in the memory of a mask that nobody else reads any more. A mask of 128,000 tokens is 16 KB:
    /// freed by another thread than the one that took it, it makes the allocator's locks meet.
    ///
    /// # Errors
    /// As [`Constraint::follow`].
    pub fn follow_in(
        &mut self,
        token: Option<u32>,
        spare: Option<Arc<TokenMask>>,
    ) -> Result<Allowed, ConstraintError> {
        let mut mask = spare.unwrap_or_default();
        let Some(place) = Arc::get_mut(&mut mask) else { return self.follow_in(token, None) };
        Ok(if self.take(token, Some(place))? { Allowed::Tokens(mask) } else { Allowed::Complete })
    }

    /// Takes the answer's last token and says whether the answer is complete with it. Takes some 10 us: no mask is computed.
    ///
    /// # Errors
    /// [`ConstraintError`]; the constraint is of no use after it.
    pub fn completes(&mut self, token: u32) -> Result<bool, ConstraintError> {
        Ok(!self.take(Some(token), None)?)
    }

    /// Takes a token, and puts the mask of the next one into `mask`; false if the answer is complete.
    fn take(&mut self, token: Option<u32>, mask: Option<&mut TokenMask>) -> Result<bool, ConstraintError> {
        let (kind, parser) = (self.kind, self.own());
        let followed = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
            if let Some(token) = token {
                parser.consume_token(token)?;
            }
            let goes_on = !parser.check_stop()?;
            if let Some(mask) = mask.filter(|_| goes_on) {
                mask.set(parser.compute_mask()?.as_slice());
            }
            Ok(goes_on)
        }));
        match (followed, parser.stop_reason()) {
            (Ok(true), _) => Ok(true),
            (Ok(false), reason) if reason.is_ok() => Ok(false),
            (Err(_), StopReason::NoExtensionBias) => Err(ConstraintError::NoToken { kind }),
            (Ok(false), reason) => Err(refusal(kind, &reason.to_string())),
            (Err(error), StopReason::LexerTooComplex | StopReason::ParserTooComplex) => {
                Err(ConstraintError::TooComplex { kind, reason: short(&error.to_string()) })
            }
            (Err(error), _) => Err(ConstraintError::Internal(short(&error.to_string()))),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
