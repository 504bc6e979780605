// Runs blocks of a kernel: one fiber a thread, switched at barriers and warp-wide operations.
//
// The order in which runnable fibers are taken is a parameter, so that a test can run a kernel in several orders: a
// missing barrier then shows as other bits. What real hardware leaves undefined or hangs on is a fault here: a barrier
// that not all threads reach, a warp-wide operation that not all lanes reach or that lanes reach at different places.

#include "shim.h"

#include <cstdio>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace evg {

thread_local View view;

namespace {

constexpr unsigned MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 128 << 10;
constexpr unsigned CANARY = 64;

#ifdef __x86_64__
// Saves the callee-saved registers on the stack and switches to another.
extern "C" void evg_switch(void** save, void* to);
asm(R"(
.text
.type evg_switch, @function
evg_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size evg_switch, .-evg_switch
)");
#endif

}  // namespace

enum class State { Ready, Barrier, Warp, Done };

struct Fiber {
    State state;
#ifdef __x86_64__
    void* stack_pointer;
#else
    ucontext_t context;
#endif
    // What it waits with.
    const char* kind;
    unsigned mask;
    uint64_t value;
    // How many warp-wide operations it has done; results lie in the buffer of that parity.
    unsigned operations;
};

struct Warp {
    uint64_t values[2][32];
    unsigned votes[2];
};

struct Machine {
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_THREADS / 32];
    char* stacks = nullptr;
    std::vector<char> shared;
    unsigned threads = 0;
    unsigned current = 0;
    int barrier_votes = 0;
    int barrier_result = 0;
    const Kernel* kernel = nullptr;
    const char* args = nullptr;
    bool faulted = false;
    std::string reason;
#ifdef __x86_64__
    void* scheduler = nullptr;
#else
    ucontext_t scheduler;
#endif
};

// A pointer, as shared variables of kernels are this library's thread-local storage, which is overwritten before each
// block. Not static: the compiler must not believe that nobody else can reach it.
extern thread_local Machine* machine;
thread_local Machine* machine = nullptr;

namespace {

// Only the fiber's own stack is live here; the scheduler goes on.
void leave() {
    Machine& m = *machine;
    Fiber& f = m.fibers[m.current];
#ifdef __x86_64__
    evg_switch(&f.stack_pointer, m.scheduler);
#else
    swapcontext(&f.context, &m.scheduler);
#endif
}

void body() {
    Machine& m = *machine;
    m.kernel->call(m.args);
    m.fibers[m.current].state = State::Done;
    leave();
    abort();
}

void enter(unsigned thread) {
    Machine& m = *machine;
    m.current = thread;
    const unsigned x = view.block.threads.x, y = view.block.threads.y;
    view.lane = {{thread % x, thread / x % y, thread / (x * y)}, thread % 32, thread / 32};
#ifdef __x86_64__
    evg_switch(&m.scheduler, m.fibers[thread].stack_pointer);
#else
    swapcontext(&m.scheduler, &m.fibers[thread].context);
#endif
}

bool prepare_stacks(Machine& m) {
    if (m.stacks) return true;
    void* at = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return false;
    m.stacks = static_cast<char*>(at);
    // Below each stack is a page that nobody may touch.
    for (unsigned i = 0; i < MAX_THREADS; i++) mprotect(m.stacks + i * STACK_BYTES, 4096, PROT_NONE);
    return true;
}

void start(Machine& m, unsigned thread) {
    Fiber& f = m.fibers[thread];
    f.state = State::Ready;
    f.operations = 0;
    char* stack = m.stacks + thread * STACK_BYTES;
#ifdef __x86_64__
    // As `evg_switch` leaves it: six registers, then where to return to; a call leaves the stack 8 off 16.
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&body);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.stack_pointer = top;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stack + 4096;
    f.context.uc_stack.ss_size = STACK_BYTES - 4096;
    f.context.uc_link = nullptr;
    makecontext(&f.context, &body, 0);
#endif
}

// Fills this library's thread-local storage, which is where `__shared__` variables are: what a kernel reads before it
// wrote it is no number.
struct Tls {
    void* start;
    size_t bytes;
};
int find_tls(dl_phdr_info* info, size_t, void* out) {
    const auto here = reinterpret_cast<uintptr_t>(&find_tls);
    bool ours = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& p = info->dlpi_phdr[i];
        const uintptr_t start = info->dlpi_addr + p.p_vaddr;
        if (p.p_type == PT_LOAD && here >= start && here < start + p.p_memsz) ours = true;
        if (p.p_type == PT_TLS) bytes = p.p_memsz;
    }
    if (!ours) return 0;
    *static_cast<Tls*>(out) = {info->dlpi_tls_data, bytes};
    return 1;
}
void poison_shared(const Tls& tls) {
    if (!tls.start) return;
    // The engine's own two variables live there too.
    Machine* const kept = machine;
    const View kept_view = view;
    memset(tls.start, 0xFF, tls.bytes);
    machine = kept;
    view = kept_view;
}

