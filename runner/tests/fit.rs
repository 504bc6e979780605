//! What a rehearsal says that a model takes is what it takes, and what is chosen by that runs within the limit.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::sync::Arc;

use evergraph_runner::Error;
use evergraph_runner::device::Device;
use evergraph_runner::engine::{PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::Gguf;
use evergraph_runner::models::{self, Decoder};
use evergraph_runner::placement::{Candidate, Needs, Placement, Room, fit, rehearse};
use evergraph_runner::sampling::Sampling;

const CONTEXT: usize = 164;
const UBATCH: usize = 32;

fn file(name: &str) -> Arc<Gguf> {
    Arc::new(Gguf::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).unwrap())
}

/// A runtime whose weights are in the pool, as on hardware; small chunks and slabs, so that small models show.
fn runtime(mode: PoolMode, limit: Option<usize>, graphs: bool) -> Arc<Runtime> {
    let mut config = RuntimeConfig::default();
    config.pool = PoolConfig::new(mode);
    config.pool.slab_bytes = PAGE;
    config.pool.limit_bytes = limit;
    config.graphs = graphs;
    config.copy_weights = true;
    let host = evergraph_pool::driver::host::HostConfig::default().granularity(PAGE).memory(1 << 30);
    let driver = Device::asked().unwrap().driver(host).unwrap();
    config.pool.chunk_bytes = driver.as_host().map(|_| PAGE);
    Arc::new(Runtime::new(driver, config).unwrap())
}

const PAGE: usize = 4 << 10;

/// Whether the models here are large beside a chunk of the device; says so where they are not.
fn chunks_are_small(what: &str) -> bool {
    let small = Device::asked().unwrap().is_host();
    if !small {
        println!("skipped: {what}: the models here are smaller than a chunk of this device");
    }
    small
}

fn session_config(_: &Decoder) -> evergraph_runner::Result<SessionConfig> {
    let mut config = SessionConfig::default();
    config.context = Some(CONTEXT);
    config.ubatch = UBATCH;
    Ok(config)
}

/// As [`session_config`], with attention's scores written out.
fn unfused(model: &Decoder) -> evergraph_runner::Result<SessionConfig> {
    let mut config = session_config(model)?;
    config.flash_attention = false;
    Ok(config)
}

/// Of more than one length of scores.
fn unfused_and_long(model: &Decoder) -> evergraph_runner::Result<SessionConfig> {
    let mut config = unfused(model)?;
    config.context = Some(2 * CONTEXT);
    Ok(config)
}

type Config = fn(&Decoder) -> evergraph_runner::Result<SessionConfig>;

/// Fills the context; the most that the pool held, and the tokens.
fn run(
    runtime: &Arc<Runtime>,
    file: &Arc<Gguf>,
    placement: &Placement,
    config: Config,
) -> evergraph_runner::Result<(u64, Vec<u32>)> {
    let model = Arc::new(models::load_placed(Arc::clone(file), runtime, placement)?);
    let config = config(&model)?;
    let mut session = Session::new(Arc::clone(runtime), model, config)?;
    session.set_sampling(&Sampling::greedy(), &[])?;
    let prompt: Vec<u32> =
        (0..((session.context() - 4) / UBATCH * UBATCH) as u32).map(|place| 3 + place * 7 % 100).collect();
    // The prompt is nearly all: a cache that grows under single tokens takes what the prompt's steps no longer need, and the
    // whole is less than was foretold.
    let mut tokens = Vec::new();
    for batch in prompt.chunks(UBATCH) {
        session.feed(batch, |_, _, _| Ok(()))?;
        tokens.push(session.pick()?);
    }
    while session.len() < session.context() {
        tokens.push(session.decode()?);
    }
    assert_eq!(session.step_tokens(), UBATCH, "memory was short for a step");
    Ok((runtime.pool().stats().reserved_bytes.peak, tokens))
}

