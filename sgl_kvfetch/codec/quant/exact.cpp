// Splits values into planes of bytes for exact.py, which says why: each value's bits are rotated left by one, and its
// bytes go to one plane each, least significant first. Values may be strided; planes are not.

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

namespace {

constexpr size_t kMostBytes = 8;  // of a value

struct Buffer {
    Py_buffer view{};
    ~Buffer() {
        if (view.obj) PyBuffer_Release(&view);
    }
};

CLONES void split_1(const uint8_t* from, size_t count, uint8_t* to) {
    for (size_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(from[i] << 1 | from[i] >> 7);
}

CLONES void split_2(const uint8_t* from, size_t count, uint8_t* low, uint8_t* high) {
    for (size_t i = 0; i < count; ++i) {
        uint16_t x;
        std::memcpy(&x, from + 2 * i, 2);
        const uint16_t rotated = static_cast<uint16_t>(x << 1 | x >> 15);
        low[i] = static_cast<uint8_t>(rotated);
        high[i] = static_cast<uint8_t>(rotated >> 8);
    }
}

CLONES void split_any(const uint8_t* from, size_t count, size_t size, size_t plane_bytes, uint8_t* to) {
    for (size_t byte = 0; byte < size; ++byte) {
        const size_t before = (byte + size - 1) % size;
        for (size_t i = 0; i < count; ++i)
            to[byte * plane_bytes + i] = static_cast<uint8_t>(from[i * size + byte] << 1 | from[i * size + before] >> 7);
    }
}

struct Split {
    size_t size, plane_bytes;  // of a value; of a plane
    uint8_t* next;             // in the first plane

    void run(const uint8_t* from, size_t count) {
        if (size == 1)
            split_1(from, count, next);
        else if (size == 2)
            split_2(from, count, next, next + plane_bytes);
        else
            split_any(from, count, size, plane_bytes, next);
        next += count;
    }

    // Splits the values of all dimensions from `dim` on. Those from `flat` on are contiguous, `run_bytes` together.
    void all(const uint8_t* from, const Py_buffer& values, int dim, int flat, size_t run_bytes) {
        if (dim == flat) return run(from, run_bytes / size);
        for (Py_ssize_t i = 0; i < values.shape[dim]; ++i)
            all(from + i * values.strides[dim], values, dim + 1, flat, run_bytes);
    }
};

PyObject* py_split(PyObject*, PyObject* args) {
    PyObject* object;
    Buffer values, planes;
    Py_ssize_t size, first;
    if (!PyArg_ParseTuple(args, "Onw*n", &object, &size, &planes.view, &first) ||
        PyObject_GetBuffer(object, &values.view, PyBUF_STRIDES))
        return nullptr;
    const Py_buffer& from = values.view;
    const bool has_values = size > 0 && size <= static_cast<Py_ssize_t>(kMostBytes) && from.itemsize == 1 &&
                            from.ndim > 0 && from.shape[from.ndim - 1] % size == 0 &&
                            (from.shape[from.ndim - 1] <= 1 || from.strides[from.ndim - 1] == 1);
    const Py_ssize_t plane_bytes = has_values ? planes.view.len / size : 0;
    if (!has_values || planes.view.len % size || first < 0 || first > plane_bytes ||
        from.len / size > plane_bytes - first) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of values of %zd bytes do not fit planes of %zd bytes at %zd", from.len,
                     size, planes.view.len, first);
        return nullptr;
    }
    int flat = from.ndim - 1;
    Py_ssize_t run_bytes = from.shape[flat];
    while (flat > 0 && from.strides[flat - 1] == run_bytes) run_bytes *= from.shape[--flat];
    Py_BEGIN_ALLOW_THREADS;
    Split split{static_cast<size_t>(size), static_cast<size_t>(plane_bytes),
                static_cast<uint8_t*>(planes.view.buf) + first};
    if (from.len) split.all(static_cast<const uint8_t*>(from.buf), from, 0, flat, static_cast<size_t>(run_bytes));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"split", py_split, METH_VARARGS,
     "split(values, size, planes, first): write uint8 values (..., n * size) from element `first` on into `size` planes"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_exact", "The native half of exact.py.", 0, methods};

}  // namespace

PyMODINIT_FUNC PyInit__exact() { return PyModule_Create(&module); }
