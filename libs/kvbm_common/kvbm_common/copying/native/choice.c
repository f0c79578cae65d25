/* The variant for the processor that this runs on. */
#include <stddef.h>
#include <stdint.h>

typedef void move_blocks(const uint64_t *, const uint64_t *, const uint64_t *, const uint32_t *,
                         size_t, size_t, size_t, uint64_t *);

extern move_blocks kvbm_move_baseline;
#if defined(KVBM_HAS_AVX2)
extern move_blocks kvbm_move_avx2;
#endif

/* Other arguments are another name: what was compiled from older sources is never called. */
void kvbm_move_lanes(const uint64_t *targets, const uint64_t *sources, const uint64_t *lengths,
                     const uint32_t *lanes, size_t blocks, size_t pieces, size_t lane_count,
                     uint64_t *sums) {
#if defined(KVBM_HAS_AVX2)
  if (__builtin_cpu_supports("avx2")) {
    kvbm_move_avx2(targets, sources, lengths, lanes, blocks, pieces, lane_count, sums);
    return;
  }
#endif
  kvbm_move_baseline(targets, sources, lengths, lanes, blocks, pieces, lane_count, sums);
}
