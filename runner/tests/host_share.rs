//! Models of which a part stays on the host give what they give with all of it on the device: bit for bit where floats are
//! multiplied, whatever stays, however the host is asked, with graphs and without.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::sync::Arc;

use evergraph_pool::Purpose;
use evergraph_runner::device::Device;
use evergraph_runner::engine::{
    ActType, HostWork, KvType, PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig,
};
use evergraph_runner::gguf::Gguf;
use evergraph_runner::models::{self, Decoder};
use evergraph_runner::placement::{Home, Names, Placement, Rule};
use evergraph_runner::sampling::Sampling;

const PROMPT: [u32; 11] = [2, 40, 17, 99, 5, 61, 33, 8, 120, 77, 14];
const STEPS: usize = 8;

fn experts_below(blocks: usize) -> Placement {
    let rules = vec![Rule { names: Names::ExpertsBelow(blocks), home: Home::Host }];
    Placement { rules, ..Placement::default() }
}

fn layers(count: usize) -> Placement {
    Placement { device_layers: Some(count), ..Placement::default() }
}

fn tensors(rule: &str) -> Placement {
    Placement { rules: vec![rule.parse().unwrap()], ..Placement::default() }
}

fn config(mode: PoolMode, graphs: bool, work: HostWork, act: ActType) -> RuntimeConfig {
    let mut config = RuntimeConfig::default();
    config.pool = PoolConfig::new(mode);
    config.graphs = graphs;
    config.act = act;
    config.host_work = Some(work);
    config.strict = true;
    config
}

/// What a run gives: logits of the prompt's end and after each step, the tokens, and graphs that were replayed.
#[derive(Debug, PartialEq)]
struct Run {
    logits: Vec<Vec<f32>>,
    tokens: Vec<u32>,
}

fn session(model: &str, placement: &Placement, config: RuntimeConfig) -> Session {
    session_with(model, placement, config, None, 0)
}

fn session_with(
    model: &str,
    placement: &Placement,
    config: RuntimeConfig,
    streamed: Option<usize>,
    fetched: usize,
) -> Session {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(model);
    let runtime = Arc::new(Runtime::on(&Device::asked().unwrap(), config).unwrap());
    let file = Arc::new(Gguf::open(&path).unwrap());
    let model = Arc::new(models::load_placed(file, &runtime, placement).unwrap());
    let mut settings = SessionConfig::default();
    settings.context = Some(PROMPT.len() + STEPS);
    settings.ubatch = 4;
    settings.kv = (KvType::F32, KvType::F32);
    settings.stream_experts = streamed;
    settings.device_experts = Some(fetched);
    session_of(runtime, model, settings)
}

fn session_of(runtime: Arc<Runtime>, model: Arc<Decoder>, settings: SessionConfig) -> Session {
    let mut session = Session::new(runtime, model, settings).unwrap();
    session.set_sampling(&Sampling::greedy(), &[]).unwrap();
    session
}

fn generate(session: &mut Session) -> Run {
    let mut run = Run { logits: Vec::new(), tokens: Vec::new() };
    session.feed(&PROMPT, |_, _, _| Ok(())).unwrap();
    run.tokens.push(session.pick().unwrap());
    run.logits.push(session.last_logits().unwrap());
    for _ in 0..STEPS {
        run.tokens.push(session.decode().unwrap());
        run.logits.push(session.last_logits().unwrap());
    }
    run
}

/// Whether the device is the host one, whose bodies are those of the host's share. A GPU adds in another order.
fn same_bodies() -> bool {
    Device::asked().unwrap().is_host()
}

/// Both arithmetics where bits are compared; on a GPU floats alone, since a code that rounds the other way is far off.
fn arithmetics() -> &'static [ActType] {
    if same_bodies() { &[ActType::F32, ActType::Q8] } else { &[ActType::F32] }
}

#[track_caller]
fn same(found: &Run, wanted: &Run, what: &str) {
    if same_bodies() {
        assert_eq!(found, wanted, "{what}");
    } else {
        near(found, wanted, what);
    }
}

/// The same tokens, and logits within what golden tests allow, or less.
#[track_caller]
fn near(found: &Run, wanted: &Run, what: &str) {
    assert_eq!(found.tokens, wanted.tokens, "{what}");
    for (row, wanted) in found.logits.iter().zip(&wanted.logits) {
        let most = wanted.iter().fold(0f32, |most, value| most.max(value.abs()));
        let far = row.iter().zip(wanted).fold(0f32, |far, (a, b)| far.max((a - b).abs()));
        assert!(far <= 1e-4 * most, "{what}: {far} of {most}");
    }
}

