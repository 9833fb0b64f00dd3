"""Prompts as text: token ids become short words that common vocabularies hold as one token each.

Every word takes as many bytes as every other, so that text is a gather over ids. Equal ids give
equal text, so prefixes repeat in the text exactly where they repeat in the ids.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from workloads.prompts import prompt_tokens
from workloads.request import Request

#: 256 of them.
WORDS = tuple(
    re.findall(
        r"\w+",
        """
ace act add age ago aid aim air all and ant any ape arc are ark arm art ash ask ate awe axe bad
bag ban bar bat bay bed bee beg bet bid big bin bit bow box boy bud bug bun bus but buy cab can
cap car cat cop cow cry cub cup cut dad dam day den dew did die dig dim dip dog dot dry due dug
ear eat egg ego elm end era eve eye fan far fat fax fed fee few fig fin fit fix fly fog for fox
fun fur gap gas gem get gin god got gum gun gut guy gym had ham has hat hay hen her hey hid him
hip his hit hop hot how hug hut ice icy ill ink inn ion ivy jam jar jaw jet job jog joy jug key
kid kin kit lab lad lag lap law lay led leg let lid lie lip lit log lot low mad man map mat may
men met mid mix mob mom mud mug nap net new nod nor not now nut oak odd off oil old one opt our
out owl own pad pan par pat paw pay pen pet pie pig pin pit pop pot put rag ram ran rat raw red
rib rid rip rob rod rot row rub rug run sad sat saw say sea see set she shy sin sir sit six ski
sky son spy sum sun tag tan tap tax tea ten the tie tin tip toe
        """,
    )
)
_TABLE = np.array([f" {word}".encode() for word in WORDS])


def text(tokens: NDArray[np.int32]) -> bytes:
    """One word for each of `tokens` (0 <= id < 256), separated by spaces."""
    return _TABLE[tokens].tobytes()[1:]


def prompt_text(request: Request, seed: int) -> bytes:
    """The prompt of `request`: as many words as it has tokens; plain ASCII, safe inside JSON."""
    return text(prompt_tokens(request, len(WORDS), seed))


def prompt_ids(request: Request, vocab: int, seed: int) -> bytes:
    """The prompt of `request` as a JSON array of token ids below `vocab`."""
    ids = prompt_tokens(request, vocab, seed)
    return b"[" + ",".join(map(str, ids.tolist())).encode() + b"]"
