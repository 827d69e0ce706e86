//! The CPU backend: computes in place from the mapping.
