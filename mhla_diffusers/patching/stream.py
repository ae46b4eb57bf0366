"""A video that a patched transformer makes frame block after frame block, for as long as one likes.

What it keeps of the frame blocks that are over is an :class:`~mhla_diffusers.attention.MHLAState` per attention, whose
size depends on the blocks of the patch and not on the length of the video.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..attention import MHLAState
from ..attention.rope import Rotary
from ..families import get_family, unwrapped
from ..settings import check_names, check_value
from .context import Grid, call_context, split_of
from .finding import find_transformers
from .layer import MHLALayer, layer_of


class VideoStream:
    """Calls a transformer with the frames that come next, as if it were called with all frames up to these.

    ::

        stream = VideoStream(pipe.transformer)
        for latents in frame_blocks:
            for t in pipe.scheduler.timesteps:
                noise = stream(latents, timestep=t.expand(1), encoder_hidden_states=text, keep=False)[0]
                latents = pipe.scheduler.step(noise, t, latents, return_dict=False)[0]
            stream(latents, timestep=0 * t.expand(1), encoder_hidden_states=text)  # what later frames see

    A stream is one video, or a batch of them; the samples of classifier-free guidance are a batch, or two streams. The
    transformer stays as it is: other streams and calls may use it in between, from other threads too, each thread with
    streams of its own. Weights must not change while a stream is used.

    Args:
        model: transformer that is patched with ``causal="block"`` in all layers, or a pipeline with one transformer.

    Raises:
        ValueError: no such model, a pipeline with two transformers, a patch that is not so, one with dense steps,
            tokens that are split between processes, or a model whose family does not give RoPE of later frames.
    """

    def __init__(self, model: Any) -> None:
        names = list(find_transformers(model))
        if len(names) > 1:
            raise ValueError(
                f"{type(model).__name__} has several transformers ({', '.join(names)}), and a stream runs one: "
                f"make one for each, such as VideoStream(pipe.{names[0]})."
            )
        self._transformer: nn.Module = model if isinstance(model, nn.Module) else model.components[names[0]]
        self._inside: Any = unwrapped(self._transformer)
        inside, self._family = self._inside, get_family(self._inside)
        if type(inside).__name__ not in self._family.forward.streamed:
            raise ValueError(
                f"A {type(inside).__name__} cannot be given a video frame block after frame block: its family "
                f"{self._family.name!r} supports {', '.join(self._family.forward.streamed) or 'no transformer'}."
            )
        attentions = self._family.attention.self_attentions(inside)
        self._layers = {name: layer_of(attn) for name, attn in attentions.items()}
        for name, layer in self._layers.items():
            if layer is not None and getattr(layer.config, "causal", None) != "block":
                raise ValueError(
                    f"A stream needs a patch whose frames see no later ones, and {name} runs "
                    f"{layer.config.attention}; patch with causal='block' and a block_length, such as 1 or 3 "
                    "latent frames."
                )
            if layer is not None and layer.config.asks_for_dense_steps:
                raise ValueError(
                    f"{layer.config.dense_words} makes steps attend as before the patch, which leave "
                    "no state behind; a stream needs a patch without them."
                )
        unpatched = [name for name, layer in self._layers.items() if layer is None]
        if unpatched:
            raise ValueError(
                f"A stream needs a state in every self-attention, and softmax attention, which has none, is left in "
                f"{len(unpatched)} of {len(attentions)}: {', '.join(unpatched)}. Patch with layers='all' and "
                "causal='block'."
            )
        self._names = {id(attn): name for name, attn in attentions.items()}
        self._states: dict[str, MHLAState] = {}
        self._grid: Grid | None = None

    @property
    def frames(self) -> int:
        """Latent frames that are over, counted in tokens along the first axis of the grid."""
        if self._grid is None or not self._states:
            return 0
        return next(iter(self._states.values())).length // (self._grid[1] * self._grid[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all states together."""
        return sum(state.nbytes for state in self._states.values())

    def reset(self) -> None:
        """Begin another video; what was kept is freed."""
        self._states, self._grid = {}, None

    def reorder(self, samples: torch.Tensor | Sequence[int]) -> None:
        """Go on with other samples of the batch; ``samples`` are their numbers, which may come several times."""
        for state in self._states.values():
            state.reorder(samples)

    def __call__(self, *args: Any, keep: bool = True, **kwargs: Any) -> Any:
        """Run the transformer on the next frames: one frame block or several, whole ones.

        Args:
            *args: of the transformer's forward.
            keep: whether later frames see these, as they do once these are denoised. Without it the stream stays where
                it is, for a frame block that is denoised in several steps.
            **kwargs: of the transformer's forward.

        Returns:
            What the transformer returns.

        Raises:
            ValueError: ``keep`` that is not a bool, arguments that the transformer's forward lacks; latents of another
                type than its weights; frames that do not fill whole blocks, of another size or batch than before, too
                late for the model's RoPE or with ``beyond="error"`` for the patch; tokens that are split between
                processes; or a call in which not all layers attend with MHLA. The stream is then as before.
        """
        check_value("keep", keep, bool)
        forward: Any = type(self._inside).forward
        names = inspect.signature(forward).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in names.values()):
            check_names(kwargs, [*names][1:] + ["keep"], "argument of a stream")
        if split_of(self._inside) is not None:
            raise ValueError(
                "The tokens of this transformer are split between processes, which a stream does not do; use it before "
                "enable_parallelism(), with a stream for each process."
            )
        if torch.is_grad_enabled() and getattr(self._inside, "gradient_checkpointing", False):
            raise ValueError(
                "Gradient checkpointing would run a block again when the stream has moved on; call the stream under "
                "torch.no_grad(), or transformer.disable_gradient_checkpointing() first."
            )
        step = _Step(self, keep)
        with call_context(stream=step):
            output = self._transformer(*args, **kwargs)
        missing = [name for name in self._layers if name not in step.states]
        if missing:
            raise ValueError(
                f"In this call {', '.join(missing)} did not attend with MHLA, so nothing of these frames can be kept "
                "there. A stream goes on while the patch is neither disabled nor skipped in any layer."
            )
        if keep or self._states:  # what is not kept leaves the mixture of the past, which the next call needs too
            self._states, self._grid = step.states, step.grid
        return output


