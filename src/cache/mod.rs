//! Which tensors a device holds: each is loaded once, by one loader, when first needed.
