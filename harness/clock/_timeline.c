/* What keeps and runs the handles of a virtual loop: the twin of timeline.py, which says what it
 * does and why. Timers are a binary heap of structs ordered by time and number, what is ready is a
 * ring, and a handle keeps its few arguments in itself.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "Handles are kept for reuse, which needs the interpreter's lock"
#endif

/* Cancelled timers are swept once they are more than this many and more than half of the heap. */
#define SWEEP_AT 128
/* Arguments that a handle keeps in itself; more are a tuple. */
#define OWN_ARGS 4
/* Handles that are kept for reuse. */
#define SPARE_HANDLES 512
#define BUSY_PASSES 1000000

struct timeline;

typedef struct {
    PyObject_HEAD
    PyObject *callback; /* NULL, like the context and the arguments, once cancelled */
    PyObject *context;
    struct timeline *kept_by; /* borrowed, and only while it is in the heap */
    double when_s;
    int argc; /* IN_TUPLE: args[0] is a tuple of all */
    char cancelled;
    PyObject *args[OWN_ARGS];
} Handle;

#define IN_TUPLE (-1)

typedef struct {
    double when_s;
    uint64_t number;
    Handle *handle; /* owned */
} Timer;

typedef struct timeline {
    PyObject_HEAD
    Timer *heap;
    Py_ssize_t timers, heap_room;
    Handle **ring; /* owned handles, `ready` of them from `first` on; its room is a power of two */
    Py_ssize_t first, ready, ring_room;
    double now_s, until_s;
    PyObject *now; /* now_s as an object, or NULL */
    uint64_t set; /* timers so far */
    Py_ssize_t cancelled; /* timers in the heap */
    Py_ssize_t passes_at_now, busy_passes;
    char stopping;
    char debug;
} Timeline;

static PyTypeObject Handle_type;

static PyObject *name_stuck, *name_busy, *name_report, *name_context;

/* ---- Handles ---- */

static Handle *spare[SPARE_HANDLES];
static int spares;

/* The callback with its arguments and its context are given up. Runs code of others. */
static void
release(Handle *self)
{
    PyObject *callback = self->callback, *context = self->context, *args[OWN_ARGS];
    int argc = self->argc == IN_TUPLE ? 1 : self->argc;
    for (int i = 0; i < argc; i++) {
        args[i] = self->args[i];
        self->args[i] = NULL;
    }
    self->argc = 0;
    self->callback = self->context = NULL;
    Py_XDECREF(callback);
    Py_XDECREF(context);
    for (int i = 0; i < argc; i++)
        Py_XDECREF(args[i]);
}

static int
handle_clear(Handle *self)
{
    if (!self->cancelled) {
        self->cancelled = 1;
        if (self->kept_by != NULL)
            self->kept_by->cancelled++;
        release(self);
    }
    return 0;
}

static int
handle_traverse(Handle *self, visitproc visit, void *arg)
{
    Py_VISIT(self->callback);
    Py_VISIT(self->context);
    for (int i = 0, argc = self->argc == IN_TUPLE ? 1 : self->argc; i < argc; i++)
        Py_VISIT(self->args[i]);
    return 0;
}

static void
handle_free(Handle *self)
{
    if (spares < SPARE_HANDLES)
        spare[spares++] = self;
    else
        PyObject_GC_Del(self);
}

static void
handle_dealloc(Handle *self)
{
    PyObject_GC_UnTrack(self);
    if (self->callback == NULL) { /* cancelled: it holds nothing */
        handle_free(self);
        return;
    }
    /* An argument may be a handle, and so on: freed in turn, not each within the one before. */
    Py_TRASHCAN_BEGIN(self, handle_dealloc)
    release(self);
    handle_free(self);
    Py_TRASHCAN_END
}

