"""OpenSSL 3 by its C interface, for what Python's `ssl` does not offer: many records in one call.

Only documented functions with a fixed signature, from the library that carries the major version in
its name. `load()` is None where the host has none (Python may have OpenSSL built in), and `ssl` is
used instead. Every call leaves the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import ssl
from ctypes import c_char_p, c_int, c_long, c_size_t, c_ulong, c_void_p
from typing import Any

#: Results of SSL_get_error.
WANT_READ, WANT_WRITE, SYSCALL, ZERO_RETURN = 2, 3, 5, 6
#: Commands of BIO_ctrl, BIO_int_ctrl and SSL_CTX_ctrl, and what they are given.
FLUSH, SET_BUFFER_SIZE, SET_SSL = 11, 117, 109
READ_BUFFER, WRITE_BUFFER = 0, 1
SET_MODE, SET_LEAST_VERSION = 33, 123
MODE_MOVING_BUFFER = 2
TLS_1_3 = 0x0304
PEM = 1
VERIFY_PEER_AND_FAIL_WITHOUT = 1 | 2
#: A connection that ends without a farewell is an end of stream, not an error of the protocol.
IGNORE_UNEXPECTED_END = 1 << 7

_SSL: dict[str, tuple[Any, ...]] = {  # name -> (result, arguments)
    "TLS_client_method": (c_void_p,),
    "TLS_server_method": (c_void_p,),
    "SSL_CTX_new": (c_void_p, c_void_p),
    "SSL_CTX_free": (None, c_void_p),
    "SSL_CTX_ctrl": (c_long, c_void_p, c_int, c_long, c_void_p),
    "SSL_CTX_set_options": (ctypes.c_uint64, c_void_p, ctypes.c_uint64),
    "SSL_CTX_set_num_tickets": (c_int, c_void_p, c_size_t),
    "SSL_CTX_set_verify": (None, c_void_p, c_int, c_void_p),
    "SSL_CTX_load_verify_locations": (c_int, c_void_p, c_char_p, c_char_p),
    "SSL_CTX_use_certificate_chain_file": (c_int, c_void_p, c_char_p),
    "SSL_CTX_use_PrivateKey_file": (c_int, c_void_p, c_char_p, c_int),
    "SSL_CTX_check_private_key": (c_int, c_void_p),
    "SSL_new": (c_void_p, c_void_p),
    "SSL_free": (None, c_void_p),
    "SSL_set_bio": (None, c_void_p, c_void_p, c_void_p),
    "SSL_set_connect_state": (None, c_void_p),
    "SSL_set_accept_state": (None, c_void_p),
    "SSL_set_quiet_shutdown": (None, c_void_p, c_int),
    "SSL_do_handshake": (c_int, c_void_p),
    "SSL_get1_peer_certificate": (c_void_p, c_void_p),
    "SSL_get_error": (c_int, c_void_p, c_int),
    "SSL_read": (c_int, c_void_p, c_void_p, c_int),
    "SSL_write": (c_int, c_void_p, c_void_p, c_int),
    "BIO_f_ssl": (c_void_p,),
}
_CRYPTO: dict[str, tuple[Any, ...]] = {
    "BIO_new": (c_void_p, c_void_p),
    "BIO_new_socket": (c_void_p, c_int, c_int),
    "BIO_f_buffer": (c_void_p,),
    "BIO_push": (c_void_p, c_void_p, c_void_p),
    "BIO_free_all": (None, c_void_p),
    "BIO_ctrl": (c_long, c_void_p, c_int, c_long, c_void_p),
    "BIO_int_ctrl": (c_long, c_void_p, c_int, c_long, c_int),
    "BIO_read": (c_int, c_void_p, c_void_p, c_int),
    "ERR_clear_error": (None,),
    "ERR_peek_last_error": (c_ulong,),
    "ERR_reason_error_string": (c_char_p, c_ulong),
    "OpenSSL_version": (c_char_p, c_int),
    "X509_free": (None, c_void_p),
    "i2d_X509": (c_int, c_void_p, c_void_p),
}


class Libssl:
    """The functions above, as attributes. `version` in words."""

    def __init__(self, library: ctypes.CDLL, crypto: ctypes.CDLL) -> None:
        """Raises AttributeError where a function is missing."""
        for source, table in ((library, _SSL), (crypto, _CRYPTO)):
            for name, (result, *arguments) in table.items():
                function = getattr(source, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        self.version: str = self.OpenSSL_version(0).decode("ascii", "replace")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def error(self) -> ssl.SSLError:
        """The last error of this thread's queue, which is emptied."""
        code = self.ERR_peek_last_error()
        self.ERR_clear_error()
        reason = self.ERR_reason_error_string(code) if code else None
        return ssl.SSLError(ssl.SSL_ERROR_SSL, (reason or b"unknown TLS error").decode())


@functools.cache
def load() -> Libssl | None:
    """None where libssl 3 is not to be had."""
    try:
        return Libssl(
            ctypes.CDLL("libssl.so.3", use_errno=True),
            ctypes.CDLL("libcrypto.so.3", use_errno=True),
        )
    except (OSError, AttributeError):
        return None
