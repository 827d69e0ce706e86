//! Describes this machine as far as a GPU is concerned. No names of persons or machines, no serial numbers.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Map, Value};
use xtask::host;

/// Name and value of a fact.
pub type Fact = (String, String);

/// AMD's PCI vendor id.
const AMD: &str = "0x1002";

/// Files of an AMD device in `/sys/bus/pci/devices` that affect its speed.
const OF_DEVICE: [&str; 9] = [
    "device",
    "revision",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "mem_info_vram_total",
    "mem_info_vis_vram_total",
    "power_dpm_force_performance_level",
];

/// Properties of a GPU node in the kernel's list.
const OF_NODE: [&str; 9] = [
    "gfx_target_version",
    "simd_count",
    "max_waves_per_simd",
    "lds_size_in_kb",
    "wave_front_size",
    "num_xcc",
    "max_engine_clk_fcompute",
    "fw_version",
    "sdma_fw_version",
];

/// Libraries that a HIP runtime loads.
const LIBRARIES: [&str; 4] = ["libamdhip64", "libhsa-runtime64", "libamd_comgr", "libhsakmt"];

/// All facts below `root`, which is normally `/`.
pub fn facts(root: &Path) -> Vec<Fact> {
    let mut facts = vec![
        fact("distribution", distribution(root)),
        fact("kernel", rustix::system::uname().release().to_string_lossy()),
        fact("processor", first_of(&root.join("proc/cpuinfo"), "model name")),
        fact("threads", std::thread::available_parallelism().map_or(0, usize::from).to_string()),
        fact("memory", first_of(&root.join("proc/meminfo"), "MemTotal")),
        fact("memory free", first_of(&root.join("proc/meminfo"), "MemAvailable")),
        fact("amdgpu driver", driver(root)),
        fact("ROCm", text(&root.join("opt/rocm/.info/version"))),
    ];
    facts.extend(devices(root));
    facts.extend(nodes(root));
    for name in
        ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "ROCMFORGE_CODE_OBJECTS"]
    {
        facts.extend(std::env::var(name).ok().map(|value| fact(name, without_serials(&value))));
    }
    facts.extend(commit());
    facts.retain(|(_, value)| !value.is_empty());
    facts
}

/// A device list as its owner wrote it. Devices named by serial number (`GPU-...`) are shown without the number.
fn without_serials(devices: &str) -> String {
    let shown = |device: &str| if device.trim().starts_with("GPU-") { "GPU-..." } else { device }.to_owned();
    devices.split(',').map(shown).collect::<Vec<_>>().join(",")
}

/// Runtime files that this process has loaded: their names contain their versions.
pub fn loaded_libraries() -> Vec<Fact> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths: BTreeSet<&str> = maps
        .lines()
        .filter_map(|line| Some(&line[line.find('/')?..]))
        .filter(|path| LIBRARIES.iter().any(|name| path.contains(name)))
        .collect();
    paths.into_iter().map(|path| fact("loaded", path)).collect()
}

/// Bytes of memory available to programs; 0 if unknown.
pub fn memory_available() -> u64 {
    let text = first_of(Path::new("/proc/meminfo"), "MemAvailable");
    text.split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// The facts as one object; facts with the same name become a list.
pub fn to_json(facts: &[Fact]) -> Value {
    let mut map = Map::new();
    for (name, value) in facts {
        match map.get_mut(name) {
            None => {
                map.insert(name.clone(), value.clone().into());
            }
            Some(Value::Array(list)) => list.push(value.clone().into()),
            Some(one) => *one = Value::from(vec![one.take(), value.clone().into()]),
        }
    }
    map.into()
}

fn fact(name: &str, value: impl Into<String>) -> Fact {
    (name.into(), value.into())
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The text after `name` and a colon, on the first line that starts with `name`.
fn first_of(path: &Path, name: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}

fn distribution(root: &Path) -> String {
    let text = text(&root.join("etc/os-release"));
    let line = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    line.unwrap_or_default().trim_matches('"').to_owned()
}

fn driver(root: &Path) -> String {
    let module = root.join("sys/module/amdgpu");
    match (module.is_dir(), text(&module.join("version"))) {
        (false, _) => "not loaded".into(),
        (true, version) if version.is_empty() => "the kernel's own".into(),
        (true, version) => version,
    }
}

/// AMD's PCI devices that are displays or accelerators.
fn devices(root: &Path) -> Vec<Fact> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join("sys/bus/pci/devices")).into_iter().flatten().flatten() {
        let path = entry.path();
        let class = text(&path.join("class"));
        if text(&path.join("vendor")) != AMD || !(class.starts_with("0x03") || class.starts_with("0x12")) {
            continue;
        }
        let values = OF_DEVICE.map(|name| (name, text(&path.join(name))));
        let known: Vec<String> =
            values.iter().filter(|(_, v)| !v.is_empty()).map(|(name, v)| format!("{name} {v}")).collect();
        found.push(fact(&format!("PCI {}", entry.file_name().to_string_lossy()), known.join(", ")));
    }
    found.sort();
    found
}

