// Split-KV decode. A work item is (sequence, split of its keys, KV head); resident blocks stride over the items.
//
// Keys travel in chunks of 16 (K and V: 8 KB). A group of warps, at one token a single warp, owns every so many-th
// chunk of the item and has a shared-memory pipeline of its own, so the main loop has no block-wide barrier and all of
// a block's shared memory but the chunks in work is under way. Operands are swapped: S^T = K Q^T and O^T = V^T P^T, so
// that the 8 heads of a group fill the 8 columns of m16n8k16 and each further token costs exactly 8 more.
//
// A group's (m, l, O) are merged through shared memory. Where a sequence has several splits, each leaves its
// unnormalised result in the workspace, and the last to arrive merges them in order of split and adds the sink: a merge
// kernel or a memset node for counters would cost another launch per layer. The workspace is anyone's before this
// kernel, so a counter carries a tag: a word without the tag counts as zero. See `openCounter`.
//
// Small steps of as many tokens as sequences have a kernel of their own: attention_row.cu.
#include "kernels/attention_internal.h"
#include "kernels/attention_merge.cuh"
#include "kernels/launch.h"

#include <algorithm>

namespace flint {

namespace attention {

namespace {

constexpr int kSTAGES = 3; // Chunks of shared memory a warp; groups of several warps pool theirs.

/// Steps of up to kLATENCY_TOKENS rows split a sequence so that one alone fills the GPU. In larger ones the batch does
/// that: fewer, longer splits then keep the workspace and the merging small. Units are pages.
constexpr int kLATENCY_BLOCKS = 192; // Blocks that share one sequence, over its KV heads; at least a GPU's SMs.
constexpr int kLATENCY_UNITS = 3;    // Fewest of a split, below its maximum number.
constexpr int kTHROUGHPUT_SPLITS = 16;
constexpr int kTHROUGHPUT_UNITS = 16;

/// Wait for the `Warps` warps of a group. Each group has an instruction of its own, with its barrier's number in it:
/// for numbers from a register the kernel would reserve all 16 barriers.
template <int Warps, int Groups>
__device__ __forceinline__ void syncGroup(int group) {
    if constexpr (Warps == 1) {
        __syncwarp();
    } else {
#pragma unroll
        for (int i = 0; i < Groups; ++i) {
            if (i == group) {
                syncNamed(1 + i, Warps * kWARP);
            }
        }
    }
}

/// One item. Groups of `Share` warps own the chunks in turn; each warp has `Tokens` of the sequence's tokens.
template <int Warps, bool Paged, int Tokens, int Share>
__device__ __forceinline__ void attendItem(DecodeArguments const& a, Item const& item, uint8_t* shared) {
    constexpr int GROUPS = Warps / Share;
    constexpr int STAGES = kSTAGES * Share;
    int const warp = threadIdx.x / kWARP, lane = threadIdx.x % kWARP;
    int const group = warp / Share;
    int const thread = threadIdx.x % (Share * kWARP);
    uint32_t const ring = sharedAddress(shared) + group * STAGES * kCHUNK_BYTES;
    int const begin = item.chunk_begin + group;
    ChunkFinder<Paged> finder(a, item, lane);

    auto const fetch = [&](int chunk, int stage) {
        if (chunk < item.chunk_end) {
            loadChunk<Paged, Share * kWARP>(item, finder.place(chunk), chunk, a.ring, ring + stage * kCHUNK_BYTES,
                                            thread);
        }
        commitCopies();
    };
    // Old tokens' keys do not depend on the kernel before this one (see launchSinkAttentionDecode).
    int const old = item.length - item.tokens;
    for (int i = 0; i < STAGES; ++i) {
        int const chunk = begin + i * GROUPS;
        if ((chunk + 1) * kCHUNK > old) {
            waitForPredecessor();
        }
        fetch(chunk, i);
    }
    waitForPredecessor();

    unsigned long long* const counter = a.counters + item.sequence * a.kv_heads + item.head;
    bool const opens = item.splits > 1 && threadIdx.x == 0;
    unsigned long long const found = opens ? __ldcg(counter) : 0;

    WarpState<Tokens> state;
#pragma unroll
    for (int n = 0; n < Tokens; ++n) {
        int const token = warp % Share * Tokens + n;
        bool const present = token < item.tokens;
        state.position[n] = old + token;
        // B operand: lane (g, t) holds dimensions 2t, 2t + 1 (+ 8) of head g.
        uint32_t const* const q =
            reinterpret_cast<uint32_t const*>(
                a.q + ((static_cast<int64_t>(item.row) + token) * a.kv_heads + item.head) * (kGROUP * kHEAD_DIM)) +
            lane / 4 * (kHEAD_DIM / 2) + lane % 4;
#pragma unroll
        for (int step = 0; step < kHEAD_DIM / 16; ++step) {
            state.q[n][step][0] = present ? __ldcg(q + step * 8) : 0;
            state.q[n][step][1] = present ? __ldcg(q + step * 8 + 4) : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                state.out[n][step][i] = 0.0f;
            }
        }
        state.top[n][0] = state.top[n][1] = kMINUS_INFINITY;
        state.sum[n][0] = state.sum[n][1] = 0.0f;
    }
    if (opens) {
        openCounter(counter, found);
    }

