#![allow(clippy::unwrap_used)]

use super::*;
use crate::bench::Events;
use crate::engine::ExpertTally;

fn setup(backend: &'static str) -> Setup {
    let machine = Machine { backend, cpu: "a \"fast\" one, they say".to_owned(), ..Machine::default() };
    Setup { machine, pool: "vmm".to_owned(), mem_limit_bytes: None, graphs: true, act: "q8", seed: 7, mmap: true }
}

fn model() -> Description {
    Description {
        kind: "gemma3 270M Q4_K - Medium".to_owned(),
        bytes: 246_636_544,
        parameters: 268_098_176,
        layers: 18,
    }
}

fn lists() -> Lists {
    Lists { models: vec!["it's \\ here|there.gguf".into()], depths: vec![64], ..Lists::default() }
}

fn measured() -> Result<Measured> {
    let events = Events { give_backs: 3, stale: 2, remaps: 1, recaptures: 1, replays: 90, ..Events::default() };
    Ok(Measured {
        tokens: 512,
        samples_ns: vec![1_000_000_000, 500_000_000],
        events,
        peak_reserved_bytes: 3 << 29,
        read_bytes: 1_500_000_000,
        expert_cache_bytes: 77,
        experts: ExpertTally { chosen: 9, hits: 4, came: 1 },
    })
}

fn failed() -> Result<Measured> {
    Err(Error::CheckFailed("it's off\nand more, \"much\" more".to_owned()))
}

/// The whole of a table with a test that worked and one that failed.
fn table(format: Format, backend: &'static str) -> String {
    let (lists, model) = (lists(), model());
    let rows = lists.rows().unwrap();
    let mut table = Table::new(format, setup(backend), &lists);
    let mut text = table.header();
    for (row, result) in rows.iter().zip([&measured(), &failed()]) {
        text += &table.row(&Record { row, model: &model, time: "2026-11-30T12:00:00Z", result });
    }
    text + &table.footer()
}

/// The cells of a line of CSV.
fn cells(line: &str) -> Vec<String> {
    let inner = line.strip_prefix('"').unwrap().strip_suffix('"').unwrap();
    inner.split("\",\"").map(|cell| cell.replace("\"\"", "\"")).collect()
}

