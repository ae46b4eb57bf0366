"""Triton's interpreter, several times faster and no different."""

from triton.runtime import interpreter


def patch_language_once_per_function() -> None:
    """Have the interpreter replace the functions of triton.language once for each helper function, not at each call.

    From the second call on that does nothing, for the replacements stay; but it is most of the interpreter's time.
    """
    patched = set()
    patch_language = interpreter._patch_lang

    def call(self, *args, **kwargs):
        if self.fn not in patched:
            patched.add(self.fn)
            patch_language(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
