//! Whether tiles may be used: the processor must have them, the system must keep them across a switch of threads, and
//! Linux must have been asked, once for the process.

use std::arch::x86_64::{__cpuid_count, __get_cpuid_max, _xgetbv};
use std::sync::OnceLock;

use crate::cpu::sets::{Limit, VARIABLE};

/// What is missing for products by tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(in crate::cpu) enum Missing {
    #[error("{VARIABLE} keeps it out")]
    Limit,
    #[error("this processor does not have it, or a hypervisor hides it (CPUID leaf 7, EDX bits 24 and 25)")]
    Processor,
    #[error("tiles have another shape than 8 of 16 rows of 64 bytes (CPUID leaf 0x1D)")]
    Shape,
    #[error("results of tiles are scaled with AVX-512 VNNI, which is not there")]
    Vnni,
    #[error("the system does not keep tiles across a switch of threads (XCR0 bits 17 and 18)")]
    System,
    #[error("the system refuses it to this process (arch_prctl ARCH_REQ_XCOMP_PERM: error {0})")]
    Refused(i64),
}

/// What is missing; asks for the permission when it is called first.
pub(in crate::cpu) fn missing() -> Option<Missing> {
    static MISSING: OnceLock<Option<Missing>> = OnceLock::new();
    *MISSING.get_or_init(|| look(Limit::current() >= Limit::Amx).err())
}

fn look(allowed: bool) -> Result<(), Missing> {
    let need = |is: bool, missing| if is { Ok(()) } else { Err(missing) };
    need(allowed, Missing::Limit)?;
    let leaf = |leaf, sub| {
        let (most, _) = __get_cpuid_max(0);
        if leaf <= most { Some(__cpuid_count(leaf, sub)) } else { None }
    };
    const BITS: u32 = 1 << 24 | 1 << 25;
    need(leaf(7, 0).is_some_and(|leaf| leaf.edx & BITS == BITS), Missing::Processor)?;
    // Palette 1: tiles and bytes of a row; rows.
    let shape = leaf(0x1D, 1).map(|leaf| (leaf.ebx, leaf.ecx & 0xFFFF));
    need(shape == Some((8 << 16 | 64, 16)), Missing::Shape)?;
    let avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
    let avx512 = avx512 && is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512vl");
    need(avx512 && is_x86_feature_detected!("avx512vnni"), Missing::Vnni)?;
    const KEPT: u64 = 1 << 17 | 1 << 18;
    // Without the feature the instruction is none.
    #[target_feature(enable = "xsave")]
    fn xcr0() -> u64 {
        // SAFETY: register 0 is there with XSAVE.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: the feature is looked for first.
    let xcr0 = if is_x86_feature_detected!("xsave") { unsafe { xcr0() } } else { 0 };
    need(xcr0 & KEPT == KEPT, Missing::System)?;
    ask().map_err(Missing::Refused)
}

/// Asks for the state component of tiles, for all threads of the process, those to come included.
#[cfg(target_os = "linux")]
fn ask() -> Result<(), i64> {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: the call reads nothing but its registers, and changes what the kernel may save for this process.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    if result == 0 { Ok(()) } else { Err(-result) }
}

/// Nobody else is known to give it.
#[cfg(not(target_os = "linux"))]
fn ask() -> Result<(), i64> {
    Err(0)
}

#[cfg(test)]
mod tests;
