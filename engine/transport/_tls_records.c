/* Many TLS records in one call of Python, with OpenSSL's own functions, by their addresses.
 *
 *     write:  payload -> SSL_write -> memory -> scratch -> socket
 *     read:   socket -> scratch, read where it lies -> SSL_read -> payload
 *
 * OpenSSL never touches the socket: a system call carries what fits into the scratch, which a
 * core's cache holds. The interpreter's lock is free meanwhile. tls_records.py has the objects of
 * OpenSSL that the addresses belong to; without this module tls_memory.py does the same with
 * Python's `ssl`, a call for each record.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <time.h>

/* Payload sealed at a time, and room for what becomes of it or is received at a time. */
#define PIECE_BYTES (1 << 17)
#define SCRATCH_BYTES (1 << 18)

/* Results of SSL_get_error. */
#define WANT_READ 2
#define ZERO_RETURN 6

typedef struct {
    PyObject_HEAD
    /* In the order in which they are given. */
    int (*ssl_read)(void *, void *, int);
    int (*ssl_write)(void *, const void *, int);
    int (*ssl_get_error)(const void *, int);
    void (*ssl_set_bio)(void *, void *, void *);
    void *(*bio_new_mem_buf)(const void *, int);
    long (*bio_set_mem_eof_return)(void *, int);
    int (*bio_read)(void *, void *, int);
    void (*err_clear_error)(void);
    void *ssl, *outgoing;
    PyObject *error; /* called for the exception that tells of OpenSSL's errors */
    char *received, *sealed;
    int sealed_from, sealed_to; /* of the scratch: records on their way to the socket */
    bool busy;
    PyThreadState *thread; /* of a call that has left the interpreter's lock */
} Records;

typedef enum {
    DONE,
    NOTHING,   /* no whole record has come */
    ENDED,     /* no more will come */
    LATER,     /* the socket is not ready, and does not wait */
    TIMED_OUT, /* it waited */
    SYSTEM,    /* errno says what */
    MEMORY,
    PROTOCOL, /* OpenSSL's queue of errors says what */
    RAISED,   /* an exception is set: of a signal's handler */
} Outcome;

/* ---- Without the interpreter's lock ---- */

