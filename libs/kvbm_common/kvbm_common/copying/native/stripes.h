/* The fast path: a stripe of 64 bytes is loaded once, and stored and summed from registers.
 *
 * Loads, stores and arithmetic of several stripes are in flight at once, where the general path of
 * copying.c does one after the other. It takes blocks whose pieces are whole stripes and whose
 * targets allow stores past the caches; the sum is that of XXH3-64 for more than 240 bytes
 * (XXH3_hashLong_64b of xxhash.h, whose constants and last steps it uses).
 *
 * Where STRIPES is not defined, there are no instructions for it: the general path takes all. */
#define LANES_MAX 64

/* The lanes of a block: piece p is summed in lane `lanes[p]`, or all of them in one lane. */
typedef struct {
  const uint32_t *lanes; /* Null: one lane. */
  size_t count;
  size_t totals[LANES_MAX]; /* Bytes of each lane. */
} lane_plan;

static inline size_t lane_of(const lane_plan *plan, size_t piece) {
  return plan->lanes ? plan->lanes[piece] : 0;
}

#if defined(__AVX2__)
#include <immintrin.h>
#define STRIPES 2
typedef __m256i vec;
#define VEC(name) _mm256_##name##_si256
#define VEC64(name) _mm256_##name
#define VEC_SHUFFLE _mm256_shuffle_epi32
#elif defined(__SSE2__)
#include <emmintrin.h>
#define STRIPES 4
typedef __m128i vec;
#define VEC(name) _mm_##name##_si128
#define VEC64(name) _mm_##name
#define VEC_SHUFFLE _mm_shuffle_epi32
#endif

#if defined(STRIPES)
#define STRIPE ((size_t)XXH_STRIPE_LEN)
#define ROUND ((size_t)16)
/* Stripes between two scrambles: (192 - 64) / 8 positions in the secret. */
#define AHEAD 1536
/* Bytes between what is loaded and what is fetched; a fetch beyond a piece does no harm. */

enum store { NO_STORE, STORE_16, STORE_VEC };

typedef struct {
  vec acc[STRIPES];
  size_t position; /* In the round: stripes since the last scramble. */
} sum_state;

static inline __attribute__((always_inline)) vec add_stripe(vec acc, vec data,
                                                            const uint8_t *secret) {
  vec key = VEC(xor)(data, VEC(loadu)((const void *)secret));
  vec product = VEC64(mul_epu32)(key, VEC64(srli_epi64)(key, 32));
  vec swapped = VEC_SHUFFLE(data, _MM_SHUFFLE(1, 0, 3, 2));
  return VEC64(add_epi64)(product, VEC64(add_epi64)(acc, swapped));
}

static inline __attribute__((always_inline)) vec scramble(vec acc, const uint8_t *secret) {
  const vec prime = VEC64(set1_epi32)((int)XXH_PRIME32_1);
  vec mixed = VEC(xor)(acc, VEC64(srli_epi64)(acc, 47));
  vec key = VEC(xor)(mixed, VEC(loadu)((const void *)secret));
  vec low = VEC64(mul_epu32)(key, prime);
  vec high = VEC64(mul_epu32)(VEC64(srli_epi64)(key, 32), prime);
  return VEC64(add_epi64)(low, VEC64(slli_epi64)(high, 32));
}

static inline __attribute__((always_inline)) void store_part(uint8_t *to, vec data,
                                                             enum store how) {
  if (how == NO_STORE) return;
#if defined(__AVX2__)
  if (how == STORE_16) {
    _mm_stream_si128((void *)to, _mm256_castsi256_si128(data));
    _mm_stream_si128((void *)(to + 16), _mm256_extracti128_si256(data, 1));
    return;
  }
#endif
  VEC(stream)((void *)to, data);
}

/* One stripe. What was loaded stays in registers: the compiler may not load it a second time. */
static inline __attribute__((always_inline)) void move_stripe(vec *acc, uint8_t *to,
                                                              const uint8_t *from,
                                                              const uint8_t *secret,
                                                              enum store how, int summed) {
  for (size_t part = 0; part < STRIPES; part++) {
    size_t at = part * sizeof(vec);
    vec data = VEC(loadu)((const void *)(from + at));
    __asm__("" : "+x"(data));
    store_part(to + at, data, how);
    if (summed) acc[part] = add_stripe(acc[part], data, secret + at);
  }
}

static inline __attribute__((always_inline)) void scramble_all(vec *acc) {
  for (size_t part = 0; part < STRIPES; part++)
    acc[part] = scramble(acc[part], XXH3_kSecret + 128 + part * sizeof(vec));
}

