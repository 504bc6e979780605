//! Threads and cores.

/// The cores that this process may use, if there are at least `threads`; else none.
#[cfg(target_os = "linux")]
pub(super) fn cores(threads: usize) -> Vec<usize> {
    let mut mask = [0u64; WORDS];
    // SAFETY: the mask is as long as is said.
    #[allow(unsafe_code)]
    let failed = unsafe { sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr()) } != 0;
    let list: Vec<usize> = (0..64 * WORDS).filter(|core| mask[core / 64] >> (core % 64) & 1 == 1).collect();
    if failed || list.len() < threads { Vec::new() } else { list }
}

/// Keeps this thread on a core. If the system refuses it runs anywhere.
#[cfg(target_os = "linux")]
pub(super) fn to(core: usize) {
    let mut mask = [0u64; WORDS];
    mask[core / 64 % WORDS] = 1 << (core % 64);
    // SAFETY: the mask is as long as is said.
    #[allow(unsafe_code)]
    unsafe {
        sched_setaffinity(0, size_of_val(&mask), mask.as_ptr());
    }
}

/// Words of a mask: 1024 cores, as in the C library.
#[cfg(target_os = "linux")]
const WORDS: usize = 16;

// The standard library links the C library.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
unsafe extern "C" {
    fn sched_getaffinity(thread: i32, bytes: usize, mask: *mut u64) -> i32;
    fn sched_setaffinity(thread: i32, bytes: usize, mask: *const u64) -> i32;
}

#[cfg(not(target_os = "linux"))]
pub(super) fn cores(_: usize) -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn to(_: usize) {}
