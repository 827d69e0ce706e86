//! stub
use std::process::ExitCode;

fn main() -> ExitCode {
    use rocmforge::model::template;
    if std::env::args_os().nth(1).is_some_and(|argument| argument == template::SUBCOMMAND) {
        return template::child_main();
    }
    ExitCode::SUCCESS
}
