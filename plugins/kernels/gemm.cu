// Matrix products of dense prefill: checks, and the choice of a tile shape.
#include "kernels/gemm.h"

#include "kernels/gemm_config.cuh"
#include "kernels/gemm_problem.h"
#include "kernels/launch.h"
#include "kernels/panel.cuh"

namespace flint {

namespace {

struct ShapeCost {
    GemmShape shape;
    int rows;     ///< of a tile, kStore
    int glu_rows; ///< of a tile, kSwiGlu
    int slowness; ///< of a multiply-add, relative; guessed from the ratio of arithmetic to loads
};

constexpr ShapeCost kSHAPES[] = {{GemmShape::kLarge, 256, 256, 10},
                                 {GemmShape::kMedium, 128, 128, 20},
                                 {GemmShape::kSmall, 64, 128, 35},
                                 {GemmShape::kTiny, 64, 128, 60}};

int64_t ceilDiv(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

template <WeightFormat F, GemmEpilogue E>
int sharedBytes(GemmShape shape) {
    static_assert(GemmMedium<F, E>::SHARED_BYTES <= kCOMMON_SHARED_BYTES);
    switch (shape) {
    case GemmShape::kLarge:
        return GemmLarge<F, E>::SHARED_BYTES; // with wgmma more, on a GPU that has it
    case GemmShape::kMedium:
        return GemmMedium<F, E>::SHARED_BYTES;
    case GemmShape::kSmall:
        return GemmSmall<F, E>::SHARED_BYTES;
    case GemmShape::kTiny:
        break;
    }
    return GemmTiny<F, E>::SHARED_BYTES;
}

/// The shape, of those that fit, with the shortest time if every multiprocessor worked on one tile after another.
GemmShape chooseShape(GemmParams const& params, GemmDevice const& device) {
    GemmShape best = GemmShape::kMedium;
    int64_t bestTime = INT64_MAX;
    for (ShapeCost const& cost : kSHAPES) {
        if (!gemmFits(params.format, params.epilogue, cost.shape, device)) {
            continue;
        }
        int64_t const tokens = gemmShapeTokens(cost.shape);
        int64_t const rows = params.epilogue == GemmEpilogue::kStore ? cost.rows : cost.glu_rows;
        int64_t const tiles = ceilDiv(params.tokens, tokens) * ceilDiv(params.rows, rows);
        int64_t const time = ceilDiv(tiles, device.processors) * tokens * rows * cost.slowness;
        if (time < bestTime) {
            bestTime = time;
            best = cost.shape;
        }
    }
    return best;
}

} // namespace

cudaError_t gemmDevice(GemmDevice& info) {
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&info.processors, cudaDevAttrMultiProcessorCount, device);
    }
    return status != cudaSuccess ? status : blockSharedBytes(info.shared_bytes);
}

bool gemmFits(WeightFormat format, GemmEpilogue epilogue, GemmShape shape, GemmDevice const& device) {
    bool const packed = format == WeightFormat::kNVFP4, store = epilogue == GemmEpilogue::kStore;
    int const bytes = packed ? (store ? sharedBytes<WeightFormat::kNVFP4, GemmEpilogue::kStore>(shape)
                                      : sharedBytes<WeightFormat::kNVFP4, GemmEpilogue::kSwiGlu>(shape))
                             : (store ? sharedBytes<WeightFormat::kBF16, GemmEpilogue::kStore>(shape)
                                      : sharedBytes<WeightFormat::kBF16, GemmEpilogue::kSwiGlu>(shape));
    return bytes <= device.shared_bytes;
}

cudaError_t launchGemmProblem(WeightFormat format, GemmProblem const& problem, GemmEpilogue epilogue, GemmShape shape,
                              int64_t max_groups, cudaStream_t stream) {
    return format == WeightFormat::kNVFP4 ? launchGemmNvfp4(problem, epilogue, shape, max_groups, stream)
                                          : launchGemmBf16(problem, epilogue, shape, max_groups, stream);
}

cudaError_t launchGemm(GemmParams const& params, cudaStream_t stream) {
    bool const glu = params.epilogue == GemmEpilogue::kSwiGlu;
    constexpr int64_t LIMIT = int64_t{1} << 31;
    if (params.rows <= 0 || params.rows % (glu ? 128 : kPANEL_ROWS) != 0 || params.columns <= 0 ||
        params.columns % kTILE_COLUMNS != 0 || params.tokens < 0 || params.tokens * params.columns >= LIMIT ||
        params.rows * params.tokens >= LIMIT * 16 || (params.plain && glu) ||
        ((params.plain || params.x_ready) && !dividesColumns(params.tokens, params.rows))) {
        return cudaErrorInvalidValue;
    }
    if (params.tokens == 0) {
        return cudaSuccess;
    }
    GemmProblem problem{};
    problem.x = static_cast<uint8_t const*>(params.x);
    problem.weight = static_cast<uint8_t const*>(params.weight);
    problem.scale = params.scale;
    problem.y = static_cast<uint8_t*>(params.y);
    problem.positions = static_cast<int32_t>(params.tokens);
    problem.columns = static_cast<int32_t>(params.columns);
    problem.panels = static_cast<int32_t>(params.rows / kPANEL_ROWS);
    for (int i = 0; i < 2; ++i) {
        int64_t const row = params.segment_row[i];
        if (row < 0 || row % kPANEL_ROWS != 0) {
            return cudaErrorInvalidValue;
        }
        problem.segment_panels[i] = row > 0 ? static_cast<int32_t>(row / kPANEL_ROWS) : problem.panels;
    }
    problem.round_gate_up = true;
    problem.ready = params.x_ready ? GemmReady::kAll : GemmReady::kWeights;
    GemmDevice device;
    cudaError_t const status = gemmDevice(device);
    if (status != cudaSuccess) {
        return status;
    }
    if (dividesColumns(params.tokens, params.rows)) {
        return launchGemmSplit(params.format, problem, params.epilogue, params.plain, device, stream);
    }
    GemmShape const shape = chooseShape(params, device);
    int64_t const groups = ceilDiv(params.tokens, gemmShapeTokens(shape));
    return launchGemmProblem(params.format, problem, params.epilogue, shape, groups, stream);
}

} // namespace flint
