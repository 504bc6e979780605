//! What every op is tried with: shapes, types, strides and odd values, written once.
//!
//! A [`Case`] builds its tensors from fixed numbers on a device, runs one op, and compares all that it wrote with what
//! the host device's bodies write. Tests run the cases on emulated CUDA kernels; on a machine with a GPU they run on
//! that. Bytes around every tensor and in the gaps of strided ones must stay as they were.

mod attention;
mod compare;
mod compressed;
mod elementwise;
mod fused;
mod heads;
mod moe;
mod products;
mod rows;
mod sample;
mod streams;
mod tensors;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use evergraph_pool::driver::{DriverError, DynDriver, EventHandle, StreamHandle};

pub(crate) use tensors::Tensors;

use crate::ops::Op;
use crate::{KernelError, Kernels};

/// A device to run cases on: its kernels and a stream.
#[derive(Debug)]
pub struct Bench {
    driver: DynDriver,
    kernels: Kernels,
    stream: StreamHandle,
    launches: usize,
}

impl Bench {
    /// A bench on the device of these kernels, with a stream of its own. `launches` are timed per case; 0 means none.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(kernels: Kernels, launches: usize) -> Result<Self, KernelError> {
        let driver = kernels.driver().clone();
        driver.bind()?;
        let stream = driver.stream_create(0)?;
        Ok(Self { driver, kernels, stream, launches })
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &DynDriver {
        &self.driver
    }

    /// The kernels.
    #[must_use]
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The stream that everything runs on.
    #[must_use]
    pub fn stream(&self) -> StreamHandle {
        self.stream
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if self.driver.bind().is_ok() {
            let _ = self.driver.stream_destroy(self.stream);
        }
    }
}

/// What came out of a case.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// Greatest absolute error over the greatest absolute value of the reference, over everything that the op wrote.
    /// Infinite where a whole number, a NaN, an infinity or a byte around the tensors differs.
    pub error: f64,
    /// What `error` may be.
    pub tolerance: f64,
    /// Median time of a launch, microseconds; 0 where none was timed. Nothing else runs, so inputs may come from caches.
    pub micros: f64,
    /// Bytes that a launch reads and writes at least.
    pub bytes: usize,
    /// Where the greatest error is.
    pub place: String,
}

impl Outcome {
    /// Whether the error is within the tolerance.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.error <= self.tolerance
    }
}

type Build = dyn Fn(&mut Tensors<'_>) -> Result<Box<dyn Op>, KernelError> + Send + Sync;

/// One op with its inputs.
#[derive(Clone)]
pub struct Case {
    op: &'static str,
    name: String,
    tolerance: f64,
    bytes: Option<usize>,
    large: bool,
    own_codes: bool,
    build: Arc<Build>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.op, self.name)
    }
}

impl Case {
    /// A case of `op`. `build` makes the inputs from the given tensors; on every device the same ones.
    pub(crate) fn new(
        op: &'static str,
        name: impl Into<String>,
        tolerance: f64,
        build: impl Fn(&mut Tensors<'_>) -> Result<Box<dyn Op>, KernelError> + Send + Sync + 'static,
    ) -> Self {
        Self { op, name: name.into(), tolerance, bytes: None, large: false, own_codes: false, build: Arc::new(build) }
    }

    /// Marks a case that takes seconds without a GPU.
    #[must_use]
    pub(crate) fn large(mut self) -> Self {
        self.large = true;
        self
    }

    /// The bytes that a launch touches, where they are fewer than those of its views.
    #[must_use]
    pub(crate) fn touching(mut self, bytes: usize) -> Self {
        self.bytes = Some(bytes);
        self
    }

    /// Marks a case whose op writes floats, codes and scales first: codes are compared with the floats beside them, since those of
    /// the reference may fall to another side.
    #[must_use]
    pub(crate) fn with_own_codes(mut self, own: bool) -> Self {
        self.own_codes = own;
        self
    }

    /// The op's name.
    #[must_use]
    pub fn op(&self) -> &'static str {
        self.op
    }

    /// What is special about it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it takes seconds without a GPU.
    #[must_use]
    pub fn is_large(&self) -> bool {
        self.large
    }

    /// Runs the op on both benches and compares.
    ///
    /// # Errors
    /// Those of the op and the drivers: a fault of the kernel, no memory.
    pub fn run(&self, under_test: &Bench, reference: &Bench) -> Result<Outcome, KernelError> {
        let (mut tensors, mut wanted) = (Tensors::new(under_test)?, Tensors::new(reference)?);
        let op = (self.build)(&mut tensors)?;
        {
            let op = (self.build)(&mut wanted)?;
            reference.driver.bind()?;
            op.launch(&reference.kernels, reference.stream)?;
            wanted.fetch()?;
        }
        under_test.driver.bind()?;
        op.launch(&under_test.kernels, under_test.stream)?;
        tensors.fetch()?;
        let (writes, mut beside) = (op.writes(), op.leftovers());
        let mut own = None;
        if self.own_codes
            && let [x, q, scales, ..] = writes[..]
        {
            beside.extend([q, scales]);
            own = Some(compare::codes_of_own(&tensors, [x, q, scales]));
        }
        let worst = compare::compare(&tensors, &wanted, &writes, &beside);
        let worst = own.filter(|own| own.error > worst.error).unwrap_or(worst);
        under_test.driver.bind()?;
        let micros = under_test.time(op.as_ref())?;
        let views = op.reads().into_iter().filter(|r| !op.writes().iter().any(|w| w.same_place(r)));
        let writes = op.writes().into_iter().filter(|w| !op.leftovers().iter().any(|left| left.same_place(w)));
        let bytes = || views.chain(writes).map(|v| v.rows() * v.ty().row_bytes(v.cols()).unwrap_or(0)).sum();
        let bytes = self.bytes.unwrap_or_else(bytes);
        Ok(Outcome { error: worst.error, tolerance: self.tolerance, micros, bytes, place: worst.place })
    }
}

impl Bench {
    /// Median time of a launch, microseconds.
    fn time(&self, op: &dyn Op) -> Result<f64, KernelError> {
        if self.launches == 0 {
            return Ok(0.0);
        }
        let events = (Event::new(&self.driver)?, Event::new(&self.driver)?);
        let mut times = Vec::with_capacity(self.launches);
        for _ in 0..self.launches {
            let start = Instant::now();
            self.driver.event_record(events.0.event, self.stream)?;
            op.launch(&self.kernels, self.stream)?;
            self.driver.event_record(events.1.event, self.stream)?;
            self.driver.event_synchronize(events.1.event)?;
            let wall = start.elapsed().as_secs_f64() * 1e6;
            let device = self.driver.event_elapsed_ms(events.0.event, events.1.event);
            times.push(device.map_or(wall, |ms| f64::from(ms) * 1e3));
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

/// An event that is destroyed on drop.
struct Event<'d> {
    driver: &'d DynDriver,
    event: EventHandle,
}

impl<'d> Event<'d> {
    fn new(driver: &'d DynDriver) -> Result<Self, DriverError> {
        Ok(Self { driver, event: driver.event_create(true)? })
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        let _ = self.driver.event_destroy(self.event);
    }
}

/// Every case, op by op.
#[must_use]
pub fn cases() -> Vec<Case> {
    let tables = [
        elementwise::cases,
        rows::cases,
        moe::cases,
        heads::cases,
        attention::cases,
        sample::cases,
        products::cases,
        streams::cases,
        compressed::cases,
        fused::cases,
    ];
    tables.into_iter().flat_map(|cases| cases()).collect()
}
