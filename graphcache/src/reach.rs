//! How far a graph reaches into memory that grows.
//!
//! A graph on a growable slice has the slice's whole range in it, most of which may have no memory yet. Each run says how
//! far it goes this time, and is refused before anything is queued where that is further than the slice has grown.
//! The owner can not shrink the slice meanwhile: a request borrows it.

use evergraph_pool::{AllocationId, Extent, Touch, mutant};
use smallvec::SmallVec;

use crate::CacheError;

/// One growable slice of a graph.
#[derive(Clone, Debug)]
pub(crate) struct Reach {
    pub(crate) allocation: AllocationId,
    /// Where what was declared of it ends, bytes.
    pub(crate) end_bytes: usize,
    pub(crate) extent: Extent,
}

/// The growable slices of a graph, each once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reaches(SmallVec<[Reach; 4]>);

impl Reaches {
    /// Adds a slice, or widens what was declared of it.
    pub(crate) fn add(&mut self, reach: Reach) {
        match self.0.iter_mut().find(|known| known.allocation == reach.allocation) {
            Some(known) => known.end_bytes = known.end_bytes.max(reach.end_bytes),
            None => self.0.push(reach),
        }
    }

    /// What a run that touches this much would find missing.
    #[inline]
    pub(crate) fn beyond(&self, touches: &[Touch]) -> Option<CacheError> {
        self.0.iter().enumerate().find_map(|(index, reach)| reach.beyond(index, touches))
    }
}

impl Reach {
    /// `index`: where its touch is likely to be, since both lists follow the order of declaration.
    #[inline]
    pub(crate) fn beyond(&self, index: usize, touches: &[Touch]) -> Option<CacheError> {
        let mine = |touch: &&Touch| touch.allocation == self.allocation;
        let touch = touches.get(index).filter(mine).or_else(|| touches.iter().find(mine));
        let touched_bytes = touch.map_or(self.end_bytes, |touch| touch.bytes);
        let there_bytes = self.extent.bytes();
        let missing = touched_bytes > there_bytes && !mutant::is("cache.reach-unchecked");
        missing.then_some(CacheError::NotGrown { allocation: self.allocation, touched_bytes, there_bytes })
    }
}
