//! Memory: an allocation and its drop, large blocks there and back, churns, reuse across streams.
//!
//! `rivals/rivals.cpp` does the same work with other allocators; sizes, seeds, batches and what is timed must stay alike.

use std::hint::black_box;
use std::time::Instant;

use evergraph_pool::{Content, Pool, PoolConfig, Purpose, Stream};

use super::{Effort, Error, Report, Rig};
use crate::churn::Churn;
use crate::samples::batch;

const WHO: &str = "evergraph";
const SIZES: [(&str, usize); 5] =
    [("512 B", 512), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("2 MiB", 2 << 20), ("64 MiB", 64 << 20)];
const CHURNS: [(usize, usize); 3] = [(100, 1 << 20), (1000, 8 << 20), (5000, 8 << 20)];
const STEPS: usize = 200_000;
/// Steps before the first that is timed.
const WORN: usize = 100_000;
const BATCH: u32 = 200;
const SHARED_BYTES: usize = 2 << 20;
const LARGE: [(&str, usize); 2] = [("252 MiB", 252 << 20), ("1 GiB", 1 << 30)];

/// All of it.
///
/// # Errors
/// Those of the pool and the driver.
pub fn measure(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    pairs(rig, effort, report)?;
    large(rig, effort, report)?;
    across(rig, effort, report)?;
    churns(rig, effort, report)
}

fn pairs(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    let pool = Pool::new(rig.driver.clone(), PoolConfig::vmm())?;
    for (name, bytes) in SIZES {
        let other = pool.alloc::<u8>(3000, &rig.stream)?;
        let pair = |_| pool.alloc::<u8>(black_box(bytes), &rig.stream).map(drop);
        batch(1000, pair)?;
        let mut samples = Vec::new();
        for _ in 0..effort.rounds(300) {
            rig.settle()?;
            samples.push(batch(1000, pair)?);
        }
        report.add("alloc + free", name, WHO, "ns", &samples);
        drop(other);
    }
    Ok(())
}

/// A large block with pages from the driver, and pages away and back under the same addresses, as a remap has it: with
/// chunks of 2 MiB alone, and with larger ones by the table.
fn large(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    let us = |start: Instant| start.elapsed().as_secs_f64() * 1e6;
    for (chunks, config) in [("2 MiB", PoolConfig::vmm().chunk_classes(&[])), ("by the table", PoolConfig::vmm())] {
        let pool = Pool::new(rig.driver.clone(), config)?;
        for ((size, bytes), purpose) in
            LARGE.into_iter().flat_map(|large| [(large, Purpose::Scratch), (large, Purpose::Weight)])
        {
            let mut samples: [Vec<f64>; 4] = Default::default();
            for _ in 0..effort.rounds(100) {
                rig.settle()?;
                let start = Instant::now();
                let slice = pool.alloc_for::<u8>(bytes, purpose, &rig.stream)?;
                samples[0].push(us(start));
                let start = Instant::now();
                pool.sleep(Content::Drop, &[purpose])?;
                samples[1].push(us(start));
                let start = Instant::now();
                pool.wake(&[purpose])?;
                samples[2].push(us(start));
                drop(slice);
                let start = Instant::now();
                pool.trim_to(0)?;
                samples[3].push(us(start));
            }
            let case = format!("{size}, {purpose:?}, chunks: {chunks}");
            for (what, samples) in
                ["alloc with new pages", "sleep, bytes dropped", "wake", "give back"].iter().zip(&samples)
            {
                report.add(what, &case, WHO, "µs", samples);
            }
        }
    }
    Ok(())
}

/// A block that one stream used goes to the other, again and again: the limit leaves room for one.
fn across(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    let other = Stream::new(&rig.driver)?;
    let streams = [&rig.stream, &other];
    for (case, count) in [("one stream", 1), ("two streams in turn", 2)] {
        let pool = Pool::new(rig.driver.clone(), PoolConfig::vmm().limit(SHARED_BYTES).chunk(SHARED_BYTES))?;
        let turn = |turn: u32| -> Result<(), Error> {
            let stream = streams[turn as usize % count];
            let slice = pool.alloc::<u8>(SHARED_BYTES, stream)?;
            rig.driver.memset_d8(slice.ptr(), turn as u8, 8, stream.handle())?;
            Ok(())
        };
        batch(64, turn)?;
        let before = pool.counters().cross_stream;
        let mut samples = Vec::new();
        let rounds = effort.rounds(300);
        for _ in 0..rounds {
            rig.settle()?;
            other.synchronize()?;
            samples.push(batch(64, turn)?);
        }
        report.add("alloc + memset + free, 2 MiB", case, WHO, "ns", &samples);
        // A hand-out that finds the other stream's work done needs no event.
        let crossed = (pool.counters().cross_stream - before) as f64 / (rounds as f64 * 64.0);
        report.add("hand-outs ordered by an event", case, WHO, "ratio", &[crossed]);
        other.synchronize()?;
        rig.settle()?;
    }
    Ok(())
}

fn churns(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    for (live, most) in CHURNS {
        if effort == Effort::Quick && live > 100 {
            continue;
        }
        let (steps, worn) = if effort == Effort::Quick { (2000, 1000) } else { (STEPS, WORN) };
        let pool = Pool::new(rig.driver.clone(), PoolConfig::vmm())?;
        let mut churn = Churn::on(pool, rig.stream.clone(), live, most, steps, 1)?;
        (0..worn).try_for_each(|_| churn.step())?;
        let mut samples = Vec::new();
        for _ in 0..(steps - worn) / BATCH as usize {
            rig.settle()?;
            samples.push(batch(BATCH, |_| churn.step())?);
        }
        let case = format!("{live} live, ..{} MiB", most >> 20);
        report.add("churn step", &case, WHO, "ns", &samples);
        let (reserved, requested) = churn.peaks();
        report.add("reserved / requested", &case, WHO, "ratio", &[reserved as f64 / requested as f64]);
    }
    Ok(())
}
