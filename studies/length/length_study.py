"""Attentions on a video model of 12,288 tokens that is trained from scratch, in slices of minutes on one GPU.

python studies/length/length_study.py --plan  # counted and predicted; no GPU
python studies/length/length_study.py --device cuda --minutes 9 --output outputs/length  # three times; each goes on
python studies/length/length_study.py --device cpu --minutes 3 --output outputs/length-toy  # the same at toy size
python studies/length/length_study.py --report --output outputs/length  # the plot, elsewhere

The parts, in order. A classifier of digits. A Wan transformer with softmax attention, trained on clips that grow
longer. The gate: if the model shows fewer than 60 % of the digits that it is asked for, all that follows measures the
errors of attention alone. Then attentions in its place: a few without training, eight adapted, and the rest of the grid
without training. What is finished is a file, written aside and renamed, so a kill at any moment costs the row that was
running; training and adaptation go on from their last checkpoint. length.md and length.csv hold the table, length.png
the quality over the cost.
"""

import argparse
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from length_model import LEARNING_RATES, REAL, SOFTMAX, TEXT_DIM, TOY, Row, Size, make_model, rows_of
from length_plan import plan
from length_scenes import Clips, ColourClassifier, Scenes, fine_detail, look, train_classifier
from safetensors.torch import load_file, safe_open

from mhla_diffusers import apply_mhla, mhla_layers
from mhla_diffusers.attention import layout
from mhla_diffusers.benchmark.timing import Budget, time_interleaved
from mhla_diffusers.demo.adaptation import DIFFUSION
from mhla_diffusers.devices import choose_device
from mhla_diffusers.evaluation.metrics import frechet_distance
from mhla_diffusers.families import NoisedBatch, predict, trained_family
from mhla_diffusers.files import check_writable, read_json, write_json, write_tensors, write_text, written_aside
from mhla_diffusers.patching import call_context
from mhla_diffusers.reporting import require_matplotlib, write_table
from mhla_diffusers.training import ObjectiveWeights, StageConfig
from mhla_diffusers.training.objectives import stage_losses
from mhla_diffusers.training.optimizer import load_optimizer_state, make_optimizer, optimizer_state
from mhla_diffusers.training.roles import Roles, Teacher, make_trainable, trainable_names

# ---- the clock, and what a study holds -------------------------------------------------------------------------------

MARGIN = 20.0
"""Seconds before the end of a slice in which nothing is begun: to write a checkpoint, the table and the plot."""
CHECKPOINT_EVERY = 60.0
ROW_SECONDS = 5.0
"""Without which no row is begun; it may take longer, at the cost of the margin."""
SAID_EVERY, MOST_SKIPPED, MOST_GRAPHS = 100, 10, 128
FLOW_SHIFT, GUIDANCE, DROPOUT = 3.0, 2.5, 0.1
HELD_OUT_SEED, CALIBRATION_SEED, NOISE = 2 * 10**6, 3 * 10**6, 2**40
"""Seeds; training's are the updates, and noise has others than scenes."""


class SliceOver(Exception):
    """The slice has no time left for what comes next."""


class Clock:
    """The end of this slice, and how long first calls take."""

    def __init__(self, minutes: float, started: float, compilation: float) -> None:
        self._end = started + 60 * minutes - MARGIN
        self._met: set[object] = set()
        self.compilation = compilation
        """Seconds that a graph's first call is given."""

    def need(self, seconds: float) -> None:
        """Raise :class:`SliceOver` unless so many seconds are left."""
        if time.time() + seconds > self._end:
            raise SliceOver

    @contextmanager
    def call(self, graph: object, usual: float = 0.0) -> Iterator[None]:
        """Around work that compiles when ``graph``, unless None, is met first, and else takes a usual time."""
        is_first, began = graph is not None and graph not in self._met, time.time()
        self.need(self.compilation if is_first else 2 * usual)
        yield
        if is_first:  # the next may take half as long again
            longest = 1.5 * (time.time() - began)
            self.compilation = max(self.compilation, longest) if self._met else longest
            self._met.add(graph)


