//! The daemon's state at one moment, and rates between two samples.

use rocmforge_client::wire::{DeviceMemory, PsReply, ResidencyReply, StatusReply};
use rocmforge_client::{Client, ClientError};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::app::Happening;
use crate::text::words;

/// The daemon's state at one moment.
#[derive(Clone, Debug)]
pub struct Sample {
    /// State of the daemon and its devices.
    pub status: StatusReply,
    /// The use of the devices' memory.
    pub residency: ResidencyReply,
    /// Running and waiting requests.
    pub ps: PsReply,
}

/// Rates per second between two samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Tokens generated.
    pub tokens_per_second: f64,
    /// Prompt tokens computed.
    pub prompt_tokens_per_second: f64,
    /// Bytes of weights loaded to the device.
    pub load_bytes_per_second: f64,
    /// Bytes of weights evicted.
    pub evicted_bytes_per_second: f64,
    /// Tensors asked for that were already resident.
    pub hits_per_second: f64,
    /// Tensors that had to be loaded.
    pub misses_per_second: f64,
}

impl Sample {
    /// Asks the daemon for all of it.
    ///
    /// # Errors
    /// As [`rocmforge_client::Connection::call`].
    pub fn take(client: &Client) -> Result<Self, ClientError> {
        Ok(Self { status: client.status()?, residency: client.residency()?, ps: client.ps()? })
    }

    /// Rates of each device since an earlier sample; `None` if the daemon was restarted in between, or if no time
    /// passed by its clock.
    pub fn rates_since(&self, earlier: &Self) -> Vec<Option<Rates>> {
        let same = self.status.pid == earlier.status.pid;
        let ms = self.status.uptime_ms.saturating_sub(earlier.status.uptime_ms);
        let seconds = ms as f64 / 1e3;
        let now = &self.residency.devices;
        let rates = |(at, device): (usize, &DeviceMemory)| {
            let before = earlier.residency.devices.get(at).filter(|_| same && ms > 0)?;
            rates(before, device, seconds)
        };
        now.iter().enumerate().map(rates).collect()
    }

    /// The sample for scripts: no `ext`, states in snake case.
    pub fn to_json(&self, rates: &[Option<Rates>], happened: &[Happening], missed: u64) -> Value {
        let mut devices = plain(&self.residency.devices);
        for (at, device) in devices.as_array_mut().into_iter().flatten().enumerate() {
            device["rates"] = serde_json::to_value(rates.get(at).copied().flatten()).unwrap_or(Value::Null);
        }
        let events: Vec<_> = happened.iter().map(|happening| plain(&happening.entry)).collect();
        json!({
            "status": plain(&self.status),
            "devices": devices,
            "models": plain(&self.residency.models),
            "sequences": plain(&self.ps.sequences),
            "events": events,
            "events_missed": missed,
        })
    }
}

/// `None` if a counter went back: then it is another daemon's.
fn rates(before: &DeviceMemory, now: &DeviceMemory, seconds: f64) -> Option<Rates> {
    let rate =
        |counter: fn(&DeviceMemory) -> u64| Some(counter(now).checked_sub(counter(before))? as f64 / seconds);
    Some(Rates {
        tokens_per_second: rate(|device| device.decode_rows)?,
        prompt_tokens_per_second: rate(|device| device.prefill_rows)?,
        load_bytes_per_second: rate(|device| device.load_bytes)?,
        evicted_bytes_per_second: rate(|device| device.evicted_bytes)?,
        hits_per_second: rate(|device| device.hits)?,
        misses_per_second: rate(|device| device.loads)?,
    })
}

fn plain<T: Serialize>(value: &T) -> Value {
    without_ext(serde_json::to_value(value).unwrap_or(Value::Null))
}

fn without_ext(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let keep = fields.into_iter().filter(|(key, _)| key != "ext" && key != "more");
            let plain = keep.map(|(key, value)| match value {
                Value::String(name) if ["state", "kind"].contains(&key.as_str()) => {
                    (key, Value::from(words(&name).replace(' ', "_")))
                }
                other => (key, without_ext(other)),
            });
            Value::Object(plain.collect::<Map<_, _>>())
        }
        Value::Array(values) => values.into_iter().map(without_ext).collect(),
        other => other,
    }
}
