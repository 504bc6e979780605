//! What the pool's lock guards.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use slab::Slab;
use smallvec::SmallVec;

use crate::arena::ScratchPolicy;
use crate::core::{BlockKey, Heap, HeapConfig, SegmentKey, Stamp, StreamKey, Uses};
use crate::driver::host_memory::{Pinned, Registered};
use crate::driver::{DevicePtr, PhysHandle};
use crate::grant::Grantees;
use crate::growing::Growing;
use crate::handshake::{EpochWriter, Lease};
use crate::outputs::Book;
use crate::sleep::Sleeping;
use crate::token::{Place, PlaceKind};
use crate::{
    AllocationId, BadReason, Counters, Dependency, Dependent, HandedOut, PoolId, PoolMode, Stat, Stream, Token,
};

/// No record, no window.
pub(crate) const NONE: u32 = u32::MAX;

/// Where a block is: which heap, which block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Home {
    pub(crate) heap: usize,
    pub(crate) block: BlockKey,
}

/// Left with a block whose [`Info`] has a place in the table. No allocation has this number: the last pool
/// number is not given out.
const IN_TABLE: u64 = u64::MAX;

/// What the runtime knows about a used block beyond the heap. Nearly always that is the allocation alone, which is
/// left with the block itself; the table, indexed like the heap's blocks, has the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Info {
    /// The hand-out; 0 when nobody's.
    pub(crate) allocation: u64,
    /// Index into the records, or [`NONE`]: no graph ever depended on it.
    pub(crate) record: u32,
    /// The graph in whose open window it was handed out, or [`NONE`].
    pub(crate) window: u32,
    /// Further streams are in [`State::extra`].
    pub(crate) extra: bool,
    /// Its slice was dropped inside a window that may have captured uses of it.
    pub(crate) limbo: bool,
}

impl Info {
    pub(crate) const EMPTY: Self = Self { allocation: 0, record: NONE, window: NONE, extra: false, limbo: false };

    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.record == NONE && self.window == NONE && !self.extra
    }
}

/// A stream as the pool knows it, or a private number that only tags memory.
#[derive(Debug)]
pub(crate) struct Slot {
    /// `None`: private, or unused.
    pub(crate) stream: Option<Stream>,
    /// The graph whose window is open on it.
    pub(crate) window: u32,
    /// Live slices and graphs that need the number.
    pub(crate) live: u64,
    pub(crate) taken: bool,
}

/// Who owns what a record is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing {
    /// A live slice, foreign range or buffer.
    Live,
    /// Graphs only.
    Held,
    /// Nobody: see the reason.
    Gone(BadReason),
}

/// A graph's hold on a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Holder {
    pub(crate) graph: usize,
    pub(crate) strong: u32,
    pub(crate) weak: u32,
}

/// Memory outside the heaps.
#[derive(Debug)]
pub(crate) enum Outside {
    Foreign {
        name: String,
    },
    Pinned(Arc<Pinned>),
    Registered(Registered),
    /// Zero bytes, or already freed.
    Nothing,
}

/// Where the memory of a record is.
#[derive(Debug)]
pub(crate) enum Site {
    Block(Home),
    Outside(Outside),
}

/// Memory that a graph depends on, or that could change without its block changing.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) allocation: AllocationId,
    pub(crate) address: u32,
    pub(crate) backing: u32,
    pub(crate) content: u32,
    pub(crate) ptr: u64,
    /// As asked for.
    pub(crate) bytes: u64,
    pub(crate) site: Site,
    pub(crate) standing: Standing,
    /// Pages are missing.
    pub(crate) unbacked: bool,
    /// Its heap sleeps, or is about to.
    pub(crate) asleep: bool,
    pub(crate) retiring: bool,
    /// Its last holder went while it was being retired: dropped when the mark goes, and not before, since the
    /// retirer still works on its memory.
    pub(crate) drop_later: bool,
    pub(crate) holders: SmallVec<[Holder; 2]>,
    /// Streams whose work may still touch it, graphs that are gone included.
    pub(crate) uses: Uses,
}

