//! What is measured: lists of values, and every combination of them.

use std::fmt;
use std::path::PathBuf;

use crate::engine::KvType;
use crate::error::{Error, Result};

/// Most combinations in one run.
const MOST_ROWS: usize = 10_000;

/// The values of each parameter, in llama-bench's order from the slowest to the fastest.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Lists {
    /// Model files.
    pub models: Vec<PathBuf>,
    /// Layers on the device; -1 is all.
    pub gpu_layers: Vec<i64>,
    /// Layers whose experts stay with the host.
    pub cpu_moe: Vec<u32>,
    /// How a model is split between devices.
    pub split_modes: Vec<SplitMode>,
    /// The device that holds what is not split.
    pub main_gpus: Vec<u32>,
    /// Shares of the devices.
    pub tensor_splits: Vec<TensorSplit>,
    /// Tensors placed by name: `pattern=device;…`, or nothing.
    pub overrides: Vec<String>,
    /// Tokens handed to the model at a time.
    pub batches: Vec<u32>,
    /// Tokens in one step.
    pub ubatches: Vec<u32>,
    /// Types of the key cache.
    pub types_k: Vec<KvType>,
    /// Types of the value cache.
    pub types_v: Vec<KvType>,
    /// Attention in one kernel or in several.
    pub flash_attn: Vec<FlashAttn>,
    /// Threads on the host.
    pub threads: Vec<u32>,
    /// Tokens in the cache before a test begins.
    pub depths: Vec<u32>,
    /// Tests of a prompt: its tokens.
    pub prompts: Vec<u32>,
    /// Tests of generation: its tokens.
    pub generations: Vec<u32>,
    /// Tests of both, one after the other.
    pub both: Vec<(u32, u32)>,
}

impl Default for Lists {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            gpu_layers: vec![-1],
            cpu_moe: vec![0],
            split_modes: vec![SplitMode::Layer],
            main_gpus: vec![0],
            tensor_splits: vec![TensorSplit::default()],
            overrides: vec![String::new()],
            batches: vec![2048],
            ubatches: vec![512],
            types_k: vec![KvType::F16],
            types_v: vec![KvType::F16],
            flash_attn: vec![FlashAttn::Auto],
            threads: vec![cores()],
            depths: vec![0],
            prompts: vec![512],
            generations: vec![128],
            both: Vec::new(),
        }
    }
}

/// Threads by default: one a core.
fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(1))
}

/// One test with all its parameters.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Row {
    /// What a loaded model depends on: rows that are equal here share one.
    pub model: ModelParameters,
    /// What a sequence depends on.
    pub sequence: SequenceParameters,
    /// What is timed.
    pub test: Test,
}

/// A model file, and where its parts go.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct ModelParameters {
    /// The file.
    pub file: PathBuf,
    /// Where its parts go.
    pub placement: Placement,
}

/// Where the parts of a model go.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Placement {
    /// Layers on the device; -1 is all.
    pub gpu_layers: i64,
    /// Layers whose experts stay with the host.
    pub cpu_moe: u32,
    /// How a model is split between devices.
    pub split_mode: SplitMode,
    /// The device that holds what is not split.
    pub main_gpu: u32,
    /// Shares of the devices.
    pub tensor_split: TensorSplit,
    /// Tensors placed by name.
    pub overrides: String,
}

/// How a sequence is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SequenceParameters {
    /// Tokens handed to the model at a time.
    pub batch: u32,
    /// Tokens in one step.
    pub ubatch: u32,
    /// Type of the key cache.
    pub type_k: KvType,
    /// Type of the value cache.
    pub type_v: KvType,
    /// Attention in one kernel or in several.
    pub flash_attn: FlashAttn,
    /// Threads on the host.
    pub threads: u32,
}

/// What is timed: a prompt, then single tokens, both behind `depth` tokens that are not timed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Test {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens one by one.
    pub generation: u32,
    /// Tokens before.
    pub depth: u32,
}

