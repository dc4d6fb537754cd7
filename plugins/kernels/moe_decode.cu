// The experts of NormMoe's low-latency path, after moe_route.cu:
//   up:   gate, up and SwiGLU of each chosen expert, and of more than kSINGLE_TOKENS tokens the shared expert's, too
//   down: down projections of the chosen and the shared expert, combine
// A panel, 16 rows of one matrix, is multiplied by one group of warps: only the chosen experts' bytes move, each once
// for all tokens, and nothing is scattered.
#include "kernels/launch.h"
#include "kernels/moe_internal.h"
#include "kernels/swiglu.cuh"

namespace flint {

namespace {

/// Place of row `row` of a panel's 8 units among a token's activations, which are ordered.
__device__ __forceinline__ int unitPlace(int panel, int row) {
    int const unit = panel * 8 + row;
    return unit / 16 * 16 + activationOrder(unit % 16);
}

/// Panels of a block of the kernel below, each multiplied by a group of kSPLIT warps. Every block reads the logits and
/// x, and the L2 serves the reads of one line one by one: so few blocks, one a multiprocessor of an H200. BF16 panels
/// have twice the warps.
template <WeightFormat F>
constexpr int kUP_PANELS = F == WeightFormat::kNVFP4 ? 3 : 1;

template <WeightFormat F, int H>
constexpr int kUP_SINGLE_WARPS = kUP_PANELS<F> * Split<F, H>::kSPLIT;

template <WeightFormat F, int H>
struct UpSingleShared {
    CopiedSlice<F, H> slices[kUP_SINGLE_WARPS<F, H>];
    alignas(16) uint8_t row[H * 2];
    alignas(16) float sums[PartialSums::floats(kUP_SINGLE_WARPS<F, H>)];
    CopyBarrier copied;
    int chosen[kTOP_K];
};

/// A token at a time. Grid (6 * 2 I / 16 / kUP_PANELS, T): consecutive panels of the chosen experts, in slot order.
template <WeightFormat F, int H, int E, int I>
__global__ void __launch_bounds__(kUP_SINGLE_WARPS<F, H>* kWARP)
    moeUpSingleKernel(MoeParams const params, MoeDecodeWorkspace const all) {
    MoeDecodeWorkspace const work = all.of(blockIdx.y, params);
    constexpr int PARTS = Split<F, H>::kSPLIT, WARPS = kUP_SINGLE_WARPS<F, H>, PANELS = kUP_PANELS<F>;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<UpSingleShared<F, H>*>(raw);
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, part = warp % PARTS, group = warp / PARTS;
    constexpr int EXPERT_PANELS = 2 * I / kPANEL_ROWS;
    int const index = blockIdx.x * PANELS + group, slot = index / EXPERT_PANELS, panel = index % EXPERT_PANELS;
    CopiedSlice<F, H>& slice = shared.slices[warp];
    if (threadIdx.x == 0) {
        shared.copied.open();
    }
    if (lane == 0) {
        slice.open();
    }
    waitForPredecessor();
    if (threadIdx.x == 0) { // x comes while weights do
        shared.copied.expect(H * 2);
        RowX<H>::copy(shared.copied, work.x, 1, shared.row);
    }
    // One warp routes: all of them would read the same few lines at the same time, which the L2 serves one by one.
    if (warp == WARPS - 1) {
        RouterLogits<E> logits;
        logits.load(work.logits, lane);
        RouterKeys<E> keys(logits, lane);
#pragma unroll 1                          // the code comes from the L2, too
        for (int i = 0; i <= slot; ++i) { // the block's last slot
            if (auto const best = keys.takeBest(lane); best.mine) {
                shared.chosen[i] = best.expert;
            }
        }
    }
    __syncthreads();
    int const expert = shared.chosen[slot];
    if (lane == 0) {
        slice.copy(params.up + (int64_t{expert} * EXPERT_PANELS + panel) * panelBytes(F, H), part);
    }
    // After the wait, as the down kernel reads what the router's kernel wrote before a wait of its own; and not sooner,
    // as its weights would delay these.
    allowSuccessor();
    GateUpScales const scales(params.up_scale == nullptr ? nullptr : params.up_scale + 2 * expert, kRESTORE<F>);
    shared.copied.wait(); // opened before the barrier of routing
    float acc[1][4];
    slice.multiply(acc, part, lane, RowX<H>{shared.row, lane}); // in every column, see SharedX
    PartialSums const partial{shared.sums + PartialSums::floats(group * PARTS)};
    partial.store(acc[0], part, lane);
    __syncthreads();
    if (int const unit = threadIdx.x % (PARTS * kWARP); unit < 8) {
        float const gate = partial.sum(PARTS, unit, 0) * scales.gate, up = partial.sum(PARTS, unit + 8, 0) * scales.up;
        work.act[slot * I + unitPlace(panel, unit)] = swigluRouted(gate, up);
    }
}

/// Warps of a block of the kernel below: as many as registers allow, and one for each token's routing.
template <WeightFormat F>
constexpr int kUP_WARPS = F == WeightFormat::kNVFP4 ? 16 : 8;

/// Whether the kernel below has registers to load the tensor scales before the product; on 10.x it would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1100
constexpr bool kSCALES_AHEAD = false;
#else
constexpr bool kSCALES_AHEAD = true;
#endif

template <WeightFormat F, int H, int E>
struct UpShared {
    alignas(16) uint8_t x[kDECODE_TOKENS * RowX<H>::kSTRIDE];
    alignas(16) float sums[2][PartialSums::floats(kUP_WARPS<F>)];
    CopyBarrier copied;
    StepRoutes<kDECODE_TOKENS> routes;
    int first[E];
};

/// Several tokens. A block a multiprocessor: groups of kSPLIT warps stride over the panels of all distinct experts and
/// then of the shared one, the next panel's weights under way while the present one is multiplied.
template <WeightFormat F, int H, int E, int I, int S>
__global__ void __launch_bounds__(kUP_WARPS<F>* kWARP, 1)
    moeUpKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int WARPS = kUP_WARPS<F>, PARTS = Split<F, H>::kSPLIT, GROUPS = WARPS / PARTS, THREADS = PARTS * kWARP;
    static_assert(GROUPS * PARTS == WARPS && WARPS >= kDECODE_TOKENS);
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<UpShared<F, H, E>*>(raw);
    StepRoutes<kDECODE_TOKENS> const& routes = shared.routes;
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, part = warp % PARTS, group = warp / PARTS;
    constexpr int PANELS = 2 * I / kPANEL_ROWS;           // of an expert
    bool const copies = threadIdx.x == WARPS * kWARP - 1; // in a warp that routes no token, if there is one
    if (copies) {
        shared.copied.open();
    }
    waitForPredecessor();
    RouterLogits<E> logits;
    if (warp < params.tokens) { // before the rows, which would delay them
        logits.load(work.logits + warp * E, lane);
    }
    if (copies) {
        shared.copied.expect(params.tokens * H * 2);
        RowX<H>::copy(shared.copied, work.x, params.tokens, shared.x);
    }
    routeStep<E>(logits, params.tokens, shared.routes, shared.first);
    if (blockIdx.x == 0) {
        copyRoutes(*work.routes, shared.routes);
        __threadfence();
        __syncthreads(); // a block allows its successor as soon as one of its threads does
    }
    allowSuccessor(); // now: the down kernel reads the routing before its own wait

