//! The project commands that need the library. `cargo xtask <command>` hands them on to here.

mod attack;
mod docs;
mod gpu_report;
mod kernels;
mod oracle;
mod requantize;
mod soak;
mod stage;
mod synthetic;
mod verdicts;
mod whole;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::error;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Project commands of ROCmForge that need its library")]
#[command(version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

// `cargo xtask --help` has a copy of these lines, in xtask/src/main.rs.
#[derive(Subcommand)]
enum Command {
    /// Build the GPU kernels: code objects for AMD GPUs, look-alikes that run them on the CPU.
    Kernels(kernels::Args),
    /// Write a model file of a real model's shape with random weights, to measure a machine's speed.
    Synthetic(synthetic::Args),
    /// Write a model's file again with 6-bit floats (MXFP6) for its matrices.
    Requantize(requantize::Args),
    /// Write manual pages and shell completions, made from command lines and documents.
    Docs(docs::Args),
    /// Make the expected answers of the reference tests again, with another engine.
    Oracle(oracle::Args),
    /// Ask llama.cpp about every malformed model file of the tests, and show where and why our verdict differs.
    Verdicts(verdicts::Args),
    /// Run many clients against a private daemon for a while, and check that it leaks nothing.
    Soak(soak::Args),
    /// Let one user take all it can get from a private daemon, and measure what that costs others. Needs root.
    Attack(attack::Args),
    /// Test and measure this machine's GPU, and write one report file to read and to send. Needs no network.
    GpuReport(gpu_report::Args),
    /// Run a stage of the check.
    #[command(hide = true)]
    Stage(stage::Args),
    /// A user of an attack.
    #[command(hide = true)]
    AttackAs(attack::UserArgs),
    /// Examine the GPUs in this process, and print the findings for the parent process.
    #[command(name = rocmforge::backend::doctor::SUBCOMMAND, hide = true)]
    ExamineGpus,
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if matches!(command, Command::ExamineGpus) {
        return rocmforge::backend::doctor::child_main();
    }
    if let Command::AttackAs(args) = &command {
        return attack::as_user(args);
    }
    error::exit(|| match command {
        Command::Kernels(args) => kernels::run(&args),
        Command::Synthetic(args) => synthetic::run(&args),
        Command::Requantize(args) => requantize::run(&args),
        Command::Docs(args) => docs::run(&args),
        Command::Oracle(args) => oracle::run(&args),
        Command::Verdicts(args) => verdicts::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Attack(args) => attack::run(&args),
        Command::GpuReport(args) => gpu_report::run(&args),
        Command::Stage(args) => stage::run(&args),
        Command::ExamineGpus | Command::AttackAs(_) => Ok(()),
    })
}
