//! Every driver call of a generation fails once: an error comes out, nothing stays behind, and a second try
//! works.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::sync::Arc;

use evergraph_pool::driver::host::{HostConfig, HostDevice, Live};
use evergraph_pool::driver::{DriverErrorKind, Faulty};
use evergraph_runner::engine::{PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::Gguf;
use evergraph_runner::sampling::Sampling;
use evergraph_runner::{Error, Result, models};

type Driver = Arc<Faulty<HostDevice>>;

fn config(mode: PoolMode, limit_bytes: Option<usize>) -> RuntimeConfig {
    let mut config = RuntimeConfig::default();
    config.pool = PoolConfig::new(mode);
    config.pool.limit_bytes = limit_bytes;
    config
}

/// A whole generation on a device that somebody else owns.
fn generate(driver: &Driver, config: RuntimeConfig) -> Result<Vec<u32>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gemma3.gguf");
    let runtime = Arc::new(Runtime::new(Arc::clone(driver) as _, config)?);
    let model = Arc::new(models::load(Arc::new(Gguf::open(&path)?), &runtime)?);
    let mut settings = SessionConfig::default();
    settings.context = Some(64);
    settings.ubatch = 4;
    let mut session = Session::new(runtime, model, settings)?;
    session.set_sampling(&Sampling::greedy(), &[])?;
    let prompt: Vec<u32> = (2..18).collect();
    session.feed(&prompt, |_, _, _| Ok(()))?;
    let mut tokens = vec![session.pick()?];
    for _ in 0..6 {
        tokens.push(session.decode()?);
    }
    Ok(tokens)
}

fn live(driver: &Driver) -> Live {
    driver.inner().live()
}

/// Whether the error is one that an injected failure can give.
fn expected(error: &Error) -> bool {
    let text = error.to_string();
    error.exit_status() == 1 && (text.contains("out of memory") || text.contains("injected"))
}

/// Which calls to fail of `count`: the first and last few, and some between.
fn chosen(count: u64) -> impl Iterator<Item = u64> {
    (1..=count).filter(move |nth| *nth <= 40 || count - nth < 8 || nth % 97 == 0)
}

fn fail_each(mode: PoolMode, memory_only: bool) {
    let mut driver = Faulty::new(HostDevice::new(HostConfig::default()).unwrap());
    let clean = generate(&driver, config(mode, None)).unwrap();
    assert_eq!(live(&driver), Live::default(), "a clean run leaves nothing");
    let first = driver.counts();
    generate(&driver, config(mode, None)).unwrap();
    let counts: Vec<(&str, u64)> =
        driver.counts().iter().zip(&first).map(|(now, then)| (now.0, now.1 - then.1)).collect();

    let memory =
        ["malloc", "create", "map", "set_access", "address_reserve", "host_alloc", "host_register", "instantiate"];
    // What can not be destroyed stays; nobody can help that.
    let ends = ["destroy", "unload", "free", "unmap", "release", "unregister"];
    let (mut failed, mut survived) = (0, 0);
    for (call, count) in counts {
        if memory.contains(&call) != memory_only || call == "bind" {
            continue;
        }
        for nth in chosen(count) {
            let before = driver.injected();
            if memory_only {
                driver.fail_nth_with(call, nth, DriverErrorKind::OutOfMemory);
            } else {
                driver.fail_nth(call, nth);
            }
            let result = generate(&driver, config(mode, None));
            driver.clear();
            match result {
                // Some failures are mended on the way: pages taken from elsewhere, a step run without its graph.
                Ok(tokens) => {
                    assert_eq!(tokens, clean, "{call} number {nth}");
                    survived += 1;
                }
                Err(error) => {
                    assert!(driver.injected() > before, "{call} number {nth}: {error}");
                    assert!(expected(&error), "{call} number {nth}: {error}");
                    failed += 1;
                }
            }
            if ends.iter().any(|end| call.contains(end)) {
                driver = Faulty::new(HostDevice::new(HostConfig::default()).unwrap());
                continue;
            }
            assert_eq!(live(&driver), Live::default(), "left behind after {call} number {nth} failed ({mode})");
        }
    }
    assert!(failed > 0 && survived > 0, "{failed} failed, {survived} survived");
    assert_eq!(generate(&driver, config(mode, None)).unwrap(), clean, "and it works again");
}

#[test]
fn out_of_memory_at_each_allocation_in_turn_vmm() {
    fail_each(PoolMode::Vmm, true);
}

#[test]
fn out_of_memory_at_each_allocation_in_turn_slab() {
    fail_each(PoolMode::Slab, true);
}

#[test]
fn any_other_call_failing_vmm() {
    fail_each(PoolMode::Vmm, false);
}

#[test]
fn any_other_call_failing_slab() {
    fail_each(PoolMode::Slab, false);
}

#[test]
fn a_limit_too_small_is_an_error_and_one_large_enough_is_none() {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let driver = Faulty::new(HostDevice::new(HostConfig::default()).unwrap());
        let clean = generate(&driver, config(mode, None)).unwrap();
        let mut worked = 0;
        for limit in (0..=12).map(|step| step << 20) {
            match generate(&driver, config(mode, Some(limit))) {
                Ok(tokens) => {
                    assert_eq!(tokens, clean, "limit {limit}");
                    worked += 1;
                }
                Err(error) => assert!(expected(&error), "limit {limit}: {error}"),
            }
            assert_eq!(live(&driver), Live::default(), "limit {limit}");
        }
        assert!(worked > 0 && worked < 13, "{worked}");
    }
}
