//! How a host device is set up.

/// What fresh memory holds. Never zeros by luck: a test that forgets to clear must see it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Poison {
    /// Whatever the system gives.
    Off,
    /// The pattern in the first and last 64 KiB of each piece (all of it up to 128 KiB). Touches few pages, so
    /// that a large piece costs neither time nor resident memory.
    Ends,
    /// The pattern everywhere.
    Full,
}

/// A host device's size, kind and strictness. Built up by its methods from [`HostConfig::default`]: 16 GiB, 2 MiB
/// granularity, VMM, threads.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HostConfig {
    /// Memory of each device, bytes.
    pub memory_bytes: usize,
    /// Unit of reserve, create and map, bytes; a power of two of at least 4096.
    pub granularity_bytes: usize,
    /// Whether streams run only when somebody waits, asks or steps, on that thread, instead of on threads of
    /// their own.
    pub stepped: bool,
    /// Whether address ranges and pages can be managed apart.
    pub vmm: bool,
    /// Largest single reservation that is not refused, bytes.
    pub va_limit_bytes: Option<usize>,
    /// What fresh memory holds.
    pub poison: Poison,
    /// Whether the devices of a machine can reach each other.
    pub peers: bool,
    /// Whether a module load counts as unsafe during a capture (drivers before 12.3).
    pub module_load_breaks_capture: bool,
    /// Whether calls that drivers have been seen to let pass during a capture count as unsafe all the same: the VMM
    /// calls, exec-update, upload, destroying a graph. No driver promises that they pass.
    pub strict_captures: bool,
    /// Device memory that an instantiated graph takes, bytes a node.
    pub exec_bytes_per_node: usize,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            memory_bytes: 16 << 30,
            granularity_bytes: 2 << 20,
            stepped: false,
            vmm: true,
            va_limit_bytes: None,
            poison: Poison::Ends,
            peers: true,
            module_load_breaks_capture: true,
            strict_captures: true,
            exec_bytes_per_node: 0,
        }
    }
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $field:ident = $ty:ty;)*) => {
        impl HostConfig {$(
            $(#[$doc])*
            #[must_use]
            pub fn $name(mut self, value: $ty) -> Self {
                self.$field = value.into();
                self
            }
        )*}
    };
}

setters! {
    /// Sets the memory of each device, bytes.
    memory: memory_bytes = usize;
    /// Sets the granularity, bytes.
    granularity: granularity_bytes = usize;
    /// Sets deterministic stepping on or off.
    stepped: stepped = bool;
    /// Sets VMM on or off; off leaves `malloc`.
    vmm: vmm = bool;
    /// Refuses reservations larger than this, bytes.
    va_limit: va_limit_bytes = usize;
    /// Sets what fresh memory holds.
    poison: poison = Poison;
    /// Sets whether devices reach each other.
    peers: peers = bool;
    /// Sets whether a module load counts as unsafe during a capture.
    module_load_breaks_capture: module_load_breaks_capture = bool;
    /// Sets whether calls that drivers let pass during a capture count as unsafe.
    strict_captures: strict_captures = bool;
    /// Sets the device memory that an instantiated graph takes, bytes a node.
    exec_bytes_per_node: exec_bytes_per_node = usize;
}
