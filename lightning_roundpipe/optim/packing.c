/* Conversions between fp32 numbers and what is kept of them, in one pass over memory.

   They give the bits that the torch operations in split_masters.py and packed_moments.py give, where these are used
   without a compiler. Numbers are their bits, except for int8's product and quotient. A pass uses the threads of the
   OpenMP that torch has loaded. */

#include <stdint.h>
#include <string.h>

#define GRAIN 32768 /* numbers that are not worth a second thread, as in torch */
#define PASS _Pragma("omp parallel for simd num_threads(threads) if (parallel : n > GRAIN)")
#define BLOCK 256
#define SMALLEST 0x00800000 /* the smallest normal fp32 number */

static inline uint32_t to_bf16(uint32_t number) {
    uint32_t rounded = (number + 0x7fff + (number >> 16 & 1)) >> 16;
    return (number & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

static inline float as_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t as_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

void join(int64_t n, int threads, const uint16_t *restrict high, const int16_t *restrict low, uint32_t *restrict out) {
    PASS
    for (int64_t i = 0; i < n; i++)
        out[i] = ((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i];
}

void split(int64_t n, int threads, const uint32_t *restrict numbers, uint16_t *restrict high, int16_t *restrict low) {
    PASS
    for (int64_t i = 0; i < n; i++) {
        uint32_t rounded = to_bf16(numbers[i]);
        int32_t rest = (int32_t)(numbers[i] - (rounded << 16));
        high[i] = rounded;
        low[i] = rest > INT16_MAX ? INT16_MAX : rest;
    }
}

void load_bf16(int64_t n, int threads, const uint16_t *restrict packed, uint32_t *restrict out) {
    PASS
    for (int64_t i = 0; i < n; i++)
        out[i] = (uint32_t)packed[i] << 16;
}

/* One of all numbers of 16 bits for each place, modulo 65,536. */
static inline uint32_t noise(uint32_t place) {
    uint32_t x = place * 40503 & 0xffff;
    x = (x ^ x >> 7) * 30023 & 0xffff;
    return x ^ x >> 8;
}

void store_bf16(int64_t n, int threads, int64_t place, const uint32_t *restrict numbers, uint16_t *restrict packed) {
    PASS
    for (int64_t i = 0; i < n; i++)
        packed[i] = (numbers[i] + noise((uint32_t)place + (uint32_t)i)) >> 16;
}

void load_int8(int64_t n, int threads, const uint8_t *restrict codes, const float *restrict largest,
               const float *restrict values, float *restrict out) {
    PASS
    for (int64_t i = 0; i < n; i++)
        out[i] = values[codes[i]] * largest[i / BLOCK];
}

void store_int8(int64_t n, int threads, const uint32_t *restrict numbers, const uint8_t *restrict nearest,
                uint8_t *restrict codes, uint32_t *restrict largest) {
#pragma omp parallel for num_threads(threads) if (n > GRAIN)
    for (int64_t start = 0; start < n; start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        uint32_t most = 0; /* the bits of magnitudes have their order, and NaN is above all */
        uint16_t places[BLOCK];
        for (int i = 0; i < count; i++) {
            uint32_t magnitude = numbers[start + i] & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        largest[start / BLOCK] = most;
        float divisor = as_float(most > SMALLEST ? most : SMALLEST);
        for (int i = 0; i < count; i++)
            places[i] = to_bf16(as_bits(as_float(numbers[start + i]) / divisor));
        for (int i = 0; i < count; i++)
            codes[start + i] = nearest[places[i]];
    }
}
