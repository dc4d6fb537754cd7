// The decode kernels' inner product: a warp's share of one weight panel, times up to eight tokens.
//
// A block gives each panel kSPLIT warps, which divide its K; a warp loads its whole share, into registers or shared
// memory, before it needs the activations, so that the loads of all warps are under way together and, with programmatic
// dependent launch, while the previous kernel still runs.
#pragma once

#include "kernels/panel.cuh"

namespace flint {

constexpr int kDECODE_TOKENS = 8; ///< Columns of the matrix instruction: the most tokens of the low-latency path.

/// How the K of a weight is divided: kSPLIT warps with kTILES tiles each.
template <WeightFormat F, int K>
struct Split {
    static constexpr int kALL_TILES = K / kTILE_COLUMNS;
    /// Tiles that registers hold with ease; in BF16 more of a long K, or the block would have too many threads for
    /// them.
    static constexpr int kMOST = F == WeightFormat::kNVFP4 ? 8 : kALL_TILES > 64 ? 6 : 4;
    static constexpr int kSPLIT = kALL_TILES > kMOST ? kALL_TILES / kMOST : 1;
    static constexpr int kTILES = kALL_TILES / kSPLIT;
    static_assert(K % kTILE_COLUMNS == 0 && kALL_TILES % kSPLIT == 0);
};

/// Products of a panel's tiles with GROUPS groups of eight tokens, summed.
template <int GROUPS>
struct TileSums {
    /// Few groups: several accumulators, or each instruction would wait for the one before it.
    static constexpr int kCHAINS = GROUPS == 1 ? 4 : 1;
    float sums[GROUPS][kCHAINS][4] = {};

    /// Add COUNT tiles from `first` on; `operandsOf(i, a)` makes the A operands of the i-th of them.
    template <int COUNT, typename X, typename Operands>
    __device__ __forceinline__ void add(int first, X const& x, Operands const& operandsOf) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            uint32_t a[4][4];
            operandsOf(i, a);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                uint4 const low = x(first + i, 0, group);
                uint4 const high = x(first + i, 1, group);
                mma16816(sums[group][0], a[0], low.x, low.y);
                mma16816(sums[group][1 % kCHAINS], a[1], low.z, low.w);
                mma16816(sums[group][2 % kCHAINS], a[2], high.x, high.y);
                mma16816(sums[group][3 % kCHAINS], a[3], high.z, high.w);
            }
        }
    }

    __device__ __forceinline__ void fold(float (&acc)[GROUPS][4]) const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = sums[group][0][i];
#pragma unroll
                for (int chain = 1; chain < kCHAINS; ++chain) {
                    sum += sums[group][chain][i];
                }
                acc[group][i] = sum;
            }
        }
    }
};

/// One warp's share of a panel, TILES consecutive tiles, in registers.
template <WeightFormat F, int TILES>
struct Slice {
    static constexpr bool kPACKED = F == WeightFormat::kNVFP4;
    uint4 data[TILES][kPACKED ? 1 : 4];             ///< NVFP4: codes; BF16: the operands of four instructions
    uint32_t scales[kPACKED ? (TILES + 1) / 2 : 1]; ///< NVFP4: two bytes a tile, rows g and g + 8

    /// Load share `part` of the panel of a weight with K columns.
    template <int K>
    __device__ __forceinline__ void load(uint8_t const* panel, int part, int lane) {
        static_assert(TILES == Split<F, K>::kTILES);
        // One address and constant offsets from it: where the panel depends on a choice, each load would else wait for
        // an address of its own.
        uint8_t const* const tiles = panel + part * (TILES * (kPACKED ? 512 : 2048)) + lane * 16;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            if constexpr (kPACKED) {
                data[i][0] = loadStreaming(tiles + i * 512);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    data[i][j] = loadStreaming(tiles + i * 2048 + j * 512);
                }
            }
        }
        if constexpr (kPACKED) {
            constexpr int GROUP = scaleGroup(K / kTILE_COLUMNS);
            static_assert(TILES % GROUP == 0);
            // A group holds, per lane, two bytes for each of its tiles.
            uint8_t const* const groups = panel + 8 * K + part * (TILES * 64) + lane * (2 * GROUP);
#pragma unroll
            for (int i = 0; i < TILES; i += GROUP) {
                if constexpr (GROUP == 4) {
                    loadStreaming8(groups + i * 64, scales[i / 2], scales[i / 2 + 1]);
                } else if constexpr (GROUP == 2) {
                    scales[i / 2] = loadNow4(groups + i * 64);
                } else {
                    scales[i / 2] = loadNow2(groups + i * 64);
                }
            }
        }
    }

    /// A operands of tile `i`.
    __device__ __forceinline__ void operands(int i, uint32_t (&a)[4][4]) const {
        if constexpr (kPACKED) {
            dequantize(data[i][0], i % 2 == 0 ? scales[i / 2] : scales[i / 2] >> 16, a);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                a[j][0] = data[i][j].x;
                a[j][1] = data[i][j].y;
                a[j][2] = data[i][j].z;
                a[j][3] = data[i][j].w;
            }
        }
    }

    /// acc[group] = share * x for GROUPS groups of eight tokens, a sum over all columns in an order of its own.
    /// `x(tile, half, group)` gives a lane its 8 values of a tile's half (0, 1) for the group's token lane / 4, in
    /// activationOrder: instructions 2 half and 2 half + 1.
    template <int GROUPS, typename X>
    __device__ __forceinline__ void multiply(float (&acc)[GROUPS][4], int part, X const& x) const {
        multiplyTiles<GROUPS>(acc, part, x, [&](int i, uint32_t (&a)[4][4]) { operands(i, a); });
    }

    template <int GROUPS, typename X, typename Operands>
    static __device__ __forceinline__ void multiplyTiles(float (&acc)[GROUPS][4], int part, X const& x,
                                                         Operands const& operandsOf) {
        TileSums<GROUPS> sums;
        sums.template add<TILES>(part * TILES, x, operandsOf);
        sums.fold(acc);
    }
};

