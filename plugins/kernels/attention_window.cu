// Decode in rings, few tokens, one a sequence: a cluster of blocks shares a row's window for one KV head.
//
// One SM would take longer to read a window than all else takes. In a cluster each warp has one chunk of 16 keys
// (attention_decode.cu), so that all of the window is under way before the kernel that writes q and this step's keys
// has ended. What is left then is a chain of latencies, and that is what this kernel keeps short: q comes once for a
// block's warps; a warp's result takes the place of its own chunk, which no barrier must guard; blocks send each other
// their partial results with stores that count at the receiver, so that neither a fence nor a barrier of the cluster
// follows them; and the sinks are there by then.
//
// Block r finishes heads r n to (r + 1) n - 1 of the group's 8, n = 8 / blocks.
#include "kernels/attention_internal.h"
#include "kernels/attention_merge.cuh"
#include "kernels/cluster.cuh"
#include "kernels/launch.h"

namespace flint::attention {

namespace {

/// Blocks of a cluster and warps of a block. 4 x 9 and 8 x 5 hold a window of 513 keys, 33 chunks, and run on any GPU.
constexpr int kWINDOW_CLUSTER = 4;
constexpr int kWINDOW_WARPS = 9;
constexpr int kWINDOW_CHUNKS = kWINDOW_CLUSTER * kWINDOW_WARPS;
constexpr int kWINDOW_HEADS = kGROUP / kWINDOW_CLUSTER; // That a block finishes.

/// A warp's result.
struct WindowResult {
    float outs[kGROUP][kMERGE_STRIDE];
    float2 stats[kGROUP];
};

struct WindowShared {
    union {
        uint8_t chunk[kCHUNK_BYTES];
        WindowResult result;
    } warps[kWINDOW_WARPS];
    uint8_t q[kGROUP * kROW_BYTES];
    float4 values[kWINDOW_CLUSTER][kWINDOW_HEADS][kWARP]; // What the cluster's blocks send.
    float2 stats[kWINDOW_CLUSTER][kWINDOW_HEADS];
    CopyBarrier received;
};

static_assert(sizeof(WindowResult) <= kCHUNK_BYTES);
static_assert(sizeof(WindowShared) <= kCOMMON_SHARED_BYTES);
static_assert(kGROUP * kROW_SEGMENTS <= kWINDOW_WARPS * kWARP, "q is copied at once");
static_assert(kLATENCY_TOKENS <= kWARP, "a lane looks at a sequence");

/// The keys that a row sees: positions [low, end) of a ring, from `fresh` on those of this step's tokens.
struct Window {
    int slot = 0;
    int low = 0;
    int fresh = 0;
    int end = 0;
};

/// The window of a row; none if it is padding. A sequence may have several rows where another one has none.
__device__ __forceinline__ Window findWindow(Arguments const& a, int row, int lane) {
    int start = 0, end = 0, length = 0, slot = 0;
    if (lane < a.sequences) {
        start = a.query_start[lane];
        end = a.query_start[lane + 1];
        length = a.seq_lens[lane];
        slot = a.ring_slot[lane];
    }
    unsigned const found = __ballot_sync(0xFFFFFFFFu, start <= row && row < end);
    if (!found) {
        return {};
    }
    int const source = __ffs(static_cast<int>(found)) - 1;
    Window window;
    window.slot = __shfl_sync(0xFFFFFFFFu, slot, source);
    window.end = __shfl_sync(0xFFFFFFFFu, length - end, source) + row + 1;
    window.low = max(0, window.end - a.window);
    window.fresh = max(window.low, __shfl_sync(0xFFFFFFFFu, length - (end - start), source));
    return window;
}

/// Requests a warp's chunk: K and V of positions [first, first + kCHUNK).
class ChunkLoader {
  public:
    __device__ __forceinline__ ChunkLoader(Arguments const& a, Window const& window, int head, int first,
                                           uint32_t target, int lane)
        : mWindow(window), mK(a.kv_pool + (static_cast<int64_t>(window.slot) * a.kv_heads + head) *
                                              (2 * static_cast<int64_t>(a.ring) * kHEAD_DIM)),
          mRing(a.ring), mFirst(first), mPlace(first % a.ring), mTarget(target), mHalf(lane / kROW_SEGMENTS),
          mSegment(lane % kROW_SEGMENTS) {}

    /// Keys of earlier steps, two at a time. Rows that the query does not see become zeros and are not read: 0 * NaN
    /// would be NaN in P.V.
    __device__ __forceinline__ void loadOld() const {
#pragma unroll
        for (int i = 0; i < kCHUNK; i += 2) {
            int const row = i + mHalf;
            int const position = mFirst + row;
            if (position < mWindow.fresh || position >= mWindow.end) {
                bool const valid = position >= mWindow.low && position < mWindow.end;
                bf16 const* const k = source(row);
                copyOnceAsync16(target(row), k, valid);
                copyOnceAsync16(target(row) + kCHUNK * kROW_BYTES, k + mRing * kHEAD_DIM, valid);
            }
        }
    }

    /// Keys of this step; half the lanes copy K, half V.
    __device__ __forceinline__ void loadFresh() const {
        int const end = min(mWindow.end - mFirst, kCHUNK);
#pragma unroll 1
        for (int row = max(mWindow.fresh - mFirst, 0); row < end; ++row) {
            copyOnceAsync16(target(row) + mHalf * (kCHUNK * kROW_BYTES), source(row) + mHalf * mRing * kHEAD_DIM, true);
        }
    }

  private:
    __device__ __forceinline__ bf16 const* source(int row) const {
        return mK + ringPlace(mPlace, row, mRing) * kHEAD_DIM + mSegment * kSEGMENT;
    }

