//! Evergraph kernels.