    int const routed = routes.count * PANELS, units = routed + 2 * S / kPANEL_ROWS;
    int const stride = gridDim.x * GROUPS;
    auto const load = [&](SliceOf<F, H>& slice, int unit) {
        if (unit < units) {
            int64_t const panel = int64_t{routes.distinct[unit < routed ? unit / PANELS : 0]} * PANELS + unit % PANELS;
            uint8_t const* const weight = unit < routed ? params.up + panel * panelBytes(F, H)
                                                        : params.shared_up + (unit - routed) * panelBytes(F, H);
            slice.template load<H>(weight, part, lane);
        }
    };
    RowX<H> const x{shared.x + min(lane / 4, params.tokens - 1) * RowX<H>::kSTRIDE, lane};
    auto const compute = [&](SliceOf<F, H> const& slice, int unit, float* sums) {
        bool const isShared = unit >= routed;
        int const index = isShared ? 0 : unit / PANELS, panel = isShared ? unit - routed : unit % PANELS;
        float const* const scale = isShared || params.up_scale == nullptr
                                       ? params.shared_up_scale
                                       : params.up_scale + 2 * routes.distinct[index];
        GateUpScales scales;
        if constexpr (kSCALES_AHEAD) {
            scales = GateUpScales(scale, kRESTORE<F>);
        }
        float acc[1][4];
        slice.multiply(acc, part, x);
        PartialSums const partial{sums + PartialSums::floats(group * PARTS)};
        partial.store(acc[0], part, lane);
        if constexpr (!kSCALES_AHEAD) {
            scales = GateUpScales(scale, kRESTORE<F>);
        }
        if constexpr (PARTS == 1) { // one barrier a panel: two sums alternate
            __syncwarp();
        } else {
            syncNamed(1 + group, THREADS);
        }
        for (int i = threadIdx.x % THREADS; i < 8 * params.tokens; i += THREADS) {
            int const row = i % 8, token = i / 8, pair = routes.pair[index][token];
            if (isShared || pair >= 0) {
                float const gate = partial.sum(PARTS, row, token) * scales.gate;
                float const up = partial.sum(PARTS, row + 8, token) * scales.up;
                if (isShared) {
                    work.shared_act[token * S + unitPlace(panel, row)] = swigluRounded(gate, up);
                } else {
                    work.act[pair * I + unitPlace(panel, row)] = swigluRouted(gate, up);
                }
            }
        }
    };
    int unit = blockIdx.x * GROUPS + group;
    SliceOf<F, H> even, odd; // the next panel's weights come while the present one's are multiplied
    load(even, unit);
    shared.copied.wait(); // opened before the barriers of routing
    while (unit < units) {
        load(odd, unit + stride);
        compute(even, unit, shared.sums[0]);
        unit += stride;
        if (unit >= units) {
            break;
        }
        load(even, unit + stride);
        compute(odd, unit, shared.sums[1]);
        unit += stride;
    }
}

/// The shared expert's part of a panel: warps 0 .. kSPLIT - 1 of it divide K.
template <WeightFormat F, int S>
constexpr int kSHARED_WARPS = Split<F, S>::kSPLIT;

template <WeightFormat F, int I, int S>
constexpr int kSINGLE_WARPS = kTOP_K * Split<F, I>::kSPLIT + kSHARED_WARPS<F, S>;

/// Tiles that the kernel below has ready: fewer than all, so that a block finds its registers beside the up kernel's
/// and its weights come while that runs.
template <WeightFormat F, int I>
constexpr int kDOWN_READY = F == WeightFormat::kNVFP4 && Split<F, I>::kTILES == 8 ? 5 : Split<F, I>::kTILES;

/// A token at a time. Grid (H / 16, T): a group of warps per chosen expert, in slot order, and one for the shared
/// expert.
template <WeightFormat F, int E, int I, int S>
__global__ void __launch_bounds__(kSINGLE_WARPS<F, I, S>* kWARP, 1)
    moeDownSingleKernel(MoeParams const params, MoeDecodeWorkspace const all) {
    MoeDecodeWorkspace const work = all.of(blockIdx.y, params);
    constexpr int PARTS = Split<F, I>::kSPLIT, SHARED_PARTS = Split<F, S>::kSPLIT;
    using X = StagedX<Split<F, I>::kTILES, 1>;
    __shared__ __align__(16) uint4 staged[kSINGLE_WARPS<F, I, S> * X::kVECTORS];
    __shared__ __align__(16) float sums[PartialSums::floats(kSINGLE_WARPS<F, I, S>)];
    __shared__ Routes routes;
    __shared__ float scales[kTOP_K + 1];
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, panel = blockIdx.x;
    int const panels = params.hidden / kPANEL_ROWS;
    bool const isShared = warp >= kTOP_K * PARTS;
    int const slot = isShared ? 0 : warp / PARTS, part = isShared ? warp - kTOP_K * PARTS : warp % PARTS;

    static_assert(Split<F, I>::kTILES == Split<F, S>::kTILES);
    SliceOf<F, I> slice;
    if (isShared) {
        slice.template load<S>(params.shared_down + panel * panelBytes(F, S), part, lane);
    }
    // The logits are complete, though the up kernel is not: it let this one start after its own wait for the router.
    if (warp == 0) { // see the up kernel
        Routes const found = routeToken<E>(work.logits, lane);
        if (lane == 0) {
            routes = found;
        }
    }
    __syncthreads();
    int const expert = routes.expert[slot];
    if (!isShared) {
        slice.template load<I>(params.down + (int64_t{expert} * panels + panel) * panelBytes(F, I), part, lane);
    }
    if (threadIdx.x <= kTOP_K) {
        bool const last = threadIdx.x == kTOP_K; // the shared expert's
        float const* const source =
            last ? params.shared_down_scale : params.down_scale + routes.expert[last ? 0 : threadIdx.x];
        scales[threadIdx.x] = kRESTORE<F> * (params.down_scale == nullptr ? 1.0f : __ldg(source));
    }
    allowSuccessor();
    ReadySlice<F, Split<F, I>::kTILES, kDOWN_READY<F, I>> const ready(slice);
    ready.hold(params.tokens < 0, params.out);
    // The shared expert's activations are complete, as the logits are: its warps are done when the other ones start.
    bf16 const* act = work.shared_act;
    if (!isShared) {
        act = work.act + slot * I;
        waitForPredecessor();
    }

    X const x{staged + warp * X::kVECTORS, part, lane};
    x.template stage<true>(1, [&](int) { return act; });
    float acc[1][4];
    ready.multiply(acc, part, x);
    PartialSums{sums}.store(acc[0], warp, lane);
    __syncthreads();
    if (threadIdx.x < kPANEL_ROWS) { // of a warp that has waited
        int const row = threadIdx.x;
        float routed = 0;
#pragma unroll
        for (int i = 0; i < kTOP_K; ++i) {
            PartialSums const theirs{sums + PartialSums::floats(i * PARTS)};
            routed += routes.weight[i] * roundBf16(theirs.sum(PARTS, row, 0) * scales[i]);
        }
        PartialSums const theirs{sums + PartialSums::floats(kTOP_K * PARTS)};
        float const sharedOut = roundBf16(theirs.sum(SHARED_PARTS, row, 0) * scales[kTOP_K]);
        params.out[int64_t{blockIdx.y} * params.hidden + panel * kPANEL_ROWS + row] =
            __float2bfloat16_rn(roundBf16(routed) + sharedOut);
    }
}

/// Warps of a block of the kernel below that take experts: as many as registers allow.
template <WeightFormat F>
constexpr int kEXPERT_WARPS = F == WeightFormat::kNVFP4 ? 12 : 8;

template <int I, int S>
struct DownShared {
    alignas(16) uint8_t act[kDECODE_PAIRS * RowX<I>::kSTRIDE];
    alignas(16) uint8_t shared_act[kDECODE_TOKENS * RowX<S>::kSTRIDE];
    StepRoutes<kDECODE_TOKENS> routes;
    float y[kDECODE_PAIRS][kPANEL_ROWS];
    CopyBarrier copied;
    alignas(16) float sums[PartialSums::floats(8)]; ///< of the shared expert
};

/// Several tokens. Grid (H / 16): kEXPERT_WARPS warps take the distinct experts in turn, each a whole row of K; the
/// other warps take the shared expert.
template <WeightFormat F, int I, int S>
__global__ void __launch_bounds__((kEXPERT_WARPS<F> + kSHARED_WARPS<F, S>)*kWARP, 1)
    moeDownKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, I>::kSPLIT, SHARED_PARTS = Split<F, S>::kSPLIT;
    constexpr int EXPERT_WARPS = kEXPERT_WARPS<F>, THREADS = (EXPERT_WARPS + SHARED_PARTS) * kWARP;
    /// BF16 shares are too large for registers twice: the next one is loaded when the present one is used up.
    constexpr bool AHEAD = F == WeightFormat::kNVFP4;
    static_assert(Split<F, I>::kTILES == Split<F, S>::kTILES && SHARED_PARTS <= 8);
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<DownShared<I, S>*>(raw);
    StepRoutes<kDECODE_TOKENS> const& routes = shared.routes;
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, column = lane / 4, panel = blockIdx.x;
    int const panels = params.hidden / kPANEL_ROWS, sharedPart = warp - EXPERT_WARPS;

