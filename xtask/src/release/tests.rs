//! Packages of a made-up build: the real list of files, small programs. Other programs read what was written.

#![allow(clippy::expect_used)] // tests fail by panicking

use std::collections::BTreeSet;

use super::*;

const TIME: u64 = 1_700_000_000;

/// A project with the real list, programs that print their own names, and pages; and a release of it.
fn project() -> (tempfile::TempDir, Release) {
    let dir = tempfile::tempdir().expect("a folder");
    let root = dir.path().join("project");
    let manifest = fs::read_to_string(host::root().join("Cargo.toml")).expect("Cargo.toml");
    for file in install::listed(&manifest).expect("a list") {
        let source = file.source.replace('*', "made-up");
        let path = root.join(&source);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        let real = host::root().join(&source);
        let text = if source.starts_with("target/release/rocmforge") {
            format!("#!/bin/sh\necho {source}\n").into_bytes()
        } else if real.exists() {
            fs::read(real).expect("a file")
        } else {
            format!("{source}\n").into_bytes()
        };
        fs::write(&path, text).expect("a file");
    }
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "target/release/docs/doc/changelog"] {
        fs::write(root.join(name), name).expect("a file");
    }
    fs::write(root.join("target/release/docs/doc/third-party-licences.gz"), "notices").expect("a file");
    fs::write(root.join("Cargo.toml"), manifest).expect("Cargo.toml");
    let mut release = Release::of(&root, dir.path().join("out")).expect("a release");
    release.commit = Commit { id: "0123".into(), time: TIME };
    release.history = vec![
        entry("0.2.0", TIME, &["Say 100 % of it", "Do more"]),
        entry("0.1.0", TIME - 86_400, &["Begin"]),
    ];
    (dir, release)
}

fn entry(version: &str, time: u64, changes: &[&str]) -> Entry {
    let changes = changes.iter().map(|change| (*change).to_owned()).collect();
    Entry { version: version.into(), time, changes }
}

fn docs(release: &Release) -> PathBuf {
    release.root.join("target/release/docs")
}

/// Where files go; a new folder each time, with new times of its files.
fn place(release: &Release, prefix: &str, name: &str) -> Place {
    Place::of_project(&release.root, prefix, release.out.join(name))
}

fn says(program: &str, words: &[&str]) -> String {
    host::read(Command::new(program).args(words)).expect(program)
}

/// Every path that the list leads to with a prefix.
fn expected(release: &Release, prefix: &str) -> BTreeSet<String> {
    let place = place(release, prefix, "nowhere");
    let files = install::files(&place).expect("a list");
    let below =
        |path: PathBuf| path.strip_prefix(&place.destdir).expect("below").to_string_lossy().into_owned();
    files.iter().map(|file| below(place.of(file))).collect()
}

#[test]
fn the_tar_archive_has_all_files_and_the_same_bytes_each_time() {
    let (_dir, release) = project();
    let name =
        tarball::write(&release, &place(&release, "/usr/local", "a"), &docs(&release)).expect("packed");
    let path = release.out.join(&name);
    let first = fs::read(&path).expect("read");
    // A file's time on this machine changes nothing.
    fs::write(release.root.join("README.md"), fs::read(release.root.join("README.md")).expect("read"))
        .expect("written");
    tarball::write(&release, &place(&release, "/usr/local", "b"), &docs(&release)).expect("packed");
    assert!(first == fs::read(&path).expect("read"), "{name} differs");

    let top = name.strip_suffix(".tar.xz").expect("its name");
    let path = path.to_string_lossy().into_owned();
    let mut wanted: BTreeSet<String> = expected(&release, "/usr/local")
        .iter()
        .map(|file| format!("{top}/{}", file.strip_prefix("usr/local/").unwrap_or(file)))
        .collect();
    for name in ["README.md", "SECURITY.md", "LICENSE-MIT", "LICENSE-APACHE", "CHANGELOG.md", "install.sh"] {
        assert!(wanted.insert(format!("{top}/{name}")), "{name} twice");
    }
    let listed = says("tar", &["--list", "--file", &path]);
    let listed: BTreeSet<String> =
        listed.lines().filter(|line| !line.ends_with('/')).map(str::to_owned).collect();
    assert_eq!(listed, wanted);
    for line in says("tar", &["--list", "--verbose", "--utc", "--full-time", "--file", &path]).lines() {
        assert!(line.contains(" root/root ") && line.contains(" 2023-11-14 22:13:20 "), "{line}");
        let mode = if line.contains("/bin/") && !line.ends_with('/') || line.ends_with(".sh") {
            "-rwxr-xr-x"
        } else {
            ""
        };
        assert!(line.starts_with(mode), "{line}");
    }
}

