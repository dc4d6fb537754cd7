// Decode: which keys a block works on, and how they come into shared memory.
//
// An item is (sequence, split of its keys, KV head). How many splits a sequence has depends on its length, its number
// of new tokens and the launch's max_splits and split_units, but not on the batch's other sequences: its result does
// not, either (classes of launches: launchSinkAttentionDecode).
#pragma once

#include "kernels/attention_splits.cuh"

namespace flint::attention {

constexpr int kCHUNK = 16;
constexpr int kUNIT = kPAGE_TOKENS / kCHUNK; // Chunks of a page: the unit in which an item's keys are handed out.
constexpr int kCHUNK_BYTES = 2 * kCHUNK * kROW_BYTES;
constexpr int kMAX_TOKENS = 8;
constexpr int kUNSPLIT_UNITS = 10; // Up to here merging costs more than it saves: a window of 513 keys and 8 tokens.

struct DecodeArguments : SplitArguments {
    int split_units;
    unsigned long long* counters; // [B, Hkv]

    explicit DecodeArguments(SinkAttentionParams const& p) : SplitArguments(p) {}
};

/// A split of a sequence's keys, for one KV head.
struct Item {
    int sequence;
    int row;    // First row of the sequence.
    int tokens; // Its rows.
    int length; // Its tokens after the step.
    int low;    // First position that any of its rows sees.
    int split;
    int splits;
    int chunk_begin, chunk_end;
    int head; // KV head.
};

__device__ __forceinline__ int firstVisible(int length, int tokens, int window) {
    return max(0, length - tokens - window + 1);
}

__device__ __forceinline__ int unitsOf(int low, int length) {
    return ((length + kCHUNK - 1) / kCHUNK - low / kCHUNK + kUNIT - 1) / kUNIT;
}

/// Finds the items of rising numbers; each warp walks the batch for itself, 32 sequences at a time.
class ItemFinder {
  public:
    __device__ __forceinline__ bool find(DecodeArguments const& a, int number, int lane, Item& item) {
        int const wanted = number / a.kv_heads;
        for (; mFirst < a.sequences; mFirst += kWARP) {
            int const b = mFirst + lane;
            int row = 0, tokens = 0, length = 0, splits = 0;
            if (b < a.sequences) {
                row = a.query_start[b];
                tokens = a.query_start[b + 1] - row;
                length = a.seq_lens[b];
            }
            if (tokens > 0) {
                int const units = unitsOf(firstVisible(length, tokens, a.window), length);
                splits = units <= kUNSPLIT_UNITS ? 1 : min(a.max_splits, (units + a.split_units - 1) / a.split_units);
            }
            int const end = mBefore + warpPrefixSum(splits, lane);
            unsigned const found = __ballot_sync(0xFFFFFFFFu, end > wanted);
            if (!found) {
                mBefore = __shfl_sync(0xFFFFFFFFu, end, kWARP - 1);
                continue;
            }
            int const source = __ffs(static_cast<int>(found)) - 1;
            item.sequence = mFirst + source;
            item.row = __shfl_sync(0xFFFFFFFFu, row, source);
            item.tokens = __shfl_sync(0xFFFFFFFFu, tokens, source);
            item.length = __shfl_sync(0xFFFFFFFFu, length, source);
            item.splits = __shfl_sync(0xFFFFFFFFu, splits, source);
            item.split = wanted - (__shfl_sync(0xFFFFFFFFu, end, source) - item.splits);
            item.head = number % a.kv_heads;
            item.low = firstVisible(item.length, item.tokens, a.window);
            int const units = unitsOf(item.low, item.length);
            int const origin = item.low / kCHUNK;
            item.chunk_begin = origin + kUNIT * (item.split * units / item.splits);
            item.chunk_end =
                min(origin + kUNIT * ((item.split + 1) * units / item.splits), (item.length + kCHUNK - 1) / kCHUNK);
            return true;
        }
        return false;
    }

