//! Models: from the tensors of a file to the ops of a step.

mod attention;
mod block;
mod compressed;
mod decoder;
mod deepseek2;
mod deepseek4;
mod experts;
mod feed_forward;
mod fetched;
mod gemma3;
mod gemma4;
mod hyper;
mod input;
mod keys;
mod kv;
mod latent;
mod layer_input;
mod reads;
mod residual;
mod streamed;
mod streams;
mod weights;

use std::path::PathBuf;
use std::sync::Arc;

pub use attention::{AttentionPart, KeyValue, OwnKeyValue, Rotation};
pub use block::Block;
pub use compressed::{CompressedPart, Compressor, Indexer, Tail};
pub use decoder::{Decoder, Taps};
pub use experts::{Choice, Experts, GateUp, OnBus};
pub use feed_forward::{Branch, Dense, FeedForward};
pub use hyper::Mixer;
pub(crate) use kv::Rings;
pub use kv::{CompressedCache, KvCache, LayerCache};
pub use latent::Latent;
pub use layer_input::{LayerInput, LayerInputs};
pub use streams::{StreamBlock, StreamStack};
pub use weights::Weights;

use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::gguf::{Gguf, TensorInfo};
use crate::placement::{Placement, in_block};

/// Builds the model of a file on a device.
type Load = fn(Arc<Gguf>, &Runtime, &Placement) -> Result<Decoder>;

/// What is there, by the name that files give it (`general.architecture`).
const ARCHITECTURES: &[(&str, Load)] = &[
    ("deepseek2", deepseek2::load),
    ("deepseek4", deepseek4::load),
    ("gemma3", gemma3::load),
    ("gemma4", gemma4::load),
];

/// Builds the model that a file holds, all of it on the device.
///
/// # Errors
/// As for [`load_placed`].
pub fn load(file: Arc<Gguf>, runtime: &Runtime) -> Result<Decoder> {
    load_placed(file, runtime, &Placement::default())
}

/// Builds the model that a file holds, with a part of it on the host.
///
/// # Errors
/// [`Error::Unsupported`] for an architecture that is not there; [`Error::Metadata`] and [`Error::Tensor`] for a
/// file that does not hold together; those of the pool.
pub fn load_placed(file: Arc<Gguf>, runtime: &Runtime, placement: &Placement) -> Result<Decoder> {
    let name = file.architecture()?;
    check_blocks(&file, name)?;
    match ARCHITECTURES.iter().find(|(known, _)| *known == name) {
        Some((_, load)) => load(file, runtime, placement),
        None => {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|(known, _)| *known).collect();
            Err(Error::Unsupported {
                what: "this architecture",
                found: name.to_owned(),
                advice: format!("a model of {}", known.join(" or ")),
            })
        }
    }
}

/// Refuses a file that says that it has fewer blocks than it has: with some left out, a model gives other text and no error.
fn check_blocks(file: &Gguf, architecture: &str) -> Result<()> {
    let key = format!("{architecture}.block_count");
    // One that is missing or no number is the loader's to name.
    let Some(blocks) = file.get(&key).and_then(|value| value.as_u64()) else { return Ok(()) };
    let mut names = file.tensors().iter().map(TensorInfo::name);
    match names.find(|name| in_block(name).is_some_and(|(block, _)| block as u64 >= blocks)) {
        None => Ok(()),
        Some(name) => Err(Error::metadata(key, format!("a number that counts the block of {name} too"), blocks)),
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
