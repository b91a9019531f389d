// Calls compiled kernels from Python: a function for each, of tensors and whole numbers, as fast as one that is written
// for its kernel alone (`psg_fx/torch_private/kernel_files.py`).

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <alloca.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>

namespace {

using Kernel = void (*)(void* const*);
using DataOf = void* (*)(PyObject*);

// A kernel, what gives the address of a tensor's data, and of each argument whether it is a tensor ('t') or a number.
struct Bound {
    Kernel kernel;
    DataOf data_of;
    Py_ssize_t count;
    char* kinds;
};

const char* const NAME = "psg_fx.kernel";

// Writes the arguments into an array; false where Python has an error.
bool load(const Bound& bound, PyObject* const* args, void** into) {
    for (Py_ssize_t i = 0; i < bound.count; ++i) {
        if (bound.kinds[i] == 't') {
            into[i] = bound.data_of(args[i]);
            continue;
        }
        const Py_ssize_t number = PyLong_AsSsize_t(args[i]);
        if (number == -1 && PyErr_Occurred()) return false;
        into[i] = reinterpret_cast<void*>(static_cast<std::intptr_t>(number));
    }
    return true;
}

PyObject* call(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
    const auto& bound = *static_cast<const Bound*>(PyCapsule_GetPointer(capsule, NAME));
    if (count != bound.count) {
        return PyErr_Format(PyExc_TypeError, "a kernel of %zd arguments was given %zd", bound.count, count);
    }
    try {
        const auto into = static_cast<void**>(alloca(sizeof(void*) * static_cast<size_t>(count)));
        if (!load(bound, args, into)) return nullptr;
        bound.kernel(into);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
        return nullptr;
    }
    Py_RETURN_NONE;
}

void forget(Bound* bound) {
    std::free(bound->kinds);
    delete bound;
}

void forget_capsule(PyObject* capsule) { forget(static_cast<Bound*>(PyCapsule_GetPointer(capsule, NAME))); }

PyMethodDef METHOD = {"kernel", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, ""};

}  // namespace

extern "C" PyObject* function(Kernel kernel, DataOf data_of, const char* kinds) {
    const auto bound = new Bound{kernel, data_of, static_cast<Py_ssize_t>(std::strlen(kinds)), strdup(kinds)};
    PyObject* capsule = PyCapsule_New(bound, NAME, forget_capsule);
    if (capsule == nullptr) {
        forget(bound);
        return nullptr;
    }
    PyObject* found = PyCFunction_New(&METHOD, capsule);
    Py_DECREF(capsule);
    return found;
}