static double
now_s(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Signals are answered here: a thread that waits holds up its interpreter's Ctrl-C otherwise. */
static Outcome
interrupted(Records *self)
{
    PyEval_RestoreThread(self->thread);
    int failed = PyErr_CheckSignals();
    self->thread = PyEval_SaveThread();
    return failed ? RAISED : DONE;
}

/* timeout_s: 0 does not wait, less than that waits for ever. */
static Outcome
ready(Records *self, int fd, short event, double timeout_s)
{
    double deadline_s = now_s() + timeout_s;
    if (timeout_s == 0)
        return LATER;
    for (;;) {
        struct pollfd watched = {.fd = fd, .events = event};
        int wait_ms = -1;
        if (timeout_s > 0) {
            double left_ms = ceil(1e3 * (deadline_s - now_s()));
            wait_ms = left_ms < 0 ? 0 : left_ms > INT_MAX ? INT_MAX : (int)left_ms;
        }
        int found = poll(&watched, 1, wait_ms);
        if (found > 0)
            return DONE;
        if (found == 0 && wait_ms < INT_MAX)
            return TIMED_OUT;
        if (found < 0 && errno != EINTR)
            return SYSTEM;
        Outcome outcome = found < 0 ? interrupted(self) : DONE;
        if (outcome != DONE)
            return outcome;
    }
}

/* After a system call that failed: whether to try again. */
static Outcome
again(Records *self, int fd, short event, double timeout_s)
{
    if (errno == EINTR)
        return interrupted(self);
    if (errno == EAGAIN || errno == EWOULDBLOCK)
        return ready(self, fd, event, timeout_s);
    return SYSTEM;
}

/* All records that are sealed, to the socket. more: others follow at once, so the end of these
 * need not leave in a short packet of its own. */
static Outcome
flush(Records *self, int fd, double timeout_s, bool more)
{
    int flags = MSG_NOSIGNAL | (more ? MSG_MORE : 0);
    for (;;) {
        while (self->sealed_from < self->sealed_to) {
            ssize_t sent = send(fd, self->sealed + self->sealed_from,
                                (size_t)(self->sealed_to - self->sealed_from), flags);
            if (sent >= 0) {
                self->sealed_from += (int)sent;
                continue;
            }
            Outcome outcome = again(self, fd, POLLOUT, timeout_s);
            if (outcome != DONE)
                return outcome;
        }
        int moved = self->bio_read(self->outgoing, self->sealed, SCRATCH_BYTES);
        if (moved <= 0)
            return DONE; /* there are none */
        self->sealed_from = 0;
        self->sealed_to = moved;
    }
}

/* As many records as one read of the socket gives, for `open_records`, which has none left. */
static Outcome
fill(Records *self, int fd, double timeout_s, int *count)
{
    ssize_t got;
    while ((got = recv(fd, self->received, SCRATCH_BYTES, 0)) < 0) {
        Outcome outcome = again(self, fd, POLLIN, timeout_s);
        if (outcome != DONE)
            return outcome;
    }
    *count = (int)got;
    if (got == 0)
        return ENDED;
    self->err_clear_error();
    void *records = self->bio_new_mem_buf(self->received, (int)got);
    if (records == NULL)
        return MEMORY;
    self->bio_set_mem_eof_return(records, -1); /* its end is not the stream's */
    /* Takes the new one and frees the one before; the other direction stays as it is. */
    self->ssl_set_bio(self->ssl, records, self->outgoing);
    return DONE;
}

static Outcome
seal(Records *self, const char *payload, Py_ssize_t size)
{
    self->err_clear_error();
    while (size > 0) {
        int part = size > INT_MAX / 2 ? INT_MAX / 2 : (int)size;
        /* Into memory, which has room for all of it. */
        if (self->ssl_write(self->ssl, payload, part) != part)
            return PROTOCOL;
        payload += part;
        size -= part;
    }
    return DONE;
}

/* Payload of records that have come, *count bytes: DONE: `size` of them, else why no more. */
static Outcome
open_records(Records *self, char *payload, Py_ssize_t size, Py_ssize_t *count)
{
    Py_ssize_t at = 0;
    while (at < size) {
        Py_ssize_t left = size - at;
        self->err_clear_error();
        int got = self->ssl_read(self->ssl, payload + at, left > INT_MAX ? INT_MAX : (int)left);
        if (got > 0) {
            at += got;
            continue;
        }
        *count = at;
        int why = self->ssl_get_error(self->ssl, got);
        return why == WANT_READ ? NOTHING : why == ZERO_RETURN ? ENDED : PROTOCOL;
    }
    *count = at;
    return DONE;
}

static Outcome
write_all(Records *self, int fd, const Py_buffer *views, Py_ssize_t n_views, double timeout_s)
{
    Outcome outcome = DONE;
    Py_ssize_t waiting = 0, left_in_all = 0;
    for (Py_ssize_t i = 0; i < n_views; i++)
        left_in_all += views[i].len;
    for (Py_ssize_t i = 0; outcome == DONE && i < n_views; i++)
        for (Py_ssize_t at = 0; outcome == DONE && at < views[i].len; at += PIECE_BYTES) {
            Py_ssize_t left = views[i].len - at;
            Py_ssize_t part = left > PIECE_BYTES ? PIECE_BYTES : left;
            outcome = seal(self, (const char *)views[i].buf + at, part);
            waiting += part;
            left_in_all -= part;
            if (outcome == DONE && waiting >= PIECE_BYTES) {
                outcome = flush(self, fd, timeout_s, left_in_all > 0);
                waiting = 0;
            }
        }
    return outcome == DONE ? flush(self, fd, timeout_s, false) : outcome;
}

static Outcome
read_all(Records *self, int fd, const Py_buffer *views, Py_ssize_t n_views, double timeout_s)
{
    for (Py_ssize_t i = 0; i < n_views; i++)
        for (Py_ssize_t at = 0; at < views[i].len;) {
            Py_ssize_t opened = 0;
            int filled;
            Outcome outcome =
                open_records(self, (char *)views[i].buf + at, views[i].len - at, &opened);
            at += opened;
            if (outcome == NOTHING)
                outcome = fill(self, fd, timeout_s, &filled);
            if (outcome != DONE)
                return outcome;
        }
    return DONE;
}

/* ---- With it ---- */

/* Whether the call may go on; it ends with `leave`. */
static bool
enter(Records *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is in this connection");
        return false;
    }
    self->busy = true;
    self->thread = PyEval_SaveThread();
    return true;
}

/* Sets an exception for what is neither done, nothing nor the end. */
static bool
leave(Records *self, Outcome outcome)
{
    int number = errno;
    PyEval_RestoreThread(self->thread);
    self->busy = false;
    switch (outcome) {
    case DONE:
    case NOTHING:
    case ENDED:
        return true;
    case RAISED:
        return false;
    case MEMORY:
        PyErr_NoMemory();
        return false;
    case TIMED_OUT:
        PyErr_SetString(PyExc_TimeoutError, "timed out");
        return false;
    case LATER:
        number = EAGAIN;
        /* fall through */
    case SYSTEM:
        errno = number;
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    case PROTOCOL:
        break;
    }
    PyObject *error = PyObject_CallNoArgs(self->error);
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return false;
}

static PyObject *
over_views(Records *self, PyObject *args, bool writing)
{
    int fd;
    PyObject *given, *list;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "iOd", &fd, &given, &timeout_s))
        return NULL;
    if ((list = PySequence_Tuple(given)) == NULL)
        return NULL;
    Py_ssize_t n_views = PyTuple_GET_SIZE(list), held = 0;
    PyObject *result = NULL;
    Py_buffer *views = PyMem_New(Py_buffer, n_views ? n_views : 1);
    if (views == NULL) {
        PyErr_NoMemory();
        goto released;
    }
    for (; held < n_views; held++)
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(list, held), views + held,
                               writing ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
            goto released;
    if (!enter(self))
        goto released;
    Outcome outcome = (writing ? write_all : read_all)(self, fd, views, n_views, timeout_s);
    if (leave(self, outcome))
        result = PyBool_FromLong(outcome == DONE);