#[test]
fn the_archives_script_installs_and_removes() {
    let (dir, release) = project();
    let name =
        tarball::write(&release, &place(&release, "/usr/local", "a"), &docs(&release)).expect("packed");
    let path = release.out.join(&name).to_string_lossy().into_owned();
    let to = dir.path().to_string_lossy().into_owned();
    says("tar", &["-C", &to, "-xf", &path]);
    let script = dir.path().join(name.strip_suffix(".tar.xz").expect("its name")).join("install.sh");
    let script = script.to_string_lossy().into_owned();
    let system = dir.path().join("system");
    let destdir = system.to_string_lossy().into_owned();
    says(&script, &["--destdir", &destdir]);
    assert_eq!(found(&system), expected(&release, "/usr/local"));
    assert_eq!(says(&format!("{destdir}/usr/local/bin/rocmforged"), &[]), "target/release/rocmforged\n");
    let unit =
        fs::read_to_string(system.join("usr/local/lib/systemd/system/rocmforged.service")).expect("a unit");
    assert!(
        unit.contains("ExecStart=/usr/local/bin/rocmforged --config /etc/rocmforge/config.toml"),
        "{unit}"
    );
    // An administrator's changes stay at both.
    let config = system.join("etc/rocmforge/config.toml");
    fs::write(&config, "mine").expect("written");
    fs::write(system.join("etc/rocmforge/conf.d/own.toml"), "mine too").expect("written");
    says(&script, &["--destdir", &destdir]);
    assert_eq!(fs::read_to_string(&config).expect("kept"), "mine");
    assert!(
        fs::read_to_string(system.join("etc/rocmforge/config.toml.new"))
            .expect("beside")
            .contains("[limits]")
    );
    says(&script, &["--uninstall", "--destdir", &destdir]);
    let kept = ["etc/rocmforge/conf.d/own.toml", "etc/rocmforge/config.toml"].map(str::to_owned);
    assert_eq!(found(&system), BTreeSet::from(kept));
    assert!(!system.join("usr/local/share/rocmforge").exists(), "an empty folder was left");
}

#[test]
fn the_rpm_has_all_files_and_the_same_bytes_each_time() {
    if !host::have("rpmbuild") {
        println!("rocmforge-test-skipped: the RPM package: rpmbuild is missing (Debian package rpm)");
        assert!(!host::strict(), "may not be skipped here");
        return;
    }
    let (_dir, release) = project();
    let name = rpm::write(&release, &place(&release, "/usr", "a"), &docs(&release)).expect("packed");
    let path = release.out.join(&name);
    let first = fs::read(&path).expect("read");
    rpm::write(&release, &place(&release, "/usr", "b"), &docs(&release)).expect("packed");
    assert!(first == fs::read(&path).expect("read"), "{name} differs");

    let path = path.to_string_lossy().into_owned();
    let ask = |form: &str| says("rpm", &["-qp", "--qf", form, &path]);
    assert_eq!(ask("%{NAME} %{VERSION} %{LICENSE}"), "rocmforge 0.1.0 MIT OR Apache-2.0");
    let listed = ask("[%{FILEMODES:perms} %{FILEUSERNAME} %{FILEGROUPNAME} %{FILEMTIMES} %{FILENAMES}\n]");
    for line in listed.lines() {
        assert!(line.contains(&format!(" root root {TIME} ")), "{line}");
        let program = line.contains("/usr/bin/") || line.ends_with("/choose-drop-ins");
        assert_eq!(line.starts_with("-rwxr-xr-x "), program, "{line}");
    }
    let files: BTreeSet<String> = listed
        .lines()
        .filter(|line| !line.starts_with('d'))
        .filter_map(|line| Some(line.split_once(" /")?.1.to_owned()))
        .collect();
    let mut wanted: BTreeSet<String> = expected(&release, "/usr")
        .iter()
        .map(|file| file.replace("vendor-completions/", "site-functions/"))
        .collect();
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "third-party-licences.gz"] {
        wanted.insert(format!("usr/share/licenses/rocmforge/{name}"));
    }
    assert_eq!(files, wanted);
    for folder in ["/etc/rocmforge/conf.d", "/usr/share/rocmforge/drop-ins/version", "/usr/lib/rocmforge"] {
        assert!(listed.contains(&format!("drwxr-xr-x root root {TIME} {folder}\n")), "{folder}: {listed}");
    }
    let configs = says("rpm", &["-qp", "--configfiles", &path]);
    assert_eq!(configs, "/etc/rocmforge/conf.d/README\n/etc/rocmforge/config.toml\n");
    assert!(ask("[%{CHANGELOGTEXT}\n]").contains("- Say 100 % of it\n- Do more"));
    assert!(says("rpm", &["-qp", "--requires", &path]).contains("systemd >= 252"));
    let checked = says("rpm", &["--checksig", "--nosignature", &path]);
    assert!(checked.contains("digests OK"), "{checked}");
    for script in ["POSTIN", "PREUN", "POSTUN", "TRIGGERSCRIPTS"] {
        let text = ask(&format!("%{{{script}}}"));
        assert!(text.contains("systemctl"), "{script}: {text}");
        says("sh", &["-n", "-c", &text]);
    }
}

