//! A table for people: of the parameters only those that differ from llama-bench's defaults.

use super::{LLAMA, Record, Setup, Value};
use crate::bench::parameters::Lists;

/// A column: what it is called, and how wide it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Column {
    of: Of,
    title: &'static str,
    width: usize,
    left: bool,
}

/// What stands in a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Of {
    Model,
    Size,
    Params,
    Backend,
    /// One of llama-bench's fields.
    Field(&'static str),
    Test,
    Speed,
    /// One of ours.
    Ours(&'static str),
    Peak,
    Achieved,
}

const fn column(of: Of, title: &'static str, width: usize, left: bool) -> Column {
    Column { of, title, width, left }
}

const fn number(field: &'static str, title: &'static str, width: usize) -> Column {
    column(Of::Field(field), title, width, false)
}

const fn words(field: &'static str, title: &'static str, width: usize) -> Column {
    column(Of::Field(field), title, width, true)
}

/// llama-bench's columns in its order, then ours.
pub(super) fn columns(setup: &Setup, lists: &Lists) -> Vec<Column> {
    let usual = Lists::default();
    let host = setup.machine.backend == "CPU";
    let columns = [
        (true, column(Of::Model, "model", 30, true)),
        (true, column(Of::Size, "size", 10, false)),
        (true, column(Of::Params, "params", 10, false)),
        (true, column(Of::Backend, "backend", 10, true)),
        (!host || lists.gpu_layers.len() > 1, number("n_gpu_layers", "ngl", 3)),
        (lists.cpu_moe != usual.cpu_moe, number("n_cpu_moe", "n_cpu_moe", 10)),
        (host || lists.threads != usual.threads, number("n_threads", "threads", 7)),
        (lists.batches != usual.batches, number("n_batch", "n_batch", 7)),
        (lists.ubatches != usual.ubatches, number("n_ubatch", "n_ubatch", 8)),
        (lists.types_k != usual.types_k, column(Of::Field("type_k"), "type_k", 6, false)),
        (lists.types_v != usual.types_v, column(Of::Field("type_v"), "type_v", 6, false)),
        (lists.main_gpus != usual.main_gpus, number("main_gpu", "main_gpu", 10)),
        (lists.split_modes != usual.split_modes, column(Of::Field("split_mode"), "sm", 6, false)),
        (lists.flash_attn != usual.flash_attn, number("flash_attn", "fa", 3)),
        (lists.tensor_splits != usual.tensor_splits, words("tensor_split", "ts", 12)),
        (lists.overrides != usual.overrides, words("tensor_buft_overrides", "ot", 21)),
        (!setup.mmap, column(Of::Field("load_mode"), "lm", 10, false)),
        (true, column(Of::Test, "test", 15, false)),
        (true, column(Of::Speed, "t/s", 20, false)),
        (true, column(Of::Ours("give_backs"), "give_backs", 10, false)),
        (true, column(Of::Ours("stale"), "stale", 5, false)),
        (true, column(Of::Ours("remaps"), "remaps", 6, false)),
        (true, column(Of::Ours("updates"), "updates", 7, false)),
        (true, column(Of::Ours("recaptures"), "recaptures", 10, false)),
        (true, column(Of::Ours("eager"), "eager", 5, false)),
        (true, column(Of::Peak, "peak", 10, false)),
        (true, column(Of::Achieved, "GB/s", 8, false)),
    ];
    columns.into_iter().filter(|(shown, _)| *shown).map(|(_, column)| column).collect()
}

pub(super) fn header(columns: &[Column]) -> String {
    let titles = columns.iter().map(|column| cell(column, column.title));
    let rules = columns.iter().map(|column| {
        let (line, end) = ("-".repeat(column.width - 1), if column.left { '-' } else { ':' });
        format!(" {line}{end} |")
    });
    format!("|{}\n|{}\n", titles.collect::<String>(), rules.collect::<String>())
}

pub(super) fn row(columns: &[Column], record: &Record<'_>, setup: &Setup) -> String {
    let (llama, ours) = (record.llama(setup), record.ours(setup));
    let named = |list: &[(&str, super::Kind)], values: &[Value], name: &str| {
        let found = list.iter().zip(values).find(|((field, _), _)| *field == name);
        found.map_or_else(String::new, |(_, value)| value.to_string())
    };
    let cells = columns.iter().map(|column| {
        let text = match column.of {
            Of::Model => record.model.kind.clone(),
            Of::Size => size(record.model.bytes),
            Of::Params => params(record.model.parameters),
            Of::Backend => setup.machine.backend.to_owned(),
            Of::Field(name) => named(&LLAMA, &llama, name),
            Of::Test => record.row.test.to_string(),
            Of::Speed => speed(record),
            Of::Ours(name) => named(&super::OURS, &ours, name),
            Of::Peak => record.measured().map_or_else(String::new, |measured| size(measured.peak_reserved_bytes)),
            Of::Achieved => {
                record.measured().map_or_else(String::new, |measured| format!("{:.2}", measured.gb_per_s()))
            }
        };
        cell(column, &text.replace('|', "\\|"))
    });
    format!("|{}\n", cells.collect::<String>())
}

fn cell(column: &Column, text: &str) -> String {
    let width = column.width;
    if column.left { format!(" {text:<width$} |") } else { format!(" {text:>width$} |") }
}

fn speed(record: &Record<'_>) -> String {
    match record.result {
        Ok(measured) => {
            let samples = measured.samples_ts();
            format!("{:.2} ± {:.2}", super::mean(&samples), super::deviation(&samples))
        }
        Err(crate::Error::Pool { source }) if source.is_out_of_memory() => "out of memory".to_owned(),
        Err(crate::Error::Driver(error)) if error.is_out_of_memory() => "out of memory".to_owned(),
        Err(_) => "failed".to_owned(),
    }
}

fn size(bytes: u64) -> String {
    let (unit, name) = if bytes < 1 << 30 { (1u64 << 20, "MiB") } else { (1 << 30, "GiB") };
    format!("{:.2} {name}", bytes as f64 / unit as f64)
}

fn params(count: u64) -> String {
    if count < 1_000_000_000 { format!("{:.2} M", count as f64 / 1e6) } else { format!("{:.2} B", count as f64 / 1e9) }
}
