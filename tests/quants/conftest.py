"""Kernels run under Triton's interpreter where there is no GPU."""

import tests.support.triton_interpreter  # noqa: F401  chooses the interpreter