#[test]
fn a_folder_of_packages_is_checked_by_sha256sum_and_replaced_as_a_whole() {
    let (_dir, release) = project();
    for name in ["a.deb", "b.rpm"] {
        fs::write(release.out.join(name), name).expect("written");
    }
    let recipe = container::write(&release.out, "a.deb").expect("written");
    let text = fs::read_to_string(release.out.join(&recipe)).expect("read");
    assert!(text.contains("\nCOPY a.deb /tmp/rocmforge.deb\n") && !text.contains('@'), "{text}");
    let names = ["b.rpm".to_owned(), "a.deb".to_owned(), recipe];
    let written = sums::write(&release.out, &names).expect("written");
    let named: Vec<&str> = written.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(named, ["Containerfile", "a.deb", "b.rpm", "SHA256SUMS"]);
    let check = |strict| {
        let mut command = Command::new("sha256sum");
        host::works(command.current_dir(&release.out).args(["--check", strict, "SHA256SUMS"]))
    };
    assert!(check("--strict"));
    fs::write(release.out.join("a.deb"), "changed").expect("written");
    assert!(!check("--strict"));
    // Files of others stay.
    fs::write(release.out.join("notes"), "mine").expect("written");
    sums::clear(&release.out).expect("removed");
    assert_eq!(found(&release.out), BTreeSet::from(["notes".to_owned()]));
}

#[test]
fn changelogs_have_each_ones_form() {
    let (_dir, release) = project();
    let people = documents::of_people(&release.history).expect("written");
    let wanted = "# Changes\n\n## 0.2.0 (2023-11-14)\n\n- Say 100 % of it\n- Do more\n\n## 0.1.0 (2023-11-13)\n\n- Begin\n";
    assert_eq!(people, wanted);
    let debian = documents::of_debian("rocmforge", "A <a@b.c>", &release.history).expect("written");
    let first = "rocmforge (0.2.0-1) unstable; urgency=medium\n\n  * Say 100 % of it\n  * Do more\n\n -- A <a@b.c>  Tue, 14 Nov 2023 22:13:20 +0000\n\n";
    assert!(debian.starts_with(first), "{debian}");
    // Debian's lines have at most 80 columns.
    let long = "abcd ".repeat(20);
    let debian = documents::of_debian("x", "A <a@b.c>", &[entry("1", TIME, &[&long])]).expect("written");
    let line = |count| ["abcd"].repeat(count).join(" ");
    assert!(debian.contains(&format!("\n  * {}\n    {}\n\n", line(15), line(5))), "{debian}");
    let rpm = documents::of_rpm("A <a@b.c>", &release.history).expect("written");
    let first = "%changelog\n* Tue Nov 14 2023 A <a@b.c> - 0.2.0-1\n- Say 100 %% of it\n- Do more\n\n* Mon Nov 13 2023";
    assert!(rpm.starts_with(first), "{rpm}");
}

#[test]
fn changes_belong_to_the_version_after_the_last_tag() {
    if !host::have("git") {
        println!("rocmforge-test-skipped: changes by version: git is missing (Debian package git)");
        assert!(!host::strict(), "may not be skipped here");
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let root = dir.path();
    fs::write(root.join("Cargo.toml"), "").expect("written");
    assert_eq!(
        history::entries(root, "1.0.0", &Commit { id: String::new(), time: 5 }).expect("read").len(),
        1
    );
    let git = |words: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(root).args(["-c", "user.name=a", "-c", "user.email=a@b.c"]).args(words);
        command.env("GIT_COMMITTER_DATE", format!("{TIME} +0500")).env("GIT_CONFIG_GLOBAL", "/dev/null");
        host::read(&mut command).expect("git");
    };
    git(&["init", "--quiet"]);
    for (subject, tag) in
        [("One", "v0.9.0"), ("Two", ""), ("Three", "v0.10.0"), ("Four", "v1.0.0"), ("Five", "")]
    {
        git(&["commit", "--quiet", "--allow-empty", "--message", subject]);
        if !tag.is_empty() {
            git(&["tag", tag]);
        }
    }
    let last = history::last(root).expect("a commit");
    assert_eq!((last.id.len(), last.time), (40, TIME));
    let wanted = [
        entry("1.0.0", TIME, &["Five", "Four"]),
        entry("0.10.0", TIME, &["Three", "Two"]),
        entry("0.9.0", TIME, &["One"]),
    ];
    assert_eq!(history::entries(root, "1.0.0", &last).expect("read"), wanted);
    let error = history::check_clean(root).expect_err("Cargo.toml is not in the repository").to_string();
    assert!(error.contains("1 files have changes") && error.contains("Cargo.toml"), "{error}");
    git(&["add", "Cargo.toml"]);
    git(&["commit", "--quiet", "--message", "Six"]);
    history::check_clean(root).expect("clean");
}

/// All files below a folder.
fn found(below: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![below.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(below).expect("below").to_string_lossy().into_owned());
            }
        }
    }
    found
}

#[test]
fn notices_of_linked_crates_are_collected() {
    let text = licences::collect().expect("cargo tells the crates");
    // Linked, linked by a library, only in tests, and our own.
    for (name, there) in
        [("tokio 1.", true), ("libc 0.", true), ("proptest 1.", false), ("rocmforge-client 0.", false)]
    {
        assert_eq!(text.lines().any(|line| line.starts_with(name)), there, "{name}");
    }
    assert!(text.contains("Permission is hereby granted, free of charge"), "no licence has its text");
}
