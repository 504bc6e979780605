//! Sizes, fragmentation, modes: what a pool must get right before any graph comes in.

use std::sync::{Arc, Barrier};

use evergraph_graphcache::CacheConfig;
use evergraph_pool::{Pool, PoolConfig, PoolError, PoolMode, Purpose, Stream};

use super::stage::{PAGES, Stage, count, device, is_out_of_memory, names};
use super::story::{Story, Told};
use super::{Scenario, both, vmm};

pub(super) static SCENARIOS: &[Scenario] = &[
    both("pytorch-182446-sizes-that-wrap", "sizes near the end of the number line are refused, none wraps", wrap),
    both("rmm-2312-zero-bytes", "eight threads of empty slices: no driver call, no entry", zero_bytes),
    both("rmm-496-exact-size", "a request that fits is served although a doubled growth would not fit", exact_size),
    both("rmm-2039-two-streams", "free memory of two streams is put together before the pool says no", two_streams),
    both("llama.cpp-22107-growing-requests", "each step asks for a little more: the pool does not swell", swelling),
    both("pytorch-146431-freed-by-owner", "a slice goes back to the pool that it came from", by_owner),
    vmm("torch-memory-saver-82-granularity", "odd sizes: create, map, access and unmap agree in bytes", granularity),
    vmm("llama.cpp-4680-reservation-refused", "a device that refuses large reservations gets a smaller one", back_off),
];

fn wrap(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let kept = stage.scratch(stage.page_words())?;
    let before = stage.pool.stats();
    story.say("rounding the size up to a block wraps around to zero in a careless pool: two owners, one address");
    let (refused, calls) = stage.calls(|| {
        let sizes = (0..1024).map(|i| usize::MAX - i).chain([1 << 63, (1 << 63) - 1, usize::MAX / 2 + 1]);
        sizes
            .filter(|bytes| matches!(stage.pool.alloc::<u8>(*bytes, &stage.stream), Err(PoolError::TooLarge { .. })))
            .count()
    });
    story.check("sizes refused as too large", 1027, refused);
    story.check("driver calls for them", 0, calls.len());
    let words = [usize::MAX / 4 + 1, usize::MAX / 2, usize::MAX];
    let typed =
        words.iter().filter(|n| matches!(stage.pool.alloc::<u32>(**n, &stage.stream), Err(PoolError::TooLarge { .. })));
    story.check("element counts whose bytes do not fit a number", 3, typed.count());
    story.say("one byte more than there is is an ordinary lack of memory");
    let all = PAGES * stage.page();
    story.holds("out of memory, typed", is_out_of_memory(&stage.pool.alloc::<u8>(all + 1, &stage.stream)));
    let after = stage.pool.stats();
    story.check("bytes allocated", before.allocated_bytes.current, after.allocated_bytes.current);
    story.check("slices alive", before.allocations.current, after.allocations.current);
    story.check("the pool's own books", Ok(()), stage.pool.check());
    drop(kept);
    Ok(())
}

fn zero_bytes(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let start = Arc::new(Barrier::new(8));
    story.say("eight threads make and drop 1000 empty slices each");
    let (good, calls) = stage.calls(|| {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    let (start, pool, stream) = (start.clone(), stage.pool.clone(), stage.stream.clone());
                    scope.spawn(move || {
                        start.wait();
                        (0..1000).filter(|_| pool.alloc::<u32>(0, &stream).is_ok_and(|s| s.is_empty())).count()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap_or(0)).sum::<usize>()
        })
    });
    story.check("empty slices made", 8000, good);
    story.check("driver calls", Vec::<&str>::new(), names(&calls));
    story.check("bytes reserved", 0, stage.pool.stats().reserved_bytes.current);
    story.check("slices alive", 0, stage.pool.stats().allocations.current);
    Ok(())
}

fn exact_size(story: &mut Story) -> Told {
    // A slab may start off the granule, so each is a granule larger than what is asked of it.
    let limit = 32 * story.page() + if story.vmm() { 0 } else { 3 * 512 };
    let stage = Stage::with(story, story.pages().limit(limit), CacheConfig::default())?;
    story.say("32 pages may be held, 24 are: a pool that grows by doubling would ask for 16 or 24 more");
    let first = stage.pool.alloc::<u8>(16 * stage.page(), &stage.stream)?;
    let second = stage.pool.alloc::<u8>(8 * stage.page(), &stage.stream)?;
    let third = stage.pool.alloc::<u8>(8 * stage.page(), &stage.stream);
    story.holds("8 pages more are handed out", third.is_ok());
    story.check("bytes reserved", limit as u64, stage.pool.stats().reserved_bytes.current);
    story.holds("and no byte beyond", is_out_of_memory(&stage.pool.alloc::<u8>(1, &stage.stream)));
    drop((first, second, third));
    Ok(())
}

