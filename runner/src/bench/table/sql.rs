//! SQL statements, as SQLite and others read them: a table `llama_bench`, and a row for each test.

use super::{Kind, Value, fields};

pub(super) fn header() -> String {
    let columns: Vec<String> = fields().map(|(name, kind)| format!("  {name} {}", column_type(kind))).collect();
    format!("CREATE TABLE IF NOT EXISTS llama_bench (\n{}\n);\n\n", columns.join(",\n"))
}

pub(super) fn row(values: &[Value]) -> String {
    let names: Vec<&str> = fields().map(|(name, _)| name).collect();
    let words: Vec<String> = values.iter().map(word).collect();
    format!("INSERT INTO llama_bench ({}) VALUES ({});\n", names.join(", "), words.join(", "))
}

fn column_type(kind: Kind) -> &'static str {
    match kind {
        Kind::Text => "TEXT",
        Kind::Int | Kind::Bool => "INTEGER",
        Kind::Real => "REAL",
    }
}

fn word(value: &Value) -> String {
    match value {
        Value::Nothing => "NULL".to_owned(),
        value => format!("'{}'", value.to_string().replace('\'', "''")),
    }
}
