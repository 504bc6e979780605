//! Stream sets.

/// A stream, as a small number that the runtime hands out. Numbers may be reused once no block uses them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct StreamKey(pub(crate) u32);

/// A point on the pool's own clock: the runtime counts up once a free. Work queued before a block was freed
/// at `t` was queued before `t`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub(crate) struct Stamp(pub(crate) u64);

/// The set of streams whose queued work may still touch a block. The first 64 streams cost one word; more
/// are exact too, on the heap.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Uses {
    bits: u64,
    // Never holds trailing zero words, and never an empty vector, so that derived equality is set equality.
    #[allow(clippy::box_collection, reason = "one word in every block instead of three")]
    more: Option<Box<Vec<u64>>>,
}

/// Which free index a block with these uses lives in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Home {
    /// Nobody uses it.
    Idle,
    /// One stream does.
    Stream(u32),
    /// Several do.
    Mixed,
}

impl Uses {
    /// Used by nobody.
    #[must_use]
    pub(crate) const fn none() -> Self {
        Self { bits: 0, more: None }
    }

    /// Used by one stream.
    #[must_use]
    #[inline]
    pub(crate) fn one(stream: StreamKey) -> Self {
        let mut uses = Self::none();
        uses.insert(stream);
        uses
    }

    /// Adds a stream.
    #[inline]
    pub(crate) fn insert(&mut self, stream: StreamKey) {
        if stream.0 < 64 {
            self.bits |= 1 << stream.0;
        } else {
            self.insert_far(stream.0 as usize - 64);
        }
    }

    #[cold]
    fn insert_far(&mut self, bit: usize) {
        let words = self.more.get_or_insert_default();
        if words.len() <= bit / 64 {
            words.resize(bit / 64 + 1, 0);
        }
        words[bit / 64] |= 1 << (bit % 64);
    }

    /// Takes a stream out.
    #[inline]
    pub(crate) fn remove(&mut self, stream: StreamKey) {
        if stream.0 < 64 {
            self.bits &= !(1 << stream.0);
        } else if let Some(words) = &mut self.more {
            let bit = stream.0 as usize - 64;
            if let Some(word) = words.get_mut(bit / 64) {
                *word &= !(1 << (bit % 64));
            }
            while words.last() == Some(&0) {
                words.pop();
            }
            if words.is_empty() {
                self.more = None;
            }
        }
    }

    /// Adds every stream of `other`.
    #[inline]
    pub(crate) fn extend(&mut self, other: &Self) {
        self.bits |= other.bits;
        if other.more.is_some() {
            self.extend_far(other);
        }
    }

    #[cold]
    fn extend_far(&mut self, other: &Self) {
        if let Some(theirs) = &other.more {
            let ours = self.more.get_or_insert_default();
            if ours.len() < theirs.len() {
                ours.resize(theirs.len(), 0);
            }
            for (a, b) in ours.iter_mut().zip(theirs.iter()) {
                *a |= b;
            }
        }
    }

    /// Whether `stream` is in the set.
    #[must_use]
    pub(crate) fn contains(&self, stream: StreamKey) -> bool {
        if stream.0 < 64 {
            self.bits >> stream.0 & 1 == 1
        } else {
            let bit = stream.0 as usize - 64;
            self.more.as_ref().and_then(|m| m.get(bit / 64)).is_some_and(|w| w >> (bit % 64) & 1 == 1)
        }
    }

    /// Whether a stream is in both.
    #[must_use]
    #[inline]
    pub(super) fn intersects(&self, other: &Self) -> bool {
        self.bits & other.bits != 0
            || match (&self.more, &other.more) {
                (Some(a), Some(b)) => a.iter().zip(b.iter()).any(|(a, b)| a & b != 0),
                _ => false,
            }
    }

    /// Whether nobody uses it.
    #[must_use]
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.bits == 0 && self.more.is_none()
    }

    /// How many streams.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        let more: u32 = self.more.iter().flat_map(|m| m.iter()).map(|w| w.count_ones()).sum();
        (self.bits.count_ones() + more) as usize
    }

    /// Whether work on `stream` needs no ordering: nobody uses it, or only that stream.
    #[must_use]
    #[inline]
    pub(crate) fn within(&self, stream: StreamKey) -> bool {
        if stream.0 < 64 && self.more.is_none() {
            self.bits & !(1 << stream.0) == 0
        } else {
            self.iter().all(|s| s == stream)
        }
    }

    /// The streams, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = StreamKey> + '_ {
        std::iter::once(self.bits).chain(self.more.iter().flat_map(|m| m.iter().copied())).enumerate().flat_map(
            |(i, word)| (0..64u32).filter(move |b| word >> b & 1 == 1).map(move |b| StreamKey(i as u32 * 64 + b)),
        )
    }

    /// Where a free block with these uses is indexed.
    #[inline]
    pub(super) fn home(&self) -> Home {
        match &self.more {
            None if self.bits == 0 => Home::Idle,
            None if self.bits & (self.bits - 1) == 0 => Home::Stream(self.bits.trailing_zeros()),
            None => Home::Mixed,
            Some(_) => self.far_home(),
        }
    }

    #[cold]
    fn far_home(&self) -> Home {
        match (self.len(), self.iter().next()) {
            (1, Some(stream)) => Home::Stream(stream.0),
            _ => Home::Mixed,
        }
    }
}

impl FromIterator<StreamKey> for Uses {
    fn from_iter<I: IntoIterator<Item = StreamKey>>(streams: I) -> Self {
        let mut uses = Self::none();
        streams.into_iter().for_each(|s| uses.insert(s));
        uses
    }
}