impl Test {
    /// Tokens that are timed.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.prompt as usize + self.generation as usize
    }
}

/// llama-bench's name of the test: `pp512`, `tg128`, `pp512+tg128 @ d4096`.
impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.prompt, self.generation) {
            (prompt, 0) => write!(f, "pp{prompt}")?,
            (0, generation) => write!(f, "tg{generation}")?,
            (prompt, generation) => write!(f, "pp{prompt}+tg{generation}")?,
        }
        if self.depth > 0 { write!(f, " @ d{}", self.depth) } else { Ok(()) }
    }
}

/// Attention in one kernel, or its scores written out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlashAttn {
    /// As the engine likes.
    Auto,
    /// In one kernel.
    On,
    /// Scores written out.
    Off,
}

impl FlashAttn {
    /// llama.cpp's words for it.
    ///
    /// # Errors
    /// A text that says what there is.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" | "-1" => Ok(Self::Auto),
            "on" | "enabled" | "true" | "1" => Ok(Self::On),
            "off" | "disabled" | "false" | "0" => Ok(Self::Off),
            _ => Err(format!("`{text}` is not on, off or auto")),
        }
    }

    /// llama.cpp's number for it.
    #[must_use]
    pub fn number(self) -> i64 {
        match self {
            Self::Auto => -1,
            Self::On => 1,
            Self::Off => 0,
        }
    }
}

/// How a model is split between devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SplitMode {
    /// One device has it all.
    None,
    /// Whole layers.
    Layer,
    /// Rows of matrices.
    Row,
    /// Tensors, in parallel.
    Tensor,
}

impl SplitMode {
    const ALL: [Self; 4] = [Self::None, Self::Layer, Self::Row, Self::Tensor];

    /// llama.cpp's name of it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Layer => "layer",
            Self::Row => "row",
            Self::Tensor => "tensor",
        }
    }

    /// The mode of that name.
    ///
    /// # Errors
    /// A text that says what there is.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mode = Self::ALL.into_iter().find(|mode| mode.name() == text);
        mode.ok_or_else(|| format!("`{text}` is not none, layer, row or tensor"))
    }
}

/// Shares of the devices; all zero means as the memory is.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorSplit(Vec<f32>);

impl Default for TensorSplit {
    fn default() -> Self {
        Self(vec![0.0])
    }
}

impl TensorSplit {
    /// Reads `3/1` or `3;1`.
    ///
    /// # Errors
    /// A text that says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let share = |part: &str| {
            let share = part.trim().parse::<f32>().ok().filter(|share| share.is_finite() && *share >= 0.0);
            share.ok_or_else(|| format!("`{part}` is no share; write 3/1 for two devices"))
        };
        text.split(['/', ';']).map(share).collect::<std::result::Result<_, _>>().map(Self)
    }

    /// The shares.
    #[must_use]
    pub fn shares(&self) -> &[f32] {
        &self.0
    }
}

impl fmt::Display for TensorSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.0.iter().rposition(|share| *share > 0.0).unwrap_or(0);
        let shares: Vec<String> = self.0.iter().take(last + 1).map(|share| format!("{share:.2}")).collect();
        f.write_str(&shares.join("/"))
    }
}

/// The name that files and flags have for a cache's type.
#[must_use]
pub fn kv_name(ty: KvType) -> &'static str {
    match ty {
        KvType::F32 => "f32",
        KvType::F16 => "f16",
        KvType::Bf16 => "bf16",
    }
}

/// The cache type of that name.
///
/// # Errors
/// A text that says what there is.
pub fn kv_parse(text: &str) -> Result<KvType, String> {
    let types = [KvType::F16, KvType::Bf16, KvType::F32];
    let found = types.into_iter().find(|ty| kv_name(*ty) == text);
    found.ok_or_else(|| format!("`{text}` is not supported; caches can be f16, bf16 or f32"))
}

