//! Builds the look-alike of libamdhip64 that runs the kernels on the CPU (tests/lookalike/cpu), with the system's
//! clang.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

pub mod sources;
pub mod unit;
use crate::error::{Error, Result};
use crate::host;
use sources::include_flags;
use unit::Unit;

/// Build variants of the look-alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Variant {
    /// Waves of 32 lanes: a gfx1100
    Wave32,
    /// Waves of 64 lanes: a gfx90a
    Wave64,
    /// As wave32, and stops at invalid memory accesses and undefined behaviour
    Wave32Sanitized,
    /// As wave64, and stops at invalid memory accesses and undefined behaviour
    Wave64Sanitized,
    /// Waves of 64 lanes without a matrix unit: a gfx906
    Wave64NoMatrix,
}

#[derive(clap::Args)]
pub struct Args {
    /// Which; default: wave32 and wave64
    variants: Vec<Variant>,
}

/// Runs the command: builds the variants and prints their paths.
///
/// # Errors
/// As [`build`].
pub fn run(args: &Args) -> Result<()> {
    build_all(&args.variants)
}

/// Builds these variants, or if there is none, one for each size of waves; prints their paths.
///
/// # Errors
/// As [`build`].
pub fn build_all(variants: &[Variant]) -> Result<()> {
    let usual = [Variant::Wave32, Variant::Wave64];
    for variant in if variants.is_empty() { &usual } else { variants } {
        println!("{}", build(*variant)?.display());
    }
    Ok(())
}

impl Variant {
    pub fn name(self) -> &'static str {
        match self {
            Self::Wave32 => "wave32",
            Self::Wave64 => "wave64",
            Self::Wave32Sanitized => "wave32-sanitized",
            Self::Wave64Sanitized => "wave64-sanitized",
            Self::Wave64NoMatrix => "wave64-no-matrix",
        }
    }

    fn is_sanitized(self) -> bool {
        matches!(self, Self::Wave32Sanitized | Self::Wave64Sanitized)
    }

    fn flags(self) -> Vec<&'static str> {
        const SANITIZED: [&str; 6] = [
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            // Entry points are called through an untyped pointer.
            "-fno-sanitize=function",
            "-fsanitize-address-use-after-return=never",
            "-shared-libasan",
            "-gline-tables-only",
        ];
        let mut flags = match self {
            Self::Wave32 | Self::Wave32Sanitized => vec!["-DWAVE=32u"],
            Self::Wave64 | Self::Wave64Sanitized => vec!["-DWAVE=64u"],
            Self::Wave64NoMatrix => vec!["-DWAVE=64u", "-DHAS_MATRIX_UNIT=0"],
        };
        if self.is_sanitized() {
            flags.extend(SANITIZED);
        }
        flags
    }
}

/// Any of these will do: the exact bytes of the library do not matter. Every Debian since 12 has the last one.
const COMPILERS: [(&str, &str); 4] = [
    ("clang++-22", "libclang-rt-22-dev"),
    ("clang++-21", "libclang-rt-21-dev"),
    ("clang++-20", "libclang-rt-20-dev"),
    ("clang++-19", "libclang-rt-19-dev"),
];

/// Builds the library if it is out of date; returns its path.
///
/// # Errors
/// [`Error::ToolMissing`], errors of compiling.
pub fn build(variant: Variant) -> Result<PathBuf> {
    let dir = host::target_dir().join("lookalike").join(variant.name());
    build_from(host::root(), &dir, variant, &["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"])
}

/// Flags for changed kernels: no warnings.
const TRIAL: [&str; 1] = ["-w"];

/// As [`build`], with the kernels under `root` and output in `dir`. Warnings are allowed.
///
/// # Errors
/// As [`build`].
pub fn build_changed(root: &Path, dir: &Path, variant: Variant) -> Result<PathBuf> {
    build_from(root, dir, variant, &TRIAL)
}