@dataclass
class Study:
    """What all parts share."""

    size: Size
    device: torch.device
    output: Path
    clock: Clock
    gate: float
    classifier: Any = None
    softmax: Any = None
    """The trained model, compiled."""
    with_clips: bool = True
    """Whether the model is good enough to be judged by its clips."""
    scenes: dict[str, Scenes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.size.pixels, self.size.frames, self.size.digits
        self.scenes = {split: Scenes(split, *shape, self.device) for split in ("train", "held-out")}
        words = torch.randn(10 * self.size.digits, TEXT_DIM, generator=torch.Generator().manual_seed(0))
        self._words = words.to(self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of all forwards."""
        enabled = self.size.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def captions(self, labels: torch.Tensor) -> torch.Tensor:
        """A word for the digit of every colour: (B, K, TEXT_DIM). The empty caption is zeros."""
        return self._words[labels + 10 * torch.arange(labels.shape[1], device=labels.device)]

    def batch(self, split: str, seed: int, count: int, frames: int, dropout: float = 0.0) -> NoisedBatch:
        """Scenes noised to times that are spread evenly over the training distribution."""
        clips = self.scenes[split].draw(seed, count, frames)
        chance = torch.Generator(self.device).manual_seed(NOISE + seed)
        noise = torch.randn(clips.pixels.shape, generator=chance, device=self.device)
        quantiles = torch.rand(count, generator=chance, device=self.device)
        quantiles = ((torch.arange(count, device=self.device) + quantiles) / count).clamp(1e-4, 1 - 1e-4)
        kept = torch.rand(count, 1, 1, generator=chance, device=self.device) >= dropout
        conditioning = {"encoder_hidden_states": self.captions(clips.labels) * kept}
        return self.process.make_batch(clips.pixels, noise, quantiles, conditioning)

    @property
    def process(self) -> Any:
        """How the model is trained."""
        return trained_family(self.softmax).process(self.softmax, FLOW_SHIFT)

    def new_model(self) -> Any:
        """A fresh copy of the trained model, not compiled; before it is trained, with random weights."""
        torch.manual_seed(0)
        model = make_model(self.size).to(self.device)
        if self.weights.is_file():
            model.load_state_dict({name: value.float() for name, value in load_file(self.weights).items()})
        return model

    @property
    def weights(self) -> Path:
        """Of the trained model, in bfloat16, from which everything starts."""
        return self.output / "softmax.safetensors"

    def compiled(self, model: Any) -> Any:
        """The model, its blocks compiled in place, one graph for a number of frames and clips."""
        model.compile_repeated_blocks(backend=self.size.compiler, fullgraph=True, dynamic=False)
        return model


def say(text: str) -> None:
    """One line at once, so that a killed run has said it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# ---- updates that go on where they stopped ---------------------------------------------------------------------------


@dataclass
class Done:
    """How far it has come."""

    stage: int = 0
    step: int = 0
    """Updates of this stage."""
    seconds: float = 0.0
    """That they took."""
    usual: float = 0.0
    """Median of them in the last slice that had any."""


@dataclass(frozen=True)
class Stage:
    """Updates of one kind."""

    settings: StageConfig
    backward: Callable[[int, float], torch.Tensor]
    """(update, part done) → the loss, whose gradients it has accumulated."""
    graph: Callable[[float], object]
    """Part done → what is compiled anew when it changes; None if nothing is compiled."""
    seconds: float | None = None
    """How long it lasts, if that is not ``settings.steps``."""

    def part_done(self, done: Done) -> float:
        """From 0 to 1."""
        return done.step / self.settings.steps if self.seconds is None else done.seconds / self.seconds

    def rate(self, step: int, part: float) -> float:
        """Factor of the learning rate: warm-up, then constant or cosine."""
        warm = min(1.0, (step + 1) / (self.settings.warmup_steps + 1))
        return warm * (0.5 * (1 + math.cos(math.pi * part)) if self.settings.scheduler == "cosine" else 1.0)


def train(study: Study, model: Any, stages: Sequence[Stage], file: Path) -> float:
    """Train through the stages, from the checkpoint in the file if there is one. The file has the last state then.

    Returns:
        Median seconds of an update of the last stage.

    Raises:
        SliceOver: the rest is for the next slice; the checkpoint is written.
        RuntimeError: loss or gradients were not finite too often in a row.
    """
    model.train()
    trainable, done, tensors = stages[0].settings.trainable, Done(), {}
    if file.is_file():
        with safe_open(file, "pt") as saved:
            done = Done(**json.loads(saved.metadata()["done"]))
        tensors = load_file(file)
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name in trainable_names(model, trainable):
                own[name].copy_(tensors.pop(f"weights/{name}"))
    for index in range(done.stage, len(stages)):
        settings, trained = stages[index].settings, make_trainable(model, trainable_names(model, trainable))
        optimizer = make_optimizer(
            model,
            trained,
            learning_rate=settings.learning_rate,
            mixing_learning_rate=settings.mixing_learning_rate,
            weight_decay=0.01 * (trainable == "all"),
        )
        if index == done.stage:
            load_optimizer_state(optimizer, trained, tensors)
        else:
            done = Done(index)
        train_stage(study, stages[index], trained, optimizer, done, file)
    return done.usual


def train_stage(study: Study, stage: Stage, trained: Any, optimizer: Any, done: Done, file: Path) -> None:
    """The rest of one stage, see :func:`train`."""
    took, saved_at, skipped = [0.0], time.time(), 0
    while (part := stage.part_done(done)) < 1:
        try:
            with study.clock.call(stage.graph(part), min(took[-2:])):  # what compiled before took longer than usual
                began = time.time()
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * stage.rate(done.step, part)
                loss = float(stage.backward(done.step, part))
                norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0))
                is_finite = math.isfinite(loss) and math.isfinite(norm)
                if is_finite:
                    optimizer.step()
                optimizer.zero_grad()
        except SliceOver:
            save(trained, optimizer, done, file)
            raise
        skipped = 0 if is_finite else skipped + 1
        if skipped == MOST_SKIPPED:
            raise RuntimeError(
                f"{skipped} updates to number {done.step} were not finite: loss {loss}, gradients {norm}"
            )
        took.append(time.time() - began)
        done.step, done.seconds, done.usual = done.step + 1, done.seconds + took[-1], median(took[1:])
        if done.step % SAID_EVERY == 0:
            say(f"  {file.stem}: stage {done.stage}, update {done.step}, loss {loss:.4f}, {took[-1]:.3f} s")
        if time.time() - saved_at > CHECKPOINT_EVERY:
            save(trained, optimizer, done, file)
            saved_at = time.time()
    save(trained, optimizer, done, file)