/* A handle of args[0], the callback, with the rest; NULL with an error set. */
static Handle *
handle_new(PyObject *const *args, Py_ssize_t count, PyObject *context, double when_s)
{
    Handle *self;
    PyObject *tuple = NULL;
    if (context == NULL)
        context = PyContext_CopyCurrent();
    else
        Py_INCREF(context);
    if (context == NULL)
        return NULL;
    Py_ssize_t argc = count - 1;
    if (argc > OWN_ARGS) {
        tuple = PyTuple_New(argc);
        if (tuple == NULL) {
            Py_DECREF(context);
            return NULL;
        }
        for (Py_ssize_t i = 0; i < argc; i++) {
            Py_INCREF(args[1 + i]);
            PyTuple_SET_ITEM(tuple, i, args[1 + i]);
        }
    }
    if (spares) {
        self = spare[--spares];
        _Py_NewReference((PyObject *)self);
    }
    else {
        self = PyObject_GC_New(Handle, &Handle_type);
        if (self == NULL) {
            Py_DECREF(context);
            Py_XDECREF(tuple);
            return NULL;
        }
    }
    Py_INCREF(args[0]);
    self->callback = args[0];
    self->context = context;
    self->kept_by = NULL;
    self->when_s = when_s;
    self->cancelled = 0;
    if (tuple != NULL) {
        self->argc = IN_TUPLE;
        self->args[0] = tuple;
    }
    else {
        self->argc = (int)argc;
        for (Py_ssize_t i = 0; i < argc; i++) {
            Py_INCREF(args[1 + i]);
            self->args[i] = args[1 + i];
        }
    }
    PyObject_GC_Track(self);
    return self;
}

static PyObject *
handle_cancel(Handle *self, PyObject *Py_UNUSED(none))
{
    handle_clear(self);
    Py_RETURN_NONE;
}

static PyObject *
handle_cancelled(Handle *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(self->cancelled);
}

static PyObject *
handle_when(Handle *self, PyObject *Py_UNUSED(none))
{
    return PyFloat_FromDouble(self->when_s);
}

static PyObject *
handle_args(Handle *self, void *Py_UNUSED(closure))
{
    if (self->callback == NULL)
        Py_RETURN_NONE;
    if (self->argc == IN_TUPLE) {
        Py_INCREF(self->args[0]);
        return self->args[0];
    }
    PyObject *tuple = PyTuple_New(self->argc);
    for (int i = 0; tuple != NULL && i < self->argc; i++) {
        Py_INCREF(self->args[i]);
        PyTuple_SET_ITEM(tuple, i, self->args[i]);
    }
    return tuple;
}

static PyObject *
handle_repr(Handle *self)
{
    PyObject *module = PyImport_ImportModule("harness.clock.handles");
    if (module == NULL)
        return NULL;
    PyObject *words = PyObject_CallMethod(module, "words", "O", self);
    Py_DECREF(module);
    return words;
}

