//! Files of kept prefixes: one holds those of one user and model.
//!
//! Little-endian: `RFPREFIX`, version (u32), digest of the model (32 bytes), user (u64, all ones: all users). Then length of
//! the layout's name (u32), the name, bytes of a page (u64), number of pages (u32). Per page: index of the page that it continues
//! (u32, all ones: none), number of tokens (u32), the tokens (u32 each), CRC-32 of its content (u32). Then the CRC-32 of all
//! before (u32): that is the index. Then the content of each page.
//!
//! A prompt needs the index, and the pages that it begins with. Each is checked when it is read.

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
const VERSION: u32 = 2;
/// No page, or no user.
const NONE: u32 = u32::MAX;
const LAYOUT_BYTES_MAX: usize = 64;
/// A page is read for fewer of its tokens only where the prompt ends.
const SHARED_LEAST: usize = KV_PAGE_TOKENS / 4;

/// Most bytes of a file without its pages.
pub(super) const HEADER_BYTES_MAX: u64 = 128 + LAYOUT_BYTES_MAX as u64;
/// Most bytes of a page in a file, beside its content.
pub(super) const PAGE_BYTES_BESIDE: u64 = 12 + 4 * KV_PAGE_TOKENS as u64;

/// Digest of a model's files, and of all else that its keys and values depend on.
pub(super) type Digest = [u8; 32];

/// A page in the index.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    after: Option<u32>,
    tokens: Vec<u32>,
    crc: u32,
}

/// Tokens of a page after the one that it continues.
type Place = (Option<u32>, Vec<u32>);

/// The pages of a file without their content: some 300 bytes a page.
#[derive(Debug)]
pub(super) struct Index {
    layout: String,
    page_bytes: u64,
    pages: Vec<Entry>,
    places: BTreeMap<Place, u32>,
}

impl Index {
    /// Number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// The pages that hold the longest known prefix of `tokens`, in order of position. The last may have other tokens after
    /// some.
    pub fn path(&self, tokens: &[u32]) -> Vec<u32> {
        let mut path: Vec<u32> = Vec::new();
        for page in tokens.chunks(KV_PAGE_TOKENS) {
            let place: Place = (path.last().copied(), page.to_vec());
            match self.places.get(&place) {
                Some(next) if page.len() == KV_PAGE_TOKENS => path.push(*next),
                _ => {
                    path.extend(self.partly(&place));
                    break;
                }
            }
        }
        path
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
        let (layout, page_bytes, count) = (from.text(LAYOUT_BYTES_MAX)?, from.wide()?, from.number()?);
        let mut index = Index { layout, page_bytes, pages: Vec::new(), places: BTreeMap::new() };
        for at in 0..count {
            let after = Some(from.number()?).filter(|after| *after != NONE);
            let tokens = from.number()? as usize;
            if after.is_some_and(|after| after >= at) || !(1..=KV_PAGE_TOKENS).contains(&tokens) {
                return Err(FileError::Damaged("its pages are not in order"));
            }
            let tokens = (0..tokens).map(|_| from.number()).collect::<Result<Vec<u32>, _>>()?;
            index.places.insert((after, tokens.clone()), at);
            index.pages.push(Entry { after, tokens, crc: from.number()? });
        }
        from.check()?;
        let (file, left) = from.rest();
        if page_bytes.checked_mul(count.into()) != Some(left) {
            return Err(FileError::Damaged("its pages have another length"));
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
            Ok(PrefixPage { after: at.checked_sub(1), tokens: entry.tokens.clone(), bytes })
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
        let at = start + u64::from(page) * index.page_bytes;
        let mut bytes = vec![0; usize::try_from(index.page_bytes).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }
}

/// Where the content of a page to write is.
#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    New(&'a PrefixPage),
    Old(u32),
}

/// A page to write.
struct Line<'a> {
    after: Option<u32>,
    tokens: &'a [u32],
    crc: u32,
    source: Source<'a>,
}