def save(trained: Any, optimizer: Any, done: Done, file: Path) -> None:
    """Write a checkpoint aside, and rename it."""
    weights = {f"weights/{name}": value.detach().cpu().contiguous() for name, value in trained.items()}
    write_tensors(weights | optimizer_state(optimizer, trained), file, {"done": json.dumps(asdict(done))})


# ---- the parts -------------------------------------------------------------------------------------------------------


def prepare_classifier(study: Study) -> ColourClassifier:
    """The classifier, from its file or trained."""
    file, found = study.output / "classifier.safetensors", ColourClassifier().to(study.device)
    if not file.is_file():
        study.clock.need(study.size.compilation_seconds)
        trained = train_classifier(study.scenes["train"], *study.size.classifier)
        write_tensors({name: value.cpu() for name, value in trained.state_dict().items()}, file)
    found.load_state_dict(load_file(file))
    return found.eval()


def train_softmax(study: Study) -> None:
    """The model with softmax attention: short clips first. It ends in ``study.weights``."""
    size, file = study.size, study.output / "training.safetensors"
    study.softmax = model = study.new_model()

    def now(part: float) -> tuple[int, int]:
        before = 0.0
        for frames, count, share in size.curriculum:
            before += share
            if part < before:
                return frames, count
        return size.curriculum[-1][:2]

    def backward(step: int, part: float) -> torch.Tensor:
        frames, count = now(part)
        batch = study.batch("train", step, count, frames, DROPOUT)
        with study.autocast():
            loss = study.process.loss(predict(model, batch), batch).mean()
        loss.backward()
        return loss.detach()

    if not study.weights.is_file():
        settings = StageConfig(
            10**6, LEARNING_RATES["from scratch"], "all", DIFFUSION, scheduler="cosine", warmup_steps=100
        )
        stage = Stage(settings, backward, lambda part: ("training", now(part)), study.size.training_seconds)
        train(study, study.compiled(model), [stage], file)
        state = {name: value.detach().cpu().bfloat16() for name, value in model.state_dict().items()}
        write_tensors(state, study.weights)
    file.unlink(missing_ok=True)
    study.softmax = study.compiled(study.new_model()).eval().requires_grad_(False)


