//! The kernels that the stories launch. All work on `u32` words.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use crate::driver::host::{HostKernel, KernelContext};
use crate::driver::{DevicePtr, Fault};

const PTR: (u32, u32) = (8, 8);
const WORD: (u32, u32) = (4, 4);

/// `gate fill add step alone indirect peek burst mixed`, and `add_wide` (as `add`, with another hidden attribute).
pub static KERNELS: &[HostKernel] = &[
    HostKernel { name: "gate", params: &[PTR], hidden_attribute: 0, body: gate },
    HostKernel { name: "fill", params: &[PTR, WORD, WORD], hidden_attribute: 0, body: fill },
    HostKernel { name: "add", params: &[PTR, PTR, WORD, WORD], hidden_attribute: 0, body: add },
    HostKernel { name: "add_wide", params: &[PTR, PTR, WORD, WORD], hidden_attribute: 4, body: add },
    HostKernel { name: "step", params: &[PTR], hidden_attribute: 0, body: step },
    HostKernel { name: "alone", params: &[PTR, PTR], hidden_attribute: 0, body: alone },
    HostKernel { name: "indirect", params: &[PTR, WORD], hidden_attribute: 0, body: indirect },
    HostKernel { name: "peek", params: &[PTR, WORD], hidden_attribute: 0, body: peek },
    HostKernel { name: "burst", params: &[], hidden_attribute: 0, body: burst },
    HostKernel { name: "mixed", params: &[(16, 8), (1, 1), (8, 8)], hidden_attribute: 0, body: mixed },
    HostKernel { name: "gated_fill", params: &[PTR, PTR, WORD, WORD], hidden_attribute: 0, body: gated_fill },
];

/// Another module with a function of the same name that does something else.
pub static OTHER_KERNELS: &[HostKernel] =
    &[HostKernel { name: "add", params: &[PTR, PTR, WORD, WORD], hidden_attribute: 0, body: subtract }];

fn word<'a>(context: &KernelContext<'a>, ptr: DevicePtr) -> Result<&'a AtomicU32, Fault> {
    // SAFETY: the slice is only turned into an atomic, whose accesses may race.
    let words = unsafe { context.slice_mut::<u32>(ptr, 1)? };
    // SAFETY: the word is mapped, aligned and outlives the launch.
    Ok(unsafe { AtomicU32::from_ptr(words.as_mut_ptr()) })
}

fn wait_open(flag: &AtomicU32) {
    while flag.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
}

/// `gate(flag)`: runs until the word is not zero.
fn gate(context: &KernelContext<'_>) -> Result<(), Fault> {
    wait_open(word(context, context.ptr(0)?)?);
    Ok(())
}

/// `fill(dst, n, value)`.
fn fill(context: &KernelContext<'_>) -> Result<(), Fault> {
    // SAFETY: the stories order everything that touches the words.
    let dst = unsafe { context.slice_mut::<u32>(context.ptr(0)?, context.arg::<u32>(1)? as usize)? };
    dst.fill(context.arg(2)?);
    Ok(())
}

/// `gated_fill(flag, dst, n, value)`: takes `dst`, waits for the flag, then fills.
fn gated_fill(context: &KernelContext<'_>) -> Result<(), Fault> {
    // SAFETY: as `fill`.
    let dst = unsafe { context.slice_mut::<u32>(context.ptr(1)?, context.arg::<u32>(2)? as usize)? };
    let gate = word(context, context.ptr(0)?)?;
    gate.store(2, Ordering::Release);
    while gate.load(Ordering::Acquire) != 1 {
        std::thread::yield_now();
    }
    dst.fill(context.arg(3)?);
    Ok(())
}

fn each(context: &KernelContext<'_>, op: fn(u32, u32) -> u32) -> Result<(), Fault> {
    let len = context.arg::<u32>(2)? as usize;
    let value = context.arg(3)?;
    let (dst, src) = (context.ptr(0)?, context.ptr(1)?);
    // SAFETY: as `fill`; source and destination may be the same words, so they are copied out first.
    let words = unsafe { context.slice::<u32>(src, len)? }.to_vec();
    // SAFETY: as `fill`.
    let out = unsafe { context.slice_mut::<u32>(dst, len)? };
    for (out, word) in out.iter_mut().zip(words) {
        *out = op(word, value);
    }
    Ok(())
}

/// `add(dst, src, n, value)`.
fn add(context: &KernelContext<'_>) -> Result<(), Fault> {
    each(context, u32::wrapping_add)
}

fn subtract(context: &KernelContext<'_>) -> Result<(), Fault> {
    each(context, u32::wrapping_sub)
}

/// `step(counter)`: one more.
fn step(context: &KernelContext<'_>) -> Result<(), Fault> {
    word(context, context.ptr(0)?)?.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// `alone(inside, crowded)`: notes in `crowded` if another launch is inside meanwhile.
fn alone(context: &KernelContext<'_>) -> Result<(), Fault> {
    let inside = word(context, context.ptr(0)?)?;
    if inside.fetch_add(1, Ordering::AcqRel) != 0 {
        word(context, context.ptr(1)?)?.store(1, Ordering::Release);
    }
    for _ in 0..50 {
        std::thread::yield_now();
    }
    inside.fetch_sub(1, Ordering::AcqRel);
    Ok(())
}

/// `indirect(table, value)`: fills one word at the address that lies in device memory.
fn indirect(context: &KernelContext<'_>) -> Result<(), Fault> {
    // SAFETY: as `fill`.
    let target = unsafe { context.slice::<u64>(context.ptr(0)?, 1)? }[0];
    // SAFETY: as `fill`.
    let word = unsafe { context.slice_mut::<u32>(DevicePtr(target), 1)? };
    word[0] = context.arg(1)?;
    Ok(())
}

/// `peek(src, bytes)`: reads bytes.
fn peek(context: &KernelContext<'_>) -> Result<(), Fault> {
    // SAFETY: as `fill`.
    let bytes = unsafe { context.slice::<u8>(context.ptr(0)?, context.arg::<u32>(1)? as usize)? };
    std::hint::black_box(bytes.iter().fold(0u8, |all, byte| all ^ byte));
    Ok(())
}

/// `mixed({dst, n}, a, b)`: fills `n` words with `a + b`; a structure by value, and padding before `b`.
fn mixed(context: &KernelContext<'_>) -> Result<(), Fault> {
    let [dst, n] = context.arg::<[u64; 2]>(0)?;
    // SAFETY: as `fill`.
    let dst = unsafe { context.slice_mut::<u32>(DevicePtr(dst), n as u32 as usize)? };
    dst.fill(u32::from(context.arg::<u8>(1)?).wrapping_add(context.arg::<u64>(2)? as u32));
    Ok(())
}

/// A kernel with a bug.
fn burst(_context: &KernelContext<'_>) -> Result<(), Fault> {
    panic!("index out of bounds")
}