/// Writes a file that its owner alone may read; see [`summed::create`]. Beside `prefixes` it gets those pages of an older
/// file that are not among them, as many as have room in so many bytes. Their content is copied unchecked, with its checksum.
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
    let old = old.filter(|(old, _)| {
        (&old.known.index.layout, old.known.index.page_bytes) == (&prefixes.layout, page_bytes)
    });
    let mut lines: Vec<Line<'_>> = prefixes.pages.iter().map(Line::of).collect();
    if let Some((old, room)) = old {
        add_old(&mut lines, &old.known.index, room / page_bytes.saturating_add(PAGE_BYTES_BESIDE));
    }
    summed::create(path, MAGIC, VERSION, |out| {
        out.put(digest)?;
        out.wide(user(prefixes.uid))?;
        out.text(&prefixes.layout)?;
        out.wide(page_bytes)?;
        out.count(lines.len())?;
        lines.iter().try_for_each(|line| line.write(out))?;
        out.sum()?;
        for line in &lines {
            match (line.source, old) {
                (Source::New(page), _) => out.put(&page.bytes)?,
                (Source::Old(page), Some((old, _))) => {
                    out.put(&old.content(page).map_err(io::Error::other)?)?
                }
                (Source::Old(_), None) => {} // there are none
            }
        }
        Ok(())
    })
}

impl<'a> Line<'a> {
    fn of(page: &'a PrefixPage) -> Self {
        let (tokens, crc) = (page.tokens.as_slice(), crc32fast::hash(&page.bytes));
        Self { after: page.after, tokens, crc, source: Source::New(page) }
    }

    fn write(&self, out: &mut Out) -> io::Result<()> {
        out.number(self.after.unwrap_or(NONE))?;
        out.count(self.tokens.len())?;
        self.tokens.iter().try_for_each(|token| out.number(*token))?;
        out.number(self.crc)
    }
}

/// Adds at most so many pages of an older file that none of `lines` has, each after the one that it continues.
fn add_old<'a>(lines: &mut Vec<Line<'a>>, old: &'a Index, most: u64) {
    let most = lines.len().saturating_add(usize::try_from(most).unwrap_or(usize::MAX));
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
        moved.push(match there {
            Some((_, there)) => Some(*there),
            None if lines.len() < most => {
                let number = lines.len() as u32;
                lines.push(Line { after, tokens: place.1, crc: entry.crc, source: Source::Old(at) });
                places.insert(place, number);
                Some(number)
            }
            None => None,
        });
    }
}