    bool const copies = threadIdx.x == 0;
    if (copies) {
        shared.copied.open();
    }
    SliceOf<F, I> slice;
    if (sharedPart >= 0) {
        slice.template load<S>(params.shared_down + panel * panelBytes(F, S), sharedPart, lane);
    }
    // Complete: the up kernel let this one start when it had written them, behind a fence; copyRoutes reads past L1.
    copyRoutes(shared.routes, *work.routes);
    __syncthreads();
    auto const load = [&](SliceOf<F, I>& target, int index, int part) {
        if (index < routes.count) {
            int64_t const source = int64_t{routes.distinct[index]} * panels + panel;
            target.template load<I>(params.down + source * panelBytes(F, I), part, lane);
        }
    };
    if (sharedPart < 0) {
        load(slice, warp, 0);
    }
    allowSuccessor();
    waitForPredecessor();

    if (copies) {
        shared.copied.expect(params.tokens * (kTOP_K * I + S) * 2);
        RowX<S>::copy(shared.copied, work.shared_act, params.tokens, shared.shared_act);
        RowX<I>::copy(shared.copied, work.act, params.tokens * kTOP_K, shared.act);
    }
    __syncwarp();
    shared.copied.wait();
    if (sharedPart >= 0) {
        float acc[1][4];
        int const token = min(column, params.tokens - 1);
        slice.multiply(acc, sharedPart, RowX<S>{shared.shared_act + token * RowX<S>::kSTRIDE, lane});
        PartialSums{shared.sums}.store(acc[0], sharedPart, lane);
    } else {
        float sum[4] = {};
        for (int index = warp, part = 0; index < routes.count;) {
            int const nextPart = part + 1 == PARTS ? 0 : part + 1;
            int const nextIndex = nextPart == 0 ? index + EXPERT_WARPS : index;
            SliceOf<F, I> next;
            if constexpr (AHEAD) {
                load(next, nextIndex, nextPart);
            }
            int const mine = max(static_cast<int>(routes.pair[index][column]), 0);
            // Loaded here: behind the product it would be waited for.
            float const scale =
                kRESTORE<F> * (params.down_scale == nullptr
                                   ? 1.0f
                                   : __uint_as_float(loadNow4(params.down_scale + routes.distinct[index])));
            float acc[1][4];
            slice.multiply(acc, part, RowX<I>{shared.act + mine * RowX<I>::kSTRIDE, lane});
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[i] += acc[0][i];
            }
            if constexpr (!AHEAD) {
                load(next, nextIndex, nextPart);
            }
            if (nextPart == 0) {
                // Columns 2t, 2t + 1 of rows g, g + 8: y_e = r(acc * scale_e).
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int const pair = routes.pair[index][lane % 4 * 2 + i % 2];
                    if (pair >= 0) {
                        shared.y[pair][lane / 4 + i / 2 * 8] = roundBf16(sum[i] * scale);
                    }
                    sum[i] = 0;
                }
            }
            slice = next;
            index = nextIndex;
            part = nextPart;
        }
    }
    __syncthreads();
    float const sharedScale =
        kRESTORE<F> * (params.shared_down_scale == nullptr ? 1.0f : __ldg(params.shared_down_scale));
    for (int i = threadIdx.x; i < params.tokens * kPANEL_ROWS; i += THREADS) {
        int const token = i / kPANEL_ROWS, row = i % kPANEL_ROWS;
        float routed = 0;
#pragma unroll
        for (int slot = 0; slot < kTOP_K; ++slot) {
            int const pair = token * kTOP_K + slot;
            routed += routes.weight[pair] * shared.y[pair][row];
        }
        float const sharedOut = roundBf16(PartialSums{shared.sums}.sum(SHARED_PARTS, row, token) * sharedScale);
        params.out[int64_t{token} * params.hidden + panel * kPANEL_ROWS + row] =
            __float2bfloat16_rn(roundBf16(routed) + sharedOut);
    }
}

