#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::engine::{KvType, PoolConfig, RuntimeConfig, Session, SessionConfig};
use crate::sampling::Sampling;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn lists(models: &[&str]) -> Lists {
    let models = models.iter().map(|name| golden(name)).collect();
    Lists { models, prompts: vec![24], generations: vec![8], ubatches: vec![16], ..Lists::default() }
}

#[derive(Default)]
struct Heard {
    stages: Vec<(usize, Stage)>,
    results: Vec<Result<Measured, String>>,
}

impl Listener for Heard {
    fn stage(&mut self, number: usize, _: &Row, stage: Stage) {
        self.stages.push((number, stage));
    }

    fn done(&mut self, _: &Row, _: &Description, result: &Result<Measured>) -> Result<()> {
        self.results.push(result.as_ref().map_err(ToString::to_string).cloned());
        Ok(())
    }
}

fn opener(limit_bytes: Option<usize>) -> impl Fn() -> Result<Arc<Runtime>> {
    move || {
        let mut pool = PoolConfig::vmm();
        pool.limit_bytes = limit_bytes;
        Runtime::host(RuntimeConfig { pool, strict: true, ..RuntimeConfig::default() }).map(Arc::new)
    }
}

fn settings() -> Settings {
    Settings { repetitions: 2, ..Settings::default() }
}

