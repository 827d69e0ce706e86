//! Code for devices: built ahead, one object per architecture, chosen here by name.

mod archive;
mod choice;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use archive::{Archive, ArchiveEntry, PackedFrame, write_archive};
pub use choice::generic_of;

/// The code objects of this build, made by `cargo xtask kernels`.
static EMBEDDED: &[u8] = include_bytes!("../../../../kernels/code-objects.bin");

/// Names a folder with `<arch>.co` or `<arch>.cubin` to take instead.
pub const FOLDER_VARIABLE: &str = "ROCMFORGE_CODE_OBJECTS";

/// Endings of files in such a folder.
const ENDINGS: [&str; 2] = ["co", "cubin"];

/// Larger is no code object of ours.
const OBJECT_MAX: u64 = 256 << 20;

/// Where code comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CodeSource {
    /// The folder that [`FOLDER_VARIABLE`] names, else what this program carries.
    #[default]
    Environment,
    /// What this program carries.
    Embedded,
    /// This folder.
    Folder(PathBuf),
}

/// Code for one architecture.
#[derive(Debug)]
pub struct CodeObject {
    /// Its architecture and where it came from.
    pub name: String,
    /// The object.
    pub bytes: Vec<u8>,
}

/// Why there is no code for a device.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ObjectError {
    /// Nobody built any for it.
    #[error(
        "no kernels for {arch}: {source_name} has {}; build them with `cargo xtask kernels` and name their folder in \
         ROCMFORGE_CODE_OBJECTS",
        if have.is_empty() { "none".into() } else { have.join(", ") }
    )]
    NotBuilt {
        /// The device's architecture.
        arch: String,
        /// Where was looked.
        source_name: String,
        /// What is there.
        have: Vec<String>,
    },
    /// A file cannot be read.
    #[error("{}: {why}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The archive is broken.
    #[error("the archive of code objects is broken: {0}")]
    Archive(&'static str),
    /// It is for this device and lacks a kernel.
    #[error(
        "the code object {object} has no kernel {kernel}; build the kernels again with `cargo xtask kernels`"
    )]
    NoKernel {
        /// The kernel.
        kernel: &'static str,
        /// The object.
        object: String,
    },
}

impl CodeSource {
    /// The folder, when it is one.
    fn folder(&self) -> Option<PathBuf> {
        match self {
            Self::Environment => {
                std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from)
            }
            Self::Embedded => None,
            Self::Folder(folder) => Some(folder.clone()),
        }
    }

    /// Architectures there is code for.
    ///
    /// # Errors
    /// [`ObjectError`].
    pub fn architectures(&self) -> Result<Vec<String>, ObjectError> {
        match self.folder() {
            Some(folder) => Ok(list(&folder)?.into_iter().map(|(arch, _)| arch).collect()),
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

    /// Code for `arch`: of that name, else of its family.
    ///
    /// # Errors
    /// [`ObjectError`].
    pub fn choose(source: &CodeSource, arch: &str) -> Result<Self, ObjectError> {
        let name = Self::chosen(source, arch)?;
        let gone =
            || ObjectError::NotBuilt { arch: arch.into(), source_name: source.to_string(), have: vec![] };
        let (bytes, name) = match source.folder() {
            Some(folder) => {
                let (_, path) =
                    list(&folder)?.into_iter().find(|(arch, _)| *arch == name).ok_or_else(gone)?;
                (read(&path)?, path.display().to_string())
            }
            None => {
                let archive = Archive::parse(EMBEDDED)?;
                let entry = archive.entries().find(|entry| entry.name == name).ok_or_else(gone)?;
                (entry.unpack()?, format!("{name} of this program"))
            }
        };
        if !bytes.starts_with(b"\x7fELF") {
            return Err(ObjectError::File { path: name.into(), why: "not an ELF code object".into() });
        }
        Ok(Self { name, bytes })
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

/// Architectures and files of a folder, by name.
fn list(folder: &Path) -> Result<Vec<(String, PathBuf)>, ObjectError> {
    let fail = |error: std::io::Error| ObjectError::File { path: folder.into(), why: error.to_string() };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let ending = path.extension().and_then(|ending| ending.to_str());
        if let Some(arch) = path.file_stem().and_then(|stem| stem.to_str())
            && ending.is_some_and(|ending| ENDINGS.contains(&ending))
        {
            found.push((arch.to_owned(), path.clone()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, ObjectError> {
    let fail = |error: std::io::Error| ObjectError::File { path: path.into(), why: error.to_string() };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(fail)?;
    file.take(OBJECT_MAX + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > OBJECT_MAX {
        return Err(ObjectError::File { path: path.into(), why: format!("larger than {OBJECT_MAX} bytes") });
    }
    Ok(bytes)
}