std::string place(unsigned thread) {
    char text[160];
    const auto& b = view.block.index;
    snprintf(text, sizeof text, "thread %u of block (%u, %u, %u)", thread, b.x, b.y, b.z);
    return text;
}

bool fail(Machine& m, std::string reason) {
    m.faulted = true;
    m.reason = std::move(reason);
    return false;
}

// Lets a warp go on whose living lanes all wait for each other. False: a fault, or nothing to do.
bool release_warp(Machine& m, unsigned warp, bool& progress) {
    const unsigned first = warp * 32, count = m.threads - first < 32 ? m.threads - first : 32;
    unsigned waiting = 0, done = 0, at_barrier = 0, example = first;
    for (unsigned i = 0; i < count; i++) {
        const Fiber& f = m.fibers[first + i];
        if (f.state == State::Warp) waiting++, example = first + i;
        if (f.state == State::Done) done++;
        if (f.state == State::Barrier) at_barrier++;
    }
    if (waiting == 0 || waiting + done + at_barrier < count) return true;
    const Fiber& f = m.fibers[example];
    if (done)
        return fail(m, std::string(f.kind) + " that not all lanes reach: " + std::to_string(done) +
                           " lanes of the warp have ended; waiting is " + place(example));
    if (at_barrier)
        return fail(m, std::string(f.kind) + " that not all lanes reach: " + std::to_string(at_barrier) +
                           " lanes of the warp wait at __syncthreads; waiting is " + place(example));
    Warp& w = m.warps[warp];
    const unsigned parity = f.operations & 1;
    w.votes[parity] = 0;
    for (unsigned i = 0; i < count; i++) {
        const Fiber& other = m.fibers[first + i];
        if (strcmp(other.kind, f.kind) != 0)
            return fail(m, std::string("lanes of one warp at different places: ") + f.kind + " and " + other.kind +
                               ", " + place(first + i));
        if (other.mask != 0xFFFFFFFFu) return fail(m, std::string(f.kind) + " with a mask that is not the whole warp");
        w.values[parity][i] = other.value;
        w.votes[parity] |= (other.value != 0 ? 1u : 0u) << i;
    }
    // Lanes that are not there bring zeros: whole warps are the rule, so this only matters for odd blocks.
    for (unsigned i = count; i < 32; i++) w.values[parity][i] = 0;
    for (unsigned i = 0; i < count; i++) m.fibers[first + i].state = State::Ready;
    progress = true;
    return true;
}

bool run_block(Machine& m, unsigned order) {
    const unsigned warps = (m.threads + 31) / 32;
    uint64_t random = order * 0x9E3779B97F4A7C15ull + 1;
    for (unsigned i = 0; i < m.threads; i++) start(m, i);
    for (;;) {
        bool progress = false;
        unsigned begin = 0;
        if (order > 1) {
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            begin = unsigned(random % m.threads);
        }
        for (unsigned i = 0; i < m.threads; i++) {
            unsigned thread = (begin + i) % m.threads;
            if (order % 2 == 1) thread = m.threads - 1 - thread;
            if (m.fibers[thread].state != State::Ready) continue;
            progress = true;
            enter(thread);
            if (m.faulted) {
                m.reason += ", " + place(thread);
                return false;
            }
        }
        for (unsigned warp = 0; warp < warps; warp++)
            if (!release_warp(m, warp, progress)) return false;
        unsigned done = 0, at_barrier = 0;
        for (unsigned i = 0; i < m.threads; i++) {
            done += m.fibers[i].state == State::Done;
            at_barrier += m.fibers[i].state == State::Barrier;
        }
        if (done == m.threads) return true;
        if (at_barrier == m.threads) {
            m.barrier_result = m.barrier_votes;
            m.barrier_votes = 0;
            for (unsigned i = 0; i < m.threads; i++) m.fibers[i].state = State::Ready;
            continue;
        }
        if (!progress) {
            unsigned waiting = 0;
            while (m.fibers[waiting].state != State::Barrier) waiting++;
            return fail(m, "__syncthreads that not all threads reach: " + std::to_string(done) + " of " +
                               std::to_string(m.threads) + " threads have ended; waiting is " + place(waiting));
        }
    }
}

// A stray access ends the process; at least say whose it was.
void stray(int, siginfo_t* info, void*) {
    if (Machine* m = machine; m && m->kernel) {
        char text[256];
        const auto& b = view.block.index;
        const int n = snprintf(text, sizeof text, "emulated kernel %s: stray access at %p, thread %u of block (%u, %u, %u)\n",
                               m->kernel->name, info->si_addr, m->current, b.x, b.y, b.z);
        if (write(2, text, size_t(n)) < 0) abort();
    }
    signal(SIGSEGV, SIG_DFL);
}

