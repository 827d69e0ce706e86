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
            if folder == "bash" {
                text = for_bash(&String::from_utf8_lossy(&text), &program).into_bytes();
            }
            files.push(File { path: format!("completions/{folder}/{file}"), text });
        }
    }
    files
}

/// The generator's script, which also completes options of subcommands and names of models.
///
/// The generator calls a subcommand of `a-b` by two names, `a__b__subcmd__c` and `a__subcmd__b__subcmd__c`, and so finds
/// none (clap_complete 4.6).
fn for_bash(script: &str, program: &Command) -> String {
    let name = program.get_name();
    let function = name.replace('-', "__");
    let mut script = script.replace(&name.replace('-', "__subcmd__"), &function);
    let takes_model = |command: &&Command| {
        command.get_positionals().next().is_some_and(|argument| argument.get_id() == "model")
    };
    let commands: Vec<&str> = program.get_subcommands().filter(takes_model).map(Command::get_name).collect();
    if !commands.is_empty() {
        script = script
            .replace(&format!("complete -F _{function} "), &format!("complete -F _{function}_or_models "));
        script.push_str(&format!(
            r#"
# Names of models, after a command that takes one. Asks the daemon, for a second at most. Names are compared and quoted here, because
# compgen would run what stands in them.
_{function}_or_models() {{
    _{function} "$@"
    case "$3" in
        {})
            if [[ "$2" != -* ]]; then
                local name
                COMPREPLY=()
                while IFS= read -r name; do
                    [[ "$name" != "$2"* ]] || COMPREPLY+=("$(printf %q "$name")")
                done < <(timeout 1 {name} list 2>/dev/null | sed -n '2,$s/  .*//p')
            fi
            ;;
    esac
}}
"#,
            commands.join("|")
        ));
    }
    script
}
