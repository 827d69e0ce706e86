//! Files of kept prefixes: one holds those of one user and model.
//!
//! Little-endian: `RFPREFIX`, version (u32), digest of the model (32 bytes), user (u64, all ones: all users). Then length of
//! the layout's name (u32), the name, and bytes of a page (u64). Then those of a recurrent state (u64, 0: the model has none), and
//! the number of pages (u32). Each page has the index of the page that it continues (u32, all ones: none), and the number of its
//! tokens (u32). The tokens follow (u32 each), and the CRC-32 of its content (u32). Then 1 if the state after its tokens is there,
//! else 0 (u32), and the CRC-32 of that (u32). The CRC-32 of all before (u32) ends the index. Then comes the content of each page,
//! and each state that is there.
//!
//! A prompt needs the index, and the pages that it begins with. Each is checked when it is read. A model with recurrent states goes
//! on behind a state alone, so its prompts need the pages up to one, and that one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use super::summed::{self, FileError, In, Out};
use crate::backend::KV_PAGE_TOKENS;
use crate::scheduler::{PrefixPage, Prefixes};

const MAGIC: &[u8; 8] = b"RFPREFIX";
/// Changes with the format.
const VERSION: u32 = 3;
/// No page, or no user.
const NONE: u32 = u32::MAX;
const LAYOUT_BYTES_MAX: usize = 64;
/// A page is read for fewer of its tokens only where the prompt ends.
const SHARED_LEAST: usize = KV_PAGE_TOKENS / 4;

/// Most bytes of a file without its pages.
pub(super) const HEADER_BYTES_MAX: u64 = 128 + LAYOUT_BYTES_MAX as u64;
/// Most bytes of a page in a file, beside its content and its state's.
pub(super) const PAGE_BYTES_BESIDE: u64 = 20 + 4 * KV_PAGE_TOKENS as u64;

/// Digest of a model's files, and of all else that its keys and values depend on.
pub(super) type Digest = [u8; 32];

/// A page in the index.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    after: Option<u32>,
    tokens: Vec<u32>,
    crc: u32,
    state: Option<EntryState>,
}

/// The state after a page's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EntryState {
    /// Its place among the states of the file.
    number: u32,
    crc: u32,
}

/// Tokens of a page after the one that it continues.
type Place = (Option<u32>, Vec<u32>);

/// The pages of a file without their content: some 300 bytes a page.
#[derive(Debug)]
pub(super) struct Index {
    layout: String,
    page_bytes: u64,
    /// Bytes of a recurrent state; 0 if the model has none.
    state_bytes: u64,
    pages: Vec<Entry>,
    places: BTreeMap<Place, u32>,
}

impl Index {
    /// Number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// The pages that hold the longest known prefix of `tokens`, in order of position. The last may have other tokens after
    /// some. With recurrent states, the last one has a state after its tokens.
    pub fn path(&self, tokens: &[u32]) -> Vec<u32> {
        let mut path: Vec<u32> = Vec::new();
        for page in tokens.chunks(KV_PAGE_TOKENS) {
            let place: Place = (path.last().copied(), page.to_vec());
            match self.places.get(&place) {
                Some(next) if page.len() == KV_PAGE_TOKENS => path.push(*next),
                _ if self.state_bytes > 0 => {
                    path.extend(self.whole_beginning(&place));
                    break;
                }
                _ => {
                    path.extend(self.partly(&place));
                    break;
                }
            }
        }
        while self.state_bytes > 0 && path.last().is_some_and(|last| !self.has_state(*last)) {
            path.pop();
        }
        path
    }

