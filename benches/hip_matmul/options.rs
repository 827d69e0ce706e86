//! Command line of the bench of matmuls.

use rocmforge::tensor::DType;

/// Sizes and repetitions of a run. The bench's head explains each.
pub struct Options {
    pub layers: usize,
    pub rows: Vec<u32>,
    pub prefill: Vec<u32>,
    pub device: u32,
    pub replays: usize,
    pub json: bool,
    pub of_wave: bool,
    pub dtypes: Vec<DType>,
}

/// `None` without `--bench`.
pub fn options() -> Result<Option<Options>, String> {
    let mut options = Options {
        layers: 32,
        rows: vec![],
        prefill: vec![],
        device: 0,
        replays: 30,
        json: false,
        of_wave: false,
        dtypes: vec![],
    };
    let mut bench = false;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let text = arguments.next().unwrap_or_default();
            text.parse::<u32>().map_err(|e| format!("{argument} {text}: {e}"))
        };
        match argument.as_str() {
            "--bench" => bench = true,
            "--json" => options.json = true,
            "--of-wave" => options.of_wave = true,
            "--layers" => options.layers = number()? as usize,
            "--rows" => options.rows.push(number()?),
            "--prefill" => options.prefill.push(number()?),
            "--replays" => options.replays = (number()? as usize).max(1),
            "--device" => options.device = number()?,
            name => {
                let dtype = DType::all().find(|t| t.name() == name).ok_or(format!("{name}: no such type"))?;
                options.dtypes.push(dtype);
            }
        }
    }
    if options.rows.is_empty() {
        options.rows = vec![1, 2, 4, 8, 16, 32, 64, 128];
    }
    if options.prefill.is_empty() {
        options.prefill = vec![64, 512, 4096];
    }
    options.prefill.retain(|&rows| rows != 0);
    if options.dtypes.is_empty() {
        options.dtypes = vec![DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::F16];
    }
    Ok(bench.then_some(options))
}
