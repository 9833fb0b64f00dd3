"""TLS by the OpenSSL that `cryptography` brings, a chunk of many records in one call of C.

Python's `ssl` returns to the interpreter at each record of 16 KiB and takes its lock anew, which
costs as much as a third of the cipher; and the OpenSSL that it is built on is often one that seals
and opens AES at half the speed. Importing this module raises ImportError where the loop
(`_tls_records.c`) is not built or `cryptography` lacks a function; `tls_memory` is used then.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.bindings._rust import _openssl
from cryptography.x509.oid import NameOID

from engine.transport.tls import Buffer, TlsSocket
from native import require

require("engine.transport._tls_records")
from engine.transport._tls_records import Records  # noqa: E402

#: OpenSSL's functions, and C values for them. What cffi calls leaves the interpreter's lock.
_lib: Any = _openssl.lib
_ffi: Any = _openssl.ffi

_PEM = 1
_TLS_1_3 = 0x0304
_VERIFY_PEER_AND_FAIL_WITHOUT = 1 | 2
_WANT_READ = 2


def _address(thing: Any) -> int:
    return int(_ffi.cast("intptr_t", thing))


#: What `Records` calls, in the order in which it takes their addresses.
_CALLED_FROM_C = (
    "SSL_read",
    "SSL_write",
    "SSL_get_error",
    "SSL_set_bio",
    "BIO_new_mem_buf",
    "BIO_set_mem_eof_return",
    "BIO_read",
    "ERR_clear_error",
)
#: What is called here. Bindings change between releases; none of these may be found missing later.
_CALLED_FROM_PYTHON = (
    "BIO_free",
    "BIO_get_mem_data",
    "BIO_new",
    "BIO_s_mem",
    "ERR_clear_error",
    "ERR_get_error",
    "ERR_reason_error_string",
    "OpenSSL_version",
    "SSL_CIPHER_get_name",
    "SSL_CTX_check_private_key",
    "SSL_CTX_free",
    "SSL_CTX_load_verify_locations",
    "SSL_CTX_new",
    "SSL_CTX_set_min_proto_version",
    "SSL_CTX_set_options",
    "SSL_CTX_set_session_cache_mode",
    "SSL_CTX_set_verify",
    "SSL_CTX_use_PrivateKey_file",
    "SSL_CTX_use_certificate_chain_file",
    "SSL_OP_NO_TICKET",
    "SSL_SESS_CACHE_OFF",
    "SSL_do_handshake",
    "SSL_free",
    "SSL_get_current_cipher",
    "SSL_get_error",
    "SSL_get_peer_certificate",
    "SSL_new",
    "SSL_set_accept_state",
    "SSL_set_bio",
    "SSL_set_connect_state",
    "TLS_client_method",
    "TLS_server_method",
    "X509_free",
    "i2d_X509_bio",
)
_missing = [name for name in _CALLED_FROM_C + _CALLED_FROM_PYTHON if not hasattr(_lib, name)]
if _missing:
    raise ImportError(f"the OpenSSL of cryptography is without {', '.join(_missing)}")

_FUNCTIONS = tuple(_address(_ffi.addressof(_lib, name)) for name in _CALLED_FROM_C)
VERSION: str = _ffi.string(_lib.OpenSSL_version(0)).decode("ascii", "replace")


class RecordsContext:
    """Certificates and rules of one side, for any number of connections."""

    def __init__(self, certificate: str, key: str, authority: str, server_side: bool) -> None:
        """Raises ssl.SSLError where the files do not fit."""
        self._server_side = server_side
        _lib.ERR_clear_error()
        method = _lib.TLS_server_method() if server_side else _lib.TLS_client_method()
        self._context = context = _ffi.gc(_made(_lib.SSL_CTX_new(method)), _lib.SSL_CTX_free)
        _made(_lib.SSL_CTX_set_min_proto_version(context, _TLS_1_3))
        _lib.SSL_CTX_set_verify(context, _VERIFY_PEER_AND_FAIL_WITHOUT, _ffi.NULL)
        # No session is resumed. The two tickets that a listening side sends all the same are short
        # ones, and the dialling side reads them with the answer to its hello.
        _lib.SSL_CTX_set_options(context, _lib.SSL_OP_NO_TICKET)
        _lib.SSL_CTX_set_session_cache_mode(context, _lib.SSL_SESS_CACHE_OFF)
        files = (os.fsencode(certificate), os.fsencode(key), os.fsencode(authority))
        _made(_lib.SSL_CTX_load_verify_locations(context, files[2], _ffi.NULL))
        _made(_lib.SSL_CTX_use_certificate_chain_file(context, files[0]))
        _made(_lib.SSL_CTX_use_PrivateKey_file(context, files[1], _PEM))
        _made(_lib.SSL_CTX_check_private_key(context))

    def __call__(self, raw: socket.socket) -> RecordsTls:
        return RecordsTls(raw, self._context, self._server_side)


class RecordsTls(TlsSocket):
    """See `TlsSocket`. OpenSSL's objects live as long as this one: a thread that is in one of its
    methods keeps it. Freeing them says no farewell and touches no socket."""

    def __init__(self, raw: socket.socket, context: Any, server_side: bool) -> None:
        super().__init__(raw, server_side)
        # It keeps the context.
        self._ssl = _ffi.gc(_made(_lib.SSL_new(context)), _lib.SSL_free)
        incoming, outgoing = (_made(_lib.BIO_new(_lib.BIO_s_mem())) for _ in range(2))
        _lib.SSL_set_bio(self._ssl, incoming, outgoing)  # which owns them from here
        (_lib.SSL_set_accept_state if server_side else _lib.SSL_set_connect_state)(self._ssl)
        self._records = Records(_FUNCTIONS, _address(self._ssl), _address(outgoing), _error)

    def identity(self) -> str:
        certificate = _lib.SSL_get_peer_certificate(self._ssl)
        if certificate == _ffi.NULL:
            return ""
        memory = _ffi.gc(_made(_lib.BIO_new(_lib.BIO_s_mem())), _lib.BIO_free)
        try:
            _made(_lib.i2d_X509_bio(memory, certificate))
        finally:
            _lib.X509_free(certificate)
        start = _ffi.new("char **")
        size = _lib.BIO_get_mem_data(memory, start)
        der = bytes(_ffi.buffer(start[0], size))
        try:
            subject = x509.load_der_x509_certificate(der).subject
        except (ValueError, x509.InvalidVersion) as error:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, f"the peer's certificate: {error}") from error
        names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(names[0].value) if names else ""

    def cipher(self) -> str:
        known = _lib.SSL_get_current_cipher(self._ssl)
        return "" if known == _ffi.NULL else _ffi.string(_lib.SSL_CIPHER_get_name(known)).decode()

    def negotiate(self) -> bool:
        _lib.ERR_clear_error()
        result = _lib.SSL_do_handshake(self._ssl)
        if result != 1 and _lib.SSL_get_error(self._ssl, result) != _WANT_READ:
            raise _error()
        return bool(result == 1)

    def seal(self, data: Buffer) -> None:
        self._records.seal(data)

    def open(self, view: memoryview) -> int | None:
        return self._records.open(view)

    def flush(self) -> None:
        self._records.flush(self.raw.fileno(), self._timeout_s())

    def fill(self) -> int:
        return self._records.fill(self.raw.fileno(), self._timeout_s())

    def send_views(self, views: Sequence[Buffer]) -> None:
        self._records.write(self.raw.fileno(), views, self._timeout_s())

    def recv_views(self, views: Sequence[memoryview]) -> None:
        if not self._records.read(self.raw.fileno(), views, self._timeout_s()):
            raise ConnectionResetError("closed")

    def _timeout_s(self) -> float:
        timeout_s = self.raw.gettimeout()
        return -1.0 if timeout_s is None else timeout_s


def _made(result: Any) -> Any:
    """What a call made. Raises ssl.SSLError where it made nothing."""
    if not result or (isinstance(result, int) and result < 0):
        raise _error()
    return result


def _error() -> ssl.SSLError:
    """The last error of this thread's queue, which is emptied."""
    code = 0
    while following := _lib.ERR_get_error():
        code = following
    reason = _lib.ERR_reason_error_string(code) if code else _ffi.NULL
    words = "unknown TLS error" if reason == _ffi.NULL else _ffi.string(reason).decode()
    return ssl.SSLError(ssl.SSL_ERROR_SSL, words)