    __device__ __forceinline__ uint32_t target(int row) const { return mTarget + swizzled(row, mSegment); }

    Window mWindow;
    bf16 const* mK; // The ring's; V follows.
    int mRing;
    int mFirst, mPlace;
    uint32_t mTarget;
    int mHalf, mSegment;
};

/// The state before the first key, with q from shared memory.
__device__ __forceinline__ WarpState<1> openState(uint8_t const* q, int position, int lane) {
    WarpState<1> state;
    state.position[0] = position;
    state.top[0][0] = state.top[0][1] = kMINUS_INFINITY;
    state.sum[0][0] = state.sum[0][1] = 0.0f;
#pragma unroll
    for (int step = 0; step < kHEAD_DIM / 16; step += 2) {
        uint32_t b[4];
        ldmatrix4(b, sharedAddress(q) + swizzled(lane % 8, step * 2 + lane / 8));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            state.q[0][step + i / 2][i % 2] = b[i];
            state.out[0][step][i] = state.out[0][step + 1][i] = 0.0f;
        }
    }
    return state;
}

/// Grid: (rows, KV heads, blocks of a cluster), the last innermost.
__global__ void __launch_bounds__(kWINDOW_WARPS* kWARP, 2)
    sinkAttentionWindowKernel(Arguments const __grid_constant__ a) {
    extern __shared__ __align__(256) uint8_t shared[];
    auto& s = *reinterpret_cast<WindowShared*>(shared);
    int const warp = threadIdx.x / kWARP, lane = threadIdx.x % kWARP;
    int const rank = clusterRank();
    int const number = blockIdx.x / kWINDOW_CLUSTER;
    int const row = number / a.kv_heads, head = number % a.kv_heads;
    int const finished = head * kGROUP + rank * kWINDOW_HEADS + warp % kWINDOW_HEADS; // By one of the first warps.
    allowSuccessor();
    if (threadIdx.x == 0) {
        s.received.open();
        s.received.expect(sizeof(s.values) + sizeof(s.stats));
    }
    arriveCluster();
    Window const window = findWindow(a, row, lane);
    int const first = (window.low / kCHUNK + warp * kWINDOW_CLUSTER + rank) * kCHUNK;
    bool const present = first < window.end;
    uint32_t const chunk = sharedAddress(s.warps[warp].chunk);
    ChunkLoader const loader(a, window, head, first, chunk, lane);
    if (present) {
        loader.loadOld();
    }
    float const sink = __uint_as_float(loadNow4(a.sinks + finished));
    waitCluster(); // Every block of the cluster runs and can receive.

    waitForPredecessor();
    if (threadIdx.x < kGROUP * kROW_SEGMENTS) {
        int const segment = threadIdx.x;
        copyAsync16(sharedAddress(s.q) + swizzled(segment / kROW_SEGMENTS, segment % kROW_SEGMENTS),
                    a.q + (static_cast<int64_t>(row) * a.kv_heads + head) * (kGROUP * kHEAD_DIM) + segment * kSEGMENT);
    }
    if (present) {
        loader.loadFresh();
    }
    commitCopies();
    waitCopies<0>();
    __syncthreads();

    WarpState<1> state = openState(s.q, window.end - 1, lane);
    if (present) {
        bool const masked = first < window.low || first + kCHUNK > window.end;
        attendChunk(state, chunk, masked, first, a.window, lane);
        __syncwarp(); // All lanes have used it.
    }
    WindowResult& own = s.warps[warp].result;
    leaveResult(state, 0, own.outs[0], own.stats, lane);
    __syncthreads();

    WindowResult const& parts = s.warps[0].result;
    for (int h = warp; h < kGROUP; h += kWINDOW_WARPS) {
        RowResult const part = mergeResults<kWINDOW_WARPS>(parts.outs[h], kCHUNK_BYTES / sizeof(float), parts.stats + h,
                                                           kCHUNK_BYTES / sizeof(float2), lane);
        int const owner = h / kWINDOW_HEADS, slot = h % kWINDOW_HEADS;
        uint32_t const barrier = peerAddress(&s.received, owner);
        sendAsync(peerAddress(&s.values[rank][slot][lane], owner), part.value, barrier);
        if (lane == 0) {
            sendAsync(peerAddress(&s.stats[rank][slot], owner), make_float2(part.top, part.sum), barrier);
        }
    }
    if (warp < kWINDOW_HEADS) {
        s.received.wait();
        RowResult const result = mergeResults<kWINDOW_CLUSTER>(&s.values[0][warp][0].x, kWINDOW_HEADS * kHEAD_DIM,
                                                               &s.stats[0][warp], kWINDOW_HEADS, lane);
        // A row of padding has seen no key: it becomes zeros.
        storeRow(a, row, finished, sink, result.top, result.sum, result.value, lane);
    }
}

} // namespace

bool isWindowStep(SinkAttentionParams const& params) {
    // The window's first key may be the last of its chunk.
    bool const fits = params.window + kCHUNK - 1 <= kWINDOW_CHUNKS * kCHUNK;
    return params.ring > 0 && fits && params.tokens <= kLATENCY_TOKENS && params.tokens == params.sequences;
}

cudaError_t launchWindowDecode(SinkAttentionParams const& params, cudaStream_t stream) {
    constexpr int BYTES = sizeof(WindowShared);
    if (cudaError_t const status = allowShared(sinkAttentionWindowKernel, BYTES); status != cudaSuccess) {
        return status;
    }
    auto const grid = static_cast<unsigned>(params.tokens * params.kv_heads * kWINDOW_CLUSTER);
    return launchCluster(sinkAttentionWindowKernel, dim3(grid), dim3(kWINDOW_WARPS * kWARP), kWINDOW_CLUSTER, BYTES,
                         stream, Arguments(params));
}

} // namespace flint::attention
