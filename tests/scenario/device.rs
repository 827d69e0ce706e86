//! A daemon on a GPU or the look-alike: weights load on request and are freed again.

use std::time::Instant;

use rocmforge_client::wire::{DeviceStatus, LoadToDeviceEnd, LoadToDeviceItem};

use crate::gpu;
use crate::rig::{PATIENCE, Rig, TINY, story};

/// A daemon on the GPU for tests; `None` after reporting why there is none.
pub fn on_gpu() -> Option<Rig> {
    on_gpu_with("")
}

/// Like [`on_gpu`], with more keys of the table `device`.
pub fn on_gpu_with(device: &str) -> Option<Rig> {
    gpu::library()?;
    let mut rig = Rig::idle();
    rig.configure(&format!(
        "[device]\nbackend = \"hip\"\nupload_threads = 2\n{device}\n[limits]\nstep_rows = 32"
    ));
    run_on_gpu(&mut rig);
    Some(rig)
}

/// Starts a daemon of [`on_gpu`], also after its end.
pub fn run_on_gpu(rig: &mut Rig) {
    let mut command = rig.command();
    command.env("ROCMFORGE_HIP_LIB", gpu::library().expect("it was there before"));
    rig.spawn(&mut command);
    rig.client().ping(b"").expect("the daemon does not answer");
}

fn device(rig: &Rig) -> DeviceStatus {
    rig.client().status().unwrap().devices.remove(0)
}

/// Loads a model onto the device; returns the progress items and the end.
fn bring(rig: &Rig, model: &str) -> (Vec<LoadToDeviceItem>, LoadToDeviceEnd) {
    let mut loading = rig.client().preload_all(model).unwrap();
    let items = loading.by_ref().collect::<Result<_, _>>().unwrap();
    (items, loading.end().cloned().unwrap())
}

#[test]
fn a_model_is_brought_to_the_device_on_request_and_leaves_it_when_unloaded() {
    let Some(rig) = on_gpu() else { return };
    assert!(rig.client().load(TINY).unwrap().mapped_now);
    let mapped = device(&rig);
    assert_eq!((mapped.kind.as_str(), mapped.device_bytes, mapped.tensors_loaded), ("hip", 0, 0));
    let (items, end) = bring(&rig, TINY);
    assert!(items.windows(2).all(|pair| pair[0].tensors <= pair[1].tensors), "{items:?}");
    assert!(items.iter().all(|item| item.tensors_total == end.tensors), "{items:?}");
    assert!(items.iter().all(|item| item.device_bytes_total == end.device_bytes), "{items:?} {end:?}");
    let there = device(&rig);
    assert!(end.device_bytes > 0 && there.device_bytes == end.device_bytes, "{end:?}");
    assert!(
        there.notes().iter().any(|(name, _)| *name == "upload"),
        "the status does not name the upload path"
    );
    // A request finds the weights resident, and so does a second load.
    let client = rig.client();
    let mut generation = client.generate(&story(3)).unwrap();
    generation.by_ref().collect::<Result<Vec<_>, _>>().unwrap();
    let ended = generation.end().unwrap();
    assert_eq!((ended.timings.load_us, ended.tensors_loaded(), ended.loaded_bytes()), (0, 0, 0));
    assert_eq!(ended.tensors_found(), u64::from(end.tensors));
    assert_eq!(bring(&rig, TINY).1.device_bytes, end.device_bytes);
    assert_eq!(device(&rig).tensors_loaded, there.tensors_loaded);

    rig.client().unload(TINY).unwrap();
    let until = Instant::now() + PATIENCE;
    while device(&rig).device_bytes > 0 {
        assert!(Instant::now() < until, "the copies were not freed");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn where_weights_are_read_in_place_there_is_nothing_to_bring() {
    let rig = Rig::start_with("[device]\nbackend = 'cpu'");
    let (_, end) = bring(&rig, TINY); // also maps the model
    assert!(end.tensors > 0 && end.device_bytes == 0, "{end:?}");
    assert_eq!(rig.client().status().unwrap().models_mapped, 1);
    let refused = rig.client().preload_all("nobody").unwrap().next_item().unwrap_err();
    assert_eq!(refused.code_name(), "ModelNotFound");
}