def adapt(study: Study, row: Row, model: Any, file: Path) -> float:
    """Transfer, then distillation, of the attention alone; softmax is trained on with the loss of its training.

    A model that did not pass the gate is no teacher of anything but its attention, so transfer is all.

    Returns:
        Seconds of an update, as :func:`train` has it.
    """
    size, softmax = study.size, row.config is None
    weights = DIFFUSION if softmax else ObjectiveWeights(distillation=1.0)
    rate = LEARNING_RATES["softmax, trained on" if softmax else "distillation"]
    steps = size.adapted_steps + size.transfer_steps if softmax else size.adapted_steps
    transfer_steps = 0 if softmax else size.transfer_steps
    rates: dict[str, Any] = {"trainable": "attention", "mixing_learning_rate": 5e-3}
    stages = [StageConfig(steps, rate, objectives=weights, scheduler="cosine", **rates)]
    if transfer_steps:
        stages.insert(0, StageConfig(transfer_steps, 2e-3, objectives=ObjectiveWeights(transfer=1.0), **rates))
    teacher = None if softmax else Teacher(model, trainable_names(model, "attention"))

    def of_stage(settings: StageConfig) -> Stage:
        is_transfer = settings.objectives.transfer > 0
        roles = Roles(model, study.process, teacher, autocast=study.autocast)

        def losses(batch: NoisedBatch) -> torch.Tensor:
            total = torch.zeros((), device=batch.latents.device)
            for loss, _ in stage_losses(roles, settings, model, batch):
                loss.backward()
                total += loss.detach()
            return total

        def backward(step: int, _: float) -> torch.Tensor:
            seed = 10**5 + step + is_transfer * 10**4  # scenes that every row sees, and training did not
            batch = study.batch("train", seed, size.batch, size.frames, DROPOUT)
            if is_transfer:  # single attentions, to whose inputs no compiled block would listen
                with torch.compiler.set_stance("force_eager"):
                    return losses(batch)
            if softmax:
                return losses(batch)
            with study.autocast():
                with torch.no_grad():
                    target = predict(study.softmax, batch)
                loss = (predict(model, batch).float() - target.float()).square().mean()
            loss.backward()
            return loss.detach()

        return Stage(settings, backward, lambda _: None if is_transfer else (row.name, "adapted"))

    stages = stages if study.with_clips else stages[:1]
    return train(study, study.compiled(model), [of_stage(settings) for settings in stages], file)


@contextmanager
def box_order(active: bool) -> Iterator[None]:
    """Within it blocks are boxes of the grid in raster order; the package has the Hilbert curve alone."""
    if not active:
        yield
        return
    hilbert = layout.hilbert_curve
    layout.hilbert_curve = boxes_of
    forget_tables()
    try:
        yield
    finally:
        layout.hilbert_curve = hilbert
        forget_tables()


def forget_tables() -> None:
    """Clear what the attention keeps of an order of the tokens."""
    for name, module in list(sys.modules.items()):
        for kept in vars(module).values() if name.startswith("mhla_diffusers.attention") else ():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


