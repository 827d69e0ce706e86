//! A look-alike of the unchanged kernels, the starting point for each changed one.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use xtask::error::{Error, Result};
use xtask::lookalike::{self, Variant, sources};

use super::suite::{Ended, Select, Suite};

/// Extra time for other load on the machine.
const SLACK: Duration = Duration::from_secs(10);

/// Result of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It does not compile.
    Refused,
    /// It compiles to the same code.
    Same,
    /// The test that noticed it.
    Killed(String),
    Survived,
}

/// Built objects of one variant, beside the unchanged ones.
pub struct Bench {
    variant: Variant,
    root: PathBuf,
    built: PathBuf,
    kept: PathBuf,
    /// Library that test programs must preload.
    preload: Option<PathBuf>,
    patience: Duration,
}

impl Bench {
    /// Builds the unchanged kernels under `root` and runs all tests on them.
    ///
    /// # Errors
    /// [`Error::Unexpected`] if a test fails without any change; errors of building.
    pub fn new(root: &Path, variant: Variant, suite: &Suite) -> Result<Self> {
        let name = variant.name();
        let mut bench = Self {
            variant,
            root: root.into(),
            built: root.join(name),
            kept: root.join(format!("{name}-unchanged")),
            preload: lookalike::sanitizer_runtime(variant)?,
            patience: Duration::from_secs(600),
        };
        println!("{name}: the unchanged kernels");
        let library = lookalike::build_changed(root, &bench.built, variant)?;
        copy_new(&bench.built, &bench.kept)?;
        let (ended, longest) = bench.run(suite, &library, Select::AllBut(&[]))?;
        if ended != Ended::Passed {
            let text = format!("{ended:?} without a change");
            return Err(Error::Unexpected { what: "the kernel tests", text });
        }
        bench.patience = longest * 4 + SLACK;
        Ok(bench)
    }

    /// Tries the change that is under `root`; `first` are the tests most likely to notice it.
    ///
    /// # Errors
    /// Errors of building and of starting tests.
    pub fn try_change(&self, first: &[&str], suite: &Suite) -> Result<Fate> {
        copy_new(&self.kept, &self.built)?;
        let library = match lookalike::build_changed(&self.root, &self.built, self.variant) {
            Ok(library) => library,
            Err(Error::Command { .. }) => return Ok(Fate::Refused),
            Err(error) => return Err(error),
        };
        if self.is_same()? {
            return Ok(Fate::Same);
        }
        let halves: &[Select<'_>] = match first {
            [] => &[Select::AllBut(&[])],
            _ => &[Select::Only(first), Select::AllBut(first)],
        };
        for select in halves {
            match self.run(suite, &library, *select)?.0 {
                Ended::Passed => (),
                Ended::Failed(test) => return Ok(Fate::Killed(test)),
                Ended::Stalled => return Ok(Fate::Killed("a time limit".into())),
            }
        }
        Ok(Fate::Survived)
    }

    fn run(&self, suite: &Suite, library: &Path, select: Select<'_>) -> Result<(Ended, Duration)> {
        suite.run(library, self.preload.as_deref(), select, self.patience)
    }

    /// Whether all objects equal those of the unchanged kernels.
    fn is_same(&self) -> Result<bool> {
        for name in sources::names()? {
            let object = format!("kernel_{name}.o");
            if !same(&self.kept.join(&object), &self.built.join(&object))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Copies the files of `from` that differ from those of `to`, except the library, which is linked again from objects.
fn copy_new(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).map_err(Error::at(to))?;
    for entry in fs::read_dir(from).map_err(Error::at(from))? {
        let file = entry.map_err(Error::at(from))?.path();
        let place = to.join(file.file_name().unwrap_or_default());
        if file.extension() != Some(OsStr::new("so")) && !(place.is_file() && same(&file, &place)?) {
            fs::copy(&file, &place).map_err(Error::at(&file))?;
        }
    }
    Ok(())
}

fn same(a: &Path, b: &Path) -> Result<bool> {
    Ok(fs::read(a).map_err(Error::at(a))? == fs::read(b).map_err(Error::at(b))?)
}
