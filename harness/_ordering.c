/* Which of many keys has the least: the twin of LeastFirst and FewestFirst in ordering.py, which
 * says what they do. Both are one binary heap of the usable keys, with each key's place in it: all
 * that an update meets lies close together, where tuples and numbers of Python lie far apart.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#define NOWHERE (-1)

typedef struct {
    double cost; /* a count below 2^53, which a double holds exactly */
    Py_ssize_t key;
} Entry;

typedef struct {
    PyObject_HEAD
    Entry *heap; /* of the usable keys */
    double *costs; /* by key */
    Py_ssize_t *places; /* by key: where it is in the heap, or NOWHERE */
    Py_ssize_t usable, keys, room;
} Order;

/* ---- The heap ---- */

static inline bool
before(Entry a, Entry b)
{
    return a.cost < b.cost || (a.cost == b.cost && a.key < b.key);
}

static inline void
put(Order *self, Py_ssize_t at, Entry entry)
{
    self->heap[at] = entry;
    self->places[entry.key] = at;
}

/* `entry` belongs where `at` is, or above or below: what is there is overwritten. */
static void
settle(Order *self, Py_ssize_t at, Entry entry)
{
    Entry *heap = self->heap;
    while (at > 0 && before(entry, heap[(at - 1) / 2])) {
        put(self, at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        Py_ssize_t child = 2 * at + 1;
        if (child + 1 < self->usable && before(heap[child + 1], heap[child]))
            child++;
        if (child >= self->usable || !before(heap[child], entry))
            break;
        put(self, at, heap[child]);
        at = child;
    }
    put(self, at, entry);
}

static void
set_usable(Order *self, Py_ssize_t key, bool usable)
{
    Py_ssize_t at = self->places[key];
    if (usable && at == NOWHERE) {
        at = self->usable++;
        settle(self, at, (Entry){self->costs[key], key});
    }
    else if (!usable && at != NOWHERE) {
        self->places[key] = NOWHERE;
        Entry last = self->heap[--self->usable];
        if (last.key != key)
            settle(self, at, last);
    }
}

static void
set_cost(Order *self, Py_ssize_t key, double cost)
{
    self->costs[key] = cost;
    if (self->places[key] != NOWHERE)
        settle(self, self->places[key], (Entry){cost, key});
}

/* ---- What both can ---- */

/* A key among the arguments; NOWHERE with an error set. */
static Py_ssize_t
key_of(Order *self, PyObject *number)
{
    Py_ssize_t key = PyNumber_AsSsize_t(number, PyExc_IndexError);
    if (key == -1 && PyErr_Occurred())
        return NOWHERE;
    if (key < 0 || key >= self->keys) {
        PyErr_Format(PyExc_IndexError, "key %zd, of %zd", key, self->keys);
        return NOWHERE;
    }
    return key;
}

static bool
takes_two(const char *called, Py_ssize_t count)
{
    if (count != 2)
        PyErr_Format(PyExc_TypeError, "%s() takes 2 arguments, found %zd", called, count);
    return count == 2;
}

static int
make_room(Order *self, Py_ssize_t room)
{
    Entry *heap = PyMem_Realloc(self->heap, (size_t)room * sizeof(Entry));
    if (heap != NULL)
        self->heap = heap;
    double *costs = PyMem_Realloc(self->costs, (size_t)room * sizeof(double));
    if (costs != NULL)
        self->costs = costs;
    Py_ssize_t *places = PyMem_Realloc(self->places, (size_t)room * sizeof(Py_ssize_t));
    if (places != NULL)
        self->places = places;
    if (heap == NULL || costs == NULL || places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->room = room;
    return 0;
}

static PyObject *
order_add(Order *self, PyObject *Py_UNUSED(none))
{
    if (self->keys == self->room && make_room(self, self->room ? 2 * self->room : 16) < 0)
        return NULL;
    Py_ssize_t key = self->keys++;
    self->costs[key] = 0.0;
    self->places[key] = NOWHERE;
    set_usable(self, key, true);
    return PyLong_FromSsize_t(key);
}

static PyObject *
order_usable(Order *self, PyObject *number)
{
    Py_ssize_t key = key_of(self, number);
    return key == NOWHERE ? NULL : PyBool_FromLong(self->places[key] != NOWHERE);
}

static PyObject *
order_n_usable(Order *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromSsize_t(self->usable);
}

static PyObject *
order_set_usable(Order *self, PyObject *const *args, Py_ssize_t count)
{
    if (!takes_two("set_usable", count))
        return NULL;
    Py_ssize_t key = key_of(self, args[0]);
    int usable = key == NOWHERE ? -1 : PyObject_IsTrue(args[1]);
    if (usable < 0)
        return NULL;
    set_usable(self, key, usable);
    Py_RETURN_NONE;
}

static PyObject *
order_least(Order *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromSsize_t(self->usable ? self->heap[0].key : NOWHERE);
}

static Py_ssize_t
order_length(Order *self)
{
    return self->keys;
}

static void
order_dealloc(Order *self)
{
    PyMem_Free(self->heap);
    PyMem_Free(self->costs);
    PyMem_Free(self->places);
    Py_TYPE(self)->tp_free(self);
}

/* ---- Costs ---- */

static PyObject *
least_update(Order *self, PyObject *const *args, Py_ssize_t count)
{
    if (!takes_two("update", count))
        return NULL;
    Py_ssize_t key = key_of(self, args[0]);
    if (key == NOWHERE)
        return NULL;
    double cost = PyFloat_AsDouble(args[1]);
    if (cost == -1.0 && PyErr_Occurred())
        return NULL;
    set_cost(self, key, cost);
    Py_RETURN_NONE;
}

static PyObject *
least_cost(Order *self, PyObject *number)
{
    Py_ssize_t key = key_of(self, number);
    return key == NOWHERE ? NULL : PyFloat_FromDouble(self->costs[key]);
}

/* ---- Counts ---- */

static PyObject *
fewest_change(Order *self, PyObject *const *args, Py_ssize_t count)
{
    if (!takes_two("change", count))
        return NULL;
    Py_ssize_t key = key_of(self, args[0]);
    if (key == NOWHERE)
        return NULL;
    long by = PyLong_AsLong(args[1]);
    if (by == -1 && PyErr_Occurred())
        return NULL;
    set_cost(self, key, self->costs[key] + (double)by);
    Py_RETURN_NONE;
}

static PyObject *
fewest_count(Order *self, PyObject *number)
{
    Py_ssize_t key = key_of(self, number);
    return key == NOWHERE ? NULL : PyLong_FromDouble(self->costs[key]);
}

/* ---- The types ---- */

#define OF_BOTH \
    {"add", (PyCFunction)order_add, METH_NOARGS, "Another key, usable and at 0."}, \
    {"usable", (PyCFunction)order_usable, METH_O, "Whether a key is."}, \
    {"n_usable", (PyCFunction)order_n_usable, METH_NOARGS, "How many are."}, \
    {"set_usable", (PyCFunction)(void (*)(void))order_set_usable, METH_FASTCALL, "Or not."}, \
    {"least", (PyCFunction)order_least, METH_NOARGS, "The usable key of least; -1: none is."}

static PyMethodDef least_methods[] = {
    OF_BOTH,
    {"update", (PyCFunction)(void (*)(void))least_update, METH_FASTCALL, "A key costs this now."},
    {"cost", (PyCFunction)least_cost, METH_O, "What a key costs."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef fewest_methods[] = {
    OF_BOTH,
    {"change", (PyCFunction)(void (*)(void))fewest_change, METH_FASTCALL, "A key has more now."},
    {"count", (PyCFunction)fewest_count, METH_O, "How many a key has."},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods order_as_sequence = {.sq_length = (lenfunc)order_length};

static PyTypeObject LeastFirst_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "harness._ordering.LeastFirst",
    .tp_doc = "See harness.ordering.LeastFirst.",
    .tp_basicsize = sizeof(Order),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)order_dealloc,
    .tp_methods = least_methods,
    .tp_as_sequence = &order_as_sequence,
};

static PyTypeObject FewestFirst_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "harness._ordering.FewestFirst",
    .tp_doc = "See harness.ordering.FewestFirst.",
    .tp_basicsize = sizeof(Order),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)order_dealloc,
    .tp_methods = fewest_methods,
    .tp_as_sequence = &order_as_sequence,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "harness._ordering",
    .m_doc = "The twin in C of harness.ordering.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__ordering(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    if (PyModule_AddType(made, &LeastFirst_type) < 0 ||
        PyModule_AddType(made, &FewestFirst_type) < 0 ||
        PyModule_AddStringConstant(made, "SOURCE_SHA256", SOURCE_SHA256) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
