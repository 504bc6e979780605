//! The key and value cache grows with the text, under the graph that decodes it.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::sync::Arc;

use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_pool::{PoolConfig, PoolMode};
use evergraph_runner::Error;
use evergraph_runner::engine::{KvType, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::Gguf;
use evergraph_runner::models;
use evergraph_runner::sampling::Sampling;

const CHUNK: usize = 16 << 10;

/// A sequence of at most `context` tokens.
fn session(pool: PoolConfig, graphs: bool, context: usize) -> Session {
    let driver = HostDevice::new(HostConfig::default().granularity(CHUNK)).unwrap();
    let mut config = RuntimeConfig::default();
    (config.pool, config.graphs, config.strict) = (pool, graphs, true);
    let runtime = Arc::new(Runtime::new(driver, config).unwrap());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gemma3.gguf");
    let model = Arc::new(models::load(Arc::new(Gguf::open(&path).unwrap()), &runtime).unwrap());
    let mut settings = SessionConfig::default();
    (settings.context, settings.ubatch, settings.kv) = (Some(context), 7, (KvType::F32, KvType::F32));
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
