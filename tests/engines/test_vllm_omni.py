"""The backend of vLLM-Omni in the engine itself: its Wan, Ulysses and compilation, found through the entry point."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from mhla_diffusers.attention import sparse_attention
from mhla_diffusers.config import NOTHING_DENSE

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vllm-omni is missing; make engines installs and tests it", allow_module_level=True)

import tiny_wan_in_vllm_omni as tiny

from tests.refusals import refused

TOKENS = 5 * 8 * 12


@pytest.fixture(scope="module")
def backend():
    """The module that the entry point has loaded."""
    tiny.load_plugins()
    return sys.modules["mhla_diffusers.engines.vllm_omni"]


@pytest.fixture
def settings(backend, monkeypatch):
    """Return a function that sets the backend's variables as a new process would read them."""

    def change(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        backend.engine.cache_clear()

    change(MHLA_MIN_TOKENS="0", **{f"MHLA_{name.upper()}": str(count) for name, count in NOTHING_DENSE.items()})
    yield change
    backend.engine.cache_clear()


@pytest.fixture
def lines(caplog):
    """A function that returns what the backend has logged."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == "vllm_omni.mhla"]


def wan_output(backend_name, **kwargs):
    with tiny.engine(backend_name) as config:
        return tiny.denoise(tiny.make_wan(config), **kwargs)


def self_attention(backend, tokens=TOKENS, **kwargs):
    """An attention of the backend, and tensors for it."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, tiny.HEADS, tiny.HEAD_DIM)
    arguments = {"num_heads": tiny.HEADS, "head_size": tiny.HEAD_DIM, "softmax_scale": tiny.HEAD_DIM**-0.5}
    implementation = backend.MHLAImpl(**{**arguments, "prefix": "blocks.1.attn1", "qkv_layout": "BSND", **kwargs})
    return implementation.forward, [torch.randn(shape, generator=generator) for _ in range(3)]


def softmax(query, key, value):
    return functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def operator(query, key, value, grid=tiny.GRID, **kwargs):
    return sparse_attention(query, key, value, grid, density=0.15, **kwargs)


def layout(**kwargs):
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, VideoTokenLayout

    mask = kwargs.pop("attn_mask", None)
    return AttentionMetadata(attn_mask=mask, video_layout=VideoTokenLayout(**kwargs))


def test_density_1_is_the_dense_attention_of_the_engine(settings, lines):
    settings(MHLA_DENSITY="1.0")
    torch.testing.assert_close(wan_output("MHLA"), wan_output("TORCH_SDPA"), atol=1e-5, rtol=0)
    assert lines() == ["MHLA: sparse in 2 of 2 attentions"]


def test_self_attention_is_the_operator_and_cross_attention_the_engines(settings):
    settings(MHLA_DENSITY="0.15")
    calls = {}
    with tiny.engine("MHLA") as config:
        wan = tiny.make_wan(config)
        for name in ("attn1", "attn2"):
            module = getattr(wan.blocks[1], name).attn
            module.register_forward_hook(lambda _, args, output, name=name: calls.update({name: (args[:3], output)}))
        tiny.denoise(wan)
    tensors, output = calls["attn1"]
    torch.testing.assert_close(output, operator(*tensors), atol=0, rtol=0)
    assert (output - softmax(*tensors)).abs().max() > 1e-2
    tensors, output = calls["attn2"]
    torch.testing.assert_close(output, softmax(*tensors), atol=0, rtol=0)


def test_dense_steps_and_layers_are_counted_over_a_call(settings, lines):
    settings(MHLA_DENSE_FIRST="1", MHLA_DENSE_LAYERS="1")
    with tiny.engine("MHLA") as config:
        wan = tiny.make_wan(config)
        for step in range(3):
            tiny.denoise(wan, step=step)
        assert len(lines()) == 2
    assert lines()[2:] == ["MHLA: sparse in 2 of 6 attentions, 3 dense: first layers, 1 dense: dense steps"]


def test_what_dense_steps_measure_corrects_the_steps_that_follow(settings):
    """Also where the model does not tell how many steps there are, as the engine's Wan does not."""
    outputs = {}
    for first in ("0", "1"):
        settings(MHLA_DENSITY="0.05", MHLA_DENSE_FIRST=first)
        with tiny.engine("MHLA") as config:
            wan = tiny.make_wan(config)
            outputs[first] = [tiny.denoise(wan, step=step) for step in range(2)]
    exact = wan_output("TORCH_SDPA")
    torch.testing.assert_close(outputs["1"][0], exact, atol=0, rtol=0)
    errors = {first: float((steps[1] - exact).norm()) for first, steps in outputs.items()}
    assert errors["1"] < 0.2 * errors["0"]


@pytest.mark.parametrize(
    ("metadata", "kwargs", "words"),
    [
        (lambda: None, {}, "the token grid is unknown"),
        (lambda: layout(latent_grid=(5, 8, 13)), {}, "480 tokens are not those of the grid 5x8x13"),
        (lambda: layout(latent_grid=tiny.GRID, attn_mask=torch.ones(1, TOKENS).bool()), {}, "a mask of shape (1, 480)"),
        (
            lambda: layout(latent_grid=(4, 8, 12), attn_mask=torch.ones(1, 1, 480, 480).bool()),
            {},
            "a mask of shape (1, 1,",
        ),
        (lambda: layout(latent_grid=tiny.GRID), {"causal": True}, "causal attention"),
    ],
)
def test_what_cannot_be_sparse_is_dense_with_the_reason(settings, lines, backend, metadata, kwargs, words):
    attend, tensors = self_attention(backend, **kwargs)
    output = attend(*tensors, metadata())
    dense, _ = self_attention(backend, role="cross", **kwargs)
    torch.testing.assert_close(output, dense(*tensors, metadata()), atol=0, rtol=0)
    assert words in lines()[0]


def test_cross_attention_is_no_self_attention_that_failed(settings, lines, backend):
    for role, length in (("cross", TOKENS), ("longcat_video.avatar_audio", 7)):
        attend, (query, key, value) = self_attention(backend, role=role)
        key, value = key[:, :length], value[:, :length]
        torch.testing.assert_close(attend(query, key, value), softmax(query, key, value), atol=0, rtol=0)
    backend.engine().end()
    assert lines() == []


def test_tokens_before_a_video_attend_to_everything_and_padding_takes_no_part(settings, backend):
    """MiniMax-H3's sequence: text and sound, the video, and padding that a mask may hide."""
    settings(MHLA_DENSITY="0.15")
    attend, tensors = self_attention(backend, 9 + TOKENS + 5)
    mask = torch.arange(9 + TOKENS + 5)[None] < 9 + TOKENS
    used = [x[:, : 9 + TOKENS] for x in tensors]
    for attn_mask in (None, mask):
        output = attend(*tensors, layout(prefix_len=9, latent_grid=tiny.GRID, attn_mask=attn_mask))
        torch.testing.assert_close(output[:, : 9 + TOKENS], operator(*used, extra=(9, 0)), atol=0, rtol=0)
        torch.testing.assert_close(output[:, :9], softmax(*used)[:, :9], atol=1e-5, rtol=0)
        assert output.shape == tensors[0].shape and not output[:, 9 + TOKENS :].any()


def test_of_several_videos_the_one_that_is_made_is_sparse(settings, backend):
    from vllm_omni.diffusion.attention.backends.abstract import VideoTokenSpan

    settings(MHLA_DENSITY="0.15")
    attend, tensors = self_attention(backend, 3 + 40 + TOKENS + 2 + 6)
    spans = (VideoTokenSpan(3, (2, 4, 5), "reference"), VideoTokenSpan(43, tiny.GRID, "target"))
    output = attend(*tensors, layout(used_len=43 + TOKENS + 2, video_spans=spans))
    used = [x[:, : 43 + TOKENS + 2] for x in tensors]
    torch.testing.assert_close(output[:, : 43 + TOKENS + 2], operator(*used, extra=(43, 2)), atol=0, rtol=0)


@pytest.mark.parametrize("degree", ["ring_degree", "allgather_degree"])
def test_parallelism_that_divides_the_keys_is_refused(settings, backend, degree):
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig

    parallel = DiffusionParallelConfig(**{degree: 2})
    config = OmniDiffusionConfig(model_class_name="WanPipeline", num_gpus=2, parallel_config=parallel)
    with set_current_diffusion_config(config), refused(f"{degree}=1", "ulysses_degree"):
        self_attention(backend)


def test_wrong_variables_stop_the_engine_when_it_loads_a_model(settings):
    settings(MHLA_DENSITY="15")
    with refused("density=15"), tiny.engine("MHLA") as config:
        tiny.make_wan(config)


@pytest.mark.slow
def test_compiled_blocks_count_and_attend_as_before(settings, lines):
    """More layers than torch recompiles for (eight), so that a layer or step baked into a graph would be noticed."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters
    from vllm_omni.diffusion.compile import regionally_compile

    outputs = []
    for compiled in (False, True):
        settings(MHLA_DENSITY="0.15", MHLA_DENSE_FIRST="1")
        reset()
        counters.clear()
        with tiny.engine("MHLA") as config:
            wan = tiny.make_wan(config, layers=10)
            if compiled:
                regionally_compile(wan, backend="aot_eager", dynamic=True)
            outputs.append([tiny.denoise(wan, step=step) for step in range(3)])
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=0)
    assert lines().count("MHLA: sparse in 20 of 30 attentions, 10 dense: dense steps") == 2
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["frames"]["cache_limit"] and counters["stats"]["unique_graphs"] < 20


@pytest.mark.slow
def test_two_processes_with_ulysses_give_what_one_gives(settings, tmp_path):
    settings(MHLA_DENSITY="0.15")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    program = f"import sys; from {tiny.__name__} import run_in_process; run_in_process(sys.argv[1])"
    command = [*launch, sys.executable, "-c", program, tmp_path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    # at the end of a process, as the call is not over
    assert said.count("MHLA: sparse in 4 of 4 attentions") == 2
    with tiny.engine("MHLA") as config:
        wan = tiny.make_wan(config)
        expected = [tiny.denoise(wan, grid) for grid in (tiny.GRID, tiny.ODD_GRID)]
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, atol=1e-5, rtol=0)
