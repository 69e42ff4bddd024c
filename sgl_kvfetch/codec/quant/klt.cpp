// What `klt` does to the product of its integers and its matrix, in one pass over memory: scale, mean, rotation of K,
// rounding. klt.py computes the product, and docs/format.md says what all of it means.

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

namespace {

enum Type { kFloat32, kBfloat16, kFloat16 };

float bfloat16_value(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
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
    bool is_interleaved;                 // a pair is channels 2i and 2i + 1, and not i and i + pairs
    Type product_type, type;
    const void* product;  // (tokens, channels): those of K, then those of V
    const float* scales;  // (tokens,)
    const float* mean;    // (channels,)
    const float* table;   // (tokens, 2 * pairs): cosines, then sines
    void *k, *v;          // (tokens, heads, dim)

    size_t channels() const { return heads * (k_dim + v_dim); }
};

CLONES void scale_row(const Cell& c, size_t token, float* row) {
    const size_t channels = c.channels();
    const float scale = c.scales[token];
    const float* mean = c.mean;
    if (c.product_type == kBfloat16) {
        const uint16_t* x = static_cast<const uint16_t*>(c.product) + token * channels;
        for (size_t i = 0; i < channels; ++i) row[i] = bfloat16_value(x[i]) * scale + mean[i];
    } else {
        const float* x = static_cast<const float*>(c.product) + token * channels;
        for (size_t i = 0; i < channels; ++i) row[i] = x[i] * scale + mean[i];
    }
}

CLONES void rotate_row(const Cell& c, size_t token, float* row) {
    const size_t pairs = c.pairs;
    const float *cos = c.table + token * 2 * pairs, *sin = cos + pairs;
    const size_t step = c.is_interleaved ? 2 : 1, apart = c.is_interleaved ? 1 : pairs;
    for (size_t h = 0; h < c.heads; ++h) {
        float* head = row + h * c.k_dim;
        for (size_t i = 0; i < pairs; ++i) {
            const float a = head[i * step], b = head[i * step + apart];
            head[i * step] = a * cos[i] - b * sin[i];
            head[i * step + apart] = b * cos[i] + a * sin[i];
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

void restore(const Cell& c) {
    std::vector<float> row(c.channels());
    const size_t k = c.heads * c.k_dim, v = c.heads * c.v_dim;
    for (size_t token = 0; token < c.tokens; ++token) {
        scale_row(c, token, row.data());
        if (c.pairs) rotate_row(c, token, row.data());
        store_row(row.data(), k, c.type, c.k, token * k);
        store_row(row.data() + k, v, c.type, c.v, token * v);
    }
}

PyObject* py_restore(PyObject*, PyObject* args) {
    Cell c;
    unsigned long long product, scales, mean, table, k, v;
    int product_type, type, is_interleaved;
    Py_ssize_t tokens, heads, k_dim, v_dim, pairs;
    if (!PyArg_ParseTuple(args, "nnnnnpiiKKKKKK", &tokens, &heads, &k_dim, &v_dim, &pairs, &is_interleaved,
                          &product_type, &type, &product, &scales, &mean, &table, &k, &v))
        return nullptr;
    c.tokens = tokens, c.heads = heads, c.k_dim = k_dim, c.v_dim = v_dim, c.pairs = pairs;
    c.is_interleaved = is_interleaved;
    c.product_type = static_cast<Type>(product_type), c.type = static_cast<Type>(type);
    c.product = reinterpret_cast<const void*>(product);
    c.scales = reinterpret_cast<const float*>(scales);
    c.mean = reinterpret_cast<const float*>(mean);
    c.table = reinterpret_cast<const float*>(table);
    c.k = reinterpret_cast<void*>(k), c.v = reinterpret_cast<void*>(v);
    Py_BEGIN_ALLOW_THREADS;
    restore(c);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"restore", py_restore, METH_VARARGS, "See klt.py, which alone calls it: it takes addresses."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_klt", "The native half of klt.py.", 0, methods};

}  // namespace

PyMODINIT_FUNC PyInit__klt() { return PyModule_Create(&module); }