/// Resident blocks a multiprocessor that the router's kernel and several tokens' QKV ask registers for. On 9.0 three
/// fit without spills: an H200 then has all of QKV's together, and the router's leave registers to other kernels.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
template <WeightFormat F>
constexpr int kREADY_BLOCKS = F == WeightFormat::kNVFP4 ? 3 : 1;
#else
template <WeightFormat F>
constexpr int kREADY_BLOCKS = 1;
#endif

/// Whether a kernel's blocks are for launchSpread: BF16 ones are to be several to a multiprocessor.
template <WeightFormat F, int TOKENS>
constexpr bool kSPREADS = TOKENS == 1 && F == WeightFormat::kNVFP4;

/// A share whose operands were made while the kernel had nothing else to do: before the wait for the activations.
/// Dequantising takes as long as all else that follows the wait. READY: tiles for which there are registers; the other
/// ones are dequantised when they are used.
template <WeightFormat F, int TILES, int READY = TILES>
struct ReadySlice {
    uint32_t a[READY][4][4];
    Slice<F, TILES> const& slice;

    __device__ __forceinline__ explicit ReadySlice(Slice<F, TILES> const& source) : slice(source) {
#pragma unroll
        for (int i = 0; i < READY; ++i) {
            slice.operands(i, a[i]);
        }
    }

    /// Keep the work here. The assembler would move it down to the operands' uses, to save registers; a branch that
    /// uses them all holds it. `never` is false at run time, unknown at compile time; nothing is written then.
    __device__ __forceinline__ void hold(bool never, void* sink) const {
        if (F == WeightFormat::kNVFP4 && never) { // BF16 operands are what was loaded
            auto* const words = static_cast<uint32_t volatile*>(sink);
#pragma unroll
            for (int i = 0; i < READY; ++i) {
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    words[(i * 16 + j) * kWARP] = a[i][j / 4][j % 4];
                }
            }
        }
    }

    template <typename X>
    __device__ __forceinline__ void multiply(float (&acc)[1][4], int part, X const& x) const {
        Slice<F, TILES>::template multiplyTiles<1>(acc, part, x, [&](int i, uint32_t (&out)[4][4]) {
            if (i >= READY) {
                slice.operands(i, out);
                return;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    out[j][k] = a[i < READY ? i : 0][j][k];
                }
            }
        });
    }
};

/// The slice of a warp for a weight with K columns.
template <WeightFormat F, int K>
using SliceOf = Slice<F, Split<F, K>::kTILES>;

/// A warp's share of a panel in shared memory. The copy engine brings it, in two halves: no registers are needed while
/// it is under way, and no instructions to ask for each line.
template <WeightFormat F, int K>
struct CopiedSlice {
    static constexpr bool kPACKED = F == WeightFormat::kNVFP4;
    static constexpr int kTILES = Split<F, K>::kTILES, kHALF = kTILES / 2;
    static constexpr int kTILE_BYTES = kPACKED ? 512 : 2048;
    static constexpr int kSCALE_BYTES = kPACKED ? kTILES * 64 : 0;
    static_assert(kTILES % 2 == 0);
    alignas(16) uint8_t tiles[kTILES * kTILE_BYTES];
    alignas(16) uint8_t scales[kPACKED ? kSCALE_BYTES : 16];
    CopyBarrier halves[2];

    /// By one thread; all others see it after a barrier.
    __device__ __forceinline__ void open() {
        halves[0].open();
        halves[1].open();
    }