  private:
    int mFirst = 0;
    int mBefore = 0; // Splits of the sequences before mFirst.
};

/// Where a chunk's 16 rows of K and V are.
struct ChunkPlace {
    bf16 const* k;  // Row 0, or the ring's.
    int first;      // Row of the ring that holds row 0.
    int v_distance; // From K to V, in values.
};

/// Pages of an item, read 32 ahead so that the table's latency does not stand before each page's own.
class PageWindow {
  public:
    __device__ __forceinline__ PageWindow(Arguments const& a, Item const& item, int lane)
        : mTable(a.page_table + static_cast<int64_t>(item.sequence) * a.table_width), mFirst(item.chunk_begin / kUNIT),
          mEnd((item.chunk_end + kUNIT - 1) / kUNIT), mLane(lane) {
        mPages = load(mFirst);
        mNext = load(mFirst + kWARP);
    }

    /// Page number `index` of the sequence; the indices asked for never fall, nor rise by more than 32.
    __device__ __forceinline__ int64_t page(int index) {
        if (index - mFirst >= kWARP) {
            mFirst += kWARP;
            mPages = mNext;
            mNext = load(mFirst + kWARP);
        }
        return __shfl_sync(0xFFFFFFFFu, mPages, index - mFirst);
    }

  private:
    __device__ __forceinline__ int load(int first) const { return first + mLane < mEnd ? mTable[first + mLane] : 0; }

    int32_t const* mTable;
    int mFirst, mEnd, mLane;
    int mPages, mNext;
};

template <bool Paged>
class ChunkFinder;

template <>
class ChunkFinder<true> {
  public:
    __device__ __forceinline__ ChunkFinder(Arguments const& a, Item const& item, int lane)
        : mPages(a, item, lane), mPool(a.kv_pool + static_cast<int64_t>(item.head) * (2 * kPAGE_TOKENS * kHEAD_DIM)),
          mPageStride(static_cast<int64_t>(a.kv_heads) * (2 * kPAGE_TOKENS * kHEAD_DIM)) {}

    __device__ __forceinline__ ChunkPlace place(int chunk) {
        int64_t const page = mPages.page(chunk / kUNIT);
        return {mPool + page * mPageStride + (chunk % kUNIT) * (kCHUNK * kHEAD_DIM), 0, kPAGE_TOKENS * kHEAD_DIM};
    }

  private:
    PageWindow mPages;
    bf16 const* mPool;
    int64_t mPageStride;
};

template <>
class ChunkFinder<false> {
  public:
    __device__ __forceinline__ ChunkFinder(Arguments const& a, Item const& item, int)
        : ChunkFinder(a, a.ring_slot[item.sequence], item.head) {}

    __device__ __forceinline__ ChunkFinder(Arguments const& a, int slot, int head)
        : mRing(a.ring), mRows(a.kv_pool + (static_cast<int64_t>(slot) * a.kv_heads + head) *
                                               (2 * static_cast<int64_t>(a.ring) * kHEAD_DIM)) {}

    __device__ __forceinline__ ChunkPlace place(int chunk) const {
        return {mRows, (chunk * kCHUNK) % mRing, mRing * kHEAD_DIM};
    }

  private:
    int mRing;
    bf16 const* mRows;
};

/// Copy a chunk to shared memory with `Threads` threads; rows that no query sees become zeros and are not read: 0 * NaN
/// would be NaN in P.V.
template <bool Paged, int Threads>
__device__ __forceinline__ void loadChunk(Item const& item, ChunkPlace const& place, int chunk, int ring,
                                          uint32_t stage, int thread) {
    int const segment = thread % kROW_SEGMENTS;
#pragma unroll
    for (int i = 0; i < kCHUNK * kROW_SEGMENTS / Threads; ++i) {
        int const row = thread / kROW_SEGMENTS + i * (Threads / kROW_SEGMENTS);
        int const position = chunk * kCHUNK + row;
        bool const valid = position >= item.low && position < item.length;
        int const source = Paged ? row : ringPlace(place.first, row, ring);
        bf16 const* const k = place.k + source * kHEAD_DIM + segment * kSEGMENT;
        uint32_t const target = stage + swizzled(row, segment);
        copyOnceAsync16(target, k, valid);
        copyOnceAsync16(target + kCHUNK * kROW_BYTES, k + place.v_distance, valid);
    }
}

} // namespace flint::attention
