/* Conversions between fp32 numbers and what is kept of them, in one pass over memory.

   They give the bits that the torch operations in split_masters.py and packed_moments.py give, which do the same where
   there is no compiler. Numbers are their bits, except for int8's product and quotient. Threads are those of the OpenMP
   that torch has loaded: waking them takes longer than a short pass, so several passes share one parallel region. */

#include <omp.h>
#include <stdint.h>
#include <string.h>

#define GRAIN 32768 /* numbers that are not worth a second thread, as in torch */
#define BLOCK 256
#define SMALLEST 0x00800000 /* the smallest normal fp32 number */

/* A conversion of `length` numbers by function number `kind` of KINDS. `source` and `also` are read, `to` is written,
   and `beside` is read or written, as the function says. */
struct pass {
    int64_t kind, length, place;
    const void *source, *also;
    void *to, *beside;
};

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

/* One of all numbers of 16 bits for each place, modulo 65,536. */
static inline uint32_t noise(uint32_t place) {
    uint32_t x = place * 40503 & 0xffff;
    x = (x ^ x >> 7) * 30023 & 0xffff;
    return x ^ x >> 8;
}

/* `source`: upper halves; `also`: lower halves; `to`: numbers. */
static void join(const struct pass *pass, int64_t start, int64_t end) {
    const uint16_t *restrict high = pass->source;
    const int16_t *restrict low = pass->also;
    uint32_t *restrict numbers = pass->to;
    for (int64_t i = start; i < end; i++)
        numbers[i] = ((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i];
}

/* `source`: numbers; `to`: upper halves; `beside`: lower halves. */
static void split(const struct pass *pass, int64_t start, int64_t end) {
    const uint32_t *restrict numbers = pass->source;
    uint16_t *restrict high = pass->to;
    int16_t *restrict low = pass->beside;
    for (int64_t i = start; i < end; i++) {
        uint32_t rounded = to_bf16(numbers[i]);
        int32_t rest = (int32_t)(numbers[i] - (rounded << 16));
        high[i] = rounded;
        low[i] = rest > INT16_MAX ? INT16_MAX : rest;
    }
}

static void load_bf16(const struct pass *pass, int64_t start, int64_t end) {
    const uint16_t *restrict packed = pass->source;
    uint32_t *restrict numbers = pass->to;
    for (int64_t i = start; i < end; i++)
        numbers[i] = (uint32_t)packed[i] << 16;
}

/* `place`: of the first number in the sequence of noise. */
static void store_bf16(const struct pass *pass, int64_t start, int64_t end) {
    const uint32_t *restrict numbers = pass->source;
    uint16_t *restrict packed = pass->to;
    uint32_t place = pass->place;
    for (int64_t i = start; i < end; i++)
        packed[i] = (numbers[i] + noise(place + (uint32_t)i)) >> 16;
}

/* `also`: the value of each code; `beside`: the largest magnitude of each block, which is read. */
static void load_int8(const struct pass *pass, int64_t start, int64_t end) {
    const uint8_t *restrict codes = pass->source;
    const float *restrict values = pass->also, *restrict largest = pass->beside;
    float *restrict numbers = pass->to;
    for (int64_t i = start; i < end; i++)
        numbers[i] = values[codes[i]] * largest[i / BLOCK];
}

/* `also`: the code of each bf16 number; `beside`: the largest magnitude of each block. */
static void store_int8(const struct pass *pass, int64_t start, int64_t end) {
    const uint32_t *restrict numbers = pass->source;
    const uint8_t *restrict nearest = pass->also;
    uint8_t *restrict codes = pass->to;
    uint32_t *restrict largest = pass->beside;
    for (int64_t first = start; first < end; first += BLOCK) {
        int count = end - first < BLOCK ? (int)(end - first) : BLOCK;
        uint32_t most = 0; /* the bits of magnitudes have their order, and NaN is above all */
        uint16_t places[BLOCK];
        for (int i = 0; i < count; i++) {
            uint32_t magnitude = numbers[first + i] & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        largest[first / BLOCK] = most;
        float divisor = as_float(most > SMALLEST ? most : SMALLEST);
        for (int i = 0; i < count; i++)
            places[i] = to_bf16(as_bits(as_float(numbers[first + i]) / divisor));
        for (int i = 0; i < count; i++)
            codes[first + i] = nearest[places[i]];
    }
}

static void (*const KINDS[])(const struct pass *, int64_t, int64_t) = {join,       split,     load_bf16,
                                                                       store_bf16, load_int8, store_int8};

void convert(int threads, int count, const struct pass *passes) {
    int64_t most = 0;
    for (int i = 0; i < count; i++)
        most = passes[i].length > most ? passes[i].length : most;
#pragma omp parallel num_threads(threads) if (most > GRAIN)
    for (int i = 0; i < count; i++) {
        int64_t share = (passes[i].length / omp_get_num_threads() / BLOCK + 1) * BLOCK;
        int64_t start = share * omp_get_thread_num(), end = start + share;
        KINDS[passes[i].kind](&passes[i], start, end < passes[i].length ? end : passes[i].length);
    }
}
