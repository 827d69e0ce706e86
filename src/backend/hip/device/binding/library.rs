//! Search for the runtime's library.

use std::ffi::{OsStr, OsString, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use super::api::Api;
use super::properties::PropertiesFn;

/// File names of the library, best first. `.so.5` comes after all other places: beside a newer one it is a leftover.
const NAMES: [&str; 4] = ["libamdhip64.so.8", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];
const OLD_NAME: &str = "libamdhip64.so.5";

/// Why no runtime could be loaded.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LibraryError {
    /// No library was found.
    #[error(
        "libamdhip64 was not found ({}); install the HIP runtime of ROCm (6 or 7, package hip-runtime-amd or libamdhip64), \
         or name the file in ROCMFORGE_HIP_LIB",
        Listed(places)
    )]
    NotFound {
        /// Paths that were tried.
        places: Vec<String>,
    },
    /// The system's loader refused the file.
    #[error("{} cannot be loaded: {why}; reinstall the ROCm packages, or name another in ROCMFORGE_HIP_LIB", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The loader's message.
        why: String,
    },
    /// The library lacks a function.
    #[error(
        "{} has no function {symbol}: it is too old or not a HIP runtime; ROCm 5.2 or newer is needed",
        path.display()
    )]
    Symbol {
        /// The file.
        path: PathBuf,
        /// The missing function.
        symbol: &'static str,
    },
}

struct Listed<'a>(&'a [String]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "looked in: {}", self.0.join(", "))
    }
}

