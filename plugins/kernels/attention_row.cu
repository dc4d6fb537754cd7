// Decode, few tokens, as many as sequences: a cluster of blocks shares a row's keys, or a split of them, for one KV
// head.
//
// One SM would take longer to read a window, or a short context, than all else takes, and partial results that pass
// through global memory cost a few latencies. In a cluster each warp has every so many-th chunk of 16 keys
// (attention_decode.cu), and all that its stages of shared memory hold is under way before the kernel that writes q and
// this step's keys has ended. What is left then is a chain of latencies, and that is what this kernel keeps short: q
// comes once for a block's warps; a warp's result takes the place of its own first chunk, which no barrier must guard;
// blocks send each other their partial results with stores that count at the receiver, so that neither a fence nor a
// barrier of the cluster follows them; and the sinks are there by then. Long contexts have several splits, and the last
// to arrive merges them, as in attention_decode.cu.
//
// Block r of a cluster finishes heads r n to (r + 1) n - 1 of the group's 8, n = 8 / blocks.
//
// The kernel reads q and the step's keys from the cache, or makes both from the QKV projection's rows (NewTokens): norm
// and RoPE take no time here, and a kernel for them would.
#include "kernels/attention_internal.h"
#include "kernels/attention_merge.cuh"
#include "kernels/cluster.cuh"
#include "kernels/launch.h"
#include "kernels/qkv_head.cuh"

#include <algorithm>

namespace flint::attention {

namespace {

constexpr int kMOST_SPLITS = 8; // Of a row.

/// Blocks of a cluster, warps of a block, chunks of shared memory a warp, and how many chunks a warp has at most (0:
/// any number). Registers at most: windows leave room for the output projection's blocks on the same multiprocessor.
struct Windowed {
    static constexpr bool kPAGED = false;
    static constexpr int kCLUSTER = 4;
    static constexpr int kWARPS = 9; // A window of 513 keys, 33 or 34 chunks, is under way at once, on any GPU.
    static constexpr int kSTAGES = 1;
    static constexpr int kROUNDS = 1;
    static constexpr int kREGISTERS = 80;
};
struct Full {
    static constexpr bool kPAGED = true;
    static constexpr int kCLUSTER = 4;
    static constexpr int kROUNDS = 0;
    static constexpr int kREGISTERS = 255;
    static constexpr int kWARPS = 8;
    static constexpr int kSTAGES = 3;
};
/// Where a block has 99 KB.
struct FullSmall {
    static constexpr bool kPAGED = true;
    static constexpr int kCLUSTER = 4;
    static constexpr int kROUNDS = 0;
    static constexpr int kREGISTERS = 255;
    static constexpr int kWARPS = 5;
    static constexpr int kSTAGES = 2;
};

/// A warp's result.
struct WarpResult {
    float outs[kGROUP][kMERGE_STRIDE];
    float2 stats[kGROUP];
};

/// Heads that a block finishes.
template <typename Shape>
constexpr int kOWN_HEADS = kGROUP / Shape::kCLUSTER;

template <typename Shape>
struct RowShared {
    union {
        uint8_t chunks[Shape::kSTAGES * kCHUNK_BYTES];
        WarpResult result;
    } warps[Shape::kWARPS];
    uint8_t q[kGROUP * kROW_BYTES];
    float4 values[Shape::kCLUSTER][kOWN_HEADS<Shape>][kWARP]; // What the cluster's blocks send.
    float2 stats[Shape::kCLUSTER][kOWN_HEADS<Shape>];
    CopyBarrier received;
};

static_assert(sizeof(WarpResult) <= kCHUNK_BYTES);
static_assert(sizeof(RowShared<Windowed>) <= kCOMMON_SHARED_BYTES);
static_assert(sizeof(RowShared<FullSmall>) <= kCOMMON_SHARED_BYTES);
static_assert(kLATENCY_TOKENS <= kWARP, "a lane looks at a row");

struct RowArguments : SplitArguments {
    int split_chunks;             // A row has a split for every so many chunks, up to max_splits.
    unsigned long long* counters; // [T, Hq]
    NewTokens news;

