//! One file per architecture: which tensors by which names, which metadata.