    /// Start copying share `part` of `panel`, by one thread.
    __device__ __forceinline__ void copy(uint8_t const* panel, int part) {
        constexpr int HALF_BYTES = kHALF * kTILE_BYTES;
        uint8_t const* const source = panel + part * (2 * HALF_BYTES);
        halves[0].expect(HALF_BYTES + kSCALE_BYTES);
        halves[0].copyOnce(tiles, source, HALF_BYTES);
        if constexpr (kPACKED) {
            halves[0].copyOnce(scales, panel + 8 * K + part * kSCALE_BYTES, kSCALE_BYTES);
        }
        halves[1].expect(HALF_BYTES);
        halves[1].copyOnce(tiles + HALF_BYTES, source + HALF_BYTES, HALF_BYTES);
    }

    /// acc = share * x, as Slice does, and with the same bits.
    template <typename X>
    __device__ __forceinline__ void multiply(float (&acc)[1][4], int part, int lane, X const& x) const {
        TileSums<1> sums;
#pragma unroll 1 // the code comes from the L2, too
        for (int half = 0; half < 2; ++half) {
            halves[half].wait();
            sums.template add<kHALF>(part * kTILES + half * kHALF, x,
                                     [&](int i, uint32_t (&a)[4][4]) { operands(half * kHALF + i, lane, a); });
        }
        sums.fold(acc);
    }

  private:
    __device__ __forceinline__ void operands(int i, int lane, uint32_t (&a)[4][4]) const {
        auto const* const mine = reinterpret_cast<uint4 const*>(tiles + i * kTILE_BYTES) + lane;
        if constexpr (kPACKED) {
            constexpr int GROUP = scaleGroup(K / kTILE_COLUMNS);
            auto const* const group =
                reinterpret_cast<uint16_t const*>(scales + i / GROUP * (GROUP * 64)) + lane * GROUP;
            dequantize(*mine, group[i % GROUP], a);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint4 const four = mine[j * kWARP];
                a[j][0] = four.x;
                a[j][1] = four.y;
                a[j][2] = four.z;
                a[j][3] = four.w;
            }
        }
    }
};

/// Activations in shared memory, ordered: [K / 64 tiles][2 halves][TOKENS][4 lanes t][8 values]. 16-byte reads of a
/// warp are contiguous. One token stands in every column of the product, which costs nothing: nobody reads the other
/// ones.
template <int TOKENS>
struct SharedX {
    uint4 const* base;
    int lane;

    __device__ __forceinline__ uint4 operator()(int tile, int half, int group) const {
        int const token = TOKENS == 1 ? 0 : group * kDECODE_TOKENS + lane / 4;
        return base[((tile * 2 + half) * TOKENS + token) * 4 + lane % 4];
    }

    /// Put 8 columns from `column` on, a multiple of 8, of token `token` in place: pairs (c, c + 2) of the columns
    /// c = 0, 1, 4, 5 among them, which are at places 0, 4, 8, 12 of a lane's 16 values (+ 2 in the far 8 columns), see
    /// activationOrder.
    static __device__ __forceinline__ void store(uint32_t* x, unsigned token, unsigned column, uint4 pairs) {
        unsigned const tile = column / kTILE_COLUMNS, t = column % kTILE_COLUMNS / 16, far = column % 16 / 8;
        uint32_t* const near = x + ((tile * 2 * TOKENS + token) * 4 + t) * 4 + far;
        near[0] = pairs.x;
        near[2] = pairs.y;
        near[TOKENS * 16] = pairs.z;
        near[TOKENS * 16 + 2] = pairs.w;
    }

    static constexpr int bytes(int columns) { return columns * TOKENS * 2; }
};

/// Ordered rows [K] in shared memory, as they stand in global memory but `kSTRIDE` bytes apart (neighbours' reads then
/// meet other banks). `row`: of the lane's token; of one that is not there any row, for its column is not read.
template <int K>
struct RowX {
    static constexpr int kSTRIDE = K * 2 + 16;
    uint8_t const* row;
    int lane;

    __device__ __forceinline__ uint4 operator()(int tile, int half, int) const {
        return *reinterpret_cast<uint4 const*>(row + tile * 128 + lane % 4 * 32 + half * 16);
    }

    /// Start copying `count` rows to shared memory, by one thread. The copy engine moves a row as a whole: a thread's
    /// copies of 16 bytes would take several microseconds from lines that all blocks read at once.
    static __device__ __forceinline__ void copy(CopyBarrier& barrier, bf16 const* rows, int count, uint8_t* target) {
        int row = blockIdx.x % count; // every block from a row of its own
        for (int i = 0; i < count; ++i) {
            barrier.copy(target + row * kSTRIDE, rows + int64_t{row} * K, K * 2);
            row = row + 1 == count ? 0 : row + 1;
        }
    }
};