    /// Pages of a path whose return tells that all of it was given back. With recurrent states that is the last one: its state
    /// is given back, and no other.
    pub fn telling<'a>(&self, path: &'a [u32]) -> &'a [u32] {
        let all_but_last = if self.state_bytes > 0 { path.len().saturating_sub(1) } else { 0 };
        path.get(all_but_last..).unwrap_or_default()
    }

    /// Whether a page's state is in the file.
    pub fn has_state(&self, page: u32) -> bool {
        self.pages.get(page as usize).is_some_and(|page| page.state.is_some())
    }

    /// The page at a place all of whose tokens are the first ones of those asked for. It is before them in the order.
    fn whole_beginning(&self, place: &Place) -> Option<u32> {
        let ((of, tokens), page) =
            self.places.range((Bound::Unbounded, Bound::Included(place))).next_back()?;
        (*of == place.0 && place.1.starts_with(tokens)).then_some(*page)
    }

    /// The page at a place whose tokens share enough with those asked for: a neighbour in their order.
    fn partly(&self, place: &Place) -> Option<u32> {
        let before = self.places.range((Bound::Unbounded, Bound::Excluded(place))).next_back();
        let after = self.places.range((Bound::Included(place), Bound::Unbounded)).next();
        let there = [before, after].into_iter().flatten().filter(|((of, _), _)| *of == place.0);
        let shared = |tokens: &[u32]| tokens.iter().zip(&place.1).take_while(|(a, b)| a == b).count();
        let (count, page) = there.map(|((_, tokens), page)| (shared(tokens), *page)).max()?;
        // The last token of a prompt is computed in any case.
        let of_use = place.1.len().saturating_sub(1);
        (of_use > 0 && count >= SHARED_LEAST.min(of_use)).then_some(page)
    }
}

/// The index of a file, right for as long as the file is the same.
#[derive(Clone, Debug)]
pub(super) struct Known {
    identity: Identity,
    /// Bytes before the content of the first page.
    start: u64,
    pub index: Arc<Index>,
}

/// Tells whether a file changed: device, inode, bytes, and the times of its content and of itself.
type Identity = (u64, u64, u64, [i64; 4]);

fn identity(of: &File) -> io::Result<Identity> {
    let of = of.metadata()?;
    Ok((of.dev(), of.ino(), of.len(), [of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec()]))
}

/// A file whose index was read and checked.
#[derive(Debug)]
pub(super) struct Reader {
    file: File,
    pub known: Known,
}

impl Reader {
    /// Opens a file whose index is known, and reads no index unless it changed.
    ///
    /// # Errors
    /// As [`Reader::open`].
    pub fn open_known(
        path: &Path,
        digest: &Digest,
        uid: Option<u32>,
        known: Option<Known>,
    ) -> Result<Self, FileError> {
        if let Some(known) = known {
            let file = File::open(path)?;
            if identity(&file)? == known.identity {
                return Ok(Self { file, known });
            }
        }
        Self::open(path, digest, uid)
    }

    /// Opens a file and reads its index.
    ///
    /// # Errors
    /// [`FileError`]. A count in the file takes no memory that its length does not justify.
    pub fn open(path: &Path, digest: &Digest, uid: Option<u32>) -> Result<Self, FileError> {
        let mut from = In::open(path, MAGIC, VERSION)?;
        if from.array::<32>()? != *digest || from.wide()? != user(uid) {
            return Err(FileError::Other);
        }
        let (layout, page_bytes) = (from.text(LAYOUT_BYTES_MAX)?, from.wide()?);
        let (state_bytes, count) = (from.wide()?, from.number()?);
        let mut index = Index { layout, page_bytes, state_bytes, pages: Vec::new(), places: BTreeMap::new() };
        let mut states = 0;
        for at in 0..count {
            let after = Some(from.number()?).filter(|after| *after != NONE);
            let tokens = from.number()? as usize;
            if after.is_some_and(|after| after >= at) || !(1..=KV_PAGE_TOKENS).contains(&tokens) {
                return Err(FileError::Damaged("its pages are not in order"));
            }
            let tokens = (0..tokens).map(|_| from.number()).collect::<Result<Vec<u32>, _>>()?;
            index.places.insert((after, tokens.clone()), at);
            let crc = from.number()?;
            let state = match (from.number()?, from.number()?) {
                (0, 0) => None,
                (1, crc) if state_bytes > 0 => Some(EntryState { number: states, crc }),
                _ => return Err(FileError::Damaged("a page has a state that its model has not")),
            };
            states += u32::from(state.is_some());
            index.pages.push(Entry { after, tokens, crc, state });
        }
        from.check()?;
        let (file, left) = from.rest();
        let (pages, states) = (page_bytes.checked_mul(count.into()), state_bytes.checked_mul(states.into()));
        if pages.zip(states).and_then(|(pages, states)| pages.checked_add(states)) != Some(left) {
            return Err(FileError::Damaged("its pages and states have another length"));
        }
        let identity = identity(&file)?;
        let known = Known { identity, start: identity.2.saturating_sub(left), index: Arc::new(index) };
        Ok(Self { file, known })
    }

