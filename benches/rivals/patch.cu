// What a patch repair would cost: the pointers of each kernel node of an instantiated graph set anew, against an
// exec-update from a graph that was captured again. Build and run: nvcc -O2 -o patch patch.cu -lcuda && ./patch
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                                     \
    do {                                                                                \
        cudaError_t error = (call);                                                     \
        if (error != cudaSuccess) {                                                     \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));              \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

__global__ void step(const float* x, const float* w, float* y, unsigned n, float k) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * w[i] + k;
}

static double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Samples {
    std::vector<double> all;
    void print(const char* what, int nodes) {
        std::sort(all.begin(), all.end());
        size_t n = all.size();
        printf("| %s | %d | %.1f | %.1f | %.1f | %zu |\n", what, nodes, all[n / 2], all[n / 20], all[n - 1 - n / 20], n);
    }
};

int main() {
    printf("| what | nodes | median us | p5 | p95 | n |\n|---|---|---|---|---|---|\n");
    for (int nodes : {100, 300, 1000}) {
        cudaStream_t stream;
        CHECK(cudaStreamCreate(&stream));
        const unsigned n = 1024;
        float *a, *b;
        CHECK(cudaMalloc(&a, 64 << 20));
        CHECK(cudaMalloc(&b, 64 << 20));
        auto capture = [&](float* base) {
            cudaGraph_t graph;
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            for (int i = 0; i < nodes; i++) {
                float* at = base + i * n;
                step<<<4, 256, 0, stream>>>(at, at + n, at + 2 * n, n, 1.0f);
            }
            CHECK(cudaStreamEndCapture(stream, &graph));
            return graph;
        };
        cudaGraph_t graph = capture(a);
        cudaGraphExec_t exec;
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        size_t count = 0;
        CHECK(cudaGraphGetNodes(graph, nullptr, &count));
        std::vector<cudaGraphNode_t> all(count);
        CHECK(cudaGraphGetNodes(graph, all.data(), &count));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));

        Samples set, launch_after, launch_plain, update, recapture;
        for (int round = 0; round < 60; round++) {
            float* base = round % 2 ? a : b;
            double start = now_us();
            for (int i = 0; i < nodes; i++) {
                const float *x = base + i * n, *w = x + n;
                float* y = base + i * n + 2 * n;
                unsigned len = n;
                float k = 1.0f;
                void* args[] = {&x, &w, &y, &len, &k};
                cudaKernelNodeParams params = {};
                params.func = (void*)step;
                params.gridDim = dim3(4);
                params.blockDim = dim3(256);
                params.kernelParams = args;
                CHECK(cudaGraphExecKernelNodeSetParams(exec, all[i], &params));
            }
            set.all.push_back(now_us() - start);
            start = now_us();
            CHECK(cudaGraphLaunch(exec, stream));
            launch_after.all.push_back(now_us() - start);
            CHECK(cudaStreamSynchronize(stream));
            start = now_us();
            CHECK(cudaGraphLaunch(exec, stream));
            launch_plain.all.push_back(now_us() - start);
            CHECK(cudaStreamSynchronize(stream));

            start = now_us();
            cudaGraph_t again = capture(round % 2 ? b : a);
            recapture.all.push_back(now_us() - start);
            start = now_us();
            cudaGraphExecUpdateResultInfo info;
            CHECK(cudaGraphExecUpdate(exec, again, &info));
            update.all.push_back(now_us() - start);
            CHECK(cudaGraphLaunch(exec, stream));
            CHECK(cudaStreamSynchronize(stream));
            CHECK(cudaGraphDestroy(again));
        }
        set.print("set the parameters of every node", nodes);
        launch_after.print("first launch after that", nodes);
        launch_plain.print("launch", nodes);
        recapture.print("capture again", nodes);
        update.print("exec-update", nodes);
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaFree(a));
        CHECK(cudaFree(b));
        CHECK(cudaStreamDestroy(stream));
    }
    return 0;
}
