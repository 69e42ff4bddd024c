// What `klt` does before and after its matrix products, each in one pass over memory. docs/format.md defines it.
//
// restore scales the product, adds the mean, rotates K, and rounds. restore_integers does the same after a product of
// integers (integer_product.h); klt.py has the other products. centre makes the factor that quantise multiplies: it
// undoes the rotation and subtracts the mean. round_steps makes integers from coefficients.

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

#include "integer_product.h"

namespace {

enum Type : int { kFloat32, kBfloat16, kFloat16 };

float bfloat16_value(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

float float16_value(uint16_t x) {
    const uint32_t magnitude = (x & 0x7fffu) << 13;
    float value, unit = 0x1p112f;  // 2^-14 is the smallest normal number of one type, and 2^-126 of the other
    std::memcpy(&value, &magnitude, 4);
    value *= unit;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (magnitude >= 0x7c00u << 13) bits |= 0x7f800000;  // infinite, or no number
    bits |= (x & 0x8000u) << 16;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounds to the nearest value, ties to even. What is too large becomes infinite.
uint16_t bfloat16_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The same for magnitudes up to 65504. (_Float16 would need GCC 12.)
uint16_t float16_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    float shifted;
    std::memcpy(&shifted, &size, 4);
    shifted += 0.5f;  // rounds what is below 2^-14 to a multiple of 2^-24
    uint32_t small;
    std::memcpy(&small, &shifted, 4);
    const uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    return static_cast<uint16_t>(sign | (size < 113u << 23 ? small - 0x3f000000 : normal));
}

struct Cell {
    size_t tokens, heads, k_dim, v_dim;  // heads: of all its layers
    size_t pairs;                        // of channels of a K head that rotate
    int is_interleaved;                  // a pair is channels 2i and 2i + 1, and not i and i + pairs
    Type product_type, type;
    const void* product;  // (tokens, channels): those of K, then those of V; restore_integers makes its own
    const float* scales;  // (tokens,)
    const float* mean;    // (channels,)
    const float* table;   // (rotations, tokens, 2 * pairs): cosines, then sines
    void *k, *v;          // (tokens, heads, dim)
    size_t layers;
    const int64_t* turns;  // (layers,): which rotation each layer has

    size_t channels() const { return heads * (k_dim + v_dim); }
};

CLONES void scale_row(const Cell& c, size_t token, const void* product, float* row) {
    const size_t channels = c.channels();
    const float scale = c.scales[token];
    const float* mean = c.mean;
    if (c.product_type == kBfloat16) {
        const uint16_t* x = static_cast<const uint16_t*>(product);
        for (size_t i = 0; i < channels; ++i) row[i] = bfloat16_value(x[i]) * scale + mean[i];
    } else {
        const float* x = static_cast<const float*>(product);
        for (size_t i = 0; i < channels; ++i) row[i] = x[i] * scale + mean[i];
    }
}

// direction: 1, or -1 to undo a rotation.
CLONES void rotate_row(const Cell& c, size_t token, float direction, float* row) {
    const size_t pairs = c.pairs, layer_heads = c.heads / c.layers;
    const size_t step = c.is_interleaved ? 2 : 1, apart = c.is_interleaved ? 1 : pairs;
    for (size_t h = 0; h < c.heads; ++h) {
        const float* cos = c.table + (c.turns[h / layer_heads] * c.tokens + token) * 2 * pairs;
        const float* sin = cos + pairs;
        float* head = row + h * c.k_dim;
        for (size_t i = 0; i < pairs; ++i) {
            const float a = head[i * step], b = head[i * step + apart];
            head[i * step] = a * cos[i] - direction * b * sin[i];
            head[i * step + apart] = b * cos[i] + direction * a * sin[i];
        }
    }
}

CLONES void store_row(const float* row, size_t count, Type type, void* out, size_t at) {
    if (type == kBfloat16) {
        uint16_t* to = static_cast<uint16_t*>(out) + at;
        for (size_t i = 0; i < count; ++i) to[i] = bfloat16_of(row[i]);
    } else if (type == kFloat16) {
        uint16_t* to = static_cast<uint16_t*>(out) + at;
        for (size_t i = 0; i < count; ++i) to[i] = float16_of(std::clamp(row[i], -65504.0f, 65504.0f));
    } else {
        std::memcpy(static_cast<float*>(out) + at, row, 4 * count);
    }
}

// row: room for a token's channels.
void restore_token(const Cell& c, size_t token, const void* product, float* row) {
    const size_t k = c.heads * c.k_dim, v = c.heads * c.v_dim;
    scale_row(c, token, product, row);
    if (c.pairs) rotate_row(c, token, 1, row);
    store_row(row, k, c.type, c.k, token * k);
    store_row(row + k, v, c.type, c.v, token * v);
}

void restore(const Cell& c) {
    std::vector<float> row(c.channels());
    const size_t token_bytes = c.channels() * (c.product_type == kFloat32 ? 4 : 2);
    for (size_t token = 0; token < c.tokens; ++token)
        restore_token(c, token, static_cast<const char*>(c.product) + token * token_bytes, row.data());
}

void restore_integers(const Cell& c, const integer_product::Product& p) {
    using namespace integer_product;
    Block block(p);
    std::vector<float> product(kBlock * p.stride()), row(c.channels());
    for (size_t first = 0; first < c.tokens; first += kBlock) {
        read_block(p, first, block);
        multiply(p, block, std::min(kBlock, c.tokens - first), product.data());
        for (size_t token = first; token < std::min(first + kBlock, c.tokens); ++token)
            restore_token(c, token, &product[(token - first) * p.stride()], row.data());
    }
}

const float kLeastNorm = 1e-6f;  // as in sensitivity.py
const float kMostDeviations = 8;
const int kRandomSums = 8;       // of the coefficients that are not kept; as in klt.py
const float kDoubtful = 128;     // the mean square of those sums, in steps, above which klt.py computes them
const float kRoundsToWhole = 0x1.8p23f;  // added and subtracted: rounds magnitudes to 2^22, ties to even
const int kMostExponent = 8, kUnit = 128, kZero = 128;

struct Values {
    const char* data;
    size_t token_stride, layer_stride;  // bytes
};

CLONES void load(const void* from, size_t count, Type type, float* row) {
    if (type == kFloat32) {
        std::memcpy(row, from, 4 * count);
    } else if (type == kBfloat16) {
        const uint16_t* x = static_cast<const uint16_t*>(from);
        for (size_t i = 0; i < count; ++i) row[i] = bfloat16_value(x[i]);
    } else {
        const uint16_t* x = static_cast<const uint16_t*>(from);
        for (size_t i = 0; i < count; ++i) row[i] = float16_value(x[i]);
    }
}

// The sum of 16 interleaved partial sums, so that compilers use vectors.
float sum_of(const float* partial) {
    float sum = 0;
    for (int i = 0; i < 16; ++i) sum += partial[i];
    return sum;
}

CLONES float squares(const float* x, size_t count) {
    float partial[16] = {};
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; ++j) partial[j] += x[i + j] * x[i + j];
    for (; i < count; ++i) partial[0] += x[i] * x[i];
    return sum_of(partial);
}

CLONES bool all_finite(const float* x, size_t count) {
    uint32_t bad = 0;
    for (size_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bad |= (bits & 0x7f800000) == 0x7f800000;
    }
    return !bad;
}

CLONES void subtract(const float* mean, size_t count, float* row) {
    for (size_t i = 0; i < count; ++i) row[i] -= mean[i];
}

// Writes the product's left factor and the logarithms of norms, and returns whether all values are finite.
bool centre(const Cell& c, const Values& k, const Values& v, void* centred, float* log_norms) {
    std::vector<float> row(c.channels());
    const size_t heads = c.heads / c.layers;
    for (size_t token = 0; token < c.tokens; ++token) {
        float* at = row.data();
        float* norm = log_norms + token * 2 * c.heads;
        for (const auto& [x, dim] : {std::pair(k, c.k_dim), std::pair(v, c.v_dim)})
            for (size_t layer = 0; layer < c.layers; ++layer) {
                load(x.data + token * x.token_stride + layer * x.layer_stride, heads * dim, c.type, at);
                for (size_t head = 0; head < heads; ++head, at += dim)
                    *norm++ = std::log(std::max(squares(at, dim), kLeastNorm * kLeastNorm)) / 2;
            }
        if (!all_finite(row.data(), row.size())) return false;
        if (c.pairs) rotate_row(c, token, -1, row.data());
        subtract(c.mean, row.size(), row.data());
        store_row(row.data(), row.size(), c.product_type, centred, token * row.size());
    }
    return true;
}

struct Rows {
    size_t columns, kept, wide;  // columns: of the product; after the kept coefficients come the sums of the others
    const float *inverse_spread, *weights;  // (kept,); weights also have one a norm, and a constant
    double most_cost;                       // the largest magnitude of the others' part of the cost
    const float* limits;                    // (kept,)
    const int64_t *which, *bits;            // (wide,)

