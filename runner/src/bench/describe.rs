//! What a table says of a model and of the machine.

use std::path::Path;

use crate::error::Result;
use crate::gguf::Gguf;

/// Names of `general.file_type`, as llama.cpp prints them.
const FILE_TYPES: &[(u64, &str)] = &[
    (0, "all F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K - Medium"),
    (11, "Q3_K - Small"),
    (12, "Q3_K - Medium"),
    (13, "Q3_K - Large"),
    (14, "Q4_K - Small"),
    (15, "Q4_K - Medium"),
    (16, "Q5_K - Small"),
    (17, "Q5_K - Medium"),
    (18, "Q6_K"),
    (21, "Q2_K - Small"),
    (24, "IQ1_S - 1.5625 bpw"),
    (25, "IQ4_NL - 4.5 bpw"),
    (30, "IQ4_XS - 4.25 bpw"),
    (32, "BF16"),
    (38, "MXFP4 MoE"),
];

/// A model in a table.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Description {
    /// Architecture, size and type: `gemma3 270M Q4_K - Medium`.
    pub kind: String,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Number of weights.
    pub parameters: u64,
    /// Number of layers.
    pub layers: usize,
}

impl Description {
    /// Of a file that can not be read.
    pub(super) fn unknown() -> Self {
        Self { kind: "?".to_owned(), bytes: 0, parameters: 0, layers: 0 }
    }

    /// Of a file that is read no further than its table of tensors.
    ///
    /// # Errors
    /// Those of the file.
    pub fn open(path: &Path) -> Result<Self> {
        Self::of(&Gguf::open(path)?)
    }

    /// Of an open file.
    ///
    /// # Errors
    /// A file without an architecture, or without a number of layers.
    pub fn of(file: &Gguf) -> Result<Self> {
        let architecture = file.architecture()?;
        let parameters = file.tensors().iter().map(|tensor| tensor.elements()).fold(0, u64::saturating_add);
        let size = match file.get("general.size_label").and_then(|value| value.as_str()) {
            Some(label) => label.to_owned(),
            None => rounded(parameters),
        };
        let kind = format!("{architecture} {size} {}", file_type(file));
        let layers = file.require_in(&format!("{architecture}.block_count"), 0..=u64::from(u32::MAX))? as usize;
        let bytes = file.tensors().iter().map(|tensor| tensor.bytes()).fold(0, u64::saturating_add);
        Ok(Self { kind, bytes, parameters, layers })
    }
}

/// The file's word for its type; without one, the type that most of its bytes have.
fn file_type(file: &Gguf) -> String {
    let said = file.get("general.file_type").and_then(|value| value.as_u64());
    if let Some((_, name)) = said.and_then(|id| FILE_TYPES.iter().find(|(known, _)| *known == id)) {
        return (*name).to_owned();
    }
    let mut types: Vec<(String, u64)> = Vec::new();
    for tensor in file.tensors() {
        let name = tensor.quant_type().to_string();
        match types.iter_mut().find(|(known, _)| *known == name) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(tensor.bytes()),
            None => types.push((name, tensor.bytes())),
        }
    }
    types.into_iter().max_by_key(|(_, bytes)| *bytes).map_or_else(|| "?".to_owned(), |(name, _)| name)
}

fn rounded(parameters: u64) -> String {
    match parameters {
        0..1_000_000 => format!("{}K", parameters / 1000),
        1_000_000..1_000_000_000 => format!("{}M", parameters / 1_000_000),
        _ => format!("{:.1}B", parameters as f64 / 1e9),
    }
}

/// What the table says of where it was made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Machine {
    /// `CPU` or `CUDA`.
    pub backend: &'static str,
    /// The processor's name.
    pub cpu: String,
    /// The device's name; empty for the CPU.
    pub gpu: String,
    /// How `--device` asks for it.
    pub device: String,
}

impl Machine {
    /// Of this machine, with a device of it.
    #[must_use]
    pub fn with(device: &crate::device::Device) -> Self {
        Self {
            backend: if device.is_host() { "CPU" } else { "CUDA" },
            cpu: processor(),
            gpu: device.info().map(|info| info.name.clone()).unwrap_or_default(),
            device: device.words(),
        }
    }
}

/// The processor's name, where the system tells.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name"));
    line.and_then(|line| line.split_once(':')).map_or_else(String::new, |(_, name)| name.trim().to_owned())
}
