//! Threads and cores.

/// The cores that this process may use, if there are at least `threads`; else none. Of those that share their units, such as the two
/// threads of one core, the second comes after the first of all others.
#[cfg(target_os = "linux")]
pub(super) fn cores(threads: usize) -> Vec<usize> {
    let mut mask = [0u64; WORDS];
    // SAFETY: the mask is as long as is said.
    #[allow(unsafe_code)]
    let failed = unsafe { sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr()) } != 0;
    let list: Vec<usize> = (0..64 * WORDS).filter(|core| mask[core / 64] >> (core % 64) & 1 == 1).collect();
    if failed || list.len() < threads { Vec::new() } else { apart(&list, first_of) }
}

/// The first of the cores that share their units with this one; itself where the system does not say.
#[cfg(target_os = "linux")]
fn first_of(core: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(path).unwrap_or_default();
    list.split([',', '-', '\n']).next().and_then(|first| first.parse().ok()).unwrap_or(core)
}

/// Cores in an order in which those that share their units are far apart: the firsts, then the seconds.
#[cfg(any(target_os = "linux", test))]
pub(super) fn apart(cores: &[usize], first_of: impl Fn(usize) -> usize) -> Vec<usize> {
    let firsts: Vec<usize> = cores.iter().map(|&core| first_of(core)).collect();
    let rank = |at: usize| firsts[..at].iter().filter(|first| **first == firsts[at]).count();
    let mut order: Vec<usize> = (0..cores.len()).collect();
    order.sort_by_key(|&at| rank(at));
    order.into_iter().map(|at| cores[at]).collect()
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
