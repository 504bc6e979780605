//! The pool's inside: the locks, and the streams that the pool knows.
//!
//! Two locks. `state` guards the books and is held for moments: never for a wait, never while foreign code
//! runs. It is a [`Lock`]: its waiters spin and yield, so it must stay that way. `cold` serialises what moves memory between the pool and the driver (growth, give-back, repair); it is taken
//! *before* `state`, never inside it, and no callback runs under it. Whoever holds `cold` may wait for the
//! device and for leases: a launcher takes neither lock while it holds a lease, and a drop takes only `state`.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use parking_lot::{Mutex, MutexGuard, RecursiveRwLock, RecursiveRwLockReadGuard, RecursiveRwLockWriteGuard};

use crate::core::{StreamKey, Uses};
use crate::driver::host_memory::HostMemory;
use crate::driver::{DeviceOrdinal, DynDriver};
use crate::handshake::Epoch;
use crate::lock::{Guard, Lock};
use crate::slice::Raw;
use crate::state::{Home, NONE, State};
use crate::{ChunkClass, Dependent, PoolConfig, PoolError, PoolId, PoolMode, Purpose, Retired, Stream, Token};

/// What pools, slices, windows and registrations share.
pub(crate) struct Shared {
    pub(crate) id: PoolId,
    pub(crate) driver: DynDriver,
    pub(crate) config: PoolConfig,
    pub(crate) device: DeviceOrdinal,
    pub(crate) epoch: Arc<Epoch>,
    /// vmm: bytes of the smallest physical chunk; the books count in these.
    pub(crate) chunk_bytes: u64,
    /// vmm: who gets larger ones.
    pub(crate) chunk_classes: Vec<ChunkClass>,
    books: &'static Books,
    cold: Mutex<()>,
}

/// The books and their lock. They outlive every pool, so that a slice can find them without counting
/// references: two locked instructions less in every hand-out and drop. Used again by the next pool.
#[repr(align(64))]
pub(crate) struct Books {
    state: Lock<State>,
    /// Held for reading while somebody queues work on memory of the pool, so that a sleep begins before it or after it.
    /// Taken before the cold lock and the books' lock.
    gate: RecursiveRwLock<()>,
    /// Which purposes are asleep, by bits. Set under the gate, cleared without.
    asleep: AtomicU8,
}

