//! Measurements and their sizes: those of real models, as far as the device has room.

use std::path::Path;

use rocmforge::backend::doctor::Gpu;
use rocmforge::tensor::DType;

use super::system;
use crate::synthetic::{self, LARGE, Mixture, SMALL, Shape, TINY};

/// Types that have kernels, the most used first.
const TYPES: [&str; 28] = [
    "Q4_K",
    "Q8_0",
    "Q6_K",
    "Q5_K",
    "Q3_K",
    "IQ4_XS",
    "Q4_0",
    "Q2_K",
    "IQ4_NL",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "MXFP4",
    "NVFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "IQ3_XXS",
    "IQ3_S",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ1_S",
    "IQ1_M",
    "TQ1_0",
    "TQ2_0",
    "F16",
    "BF16",
    "F32",
];

/// Layers to multiply: together larger than any cache, so that more layers would measure the same.
const LAYERS: u64 = 8;

/// Weights per layer of `hip_matmul`, and of its head.
const LAYER_WEIGHTS: u64 = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336);
const HEAD_WEIGHTS: u64 = 4096 * 128_256;

/// Bytes that `hip_matmul` needs besides weights.
const BESIDE_BYTES: u64 = 1 << 30;

/// Bytes that must stay free besides a model, on the disk and in memory.
const SPARE_BYTES: u64 = 3 << 30;

/// One run of a whole model.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    prompt: u32,
    tokens: u32,
    sequences: u32,
    rounds: u32,
}

impl Step {
    pub fn name(&self) -> String {
        let Self { prompt, tokens, sequences, .. } = self;
        format!("{prompt} + {tokens} tokens x{sequences}")
    }

    /// Arguments of `gpu_step`.
    fn words(&self) -> Vec<String> {
        let numbers = [
            ("--prompt", self.prompt),
            ("--tokens", self.tokens),
            ("--sequences", self.sequences),
            ("--rounds", self.rounds),
        ];
        numbers.into_iter().flat_map(|(name, value)| [name.to_owned(), value.to_string()]).collect()
    }
}

/// The value of `HIP_VISIBLE_DEVICES` that selects the device that is number `index` under the present value.
pub fn visible(index: u32) -> String {
    let present = std::env::var("HIP_VISIBLE_DEVICES").unwrap_or_default();
    nth_visible(&present, index)
}

fn nth_visible(present: &str, index: u32) -> String {
    let listed = present.split(',').map(str::trim).filter(|number| !number.is_empty()).nth(index as usize);
    listed.map_or_else(|| index.to_string(), str::to_owned)
}

/// The measurements on a device.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub types: Vec<String>,
    pub uploads: Vec<(&'static str, u32)>,
    pub models: Vec<(Shape, Mixture)>,
    pub steps: Vec<Step>,
    /// Rows of a prefill, 0 for none; and how often a step is replayed.
    prefill: u32,
    replays: u32,
    rows: &'static [u32],
    layers: u64,
    /// MiB of memory to read for the device's read rate.
    read_mib: u32,
    /// Factor on the time limits of parts.
    pub patience: u32,
    /// Free bytes on the device.
    free_bytes: u64,
}

impl Sizes {
    /// With `quick`, sizes that a CPU look-alike handles in seconds.
    pub fn of(gpu: &Gpu, quick: bool) -> Self {
        let free_bytes = gpu.memory_free_bytes;
        if quick {
            return Self {
                types: vec!["Q4_K".into()],
                uploads: vec![("ring", 2), ("registered", 1), ("copy", 1)],
                models: vec![(TINY, Mixture::Q4KM)],
                steps: vec![Step { prompt: 16, tokens: 4, sequences: 2, rounds: 1 }],
                prefill: 0,
                replays: 1,
                rows: &[1],
                layers: 1,
                read_mib: 16,
                // Tests have the same sizes on every device.
                patience: 6,
                free_bytes,
            };
        }
        let large = [(LARGE, Mixture::Q4KM), (LARGE, Mixture::Q8)];
        let models = large.into_iter().filter(|(shape, mixture)| fits(shape, *mixture, free_bytes));
        let mut models: Vec<_> = models.collect();
        if models.is_empty() {
            models.push((SMALL, Mixture::Q4KM));
        }
        Self {
            types: TYPES.map(str::to_owned).into(),
            uploads: vec![
                ("auto", 8),
                ("ring", 1),
                ("ring", 2),
                ("ring", 4),
                ("ring", 8),
                ("registered", 1),
                ("registered", 4),
                ("copy", 1),
                ("copy", 4),
            ],
            models,
            steps: vec![
                Step { prompt: 512, tokens: 128, sequences: 1, rounds: 2 },
                Step { prompt: 4096, tokens: 32, sequences: 1, rounds: 1 },
                Step { prompt: 128, tokens: 64, sequences: 8, rounds: 1 },
            ],
            prefill: 1024,
            replays: 30,
            rows: &[1, 8],
            layers: LAYERS,
            read_mib: 1024,
            patience: 1,
            free_bytes,
        }
    }

