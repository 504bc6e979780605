//! The bytes of what sleeps, on the host.
//!
//! Only what somebody would miss: the bytes of live slices (of one that grows, as far as it has grown), and of memory that
//! graphs read although its owner is gone. Each stretch remembers its allocation: what is freed while it sleeps, and
//! what comes after it at the same place, does not get its bytes.

use std::ops::Range;
use std::sync::Arc;

use crate::core::Uses;
use crate::driver::host_memory::{Pinned, download, upload};
use crate::driver::{DevicePtr, DriverResult};
use crate::give_back::{Going, Parcel};
use crate::shared::Shared;
use crate::sleep::Content;
use crate::state::{Home, Leftover, NONE, Outside, Standing, State};
use crate::{PoolError, Stream, mutant};

/// Bytes of a heap, on the host.
#[derive(Debug)]
pub(crate) struct Saved {
    store: Store,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
enum Store {
    Plain(Vec<u8>),
    Pinned(Arc<Pinned>),
}

/// A stretch of one allocation.
#[derive(Clone, Copy, Debug)]
struct Piece {
    home: Home,
    allocation: u64,
    ptr: DevicePtr,
    bytes: usize,
    /// Where it lies in the store.
    offset: usize,
}

impl Shared {
    /// Copies down what is to be kept. The host has seen everything complete that writes it.
    pub(crate) fn save(&self, going: &mut [Going]) -> Result<(), PoolError> {
        self.forget_outputs(going)?;
        for going in going {
            if let Parcel::Sleep(bed) = &mut going.parcel
                && bed.content != Content::Drop
                && self.lock().sleeping[bed.heap].as_ref().is_some_and(|s| !s.down)
            {
                let (pieces, kept, bytes) = self.lock().pieces(bed.heap);
                bed.kept = kept;
                bed.saved = Some(self.save_pieces(bed.content, pieces, bytes)?);
            }
        }
        Ok(())
    }

    /// What graphs left in arenas goes with the pages: nobody can take hold of it from here on. Whoever holds some of it
    /// keeps the arena awake.
    fn forget_outputs(&self, going: &[Going]) -> Result<(), PoolError> {
        let mut arenas = Vec::new();
        {
            let state = self.lock();
            for going in going {
                if let Parcel::Sleep(bed) = &going.parcel
                    && let Some(sleeping) = state.sleeping[bed.heap].as_ref().filter(|s| !s.down)
                {
                    let inside = state.arenas.iter().filter(|(_, arena)| sleeping.arenas.contains(arena.0));
                    arenas.extend(inside.map(|(_, arena)| Arc::clone(&arena.2)));
                }
            }
        }
        // None is forgotten where one is held.
        if arenas.iter().any(|book| book.is_held()) || !arenas.iter().all(|book| book.forget_outputs()) {
            return Err(PoolError::Busy {
                what: "a sleep",
                why: "a result in an arena is held; copy it, or drop the hold",
            });
        }
        Ok(())
    }

    fn save_pieces(&self, content: Content, pieces: Vec<Piece>, bytes: usize) -> Result<Saved, PoolError> {
        if content == Content::KeepPinned && bytes > 0 {
            let pinned = Arc::new(Pinned::new(&self.driver, bytes)?);
            let copied = self.copying(|stream| {
                let keep = |p: &Piece| pinned.keep(p.offset, p.ptr, p.bytes, stream.handle());
                pieces.iter().try_for_each(keep)?;
                self.driver.stream_synchronize(stream.handle())
            });
            return match copied {
                Ok(()) => Ok(Saved { store: Store::Pinned(pinned), pieces }),
                Err((error, idle)) => {
                    if idle {
                        self.keep_leftover(Leftover::Host(Outside::Pinned(pinned), Uses::none()));
                    }
                    Err(error)
                }
            };
        }
        let mut plain = Vec::new();
        plain.try_reserve_exact(bytes).map_err(|_| PoolError::NoHostMemory { bytes })?;
        plain.resize(bytes, 0u8);
        let copied = self.copying(|stream| {
            let keep = |p: &Piece| match plain.get_mut(p.offset..p.offset + p.bytes) {
                Some(out) => download(&self.driver, out, p.ptr, stream.handle()),
                None => Ok(()),
            };
            pieces.iter().try_for_each(keep)
        });
        copied.map_err(|(error, _)| error)?;
        Ok(Saved { store: Store::Plain(plain), pieces })
    }

