/* The running batch of a modelled decode instance: the twin of modelled_macro.MacroBatch with its
 * clock (modelled_batch.StepClock), where it is said what they do and why. All of an instance's numbers
 * lie in one struct and two short arrays, because each event meets another of many instances whose
 * state has left the caches. Sums and products are those of the twin in its order, so that both
 * give the same times to the last bit.
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
#error "A batch has no lock of its own"
#endif

/* As in modelled_batch.py. */
#define SAME_BOUNDARY 1e-7
#define KEEP 512
/* Bounds that keep sums of tokens and steps far from the end of 64 bits. */
#define MOST ((int64_t)1 << 40)
#define MOST_BATCH ((int64_t)1 << 20)

/* One that waits or runs. */
typedef struct {
    int64_t leaves; /* the boundary; while it waits, its output tokens */
    int64_t admitted_at;
    int64_t input_tokens;
    PyObject *member; /* owned; NULL: it was removed while it ran */
} Place;

/* Places first..first + count - 1. */
typedef struct {
    Place *places;
    Py_ssize_t first, count, room;
} Line;

/* Equal steps that are over. */
typedef struct {
    int64_t opened; /* the boundary */
    int64_t count;
    double start_s, step_s; /* the first end, and the time between two */
} Segment;

typedef struct {
    PyObject_HEAD
    vectorcallfunc on_timer;
    PyObject *loop;
    PyObject *step_by_batch; /* list, shared with other instances */
    PyObject *timer;         /* or NULL */
    double timer_s;
    /* The open segment began at boundary `anchor`. */
    int64_t anchor;
    double anchor_s, step_s;
    double slowdown;
    int64_t batch, max_batch;
    Line running; /* in order of leaving, then of admission */
    Line waiting; /* in order of coming */
    bool contextual, paused, was_running;
    /* Tokens of context of the running batch at boundary `context_at`; 0 if of no matter. */
    int64_t context_tokens, context_at, bucket_tokens;
    PyObject *times;
    double paused_s;
    int64_t paused_boundary;
    Segment *segments;
    Py_ssize_t closed, segment_room, segment_limit;
} Batch;

static PyObject *name_time, *name_call_at, *name_cancel, *name_finish, *name_step_s;
static PyObject *name_input_tokens, *name_output_tokens;

/* ---- Lines ---- */