fn needs(mode: PoolMode, graphs: bool, file: &Arc<Gguf>, candidate: &Candidate, config: Config) -> Needs {
    rehearse(file, &runtime(mode, None, graphs), &candidate.placement(), &config).unwrap()
}

/// Within a few of the small chunks, or a fiftieth: scratch of several steps may lie in other pieces, and a cache that grows may take
/// what the step at hand has no need of.
fn near(foretold: u64, real: u64) -> bool {
    foretold.abs_diff(real) <= (8 * PAGE as u64).max(real / 50)
}

#[test]
fn a_rehearsal_takes_what_the_run_takes() {
    let candidates = [
        Candidate::default(),
        Candidate { experts_below: 2, ..Candidate::default() },
        Candidate { device_layers: Some(2), ..Candidate::default() },
        Candidate { device_layers: Some(0), ..Candidate::default() },
    ];
    let fused: Config = session_config;
    for (name, config) in [("gemma4-moe.gguf", fused), ("gemma4-e.gguf", fused), ("gemma4-moe-q.gguf", unfused)] {
        let file = file(name);
        for candidate in candidates {
            for (mode, graphs) in [(PoolMode::Vmm, true), (PoolMode::Slab, true), (PoolMode::Vmm, false)] {
                let foretold = needs(mode, graphs, &file, &candidate, config).reserved_bytes;
                let real = run(&runtime(mode, None, graphs), &file, &candidate.placement(), config).unwrap().0;
                let what = format!("{name} {candidate:?} {mode}, graphs {graphs}: {foretold} foretold, {real} taken");
                println!("{what}");
                assert!(near(foretold, real), "{what}");
            }
        }
    }
}

#[test]
fn what_is_chosen_runs_within_the_limit_and_one_step_more_would_not() {
    if !chunks_are_small("what fits") {
        return;
    }
    let file = file("gemma4-moe.gguf");
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let of = |candidate: &Candidate| needs(mode, true, &file, candidate, session_config).reserved_bytes;
        let whole = of(&Candidate::default());
        let least = of(&Candidate { experts_below: 99, device_layers: Some(0), ..Candidate::default() });
        let (_, wanted) = run(&runtime(mode, None, true), &file, &Placement::default(), session_config).unwrap();
        let mut kinds = [0; 3];
        for part in 0..=6 {
            let margin = 4 * PAGE as u64;
            let limit = least + (whole - least) * part / 6 + margin;
            let runtime = runtime(mode, Some(limit as usize), true);
            let room = Room::new(runtime.free_bytes().unwrap() as u64, Some(margin));
            assert_eq!(room.free_bytes, limit);
            let fitted = fit(&file, &runtime, &room, None, &session_config).unwrap();
            let (chosen, what) = (fitted.chosen, format!("{mode}, {limit} of {whole}: {fitted:?}"));
            assert_eq!(runtime.pool().stats().reserved_bytes.peak, 0, "{what}: a rehearsal takes nothing");
            let candidate = chosen.candidate;
            let (peak, tokens) = run(&runtime, &file, &candidate.placement(), session_config).expect(&what);
            println!("{peak} {what}");
            assert!(peak <= chosen.needs_bytes && near(chosen.needs_bytes, peak), "{what}: {peak} taken");
            assert_eq!(tokens, wanted, "{what}");
            assert_eq!(runtime.pool().stats().num_alloc_retries, 0, "{what}: it was short of memory");
            let better = match candidate {
                Candidate { experts_below: 0, device_layers: None, .. } => None,
                Candidate { experts_below, device_layers: None, .. } => {
                    Some(Candidate { experts_below: experts_below - 1, ..candidate })
                }
                Candidate { device_layers: Some(layers), .. } => {
                    Some(Candidate { device_layers: Some(layers + 1), ..candidate })
                }
            };
            kinds[usize::from(better.is_some()) + usize::from(candidate.device_layers.is_some())] += 1;
            if let Some(better) = better {
                assert!(!room.holds(of(&better)), "{what}: {better:?} fits too");
            }
        }
        assert!(kinds.iter().all(|count| *count > 0), "whole, experts, layers: {kinds:?}");
        let small = runtime(mode, Some(least as usize - 1), true);
        let room = Room::new(least - 1, Some(0));
        let error = fit(&file, &small, &room, None, &session_config).unwrap_err();
        assert!(matches!(error, Error::NoPlacement { .. }), "{error}");
    }
}

