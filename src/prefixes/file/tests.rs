use std::fs;

use super::*;
use crate::prefixes::summed::tests::assert_every_byte_counts;

fn page(after: Option<u32>, tokens: u32, byte: u32) -> PrefixPage {
    let (tokens, bytes) = ((byte..byte + tokens).collect(), vec![byte as u8; 24]);
    PrefixPage { after, tokens, bytes, state: None }
}

/// The same with a state after it.
fn ended(after: Option<u32>, tokens: u32, byte: u32) -> PrefixPage {
    PrefixPage { state: Some(vec![byte as u8; 10]), ..page(after, tokens, byte) }
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
    let bytes = 8 + 4 + 32 + 8 + 4 + 7 + 8 + 8 + 4 + 4 * 20 + 4 * (32 + 32 + 5 + 9) + 4 + 4 * 24;
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
fn a_prompt_of_a_recurrent_model_needs_the_pages_up_to_a_state() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.prefixes");
    let all = of(vec![
        page(None, 32, 1),
        ended(Some(0), 32, 2),
        page(Some(1), 32, 3),
        ended(Some(2), 5, 4),
        ended(Some(0), 9, 5),
    ]);
    write(&path, &[7; 32], &all, None).unwrap();
    let reader = Reader::open(&path, &[7; 32], Some(1000)).unwrap();
    let tokens = |pages: &[(u32, u32)]| -> Vec<u32> {
        pages.iter().flat_map(|(from, count)| *from..from + count).collect()
    };
    let cases = [
        (tokens(&[(1, 32), (2, 32), (3, 32), (4, 9)]), vec![0, 1, 2, 3]),
        (tokens(&[(1, 32), (2, 32), (3, 32), (4, 5)]), vec![0, 1, 2, 3]),
        (tokens(&[(1, 32), (2, 32), (3, 32), (4, 4)]), vec![0, 1]), // the state is behind one token more
        (tokens(&[(1, 32), (2, 32), (3, 30)]), vec![0, 1]),
        (tokens(&[(1, 32), (5, 12)]), vec![0, 4]),
        (tokens(&[(1, 32), (5, 8)]), vec![]),
        (tokens(&[(1, 32)]), vec![]),
    ];
    for (tokens, pages) in cases {
        assert_eq!(reader.known.index.path(&tokens), pages, "{tokens:?}");
    }
    let read = reader.prefixes(&[0, 1, 2, 3], Some(1000)).unwrap().pages;
    let states: Vec<_> = read.into_iter().map(|page| page.state).collect();
    assert_eq!(states, [None, None, None, Some(vec![4; 10])], "the last one alone is of use");
    // A state whose bytes changed is not used, and others are not looked at.
    let mut bytes = fs::read(&path).unwrap();
    let first = bytes.len() - 3 * 10;
    bytes[first + 10] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let reader = Reader::open(&path, &[7; 32], Some(1000)).unwrap();
    assert!(matches!(reader.prefixes(&[0, 1, 2, 3], Some(1000)), Err(FileError::Damaged(_))));
    assert_eq!(reader.prefixes(&[0, 1], Some(1000)).unwrap().pages[1].state, Some(vec![2; 10]));
}

#[test]
fn with_any_byte_of_a_state_or_of_the_index_changed_it_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.prefixes");
    write(&path, &[7; 32], &of(vec![ended(None, 32, 1), ended(Some(0), 3, 2)]), None).unwrap();
    assert_every_byte_counts(&path, || {
        let read = Reader::open(&path, &[7; 32], Some(1000));
        read.and_then(|reader| {
            Ok((reader.prefixes(&[0], Some(1000))?, reader.prefixes(&[0, 1], Some(1000))?))
        })
        .is_err()
    });
}

#[test]
fn a_file_from_before_is_refused() {
    let (_dir, path) = written();
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 2;
    fs::write(&path, &bytes).unwrap();
    let refused = Reader::open(&path, &[7; 32], Some(1000)).unwrap_err();
    assert!(matches!(refused, FileError::Version { found: 2, known: VERSION }), "{refused}");
}

#[test]
fn states_of_an_older_file_stay_as_far_as_they_have_room() {
    let newer = of(vec![page(None, 32, 1), page(Some(0), 32, 2), ended(Some(1), 7, 9)]);
    let older = of(vec![page(None, 32, 1), ended(Some(0), 32, 2), ended(Some(1), 5, 3)]);
    let states = |room: u64| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.prefixes");
        write(&path, &[7; 32], &older, None).unwrap();
        let old = Reader::open(&path, &[7; 32], Some(1000)).unwrap();
        write(&path, &[7; 32], &newer, Some((&old, room))).unwrap();
        let all = Reader::open(&path, &[7; 32], Some(1000)).unwrap();
        let read = |path: &[u32]| all.prefixes(path, Some(1000)).unwrap().pages.pop().unwrap().state;
        (0..all.known.index.len() as u32)
            .map(|at| match at {
                0 => read(&[0]),
                1 => read(&[0, 1]),
                at => read(&[0, 1, at]),
            })
            .map(|state| state.map(|bytes| bytes[0]))
            .collect::<Vec<_>>()
    };
    assert_eq!(states(u64::MAX), [None, Some(2), Some(9), Some(3)]);
    assert_eq!(states(10), [None, Some(2), Some(9)]);
    assert_eq!(states(9), [None, None, Some(9)]);
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
        let found: Vec<_> = all.known.index.pages.iter().map(|page| (page.after, page.tokens[0])).collect();
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
