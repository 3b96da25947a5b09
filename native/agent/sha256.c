#include "sha256.h"

/* FIPS 180-4, 4.2.2. */
static const uint32_t constants[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t turn(uint32_t x, int n) {
        return x >> n | x << (32 - n);
}

static uint32_t load_big(const uint8_t *at) {
        return (uint32_t) at[0] << 24 | (uint32_t) at[1] << 16 | (uint32_t) at[2] << 8 | at[3];
}

static void store_big(uint8_t *at, uint32_t x) {
        for (int i = 0; i < 4; i++)
                at[i] = (uint8_t) (x >> (24 - 8 * i));
}

/* FIPS 180-4, 6.2.2. */
static void blocks_plain(uint32_t state[8], const uint8_t *data, size_t count) {
        for (; count > 0; count--, data += SHA256_BLOCK) {
                uint32_t w[64], s[8];

                for (int t = 0; t < 16; t++)
                        w[t] = load_big(data + 4 * t);
                for (int t = 16; t < 64; t++)
                        w[t] = w[t - 16] + w[t - 7] + (turn(w[t - 15], 7) ^ turn(w[t - 15], 18) ^ w[t - 15] >> 3) +
                               (turn(w[t - 2], 17) ^ turn(w[t - 2], 19) ^ w[t - 2] >> 10);
                memcpy(s, state, sizeof(s));
                /* a to h stay where they are and change their names: at round t, a is at -t. Unrolled, these are registers. */
#pragma GCC unroll 64
                for (int t = 0; t < 64; t++) {
                        uint32_t a = s[-t & 7], b = s[(1 - t) & 7], c = s[(2 - t) & 7];
                        uint32_t e = s[(4 - t) & 7], f = s[(5 - t) & 7], g = s[(6 - t) & 7], h = s[(7 - t) & 7];
                        uint32_t t1 = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) +
                                      constants[t] + w[t];
                        uint32_t t2 = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
                        s[(3 - t) & 7] += t1;
                        s[(7 - t) & 7] = t1 + t2;
                }
                for (int i = 0; i < 8; i++)
                        state[i] += s[i];
        }
}

#if defined(__x86_64__) && !defined(SHA256_PLAIN)
#include <cpuid.h>
#include <immintrin.h>

static bool cpu_has_sha(void) {
        unsigned a, b, c, d;

        return __get_cpuid(1, &a, &b, &c, &d) && c & bit_SSE4_1 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & bit_SHA;
}

/* The same with the processor's own instructions, four rounds a step; they want the state as the words ABEF and CDGH. */
__attribute__((target("sha,sse4.1"))) static void blocks_sha(uint32_t state[8], const uint8_t *data, size_t count) {
        const __m128i big = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
        __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *) (const void *) state), 0xb1);
        __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *) (const void *) (state + 4)), 0x1b);
        __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
        __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

        for (; count > 0; count--, data += SHA256_BLOCK) {
                __m128i w[4], abef_before = abef, cdgh_before = cdgh;

#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) {
                        __m128i *next = &w[i % 4], last = w[(i + 3) % 4];
                        if (i < 4)
                                *next = _mm_shuffle_epi8(
                                        _mm_loadu_si128((const __m128i *) (const void *) (data + 16 * i)), big);
                        else
                                *next = _mm_sha256msg2_epu32(
                                        _mm_add_epi32(_mm_sha256msg1_epu32(*next, w[(i + 1) % 4]),
                                                      _mm_alignr_epi8(last, w[(i + 2) % 4], 4)), last);
                        __m128i sum = _mm_add_epi32(
                                *next, _mm_loadu_si128((const __m128i *) (const void *) (constants + 4 * i)));
                        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
                        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
                }
                abef = _mm_add_epi32(abef, abef_before);
                cdgh = _mm_add_epi32(cdgh, cdgh_before);
        }
        __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
        _mm_storeu_si128((__m128i *) (void *) state, _mm_blend_epi16(feba, dchg, 0xf0));
        _mm_storeu_si128((__m128i *) (void *) (state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static void blocks(uint32_t state[8], const uint8_t *data, size_t count) {
        static int hard = -1;

        if (hard < 0)
                hard = cpu_has_sha();
        if (hard)
                blocks_sha(state, data, count);
        else
                blocks_plain(state, data, count);
}
#else
static void blocks(uint32_t state[8], const uint8_t *data, size_t count) {
        blocks_plain(state, data, count);
}
#endif

void sha256_start(struct sha256 *sum) {
        /* FIPS 180-4, 5.3.3. */
        static const uint32_t initial[8] = {
                0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
        };

        memcpy(sum->state, initial, sizeof(initial));
        sum->size = 0;
}

void sha256_add(struct sha256 *sum, const uint8_t *data, size_t size) {
        size_t held = (size_t) (sum->size % SHA256_BLOCK);

        sum->size += size;
        if (held > 0) {
                size_t take = min_size(size, SHA256_BLOCK - held);
                memcpy(sum->waiting + held, data, take);
                data += take;
                size -= take;
                if (held + take < SHA256_BLOCK)
                        return;
                blocks(sum->state, sum->waiting, 1);
        }
        blocks(sum->state, data, size / SHA256_BLOCK);
        if (size % SHA256_BLOCK > 0)
                memcpy(sum->waiting, data + size / SHA256_BLOCK * SHA256_BLOCK, size % SHA256_BLOCK);
}

void sha256_digest(const struct sha256 *sum, uint8_t ret[SHA256_SIZE]) {
        uint8_t last[2 * SHA256_BLOCK] = { 0 };
        size_t held = (size_t) (sum->size % SHA256_BLOCK);
        size_t count = held < SHA256_BLOCK - 8 ? 1 : 2;
        uint32_t state[8];

        /* A one, zeros, and the number of bits at the end of a block. */
        memcpy(last, sum->waiting, held);
        last[held] = 0x80;
        store_big(last + count * SHA256_BLOCK - 8, (uint32_t) (sum->size >> 29));
        store_big(last + count * SHA256_BLOCK - 4, (uint32_t) (sum->size << 3));
        memcpy(state, sum->state, sizeof(state));
        blocks(state, last, count);
        for (int i = 0; i < 8; i++)
                store_big(ret + 4 * i, state[i]);
}