#[test]
fn csv_has_llama_benchs_columns_first_and_every_value_in_quotes() {
    let text = table(Format::Csv, "CUDA");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    let names: Vec<&str> = lines[0].split(',').collect();
    assert_eq!(names[..5], ["build_commit", "build_number", "cpu_info", "gpu_info", "backends"]);
    assert_eq!(names[35..42], ["test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "give_backs", "stale"]);
    let (good, bad) = (cells(lines[1]), cells(lines[2]));
    assert_eq!((good.len(), bad.len()), (names.len(), names.len()));
    let of = |row: &[String], name: &str| row[names.iter().position(|known| *known == name).unwrap()].clone();
    for (name, value) in [
        ("cpu_info", "a \"fast\" one, they say"),
        ("model_filename", "it's \\ here|there.gguf"),
        ("model_size", "246636544"),
        ("n_batch", "2048"),
        ("n_gpu_layers", "-1"),
        ("flash_attn", "-1"),
        ("no_kv_offload", "0"),
        ("tensor_buft_overrides", "none"),
        ("n_prompt", "512"),
        ("n_gen", "0"),
        ("n_depth", "64"),
        ("avg_ns", "750000000"),
        ("stddev_ns", "353553390"),
        ("avg_ts", "768.000000"),
        ("stddev_ts", "362.038672"),
        ("give_backs", "3"),
        ("stale", "2"),
        ("remaps", "1"),
        ("updates", "0"),
        ("peak_reserved_bytes", "1610612736"),
        ("achieved_gb_per_s", "2.000000"),
        ("mem_limit_bytes", ""),
        ("expert_cache_bytes", "77"),
        ("experts_chosen", "9"),
        ("experts_hit", "4"),
        ("error", ""),
    ] {
        assert_eq!(of(&good, name), value, "{name}");
    }
    for (name, value) in [("n_gen", "128"), ("avg_ts", ""), ("stale", ""), ("error", "a check did not hold: it's off")]
    {
        assert_eq!(of(&bad, name), value, "{name}");
    }
}

#[test]
fn json_and_jsonl_hold_the_same_and_the_samples() {
    let array: serde_json::Value = serde_json::from_str(&table(Format::Json, "CUDA")).unwrap();
    let lines = table(Format::Jsonl, "CUDA");
    let objects: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(array.as_array().unwrap(), &objects);
    let [good, bad] = &objects[..] else { panic!("{lines}") };
    assert_eq!(good.as_object().unwrap().len(), LLAMA.len() + OURS.len() + 2);
    assert_eq!(good["model_filename"], "it's \\ here|there.gguf");
    assert_eq!(good["samples_ns"], serde_json::json!([1_000_000_000, 500_000_000]));
    assert_eq!(good["samples_ts"], serde_json::json!([512.0, 1024.0]));
    assert_eq!((&good["cpu_strict"], &good["graphs"]), (&false.into(), &true.into()));
    assert_eq!((&good["n_gpu_layers"], &good["avg_ts"]), (&(-1).into(), &768.0.into()));
    assert!(good["error"].is_null() && good["mem_limit_bytes"].is_null());
    assert!(bad["avg_ns"].is_null() && bad["error"] == "a check did not hold: it's off");
    assert_eq!(bad["samples_ns"], serde_json::json!([]));
    let text = table(Format::Json, "CUDA");
    let at = |name: &str| text.find(&format!("\"{name}\"")).unwrap();
    assert!(at("stddev_ts") < at("samples_ns") && at("samples_ts") < at("give_backs"), "ours come after");
    assert_eq!(Table::new(Format::Json, setup("CPU"), &lists()).header() + "\n]\n", "[\n\n]\n");
}

#[test]
fn sql_doubles_quotes_and_knows_nothing() {
    let text = table(Format::Sql, "CUDA");
    assert!(
        text.starts_with("CREATE TABLE IF NOT EXISTS llama_bench (\n  build_commit TEXT,\n  build_number INTEGER,")
    );
    assert!(
        text.contains("\n  cpu_strict INTEGER,\n") && text.contains("\n  stddev_ts REAL,\n  give_backs INTEGER,\n")
    );
    assert!(text.contains("\n  error TEXT\n);\n\n"));
    let inserts: Vec<&str> =
        text.lines().filter(|line| line.starts_with("INSERT INTO llama_bench (build_commit, ")).collect();
    assert_eq!(inserts.len(), 2);
    assert!(
        inserts[0].contains("'it''s \\ here|there.gguf'")
            && inserts[0].ends_with(", '1', 'q8', '7', '77', '9', '4', NULL);")
    );
    assert!(inserts[1].contains("'2026-11-30T12:00:00Z', NULL, NULL, NULL, NULL, NULL"));
    assert!(inserts[1].ends_with("'a check did not hold: it''s off');"), "{}", inserts[1]);
    // Outside of quotes there is no third statement.
    let outside: String = text.split('\'').step_by(2).collect();
    assert_eq!(outside.matches(';').count(), 3);
}

#[test]
fn the_table_for_people_shows_what_is_not_usual() {
    let text = table(Format::Markdown, "CUDA");
    let lines: Vec<&str> = text.lines().collect();
    let titles =
        |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).filter(|t| !t.is_empty()).collect::<Vec<_>>();
    assert_eq!(
        titles(lines[0]),
        "model size params backend ngl test t/s give_backs stale remaps updates recaptures eager peak GB/s"
            .split(' ')
            .collect::<Vec<_>>()
    );
    assert!(lines[1].starts_with("| ------------------------------ | ---------: | ---------: | ---------- | --: |"));
    assert_eq!(
        titles(lines[2]),
        [
            "gemma3 270M Q4_K - Medium",
            "235.21 MiB",
            "268.10 M",
            "CUDA",
            "-1",
            "pp512 @ d64",
            "768.00 ± 362.04",
            "3",
            "2",
            "1",
            "0",
            "1",
            "0",
            "1.50 GiB",
            "2.00"
        ]
    );
    assert!(lines[3].contains("|     tg128 @ d64 |               failed |"), "{}", lines[3]);
    let widths: Vec<usize> = lines[..4].iter().map(|line| line.chars().count()).collect();
    assert!(widths.iter().all(|width| *width == widths[0]), "{text}");

    let host = Table::new(Format::Markdown, setup("CPU"), &lists()).header();
    assert!(host.contains("| backend    | threads |") && !host.contains("ngl"), "{host}");
    let many = Lists { ubatches: vec![128, 256], flash_attn: vec![crate::bench::FlashAttn::On], ..lists() };
    let unusual = Table::new(Format::Markdown, setup("CUDA"), &many).header();
    assert!(unusual.contains("| ngl | n_ubatch |  fa |"), "{unusual}");
}

#[test]
fn formats_have_llama_benchs_names() {
    assert_eq!(Format::parse("md"), Ok(Some(Format::Markdown)));
    assert_eq!(Format::parse("none"), Ok(None));
    assert!(Format::parse("xml").unwrap_err().contains("csv, json, jsonl, md, sql"));
}
