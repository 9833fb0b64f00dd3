/*
 * Preload library for linux.uml on processors whose extended state is larger than its buffers (AMX).
 *
 * PTRACE_SETREGSET of NT_X86_XSTATE must be given the whole image; user-mode Linux gives the part that it
 * knows, and the host refuses it. This wrapper reads the whole image, lays the given part over it and
 * writes that. Every other request is passed through.
 */
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    REQUEST_GET_SET = 0x4204,
    REQUEST_SET_SET = 0x4205,
    NOTE_XSTATE = 0x202,
    LARGEST_IMAGE = 65536,
};

/* The raw call stores a peeked word where the C library returns it. */
static int is_peek(int request)
{
    return request >= 1 && request <= 3;
}

static long set_xstate(long pid, const struct iovec *given)
{
    static char image[LARGEST_IMAGE] __attribute__((aligned(64)));
    struct iovec whole = { image, sizeof image };

    if (syscall(SYS_ptrace, REQUEST_GET_SET, pid, NOTE_XSTATE, &whole) < 0)
        return -1;
    if (given->iov_len >= whole.iov_len)
        return syscall(SYS_ptrace, REQUEST_SET_SET, pid, NOTE_XSTATE, given);
    memcpy(image, given->iov_base, given->iov_len);
    return syscall(SYS_ptrace, REQUEST_SET_SET, pid, NOTE_XSTATE, &whole);
}

long ptrace(int request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    long pid = va_arg(arguments, long);
    long address = va_arg(arguments, long);
    void *data = va_arg(arguments, void *);
    va_end(arguments);

    if (request == REQUEST_SET_SET && address == NOTE_XSTATE)
        return set_xstate(pid, data);
    if (is_peek(request)) {
        long word = 0;
        long status = syscall(SYS_ptrace, request, pid, address, &word);
        return status < 0 ? status : word;
    }
    return syscall(SYS_ptrace, request, pid, address, data);
}
