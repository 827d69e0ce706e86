//! A hub's list of a repository's files, and the choice of a model among them.
//!
//! A hub answers `GET /api/models/OWNER/REPOSITORY/revision/REVISION?blobs=true` with JSON: `sha`, the commit, and `siblings`, each
//! with `rfilename`, `size` and, for large files, `lfs.sha256`. It serves a file at `/OWNER/REPOSITORY/resolve/COMMIT/PATH`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::PullError;
use super::source::{ENDING, Place, Wanted, digest, encoded, without_part};
use super::web::{agent, web_error};

/// Most bytes of a list.
const LIST_BYTES_MAX: u64 = 16 << 20;

/// The type of weights that is taken where a repository has several and the user names none.
const USUAL: &str = "Q4_K_M";

/// Most models that an error names.
const NAMED_MAX: usize = 20;

#[derive(Debug, Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Large>,
}

#[derive(Debug, Deserialize)]
struct Large {
    sha256: String,
    size: Option<u64>,
}

/// The files of the model at that place: one, or its parts in order.
pub fn files(hub: &str, place: &Place, token: Option<&str>) -> Result<Vec<Wanted>, PullError> {
    let hub = hub.trim_end_matches('/');
    let listing = list(hub, place, token)?;
    let wrong = |reason: String| PullError::Hub { repository: place.repository.clone(), reason };
    let chosen = choose(&listing.siblings, place).map_err(wrong)?;
    let base = format!("{hub}/{}/resolve/{}", place.repository, encoded(&listing.sha));
    let wanted = |sibling: &Sibling| -> Result<Wanted, PullError> {
        let path = &sibling.rfilename;
        let sha256 = sibling.lfs.as_ref().map(|large| digest(&large.sha256)).transpose().map_err(wrong)?;
        Ok(Wanted {
            url: format!("{base}/{}", encoded(path)),
            file: path.rsplit('/').next().unwrap_or(path).to_owned(),
            sha256,
            bytes: sibling.lfs.as_ref().and_then(|large| large.size).or(sibling.size),
            of_hub: true,
        })
    };
    chosen.into_iter().map(wanted).collect()
}

fn list(hub: &str, place: &Place, token: Option<&str>) -> Result<Listing, PullError> {
    let revision = encoded(&place.revision).replace('/', "%2F");
    let url = format!("{hub}/api/models/{}/revision/{revision}?blobs=true", place.repository);
    let mut request = agent(&url, false)?.get(&url);
    if let Some(token) = token {
        request = request.header("Authorization", format!("Bearer {token}"));
    }
    let mut response = request.call().map_err(|error| web_error(&url, error))?;
    let status = response.status().as_u16();
    if status != 200 {
        return Err(PullError::Status { url, status });
    }
    let text = response.body_mut().with_config().limit(LIST_BYTES_MAX).read_to_vec();
    let text = text.map_err(|error| web_error(&url, error))?;
    serde_json::from_slice(&text)
        .map_err(|error| PullError::Web { url, reason: format!("its list of files is none: {error}") })
}

/// The files of the one model that the place names.
fn choose<'a>(siblings: &'a [Sibling], place: &Place) -> Result<Vec<&'a Sibling>, String> {
    // Projectors of images belong to another model's file.
    let is_model = |path: &str| path.ends_with(ENDING) && !path.to_lowercase().contains("mmproj");
    let mut models: BTreeMap<&str, Vec<&Sibling>> = BTreeMap::new();
    for sibling in siblings.iter().filter(|sibling| is_model(&sibling.rfilename)) {
        models.entry(without_part(&sibling.rfilename).0).or_default().push(sibling);
    }
    let names: Vec<&str> = models.keys().copied().collect();
    let with_tag = |tag: &str| -> Vec<&str> {
        let has = |name: &&&str| has_word(&name.to_lowercase(), &tag.to_lowercase());
        names.iter().filter(has).copied().collect()
    };
    let fitting = match (&place.file, &place.tag) {
        (Some(file), _) => names.iter().filter(|name| **name == without_part(file).0).copied().collect(),
        (None, Some(tag)) => with_tag(tag),
        (None, None) if names.len() == 1 => names.clone(),
        (None, None) => with_tag(USUAL),
    };
    match fitting.as_slice() {
        [one] => Ok(whole(models.remove(one).unwrap_or_default())?),
        [] if names.is_empty() => Err("it has no GGUF files".to_owned()),
        none_or_several => {
            let what =
                if none_or_several.is_empty() { "none of its models fits" } else { "several models fit" };
            let shown = if none_or_several.is_empty() { &names } else { &fitting };
            let listed = shown.iter().take(NAMED_MAX).copied().collect::<Vec<_>>().join(", ");
            let more = shown.len().saturating_sub(NAMED_MAX);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            Err(format!("{what}; name one of {listed}{more}"))
        }
    }
}

