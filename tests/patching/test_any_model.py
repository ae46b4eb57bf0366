"""Models without a family: sparse attention wherever they call PyTorch's attention, known by a token grid."""

import copy
import logging
import math
import threading
from functools import partial

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from mhla_diffusers.patching.attend import EngineAttention, EngineSettings
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mhla_diffusers as mhla
from mhla_diffusers.attention import sparse_attention
from mhla_diffusers.families.refused import BY_GRID

from ..models import assert_changed, seeded
from ..refusals import refused

GRID, HEADS, HEAD_DIM, TEXT = (4, 6, 8), 2, 16, 5
TOKENS = math.prod(GRID) + TEXT


class Plain(nn.Module):
    """A transformer of nobody: text behind the video in one sequence, and cross-attention to a caption."""

    def __init__(self, layers: int = 3, causal: bool = False) -> None:
        super().__init__()
        size = HEADS * HEAD_DIM
        self.layers = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(layers))
        self.cross, self.causal = nn.Linear(size, size), causal

    def forward(self, hidden_states, caption, mask=None):
        def split(x):
            return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

        for layer in self.layers:
            query, key, value = map(split, layer(hidden_states).chunk(3, dim=-1))
            attended = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=self.causal)
            hidden_states = hidden_states + attended.transpose(1, 2).flatten(2)
            crossed = functional.scaled_dot_product_attention(split(self.cross(hidden_states)), *[split(caption)] * 2)
            hidden_states = hidden_states + crossed.transpose(1, 2).flatten(2)
        return hidden_states


def plain(**settings):
    return seeded(Plain, **settings)


def inputs(tokens=TOKENS):
    torch.manual_seed(1)
    return torch.randn(2, tokens, HEADS * HEAD_DIM), torch.randn(2, 7, HEADS * HEAD_DIM)


def run(model, arguments):
    with torch.no_grad():
        return model(*arguments)


def cosmos():
    model = seeded(
        diffusers.CosmosTransformer3DModel,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_embed_dim=8,
        adaln_lora_dim=4,
        max_size=(4, 16, 16),
        concat_padding_mask=False,
    )
    torch.manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(1, 4, 4, 12, 16),
        "encoder_hidden_states": torch.randn(1, 6, 8),
        "timestep": torch.tensor([500]),
    }
    return model, arguments


def ovis():
    axes = {"axes_dims_rope": (4, 6, 6)}
    model = seeded(
        diffusers.OvisImageTransformer2DModel,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        **axes,
    )
    torch.manual_seed(1)
    rows, columns = (torch.arange(size).float() for size in (8, 12))
    arguments = {
        "hidden_states": torch.randn(1, 96, 16),
        "encoder_hidden_states": torch.randn(1, TEXT, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), rows, columns),
        "txt_ids": torch.zeros(TEXT, 3),
    }
    return model, arguments


def hidream(height, width):
    model = seeded(
        diffusers.HiDreamImageTransformer2DModel,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=24,
        num_attention_heads=2,
        caption_channels=[16, 16],
        text_emb_dim=12,
        axes_dims_rope=(8, 8, 8),
        max_resolution=(32, 32),
        llama_layers=[0, 1],
        force_inference_output=True,
    )
    torch.manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(1, 4, height, width),
        "timesteps": torch.tensor([500]),
        "encoder_hidden_states_t5": torch.randn(1, 5, 16),
        "encoder_hidden_states_llama3": torch.randn(2, 1, 6, 16),
        "pooled_embeds": torch.randn(1, 12),
    }
    return model, arguments


