"""Kernels: the CUDA source. One copies rows, one sums up blocks where they lie.

The source needs no header, so that NVRTC compiles it on any machine. What one thread does is in
functions that a C++ compiler takes as well: the tests run that very arithmetic without a GPU.
"""

from __future__ import annotations

COPY_ROWS = "kvbm_copy_rows"
SUM_KIBS = "kvbm_sum_kibs"
SUM_PARTS = "kvbm_sum_parts"

COPY_THREADS = 256
COPY_GRID_MAX = 8
"""Thread blocks of a copy: enough loads in flight to fill a bus (8 x 256 lanes x 64 bytes is 128
KiB; an H100 fills a PCIe 5 with half of it), few enough to leave an engine its multiprocessors."""
SUM_THREADS = 256
SUM_GRID_MAX = 264
"""Thread blocks of a launch over KiBs: two for each multiprocessor of a large GPU."""
CHAIN_THREADS = 64
"""Threads of the kernel that sums up a part, KiB by KiB: 8 compute, the others read ahead."""
KIB_SUM_BYTES = 64
"""Eight accumulators of 8 bytes, for each full KiB of a part."""
SUM_PIECE_BYTES = 64
"""Pieces are multiples of this, and their addresses of 8: no stripe of the checksum is in two."""
SUM_BLOCK_BYTES_MIN = 256
"""xxh3-64 treats up to 240 bytes in other ways, which no block needs."""


def kibs_of(part_bytes: int) -> int:
    """Return the full KiBs of a part before its last 1 to 1,024 bytes."""
    return (part_bytes - 1) // 1024


SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
#ifdef __CUDACC__
#define ON_DEVICE static __device__ __forceinline__
#define CONSTANT static __constant__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED
#define ON_DEVICE static inline
#define CONSTANT static const
struct uint4 { u32 x, y, z, w; };
#endif

/* --- copies ----------------------------------------------------------------------------- */

template <typename Word>
ON_DEVICE void copy_words(u64 target, u64 source, u64 count, u32 lane, u32 lanes) {
    Word* to = (Word*)target;
    const Word* from = (const Word*)source;
    u64 i = lane;
    for (; i + 3ULL * lanes < count; i += 4ULL * lanes) {  /* Four loads in flight for each lane. */
        Word a = from[i], b = from[i + lanes];
        Word c = from[i + 2ULL * lanes], d = from[i + 3ULL * lanes];
        to[i] = a; to[i + lanes] = b; to[i + 2ULL * lanes] = c; to[i + 3ULL * lanes] = d;
    }
    for (; i < count; i += lanes) to[i] = from[i];
}

/* Copies the whole words of a row; gives the bytes that they are. */
template <typename Word>
ON_DEVICE u64 copied(u64 target, u64 source, u64 bytes, u32 lane, u32 lanes) {
    u64 count = bytes / sizeof(Word);
    copy_words<Word>(target, source, count, lane, lanes);
    return count * sizeof(Word);
}

/* In the widest words that both addresses allow; the rest of the row byte by byte. */
ON_DEVICE void copy_row(u64 target, u64 source, u64 bytes, u32 lane, u32 lanes) {
    u64 both = target | source, words = 0;
    if ((both & 15) == 0) words = copied<uint4>(target, source, bytes, lane, lanes);
    else if ((both & 7) == 0) words = copied<u64>(target, source, bytes, lane, lanes);
    else if ((both & 3) == 0) words = copied<u32>(target, source, bytes, lane, lanes);
    copy_words<unsigned char>(target + words, source + words, bytes - words, lane, lanes);
}

/* --- xxh3-64, seed 0, default secret, more than 240 bytes: github.com/Cyan4973/xxHash ---- */

#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

