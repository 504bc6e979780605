//! Evergraph runner.
