/* Copies what request records hold into columns: the twin of request_rows.PythonCopier, which says
 * what for. Slots of a record are read where they lie in it, seconds become microseconds at once,
 * and each column that repeats itself is numbered by itself.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "Records are read without a lock of their own"
#endif

/* Values of a column that are known by their address; the rest are looked up. A power of two. */
#define KNOWN 2048
#define NUMBERS_A_RUN 3
/* Rows that wait side by side until their columns are written. Columns begin at the same place of
 * pages, so that a row written to each of them would have one set of a cache for all. */
#define WAITING 64

/* Where a record keeps a field. */
typedef struct {
    PyObject *name;
    Py_ssize_t offset; /* in a record of exactly the class; -1: only by name */
} Field;

typedef struct {
    PyObject *value; /* owned, so that its address stays its own; or NULL */
    int32_t number;
} Known;

/* A column that repeats itself: its values in order of first appearance. */
typedef struct {
    PyObject *numbers; /* dict: value to number */
    PyObject *values;  /* list */
    Known known[KNOWN];
} Names;

typedef struct {
    PyObject_HEAD
    PyTypeObject *record_type;
    PyObject *on_full;
    PyObject *spans, *configuration, *phase; /* where it copies from; the last two of the last row */
    Py_ssize_t times, counts, others; /* fields of each kind */
    Field *fields;                    /* times, counts, others, and the runs of tokens */
    Names *names;                     /* of each of the others */
    /* Columns by row: one array for all of a kind, `capacity` values a column. */
    Py_buffer times_us, count_values, codes, runs_each;
    bool ready;   /* the four are there */
    bool copying; /* or beginning or taking: code of values and arrays must do none meanwhile */
    Py_ssize_t capacity, rows, written, max_runs;
    int64_t *waiting; /* rows `written` to `rows`: times, counts, how many runs, and the others */
    char *missing; /* a byte a time, or NULL: none is missing */
    bool *has_missing;
    double *runs;
    Py_ssize_t run_numbers, run_room;
} Copier;

/* How long a waiting row is. Its codes take half a number each. */
static Py_ssize_t
row_numbers(const Copier *self)
{
    return self->times + self->counts + 1 + (self->others + 1) / 2;
}

/* ---- Making one ---- */

static int
find_field(Field *field, PyTypeObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    Py_INCREF(name);
    field->name = name;
    field->offset = -1;
    if (found == NULL) {
        PyErr_Clear();
        return 0;
    }
    if (Py_TYPE(found) == &PyMemberDescr_Type && PyDescr_TYPE(found) == type) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (member->type == T_OBJECT_EX && member->offset > 0)
            field->offset = member->offset;
    }
    Py_DECREF(found);
    return 0;
}

static void
release_target(Copier *self)
{
    if (self->ready) {
        self->ready = false;
        PyBuffer_Release(&self->times_us);
        PyBuffer_Release(&self->count_values);
        PyBuffer_Release(&self->codes);
        PyBuffer_Release(&self->runs_each);
    }
    PyMem_Free(self->missing);
    self->missing = NULL;
    self->rows = self->written = self->run_numbers = 0;
}

static void
forget_names(Copier *self)
{
    Py_CLEAR(self->spans);
    Py_CLEAR(self->configuration);
    Py_CLEAR(self->phase);
    for (Py_ssize_t i = 0; self->names != NULL && i < self->others; i++) {
        Names *names = &self->names[i];
        for (int k = 0; k < KNOWN; k++)
            Py_CLEAR(names->known[k].value);
        Py_CLEAR(names->numbers);
        Py_CLEAR(names->values);
    }
}

static int
copier_traverse(Copier *self, visitproc visit, void *arg)
{
    Py_VISIT(self->record_type);
    Py_VISIT(self->on_full);
    Py_VISIT(self->spans);
    Py_VISIT(self->configuration);
    Py_VISIT(self->phase);
    for (Py_ssize_t i = 0; self->names != NULL && i < self->others; i++) {
        Py_VISIT(self->names[i].numbers);
        Py_VISIT(self->names[i].values);
        for (int k = 0; k < KNOWN; k++)
            Py_VISIT(self->names[i].known[k].value);
    }
    return 0;
}

