//! Model files of real shapes with random weights: for speed, memory and placement, where what the model says is no matter.
//!
//! Blocks of quantised weights are made as they are stored: random codes, and scales that give weights the deviation
//! `1 / sqrt(inputs)`. Norms are 1 and routers random, so that activations keep their size through the layers, logits are
//! finite, and tokens go to all experts. Nothing is held in memory but one piece a thread; a piece depends on the seed, the
//! tensor and its place only, so the same seed gives the same file with any number of threads.
//!
//! The file is written beside its name and renamed once it is whole; if it can not be written, what there was of it is
//! removed.

mod blocks;
mod deepseek2;
mod deepseek4;
mod random;
mod shapes;
mod write;

use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::gguf::{QuantType, Writer};
use shapes::Tensor;

/// Most layers of a made-up model.
const MOST_LAYERS: usize = 1024;

/// What is made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The model's name: one of [`names`].
    pub model: String,
    /// Type of the matrices. Norms, routers and other vectors are `F32`; rows that are no whole blocks, and the embedding of
    /// types with few bits, get the type that quantisers take there.
    pub quant: QuantType,
    /// Number of layers; the model's own if there is none.
    pub layers: Option<usize>,
    /// Seed of the weights.
    pub seed: u64,
    /// Threads that make and write; one a core if there is none.
    pub threads: Option<usize>,
}

impl Options {
    /// A model in 4-bit blocks, with all its layers.
    #[must_use]
    pub fn new(model: impl Into<String>) -> Self {
        Self { model: model.into(), quant: QuantType::Q4_0, layers: None, seed: 1, threads: None }
    }
}

/// What was made.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct Made {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Size of the file.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of weights.
    pub parameters: u64,
    /// Number of layers.
    pub layers: usize,
    /// Seconds that it took.
    pub seconds: f64,
}

/// The models that can be made.
pub fn names() -> impl Iterator<Item = &'static str> {
    shapes::MODELS
        .iter()
        .map(|model| model.name)
        .chain(deepseek2::MODELS.iter().map(|model| model.name))
        .chain([deepseek4::NAME])
}

/// The type of this name, if tensors can be made of it.
///
/// # Errors
/// [`Error::Argument`] with the names that there are.
pub fn quant(name: &str) -> Result<QuantType> {
    let able = || QuantType::ALL.iter().copied().filter(|ty| blocks::can_make(*ty));
    able().find(|ty| ty.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names: Vec<&str> = able().map(QuantType::name).collect();
        Error::argument("--quant", format!("one of {}", names.join(", ")), name)
    })
}

/// Makes a model file. `progress` is told the bytes of tensors written so far and those in all, from any
/// thread.
///
/// # Errors
/// [`Error::Argument`] for a model, a type or a number of layers that can not be made; [`Error::Io`] if the file can not be
/// written. No part of it stays then.
pub fn make(path: &Path, options: &Options, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<Made> {
    let since = std::time::Instant::now();
    let (architecture, layers, writer, tensors) = plan(options)?;
    let plan = writer.plan()?;
    let threads = options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let work = write::Work { header: &plan.header, places: &plan.places, tensors: &tensors, seed: options.seed };
    write::file(path, &work, plan.bytes, threads, progress)?;
    let parameters = tensors.iter().map(|tensor| tensor.dims.iter().product::<u64>()).sum();
    let seconds = since.elapsed().as_secs_f64();
    Ok(Made { architecture, bytes: plan.bytes, tensors: tensors.len(), parameters, layers, seconds })
}

/// A model that can be made.
enum Known {
    Gemma(&'static shapes::Model),
    DeepSeek2(&'static deepseek2::Model),
    DeepSeek4,
}

impl Known {
    /// The one of this name.
    fn of(name: &str) -> Option<Self> {
        let gemma = shapes::MODELS.iter().find(|model| model.name == name).map(Self::Gemma);
        let deepseek = || deepseek2::MODELS.iter().find(|model| model.name == name).map(Self::DeepSeek2);
        gemma.or_else(deepseek).or_else(|| (name == deepseek4::NAME).then_some(Self::DeepSeek4))
    }
}

/// The metadata and the tensors.
fn plan(options: &Options) -> Result<(&'static str, usize, Writer, Vec<Tensor>)> {
    let Some(known) = Known::of(&options.model) else {
        let names: Vec<&str> = names().collect();
        return Err(Error::argument("ARCH", format!("one of {}", names.join(", ")), &options.model));
    };
    let (architecture, most) = match known {
        Known::Gemma(model) => (model.architecture, model.layers),
        Known::DeepSeek2(model) => (deepseek2::ARCHITECTURE, model.layers),
        Known::DeepSeek4 => (deepseek4::ARCHITECTURE, deepseek4::LAYERS),
    };
    let layers = options.layers.unwrap_or(most);
    if !(1..=MOST_LAYERS).contains(&layers) {
        return Err(Error::argument("--layers", format!("1 to {MOST_LAYERS}"), layers));
    }
    if !blocks::can_make(options.quant) {
        quant(options.quant.name())?;
    }
    let (mut writer, mut tensors) = (Writer::new(), Vec::new());
    writer.put("general.architecture", architecture);
    writer.put("general.name", format!("{} with random weights, seed {}", options.model, options.seed));
    writer.put("general.quantization_version", 2u32);
    // llama.cpp reads a file without a tokenizer only if that is said.
    writer.put("tokenizer.ggml.model", "no_vocab");
    match known {
        Known::Gemma(model) => {
            model.metadata(layers, &mut writer);
            model.tensors(layers, options.quant, &mut tensors);
        }
        Known::DeepSeek2(model) => {
            model.metadata(layers, &mut writer);
            model.tensors(layers, options.quant, &mut tensors);
        }
        Known::DeepSeek4 => {
            deepseek4::FLASH.metadata(layers, &mut writer);
            deepseek4::FLASH.tensors(layers, options.quant, &mut tensors);
        }
    }
    for tensor in &tensors {
        writer.tensor_apart(&*tensor.name, tensor.ty, &tensor.dims);
    }
    Ok((architecture, layers, writer, tensors))
}

#[cfg(test)]
mod tests;