static PyMethodDef handle_methods[] = {
    {"cancel", (PyCFunction)handle_cancel, METH_NOARGS, "It will not run."},
    {"cancelled", (PyCFunction)handle_cancelled, METH_NOARGS, "Whether it was cancelled."},
    {"when", (PyCFunction)handle_when, METH_NOARGS, "Its time in seconds."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef handle_members[] = {
    {"_callback", T_OBJECT, offsetof(Handle, callback), READONLY, NULL},
    {"_cancelled", T_BOOL, offsetof(Handle, cancelled), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef handle_getset[] = {
    {"_args", (getter)handle_args, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Handle_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "harness.clock._timeline.VirtualHandle",
    .tp_doc = "A callback of the next pass, or of a time. Made by a timeline alone.",
    .tp_basicsize = sizeof(Handle),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)handle_dealloc,
    .tp_traverse = (traverseproc)handle_traverse,
    .tp_clear = (inquiry)handle_clear,
    .tp_repr = (reprfunc)handle_repr,
    .tp_methods = handle_methods,
    .tp_members = handle_members,
    .tp_getset = handle_getset,
};

/* ---- The heap of timers and the ring of what is ready ---- */

static inline bool
before(const Timer *a, const Timer *b)
{
    return a->when_s < b->when_s || (a->when_s == b->when_s && a->number < b->number);
}

static void
sift_down(Timer *heap, Py_ssize_t timers, Py_ssize_t at)
{
    Timer moved = heap[at];
    for (;;) {
        Py_ssize_t child = 2 * at + 1;
        if (child >= timers)
            break;
        if (child + 1 < timers && before(&heap[child + 1], &heap[child]))
            child++;
        if (!before(&heap[child], &moved))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* Takes over the caller's reference to `handle` where it succeeds. */
static int
push_timer(Timeline *self, Handle *handle)
{
    if (self->timers == self->heap_room) {
        Py_ssize_t room = self->heap_room ? 2 * self->heap_room : 64;
        Timer *heap = PyMem_Realloc(self->heap, (size_t)room * sizeof(Timer));
        if (heap == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->heap = heap;
        self->heap_room = room;
    }
    Timer timer = {handle->when_s, self->set++, handle};
    Timer *heap = self->heap;
    Py_ssize_t at = self->timers++;
    while (at > 0) {
        Py_ssize_t parent = (at - 1) / 2;
        if (!before(&timer, &heap[parent]))
            break;
        heap[at] = heap[parent];
        at = parent;
    }
    heap[at] = timer;
    handle->kept_by = self;
    return 0;
}

/* The earliest timer's handle, which is the caller's then. */
static Handle *
pop_timer(Timeline *self)
{
    Handle *handle = self->heap[0].handle;
    self->timers--;
    if (self->timers) {
        self->heap[0] = self->heap[self->timers];
        sift_down(self->heap, self->timers, 0);
    }
    handle->kept_by = NULL;
    if (handle->cancelled)
        self->cancelled--;
    return handle;
}

/* A cancelled handle holds nothing, so giving it up runs no code of others. */
static void
sweep_cancelled(Timeline *self)
{
    Py_ssize_t kept = 0;
    for (Py_ssize_t at = 0; at < self->timers; at++) {
        Handle *handle = self->heap[at].handle;
        if (handle->cancelled) {
            handle->kept_by = NULL;
            Py_DECREF(handle);
        }
        else
            self->heap[kept++] = self->heap[at];
    }
    self->timers = kept;
    self->cancelled = 0;
    for (Py_ssize_t at = kept / 2 - 1; at >= 0; at--)
        sift_down(self->heap, kept, at);
}

/* Takes over the caller's reference to `handle` where it succeeds. */
static int
push_ready(Timeline *self, Handle *handle)
{
    if (self->ready == self->ring_room) {
        Py_ssize_t room = self->ring_room ? 2 * self->ring_room : 64;
        Handle **ring = PyMem_New(Handle *, room);
        if (ring == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (Py_ssize_t i = 0; i < self->ready; i++)
            ring[i] = self->ring[(self->first + i) & (self->ring_room - 1)];
        PyMem_Free(self->ring);
        self->ring = ring;
        self->ring_room = room;
        self->first = 0;
    }
    self->ring[(self->first + self->ready++) & (self->ring_room - 1)] = handle;
    return 0;
}

static Handle *
pop_ready(Timeline *self)
{
    Handle *handle = self->ring[self->first];
    self->first = (self->first + 1) & (self->ring_room - 1);
    self->ready--;
    return handle;
}

/* What a callback's end sets anew stays, as otherwise this might have none. */
static void
drop_all(Timeline *self)
{
    for (Py_ssize_t left = self->timers; left > 0 && self->timers; left--)
        Py_DECREF(pop_timer(self));
    for (Py_ssize_t left = self->ready; left > 0 && self->ready; left--)
        Py_DECREF(pop_ready(self));
}

/* ---- The timeline ---- */

static PyObject *
timeline_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(options))
{
    Timeline *self = (Timeline *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->until_s = Py_HUGE_VAL;
        self->busy_passes = BUSY_PASSES;
    }
    return (PyObject *)self;
}

static int
timeline_init(Timeline *self, PyObject *args, PyObject *options)
{
    static char *names[] = {"until_s", NULL};
    PyObject *until = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, options, "|O:Timeline", names, &until))
        return -1;
    self->until_s = Py_HUGE_VAL;
    if (until != Py_None) {
        double until_s = PyFloat_AsDouble(until);
        if (until_s == -1.0 && PyErr_Occurred())
            return -1;
        self->until_s = until_s;
    }
    return 0;
}

static int
timeline_traverse(Timeline *self, visitproc visit, void *arg)
{
    for (Py_ssize_t at = 0; at < self->timers; at++)
        Py_VISIT(self->heap[at].handle);
    for (Py_ssize_t i = 0; i < self->ready; i++)
        Py_VISIT(self->ring[(self->first + i) & (self->ring_room - 1)]);
    Py_VISIT(self->now);
    return 0;
}

static int
timeline_clear(Timeline *self)
{
    drop_all(self);
    return 0;
}

static void
timeline_dealloc(Timeline *self)
{
    PyObject_GC_UnTrack(self);
    drop_all(self);
    PyMem_Free(self->heap);
    PyMem_Free(self->ring);
    Py_XDECREF(self->now);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
timeline_time(Timeline *self, PyObject *Py_UNUSED(none))
{
    if (self->now == NULL) {
        self->now = PyFloat_FromDouble(self->now_s);
        if (self->now == NULL)
            return NULL;
    }
    Py_INCREF(self->now);
    return self->now;
}

/* The context among the keywords, borrowed, or NULL where none is given. -1 with an error set. */
static int
find_context(const char *called, PyObject *const *values, PyObject *names, PyObject **context)
{
    *context = NULL;
    if (names == NULL)
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (name != name_context && PyUnicode_Compare(name, name_context) != 0) {
            if (!PyErr_Occurred())
                PyErr_Format(
                    PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", called, name);
            return -1;
        }
        if (values[i] == Py_None)
            continue;
        if (!PyContext_CheckExact(values[i])) {
            PyErr_Format(
                PyExc_TypeError, "%s() takes a Context, not %R, as context", called, values[i]);
            return -1;
        }
        *context = values[i];
    }
    return 0;
}

static PyObject *
set_timer(Timeline *self, double when_s, PyObject *const *args, Py_ssize_t count, PyObject *context)
{
    if (isnan(when_s)) {
        PyErr_SetString(PyExc_ValueError, "a timer cannot be set for NaN");
        return NULL;
    }
    Handle *handle = handle_new(args, count, context, when_s);
    if (handle == NULL)
        return NULL;
    if (self->cancelled > SWEEP_AT && self->cancelled * 2 > self->timers)
        sweep_cancelled(self);
    if (push_timer(self, handle) < 0) {
        Py_DECREF(handle);
        return NULL;
    }
    Py_INCREF(handle);
    return (PyObject *)handle;
}

static PyObject *
timeline_call_at(Timeline *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *context;
    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "call_at() takes a time and a callback");
        return NULL;
    }
    if (find_context("call_at", args + count, names, &context) < 0)
        return NULL;
    double when_s = PyFloat_AsDouble(args[0]);
    if (when_s == -1.0 && PyErr_Occurred())
        return NULL;
    return set_timer(self, when_s, args + 1, count - 1, context);
}

static PyObject *
timeline_call_later(Timeline *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *context;
    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "call_later() takes a delay and a callback");
        return NULL;
    }
    if (find_context("call_later", args + count, names, &context) < 0)
        return NULL;
    double delay_s = PyFloat_AsDouble(args[0]);
    if (delay_s == -1.0 && PyErr_Occurred())
        return NULL;
    return set_timer(self, self->now_s + delay_s, args + 1, count - 1, context);
}

static PyObject *
timeline_call_soon(Timeline *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *context;
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "call_soon() takes a callback");
        return NULL;
    }
    if (find_context("call_soon", args + count, names, &context) < 0)
        return NULL;
    Handle *handle = handle_new(args, count, context, self->now_s);
    if (handle == NULL)
        return NULL;
    if (push_ready(self, handle) < 0) {
        Py_DECREF(handle);
        return NULL;
    }
    Py_INCREF(handle);
    return (PyObject *)handle;
}

