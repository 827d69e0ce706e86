//! Code for devices: built in advance, one object per architecture, chosen by name.

mod archive;
mod choice;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use archive::{Archive, ArchiveEntry, PackedFrame, write_archive};
pub use choice::generic_of;

/// The code objects of this build, made by `cargo xtask kernels`.
static EMBEDDED: &[u8] = include_bytes!("../../../../../kernels/code-objects.bin");

/// Environment variable with a folder to use instead. It holds `<arch>.co` or `<arch>.cubin` files, or folders `<arch>`
/// of several such files.
pub const FOLDER_VARIABLE: &str = "ROCMFORGE_CODE_OBJECTS";

/// File extensions in such a folder.
const ENDINGS: [&str; 2] = ["co", "cubin"];

/// Most files to look at.
const FILES_MAX: usize = 4096;

/// Largest code object to accept, in bytes.
const OBJECT_MAX: u64 = 256 << 20;

/// Source of code objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CodeSource {
    /// The folder named by [`FOLDER_VARIABLE`], else the embedded objects.
    #[default]
    Environment,
    /// The objects embedded in this program.
    Embedded,
    /// This folder.
    Folder(PathBuf),
}

/// Code for one architecture.
#[derive(Debug)]
pub struct CodeObject {
    /// The architecture and the source.
    pub name: String,
    /// The objects, usually one. nvcc generates better code for objects that are not linked together.
    pub images: Vec<Vec<u8>>,
}

/// Why there is no code for a device.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ObjectError {
    /// No code was built for the architecture.
    #[error(
        "no kernels for {arch}: {source_name} has {}; build them with `cargo xtask kernels` and name their folder in \
         ROCMFORGE_CODE_OBJECTS",
        if have.is_empty() { "none".into() } else { have.join(", ") }
    )]
    NotBuilt {
        /// The device's architecture.
        arch: String,
        /// The source that was searched.
        source_name: String,
        /// Architectures that the source has.
        have: Vec<String>,
    },
    /// A file cannot be read.
    #[error("{}: {why}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's message.
        why: String,
    },
    /// The archive is invalid.
    #[error("the archive of code objects is broken: {0}")]
    Archive(&'static str),
    /// The code object fits the device but lacks a kernel.
    #[error(
        "the code object {object} has no kernel {kernel}; build the kernels again with `cargo xtask kernels`"
    )]
    NoKernel {
        /// The missing kernel.
        kernel: &'static str,
        /// The code object.
        object: String,
    },
}

impl CodeSource {
    /// The folder, if this source is a folder.
    fn folder(&self) -> Option<PathBuf> {
        match self {
            Self::Environment => {
                std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from)
            }
            Self::Embedded => None,
            Self::Folder(folder) => Some(folder.clone()),
        }
    }

    /// Architectures that the source has code for.
    ///
    /// # Errors
    /// [`ObjectError`].
    pub fn architectures(&self) -> Result<Vec<String>, ObjectError> {
        match self.folder() {
            Some(folder) => Ok(list(&folder)?.into_keys().collect()),
            None => Ok(Archive::parse(EMBEDDED)?.entries().map(|entry| entry.name.to_owned()).collect()),
        }
    }
}

impl CodeObject {
    /// The name of the code object that `source` has for `arch`, without reading it.
    ///
    /// # Errors
    /// [`ObjectError`].
    pub fn chosen(source: &CodeSource, arch: &str) -> Result<String, ObjectError> {
        let have = source.architectures()?;
        match choice::choose(arch, &have) {
            Some(name) => Ok(name.to_owned()),
            None => Err(ObjectError::NotBuilt { arch: arch.into(), source_name: source.to_string(), have }),
        }
    }