CONSTANT unsigned char SECRET[192] = {
0xb8,0xfe,0x6c,0x39,0x23,0xa4,0x4b,0xbe,0x7c,0x01,0x81,0x2c,0xf7,0x21,0xad,0x1c,
0xde,0xd4,0x6d,0xe9,0x83,0x90,0x97,0xdb,0x72,0x40,0xa4,0xa4,0xb7,0xb3,0x67,0x1f,
0xcb,0x79,0xe6,0x4e,0xcc,0xc0,0xe5,0x78,0x82,0x5a,0xd0,0x7d,0xcc,0xff,0x72,0x21,
0xb8,0x08,0x46,0x74,0xf7,0x43,0x24,0x8e,0xe0,0x35,0x90,0xe6,0x81,0x3a,0x26,0x4c,
0x3c,0x28,0x52,0xbb,0x91,0xc3,0x00,0xcb,0x88,0xd0,0x65,0x8b,0x1b,0x53,0x2e,0xa3,
0x71,0x64,0x48,0x97,0xa2,0x0d,0xf9,0x4e,0x38,0x19,0xef,0x46,0xa9,0xde,0xac,0xd8,
0xa8,0xfa,0x76,0x3f,0xe3,0x9c,0x34,0x3f,0xf9,0xdc,0xbb,0xc7,0xc7,0x0b,0x4f,0x1d,
0x8a,0x51,0xe0,0x4b,0xcd,0xb4,0x59,0x31,0xc8,0x9f,0x7e,0xc9,0xd9,0x78,0x73,0x64,
0xea,0xc5,0xac,0x83,0x34,0xd3,0xeb,0xc3,0xc5,0x81,0xa0,0xff,0xfa,0x13,0x63,0xeb,
0x17,0x0d,0xdd,0x51,0xb7,0xf0,0xda,0x49,0xd3,0x16,0x55,0x26,0x29,0xd4,0x68,0x9e,
0x2b,0x16,0xbe,0x58,0x7d,0x47,0xa1,0xfc,0x8f,0xf8,0xb8,0xd1,0x7a,0xd0,0x31,0xce,
0x45,0xcb,0x3a,0x8f,0x95,0x16,0x04,0x28,0xaf,0xd7,0xfb,0xca,0xbb,0x4b,0x40,0x7e};

ON_DEVICE u64 secret_at(u32 offset) {
    u64 word = 0;
    for (int i = 7; i >= 0; --i) word = (word << 8) | SECRET[offset + i];
    return word;
}

/* A region is {address, stride, piece bytes, offset of the piece in the block}. */
struct Pieces { const u64* regions; u32 count; u64 block; };

/* Where the stripe at `offset` of the block is: its region by bisection. */
ON_DEVICE const u64* stripe_at(Pieces pieces, u64 offset) {
    u32 low = 0, high = pieces.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (pieces.regions[4 * middle + 3] <= offset) low = middle; else high = middle;
    }
    const u64* region = pieces.regions + 4 * low;
    return (const u64*)(region[0] + pieces.block * region[1] + (offset - region[3]));
}

/* What a stripe of 64 bytes adds to accumulator `lane`. */
ON_DEVICE u64 stripe_sum(const u64* stripe, u32 lane, u64 key) {
    u64 mixed = stripe[lane] ^ key;
    return stripe[lane ^ 1] + (mixed & 0xFFFFFFFFULL) * (mixed >> 32);
}

/* The keys of a lane, one for each stripe of a KiB: read once, since lanes read other words of
   the secret, which constant memory serves one by one. */
struct Keys { u64 of[16]; };
ON_DEVICE Keys keys_of(u32 lane) {
    Keys keys;
    UNROLLED for (u32 n = 0; n < 16; ++n) keys.of[n] = secret_at(8 * (n + lane));
    return keys;
}

/* What the first stripes of KiB `kib` add to it. They only add up: any order, any thread. */
ON_DEVICE u64 kib_sum(Pieces pieces, u64 kib, u32 stripes, u32 lane, const Keys& keys) {
    u64 sum = 0;
    UNROLLED for (u32 n = 0; n < 16; ++n)
        if (n < stripes)
            sum += stripe_sum(stripe_at(pieces, kib * 1024 + n * 64ULL), lane, keys.of[n]);
    return sum;
}

ON_DEVICE u64 first_sum(u32 lane) {
    switch (lane) {
        case 0: return PRIME32_3; case 1: return PRIME64_1; case 2: return PRIME64_2;
        case 3: return PRIME64_3; case 4: return PRIME64_4; case 5: return PRIME32_2;
        case 6: return PRIME64_5; default: return PRIME32_1;
    }
}

ON_DEVICE u64 scrambled(u64 sum, u64 key) {
    sum ^= sum >> 47;
    sum ^= key;
    return sum * PRIME32_1;
}

/* Full KiBs before the last 1 to 1,024 bytes, and the full stripes before the last 1 to 64. */
ON_DEVICE u64 kibs_of(u64 bytes) { return (bytes - 1) / 1024; }
ON_DEVICE u32 rest_stripes_of(u64 bytes) { return (u32)((bytes - 1 - kibs_of(bytes) * 1024) / 64); }