    int stage = 0;
    // All groups take the same number of turns, also of nothing: where they did not, racecheck reported accesses of the
    // merge that a barrier of all warps separates.
    for (int chunk = begin; chunk - group < item.chunk_end; chunk += GROUPS) {
        waitCopies<STAGES - 1>();
        syncGroup<Share, GROUPS>(group); // The chunk is there for all.
        if (chunk < item.chunk_end) {
            int const first = chunk * kCHUNK;
            bool const masked = first + kCHUNK > old + 1 || first <= item.length - 1 - a.window;
            attendChunk(state, ring + stage * kCHUNK_BYTES, masked, first, a.window, lane);
        }
        syncGroup<Share, GROUPS>(group); // All have used it.
        fetch(chunk + STAGES * GROUPS, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    finishItem<Warps, Tokens, Share>(a, item, state, shared);
}

template <int Warps>
constexpr int kSHARED_BYTES = Warps * kSTAGES * kCHUNK_BYTES;

static_assert(8 * 2 * kGROUP * (kMERGE_STRIDE * 4 + 8) <= kSHARED_BYTES<8>, "the merge reuses the chunks' memory");
static_assert(kSHARED_BYTES<4> + 1024 <= kCOMMON_SHARED_BYTES, "any GPU runs the kernel of four warps");
static_assert(4 * 2 * kGROUP * (kMERGE_STRIDE * 4 + 8) <= kSHARED_BYTES<4>, "the merge reuses the chunks' memory");

/// Grid: as many blocks as are resident, or as there can be items. 8 warps use a whole SM of 227 KB, 4 warps half of
/// one, or one of 99 KB.
template <int Warps, bool Paged>
__global__ void __launch_bounds__(Warps* kWARP, Warps == 8 ? 1 : 2)
    sinkAttentionDecodeKernel(DecodeArguments const __grid_constant__ a) {
    extern __shared__ __align__(256) uint8_t shared[];
    int const lane = threadIdx.x % kWARP;
    allowSuccessor();
    ItemFinder finder;
    Item item;
    for (int number = blockIdx.x; finder.find(a, number, lane, item); number += gridDim.x) {
        if (item.tokens == 1) {
            attendItem<Warps, Paged, 1, 1>(a, item, shared);
        } else if (item.tokens == 2) {
            attendItem<Warps, Paged, 2, 1>(a, item, shared);
        } else if (item.tokens <= 4) {
            attendItem<Warps, Paged, 2, 2>(a, item, shared);
        } else if (item.tokens <= kMAX_TOKENS) {
            attendItem<Warps, Paged, 2, 4>(a, item, shared);
        }
    }
    waitForPredecessor(); // Also without an item: this kernel's end must not overtake its predecessor's.
    zeroPadding(a);
}

int latencySplits(int64_t kvHeads, int64_t blocks) {
    return static_cast<int>(std::clamp<int64_t>(blocks / kvHeads, 1, kMAX_SPLITS));
}

size_t counterBytes(int64_t sequences, int64_t kvHeads) {
    return aligned(static_cast<size_t>(sequences * kvHeads) * sizeof(unsigned long long));
}

template <int Warps>
cudaError_t launchDecode(void (*kernel)(DecodeArguments const), DecodeArguments const& a, int64_t items, int sms,
                         cudaStream_t stream) {
    constexpr int BYTES = kSHARED_BYTES<Warps>;
    if (cudaError_t const status = allowShared(kernel, BYTES); status != cudaSuccess) {
        return status;
    }
    int resident = 0;
    if (cudaError_t const status =
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, Warps * kWARP, BYTES);
        status != cudaSuccess) {
        return status;
    }
    auto const grid = static_cast<unsigned>(std::min<int64_t>(items, std::max(resident, 1) * sms));
    return launchOverlapped(kernel, dim3(grid), dim3(Warps * kWARP), BYTES, stream, a);
}

} // namespace

} // namespace attention

char const* sinkAttentionProblem(SinkAttentionParams const& p, bool decode) {
    using namespace attention;
    bool const paged = p.ring == 0;
    int64_t const limit = int64_t{1} << 30;
    if (p.head_dim != kHEAD_DIM) {
        return "the kernels need a head dimension of 128";
    }
    if (p.kv_heads < 1 || p.heads != p.kv_heads * kGROUP) {
        return "the kernels need 8 query heads a KV head";
    }
    if (p.kv_heads > 64 || p.tokens > limit / p.heads || p.sequences > limit / p.kv_heads || p.ring > 1 << 20) {
        return "more heads, tokens, sequences or ring entries than the kernels can index";
    }
    if (paged && p.window != 0) {
        return "a window needs rings: full layers see every earlier key";
    }
    if (!paged && (p.window < 1 || p.window > limit / 2)) {
        return "sliding layers need a window of at least one key";
    }
    // A decode step has written its tokens before the first of them reads its window; prefill reads older keys only.
    int64_t const written = decode ? std::min<int64_t>(std::max<int64_t>(p.tokens, 1), kMAX_TOKENS) : 1;
    if (!paged && p.ring < std::max<int64_t>(p.window + written - 1, kLEAST_RING)) {
        return "the ring must hold the window and the other tokens of a decode step, and at least 32";
    }
    return nullptr;
}

size_t sinkAttentionDecodeWorkspaceBytes(int64_t tokens, int64_t sequences, int64_t heads, int64_t kvHeads) {
    using namespace attention;
    // The greatest over all smaller steps too, of either class and on any GPU: a profile asks only for its maximum.
    int64_t const splits =
        std::max(std::min<int64_t>(tokens, kLATENCY_TOKENS) * latencySplits(kvHeads, kLATENCY_BLOCKS),
                 tokens * kTHROUGHPUT_SPLITS);
    return std::max(counterBytes(sequences, kvHeads) + partialBytes(splits * heads),
                    rowAttentionWorkspaceBytes(tokens, heads));
}

cudaError_t launchSinkAttentionDecode(SinkAttentionParams const& params, cudaStream_t stream) {
    using namespace attention;
    if (sinkAttentionProblem(params, true)) {
        return cudaErrorInvalidValue;
    }
    if (params.tokens == 0 || params.sequences == 0) {
        return cudaSuccess;
    }
    if (isRowStep(params)) {
        return launchRowAttention(params, nullptr, stream);
    }
    int device = 0, sms = 0, sharedBytes = 0;
    for (cudaError_t const status :
         {cudaGetDevice(&device), cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
          cudaDeviceGetAttribute(&sharedBytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)}) {
        if (status != cudaSuccess) {
            return status;
        }
    }
    bool const latency = params.tokens <= kLATENCY_TOKENS;
    bool const paged = params.ring == 0;
    DecodeArguments a(params);
    int splits = latency ? latencySplits(params.kv_heads, std::min(sms, kLATENCY_BLOCKS)) : kTHROUGHPUT_SPLITS;
    a.split_units = latency ? kLATENCY_UNITS : kTHROUGHPUT_UNITS;
    if (params.window > 0 && (params.window + kMAX_TOKENS - 2) / kPAGE_TOKENS + 2 <= kUNSPLIT_UNITS) {
        splits = 1; // a window is never split: launch no blocks for it
    }
    auto* const workspace = static_cast<uint8_t*>(params.workspace);
    a.counters = reinterpret_cast<unsigned long long*>(workspace);
    a.splitInto(splits, workspace + counterBytes(params.sequences, params.kv_heads));

    int64_t const items = std::min(params.sequences, params.tokens) * params.kv_heads * a.max_splits;
    if (latency && paged && sharedBytes >= kSHARED_BYTES<8> + 1024) {
        return launchDecode<8>(sinkAttentionDecodeKernel<8, true>, a, items, sms, stream);
    }
    auto* const kernel = paged ? sinkAttentionDecodeKernel<4, true> : sinkAttentionDecodeKernel<4, false>;
    return launchDecode<4>(kernel, a, items, sms, stream);
}

} // namespace flint
