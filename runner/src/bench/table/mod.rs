//! Results as text: llama-bench's formats and columns, ours after its own.

mod csv;
mod json;
mod markdown;
mod sql;

use super::describe::{Description, Machine};
use super::measure::Measured;
use super::parameters::{Lists, Row, kv_name};
use super::samples::{deviation, mean};
use crate::error::{Error, Result};

/// How a table is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Comma-separated, all values quoted.
    Csv,
    /// One array of objects.
    Json,
    /// An object a line.
    Jsonl,
    /// A table for people.
    Markdown,
    /// Statements that make a table and fill it.
    Sql,
}

impl Format {
    /// The format of that name; `none` is none.
    ///
    /// # Errors
    /// A text that says what there is.
    pub fn parse(text: &str) -> std::result::Result<Option<Self>, String> {
        match text {
            "none" => Ok(None),
            "csv" => Ok(Some(Self::Csv)),
            "json" => Ok(Some(Self::Json)),
            "jsonl" => Ok(Some(Self::Jsonl)),
            "md" => Ok(Some(Self::Markdown)),
            "sql" => Ok(Some(Self::Sql)),
            _ => Err(format!("`{text}` is not csv, json, jsonl, md, sql or none")),
        }
    }
}

/// What holds for a whole table.
#[derive(Clone, PartialEq, Debug)]
pub struct Setup {
    /// Where it was made.
    pub machine: Machine,
    /// Mode of the pool.
    pub pool: String,
    /// Most memory that the pool may take.
    pub mem_limit_bytes: Option<u64>,
    /// Whether steps are captured and replayed.
    pub graphs: bool,
    /// Activations in products.
    pub act: &'static str,
    /// Seed of the tokens.
    pub seed: u64,
    /// Whether model files are mapped.
    pub mmap: bool,
}

/// A row of a table.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// What was measured.
    pub row: &'a Row,
    /// On what model.
    pub model: &'a Description,
    /// When, in RFC 3339.
    pub time: &'a str,
    /// What came of it.
    pub result: &'a Result<Measured>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Text,
    Int,
    Bool,
    Real,
}

/// llama-bench's columns and their types, in its order.
#[rustfmt::skip]
const LLAMA: [(&str, Kind); 40] = [
    ("build_commit", Kind::Text), ("build_number", Kind::Int), ("cpu_info", Kind::Text), ("gpu_info", Kind::Text),
    ("backends", Kind::Text), ("model_filename", Kind::Text), ("model_type", Kind::Text), ("model_size", Kind::Int),
    ("model_n_params", Kind::Int), ("n_batch", Kind::Int), ("n_ubatch", Kind::Int), ("n_threads", Kind::Int),
    ("cpu_mask", Kind::Text), ("cpu_strict", Kind::Bool), ("poll", Kind::Int), ("type_k", Kind::Text),
    ("type_v", Kind::Text), ("n_gpu_layers", Kind::Int), ("n_cpu_moe", Kind::Int), ("split_mode", Kind::Text),
    ("main_gpu", Kind::Int), ("no_kv_offload", Kind::Bool), ("flash_attn", Kind::Int), ("devices", Kind::Text),
    ("tensor_split", Kind::Text), ("tensor_buft_overrides", Kind::Text), ("load_mode", Kind::Text),
    ("embeddings", Kind::Bool), ("no_op_offload", Kind::Int), ("no_host", Kind::Bool), ("fit_target", Kind::Int),
    ("fit_min_ctx", Kind::Int), ("n_prompt", Kind::Int), ("n_gen", Kind::Int), ("n_depth", Kind::Int),
    ("test_time", Kind::Text), ("avg_ns", Kind::Int), ("stddev_ns", Kind::Int), ("avg_ts", Kind::Real),
    ("stddev_ts", Kind::Real),
];

/// Ours.
#[rustfmt::skip]
const OURS: [(&str, Kind); 19] = [
    ("give_backs", Kind::Int), ("stale", Kind::Int), ("remaps", Kind::Int), ("updates", Kind::Int),
    ("recaptures", Kind::Int), ("eager", Kind::Int), ("peak_reserved_bytes", Kind::Int),
    ("achieved_gb_per_s", Kind::Real), ("replays", Kind::Int), ("read_bytes", Kind::Int), ("pool", Kind::Text),
    ("mem_limit_bytes", Kind::Int), ("graphs", Kind::Bool), ("act", Kind::Text), ("seed", Kind::Int),
    ("expert_cache_bytes", Kind::Int), ("experts_chosen", Kind::Int), ("experts_hit", Kind::Int),
    ("error", Kind::Text),
];

/// A value; what a failed test does not have is nothing.
#[derive(Clone, PartialEq, Debug)]
enum Value {
    Nothing,
    Text(String),
    Int(i128),
    Bool(bool),
    Real(f64),
}

impl Value {
    fn text(text: impl ToString) -> Self {
        Self::Text(text.to_string())
    }

    fn int(number: impl Into<i128>) -> Self {
        Self::Int(number.into())
    }
}

/// As llama-bench writes numbers. Nothing is an empty text.
impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nothing => Ok(()),
            Self::Text(text) => f.write_str(text),
            Self::Int(number) => number.fmt(f),
            Self::Bool(is) => f.write_str(if *is { "1" } else { "0" }),
            Self::Real(number) => write!(f, "{number:.6}"),
        }
    }
}

/// What a failed test says in a table: the first line; what the pool reports besides is for people.
fn first_line(error: &Error) -> String {
    error.parts().0.lines().next().unwrap_or_default().to_owned()
}