/* What follows the last scramble. */
ON_DEVICE u64 rest_sum(Pieces pieces, u64 bytes, u32 lane, const Keys& keys) {
    u64 sum = kib_sum(pieces, kibs_of(bytes), rest_stripes_of(bytes), lane, keys);
    return sum + stripe_sum(stripe_at(pieces, bytes - 64), lane, secret_at(121 + 8 * lane));
}

ON_DEVICE u64 high_product(u64 a, u64 b) {
#ifdef __CUDACC__
    return __umul64hi(a, b);
#else
    return (u64)(((unsigned __int128)a * b) >> 64);
#endif
}

ON_DEVICE u64 digest_of(const u64* sums, u64 bytes) {
    u64 result = bytes * PRIME64_1;
    for (u32 i = 0; i < 4; ++i) {
        u64 a = sums[2 * i] ^ secret_at(11 + 16 * i), b = sums[2 * i + 1] ^ secret_at(19 + 16 * i);
        result += (a * b) ^ high_product(a, b);
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9ULL;
    return result ^ (result >> 32);
}

#ifdef __CUDACC__
extern "C" __global__ void kvbm_copy_rows(const u64* __restrict__ rows, u32 count) {
    u32 lane = threadIdx.x & 31, warps = (gridDim.x * blockDim.x) >> 5;
    for (u32 row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5; row < count; row += warps)
        copy_row(rows[3ULL * row], rows[3ULL * row + 1], rows[3ULL * row + 2], lane, 32);
}

/* A part is {its first region, number of regions, bytes, full KiBs of the parts before it}. */
ON_DEVICE Pieces pieces_of(const u64* regions, const u64* part, u64 block) {
    Pieces pieces = {regions + 4 * part[0], (u32)part[1], block};
    return pieces;
}

/* What every KiB of every part of every block adds: in any order, by as many threads as there are.
   `kibs`: of all parts of a block. */
extern "C" __global__ void kvbm_sum_kibs(const u64* __restrict__ regions,
                                         const u64* __restrict__ parts, u32 part_count, u32 kibs,
                                         const u64* __restrict__ blocks, u32 block_count,
                                         u64* kib_sums) {
    u32 lane = threadIdx.x & 7, groups = (gridDim.x * blockDim.x) >> 3;
    Keys keys = keys_of(lane);
    for (u32 n = (blockIdx.x * blockDim.x + threadIdx.x) >> 3; n < kibs * block_count;
         n += groups) {
        u32 kib = n % kibs, low = 0, high = part_count;
        while (high - low > 1) {
            u32 middle = (low + high) / 2;
            if (parts[4 * middle + 3] <= kib) low = middle; else high = middle;
        }
        const u64* part = parts + 4 * low;
        Pieces pieces = pieces_of(regions, part, blocks[n / kibs]);
        kib_sums[8ULL * n + lane] = kib_sum(pieces, kib - part[3], 16, lane, keys);
    }
}

#define TILE 128  /* KiBs whose sums are in shared memory at a time: 8 KiB. */

/* A thread block for each part of each block: what its KiBs add, one by one, and the rest. */
extern "C" __global__ void kvbm_sum_parts(const u64* __restrict__ regions,
                                          const u64* __restrict__ parts, u32 part_count, u32 kibs,
                                          const u64* __restrict__ blocks,
                                          const u64* __restrict__ kib_sums, u64* digests) {
    __shared__ u64 tile[TILE][8];
    __shared__ u64 sums[8];
    u32 block = blockIdx.x / part_count;
    const u64* part = parts + 4 * (blockIdx.x % part_count);
    Pieces pieces = pieces_of(regions, part, blocks[block]);
    u32 lane = threadIdx.x & 7, group = threadIdx.x >> 3, groups = blockDim.x >> 3;
    u64 bytes = part[2], count = kibs_of(bytes), scramble = secret_at(128 + 8 * lane);
    const u64* ours = kib_sums + 8ULL * ((u64)kibs * block + part[3]);
    u64 sum = first_sum(lane);
    for (u64 base = 0; base < count; base += TILE) {
        u32 here = (u32)(count - base < TILE ? count - base : TILE);
        for (u32 k = group; k < here; k += groups) tile[k][lane] = ours[8ULL * (base + k) + lane];
        __syncthreads();
        if (group == 0)
            for (u32 k = 0; k < here; ++k) sum = scrambled(sum + tile[k][lane], scramble);
        __syncthreads();
    }
    if (group == 0) {
        Keys keys = keys_of(lane);
        sums[lane] = sum + rest_sum(pieces, bytes, lane, keys);
    }
    __syncthreads();
    if (threadIdx.x == 0) digests[blockIdx.x] = digest_of(sums, bytes);
}
#endif
"""
