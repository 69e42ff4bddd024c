// Splits values into planes of bytes for `ExactQuantiser`, which says why, and joins them again: each value's bits are
// rotated left by one, and its bytes go to one plane each, least significant first. Values may be strided; planes are
// not.

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

CLONES void split_byte(const uint8_t* from, const uint8_t* before, size_t count, size_t size, uint8_t* to) {
    for (size_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(from[i * size] << 1 | before[i * size] >> 7);
}

CLONES void join_1(const uint8_t* from, size_t count, uint8_t* to) {
    for (size_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(from[i] >> 1 | from[i] << 7);
}

CLONES void join_2(const uint8_t* low, const uint8_t* high, size_t count, uint8_t* to) {
    for (size_t i = 0; i < count; ++i) {
        const uint16_t rotated = static_cast<uint16_t>(low[i] | high[i] << 8);
        const uint16_t x = static_cast<uint16_t>(rotated >> 1 | rotated << 15);
        std::memcpy(to + 2 * i, &x, 2);
    }
}

CLONES void join_byte(const uint8_t* from, const uint8_t* following, size_t count, size_t size, uint8_t* to) {
    for (size_t i = 0; i < count; ++i) to[i * size] = static_cast<uint8_t>(from[i] >> 1 | following[i] << 7);
}

struct Split {
    size_t size;                  // of a value
    uint8_t* planes[kMostBytes];  // where the next value's bytes are

    void run(const uint8_t* from, size_t count) {
        if (size == 1)
            split_1(from, count, planes[0]);
        else if (size == 2)
            split_2(from, count, planes[0], planes[1]);
        else
            for (size_t byte = 0; byte < size; ++byte)
                split_byte(from + byte, from + (byte + size - 1) % size, count, size, planes[byte]);
        for (size_t byte = 0; byte < size; ++byte) planes[byte] += count;
    }
};

struct Join {
    size_t size;                  // of a value
    uint8_t* planes[kMostBytes];  // where the next value's bytes are

    void run(uint8_t* to, size_t count) {
        if (size == 1)
            join_1(planes[0], count, to);
        else if (size == 2)
            join_2(planes[0], planes[1], count, to);
        else
            for (size_t byte = 0; byte < size; ++byte)
                join_byte(planes[byte], planes[(byte + 1) % size], count, size, to + byte);
        for (size_t byte = 0; byte < size; ++byte) planes[byte] += count;
    }
};

// Strided values, of which the last dimensions are contiguous.
struct Values {
    const Py_buffer& view;
    const size_t size;  // of a value
    int flat;           // from this dimension on they are contiguous, `run_bytes` together
    Py_ssize_t run_bytes;

    Values(const Py_buffer& view, size_t size) : view(view), size(size), flat(view.ndim - 1) {
        run_bytes = view.shape[flat];
        while (flat > 0 && view.strides[flat - 1] == run_bytes) run_bytes *= view.shape[--flat];
    }

    static bool are_in(const Py_buffer& view, Py_ssize_t size) {
        return size > 0 && size <= static_cast<Py_ssize_t>(kMostBytes) && view.itemsize == 1 && view.ndim > 0 &&
               view.shape[view.ndim - 1] % size == 0 &&
               (view.shape[view.ndim - 1] <= 1 || view.strides[view.ndim - 1] == 1);
    }

    template <class Work>
    void each_run(Work& work) const {
        if (view.len) from(static_cast<uint8_t*>(view.buf), 0, work);
    }

    template <class Work>
    void from(uint8_t* first, int dim, Work& work) const {
        if (dim == flat) return work.run(first, run_bytes / size);
        for (Py_ssize_t i = 0; i < view.shape[dim]; ++i) from(first + i * view.strides[dim], dim + 1, work);
    }
};

// Strided values, and a plane for each of their bytes.
struct Arguments {
    Buffer values, planes[kMostBytes];
    Py_ssize_t size = 0, plane_bytes = 0;  // of a value; of a plane

    // Returns whether they fit each other: planes have room for all values from `first` on.
    bool take(PyObject* object, int values_flags, PyObject* sequence, int planes_flags, Py_ssize_t first) {
        if (PyObject_GetBuffer(object, &values.view, PyBUF_STRIDES | values_flags) ||
            (size = PySequence_Size(sequence)) < 0)
            return false;
        bool fit = Values::are_in(values.view, size);
        for (Py_ssize_t i = 0; fit && i < size; ++i) {
            PyObject* plane = PySequence_GetItem(sequence, i);
            const bool is_buffer = plane && !PyObject_GetBuffer(plane, &planes[i].view, planes_flags);
            Py_XDECREF(plane);
            if (!is_buffer) return false;
            plane_bytes = planes[0].view.len;
            fit = planes[i].view.len == plane_bytes;
        }
        if (fit && first >= 0 && first <= plane_bytes && values.view.len / size <= plane_bytes - first) return true;
        PyErr_Format(PyExc_ValueError, "%zd bytes of values do not fit %zd planes of %zd bytes at %zd", values.view.len,
                     size, plane_bytes, first);
        return false;
    }

    template <class Work>
    PyObject* run(Py_ssize_t first) {
        Work work{static_cast<size_t>(size), {}};
        for (Py_ssize_t i = 0; i < size; ++i) work.planes[i] = static_cast<uint8_t*>(planes[i].view.buf) + first;
        Py_BEGIN_ALLOW_THREADS;
        Values(values.view, work.size).each_run(work);
        Py_END_ALLOW_THREADS;
        Py_RETURN_NONE;
    }
};

PyObject* py_split(PyObject*, PyObject* args) {
    PyObject *object, *sequence;
    Py_ssize_t first;
    Arguments arguments;
    if (!PyArg_ParseTuple(args, "OOn", &object, &sequence, &first) ||
        !arguments.take(object, 0, sequence, PyBUF_WRITABLE, first))
        return nullptr;
    return arguments.run<Split>(first);
}

PyObject* py_join(PyObject*, PyObject* args) {
    PyObject *object, *sequence;
    Arguments arguments;
    if (!PyArg_ParseTuple(args, "OO", &sequence, &object) ||
        !arguments.take(object, PyBUF_WRITABLE, sequence, PyBUF_SIMPLE, 0))
        return nullptr;
    return arguments.run<Join>(0);
}

PyMethodDef methods[] = {
    {"split", py_split, METH_VARARGS,
     "split(values, planes, first): write uint8 values (..., n * size) into a plane for each byte, from `first` on"},
    {"join", py_join, METH_VARARGS, "join(planes, values): write uint8 values (..., n * size) of a plane for each byte"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_exact", "The native half of `ExactQuantiser`.", 0, methods};

}  // namespace

PyMODINIT_FUNC PyInit__exact() { return PyModule_Create(&module); }
