//! Quantised activations: the tiny golden model with its weights in blocks, dense and with experts.

#![allow(clippy::unwrap_used, missing_docs)]

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use evergraph_kernels::quant::quantize;
use evergraph_runner::Error;
use evergraph_runner::engine::{
    ActType, KvType, PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig, StepKey,
};
use evergraph_runner::gguf::{Bytes, Gguf, QuantType, Writer};
use evergraph_runner::models::{self, KvCache};
use evergraph_runner::sampling::Sampling;

const EXPERTS: u64 = 4;
const HIDDEN: u64 = 96;

/// The golden model with matrices of these types, and with experts in place of the dense part if asked for: slices of
/// its own weights, and a router of floats.
fn model(types: &[QuantType], experts: bool) -> Gguf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gemma3.gguf");
    let file = Gguf::open(&path).unwrap();
    let mut writer = Writer::new();
    for key in [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.sliding_window",
    ] {
        let key = format!("gemma3.{key}");
        writer.put(key.as_str(), file.get(&key).unwrap().as_u64().unwrap() as u32);
    }
    writer.put("general.architecture", "gemma3");
    writer.put("gemma3.attention.layer_norm_rms_epsilon", 1e-6f32);
    if experts {
        writer.put("gemma3.expert_count", EXPERTS as u32);
        writer.put("gemma3.expert_used_count", 2u32);
        writer.put("gemma3.expert_feed_forward_length", HIDDEN as u32);
    }
    let mut matrices = 0;
    let mut add = |name: String, dims: Vec<u64>, values: &[f32]| {
        // The output matrix is the embedding; the router stays as it is.
        let ty = if dims.len() == 1 || name.contains("gate_inp") {
            QuantType::F32
        } else {
            matrices += 1;
            types[matrices % types.len()]
        };
        writer.tensor(name, ty, &dims, quantize(ty, values).unwrap());
    };
    for tensor in file.tensors() {
        let values: Vec<f32> =
            file.data(tensor).as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let (name, dims) = (tensor.name().to_owned(), tensor.dims().to_vec());
        if !experts || !name.contains("ffn_") || name.contains("norm") {
            add(name, dims, &values);
            continue;
        }
        let each = (64 * HIDDEN) as usize;
        let values: Vec<f32> = values.iter().copied().cycle().skip(7).take(each * EXPERTS as usize).collect();
        let dims = if name.contains("down") { vec![HIDDEN, 64, EXPERTS] } else { vec![64, HIDDEN, EXPERTS] };
        if name.contains("down") {
            add(name.replace("down", "gate_inp"), vec![64, EXPERTS], &values[each..each + 64 * EXPERTS as usize]);
        }
        add(name.replace(".weight", "_exps.weight"), dims, &values);
    }
    Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap()
}

fn config(act: ActType) -> RuntimeConfig {
    let mut config = RuntimeConfig::default();
    config.act = act;
    config.strict = true;
    config
}

/// Logits of each position of a prompt, and of some greedy steps, with the tokens picked.
fn trace(file: Gguf, config: RuntimeConfig, ubatch: usize) -> (Vec<Vec<f32>>, Vec<u32>) {
    let runtime = Arc::new(Runtime::host(config).unwrap());
    let model = Arc::new(models::load(Arc::new(file), &runtime).unwrap());
    let vocabulary = model.vocabulary;
    let mut settings = SessionConfig::default();
    (settings.context, settings.ubatch, settings.logit_rows) = (Some(64), ubatch, 5);
    let mut session = Session::new(runtime, model, settings).unwrap();
    session.set_sampling(&Sampling::greedy(), &[]).unwrap();
    let prompt: Vec<u32> = (0..40).map(|index| 5 + index * 37 % 500).collect();
    let mut rows = Vec::new();
    session
        .feed(&prompt, |session, _, count| {
            for first in (0..count).step_by(session.logit_rows()) {
                let logits = session.logits(first, session.logit_rows().min(count - first))?;
                rows.extend(logits.chunks(vocabulary).map(<[f32]>::to_vec));
            }
            Ok(())
        })
        .unwrap();
    let mut tokens = vec![session.pick().unwrap()];
    for _ in 0..8 {
        tokens.push(session.decode().unwrap());
        rows.push(session.last_logits().unwrap());
    }
    (rows, tokens)
}

/// Mean square of the difference, by that of `b`.
fn error(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    let pairs = || a.iter().flatten().zip(b.iter().flatten()).map(|(&a, &b)| (f64::from(a), f64::from(b)));
    pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>() / pairs().map(|(_, b)| b * b).sum::<f64>()
}

