"""Kernels of products with integers as sources that compile without a GPU."""

from __future__ import annotations

from typing import Any

from glm5deploy.quants.arguments import kernel_format
from glm5deploy.quants.formats import FORMATS
from tests.support.compiling import kernel_source

ELEMENTS = {1: "*i16", 2: "*i16", 4: "*i16", 8: "*i16", 16: "*bf16"}
TYPES = dict.fromkeys(("fitted", "sums"), "*fp16") | dict.fromkeys(("scales", "weights", "parts"), "*fp32")
TYPES |= dict.fromkeys(("hidden", "y"), "*bf16") | dict.fromkeys(("order", "work", "tickets", "ids"), "*i32")
# What numbers and pointers of launches are multiples of.
ALIGNED = ("N", "K", "x_stride", "y_stride")


def planes_signature(names: tuple[str, ...], type_name: str) -> dict[str, str]:
    """Pointer types of low, high, words, halves; a missing plane is stood in for by the low one."""
    f = FORMATS[type_name]
    low = ELEMENTS[f.low]
    kinds = (low, ELEMENTS[f.high] if f.high else low, "*i32" if f.word_count else low, "*i16" if f.half_count else low)
    return dict(zip(names, kinds, strict=True))


def integer_source(kernel: Any, formats: dict[str, str], constants: dict[str, Any], terms: str = "*bf16") -> Any:
    """A kernel for planes of GGML types, by the kernel's name for each format, and other constants.

    `terms`: the type of the second product's results.
    """
    names = kernel.arg_names
    constants = {"CHAINED": False} | constants
    known = TYPES | {"x": "*bf16" if "fitted" in names else "*fp16", "terms": terms}
    for name, prefix in {"FMT": "", "G": "g_", "U": "u_"}.items():
        if name in formats:
            constants = constants | {name: kernel_format(FORMATS[formats[name]])}
            planes = tuple(prefix + plane for plane in ("low", "high", "words", "halves"))
            known |= planes_signature(planes, formats[name])
    pointers = [n for n in names if n not in constants and known.get(n, "").startswith("*")]
    return kernel_source(kernel, known, constants, [*pointers, *(n for n in ALIGNED if n in names)])