impl Record {
    pub(crate) fn new(allocation: AllocationId, ptr: u64, bytes: u64, site: Site, standing: Standing) -> Self {
        Self {
            allocation,
            address: 1,
            backing: 1,
            content: 1,
            ptr,
            bytes,
            site,
            standing,
            unbacked: false,
            asleep: false,
            retiring: false,
            drop_later: false,
            holders: SmallVec::new(),
            uses: Uses::none(),
        }
    }

    pub(crate) fn home(&self) -> Option<Home> {
        match self.site {
            Site::Block(home) => Some(home),
            Site::Outside(_) => None,
        }
    }

    pub(crate) fn all_weak(&self) -> bool {
        self.holders.iter().all(|h| h.strong == 0)
    }

    fn moved(&self) -> bool {
        (self.address, self.backing, self.content) != (1, 1, 1)
    }

    pub(crate) fn token(&self, place: Place) -> Token {
        Token {
            allocation: self.allocation,
            address: self.address,
            backing: self.backing,
            content: self.content,
            place,
        }
    }
}

/// A dependency of a graph and the record behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dep {
    pub(crate) dependency: Dependency,
    pub(crate) record: usize,
}

/// A hand-out of an open window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowBlock {
    pub(crate) home: Home,
    pub(crate) base: u64,
    pub(crate) block_bytes: u64,
    pub(crate) handed: HandedOut,
}

/// A window while it is open.
#[derive(Debug)]
pub(crate) struct OpenWindow {
    /// Keeps the opening thread from breaking its capture. `None`: declarations only.
    #[allow(dead_code, reason = "counts by being there")]
    pub(crate) thread: Option<crate::capture_thread::Mark>,
    /// `None`: declarations only.
    pub(crate) stream: Option<StreamKey>,
    /// Tags memory freed inside: the window's own number, or the arena's.
    pub(crate) private: StreamKey,
    pub(crate) handed: Vec<WindowBlock>,
    /// Spans freed inside: what is handed out on top of them was written before in the same replay.
    pub(crate) freed: Vec<Range<u64>>,
    /// Blocks of slices dropped inside that were handed out before.
    pub(crate) limbo: Vec<(Home, Uses)>,
}

/// A graph as the pool knows it.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) dependent: Arc<dyn Dependent>,
    pub(crate) lease: Arc<Lease>,
    /// The stream it is launched on.
    pub(crate) stream: StreamKey,
    pub(crate) cost_us: u32,
    pub(crate) policy: ScratchPolicy,
    pub(crate) deps: Vec<Dep>,
    pub(crate) window: Option<OpenWindow>,
    pub(crate) evicted: bool,
    /// It was good when it was last told or walked: counts transitions to stale once.
    pub(crate) good: bool,
}

/// What a segment took from the driver.
#[derive(Debug)]
pub(crate) enum Backing {
    Slab { ptr: DevicePtr, bytes: u64 },
    Range { ptr: DevicePtr, bytes: u64, chunks: Vec<Option<Bundle>> },
}

/// The pages of a chunk: a physical handle, and which chunks of the range it is mapped under. Each of those has a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bundle {
    pub(crate) handle: PhysHandle,
    pub(crate) first: u32,
    pub(crate) count: NonZeroU32,
}

impl Bundle {
    pub(crate) fn chunks(&self) -> Range<u32> {
        self.first..self.first + self.count.get()
    }
}

/// A physical chunk, small or large, that is mapped nowhere: it was taken from under one range and waits for another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spare {
    pub(crate) handle: PhysHandle,
    pub(crate) bytes: u64,
}

/// Things that left the books but that the driver would not take back yet. Tried again whenever memory moves.
#[derive(Debug)]
pub(crate) enum Leftover {
    /// A chunk without a mapping.
    Chunk(PhysHandle, u64),
    /// A chunk still mapped where nobody uses it.
    Mapped(DevicePtr, PhysHandle, u64),
    /// Host memory, and the streams to wait for.
    Host(Outside, Uses),
}