released:
    while (held > 0)
        PyBuffer_Release(views + --held);
    PyMem_Free(views);
    Py_DECREF(list);
    return result;
}

static PyObject *
records_write(Records *self, PyObject *args)
{
    return over_views(self, args, true);
}

static PyObject *
records_read(Records *self, PyObject *args)
{
    return over_views(self, args, false);
}

static PyObject *
records_seal(Records *self, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    bool done = enter(self) && leave(self, seal(self, view.buf, view.len));
    PyBuffer_Release(&view);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
records_open(Records *self, PyObject *room)
{
    Py_buffer view;
    if (PyObject_GetBuffer(room, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    Py_ssize_t count = 0;
    Outcome outcome = DONE;
    bool done = enter(self);
    if (done) {
        outcome = open_records(self, view.buf, view.len, &count);
        if (count > 0) { /* handed over first: the next call meets the end or the failure again */
            self->err_clear_error();
            outcome = DONE;
        }
        done = leave(self, outcome);
    }
    PyBuffer_Release(&view);
    if (!done)
        return NULL;
    if (outcome == NOTHING)
        Py_RETURN_NONE;
    return PyLong_FromSsize_t(count);
}

static PyObject *
records_flush(Records *self, PyObject *args)
{
    int fd;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "id", &fd, &timeout_s) || !enter(self) ||
        !leave(self, flush(self, fd, timeout_s, false)))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
records_fill(Records *self, PyObject *args)
{
    int fd, count = 0;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "id", &fd, &timeout_s) || !enter(self) ||
        !leave(self, fill(self, fd, timeout_s, &count)))
        return NULL;
    return PyLong_FromLong(count);
}

static void
records_dealloc(Records *self)
{
    PyMem_Free(self->received);
    PyMem_Free(self->sealed);
    Py_XDECREF(self->error);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
records_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    Py_ssize_t functions[8], ssl, outgoing;
    PyObject *error;
    if (!PyArg_ParseTuple(args, "(nnnnnnnn)nnO", functions, functions + 1, functions + 2,
                          functions + 3, functions + 4, functions + 5, functions + 6,
                          functions + 7, &ssl, &outgoing, &error))
        return NULL;
    Records *self = (Records *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ssl_read = (int (*)(void *, void *, int))functions[0];
    self->ssl_write = (int (*)(void *, const void *, int))functions[1];
    self->ssl_get_error = (int (*)(const void *, int))functions[2];
    self->ssl_set_bio = (void (*)(void *, void *, void *))functions[3];
    self->bio_new_mem_buf = (void *(*)(const void *, int))functions[4];
    self->bio_set_mem_eof_return = (long (*)(void *, int))functions[5];
    self->bio_read = (int (*)(void *, void *, int))functions[6];
    self->err_clear_error = (void (*)(void))functions[7];
    self->ssl = (void *)ssl;
    self->outgoing = (void *)outgoing;
    self->error = Py_NewRef(error);
    self->received = PyMem_Malloc(SCRATCH_BYTES);
    self->sealed = PyMem_Malloc(SCRATCH_BYTES);
    if (self->received == NULL || self->sealed == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyMethodDef records_methods[] = {
    {"write", (PyCFunction)records_write, METH_VARARGS,
     "write(fd, views, timeout_s): all bytes of all views, sealed and sent."},
    {"read", (PyCFunction)records_read, METH_VARARGS,
     "read(fd, views, timeout_s): fill all views. False: the stream ended before."},
    {"seal", (PyCFunction)records_seal, METH_O, "seal(data): its records wait for a flush."},
    {"open", (PyCFunction)records_open, METH_O,
     "open(view): how many bytes records that have come put there; None: there is no whole one; "
     "0: the stream has ended."},
    {"flush", (PyCFunction)records_flush, METH_VARARGS,
     "flush(fd, timeout_s): send all records that wait."},
    {"fill", (PyCFunction)records_fill, METH_VARARGS,
     "fill(fd, timeout_s): read records, of which none is left; their bytes, 0 at the end."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Records_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "engine.transport._tls_records.Records",
    .tp_doc = "Records(functions, ssl, outgoing, error): of one connection, whose objects of "
              "OpenSSL must outlive it. timeout_s: 0 does not wait, -1 waits for ever.",
    .tp_basicsize = sizeof(Records),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = records_new,
    .tp_dealloc = (destructor)records_dealloc,
    .tp_methods = records_methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "engine.transport._tls_records",
    .m_doc = "Many TLS records in one call. See engine.transport.tls_records.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__tls_records(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (PyModule_AddType(made, &Records_type) < 0 ||
                         PyModule_AddStringConstant(made, "SOURCE_SHA256", SOURCE_SHA256) < 0))
        Py_CLEAR(made);
    return made;
}