/// A loaded HIP runtime. It stays loaded until the process ends, because its own threads cannot be waited for.
pub struct Library {
    api: Api,
    properties: Option<PropertiesFn>,
    path: PathBuf,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Library {
    /// Loads the runtime that the environment names (`ROCMFORGE_HIP_LIB`, `ROCM_PATH`, `HIP_PATH`), else the newest found.
    ///
    /// # Errors
    /// [`LibraryError`].
    pub fn find() -> Result<Self, LibraryError> {
        Self::find_in(&SearchPath::from_env())
    }

    fn find_in(places: &SearchPath) -> Result<Self, LibraryError> {
        let mut refused = None;
        for path in places.candidates() {
            match Self::open(&path) {
                Ok(library) => return Ok(library),
                Err(LibraryError::NotFound { .. }) => {}
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(refused.unwrap_or_else(|| LibraryError::NotFound { places: places.described() }))
    }

    /// Loads this file. A bare name is searched in the loader's own path.
    ///
    /// # Errors
    /// [`LibraryError`].
    pub fn open(path: &Path) -> Result<Self, LibraryError> {
        let bare = path.components().count() == 1;
        if !bare && !path.exists() {
            return Err(LibraryError::NotFound { places: vec![path.display().to_string()] });
        }
        // SAFETY: loading runs the library's initialisers. It is the HIP runtime that the administrator installed or
        // named, which is made to be loaded. Nothing known about it forbids other threads meanwhile.
        let loaded = unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
            // The error itself says only which call failed; its source holds the loader's message.
            let why =
                std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            // The loader says «cannot open shared object file» with the requested name when that file is missing. It
            // says it with another name when a dependency is missing.
            if bare && why.starts_with(&format!("{}: cannot open", path.display())) {
                LibraryError::NotFound { places: vec![path.display().to_string()] }
            } else {
                LibraryError::Refused { path: path.into(), why }
            }
        })?;
        // Never unloaded: the functions copied out of it stay valid for the life of the process.
        let loaded = ManuallyDrop::new(libloading::Library::from(loaded));
        let api = Api::load(&loaded).map_err(|symbol| LibraryError::Symbol { path: path.into(), symbol })?;
        Ok(Self { api, properties: PropertiesFn::load(&loaded), path: path.into() })
    }

    /// The path as passed to the system's loader.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The library's version: `major * 10^7 + minor * 10^5 + patch`, or `None` when it reports none. Works without a
    /// device.
    pub fn version(&self) -> Option<u32> {
        let mut version: c_int = 0;
        // SAFETY: a place for one integer is passed.
        let code = unsafe { (self.api.hipRuntimeGetVersion)(&raw mut version) };
        u32::try_from(version).ok().filter(|version| code == 0 && *version > 0)
    }

    pub(in crate::backend::hip) fn api(&self) -> &Api {
        &self.api
    }

    pub(in crate::backend::hip) fn properties(&self) -> Option<PropertiesFn> {
        self.properties
    }
}

/// Places to search.
struct SearchPath {
    /// Only this file.
    only: Option<PathBuf>,
    folders: Vec<PathBuf>,
}

impl SearchPath {
    fn from_env() -> Self {
        Self::of(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn of(var: impl Fn(&str) -> Option<OsString>) -> Self {
        let root = |name| var(name).map(|root| Path::new(OsStr::new(&root)).join("lib"));
        let folders = [root("ROCM_PATH"), root("HIP_PATH"), Some("/opt/rocm/lib".into())];
        Self {
            only: var("ROCMFORGE_HIP_LIB").map(PathBuf::from),
            folders: folders.into_iter().flatten().collect(),
        }
    }

    fn candidates(&self) -> Vec<PathBuf> {
        if let Some(only) = &self.only {
            return vec![only.clone()];
        }
        let in_folders = |name: &'static str| self.folders.iter().map(move |folder| folder.join(name));
        let newer = self.folders.iter().flat_map(|folder| NAMES.map(|name| folder.join(name)));
        newer
            .chain(NAMES.map(PathBuf::from))
            .chain(in_folders(OLD_NAME))
            .chain([PathBuf::from(OLD_NAME)])
            .collect()
    }

    fn described(&self) -> Vec<String> {
        match &self.only {
            Some(only) => vec![format!("ROCMFORGE_HIP_LIB={}", only.display())],
            None => {
                let folders = self.folders.iter().map(|folder| folder.display().to_string());
                folders.chain(["the system's library path".into()]).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(vars: &[(&str, &str)]) -> SearchPath {
        SearchPath::of(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn newer_names_come_first_and_the_oldest_after_all_places() {
        let found = places(&[("ROCM_PATH", "/a"), ("HIP_PATH", "/b")]).candidates();
        let text: Vec<_> = found.iter().map(|path| path.display().to_string()).collect();
        assert_eq!(text[0], "/a/lib/libamdhip64.so.8");
        assert_eq!(text[3], "/a/lib/libamdhip64.so");
        assert_eq!(text[4], "/b/lib/libamdhip64.so.8");
        assert_eq!(text[8], "/opt/rocm/lib/libamdhip64.so.8");
        assert_eq!(text[12], "libamdhip64.so.8");
        assert_eq!(
            text[16..],
            ["/a/lib", "/b/lib", "/opt/rocm/lib", ""]
                .map(|folder| { Path::new(folder).join("libamdhip64.so.5").display().to_string() })
        );
    }

    #[test]
    fn a_named_file_is_the_only_place() {
        let places = places(&[("ROCMFORGE_HIP_LIB", "/x/lib.so"), ("ROCM_PATH", "/a")]);
        assert_eq!(places.candidates(), [PathBuf::from("/x/lib.so")]);
        let error = Library::find_in(&places).expect_err("there is no such file");
        let text = error.to_string();
        assert!(matches!(error, LibraryError::NotFound { .. }), "{text}");
        assert!(text.contains("ROCMFORGE_HIP_LIB=/x/lib.so"), "{text}");
    }

    #[test]
    fn a_library_that_is_none_is_refused_by_name() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("libamdhip64.so.7");
        std::fs::write(&path, "no library").expect("written");
        let folder = SearchPath { only: Some(path.clone()), folders: vec![] };
        assert!(matches!(Library::find_in(&folder), Err(LibraryError::Refused { path: p, .. }) if p == path));
        // In the loader's words: invalid ELF header, file too short.
        let text = Library::find_in(&folder).map_err(|error| error.to_string()).expect_err("as above");
        assert!(text.contains(&format!("{}: ", path.display())), "{text}");
        let nowhere = Library::open(Path::new("libamdhip64-nowhere.so.7")).expect_err("no such name");
        assert!(matches!(nowhere, LibraryError::NotFound { .. }), "{nowhere}");
        // The C library has none of the functions.
        let error = Library::open(Path::new("libc.so.6")).expect_err("not a HIP runtime");
        assert!(matches!(error, LibraryError::Symbol { symbol: "hipInit", .. }), "{error}");
    }
}