thread_local! {
    /// How many gates this thread holds open.
    static GATES: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, no memory of a pool is put to sleep: a sleep waits for its end. What sleeps already may still wake. On
/// the thread that has one a sleep is refused as `Busy`.
#[must_use = "a sleep waits only as long as this lives"]
#[derive(Debug)]
pub struct Awake {
    _gate: RecursiveRwLockReadGuard<'static, ()>,
}

impl Drop for Awake {
    fn drop(&mut self) {
        GATES.set(GATES.get().saturating_sub(1));
    }
}

/// Books without a pool.
static SPARE: Mutex<Vec<&'static Books>> = Mutex::new(Vec::new());

impl Books {
    /// Fresh books, bound in old covers if there are any.
    fn open(state: State) -> &'static Self {
        let spare = SPARE.lock().pop();
        match spare {
            Some(books) => {
                *books.lock() = state;
                books.asleep.store(0, Ordering::Relaxed);
                books
            }
            None => Box::leak(Box::new(Self {
                state: Lock::new(state),
                gate: RecursiveRwLock::default(),
                asleep: AtomicU8::new(0),
            })),
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, State> {
        self.state.lock()
    }

    /// Holds the gate open.
    pub(crate) fn hold_awake(&'static self) -> Awake {
        // Recursive: one call may look at two slices, and a sleep may wait between the two.
        let gate = self.gate.read();
        GATES.set(GATES.get() + 1);
        Awake { _gate: gate }
    }

    /// For a call that queues work on a slice.
    pub(crate) fn awake(&'static self, purpose: Purpose, what: &'static str) -> Result<Awake, PoolError> {
        let awake = self.hold_awake();
        let asleep = self.asleep.load(Ordering::Acquire) & (1 << purpose.index()) != 0;
        if asleep { Err(PoolError::Asleep { purpose, what }) } else { Ok(awake) }
    }

    /// Waits until nobody queues work.
    pub(crate) fn shut_gate(&self) -> Result<RecursiveRwLockWriteGuard<'_, ()>, PoolError> {
        if GATES.get() > 0 {
            return Err(PoolError::Busy { what: "a sleep", why: "this thread is in the middle of a run on the pool" });
        }
        Ok(self.gate.write())
    }

    /// Tells those who queue work. What falls asleep is told with the gate shut.
    pub(crate) fn tell_asleep(&self, state: &State) {
        let bits = state.heaps.iter().enumerate().map(|(heap, books)| u8::from(books.is_asleep()) << heap);
        self.asleep.store(bits.fold(0, |all, bit| all | bit), Ordering::Release);
    }

    pub(crate) fn token_of(&self, raw: &Raw) -> Token {
        let state = self.lock();
        let place = raw.place();
        let record = state.block_of(&fresh(raw, place)).map(|home| state.info(home).record).filter(|&r| r != NONE);
        match record.and_then(|r| state.records.get(r as usize)) {
            Some(record) => record.token(place),
            None => fresh(raw, place),
        }
    }

    pub(crate) fn record_stream(&self, raw: &Raw, stream: &Stream) -> Result<(), PoolError> {
        if raw.bytes == 0 {
            return Ok(());
        }
        // The slice lives, so its pool does.
        let owner = self.lock().owner.clone().ok_or(PoolError::Internal("a live slice without a pool"))?;
        let mut state = self.lock();
        let key = owner.stream_key(&mut state, stream);
        if key == raw.stream {
            return Ok(());
        }
        let home = Home { heap: raw.purpose.index(), block: raw.block };
        state.extra.entry(home).or_default().insert(key);
        state.info_mut(home).extra = true;
        Ok(())
    }
}

/// Proof that the cold lock is held.
pub(crate) struct Cold<'a> {
    _guard: MutexGuard<'a, ()>,
}

/// News for dependents and owners to be dropped, kept until no lock is held.
#[derive(Default)]
pub(crate) struct Notices {
    pub(crate) news: Vec<(Arc<dyn Dependent>, Retired)>,
    pub(crate) owners: Vec<Arc<dyn HostMemory>>,
}

