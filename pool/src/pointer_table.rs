//! Addresses that live in device memory.

use crate::{DeviceSlice, Token, Tracked, Use};

/// A device slice of addresses, with the allocations that they point at.
///
/// A scan of a graph's arguments can not see addresses that kernels load from memory, so whoever declares the
/// table declares its members with it.
#[derive(Debug)]
pub struct PointerTable {
    pub(crate) slice: DeviceSlice<u64>,
    pub(crate) members: Vec<TableMember>,
}

/// What one address of a [`PointerTable`] points at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableMember {
    /// Which allocation, in which state.
    pub token: Token,
    /// What kernels do with it.
    pub use_: Use,
    /// How long it is, bytes.
    pub bytes: usize,
}

impl PointerTable {
    /// The addresses, in order of the members.
    pub fn slice(&self) -> &DeviceSlice<u64> {
        &self.slice
    }

    /// What they point at.
    #[must_use]
    pub fn members(&self) -> &[TableMember] {
        &self.members
    }

    pub(crate) fn member(memory: &dyn Tracked, use_: Use) -> TableMember {
        TableMember { token: memory.token(), use_, bytes: memory.bytes() }
    }
}
