//! Graphs: a launch through the cache beside a bare one, reading a graph back, loading the kernels.

use std::hint::black_box;
use std::time::Instant;

use evergraph_graphcache::{CacheConfig, CacheError, GraphCache, GraphKey, Ran, Request};
use evergraph_kernels::Kernels;
use evergraph_pool::handshake::{EpochWriter, Launcher};
use evergraph_pool::{DeviceSlice, Pool, PoolConfig, Use};

use super::{Effort, Error, Report, Rig, Step};
use crate::samples::batch;

/// Graphs by kernels, rounds, and launches between two waits: far below what a queue holds, so that no launch waits for the
/// device.
const LAUNCHES: [(usize, usize, u32); 2] = [(8, 2000, 32), (300, 500, 4)];

struct Looped<'a> {
    rig: &'a Rig,
    cache: GraphCache,
    key: GraphKey,
    pool: Pool,
    data: DeviceSlice<u32>,
    nodes: usize,
}

impl<'a> Looped<'a> {
    /// A graph of that many kernels, captured and launched once.
    fn new(rig: &'a Rig, nodes: usize) -> Result<Self, Error> {
        let pool = Pool::new(rig.driver.clone(), PoolConfig::vmm())?;
        let data = pool.alloc_zeroed(1024, evergraph_pool::Purpose::State, &rig.stream)?;
        let cache = GraphCache::new(CacheConfig::default());
        let looped = Self { rig, cache, key: GraphKey::new("step"), pool, data, nodes };
        for _ in 0..8 {
            if looped.run()? == Ran::Replayed {
                return Ok(looped);
            }
        }
        Err("the graph was never simply launched".into())
    }

    fn request(&self) -> Request<'_> {
        Request::new(&self.key, &self.pool, &self.rig.stream)
    }

    fn run(&self) -> Result<Ran, CacheError> {
        let outcome = self.cache.run::<CacheError>(&self.request(), |scope| {
            scope.declare(&self.data, Use::State)?;
            scope.keep(self.rig.module().clone());
            let step = Step { dst: self.data.ptr(), src: self.data.ptr(), words: 256, threads: 256 };
            (0..self.nodes).try_for_each(|_| self.rig.launch(step, scope.stream()))
        });
        Ok(outcome?.ran)
    }
}

/// Host time of a launch: bare, with the handshake alone, through the cache. Blocks of each take turns, and the
/// differences are of neighbours.
///
/// # Errors
/// Those of the cache, the pool and the driver.
pub fn launches(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    for (nodes, rounds, queued) in LAUNCHES {
        let looped = Looped::new(rig, nodes)?;
        let exec = looped.cache.info(&looped.request()).ok_or("no graph")?.exec;
        let stream = rig.stream.handle();
        let writer = EpochWriter::new();
        let (epoch, proven) = (writer.published(), writer.proven());
        let mut launcher = Launcher::new();
        let mut number = 0;
        let mut samples: [Vec<f64>; 3] = Default::default();
        let rounds = effort.rounds(rounds);
        for round in 0..rounds + 10 {
            for turn in 0..3 {
                rig.settle()?;
                let which = (round + turn) % 3;
                let ns = match which {
                    0 => batch(queued, |_| rig.driver.launch(black_box(exec), stream))?,
                    1 => batch(queued, |_| {
                        number += 1;
                        let launch = || rig.driver.launch(black_box(exec), stream);
                        launcher.launch([(&*epoch, proven)], number, launch).unwrap_or(Ok(()))
                    })?,
                    _ => batch(queued, |_| match looped.run() {
                        Ok(Ran::Replayed) => Ok(()),
                        Ok(ran) => Err(format!("{ran} on an undisturbed pool").into()),
                        Err(error) => Err(Error::from(error)),
                    })?,
                };
                // The first rounds warm up.
                if round >= 10 {
                    samples[which].push(ns);
                }
            }
        }
        rig.settle()?;
        let case = format!("graph of {nodes} kernels, host time");
        let over = |which: usize| -> Vec<f64> { samples[which].iter().zip(&samples[0]).map(|(a, b)| a - b).collect() };
        report.add("launch", &case, "bare launch of the exec", "ns", &samples[0]);
        report.add("launch", &case, "with the handshake", "ns", &samples[1]);
        report.add("launch", &case, "through the cache", "ns", &samples[2]);
        report.add("launch", &case, "handshake less bare", "ns", &over(1));
        report.add("launch", &case, "cache less bare", "ns", &over(2));
    }
    Ok(())
}

/// Reading a captured graph back, and the other steps of a capture, with nothing moved: the graph is invalidated.
///
/// # Errors
/// Those of the cache, the pool and the driver.
pub fn scan(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    let looped = Looped::new(rig, 300)?;
    let first = looped.cache.step_times();
    let (mut scans, mut captures, mut updates) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..effort.rounds(300) {
        rig.settle()?;
        looped.cache.invalidate(&looped.key);
        let ran = looped.run()?;
        if ran != Ran::Updated {
            return Err(format!("{ran} instead of updated").into());
        }
        let times = looped.cache.step_times();
        let us = |time: Option<std::time::Duration>| time.map(|time| time.as_secs_f64() * 1e6);
        scans.extend(us(times.scan));
        captures.extend(us(times.capture));
        updates.extend(us(times.update));
    }
    let once: Vec<f64> = first.scan.map(|time| time.as_secs_f64() * 1e6).into_iter().collect();
    report.add("scan of 300 nodes", "the first", "evergraph", "us", &once);
    report.add("scan of 300 nodes", "later ones", "evergraph", "us", &scans);
    report.add("capture of 300 nodes", "nothing moved", "evergraph", "us", &captures);
    report.add("exec-update of 300 nodes", "nothing moved", "evergraph", "us", &updates);
    Ok(())
}

/// Loading the kernels: the first time in this process (which compiles what is not on disk), then again, from disk.
///
/// # Errors
/// Those of the driver. A device without kernels is said and left out.
pub fn load(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    let timed = || -> Result<(f64, usize), Error> {
        let start = Instant::now();
        let kernels = Kernels::load(rig.driver.clone())?;
        Ok((start.elapsed().as_secs_f64() * 1e3, kernels.compiled()))
    };
    match timed() {
        Ok((ms, compiled)) => {
            let case = format!("the first in this process, {compiled} sources compiled");
            report.add("Kernels::load", &case, "evergraph", "ms", &[ms]);
        }
        Err(error) => {
            println!("skipped: Kernels::load: {error}");
            return Ok(());
        }
    }
    let mut samples = Vec::new();
    for _ in 0..effort.rounds(30) {
        match timed()? {
            (ms, 0) => samples.push(ms),
            (_, compiled) => return Err(format!("{compiled} sources were compiled again: no disk cache").into()),
        }
    }
    report.add("Kernels::load", "later ones, from disk", "evergraph", "ms", &samples);
    Ok(())
}
