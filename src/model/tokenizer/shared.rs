//! One tokenizer for all mapped models of one vocabulary.
//!
//! A vocabulary of 128,000 tokens takes 30 MiB in metadata and tables. Fine-tunes and other quantisations share it. A
//! tokenizer is found by a hash of the file's `tokenizer.*` metadata, and shared only when all of it is equal. The last
//! model that uses it frees it.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::{Arc, OnceLock, Weak};

use hashbrown::DefaultHashBuilder;

use super::special::swallows_spaces;
use super::{Tokenizer, TokenizerError};
use crate::lock::{Mutex, Rank};
use crate::model::constraint::{ConstraintCompiler, ConstraintError};
use crate::model::gguf::{Entry, Gguf, Value};
use crate::share::Charge;

/// A [`Tokenizer`] that several models may share. Clones are the same tokenizer.
#[derive(Clone, Debug)]
pub struct SharedTokenizer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    made_of: MadeOf,
    tokenizer: Tokenizer,
    /// Made with the first constraint.
    constraints: OnceLock<Result<Arc<ConstraintCompiler>, ConstraintError>>,
    /// Held while it is made.
    making: Mutex<()>,
}

/// All inputs of a tokenizer.
#[derive(Debug, PartialEq)]
struct MadeOf {
    entries: Vec<Entry>,
    /// Derived from `general.name`; otherwise equal models may differ in it.
    swallows_spaces: bool,
}

impl MadeOf {
    fn of(gguf: &Gguf) -> Self {
        // Chat templates do not affect tokens, and fine-tunes differ in them.
        let wanted = |key: &str| key.starts_with("tokenizer.") && !key.starts_with("tokenizer.chat_template");
        let swallows_spaces = swallows_spaces(gguf.string("general.name"));
        Self { entries: gguf.entries(wanted), swallows_spaces }
    }

    fn hash(&self, builder: &DefaultHashBuilder) -> u64 {
        let mut state = builder.build_hasher();
        self.swallows_spaces.hash(&mut state);
        for (key, value) in &self.entries {
            key.hash(&mut state);
            value.hash_to(&mut state);
        }
        state.finish()
    }

    /// True when all inputs are equal, arrays by sharing memory. May be false for equal arrays elsewhere in memory.
    fn is(&self, other: &Self) -> bool {
        let same = |(one, two): (&Entry, &Entry)| {
            let look = || !matches!(&*one.1, Value::Array(_)) && one.1 == two.1;
            one.0 == two.0 && (Arc::ptr_eq(&one.1, &two.1) || look())
        };
        self.swallows_spaces == other.swallows_spaces
            && self.entries.len() == other.entries.len()
            && self.entries.iter().zip(&other.entries).all(same)
    }
}

impl SharedTokenizer {
    /// The metadata it was built from, for headers that share it.
    pub fn entries(&self) -> &[Entry] {
        &self.0.made_of.entries
    }

    /// The compiler of constraints for this vocabulary. The first call builds it, which takes as long as
    /// [`ConstraintCompiler::new`]; other callers wait for it.
    ///
    /// # Errors
    /// [`ConstraintError`], if the vocabulary cannot be constrained.
    pub fn constraints(&self) -> Result<Arc<ConstraintCompiler>, ConstraintError> {
        self.constraints_charged(None)
    }

    /// As [`SharedTokenizer::constraints`]. The call that builds it has the table charged to `charge`, which is held as long as
    /// the vocabulary. A table that finds no room is built by a later call.
    ///
    /// # Errors
    /// As [`SharedTokenizer::constraints`], and [`ConstraintError::NoRoom`].
    pub fn constraints_charged(
        &self,
        charge: Option<Charge>,
    ) -> Result<Arc<ConstraintCompiler>, ConstraintError> {
        if let Some(made) = self.0.constraints.get() {
            return made.clone();
        }
        let _making = self.0.making.lock();
        if let Some(made) = self.0.constraints.get() {
            return made.clone();
        }
        let made = ConstraintCompiler::new(&self.0.tokenizer, charge).map(Arc::new);
        if !matches!(made, Err(ConstraintError::NoRoom(_))) {
            let _ = self.0.constraints.set(made.clone()); // nobody else makes one
        }
        made
    }

    /// True when both are the same tokenizer in memory.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Deref for SharedTokenizer {
    type Target = Tokenizer;

    fn deref(&self) -> &Tokenizer {
        &self.0.tokenizer
    }
}

/// The tokenizers in use by models.
#[derive(Debug)]
pub struct Tokenizers {
    /// By the hash of their inputs. Holds the living tokenizers, and those that died since the last insertion.
    known: Mutex<HashMap<u64, Weak<Shared>>>,
    hasher: DefaultHashBuilder,
}

impl Default for Tokenizers {
    fn default() -> Self {
        Self { known: Mutex::new(Rank::Tokenizers, HashMap::new()), hasher: DefaultHashBuilder::default() }
    }
}