fn build_from(root: &Path, dir: &Path, variant: Variant, flags: &[&str]) -> Result<PathBuf> {
    let compiler = compiler()?;
    fs::create_dir_all(dir).map_err(Error::at(dir))?;
    // Stages beside each other build the same variant: one builds, the others wait.
    let path = dir.join(".lock");
    let lock = File::create(&path).map_err(Error::at(&path))?;
    lock.lock().map_err(Error::at(&path))?;
    let mut units = Vec::new();
    for source in runtime_sources()? {
        units.push(compile(&compiler, variant, &source, (root, dir), flags)?);
    }
    for name in sources::names()? {
        let source = sources::write_unit(dir, &name, "cpp")?;
        units.push(compile(&compiler, variant, &source, (root, dir), flags)?);
    }
    let library = dir.join("libamdhip64.so");
    let objects: Vec<PathBuf> = units.iter().map(|unit| unit.output.clone()).collect();
    unit::build(units)?;
    if !is_newer(&library, &objects) {
        let mut link = Command::new(&compiler);
        link.args(["-shared", "-Wl,-z,defs", "-pthread"]).args(variant.flags());
        if variant.is_sanitized() {
            // The program that loads the library provides the sanitizers' symbols.
            link.arg("-Wl,-z,undefs");
        }
        link.args(&objects).arg("-o").arg(&library);
        host::run(&mut link)?;
    }
    Ok(library)
}

fn compile(
    compiler: &str,
    variant: Variant,
    source: &Path,
    (root, dir): (&Path, &Path),
    flags: &[&str],
) -> Result<Unit> {
    let stem = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let output = dir.join(format!("{stem}.o"));
    let mut command = Command::new(compiler);
    command
        // Level 3 has fused multiply-add and half precision in hardware, as all processors since 2015.
        .args(["-std=c++20", "-O2", "-march=x86-64-v3", "-fPIC", "-fvisibility=hidden", "-pthread"])
        .args(["-ffp-contract=off", "-fno-strict-aliasing", "-DROCMFORGE_HOST"])
        .args(flags)
        .args(variant.flags())
        .args(include_flags(root))
        .args(["-MMD", "-MF"])
        .arg(unit::list_path(&output))
        .arg("-c")
        .arg(source)
        .arg("-o")
        .arg(&output);
    let salt = host::read(Command::new(compiler).arg("--version"))?;
    Ok(Unit { output, commands: vec![command], salt, is_trial: flags == TRIAL })
}

/// The library that a program must preload before it opens a sanitized look-alike.
///
/// # Errors
/// [`Error::ToolMissing`].
pub fn sanitizer_runtime(variant: Variant) -> Result<Option<PathBuf>> {
    if !variant.is_sanitized() {
        return Ok(None);
    }
    let compiler = compiler()?;
    let name = "libclang_rt.asan-x86_64.so";
    let find = || host::read(Command::new(&compiler).arg(format!("-print-file-name={name}")));
    let mut path = PathBuf::from(find()?.trim());
    if !path.is_absolute() {
        let package = COMPILERS.iter().find(|(program, _)| *program == compiler).map(|(_, runtime)| *runtime);
        host::install(package.unwrap_or("libclang-rt-19-dev"))?;
        path = find()?.trim().into();
    }
    if path.is_file() {
        Ok(Some(path))
    } else {
        Err(Error::ToolMissing { program: name.into(), package: "libclang-rt-19-dev" })
    }
}

fn runtime_sources() -> Result<Vec<PathBuf>> {
    let dir = host::root().join("tests/lookalike/cpu");
    let entries = fs::read_dir(&dir).map_err(Error::at(&dir))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ending| ending == "cpp"))
        .collect();
    found.sort();
    Ok(found)
}

fn compiler() -> Result<String> {
    if let Some((found, _)) = COMPILERS.iter().find(|(program, _)| host::have(program)) {
        return Ok((*found).into());
    }
    let (program, runtime) = COMPILERS[COMPILERS.len() - 1];
    host::ensure(program, "clang-19")?;
    host::install(runtime)?;
    Ok(program.into())
}

fn is_newer(file: &Path, than: &[PathBuf]) -> bool {
    let time = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).ok();
    let made = time(file);
    made.is_some() && than.iter().all(|other| time(other) <= made)
}