def boxes_of(grid: tuple[int, ...]) -> torch.Tensor:
    """Tokens box after box, in boxes of 2x2x2 in boxes of 4x4x4 in such of 4x4x8: int64 (N,) places in raster order.

    So every 16 tokens are a box of 2x2x4, every 64 one of 4x4x4 and every 128 one of 4x4x8 if they fit.
    """
    place = torch.arange(math.prod(grid), device="cpu").view(grid)
    axes = torch.meshgrid(*(torch.arange(size, device="cpu") for size in grid), indexing="ij")
    key = torch.zeros(grid, dtype=torch.int64)
    for axis, side in ((0, 4), (1, 4), (2, 8)):  # which box of the largest
        key = key * 2**10 + axes[axis] // side
    for axis, bit in ((2, 2), (1, 1), (0, 1), (2, 1), (0, 0), (1, 0), (2, 0)):  # then halves, the finest last
        key = key * 2 + (axes[axis] >> bit) % 2
    return place.flatten()[key.flatten().argsort(stable=True)]


def patched(study: Study, row: Row) -> Any:
    """A fresh model with a row's attention, calibrated where it says so."""
    model, size = study.new_model(), study.size
    if row.config is None:
        return model
    batches = [study.batch("train", CALIBRATION_SEED + number, 1, size.frames) for number in range(4)]
    quantiles = (torch.arange(4, dtype=torch.float64, device=study.device) + 0.5) / 4
    batches = [
        study.process.make_batch(one.latents, one.noise, quantile[None], one.conditioning)
        for one, quantile in zip(batches, quantiles, strict=True)
    ]

    def run() -> None:
        for batch in batches:
            predict(model, batch)

    with study.autocast():
        apply_mhla(model, row.config, calibration=run if row.linear == "calibrated" else None)
    if row.linear == "off":
        for layer in mhla_layers(model).values():
            torch.nn.init.constant_(layer.linear_log_weight, -80.0)  # log λ, which no float32 sum sees
    return model


# ---- what is measured ------------------------------------------------------------------------------------------------