    /// Loads code for `arch`: of its exact name, else of its generic family.
    ///
    /// # Errors
    /// [`ObjectError`].
    pub fn choose(source: &CodeSource, arch: &str) -> Result<Self, ObjectError> {
        let name = Self::chosen(source, arch)?;
        let gone =
            || ObjectError::NotBuilt { arch: arch.into(), source_name: source.to_string(), have: vec![] };
        let (images, name) = match source.folder() {
            Some(folder) => {
                let paths = list(&folder)?.remove(&name).ok_or_else(gone)?;
                let images = paths.iter().map(|path| read(path)).collect::<Result<_, _>>()?;
                (images, format!("{name} of {}", folder.display()))
            }
            None => {
                let archive = Archive::parse(EMBEDDED)?;
                let entry = archive.entries().find(|entry| entry.name == name).ok_or_else(gone)?;
                (vec![entry.unpack()?], format!("{name} of this program"))
            }
        };
        Ok(Self { name, images })
    }
}

impl std::fmt::Display for CodeSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.folder() {
            Some(folder) => write!(f, "{}", folder.display()),
            None => f.write_str("this program"),
        }
    }
}

/// Architectures in a folder, each with its files.
fn list(folder: &Path) -> Result<BTreeMap<String, Vec<PathBuf>>, ObjectError> {
    let (mut files, mut folders) = (BTreeMap::new(), BTreeMap::new());
    for path in entries(folder)? {
        let (Some(name), Some(stem)) = (text(path.file_name()), text(path.file_stem())) else { continue };
        if is_object(&path) {
            files.insert(stem, vec![path]);
        } else if path.is_dir() {
            let objects: Vec<PathBuf> = entries(&path)?.into_iter().filter(|path| is_object(path)).collect();
            if !objects.is_empty() {
                folders.insert(name, objects);
            }
        }
    }
    files.extend(folders);
    Ok(files)
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, ObjectError> {
    let fail = |error: std::io::Error| ObjectError::File { path: folder.into(), why: error.to_string() };
    let entries = std::fs::read_dir(folder).map_err(fail)?.take(FILES_MAX);
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>().map_err(fail)?;
    paths.sort_unstable();
    Ok(paths)
}

fn is_object(path: &Path) -> bool {
    text(path.extension()).is_some_and(|ending| ENDINGS.contains(&ending.as_str()))
}

fn text(name: Option<&OsStr>) -> Option<String> {
    Some(name?.to_str()?.to_owned())
}

fn read(path: &Path) -> Result<Vec<u8>, ObjectError> {
    let fail = |error: std::io::Error| ObjectError::File { path: path.into(), why: error.to_string() };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(fail)?;
    file.take(OBJECT_MAX + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > OBJECT_MAX {
        return Err(ObjectError::File {
            path: path.into(),
            why: format!("it is larger than {OBJECT_MAX} bytes"),
        });
    }
    if !bytes.starts_with(b"\x7fELF") {
        return Err(ObjectError::File { path: path.into(), why: "it is not an ELF code object".into() });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_gives_one_object_or_several_and_nothing_that_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("in the folder")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        write("gfx11-generic.co", "\x7fELF generic");
        write("gfx90a.co", "no object");
        write("sm_90.cubin", "\x7fELF older, as one");
        write("sm_90/b.cubin", "\x7fELF b");
        write("sm_90/a.cubin", "\x7fELF a");
        write("sm_90/a.cu", "its source");
        write("units/a.cu", "a source");
        let source = CodeSource::Folder(folder.path().into());
        assert_eq!(source.architectures().expect("listed"), ["gfx11-generic", "gfx90a", "sm_90"]);
        let images = |arch| CodeObject::choose(&source, arch).map(|object| object.images);
        assert_eq!(images("gfx1151").expect("its family's"), [b"\x7fELF generic"]);
        assert_eq!(images("sm_90").expect("all in the folder"), [b"\x7fELF a", b"\x7fELF b"]);
        assert!(
            matches!(images("gfx90a"), Err(ObjectError::File { path, .. }) if path.ends_with("gfx90a.co"))
        );
        assert!(matches!(images("gfx906"), Err(ObjectError::NotBuilt { have, .. }) if have.len() == 3));
    }
}