impl Lists {
    /// Every combination, in llama-bench's order: rows that share a model follow each other.
    ///
    /// # Errors
    /// [`Error::Argument`] if nothing is to be measured, or far too much.
    pub fn rows(&self) -> Result<Vec<Row>> {
        let mut tests: Vec<(u32, u32)> = self.prompts.iter().map(|&prompt| (prompt, 0)).collect();
        tests.extend(self.generations.iter().map(|&generation| (0, generation)));
        tests.extend(&self.both);
        tests.retain(|&test| test != (0, 0));
        if tests.is_empty() {
            return Err(Error::argument("-p, -n and -pg", "a test of at least one token", "none"));
        }
        let sequences = self.sequences();
        let placements = self.placements();
        let counts = [self.models.len(), placements.len(), sequences.len(), self.depths.len(), tests.len()];
        let count = counts.iter().try_fold(1usize, |product, &count| product.checked_mul(count));
        if count.is_none_or(|count| count > MOST_ROWS) {
            let expected = format!("at most {MOST_ROWS} combinations of all values");
            let found = counts.map(|count| count.to_string()).join(" x ");
            return Err(Error::argument("the lists", expected, found));
        }
        let mut rows = Vec::new();
        for file in &self.models {
            for placement in &placements {
                let model = ModelParameters { file: file.clone(), placement: placement.clone() };
                for &sequence in &sequences {
                    for &depth in &self.depths {
                        rows.extend(tests.iter().map(|&(prompt, generation)| Row {
                            model: model.clone(),
                            sequence,
                            test: Test { prompt, generation, depth },
                        }));
                    }
                }
            }
        }
        Ok(rows)
    }

    fn placements(&self) -> Vec<Placement> {
        let mut all = vec![Placement {
            gpu_layers: -1,
            cpu_moe: 0,
            split_mode: SplitMode::Layer,
            main_gpu: 0,
            tensor_split: TensorSplit::default(),
            overrides: String::new(),
        }];
        vary(&mut all, &self.gpu_layers, |row, value| row.gpu_layers = *value);
        vary(&mut all, &self.cpu_moe, |row, value| row.cpu_moe = *value);
        vary(&mut all, &self.split_modes, |row, value| row.split_mode = *value);
        vary(&mut all, &self.main_gpus, |row, value| row.main_gpu = *value);
        vary(&mut all, &self.tensor_splits, |row, value| row.tensor_split = value.clone());
        vary(&mut all, &self.overrides, |row, value| row.overrides.clone_from(value));
        all
    }

    fn sequences(&self) -> Vec<SequenceParameters> {
        let mut all = vec![SequenceParameters {
            batch: 0,
            ubatch: 0,
            type_k: KvType::F16,
            type_v: KvType::F16,
            flash_attn: FlashAttn::Auto,
            threads: 0,
        }];
        vary(&mut all, &self.batches, |row, value| row.batch = *value);
        vary(&mut all, &self.ubatches, |row, value| row.ubatch = *value);
        vary(&mut all, &self.types_k, |row, value| row.type_k = *value);
        vary(&mut all, &self.types_v, |row, value| row.type_v = *value);
        vary(&mut all, &self.flash_attn, |row, value| row.flash_attn = *value);
        vary(&mut all, &self.threads, |row, value| row.threads = *value);
        all
    }
}

/// Each of `rows` with each of `values`. More than [`MOST_ROWS`] are cut off one above: that is too many however it goes on.
fn vary<R: Clone, V>(rows: &mut Vec<R>, values: &[V], set: impl Fn(&mut R, &V)) {
    let set = &set;
    let each = rows.iter().flat_map(|row| {
        values.iter().map(move |value| {
            let mut row = row.clone();
            set(&mut row, value);
            row
        })
    });
    *rows = each.take(MOST_ROWS + 1).collect();
}

#[cfg(test)]
mod tests;