def test_density_1_is_the_model_itself_and_removal_leaves_nothing():
    model, arguments = plain(), inputs()
    before, expected = (dict(vars(model)), type(model)), run(model, arguments)
    mhla.apply_mhla(model, grid=GRID, extra=(0, TEXT), density=1.0)
    assert "all pairs listed" in str(mhla.describe(model)) and "others" not in str(mhla.describe(model))
    assert mhla.is_patched(model) and isinstance(model, Plain)
    torch.testing.assert_close(run(model, arguments), expected, atol=1e-5, rtol=1e-5)
    mhla.remove_mhla(model)
    assert (dict(vars(model)), type(model)) == before and not mhla.is_patched(model)
    assert torch.equal(run(model, arguments), expected)


def test_other_settings_are_a_fresh_patch_with_them():
    model, arguments = mhla.apply_mhla(plain(), grid=GRID, extra=(0, TEXT), density=0.2), inputs()
    sparse = run(model, arguments)
    assert mhla.change_mhla(model, density=0.5) is model
    expected = run(mhla.apply_mhla(plain(), grid=GRID, extra=(0, TEXT), density=0.5), arguments)
    assert torch.equal(run(model, arguments), expected) and not torch.equal(sparse, expected)
    for settings, offending in (({"density": 2}, "2"), ({"backend": "eager"}, "eager"), ({"layers": "2/3"}, "2/3")):
        with refused(offending):
            mhla.change_mhla(model, **settings)
    with mhla.mhla_disabled(model), pytest.raises(ValueError, match="switched off"):
        mhla.change_mhla(model, density=0.3)
    assert torch.equal(run(model, arguments), expected), "what is refused changes nothing"


def test_a_patch_without_layers_has_nothing_to_save(tmp_path, caplog):
    model = mhla.apply_mhla(plain(), grid=GRID, extra=(0, TEXT))
    for call in (lambda: mhla.save_mhla(model, tmp_path), lambda: mhla.load_mhla(model, "tiny-wan-mhla")):
        with refused("Plain", "no parameters", "same arguments"):
            call()
    assert not list(tmp_path.iterdir()) and not caplog.records
    assert mhla.mhla_layers(model) == {} and "Plain" in caplog.text, "said that it has none"


def test_attentions_on_the_grid_are_the_operator_and_all_others_stay(caplog):
    caplog.set_level(logging.INFO)
    model, arguments = plain(layers=1), inputs()
    expected = run(model, arguments)
    mhla.apply_mhla(model, grid=GRID, extra=(0, TEXT), density=0.2)
    found = run(model, arguments)
    hidden_states, caption = arguments
    query, key, value = (
        x.unflatten(-1, (-1, HEAD_DIM)) for x in model.layers[0](hidden_states).detach().chunk(3, dim=-1)
    )
    attended = sparse_attention(query, key, value, GRID, density=0.2, extra=(0, TEXT))

    def sparse(*_, **__):
        return attended.transpose(1, 2)

    own = functional.scaled_dot_product_attention
    calls = iter([sparse, own])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", lambda *x, **y: next(calls)(*x, **y))
        assert torch.equal(run(plain(layers=1), arguments), found)
    assert_changed(found, expected)
    assert "sparse in 1 of 2 attentions, 1 dense: 197 queries of 7 keys" in str(mhla.describe(model))
    assert sum("cross-attention" in line for line in caplog.messages if line.startswith("MHLA: dense")) == 1


@pytest.mark.parametrize(
    ("settings", "mask", "tokens", "reason"),
    [
        ({"causal": True}, None, 197, "causal attention"),
        ({}, torch.ones(197, 197, dtype=torch.bool), 197, "a mask"),
        ({}, None, 180, "180 tokens are not those of the grid"),
    ],
)
def test_what_does_not_fit_stays_dense_and_is_told_once(settings, mask, tokens, reason, caplog):
    model, arguments = plain(**settings), (*inputs(tokens), mask)
    expected = run(model, arguments)
    mhla.apply_mhla(model, grid=GRID, extra=(0, TEXT))
    for _ in range(2):
        assert torch.equal(run(model, arguments), expected)
    assert sum(reason in line for line in caplog.messages) == 1
    assert reason in str(mhla.describe(model))


