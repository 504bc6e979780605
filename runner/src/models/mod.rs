//! Models: from the tensors of a file to the ops of a step.

mod block;
mod decoder;
mod gemma3;
mod input;
mod kv;
mod weights;

use std::path::PathBuf;
use std::sync::Arc;

pub use block::{AttentionPart, Block, FeedForward};
pub use decoder::{Decoder, Taps};
pub use kv::{KvCache, LayerCache};
pub use weights::Weights;

use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::gguf::Gguf;

/// Builds the model that a file holds.
///
/// # Errors
/// [`Error::Unsupported`] for an architecture that is not there; [`Error::Metadata`] and [`Error::Tensor`] for a
/// file that does not hold together; those of the pool.
pub fn load(file: Arc<Gguf>, runtime: &Runtime) -> Result<Decoder> {
    match file.architecture()? {
        "gemma3" => gemma3::load(file, runtime),
        other => Err(Error::Unsupported {
            what: "this architecture",
            found: other.to_owned(),
            advice: "a gemma3 model".to_owned(),
        }),
    }
}

/// Looks a model file up in the folder `EVERGRAPH_MODELS`, else in `models` here or in a folder above.
#[must_use]
pub fn find_file(name: &str) -> Option<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os("EVERGRAPH_MODELS").map(PathBuf::from).into_iter().collect();
    if let Ok(here) = std::env::current_dir() {
        folders.extend(here.ancestors().map(|folder| folder.join("models")));
    }
    folders.into_iter().map(|folder| folder.join(name)).find(|path| path.is_file())
}