static PyObject *
timeline_forget(Timeline *self, PyObject *Py_UNUSED(none))
{
    drop_all(self);
    Py_RETURN_NONE;
}

/* What was raised, as an object, which is the caller's; NULL with the error set again when it is
 * one that ends the loop. */
static PyObject *
take_error(void)
{
    if (PyErr_ExceptionMatches(PyExc_SystemExit) || PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        return NULL;
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
#endif
}

/* Calls `handle`'s callback in its context. What it raises goes to `_report`; -1 with an error set
 * for what ends the loop. The handle may be cancelled meanwhile, so all is held here. */
static int
run_handle(Timeline *self, Handle *handle)
{
    PyObject *callback = handle->callback, *context = handle->context, *result = NULL;
    PyObject *stack[1 + OWN_ARGS]; /* the callee may use the place before the first */
    int argc = handle->argc, held = argc == IN_TUPLE ? 1 : argc;
    Py_INCREF(callback);
    Py_INCREF(context);
    for (int i = 0; i < held; i++) {
        Py_INCREF(handle->args[i]);
        stack[1 + i] = handle->args[i];
    }
    if (PyContext_Enter(context) == 0) {
        if (argc == IN_TUPLE)
            result = PyObject_Call(callback, stack[1], NULL);
        else
            result = PyObject_Vectorcall(
                callback, stack + 1, (size_t)argc | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(result);
    }
    int ok = 0;
    if (result != NULL)
        Py_DECREF(result);
    else {
        PyObject *error = take_error();
        if (error == NULL)
            ok = -1;
        else {
            PyObject *done =
                PyObject_CallMethodObjArgs((PyObject *)self, name_report, handle, error, NULL);
            Py_DECREF(error);
            if (done == NULL)
                ok = -1;
            else
                Py_DECREF(done);
        }
    }
    Py_DECREF(callback);
    Py_DECREF(context);
    for (int i = 0; i < held; i++)
        Py_DECREF(stack[1 + i]);
    return ok;
}

/* Calls a method that raises. */
static PyObject *
end_with(Timeline *self, PyObject *name, PyObject *arg)
{
    PyObject *returned = PyObject_CallMethodObjArgs((PyObject *)self, name, arg, NULL);
    if (returned != NULL) {
        Py_DECREF(returned);
        PyErr_Format(PyExc_SystemError, "%U() returned", name);
    }
    return NULL;
}

static PyObject *
end_stuck(Timeline *self, double when_s)
{
    PyObject *when = PyFloat_FromDouble(when_s);
    if (when != NULL) {
        end_with(self, name_stuck, when);
        Py_DECREF(when);
    }
    return NULL;
}

static PyObject *
timeline_run_once(Timeline *self, PyObject *Py_UNUSED(none))
{
    for (;;) {
        if (PyErr_CheckSignals() < 0)
            return NULL;
        if (self->ready) {
            if (++self->passes_at_now > self->busy_passes)
                return end_with(self, name_busy, NULL);
        }
        else if (!self->stopping) {
            while (self->timers && self->heap[0].handle->cancelled)
                Py_DECREF(pop_timer(self));
            double when_s = self->timers ? self->heap[0].when_s : Py_HUGE_VAL;
            if (when_s > self->until_s || when_s == Py_HUGE_VAL)
                return end_stuck(self, when_s);
            if (when_s > self->now_s) {
                self->now_s = when_s;
                Py_CLEAR(self->now);
                self->passes_at_now = 0;
            }
        }
        while (self->timers && self->heap[0].when_s <= self->now_s) {
            Handle *handle = pop_timer(self);
            if (handle->cancelled)
                Py_DECREF(handle);
            else if (push_ready(self, handle) < 0) {
                Py_DECREF(handle);
                return NULL;
            }
        }
        /* What these callbacks schedule runs in the next pass, as in any asyncio loop. */
        for (Py_ssize_t left = self->ready; left > 0 && self->ready; left--) {
            Handle *handle = pop_ready(self);
            int ok = handle->cancelled ? 0 : run_handle(self, handle);
            Py_DECREF(handle);
            if (ok < 0)
                return NULL;
        }
        if (self->stopping)
            Py_RETURN_NONE;
    }
}

/* asyncio asks for each future that is made. */
static PyObject *
timeline_get_debug(Timeline *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(self->debug);
}

static PyMethodDef timeline_methods[] = {
    {"time", (PyCFunction)timeline_time, METH_NOARGS, "Seconds from 0."},
    {"call_at", (PyCFunction)(void (*)(void))timeline_call_at, METH_FASTCALL | METH_KEYWORDS,
     "A time in the past counts as now; NaN raises ValueError."},
    {"call_later", (PyCFunction)(void (*)(void))timeline_call_later, METH_FASTCALL | METH_KEYWORDS,
     "Like call_at, from now on."},
    {"call_soon", (PyCFunction)(void (*)(void))timeline_call_soon, METH_FASTCALL | METH_KEYWORDS,
     "In the next pass."},
    {"get_debug", (PyCFunction)timeline_get_debug, METH_NOARGS, "As asyncio's own."},
    {"_forget", (PyCFunction)timeline_forget, METH_NOARGS, "Drop all handles."},
    {"_run_once", (PyCFunction)timeline_run_once, METH_NOARGS,
     "Pass after pass until the loop is stopped."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef timeline_members[] = {
    {"_stopping", T_BOOL, offsetof(Timeline, stopping), 0, "Set by asyncio's own stop()."},
    {"_debug", T_BOOL, offsetof(Timeline, debug), 0, "Set by asyncio's own set_debug()."},
    {"_timer_count", T_PYSSIZET, offsetof(Timeline, timers), READONLY, "Cancelled ones included."},
    {"_cancelled_count", T_PYSSIZET, offsetof(Timeline, cancelled), READONLY, "Cancelled timers."},
    {"_busy_passes", T_PYSSIZET, offsetof(Timeline, busy_passes), 0, "Passes at one instant."},
    {"_until_s", T_DOUBLE, offsetof(Timeline, until_s), 0, "The limit of time."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject Timeline_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "harness.clock._timeline.Timeline",
    .tp_doc = "Keeps handles and runs them in virtual time. See harness.clock.timeline.",
    .tp_basicsize = sizeof(Timeline),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = timeline_new,
    .tp_init = (initproc)timeline_init,
    .tp_dealloc = (destructor)timeline_dealloc,
    .tp_traverse = (traverseproc)timeline_traverse,
    .tp_clear = (inquiry)timeline_clear,
    .tp_methods = timeline_methods,
    .tp_members = timeline_members,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "harness.clock._timeline",
    .m_doc = "The twin in C of harness.clock.timeline.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__timeline(void)
{
    if (name_stuck == NULL && (name_stuck = PyUnicode_InternFromString("_stuck")) == NULL)
        return NULL;
    if (name_busy == NULL && (name_busy = PyUnicode_InternFromString("_busy")) == NULL)
        return NULL;
    if (name_report == NULL && (name_report = PyUnicode_InternFromString("_report")) == NULL)
        return NULL;
    if (name_context == NULL && (name_context = PyUnicode_InternFromString("context")) == NULL)
        return NULL;
    if (PyType_Ready(&Handle_type) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    if (PyModule_AddType(made, &Timeline_type) < 0 || PyModule_AddType(made, &Handle_type) < 0 ||
        PyModule_AddStringConstant(made, "SOURCE_SHA256", SOURCE_SHA256) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