def test_grid_and_extra_as_functions_of_the_arguments():
    model = plain()
    mhla.apply_mhla(
        model, grid=lambda x, caption: (x.shape[1] // 48, 6, 8), extra=lambda x, caption: (0, x.shape[1] % 48)
    )
    for frames, text in ((4, 5), (3, 2)):
        arguments = inputs(frames * 48 + text)
        expected = plain()
        mhla.apply_mhla(expected, grid=(frames, 6, 8), extra=(0, text))
        assert torch.equal(run(model, arguments), run(expected, arguments))


def qwenimage21(cached=False):
    model = seeded(
        diffusers.QwenImage21Transformer2DModel,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=8,
        axes_dims_rope=(4, 6, 6),
    )
    torch.manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(2, 192, 16),
        "encoder_hidden_states": torch.randn(2, TEXT, 8),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 16, 12)]] * 2,
        "img_mask": torch.tensor([[False] * TEXT + [True] * 48] * 2),
    }
    if cached:  # as all steps but the first: the prompt's keys are there, and no queries
        cache = QwenImage21KVCache(2)
        with torch.no_grad():
            model(**arguments, kv_cache=cache, kv_cache_mode="extract")
        arguments |= {"kv_cache": cache, "kv_cache_mode": "cached"}
    return model, arguments


def cosmos3():
    model = seeded(
        diffusers.Cosmos3OmniTransformer,
        head_dim=16,
        hidden_size=32,
        intermediate_size=32,
        latent_channel=4,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        patch_latent_dim=16,
        vocab_size=32,
        rope_axes_dim=(4, 2, 2),
    )
    torch.manual_seed(1)
    video = torch.arange(TEXT, TOKENS)
    places = torch.cartesian_prod(*map(torch.arange, GRID)).T + TEXT
    arguments = {
        "input_ids": torch.arange(TEXT),
        "text_indexes": torch.arange(TEXT),
        "position_ids": torch.cat([torch.arange(TEXT).expand(3, -1), places], 1),
        "und_len": TEXT,
        "sequence_length": TOKENS,
        "vision_tokens": [torch.randn(1, 4, 4, 12, 16)],
        "vision_token_shapes": [GRID],
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video,
        "vision_timesteps": torch.full((192,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(4)],
    }
    return model, arguments


# of text HiDream's attentions see T5's 5 tokens and twice Llama's 6, and of an image that is not square padding, to 256
@pytest.mark.parametrize(
    ("make", "grid", "extra"),
    [
        (cosmos, (4, 6, 8), (0, 0)),
        (ovis, (8, 12), (TEXT, 0)),
        (partial(hidream, 16, 24), (8, 12), (0, 256 - 96 + 17)),
        (partial(hidream, 32, 32), *(None,) * 2),
        (partial(hidream, 16, 24), *(None,) * 2),
        (qwenimage21, *(None,) * 2),
        (partial(qwenimage21, cached=True), *(None,) * 2),
        (cosmos3, *(None,) * 2),
    ],
    ids=["cosmos", "ovis", "hidream", "hidream, square", "hidream, not square", "qwenimage21", "cached", "cosmos3"],
)
def test_classes_of_diffusers_without_a_family(make, grid, extra):
    """For some classes the package knows the arguments; its error names them where they are missing."""
    model, arguments = make()

    def predict():
        with torch.no_grad():
            found = model(**arguments, return_dict=False)[0]
            return found[0] if isinstance(found, list) else found

    places = {"grid": grid, "extra": extra}
    if grid is None:
        known = BY_GRID[type(model).__name__]
        with refused(known):
            mhla.apply_mhla(model)
        places = eval(f"dict({known})")
    expected = predict()
    mhla.apply_mhla(model, **places, density=1.0)
    torch.testing.assert_close(predict(), expected, atol=1e-4, rtol=1e-4)
    mhla.remove_mhla(model)
    mhla.apply_mhla(model, **places, density=0.2)
    assert_changed(predict(), expected)
    assert "sparse in 2 of" in str(mhla.describe(model))
    with mhla.mhla_disabled(model):
        assert torch.equal(predict(), expected)
    mhla.remove_mhla(model)
    assert torch.equal(predict(), expected)


def test_threads_copies_and_other_models_are_left_alone():
    model, other, arguments = plain(), plain(), inputs()
    expected = run(other, arguments)
    mhla.apply_mhla(model, grid=GRID, extra=(0, TEXT))
    clone, found, sparse = copy.deepcopy(model), [], run(model, arguments)
    threads = [threading.Thread(target=lambda m: found.append(run(m, arguments)), args=(m,)) for m in (model, clone)]
    for thread in threads:
        thread.start()
    assert torch.equal(run(other, arguments), expected)
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, sparse) for one in found)
    mhla.remove_mhla(model)
    assert torch.equal(run(clone, arguments), sparse)