/// The parts of a model in order, of which none may be missing.
fn whole(mut files: Vec<&Sibling>) -> Result<Vec<&Sibling>, String> {
    files.sort_by(|a, b| a.rfilename.cmp(&b.rfilename));
    let all = files.first().map_or("", |file| without_part(&file.rfilename).1);
    let all: usize = all.rsplit('-').next().and_then(|all| all.parse().ok()).unwrap_or(1);
    if files.len() != all {
        return Err(format!("it has {} of the model's {all} parts", files.len()));
    }
    Ok(files)
}

/// Whether a name has this word, between marks or ends: `q4_k` is none of `m-q4_k_m`.
fn has_word(name: &str, word: &str) -> bool {
    let is_mark = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    name.match_indices(word).any(|(at, _)| {
        let before = name[..at].chars().next_back();
        let after = name[at + word.len()..].chars().next();
        before.is_none_or(is_mark) && after.is_none_or(is_mark)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn siblings(names: &[&str]) -> Vec<Sibling> {
        let one = |name: &&str| Sibling { rfilename: (*name).to_owned(), size: None, lfs: None };
        names.iter().map(one).collect()
    }

    fn chosen(names: &[&str], file: Option<&str>, tag: Option<&str>) -> Result<Vec<String>, String> {
        let own = |text: Option<&str>| text.map(str::to_owned);
        let place =
            Place { repository: "a/b".into(), revision: "main".into(), file: own(file), tag: own(tag) };
        let all = siblings(names);
        choose(&all, &place).map(|files| files.into_iter().map(|file| file.rfilename.clone()).collect())
    }

    #[test]
    fn a_tag_a_file_or_the_usual_type_chooses_one_model() {
        let names = ["README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "mmproj-f16.gguf"];
        let one = |name: &str| Ok(vec![name.to_owned()]);
        assert_eq!(chosen(&names, None, None), one("m-Q4_K_M.gguf"));
        assert_eq!(chosen(&names, None, Some("q8_0")), one("m-Q8_0.gguf"));
        assert_eq!(chosen(&names, Some("m-Q4_K_S.gguf"), None), one("m-Q4_K_S.gguf"));
        assert_eq!(chosen(&["only-f16.gguf"], None, None), one("only-f16.gguf"));
        let refused = chosen(&names, None, Some("Q4_K")).unwrap_err();
        assert_eq!(refused, "none of its models fits; name one of m-Q4_K_M, m-Q4_K_S, m-Q8_0");
        assert_eq!(chosen(&["README.md"], None, None).unwrap_err(), "it has no GGUF files");
        let several = chosen(&["a-Q8_0.gguf", "b-Q8_0.gguf"], None, Some("Q8_0")).unwrap_err();
        assert_eq!(several, "several models fit; name one of a-Q8_0, b-Q8_0");
    }

    #[test]
    fn parts_of_a_model_are_one_and_must_be_all_there() {
        let names = ["d/m-00002-of-00002.gguf", "d/m-00001-of-00002.gguf"];
        let both = Ok(vec![names[1].to_owned(), names[0].to_owned()]);
        assert_eq!(chosen(&names, None, None), both);
        assert_eq!(chosen(&names, Some("d/m-00001-of-00002.gguf"), None), both);
        assert_eq!(chosen(&names[..1], None, None).unwrap_err(), "it has 1 of the model's 2 parts");
    }
}