impl Notices {
    /// Calls foreign code: no lock is held.
    pub(crate) fn deliver(self) {
        for (dependent, notice) in self.news {
            dependent.retired(&notice);
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("id", &self.id).field("config", &self.config).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(driver: DynDriver, config: PoolConfig) -> Result<Arc<Self>, PoolError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let device = driver.info().ordinal;
        let (mut chunk_bytes, mut chunk_classes) = (0, Vec::new());
        if config.mode == PoolMode::Vmm {
            if !driver.info().vmm {
                return Err(PoolError::Unsupported { device, what: "virtual memory management; use the slab mode" });
            }
            driver.bind()?;
            let granularity = driver.granularity_bytes()?;
            config.check(granularity)?;
            let (smallest, classes) = config.chunks(granularity);
            (chunk_bytes, chunk_classes) = (smallest as u64, classes);
        } else {
            config.check(1)?;
        }
        let id = NEXT
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < u32::from(u16::MAX)).then_some(n + 1))
            .map_err(|_| PoolError::TooManyPools)?;
        let id = PoolId(id as u16);
        let state = State::new(id, config.mode, config.limit_bytes.map(|b| b as u64));
        let epoch = state.epoch.published();
        let shared = Arc::new(Self {
            id,
            driver,
            config,
            device,
            epoch,
            chunk_bytes,
            chunk_classes,
            books: Books::open(state),
            cold: Mutex::new(()),
        });
        shared.lock().owner = Some(Arc::clone(&shared));
        Ok(shared)
    }

    /// Where slices find the books.
    #[inline]
    pub(crate) fn books(&self) -> &'static Books {
        self.books
    }

    /// The last owner is gone, and so is every slice: nobody looks at the books any more.
    pub(crate) fn shelve(&self) {
        let old = std::mem::replace(&mut *self.lock(), State::new(self.id, self.config.mode, None));
        drop(old);
        SPARE.lock().push(self.books);
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, State> {
        self.books.lock()
    }

    pub(crate) fn cold(&self) -> Cold<'_> {
        Cold { _guard: self.cold.lock() }
    }

    /// The number of a stream, given on first sight.
    pub(crate) fn stream_key(&self, state: &mut State, stream: &Stream) -> StreamKey {
        if let Some(key) = stream.home_key(self.id) {
            return StreamKey(key);
        }
        if let Some(&key) = state.stream_keys.get(&stream.id()) {
            return StreamKey(key);
        }
        let key = state.take_slot(Some(stream.clone()));
        state.stream_keys.insert(stream.id(), key.0);
        stream.set_home_key(self.id, key.0);
        key
    }

    pub(crate) fn same_device(&self, what: &'static str, stream: &Stream) -> Result<(), PoolError> {
        if stream.device() == self.device {
            return Ok(());
        }
        Err(PoolError::OtherDevice { what, expected: self.device, found: stream.device() })
    }

    /// Asks the driver which streams are idle, so that the memory that waits for them is free for all. Not
    /// inside a window. Streams that only the pool still knows are forgotten once they are idle.
    pub(crate) fn settle(&self) {
        let (streams, upto) = {
            let mut state = self.lock();
            let streams: Vec<(StreamKey, Stream)> = state
                .streams
                .iter()
                .enumerate()
                .filter(|(_, s)| s.window == NONE)
                .filter_map(|(k, s)| Some((StreamKey(k as u32), s.stream.clone()?)))
                .collect();
            (streams, state.tick())
        };
        let mut gone = Vec::new();
        for (key, stream) in streams {
            // A driver that can not answer just means "not idle".
            if !stream.is_idle().unwrap_or(false) {
                continue;
            }
            let mut state = self.lock();
            for heap in &mut state.heaps {
                heap.completed(key, upto);
            }
            let slot = &mut state.streams[key.0 as usize];
            // One clone in the slot, one here: nobody else can queue work or make another clone.
            if slot.live == 0 && slot.window == NONE && stream.clones() == 2 {
                let old = slot.stream.take();
                slot.taken = false;
                state.stream_keys.remove(&stream.id());
                for heap in &mut state.heaps {
                    heap.forget_stream(key);
                }
                for (_, record) in &mut state.records {
                    record.uses.remove(key);
                }
                for uses in state.extra.values_mut() {
                    uses.remove(key);
                }
                stream.clear_home_key(self.id);
                gone.push(old);
            }
            drop(state);
            gone.push(Some(stream));
        }
    }

    /// Waits on the host until everything that was queued so far on these streams is complete, and tells the
    /// heaps. Takes no lock while it waits.
    pub(crate) fn host_wait(&self, uses: &Uses) -> Result<(), PoolError> {
        if crate::mutant::is("no-wait-before-unmap") {
            return Ok(());
        }
        let (streams, upto) = {
            let mut state = self.lock();
            let streams: Vec<(StreamKey, Stream)> =
                uses.iter().filter_map(|k| Some((k, state.streams.get(k.0 as usize)?.stream.clone()?))).collect();
            (streams, state.tick())
        };
        let marks = streams.iter().map(|(_, s)| s.mark()).collect::<Result<Vec<_>, _>>()?;
        if crate::mutant::is("stream-wait-before-unmap") {
            if let Some((_, stream)) = streams.first() {
                for mark in &marks {
                    stream.wait(mark)?;
                }
            }
            return Ok(());
        }
        for ((key, stream), mark) in streams.iter().zip(&marks) {
            mark.synchronize()?;
            // On a capturing stream the event stands for the work before the capture: not for all of it.
            if !stream.is_capturing() {
                let mut state = self.lock();
                for heap in &mut state.heaps {
                    heap.completed(*key, upto);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn set_limit(&self, bytes: Option<usize>) {
        self.lock().limit_bytes = bytes.map(|b| b as u64);
    }

    pub(crate) fn limit(&self) -> Option<usize> {
        self.lock().limit_bytes.map(|b| b as usize)
    }
}

/// The token of a hand-out that nothing happened to.
pub(crate) fn fresh(raw: &Raw, place: crate::token::Place) -> Token {
    Token { allocation: raw.allocation, address: 1, backing: 1, content: 1, place }
}