class Scheduler:
    """Counts steps, as schedulers of diffusers do."""

    def __init__(self, steps: int) -> None:
        self.timesteps, self.step_index, self.begin_index, self.order = torch.arange(steps), None, None, 1


class Pipe:
    def __init__(self, transformer: nn.Module) -> None:
        self.components, self.scheduler = {"transformer": transformer}, None

    def __call__(self, arguments, steps, until=None):
        self.scheduler, outputs = Scheduler(steps), []
        for index in range(steps)[:until]:
            outputs.append(run(self.components["transformer"], arguments))
            self.scheduler.step_index = index + 1
        return outputs


def test_dense_steps_and_what_they_show_in_a_pipeline():
    arguments, expected = inputs(), run(plain(), inputs())
    pipe = mhla.apply_mhla(Pipe(plain()), grid=GRID, extra=(0, TEXT), refresh=3)
    first, second, third, fourth, *_ = pipe(arguments, 6)
    assert torch.equal(first, expected) and torch.equal(fourth, expected)
    dropped = mhla.apply_mhla(Pipe(plain()), grid=GRID, extra=(0, TEXT), refresh=3, carry=False)(arguments, 6)
    distances = [float((x - expected).norm()) for x in (second, third, dropped[1])]
    assert distances[0] < distances[1] < distances[2]  # the input stays the same, so what is carried is what is lost
    assert torch.equal(pipe(arguments, 6)[1], second)


@pytest.mark.parametrize("before", [{"steps": 1}, {"steps": 6, "until": 1}, {"steps": 4, "until": 2}])
def test_every_call_of_a_pipeline_begins_afresh(before):
    """Also where the call before ended in the step in which this one begins, which no index of a step tells."""
    arguments, others = inputs(), [-one for one in inputs()]
    settings = {"grid": GRID, "extra": (0, TEXT), "softmax_steps": 1}
    expected = mhla.apply_mhla(Pipe(plain()), **settings)(arguments, 6)
    pipe = mhla.apply_mhla(Pipe(plain()), **settings)
    pipe(others, **before)
    assert all(torch.equal(one, other) for one, other in zip(pipe(arguments, 6), expected, strict=True))


def losses(forwards, living=True, **settings):
    """Error of the last forward of a sampling in which steps make different forwards, by the captions that they take.

    Args:
        forwards: the step of each forward, and the name of the caption that it takes.
        living: whether all forwards get the same tensors as captions, or new ones.
    """
    hidden_states, caption = inputs()
    captions = {"with": caption, "without": -caption}
    expected = run(plain(), (hidden_states, captions[forwards[-1][1]]))
    pipe = mhla.apply_mhla(Pipe(plain()), grid=GRID, extra=(0, TEXT), softmax_steps=1, **settings)
    pipe.scheduler = Scheduler(8)
    for step, name in forwards:
        pipe.scheduler.step_index = step
        caption = captions[name] if living else captions[name].clone()
        found = run(pipe.components["transformer"], (hidden_states + 0, caption))
    return float((found - expected).norm())


