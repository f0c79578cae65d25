/* Name the blocks of a chain, and read token ids, many in one call.
 *
 * A name is BLAKE2b-128 (RFC 7693) under the key of its namespace, over the name before it and the
 * block's token ids: see identity.py. The key fills a first block of BLAKE2b, which is compressed
 * once for all of a chain. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NAME 16
#define KEY 32
#define CHUNK 128

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

static inline uint64_t turned(uint64_t word, int by) { return (word >> by) | (word << (64 - by)); }

static inline uint64_t read_word(const uint8_t *from) {
  uint64_t word;
  memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

#define MIX(a, b, c, d, x, y)      \
  do {                             \
    a = a + b + (x);               \
    d = turned(d ^ a, 32);         \
    c = c + d;                     \
    b = turned(b ^ c, 24);         \
    a = a + b + (y);               \
    d = turned(d ^ a, 16);         \
    c = c + d;                     \
    b = turned(b ^ c, 63);         \
  } while (0)

/* One chunk: `counted` bytes with it; `last` is all ones for the last chunk, else 0. */
static inline void compress(uint64_t state[8], const uint8_t chunk[CHUNK], uint64_t counted,
                            uint64_t last) {
  uint64_t m[16], v[16];
  for (int i = 0; i < 16; i++) m[i] = read_word(chunk + 8 * i);
  for (int i = 0; i < 8; i++) v[i] = state[i], v[i + 8] = IV[i];
  v[12] ^= counted;
  v[14] ^= last;
#pragma GCC unroll 12
  for (int round = 0; round < 12; round++) {
    const uint8_t *s = SIGMA[round];
    MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
  }
  for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

/* The names of `count` blocks of `size` bytes of token ids each, back to back; the parent of the
 * first one is `parent`, each other's is the name before it. */
void kvbm_chain(const uint8_t key[KEY], const uint8_t parent[NAME], const uint8_t *tokens,
                size_t size, size_t count, uint8_t *names) {
  uint8_t chunk[CHUNK] = {0};
  uint64_t keyed[8];
  memcpy(keyed, IV, sizeof keyed);
  keyed[0] ^= 0x01010000 ^ (KEY << 8) ^ NAME;
  memcpy(chunk, key, KEY);
  compress(keyed, chunk, CHUNK, 0);
  const size_t total = NAME + size;
  for (size_t block = 0; block < count; block++, tokens += size, names += NAME) {
    uint64_t state[8];
    memcpy(state, keyed, sizeof state);
    const uint8_t *from = tokens;
    size_t done = 0, filled = NAME;
    memcpy(chunk, parent, NAME);
    do {
      size_t room = CHUNK - filled, left = total - done - filled;
      size_t taken = left < room ? left : room;
      memcpy(chunk + filled, from, taken);
      memset(chunk + filled + taken, 0, room - taken);
      from += taken;
      done += filled + taken;
      compress(state, chunk, CHUNK + done, done == total ? ~(uint64_t)0 : 0);
      filled = 0;
    } while (done < total);
    for (int i = 0; i < NAME; i++) names[i] = (uint8_t)(state[i / 8] >> (8 * (i % 8)));
    parent = names;
  }
}

/* The token ids of an array of msgpack, at most `most`, as u32; how many there are, or -1 for
 * anything else than an array of numbers from 0 to 2^32 - 1 that ends with the bytes. */
ptrdiff_t kvbm_token_ids(const uint8_t *at, size_t size, uint32_t *ids, size_t most) {
  const uint8_t *end = at + size;
  size_t count;
  if (size < 1) return -1;
  if ((at[0] & 0xf0) == 0x90) {
    count = at[0] & 0x0f;
    at += 1;
  } else if (at[0] == 0xdc && size >= 3) {
    count = (size_t)at[1] << 8 | at[2];
    at += 3;
  } else if (at[0] == 0xdd && size >= 5) {
    count = (size_t)at[1] << 24 | (size_t)at[2] << 16 | (size_t)at[3] << 8 | at[4];
    at += 5;
  } else {
    return -1;
  }
  if (count > most) return -1;
  for (size_t i = 0; i < count; i++) {
    if (at == end) return -1;
    uint8_t kind = *at++;
    size_t left = (size_t)(end - at);
    if (kind == 0xcd && left >= 2) {
      ids[i] = (uint32_t)at[0] << 8 | at[1];
      at += 2;
    } else if (kind < 0x80) {
      ids[i] = kind;
    } else if (kind == 0xcc && left >= 1) {
      ids[i] = *at++;
    } else if (kind == 0xce && left >= 4) {
      ids[i] = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
      at += 4;
    } else {
      return -1;
    }
  }
  return at == end ? (ptrdiff_t)count : -1;
}