fn user(uid: Option<u32>) -> u64 {
    uid.map_or(u64::MAX, u64::from)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::summed::tests::assert_every_byte_counts;
    use super::*;

    fn page(after: Option<u32>, tokens: u32, byte: u32) -> PrefixPage {
        PrefixPage { after, tokens: (byte..byte + tokens).collect(), bytes: vec![byte as u8; 24] }
    }

    fn of(pages: Vec<PrefixPage>) -> Prefixes {
        Prefixes { uid: Some(1000), layout: "cpu f16".to_owned(), pages }
    }

    fn prefixes() -> Prefixes {
        of(vec![page(None, 32, 1), page(Some(0), 32, 2), page(Some(1), 5, 3), page(Some(0), 9, 4)])
    }

    /// Each path to a page without one after it, read whole.
    fn read_all(path: &Path, digest: &Digest, uid: Option<u32>) -> Result<Vec<Prefixes>, FileError> {
        let reader = Reader::open(path, digest, uid)?;
        let ends = |at: &u32| reader.known.index.pages.iter().all(|page| page.after != Some(*at));
        let path_to = |end: u32| {
            let mut path = vec![end];
            while let Some(before) = reader.known.index.pages[path[0] as usize].after {
                path.insert(0, before);
            }
            path
        };
        let ends = (0..reader.known.index.len() as u32).filter(ends);
        ends.map(|end| reader.prefixes(&path_to(end), uid)).collect()
    }

    fn written() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.prefixes");
        write(&path, &[7; 32], &prefixes(), None).unwrap();
        (dir, path)
    }

    #[test]
    fn a_file_is_read_as_it_was_written_and_by_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let (dir, path) = written();
        let metadata = fs::metadata(&path).unwrap();
        let bytes = 8 + 4 + 32 + 8 + 4 + 7 + 8 + 4 + 4 * 12 + 4 * (32 + 32 + 5 + 9) + 4 + 4 * 24;
        assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (bytes, 0o600));
        let all = prefixes().pages;
        let chain = |pages: &[usize]| {
            let chained = (0u32..).zip(pages);
            of(chained.map(|(at, of)| PrefixPage { after: at.checked_sub(1), ..all[*of].clone() }).collect())
        };
        let read = read_all(&path, &[7; 32], Some(1000)).unwrap();
        assert_eq!(read, [chain(&[0, 1, 2]), chain(&[0, 3])]);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "no part is left");
        assert!(matches!(read_all(&path, &[8; 32], Some(1000)), Err(FileError::Other)));
        assert!(matches!(read_all(&path, &[7; 32], Some(1001)), Err(FileError::Other)));
        assert!(matches!(read_all(&path, &[7; 32], None), Err(FileError::Other)));
    }

    #[test]
    fn with_any_byte_changed_or_missing_nothing_is_used() {
        let (_dir, path) = written();
        assert_every_byte_counts(&path, || read_all(&path, &[7; 32], Some(1000)).is_err());
    }

    #[test]
    fn a_prompt_needs_its_own_pages_alone() {
        let (_dir, path) = written();
        let index = Reader::open(&path, &[7; 32], Some(1000)).unwrap().known.index;
        let tokens = |pages: &[(u32, u32)]| -> Vec<u32> {
            pages.iter().flat_map(|(from, count)| *from..from + count).collect()
        };
        let cases = [
            (tokens(&[(1, 32), (2, 32), (3, 5)]), vec![0, 1, 2]),
            (tokens(&[(1, 32), (2, 32), (3, 5), (90, 40)]), vec![0, 1]), // 5 tokens are too few for a page
            (tokens(&[(1, 32), (4, 9), (90, 40)]), vec![0, 3]),
            (tokens(&[(1, 32), (4, 6)]), vec![0, 3]),
            (tokens(&[(1, 32), (2, 9)]), vec![0, 1]),
            (tokens(&[(1, 32), (90, 40)]), vec![0]),
            (tokens(&[(1, 9)]), vec![0]),
            (tokens(&[(1, 3), (90, 40)]), vec![]),
            (tokens(&[(2, 32)]), vec![]),
            (vec![], vec![]),
        ];
        for (tokens, pages) in cases {
            assert_eq!(index.path(&tokens), pages, "{tokens:?}");
        }
        // Others may be damaged: they are not looked at.
        let mut bytes = fs::read(&path).unwrap();
        let contents = bytes.len() - 4 * 24;
        bytes[contents + 24..contents + 3 * 24].fill(0);
        fs::write(&path, &bytes).unwrap();
        let reader = Reader::open(&path, &[7; 32], Some(1000)).unwrap();
        assert_eq!(reader.prefixes(&[0, 3], Some(1000)).unwrap().pages[1].bytes, prefixes().pages[3].bytes);
        assert!(matches!(reader.prefixes(&[0, 1], Some(1000)), Err(FileError::Damaged(_))));
    }

    #[test]
    fn pages_of_an_older_file_stay_beside_new_ones_as_far_as_they_have_room() {
        let newer = of(vec![page(None, 32, 1), page(Some(0), 32, 7), page(Some(0), 12, 4)]);
        type Pages<'a> = &'a [(Option<u32>, u32)];
        let wanted: [(u64, Pages<'_>); 3] = [
            (u64::MAX, &[(None, 1), (Some(0), 7), (Some(0), 4), (Some(0), 2), (Some(3), 3)]),
            (24 + PAGE_BYTES_BESIDE, &[(None, 1), (Some(0), 7), (Some(0), 4), (Some(0), 2)]),
            (9, &[(None, 1), (Some(0), 7), (Some(0), 4)]),
        ];
        for (room, pages) in wanted {
            let (_dir, path) = written();
            let old = Reader::open(&path, &[7; 32], Some(1000)).unwrap();
            write(&path, &[7; 32], &newer, Some((&old, room))).unwrap();
            let all = Reader::open(&path, &[7; 32], Some(1000)).unwrap();
            let found: Vec<_> =
                all.known.index.pages.iter().map(|page| (page.after, page.tokens[0])).collect();
            assert_eq!(found, pages, "{room}");
            read_all(&path, &[7; 32], Some(1000)).unwrap();
        }
        // Not those of another layout.
        let (_dir, path) = written();
        let old = Reader::open(&path, &[7; 32], Some(1000)).unwrap();
        let other = Prefixes { layout: "gpu".to_owned(), ..newer };
        write(&path, &[7; 32], &other, Some((&old, u64::MAX))).unwrap();
        assert_eq!(Reader::open(&path, &[7; 32], Some(1000)).unwrap().known.index.len(), 3);
    }
}
