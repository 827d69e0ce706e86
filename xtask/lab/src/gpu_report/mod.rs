//! `cargo xtask gpu-report`: collects everything about a GPU that only its owner can measure, in one file to send.
//!
//! The report has the doctor's findings, all tests that a GPU can run, and measurements at the shapes of real models.
//! Nothing is downloaded: the command makes the models. A part that fails or hangs is ended and reported, and the
//! next part runs.

mod page;
mod part;
mod plan;
mod private;
mod programs;
mod system;
mod trial;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rocmforge::backend::doctor::{Doctor, Gpu, Report as Findings, State as Health};
use rocmforge::backend::hip::Library;
use xtask::error::{Error, Result};
use xtask::host;

use crate::synthetic;
use page::{Page, Played, played};
use part::{Kind, Outcome, State};
use plan::Sizes;
use private::Private;
use programs::Programs;
pub use trial::on_lookalike;

#[derive(clap::Args)]
pub struct Args {
    /// Report file; default: gpu-report.md in the build folder
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// GPU to use, by the doctor's number; default: the first that works
    #[arg(long, value_name = "NUMBER")]
    device: Option<u32>,
    /// GGUF files to measure, besides the ones made here
    #[arg(long, value_name = "FILE")]
    model: Vec<PathBuf>,
    /// Run only these parts
    #[arg(long, value_delimiter = ',', value_name = "PART")]
    only: Vec<Group>,
}

/// A kind of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Group {
    /// Tests of every kernel against f64 on the host
    Kernels,
    /// Tests of the engine on the device: weights loaded on demand, devices that fail
    Engine,
    /// Tests of whole models against the CPU
    Models,
    /// Matrix products of an 8B model, for each type
    Matmul,
    /// Upload speed of weights, by path and threads
    Upload,
    /// Prefill and decode of whole models
    Step,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| host::target_dir().join("gpu-report.md"));
    // Checks that the file is writable before minutes are spent.
    let parent = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(Error::at(parent))?;
    fs::write(&out, "").map_err(Error::at(&out))?;
    let program = std::env::current_exe().map_err(Error::io("this program"))?;
    let findings = Doctor::new(&program).report();
    let gpu = chosen(&findings, args.device);
    let mut page = Page { facts: system::facts(Path::new("/")), findings, gpu, outcomes: Vec::new() };
    match page.gpu.clone() {
        Some(gpu) => try_all(args, &gpu, &mut page)?,
        None => tell(&page.findings),
    }
    let verdict = page.verdict();
    let failed = page.failed().len();
    let has_gpu = page.gpu.is_some();
    Private::here().strip(&mut page);
    fs::write(&out, page.text()).map_err(Error::at(&out))?;
    println!("{verdict}");
    println!("{}", out.display());
    match (has_gpu, failed) {
        (false, _) => Err(Error::NoGpu),
        (true, 0) => Ok(()),
        (true, failed) => Err(Error::Parts { failed, report: out }),
    }
}

/// The requested GPU, or the first that works.
fn chosen(findings: &Findings, index: Option<u32>) -> Option<Gpu> {
    let mut working = findings.gpus.iter().filter(|gpu| gpu.works);
    match index {
        Some(index) => working.find(|gpu| gpu.index == index).cloned(),
        None => working.next().cloned(),
    }
}

/// Prints the doctor's findings if no GPU works.
fn tell(findings: &Findings) {
    for check in &findings.checks {
        let mark = if check.state == Health::Problem { "PROBLEM" } else { "" };
        eprintln!("{:14} {mark:7} {}", check.name, check.found);
        if !check.advice.is_empty() {
            eprintln!("{:22} -> {}", "", check.advice);
        }
    }
}

fn try_all(args: &Args, gpu: &Gpu, page: &mut Page) -> Result<()> {
    let library = Library::find()
        .map_err(|error| Error::Unexpected { what: "the HIP runtime", text: error.to_string() })?;
    page.facts.extend(system::loaded_libraries());
    let place = format!("{} at {}", gpu.name, gpu.pci);
    eprintln!("{place}: {}, through {}", gpu.arch, library.path().display());
    let quick = played(gpu) == Played::OnCpu;
    if quick {
        eprintln!("this is not a GPU: the kernels run on the CPU, with small sizes");
    }
    let dir = host::target_dir().join("gpu-report");
    fs::create_dir_all(&dir).map_err(Error::at(&dir))?;
    // The model files are removed with this folder in any case.
    let dir = tempfile::tempdir_in(&dir).map_err(Error::at(&dir))?;
    let started = Instant::now();
    eprintln!("building tests and measurements");
    let wants = |group: Group| args.only.is_empty() || args.only.contains(&group);
    let of = |groups: &[(Group, &'static str)]| -> Vec<&str> {
        groups.iter().filter(|(group, _)| wants(*group)).map(|(_, program)| *program).collect()
    };
    let tests = of(&[(Group::Kernels, "kernels"), (Group::Engine, "gpu"), (Group::Models, "reference")]);
    let mut benches =
        of(&[(Group::Matmul, "hip_matmul"), (Group::Upload, "gpu_step"), (Group::Step, "gpu_step")]);
    benches.dedup();
    let programs = match Programs::build(&tests, &benches, quick) {
        Ok(programs) => programs,
        Err(Error::Interrupted) => return Err(Error::Interrupted),
        // The doctor's findings are still worth a report.
        Err(error) => {
            page.outcomes.push(Outcome::of("build", started, Err(error.to_string())));
            return Ok(());
        }
    };
    page.outcomes.push(Outcome::of("build", started, Ok(String::new())));
    let mut tried = Trial {
        programs,
        library: library.path().into(),
        visible: (page.findings.gpus.len() > 1).then(|| plan::visible(gpu.index)),
        device: place,
        dir: dir.path().into(),
        sizes: Sizes::of(gpu, quick),
        outcomes: &mut page.outcomes,
    };
    tried.tests(wants)?;
    if wants(Group::Matmul) {
        tried.matmul()?;
    }
    if wants(Group::Upload) || wants(Group::Step) {
        tried.models(wants, &args.model)?;
    }
    Ok(())
}

/// The state of trying parts one after the other.
struct Trial<'a> {
    programs: Programs,
    /// File of the runtime. Tests fail if it does not answer.
    library: PathBuf,
    /// `HIP_VISIBLE_DEVICES` if there are several devices: programs see only the chosen one, as number 0.
    visible: Option<String>,
    /// Name and address of the device that must answer.
    device: String,
    dir: PathBuf,
    sizes: Sizes,
    outcomes: &'a mut Vec<Outcome>,
}