    RowArguments(SinkAttentionParams const& p, NewTokens const& n) : SplitArguments(p), news(n) {}
};

/// A row, or a split of its keys, for one KV head. The row sees positions [low, end); those from `fresh` on are of this
/// step's tokens. A row of padding sees none.
struct RowItem {
    int row, head;
    int sequence, slot; // The slot: of a ring.
    int low, fresh, end;
    int split, splits;
    int chunk_begin, chunk_end;
};

/// Finds the items of rising numbers. A sequence may have several rows where another one has none.
class RowFinder {
  public:
    __device__ __forceinline__ RowFinder(RowArguments const& a, int lane) : mLane(lane) {
        int start = 0, end = 0, length = 0, slot = 0;
        if (lane < a.sequences) { // All under way together: little time is left until the projection ends.
            start = a.query_start[lane];
            end = a.query_start[lane + 1];
            length = a.seq_lens[lane];
            slot = a.ring > 0 ? a.ring_slot[lane] : 0;
        }
        // The last sequence that begins at the lane's row or before.
#pragma unroll
        for (int step = kLATENCY_TOKENS / 2; step > 0; step /= 2) {
            int const other = mSequence + step, first = __shfl_sync(0xFFFFFFFFu, start, other);
            mSequence = other < a.sequences && first <= lane ? other : mSequence;
        }
        int const first = __shfl_sync(0xFFFFFFFFu, start, mSequence), last = __shfl_sync(0xFFFFFFFFu, end, mSequence);
        int const whole = __shfl_sync(0xFFFFFFFFu, length, mSequence);
        mSlot = __shfl_sync(0xFFFFFFFFu, slot, mSequence);
        if (first <= lane && lane < last) {
            mEnd = whole - (last - lane) + 1;
            mLow = max(0, mEnd - a.window);
            mFresh = max(mLow, whole - (last - first));
        }
        if (lane < a.tokens) {
            mSplits = max(1, min(a.max_splits, (chunks() + a.split_chunks - 1) / a.split_chunks));
        }
        mItems = warpPrefixSum(mSplits, lane);
    }

    __device__ __forceinline__ bool find(RowArguments const& a, int number, RowItem& item) const {
        int const wanted = number / a.kv_heads;
        unsigned const found = __ballot_sync(0xFFFFFFFFu, mItems > wanted);
        if (!found) {
            return false;
        }
        auto const of = [row = __ffs(static_cast<int>(found)) - 1](int value) {
            return __shfl_sync(0xFFFFFFFFu, value, row);
        };
        item.row = __ffs(static_cast<int>(found)) - 1;
        item.head = number % a.kv_heads;
        item.sequence = of(mSequence);
        item.slot = of(mSlot);
        item.low = of(mLow);
        item.fresh = of(mFresh);
        item.end = of(mEnd);
        item.splits = of(mSplits);
        item.split = wanted - (of(mItems) - item.splits);
        int const all = of(chunks()), origin = item.low / kCHUNK;
        item.chunk_begin = origin + item.split * all / item.splits;
        item.chunk_end = origin + (item.split + 1) * all / item.splits;
        return true;
    }

  private:
    __device__ __forceinline__ int chunks() const { return (mEnd + kCHUNK - 1) / kCHUNK - mLow / kCHUNK; }

    int mLane;
    int mSequence = 0, mSlot = 0, mLow = 0, mFresh = 0, mEnd = 0;
    int mSplits = 0;
    int mItems = 0; // Of the rows up to this lane's.
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

/// q, and the keys of this step's tokens, from the projection's rows; a warp's lanes share a head.
class Newcomers {
  public:
    __device__ __forceinline__ Newcomers(RowArguments const& a, RowItem const& item, int lane)
        : mArguments(a), mItem(item), mLow(2 * lane) {}

    /// What finishes q, or k, of the token at a position; nothing of it comes from the projection.
    __device__ __forceinline__ HeadQuad quad(float const* norm, int position) const {
        return HeadQuad::load(norm, mArguments.news.rope, max(position, 0), mLow);
    }