template <WeightFormat F, int H, int E, int I, int S>
cudaError_t launchSeveral(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    int device = 0, sms = 0;
    for (cudaError_t const error :
         {cudaGetDevice(&device), cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)}) {
        if (error != cudaSuccess) {
            return error;
        }
    }
    static_assert(sizeof(UpShared<F, H, E>) <= kCOMMON_SHARED_BYTES);
    static_assert(sizeof(DownShared<I, S>) <= kCOMMON_SHARED_BYTES);
    auto const up = moeUpKernel<F, H, E, I, S>;
    if (cudaError_t const error = allowShared(up, sizeof(UpShared<F, H, E>)); error != cudaSuccess) {
        return error;
    }
    cudaError_t const error =
        launchOverlapped(up, dim3(sms), dim3(kUP_WARPS<F> * kWARP), sizeof(UpShared<F, H, E>), stream, params, work);
    if (error != cudaSuccess) {
        return error;
    }
    auto const down = moeDownKernel<F, I, S>;
    if (cudaError_t const status = allowShared(down, sizeof(DownShared<I, S>)); status != cudaSuccess) {
        return status;
    }
    dim3 const block((kEXPERT_WARPS<F> + kSHARED_WARPS<F, S>)*kWARP);
    return launchOverlapped(down, dim3(H / kPANEL_ROWS), block, sizeof(DownShared<I, S>), stream, params, work);
}

