//! Evergraph graphcache.
