"""TLS by libssl's own chain of buffers: a chunk of many records is one call, from Python and to the
kernel.

    SSL_write -> buffer -> socket        what is sealed goes out in pieces of the buffer
    socket -> buffer -> SSL_read         records are read many at a time
    BIO_f_buffer on BIO_f_ssl            reads on, record by record, until all came

Python's `ssl` returns to the interpreter at each record of 16 KiB and takes its lock anew, which
cost as much as a third of the cipher.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.x509.oid import NameOID

from engine.transport import libssl
from engine.transport.libssl import Libssl
from engine.transport.tls import Buffer, TlsSocket

#: Of records, each way.
BUFFER_BYTES = 1 << 18
#: What `send` seals at a time: its records fit into an empty buffer.
SEND_BYTES = BUFFER_BYTES // 2
#: A read of more than BIO_f_buffer holds by itself fills no buffer of its own: it goes on until all
#: has come. Smaller ones ask OpenSSL directly.
_DIRECT_BYTES = 4096


class ChainContext:
    """Certificates and rules of one side, for any number of connections."""

    def __init__(
        self, lib: Libssl, certificate: str, key: str, authority: str, server_side: bool
    ) -> None:
        """Raises ssl.SSLError where the files do not fit."""
        self._lib = lib
        self._server_side = server_side
        lib.ERR_clear_error()
        method = lib.TLS_server_method() if server_side else lib.TLS_client_method()
        self._context = context = _made(lib, lib.SSL_CTX_new(method))
        weakref.finalize(self, lib.SSL_CTX_free, context).atexit = False
        _made(lib, lib.SSL_CTX_ctrl(context, libssl.SET_LEAST_VERSION, libssl.TLS_1_3, None))
        lib.SSL_CTX_ctrl(context, libssl.SET_MODE, libssl.MODE_MOVING_BUFFER, None)
        lib.SSL_CTX_set_options(context, libssl.IGNORE_UNEXPECTED_END)
        lib.SSL_CTX_set_verify(context, libssl.VERIFY_PEER_AND_FAIL_WITHOUT, None)
        # Connections are long-lived; a ticket would be one more thing that a reader must handle.
        _made(lib, lib.SSL_CTX_set_num_tickets(context, 0))
        files = (os.fsencode(certificate), os.fsencode(key), os.fsencode(authority))
        _made(lib, lib.SSL_CTX_load_verify_locations(context, files[2], None))
        _made(lib, lib.SSL_CTX_use_certificate_chain_file(context, files[0]))
        _made(lib, lib.SSL_CTX_use_PrivateKey_file(context, files[1], libssl.PEM))
        _made(lib, lib.SSL_CTX_check_private_key(context))

    def __call__(self, raw: socket.socket) -> ChainedTls:
        return ChainedTls(raw, self._lib, self._context, self._server_side)


class ChainedTls(TlsSocket):
    """See `TlsSocket`. OpenSSL's objects live as long as this one: a thread that is in one of its
    methods keeps it."""

    def __init__(self, raw: socket.socket, lib: Libssl, context: int, server_side: bool) -> None:
        super().__init__(raw)
        self._lib = lib
        self._ssl = ends = _made(lib, lib.SSL_new(context))  # keeps the context
        self._out = self._buffered_socket(libssl.WRITE_BUFFER)
        # The connection owns both of its chains from here.
        lib.SSL_set_bio(ends, self._buffered_socket(libssl.READ_BUFFER), self._out)
        (lib.SSL_set_accept_state if server_side else lib.SSL_set_connect_state)(ends)
        whole = _made(lib, lib.BIO_new(lib.BIO_f_ssl()))
        lib.BIO_ctrl(whole, libssl.SET_SSL, 0, ends)
        self._whole = lib.BIO_push(_made(lib, lib.BIO_new(lib.BIO_f_buffer())), whole)
        # Freeing says no farewell: the descriptor may be another connection's by then. Not at exit
        # either: threads may be in it still.
        lib.SSL_set_quiet_shutdown(ends, 1)
        weakref.finalize(self, _free, lib, self._whole, ends).atexit = False
        #: Of the `send` in progress: sealed, and not all of it out.
        self._sealed_payload = 0

    def handshake(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the TLS handshake took too long")
            self.raw.settimeout(left_s)
            self._begin()
            result = self._lib.SSL_do_handshake(self._ssl)
            if result == 1:
                self.raw.settimeout(timeout_s)
                return
            if not self._again(result):
                raise ConnectionResetError("closed during the TLS handshake")

    def identity(self) -> str:
        lib = self._lib
        certificate = lib.SSL_get1_peer_certificate(self._ssl)
        if not certificate:
            return ""
        try:
            der = ctypes.create_string_buffer(max(1, lib.i2d_X509(certificate, None)))
            end = ctypes.c_void_p(ctypes.addressof(der))  # moved behind what is written
            size = lib.i2d_X509(certificate, ctypes.byref(end))
        finally:
            lib.X509_free(certificate)
        subject = x509.load_der_x509_certificate(der.raw[:size]).subject
        names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(names[0].value) if names else ""

    def send_views(self, views: Sequence[Buffer]) -> None:
        for view in views:
            size = len(view)
            if not size:
                continue
            address = _address(view)
            while True:
                self._begin()
                result = self._lib.SSL_write(self._ssl, address, size)
                if result > 0:
                    break  # all of it: partial writes are not asked for
                if not self._again(result):
                    raise ConnectionResetError("closed")
        while not self._flushed():
            self._wait(select.POLLOUT)

    def recv(self, size: int) -> bytes:
        room = bytearray(size)
        return bytes(room[: self._read(memoryview(room))])

    def recv_buffered(self, size: int) -> bytes:
        try:
            return self.recv(size)
        except BlockingIOError:
            return b""

    def recv_into(self, view: memoryview) -> int:
        if len(view) > _DIRECT_BYTES:
            self._begin()
            count = int(self._lib.BIO_read(self._whole, _address(view), len(view)))
            if count > 0:
                return count
            if self._lib.ERR_peek_last_error():
                raise self._lib.error()
        return self._read(view)  # which meets again what else stopped the other

    def send(self, data: bytes | bytearray) -> int:
        if not self._sealed_payload:
            part = bytes(data[:SEND_BYTES])
            self._begin()
            # Goes into the buffer, which is empty.
            result = self._lib.SSL_write(self._ssl, part, len(part))
            if result <= 0:
                if not self._again(result):
                    raise ConnectionResetError("closed")
                raise BlockingIOError(errno.EAGAIN, "records wait for room")
            self._sealed_payload = len(part)
        if not self._flushed():
            raise BlockingIOError(errno.EAGAIN, "records wait for room")
        sent, self._sealed_payload = self._sealed_payload, 0
        return sent

    # --- calls of the library ----------------------------------------------------------------

    def _buffered_socket(self, which: int) -> int:
        lib = self._lib
        below = _made(lib, lib.BIO_new_socket(self.raw.fileno(), 0))
        buffer = _made(lib, lib.BIO_new(lib.BIO_f_buffer()))
        _made(lib, lib.BIO_int_ctrl(buffer, libssl.SET_BUFFER_SIZE, BUFFER_BYTES, which))
        return int(lib.BIO_push(buffer, below))

    def _begin(self) -> None:
        """Before each call whose outcome is asked for: what this thread left behind is forgotten,
        and a descriptor that was closed is not used."""
        if self.raw.fileno() < 0:
            raise OSError(errno.EBADF, "closed")
        self._lib.ERR_clear_error()
        ctypes.set_errno(0)

    def _read(self, view: memoryview) -> int:
        if not len(view):
            return 0
        while True:
            self._begin()
            count = int(self._lib.SSL_read(self._ssl, _address(view), len(view)))
            if count > 0:
                return count
            if not self._again(count):
                return 0

    def _flushed(self) -> bool:
        """Whether all records are out; False: there is no room. Raises OSError."""
        self._begin()
        if self._lib.BIO_ctrl(self._out, libssl.FLUSH, 0, None) > 0:
            return True
        number = ctypes.get_errno()
        if number in (0, errno.EAGAIN, errno.EINTR):
            return False
        raise OSError(number, os.strerror(number))

    def _again(self, result: int) -> bool:
        """After a call that did not do: whether to call again, once the socket is ready; False: the
        stream has ended. Raises BlockingIOError, TimeoutError, OSError, ssl.SSLError."""
        number = ctypes.get_errno()
        kind = self._lib.SSL_get_error(self._ssl, result)
        if kind == libssl.ZERO_RETURN:
            return False
        if kind == libssl.WANT_READ:
            self._wait(select.POLLIN)
        elif kind == libssl.WANT_WRITE:
            self._wait(select.POLLOUT)
        elif kind == libssl.SYSCALL:
            if number:
                raise OSError(number, os.strerror(number))
            return False
        else:
            raise self._lib.error()
        return True

    def _wait(self, event: int) -> None:
        """As the socket's timeout says. A blocking socket comes here when a signal interrupted."""
        timeout_s = self.raw.gettimeout()
        if timeout_s == 0.0:
            raise BlockingIOError(errno.EAGAIN, "not ready")
        poll = select.poll()
        poll.register(self.raw.fileno(), event)
        if not poll.poll(None if timeout_s is None else 1e3 * timeout_s):
            raise TimeoutError("timed out")


def _made(lib: Libssl, result: int | None) -> int:
    """What a call made. Raises ssl.SSLError where it made nothing."""
    if not result or result < 0:
        raise lib.error()
    return result


def _free(lib: Libssl, whole: int, ends: int) -> None:
    lib.BIO_free_all(whole)
    lib.SSL_free(ends)


def _address(view: Buffer) -> Any:
    """For a call that ends while `view` is held."""
    if isinstance(view, bytes):
        return view
    if isinstance(view, memoryview) and view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
