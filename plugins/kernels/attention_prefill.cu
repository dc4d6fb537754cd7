// Prefill: FlashAttention-2's loop on mma.sync, the same for all targets.
//
// A block has 16 tokens x the 8 heads of a KV group = 128 rows (row = token * 8 + head), so that a K/V tile of 64 keys
// is read once for the group. Tiles are double buffered; each is copied while the previous one is used. Blocks are
// numbered from the batch's last token back: a sequence's last tokens see the most keys and are started first.
//
// Where two blocks fit on an SM, 4 warps have 32 rows each: every K and V operand read from shared memory then serves
// two products, and the other block's products run during this one's softmax. Else 8 warps have 16 rows each.
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

/// Grid: (blocks of tokens, at most) x KV heads, the heads next to one another.
template <int Warps, bool Paged>
__global__ void __launch_bounds__(Warps* kWARP, Warps == 4 ? 2 : 1)
    sinkAttentionPrefillKernel(Arguments const __grid_constant__ a) {
    constexpr int PANELS = kROWS / 16 / Warps;
    extern __shared__ __align__(256) uint8_t shared[];
    int const warp = threadIdx.x / kWARP, lane = threadIdx.x % kWARP;
    int const head = static_cast<int>(blockIdx.x) % a.kv_heads;
    allowSuccessor();
    waitForPredecessor();
    zeroPadding(a);
    Block block;
    if (!findBlock(a, static_cast<int>(blockIdx.x) / a.kv_heads, lane, block)) {
        return;
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
    int const begin = block.low / kTILE, end = (block.high + kTILE - 1) / kTILE;
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
    storeRows(a, block, state, head, shared + warp * PANELS * 16 * kROW_BYTES, firstToken, lane);
}

constexpr int kSTORE_WARPS = 4;

/// Leave the last min(new, ring) fresh tokens of each sequence in its ring; a warp a token. A kernel of its own,
/// because the attention kernel's blocks still read the ring's older tokens.
__global__ void __launch_bounds__(kSTORE_WARPS* kWARP)
    ringStoreKernel(Arguments const __grid_constant__ a, uint4* __restrict__ ring) {
    allowSuccessor();
    waitForPredecessor();
    int const row = static_cast<int>(blockIdx.x) * kSTORE_WARPS + static_cast<int>(threadIdx.x) / kWARP;
    int low = 0, high = a.sequences; // query_start[low] <= row < query_start[high], as far as that holds.
    while (high - low > 1) {
        int const middle = (low + high) / 2;
        (a.query_start[middle] <= row ? low : high) = middle;
    }
    int const end = a.query_start[low + 1];
    if (row >= end || row < end - a.ring) {
        return;
    }
    int const place = (a.seq_lens[low] - (end - row)) % a.ring;
    int64_t const first = static_cast<int64_t>(a.ring_slot[low]) * 2 * a.kv_heads;
    int const vectors = 2 * a.kv_heads * kROW_SEGMENTS;
    uint4 const* const source = reinterpret_cast<uint4 const*>(a.fresh_kv) + static_cast<int64_t>(row) * vectors;
    for (int i = threadIdx.x % kWARP; i < vectors; i += kWARP) {
        int const isValue = i / kROW_SEGMENTS / a.kv_heads, head = i / kROW_SEGMENTS % a.kv_heads;
        ring[((first + 2 * head + isValue) * a.ring + place) * kROW_SEGMENTS + i % kROW_SEGMENTS] = source[i];
    }
}

template <int Warps, bool Paged>
cudaError_t launchPrefill(Arguments const& a, unsigned blocks, cudaStream_t stream) {
    auto* const kernel = sinkAttentionPrefillKernel<Warps, Paged>;
    if (cudaError_t const status = allowShared(kernel, kSHARED_BYTES); status != cudaSuccess) {
        return status;
    }
    return launchOverlapped(kernel, dim3(blocks), dim3(Warps * kWARP), kSHARED_BYTES, stream, a);
}

} // namespace

} // namespace attention

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
    Arguments const a(params);
    bool const paged = params.ring == 0;
    bool const two = sharedBytes >= 2 * (kSHARED_BYTES + 1024);
    cudaError_t const status =
        two ? (paged ? launchPrefill<4, true>(a, blocks, stream) : launchPrefill<4, false>(a, blocks, stream))
            : (paged ? launchPrefill<8, true>(a, blocks, stream) : launchPrefill<8, false>(a, blocks, stream));
    if (status != cudaSuccess || paged) {
        return status;
    }
    auto const stores = static_cast<unsigned>((params.tokens + kSTORE_WARPS - 1) / kSTORE_WARPS);
    return launchOverlapped(ringStoreKernel, dim3(stores), dim3(kSTORE_WARPS * kWARP), 0, stream, a,
                            static_cast<uint4*>(params.kv_pool_out));
}

} // namespace flint
