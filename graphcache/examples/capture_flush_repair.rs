//! Captures a graph, takes its scratch away, and watches how it is repaired.
//!
//! `cargo run -p evergraph-graphcache --example capture_flush_repair [-- --device host|cuda]`

use evergraph_graphcache::{CacheConfig, CacheError, GraphCache, GraphKey, Request};
use evergraph_pool::driver::host::HostConfig;
use evergraph_pool::driver::{DeviceChoice, DynDriver, open};
use evergraph_pool::{Pool, PoolConfig, PoolMode, Purpose, ScratchPolicy, Stream, Use};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let driver: DynDriver = open(DeviceChoice::asked()?, HostConfig::default())?;
        println!("-- {mode} on {}", driver.info().name);
        let pool = Pool::new(driver.clone(), PoolConfig::new(mode))?;
        let stream = Stream::new(&driver)?;
        let cache = GraphCache::new(CacheConfig::default());
        let input = pool.upload(&[0u32; 4], Purpose::State, &stream)?;
        let output = pool.upload(&[0u32; 4], Purpose::State, &stream)?;
        let key = GraphKey::new("through a temporary of 16 MiB");
        let run = |turn: u32| -> Result<(), Box<dyn std::error::Error>> {
            stream.upload(&[turn; 4], &input)?;
            let request = Request::new(&key, &pool, &stream).policy(ScratchPolicy::Track);
            let outcome = cache.run(&request, |scope| -> Result<(), CacheError> {
                scope.declare(&input, Use::Input)?;
                scope.declare(&output, Use::State)?;
                let temporary = scope.alloc::<u32>(4 << 20)?;
                scope.stream().copy(&input, &temporary)?;
                let head = scope.alloc::<u32>(4)?;
                driver.memcpy_dtod(head.ptr(), temporary.ptr(), 16, stream.handle())?;
                Ok(scope.stream().copy(&head, &output)?)
            })?;
            let cause = outcome.cause.map_or(String::new(), |cause| format!(": {cause}"));
            println!("run {turn}: {}{cause}", outcome.ran);
            assert_eq!(stream.download(&output)?, [turn; 4]);
            Ok(())
        };
        (1..=4).try_for_each(run)?;
        println!("flush: {} KiB went back", pool.trim_to(0)? >> 10);
        (5..=6).try_for_each(run)?;
    }
    Ok(())
}