/// A warp's share of the activations, brought from global to the warp's own shared memory by loads that are all under
/// way together. (Loads straight into operand registers end up one by one just before their uses: the assembler saves
/// registers. And one token would leave seven eighths of the lanes idle.) Layout and columns as SharedX, for TILES
/// tiles.
template <int TILES, int TOKENS>
struct StagedX {
    static constexpr int kVECTORS = TILES * 2 * TOKENS * 4; ///< 16-byte vectors of shared memory a warp
    static_assert(TILES * 4 <= kWARP);
    uint4* base; ///< of this warp
    int part;    ///< the share
    int lane;

    /// Stage rows [K] of `tokens` tokens; `row(token)` points to one. TOKENS > 1: the other ones are zeros. ORDERED:
    /// each 16 columns in activationOrder; else in plain order.
    template <bool ORDERED, typename Row>
    __device__ __forceinline__ void stage(int tokens, Row const& row) const {
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            bf16 const* const source = token < tokens ? row(token) : nullptr;
            if constexpr (ORDERED) {
                stageOrdered(token, source);
            } else {
                stagePlain(token, source);
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ uint4 operator()(int tile, int half, int) const {
        return base[place(tile - part * TILES, half, TOKENS == 1 ? 0 : lane / 4, lane % 4)];
    }

  private:
    static __device__ __forceinline__ int place(int tile, int half, int token, int t) {
        return ((tile * 2 + half) * TOKENS + token) * 4 + t;
    }

    /// Neighbours read neighbouring vectors, [tile][t][half], so that a load needs few lines, and each once.
    __device__ __forceinline__ void stageOrdered(int token, bf16 const* source) const {
        constexpr int VECTORS = TILES * 8;
        auto const* const mine = reinterpret_cast<uint4 const*>(source) + part * VECTORS + lane;
        uint4 values[(VECTORS + kWARP - 1) / kWARP];
#pragma unroll
        for (int i = 0; i * kWARP < VECTORS; ++i) {
            bool const exists = (TOKENS == 1 || source != nullptr) && i * kWARP + lane < VECTORS;
            values[i] = exists ? loadPastL1(mine + i * kWARP) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i * kWARP < VECTORS; ++i) {
            int const v = i * kWARP + lane;
            if (v < VECTORS) {
                base[place(v / 8, v % 2, token, v % 8 / 2)] = values[i];
            }
        }
    }

    /// A lane reads the 16 columns that it puts in order.
    __device__ __forceinline__ void stagePlain(int token, bf16 const* source) const {
        int const tile = lane / 4, t = lane % 4;
        if (tile >= TILES) {
            return;
        }
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        if (TOKENS == 1 || source != nullptr) {
            a = loadNow16(source + (part * TILES + tile) * kTILE_COLUMNS + t * 16);
            b = loadNow16(source + (part * TILES + tile) * kTILE_COLUMNS + t * 16 + 8);
        }
        // Half h needs columns 4h .. 4h + 3 and 8 + 4h .. 8 + 4h + 3, as pairs (c, c + 2), (c + 8, c + 10), then the
        // same of c + 1.
        base[place(tile, 0, token, t)] = make_uint4(__byte_perm(a.x, a.y, 0x5410), __byte_perm(b.x, b.y, 0x5410),
                                                    __byte_perm(a.x, a.y, 0x7632), __byte_perm(b.x, b.y, 0x7632));
        base[place(tile, 1, token, t)] = make_uint4(__byte_perm(a.z, a.w, 0x5410), __byte_perm(b.z, b.w, 0x5410),
                                                    __byte_perm(a.z, a.w, 0x7632), __byte_perm(b.z, b.w, 0x7632));
    }
};

/// Partial sums of a panel's warps in shared memory: [kSPLIT][16 rows][8 tokens].
struct PartialSums {
    float* base;

    __device__ __forceinline__ void store(float const (&acc)[4], int part, int lane) const {
        float* const mine = base + part * (kPANEL_ROWS * kDECODE_TOKENS);
        int const row = lane / 4, token = lane % 4 * 2;
        *reinterpret_cast<float2*>(mine + row * kDECODE_TOKENS + token) = make_float2(acc[0], acc[1]);
        *reinterpret_cast<float2*>(mine + (row + 8) * kDECODE_TOKENS + token) = make_float2(acc[2], acc[3]);
    }

    /// Sum over the parts, in order.
    __device__ __forceinline__ float sum(int parts, int row, int token) const {
        float total = 0;
        for (int part = 0; part < parts; ++part) {
            total += base[(part * kPANEL_ROWS + row) * kDECODE_TOKENS + token];
        }
        return total;
    }

    static __host__ __device__ constexpr int floats(int parts) { return parts * kPANEL_ROWS * kDECODE_TOKENS; }
};

} // namespace flint