    /// The content of these pages, each of which continues the one before. Nothing is used unless all of it is right.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn prefixes(&self, path: &[u32], uid: Option<u32>) -> Result<Prefixes, FileError> {
        let page = |(at, page): (u32, &u32)| {
            let entry = self.entry(*page)?;
            let bytes = self.content(*page)?;
            if crc32fast::hash(&bytes) != entry.crc {
                return Err(FileError::Damaged("the checksum of a page is another"));
            }
            let (after, tokens) = (at.checked_sub(1), entry.tokens.clone());
            // Those before the last are of no use to this prompt.
            let state = entry.state.filter(|_| path.last() == Some(page));
            let state = state.map(|state| self.checked_state(state)).transpose()?;
            Ok(PrefixPage { after, tokens, bytes, state })
        };
        let pages = (0..).zip(path).map(page).collect::<Result<_, FileError>>()?;
        Ok(Prefixes { uid, layout: self.known.index.layout.clone(), pages })
    }

    fn entry(&self, page: u32) -> Result<&Entry, FileError> {
        self.known.index.pages.get(page as usize).ok_or(FileError::Damaged("it has no such page"))
    }

    /// The content of a page, unchecked.
    fn content(&self, page: u32) -> Result<Vec<u8>, FileError> {
        // No overflow: all pages together are within the file's length.
        let Known { start, index, .. } = &self.known;
        self.read(start + u64::from(page) * index.page_bytes, index.page_bytes)
    }

    /// A state's content, unchecked.
    fn state(&self, state: EntryState) -> Result<Vec<u8>, FileError> {
        let Known { start, index, .. } = &self.known;
        let first = start + index.pages.len() as u64 * index.page_bytes;
        self.read(first + u64::from(state.number) * index.state_bytes, index.state_bytes)
    }

    fn checked_state(&self, state: EntryState) -> Result<Vec<u8>, FileError> {
        let bytes = self.state(state)?;
        if crc32fast::hash(&bytes) != state.crc {
            return Err(FileError::Damaged("the checksum of a state is another"));
        }
        Ok(bytes)
    }

    fn read(&self, at: u64, bytes: u64) -> Result<Vec<u8>, FileError> {
        let mut content = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut content, at)?;
        Ok(content)
    }
}

/// Where the content of a page to write is.
#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    New(&'a [u8]),
    Old(u32),
}

/// Where the content of a state to write is.
#[derive(Clone, Copy, Debug)]
enum StateSource<'a> {
    New(&'a [u8]),
    Old(EntryState),
}

/// A page to write.
struct Line<'a> {
    after: Option<u32>,
    tokens: &'a [u32],
    crc: u32,
    source: Source<'a>,
    /// The checksum of the state after its tokens, and where that is.
    state: Option<(u32, StateSource<'a>)>,
}

