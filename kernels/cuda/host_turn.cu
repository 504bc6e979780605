// The two sides of a turn: the device asks the host for work and, later in the same stream, waits for the answer.
#include "common.cuh"

// Words that the host reads and writes too.
EVG_DEVICE void evg_fence_system() {
#ifdef EVG_EMULATED
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#else
    asm volatile("fence.sc.sys;" ::: "memory");
#endif
}
EVG_DEVICE u32 evg_load_system(const u32* word) {
#ifdef EVG_EMULATED
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#else
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
#endif
}
EVG_DEVICE void evg_store_system(u32* word, u32 value) {
#ifdef EVG_EMULATED
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#else
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#endif
}

// turn[0] += 1; told[0] = turn[0]. What earlier kernels wrote, in host memory too, is to be seen by whoever sees `told`.
EVG_KERNEL(host_ask, EVG_BOUNDS(32))(char* turn, char* told) {
    evg_begin();
    if (threadIdx.x != 0) return;
    const u32 next = at<u32>(turn, 0)[0] + 1u;
    at<u32>(turn, 0)[0] = next;
    evg_fence_system();
    evg_store_system(at<u32>(told, 0), next);
}

// Waits until done[0] is turn[0], or done[1] is not 0: then the host has given up, and the stream goes on with whatever
// is there.
EVG_KERNEL(host_wait, EVG_BOUNDS(32))(const char* turn, const char* done) {
    evg_begin();
    if (threadIdx.x != 0) return;
    const u32 mine = at<u32>(turn, 0)[0];
    while (evg_load_system(at<u32>(done, 0)) != mine && evg_load_system(at<u32>(done, 4)) == 0u);
    evg_fence_system();
}