impl Trial<'_> {
    fn tests(&mut self, wants: impl Fn(Group) -> bool) -> Result<()> {
        for (group, name, program, filter, seconds) in [
            (Group::Kernels, "kernels", "kernels", None, 300),
            (Group::Engine, "engine", "gpu", None, 180),
            (Group::Models, "models", "reference", Some("on_gpu"), 300),
        ] {
            if wants(group) {
                let words: Vec<String> = filter.into_iter().map(str::to_owned).collect();
                self.program(name, Kind::Tests, program, &words, seconds)?;
            }
        }
        Ok(())
    }

    fn matmul(&mut self) -> Result<()> {
        for dtype in self.sizes.types.clone() {
            let name = format!("matmul {dtype}");
            let Some(words) = self.sizes.matmul(&dtype) else {
                self.add(Outcome::left(&name, "the device has too little free memory"));
                continue;
            };
            self.program(&name, Kind::Measurements, "hip_matmul", &words, 120)?;
        }
        Ok(())
    }

    fn models(&mut self, wants: impl Fn(Group) -> bool, own: &[PathBuf]) -> Result<()> {
        let mut made = 0;
        for (shape, mixture) in self.sizes.models.clone() {
            if made > 0 && !wants(Group::Step) {
                break; // uploads are measured with the first model only
            }
            let name = format!("{} {}", shape.name, mixture.name());
            if let Err(why) = self.sizes.has_room(&shape, mixture, &self.dir) {
                self.add(Outcome::left(&name, &why));
                continue;
            }
            let path = self.dir.join(format!("{}-{}.gguf", shape.name, mixture.name()));
            let started = Instant::now();
            let written = synthetic::write(&path, &shape, mixture, |_| ());
            let bytes = synthetic::bytes(&shape, mixture);
            let done =
                written.map(|()| format!("{:.2} GB", bytes as f64 / 1e9)).map_err(|error| error.to_string());
            let is_written = done.is_ok();
            self.add(Outcome::of(&format!("making {name}"), started, done));
            if is_written {
                if made == 0 && wants(Group::Upload) {
                    self.uploads(&path)?;
                }
                if wants(Group::Step) {
                    self.steps(&name, &path)?;
                }
                made += 1;
            }
            // Makes room for the next model; other files are removed with the folder.
            let _ = fs::remove_file(&path);
        }
        for path in own.iter().filter(|_| wants(Group::Step)) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            self.steps(&name, &path.canonicalize().map_err(Error::at(path))?)?;
        }
        Ok(())
    }

    fn uploads(&mut self, model: &Path) -> Result<()> {
        for (path, threads) in self.sizes.uploads.clone() {
            let words = self.sizes.upload(model, path, threads);
            self.program(&format!("upload {path} {threads}"), Kind::Measurements, "gpu_step", &words, 120)?;
        }
        Ok(())
    }

    fn steps(&mut self, name: &str, model: &Path) -> Result<()> {
        for step in self.sizes.steps.clone() {
            let words = self.sizes.step(model, &step);
            let name = format!("step {name}, {}", step.name());
            self.program(&name, Kind::Measurements, "gpu_step", &words, 180)?;
        }
        Ok(())
    }

    fn program(
        &mut self,
        name: &str,
        kind: Kind,
        program: &str,
        words: &[String],
        seconds: u64,
    ) -> Result<()> {
        let mut command: Command = self.programs.command(program);
        command.args(words);
        command.env("ROCMFORGE_HIP_LIB", &self.library).env("ROCMFORGE_TEST_DEVICE", &self.device);
        // A test without its model says so in the report.
        command.env_remove("ROCMFORGE_STRICT");
        if let Some(visible) = &self.visible {
            command.env("HIP_VISIBLE_DEVICES", visible);
        }
        let limit = Duration::from_secs(seconds) * self.sizes.patience;
        let outcome = part::run(name, kind, &mut command, limit, &self.dir.join("log"), &self.device)?;
        self.add(outcome);
        Ok(())
    }

    fn add(&mut self, outcome: Outcome) {
        let state = match outcome.state {
            State::Passed => "passed",
            State::Failed => "FAILED",
            State::Left => "not tried",
        };
        eprintln!("\r{:32} {state:9} {:6.1} s  {}", outcome.name, outcome.seconds, outcome.note);
        self.outcomes.push(outcome);
    }
}
