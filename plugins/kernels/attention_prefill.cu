// Prefill: FlashAttention-2's loop on mma.sync, the same for all targets.
//
// A block has 16 tokens x the 8 heads of a KV group = 128 rows (row = token * 8 + head), so that a K/V tile of 64 keys
// is read once for the group. Tiles are double buffered; each is copied while the previous one is used. Blocks are
// numbered from the batch's last token back: a sequence's last tokens see the most keys and are started first.
//
// Where two blocks fit on an SM, 4 warps have 32 rows each: every K and V operand read from shared memory then serves
// two products, and the other block's products run during this one's softmax. Else 8 warps have 16 rows each.
//
// Full layers: where a step has too few blocks to fill the GPU, the keys of a block are split over several, which leave
// partial results in the workspace. A second kernel merges them in order: the last of a block's splits would merge
// alone what this way all multiprocessors do.
#include "kernels/attention_splits.cuh"
#include "kernels/attention_tiles.cuh"
#include "kernels/launch.h"

#include <algorithm>

namespace flint {

namespace attention {

namespace {

constexpr int kROWS = kBLOCK_TOKENS * kGROUP;
constexpr int kQUERY_BYTES = kROWS * kROW_BYTES;
constexpr int kSHARED_BYTES = kQUERY_BYTES + 2 * kTILE_BYTES;
static_assert(kSHARED_BYTES <= kCOMMON_SHARED_BYTES);

/// Blocks that a step may make by splitting keys: a little less than three rounds of two on each of an H200's 132
/// multiprocessors. More and shorter ones would fill the last round better, but leave more partial results.
constexpr int kSPLIT_BLOCKS = 768;
/// With fewer splits than this, a step's blocks fill the GPU about as well unsplit.
constexpr int kLEAST_SPLITS = 4;
/// Fewest tiles of a split: leaving and merging its result takes about as long as two.
constexpr int kSPLIT_TILES = 8;

/// In how many splits these tiles are taken.
__device__ __forceinline__ int splitsOf(SplitArguments const& a, int tiles) {
    return max(1, min(a.max_splits, tiles / kSPLIT_TILES));
}

/// A warp's rows: `Panels` times 16 rows of 2 tokens; a lane has head lane / 4 of both.
template <int Panels>
struct WarpState {
    float out[Panels][kHEAD_DIM / 8][4];
    float top[Panels][2];
    float sum[Panels][2]; // Over this lane's keys only.
};

/// S = Q K^T of a tile, unscaled.
template <int Panels>
__device__ __forceinline__ void multiplyKeys(float (&s)[Panels][kTILE / 8][4], uint32_t q, uint32_t tile, int lane) {
    uint32_t const k = tile + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < kHEAD_DIM / 16; ++step) {
        uint32_t a[Panels][4];
#pragma unroll
        for (int m = 0; m < Panels; ++m) {
            ldmatrix4(a[m], (q ^ (step * 32)) + m * 16 * kROW_BYTES);
        }
#pragma unroll
        for (int n = 0; n < kTILE / 16; ++n) {
            uint32_t b[4];
            ldmatrix4(b, (k ^ (step * 32)) + n * 16 * kROW_BYTES);
#pragma unroll
            for (int m = 0; m < Panels; ++m) {
                mma16816(s[m][2 * n], a[m], b[0], b[1]);
                mma16816(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/// Logits become probabilities, and the state is brought to the new maxima. All rows go through each step together, so
/// that their shuffles overlap.
template <int Panels>
__device__ __forceinline__ void softmaxTile(WarpState<Panels>& state, float (&s)[Panels][kTILE / 8][4], int lane,
                                            bool masked, int firstKey, int position, int window) {
    float top[Panels][2];
    bool raised = false;
#pragma unroll
    for (int m = 0; m < Panels; ++m) {
        if (masked) {
#pragma unroll
            for (int n = 0; n < kTILE / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int const key = firstKey + n * 8 + lane % 4 * 2 + i % 2;
                    int const query = position + 2 * m + i / 2;
                    s[m][n][i] = key <= query && key > query - window ? s[m][n][i] : kMINUS_INFINITY;
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[m][half] = kMINUS_INFINITY;
#pragma unroll
            for (int n = 0; n < kTILE / 8; ++n) {
                top[m][half] = fmaxf(top[m][half], fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            }
        }
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
#pragma unroll
        for (int row = 0; row < 2 * Panels; ++row) {
            float& value = top[row / 2][row % 2];
            value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, mask));
        }
    }
#pragma unroll
    for (int row = 0; row < 2 * Panels; ++row) {
        float& value = top[row / 2][row % 2];
        value = fmaxf(value * kLOGIT_SCALE, state.top[row / 2][row % 2]);
        raised |= value > state.top[row / 2][row % 2];
    }
    if (__any_sync(0xFFFFFFFFu, raised)) {
#pragma unroll
        for (int row = 0; row < 2 * Panels; ++row) {
            int const m = row / 2, half = row % 2;
            float const factor = rescale(state.top[m][half], top[m][half]);
            state.top[m][half] = top[m][half];
            state.sum[m][half] *= factor;
#pragma unroll
            for (int n = 0; n < kHEAD_DIM / 8; ++n) {
                state.out[m][n][2 * half] *= factor;
                state.out[m][n][2 * half + 1] *= factor;
            }
        }
    }
#pragma unroll
    for (int row = 0; row < 2 * Panels; ++row) {
        int const m = row / 2, half = row % 2;
        // A row that has seen no key yet has a maximum of -infinity, and -infinity - -infinity is NaN.
        float const base = state.top[m][half] == kMINUS_INFINITY ? 0.0f : state.top[m][half];
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kTILE / 8; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& p = s[m][n][2 * half + j];
                p = exp2Fast(fmaf(p, kLOGIT_SCALE, -base));
                sum += p;
            }
        }
        state.sum[m][half] += sum;
    }
}

/// O += P V of a tile; P rounded to BF16.
template <int Panels>
__device__ __forceinline__ void multiplyValues(WarpState<Panels>& state, float const (&s)[Panels][kTILE / 8][4],
                                               uint32_t tile, int lane) {
    uint32_t const v = tile + kTILE * kROW_BYTES + swizzled(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kTILE / 16; ++step) {
        uint32_t a[Panels][4];
#pragma unroll
        for (int m = 0; m < Panels; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float const* const pair = s[m][2 * step + i / 2] + i % 2 * 2;
                a[m][i] = packBf16(pair[0], pair[1]);
            }
        }
#pragma unroll
        for (int n = 0; n < kHEAD_DIM / 16; ++n) {
            uint32_t b[4];
            ldmatrix4Transposed(b, (v ^ (n * 32)) + step * 16 * kROW_BYTES);
#pragma unroll
            for (int m = 0; m < Panels; ++m) {
                mma16816(state.out[m][2 * n], a[m], b[0], b[1]);
                mma16816(state.out[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/// Normalise with the sink, and store through the warp's own rows of Q's memory, for whole 256-byte rows.
template <int Panels>
__device__ __forceinline__ void storeRows(Arguments const& a, Block const& block, WarpState<Panels>& state, int head,
                                          uint8_t* rows, int firstToken, int lane) {
    float const sink = a.sinks[head * kGROUP + lane / 4] * kLOG2E;
    __syncwarp(); // Every lane has used Q.
#pragma unroll
    for (int m = 0; m < Panels; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = state.sum[m][half];
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
            float const all = fmaxf(state.top[m][half], sink);
            float const part = rescale(state.top[m][half], all);
            float const factor =
                __fdividef(part, sum * part + exp2Fast(sink - all)); // Within 2 units in the last place.
#pragma unroll
            for (int n = 0; n < kHEAD_DIM / 8; ++n) {
                *reinterpret_cast<uint32_t*>(rows + swizzled(m * 16 + half * 8 + lane / 4, n) + lane % 4 * 4) =
                    packBf16(state.out[m][n][2 * half] * factor, state.out[m][n][2 * half + 1] * factor);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Panels * 16 * kROW_SEGMENTS / kWARP; ++i) {
        int const row = i * 2 + lane / kROW_SEGMENTS, segment = lane % kROW_SEGMENTS;
        int const token = firstToken + row / kGROUP;
        if (token < block.tokens) {
            int64_t const target =
                (static_cast<int64_t>(block.row + token) * a.kv_heads + head) * kGROUP + row % kGROUP;
            reinterpret_cast<uint4*>(a.out)[target * kROW_SEGMENTS + segment] =
                *reinterpret_cast<uint4 const*>(rows + swizzled(row, segment));
        }
    }
}

/// Leave the unnormalised result of a split. A lane's pairs of dimensions make whole sectors of 32 bytes with its
/// neighbours'.
template <int Panels>
__device__ __forceinline__ void leaveRows(SplitArguments const& a, Block const& block, WarpState<Panels> const& state,
                                          int head, int split, int firstToken, int lane) {
#pragma unroll
    for (int m = 0; m < Panels; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = state.sum[m][half];
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
            int const token = firstToken + 2 * m + half;
            if (token >= block.tokens) {
                continue;
            }
            int64_t const row = (static_cast<int64_t>(block.row + token) * a.kv_heads + head) * kGROUP + lane / 4;
            int64_t const result = row * a.max_splits + split;
            if (lane % 4 == 0) {
                __stcg(a.stats + result, make_float2(state.top[m][half], sum));
            }
            float2* const target = reinterpret_cast<float2*>(a.partials + result * (kHEAD_DIM / 4)) + lane % 4;
#pragma unroll
            for (int n = 0; n < kHEAD_DIM / 8; ++n) {
                __stcg(target + n * 4, make_float2(state.out[m][n][2 * half], state.out[m][n][2 * half + 1]));
            }
        }
    }
}

/// Grid: (blocks of tokens, at most) x KV heads, the heads next to one another; in y the splits, at most, so that
/// blocks that read the same keys run together.
template <int Warps, bool Paged, bool Split>
__global__ void __launch_bounds__(Warps* kWARP, Warps == 4 ? 2 : 1)
    sinkAttentionPrefillKernel(SplitArguments const __grid_constant__ a) {
    constexpr int PANELS = kROWS / 16 / Warps;
    extern __shared__ __align__(256) uint8_t shared[];
    int const warp = threadIdx.x / kWARP, lane = threadIdx.x % kWARP;
    int const head = static_cast<int>(blockIdx.x) % a.kv_heads;
    allowSuccessor();
    waitForPredecessor();
    if (!Split || blockIdx.y == 0) {
        zeroPadding(a);
    }
    Block block;
    if (!findBlock(a, static_cast<int>(blockIdx.x) / a.kv_heads, lane, block)) {
        return;
    }
    int begin = block.low / kTILE, end = (block.high + kTILE - 1) / kTILE;
    int splits = 1;
    if constexpr (Split) {
        int const tiles = end, split = static_cast<int>(blockIdx.y);
        splits = splitsOf(a, tiles);
        if (split >= splits) {
            return;
        }
        begin = split * tiles / splits;
        end = (split + 1) * tiles / splits;
    }
    uint32_t const queries = sharedAddress(shared), tiles = queries + kQUERY_BYTES;
    for (int i = threadIdx.x; i < kROWS * kROW_SEGMENTS; i += Warps * kWARP) {
        int const row = i / kROW_SEGMENTS, segment = i % kROW_SEGMENTS;
        bool const valid = row / kGROUP < block.tokens;
        int64_t const token = block.row + (valid ? row / kGROUP : 0);
        copyAsync16(queries + swizzled(row, segment),
                    a.q + ((token * a.kv_heads + head) * kGROUP + row % kGROUP) * kHEAD_DIM + segment * kSEGMENT,
                    valid);
    }
    TileLoader<Warps * kWARP, Paged> loader(a, block, head, begin);
    loader.load(begin, tiles);
    commitCopies();

    WarpState<PANELS> state;
#pragma unroll
    for (int m = 0; m < PANELS; ++m) {
        state.top[m][0] = state.top[m][1] = kMINUS_INFINITY;
        state.sum[m][0] = state.sum[m][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < kHEAD_DIM / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                state.out[m][n][i] = 0.0f;
            }
        }
    }
    int const firstToken = warp * PANELS * 2;
    uint32_t const q = queries + warp * PANELS * 16 * kROW_BYTES + swizzled(lane % 16, lane / 16);
    uint32_t stage = tiles;
    uint32_t const other = tiles ^ (tiles + kTILE_BYTES);
    for (int tile = begin; tile < end; ++tile) {
        waitCopies<0>();
        __syncthreads(); // The tile is there for all, and the previous one used by all.
        if (tile + 1 < end) {
            loader.load(tile + 1, stage ^ other);
            commitCopies();
        }
        float s[PANELS][kTILE / 8][4] = {};
        multiplyKeys(s, q, stage, lane);
        bool const masked =
            tile * kTILE + kTILE > block.position + 1 || tile * kTILE <= block.position + block.tokens - 1 - a.window;
        softmaxTile(state, s, lane, masked, tile * kTILE, block.position + firstToken, a.window);
        multiplyValues(state, s, stage, lane);
        stage ^= other;
    }
    if (splits > 1) {
        leaveRows(a, block, state, head, static_cast<int>(blockIdx.y), firstToken, lane);
        return;
    }
    storeRows(a, block, state, head, shared + warp * PANELS * 16 * kROW_BYTES, firstToken, lane);
}

/// Sequence of a row: query_start[b] <= row < query_start[b + 1], as far as that holds (not for padding).
__device__ __forceinline__ int findSequence(Arguments const& a, int row) {
    int low = 0, high = a.sequences;
    while (high - low > 1) {
        int const middle = (low + high) / 2;
        (a.query_start[middle] <= row ? low : high) = middle;
    }
    return low;
}

constexpr int kMERGE_BATCH = 8; // Of splits; leaves registers for four blocks on a multiprocessor.

/// Merge the splits of a row's keys. Grid: T x KV heads; a warp has a query head.
__global__ void __launch_bounds__(kGROUP* kWARP, 4) mergeSplitsKernel(SplitArguments const __grid_constant__ a) {
    allowSuccessor();
    waitForPredecessor();
    int const row = static_cast<int>(blockIdx.x) / a.kv_heads;
    int const b = findSequence(a, row);
    int const first = a.query_start[b], tokens = a.query_start[b + 1] - first;
    if (row - first >= tokens) {
        return;
    }
    // The last position that the row's block sees: see findBlock.
    int const high =
        a.seq_lens[b] - tokens + min(tokens, (row - first) / kBLOCK_TOKENS * kBLOCK_TOKENS + kBLOCK_TOKENS);
    int const splits = splitsOf(a, (high + kTILE - 1) / kTILE);
    if (splits > 1) {
        int const head = static_cast<int>(blockIdx.x) % a.kv_heads * kGROUP + static_cast<int>(threadIdx.x) / kWARP;
        mergeRow<kMERGE_BATCH>(a, row, head, splits, threadIdx.x % kWARP);
    }
}

constexpr int kSTORE_WARPS = 4;

/// Leave the last min(new, ring) fresh tokens of each sequence in its ring; a warp a token. A kernel of its own,
/// because the attention kernel's blocks still read the ring's older tokens.
__global__ void __launch_bounds__(kSTORE_WARPS* kWARP)
    ringStoreKernel(Arguments const __grid_constant__ a, uint4* __restrict__ ring) {
    allowSuccessor();
    waitForPredecessor();
    int const row = static_cast<int>(blockIdx.x) * kSTORE_WARPS + static_cast<int>(threadIdx.x) / kWARP;
    int const b = findSequence(a, row);
    int const end = a.query_start[b + 1];
    if (row >= end || row < end - a.ring) {
        return;
    }
    int const place = (a.seq_lens[b] - (end - row)) % a.ring;
    int64_t const first = static_cast<int64_t>(a.ring_slot[b]) * 2 * a.kv_heads;
    int const vectors = 2 * a.kv_heads * kROW_SEGMENTS;
    uint4 const* const source = reinterpret_cast<uint4 const*>(a.fresh_kv) + static_cast<int64_t>(row) * vectors;
    for (int i = threadIdx.x % kWARP; i < vectors; i += kWARP) {
        int const isValue = i / kROW_SEGMENTS / a.kv_heads, head = i / kROW_SEGMENTS % a.kv_heads;
        ring[((first + 2 * head + isValue) * a.ring + place) * kROW_SEGMENTS + i % kROW_SEGMENTS] = source[i];
    }
}

/// Most splits of a block's keys in a step of up to so many blocks.
int mostSplits(unsigned blocks) {
    int const splits = static_cast<int>(kSPLIT_BLOCKS / blocks);
    return splits < kLEAST_SPLITS ? 1 : std::min(splits, kMAX_SPLITS);
}

template <int Warps>
cudaError_t launchPrefill(SplitArguments const& a, unsigned blocks, cudaStream_t stream) {
    auto* const kernel = a.ring > 0         ? sinkAttentionPrefillKernel<Warps, false, false>
                         : a.max_splits > 1 ? sinkAttentionPrefillKernel<Warps, true, true>
                                            : sinkAttentionPrefillKernel<Warps, true, false>;
    if (cudaError_t const status = allowShared(kernel, kSHARED_BYTES); status != cudaSuccess) {
        return status;
    }
    auto const splits = static_cast<unsigned>(a.max_splits);
    return launchOverlapped(kernel, dim3(blocks, splits), dim3(Warps * kWARP), kSHARED_BYTES, stream, a);
}

} // namespace

} // namespace attention

size_t sinkAttentionPrefillWorkspaceBytes(int64_t tokens, int64_t heads, int64_t kvHeads) {
    using namespace attention;
    // The greatest over all smaller steps too: at S splits, T tokens make at least T / 16 * Hkv blocks, and S times as
    // many are at most kSPLIT_BLOCKS.
    return partialBytes(std::min(tokens * kMAX_SPLITS, kSPLIT_BLOCKS * kBLOCK_TOKENS / kvHeads) * heads);
}

cudaError_t launchSinkAttentionPrefill(SinkAttentionParams const& params, cudaStream_t stream) {
    using namespace attention;
    if (sinkAttentionProblem(params, false)) {
        return cudaErrorInvalidValue;
    }
    if (params.tokens == 0 || params.sequences == 0) {
        return cudaSuccess;
    }
    int device = 0, sharedBytes = 0;
    for (cudaError_t const status :
         {cudaGetDevice(&device),
          cudaDeviceGetAttribute(&sharedBytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)}) {
        if (status != cudaSuccess) {
            return status;
        }
    }
    // Every sequence may end in a block that is not full.
    int64_t const full = params.tokens + std::min(params.tokens, params.sequences) * (kBLOCK_TOKENS - 1);
    auto const blocks = static_cast<unsigned>(full / kBLOCK_TOKENS * params.kv_heads);
    bool const paged = params.ring == 0;
    SplitArguments a(params);
    if (paged) {
        a.splitInto(mostSplits(blocks), static_cast<uint8_t*>(params.workspace));
    }
    bool const two = sharedBytes >= 2 * (kSHARED_BYTES + 1024);
    cudaError_t const status = two ? launchPrefill<4>(a, blocks, stream) : launchPrefill<8>(a, blocks, stream);
    if (status != cudaSuccess) {
        return status;
    }
    if (paged) {
        auto const merges = static_cast<unsigned>(params.tokens * params.kv_heads);
        return a.max_splits == 1
                   ? cudaSuccess
                   : launchOverlapped(mergeSplitsKernel, dim3(merges), dim3(kGROUP * kWARP), 0, stream, a);
    }
    auto const stores = static_cast<unsigned>((params.tokens + kSTORE_WARPS - 1) / kSTORE_WARPS);
    return launchOverlapped(ringStoreKernel, dim3(stores), dim3(kSTORE_WARPS * kWARP), 0, stream, a,
                            static_cast<uint4*>(params.kv_pool_out));
}

} // namespace flint
