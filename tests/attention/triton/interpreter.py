"""Triton's interpreter, which runs the kernels of these tests on the CPU.

Importing this file chooses it. That has to happen before Triton is imported for the first time: a kernel is made for
the interpreter, or for a GPU, when it is decorated.
"""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("Triton was imported before TRITON_INTERPRET=1 was set; import this file first.")
os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402 - the variable above comes first


def patch_language_once_per_function() -> None:
    """Make the interpreter several times faster and no different.

    It replaces the functions of triton.language anew at each call of a helper function, which does nothing after the
    first: the replacements stay.
    """
    patched = set()
    patch_language = interpreter._patch_lang

    def call(self, *args, **kwargs):
        if self.fn not in patched:
            patched.add(self.fn)
            patch_language(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


patch_language_once_per_function()