/// Writes a file that its owner alone may read; see [`summed::create`]. Beside `prefixes` it gets those pages of an older
/// file that are not among them, and its states, as far as so many bytes go. Their content is copied unchecked, with its
/// checksum.
///
/// # Errors
/// [`io::Error`].
pub(super) fn write(
    path: &Path,
    digest: &Digest,
    prefixes: &Prefixes,
    old: Option<(&Reader, u64)>,
) -> io::Result<u64> {
    let page_bytes = prefixes.pages.first().map_or(0, |page| page.bytes.len() as u64);
    let states = prefixes.pages.iter().filter_map(|page| page.state.as_ref());
    let state_bytes = states.map(|state| state.len() as u64).next().unwrap_or(0);
    let old = old.filter(|(Reader { known: Known { index, .. }, .. }, _)| {
        (&index.layout, index.page_bytes, index.state_bytes) == (&prefixes.layout, page_bytes, state_bytes)
    });
    let mut lines: Vec<Line<'_>> = prefixes.pages.iter().map(Line::of).collect();
    if let Some((old, room)) = old {
        add_old(&mut lines, &old.known.index, room);
    }
    summed::create(path, MAGIC, VERSION, |out| {
        out.put(digest)?;
        out.wide(user(prefixes.uid))?;
        out.text(&prefixes.layout)?;
        out.wide(page_bytes)?;
        out.wide(state_bytes)?;
        out.count(lines.len())?;
        lines.iter().try_for_each(|line| line.write(out))?;
        out.sum()?;
        for line in &lines {
            match (line.source, old) {
                (Source::New(bytes), _) => out.put(bytes)?,
                (Source::Old(page), Some((old, _))) => {
                    out.put(&old.content(page).map_err(io::Error::other)?)?
                }
                (Source::Old(_), None) => {} // there are none
            }
        }
        for (_, source) in lines.iter().filter_map(|line| line.state) {
            match (source, old) {
                (StateSource::New(bytes), _) => out.put(bytes)?,
                (StateSource::Old(state), Some((old, _))) => {
                    out.put(&old.state(state).map_err(io::Error::other)?)?
                }
                (StateSource::Old(_), None) => {} // there are none
            }
        }
        Ok(())
    })
}

impl<'a> Line<'a> {
    fn of(page: &'a PrefixPage) -> Self {
        let (tokens, crc) = (page.tokens.as_slice(), crc32fast::hash(&page.bytes));
        let state = page.state.as_deref();
        let state = state.map(|bytes| (crc32fast::hash(bytes), StateSource::New(bytes)));
        Self { after: page.after, tokens, crc, source: Source::New(&page.bytes), state }
    }

    fn write(&self, out: &mut Out) -> io::Result<()> {
        out.number(self.after.unwrap_or(NONE))?;
        out.count(self.tokens.len())?;
        self.tokens.iter().try_for_each(|token| out.number(*token))?;
        out.number(self.crc)?;
        out.number(u32::from(self.state.is_some()))?;
        out.number(self.state.map_or(0, |(crc, _)| crc))
    }
}

/// Adds pages of an older file that none of `lines` has, each after the one that it continues, and states that these lack. They
/// have so many bytes at most.
fn add_old<'a>(lines: &mut Vec<Line<'a>>, old: &'a Index, mut room: u64) {
    let page_bytes = old.page_bytes.saturating_add(PAGE_BYTES_BESIDE);
    let mut places: BTreeMap<(Option<u32>, &[u32]), u32> =
        (0..).zip(lines.iter()).map(|(at, line)| ((line.after, line.tokens), at)).collect();
    // The places of the old pages among all.
    let mut moved: Vec<Option<u32>> = Vec::new();
    for (at, entry) in (0..).zip(&old.pages) {
        let before = entry.after.map(|after| moved.get(after as usize).copied().flatten());
        let Some(after) = before.map_or(Some(None), |before| before.map(Some)) else {
            moved.push(None); // the page that it continues has no room
            continue;
        };
        let place = (after, entry.tokens.as_slice());
        // One with the same tokens, and perhaps more, is next to it in the order.
        let next = places.range(place..).next();
        let there = next.filter(|((of, tokens), _)| *of == after && tokens.starts_with(place.1));
        let there = match there {
            Some((_, there)) => Some(*there),
            None if page_bytes <= room => {
                room -= page_bytes;
                let number = lines.len() as u32;
                let (tokens, source) = (place.1, Source::Old(at));
                lines.push(Line { after, tokens, crc: entry.crc, source, state: None });
                places.insert(place, number);
                Some(number)
            }
            None => None,
        };
        moved.push(there);
        let line = there.and_then(|there| lines.get_mut(there as usize));
        if let (Some(line), Some(state)) = (line, entry.state)
            && line.state.is_none()
            && line.tokens.len() == entry.tokens.len()
            && old.state_bytes <= room
        {
            room -= old.state_bytes;
            line.state = Some((state.crc, StateSource::Old(state)));
        }
    }
}

fn user(uid: Option<u32>) -> u64 {
    uid.map_or(u64::MAX, u64::from)
}

#[cfg(test)]
mod tests;