/// Running totals, kept on the warm path.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) allocated: Stat,
    pub(crate) requested: Stat,
    pub(crate) slices: Stat,
    pub(crate) reserved: Stat,
    pub(crate) segments: Stat,
    pub(crate) held: Stat,
    pub(crate) active_peak: u64,
    pub(crate) split_peak: u64,
    pub(crate) retries: u64,
    pub(crate) ooms: u64,
}

/// Everything behind the pool's lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) id: PoolId,
    pub(crate) mode: PoolMode,
    pub(crate) heaps: [Heap; 3],
    pub(crate) info: [Vec<Info>; 3],
    pub(crate) backing: [Vec<Option<Backing>>; 3],
    pub(crate) streams: Vec<Slot>,
    pub(crate) stream_keys: HashMap<u64, u32>,
    pub(crate) extra: HashMap<Home, Uses>,
    /// Live growable slices.
    pub(crate) growing: HashMap<Home, Growing>,
    pub(crate) records: Slab<Record>,
    pub(crate) outside: BTreeSet<(u64, usize)>,
    pub(crate) graphs: Slab<Graph>,
    /// Each with the tag of its memory, its stream, and what is known of its outputs.
    pub(crate) arenas: Slab<(StreamKey, StreamKey, Arc<Book>)>,
    pub(crate) leftovers: Vec<Leftover>,
    /// Chunks without a range (vmm). The next growth takes them before it makes new ones.
    pub(crate) spare: Vec<Spare>,
    /// Bytes that were moved where new chunks could have been made instead, ever.
    pub(crate) moved_bytes: u64,
    pub(crate) sleeping: [Option<Sleeping>; 3],
    /// Devices that may touch each heap's memory.
    pub(crate) granted: [Grantees; 3],
    pub(crate) epoch: EpochWriter,
    pub(crate) clock: u64,
    pub(crate) last_allocation: u64,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) tally: Tally,
    pub(crate) counters: Counters,
    pub(crate) closed: bool,
    /// Keeps the pool while slices live: they do not count references themselves. Taken when the last handle
    /// and the last slice are gone.
    pub(crate) owner: Option<Arc<crate::shared::Shared>>,
}

impl State {
    pub(crate) fn new(id: PoolId, mode: PoolMode, limit_bytes: Option<u64>) -> Self {
        let heap = || {
            Heap::new(match mode {
                PoolMode::Vmm => HeapConfig::VMM,
                PoolMode::Slab => HeapConfig::SLAB,
            })
        };
        Self {
            id,
            mode,
            heaps: [heap(), heap(), heap()],
            info: Default::default(),
            backing: Default::default(),
            streams: Vec::new(),
            stream_keys: HashMap::new(),
            extra: HashMap::new(),
            growing: HashMap::new(),
            records: Slab::new(),
            outside: BTreeSet::new(),
            graphs: Slab::new(),
            arenas: Slab::new(),
            leftovers: Vec::new(),
            spare: Vec::new(),
            moved_bytes: 0,
            sleeping: Default::default(),
            granted: Default::default(),
            epoch: EpochWriter::new(),
            clock: 0,
            last_allocation: 0,
            limit_bytes,
            tally: Tally::default(),
            counters: Counters::default(),
            closed: false,
            owner: None,
        }
    }

    /// A point on the pool's clock, after everything queued so far.
    #[inline]
    pub(crate) fn tick(&mut self) -> Stamp {
        self.clock += 1;
        Stamp(self.clock)
    }

    /// Identity for a new hand-out. 48 bits last for centuries, but rule 11 wants to know.
    #[inline]
    pub(crate) fn next_allocation(&mut self) -> Option<AllocationId> {
        if self.last_allocation >= (1 << AllocationId::COUNTER_BITS) - 1 {
            return None;
        }
        self.last_allocation += 1;
        Some(AllocationId::new(self.id, self.last_allocation))
    }

