//! The packages that people use: they know nothing of this project.

use std::path::Path;

use crate::{clients, packages};

/// The packages, each of which the script uses.
const PACKAGES: [&str; 4] =
    ["openai==3.57.0", "anthropic==2.13.0", "ollama==0.6.3", "prometheus-client==0.26.0"];

#[test]
fn published_packages_get_the_daemons_answers_and_its_errors() {
    let Some(python) = packages::python("gateway-sdks", &PACKAGES) else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gateway/sdks.py");
    assert_eq!(clients::run(&python, &script, "=="), PACKAGES);
}
