//! Sizes of the kernels for few tokens. The templates `MatVec` and `MatVecFloats` of `matvec.cuh` and `matvec_floats.cuh`
//! compute the same ones; in emulation, a kernel that writes past the shared memory that it was launched with is a fault.

use evergraph_pool::driver::LaunchConfig;

use crate::quant::QuantType;

/// Threads of a block.
const THREADS: u32 = 256;
const WARPS: usize = 8;

/// Dynamic shared memory of a block at most.
const SHARED_BYTES: usize = 47 * 1024;

/// Blocks that a multiprocessor runs at once, about: more rows than they have warps for are taken in turns.
const RESIDENT_BLOCKS: usize = 4;

/// One kernel for few tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatVec {
    pub(super) ty: QuantType,
    /// Whether activations are 8-bit integers.
    pub(super) eights: bool,
    /// Tokens that the kernel takes at a time.
    pub(super) tokens: usize,
}

impl MatVec {
    /// Rows that a warp takes at a time.
    fn rows(self) -> usize {
        let two = if self.ty.block_size() == 1 { true } else { self.step_bytes() <= 640 };
        if two && (self.eights || self.tokens == 1) { 2 } else { 1 }
    }

    /// Bytes of 32 units of 32 elements.
    fn step_bytes(self) -> usize {
        1024 / self.ty.block_size() * self.ty.type_bytes()
    }

    /// Warps that share rows: depends on the columns only, as the sums' order does.
    fn parts(self, cols: usize) -> usize {
        if self.ty.block_size() == 1 {
            let pieces = cols / (16 / self.ty.type_bytes());
            return pieces.div_ceil(128).clamp(1, WARPS).next_power_of_two();
        }
        let steps = cols.div_ceil(1024);
        match steps {
            _ if !self.eights => 1,
            8.. if steps.is_multiple_of(4) => 4,
            _ if steps.is_multiple_of(2) => 2,
            _ => 1,
        }
    }

    fn shared_bytes(self, cols: usize) -> usize {
        if self.ty.block_size() == 1 {
            return 0;
        }
        let stages = if self.tokens == 1 && self.step_bytes() <= 1088 { 3 } else { 2 };
        let rings = WARPS * stages * self.rows() * (self.step_bytes() + 30) / 16 * 16;
        let unit_bytes = if self.eights { 48 } else { 144 };
        let fit = (SHARED_BYTES - rings) / (self.tokens * unit_bytes) / 32 * 32;
        let chunk = fit.min(256);
        // The last token needs no more than there is.
        rings + ((self.tokens - 1) * chunk + chunk.min(cols / 32)) * unit_bytes
    }

    /// The launch for `out` rows of `cols` columns, `times` times: groups of tokens, or slots.
    pub(super) fn config(self, out: usize, cols: usize, times: usize, multiprocessors: u32) -> LaunchConfig {
        let times = times.max(1);
        let groups = out.div_ceil(WARPS / self.parts(cols) * self.rows()).max(1);
        let resident = multiprocessors.max(1) as usize * RESIDENT_BLOCKS;
        // All blocks take the same number of turns, or one less.
        let turns = groups.saturating_mul(times).div_ceil(resident);
        let mut config = LaunchConfig::linear(to_u32(groups.div_ceil(turns.max(1))), THREADS);
        config.grid[1] = to_u32(times);
        config.shared_bytes = to_u32(self.shared_bytes(cols));
        config
    }
}

pub(super) fn to_u32(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
