/* Copy blocks and sum them up (XXH3-64) in one pass over memory.
 *
 * Blocks of whole stripes on aligned targets, which are nearly all, go by stripes.h. This is the
 * general path: any lengths, any alignment, any processor. Each step reads up to STEP bytes of the source once, into a buffer that stays in the L1 cache,
 * sums the buffer, and stores it past the caches. What is summed is what is stored, even where
 * somebody writes to the source meanwhile. The next step is prefetched.
 *
 * Compiled once for every entry of `VARIANTS` in hatch_build.py, each with a name of its own. */
#define XXH_INLINE_ALL
#include "xxhash.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "stripes.h"

#ifndef KVBM_MOVE
#define KVBM_MOVE kvbm_move_baseline
#endif

#define STEP 2048
#define LINE 64

/* Store past the caches: what is copied is larger than they are. `to` is on a cache line but for
 * the first bytes of a piece. */
static inline void store(uint8_t *to, const uint8_t *from, size_t length) {
#if defined(__SSE2__)
  if (((uintptr_t)to & (LINE - 1)) == 0) {
    size_t whole = length & ~(size_t)(LINE - 1);
    for (size_t i = 0; i < whole; i += LINE) {
#if defined(__AVX2__)
      __m256i a = _mm256_load_si256((const void *)(from + i));
      __m256i b = _mm256_load_si256((const void *)(from + i + 32));
      _mm256_stream_si256((void *)(to + i), a);
      _mm256_stream_si256((void *)(to + i + 32), b);
#else
      for (size_t j = i; j < i + LINE; j += 16)
        _mm_stream_si128((void *)(to + j), _mm_load_si128((const void *)(from + j)));
#endif
    }
    to += whole;
    from += whole;
    length -= whole;
  }
#endif
  memcpy(to, from, length);
}

static inline void prefetch(const uint8_t *from, size_t length) {
  for (size_t i = 0; i < length; i += LINE) __builtin_prefetch(from + i, 0, 3);
}

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* One piece. `state` may be null: nothing is summed. `to` may be null: nothing is stored. */
static void move_piece(XXH3_state_t *state, uint8_t *to, const uint8_t *from, size_t length) {
  uint8_t buffer[STEP] __attribute__((aligned(LINE)));
  size_t to_line = (LINE - ((uintptr_t)to & (LINE - 1))) & (LINE - 1);
  size_t step = to_line ? to_line : STEP;
  for (size_t done = 0; done < length; done += step, step = STEP) {
    size_t count = least(step, length - done);
    if (done + count < length) prefetch(from + done + count, least(STEP, length - done - count));
    memcpy(buffer, from + done, count);
    if (state) XXH3_64bits_update(state, buffer, count);
    if (to) store(to + done, buffer, count);
  }
}

/* One block of any pieces, by states of XXH3's own. */
static void move_any(XXH3_state_t *states, const uint64_t *targets, const uint64_t *sources,
                     const uint64_t *lengths, size_t pieces, const lane_plan *plan,
                     uint64_t *sums) {
  for (size_t lane = 0; sums && lane < plan->count; lane++) XXH3_64bits_reset(&states[lane]);
  for (size_t piece = 0; piece < pieces; piece++) {
    uint8_t *to = targets ? (uint8_t *)(uintptr_t)targets[piece] : NULL;
    const uint8_t *from = (const uint8_t *)(uintptr_t)sources[piece];
    move_piece(sums ? &states[lane_of(plan, piece)] : NULL, to, from, lengths[piece]);
  }
  for (size_t lane = 0; sums && lane < plan->count; lane++)
    sums[lane] = XXH3_64bits_digest(&states[lane]);
}

/* Piece p of block b: lengths[p] bytes from sources[b * pieces + p] to targets[b * pieces + p].
 * sums[b * lane_count + l]: over the pieces of block b whose lane is l, back to back. Without
 * `lanes` all pieces are in one. `targets` or `sums` may be null, or both: then there is nothing to
 * do. There are at most LANES_MAX lanes. */
void KVBM_MOVE(const uint64_t *targets, const uint64_t *sources, const uint64_t *lengths,
               const uint32_t *lanes, size_t blocks, size_t pieces, size_t lane_count,
               uint64_t *sums) {
  XXH3_state_t states[LANES_MAX];
  lane_plan plan = {lanes, lane_count, {0}};
  if (!targets && !sums) return;
  for (size_t lane = 0; lane < lane_count; lane++) XXH3_INITSTATE(&states[lane]);
  for (size_t piece = 0; piece < pieces; piece++)
    plan.totals[lane_of(&plan, piece)] += lengths[piece];
#if defined(STRIPES)
  int stripes = are_stripes(lengths, pieces, &plan);
#endif
  for (size_t block = 0; block < blocks; block++) {
    const uint64_t *to = targets ? targets + block * pieces : NULL;
    const uint64_t *from = sources + block * pieces;
    uint64_t *found = sums ? sums + block * lane_count : NULL;
#if defined(STRIPES)
    if (stripes && try_stripes(to, from, lengths, pieces, &plan, found)) continue;
#endif
    move_any(states, to, from, lengths, pieces, &plan, found);
  }
#if defined(__SSE2__)
  _mm_sfence(); /* The stores are visible to other processors before the caller goes on. */
#endif
}