    size_t count() const { return kept + wide; }
};

CLONES float log_cost(const Rows& r, const float* coefficients) {
    float partial[16] = {};
    const float *weights = r.weights, *inverse_spread = r.inverse_spread;
    size_t i = 0;
    for (; i + 16 <= r.kept; i += 16)
        for (int j = 0; j < 16; ++j)
            partial[j] += std::clamp(coefficients[i + j] * inverse_spread[i + j], -kMostDeviations, kMostDeviations) *
                          weights[i + j];
    for (; i < r.kept; ++i)
        partial[0] += std::clamp(coefficients[i] * inverse_spread[i], -kMostDeviations, kMostDeviations) * weights[i];
    return sum_of(partial);
}

// Rounds to whole steps, and returns whether integers can hold the token.
CLONES bool whole_steps(const Rows& r, const float* coefficients, float inverse_step, int32_t* n) {
    uint32_t bad = 0;
    const float* limits = r.limits;
    for (size_t i = 0; i < r.kept; ++i) {
        const float whole = coefficients[i] * inverse_step + kRoundsToWhole - kRoundsToWhole;
        bad |= !(std::fabs(whole) <= limits[i]);
        n[i] = static_cast<int32_t>(whole);
    }
    return !bad;
}

CLONES void to_bytes(const Rows& r, const int32_t* n, uint8_t* bytes) {
    for (size_t i = 0; i < r.kept; ++i) bytes[i] = static_cast<uint8_t>(n[i] + kZero);
    for (size_t i = 0; i < r.wide; ++i) {
        const int32_t value = n[r.which[i]], half = 1 << (r.bits[i] - 1);
        const int32_t low = ((value + half) & (2 * half - 1)) - half;
        bytes[r.which[i]] = static_cast<uint8_t>(low + kZero);
        bytes[r.kept + i] = static_cast<uint8_t>(((value - low) >> r.bits[i]) + kZero);
    }
}

CLONES void transpose(const uint8_t* bytes, size_t tokens, size_t count, size_t stride, uint8_t* out) {
    for (size_t i = 0; i < count; ++i)
        for (size_t t = 0; t < tokens; ++t) out[i * stride + t] = bytes[t * count + i];
}

bool is_doubtful(const float* sums, float inverse_step) {
    return !(squares(sums, kRandomSums) / kRandomSums * inverse_step * inverse_step <= kDoubtful);
}

// Writes each token's exponent, 0 where its values are to be kept exact; the integers, (count, tokens); and whether one
// of a token's coefficients that are not kept may be out of bounds.
void round_steps(const Cell& c, const Rows& r, size_t sinks, float step, const float* log_norms, uint8_t* exponents,
                 uint8_t* integers, uint8_t* doubtful) {
    const size_t kTokens = 64, norms = 2 * c.heads;
    const float most_cost = static_cast<float>(r.most_cost);
    std::vector<float> row(r.columns);
    std::vector<int32_t> n(r.kept);
    std::vector<uint8_t> bytes(kTokens * r.count());
    const size_t size = c.product_type == kFloat32 ? 4 : 2;
    for (size_t first = 0; first < c.tokens; first += kTokens) {
        const size_t tokens = std::min(kTokens, c.tokens - first);
        for (size_t t = 0; t < tokens; ++t) {
            const size_t token = first + t;
            load(static_cast<const char*>(c.product) + token * r.columns * size, r.columns, c.product_type, row.data());
            const float* others = row.data() + r.kept;
            float cost = log_cost(r, row.data()) + std::clamp(others[0], -most_cost, most_cost);
            cost += r.weights[r.kept + norms];
            for (size_t i = 0; i < norms; ++i) cost += log_norms[token * norms + i] * r.weights[r.kept + i];
            const float exponent = std::clamp(std::nearbyint(-cost / std::log(2.0f)), -1.0f * kMostExponent,
                                              1.0f * kMostExponent);
            const float inverse_step = 1 / (std::exp2(exponent / 2) * step);
            const bool fits = token >= sinks && whole_steps(r, row.data(), inverse_step, n.data());
            if (!fits) std::fill(n.begin(), n.end(), 0);
            doubtful[token] = fits && is_doubtful(others + 1, inverse_step);
            exponents[token] = fits ? static_cast<uint8_t>(exponent + kUnit) : 0;
            to_bytes(r, n.data(), bytes.data() + t * r.count());
        }
        transpose(bytes.data(), tokens, r.count(), c.tokens, integers + first);
    }
}

PyObject* py_restore(PyObject*, PyObject* args) {
    Cell c{};
    if (!PyArg_ParseTuple(args, "nnnnnnpiiKKKKKKK", &c.tokens, &c.heads, &c.layers, &c.k_dim, &c.v_dim, &c.pairs, &c.is_interleaved,
                          &c.product_type, &c.type, &c.product, &c.scales, &c.mean, &c.table, &c.k, &c.v, &c.turns))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    restore(c);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* py_restore_integers(PyObject*, PyObject* args) {
    Cell c{};
    integer_product::Product p{};
    if (!PyArg_ParseTuple(args, "nnnnnnpinnnpKKKKKKKKKKKKK", &c.tokens, &c.heads, &c.layers, &c.k_dim, &c.v_dim, &c.pairs,
                          &c.is_interleaved, &c.type, &p.row_stride, &p.pairs, &p.rare, &p.is_portable, &c.scales,
                          &c.mean, &c.table, &c.k, &c.v, &p.integers, &p.frequent_rows, &p.shifts, &p.rare_rows,
                          &p.frequent, &p.rare_matrix, &p.units, &c.turns))
        return nullptr;
    p.tokens = c.tokens, p.channels = c.channels(), c.product_type = kFloat32;
    Py_BEGIN_ALLOW_THREADS;
    restore_integers(c, p);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* py_centre(PyObject*, PyObject* args) {
    Cell c{};
    Values k, v;
    void* centred;
    float* log_norms;
    if (!PyArg_ParseTuple(args, "nnnnnnpiiKKKnnKnnKKK", &c.tokens, &c.heads, &c.layers, &c.k_dim, &c.v_dim, &c.pairs,
                          &c.is_interleaved, &c.product_type, &c.type, &c.mean, &c.table, &k.data, &k.token_stride,
                          &k.layer_stride, &v.data, &v.token_stride, &v.layer_stride, &centred, &log_norms, &c.turns))
        return nullptr;
    bool is_finite;
    Py_BEGIN_ALLOW_THREADS;
    is_finite = centre(c, k, v, centred, log_norms);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(is_finite);
}

PyObject* py_round_steps(PyObject*, PyObject* args) {
    Cell c{};
    Rows r;
    size_t sinks;
    double step;
    const float* log_norms;
    uint8_t *exponents, *integers, *doubtful;
    if (!PyArg_ParseTuple(args, "nnnnnnddiKKKKKKKKKK", &c.tokens, &c.heads, &r.columns, &r.kept, &r.wide, &sinks, &step,
                          &r.most_cost, &c.product_type, &c.product, &r.inverse_spread, &r.weights, &r.limits, &r.which,
                          &r.bits, &log_norms, &exponents, &integers, &doubtful))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    round_steps(c, r, sinks, static_cast<float>(step), log_norms, exponents, integers, doubtful);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

const char kDoc[] = "See _klt.pyi. It takes addresses: klt.py alone calls it.";

PyMethodDef methods[] = {
    {"restore", py_restore, METH_VARARGS, kDoc},
    {"restore_integers", py_restore_integers, METH_VARARGS, kDoc},
    {"centre", py_centre, METH_VARARGS, kDoc},
    {"round_steps", py_round_steps, METH_VARARGS, kDoc},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_klt", "The native half of klt.py.", 0, methods};

}  // namespace

static_assert(sizeof(void*) == sizeof(unsigned long long) && sizeof(size_t) == sizeof(Py_ssize_t), "64 bits");

PyMODINIT_FUNC PyInit__klt() { return PyModule_Create(&module); }