def test_a_forward_carries_what_dense_steps_showed_of_its_own_caption():
    """Also where guidance ends, or a step makes a forward more."""
    both = [(0, "without"), (0, "with")]
    carried, dropped = losses([*both, (1, "without"), (1, "with")]), losses([*both, (1, "with")], carry=False)
    assert carried < 0.5 * dropped
    assert losses([*both, (1, "with")]) == losses([*both[::-1], (1, "with")]) == carried
    assert losses([(0, "without"), (1, "with")]) == dropped


def test_captions_that_are_made_anew_carry_nothing(caplog):
    """Which of them a forward takes is not known, since a step may make more or fewer."""
    forwards = [(0, "without"), (0, "with"), (1, "with")]
    assert losses(forwards, living=False) == losses(forwards, carry=False)
    assert caplog.text.count("new tensors as captions") == 1


def test_a_forward_that_failed_may_be_repeated():
    model, (hidden_states, caption) = plain(), inputs()
    pipe = mhla.apply_mhla(Pipe(model), grid=GRID, extra=(0, TEXT), softmax_steps=1)
    found = []
    for fails in (False, True):
        pipe.scheduler = Scheduler(8)
        if fails:
            with pytest.raises(RuntimeError):
                run(model, (hidden_states[:, :, :5], caption))
        for pipe.scheduler.step_index in (0, 1):
            output = run(model, (hidden_states, caption))
        found.append(output)
    assert torch.equal(*found)


def test_a_cache_of_keys_carries_by_layer():
    """The first step of Qwen-Image 2.1 also attends over the prompt, which the others take from the cache."""
    model, arguments = qwenimage21()
    generator = torch.Generator().manual_seed(0)
    latents = [arguments["hidden_states"] + 0.02 * torch.randn(2, 192, 16, generator=generator) for _ in range(3)]

    def sample(pipe):
        cache, outputs = QwenImage21KVCache(2), []
        pipe.scheduler = Scheduler(8)
        for index, latent in enumerate(latents):
            mode = "extract" if index == 0 else "cached"
            with torch.no_grad():
                given = arguments | {"hidden_states": latent, "kv_cache": cache, "kv_cache_mode": mode}
                outputs.append(model(**given, return_dict=False)[0][:, -192:])
            pipe.scheduler.step_index = index + 1
        return torch.stack(outputs[1:])

    expected, errors = sample(Pipe(model)), []
    for carry in (True, False):
        pipe = Pipe(model)
        places = eval(f"dict({BY_GRID['QwenImage21Transformer2DModel']})")
        mhla.apply_mhla(pipe, **places, density=0.2, softmax_steps=1, carry=carry)
        errors.append(float((sample(pipe) - expected).norm()))
        mhla.remove_mhla(pipe)
    assert errors[0] < 0.5 * errors[1]


def test_a_scheduler_that_nobody_steps_is_warned_of(caplog):
    pipe = mhla.apply_mhla(Pipe(plain(layers=1)), grid=GRID, extra=(0, TEXT), softmax_steps=1)
    pipe.scheduler = Scheduler(30)
    for _ in range(20):
        run(pipe.components["transformer"], inputs())
    assert caplog.text.count("scheduler.step()") == 1


def test_a_copied_pipeline_is_taken_by_change_mhla(caplog):
    pipe = mhla.apply_mhla(Pipe(plain()), grid=GRID, extra=(0, TEXT), refresh=3)
    expected, copied = pipe(inputs(), 4), copy.deepcopy(pipe)
    assert not torch.equal(copied(inputs(), 4)[0], expected[0])
    assert "change_mhla(pipe)" in caplog.text
    mhla.change_mhla(copied)
    assert all(torch.equal(one, other) for one, other in zip(copied(inputs(), 4), expected, strict=True))


