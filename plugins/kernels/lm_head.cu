// The LM head reads 173 MB (NVFP4) for each group of rows, so it is a stream: blocks stay, each walks over its share of
// the panels, and a warp loads its share of the next panel before it multiplies the present one.
#include "kernels/lm_head.h"

#include "kernels/launch.h"
#include "kernels/norm.cuh"

#include <algorithm>

namespace flint {

namespace {

/// Teams of kSPLIT warps in a block, each with panels of its own. Many rows leave room for one block, which needs warps
/// enough.
template <WeightFormat F, int H, int ROWS>
constexpr int kTEAMS = ROWS <= 8 ? 1 : std::max(1, 16 / Split<F, H>::kSPLIT);

template <WeightFormat F, int H, int ROWS>
struct HeadShared {
    static constexpr int kTHREADS = kTEAMS<F, H, ROWS> * Split<F, H>::kSPLIT * kWARP;
    alignas(16) uint32_t x[SharedX<ROWS>::bytes(H) / 4];
    float partial[kTEAMS<F, H, ROWS>][2][(ROWS + 7) / 8][PartialSums::floats(Split<F, H>::kSPLIT)];
    NormScratch<H, kTHREADS> norm;
};

/// Persistent grid; kTEAMS teams a block. Rows `first` .. `first` + ROWS - 1 of logits_rows.
template <WeightFormat F, int H, int ROWS>
__global__ void __launch_bounds__(HeadShared<F, H, ROWS>::kTHREADS) lmHeadKernel(LmHeadParams const params, int first) {
    constexpr int PARTS = Split<F, H>::kSPLIT, THREADS = PARTS * kWARP, GROUPS = (ROWS + 7) / 8;
    constexpr int TEAMS = kTEAMS<F, H, ROWS>;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<HeadShared<F, H, ROWS>*>(raw);
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP % PARTS, team = threadIdx.x / THREADS;
    int const panels = params.vocabulary / kPANEL_ROWS;
    int const live = min(ROWS, params.rows - first);

    SliceOf<F, H> slice;
    int panel = blockIdx.x * TEAMS + team;
    if (panel < panels) {
        slice.template load<H>(params.weight + panel * panelBytes(F, H), part, lane);
    }
    shared.norm.prefetch(params.norm);
    float const scale = kRESTORE<F> * (params.scale == nullptr ? 1.0f : *params.scale);
    allowSuccessor();
    waitForPredecessor();

    NormParams const norm{params.delta, params.residual, params.norm, nullptr, params.eps, live};
    normalizeRows<H, ROWS, HeadShared<F, H, ROWS>::kTHREADS>(
        norm, shared.norm, false, shared.x, [&](int row) { return params.logits_rows[first + row]; },
        [](int, int, uint4) {});

    SharedX<ROWS> const x{reinterpret_cast<uint4 const*>(shared.x), lane};
    for (int parity = 0; panel < panels; parity ^= 1) {
        float acc[GROUPS][4];
        slice.multiply(acc, part, x);
        int const next = panel + gridDim.x * TEAMS;
        if (next < panels) {
            slice.template load<H>(params.weight + next * panelBytes(F, H), part, lane);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            PartialSums{shared.partial[team][parity][group]}.store(acc[group], part, lane);
        }
        if constexpr (PARTS == 1) { // one barrier a panel: the two parities alternate
            __syncwarp();
        } else {
            static_assert(TEAMS < 16); // barriers 1 to 15
            syncNamed(1 + team, THREADS);
        }
        for (int i = threadIdx.x % THREADS; i < kPANEL_ROWS * live; i += THREADS) {
            int const row = i / kPANEL_ROWS, unit = i % kPANEL_ROWS;
            float const sum = PartialSums{shared.partial[team][parity][row / 8]}.sum(PARTS, unit, row % 8);
            params.logits[int64_t{first + row} * params.vocabulary + panel * kPANEL_ROWS + unit] = sum * scale;
        }
        panel = next;
    }
}

template <WeightFormat F, int H, int ROWS>
cudaError_t launchRows(LmHeadParams const& params, int first, cudaStream_t stream) {
    auto const kernel = lmHeadKernel<F, H, ROWS>;
    constexpr size_t BYTES = sizeof(HeadShared<F, H, ROWS>);
    constexpr int THREADS = HeadShared<F, H, ROWS>::kTHREADS;
    if (cudaError_t const error = allowShared(kernel, BYTES); error != cudaSuccess) {
        return error;
    }
    int device = 0, processors = 0, resident = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess) {
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, THREADS, BYTES);
    }
    if (error != cudaSuccess) {
        return error;
    }
    constexpr int TEAMS = kTEAMS<F, H, ROWS>;
    int const panels = params.vocabulary / kPANEL_ROWS;
    int const blocks = std::min((panels + TEAMS - 1) / TEAMS, processors * std::max(resident, 1));
    return launchOverlapped(kernel, dim3(blocks), dim3(THREADS), BYTES, stream, params, first);
}

template <WeightFormat F, int H>
cudaError_t launchFormat(LmHeadParams const& params, cudaStream_t stream) {
    static_assert(sizeof(HeadShared<F, H, 8>) <= kCOMMON_SHARED_BYTES);
    int available = 0;
    if (cudaError_t const error = blockSharedBytes(available); error != cudaSuccess) {
        return error;
    }
    int const most = static_cast<size_t>(available) < sizeof(HeadShared<F, H, 32>) ? 8 : 32;
    for (int first = 0; first < params.rows;) {
        int const left = params.rows - first;
        cudaError_t error;
        if (left == 1) {
            error = launchRows<F, H, 1>(params, first, stream);
            first += 1;
        } else if (left <= 8 || most == 8) {
            error = launchRows<F, H, 8>(params, first, stream);
            first += 8;
        } else {
            error = launchRows<F, H, 32>(params, first, stream);
            first += 32;
        }
        if (error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

} // namespace

cudaError_t launchLmHead(LmHeadParams const& params, cudaStream_t stream) {
    bool const packed = params.format == WeightFormat::kNVFP4;
    switch (params.hidden) {
    case 2048:
        return packed ? launchFormat<WeightFormat::kNVFP4, 2048>(params, stream)
                      : launchFormat<WeightFormat::kBF16, 2048>(params, stream);
    case 128:
        return packed ? launchFormat<WeightFormat::kNVFP4, 128>(params, stream)
                      : launchFormat<WeightFormat::kBF16, 128>(params, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
