//! The churn: so many live slices, and each step drops a random one and allocates a new one.

use evergraph_pool::{DeviceSlice, Pool, PoolConfig, PoolError, Stream};

use crate::null::NullDriver;

/// xorshift64*: the same numbers everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator; the seed must not be 0.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.max(1))
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Log-uniform in `[512, most)`, bytes.
    pub fn size(&mut self, most: usize) -> usize {
        let unit = (self.bits() >> 11) as f64 / (1u64 << 53) as f64;
        (512.0 * (most as f64 / 512.0).powf(unit)) as usize
    }
}

/// A pool over no device, and a stream.
#[must_use]
pub fn null_pool() -> (Pool, Stream) {
    let driver = NullDriver::shared();
    match (Stream::new(&driver), Pool::new(driver.clone(), PoolConfig::vmm())) {
        (Ok(stream), Ok(pool)) => (pool, stream),
        (stream, pool) => panic!("the null driver failed: {:?} {:?}", stream.err(), pool.err()),
    }
}

/// A churn in progress. Sizes and victims are drawn beforehand, so that a step is one drop and one `alloc`.
#[derive(Debug)]
pub struct Churn {
    pool: Pool,
    stream: Stream,
    live: Vec<Option<DeviceSlice<u8>>>,
    plan: Vec<(u32, u32)>,
    at: usize,
}

impl Churn {
    /// Fills the pool with `live` slices of 512 B to `most` bytes and draws `planned` steps, which repeat.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn new(live: usize, most: usize, planned: usize, seed: u64) -> Result<Self, PoolError> {
        let (pool, stream) = null_pool();
        Self::on(pool, stream, live, most, planned, seed)
    }

    /// The same with a pool and a stream of choice.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn on(
        pool: Pool,
        stream: Stream,
        live: usize,
        most: usize,
        planned: usize,
        seed: u64,
    ) -> Result<Self, PoolError> {
        let mut rng = Rng::new(seed);
        let slices = (0..live).map(|_| pool.alloc(rng.size(most), &stream).map(Some)).collect::<Result<_, _>>()?;
        let plan = (0..planned).map(|_| ((rng.bits() % live as u64) as u32, rng.size(most) as u32)).collect();
        Ok(Self { pool, stream, live: slices, plan, at: 0 })
    }

    /// One step.
    ///
    /// # Errors
    /// Those of the pool.
    #[inline]
    pub fn step(&mut self) -> Result<(), PoolError> {
        let (victim, bytes) = self.plan[self.at];
        self.at = if self.at + 1 == self.plan.len() { 0 } else { self.at + 1 };
        self.live[victim as usize] = None;
        self.live[victim as usize] = Some(self.pool.alloc(bytes as usize, &self.stream)?);
        Ok(())
    }

    /// Most bytes reserved and most bytes requested, so far.
    #[must_use]
    pub fn peaks(&self) -> (u64, u64) {
        let stats = self.pool.stats();
        (stats.reserved_bytes.peak, stats.requested_bytes.peak)
    }
}