template <WeightFormat F, int H, int E, int I, int S>
cudaError_t launchShape(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    if (params.tokens > kSINGLE_TOKENS) {
        return launchSeveral<F, H, E, I, S>(params, work, stream);
    }
    constexpr int PANELS = kTOP_K * 2 * I / kPANEL_ROWS;
    static_assert(PANELS % kUP_PANELS<F> == 0);
    dim3 const grid(PANELS / kUP_PANELS<F>, params.tokens), block(kUP_SINGLE_WARPS<F, H> * kWARP);
    static_assert(sizeof(UpSingleShared<F, H>) <= kCOMMON_SHARED_BYTES);
    cudaError_t const error = launchSpread(kSPREADS<F, 1>, moeUpSingleKernel<F, H, E, I>, grid, block,
                                           sizeof(UpSingleShared<F, H>), stream, params, work);
    if (error != cudaSuccess) {
        return error;
    }
    return launchSpread(kSPREADS<F, 1>, moeDownSingleKernel<F, E, I, S>, dim3(H / kPANEL_ROWS, params.tokens),
                        dim3(kSINGLE_WARPS<F, I, S> * kWARP), 0, stream, params, work);
}

template <WeightFormat F>
cudaError_t launchFormat(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    auto const is = [&](int hidden, int experts, int intermediate, int shared) {
        return params.hidden == hidden && params.experts == experts && params.intermediate == intermediate &&
               params.shared == shared;
    };
    if (is(2048, 256, 512, 1024)) {
        return launchShape<F, 2048, 256, 512, 1024>(params, work, stream);
    }
    if (is(2048, 16, 512, 1024)) { // Flint's widths with few experts, for tests
        return launchShape<F, 2048, 16, 512, 1024>(params, work, stream);
    }
    if (is(128, 16, 64, 64)) { // flint-nano
        return launchShape<F, 128, 16, 64, 64>(params, work, stream);
    }
    return cudaErrorInvalidValue;
}

} // namespace

cudaError_t launchMoeExperts(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    return params.format == WeightFormat::kNVFP4 ? launchFormat<WeightFormat::kNVFP4>(params, work, stream)
                                                 : launchFormat<WeightFormat::kBF16>(params, work, stream);
}

cudaError_t launchMoeDecode(MoeParams const& params, cudaStream_t stream) {
    if (params.experts != 256 && params.experts != 16) { // before the first of the kernels
        return cudaErrorInvalidValue;
    }
    MoeDecodeWorkspace const work = MoeDecodeWorkspace::layout(params);
    if (cudaError_t const error = launchMoeRoute(params, work, stream); error != cudaSuccess) {
        return error;
    }
    return launchMoeExperts(params, work, stream);
}

} // namespace flint
