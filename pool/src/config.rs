//! How a pool is set up.

use crate::{ChunkClass, PoolError};

/// How the pool takes memory from the driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PoolMode {
    /// Reserved address ranges with physical chunks mapped under them: addresses are stable, giving back is
    /// unmapping.
    Vmm,
    /// Slabs by `malloc`: addresses die with the slab.
    Slab,
}

impl std::fmt::Display for PoolMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Vmm => "vmm",
            Self::Slab => "slab",
        })
    }
}

/// What memory is for. Scratch, state and weights never share a chunk or a slab.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Purpose {
    /// Activations and temporaries.
    #[default]
    Scratch,
    /// State that lives across steps (a KV cache).
    State,
    /// Weights.
    Weight,
}

impl Purpose {
    /// All of them, in the order of their heaps.
    pub const ALL: [Self; 3] = [Self::Scratch, Self::State, Self::Weight];

    #[inline]
    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// Settings of a pool. Start from [`PoolConfig::new`] and change what you need.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolConfig {
    /// The mode.
    pub mode: PoolMode,
    /// Most bytes that the pool may hold from the driver; `None`: as much as there is.
    pub limit_bytes: Option<usize>,
    /// vmm: bytes of the smallest physical chunk, a multiple of the driver's granularity; `None`: 2 MiB or the
    /// granularity, whichever is larger.
    pub chunk_bytes: Option<usize>,
    /// vmm: larger chunks for what misses much at one place. `None`: the [usual](ChunkClass::USUAL) ones, or none where
    /// `chunk_bytes` names one size for all.
    pub chunk_classes: Option<Vec<ChunkClass>>,
    /// vmm: bytes of address space reserved at a time; `None`: twice the device's memory. Where the driver
    /// refuses, less is asked for, down to one chunk or the request.
    pub reserve_bytes: Option<usize>,
    /// slab: the smallest slab, bytes. Below 2 MiB slabs are also no larger than a request needs, for small devices.
    pub slab_bytes: usize,
    /// slab: how many slabs there may be at a time. A full table gives a slab back first.
    pub slab_slots: usize,
    /// slab: cached slabs are given back on growth once they exceed this many times the new slab. In percent.
    pub slab_cached_percent: usize,
}

impl PoolConfig {
    /// The defaults of a mode: no limit, 256 slab slots, slabs of at least 2 MiB.
    #[must_use]
    pub fn new(mode: PoolMode) -> Self {
        Self {
            mode,
            limit_bytes: None,
            chunk_bytes: None,
            chunk_classes: None,
            reserve_bytes: None,
            slab_bytes: 2 << 20,
            slab_slots: 256,
            slab_cached_percent: 100,
        }
    }

    /// The defaults of the vmm mode.
    #[must_use]
    pub fn vmm() -> Self {
        Self::new(PoolMode::Vmm)
    }

    /// The defaults of the slab mode.
    #[must_use]
    pub fn slab() -> Self {
        Self::new(PoolMode::Slab)
    }

    /// With a byte limit.
    #[must_use]
    pub fn limit(mut self, bytes: usize) -> Self {
        self.limit_bytes = Some(bytes);
        self
    }

    /// With chunks of this many bytes (vmm): all of them, unless [`chunk_classes`](Self::chunk_classes) says more.
    #[must_use]
    pub fn chunk(mut self, bytes: usize) -> Self {
        self.chunk_bytes = Some(bytes);
        self
    }

    /// With these larger chunks for what misses much at one place (vmm).
    #[must_use]
    pub fn chunk_classes(mut self, classes: &[ChunkClass]) -> Self {
        self.chunk_classes = Some(classes.to_vec());
        self
    }

    /// The smallest chunk and the classes of larger ones, once checked.
    pub(crate) fn chunks(&self, granularity_bytes: usize) -> (usize, Vec<ChunkClass>) {
        let smallest = self.chunk_bytes.unwrap_or_else(|| (2usize << 20).next_multiple_of(granularity_bytes));
        let classes = match (&self.chunk_classes, self.chunk_bytes) {
            (Some(classes), _) => classes.clone(),
            (None, Some(_)) => Vec::new(),
            // A granularity that the usual sizes are no multiple of has chunks of one size.
            (None, None) => ChunkClass::USUAL.into_iter().filter(|class| class.check(smallest).is_ok()).collect(),
        };
        (smallest, classes)
    }

    /// With slabs of at least this many bytes (slab).
    #[must_use]
    pub fn smallest_slab(mut self, bytes: usize) -> Self {
        self.slab_bytes = bytes;
        self
    }

    /// With this many slab slots (slab).
    #[must_use]
    pub fn slots(mut self, slots: usize) -> Self {
        self.slab_slots = slots;
        self
    }

    pub(crate) fn check(&self, granularity_bytes: usize) -> Result<(), PoolError> {
        if self.mode == PoolMode::Slab {
            if self.slab_slots == 0 {
                return Err(PoolError::Config("slab_slots must be at least 1"));
            }
            if self.slab_bytes == 0 || self.slab_bytes > 1 << 46 {
                return Err(PoolError::Config("slab_bytes must be between 1 byte and 64 TiB"));
            }
            return Ok(());
        }
        if granularity_bytes == 0 {
            return Err(PoolError::Config("the driver reports a granularity of 0"));
        }
        if let Some(chunk) = self.chunk_bytes
            && (chunk == 0 || chunk % granularity_bytes != 0 || chunk > 1 << 46)
        {
            return Err(PoolError::Config("chunk_bytes must be a multiple of the driver's granularity"));
        }
        let (smallest, classes) = self.chunks(granularity_bytes);
        classes.iter().try_for_each(|class| class.check(smallest))
    }
}
