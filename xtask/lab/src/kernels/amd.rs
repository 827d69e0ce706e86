//! Builds code objects for AMD GPUs: each kernel file becomes assembly and an object; all objects of a target become
//! one code object.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use xtask::error::{Error, Result};
use xtask::host;
use xtask::lookalike::sources::{self, include_flags};
use xtask::lookalike::unit::{self, Unit};

use super::targets::Target;
use super::zig::Zig;
use super::{gates, note, table};

const ASSEMBLY: [&str; 15] = [
    "-x",
    "hip",
    "--cuda-device-only",
    "-S",
    "-nogpuinc",
    "-nogpulib",
    "-nostdinc",
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-function",
];
const LINK: [&str; 5] = ["-m", "elf64_amdgpu", "--no-undefined", "-shared", "-s"];

/// A code object.
pub struct Object {
    pub target: &'static Target,
    pub bytes: Vec<u8>,
    pub kernels: usize,
    /// Faults that the gates found.
    pub faults: Vec<String>,
    /// Lines of the table of hot kernels.
    pub rows: Vec<table::Row>,
}

/// Builds one code object for each of `targets`.
///
/// # Errors
/// Errors of compiling.
pub fn build(targets: &[&'static Target]) -> Result<Vec<Object>> {
    let zig = Zig::find()?;
    let names = sources::names()?;
    let mut units = Vec::new();
    for target in targets {
        units.extend(units_of(&zig, target, &names)?);
    }
    unit::build(units)?;
    targets.iter().map(|target| finish(&zig, target, &names)).collect()
}

/// The compiler's flags for `target` without file names: for assembly, for objects and for linking.
pub fn flags(target: &Target) -> Vec<String> {
    [assembly_flags(target), object_flags(target), LINK.map(String::from).into()].concat()
}

fn assembly_flags(target: &Target) -> Vec<String> {
    let own = [format!("--offload-arch={}", target.name), version_flag(target)];
    ASSEMBLY.iter().map(|flag| (*flag).to_owned()).chain(own).collect()
}

fn object_flags(target: &Target) -> Vec<String> {
    vec![
        "--target=amdgcn-amd-amdhsa".into(),
        format!("-mcpu={}", target.name),
        version_flag(target),
        "-c".into(),
    ]
}

fn version_flag(target: &Target) -> String {
    format!("-mcode-object-version={}", target.code_object_version)
}

fn dir_of(target: &Target) -> PathBuf {
    super::dir().join(target.name)
}

fn units_of(zig: &Zig, target: &Target, names: &[String]) -> Result<Vec<Unit>> {
    let dir = dir_of(target);
    fs::create_dir_all(&dir).map_err(Error::at(&dir))?;
    names.iter().map(|name| compile(zig, target, name, &dir)).collect()
}

/// Compiles one kernel file. The assembly is kept beside the object, for the gates and for people.
fn compile(zig: &Zig, target: &Target, name: &str, dir: &Path) -> Result<Unit> {
    let source = sources::write_unit(&super::dir().join("units"), name, "hip")?;
    let assembly = dir.join(format!("{name}.s"));
    let output = dir.join(format!("{name}.o"));
    let mut to_assembly = zig.clang();
    to_assembly
        .args(assembly_flags(target))
        // A fixed name instead of a hash of the path, so that the bytes are the same in every directory.
        .arg(format!("-cuid={name}"))
        .args(include_flags(host::root()))
        // The driver does not pass -MF on to device compilations.
        .args(["-Xclang", "-MT", "-Xclang", name, "-Xclang", "-dependency-file", "-Xclang"])
        .arg(unit::list_path(&output))
        .arg(&source)
        .arg("-o")
        .arg(&assembly);
    let mut to_object = zig.clang();
    to_object.args(object_flags(target)).arg(&assembly).arg("-o").arg(&output);
    Ok(Unit { output, commands: vec![to_assembly, to_object], salt: Zig::salt(), is_trial: false })
}

/// Joins the objects of a target and checks the result.
fn finish(zig: &Zig, target: &'static Target, names: &[String]) -> Result<Object> {
    let dir = dir_of(target);
    check_inputs(&dir, names)?;
    let mut metadata = Vec::new();
    let mut inputs = Vec::new();
    for name in names {
        let path = dir.join(format!("{name}.o"));
        let object = fs::read(&path).map_err(Error::at(&path))?;
        metadata.push(note::read(&object)?);
        // A code object has one note; the linker would keep one per file.
        let stripped = dir.join(format!("{name}.no-note.o"));
        fs::write(&stripped, note::exclude(object)?).map_err(Error::at(&stripped))?;
        inputs.push(stripped);
    }
    let joined = note::join(&metadata)?;
    inputs.push(assemble_note(zig, target, &dir, &joined)?);
    let output = super::dir().join(format!("{}.co", target.name));
    let mut link = zig.lld();
    link.args(LINK).args(&inputs).arg("-o").arg(&output);
    run_quietly(&mut link)?;
    let kernels = gates::kernels(&joined)?;
    let mut faults = gates::faults(target, &kernels);
    let mut rows = Vec::new();
    for name in names {
        let path = dir.join(format!("{name}.s"));
        let text = fs::read_to_string(&path).map_err(Error::at(&path))?;
        faults.extend(gates::faults_of_code(target, &text));
        rows.extend(table::rows(target, &kernels, &text));
    }
    let bytes = fs::read(&output).map_err(Error::at(&output))?;
    Ok(Object { target, bytes, kernels: kernels.len(), faults, rows })
}

/// Checks that every kernel file and header that was read is in the digest, by which a stale archive is noticed.
fn check_inputs(dir: &Path, names: &[String]) -> Result<()> {
    let known = sources::inputs(&sources::dir())?;
    for name in names {
        let read = unit::files_of(&dir.join(format!("{name}.o"))).unwrap_or_default();
        let is_ours = |path: &&PathBuf| path.starts_with(sources::dir());
        // clang writes paths like `kernels/gemv/../common/x.h`.
        let unknown = read
            .iter()
            .filter(is_ours)
            .find(|path| path.canonicalize().map_or(true, |path| !known.contains(&path)));
        if let Some(path) = unknown {
            let text =
                format!("{name} includes {}, which is not in the digest of the archive", path.display());
            return Err(Error::Unexpected { what: "the compiler", text });
        }
    }
    Ok(())
}

/// Makes an object that holds only the joined note.
fn assemble_note(zig: &Zig, target: &Target, dir: &Path, metadata: &rmpv::Value) -> Result<PathBuf> {
    let (assembly, output) = (dir.join("note.asm"), dir.join("note.asm.o"));
    fs::write(&assembly, note::assembly(metadata)?).map_err(Error::at(&assembly))?;
    let mut command = zig.clang();
    command.args(object_flags(target)).args(["-x", "assembler"]).arg(&assembly).arg("-o").arg(&output);
    run_quietly(&mut command)?;
    Ok(output)
}

fn run_quietly(command: &mut Command) -> Result<()> {
    let shown = host::shown(command);
    let output = command.output().map_err(Error::io(shown.clone()))?;
    host::check_interrupted()?;
    if output.status.success() {
        return Ok(());
    }
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    Err(Error::Command { command: shown, status: output.status })
}
