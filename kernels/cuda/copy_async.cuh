// Copies from global to shared memory that go on while the thread does something else.
#pragma once

#include "common.cuh"

// Both addresses are multiples of 16.
EVG_DEVICE void copy_async_16(u8* to, const u8* from) {
#ifdef EVG_EMULATED
    memcpy(to, from, 16);
#else
    u64 shared;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(shared) : "l"(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(shared)), "l"(from) : "memory");
#endif
}

// Ends a group of copies.
EVG_DEVICE void copy_async_commit() {
#ifndef EVG_EMULATED
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the last `N` groups of this thread are still under way. Other threads see the bytes after a barrier.
template <int N> EVG_DEVICE void copy_async_wait() {
#ifndef EVG_EMULATED
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
