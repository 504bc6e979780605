//! A cache on the device of experts that stay on the host: for single tokens, those that are chosen most often.
//!
//! Of each block whose experts are on the host the device keeps equally many, in memory that is taken once and never moves. Which
//! they are stands in device memory, where the op that shares a token's experts out finds it ([`ShareExperts`]); the device counts what
//! is chosen, too. Every so many tokens the session reads the counts, and the device fetches what is used more ([`GatherExperts`])
//! in stream order between two steps. So contents change, addresses do not, and no graph needs to know.
//!
//! [`ShareExperts`]: evergraph_kernels::ops::ShareExperts

use evergraph_graphcache::Scope;
use evergraph_kernels::ops::{GatherExperts, Root, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::driver::DevicePtr;
use evergraph_pool::{DeviceSlice, PoolError, Purpose, Stream, Use};
use parking_lot::Mutex;

use super::residents::{ExpertTally, Residents};
use super::runtime::Runtime;
use super::step::{Step, view_of};
use crate::error::{Error, Result};

/// Single tokens between two looks at the counts.
const TOKENS: usize = 64;

/// Bytes that come at a time, about: a millisecond of a fast bus, or less.
const MOST_BYTES: usize = 32 << 20;

/// Experts of a token that the op which shares them out can take.
const MOST_USED: usize = 32;

/// Slots start at whole cache lines.
const LINE: usize = 256;

/// Experts of a block that stay on the host.
#[derive(Debug)]
pub(crate) struct HostExperts {
    /// What names them: the host's address of the last of their tensors.
    pub(crate) key: DevicePtr,
    /// Experts of a token.
    pub(crate) used: usize,
    /// `[E, out, in]` each, as the device reaches them over the bus.
    pub(crate) tensors: [Option<TensorView>; 3],
}

/// The cache of one block.
#[derive(Debug)]
pub(crate) struct CachedExperts {
    experts: HostExperts,
    /// `[S, out, in]` each.
    pub(crate) slots: [Option<TensorView>; 3],
    /// Number of slots.
    pub(crate) count: usize,
    /// `[E]` I32: the slot of each expert, or -1.
    pub(crate) at: TensorView,
    /// `[E]` I32: how often each was chosen.
    pub(crate) counts: TensorView,
    /// `[S]` I32: the expert that is to come to each slot, or -1.
    wanted: TensorView,
}

/// The cache of a sequence.
///
/// # Reuse and capture
/// All addresses are fixed; every graph declares the memory as state.
#[derive(Debug)]
pub(crate) struct ExpertCache {
    memory: DeviceSlice<u8>,
    table: DeviceSlice<i32>,
    counts: DeviceSlice<i32>,
    wanted: DeviceSlice<i32>,
    blocks: Vec<CachedExperts>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    residents: Residents,
    /// Tokens since the last look at the counts.
    tokens: usize,
    /// Whether slots hold what the table says; not if a change failed half-way.
    settled: bool,
}

impl HostExperts {
    fn count(&self) -> usize {
        self.tensors.iter().flatten().map(|tensor| tensor.dim(0)).min().unwrap_or(0)
    }

    /// Bytes of one expert, tensor by tensor.
    fn bytes(&self) -> impl Iterator<Item = usize> {
        self.tensors.iter().flatten().map(|tensor| tensor.range().len() / tensor.dim(0).max(1))
    }
}

/// Bytes of so many slots of a block.
fn slot_bytes(experts: &HostExperts, slots: usize) -> usize {
    let bytes = experts.bytes().map(|bytes| bytes.saturating_mul(slots).saturating_add(LINE - 1) / LINE * LINE);
    bytes.fold(0, usize::saturating_add)
}

/// The most slots a block that fit.
fn slots(blocks: &[HostExperts], bytes: usize) -> usize {
    let all = |slots: usize| blocks.iter().fold(0usize, |sum, block| sum.saturating_add(slot_bytes(block, slots)));
    let most = blocks.iter().map(HostExperts::count).min().unwrap_or(0);
    let guess = bytes.checked_div(all(1)).unwrap_or(0);
    // Rounding up once for all slots takes less than for each, so more may fit.
    (guess..=most).take_while(|&slots| all(slots) <= bytes).last().unwrap_or(0).max(guess.min(most))
}

impl ExpertCache {
    /// Takes memory of up to `bytes` for the experts of these blocks. None where there is nothing to keep, or no room for an
    /// expert of each.
    pub(crate) fn new(runtime: &Runtime, blocks: Vec<HostExperts>, bytes: usize) -> Result<Option<Self>> {
        let slots = slots(&blocks, bytes);
        let reason = match blocks.iter().map(|block| block.used).max() {
            None => Some("no experts of the host are in the device's reach"),
            Some(used) if used > MOST_USED => Some("a token chooses too many experts"),
            Some(_) if slots == 0 => Some("it has no room for an expert of each block"),
            Some(_) => None,
        };
        if let Some(reason) = reason {
            tracing::info!(bytes, reason, "no cache of experts");
            return Ok(None);
        }
        let (pool, stream, device) = (runtime.pool(), runtime.stream(), runtime.device());
        let total = blocks.iter().map(|block| slot_bytes(block, slots)).sum();
        let short = |source: PoolError| match source.is_out_of_memory() {
            true => Error::ExpertCache { bytes: total, source },
            false => source.into(),
        };
        let numbers = |len| pool.alloc_for::<i32>(len, Purpose::State, stream).map_err(short);
        let memory = pool.alloc_for::<u8>(total, Purpose::State, stream).map_err(short)?;
        let experts: usize = blocks.iter().map(HostExperts::count).sum();
        let (table, counts, wanted) = (numbers(experts)?, numbers(experts)?, numbers(blocks.len() * slots)?);
        stream.fill(&counts, 0)?;
        let sizes: Vec<_> = blocks.iter().map(|block| (slots, block.count(), block.bytes().sum())).collect();
        let (mut offset, mut first) = (0, 0);
        let mut cached = Vec::with_capacity(blocks.len());
        for (number, experts) in blocks.into_iter().enumerate() {
            let mut places = [const { None }; 3];
            for (place, tensor) in places.iter_mut().zip(&experts.tensors) {
                let Some(tensor) = tensor else { continue };
                let bytes = tensor.range().len() / tensor.dim(0) * slots;
                let at = memory.ptr().checked_add(offset);
                let at = at.ok_or_else(|| Error::CheckFailed("no place for a cache of experts".to_owned()))?;
                let root = Root::with_allocation("cached experts", at, bytes, device, memory.token().allocation.get());
                *place = Some(TensorView::new(&root, tensor.ty(), &[slots, tensor.dim(1), tensor.dim(2)])?);
                offset += bytes.next_multiple_of(LINE);
            }
            let numbers = |slice: &DeviceSlice<i32>, name, start, len| {
                let all = view_of(slice, name, device, QuantType::I32, &[slice.len()])?;
                Ok::<_, Error>(all.narrow(0, start, len)?)
            };
            let count = experts.count();
            cached.push(CachedExperts {
                slots: places,
                count: slots,
                at: numbers(&table, "slots of experts", first, count)?,
                counts: numbers(&counts, "counts of experts", first, count)?,
                wanted: numbers(&wanted, "experts to come", number * slots, slots)?,
                experts,
            });
            first += count;
        }
        let state = State { residents: Residents::new(sizes, MOST_BYTES), tokens: 0, settled: false };
        Ok(Some(Self { memory, table, counts, wanted, blocks: cached, state: Mutex::new(state) }))
    }

    /// The cache of a block, by what [names](HostExperts::key) its experts.
    pub(super) fn of(&self, key: DevicePtr) -> Option<&CachedExperts> {
        self.blocks.iter().find(|block| block.experts.key == key)
    }

    /// Bytes of the experts that it keeps.
    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub(super) fn declare(&self, scope: &Scope<'_>) -> Result<()> {
        scope.declare(&self.memory, Use::State)?;
        for numbers in [&self.table, &self.counts, &self.wanted] {
            scope.declare(numbers, Use::State)?;
        }
        Ok(())
    }

    /// To be called before each single token: whether experts are to [come](Self::push) first. Says in device memory which.
    pub(super) fn turn(&self, stream: &Stream) -> Result<bool> {
        let state = &mut *self.state.lock();
        let mut wanted = state.residents.experts();
        if state.settled {
            if state.tokens < TOKENS {
                state.tokens += 1;
                return Ok(false);
            }
            state.tokens = 1;
            let (swaps, counts) = state.residents.change(&stream.download(&self.counts)?);
            if let Some(counts) = counts {
                stream.upload(&counts, &self.counts)?;
            }
            if swaps.is_empty() {
                return Ok(false);
            }
            wanted.fill(-1);
            for swap in &swaps {
                let slots = self.blocks.first().map_or(0, |block| block.count);
                if let (Some(place), Ok(expert)) =
                    (wanted.get_mut(swap.block * slots + swap.slot), i32::try_from(swap.expert))
                {
                    *place = expert;
                }
            }
            tracing::debug!(experts = swaps.len(), "experts of the host that are used more come to the device");
        }
        // Until they are there.
        state.settled = false;
        stream.upload(&wanted, &self.wanted)?;
        stream.upload(&state.residents.table(), &self.table)?;
        Ok(true)
    }

    /// Appends what brings the experts that are to come.
    pub(super) fn push(&self, step: &mut Step<'_>) -> Result<()> {
        for block in &self.blocks {
            for (w, out) in block.experts.tensors.iter().flatten().zip(block.slots.iter().flatten()) {
                step.push(GatherExperts { w: w.clone(), ids: block.wanted.clone(), out: out.clone() })?;
            }
        }
        Ok(())
    }

    /// Says that they came.
    pub(super) fn settled(&self) {
        self.state.lock().settled = true;
    }

    /// What was chosen so far.
    pub(super) fn tally(&self, stream: &Stream) -> Result<ExpertTally> {
        let counts = stream.download(&self.counts)?;
        Ok(self.state.lock().residents.note(&counts))
    }
}