#[test]
fn every_placement_gives_the_same_bits() {
    let everything = [
        (
            "gemma4-moe.gguf",
            vec![
                experts_below(usize::MAX),
                experts_below(1),
                experts_below(2),
                experts_below(3),
                layers(0),
                layers(2),
                tensors("ffn_.*=CPU"),
            ],
        ),
        ("gemma4-moe-q.gguf", vec![experts_below(2), tensors("ffn_down_exps=CPU"), tensors("token_embd=CPU")]),
        ("gemma4-e.gguf", vec![layers(1), layers(3), tensors("per_layer_token_embd=CPU")]),
        ("gemma4-dense.gguf", vec![layers(2), tensors(r"blk\.1\.attn_.*=CPU")]),
        ("gemma3.gguf", vec![layers(0), layers(1), layers(2), tensors(r"\.(ffn|attn)_.*=CPU")]),
        (
            "deepseek-v2-lite.gguf",
            vec![experts_below(usize::MAX), experts_below(2), layers(0), layers(3), tensors(r"attn_[kv]_b=CPU")],
        ),
        ("deepseek-v3.gguf", vec![experts_below(3), layers(2), tensors("attn_q_.*=CPU"), tensors("ffn_.*=CPU")]),
        ("deepseek-v4.gguf", vec![experts_below(usize::MAX), experts_below(1), experts_below(3)]),
        ("deepseek-v4-q.gguf", vec![experts_below(2), tensors("ffn_down_exps=CPU"), tensors("token_embd=CPU")]),
    ];
    for (model, placements) in everything {
        for &act in arithmetics() {
            let plain =
                |mode| generate(&mut session(model, &Placement::default(), config(mode, true, HostWork::Nodes, act)));
            let wanted = plain(PoolMode::Vmm);
            for placement in &placements {
                let ways = [
                    (PoolMode::Vmm, true, HostWork::Nodes),
                    (PoolMode::Vmm, true, HostWork::Turns),
                    (PoolMode::Slab, true, HostWork::Turns),
                    (PoolMode::Vmm, false, HostWork::Turns),
                    (PoolMode::Slab, false, HostWork::Nodes),
                ];
                for (mode, graphs, work) in ways {
                    let what = format!("{model} {placement:?} {mode} {work:?} {act:?}, graphs {graphs}");
                    let mut session = session(model, placement, config(mode, graphs, work, act));
                    assert!(session.model().uses_host(), "{what}");
                    same(&generate(&mut session), &wanted, &what);
                    let counters = session.runtime().graph_counters();
                    assert_eq!(counters.replays > 0, graphs, "{what}: {counters:?}");
                    assert_eq!(counters.recaptures, 0, "{what}: {counters:?}");
                }
            }
        }
    }
}