    /// q of head `head` of the group, not finished.
    __device__ __forceinline__ void loadQ(int head, uint32_t (&words)[2]) const {
        load(mItem.row, mItem.head * kGROUP + head, words);
    }

    /// k and v of the token at a position of this step.
    __device__ __forceinline__ void loadKey(int position, uint32_t (&key)[2], uint32_t (&value)[2]) const {
        int const row = mItem.row - (mItem.end - 1 - position);
        load(row, mArguments.kv_heads * kGROUP + mItem.head, key);
        load(row, mArguments.kv_heads * (kGROUP + 1) + mItem.head, value);
    }

    __device__ __forceinline__ void finish(HeadQuad const& quad, uint32_t (&words)[2]) const {
        quad.finish(mArguments.news.eps, mArguments.news.rope != nullptr, words);
    }

    __device__ __forceinline__ void putQ(uint8_t* q, int head, uint32_t const (&words)[2]) const {
        put(q, head, words);
    }

    /// A finished key to its place in the chunk from `first` on; the row's own one to the cache, too.
    __device__ __forceinline__ void putKey(uint8_t* chunk, ChunkPlace const& place, int first, int position,
                                           uint32_t const (&key)[2], uint32_t const (&value)[2]) const {
        int const inside = position - first;
        put(chunk, inside, key);
        put(chunk + kCHUNK * kROW_BYTES, inside, value);
        if (position == mItem.end - 1) {
            int const row = mArguments.ring == 0 ? inside : ringPlace(place.first, inside, mArguments.ring);
            bf16* const target = const_cast<bf16*>(place.k) + row * kHEAD_DIM + mLow;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                *reinterpret_cast<uint32_t*>(target + i * (kHEAD_DIM / 2)) = key[i];
                *reinterpret_cast<uint32_t*>(target + place.v_distance + i * (kHEAD_DIM / 2)) = value[i];
            }
        }
    }

    /// All keys of this step that a chunk has.
    __device__ __forceinline__ void putKeys(uint8_t* chunk, ChunkPlace const& place, int first) const {
        int const end = min(mItem.end, first + kCHUNK);
#pragma unroll 1
        for (int position = max(mItem.fresh, first); position < end; ++position) {
            uint32_t key[2], value[2];
            loadKey(position, key, value);
            finish(quad(mArguments.news.k_norm, position), key);
            putKey(chunk, place, first, position, key, value);
        }
    }

  private:
    __device__ __forceinline__ void load(int row, int head, uint32_t (&words)[2]) const {
        int const heads = mArguments.kv_heads * (kGROUP + 2);
        bf16 const* const source = mArguments.news.raw + (int64_t{row} * heads + head) * kHEAD_DIM + mLow;
        words[0] = __ldcg(reinterpret_cast<uint32_t const*>(source));
        words[1] = __ldcg(reinterpret_cast<uint32_t const*>(source + kHEAD_DIM / 2));
    }

    /// Into a row of a tile.
    __device__ __forceinline__ void put(uint8_t* tile, int row, uint32_t const (&words)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int const dim = mLow + i * (kHEAD_DIM / 2);
            *reinterpret_cast<uint32_t*>(tile + swizzled(row, dim / kSEGMENT) + dim % kSEGMENT * 2) = words[i];
        }
    }