/* One piece. `last`: its end is that of its lane, whose last stripe is summed by itself. */
static inline __attribute__((always_inline)) void move_stripes(sum_state *state, uint8_t *to,
                                                               const uint8_t *from, size_t length,
                                                               int last, enum store how,
                                                               int summed) {
  vec acc[STRIPES];
  size_t position = state->position, done = 0, end = length - (last ? STRIPE : 0);
  for (size_t part = 0; part < STRIPES; part++) acc[part] = state->acc[part];
  while (done < end) {
    if (position == 0 && end - done >= ROUND * STRIPE) {
      for (size_t i = 0; i < ROUND; i++) {
        __builtin_prefetch(from + done + i * STRIPE + AHEAD, 0, 3);
        move_stripe(acc, to + done + i * STRIPE, from + done + i * STRIPE, XXH3_kSecret + i * 8,
                    how, summed);
      }
      done += ROUND * STRIPE;
      position = ROUND;
    } else {
      __builtin_prefetch(from + done + AHEAD, 0, 3);
      move_stripe(acc, to + done, from + done, XXH3_kSecret + position * 8, how, summed);
      done += STRIPE;
      position++;
    }
    if (position == ROUND) {
      if (summed) scramble_all(acc);
      position = 0;
    }
  }
  if (last) {
    __builtin_prefetch(from + done + AHEAD, 0, 3);
    move_stripe(acc, to + done, from + done, XXH3_kSecret + 192 - 64 - 7, how, summed);
  }
  for (size_t part = 0; part < STRIPES; part++) state->acc[part] = acc[part];
  state->position = position;
}

static inline __attribute__((always_inline)) void begin_lanes(sum_state *states, size_t *left,
                                                              const lane_plan *plan) {
  static const uint64_t first[XXH_ACC_NB] = XXH3_INIT_ACC;
  for (size_t lane = 0; lane < plan->count; lane++) {
    states[lane].position = 0;
    left[lane] = plan->totals[lane];
    for (size_t part = 0; part < STRIPES; part++)
      states[lane].acc[part] =
          VEC(loadu)((const void *)((const uint8_t *)first + part * sizeof(vec)));
  }
}

static inline __attribute__((always_inline)) uint64_t lane_sum(const sum_state *state,
                                                               size_t total) {
  uint64_t acc[XXH_ACC_NB];
  for (size_t part = 0; part < STRIPES; part++)
    VEC(storeu)((void *)((uint8_t *)acc + part * sizeof(vec)), state->acc[part]);
  return XXH3_mergeAccs(acc, XXH3_kSecret + XXH_SECRET_MERGEACCS_START,
                        (xxh_u64)total * XXH_PRIME64_1);
}

/* One block, by the widest stores that every target of it allows. Its pieces go in their order,
 * which is that of memory where lanes take turns; each lane's state waits for its next piece. */
static inline __attribute__((always_inline)) void move_block(
    const uint64_t *targets, const uint64_t *sources, const uint64_t *lengths, size_t pieces,
    const lane_plan *plan, enum store how, int summed, uint64_t *sums) {
  sum_state states[LANES_MAX];
  size_t left[LANES_MAX];
  begin_lanes(states, left, plan);
  for (size_t piece = 0; piece < pieces; piece++) {
    const uint8_t *from = (const uint8_t *)(uintptr_t)sources[piece];
    uint8_t *to = (uint8_t *)(uintptr_t)(how == NO_STORE ? sources : targets)[piece];
    size_t lane = lane_of(plan, piece);
    left[lane] -= lengths[piece];
    move_stripes(&states[lane], to, from, lengths[piece], left[lane] == 0, how, summed);
  }
  for (size_t lane = 0; summed && lane < plan->count; lane++)
    sums[lane] = lane_sum(&states[lane], plan->totals[lane]);
}

/* Whether the pieces of every block are whole stripes, and every lane long enough for them. */
static inline int are_stripes(const uint64_t *lengths, size_t pieces, const lane_plan *plan) {
  for (size_t piece = 0; piece < pieces; piece++)
    if (lengths[piece] == 0 || lengths[piece] % STRIPE) return 0;
  for (size_t lane = 0; lane < plan->count; lane++)
    if (plan->totals[lane] <= XXH3_MIDSIZE_MAX) return 0;
  return 1;
}

/* Move a block whose pieces `are_stripes`; false: nothing was done, its targets are odd. `targets`
 * or `sums` may be null, not both. */
static int try_stripes(const uint64_t *targets, const uint64_t *sources, const uint64_t *lengths,
                       size_t pieces, const lane_plan *plan, uint64_t *sums) {
  uint64_t odd = 0;
  if (!targets) {
    move_block(targets, sources, lengths, pieces, plan, NO_STORE, 1, sums);
    return 1;
  }
  for (size_t piece = 0; piece < pieces; piece++) odd |= targets[piece];
  if (odd % 16) return 0;
  int narrow = odd % sizeof(vec) != 0;
  if (narrow && sums)
    move_block(targets, sources, lengths, pieces, plan, STORE_16, 1, sums);
  else if (narrow)
    move_block(targets, sources, lengths, pieces, plan, STORE_16, 0, NULL);
  else if (sums)
    move_block(targets, sources, lengths, pieces, plan, STORE_VEC, 1, sums);
  else
    move_block(targets, sources, lengths, pieces, plan, STORE_VEC, 0, NULL);
  return 1;
}
#endif