#[test]
fn rows_of_a_model_share_it_and_a_filled_cache_is_filled_once() {
    let lists = Lists { depths: vec![0, 700], ..lists(&["gemma3.gguf", "gemma4-moe-q.gguf"]) };
    let mut heard = Heard::default();
    run(&lists.rows().unwrap(), &settings(), &opener(None), &mut heard).unwrap();
    let results: Vec<Measured> = heard.results.into_iter().map(Result::unwrap).collect();
    assert_eq!(results.len(), 8);
    for result in &results {
        assert_eq!(result.samples_ns.len(), 2);
        assert!(result.samples_ns.iter().all(|ns| *ns > 0) && result.read_bytes > 0 && result.peak_reserved_bytes > 0);
        assert_eq!(result.events.eager, 0, "all is warm before it is timed");
    }
    assert_eq!(results.iter().map(|result| result.tokens).collect::<Vec<_>>(), [24, 8, 24, 8, 24, 8, 24, 8]);
    assert!(results[1].events.replays >= 16, "{:?}", results[1].events);
    let count = |stage: Stage| {
        heard.stages.iter().filter(|(_, other)| *other == stage).map(|(row, _)| *row).collect::<Vec<_>>()
    };
    assert_eq!(count(Stage::Load), [1, 5]);
    assert_eq!(count(Stage::Fill), [3, 4, 7, 8]);
    assert_eq!(count(Stage::Repetition(2)), [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_test_without_memory_is_one_row_and_the_next_goes_on() {
    let lists = Lists { depths: vec![0, 40_000, 8], prompts: vec![0], ..lists(&["gemma3.gguf"]) };
    let rows = lists.rows().unwrap();
    let mut heard = Heard::default();
    let quick = Settings { repetitions: 1, warm_up: false, ..Settings::default() };
    let error = run(&rows, &quick, &opener(Some(6 << 20)), &mut heard).unwrap_err();
    assert!(matches!(error, Error::Tests { failed: 1, tests: 3 }), "{error}");
    assert!(heard.results[0].is_ok() && heard.results[2].is_ok(), "{:?}", heard.results);
    assert!(heard.results[1].as_ref().unwrap_err().starts_with("out of memory"), "{:?}", heard.results[1]);
    let peak = heard.results[2].as_ref().unwrap().peak_reserved_bytes;
    assert_eq!(peak, heard.results[0].as_ref().unwrap().peak_reserved_bytes, "nothing is left of the rows before");
}

#[test]
fn what_the_engine_can_not_do_is_refused_before_anything_runs() {
    let base = || lists(&["gemma3.gguf"]);
    let cases = [
        ("-sm", Lists { split_modes: vec![SplitMode::Row], ..base() }),
        ("-mg", Lists { main_gpus: vec![1], ..base() }),
        ("-ts", Lists { tensor_splits: vec![TensorSplit::parse("1/1").unwrap()], ..base() }),
        ("-ot", Lists { overrides: vec!["exps=moon".to_owned()], ..base() }),
        ("-ctk", Lists { types_k: vec![KvType::F16, KvType::F32], ..base() }),
    ];
    for (flag, lists) in cases {
        let mut heard = Heard::default();
        let error = run(&lists.rows().unwrap(), &settings(), &opener(None), &mut heard).unwrap_err();
        assert!(error.exit_status() == 2 && error.to_string().starts_with(flag), "{error}");
        assert!(heard.stages.is_empty() && heard.results.is_empty(), "{flag}");
    }
    let fine = Lists {
        gpu_layers: vec![-1, 99, 1],
        cpu_moe: vec![0, 2],
        overrides: vec!["a=CPU;b=CUDA0".to_owned()],
        split_modes: vec![SplitMode::None, SplitMode::Layer],
        ..base()
    };
    check(&fine.rows().unwrap(), 1).unwrap();
    let two = Lists { main_gpus: vec![1], tensor_splits: vec![TensorSplit::parse("1/1").unwrap()], ..base() };
    check(&two.rows().unwrap(), 2).unwrap();
}

#[test]
fn a_sequence_taken_back_goes_on_as_it_would_have() {
    // Windows of 8 to 16 tokens: going on for 60 writes over all that they keep.
    for name in ["gemma3.gguf", "gemma4-e.gguf", "deepseek-v4.gguf"] {
        let runtime = opener(None)().unwrap();
        let model = Arc::new(models::load(Arc::new(Gguf::open(&golden(name)).unwrap()), &runtime).unwrap());
        let vocabulary = model.vocabulary as u32;
        let ids = |from: u32, count: u32| (from..from + count).map(|id| id * 7 % vocabulary).collect::<Vec<u32>>();
        let config = SessionConfig { context: Some(128), ubatch: 16, ..SessionConfig::default() };
        let mut session = Session::new(Arc::clone(&runtime), model, config).unwrap();
        session.set_sampling(&Sampling::greedy(), &[]).unwrap();
        let start = session.mark().unwrap();
        session.feed(&ids(1, 40), |_, _, _| Ok(())).unwrap();
        let mark = session.mark().unwrap();
        assert_eq!((start.tokens(), mark.tokens()), (0, 40));
        let go_on = |session: &mut Session| {
            session.rewind(&mark).unwrap();
            let mut logits = Vec::new();
            for id in ids(5, 4) {
                session.take_next(id).unwrap();
                session.decode().unwrap();
                logits.push(session.last_logits().unwrap());
            }
            session.feed(&ids(9, 60), |_, _, _| Ok(())).unwrap();
            session.pick().unwrap();
            logits.push(session.last_logits().unwrap());
            logits
        };
        let first = go_on(&mut session);
        assert!(first == go_on(&mut session), "{name}: another text after the same start");
        session.rewind(&start).unwrap();
        assert!(session.is_empty() && session.rewind(&mark).is_err(), "it lies ahead now");
        session.feed(&ids(1, 40), |_, _, _| Ok(())).unwrap();
        assert!(first == go_on(&mut session), "{name}: another text from the very start");
        assert!(matches!(session.take_next(vocabulary), Err(Error::TokenId { .. })));
    }
}

#[test]
fn the_least_that_steps_read_counts_active_experts_windows_and_rows() {
    let runtime = opener(None)().unwrap();
    let load = |name: &str| models::load(Arc::new(Gguf::open(&golden(name)).unwrap()), &runtime).unwrap();
    let model = load("gemma3.gguf");
    let types = (KvType::F16, KvType::F16);
    // All matrices of this file are used by each token; the output matrix is the embedding.
    let matrices: u64 = model
        .weights
        .file()
        .tensors()
        .iter()
        .filter(|tensor| tensor.dims().len() > 1)
        .map(|tensor| tensor.bytes())
        .sum();
    let row = (model.width * 4) as u64;
    assert_eq!(model.weight_bytes(1, 1), matrices + row);
    assert_eq!(model.weight_bytes(9, 1), matrices + 9 * row);
    assert!(model.weight_bytes(1, 0) < matrices);
    // Global layers read all that there is, local ones their window.
    let of = |window: bool| model.blocks.iter().filter(move |block| block.attention.window.is_some() == window);
    let width = |block: &models::Block| {
        (block.attention.kv_heads * (block.attention.key_dim + block.attention.value_dim) * 2) as u64
    };
    let (local, global): (u64, u64) = (of(true).map(width).sum(), of(false).map(width).sum());
    let window = u64::from(of(true).next().unwrap().attention.window.unwrap());
    assert_eq!(model.cache_bytes(0..1, types), local + global);
    assert_eq!(model.cache_bytes(999..1000, types), window * local + 1000 * global);
    assert_eq!(model.cache_bytes(990..1000, types), (window + 9) * local + 1000 * global);
    assert_eq!(model.cache_bytes(990..1000, (KvType::F32, KvType::F32)), 2 * model.cache_bytes(990..1000, types));
    // Experts: what the tokens can pick, until that is all.
    let moe = load("gemma4-moe.gguf");
    let steps: Vec<u64> = (1..40).map(|tokens| moe.weight_bytes(tokens, 1)).collect();
    let growth: Vec<u64> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(growth[0] > *growth.last().unwrap(), "{growth:?}");
    assert_eq!(*growth.last().unwrap(), (moe.width * 4) as u64, "with all experts in use a token adds its row");
}