/// DeepSeek V4: its experts may stay on the host, and nothing else.
#[test]
fn a_model_whose_blocks_stay_whole_is_fitted_by_its_experts_alone() {
    if !chunks_are_small("what fits") {
        return;
    }
    let (file, mode) = (file("deepseek-v4.gguf"), PoolMode::Vmm);
    let of = |experts_below| {
        needs(mode, true, &file, &Candidate { experts_below, ..Candidate::default() }, session_config).reserved_bytes
    };
    let runtime = runtime(mode, None, true);
    let chosen = fit(&file, &runtime, &Room::new(of(2), Some(0)), None, &session_config).unwrap().chosen;
    assert_eq!((chosen.candidate.experts_below, chosen.candidate.device_layers), (2, None), "{chosen:?}");
    let least = of(99);
    let error = fit(&file, &runtime, &Room::new(least - 1, Some(0)), None, &session_config).unwrap_err();
    assert!(matches!(error, Error::NoPlacement { needed_bytes, .. } if needed_bytes == least), "{error}");
}

#[test]
fn graphs_of_shorter_texts_give_way_to_what_was_foretold() {
    if !chunks_are_small("what fits") {
        return;
    }
    let file = file("gemma4-moe.gguf");
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let needs = needs(mode, true, &file, &Candidate::default(), unfused_and_long).reserved_bytes;
        let plain = Placement::default();
        let (most, wanted) = run(&runtime(mode, None, true), &file, &plain, unfused_and_long).unwrap();
        let limit = needs + 4 * PAGE as u64;
        println!("{mode}: {needs} foretold, {most} taken if there is no limit");
        assert!(most > limit, "{mode}: {most} taken, so {limit} shows nothing");
        let (peak, tokens) = run(&runtime(mode, Some(limit as usize), true), &file, &plain, unfused_and_long).unwrap();
        assert!(peak <= limit, "{mode}: {peak} of {limit}");
        assert_eq!(tokens, wanted, "{mode}");
    }
}

#[test]
fn an_open_context_is_shortened_first_and_a_real_device_runs_no_rehearsal() {
    if !chunks_are_small("what fits") {
        return;
    }
    let file = file("gemma3.gguf");
    let runtime = runtime(PoolMode::Vmm, None, true);
    let open = |_: &Decoder| {
        let mut config = SessionConfig::default();
        config.ubatch = UBATCH;
        Ok(config)
    };
    let of = |context| {
        let config = |model: &Decoder| {
            let mut config = open(model)?;
            config.context = context;
            Ok(config)
        };
        rehearse(&file, &runtime, &Placement::default(), &config).unwrap()
    };
    let (whole, short) = (of(None), of(Some(256)));
    assert!(short.reserved_bytes + 8 * (PAGE as u64) < whole.reserved_bytes, "{short:?} {whole:?}");
    let room = Room::new((whole.reserved_bytes + short.reserved_bytes) / 2, Some(0));
    let fitted = fit(&file, &runtime, &room, Some(256), &open).unwrap();
    let context = fitted.chosen.candidate.context.unwrap();
    assert!((256..whole.context).contains(&context) && context.is_multiple_of(256), "{fitted:?}");
    assert_eq!(fitted.chosen.candidate.device_layers, None);
    assert_eq!(fitted.needs.context, context);
    assert!(!room.holds(of(Some(context + 256)).reserved_bytes), "{fitted:?}");

    let model = Arc::new(models::load(file, &runtime).unwrap());
    let mut session = Session::new(runtime, model, SessionConfig::default()).unwrap();
    assert!(session.rehearse().is_err());
}