#[test]
fn experts_that_come_to_the_device_for_a_prompt_give_the_same_bits() {
    let experts = || vec![experts_below(usize::MAX), experts_below(1)];
    let with_layers = || [experts(), vec![layers(3)]].concat();
    let models = [
        ("gemma4-moe.gguf", with_layers()),
        ("gemma4-moe-q.gguf", with_layers()),
        ("deepseek-v2-lite.gguf", with_layers()),
        ("deepseek-v4-q.gguf", experts()),
    ];
    for (model, placements) in models {
        for &act in arithmetics() {
            let plain = config(PoolMode::Vmm, true, HostWork::Nodes, act);
            let wanted = generate(&mut session(model, &Placement::default(), plain));
            for placement in &placements {
                for (mode, graphs) in [(PoolMode::Vmm, true), (PoolMode::Slab, true), (PoolMode::Vmm, false)] {
                    // From 1 token on every step has them come, from 4 on those of whole prompts.
                    for from in [1, 4] {
                        let what = format!("{model} {placement:?} {mode} {act:?}, graphs {graphs}, from {from}");
                        let config = config(mode, graphs, HostWork::Turns, act);
                        let mut session = session_with(model, placement, config, Some(from), 0);
                        same(&generate(&mut session), &wanted, &what);
                        // Again: the same graphs, of which some are replayed now.
                        session.clear().unwrap();
                        same(&generate(&mut session), &wanted, &what);
                        assert_eq!(session.runtime().graph_counters().recaptures, 0, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn experts_that_the_device_fetches_for_a_token_change_no_more_than_the_order_of_a_sum() {
    for model in ["gemma4-moe.gguf", "gemma4-moe-q.gguf", "deepseek-v2-lite.gguf", "deepseek-v4-q.gguf"] {
        let config = |graphs, work| config(PoolMode::Vmm, graphs, work, ActType::F32);
        let wanted = generate(&mut session(model, &Placement::default(), config(true, HostWork::Nodes)));
        for placement in [experts_below(usize::MAX), experts_below(2)] {
            // More than a token uses is all but one: the host is asked in any case.
            for fetched in [1, 16] {
                let mut runs = [(true, HostWork::Turns), (true, HostWork::Nodes), (false, HostWork::Turns)].map(
                    |(graphs, work)| {
                        generate(&mut session_with(model, &placement, config(graphs, work), None, fetched))
                    },
                );
                assert_eq!(runs[0], runs[1]);
                assert_eq!(runs[0], runs[2], "graphs on and off");
                let run = std::mem::replace(&mut runs[0], Run { logits: Vec::new(), tokens: Vec::new() });
                assert_ne!(run.logits, wanted.logits, "{model} {placement:?} {fetched}: the device did nothing");
                near(&run, &wanted, &format!("{model} {placement:?} {fetched}"));
            }
        }
    }
}

/// A session that keeps some experts on the device.
fn session_caching(model: &str, placement: &Placement, config: RuntimeConfig, cache: usize, fetched: usize) -> Session {
    let first = session(model, placement, config);
    let mut settings = SessionConfig::default();
    (settings.context, settings.ubatch) = (Some(PROMPT.len() + LONG), 4);
    (settings.kv, settings.device_experts) = ((KvType::F32, KvType::F32), Some(fetched));
    settings.expert_cache = Some(cache);
    session_of(first.runtime().clone(), first.model().clone(), settings)
}

/// Tokens until experts changed places several times.
const LONG: usize = 200;

fn generate_long(session: &mut Session) -> Run {
    let mut run = Run { logits: Vec::new(), tokens: Vec::new() };
    session.feed(&PROMPT, |_, _, _| Ok(())).unwrap();
    run.tokens.push(session.pick().unwrap());
    for step in 0..LONG {
        // What a small model says goes round in circles.
        if step % 5 == 0 {
            session.take_next(3 + (step as u32 * step as u32 * 7) % 120).unwrap();
        }
        run.tokens.push(session.decode().unwrap());
        if step % 20 == 19 {
            run.logits.push(session.last_logits().unwrap());
        }
    }
    run
}

/// Bytes that hold so many experts of each of these blocks, and no more.
fn cache_of(session: &Session, experts: usize) -> usize {
    let mut bytes = 0;
    let file = session.model().weights.file().clone();
    for tensor in file.tensors().iter().filter(|tensor| tensor.name().contains("_exps.weight")) {
        if session.model().weights.home(tensor.name()) == Home::Host {
            let one = tensor.bytes() as usize / tensor.shape()[0] as usize;
            bytes += (one * experts).next_multiple_of(256);
        }
    }
    bytes
}

#[test]
fn experts_that_the_device_keeps_change_no_more_than_the_order_of_a_sum() {
    // Of those that are kept there may be more than are fetched, or fewer, or none are fetched; and all may be kept.
    let sizes: [(&str, &[(usize, usize)]); 3] = [
        ("gemma4-moe.gguf", &[(1, 0), (2, 2), (3, 0), (usize::MAX, 1)]),
        ("gemma4-moe-q.gguf", &[(2, 1)]),
        ("deepseek-v4-q.gguf", &[(2, 0)]),
    ];
    for (model, sizes) in sizes {
        let config = |mode, graphs, work| config(mode, graphs, work, ActType::F32);
        let plain = config(PoolMode::Vmm, true, HostWork::Nodes);
        let wanted = generate_long(&mut session_caching(model, &Placement::default(), plain, 0, 0));
        let placement = experts_below(usize::MAX);
        let all = session(model, &placement, config(PoolMode::Vmm, true, HostWork::Nodes));
        let mut changed = false;
        for &(kept, fetched) in sizes {
            let bytes = if kept == usize::MAX { 1 << 30 } else { cache_of(&all, kept) };
            let ways = [
                (PoolMode::Vmm, true, HostWork::Turns),
                (PoolMode::Slab, true, HostWork::Nodes),
                (PoolMode::Vmm, false, HostWork::Turns),
            ];
            let mut first = None;
            for (mode, graphs, work) in ways {
                let what = format!("{model} {kept} kept, {fetched} fetched, {mode} {work:?}, graphs {graphs}");
                let mut session = session_caching(model, &placement, config(mode, graphs, work), bytes, fetched);
                let run = generate_long(&mut session);
                near(&run, &wanted, &what);
                let tally = session.expert_tally().unwrap().unwrap();
                assert!(tally.chosen > 0 && tally.hits > 0, "{what}: {tally:?}");
                changed |= tally.came > 0;
                assert_eq!(tally.hits == tally.chosen, kept == usize::MAX, "{what}: {tally:?}");
                if kept < usize::MAX {
                    assert_eq!(session.expert_cache_bytes(), bytes, "{what}");
                }
                let counters = session.runtime().graph_counters();
                assert_eq!((counters.recaptures, counters.stale), (0, 0), "{what}: {counters:?}");
                let found = (run, tally);
                // The same experts are in the same slots at the same time, so not even a bit differs.
                match &first {
                    Some(first) => assert_eq!(&found, first, "{what}"),
                    None => first = Some(found),
                }
            }
        }
        assert!(changed, "{model}: no expert took another's place");
    }
}

#[test]
fn attention_on_the_host_writes_its_scores_out_too() {
    let run = |model: &str, placement: &Placement, graphs, work, flash| {
        let config = config(PoolMode::Vmm, graphs, work, ActType::F32);
        let first = session(model, placement, config);
        let mut settings = SessionConfig::default();
        (settings.context, settings.ubatch) = (Some(400), 4);
        (settings.kv, settings.flash_attention) = ((KvType::F32, KvType::F32), flash);
        let mut session = session_of(first.runtime().clone(), first.model().clone(), settings);
        // Up to where scores become longer.
        let text: Vec<u32> = (0..240).map(|index| 3 + index * 37 % 100).collect();
        session.feed(&text, |_, _, _| Ok(())).unwrap();
        let run = generate(&mut session);
        assert!(session.len() > 256);
        run
    };
    for (model, placements) in [
        ("gemma3.gguf", [layers(0), layers(1)]),
        ("gemma4-e.gguf", [layers(1), layers(3)]),
        ("gemma4-moe.gguf", [layers(2), experts_below(1)]),
        ("deepseek-v3.gguf", [layers(2), experts_below(2)]),
    ] {
        let wanted = run(model, &Placement::default(), true, HostWork::Nodes, false);
        assert!(wanted != run(model, &Placement::default(), true, HostWork::Nodes, true), "{model}: another way");
        for placement in &placements {
            for (graphs, work) in [(true, HostWork::Turns), (true, HostWork::Nodes), (false, HostWork::Turns)] {
                let what = format!("{model} {placement:?} {work:?}, graphs {graphs}");
                same(&run(model, placement, graphs, work, false), &wanted, &what);
            }
        }
    }
}

#[test]
fn a_cache_of_experts_that_does_not_fit_is_refused_and_one_that_holds_none_is_left_out() {
    let placement = experts_below(usize::MAX);
    let model = "gemma4-moe-q.gguf";
    let plain = || config(PoolMode::Vmm, true, HostWork::Nodes, ActType::F32);
    let first = session(model, &placement, plain());
    let kept = cache_of(&first, 1);
    assert_eq!(session_caching(model, &placement, plain(), kept, 0).expert_cache_bytes(), kept);
    let mut less = session_caching(model, &placement, plain(), kept - 1, 0);
    assert_eq!((less.expert_cache_bytes(), less.expert_tally().unwrap()), (0, None));
    generate(&mut less);
    // What is there is enough for the rest of a sequence.
    let mut settings = SessionConfig::default();
    (settings.context, settings.ubatch, settings.expert_cache) = (Some(16), 4, Some(1 << 30));
    let runtime = first.runtime().clone();
    let _half = runtime.pool().alloc_for::<u8>(1 << 20, Purpose::State, runtime.stream()).unwrap();
    let held = runtime.pool().stats().reserved_bytes.current as usize;
    runtime.pool().set_limit(Some(held));
    let error = Session::new(runtime, first.model().clone(), settings).err().unwrap();
    let (what, advice) = error.parts();
    assert!(error.is_out_of_memory() && what.contains("a cache of experts of"), "{what}");
    assert!(advice.unwrap().contains("--expert-cache"));
}
