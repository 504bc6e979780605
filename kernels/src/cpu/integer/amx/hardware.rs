//! The processor's tiles. Stable Rust has no intrinsics for them, so these are their instructions.
//!
//! The compiler never uses tiles by itself. What a block of instructions leaves in them is of no use to a later one: all
//! that lives on between is the configuration.

use std::arch::asm;

use super::{ROWS, SUMS, Step};
use crate::cpu::gemm::{DEPTH, PANEL};

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
#[cfg_attr(test, derive(zerocopy::IntoBytes, zerocopy::Immutable))]
pub(super) struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row.
    bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Configuration>() == 64);

/// Tiles 0 to 3 are C, sums of 16 tokens; 4 and 7 are A, codes of 16 rows; 5 and 6 are B, four columns of 16 tokens a row.
pub(super) const fn configuration(group: usize) -> Configuration {
    let (mut bytes, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < 8 {
        (bytes[tile], rows[tile]) = match tile {
            4 | 7 => (group as u16, ROWS as u8),
            5 | 6 => (4 * PANEL as u16, (group / 4) as u8),
            _ => (4 * PANEL as u16, ROWS as u8),
        };
        tile += 1;
    }
    Configuration { palette: 1, start_row: 0, reserved: [0; 14], bytes, rows }
}

/// # Safety
/// The process may use tiles. Groups have 16 columns or 32.
pub(super) unsafe fn configure(group: usize) {
    let configuration = configuration(group);
    // SAFETY: by the caller; 64 bytes are read.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly)) };
}

/// # Safety
/// The process may use tiles.
pub(super) unsafe fn release() {
    // SAFETY: by the caller. Nobody needs what is in them.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

// Rows of codes are `4 * 64` bytes apart, rows of all else 64.
const _: () = assert!(DEPTH == 4 * 64 && 4 * PANEL == 64 && 4 * SUMS == 1024);

/// One group: `$a` is the tile of its codes; then, of each panel, the tiles of its activations and sums, the registers with
/// the addresses of its activations and offsets, and how far behind the first panel's its sums are.
macro_rules! group {
    ($a:literal, $bytes:literal, $($b:literal, $c:literal, $q:literal, $offsets:literal, $behind:literal);+) => {
        concat!(
            "tileloadd ", $a, ", [{codes} + 4*{line}]\n",
            $(
                "tileloadd ", $b, ", [", $q, " + {line}]\n",
                // Without an index the stride is 0: the same line for all rows.
                "tileloadd ", $c, ", [", $offsets, "]\n",
                "tdpbusd ", $c, ", ", $a, ", ", $b, "\n",
            )+
            $("tilestored [{sums} + {line} + ", $behind, "], ", $c, "\n",)+
            "add {codes}, {group}\n",
            $("add ", $q, ", {q_bytes}\n", "add ", $offsets, ", 64\n",)+
            "add {sums}, ", $bytes, "\n",
        )
    };
}

/// Groups in pairs, each of a pair with its own tiles of sums, then one that is left. `{pairs}` counts to 0.
macro_rules! groups {
    ($even:expr, $odd:expr) => {
        concat!(
            "test {pairs}, {pairs}\n",
            "jz 3f\n",
            "2:\n",
            $even,
            $odd,
            "dec {pairs}\n",
            "jnz 2b\n",
            "3:\n",
            "test {left}, {left}\n",
            "jz 4f\n",
            $even,
            "4:\n",
        )
    };
}

/// The sums of some groups. Writes `[group][panel][row][lane]`.
///
/// # Safety
/// Tiles are [configured](configure) for this group. There are `ROWS` rows of codes, `DEPTH` apart, with `groups * group` of
/// them each; as many times `PANEL` activations, `groups * PANEL` offsets of each panel, and room for all sums.
pub(super) unsafe fn products<const V: usize>(group: usize, step: Step<'_, V>) {
    const { assert!(V == 1 || V == 2) };
    let (codes, sums) = (step.codes.as_ptr(), step.sums.as_mut_ptr());
    let (pairs, left) = (step.groups / 2, step.groups % 2);
    let (q, offsets) = (step.q.map(<[i8]>::as_ptr), step.offsets.map(<[i32]>::as_ptr));
    match (&q[..], &offsets[..]) {
        // SAFETY: by the caller. The tiles that are written are named.
        ([q], [offsets]) => unsafe {
            asm!(
                groups!(
                    group!("tmm4", "1024", "tmm5", "tmm0", "{q}", "{offsets}", "0"),
                    group!("tmm7", "1024", "tmm6", "tmm2", "{q}", "{offsets}", "0")
                ),
                codes = inout(reg) codes => _,
                q = inout(reg) *q => _,
                offsets = inout(reg) *offsets => _,
                sums = inout(reg) sums => _,
                pairs = inout(reg) pairs => _,
                left = in(reg) left,
                line = in(reg) 64usize,
                group = in(reg) group,
                q_bytes = in(reg) group * PANEL,
                out("tmm0") _, out("tmm2") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        },
        // SAFETY: as above.
        ([q, q_2], [offsets, offsets_2]) => unsafe {
            asm!(
                groups!(
                    group!(
                        "tmm4", "2048",
                        "tmm5", "tmm0", "{q}", "{offsets}", "0";
                        "tmm6", "tmm1", "{q_2}", "{offsets_2}", "1024"
                    ),
                    group!(
                        "tmm7", "2048",
                        "tmm5", "tmm2", "{q}", "{offsets}", "0";
                        "tmm6", "tmm3", "{q_2}", "{offsets_2}", "1024"
                    )
                ),
                codes = inout(reg) codes => _,
                q = inout(reg) *q => _,
                q_2 = inout(reg) *q_2 => _,
                offsets = inout(reg) *offsets => _,
                offsets_2 = inout(reg) *offsets_2 => _,
                sums = inout(reg) sums => _,
                pairs = inout(reg) pairs => _,
                left = in(reg) left,
                line = in(reg) 64usize,
                group = in(reg) group,
                q_bytes = in(reg) group * PANEL,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        },
        // There is no other number.
        _ => {}
    }
}