impl Tokenizers {
    /// The tokenizer of a file: an existing one, else a new one. Two concurrent callers may both build it, and both get
    /// the same one.
    ///
    /// Cost: that of [`Tokenizer::new`]; or about 2 ms to compare 150,000 tokens; or nothing for a header that shares
    /// the [known](Tokenizers::known) values.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn of(&self, gguf: &Gguf) -> Result<SharedTokenizer, TokenizerError> {
        let made_of = MadeOf::of(gguf);
        if let Some(same) = self.alive().into_iter().find(|known| known.made_of.is(&made_of)) {
            return Ok(SharedTokenizer(same));
        }
        let hash = made_of.hash(&self.hasher);
        if let Some(shared) = self.find(hash, &made_of) {
            return Ok(shared);
        }
        let tokenizer = Tokenizer::from_gguf(gguf)?;
        let (constraints, making) = (OnceLock::new(), Mutex::new(Rank::Vocabulary, ()));
        let new = Arc::new(Shared { made_of, tokenizer, constraints, making });
        if let Some(shared) = self.find(hash, &new.made_of) {
            return Ok(shared);
        }
        let mut known = self.known.lock();
        known.retain(|_, known| known.strong_count() > 0);
        known.insert(hash, Arc::downgrade(&new));
        Ok(SharedTokenizer(new))
    }

    /// The metadata of the current tokenizers, by key: see [`Gguf::open_beside`].
    pub fn known(&self) -> impl Fn(&str) -> Vec<Arc<Value>> + use<> {
        let alive = self.alive();
        move |key| {
            let entries = alive.iter().flat_map(|known| &known.made_of.entries);
            entries.filter(|(other, _)| **other == *key).map(|(_, value)| Arc::clone(value)).collect()
        }
    }

    fn alive(&self) -> Vec<Arc<Shared>> {
        self.known.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Number of tokenizers in use.
    pub fn living(&self) -> usize {
        self.known.lock().values().filter(|known| known.strong_count() > 0).count()
    }

    fn find(&self, hash: u64, made_of: &MadeOf) -> Option<SharedTokenizer> {
        // Compares, and may free, megabytes: both without the lock.
        let found = self.known.lock().get(&hash).and_then(Weak::upgrade)?;
        (found.made_of == *made_of).then_some(SharedTokenizer(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The small model's header with `from`, which occurs once, replaced by `to` of equal length.
    fn header(from: &str, to: &str) -> Gguf {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/tinystories-260k-f32.gguf");
        let mut bytes = std::fs::read(path).unwrap();
        assert_eq!(from.len(), to.len());
        let found = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        bytes[found..][..to.len()].copy_from_slice(to.as_bytes());
        Gguf::parse(&bytes[..]).unwrap()
    }

    fn original() -> Gguf {
        header("stories", "stories")
    }

    #[test]
    fn equal_vocabularies_have_one_tokenizer_and_hold_their_metadata_once() {
        let tokenizers = Tokenizers::default();
        let (mut first, mut second) = (original(), header("tinyllamas", "othernames"));
        let (one, two) = (tokenizers.of(&first).unwrap(), tokenizers.of(&second).unwrap());
        assert!(one.is(&two));
        assert_eq!(tokenizers.living(), 1);
        let text = |gguf: &Gguf| gguf.strings("tokenizer.ggml.tokens").unwrap().get(300).unwrap().as_ptr();
        assert_ne!(text(&first), text(&second));
        first.share(one.entries());
        second.share(two.entries());
        assert_eq!(text(&first), text(&second));
        assert_eq!(text(&first), one.token_text(300).unwrap().as_ptr(), "the vocabulary's texts are no copy");
        assert_eq!(second.string("general.name"), Some("othernames-stories-260k"), "its own stays its own");
        assert_eq!(first.metadata().count(), original().metadata().count());
        drop((one, first, second));
        assert_eq!(tokenizers.living(), 1);
        drop(two);
        assert_eq!(tokenizers.living(), 0, "the last model frees it");
        assert!(!tokenizers.of(&original()).unwrap().entries().is_empty());
    }

    #[test]
    fn a_header_read_beside_a_tokenizer_takes_its_metadata_from_there() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/tinystories-260k-f32.gguf");
        let bytes = std::fs::read(path).unwrap();
        let tokenizers = Tokenizers::default();
        let first = tokenizers.of(&original()).unwrap();
        let read = Gguf::parse_beside(&bytes[..], &tokenizers.known()).unwrap();
        let text = |gguf: &Gguf| gguf.strings("tokenizer.ggml.tokens").unwrap().get(300).unwrap().as_ptr();
        assert_eq!(text(&read), first.token_text(300).unwrap().as_ptr(), "not built again");
        assert!(first.0.made_of.is(&MadeOf::of(&read)), "found without a hash");
        assert!(
            !first.0.made_of.is(&MadeOf::of(&original())),
            "equal arrays elsewhere take more than a look"
        );
        assert!(tokenizers.of(&read).unwrap().is(&first));
        drop((first, read));
        assert_eq!(tokenizers.known()("tokenizer.ggml.tokens").len(), 0, "what nobody has is not kept");
    }

    #[test]
    fn one_changed_token_makes_another_vocabulary() {
        let tokenizers = Tokenizers::default();
        let one = tokenizers.of(&original()).unwrap();
        // A token's text, an unread key, and the name that makes spaces be swallowed.
        let kinds = [("<0x1F>", "<0x1f>"), ("bos_token_id", "xyz_token_id"), ("tinyllamas", "phi-3-nano")];
        for (from, to) in kinds {
            let other = tokenizers.of(&header(from, to)).unwrap();
            assert!(!other.is(&one), "{to}");
            assert!(other.is(&tokenizers.of(&header(from, to)).unwrap()), "{to}");
            drop(other);
            assert_eq!(tokenizers.living(), 1, "the other went with its last owner");
        }
        assert!(tokenizers.of(&original()).unwrap().is(&one));
    }

    #[test]
    fn the_same_hash_is_not_enough() {
        let tokenizers = Tokenizers::default();
        let (one, other) = (original(), header("<0x1F>", "<0x1f>"));
        let shared = tokenizers.of(&one).unwrap();
        let hash = MadeOf::of(&other).hash(&tokenizers.hasher);
        tokenizers.known.lock().insert(hash, Arc::downgrade(&shared.0));
        assert!(!tokenizers.of(&other).unwrap().is(&shared));
    }
}
