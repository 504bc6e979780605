//! Wall clock over a driver that does nothing: an allocation and its drop, churns, the launch check.
//!
//! `cargo bench -p evergraph-benches --bench pool`. What the churns reserve is printed first.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use evergraph_benches::churn::{Churn, null_pool};
use evergraph_graphcache::{CacheConfig, CacheError, GraphCache, GraphKey, Ran, Request};
use evergraph_pool::Use;
use evergraph_pool::handshake::{EpochWriter, Launcher};

const CHURNS: [(usize, usize); 3] = [(100, 1 << 20), (1000, 8 << 20), (5000, 8 << 20)];
const STEPS: usize = 200_000;

fn pair(c: &mut Criterion) {
    let mut group = c.benchmark_group("pair");
    for (name, bytes) in [("512 B", 512), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("64 MiB", 64 << 20)] {
        let (pool, stream) = null_pool();
        group.bench_function(name, |b| {
            b.iter(|| drop(black_box(pool.alloc::<u8>(black_box(bytes), &stream).expect("memory without end"))));
        });
    }
    group.finish();
}

fn churn(c: &mut Criterion) {
    println!("reserved / requested at peak, after the fill and {STEPS} steps, six seeds:");
    for (live, most) in CHURNS {
        let ratios: Vec<String> = (1..=6)
            .map(|seed| {
                let mut churn = Churn::new(live, most, STEPS, seed).expect("memory without end");
                (0..STEPS).try_for_each(|_| churn.step()).expect("memory without end");
                let (reserved, requested) = churn.peaks();
                format!("{:.3}", reserved as f64 / requested as f64)
            })
            .collect();
        println!("  {live:5} live of 512 B to {} MiB: {}", most >> 20, ratios.join(" "));
    }
    let mut group = c.benchmark_group("churn");
    for (live, most) in CHURNS {
        let mut churn = Churn::new(live, most, STEPS, 1).expect("memory without end");
        (0..STEPS).try_for_each(|_| churn.step()).expect("memory without end");
        group.bench_function(format!("{live} live"), |b| b.iter(|| churn.step().expect("memory without end")));
    }
    group.finish();
}

fn launch_check(c: &mut Criterion) {
    let mut group = c.benchmark_group("launch check");
    let writer = EpochWriter::new();
    let (epoch, proven) = (writer.published(), writer.proven());
    let mut launcher = Launcher::new();
    let mut number = 0;
    group.bench_function("handshake", |b| {
        b.iter(|| {
            number += 1;
            launcher.launch([(&*epoch, proven)], number, || black_box(number)).expect("nobody disturbs")
        });
    });

    let (pool, stream) = null_pool();
    let cache = GraphCache::new(CacheConfig::default());
    let input = pool.alloc::<f32>(1024, &stream).expect("memory without end");
    let key = GraphKey::new("step");
    let request = Request::new(&key, &pool, &stream);
    let run = || {
        cache
            .run::<CacheError>(&request, |scope| {
                let _scratch = scope.alloc::<f32>(1 << 16)?;
                scope.declare(&input, Use::Input)
            })
            .expect("nothing can fail")
    };
    while run().ran != Ran::Replayed {}
    group.bench_function("replay through the cache", |b| b.iter(|| black_box(run())));
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(100).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    targets = pair, churn, launch_check
}
criterion_main!(benches);
