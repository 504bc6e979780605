//! Tiles in plain Rust, by the operation sections of Intel's Software Developer's Manual, volume 2 (`LDTILECFG`,
//! `TILELOADD`, `TDPBUSD`, `TILESTORED`, `TILEZERO`, `TILERELEASE`). What the processor refuses is an assertion.

use std::cell::RefCell;

use zerocopy::IntoBytes;

use super::hardware::Configuration;
use super::{Step, Unit};
use crate::cpu::gemm::{DEPTH, PANEL};

#[cfg(target_os = "linux")]
pub(in crate::cpu) mod trap;

const ROWS: usize = 16;
const BYTES: usize = 64;

/// The eight tiles of a thread.
struct Machine {
    configured: bool,
    rows: [usize; 8],
    bytes: [usize; 8],
    tiles: [[[u8; BYTES]; ROWS]; 8],
}

thread_local! {
    static MACHINE: RefCell<Machine> = const { RefCell::new(Machine::new()) };
}

impl Machine {
    const fn new() -> Self {
        Self { configured: false, rows: [0; 8], bytes: [0; 8], tiles: [[[0; BYTES]; ROWS]; 8] }
    }

    /// `ldtilecfg`.
    fn configure(&mut self, from: &[u8; 64]) {
        *self = Self::new();
        assert_eq!((from[0], from[1]), (1, 0), "palette, first row");
        assert!(from[2..16].iter().chain(&from[32..48]).chain(&from[56..]).all(|&b| b == 0), "what is reserved is 0");
        for tile in 0..8 {
            self.bytes[tile] = usize::from(u16::from_le_bytes([from[16 + 2 * tile], from[17 + 2 * tile]]));
            self.rows[tile] = usize::from(from[48 + tile]);
            assert!(self.rows[tile] <= ROWS && self.bytes[tile] <= BYTES, "tile {tile} is too large");
            assert_eq!(self.rows[tile] == 0, self.bytes[tile] == 0, "tile {tile} has rows and bytes, or neither");
        }
        self.configured = true;
    }

    /// What an instruction needs of a tile.
    fn usable(&self, tile: usize) {
        assert!(self.configured && self.rows[tile] > 0, "tile {tile} is not configured");
    }

    /// `tileloadd`.
    ///
    /// # Safety
    /// The rows can be read.
    unsafe fn load(&mut self, tile: usize, from: *const u8, stride: usize) {
        self.usable(tile);
        // What is behind a row's end, or below the last row, becomes 0.
        self.tiles[tile] = [[0; BYTES]; ROWS];
        for row in 0..self.rows[tile] {
            // SAFETY: by the caller.
            let bytes = unsafe { std::slice::from_raw_parts(from.wrapping_add(row * stride), self.bytes[tile]) };
            self.tiles[tile][row][..self.bytes[tile]].copy_from_slice(bytes);
        }
    }

    /// `tilestored`.
    ///
    /// # Safety
    /// The rows can be written.
    unsafe fn store(&self, tile: usize, to: *mut u8, stride: usize) {
        self.usable(tile);
        for row in 0..self.rows[tile] {
            // SAFETY: by the caller.
            let bytes = unsafe { std::slice::from_raw_parts_mut(to.wrapping_add(row * stride), self.bytes[tile]) };
            bytes.copy_from_slice(&self.tiles[tile][row][..self.bytes[tile]]);
        }
    }

    /// `tilezero`.
    fn zero(&mut self, tile: usize) {
        self.usable(tile);
        self.tiles[tile] = [[0; BYTES]; ROWS];
    }

    /// `tdpbusd c, a, b`: bytes of `a` are unsigned, of `b` signed.
    fn multiply(&mut self, c: usize, a: usize, b: usize) {
        [c, a, b].iter().for_each(|&tile| self.usable(tile));
        assert!(c != a && c != b && a != b, "three tiles");
        assert_eq!(self.rows[c], self.rows[a], "rows of tiles {c} and {a}");
        assert_eq!(self.bytes[c], self.bytes[b], "columns of tiles {c} and {b}");
        assert_eq!(self.bytes[a], 4 * self.rows[b], "columns of tile {a}, rows of tile {b}");
        let (mut sums, a_tile, b_tile) = (self.tiles[c], &self.tiles[a], &self.tiles[b]);
        for (sums, codes) in sums.iter_mut().zip(a_tile).take(self.rows[c]) {
            for (k, codes) in codes.as_chunks::<4>().0.iter().enumerate().take(self.bytes[a] / 4) {
                let columns = sums.as_chunks_mut::<4>().0.iter_mut().zip(b_tile[k].as_chunks::<4>().0);
                for (sum, q) in columns.take(self.bytes[c] / 4) {
                    let more: i32 = codes.iter().zip(q).map(|(&code, &q)| i32::from(code) * i32::from(q as i8)).sum();
                    *sum = i32::from_le_bytes(*sum).wrapping_add(more).to_le_bytes();
                }
            }
        }
        self.tiles[c] = sums;
    }
}

pub(super) fn configure(configuration: &Configuration) {
    let mut bytes = [0; 64];
    bytes.copy_from_slice(configuration.as_bytes());
    MACHINE.with_borrow_mut(|machine| machine.configure(&bytes));
}

pub(super) fn release() {
    MACHINE.set(Machine::new());
}

/// Whether this thread's tiles are configured.
pub(super) fn in_use() -> bool {
    MACHINE.with_borrow(|machine| machine.configured)
}

/// What the processor's tiles do in `hardware::products`.
pub(super) fn products<const V: usize>(group: usize, step: Step<'_, V>) {
    MACHINE.with_borrow_mut(|machine| {
        for g in 0..step.groups {
            // SAFETY: there are as many numbers in all lists, which the caller has checked.
            unsafe {
                machine.load(4, step.codes[g * group..].as_ptr(), DEPTH);
                for v in 0..V {
                    machine.load(5, step.q[v][g * group * PANEL..].as_ptr().cast(), 64);
                    machine.load(v, step.offsets[v][g * PANEL..].as_ptr().cast(), 0);
                    machine.multiply(v, 4, 5);
                    machine.store(v, step.sums[(g * V + v) * super::SUMS..].as_mut_ptr().cast(), 64);
                }
            }
        }
    });
}

/// The units that can be tried here: the emulated one, and the processor's, or its instructions if something stands in for them.
pub(in crate::cpu) fn units() -> Vec<Unit> {
    let mut units = vec![Unit::Emulated];
    #[cfg(target_os = "linux")]
    if super::missing().is_none() || trap::install() {
        units.push(Unit::Hardware);
    }
    units
}
