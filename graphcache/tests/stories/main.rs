//! What has gone wrong with captured graphs elsewhere, told against this cache on the host device.
//!
//! One binary, so that the table in `mutants.rs` can run any story in a child process with one rule taken out.
//! Every story that replays changes its input between replays.
#![allow(clippy::unwrap_used, unsafe_code, dropping_copy_types)]

mod bounds;
mod devices;
mod failures;
mod growing;
mod moved;
mod mutants;
mod outputs;
mod record;
mod repairs;
mod replay;
mod rig;
mod sleep;
mod threads;
mod updates;
mod windows;
