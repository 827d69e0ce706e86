//! Ollama's models: `manifests/HOST/NAMESPACE/MODEL/TAG` names files below `blobs` by their digests. Nothing there is written.
//!
//! A model is called `MODEL:TAG`, or `MODEL` if the tag is `latest`. Host and namespace tell equal names apart, unless they are
//! Ollama's own.

use std::collections::BTreeSet;
use std::path::Path;

use super::directory::{Entry, inspect};
use super::walk::Walk;

/// The directories of Ollama's models.
const MANIFESTS: &str = "manifests";
const BLOBS: &str = "blobs";

/// Host and namespace of Ollama's own models.
const OWN: [&str; 2] = ["registry.ollama.ai", "library"];

/// Most directories on a manifest's way.
const DEPTH_MAX: usize = 6;

/// Longest manifest. Real ones stay below 2 KiB.
const MANIFEST_BYTES_MAX: u64 = 64 << 10;

/// Types of a manifest's layers.
const MODEL: &str = "application/vnd.ollama.image.model";
const ADAPTER: &str = "application/vnd.ollama.image.adapter";

/// A file's parts, of which the first with weights is served.
#[derive(serde::Deserialize)]
struct Manifest {
    layers: Vec<Layer>,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: String,
    digest: String,
}

/// True for the names in Ollama's directory.
pub(super) fn is_root(directories: &BTreeSet<String>) -> bool {
    [MANIFESTS, BLOBS].iter().all(|name| directories.contains(*name))
}

/// Adds the models of Ollama's directory `root`, which is `depth` directories below the model directory.
///
/// # Errors
/// Those of reading a directory.
pub(super) fn read(walk: &mut Walk<'_>, root: &Path, depth: usize) -> std::io::Result<()> {
    let mut ways: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(way) = ways.pop() {
        let directory = way.iter().fold(root.join(MANIFESTS), |path, name| path.join(name));
        let (directories, files) = walk.tree(&directory)?;
        if way.len() < DEPTH_MAX {
            ways.extend(directories.into_iter().rev().map(|name| [&way[..], &[name]].concat()));
        }
        let Some((model, before)) = way.split_last() else { continue };
        for tag in files {
            let name = if tag == "latest" { model.clone() } else { format!("{model}:{tag}") };
            let labels = before.iter().filter(|label| !OWN.contains(&label.as_str())).cloned().collect();
            let entry = entry(walk, root, &directory.join(tag));
            walk.add_labelled(depth, labels, name, entry);
        }
    }
    Ok(())
}

/// The model of a manifest.
fn entry(walk: &Walk<'_>, root: &Path, manifest: &Path) -> Entry {
    let bytes = walk.small_file(manifest, MANIFEST_BYTES_MAX);
    let read: Option<Manifest> = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    match read.as_ref().map_or(Err("its manifest cannot be read"), blob) {
        Ok(blob) => {
            (walk.alive)(None);
            inspect(vec![root.join(BLOBS).join(blob)])
        }
        // Opening the manifest tells that it is no model.
        Err(why) => Entry { unusable: Some(why.to_owned()), ..inspect(vec![manifest.to_owned()]) },
    }
}

/// The name of the file with a manifest's weights.
fn blob(manifest: &Manifest) -> Result<String, &'static str> {
    let of = |kind: &'static str| manifest.layers.iter().filter(move |layer| layer.media_type == kind);
    if of(ADAPTER).next().is_some() {
        return Err("its manifest has an adapter, which is not applied here");
    }
    let mut models = of(MODEL);
    let (Some(model), None) = (models.next(), models.next()) else {
        return Err("its manifest does not name one file of weights");
    };
    let digest = model.digest.strip_prefix("sha256:");
    let digest = digest.filter(|hex| hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()));
    digest.map(|hex| format!("sha256-{hex}")).ok_or("its manifest names a file by no SHA-256")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::model::store::walk;

    fn digest(letter: char) -> String {
        letter.to_string().repeat(64)
    }

    fn found(root: &Path) -> BTreeMap<String, Entry> {
        walk::read(root, &|_| ()).unwrap().0
    }

    fn manifest(root: &Path, way: &str, text: &str) {
        let path = root.join(MANIFESTS).join(way);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn layers(layers: &[(&str, &str)]) -> String {
        let layer = |(kind, digest): &(&str, &str)| {
            format!(r#"{{"mediaType": "{kind}", "digest": "{digest}", "size": 3}}"#)
        };
        let layers: Vec<String> = layers.iter().map(layer).collect();
        format!(r#"{{"schemaVersion": 2, "config": {{}}, "layers": [{}]}}"#, layers.join(","))
    }

    #[test]
    fn manifests_name_files_and_the_namespace_tells_them_apart() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("ollama");
        std::fs::create_dir_all(root.join(BLOBS)).unwrap();
        for (letter, text) in [('a', "xxx"), ('b', "yyyy")] {
            std::fs::write(root.join(BLOBS).join(format!("sha256-{}", digest(letter))), text).unwrap();
        }
        let of = |letter| {
            layers(&[
                ("application/vnd.ollama.image.license", "x"),
                (MODEL, &format!("sha256:{}", digest(letter))),
            ])
        };
        manifest(&root, "registry.ollama.ai/library/llama3.2/1b", &of('a'));
        manifest(&root, "registry.ollama.ai/library/llama3.2/latest", &of('b'));
        manifest(&root, "registry.ollama.ai/someone/llama3.2/1b", &of('b'));
        manifest(&root, "hf.co/owner/Some-GGUF/Q4_K_M", &of('a'));
        manifest(&root, "registry.ollama.ai/library/gone/latest", &of('c'));
        let found = found(dir.path());
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["Some-GGUF:Q4_K_M", "gone", "llama3.2", "llama3.2:1b", "llama3.2:1b@someone"]);
        assert_eq!(
            ["llama3.2:1b", "llama3.2", "llama3.2:1b@someone"].map(|name| found[name].bytes),
            [3, 4, 4]
        );
        assert!(found["gone"].unusable.as_deref().unwrap().contains("No such file"));
        assert!(found["llama3.2"].paths[0].ends_with(format!("ollama/blobs/sha256-{}", digest('b'))));
    }

    #[test]
    fn manifests_that_name_no_file_say_why() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join(BLOBS)).unwrap();
        let good = format!("sha256:{}", digest('a'));
        let up = format!("sha256:../{}", "a".repeat(61));
        for (name, text, why) in [
            ("text", "no json".to_owned(), "cannot be read"),
            ("deep", "[".repeat(5000), "cannot be read"),
            ("long", format!("{}{}", " ".repeat(MANIFEST_BYTES_MAX as usize), layers(&[])), "cannot be read"),
            ("none", layers(&[]), "does not name one file"),
            ("two", layers(&[(MODEL, &good), (MODEL, &good)]), "does not name one file"),
            ("up", layers(&[(MODEL, &up)]), "no SHA-256"),
            ("other", layers(&[(MODEL, "md5:00")]), "no SHA-256"),
            ("adapted", layers(&[(MODEL, &good), (ADAPTER, &good)]), "adapter"),
        ] {
            manifest(dir.path(), &format!("h/n/{name}/latest"), &text);
            let entry = &found(dir.path())[name];
            assert!(entry.unusable.as_deref().is_some_and(|found| found.contains(why)), "{name}: {entry:?}");
            assert!(entry.paths.iter().all(|path| path.ends_with("latest")), "{name}: {entry:?}");
        }
    }
}