class Loop:
    """A sampling loop that is not a diffusers pipeline."""

    def __init__(self):
        self.transformer, self.scheduler = plain(), Scheduler(4)


def test_any_object_with_a_transformer_and_a_scheduler_is_a_pipeline():
    loop, expected = Loop(), run(plain(), inputs())
    mhla.apply_mhla(loop, grid=GRID, extra=(0, TEXT), softmax_steps=1)
    assert torch.equal(run(loop.transformer, inputs()), expected)
    loop.scheduler.step_index = 1
    assert_changed(run(loop.transformer, inputs()), expected)
    assert torch.equal(run(mhla.remove_mhla(loop).transformer, inputs()), expected)


def test_grid_is_a_function_of_arguments_by_name_however_they_are_given():
    """As the forward names them, or in their order."""
    expected = run(mhla.apply_mhla(plain(), grid=GRID, extra=(0, TEXT)), inputs())
    for grid in (lambda caption, **_: GRID if caption.shape[1] == 7 else None, lambda x, text: GRID):
        model = mhla.apply_mhla(plain(), grid=grid, extra=lambda hidden_states, **_: (0, hidden_states.shape[1] - 192))
        assert torch.equal(run(model, inputs()), expected)


def test_the_count_of_a_call_ends_behind_its_last_attention():
    """Which here is a cross-attention."""
    pipe = mhla.apply_mhla(Pipe(plain()), grid=GRID, extra=(0, TEXT), softmax_steps=1)
    for _ in range(2):
        pipe(inputs(), 4)
        assert "sparse in 9 of 24 attentions" in str(mhla.describe(pipe))


@pytest.mark.parametrize(
    "shaped",
    [lambda mask: mask, lambda mask: mask.expand(-1, HEADS, TOKENS, -1), lambda mask: torch.where(mask, 0.0, -9.0)],
    ids=["keys", "expanded", "bias"],
)
def test_masks_of_keys_are_taken(shaped):
    mask = shaped(torch.arange(TOKENS).expand(2, 1, 1, -1) < torch.tensor([TOKENS, TOKENS - 2]).view(2, 1, 1, 1))
    expected = run(plain(), (*inputs(), mask))
    model = mhla.apply_mhla(plain(), grid=GRID, extra=(0, None), density=1.0)
    torch.testing.assert_close(run(model, (*inputs(), mask)), expected, atol=1e-4, rtol=1e-4)
    assert "sparse in 3 of 6" in str(mhla.describe(model))
    assert_changed(run(mhla.change_mhla(model, density=0.2), (*inputs(), mask)), expected)


def test_keys_without_queries_change_nothing_for_the_grid():
    query, key, value = (torch.randn(2, TOKENS, HEADS, HEAD_DIM) for _ in range(3))
    attention = EngineAttention(EngineSettings(min_tokens=0), logging.getLogger(__name__))
    found = attention.attend(query[:, TEXT:], key, value, GRID, extra=(TEXT, 0))
    torch.testing.assert_close(found, attention.attend(query, key, value, GRID, extra=(TEXT, 0))[:, TEXT:])


def test_queries_without_an_axis_of_heads_are_told(caplog):
    class Flat(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    run(mhla.apply_mhla(Flat(), grid=GRID), (torch.randn(2, 192, 16),))
    assert "3 axes" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"grid": (4, 0)}, "grid=(4, 0)"),
        ({"grid": GRID, "extra": 5}, "extra=5"),
        ({"grid": GRID, "layers": "2/3"}, "layers='2/3'"),
        ({"grid": GRID, "softmax_steps": 2}, "softmax_steps=2"),
        ({"grid": GRID, "backend": "triton"}, "backend"),
    ],
)
def test_what_cannot_be_had_is_refused_and_nothing_is_changed(arguments, words):
    model = plain()
    with refused(words):
        mhla.apply_mhla(model, **arguments)
    assert not mhla.is_patched(model) and type(model) is Plain


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_attends_alike(whole):
    model = mhla.apply_mhla(plain(), grid=GRID, extra=(0, TEXT))
    expected = run(model, inputs())
    if whole:
        model.compile(backend="eager")
    else:
        for layer in model.layers:
            layer.compile(backend="eager")
    assert torch.equal(run(model, inputs()), expected)


