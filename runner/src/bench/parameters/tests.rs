#![allow(clippy::unwrap_used)]

use super::*;

fn lists() -> Lists {
    Lists { models: vec!["a.gguf".into()], ..Lists::default() }
}

#[test]
fn the_defaults_are_a_prompt_and_a_generation() {
    let rows = lists().rows().unwrap();
    assert_eq!(rows.iter().map(|row| row.test.to_string()).collect::<Vec<_>>(), ["pp512", "tg128"]);
    assert_eq!((rows[0].sequence.batch, rows[0].sequence.ubatch), (2048, 512));
}

#[test]
fn every_combination_comes_once_and_models_stay_together() {
    let lists = Lists {
        models: vec!["a.gguf".into(), "b.gguf".into()],
        gpu_layers: vec![99, 20],
        ubatches: vec![128, 512],
        threads: vec![1, 2],
        depths: vec![0, 4096],
        prompts: vec![0, 64],
        generations: vec![16],
        both: vec![(32, 8), (0, 0)],
        ..lists()
    };
    let rows = lists.rows().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 2 * 2 * 2 * 3, "zero tokens are no test");
    for (index, row) in rows.iter().enumerate() {
        assert!(!rows[..index].contains(row), "{row:?} comes twice");
    }
    let changes = rows.windows(2).filter(|pair| pair[0].model != pair[1].model).count();
    assert_eq!(changes, 3, "four models, each loaded once");
    let names: Vec<String> = rows[..6].iter().map(|row| row.test.to_string()).collect();
    assert_eq!(names, ["pp64", "tg16", "pp32+tg8", "pp64 @ d4096", "tg16 @ d4096", "pp32+tg8 @ d4096"]);
    assert_eq!(rows[6].sequence.threads, 2, "threads change faster than -ub");
    assert_eq!(rows[6].sequence.ubatch, 128);
}

#[test]
fn nothing_and_far_too_much_are_refused() {
    let nothing = Lists { prompts: vec![0], generations: vec![0], ..lists() };
    assert_eq!(nothing.rows().unwrap_err().exit_status(), 2);
    let many: Vec<u32> = (1..1000).collect();
    let far = Lists { prompts: many.clone(), depths: many.clone(), threads: many.clone(), batches: many, ..lists() };
    let error = far.rows().unwrap_err();
    assert!(error.exit_status() == 2 && error.to_string().contains("at most 10000"), "{error}");
}

#[test]
fn words_are_llama_cpps() {
    assert_eq!(FlashAttn::parse("1").unwrap().number(), 1);
    assert_eq!(FlashAttn::parse("off").unwrap().number(), 0);
    assert_eq!(FlashAttn::parse("auto").unwrap().number(), -1);
    assert!(FlashAttn::parse("maybe").is_err());
    assert_eq!(SplitMode::parse("row"), Ok(SplitMode::Row));
    assert!(SplitMode::parse("rows").is_err());
    assert_eq!(kv_parse("bf16"), Ok(KvType::Bf16));
    assert!(kv_parse("q8_0").unwrap_err().contains("f16, bf16 or f32"));
    assert_eq!(TensorSplit::parse("3/1/0").unwrap().to_string(), "3.00/1.00");
    assert_eq!(TensorSplit::parse("3;0.5").unwrap().shares(), [3.0, 0.5]);
    assert_eq!(TensorSplit::default().to_string(), "0.00");
    for text in ["", "a", "1//2", "-1", "nan", "inf"] {
        assert!(TensorSplit::parse(text).is_err(), "{text}");
    }
}