    /// For a change that may be more than who owns it.
    pub(crate) fn info_mut(&mut self, home: Home) -> &mut Info {
        let now = self.info(home);
        self.heaps[home.heap].set_owner(home.block, IN_TABLE);
        let table = &mut self.info[home.heap];
        let index = home.block.index();
        if index >= table.len() {
            table.resize(index + 1, Info::EMPTY);
        }
        table[index] = now;
        &mut table[index]
    }

    #[inline]
    pub(crate) fn info(&self, home: Home) -> Info {
        match self.heaps[home.heap].owner(home.block) {
            IN_TABLE => self.info[home.heap].get(home.block.index()).copied().unwrap_or(Info::EMPTY),
            allocation => Info { allocation, ..Info::EMPTY },
        }
    }

    /// A number for a stream or a tag.
    pub(crate) fn take_slot(&mut self, stream: Option<Stream>) -> StreamKey {
        let slot = Slot { stream, window: NONE, live: 0, taken: true };
        match self.streams.iter().position(|s| !s.taken) {
            Some(free) => {
                self.streams[free] = slot;
                StreamKey(free as u32)
            }
            None => {
                self.streams.push(slot);
                StreamKey(self.streams.len() as u32 - 1)
            }
        }
    }

    /// Lets a private tag go; nothing is tagged with it any more.
    pub(crate) fn release_slot(&mut self, key: StreamKey) {
        if let Some(slot) = self.streams.get_mut(key.0 as usize) {
            *slot = Slot { stream: None, window: NONE, live: 0, taken: false };
        }
    }

    /// Whether other streams may be ordered after this one now.
    pub(crate) fn usable(streams: &[Slot], key: StreamKey) -> bool {
        streams.get(key.0 as usize).is_some_and(|s| s.stream.is_some() && s.window == NONE)
    }

    pub(crate) fn streams_of(&self, uses: &Uses) -> Vec<Stream> {
        uses.iter().filter_map(|k| self.streams.get(k.0 as usize).and_then(|s| s.stream.clone())).collect()
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        let leftovers: u64 = self
            .leftovers
            .iter()
            .map(|l| match l {
                Leftover::Chunk(_, bytes) | Leftover::Mapped(_, _, bytes) => *bytes,
                Leftover::Host(..) => 0,
            })
            .sum();
        let heaps = self.heaps.iter().zip(&self.sleeping).map(|(heap, sleeping)| match sleeping {
            Some(sleeping) => sleeping.mapped_bytes,
            None => heap.backed_bytes(),
        });
        let spare: u64 = self.spare.iter().map(|s| s.bytes).sum();
        heaps.sum::<u64>() + leftovers + spare
    }

    /// Takes the largest chunk of at most this size that is mapped nowhere.
    pub(crate) fn take_spare(&mut self, most_bytes: u64) -> Option<Spare> {
        let fits = self.spare.iter().enumerate().filter(|(_, s)| s.bytes <= most_bytes);
        let (index, _) = fits.max_by_key(|(_, s)| s.bytes)?;
        Some(self.spare.swap_remove(index))
    }

    /// Takes the heaps' word for what is reserved, after it changed.
    pub(crate) fn note_reserved(&mut self) {
        let now = self.reserved_bytes();
        let tally = &mut self.tally.reserved;
        if now > tally.current {
            tally.add(now - tally.current);
        } else {
            tally.sub(tally.current - now);
        }
    }

    pub(crate) fn note_active(&mut self) {
        self.tally.active_peak = self.tally.active_peak.max(self.tally.allocated.current + self.tally.held.current);
    }

    pub(crate) fn place_of(&self, record: usize) -> Place {
        match self.records.get(record).map(|r| &r.site) {
            Some(Site::Block(home)) => Place::block(home.heap, home.block.index()),
            Some(Site::Outside(_)) => Place::outside(record),
            None => Place::NOWHERE,
        }
    }

    /// The used block at a place, if it still is that allocation's.
    pub(crate) fn block_of(&self, token: &Token) -> Option<Home> {
        let PlaceKind::Block { heap, index } = token.place.kind() else { return None };
        let home = Home { heap, block: BlockKey::from_index(index) };
        (heap < self.heaps.len() && self.info(home).allocation == token.allocation.get()).then_some(home)
    }

