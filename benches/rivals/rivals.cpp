// The same work as benches/src/device/memory.rs, done by other allocators: cudaMallocAsync, and with -DWITH_TORCH PyTorch's
// caching allocator (libtorch, no Python), with -DWITH_RMM RMM's pool, arena and async resources. One JSON line a row.
// benches/device.sh builds and runs it. Sizes, seeds, batches and what is timed must stay as they are over there.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#ifdef WITH_TORCH
#include <c10/cuda/CUDACachingAllocator.h>
#endif
#ifdef WITH_RMM
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#endif

using Clock = std::chrono::steady_clock;

static void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
  }
}

// xorshift64*, as benches/src/churn.rs has it.
struct Rng {
  uint64_t state;
  uint64_t bits() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1dULL;
  }
  size_t size(size_t most) {
    double unit = static_cast<double>(bits() >> 11) / static_cast<double>(1ULL << 53);
    return static_cast<size_t>(512.0 * std::pow(static_cast<double>(most) / 512.0, unit));
  }
};

static double quantile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<size_t>(std::lround(share * static_cast<double>(sorted.size() - 1)))];
}

static void row(const char* bench, const std::string& what, const std::string& who, const char* unit,
                std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  std::printf(
      "{\"bench\":\"%s\",\"case\":\"%s\",\"who\":\"%s\",\"unit\":\"%s\",\"n\":%zu,\"median\":%.3f,\"p10\":%.3f,\"p90\":%.3f}\n",
      bench, what.c_str(), who.c_str(), unit, samples.size(), quantile(samples, 0.5), quantile(samples, 0.1), quantile(samples, 0.9));
  std::fflush(stdout);
}

template <class Alloc, class Free>
struct Work {
  std::string who;
  Alloc alloc;  // (bytes, stream) -> pointer
  Free free;    // (pointer, bytes, stream)
  cudaStream_t streams[2];

  template <class Body>
  static double timed(int times, Body body) {
    auto start = Clock::now();
    for (int i = 0; i < times; ++i) body(i);
    return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / times;
  }

  void settle() {
    check(cudaStreamSynchronize(streams[0]), "synchronize");
    check(cudaStreamSynchronize(streams[1]), "synchronize");
  }

  void pairs() {
    const std::pair<const char*, size_t> sizes[] = {
        {"512 B", 512}, {"64 KiB", 64 << 10}, {"1 MiB", 1 << 20}, {"2 MiB", 2 << 20}, {"64 MiB", 64 << 20}};
    for (auto [name, bytes] : sizes) {
      void* other = alloc(3000, streams[0]);
      auto pair = [&](int) { free(alloc(bytes, streams[0]), bytes, streams[0]); };
      timed(1000, pair);
      std::vector<double> samples;
      for (int batch = 0; batch < 300; ++batch) {
        settle();
        samples.push_back(timed(1000, pair));
      }
      row("alloc + free", name, who, "ns", samples);
      free(other, 3000, streams[0]);
    }
  }

  // `reserved`: most bytes held from the driver so far, 0 where that is not known.
  template <class Reserved>
  void churn(size_t live, size_t most, Reserved reserved) {
    constexpr size_t STEPS = 200000, WORN = 100000, BATCH = 200;
    Rng rng{1};
    std::vector<std::pair<void*, size_t>> slices(live);
    size_t requested = 0, peak = 0;
    for (auto& [ptr, bytes] : slices) {
      bytes = rng.size(most);
      ptr = alloc(bytes, streams[0]);
      peak = requested += bytes;
    }
    std::vector<std::pair<uint32_t, uint32_t>> plan(STEPS);
    for (auto& [victim, bytes] : plan) {
      victim = static_cast<uint32_t>(rng.bits() % live);
      bytes = static_cast<uint32_t>(rng.size(most));
    }
    auto step = [&](size_t i) {
      auto& [ptr, bytes] = slices[plan[i].first];
      free(ptr, bytes, streams[0]);
      bytes = plan[i].second;
      ptr = alloc(bytes, streams[0]);
    };
    std::vector<size_t> sizes(live);
    for (size_t i = 0; i < live; ++i) sizes[i] = slices[i].second;
    for (auto [victim, bytes] : plan) {
      requested += bytes - sizes[victim];
      sizes[victim] = bytes;
      peak = std::max(peak, requested);
    }
    for (size_t i = 0; i < WORN; ++i) step(i);
    std::vector<double> samples;
    for (size_t i = WORN; i < STEPS; i += BATCH) {
      settle();
      samples.push_back(timed(BATCH, [&](int j) { step(i + static_cast<size_t>(j)); }));
    }
    std::string what = std::to_string(live) + " live, .." + std::to_string(most >> 20) + " MiB";
    row("churn step", what, who, "ns", samples);
    if (size_t held = reserved()) {
      row("reserved / requested", what, who, "ratio", {static_cast<double>(held) / static_cast<double>(peak)});
    }
    for (auto& [ptr, bytes] : slices) free(ptr, bytes, streams[0]);
    settle();
  }

  // 2 MiB used by one stream, given to the other.
  void across() {
    for (int count : {1, 2}) {
      auto turn = [&](int i) {
        cudaStream_t stream = streams[i % count];
        void* ptr = alloc(2 << 20, stream);
        check(cudaMemsetAsync(ptr, i, 8, stream), "memset");
        free(ptr, 2 << 20, stream);
      };
      timed(64, turn);
      std::vector<double> samples;
      for (int batch = 0; batch < 300; ++batch) {
        settle();
        samples.push_back(timed(64, turn));
      }
      row("alloc + memset + free, 2 MiB", count == 1 ? "one stream" : "two streams in turn", who, "ns", samples);
    }
  }
};

