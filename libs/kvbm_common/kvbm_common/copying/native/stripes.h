/* The fast path: a stripe of 64 bytes is loaded once, and stored and summed from registers.
 *
 * Loads, stores and arithmetic of several stripes are in flight at once, where the general path of
 * copying.c does one after the other. It takes blocks whose pieces are whole stripes and whose
 * targets allow stores past the caches; the sum is that of XXH3-64 for more than 240 bytes
 * (XXH3_hashLong_64b of xxhash.h, whose constants and last steps it uses).
 *
 * Where STRIPES is not defined, there are no instructions for it: the general path takes all. */
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

/* One piece. `last`: its end is that of the block, whose last stripe is summed by itself. */
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
      move_stripe(acc, to + done, from + done, XXH3_kSecret + position * 8, how, summed);
      done += STRIPE;
      position++;
    }
    if (position == ROUND) {
      if (summed) scramble_all(acc);
      position = 0;
    }
  }
  if (last) move_stripe(acc, to + done, from + done, XXH3_kSecret + 192 - 64 - 7, how, summed);
  for (size_t part = 0; part < STRIPES; part++) state->acc[part] = acc[part];
  state->position = position;
}

/* One block, by the widest stores that every target of it allows. */
static inline __attribute__((always_inline)) uint64_t move_block(
    const uint64_t *targets, const uint64_t *sources, const uint64_t *lengths, size_t pieces,
    size_t total, enum store how, int summed) {
  static const uint64_t first[XXH_ACC_NB] = XXH3_INIT_ACC;
  uint64_t acc[XXH_ACC_NB];
  sum_state state;
  state.position = 0;
  for (size_t part = 0; part < STRIPES; part++)
    state.acc[part] = VEC(loadu)((const void *)((const uint8_t *)first + part * sizeof(vec)));
  for (size_t piece = 0; piece < pieces; piece++) {
    const uint8_t *from = (const uint8_t *)(uintptr_t)sources[piece];
    uint8_t *to = (uint8_t *)(uintptr_t)(how == NO_STORE ? sources : targets)[piece];
    move_stripes(&state, to, from, lengths[piece], piece + 1 == pieces, how, summed);
  }
  for (size_t part = 0; part < STRIPES; part++)
    VEC(storeu)((void *)((uint8_t *)acc + part * sizeof(vec)), state.acc[part]);
  return summed ? XXH3_mergeAccs(acc, XXH3_kSecret + XXH_SECRET_MERGEACCS_START,
                                 (xxh_u64)total * XXH_PRIME64_1)
                : 0;
}

/* The widest stores for these targets; -1: the block is one for the general path. */
static inline int stores_of(const uint64_t *targets, const uint64_t *lengths, size_t pieces,
                            size_t *total) {
  uint64_t odd = 0, whole = 0;
  for (size_t piece = 0; piece < pieces; piece++) {
    if (lengths[piece] == 0 || lengths[piece] % STRIPE) return -1;
    whole += lengths[piece];
    odd |= targets ? targets[piece] : 0;
  }
  *total = whole;
  if (whole <= XXH3_MIDSIZE_MAX || odd % 16) return -1;
  if (!targets) return NO_STORE;
  return odd % sizeof(vec) ? STORE_16 : STORE_VEC;
}

/* Move a block by stripes, if it is one of those; false: nothing was done. `targets` or `sum` may
 * be null, not both. */
static int try_stripes(const uint64_t *targets, const uint64_t *sources, const uint64_t *lengths,
                       size_t pieces, uint64_t *sum) {
  size_t total;
  switch (stores_of(targets, lengths, pieces, &total)) {
    case NO_STORE:
      *sum = move_block(targets, sources, lengths, pieces, total, NO_STORE, 1);
      return 1;
    case STORE_16:
      if (sum)
        *sum = move_block(targets, sources, lengths, pieces, total, STORE_16, 1);
      else
        move_block(targets, sources, lengths, pieces, total, STORE_16, 0);
      return 1;
    case STORE_VEC:
      if (sum)
        *sum = move_block(targets, sources, lengths, pieces, total, STORE_VEC, 1);
      else
        move_block(targets, sources, lengths, pieces, total, STORE_VEC, 0);
      return 1;
    default:
      return 0;
  }
}
#endif
