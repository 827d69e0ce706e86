//! Builds the kernels for NVIDIA GPUs, for tests on machines that have one. Uses nvcc from Python packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use xtask::error::{Error, Result};
use xtask::host;
use xtask::lookalike::sources::{self, include_flags};
use xtask::lookalike::unit::{self, Unit};

use super::wheels::{Wheel, unpacked};

/// Hopper, as its driver names it. The code runs with every CUDA 13 driver.
const ARCH: &str = "sm_90";
/// The same with the matrix unit across waves, which no later device has.
const TARGET: &str = "arch=compute_90a,code=sm_90a";

const WHEELS: [Wheel; 5] = [
    Wheel {
        package: "nvidia-cuda-nvcc",
        version: "13.0.88",
        file: "nvidia_cuda_nvcc-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        bytes: 37_384_532,
        sha256: "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
    },
    Wheel {
        package: "nvidia-nvvm",
        version: "13.0.88",
        file: "nvidia_nvvm-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
        bytes: 61_601_415,
        sha256: "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
    },
    Wheel {
        package: "nvidia-cuda-crt",
        version: "13.0.88",
        file: "nvidia_cuda_crt-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        bytes: 134_086,
        sha256: "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
    },
    Wheel {
        package: "nvidia-cuda-runtime",
        version: "13.0.96",
        file: "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        bytes: 2_243_632,
        sha256: "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    },
    Wheel {
        package: "nvidia-cuda-cccl",
        version: "13.0.85",
        file: "nvidia_cuda_cccl-13.0.85-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        bytes: 3_120_526,
        sha256: "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
    },
];

/// Programs below the unpacked wheels.
const PROGRAMS: [&str; 7] = [
    "nvidia/cu13/bin/nvcc",
    "nvidia/cu13/bin/__nvcc_device_query",
    "nvidia/cu13/bin/bin2c",
    "nvidia/cu13/bin/cudafe++",
    "nvidia/cu13/bin/fatbinary",
    "nvidia/cu13/bin/ptxas",
    "nvidia/cu13/nvvm/bin/cicc",
];

/// Builds an object of each kernel file into `target/nvidia/sm_90`, if out of date; returns `target/nvidia`.
///
/// The objects are not linked: linkable code (`-dc`) takes up to twice the registers, so a GPU runs fewer threads at
/// once.
///
/// # Errors
/// Errors of fetching and compiling.
pub fn build() -> Result<PathBuf> {
    // nvcc uses the system's compiler for preprocessing.
    host::ensure("g++", "g++")?;
    let bin = unpacked("nvcc-13.0.88", &WHEELS, &PROGRAMS)?.join("nvidia/cu13/bin");
    let dir = host::target_dir().join("nvidia");
    let objects = dir.join(ARCH);
    fs::create_dir_all(&objects).map_err(Error::at(&objects))?;
    let names = sources::names()?;
    remove_others(&objects, &names)?;
    let units: Vec<Unit> =
        names.iter().map(|name| compile(&bin, name, &dir.join("units"), &objects)).collect::<Result<_>>()?;
    unit::build(units)?;
    Ok(dir)
}

/// Removes objects of deleted kernel files, because all objects of the folder are loaded.
fn remove_others(objects: &Path, names: &[String]) -> Result<()> {
    for entry in fs::read_dir(objects).map_err(Error::at(objects))? {
        let path = entry.map_err(Error::at(objects))?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        if path.extension().is_some_and(|ending| ending == "cubin") && !names.iter().any(|name| *name == stem)
        {
            fs::remove_file(&path).map_err(Error::at(&path))?;
        }
    }
    Ok(())
}

fn compile(bin: &Path, name: &str, dir: &Path, objects: &Path) -> Result<Unit> {
    let source = sources::write_unit(dir, name, "cu")?;
    let output = objects.join(format!("{name}.cubin"));
    let mut command = Command::new(bin.join("nvcc"));
    command
        .args(["-std=c++17", &format!("-gencode={TARGET}"), "-cubin", "-fmad=false"])
        .args(include_flags(host::root()))
        .args(["-MMD", "-MF"])
        .arg(unit::list_path(&output))
        .arg(&source)
        .arg("-o")
        .arg(&output);
    Ok(Unit { output, commands: vec![command], salt: WHEELS[0].sha256.into(), is_trial: false })
}