class _Step:
    """One call of a stream. It works on copies of the states, so that one that fails leaves nothing behind."""

    def __init__(self, stream: VideoStream, keep: bool) -> None:
        self._stream, self.keep, self._first = stream, keep, stream.frames
        self.states: dict[str, MHLAState] = {}
        """States of the attentions that have run, by name."""
        self.grid: Grid | None = None
        self._rotary: tuple[Rotary, Rotary] | None = None
        """What the model handed to the attention before, and what was made of it."""

    def state_of(self, attn: Any, grid: Grid) -> MHLAState:
        """Return what the frame blocks before have left behind in an attention."""
        stream, layer = self._stream, layer_of(attn)
        name = stream._names.get(id(attn))
        if name is None or not isinstance(layer, MHLALayer) or layer is not stream._layers[name]:
            raise ValueError(
                f"{name or type(attn).__name__} is not the attention, with the MHLA layer, that this stream was made "
                "for; make a new VideoStream."
            )
        if stream._grid is not None and grid[1:] != stream._grid[1:]:
            raise ValueError(
                f"The frames before had {stream._grid[1]}x{stream._grid[2]} tokens each, and these have "
                f"{grid[1]}x{grid[2]}; reset() begins a video of another size."
            )
        if name in stream._states:
            state = copy.copy(stream._states[name])
        else:
            state = layer.new_state(grid, getattr(attn.processor, "backend", "auto"))
        self.states[name], self.grid = state, grid
        return state

    def rotary(self, rotary: Rotary | None, grid: Grid) -> Rotary | None:
        """RoPE of the step's place in the video, from what the model hands to its attentions."""
        if rotary is None or not self._first:
            return rotary
        if self._rotary is None or self._rotary[0] is not rotary:
            stream = self._stream
            moved = stream._family.forward.rotary_from(stream._inside, rotary, grid, self._first)
            self._rotary = rotary, moved
        return self._rotary[1]
