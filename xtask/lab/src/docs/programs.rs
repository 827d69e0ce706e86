//! Makes manual pages and completions from the programs' command lines.

use std::io;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use super::File;

const SECTION_USER: &str = "1";
const SECTION_ADMIN: &str = "8";

/// The programs, and the sections of their pages.
fn programs() -> [(Command, &'static str); 4] {
    [
        (rocmforge::daemon::arguments::command(), SECTION_ADMIN),
        (rocmforge_client::cli::command(), SECTION_USER),
        (rocmforge_top::command(), SECTION_USER),
        (rocmforge_gateway::command(), SECTION_ADMIN),
    ]
}

/// One page for each program, and one for each of its subcommands and of theirs.
///
/// # Errors
/// Only errors of writing to memory.
pub fn pages() -> io::Result<Vec<File>> {
    let mut pages = Vec::new();
    for (program, section) in programs() {
        let mut program = program.disable_help_subcommand(true);
        program.build();
        add_pages(&program, section, &mut pages)?;
    }
    Ok(pages)
}

/// Adds the page of a command and those of its subcommands.
fn add_pages(command: &Command, section: &str, pages: &mut Vec<File>) -> io::Result<()> {
    pages.push(page(command, section)?);
    let mut shown = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    shown.try_for_each(|subcommand| add_pages(subcommand, section, pages))
}

fn page(command: &Command, section: &str) -> io::Result<File> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let mut text = Vec::new();
    Man::new(command.clone()).section(section).source("ROCmForge").manual("ROCmForge").render(&mut text)?;
    text.extend_from_slice(
        b".SH \"SEE ALSO\"\n.BR rocmforged (8),\n.BR rocmforge\\-client (1),\n.BR rocmforge\\-top (1),\n\
          .BR rocmforge\\-gateway (8),\n.BR rocmforge\\-config (5),\n.BR rocmforge\\-protocol (7)\n",
    );
    Ok(File { path: format!("man/{name}.{section}"), text })
}

/// The program without hidden subcommands, which the generator would complete too.
fn without_hidden(program: &Command) -> Command {
    let shown = program.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    // A command keeps its names for good, and so does this short process.
    let kept = |text: &str| -> &'static str { String::leak(text.to_owned()) };
    Command::new(kept(program.get_name()))
        .version(kept(program.get_version().unwrap_or_default()))
        .about(program.get_about().cloned().unwrap_or_default())
        .args(program.get_arguments().cloned())
        .subcommands(shown.cloned())
}

/// Completions of each program for each shell in Debian, under the file names that the shells look for.
pub fn completions() -> Vec<File> {
    let mut files = Vec::new();
    for (program, _) in programs() {
        let name = program.get_name().to_owned();
        let mut program = without_hidden(&program);
        for (shell, folder, file) in [
            (Shell::Bash, "bash", name.clone()),
            (Shell::Zsh, "zsh", format!("_{name}")),
            (Shell::Fish, "fish", format!("{name}.fish")),
        ] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut program, &name, &mut text);
            files.push(File { path: format!("completions/{folder}/{file}"), text });
        }
    }
    files
}
