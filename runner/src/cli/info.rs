//! `evergraph info`: metadata and tensors of a file.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde_json::{Map, json};

use super::flags::ModelFlags;
use super::output::Output;
use super::size::format_size;
use crate::error::Result;

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// Show all of long arrays and texts
    #[arg(long)]
    all: bool,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

/// Array elements shown without `--all`.
const SHOWN: usize = 16;

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    let file = flags.model.open()?;
    let architecture = file.architecture().ok();
    let bytes: u64 = file.tensors().iter().map(|tensor| tensor.bytes()).sum();
    let elements: u64 = file.tensors().iter().map(|tensor| tensor.elements()).sum();
    if out.json() {
        let most = if flags.all { usize::MAX } else { SHOWN };
        let metadata: Map<_, _> = file.metadata().map(|(key, value)| (key.to_owned(), value.to_json(most))).collect();
        let tensors: Vec<_> = file
            .tensors()
            .iter()
            .map(|tensor| {
                json!({
                    "name": tensor.name(),
                    "type": tensor.quant_type().name(),
                    "shape": tensor.shape(),
                    "bytes": tensor.bytes(),
                    "offset": tensor.start_bytes(),
                })
            })
            .collect();
        return out.document(&json!({
            "architecture": architecture,
            "version": file.version(),
            "alignment": file.alignment_bytes(),
            "tensor_bytes": bytes,
            "parameters": elements,
            "tensors": tensors,
            "metadata": metadata,
        }));
    }

    let path = flags.model.model.display();
    out.line(format!("{path}: GGUF version {}, {}", file.version(), architecture.unwrap_or("no architecture")))?;
    let mut table = Table::new();
    table.load_style(NOTHING);
    for (key, value) in file.metadata() {
        let text = match value.as_str() {
            Some(text) if flags.all => text.to_owned(),
            _ => value.to_string(),
        };
        table.add_row([key, &value.value_type().to_string(), &text]);
    }
    out.line(format!("\n{} metadata keys", file.metadata().count()))?;
    out.line(table.trim_fmt())?;

    let mut table = Table::new();
    table.load_style(NOTHING);
    for tensor in file.tensors() {
        let shape = tensor.shape().iter().map(u64::to_string).collect::<Vec<_>>().join(" × ");
        table.add_row([tensor.name(), tensor.quant_type().name(), &shape, &format_size(tensor.bytes())]);
    }
    if let Some(column) = table.column_mut(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let count = file.tensors().len();
    out.line(format!("\n{count} tensors, {elements} parameters, {}", format_size(bytes)))?;
    out.line(table.trim_fmt())
}