// Machines are kept for the next launch: their stacks are dear.
std::mutex idle_lock;
std::vector<Machine*> idle;
Machine* borrow() {
    std::lock_guard<std::mutex> guard(idle_lock);
    if (idle.empty()) return new Machine;
    Machine* m = idle.back();
    idle.pop_back();
    return m;
}
void give_back(Machine* m) {
    std::lock_guard<std::mutex> guard(idle_lock);
    idle.push_back(m);
}

std::vector<Kernel>& kernels() {
    static std::vector<Kernel> list;
    return list;
}

}  // namespace

void enlist(const Kernel& kernel) { kernels().push_back(kernel); }

[[noreturn]] void fault(const char* reason) {
    machine->faulted = true;
    machine->reason = reason;
    leave();
    abort();
}

void barrier() {
    machine->fibers[machine->current].state = State::Barrier;
    leave();
}

int barrier_count(int value) {
    machine->barrier_votes += value != 0;
    barrier();
    return machine->barrier_result;
}

static Warp& meet(const char* kind, unsigned mask, uint64_t value, unsigned& parity) {
    Fiber& f = machine->fibers[machine->current];
    f.kind = kind;
    f.mask = mask;
    f.value = value;
    f.state = State::Warp;
    leave();
    parity = f.operations++ & 1;
    return machine->warps[machine->current / 32];
}

uint64_t exchange(const char* kind, unsigned mask, uint64_t value, unsigned source) {
    unsigned parity;
    const Warp& warp = meet(kind, mask, value, parity);
    return warp.values[parity][source % 32];
}

unsigned ballot(const char* kind, unsigned mask, bool value) {
    unsigned parity;
    const Warp& warp = meet(kind, mask, value, parity);
    return warp.votes[parity];
}

}  // namespace evg

// What the host program calls.
#define EVG_API __attribute__((visibility("default")))
extern "C" {

EVG_API unsigned evg_emulated_count() { return unsigned(evg::kernels().size()); }

// The kernel's name; its parameters as pairs (offset, bytes).
EVG_API const char* evg_emulated_kernel(unsigned index, const uint32_t** parameters, unsigned* count, unsigned* args_bytes) {
    const evg::Kernel& kernel = evg::kernels()[index];
    *parameters = reinterpret_cast<const uint32_t*>(kernel.parameters);
    *count = kernel.parameter_count;
    *args_bytes = kernel.args_bytes;
    return kernel.name;
}

// Runs blocks `first .. first + blocks` of the grid (x fastest). `order` is that of threads: 0 up, 1 down, others mixed.
// Returns 0, or 1 with the fault in `message`.
EVG_API int evg_emulated_run(unsigned index, const uint32_t grid[3], const uint32_t block[3], uint32_t shared_bytes,
                     const char* args, uint64_t first, uint64_t blocks, unsigned order, char* message, size_t message_bytes) {
    using namespace evg;
    // On the heap: thread-local storage of this library is what kernels share.
    struct Borrow {
        Machine* m = borrow();
        ~Borrow() {
            machine = nullptr;
            give_back(m);
        }
    } borrowed;
    Machine& m = *borrowed.m;
    auto say = [&](const std::string& reason) {
        snprintf(message, message_bytes, "%s", reason.c_str());
        return 1;
    };
    m.kernel = &kernels()[index];
    m.args = args;
    const uint64_t threads = uint64_t(block[0]) * block[1] * block[2];
    if (threads == 0 || threads > MAX_THREADS) return say("a block of " + std::to_string(threads) + " threads");
    m.threads = unsigned(threads);
    if (!prepare_stacks(m)) return say("no memory for stacks");
    m.barrier_votes = 0;
    m.shared.resize(shared_bytes + CANARY + 16);
    char* shared = m.shared.data() + (16 - reinterpret_cast<uintptr_t>(m.shared.data()) % 16) % 16;
    static const bool handler = [] {
        struct sigaction action = {};
        action.sa_sigaction = stray;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        // It replaces the host program's, which knows less.
        return sigaction(SIGSEGV, &action, nullptr) == 0;
    }();
    (void)handler;
    machine = &m;
    view = {};
    Tls tls = {nullptr, 0};
    dl_iterate_phdr(find_tls, &tls);
    for (uint64_t i = first; i < first + blocks; i++) {
        memset(shared, 0xFF, shared_bytes);
        memset(shared + shared_bytes, 0xA5, CANARY);
        poison_shared(tls);
        view.block = {{unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / grid[0] / grid[1])},
                      {block[0], block[1], block[2]},
                      {grid[0], grid[1], grid[2]},
                      shared};
        m.faulted = false;
        if (!run_block(m, order)) return say(m.reason);
        for (unsigned c = 0; c < CANARY; c++)
            if (static_cast<unsigned char>(shared[shared_bytes + c]) != 0xA5)
                return say("wrote past the dynamic shared memory of the launch, " + place(0));
    }
    return 0;
}
}
