//! Waking: pages under the same addresses, and the bytes that were kept.

use crate::core::runs;
use crate::driver::DriverError;
use crate::growth::{Short, short};
use crate::kept::Saved;
use crate::shared::{Cold, Notices, Shared};
use crate::sleep::{Chunks, chunks_in, heaps};
use crate::state::{Backing, State};
use crate::{PoolError, Purpose, mutant};

impl Shared {
    pub(crate) fn wake(&self, purposes: &[Purpose]) -> Result<usize, PoolError> {
        self.may_call_driver("a wake")?;
        let mut notices = Notices::default();
        let result = {
            let cold = self.cold();
            self.retry_leftovers(&cold, &mut notices);
            let mut bytes = 0;
            let result = heaps(purposes).into_iter().try_for_each(|heap| {
                bytes += self.wake_heap(&cold, heap, &mut notices)?;
                Ok(())
            });
            self.note_awake();
            self.retry_leftovers(&cold, &mut notices);
            result.map(|()| bytes as usize)
        };
        notices.deliver();
        result
    }

    fn wake_heap(&self, cold: &Cold<'_>, heap: usize, notices: &mut Notices) -> Result<u64, PoolError> {
        if self.lock().sleeping[heap].is_none() {
            return Ok(0);
        }
        self.driver.bind()?;
        let mapped = self.map_missing(cold, heap, notices)?;
        let saved = self.lock().sleeping[heap].as_mut().and_then(|s| s.saved.take());
        if let Err(error) = saved.as_ref().map_or(Ok(()), |saved| self.restore(saved)) {
            // Nobody but the copies has seen these pages, and they are over.
            let _ = self.unmap_all(heap, &mapped);
            let mut state = self.lock();
            let mapped_bytes = state.mapped_bytes(heap, self.chunk_bytes);
            state.tie_heap(heap);
            if let Some(sleeping) = &mut state.sleeping[heap] {
                sleeping.mapped_bytes = mapped_bytes;
                sleeping.saved = saved;
            }
            state.note_reserved();
            return Err(error);
        }
        let bytes = chunks_in(&mapped) * self.chunk_bytes;
        // Much plain memory is better not freed under the lock.
        let leftover = saved.and_then(Saved::into_leftover);
        let mut state = self.lock();
        state.tie_heap(heap);
        state.rouse(heap);
        state.leftovers.extend(leftover);
        state.counters.wakes += 1;
        state.note_reserved();
        tracing::info!(pool = self.id.0, bytes, purpose = ?Purpose::ALL[heap], "awake");
        Ok(bytes)
    }

    /// Pages under every chunk in which somebody has a byte, all or none, with room made where there is none.
    fn map_missing(&self, cold: &Cold<'_>, heap: usize, notices: &mut Notices) -> Result<Chunks, PoolError> {
        loop {
            let missing = {
                let mut state = self.lock();
                // Chunks that would not be unmapped stay in the books, free or not.
                if state.sleeping[heap].as_ref().is_some_and(|s| s.mapped_bytes == 0) {
                    state.forget_pages(heap, self.chunk_bytes);
                }
                state.missing_chunks(heap)
            };
            let bytes = chunks_in(&missing) * self.chunk_bytes;
            let shortage = match self.lack(heap, &missing) {
                (_, over) if over > 0 => Short::Limit(over),
                (lack, _) => match self.map_all(cold, heap, &missing) {
                    Ok(()) => return Ok(missing),
                    Err(error) => short(error, lack.max(self.chunk_bytes)),
                },
            };
            self.make_room(cold, shortage, bytes, heap, None, notices)?;
        }
    }

    fn map_all(&self, cold: &Cold<'_>, heap: usize, missing: &Chunks) -> Result<(), DriverError> {
        for (done, (segment, ranges)) in missing.iter().enumerate() {
            if let Err(error) = self.map_pages(cold, heap, *segment, ranges) {
                // Nobody has seen the pages of the segments before.
                let _ = self.unmap_all(heap, missing.get(..done).unwrap_or_default());
                let mut state = self.lock();
                let mapped_bytes = state.mapped_bytes(heap, self.chunk_bytes);
                state.tie_heap(heap);
                if let Some(sleeping) = &mut state.sleeping[heap] {
                    sleeping.mapped_bytes = mapped_bytes;
                }
                state.note_reserved();
                return Err(error);
            }
        }
        Ok(())
    }
}

impl State {
    /// The chunks of a sleeping heap that its books want and that are not mapped.
    fn missing_chunks(&self, heap: usize) -> Chunks {
        let books = &self.heaps[heap];
        let mut missing = Vec::new();
        for (segment, wanted) in books.backed_chunks() {
            let Some(Some(Backing::Range { chunks, .. })) = self.backing[heap].get(segment.index()) else { continue };
            let unmapped = |chunk: &u32| chunks.get(*chunk as usize).is_some_and(Option::is_none);
            let mut wanted: Vec<u32> = wanted.into_iter().flatten().filter(unmapped).collect();
            if mutant::is("wake-skips-shared-chunks") {
                let inside = books.used_blocks().into_iter().flat_map(|block| books.chunks_inside(block));
                let inside: Vec<u32> = inside.flatten().collect();
                wanted.retain(|chunk| inside.contains(chunk));
            }
            let wanted = runs(wanted.into_iter());
            if !wanted.is_empty() {
                missing.push((segment, wanted));
            }
        }
        missing
    }
}
