//! The RPM package, by rpmbuild. The specification is written from the list of files; nothing is built by it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::{Release, documents, lay_out};
use crate::error::{Error, Result};
use crate::host;
use crate::install::{self, Place};

/// Writes the package of the files that `place` puts below /usr; returns its name.
pub fn write(release: &Release, place: &Place, docs: &Path) -> Result<String> {
    let changelog = documents::of_rpm(&release.maintainer, &release.history)?;
    let folder = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let tree = &place.destdir;
    let mut paths = Vec::new();
    lay_out(place)?;
    for file in install::files(place)? {
        let path = place.of(&file);
        let below = path.strip_prefix(tree).unwrap_or(&path).to_string_lossy().into_owned();
        paths.push(suited(tree, &below)?);
    }
    paths.extend(licences(release, tree, docs)?);
    let spec = folder.path().join(format!("{}.spec", release.name));
    let text = specification(release, &paths, &changelog);
    fs::write(&spec, text).map_err(Error::at(&spec))?;
    build(release, &spec, tree, folder.path())
}

/// Runs rpmbuild; returns the name of the package, which is then in the folder of packages.
fn build(release: &Release, spec: &Path, tree: &Path, folder: &Path) -> Result<String> {
    let top = folder.join("rpmbuild");
    let define = |name: &str, value: &str| ["--define".to_owned(), format!("{name} {value}")];
    let mut command = Command::new("rpmbuild");
    command.args(["-bb", "--quiet"]).arg(spec);
    command.args(define("_topdir", &top.to_string_lossy()));
    command.args(define("_tree", &tree.to_string_lossy()));
    command.env("SOURCE_DATE_EPOCH", release.commit.time.to_string()).env("LC_ALL", "C.UTF-8");
    // Its report of each step is only of interest if it fails.
    let shown = host::shown(&command);
    let output = command.output().map_err(Error::io(shown.clone()))?;
    host::check_interrupted()?;
    if !output.status.success() {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        return Err(Error::Command { command: shown, status: output.status });
    }
    let name = format!("{}-{}-1.{}.rpm", release.name, version(release), std::env::consts::ARCH);
    let built = top.join("RPMS").join(std::env::consts::ARCH).join(&name);
    fs::copy(&built, release.out.join(&name)).map_err(Error::at(&built))?;
    Ok(name)
}

/// Moves a file to where distributions with RPM have it; returns its path.
fn suited(tree: &Path, below: &str) -> Result<String> {
    let to = below.replace("share/zsh/vendor-completions/", "share/zsh/site-functions/");
    if to != below {
        let (from, moved) = (tree.join(below), tree.join(&to));
        let folder = moved.parent().unwrap_or(tree);
        fs::create_dir_all(folder).map_err(Error::at(folder))?;
        fs::rename(&from, &moved).map_err(Error::at(&from))?;
    }
    Ok(format!("/{to}"))
}

/// Adds licences, which the Debian package names in its own way.
fn licences(release: &Release, tree: &Path, docs: &Path) -> Result<Vec<String>> {
    let place = format!("usr/share/licenses/{}", release.name);
    let folder = tree.join(&place);
    fs::create_dir_all(&folder).map_err(Error::at(&folder))?;
    let files = ["LICENSE-MIT", "LICENSE-APACHE"].map(|name| release.root.join(name));
    let mut paths = Vec::new();
    for from in files.into_iter().chain([docs.join("doc/third-party-licences.gz")]) {
        let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let to = folder.join(&name);
        fs::copy(&from, &to).map_err(Error::at(&from))?;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o644)).map_err(Error::at(&to))?;
        paths.push(format!("/{place}/{name}"));
    }
    Ok(paths)
}

/// A hyphen separates version and release.
fn version(release: &Release) -> String {
    release.version.replace('-', "~")
}

/// The specification of a package with these files.
fn specification(release: &Release, paths: &[String], changelog: &str) -> String {
    let Release { name, description, about, licence, .. } = release;
    let mut text = format!(
        "# The same input gives the same bytes, and the files stay as they are.\n\
         %global debug_package %{{nil}}\n\
         %global __os_install_post %{{nil}}\n\
         %global _build_id_links none\n\
         %global _buildhost localhost\n\
         %global use_source_date_epoch_as_buildtime 1\n\
         %global clamp_mtime_to_source_date_epoch 1\n\
         %global _binary_payload w19.zstdio\n\
         Name: {name}\nVersion: {}\nRelease: 1\nSummary: {description}\nLicense: {licence}\n\
         Requires: systemd >= 252\n\n\
         %description\n{about}\n\n\
         %install\nmkdir -p %{{buildroot}}\ncp -a %{{_tree}}/. %{{buildroot}}/\n\n{SCRIPTS}\n%files\n",
        version(release)
    );
    for folder in folders(name, paths) {
        let _ = writeln!(text, "%dir %attr(0755, root, root) {folder}");
    }
    for path in paths {
        let kind = match path {
            path if path.starts_with("/etc/") => "%config(noreplace) ",
            path if path.starts_with("/usr/share/licenses/") => "%license ",
            path if path.starts_with("/usr/share/doc/") => "%doc ",
            _ => "",
        };
        let _ = writeln!(text, "{kind}%attr(-, root, root) {path}");
    }
    text.push('\n');
    text.push_str(changelog);
    text
}

/// Folders that only this package has.
fn folders(name: &str, paths: &[String]) -> BTreeSet<String> {
    let mut folders = BTreeSet::new();
    for path in paths {
        for folder in Path::new(path).ancestors().skip(1) {
            if folder.iter().any(|part| part == name) {
                folders.insert(folder.to_string_lossy().into_owned());
            }
        }
    }
    folders
}

/// As the Debian package's scripts: users and folders, drop-ins of systemd's version, the socket.
const SCRIPTS: &str = r#"%post
systemd-sysusers rocmforge.conf || :
systemd-tmpfiles --create rocmforge.conf || :
/usr/lib/rocmforge/choose-drop-ins /usr/share/rocmforge/drop-ins/version /usr/lib/systemd/system || :
if [ "$1" -eq 1 ]; then
    # A first installation: the preset enables the socket and nothing else.
    systemctl --no-reload preset rocmforged.socket rocmforged.service rocmforge-metrics.service rocmforge-gateway.socket rocmforge-gateway.service || :
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    if systemctl --quiet is-enabled rocmforged.socket; then systemctl start rocmforged.socket || :; fi
fi

%triggerin -- systemd
# Another version of systemd understands other settings. The daemon keeps running; its next start uses them.
/usr/lib/rocmforge/choose-drop-ins /usr/share/rocmforge/drop-ins/version /usr/lib/systemd/system || :
[ ! -d /run/systemd/system ] || systemctl daemon-reload || :

%preun
if [ "$1" -eq 0 ]; then
    if [ -d /run/systemd/system ]; then
        systemctl disable --now rocmforge-gateway.socket rocmforge-gateway.service || :
        systemctl disable --now rocmforged.socket rocmforged.service rocmforge-metrics.service || :
    else
        systemctl --no-reload disable rocmforged.socket rocmforge-gateway.socket || :
    fi
    # Made after the installation.
    rm -f /usr/lib/systemd/system/rocmforged.service.d/50-systemd-*.conf
    rmdir /usr/lib/systemd/system/rocmforged.service.d 2>/dev/null || :
fi

%postun
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    # Connections wait in the socket while the new daemon starts.
    [ "$1" -lt 1 ] || systemctl try-restart rocmforged.service rocmforge-gateway.service || :
fi
"#;