    /// The record of a block, made if there is none.
    pub(crate) fn record_of_block(&mut self, home: Home) -> Option<usize> {
        let info = self.info(home);
        if info.record != NONE {
            return Some(info.record as usize);
        }
        let view = self.heaps[home.heap].block(home.block)?;
        let allocation = AllocationId::from_raw(info.allocation)?;
        let bytes = if view.requested_bytes == 0 { view.bytes } else { view.requested_bytes };
        let standing = if info.limbo { Standing::Held } else { Standing::Live };
        let mut record = Record::new(allocation, view.base, bytes, Site::Block(home), standing);
        record.asleep = self.heaps[home.heap].is_asleep();
        let record = self.records.insert(record);
        self.info_mut(home).record = record as u32;
        Some(record)
    }

    pub(crate) fn segment_backing(&mut self, heap: usize, segment: SegmentKey) -> &mut Option<Backing> {
        let table = &mut self.backing[heap];
        let index = segment.index();
        if index >= table.len() {
            table.resize_with(index + 1, || None);
        }
        &mut table[index]
    }

    /// Takes `graph`'s hold off its records. What nobody needs any more is freed behind the graph's last
    /// launch. Host memory that is left over is returned, to be freed without the lock.
    pub(crate) fn release_holds(&mut self, graph: usize) {
        let Some(g) = self.graphs.get_mut(graph) else { return };
        let deps = std::mem::take(&mut g.deps);
        let launched = g.lease.last_launch() != 0 && !crate::mutant::is("evict-forgets-launch");
        let stream = g.stream;
        for dep in deps {
            let Some(record) = self.records.get_mut(dep.record) else { continue };
            let before = record.holders.len();
            record.holders.retain(|h| h.graph != graph);
            if record.holders.len() == before {
                continue;
            }
            if launched {
                record.uses.insert(stream);
            }
            if record.holders.is_empty() {
                self.drop_record(dep.record);
            }
        }
    }

    /// A record without holders: what becomes of it and its memory.
    pub(crate) fn drop_record(&mut self, index: usize) {
        if let Some(record) = self.records.get_mut(index).filter(|r| r.retiring)
            && !crate::mutant::is("retiring-dropped")
        {
            record.drop_later = true;
            return;
        }
        let Some(record) = self.records.get(index) else { return };
        match (&record.site, record.standing) {
            (Site::Block(home), Standing::Held) => {
                let home = *home;
                if self.info(home).limbo {
                    // The open window still keeps the block; only the record goes.
                    if !record.moved() {
                        self.records.remove(index);
                        self.info_mut(home).record = NONE;
                    }
                    return;
                }
                let record = self.records.remove(index);
                let bytes = self.heaps[home.heap].span(home.block).map_or(0, |s| s.1);
                self.tally.held.sub(bytes);
                *self.info_mut(home) = Info::EMPTY;
                let now = self.tick();
                let freed = self.heaps[home.heap].free(home.block, record.uses, now);
                debug_assert!(freed.is_ok(), "a held block is used: {freed:?}");
            }
            (Site::Block(home), Standing::Live) => {
                let home = *home;
                if record.moved() {
                    return;
                }
                let record = self.records.remove(index);
                self.info_mut(home).record = NONE;
                if !record.uses.is_empty() {
                    self.extra.entry(home).or_default().extend(&record.uses);
                    self.info_mut(home).extra = true;
                }
            }
            (Site::Outside(_), Standing::Live) => {}
            (Site::Outside(_), _) => {
                let record = self.records.remove(index);
                self.outside.remove(&(record.ptr, index));
                if let Site::Outside(outside @ (Outside::Pinned(_) | Outside::Registered(_))) = record.site {
                    self.leftovers.push(Leftover::Host(outside, record.uses));
                }
            }
            (Site::Block(_), Standing::Gone(_)) => {
                self.records.remove(index);
            }
        }
    }
}
