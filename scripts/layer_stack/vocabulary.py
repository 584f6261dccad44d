"""A tokenizer of any size: the tiny model's, with further words that no text is split into but answers are made of."""

from __future__ import annotations

from itertools import islice, product
from string import ascii_lowercase

from glm5deploy.demo.tiny_tokenizer import TinyTokenizer, train

_NORMAL, _UNUSED = 1, 5


def vocabulary(size: int) -> TinyTokenizer:
    """Exactly ``size`` tokens (at least the tiny model's): normal ones first, then control, user-defined, unused."""
    tiny = train()
    kinds = list(zip(tiny.tokens, tiny.types, strict=True))
    normal = [token for token, kind in kinds if kind == _NORMAL]
    special = [(token, kind) for token, kind in kinds if kind not in (_NORMAL, _UNUSED)]
    missing = size - len(normal) - len(special)
    if missing < 0:
        raise ValueError(f"a vocabulary of {size} tokens cannot hold {len(normal) + len(special)}")
    known = set(tiny.tokens)
    words = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=5))
    normal += islice((word for word in words if word not in known), missing)
    return TinyTokenizer(
        tokens=(*normal, *(token for token, _ in special)),
        types=(*(_NORMAL for _ in normal), *(kind for _, kind in special)),
        merges=tiny.merges,
        words=tiny.words,
    )
