// Prefill: which rows a block works on, and how tiles of their keys come into shared memory.
#pragma once

#include "kernels/attention.cuh"

namespace flint::attention {

constexpr int kBLOCK_TOKENS = 16;
constexpr int kTILE = kPAGE_TOKENS;
constexpr int kTILE_BYTES = 2 * kTILE * kROW_BYTES; // K, then V.

struct Block {
    int sequence;
    int row;      // Of its first token.
    int tokens;   // Up to 16.
    int position; // Of its first token.
    int fresh;    // First position of this step; its row is fresh_row.
    int fresh_row;
    int low, high; // Positions that its tokens see.
};

/// The block of that number, or false; every warp finds it for itself, 32 sequences at a time.
__device__ __forceinline__ bool findBlock(Arguments const& a, int number, int lane, Block& block) {
    int before = 0;
    for (int top = a.sequences; top > 0; top -= kWARP) {
        int const b = top - 1 - lane;
        int row = 0, tokens = 0, length = 0;
        if (b >= 0) {
            row = a.query_start[b];
            tokens = max(0, a.query_start[b + 1] - row);
            length = a.seq_lens[b];
        }
        int const count = (tokens + kBLOCK_TOKENS - 1) / kBLOCK_TOKENS;
        int const end = before + warpPrefixSum(count, lane);
        unsigned const found = __ballot_sync(0xFFFFFFFFu, end > number);
        if (!found) {
            before = __shfl_sync(0xFFFFFFFFu, end, kWARP - 1);
            continue;
        }
        int const source = __ffs(static_cast<int>(found)) - 1;
        // From the sequence's end: its last block is number end - count.
        int const first = __shfl_sync(0xFFFFFFFFu, end - 1, source) - number;
        tokens = __shfl_sync(0xFFFFFFFFu, tokens, source);
        block.sequence = top - 1 - source;
        block.fresh_row = __shfl_sync(0xFFFFFFFFu, row, source);
        block.fresh = __shfl_sync(0xFFFFFFFFu, length, source) - tokens;
        block.row = block.fresh_row + first * kBLOCK_TOKENS;
        block.tokens = min(kBLOCK_TOKENS, tokens - first * kBLOCK_TOKENS);
        block.position = block.fresh + first * kBLOCK_TOKENS;
        block.low = max(0, block.position - a.window + 1);
        block.high = block.position + block.tokens;
        return true;
    }
    return false;
}

/// Copies tiles of a block's keys to shared memory; rows that no token sees become zeros and are not read.
template <int Threads, bool Paged>
class TileLoader;

/// Full layers: a tile is a page.
template <int Threads>
class TileLoader<Threads, true> {
  public:
    __device__ __forceinline__ TileLoader(Arguments const& a, Block const& block, int head, int first)
        : mTable(a.page_table + static_cast<int64_t>(block.sequence) * a.table_width),
          mRows(a.kv_pool + static_cast<int64_t>(head) * (2 * kTILE * kHEAD_DIM) + threadIdx.x * kSEGMENT),
          mHeads(a.kv_heads), mHigh(block.high), mPage(mTable[first]) {}

    /// Tiles are asked for one after the other; each call looks up the next one's page, to have it in time.
    __device__ __forceinline__ void load(int tile, uint32_t stage) {
        constexpr int STEP = Threads / kROW_SEGMENTS; // A multiple of 8, so that the swizzle is the same for all rows.
        bf16 const* const k = mRows + static_cast<int64_t>(mPage) * mHeads * (2 * kTILE * kHEAD_DIM);
        mPage = (tile + 1) * kTILE < mHigh ? mTable[tile + 1] : 0;
        int const row = threadIdx.x / kROW_SEGMENTS;
        int const rows = mHigh - tile * kTILE - row;
        uint32_t const target = stage + swizzled(row, threadIdx.x % kROW_SEGMENTS);
#pragma unroll
        for (int i = 0; i < kTILE; i += STEP) {
            copyAsync16(target + i * kROW_BYTES, k + i * kHEAD_DIM, i < rows);
            copyAsync16(target + (kTILE + i) * kROW_BYTES, k + (kTILE + i) * kHEAD_DIM, i < rows);
        }
    }

  private:
    int32_t const* mTable;
    bf16 const* mRows;
    int mHeads, mHigh;
    int mPage;
};

/// Sliding layers: keys older than the step from the ring, the step's own from fresh_kv.
template <int Threads>
class TileLoader<Threads, false> {
  public:
    __device__ __forceinline__ TileLoader(Arguments const& a, Block const& block, int head, int)
        : mRing(a.kv_pool +
                (static_cast<int64_t>(a.ring_slot[block.sequence]) * a.kv_heads + head) *
                    (2 * static_cast<int64_t>(a.ring) * kHEAD_DIM) +
                threadIdx.x % kROW_SEGMENTS * kSEGMENT),
          mFresh(a.fresh_kv + (static_cast<int64_t>(block.fresh_row) * 2 * a.kv_heads + head) * kHEAD_DIM +
                 threadIdx.x % kROW_SEGMENTS * kSEGMENT),
          mFreshStride(2 * a.kv_heads * kHEAD_DIM), mFirst(block.fresh), mLow(block.low), mHigh(block.high),
          mRingTokens(a.ring) {}

    __device__ __forceinline__ void load(int tile, uint32_t stage) const {
        constexpr int STEP = Threads / kROW_SEGMENTS; // A multiple of 8, so that the swizzle is the same for all rows.
        int const row = threadIdx.x / kROW_SEGMENTS;
        int const position = tile * kTILE + row;
        uint32_t const target = stage + swizzled(row, threadIdx.x % kROW_SEGMENTS);
        // Of a row before the step, this is no address; it is not read.
        bf16 const* const fresh = mFresh + static_cast<int64_t>(position - mFirst) * mFreshStride;
        if (tile * kTILE >= mFirst) {
#pragma unroll
            for (int i = 0; i < kTILE; i += STEP) {
                copyRow(target + i * kROW_BYTES, fresh + i * mFreshStride, mFreshStride / 2, position + i);
            }
            return;
        }
        int const start = (tile * kTILE) % mRingTokens;
#pragma unroll 2
        for (int i = 0; i < kTILE; i += STEP) {
            bool const old = position + i < mFirst;
            copyRow(target + i * kROW_BYTES,
                    old ? mRing + ringPlace(start, row + i, mRingTokens) * kHEAD_DIM : fresh + i * mFreshStride,
                    old ? mRingTokens * kHEAD_DIM : mFreshStride / 2, position + i);
        }
    }

  private:
    /// `distance`: from K to V.
    __device__ __forceinline__ void copyRow(uint32_t target, bf16 const* k, int distance, int position) const {
        bool const valid = position >= mLow && position < mHigh;
        copyAsync16(target, k, valid);
        copyAsync16(target + kTILE * kROW_BYTES, k + distance, valid);
    }

    bf16 const* mRing;
    bf16 const* mFresh;
    int mFreshStride;
    int mFirst, mLow, mHigh, mRingTokens;
};

} // namespace flint::attention