/// The kernels of a decode step, and how many of them write codes.
fn kernels(file: Gguf, act: ActType) -> (Vec<&'static str>, usize) {
    let runtime = Runtime::host(config(act)).unwrap();
    let model = models::load(Arc::new(file), &runtime).unwrap();
    let cache = KvCache::new(&runtime, &model.blocks, 8, 1, (KvType::F16, KvType::F16)).unwrap();
    let found = RefCell::new((Vec::new(), 0));
    let key = StepKey { session: 0, what: "plan", shape: [0; 3] };
    let planned = runtime.step(key, &[], &[], |step| {
        let (ids, positions) =
            (step.scratch("ids", QuantType::I32, &[1])?, step.scratch("positions", QuantType::I32, &[1])?);
        let (out, logits) = (step.floats("out", &[1, model.width])?, step.floats("logits", &[1, model.vocabulary])?);
        model.forward(step, &ids, &positions, &cache, &out, None)?;
        model.head(step, &out, &logits)?;
        let ops = step.plan().ops();
        let codes = ops.iter().filter(|op| op.writes().iter().any(|view| view.ty() == QuantType::I8));
        *found.borrow_mut() = (ops.iter().map(|op| op.name()).collect(), codes.count());
        // Looked at, not run.
        Err(Error::ContextFull { tokens: 0, context: 0 })
    });
    planned.unwrap_err();
    found.into_inner()
}

fn count(names: &[&str], name: &str) -> usize {
    names.iter().filter(|other| **other == name).count()
}

#[test]
fn an_input_is_quantised_once_for_all_its_products_and_only_for_weights_in_blocks() {
    let blocks = 7;
    for (experts, products, expert_products) in [(false, 7, 0), (true, 5, 3)] {
        let (names, codes) = kernels(model(&[QuantType::Q8_0], experts), ActType::Q8);
        assert_eq!(count(&names, "matmul"), blocks * products + 1, "{names:?}");
        assert_eq!(count(&names, "expert_matmul"), blocks * expert_products, "{names:?}");
        // q, k and v share one; the mixed heads; gate and up share one; down; and the output matrix.
        assert_eq!(codes, blocks * 4 + 1, "{names:?}");
        // Norms, gates and attention write their own.
        assert_eq!(count(&names, "quantize"), 1, "{names:?}");
        let (floats, codes) = kernels(model(&[QuantType::Q8_0], experts), ActType::F32);
        assert_eq!(codes, 0, "{floats:?}");
        assert_eq!(floats.len() + 1, names.len());
        let (of_floats, codes) = kernels(model(&[QuantType::F16], experts), ActType::Q8);
        assert_eq!(codes, 0, "weights of floats take floats: {of_floats:?}");
    }
}

#[test]
fn logits_are_near_those_of_floats() {
    for experts in [false, true] {
        // Blocks and floats side by side: a product takes what its own weight wants.
        for types in [&[QuantType::Q8_0][..], &[QuantType::Q5_1, QuantType::F16, QuantType::Q8_0]] {
            let (floats, _) = trace(model(types, experts), config(ActType::F32), 64);
            let (integers, _) = trace(model(types, experts), config(ActType::Q8), 64);
            let prompt = |rows: &[Vec<f32>]| rows[..40].to_vec();
            let found = error(&prompt(&integers), &prompt(&floats));
            assert!(found > 0.0, "{types:?}, experts {experts}: --act did nothing");
            // Where two experts are about as good, a little decides between them.
            let most = if experts { 3e-2 } else { 2e-3 };
            assert!(found < most, "{types:?}, experts {experts}: {found:e}");
        }
        let (floats, _) = trace(model(&[QuantType::F32], experts), config(ActType::F32), 64);
        let (same, _) = trace(model(&[QuantType::F32], experts), config(ActType::Q8), 64);
        assert!(floats == same, "weights of floats take floats");
    }
}

#[test]
fn graphs_pools_and_limits_do_not_change_a_bit_of_quantised_runs() {
    for experts in [false, true] {
        for ubatch in [64, 7, 1] {
            let mut eager = config(ActType::Q8);
            eager.graphs = false;
            let plain = trace(model(&[QuantType::Q8_0, QuantType::Q4_1], experts), eager, ubatch);
            for mode in [PoolMode::Vmm, PoolMode::Slab] {
                for limit in [None, Some(24 << 20)] {
                    let mut config = config(ActType::Q8);
                    config.pool = PoolConfig::new(mode);
                    config.pool.limit_bytes = limit;
                    let other = trace(model(&[QuantType::Q8_0, QuantType::Q4_1], experts), config, ubatch);
                    assert!(other == plain, "experts {experts}, {mode}, limit {limit:?}, steps of {ubatch}");
                }
            }
        }
    }
}