fn nodes(root: &Path) -> Vec<Fact> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join("sys/class/kfd/kfd/topology/nodes")).into_iter().flatten().flatten() {
        let properties = text(&entry.path().join("properties"));
        let value = |name: &str| {
            properties.lines().filter_map(|line| line.split_once(' ')).find(|(key, _)| *key == name)
        };
        if value("gfx_target_version").is_none_or(|(_, version)| version == "0") {
            continue;
        }
        let known: Vec<String> =
            OF_NODE.iter().filter_map(|name| value(name)).map(|(name, v)| format!("{name} {v}")).collect();
        found.push(fact(&format!("KFD node {}", entry.file_name().to_string_lossy()), known.join(", ")));
    }
    found.sort();
    found
}

/// The commit of the sources, and whether they were changed.
fn commit() -> Vec<Fact> {
    let git = |arguments: &[&str]| {
        let output =
            Command::new("git").args(arguments).current_dir(host::root()).stdin(Stdio::null()).output();
        output
            .ok()
            .filter(|output| output.status.success())
            .map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "HEAD"]) else { return vec![] };
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    vec![fact("sources", if changed { format!("{commit}, changed") } else { commit })]
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use super::*;

    #[test]
    fn a_machine_with_a_card_is_described_without_serial_numbers() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("in the folder")).expect("made");
            fs::write(path, text).expect("written");
        };
        write("etc/os-release", "NAME=\"Debian\"\nPRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\n");
        write("etc/hostname", "secret-machine\n");
        write(
            "proc/cpuinfo",
            "processor\t: 0\nmodel name\t: A processor\nserial\t: secret\nmodel name\t: B\n",
        );
        write("proc/meminfo", "MemTotal:       65536 kB\nMemAvailable:   1024 kB\n");
        write("sys/module/amdgpu/version", "6.12.12\n");
        write("sys/bus/pci/devices/0000:03:00.0/vendor", "0x1002\n");
        write("sys/bus/pci/devices/0000:03:00.0/class", "0x030000\n");
        write("sys/bus/pci/devices/0000:03:00.0/device", "0x744c\n");
        write("sys/bus/pci/devices/0000:03:00.0/unique_id", "secret\n");
        write("sys/bus/pci/devices/0000:03:00.1/vendor", "0x1002\n");
        write("sys/bus/pci/devices/0000:03:00.1/class", "0x040300\n");
        write("sys/class/kfd/kfd/topology/nodes/0/properties", "gfx_target_version 0\nsimd_count 0\n");
        write(
            "sys/class/kfd/kfd/topology/nodes/1/properties",
            "simd_count 192\ngfx_target_version 110000\nunique_id 5577006791947779410\n",
        );
        let facts = facts(root.path());
        let value = |name: &str| facts.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
        assert_eq!(value("distribution"), Some("Debian GNU/Linux 13 (trixie)"));
        assert_eq!(value("processor"), Some("A processor"));
        assert_eq!(value("memory"), Some("65536 kB"));
        assert_eq!(value("amdgpu driver"), Some("6.12.12"));
        assert_eq!(value("PCI 0000:03:00.0"), Some("device 0x744c"));
        assert_eq!(value("PCI 0000:03:00.1"), None);
        assert_eq!(value("KFD node 1"), Some("gfx_target_version 110000, simd_count 192"));
        assert_eq!((value("KFD node 0"), value("ROCm")), (None, None));
        let all = to_json(&facts).to_string();
        assert!(!all.contains("secret") && !all.contains("5577006791947779410"), "{all}");
    }

    #[test]
    fn a_device_named_by_its_serial_number_is_told_without_it() {
        assert_eq!(without_serials("0, GPU-4d5e8a,1"), "0,GPU-...,1");
        assert_eq!(without_serials("11.0.0"), "11.0.0");
    }

    #[test]
    fn facts_of_one_name_are_a_list() {
        let facts = [fact("a", "1"), fact("b", "2"), fact("a", "3"), fact("a", "4")];
        assert_eq!(to_json(&facts), serde_json::json!({ "a": ["1", "3", "4"], "b": "2" }));
    }
}