    /// Arguments of `hip_matmul` for a type; `None` if not even one layer fits.
    pub fn matmul(&self, dtype: &str) -> Option<Vec<String>> {
        let known = DType::all().find(|known| known.name() == dtype)?;
        let bytes = |weights: u64| weights / known.block_len() as u64 * known.block_bytes() as u64;
        let room = self.free_bytes.checked_sub(bytes(HEAD_WEIGHTS) + BESIDE_BYTES)?;
        let layers = (room / bytes(LAYER_WEIGHTS)).min(self.layers);
        if layers == 0 {
            return None;
        }
        let mut words: Vec<String> =
            vec!["--bench".into(), "--json".into(), "--layers".into(), layers.to_string()];
        words.extend(self.rows.iter().flat_map(|rows| ["--rows".to_owned(), rows.to_string()]));
        words.extend(["--prefill".into(), self.prefill.to_string()]);
        words.extend(["--replays".into(), self.replays.to_string(), dtype.into()]);
        Some(words)
    }

    /// Arguments of `gpu_step` for a run of `model`.
    pub fn step(&self, model: &Path, step: &Step) -> Vec<String> {
        let read = self.read_mib.to_string();
        let words =
            ["--bench", "--json", &model.display().to_string(), "--read-mib", &read].map(str::to_owned);
        words.into_iter().chain(step.words()).collect()
    }

    /// As [`Sizes::step`], to measure the upload of `model`: the shortest run that needs all of it.
    pub fn upload(&self, model: &Path, path: &str, threads: u32) -> Vec<String> {
        let mut words = self.step(model, &Step { prompt: 8, tokens: 2, sequences: 1, rounds: 0 });
        words.extend(["--upload", path, "--threads", &threads.to_string()].map(str::to_owned));
        words
    }

    /// Checks that a model can be made in `dir` and read from memory.
    ///
    /// # Errors
    /// The reason why not.
    pub fn has_room(&self, shape: &Shape, mixture: Mixture, dir: &Path) -> Result<(), String> {
        let need = synthetic::bytes(shape, mixture) + if shape.name == TINY.name { 0 } else { SPARE_BYTES };
        let disk = rustix::fs::statvfs(dir).map_or(0, |disk| disk.f_bavail * disk.f_frsize);
        for (what, free) in [("on the disk", disk), ("of the machine's memory", system::memory_available())] {
            if free < need {
                return Err(format!("it needs {} MiB {what}, {} are free", need >> 20, free >> 20));
            }
        }
        Ok(())
    }
}

/// Whether a model, its KV pages and its step memory fit on a device.
fn fits(shape: &Shape, mixture: Mixture, free_bytes: u64) -> bool {
    let bytes = synthetic::bytes(shape, mixture);
    bytes + bytes / 8 + 2 * BESIDE_BYTES <= free_bytes
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use rocmforge::backend::cpu::quant::SUPPORTED;

    use super::*;

    fn sizes(free_gib: u64, quick: bool) -> Sizes {
        let gpu = Gpu {
            index: 0,
            name: "A card".into(),
            arch: "gfx1100".into(),
            pci: String::new(),
            memory_bytes: free_gib << 30,
            memory_free_bytes: free_gib << 30,
            units: 1,
            wave: 32,
            code: "gfx1100".into(),
            works: true,
        };
        Sizes::of(&gpu, quick)
    }

    fn names(sizes: &Sizes) -> Vec<String> {
        sizes.models.iter().map(|(shape, mixture)| format!("{} {}", shape.name, mixture.name())).collect()
    }

    #[test]
    fn every_type_with_arithmetic_is_measured() {
        let mut measured = TYPES.to_vec();
        let mut supported: Vec<&str> = SUPPORTED.iter().map(|dtype| dtype.name()).collect();
        measured.sort_unstable();
        supported.sort_unstable();
        assert_eq!(measured, supported);
    }

    #[test]
    fn models_are_as_large_as_the_device_holds() {
        assert_eq!(names(&sizes(24, false)), ["8B Q4_K_M", "8B Q8_0"]);
        assert_eq!(names(&sizes(8, false)), ["8B Q4_K_M"]);
        assert_eq!(names(&sizes(4, false)), ["1B Q4_K_M"]);
        assert_eq!(names(&sizes(24, true)), ["tiny Q4_K_M"]);
    }

    #[test]
    fn every_type_is_one_and_few_layers_are_taken_where_few_have_room() {
        let layers = |gib, dtype: &str| {
            sizes(gib, false).matmul(dtype).map(|words| words[3].parse::<u64>().expect("a number"))
        };
        for dtype in TYPES {
            assert_eq!(layers(24, dtype), Some(LAYERS), "{dtype}");
        }
        assert_eq!(layers(8, "F32"), Some(6));
        assert_eq!(layers(3, "F32"), None);
        assert_eq!(layers(24, "Q0"), None);
    }

    #[test]
    fn the_chosen_device_is_counted_among_those_that_were_visible() {
        assert_eq!(nth_visible("", 1), "1");
        assert_eq!(nth_visible("2, 3", 1), "3");
        assert_eq!(nth_visible("GPU-1,GPU-2", 0), "GPU-1");
    }
}
