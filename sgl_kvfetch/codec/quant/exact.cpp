// Splits values into planes of bytes for `ExactQuantiser`, which says why, and joins them again: each value's bits are
// rotated left by one, and its bytes go to one plane each, least significant first. Values may be strided; planes are
// not. Values may be joined right into pages of a pool, wherever these are.

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <vector>

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
        skip(count);
    }

    void skip(size_t count) {
        for (size_t byte = 0; byte < size; ++byte) planes[byte] += count;
    }
};

// Strided values, of which the last dimensions are contiguous.
struct Values {
    const Py_buffer& view;
    const size_t size;  // of a value
    int flat;           // from this dimension on they are contiguous, `run_bytes` together
    Py_ssize_t run_bytes;

    // `first`: the first dimension that may be one of those.
    Values(const Py_buffer& view, size_t size, int first = 0) : view(view), size(size), flat(view.ndim - 1) {
        run_bytes = view.shape[flat];
        while (flat > first && view.strides[flat - 1] == run_bytes) run_bytes *= view.shape[--flat];
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

    // Works on what begins at `first`, of the dimensions from `dim` on.
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
        bool fit;
        if (!get(object, values_flags, sequence, planes_flags, fit)) return false;
        if (fit && first >= 0 && first <= plane_bytes && values.view.len / size <= plane_bytes - first) return true;
        PyErr_Format(PyExc_ValueError, "%zd bytes of values do not fit %zd planes of %zd bytes at %zd", values.view.len,
                     size, plane_bytes, first);
        return false;
    }

    // Returns whether there are buffers. `fit`: whether the values are of `size` bytes, and the planes are equally long.
    bool get(PyObject* object, int values_flags, PyObject* sequence, int planes_flags, bool& fit) {
        if (PyObject_GetBuffer(object, &values.view, PyBUF_STRIDES | values_flags) ||
            (size = PySequence_Size(sequence)) < 0)
            return false;
        fit = Values::are_in(values.view, size);
        for (Py_ssize_t i = 0; fit && i < size; ++i) {
            PyObject* plane = PySequence_GetItem(sequence, i);
            const bool is_buffer = plane && !PyObject_GetBuffer(plane, &planes[i].view, planes_flags);
            Py_XDECREF(plane);
            if (!is_buffer) return false;
            plane_bytes = planes[0].view.len;
            fit = planes[i].view.len == plane_bytes;
        }
        return true;
    }

    template <class Work>
    Work work(Py_ssize_t first) {
        Work work{static_cast<size_t>(size), {}};
        for (Py_ssize_t i = 0; i < size; ++i) work.planes[i] = static_cast<uint8_t*>(planes[i].view.buf) + first;
        return work;
    }

    template <class Work>
    PyObject* run(Py_ssize_t first) {
        Work work = this->work<Work>(first);
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
    Buffer places;
    Arguments arguments;
    bool fit;
    if (!PyArg_ParseTuple(args, "OOy*", &sequence, &object, &places.view) ||
        !arguments.get(object, PyBUF_WRITABLE, sequence, PyBUF_SIMPLE, fit))
        return nullptr;
    const Py_buffer& view = arguments.values.view;
    const Py_ssize_t count = places.view.len / static_cast<Py_ssize_t>(sizeof(int64_t));
    Py_ssize_t page_bytes = 1;
    for (int dim = 1; dim < view.ndim; ++dim) page_bytes *= view.shape[dim];
    fit = fit && view.ndim > 1 && places.view.len % sizeof(int64_t) == 0 && page_bytes > 0 &&
          arguments.plane_bytes / (page_bytes / arguments.size) == count &&
          arguments.plane_bytes % (page_bytes / arguments.size) == 0;
    if (!fit) {
        PyErr_Format(PyExc_ValueError, "%zd planes of %zd bytes do not fit %zd pages of %zd bytes", arguments.size,
                     arguments.plane_bytes, count, page_bytes);
        return nullptr;
    }
    std::vector<int64_t> where(count);
    std::memcpy(where.data(), places.view.buf, places.view.len);
    for (int64_t place : where)
        if (place < -1 || place >= view.shape[0]) {
            PyErr_Format(PyExc_ValueError, "page %lld is not one of %zd", static_cast<long long>(place), view.shape[0]);
            return nullptr;
        }
    Join work = arguments.work<Join>(0);
    Py_BEGIN_ALLOW_THREADS;
    const Values values(view, work.size, 1);
    for (int64_t place : where)
        if (place >= 0)
            values.from(static_cast<uint8_t*>(view.buf) + place * view.strides[0], 1, work);
        else
            work.skip(page_bytes / work.size);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"split", py_split, METH_VARARGS,
     "split(values, planes, first): write uint8 values (..., n * size) into a plane for each byte, from `first` on"},
    {"join", py_join, METH_VARARGS,
     "join(planes, pages, places): write the values of planes, a page's after another's, into uint8 pages (pages, "
     "..., n * size): into those that int64 places say, and nowhere for -1"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_exact", "The native half of `ExactQuantiser`.", 0, methods};

}  // namespace

PyMODINIT_FUNC PyInit__exact() { return PyModule_Create(&module); }