static int
copier_clear(Copier *self)
{
    Py_CLEAR(self->on_full);
    forget_names(self);
    return 0;
}

static void
copier_dealloc(Copier *self)
{
    PyObject_GC_UnTrack(self);
    release_target(self);
    forget_names(self);
    if (self->fields != NULL)
        for (Py_ssize_t i = 0; i <= self->times + self->counts + self->others; i++)
            Py_XDECREF(self->fields[i].name);
    PyMem_Free(self->fields);
    PyMem_Free(self->names);
    PyMem_Free(self->has_missing);
    PyMem_Free(self->runs);
    PyMem_Free(self->waiting);
    Py_XDECREF(self->on_full);
    Py_XDECREF(self->record_type);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
copier_new(PyTypeObject *type, PyObject *args, PyObject *options)
{
    static char *keywords[] = {"record_type", "times", "counts", "others", "runs", "on_full", NULL};
    PyTypeObject *record_type;
    PyObject *kinds[3], *runs, *on_full;
    if (!PyArg_ParseTupleAndKeywords(args, options, "O!O!O!O!UO:Copier", keywords, &PyType_Type,
                                     &record_type, &PyTuple_Type, &kinds[0], &PyTuple_Type,
                                     &kinds[1], &PyTuple_Type, &kinds[2], &runs, &on_full))
        return NULL;
    Copier *self = (Copier *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(record_type);
    self->record_type = record_type;
    Py_INCREF(on_full);
    self->on_full = on_full;
    Py_ssize_t counts[3] = {0, 0, 0}, all = 0;
    for (int kind = 0; kind < 3; kind++)
        all += counts[kind] = PyTuple_GET_SIZE(kinds[kind]);
    self->times = counts[0];
    self->counts = counts[1];
    self->others = counts[2];
    self->fields = PyMem_Calloc((size_t)all + 1, sizeof(Field));
    self->names = PyMem_Calloc((size_t)counts[2] + 1, sizeof(Names));
    self->has_missing = PyMem_Calloc((size_t)counts[0] + 1, sizeof(bool));
    self->waiting = PyMem_Calloc(WAITING * (size_t)row_numbers(self), sizeof(int64_t));
    if (self->fields == NULL || self->names == NULL || self->has_missing == NULL ||
        self->waiting == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    Field *field = self->fields;
    for (int kind = 0; kind < 3; kind++)
        for (Py_ssize_t i = 0; i < counts[kind]; i++) {
            PyObject *name = PyTuple_GET_ITEM(kinds[kind], i);
            if (!PyUnicode_Check(name)) {
                PyErr_SetString(PyExc_TypeError, "names of fields are strings");
                goto failed;
            }
            if (find_field(field++, record_type, name) < 0)
                goto failed;
        }
    if (find_field(field, record_type, runs) < 0)
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* ---- Where it copies to ---- */

/* With an error set where it is. */
static bool
is_copying(const Copier *self)
{
    if (self->copying)
        PyErr_SetString(PyExc_RuntimeError, "a copy is under way");
    return self->copying;
}

static int
take_buffer(PyObject *array, Py_buffer *view, Py_ssize_t itemsize, Py_ssize_t columns)
{
    if (PyObject_GetBuffer(array, view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (view->itemsize != itemsize || (columns && view->len % (itemsize * columns))) {
        PyErr_SetString(PyExc_ValueError, "an array has another shape than that of its columns");
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static int
set_target(Copier *self, PyObject *times_us, PyObject *counts, PyObject *codes, PyObject *runs_each)
{
    release_target(self);
    forget_names(self);
    memset(self->has_missing, 0, (size_t)self->times * sizeof(bool));
    for (Py_ssize_t i = 0; i < self->others; i++) {
        self->names[i].numbers = PyDict_New();
        self->names[i].values = PyList_New(0);
        if (self->names[i].numbers == NULL || self->names[i].values == NULL)
            return -1;
    }
    self->spans = PyList_New(0);
    if (self->spans == NULL)
        return -1;
    if (take_buffer(runs_each, &self->runs_each, 8, 1) < 0)
        return -1;
    if (take_buffer(times_us, &self->times_us, 8, self->times) < 0)
        goto no_times;
    if (take_buffer(counts, &self->count_values, 8, self->counts) < 0)
        goto no_counts;
    if (take_buffer(codes, &self->codes, 4, self->others) < 0)
        goto no_codes;
    Py_ssize_t capacity = self->runs_each.len / 8;
    if (self->times_us.len != 8 * capacity * self->times ||
        self->count_values.len != 8 * capacity * self->counts ||
        self->codes.len != 4 * capacity * self->others) {
        PyErr_SetString(PyExc_ValueError, "arrays of different capacities");
        goto different;
    }
    self->capacity = capacity;
    self->ready = true;
    return 0;
different:
    PyBuffer_Release(&self->codes);
no_codes:
    PyBuffer_Release(&self->count_values);
no_counts:
    PyBuffer_Release(&self->times_us);
no_times:
    PyBuffer_Release(&self->runs_each);
    return -1;
}

static PyObject *
copier_begin(Copier *self, PyObject *args)
{
    PyObject *times_us, *counts, *codes, *runs_each;
    Py_ssize_t max_runs;
    if (!PyArg_ParseTuple(args, "OOOOn:begin", &times_us, &counts, &codes, &runs_each, &max_runs))
        return NULL;
    if (is_copying(self))
        return NULL;
    self->copying = true;
    int failed = set_target(self, times_us, counts, codes, runs_each);
    self->copying = false;
    if (failed)
        return NULL;
    self->max_runs = max_runs;
    Py_RETURN_NONE;
}

/* ---- Copying ---- */

/* What lies in the record's slot of a field, borrowed; NULL where there is none to look into. */
static inline PyObject *
peek(PyObject *record, bool exact, const Field *field)
{
    return exact && field->offset > 0 ? *(PyObject **)((char *)record + field->offset) : NULL;
}

/* What the record has in the field: the caller's, or NULL with an error set. */
static inline PyObject *
get(PyObject *record, bool exact, const Field *field)
{
    PyObject *value = peek(record, exact, field);
    if (value == NULL)
        return PyObject_GetAttr(record, field->name);
    Py_INCREF(value);
    return value;
}

/* Fetches what copying a record reads and writes into the cache, all at once. */
static inline void
fetch(const Copier *self, PyObject *record, bool exact, const int64_t *to)
{
    Py_ssize_t numbers = self->times + self->counts;
    for (const char *each = (const char *)to, *end = each + 8 * row_numbers(self); each < end;
         each += 64)
        __builtin_prefetch(each, 1);
    __builtin_prefetch(peek(record, exact, &self->fields[numbers + self->others]));
    for (Py_ssize_t i = 0; i < numbers; i++)
        __builtin_prefetch(peek(record, exact, &self->fields[i]));
}

/* The error set becomes one that says which field of which request does not fit. */
static void
refuse(PyObject *record, const Field *field, PyObject *value)
{
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_OverflowError))
        return;
    PyErr_Clear();
    PyObject *ident = PyObject_GetAttrString(record, "id");
    if (ident != NULL) {
        PyErr_Format(PyExc_ValueError, "%U of request %S cannot be recorded: %R", field->name,
                     ident, value);
        Py_DECREF(ident);
    }
}

static int
refuse_time(PyObject *record, const Field *field, double seconds)
{
    PyObject *value = PyFloat_FromDouble(seconds);
    if (value != NULL) {
        PyErr_SetString(PyExc_OverflowError, "more microseconds than a column holds");
        refuse(record, field, value);
        Py_DECREF(value);
    }
    return -1;
}

static int
set_missing(Copier *self, Py_ssize_t column, Py_ssize_t row)
{
    if (self->missing == NULL) {
        self->missing = PyMem_Calloc((size_t)(self->capacity * self->times) + 1, 1);
        if (self->missing == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    self->missing[column * self->capacity + row] = 1;
    self->has_missing[column] = true;
    return 0;
}

static int
copy_times(Copier *self, PyObject *record, bool exact, int64_t *to, Py_ssize_t row)
{
    for (Py_ssize_t i = 0; i < self->times; i++, to++) {
        PyObject *value = peek(record, exact, &self->fields[i]);
        double seconds;
        if (value != NULL && PyFloat_CheckExact(value))
            seconds = PyFloat_AS_DOUBLE(value);
        else if (value == Py_None)
            seconds = Py_NAN;
        else {
            value = get(record, exact, &self->fields[i]);
            if (value == NULL)
                return -1;
            seconds = value == Py_None ? Py_NAN : PyFloat_AsDouble(value);
            if (seconds == -1.0 && PyErr_Occurred()) {
                refuse(record, &self->fields[i], value);
                Py_DECREF(value);
                return -1;
            }
            Py_DECREF(value);
        }
        if (isnan(seconds)) {
            *to = 0;
            if (set_missing(self, i, row) < 0)
                return -1;
        }
        else {
            double us = rint(seconds * 1e6);
            if (!(fabs(us) < 0x1p63))
                return refuse_time(record, &self->fields[i], seconds);
            *to = (int64_t)us;
        }
    }
    return 0;
}

static int
copy_counts(Copier *self, PyObject *record, bool exact, int64_t *to)
{
    const Field *field = self->fields + self->times;
    for (Py_ssize_t i = 0; i < self->counts; i++, field++, to++) {
        PyObject *value = get(record, exact, field);
        if (value == NULL)
            return -1;
        /* Takes whatever has __index__; a float has none. */
        long long number = PyLong_AsLongLong(value);
        if (number == -1 && PyErr_Occurred()) {
            refuse(record, field, value);
            Py_DECREF(value);
            return -1;
        }
        Py_DECREF(value);
        *to = number;
    }
    return 0;
}

static inline Known *
known_place(Names *names, const PyObject *value)
{
    return &names->known[((uintptr_t)value >> 4) & (KNOWN - 1)];
}

/* The number of `value` in a column, or -1 with an error set. */
static int32_t
number_of(Names *names, PyObject *value)
{
    Known *known = known_place(names, value);
    if (known->value == value)
        return known->number;
    int32_t number;
    PyObject *found = PyDict_GetItemWithError(names->numbers, value);
    if (found != NULL)
        number = (int32_t)PyLong_AsLong(found);
    else {
        if (PyErr_Occurred())
            return -1;
        Py_ssize_t next = PyList_GET_SIZE(names->values);
        PyObject *counted = PyLong_FromSsize_t(next);
        if (counted == NULL)
            return -1;
        /* First the list: a number without its value could not be read again. */
        int failed = PyList_Append(names->values, value) < 0 ||
                     PyDict_SetItem(names->numbers, value, counted) < 0;
        Py_DECREF(counted);
        if (failed)
            return -1;
        number = (int32_t)next;
    }
    PyObject *before = known->value;
    Py_INCREF(value);
    known->value = value;
    known->number = number;
    Py_XDECREF(before);
    return number;
}

static int
copy_others(Copier *self, PyObject *record, bool exact, int32_t *to)
{
    const Field *field = self->fields + self->times + self->counts;
    for (Py_ssize_t i = 0; i < self->others; i++, field++, to++) {
        PyObject *value = peek(record, exact, field);
        if (value != NULL) {
            const Known *known = known_place(&self->names[i], value);
            if (known->value == value) {
                *to = known->number;
                continue;
            }
        }
        value = get(record, exact, field);
        if (value == NULL)
            return -1;
        int32_t number = number_of(&self->names[i], value);
        Py_DECREF(value);
        if (number < 0)
            return -1;
        *to = number;
    }
    return 0;
}

static int
add_run(double *to, PyObject *run)
{
    PyObject *numbers = PySequence_Fast(run, "a run of tokens is (first_s, step_s, count)");
    if (numbers == NULL)
        return -1;
    int ok = 0;
    if (PySequence_Fast_GET_SIZE(numbers) != NUMBERS_A_RUN) {
        PyErr_SetString(PyExc_TypeError, "a run of tokens has three numbers");
        ok = -1;
    }
    for (int i = 0; ok == 0 && i < NUMBERS_A_RUN; i++) {
        /* A number's own code could shorten the list. */
        if (i >= PySequence_Fast_GET_SIZE(numbers)) {
            PyErr_SetString(PyExc_TypeError, "a run of tokens changed");
            ok = -1;
            break;
        }
        PyObject *number = PySequence_Fast_GET_ITEM(numbers, i);
        if (PyFloat_CheckExact(number))
            to[i] = PyFloat_AS_DOUBLE(number);
        else {
            Py_INCREF(number);
            to[i] = PyFloat_AsDouble(number);
            Py_DECREF(number);
            if (to[i] == -1.0 && PyErr_Occurred())
                ok = -1;
        }
    }
    Py_DECREF(numbers);
    return ok;
}

static int
copy_runs(Copier *self, PyObject *record, bool exact, int64_t *to)
{
    const Field *field = self->fields + self->times + self->counts + self->others;
    PyObject *value = get(record, exact, field);
    if (value == NULL)
        return -1;
    PyObject *runs = PySequence_Fast(value, "runs of tokens are a sequence");
    if (runs == NULL)
        goto failed;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(runs);
    Py_ssize_t needed = self->run_numbers + NUMBERS_A_RUN * count;
    if (needed > self->run_room) {
        Py_ssize_t room = needed + needed / 2 + 4096;
        double *grown = PyMem_Realloc(self->runs, (size_t)room * sizeof(double));
        if (grown == NULL) {
            PyErr_NoMemory();
            goto failed;
        }
        self->runs = grown;
        self->run_room = room;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        /* As could this one. */
        if (i >= PySequence_Fast_GET_SIZE(runs)) {
            PyErr_SetString(PyExc_TypeError, "runs of tokens changed");
            goto failed;
        }
        PyObject *run = PySequence_Fast_GET_ITEM(runs, i);
        Py_INCREF(run);
        int ok = add_run(self->runs + self->run_numbers + NUMBERS_A_RUN * i, run);
        Py_DECREF(run);
        if (ok < 0)
            goto failed;
    }
    self->run_numbers = needed;
    *to = count;
    Py_DECREF(runs);
    Py_DECREF(value);
    return 0;
failed:
    if (PyErr_Occurred())
        refuse(record, field, value);
    Py_XDECREF(runs);
    Py_DECREF(value);
    return -1;
}

/* Notes where the row comes from, if not from where the one before did. */
static int
note_where(Copier *self, PyObject *configuration, PyObject *phase, Py_ssize_t row)
{
    if (configuration == self->configuration && phase == self->phase)
        return 0;
    PyObject *span = Py_BuildValue("(OOn)", configuration, phase, row);
    if (span == NULL)
        return -1;
    int failed = PyList_Append(self->spans, span);
    Py_DECREF(span);
    if (failed)
        return -1;
    Py_INCREF(configuration);
    Py_XSETREF(self->configuration, configuration);
    Py_INCREF(phase);
    Py_XSETREF(self->phase, phase);
    return 0;
}

/* Writes what waits to the columns. */
static void
write_columns(Copier *self)
{
    Py_ssize_t rows = self->rows - self->written, width = row_numbers(self);
    const int64_t *from = self->waiting;
    int64_t *to = (int64_t *)self->times_us.buf + self->written;
    for (Py_ssize_t i = 0; i < self->times; i++, from++, to += self->capacity)
        for (Py_ssize_t row = 0; row < rows; row++)
            to[row] = from[row * width];
    to = (int64_t *)self->count_values.buf + self->written;
    for (Py_ssize_t i = 0; i < self->counts; i++, from++, to += self->capacity)
        for (Py_ssize_t row = 0; row < rows; row++)
            to[row] = from[row * width];
    to = (int64_t *)self->runs_each.buf + self->written;
    for (Py_ssize_t row = 0; row < rows; row++)
        to[row] = from[row * width];
    const int32_t *codes = (const int32_t *)(from + 1);
    int32_t *codes_to = (int32_t *)self->codes.buf + self->written;
    for (Py_ssize_t i = 0; i < self->others; i++, codes++, codes_to += self->capacity)
        for (Py_ssize_t row = 0; row < rows; row++)
            codes_to[row] = codes[2 * row * width];
    self->written = self->rows;
}

static PyObject *
copier_add(Copier *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "add() takes a record, its configuration and its phase");
        return NULL;
    }
    if (is_copying(self))
        return NULL;
    if (!self->ready || self->rows >= self->capacity) {
        PyErr_SetString(PyExc_ValueError, "no room for a record");
        return NULL;
    }
    PyObject *record = args[0];
    Py_ssize_t row = self->rows, runs_before = self->run_numbers;
    bool exact = Py_TYPE(record) == self->record_type;
    int64_t *times = self->waiting + (row - self->written) * row_numbers(self);
    int64_t *counts = times + self->times, *runs = counts + self->counts;
    fetch(self, record, exact, times);
    self->copying = true;
    int failed = copy_others(self, record, exact, (int32_t *)(runs + 1)) < 0 ||
                 copy_times(self, record, exact, times, row) < 0 ||
                 copy_counts(self, record, exact, counts) < 0 ||
                 copy_runs(self, record, exact, runs) < 0 ||
                 note_where(self, args[1], args[2], row) < 0;
    self->copying = false;
    if (failed) {
        self->run_numbers = runs_before;
        if (self->missing != NULL)
            for (Py_ssize_t i = 0; i < self->times; i++)
                self->missing[i * self->capacity + row] = 0;
        return NULL;
    }
    self->rows = row + 1;
    bool full = self->rows == self->capacity || self->run_numbers / NUMBERS_A_RUN >= self->max_runs;
    if (full || self->rows - self->written == WAITING)
        write_columns(self);
    if (full) {
        PyObject *done = PyObject_CallNoArgs(self->on_full);
        if (done == NULL)
            return NULL;
        Py_DECREF(done);
    }
    Py_RETURN_NONE;
}

static PyObject *
copier_take(Copier *self, PyObject *Py_UNUSED(none))
{
    if (is_copying(self))
        return NULL;
    if (self->ready)
        write_columns(self);
    PyObject *missing = PyList_New(self->times), *values = PyList_New(self->others), *runs = NULL;
    PyObject *spans = self->spans ? Py_NewRef(self->spans) : PyList_New(0);
    if (missing == NULL || values == NULL || spans == NULL)
        goto failed;
    for (Py_ssize_t i = 0; i < self->times; i++) {
        PyObject *mask = Py_None;
        if (self->has_missing[i]) {
            mask = PyBytes_FromStringAndSize(self->missing + i * self->capacity, self->rows);
            if (mask == NULL)
                goto failed;
        }
        else
            Py_INCREF(mask);
        PyList_SET_ITEM(missing, i, mask);
    }
    for (Py_ssize_t i = 0; i < self->others; i++) {
        PyObject *each = self->names[i].values ? self->names[i].values : Py_None;
        Py_INCREF(each);
        PyList_SET_ITEM(values, i, each);
    }
    runs = PyBytes_FromStringAndSize((char *)self->runs, 8 * self->run_numbers);
    if (runs == NULL)
        goto failed;
    self->copying = true;
    release_target(self);
    forget_names(self);
    self->copying = false;
    return Py_BuildValue("(NNNN)", spans, missing, values, runs);
failed:
    Py_XDECREF(spans);
    Py_XDECREF(missing);
    Py_XDECREF(values);
    return NULL;
}

static PyMethodDef copier_methods[] = {
    {"begin", (PyCFunction)copier_begin, METH_VARARGS,
     "begin(times_us, counts, codes, runs_each, max_runs): copy to these arrays from now on."},
    {"add", (PyCFunction)(void (*)(void))copier_add, METH_FASTCALL,
     "add(record, configuration, phase): copy it, and call `on_full` if there is no room for more."},
    {"take", (PyCFunction)copier_take, METH_NOARGS,
     "take(): where rows are from, masks of missing times, the values of each code, and the numbers"
     " of runs."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef copier_members[] = {
    {"rows", T_PYSSIZET, offsetof(Copier, rows), READONLY, "Records added since begin()."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject Copier_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "results._request_rows.Copier",
    .tp_doc = "Copies records to columns. See results.request_rows.",
    .tp_basicsize = sizeof(Copier),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = copier_new,
    .tp_dealloc = (destructor)copier_dealloc,
    .tp_traverse = (traverseproc)copier_traverse,
    .tp_clear = (inquiry)copier_clear,
    .tp_methods = copier_methods,
    .tp_members = copier_members,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "results._request_rows",
    .m_doc = "The twin in C of results.request_rows.PythonCopier.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__request_rows(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (PyModule_AddType(made, &Copier_type) < 0 ||
                         PyModule_AddStringConstant(made, "SOURCE_SHA256", SOURCE_SHA256) < 0))
        Py_CLEAR(made);
    return made;
}