impl Record<'_> {
    fn measured(&self) -> Option<&Measured> {
        self.result.as_ref().ok()
    }

    /// Values of [`LLAMA`].
    fn llama(&self, setup: &Setup) -> [Value; LLAMA.len()] {
        let (placement, sequence, test) = (&self.row.model.placement, &self.row.sequence, &self.row.test);
        let machine = &setup.machine;
        let of = |measure: &dyn Fn(&Measured) -> Value| self.measured().map_or(Value::Nothing, measure);
        let overrides = if placement.overrides.is_empty() { "none" } else { &placement.overrides };
        [
            Value::text(concat!("evergraph-", env!("CARGO_PKG_VERSION"))),
            Value::int(0),
            Value::text(&machine.cpu),
            Value::text(&machine.gpu),
            Value::text(machine.backend),
            Value::text(self.row.model.file.display()),
            Value::text(&self.model.kind),
            Value::int(self.model.bytes),
            Value::int(self.model.parameters),
            Value::int(sequence.batch),
            Value::int(sequence.ubatch),
            Value::int(sequence.threads),
            Value::text("0x0"),
            Value::Bool(false),
            Value::int(0),
            Value::text(kv_name(sequence.type_k)),
            Value::text(kv_name(sequence.type_v)),
            Value::int(placement.gpu_layers),
            Value::int(placement.cpu_moe),
            Value::text(placement.split_mode.name()),
            Value::int(placement.main_gpu),
            Value::Bool(false),
            Value::int(sequence.flash_attn.number()),
            Value::text(&machine.device),
            Value::text(&placement.tensor_split),
            Value::text(overrides),
            Value::text(if setup.mmap { "mmap" } else { "none" }),
            Value::Bool(false),
            Value::int(0),
            Value::Bool(false),
            Value::int(0),
            Value::int(0),
            Value::int(test.prompt),
            Value::int(test.generation),
            Value::int(test.depth),
            Value::text(self.time),
            of(&|measured| Value::int(mean(&measured.samples()) as u64)),
            of(&|measured| Value::int(deviation(&measured.samples()) as u64)),
            of(&|measured| Value::Real(mean(&measured.samples_ts()))),
            of(&|measured| Value::Real(deviation(&measured.samples_ts()))),
        ]
    }

    /// Values of [`OURS`].
    fn ours(&self, setup: &Setup) -> [Value; OURS.len()] {
        let of = |count: &dyn Fn(&Measured) -> u64| self.measured().map_or(Value::Nothing, |m| Value::int(count(m)));
        [
            of(&|measured| measured.events.give_backs),
            of(&|measured| measured.events.stale),
            of(&|measured| measured.events.remaps),
            of(&|measured| measured.events.updates),
            of(&|measured| measured.events.recaptures),
            of(&|measured| measured.events.eager),
            of(&|measured| measured.peak_reserved_bytes),
            self.measured().map_or(Value::Nothing, |measured| Value::Real(measured.gb_per_s())),
            of(&|measured| measured.events.replays),
            of(&|measured| measured.read_bytes),
            Value::text(&setup.pool),
            setup.mem_limit_bytes.map_or(Value::Nothing, Value::int),
            Value::Bool(setup.graphs),
            Value::text(setup.act),
            Value::int(setup.seed),
            of(&|measured| measured.expert_cache_bytes),
            of(&|measured| measured.experts.chosen),
            of(&|measured| measured.experts.hits),
            self.result.as_ref().err().map_or(Value::Nothing, |error| Value::Text(first_line(error))),
        ]
    }

    /// Both.
    fn values(&self, setup: &Setup) -> Vec<Value> {
        self.llama(setup).into_iter().chain(self.ours(setup)).collect()
    }
}

/// All columns.
fn fields() -> impl Iterator<Item = (&'static str, Kind)> + Clone {
    LLAMA.into_iter().chain(OURS)
}

/// A table in one format, piece by piece.
#[derive(Debug)]
pub struct Table {
    format: Format,
    setup: Setup,
    /// Columns of a table for people.
    columns: Vec<markdown::Column>,
    rows: usize,
}

impl Table {
    /// A table of what these lists ask for.
    #[must_use]
    pub fn new(format: Format, setup: Setup, lists: &Lists) -> Self {
        let columns = markdown::columns(&setup, lists);
        Self { format, setup, columns, rows: 0 }
    }

    /// What comes before the rows.
    #[must_use]
    pub fn header(&self) -> String {
        match self.format {
            Format::Csv => csv::header(),
            Format::Json => "[\n".to_owned(),
            Format::Jsonl => String::new(),
            Format::Markdown => markdown::header(&self.columns),
            Format::Sql => sql::header(),
        }
    }

    /// A row.
    #[must_use]
    pub fn row(&mut self, record: &Record<'_>) -> String {
        let first = self.rows == 0;
        self.rows += 1;
        match self.format {
            Format::Csv => csv::row(&record.values(&self.setup)),
            Format::Json => json::row(record, &self.setup, first),
            Format::Jsonl => json::line(record, &self.setup),
            Format::Markdown => markdown::row(&self.columns, record, &self.setup),
            Format::Sql => sql::row(&record.values(&self.setup)),
        }
    }

    /// What comes after the rows.
    #[must_use]
    pub fn footer(&self) -> String {
        match self.format {
            Format::Json => "\n]\n".to_owned(),
            Format::Markdown => format!("\nbuild: evergraph {}\n", env!("CARGO_PKG_VERSION")),
            Format::Csv | Format::Jsonl | Format::Sql => String::new(),
        }
    }
}

#[cfg(test)]
mod tests;