    RowArguments const& mArguments;
    RowItem const& mItem;
    int mLow;
};

/// One item. `parity`: of the cluster's items so far.
template <typename Shape, bool Raw>
__device__ __forceinline__ void attendRow(RowArguments const& a, RowItem const& item, RowShared<Shape>& s,
                                          uint32_t parity) {
    constexpr int WARPS = Shape::kWARPS, STAGES = Shape::kSTAGES, CLUSTER = Shape::kCLUSTER;
    constexpr int STRIDE = WARPS * CLUSTER, OWN_HEADS = kOWN_HEADS<Shape>;
    int const warp = threadIdx.x / kWARP, lane = threadIdx.x % kWARP, rank = clusterRank();
    int const finished = item.head * kGROUP + rank * OWN_HEADS + warp % OWN_HEADS; // By one of the first warps.
    int const begin = item.chunk_begin + rank * WARPS + warp; // A block reads neighbours: few pages.
    uint8_t* const chunks = s.warps[warp].chunks;

    // What the finders and loaders of attention_decode.cu know as an item.
    Item keys{};
    keys.sequence = item.sequence;
    keys.head = item.head;
    keys.low = item.low;
    keys.length = Raw ? item.fresh : item.end; // Behind it: zeros, until putKeys.
    keys.chunk_begin = item.chunk_begin;
    keys.chunk_end = item.chunk_end;
    auto finder = [&] {
        if constexpr (Shape::kPAGED) {
            return ChunkFinder<true>(a, keys, lane);
        } else {
            return ChunkFinder<false>(a, item.slot, item.head);
        }
    }();
    auto const fetch = [&](int chunk, int stage) {
        if (chunk < item.chunk_end) {
            loadChunk<Shape::kPAGED, kWARP>(keys, finder.place(chunk), chunk, a.ring,
                                            sharedAddress(chunks + stage * kCHUNK_BYTES), lane);
        }
        commitCopies();
    };
    for (int i = 0; i < STAGES; ++i) {
        int const chunk = begin + i * STRIDE;
        if (!Raw && (chunk + 1) * kCHUNK > item.fresh) {
            waitForPredecessor();
        }
        fetch(chunk, i);
    }
    constexpr int TURNS = (kGROUP + WARPS - 1) / WARPS; // Heads of q that a warp brings.
    Newcomers const newcomers(a, item, lane);
    HeadQuad const quad = Raw ? newcomers.quad(a.news.q_norm, item.end - 1) : HeadQuad{};
    float const sink = __uint_as_float(loadNow4(a.sinks + finished));

    waitForPredecessor();
    unsigned long long* const counter = a.counters + item.row * a.kv_heads * kGROUP + finished;
    bool const opens = Shape::kPAGED && item.splits > 1 && warp < OWN_HEADS && lane == 0;
    unsigned long long const found = opens ? __ldcg(counter) : 0;
    if constexpr (Raw) {
        // Warps take the group's heads in turn, the one with the row's own key last: it has more to do.
        int const busy = ((item.end - 1) / kCHUNK - item.chunk_begin) % STRIDE - rank * WARPS;
        int const turn = (warp + 2 * WARPS - 1 - min(max(busy, 0), WARPS - 1)) % WARPS;
        uint32_t words[TURNS][2];
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            newcomers.loadQ(min(i * WARPS + turn, kGROUP - 1), words[i]);
        }
        // The step's keys, where their chunks are under way already.
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            int const chunk = begin + i * STRIDE;
            if (chunk < item.chunk_end && (chunk + 1) * kCHUNK > item.fresh) {
                waitCopies<0>();
                __syncwarp();
                newcomers.putKeys(chunks + i * kCHUNK_BYTES, finder.place(chunk), chunk * kCHUNK);
            }
        }
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            newcomers.finish(quad, words[i]);
            if (i * WARPS + turn < kGROUP) {
                newcomers.putQ(s.q, i * WARPS + turn, words[i]);
            }
        }
    } else if (threadIdx.x < kGROUP * kROW_SEGMENTS) {
        int const segment = threadIdx.x;
        auto const* const q = reinterpret_cast<uint4 const*>(
            a.q + (static_cast<int64_t>(item.row) * a.kv_heads + item.head) * (kGROUP * kHEAD_DIM));
        *reinterpret_cast<uint4*>(s.q + swizzled(segment / kROW_SEGMENTS, segment % kROW_SEGMENTS)) =
            __ldcg(q + segment);
    }
    if (opens) {
        openCounter(counter, found);
    }
    __syncthreads();

    WarpState<1> state = openState(s.q, item.end - 1, lane);
    auto const attend = [&](int chunk, uint8_t const* here) {
        int const first = chunk * kCHUNK;
        bool const masked = first < item.low || first + kCHUNK > item.end;
        attendChunk(state, sharedAddress(here), masked, first, a.window, lane);
        __syncwarp(); // All have used it.
    };
    if constexpr (Shape::kROUNDS == 1) {
        if (begin < item.chunk_end) {
            waitCopies<0>();
            __syncwarp(); // The chunk is there for all.
            attend(begin, chunks);
        }
    } else {
        int stage = 0;
        for (int chunk = begin; chunk < item.chunk_end; chunk += STRIDE) {
            waitCopies<STAGES - 1>();
            __syncwarp();
            uint8_t* const here = chunks + stage * kCHUNK_BYTES;
            if (Raw && chunk >= begin + STAGES * STRIDE && (chunk + 1) * kCHUNK > item.fresh) {
                newcomers.putKeys(here, finder.place(chunk), chunk * kCHUNK); // Only a warp's last chunk has some.
                __syncwarp();
            }
            attend(chunk, here);
            fetch(chunk + STAGES * STRIDE, stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
    WarpResult& own = s.warps[warp].result;
    leaveResult(state, 0, own.outs[0], own.stats, lane);
    __syncthreads();

    waitCluster(); // Every block of the cluster runs, and has used what it was sent for the item before.
    constexpr int DISTANCE = sizeof(s.warps[0]); // Between the warps' results.
    WarpResult const& parts = s.warps[0].result;
    for (int h = warp; h < kGROUP; h += WARPS) {
        RowResult const part = mergeResults<WARPS>(parts.outs[h], DISTANCE / sizeof(float), parts.stats + h,
                                                   DISTANCE / sizeof(float2), lane);
        int const owner = h / OWN_HEADS, slot = h % OWN_HEADS;
        uint32_t const barrier = peerAddress(&s.received, owner);
        sendAsync(peerAddress(&s.values[rank][slot][lane], owner), part.value, barrier);
        if (lane == 0) {
            sendAsync(peerAddress(&s.stats[rank][slot], owner), make_float2(part.top, part.sum), barrier);
        }
    }
    if (warp >= OWN_HEADS) {
        return;
    }
    s.received.wait(parity);
    RowResult const result =
        mergeResults<CLUSTER>(&s.values[0][warp][0].x, OWN_HEADS * kHEAD_DIM, &s.stats[0][warp], OWN_HEADS, lane);
    if (!Shape::kPAGED || item.splits == 1) { // A row of padding has seen no key: it becomes zeros.
        storeRow(a, item.row, finished, sink, result.top, result.sum, result.value, lane);
        return;
    }
    int64_t const partial =
        (static_cast<int64_t>(item.row) * a.kv_heads * kGROUP + finished) * a.max_splits + item.split;
    __stcg(a.partials + partial * kWARP + lane, result.value);
    if (lane == 0) {
        __stcg(a.stats + partial, make_float2(result.top, result.sum));
    }
    __syncwarp();
    bool const last = lane == 0 && countSplit(counter, item.splits);
    if (__any_sync(0xFFFFFFFFu, last)) {
        __syncwarp(); // What lane 0 has seen, all have.
        mergeRow<kMOST_SPLITS>(a, item.row, finished, item.splits, lane);
    }
}

/// Grid: clusters in x, as many as are resident, or as there can be items.
template <typename Shape, bool Raw>
__global__ void __maxnreg__(Shape::kREGISTERS) sinkAttentionRowKernel(RowArguments const __grid_constant__ a) {
    extern __shared__ __align__(256) uint8_t shared[];
    auto& s = *reinterpret_cast<RowShared<Shape>*>(shared);
    allowSuccessor();
    if (threadIdx.x == 0) {
        s.received.open();
    }
    RowFinder const finder(a, threadIdx.x % kWARP);
    RowItem item;
    auto const expect = [&] {
        if (threadIdx.x == 0) {
            s.received.expect(sizeof(s.values) + sizeof(s.stats));
        }
    };
    int number = blockIdx.x / Shape::kCLUSTER;
    expect();
    // Orders no memory, for little time is left before the wait: `received` is ordered by the fence of open().
    arriveCluster();
    if constexpr (Shape::kROUNDS == 1) { // A cluster for each item.
        finder.find(a, number, item);
        attendRow<Shape, Raw>(a, item, s, 0);
    } else {
        bool found = finder.find(a, number, item);
        if (!found) {
            waitCluster();
        }
        for (uint32_t parity = 0; found; parity ^= 1) {
            attendRow<Shape, Raw>(a, item, s, parity);
            number += gridDim.x / Shape::kCLUSTER;
            __syncthreads(); // The results in this memory have been merged.
            found = finder.find(a, number, item);
            if (found) {
                expect();
                releaseCluster(); // What this block was sent for the item before has been read.
            }
        }
    }
    waitForPredecessor(); // Also without an item: this kernel's end must not overtake its predecessor's.
}

size_t counterBytes(int64_t tokens, int64_t heads) {
    return aligned(static_cast<size_t>(tokens * heads) * sizeof(unsigned long long));
}

template <typename Shape, bool Raw>
cudaError_t launchShape(SinkAttentionParams const& params, NewTokens const& news, int available, cudaStream_t stream) {
    auto const kernel = sinkAttentionRowKernel<Shape, Raw>;
    int bytes = sizeof(RowShared<Shape>), resident = 1;
    dim3 const block(Shape::kWARPS * kWARP);
    if (cudaError_t const status = allowShared(kernel, available - 1024); status != cudaSuccess) {
        return status;
    }
    // Windows: a block for each multiprocessor, if the step is small enough. Where two were together, the next kernel's
    // block would find no room, and start late.
    int const alone = available / 2 + 1024;
    if (cudaError_t const status = residentClusters(kernel, block, Shape::kCLUSTER, std::max(bytes, alone), resident);
        status != cudaSuccess) {
        return status;
    }
    // One sequence fills the GPU, if it is long; a window is never split.
    int64_t const splits = Shape::kPAGED ? std::clamp<int64_t>(resident / params.kv_heads, 1, kMOST_SPLITS) : 1;
    int64_t const items = params.tokens * params.kv_heads * splits;
    RowArguments a(params, news);
    auto* const workspace = static_cast<uint8_t*>(params.workspace);
    a.counters = reinterpret_cast<unsigned long long*>(workspace);
    a.split_chunks = Shape::kCLUSTER * Shape::kWARPS * Shape::kSTAGES; // What is under way at once.
    a.splitInto(static_cast<int>(splits), workspace + counterBytes(params.tokens, params.heads));
    int64_t const clusters = Shape::kPAGED ? std::min<int64_t>(items, resident) : items;
    if (clusters <= resident) {
        bytes = std::max(bytes, alone);
    }
    return launchCluster(kernel, dim3(static_cast<unsigned>(clusters * Shape::kCLUSTER)), block, Shape::kCLUSTER, bytes,
                         stream, a);
}

template <bool Raw>
cudaError_t launch(SinkAttentionParams const& params, NewTokens const& news, cudaStream_t stream) {
    int available = 0;
    if (cudaError_t const status = blockSharedBytes(available); status != cudaSuccess) {
        return status;
    }
    if (params.ring > 0) {
        return launchShape<Windowed, Raw>(params, news, available, stream);
    }
    return static_cast<size_t>(available) >= sizeof(RowShared<Full>)
               ? launchShape<Full, Raw>(params, news, available, stream)
               : launchShape<FullSmall, Raw>(params, news, available, stream);
}

} // namespace

bool isRowStep(SinkAttentionParams const& params) {
    // The window's first key may be the last of its chunk.
    bool const fits = params.ring == 0 || params.window + kCHUNK - 1 <= Windowed::kCLUSTER * Windowed::kWARPS * kCHUNK;
    return fits && params.tokens <= kLATENCY_TOKENS && params.tokens == params.sequences;
}

size_t rowAttentionWorkspaceBytes(int64_t tokens, int64_t heads) {
    int64_t const rows = std::min<int64_t>(tokens, kLATENCY_TOKENS);
    return counterBytes(rows, heads) + partialBytes(rows * heads * kMOST_SPLITS);
}

cudaError_t launchRowAttention(SinkAttentionParams const& params, NewTokens const* news, cudaStream_t stream) {
    return news == nullptr ? launch<false>(params, NewTokens{}, stream) : launch<true>(params, *news, stream);
}

} // namespace flint::attention