    /// Runs copies on a stream of their own. With an error comes whether none of them can be under way any more.
    fn copying(&self, copy: impl FnOnce(&Stream) -> DriverResult<()>) -> Result<(), (PoolError, bool)> {
        let stream = Stream::new(&self.driver).map_err(|error| (error, true))?;
        match copy(&stream) {
            Ok(()) => Ok(()),
            Err(error) => Err((error.into(), (0..3).any(|_| stream.synchronize().is_ok()))),
        }
    }

    /// Copies back what still is the same allocation, and waits for it.
    pub(crate) fn restore(&self, saved: &Saved) -> Result<(), PoolError> {
        let alive: Vec<Piece> = {
            let state = self.lock();
            let same = saved.pieces.iter().filter(|p| state.info(p.home).allocation == p.allocation);
            // A slice that grows may have shrunk meanwhile: only where there are pages.
            same.flat_map(|p| state.heaps[p.home.heap].backed_spans(p.home.block).into_iter().filter_map(|s| p.cut(&s)))
                .collect()
        };
        if alive.is_empty() || mutant::is("kept-content-not-restored") {
            return Ok(());
        }
        let copied = self.copying(|stream| {
            for piece in &alive {
                match &saved.store {
                    Store::Pinned(pinned) => pinned.restore(piece.offset, piece.ptr, piece.bytes, stream.handle())?,
                    Store::Plain(plain) => {
                        let data = plain.get(piece.offset..piece.offset + piece.bytes).unwrap_or_default();
                        upload(&self.driver, piece.ptr, data, stream.handle())?;
                    }
                }
            }
            self.driver.stream_synchronize(stream.handle())
        });
        copied.map_err(|(error, _)| error)
    }
}

impl Piece {
    /// What of it lies in a span of addresses.
    fn cut(&self, span: &Range<u64>) -> Option<Self> {
        let (start, end) = (self.ptr.0.max(span.start), (self.ptr.0 + self.bytes as u64).min(span.end));
        let bytes = end.checked_sub(start).filter(|&bytes| bytes > 0)? as usize;
        Some(Self { ptr: DevicePtr(start), bytes, offset: self.offset + (start - self.ptr.0) as usize, ..*self })
    }
}

impl Saved {
    /// Page-locked memory, to be freed by the give-back.
    pub(crate) fn into_leftover(self) -> Option<Leftover> {
        match self.store {
            Store::Pinned(pinned) => Some(Leftover::Host(Outside::Pinned(pinned), Uses::none())),
            Store::Plain(_) => None,
        }
    }
}

impl State {
    /// What of a heap is to be kept: the stretches, their records (ascending), and their bytes.
    fn pieces(&self, heap: usize) -> (Vec<Piece>, Vec<usize>, usize) {
        let mut read: Vec<usize> = Vec::new();
        for (_, graph) in &self.graphs {
            read.extend(graph.deps.iter().filter(|d| !d.dependency.use_.is_scratch()).map(|d| d.record));
        }
        read.sort_unstable();
        let (mut pieces, mut kept, mut offset) = (Vec::new(), Vec::new(), 0);
        for block in self.heaps[heap].used_blocks() {
            let home = Home { heap, block };
            let info = self.info(home);
            let Some(record) = self.records.get(info.record as usize).filter(|_| info.record != NONE) else { continue };
            let index = info.record as usize;
            if record.standing != Standing::Live && read.binary_search(&index).is_err() {
                continue;
            }
            kept.push(index);
            // Behind its length a growable slice has no content.
            let bytes = self.growing.get(&home).map_or(record.bytes, |growing| growing.requested_bytes);
            let end = record.ptr.saturating_add(bytes);
            for span in self.heaps[heap].backed_spans(block) {
                let bytes = span.end.min(end).saturating_sub(span.start) as usize;
                if bytes > 0 {
                    let (allocation, ptr) = (info.allocation, DevicePtr(span.start));
                    pieces.push(Piece { home, allocation, ptr, bytes, offset });
                    offset += bytes;
                }
            }
        }
        kept.sort_unstable();
        (pieces, kept, offset)
    }
}
