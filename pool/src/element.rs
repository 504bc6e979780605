//! What a slice may hold.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A plain element type: any bit pattern is a value, no padding, no pointers into the host.
///
/// Implemented for every type that qualifies (integers, floats, `half`'s floats, arrays of them, structs that
/// derive zerocopy's traits).
pub trait Element: FromBytes + IntoBytes + Immutable + KnownLayout + Copy + Send + Sync + 'static {}

impl<T: FromBytes + IntoBytes + Immutable + KnownLayout + Copy + Send + Sync + 'static> Element for T {}