fn two_streams(story: &mut Story) -> Told {
    let limit = 64 * story.page();
    let stage = Stage::with(story, story.pages().limit(limit), CacheConfig::default())?;
    let other = stage.other_stream()?;
    story
        .say("two streams take and drop memory in turns, sizes s and s/2, until the limit is cached in pieces of both");
    let mut held = Vec::new();
    for i in 0..20 {
        let stream = if i % 2 == 0 { &stage.stream } else { &other };
        held.push(stage.pool.alloc::<u8>(if i % 4 < 2 { 4 * stage.page() } else { 2 * stage.page() }, stream)?);
    }
    drop(held);
    story.say("one stream goes idle; the other asks for nine tenths of everything");
    let large = stage.pool.alloc::<u8>(limit / 10 * 9, &stage.stream);
    story.holds("it gets them", large.is_ok());
    story.holds("within the limit", stage.pool.stats().reserved_bytes.current <= limit as u64);
    Ok(())
}

fn swelling(story: &mut Story) -> Told {
    const STEPS: usize = 64;
    let stage = Stage::new(story)?;
    let step = 2 * stage.page();
    story.say(format!("{STEPS} steps; each asks for {step} bytes more than the one before, one slice alive at a time"));
    for k in 1..=STEPS {
        drop(stage.pool.alloc::<u8>(k * step, &stage.stream)?);
    }
    let peak = stage.pool.stats().reserved_bytes.peak;
    let largest = (STEPS * step) as u64;
    if story.vmm() {
        story.say("pages are put where they are needed: the free tail grows by what is missing");
        story.holds("at most one chunk over the largest request", peak <= largest + stage.page() as u64);
    } else {
        story.say("a slab can not grow, so outgrown slabs go back as the larger ones come");
        story.holds("at most three times the largest request", peak <= 3 * largest);
    }
    Ok(())
}

fn by_owner(story: &mut Story) -> Told {
    let stage = Stage::with(story, story.pages_of(PoolMode::Vmm), CacheConfig::default())?;
    let slabs = Pool::new(stage.dynamic(), story.pages_of(PoolMode::Slab))?;
    story.say("a pool of pages and a pool of slabs live on one device; slices of both are dropped in mixed order");
    let (result, calls) = stage.calls(|| -> Result<(), PoolError> {
        let mut mixed = Vec::new();
        for _ in 0..4 {
            mixed.push(stage.pool.alloc::<u8>(stage.page(), &stage.stream)?);
            mixed.push(slabs.alloc::<u8>(stage.page(), &stage.stream)?);
        }
        mixed.reverse();
        drop(mixed);
        stage.stream.synchronize()?;
        stage.pool.trim_to(0)?;
        slabs.trim_to(0)?;
        Ok(())
    });
    result?;
    story.check("slabs freed as often as allocated", count(&calls, "malloc"), count(&calls, "free"));
    story.check("chunks released as often as created", count(&calls, "create"), count(&calls, "release"));
    story.check("bytes left with either", (0, 0), {
        (stage.pool.stats().reserved_bytes.current, slabs.stats().reserved_bytes.current)
    });
    story.check("failed calls", 0, calls.iter().filter(|c| c.result.is_err()).count());
    Ok(())
}

fn granularity(story: &mut Story) -> Told {
    let granularities: &[usize] = if story.hardware() { &[story.page()] } else { &[64 << 10, 2 << 20] };
    for &granularity in granularities {
        let pool = PoolConfig::new(story.mode()).chunk(granularity);
        let stage = if story.hardware() {
            Stage::with(story, pool, CacheConfig::default())?
        } else {
            Stage::host(story, device().granularity(granularity).memory(64 << 20), pool, CacheConfig::default())?
        };
        story.say(format!("a device with a granularity of {granularity} bytes; sizes around it"));
        for bytes in [1, 128, 6912, granularity - 1, granularity, granularity + 1] {
            let (result, calls) = stage.calls(|| -> Result<(), PoolError> {
                drop(stage.pool.alloc::<u8>(bytes, &stage.stream)?);
                stage.stream.synchronize()?;
                stage.pool.trim_to(0)?;
                Ok(())
            });
            result?;
            let sum = |name| calls.iter().filter(|c| c.name == name).filter_map(|c| c.arg("bytes")).sum::<u64>();
            let want = bytes.next_multiple_of(granularity) as u64;
            let found = (sum("create"), sum("map"), sum("set_access"), sum("unmap"));
            story.check(
                format!("{bytes} bytes: created, mapped, made accessible, unmapped"),
                (want, want, want, want),
                found,
            );
        }
    }
    Ok(())
}

fn back_off(story: &mut Story) -> Told {
    story.host_only("how much address space the driver reserves at a time is not ours to set")?;
    let stage = Stage::host(story, device().va_limit(4 << 20), story.pages(), CacheConfig::default())?;
    story.say("the device refuses to reserve more than 4 MiB of address space at a time; a pool wants more than it has memory");
    let slices: Result<Vec<_>, _> = (0..6).map(|_| stage.pool.alloc::<u8>(1 << 20, &stage.stream)).collect();
    story.holds("six slices of 1 MiB are handed out", slices.is_ok());
    let large = stage.pool.alloc::<u8>(5 << 20, &stage.stream);
    story.holds("5 MiB in one piece are a typed error", large.is_err());
    story.check("the pool's own books", Ok(()), stage.pool.check());
    let next = Stream::new(&stage.dynamic()).and_then(|s| stage.pool.alloc_for::<u8>(1 << 20, Purpose::State, &s));
    story.holds("and the pool goes on", next.is_ok());
    Ok(())
}
