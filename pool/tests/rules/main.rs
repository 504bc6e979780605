//! The rules, story by story, on the host device in both modes. `mutants` takes each rule out and watches its
//! test fail.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod chunks;
mod common;
mod cost;
mod faults;
mod give_back;
mod grants;
mod growing;
mod mutants;
mod outside;
mod process;
mod retire;
mod sleep;
mod slices;
mod stitch;
mod windows;
