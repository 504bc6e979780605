//! The key and value cache grows with the text, under the graph that decodes it.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::sync::Arc;

use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_pool::{PoolConfig, PoolError, PoolMode};
use evergraph_runner::Error;
use evergraph_runner::engine::{KvType, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::Gguf;
use evergraph_runner::models;
use evergraph_runner::sampling::Sampling;

const CHUNK: usize = 16 << 10;

/// A sequence of at most `context` tokens.
fn session(pool: PoolConfig, graphs: bool, context: usize) -> Session {
    session_with(pool, graphs, context, 7, true)
}

fn session_with(pool: PoolConfig, graphs: bool, context: usize, ubatch: usize, flash: bool) -> Session {
    session_of("gemma3.gguf", pool, graphs, [context, ubatch], flash)
}

fn session_of(model: &str, pool: PoolConfig, graphs: bool, [context, ubatch]: [usize; 2], flash: bool) -> Session {
    let driver = HostDevice::new(HostConfig::default().granularity(CHUNK)).unwrap();
    let mut config = RuntimeConfig::default();
    (config.pool, config.graphs, config.strict) = (pool, graphs, true);
    let runtime = Arc::new(Runtime::new(driver, config).unwrap());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(model);
    let model = Arc::new(models::load(Arc::new(Gguf::open(&path).unwrap()), &runtime).unwrap());
    let mut settings = SessionConfig::default();
    (settings.context, settings.ubatch, settings.kv) = (Some(context), ubatch, (KvType::F32, KvType::F32));
    settings.flash_attention = flash;
    let mut session = Session::new(runtime, model, settings).unwrap();
    session.set_sampling(&Sampling::greedy(), &[]).unwrap();
    session
}

/// Bytes of the caches after each token.
fn write(session: &mut Session, tokens: usize) -> Result<(Vec<u32>, Vec<usize>), Error> {
    let prompt: Vec<u32> = (0..20).map(|index| 3 + index * 37 % 500).collect();
    session.feed(&prompt, |_, _, _| Ok(()))?;
    let (mut picked, mut bytes) = (vec![session.pick()?], Vec::new());
    for _ in 0..tokens {
        picked.push(session.decode()?);
        bytes.push(session.cache_bytes());
    }
    Ok((picked, bytes))
}

#[test]
fn a_cache_that_grew_across_chunks_gives_the_same_bits() {
    let fixed = write(&mut session(PoolConfig::slab(), false, 2000), 150).unwrap().0;
    for graphs in [true, false] {
        let mut growing = session(PoolConfig::vmm().chunk(CHUNK), graphs, 2000);
        let (picked, bytes) = write(&mut growing, 150).unwrap();
        assert!(picked == fixed, "graphs {graphs}");
        let logits = growing.last_logits().unwrap();
        assert!(bytes.windows(2).all(|pair| pair[0] < pair[1]), "memory follows the text");
        assert!(bytes[149] - bytes[0] > 2 * CHUNK, "across a few chunks: {bytes:?}");
        let counters = growing.runtime().graph_counters();
        assert_eq!(counters.stale, 0, "growth costs no repair: {counters:?}");
        // More texts in the same cache, which is still there. Once every graph is captured nothing grows any more.
        let growths = [0; 3].map(|_| {
            growing.clear().unwrap();
            assert!(write(&mut growing, 150).unwrap().0 == fixed, "graphs {graphs}");
            assert_eq!(growing.last_logits().unwrap(), logits);
            growing.runtime().pool().counters().growths
        });
        assert_eq!(growths[1], growths[2]);
        growing.runtime().pool().check().unwrap();
    }
}

#[test]
fn so_does_one_of_each_shape_of_gemma_4_and_one_of_compressed_keys() {
    for model in ["gemma4-dense.gguf", "gemma4-moe-q.gguf", "gemma4-e.gguf", "deepseek-v4.gguf"] {
        let new = |pool: PoolConfig, graphs| session_of(model, pool, graphs, [2000, 7], true);
        let fixed = write(&mut new(PoolConfig::slab(), false), 150).unwrap().0;
        let mut growing = new(PoolConfig::vmm().chunk(CHUNK), true);
        let (picked, bytes) = write(&mut growing, 150).unwrap();
        assert!(picked == fixed, "{model}");
        assert!(bytes[149] - bytes[0] > 2 * CHUNK, "{model}: across a few chunks: {bytes:?}");
        assert_eq!(growing.runtime().graph_counters().stale, 0, "{model}");
    }
}

#[test]
fn a_long_context_that_is_not_used_takes_no_memory() {
    let reserved = |context| {
        let mut session = session(PoolConfig::vmm().chunk(CHUNK), true, context);
        write(&mut session, 10).unwrap();
        session.runtime().pool().stats().reserved_bytes.peak
    };
    let (short, long) = (reserved(1000), reserved(100_000));
    // The ring of recent tokens is all that is as long as the context.
    assert!(long < short + 100_000 * 4 + CHUNK as u64, "{short} bytes for 1000 tokens, {long} for 100 000");
}

#[test]
fn a_growth_that_fails_is_an_error_and_the_text_goes_on_with_more_memory() {
    let fixed = write(&mut session(PoolConfig::slab(), false, 2000), 150).unwrap().0;
    let mut growing = session(PoolConfig::vmm().chunk(CHUNK), true, 2000);
    let mut picked = write(&mut growing, 30).unwrap().0;
    let pool = growing.runtime().pool().clone();
    let most = pool.stats().reserved_bytes.current as usize;
    pool.set_limit(Some(most));
    let error = loop {
        match growing.decode() {
            Ok(token) => picked.push(token),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("memory"), "{error}");
    assert!(growing.decode().is_err(), "and again, with nothing lost");
    pool.set_limit(None);
    while picked.len() < fixed.len() {
        picked.push(growing.decode().unwrap());
    }
    assert!(picked == fixed);
    assert_eq!(pool.mode(), PoolMode::Vmm);
    pool.check().unwrap();
}

#[test]
fn scores_that_are_written_out_make_scratch_grow_with_the_text() {
    // Tokens of a step.
    const STEP: u64 = 64;
    let tokens: Vec<u32> = (0..640).map(|index| 3 + index * 37 % 500).collect();
    let peaks = |flash: bool| {
        let mut session = session_with(PoolConfig::slab(), false, 1000, STEP as usize, flash);
        let mut peaks = Vec::new();
        for step in tokens.chunks(STEP as usize) {
            let pool = session.runtime().pool().clone();
            pool.reset_peak_stats();
            session.feed(step, |_, _, _| Ok(())).unwrap();
            peaks.push(pool.stats().allocated_bytes.peak);
        }
        let heads = session.model().blocks[0].attention.heads as u64;
        (peaks, 256 * STEP * heads * 4)
    };
    let (flat, _) = peaks(true);
    assert!(flat.iter().all(|peak| *peak == flat[0]), "{flat:?}");
    let (grown, lot) = peaks(false);
    // Steps of 64 tokens end in the first 256 tokens, the second, and the third.
    for (number, peak) in grown.iter().enumerate() {
        assert_eq!(peak - grown[0], number as u64 / 4 * lot, "step {number}: {grown:?}");
    }
    assert!(grown[0] >= flat[0] + lot, "{grown:?}, {flat:?}");
}

#[test]
fn a_step_with_its_scores_written_out_is_a_graph_for_each_256_tokens() {
    let plain = write(&mut session_with(PoolConfig::slab(), false, 2000, 7, false), 500).unwrap().0;
    for pool in [PoolConfig::vmm().chunk(CHUNK), PoolConfig::slab()] {
        let mut graphs = session_with(pool, true, 2000, 7, false);
        for round in 0..2 {
            graphs.clear().unwrap();
            assert!(write(&mut graphs, 500).unwrap().0 == plain, "round {round}");
            let counters = graphs.runtime().graph_counters();
            // The 20th token to the 519th: three lengths. The prompt's steps of 7 and 6 tokens and the first choice run but a
            // few times.
            assert_eq!(counters.captures - u64::from(round > 0), 3, "round {round}: {counters:?}");
            assert_eq!(counters.stale, 0, "{counters:?}");
        }
        graphs.runtime().pool().check().unwrap();
    }
}

#[test]
fn with_scores_written_out_a_limit_near_the_edge_is_met_or_told() {
    let plain = write(&mut session_with(PoolConfig::slab(), false, 2000, 7, false), 300).unwrap().0;
    for config in [PoolConfig::vmm().chunk(CHUNK), PoolConfig::slab()] {
        let roomy = session_with(config.clone(), true, 2000, 7, false);
        let pool = roomy.runtime().pool().clone();
        let (mut done, mut short) = (0, 0);
        let mut session = roomy;
        let start = pool.stats().reserved_bytes.current as usize;
        assert!(write(&mut session, 300).unwrap().0 == plain);
        let most = pool.stats().reserved_bytes.peak as usize;
        for part in 0..8 {
            let limit = start + (most - start) * part / 8;
            let mut session = session_with(config.clone(), true, 2000, 7, false);
            session.runtime().pool().set_limit(Some(limit));
            match write(&mut session, 300) {
                Ok((tokens, _)) => {
                    done += 1;
                    assert!(tokens == plain, "{limit} of {most} bytes");
                }
                Err(error) => {
                    short += 1;
                    let told = matches!(&error, Error::Pool { source: PoolError::OutOfMemory(_) });
                    assert!(told, "{limit} of {most} bytes: {error}");
                }
            }
            session.runtime().pool().check().unwrap();
        }
        assert!(done > 0 && short > 0, "{done} done, {short} short of memory, {start} to {most} bytes");
    }
}

#[test]
fn a_prompt_goes_in_smaller_steps_where_memory_is_short_and_the_text_is_the_same() {
    let prompt: Vec<u32> = (0..300).map(|index| 3 + index * 37 % 500).collect();
    let text = |session: &mut Session| {
        let (mut next, mut picked) = (0, Vec::new());
        session.feed(&prompt, |_, first, count| {
            assert_eq!(first, next, "steps follow each other");
            next += count;
            Ok(())
        })?;
        assert_eq!(next, prompt.len());
        picked.push(session.pick()?);
        for _ in 0..4 {
            picked.push(session.decode()?);
        }
        Ok::<_, Error>(picked)
    };
    for config in [PoolConfig::vmm().chunk(CHUNK), PoolConfig::slab()] {
        let new = || session_with(config.clone(), true, 400, 256, false);
        let mut free = new();
        let pool = free.runtime().pool().clone();
        let start = pool.stats().reserved_bytes.current as usize;
        let wanted = text(&mut free).unwrap();
        assert_eq!(free.step_tokens(), 256);
        let most = pool.stats().reserved_bytes.peak as usize;
        let (mut whole, mut fewer_scores, mut smaller) = (0, 0, Vec::new());
        for part in 1..=16 {
            let mut session = new();
            session.runtime().pool().set_limit(Some(start + (most - start) * part / 16));
            match text(&mut session) {
                Ok(picked) => {
                    assert_eq!(picked, wanted, "{part} of 16 parts of the memory");
                    if session.step_tokens() < 256 {
                        smaller.push(session.step_tokens())
                    } else if session.scored_at_once() < 256 {
                        fewer_scores += 1
                    } else {
                        whole += 1
                    }
                    // The next text may have more memory.
                    session.clear().unwrap();
                    assert_eq!((session.step_tokens(), session.scored_at_once()), (256, 256));
                }
                Err(error) => assert!(error.is_out_of_memory(), "{error}"),
            }
            session.runtime().pool().check().unwrap();
        }
        assert!(
            whole > 0 && fewer_scores > 0 && smaller.len() > 1,
            "whole {whole}, fewer scores {fewer_scores}, in smaller steps {smaller:?}"
        );
        assert!(smaller.is_sorted() && smaller[0] < 128, "less memory, smaller steps: {smaller:?}");
    }
}
