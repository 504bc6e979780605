//! A cache that grows under its graph, as keys and values do while a text gets longer.

use evergraph_graphcache::{CacheError, GraphKey, Outcome, Ran, Request};
use evergraph_pool::driver::Args;
use evergraph_pool::{DeviceSlice, GrowableSlice, PoolMode, Purpose, ScratchPolicy, Tracked, Use};

use crate::rig::{BOTH, CHUNK, MIB, Rig};

/// Words in a chunk.
const WORDS: usize = CHUNK / 4;

struct Text {
    key: GraphKey,
    seq: GrowableSlice<u32>,
    position: DeviceSlice<u32>,
    sum: DeviceSlice<u32>,
}

impl Text {
    fn new(rig: &Rig) -> Self {
        let seq = rig.pool.alloc_growable(1, 16 * WORDS, Purpose::State, &rig.stream).unwrap();
        Self { key: GraphKey::new("append"), seq, position: rig.slice(&[0]), sum: rig.slice(&[0]) }
    }

    /// Appends at `position`, whatever has grown; says that it touches `touched` words.
    fn append_touching(&self, rig: &Rig, position: u32, touched: usize) -> Result<Outcome, CacheError> {
        rig.stream.upload(&[position], &self.position).unwrap();
        let touches = [self.seq.touch(touched)];
        let request = Request::new(&self.key, &rig.pool, &rig.stream).policy(ScratchPolicy::Track).touches(&touches);
        rig.cache.run(&request, |scope| {
            scope.declare(&self.seq, Use::State)?;
            scope.declare(&self.position, Use::Input)?;
            scope.declare(&self.sum, Use::State)?;
            scope.keep(rig.module.clone());
            let (seq, position, sum) = (self.seq.ptr(), self.position.ptr(), self.sum.ptr());
            rig.launch(scope.stream(), "append", Args::new().ptr(seq).ptr(position).ptr(sum))
        })
    }

    fn append(&mut self, rig: &Rig, position: u32) -> Outcome {
        self.seq.grow_to(position as usize + 1).unwrap();
        let outcome = self.append_touching(rig, position, position as usize + 1).unwrap();
        assert_eq!(rig.read(&self.sum), [(0..=position).map(|p| p.wrapping_mul(3)).fold(0, u32::wrapping_add)]);
        outcome
    }
}

#[test]
fn the_same_graph_serves_every_length_and_memory_follows() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let mut text = Text::new(&rig);
        let ran: Vec<Ran> = (0..4 * WORDS as u32 + 3).map(|position| text.append(&rig, position).ran).collect();
        assert_eq!(ran[..4], [Ran::WarmUp, Ran::WarmUp, Ran::Captured, Ran::Replayed]);
        assert!(ran[3..].iter().all(|&ran| ran == Ran::Replayed), "growth costs no repair");
        let held = rig.pool.stats().requested_bytes.current as usize;
        if mode == PoolMode::Vmm {
            assert_eq!(held, (4 * WORDS + 3) * 4 + 8);
        }
        assert_eq!(rig.count().stale, 0);
        rig.pool.check().unwrap();
    }
}

#[test]
fn a_run_beyond_what_has_grown_is_refused_before_anything_is_queued() {
    let rig = Rig::new(PoolMode::Vmm);
    let mut text = Text::new(&rig);
    for position in 0..4 {
        let _ = text.append(&rig, position);
    }
    rig.faulty.set_logging(true);
    let error = text.append_touching(&rig, 4, WORDS + 1).unwrap_err();
    assert!(matches!(error, CacheError::NotGrown { touched_bytes, .. } if touched_bytes == (WORDS + 1) * 4), "{error}");
    assert!(!rig.names().contains(&"launch"));
    // Whoever says nothing is taken to touch all that was declared.
    let silent = Request::new(&text.key, &rig.pool, &rig.stream).policy(ScratchPolicy::Track);
    let error = rig.cache.run(&silent, |_| Ok::<_, CacheError>(())).unwrap_err();
    assert!(matches!(error, CacheError::NotGrown { .. }), "{error}");
    rig.faulty.set_logging(false);
    assert_eq!(text.append(&rig, 4).ran, Ran::Replayed, "and nothing else has happened");
    text.seq.shrink_to(2).unwrap();
    assert!(matches!(text.append_touching(&rig, 4, 5), Err(CacheError::NotGrown { .. })));
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn a_shrunk_cache_gives_its_pages_and_its_graph_goes_on() {
    let rig = Rig::new(PoolMode::Vmm);
    let mut text = Text::new(&rig);
    for position in 0..6 * WORDS as u32 {
        let _ = text.append(&rig, position);
    }
    // A new text in the old cache.
    text.seq.shrink_to(1).unwrap();
    assert_eq!(rig.pool.trim_to(0).unwrap(), 5 * CHUNK);
    let ran: Vec<Ran> = (0..2 * WORDS as u32).map(|position| text.append(&rig, position).ran).collect();
    assert!(ran.iter().all(|&ran| ran == Ran::Replayed), "new pages behind the length are nobody's loss");
    rig.pool.set_limit(Some(MIB));
    let blocks: Vec<_> = (0..8).map(|_| rig.pool.alloc::<u8>(CHUNK, &rig.stream).unwrap()).collect();
    assert_eq!(text.append(&rig, 2 * WORDS as u32).ran, Ran::Replayed);
    drop(blocks);
    assert_eq!(rig.driver.fault(), None);
    assert_eq!(text.seq.token(), text.seq.token());
    rig.pool.check().unwrap();
}
