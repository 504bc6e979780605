//! Memory: an allocation and its drop, churns, reuse across streams.
//!
//! `rivals/rivals.cpp` does the same work with other allocators; sizes, seeds, batches and what is timed must stay alike.

use std::hint::black_box;

use evergraph_pool::{Pool, PoolConfig, Stream};

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

/// All of it.
///
/// # Errors
/// Those of the pool and the driver.
pub fn measure(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    pairs(rig, effort, report)?;
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