@torch.no_grad()
def attention_errors(study: Study, model: Any) -> list[float]:
    """Of every layer ‖output − softmax's‖ / ‖softmax's‖, on the inputs that the softmax model gives it."""
    teacher, size, found = study.softmax, study.size, []
    hooks = []
    for name, attn in trained_family(teacher).self_attentions(teacher).items():

        def compare(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            with call_context(grid=size.grid):
                error = model.get_submodule(name).forward(*args, **kwargs).float() - output.float()
            found.append(float(error.norm() / output.float().norm()))

        hooks.append(attn.register_forward_hook(compare, with_kwargs=True))
    try:
        with torch.compiler.set_stance("force_eager"), study.autocast():
            predict(teacher, study.batch("held-out", HELD_OUT_SEED, size.batch, size.frames))
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def held_out_loss(study: Study, model: Any) -> float:
    """Flow-matching loss of held-out scenes, the same times and noise for all."""
    size, losses = study.size, []
    for number in range(-(-size.held_out // size.batch)):
        batch = study.batch("held-out", HELD_OUT_SEED + number, size.batch, size.frames)
        with study.autocast():
            losses.append(study.process.loss(predict(model, batch), batch).mean())
    return float(torch.stack(losses).mean())


@torch.no_grad()
def generate(study: Study, model: Any, labels: torch.Tensor) -> torch.Tensor:
    """Clips of captions by Euler's steps with guidance, from noise that is the same for all: (B, 3, F, S, S)."""
    size, half = study.size, max(1, study.size.batch // 2)
    time_left = torch.linspace(1, 0, size.sampler_steps + 1, device=study.device)
    sigmas = FLOW_SHIFT * time_left / (1 + (FLOW_SHIFT - 1) * time_left)
    made = []
    for start in range(0, len(labels), half):
        captions = study.captions(labels[start : start + half])
        captions = torch.cat([captions, torch.zeros_like(captions)])
        chance = torch.Generator(study.device).manual_seed(NOISE - start - 1)
        shape = len(captions) // 2, 3, size.frames, size.pixels, size.pixels
        x = torch.randn(shape, generator=chance, device=study.device)
        for sigma, following in zip(sigmas, sigmas[1:], strict=False):
            with study.autocast():
                times = study.process.timestep(sigma.expand(len(captions)))
                velocity = model(torch.cat([x, x]), times, captions, return_dict=False)[0].float()
            asked, empty = velocity.chunk(2)
            x = x + (following - sigma) * (empty + GUIDANCE * (asked - empty))
        made.append(x)
    return torch.cat(made)


def measure(study: Study, row: Row, model: Any) -> dict[str, Any]:
    """All that the table has of a row, and the errors of single layers."""
    model.eval().requires_grad_(False)
    size = study.size
    errors = attention_errors(study, model)
    found: dict[str, Any] = {"error": sum(errors) / len(errors), "errors of layers": errors}
    batch = study.batch("held-out", HELD_OUT_SEED, size.batch, size.frames)

    @torch.no_grad()
    def forward() -> None:
        with study.autocast():
            predict(model, batch)

    def timed() -> Any:
        outcome = time_interleaved({row.name: forward}, study.device, Budget(size.timing_seconds, 3, 10))[row.name]
        if outcome.timing is None:
            raise RuntimeError(outcome.reason)
        return outcome

    with torch.compiler.set_stance("force_eager"):
        outcome = timed()
    found |= {"seconds": outcome.timing.median / size.batch, "peak bytes": outcome.peak_bytes}
    if row.is_compiled:
        with study.clock.call((row.name, row.adapted, "measured")):
            found["compiled seconds"] = timed().timing.median / size.batch
    if not study.with_clips:
        return found
    found["loss"] = held_out_loss(study, model)
    if row.generated:
        real = study.scenes["held-out"].draw(HELD_OUT_SEED, size.clips)
        study.clock.need(outcome.timing.median * size.sampler_steps * 2 * size.clips / size.batch)
        made = Clips(generate(study, model, real.labels), real.labels)
        right, features = look(study.classifier, made)
        known, expected = look(study.classifier, real)
        found |= {
            "digits": right.tolist(),
            "digits of real clips": float(known.mean()),
            "Fréchet distance": frechet_distance(expected, features),
            "fine detail": fine_detail(made.pixels) / fine_detail(real.pixels),
        }
    return found


# ---- row after row ---------------------------------------------------------------------------------------------------


def make_row(study: Study, row: Row, place: int) -> dict[str, Any]:
    """Patch, adapt and measure; a row that cannot be made says why, and the others are made all the same.

    Raises:
        SliceOver: the rest of it is for the next slice.
        RuntimeError: it took the device with it. It is recorded as failed, and the others need a new process.
    """
    file = study.output / "rows" / f"{row.file_name}.json"
    if file.is_file():
        return read_json(file)
    begun = file.with_suffix(".begun")
    attempts = int(begun.read_text()) if begun.is_file() else 0
    checkpoint = file.with_suffix(".safetensors")
    found: dict[str, Any] = {"place": place, "name": row.name, "adapted": row.adapted, "generated": row.generated}
    began, works = time.time(), True
    if attempts >= 2:
        found["failed"] = "begun twice, and each time the process was ended"
    else:
        study.clock.need(study.clock.compilation if row.is_compiled else ROW_SECONDS)
        write_text(str(attempts + 1), begun)
        try:
            with box_order(row.boxes):
                model = study.softmax if row.name == SOFTMAX else patched(study, row)
                if row.adapted:
                    found["update seconds"] = adapt(study, row, model, checkpoint)
                found |= measure(study, row, model)
        except SliceOver:
            begun.unlink()
            raise
        except Exception as error:  # noqa: BLE001 - recorded with its reason; the other rows follow
            found["failed"] = "".join(traceback.format_exception_only(error)).strip().splitlines()[0][:300]
            say(traceback.format_exc())
            works = still_works(study.device)
    write_json({**found, "row seconds": time.time() - began}, file)
    for done in (begun, checkpoint):
        done.unlink(missing_ok=True)
    if not works:
        raise RuntimeError(
            f"{study.device} does no more work in this process after {row.name}; the same command goes on."
        )
    if study.device.type == "cuda":
        gc.collect()  # a compiled model refers to itself
        torch.cuda.empty_cache()
    say(f"{row.name}{', adapted' if row.adapted else ''}: {', '.join(cells_of(found)[1:])}")
    return read_json(file)


def still_works(device: torch.device) -> bool:
    """Whether the device does anything more: after a bad access to memory CUDA refuses all else of the process."""
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
    return True


HEADER = (
    "self-attention",
    "trained",
    "held-out loss ↓",
    "digits recognised ↑",
    "Fréchet distance ↓",
    "fine detail, 100 % is real",
    "error of attention ↓",
    "ms per step",
    "ms per step, compiled",
    "peak memory, GB",
    "s per update",
)


def cells_of(found: dict[str, Any]) -> list[str]:
    """A row of the table."""

    def cell(key: str, style: str, factor: float = 1.0) -> str:
        value = found.get(key)
        return "–" if value is None or math.isnan(value) else f"{factor * value:{style}}"

    trained = "adapted" if found["adapted"] else "–"
    if "failed" in found:
        return [found["name"], trained, f"failed: {found['failed']}", *["–"] * (len(HEADER) - 3)]
    digits = found.get("digits")
    shown = "–"
    if digits:
        right = torch.tensor(digits, dtype=torch.float64)
        shown = f"{right.mean():.1%} ± {right.std() / len(right) ** 0.5:.1%}"
    return [
        found["name"],
        trained,
        cell("loss", ".4f"),
        shown,
        cell("Fréchet distance", ".1f"),
        cell("fine detail", ".0%"),
        cell("error", ".3f"),
        cell("seconds", ".2f", 1000),
        cell("compiled seconds", ".2f", 1000),
        cell("peak bytes", ".2f", 1e-9),
        cell("update seconds", ".3f"),
    ]


def read_rows(output: Path) -> list[dict[str, Any]]:
    """Those that are finished, in the order of the table."""
    return sorted((read_json(file) for file in (output / "rows").glob("*.json")), key=lambda found: found["place"])


def write_report(output: Path) -> None:
    """Table and plot of the rows that a folder has; without matplotlib the table alone, and a word on it.

    Raises:
        FileNotFoundError: the folder holds no study.
    """
    rows, tokens = read_rows(output), math.prod(read_json(output / "study.json")["grid"])
    write_table(HEADER, [cells_of(found) for found in rows], output, "length")
    try:
        plt = require_matplotlib()
    except ImportError as error:
        say(f"No plot: {error}. Where it is, --report --output {output} draws it.")
        return
    judged = [found for found in rows if "failed" not in found]
    # without clips softmax alone has a loss, by which the gate was closed
    quality = "loss" if all("loss" in found for found in judged) else "error"
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for adapted, generated, style in (
        (False, False, {"marker": ".", "color": "0.7", "label": "the grid, without training"}),
        (False, True, {"marker": "o", "color": "tab:blue", "label": "without training"}),
        (True, True, {"marker": "*", "s": 120, "color": "tab:red", "label": "adapted"}),
    ):
        shown = [one for one in judged if (one["adapted"], one["generated"]) == (adapted, generated)]
        axes.scatter([1000 * one["seconds"] for one in shown], [one[quality] for one in shown], **style)
        for one in shown if generated else ():
            place = 1000 * one["seconds"], one[quality]
            axes.annotate(one["name"], place, textcoords="offset points", xytext=(5, 4), fontsize=7)
    label = {"loss": "held-out loss", "error": "relative error of attention"}[quality]
    axes.set(xlabel="ms per step of one clip, blocks not compiled", ylabel=label, title=f"{tokens:,} tokens")
    axes.legend()
    with written_aside(output / "length.png") as aside:
        figure.savefig(aside, dpi=110)
    plt.close(figure)


def run(study: Study) -> bool:
    """One slice; whether everything is finished. Where no graph can be compiled any more, rows without one go on."""
    is_finished = True
    try:
        study.classifier = prepare_classifier(study)
        train_softmax(study)
        for place, row in enumerate(rows_of(study.size)):
            try:
                found = make_row(study, row, place)
            except SliceOver:
                if row.name == SOFTMAX:
                    raise
                is_finished = False
            else:
                if row.name == SOFTMAX:
                    check_gate(study, found)
    except SliceOver:
        is_finished = False
    finally:
        write_report(study.output)
    return is_finished


def check_gate(study: Study, found: dict[str, Any]) -> None:
    """Whether the softmax model is good enough for its clips to say something.

    Raises:
        RuntimeError: softmax itself could not be measured, so there is nothing to compare with.
    """
    if "failed" in found:
        raise RuntimeError(f"The softmax model could not be measured: {found['failed']}. Start in another folder.")
    shown = sum(found["digits"]) / len(found["digits"])
    study.with_clips = shown >= study.gate
    if not study.with_clips:
        say(
            f"The softmax model shows {shown:.0%} of the digits, fewer than {study.gate:.0%}, and the classifier "
            f"recognises {found['digits of real clips']:.0%} of real ones: its clips say nothing, and the rows that "
            "follow measure the errors of attention alone."
        )


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    """One slice, or the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="on a CPU it has toy size")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this slice, from the start of the process")
    parser.add_argument("--gate", type=float, default=0.6, help="part of the digits that the softmax model must show")
    parser.add_argument("--output", type=Path, default=Path("outputs/length"))
    compilers = ("inductor", "aot_eager", "eager")
    parser.add_argument("--compiler", choices=compilers, help="of the blocks, where the usual one fails; eager is slow")
    parser.add_argument("--plan", action="store_true", help="count and predict, and run nothing")
    parser.add_argument("--report", action="store_true", help="table and plot of the rows in --output, and run nothing")
    arguments = parser.parse_args()
    size = REAL if arguments.device == "cuda" else TOY
    size = replace(size, compiler=arguments.compiler or size.compiler)
    if arguments.plan:
        say(plan(size))
        return
    if arguments.report:
        if not (arguments.output / "study.json").is_file():
            parser.error(f"--output {arguments.output} holds no study; give the folder of one")
        write_report(arguments.output)
        return
    if not MARGIN < arguments.minutes * 60 < math.inf:
        parser.error(f"--minutes {arguments.minutes}: the last {MARGIN:.0f} seconds of a slice are for writing; give 9")
    if not 0 <= arguments.gate <= 1:
        parser.error(f"--gate {arguments.gate} must be from 0 to 1: part of the digits; give 0.6")
    try:
        device, output = choose_device(arguments.device), arguments.output
    except ValueError as error:
        parser.error(str(error))
    check_writable(output)
    card = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    settings = {**asdict(size), "grid": size.grid, "gate": arguments.gate, "device": card, "torch": torch.__version__}
    known = output / "study.json"
    if known.is_file() and read_json(known) != json.loads(json.dumps(settings)):
        parser.error(
            f"--output {output} holds a study of another size, gate, compiler, device or torch; choose another folder"
        )
    write_json(settings, known)
    torch._dynamo.config.recompile_limit = MOST_GRAPHS  # all rows compile the same code
    clock = Clock(arguments.minutes, process_started(), size.compilation_seconds)
    is_finished = run(Study(size, torch.device(device), output, clock, arguments.gate))
    say(f"Finished: {output / 'length.md'}" if is_finished else "The slice is over; the same command goes on.")


def process_started() -> float:
    """When this process began, imports included; a machine whose clock was set since it booted reports another time."""
    return max(psutil.Process().create_time(), time.time() - 120)


if __name__ == "__main__":
    main()
