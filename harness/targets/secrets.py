"""What must not be written down: keys in headers, URLs, bodies and command lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

HIDDEN = "<redacted>"
_SECRET_NAME = re.compile(r"auth|key|token|secret|cookie|password|credential|signature", re.I)
#: Names that look secret and are not.
_HARMLESS = re.compile(r"tokens|api_key_env|max_token|token_ids|min_token", re.I)
_USERINFO = re.compile(r"(https?://)[^/@\s]+@")
_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|signature)[^=&\s]*=)[^&\s]+", re.I)


def is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS.search(name)


def redacted(spec: BaseModel) -> dict[str, Any]:
    """`spec` as plain data, with the values of secret-looking names replaced."""
    cleaned: dict[str, Any] = _clean(spec.model_dump(mode="json"))
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if is_secret(key) and isinstance(each, str) and each else _clean(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_clean(each) for each in value]
    return clean_text(value) if isinstance(value, str) else value


def clean_text(text: str) -> str:
    """`text` without user information or keys in the URLs in it."""
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO.sub(rf"\1{HIDDEN}@", text))


def clean_command(words: Sequence[str]) -> list[str]:
    """A command line with the values of secret headers and body members replaced."""
    cleaned = []
    for word in words:
        name, mark, value = word.partition("=") if word.startswith("--") else ("", "", word)
        header, colon, _ = value.partition(":")
        if colon and is_secret(header) and not value.startswith(("http:", "https:", "{")):
            value = f"{header}: {HIDDEN}"
        elif value.startswith("{") and _SECRET_NAME.search(value):
            value = HIDDEN
        cleaned.append(name + mark + clean_text(value))
    return cleaned
