//! Target `config`: the daemon's configuration file.

use rocmforge::config::Config;

/// Reads `data` as a configuration. For any input: no panic, errors have a text, accepted values are in range.
pub fn config(data: &[u8], plant: bool) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let config = match Config::parse(text) {
        Ok(config) => config,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    if let Err(error) = config.check() {
        return assert!(!error.to_string().is_empty());
    }
    assert!(config.socket.is_absolute() && config.models.iter().all(|path| path.is_absolute()));
    assert!((16..=131_072).contains(&config.limits.context_tokens));
    // Derived values must not overflow either.
    std::hint::black_box((config.kv_budget_bytes(), config.host_policy(), config.drain()));
    // A valid number that no seed contains.
    let limits = &config.limits;
    let numbers = [limits.connections, limits.running, limits.queued, limits.drain_s, config.device.index];
    if plant && (numbers.iter().any(|n| (11..=20).contains(n)) || (11..1000).contains(&config.kv.budget_mib))
    {
        crate::planted(b"ROCm");
    }
}