template <class Alloc, class Free>
static Work<Alloc, Free> work(std::string who, Alloc alloc, Free free) {
  Work<Alloc, Free> work{std::move(who), alloc, free, {}};
  for (auto& stream : work.streams) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  return work;
}

static const std::pair<size_t, size_t> CHURNS[] = {{100, 1 << 20}, {1000, 8 << 20}, {5000, 8 << 20}};

#if !defined(WITH_TORCH) && !defined(WITH_RMM)
static void async() {
  cudaMemPool_t pool;
  check(cudaDeviceGetDefaultMemPool(&pool, 0), "default pool");
  uint64_t all = std::numeric_limits<uint64_t>::max();
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), "release threshold");
  auto alloc = [](size_t bytes, cudaStream_t stream) {
    void* ptr = nullptr;
    check(cudaMallocAsync(&ptr, bytes, stream), "cudaMallocAsync");
    return ptr;
  };
  auto free = [](void* ptr, size_t, cudaStream_t stream) { check(cudaFreeAsync(ptr, stream), "cudaFreeAsync"); };
  auto w = work("cudaMallocAsync", alloc, free);
  w.pairs();
  w.across();
  for (auto [live, most] : CHURNS) {
    w.settle();
    check(cudaMemPoolTrimTo(pool, 0), "trim");
    uint64_t zero = 0;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReservedMemHigh, &zero), "reset");
    w.churn(live, most, [&] {
      uint64_t high = 0;
      check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemHigh, &high), "reserved");
      return static_cast<size_t>(high);
    });
  }
}

static void plain() {
  auto alloc = [](size_t bytes, cudaStream_t) {
    void* ptr = nullptr;
    check(cudaMalloc(&ptr, bytes), "cudaMalloc");
    return ptr;
  };
  auto free = [](void* ptr, size_t, cudaStream_t) { check(cudaFree(ptr), "cudaFree"); };
  // Slow: only a few pairs.
  auto w = work("cudaMalloc", alloc, free);
  for (auto [name, bytes] : {std::pair<const char*, size_t>{"512 B", 512}, {"2 MiB", 2 << 20}}) {
    std::vector<double> samples;
    for (int batch = 0; batch < 100; ++batch) {
      samples.push_back(w.timed(5, [&](int) { w.free(w.alloc(bytes, nullptr), bytes, nullptr); }));
    }
    row("alloc + free", name, w.who, "ns", samples);
  }
}
#endif

#ifdef WITH_TORCH
static void measure_torch(const char* who) {
  namespace caching = c10::cuda::CUDACachingAllocator;
  caching::init(1);
  auto alloc = [](size_t bytes, cudaStream_t stream) { return caching::raw_alloc_with_stream(bytes, stream); };
  auto free = [](void* ptr, size_t, cudaStream_t) { caching::raw_delete(ptr); };
  auto w = work(who, alloc, free);
  w.pairs();
  // Blocks stay with their stream: two streams have two, and nothing is reused across.
  w.across();
  for (auto [live, most] : CHURNS) {
    caching::emptyCache();
    caching::resetPeakStats(0);
    w.churn(live, most,
            [] { return static_cast<size_t>(caching::getDeviceStats(0).reserved_bytes[0].peak); });
  }
}
#endif

#ifdef WITH_RMM
template <class Resource>
static auto rmm_work(const char* who, Resource& resource) {
  constexpr size_t ALIGN = 256;
  auto alloc = [&](size_t bytes, cudaStream_t stream) {
    return resource.allocate(cuda::stream_ref{stream}, bytes, ALIGN);
  };
  auto free = [&](void* ptr, size_t bytes, cudaStream_t stream) {
    resource.deallocate(cuda::stream_ref{stream}, ptr, bytes, ALIGN);
  };
  return work(who, alloc, free);
}

// `make(bytes)`: a resource of that much memory at most, or of as much as it likes.
template <class Make>
static void rmm_resource(const char* who, Make make, bool across) {
  {
    auto resource = make(std::optional<size_t>{});
    rmm_work(who, resource).pairs();
  }
  for (auto [live, most] : CHURNS) {
    auto resource = make(std::optional<size_t>{});
    // What they reserve is what they are told to begin with.
    rmm_work(who, resource).churn(live, most, [] { return size_t{0}; });
  }
  if (across) {
    auto resource = make(std::optional<size_t>{2 << 20});
    rmm_work(who, resource).across();
  }
}

static void rmm_all() {
  namespace mr = rmm::mr;
  static constexpr size_t BIG = size_t{16} << 30;
  rmm_resource(
      "RMM pool",
      [](std::optional<size_t> only) {
        return mr::pool_memory_resource{mr::cuda_memory_resource{}, only.value_or(BIG), only.value_or(BIG)};
      },
      true);
  rmm_resource(
      "RMM arena", [](std::optional<size_t>) { return mr::arena_memory_resource{mr::cuda_memory_resource{}, BIG}; }, false);
  rmm_resource(
      "RMM async", [](std::optional<size_t>) { return mr::cuda_async_memory_resource{}; }, true);
}
#endif

int main(int count, char** words) {
  (void)count, (void)words;
  check(cudaSetDevice(0), "device");
  check(cudaFree(nullptr), "context");
  try {
#if defined(WITH_TORCH)
    measure_torch(count > 1 ? words[1] : "PyTorch");
#elif defined(WITH_RMM)
    rmm_all();
#else
    async();
    plain();
#endif
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
