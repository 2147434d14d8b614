/* Steps and conversions of numbers that are kept in fewer bytes than fp32, in one pass over memory.

   Conversions give the bits that the torch operations in split_masters.py, packed_moments.py and narrow_gradient.py
   give, which do the same where there is no compiler. Numbers are their bits, except for int8's product and quotient,
   gradients and the step itself.
   Threads are those of the OpenMP that torch has loaded. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define GRAIN 32768 /* numbers that are not worth a second thread, as in torch */
#define BLOCK 256
#define SMALLEST 0x00800000 /* the smallest normal fp32 number */

#define FP32 -1

/* An array of numbers in memory, in form number `kind` of FORMS, or in fp32: FP32. */
struct kept {
    int64_t kind, place;
    void *packed, *beside;
    const void *values, *nearest;
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

/* `packed`: upper halves; `beside`: lower halves. */
static void load_halves(const struct kept *kept, int64_t start, int64_t count, uint32_t *restrict numbers) {
    const uint16_t *restrict high = (const uint16_t *)kept->packed + start;
    const int16_t *restrict low = (const int16_t *)kept->beside + start;
    for (int64_t i = 0; i < count; i++)
        numbers[i] = ((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i];
}

static void store_halves(const struct kept *kept, int64_t start, int64_t count, uint32_t *restrict numbers) {
    uint16_t *restrict high = (uint16_t *)kept->packed + start;
    int16_t *restrict low = (int16_t *)kept->beside + start;
    for (int64_t i = 0; i < count; i++) {
        uint32_t rounded = to_bf16(numbers[i]);
        int32_t rest = (int32_t)(numbers[i] - (rounded << 16));
        high[i] = rounded;
        low[i] = rest > INT16_MAX ? INT16_MAX : rest;
    }
}

/* `place`: of the first number in the sequence of noise. */
static void load_bf16(const struct kept *kept, int64_t start, int64_t count, uint32_t *restrict numbers) {
    const uint16_t *restrict packed = (const uint16_t *)kept->packed + start;
    for (int64_t i = 0; i < count; i++)
        numbers[i] = (uint32_t)packed[i] << 16;
}

static void store_bf16(const struct kept *kept, int64_t start, int64_t count, uint32_t *restrict numbers) {
    uint16_t *restrict packed = (uint16_t *)kept->packed + start;
    uint32_t place = kept->place + start;
    for (int64_t i = 0; i < count; i++)
        packed[i] = (numbers[i] + noise(place + (uint32_t)i)) >> 16;
}

static void load_fp16(const struct kept *kept, int64_t start, int64_t count, uint32_t *restrict numbers) {
    const uint16_t *restrict packed = (const uint16_t *)kept->packed + start;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = packed[i] & 0x7fff, wide = (magnitude << 13) + (112 << 23);
        wide = magnitude < 0x400 ? as_bits((float)(int32_t)magnitude * 0x1p-24f) : wide;
        wide = magnitude >= 0x7c00 ? wide + (112 << 23) : wide; /* infinity, NaN */
        numbers[i] = wide | (uint32_t)(packed[i] & 0x8000) << 16;
    }
}

/* `packed`: codes; `beside`: the largest magnitude of each block; `values`: of each code; `nearest`: the code of each
   bf16 number. `start` is a multiple of a block. */
static void load_int8(const struct kept *kept, int64_t start, int64_t count, uint32_t *restrict numbers) {
    const uint8_t *restrict codes = (const uint8_t *)kept->packed + start;
    const float *restrict values = kept->values, *restrict largest = (const float *)kept->beside + start / BLOCK;
    for (int64_t first = 0; first < count; first += BLOCK) {
        int length = count - first < BLOCK ? (int)(count - first) : BLOCK;
        for (int i = 0; i < length; i++)
            numbers[first + i] = as_bits(values[codes[first + i]] * largest[first / BLOCK]);
    }
}

static void store_int8(const struct kept *kept, int64_t start, int64_t count, uint32_t *restrict numbers) {
    const uint8_t *restrict nearest = kept->nearest;
    uint8_t *restrict codes = (uint8_t *)kept->packed + start;
    uint32_t *restrict largest = (uint32_t *)kept->beside + start / BLOCK;
    for (int64_t first = 0; first < count; first += BLOCK) {
        int length = count - first < BLOCK ? (int)(count - first) : BLOCK;
        uint32_t most = 0; /* the bits of magnitudes have their order, and NaN is above all */
        uint16_t places[BLOCK];
        for (int i = 0; i < length; i++) {
            uint32_t magnitude = numbers[first + i] & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        largest[first / BLOCK] = most;
        float divisor = as_float(most > SMALLEST ? most : SMALLEST);
        for (int i = 0; i < length; i++)
            places[i] = to_bf16(as_bits(as_float(numbers[first + i]) / divisor));
        for (int i = 0; i < length; i++)
            codes[first + i] = nearest[places[i]];
    }
}

typedef void conversion(const struct kept *, int64_t, int64_t, uint32_t *);
static const struct {
    conversion *load, *store;
} FORMS[] = {{load_halves, store_halves}, {load_bf16, store_bf16}, {load_int8, store_int8}, {load_fp16, NULL}};

/* The calling thread's share of `length` numbers, in whole blocks. */
static int64_t share(int64_t length, int64_t *start) {
    int64_t size = (length / omp_get_num_threads() / BLOCK + 1) * BLOCK;
    *start = size * omp_get_thread_num();
    return length - *start < size ? length - *start : size;
}

/* Write what is kept to `numbers`, or keep these if `stores`. */
void convert(int threads, const struct kept *kept, int64_t length, uint32_t *numbers, int stores) {
#pragma omp parallel num_threads(threads) if (length > GRAIN)
    {
        int64_t start, count = share(length, &start);
        if (count > 0)
            (stores ? FORMS[kept->kind].store : FORMS[kept->kind].load)(kept, start, count, numbers + start);
    }
}

/* A gradient: the sum of `count` arrays, each of which is multiplied by `factor`. The sum is multiplied by both
   `scales`, and clipped to `bound`. fp32 numbers are one array, and the gradient as they are. */
struct gradient {
    int64_t count;
    const struct kept *parts;
    float factor, scales[2], bound;
};

static const float *load_gradient(const struct gradient *of, int64_t first, int64_t count, float *restrict sum) {
    if (of->parts->kind == FP32)
        return (const float *)of->parts->packed + first;
    struct gradient g = *of;
    for (int64_t i = 0; i < count; i++)
        sum[i] = -0.0f; /* what changes no number that is added to it */
    for (int64_t part = 0; part < g.count; part++) {
        uint32_t numbers[BLOCK];
        FORMS[g.parts[part].kind].load(&g.parts[part], first, count, numbers);
        for (int64_t i = 0; i < count; i++)
            sum[i] += as_float(numbers[i]) * g.factor;
    }
    for (int64_t i = 0; i < count; i++) {
        float number = sum[i] * g.scales[0] * g.scales[1];
        number = number > g.bound ? g.bound : number;
        sum[i] = number < -g.bound ? -g.bound : number;
    }
    return sum;
}

/* Factors of a step of Adam, as torch's fused kernel computes and uses them. `decay`: what weights are multiplied by;
   `penalty`: how much of them is added to gradients. */
struct adam {
    float sign, decay, penalty, weight1, beta2, weight2, step_size, correction2, eps;
};

static void adam_block(const struct adam *by, int64_t count, const float *restrict gradient, float *restrict weight,
                       float *restrict average, float *restrict square) {
    struct adam a = *by;
    int near = fabsf(a.weight1) < 0.5f;
    for (int64_t i = 0; i < count; i++) {
        float g = gradient[i] * a.sign, w = weight[i] * a.decay;
        if (a.penalty != 0.0f)
            g = fmaf(w, a.penalty, g);
        float m = near ? fmaf(a.weight1, g - average[i], average[i]) : fmaf(a.weight1 - 1.0f, g - average[i], g);
        float v = fmaf(a.weight2 * g, g, square[i] * a.beta2);
        average[i] = m;
        square[i] = v;
        weight[i] = w + a.step_size * m / (sqrtf(v) / a.correction2 + a.eps);
    }
}

/* A step of Adam. `kept`: weights, averages and averages of squares. Blocks are unpacked one at a time: larger pieces
   defeat the hardware prefetcher. fp32 numbers are stepped in place. */
void adam(int threads, const struct adam *by, int64_t length, const struct gradient *gradient,
          const struct kept kept[3]) {
#pragma omp parallel num_threads(threads) if (length > GRAIN)
    {
        int64_t start, count = share(length, &start);
        uint32_t unpacked[3][BLOCK] __attribute__((aligned(64)));
        float sum[BLOCK] __attribute__((aligned(64)));
        for (int64_t first = start; first < start + count; first += BLOCK) {
            int64_t size = start + count - first < BLOCK ? start + count - first : BLOCK;
            uint32_t *numbers[3];
            for (int i = 0; i < 3; i++) {
                numbers[i] = kept[i].kind == FP32 ? (uint32_t *)kept[i].packed + first : unpacked[i];
                if (kept[i].kind != FP32)
                    FORMS[kept[i].kind].load(&kept[i], first, size, numbers[i]);
            }
            const float *numbers_of_gradient = load_gradient(gradient, first, size, sum);
            adam_block(by, size, numbers_of_gradient, (float *)numbers[0], (float *)numbers[1], (float *)numbers[2]);
            for (int i = 0; i < 3; i++)
                if (kept[i].kind != FP32)
                    FORMS[kept[i].kind].store(&kept[i], first, size, numbers[i]);
        }
    }
}