class Scaled(nn.Module):
    """Works on what its block returns with numbers, which PyTorch's compiler makes arguments of its graphs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 96)

        def forward(self, x):
            query, key, value = self.layer(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            return x + functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * 0.25 + 0.1


def test_compiled_functions_behind_an_attention_keep_their_numbers():
    torch._dynamo.reset()
    model, x = seeded(Scaled), torch.randn(1, 192, 32)
    expected = run(model, (x,))
    mhla.apply_mhla(model, grid=GRID, density=1.0)
    torch.testing.assert_close(run(torch.compile(model, backend="eager"), (x,)), expected, atol=1e-5, rtol=1e-5)


def test_disabled_within_disabled_stays_so_until_the_outer_end():
    model, expected = plain(), run(plain(), inputs())
    mhla.apply_mhla(model, grid=GRID, extra=(0, TEXT))
    with mhla.mhla_disabled(model):
        with mhla.mhla_disabled(model):
            pass
        assert torch.equal(run(model, inputs()), expected)
    assert_changed(run(model, inputs()), expected)


class Checkpointed(Plain):
    """Runs its attentions again in the backward pass."""

    reentrant = False

    def forward(self, *arguments):
        return checkpoint(super().forward, *arguments, use_reentrant=self.reentrant)


def gradient(attend, model):
    hidden_states, caption = inputs()
    hidden_states.requires_grad_()
    attend(hidden_states, caption).square().mean().backward()
    weights = model.layers[0].weight.grad.clone()
    model.zero_grad()
    return hidden_states.grad, weights


@pytest.mark.parametrize("reentrant", [True, False])
def test_attentions_that_are_recomputed_stay_dense_in_both_passes(reentrant):
    model = seeded(Checkpointed)
    model.reentrant = reentrant
    expected = gradient(model, model)
    mhla.apply_mhla(model, grid=GRID, extra=(0, TEXT))
    assert all(torch.equal(x, y) for x, y in zip(gradient(model, model), expected, strict=True))
    assert "sparse in 0 of" in str(mhla.describe(model)) and "gradient checkpointing" in repr(mhla.describe(model))
    changed = run(model, inputs())  # without gradients nothing is recomputed
    assert_changed(changed, run(plain(), inputs()))


def test_a_whole_forward_that_is_recomputed_attends_sparsely():
    model = mhla.apply_mhla(plain(), grid=GRID, extra=[0, TEXT])
    expected = gradient(model, model)
    found = gradient(partial(checkpoint, model, use_reentrant=False), model)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    unpatched = plain()
    assert_changed(expected[0], gradient(unpatched, unpatched)[0])


def test_a_part_that_is_patched_is_not_patched_with_the_whole():
    model = cosmos()[0]
    part = model.transformer_blocks[0]
    mhla.apply_mhla(part, grid=GRID)
    with refused(type(part).__name__):
        mhla.apply_mhla(model, grid=GRID)
    with refused(type(part).__name__):
        mhla.describe(part, height=64)


def test_a_forward_without_an_attention_that_the_patch_sees_is_told(caplog):
    model = mhla.apply_mhla(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval(), grid=GRID)
    for _ in range(2):  # inference takes a fast path of PyTorch's own
        run(model, (torch.randn(1, math.prod(GRID), 32),))
    assert caplog.text.count("no scaled_dot_product_attention") == 1
    assert "no scaled_dot_product_attention" in str(mhla.describe(model))
