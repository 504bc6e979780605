//! A checked request: after this, no size can wrap.

/// The largest request, bytes: the address space of the devices in question.
pub(crate) const MAX_REQUEST_BYTES: u64 = 1 << 47;

/// Why a request never reaches the heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BadRequest {
    /// Nothing was asked for. Zero-sized slices are the runtime's business.
    Zero,
    /// More than any device's address space, or rounding up would wrap.
    TooLarge,
    /// The alignment is not a power of two, or larger than the address space.
    Align,
}

/// Bytes and alignment, rounded to the heap's granule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    pub(super) requested_bytes: u64,
    pub(super) bytes: u64,
    pub(super) align: u64,
}

impl Request {
    /// Checks and rounds. `granule_bytes` is a power of two (see `HeapConfig`); `align` 0 or 1 means "any".
    #[inline]
    pub(crate) fn new(bytes: u64, align: u64, granule_bytes: u64) -> Result<Self, BadRequest> {
        if bytes == 0 {
            return Err(BadRequest::Zero);
        }
        if bytes > MAX_REQUEST_BYTES {
            return Err(BadRequest::TooLarge);
        }
        let align = align.max(1);
        if !align.is_power_of_two() || align > MAX_REQUEST_BYTES {
            return Err(BadRequest::Align);
        }
        let mask = granule_bytes - 1;
        Ok(Self { requested_bytes: bytes, bytes: (bytes + mask) & !mask, align: align.max(granule_bytes) })
    }

    /// What the caller asked for.
    pub(crate) fn requested_bytes(&self) -> u64 {
        self.requested_bytes
    }

    /// What the block must be aligned to; the granule at least.
    pub(crate) fn align_bytes(&self) -> u64 {
        self.align
    }

    /// Rounded up to whole granules.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}
