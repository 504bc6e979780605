//! The `evergraph` command.
fn main() {}