/* Makes room for one more at the end. -1 with an error set. */
static int
make_room(Line *line)
{
    if (line->first + line->count < line->room)
        return 0;
    if (line->first > line->count) {
        memmove(line->places, line->places + line->first, (size_t)line->count * sizeof(Place));
        line->first = 0;
        return 0;
    }
    Py_ssize_t room = line->room ? 2 * line->room : 4;
    Place *places = PyMem_Realloc(line->places, (size_t)room * sizeof(Place));
    if (places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    line->places = places;
    line->room = room;
    return 0;
}

/* The first one's place, which is the caller's then. */
static Place
take_first(Line *line)
{
    Place place = line->places[line->first];
    line->count--;
    line->first = line->count ? line->first + 1 : 0;
    return place;
}

/* Where `member` is from the first on, or -1. */
static Py_ssize_t
find(const Line *line, const PyObject *member)
{
    for (Py_ssize_t i = 0; i < line->count; i++)
        if (line->places[line->first + i].member == member)
            return i;
    return -1;
}

static void
drop_line(Line *line)
{
    Line dropped = *line;
    memset(line, 0, sizeof(*line));
    for (Py_ssize_t i = 0; i < dropped.count; i++)
        Py_XDECREF(dropped.places[dropped.first + i].member);
    PyMem_Free(dropped.places);
}

/* ---- Time ---- */

static int
too_many(void)
{
    PyErr_Format(
        PyExc_OverflowError, "a batch counts steps and tokens from 0 to %lld", (long long)MOST);
    return -1;
}

static int
as_seconds(PyObject *value, double *seconds)
{
    if (value == NULL)
        return -1;
    *seconds = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *seconds == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int
get_now(Batch *self, double *now_s)
{
    PyObject *args[] = {self->loop};
    return as_seconds(
        PyObject_VectorcallMethod(
            name_time, args, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL),
        now_s);
}

static inline double
time_at(const Batch *self, int64_t boundary)
{
    return self->anchor_s + (double)(boundary - self->anchor) * self->step_s;
}

/* The first boundary at or after `now_s`. */
static int
next_boundary(const Batch *self, double now_s, int64_t *boundary)
{
    if (now_s <= self->anchor_s) {
        *boundary = self->anchor;
        return 0;
    }
    if (self->step_s == 0.0) {
        PyErr_SetString(PyExc_ZeroDivisionError, "a step takes no time");
        return -1;
    }
    double steps = ceil((now_s - self->anchor_s) / self->step_s - SAME_BOUNDARY);
    if (!(fabs(steps) < (double)MOST))
        return too_many();
    *boundary = self->anchor + (int64_t)steps;
    return *boundary > MOST ? too_many() : 0;
}

static int
append_segment(Batch *self, int64_t opened, double start_s, double step_s, int64_t count)
{
    if (self->closed == self->segment_room) {
        Py_ssize_t room = self->segment_room ? 2 * self->segment_room : 4;
        Segment *segments = PyMem_Realloc(self->segments, (size_t)room * sizeof(Segment));
        if (segments == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->segments = segments;
        self->segment_room = room;
    }
    self->segments[self->closed++] = (Segment){opened, count, start_s, step_s};
    return 0;
}

/* Begins a new segment at `boundary`. */
static int
close_segment(Batch *self, int64_t boundary)
{
    int64_t count = boundary - self->anchor;
    if (count > 0) {
        double start_s = self->anchor_s + self->step_s;
        if (append_segment(self, self->anchor, start_s, self->step_s, count) < 0)
            return -1;
        self->anchor_s = time_at(self, boundary);
        self->anchor = boundary;
    }
    return 0;
}

/* The step that ends at `boundary` ends `extra_s` later, and so do all after it. */
static int
stretch(Batch *self, int64_t boundary, double extra_s)
{
    if (self->anchor < boundary) {
        double step_s = self->step_s + extra_s;
        if (close_segment(self, boundary - 1) < 0 ||
            append_segment(self, self->anchor, time_at(self, boundary) + extra_s, step_s, 1) < 0)
            return -1;
        self->anchor_s = time_at(self, boundary);
        self->anchor = boundary;
    }
    else {
        if (self->closed == 0) {
            PyErr_SetString(PyExc_IndexError, "no step to stretch");
            return -1;
        }
        Segment last = self->segments[self->closed - 1];
        double last_s = last.start_s + (double)(last.count - 1) * last.step_s;
        if (last.count > 1)
            self->segments[self->closed - 1].count--;
        else
            self->closed--;
        if (append_segment(self, boundary - 1, last_s + extra_s, last.step_s + extra_s, 1) < 0)
            return -1;
    }
    self->anchor_s += extra_s;
    return 0;
}

/* How many closed segments opened at or before `boundary`. */
static Py_ssize_t
opened_until(const Batch *self, int64_t boundary)
{
    Py_ssize_t low = 0, high = self->closed;
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (boundary < self->segments[middle].opened)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Those segments go before whose end all who run were admitted. */
static void
forget_old(Batch *self)
{
    const Place *places = self->running.places + self->running.first;
    int64_t oldest = places[0].admitted_at;
    for (Py_ssize_t i = 1; i < self->running.count; i++)
        if (places[i].admitted_at < oldest)
            oldest = places[i].admitted_at;
    Py_ssize_t drop = opened_until(self, oldest) - 1;
    if (drop > 0) {
        self->closed -= drop;
        memmove(
            self->segments, self->segments + drop, (size_t)self->closed * sizeof(Segment));
    }
    self->segment_limit = self->closed + KEEP;
}

/* (start_s, step_s, count) */
static PyObject *
make_run(double start_s, double step_s, int64_t count)
{
    PyObject *run = PyTuple_New(3);
    if (run == NULL)
        return NULL;
    PyObject *numbers[] = {
        PyFloat_FromDouble(start_s), PyFloat_FromDouble(step_s), PyLong_FromLongLong(count)};
    for (int i = 0; i < 3; i++)
        PyTuple_SET_ITEM(run, i, numbers[i]);
    for (int i = 0; i < 3; i++)
        if (numbers[i] == NULL) {
            Py_DECREF(run);
            return NULL;
        }
    return run;
}

/* Gives up `run`, which may be NULL with an error set. */
static int
append_run(PyObject *runs, PyObject *run)
{
    int failed = run == NULL || PyList_Append(runs, run) < 0;
    Py_XDECREF(run);
    return failed ? -1 : 0;
}

/* Times of the boundaries first..last as runs, in a list. */
static PyObject *
runs_between(const Batch *self, int64_t first, int64_t last)
{
    double anchor_s = self->anchor_s, step_s = self->step_s;
    int64_t surplus = self->anchor - last;
    if (first >= self->anchor) {
        PyObject *run = make_run(time_at(self, first), step_s, last - first + 1);
        PyObject *runs = run == NULL ? NULL : PyList_New(1);
        if (runs == NULL)
            Py_XDECREF(run);
        else
            PyList_SET_ITEM(runs, 0, run);
        return runs;
    }
    Py_ssize_t at = opened_until(self, first) - 1, end = self->closed;
    if (at < 0) {
        PyErr_SetString(PyExc_IndexError, "these steps are forgotten");
        return NULL;
    }
    /* Without the segments after `last`. */
    while (end - 1 > at && surplus > 0 && self->segments[end - 1].count <= surplus)
        surplus -= self->segments[--end].count;
    PyObject *runs = PyList_New(0);
    for (Py_ssize_t i = at; runs != NULL && i < end; i++) {
        /* The garbage collector, which may run when a run is made, could change the batch. */
        if (i >= self->closed) {
            PyErr_SetString(PyExc_RuntimeError, "the batch changed while its times were read");
            Py_CLEAR(runs);
            break;
        }
        Segment segment = self->segments[i];
        if (i == at) {
            int64_t skip = first - segment.opened;
            segment.start_s = segment.start_s + (double)(skip - 1) * segment.step_s;
            segment.count = segment.count - skip + 1;
        }
        if (i == end - 1 && surplus > 0)
            segment.count -= surplus;
        if (append_run(runs, make_run(segment.start_s, segment.step_s, segment.count)) < 0)
            Py_CLEAR(runs);
    }
    if (runs != NULL && surplus < 0 &&
        append_run(runs, make_run(anchor_s + step_s, step_s, -surplus)) < 0)
        Py_CLEAR(runs);
    return runs;
}

/* ---- Boundaries ---- */

static int
disarm(Batch *self)
{
    PyObject *timer = self->timer;
    self->timer = NULL;
    self->timer_s = Py_HUGE_VAL;
    if (timer == NULL)
        return 0;
    PyObject *args[] = {timer};
    PyObject *done =
        PyObject_VectorcallMethod(name_cancel, args, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(timer);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Sets the one timer, for an earlier time than it has; one that comes too early looks again. */
static int
arm(Batch *self, double when_s)
{
    if (disarm(self) < 0)
        return -1;
    PyObject *when = PyFloat_FromDouble(when_s);
    if (when == NULL)
        return -1;
    PyObject *args[] = {self->loop, when, (PyObject *)self};
    PyObject *timer =
        PyObject_VectorcallMethod(name_call_at, args, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(when);
    if (timer == NULL)
        return -1;
    PyObject *before = self->timer; /* set meanwhile, by a loop that calls back at once */
    self->timer = timer;
    self->timer_s = when_s;
    Py_XDECREF(before);
    return 0;
}

/* What a step of the batch takes by its profile. */
static int
profiled_step(Batch *self, double *step_s)
{
    PyObject *value = NULL;
    if (self->contextual) {
        PyObject *args[] = {
            self->times, PyLong_FromLongLong(self->batch),
            PyLong_FromLongLong(self->context_tokens)};
        if (args[1] != NULL && args[2] != NULL)
            value = PyObject_VectorcallMethod(
                name_step_s, args, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        Py_XDECREF(args[1]);
        Py_XDECREF(args[2]);
    }
    else if (self->batch < PyList_GET_SIZE(self->step_by_batch)) {
        value = PyList_GET_ITEM(self->step_by_batch, self->batch);
        Py_INCREF(value);
    }
    else
        PyErr_SetString(PyExc_IndexError, "no step time of so large a batch");
    return as_seconds(value, step_s);
}

static void
move_context(Batch *self, int64_t boundary)
{
    self->context_tokens += self->batch * (boundary - self->context_at);
    self->context_at = boundary;
}

/* The boundary at which somebody leaves or, if that matters, the context changes bucket. */
static int64_t
next_event(const Batch *self)
{
    int64_t leaves = self->running.places[self->running.first].leaves;
    if (!self->contextual)
        return leaves;
    int64_t left = self->bucket_tokens - self->context_tokens % self->bucket_tokens;
    int64_t changes = self->context_at + (left + self->batch - 1) / self->batch;
    return changes < leaves ? changes : leaves;
}

static void
skip_removed(Batch *self)
{
    while (self->running.count && self->running.places[self->running.first].member == NULL)
        take_first(&self->running);
}

/* Who waits comes in at `boundary`. */
static int
admit(Batch *self, int64_t boundary)
{
    Line *running = &self->running;
    while (self->waiting.count && self->batch < self->max_batch) {
        if (make_room(running) < 0)
            return -1;
        if (boundary > MOST)
            return too_many();
        Place coming = take_first(&self->waiting);
        self->batch++;
        if (self->contextual)
            self->context_tokens += coming.input_tokens + 1;
        coming.leaves += boundary - 1;
        coming.admitted_at = boundary;
        /* Most leave after all who are there, so their places need not move. */
        Place *places = running->places + running->first;
        Py_ssize_t at = running->count++;
        for (; at > 0 && places[at - 1].leaves > coming.leaves; at--)
            places[at] = places[at - 1];
        places[at] = coming;
    }
    return 0;
}

/* From `boundary` on, which may lie ahead: who waits comes in, and steps last as long as the new
 * batch takes. */
static int
go_on(Batch *self, int64_t boundary)
{
    if (self->contextual)
        move_context(self, boundary);
    if (self->waiting.count && admit(self, boundary) < 0)
        return -1;
    if (!self->batch)
        return close_segment(self, boundary);
    double step_s;
    if (profiled_step(self, &step_s) < 0)
        return -1;
    step_s *= self->slowdown;
    if (step_s != self->step_s || boundary == self->anchor) {
        if (close_segment(self, boundary) < 0)
            return -1;
        self->step_s = step_s;
        if (self->closed > self->segment_limit && self->running.count)
            forget_old(self);
    }
    if (!self->batch || !self->running.count) /* emptied by what was called */
        return 0;
    double when_s = time_at(self, next_event(self));
    return when_s < self->timer_s ? arm(self, when_s) : 0;
}

/* Lets what has changed take effect at the next boundary. If nobody leaves until then, that
 * boundary can be worked out now and needs no event. */
static int
at_next_boundary(Batch *self)
{
    double now_s;
    if (get_now(self, &now_s) < 0)
        return -1;
    skip_removed(self);
    int64_t boundary;
    if (self->batch) {
        if (next_boundary(self, now_s, &boundary) < 0)
            return -1;
    }
    else {
        /* A step whose requests were all removed still runs to its end, which may lie ahead. */
        if (now_s > self->anchor_s)
            self->anchor_s = now_s;
        boundary = self->anchor;
    }
    if (self->running.count) {
        int64_t leaves = self->running.places[self->running.first].leaves;
        if (leaves <= boundary) {
            double leaves_s = time_at(self, leaves);
            return leaves_s < self->timer_s ? arm(self, leaves_s) : 0;
        }
    }
    return go_on(self, boundary);
}

static void
leave(Batch *self, const Place *place, int64_t boundary)
{
    if (self->contextual) {
        move_context(self, boundary);
        self->context_tokens -= place->input_tokens + 1 + boundary - place->admitted_at;
    }
    self->batch--;
}

typedef struct {
    PyObject *member, *runs;
} Finished;

/* As many as finish together most times; more are kept in memory of their own. */
#define FINISHED 8

/* At `boundary`: who is done leaves, who waits comes in. */
static int
pass_boundary(Batch *self, int64_t boundary)
{
    Finished few[FINISHED], *finished = few;
    Py_ssize_t count = 0, room = FINISHED;
    int ok = 0;
    while (self->running.count && self->running.places[self->running.first].leaves <= boundary) {
        if (count == room) {
            Finished *more = PyMem_New(Finished, 2 * room);
            if (more == NULL) {
                PyErr_NoMemory();
                ok = -1;
                break;
            }
            memcpy(more, finished, (size_t)count * sizeof(Finished));
            if (finished != few)
                PyMem_Free(finished);
            finished = more;
            room *= 2;
        }
        Place place = take_first(&self->running);
        if (place.member == NULL)
            continue;
        leave(self, &place, boundary);
        PyObject *runs = runs_between(self, place.admitted_at, boundary);
        finished[count++] = (Finished){place.member, runs};
        if (runs == NULL) {
            ok = -1;
            break;
        }
    }
    if (ok == 0)
        ok = go_on(self, boundary);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (ok == 0) {
            PyObject *args[] = {finished[i].member, finished[i].runs};
            PyObject *done = PyObject_VectorcallMethod(
                name_finish, args, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
            if (done == NULL)
                ok = -1;
            else
                Py_DECREF(done);
        }
    }
    /* What the end of one runs must find no error set. */
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_DECREF(finished[i].member);
        Py_XDECREF(finished[i].runs);
    }
    PyErr_Restore(type, error, trace);
    if (finished != few)
        PyMem_Free(finished);
    return ok;
}

/* Its own timer calls it. */
static PyObject *
batch_on_timer(PyObject *object, PyObject *const *Py_UNUSED(args), size_t count, PyObject *names)
{
    Batch *self = (Batch *)object;
    if (PyVectorcall_NARGS(count) || (names != NULL && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "a batch is called by its timer, without arguments");
        return NULL;
    }
    Py_CLEAR(self->timer);
    self->timer_s = Py_HUGE_VAL;
    skip_removed(self);
    if (!self->running.count || !self->batch)
        Py_RETURN_NONE;
    int64_t next = next_event(self);
    double next_s = time_at(self, next), now_s;
    if (get_now(self, &now_s) < 0)
        return NULL;
    if ((next_s > now_s ? arm(self, next_s) : pass_boundary(self, next)) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- The batch ---- */

static int
get_tokens(PyObject *member, PyObject *name, int64_t *tokens)
{
    PyObject *value = PyObject_GetAttr(member, name);
    if (value == NULL)
        return -1;
    *tokens = PyLong_AsLongLong(value);
    Py_DECREF(value);
    if (*tokens == -1 && PyErr_Occurred())
        return -1;
    return *tokens > MOST || *tokens < 0 ? too_many() : 0;
}

static PyObject *
batch_add(Batch *self, PyObject *member)
{
    Place place = {.member = member};
    if (get_tokens(member, name_output_tokens, &place.leaves) < 0 ||
        get_tokens(member, name_input_tokens, &place.input_tokens) < 0 ||
        make_room(&self->waiting) < 0)
        return NULL;
    Py_INCREF(member);
    self->waiting.places[self->waiting.first + self->waiting.count++] = place;
    if (self->batch < self->max_batch && !self->paused && at_next_boundary(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
batch_remove(Batch *self, PyObject *member)
{
    Py_ssize_t at = find(&self->running, member);
    if (at < 0) {
        at = find(&self->waiting, member);
        if (at < 0) {
            PyErr_SetString(PyExc_ValueError, "not a member of the batch");
            return NULL;
        }
        Place *place = self->waiting.places + self->waiting.first + at;
        self->waiting.count--;
        memmove(place, place + 1, (size_t)(self->waiting.count - at) * sizeof(Place));
        Py_DECREF(member);
        Py_RETURN_NONE;
    }
    int64_t boundary = self->paused_boundary;
    double now_s;
    if (!self->paused && (get_now(self, &now_s) < 0 || next_boundary(self, now_s, &boundary) < 0))
        return NULL;
    at = find(&self->running, member);
    if (at < 0)
        Py_RETURN_NONE; /* gone while the time was read */
    Place *place = self->running.places + self->running.first + at;
    leave(self, place, boundary);
    place->member = NULL;
    Py_DECREF(member); /* the caller has one too */
    if (!self->batch && close_segment(self, boundary) < 0)
        return NULL;
    if (!self->paused && at_next_boundary(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int
append_line(PyObject *members, Line *line)
{
    for (Py_ssize_t i = 0; i < line->count; i++) {
        PyObject *member = line->places[line->first + i].member;
        if (member != NULL && PyList_Append(members, member) < 0)
            return -1;
    }
    return 0;
}

static PyObject *
batch_clear(Batch *self, PyObject *Py_UNUSED(none))
{
    double now_s;
    if (get_now(self, &now_s) < 0)
        return NULL;
    if (self->batch) {
        int64_t boundary = self->paused_boundary;
        if (!self->paused && next_boundary(self, now_s, &boundary) < 0)
            return NULL;
        if (close_segment(self, boundary) < 0)
            return NULL;
    }
    PyObject *members = PyList_New(0);
    if (members == NULL)
        return NULL;
    if (append_line(members, &self->running) < 0 || append_line(members, &self->waiting) < 0) {
        Py_DECREF(members);
        return NULL;
    }
    self->anchor_s = now_s; /* the step that ran is broken off */
    self->batch = self->context_tokens = 0;
    self->paused = false;
    /* The list holds them, so this runs no code of theirs. */
    drop_line(&self->running);
    drop_line(&self->waiting);
    if (disarm(self) < 0)
        Py_CLEAR(members);
    return members;
}

static PyObject *
batch_slow(Batch *self, PyObject *factor)
{
    double slowdown = PyFloat_AsDouble(factor);
    if (slowdown == -1.0 && PyErr_Occurred())
        return NULL;
    self->slowdown = slowdown;
    if (self->batch && !self->paused && at_next_boundary(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
batch_pause(Batch *self, PyObject *Py_UNUSED(none))
{
    double now_s;
    if (self->paused)
        Py_RETURN_NONE;
    if (get_now(self, &now_s) < 0)
        return NULL;
    int64_t boundary = self->anchor;
    if (self->batch && next_boundary(self, now_s, &boundary) < 0)
        return NULL;
    self->paused = true;
    self->paused_s = now_s;
    self->was_running = self->batch > 0;
    self->paused_boundary = boundary;
    if (disarm(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
batch_resume(Batch *self, PyObject *Py_UNUSED(none))
{
    double now_s;
    if (!self->paused)
        Py_RETURN_NONE;
    if (get_now(self, &now_s) < 0)
        return NULL;
    self->paused = false;
    double extra_s = now_s - self->paused_s;
    if (self->was_running) {
        if (self->anchor == self->paused_boundary && self->anchor_s <= self->paused_s)
            self->anchor_s += extra_s; /* no step had begun */
        else if (stretch(self, self->paused_boundary, extra_s) < 0)
            return NULL;
    }
    if (at_next_boundary(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- Making one ---- */

static int
traverse_line(const Line *line, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < line->count; i++)
        Py_VISIT(line->places[line->first + i].member);
    return 0;
}

static int
batch_traverse(Batch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->loop);
    Py_VISIT(self->step_by_batch);
    Py_VISIT(self->times);
    Py_VISIT(self->timer);
    int found = traverse_line(&self->running, visit, arg);
    return found ? found : traverse_line(&self->waiting, visit, arg);
}

/* The loop and the step times stay until it is freed: a call may still come. */
static int
batch_clear_references(Batch *self)
{
    self->batch = 0;
    Py_CLEAR(self->timer);
    drop_line(&self->running);
    drop_line(&self->waiting);
    return 0;
}

static void
batch_dealloc(Batch *self)
{
    PyObject_GC_UnTrack(self);
    batch_clear_references(self);
    PyMem_Free(self->segments);
    Py_XDECREF(self->loop);
    Py_XDECREF(self->step_by_batch);
    Py_XDECREF(self->times);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
batch_new(PyTypeObject *type, PyObject *args, PyObject *options)
{
    static char *names[] = {"loop", "times", "max_batch", NULL};
    PyObject *loop, *times;
    long long max_batch;
    if (!PyArg_ParseTupleAndKeywords(args, options, "OOL:MacroBatch", names, &loop, &times,
                                     &max_batch))
        return NULL;
    if (max_batch > MOST_BATCH) {
        PyErr_Format(PyExc_OverflowError, "a batch of at most %lld", (long long)MOST_BATCH);
        return NULL;
    }
    PyObject *bucket_tokens = PyObject_GetAttrString(times, "bucket_tokens");
    if (bucket_tokens == NULL)
        return NULL;
    long long bucket = PyLong_AsLongLong(bucket_tokens);
    Py_DECREF(bucket_tokens);
    if (bucket == -1 && PyErr_Occurred())
        return NULL;
    if (bucket > MOST) {
        too_many();
        return NULL;
    }
    PyObject *by_batch = PyObject_GetAttrString(times, "by_batch");
    if (by_batch == NULL)
        return NULL;
    if (!PyList_CheckExact(by_batch)) {
        PyErr_SetString(PyExc_TypeError, "step times by batch are a list");
        Py_DECREF(by_batch);
        return NULL;
    }
    Batch *self = (Batch *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(by_batch);
        return NULL;
    }
    self->on_timer = batch_on_timer;
    Py_INCREF(loop);
    self->loop = loop;
    self->step_by_batch = by_batch;
    Py_INCREF(times);
    self->times = times;
    self->timer_s = Py_HUGE_VAL;
    self->slowdown = 1.0;
    self->max_batch = max_batch;
    self->bucket_tokens = bucket;
    self->contextual = bucket > 0;
    self->segment_limit = KEEP;
    if (get_now(self, &self->anchor_s) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *
batch_active(Batch *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->batch);
}

static PyMethodDef batch_methods[] = {
    {"add", (PyCFunction)batch_add, METH_O, "It waits, and comes in when there is a place."},
    {"remove", (PyCFunction)batch_remove, METH_O,
     "Out of the queue now, or out of the batch at the next boundary."},
    {"clear", (PyCFunction)batch_clear, METH_NOARGS,
     "Stop at once. Who ran and who waited, in order of leaving and of coming."},
    {"slow", (PyCFunction)batch_slow, METH_O, "Steps take that many times what they would."},
    {"pause", (PyCFunction)batch_pause, METH_NOARGS, "Freeze in the middle of a step."},
    {"resume", (PyCFunction)batch_resume, METH_NOARGS, "Go on where pause() stopped."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef batch_members[] = {
    {"waiting", T_PYSSIZET, offsetof(Batch, waiting.count), READONLY, "How many wait."},
    {"_segments", T_PYSSIZET, offsetof(Batch, closed), READONLY, "Closed segments that are kept."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef batch_getset[] = {
    {"active", (getter)batch_active, NULL, "How many run.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Batch_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "harness.instances._modelled_macro.MacroBatch",
    .tp_doc = "See harness.instances.modelled_macro. Its own timer calls it.",
    .tp_basicsize = sizeof(Batch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = batch_new,
    .tp_dealloc = (destructor)batch_dealloc,
    .tp_traverse = (traverseproc)batch_traverse,
    .tp_clear = (inquiry)batch_clear_references,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Batch, on_timer),
    .tp_methods = batch_methods,
    .tp_members = batch_members,
    .tp_getset = batch_getset,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "harness.instances._modelled_macro",
    .m_doc = "The twin in C of harness.instances.modelled_macro.MacroBatch.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__modelled_macro(void)
{
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&name_time, "time"},
        {&name_call_at, "call_at"},
        {&name_cancel, "cancel"},
        {&name_finish, "finish"},
        {&name_step_s, "step_s"},
        {&name_input_tokens, "input_tokens"},
        {&name_output_tokens, "output_tokens"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (*names[i].name == NULL &&
            (*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (PyModule_AddType(made, &Batch_type) < 0 ||
                         PyModule_AddStringConstant(made, "SOURCE_SHA256", SOURCE_SHA256) < 0))
        Py_CLEAR(made);
    return made;
}
