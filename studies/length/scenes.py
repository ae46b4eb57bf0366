"""Scenes of length.py, drawn on the device from a seed, and what is measured on clips of them.

Every scene has a few handwritten digits, each of a colour of its own. They move, turn and hide each other over a
texture that drifts. The texture has detail at four scales; the last digit moves as the first one mirrored at the
centre, so that distant tokens depend on each other. Clips are (B, 3, F, S, S), with a mean near 0 and a variance
near 1, as latents have; S is the side in pixels. The classifier looks at the digit of each colour.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, pad

from studies.adaptation.digits import Split, load_digits

COLOURS = ((0.95, 0.10, 0.10), (0.10, 0.90, 0.10), (0.15, 0.20, 1.00))
"""Colours of the digits in order; each has the most of one channel."""
CELLS = (4, 8, 16, 32)
"""Cells of the texture along a side, at each of its scales."""
_MEAN, _SPREAD = 0.38, 0.2
"""Mean and spread of brightness, with which it is normalised."""
_FINE = 0.125
"""Cycles per pixel from which detail is fine; pixels hold up to a half along an axis."""


@dataclass(frozen=True)
class Clips:
    """Some scenes."""

    pixels: torch.Tensor
    """(B, 3, F, S, S) float32."""
    labels: torch.Tensor
    """(B, K) int64: the digit of every colour."""


class Scenes:
    """Draws scenes of one split of the digits.

    Args:
        split: of the handwritten digits.
        pixels: S.
        frames: of a whole clip, over which digits go their way; a shorter clip is the beginning.
        digits: K, at most three.
        device: where everything is drawn.
    """

    def __init__(self, split: Split, pixels: int, frames: int, digits: int, device: torch.device) -> None:
        self.pixels, self.frames, self.digits, self.device = pixels, frames, digits, device
        shipped = load_digits(split)
        self._images = pad(shipped.images, (1, 1, 1, 1)).to(device)[:, None]
        self._labels = shipped.labels.to(device)

    def draw(self, seed: int, count: int, frames: int | None = None) -> Clips:
        """The same seed gives the same scenes on the same device.

        Args:
            seed: of everything.
            count: B.
            frames: F; a whole clip if left out.
        """
        chance = torch.Generator(self.device).manual_seed(seed)
        time = torch.arange(frames or self.frames, device=self.device) / self.frames

        def between(low: float, high: float, *shape: int) -> torch.Tensor:
            return low + (high - low) * torch.rand(count, *shape, generator=chance, device=self.device)

        picture = self._texture(chance, time, between(-0.25, 0.25, 2), between(0.9, 1.1, 3))
        which = torch.randint(len(self._labels), (count, self.digits), generator=chance, device=self.device)
        size, angle, turn = (between(*ends, self.digits) for ends in ((0.28, 0.38), (-0.4, 0.4), (-0.6, 0.6)))
        start, speed = between(0, 1, self.digits, 2), between(-0.7, 0.7, self.digits, 2)
        # there and back between the edges: (B, K, F, 2) from -1 to 1
        way = 2 * (1 - (2 * ((start[:, :, None] + speed[:, :, None] * time[:, None]) % 1) - 1).abs()) - 1
        if self.digits > 1:
            way[:, -1] = -way[:, 0]
        for digit in range(self.digits):
            scale = size[:, digit, None]
            place = way[:, digit] * (1 - scale[..., None])
            angles = angle[:, digit, None] + turn[:, digit, None] * time
            cover = self._stamp(which[:, digit], scale, place, angles)
            colour = torch.tensor(COLOURS[digit], device=self.device)[:, None, None, None]
            picture = picture + cover[:, None] * (colour - picture)
        return Clips((picture - _MEAN) / _SPREAD, self._labels[which])

    def _texture(
        self, chance: torch.Generator, time: torch.Tensor, drift: torch.Tensor, tint: torch.Tensor
    ) -> torch.Tensor:
        """Smooth noise at every scale, all drifting by (B, 2) in a clip, in nearly grey (B, 3): (B, 3, F, S, S)."""
        count, frames, side = len(drift), len(time), self.pixels
        row = torch.linspace(-0.75, 0.75, side, device=self.device)
        still = torch.stack(torch.meshgrid(row, row, indexing="xy"), dim=-1)
        # the corners of a clip stay within the noise
        where = still + (drift[:, None] * time[:, None])[:, :, None, None]
        grey = torch.zeros(count, frames, side, side, device=self.device)
        for cells in CELLS:
            noise = torch.randn(count, 1, cells, cells, generator=chance, device=self.device)
            settings = {"mode": "bicubic", "padding_mode": "reflection", "align_corners": False}
            drawn = grid_sample(noise, where.flatten(1, 2), **settings)
            grey += 0.08 * drawn.view(count, frames, side, side)
        return ((0.35 + grey)[:, None] * tint[:, :, None, None, None]).clamp(0, 1)

    def _stamp(
        self, which: torch.Tensor, scale: torch.Tensor, place: torch.Tensor, angles: torch.Tensor
    ) -> torch.Tensor:
        """How much a digit (B,) of a half side (B, 1) covers at a place (B, F, 2), turned by (B, F): (B, F, S, S)."""
        cosine, sine = angles.cos() / scale, angles.sin() / scale
        x, y = place.unbind(dim=-1)
        theta = torch.stack([cosine, sine, -cosine * x - sine * y, -sine, cosine, sine * x - cosine * y], dim=-1)
        count, frames = angles.shape
        shape = [count * frames, 1, self.pixels, self.pixels]
        grid = affine_grid(theta.view(-1, 2, 3), shape, align_corners=False)
        images = self._images[which].repeat_interleave(frames, dim=0)
        drawn = grid_sample(images, grid, mode="bicubic", align_corners=False).view(count, frames, *shape[2:])
        return ((drawn - 0.3) * 4).clamp(0, 1)


class ColourClassifier(nn.Module):
    """Says which digit each colour shows; the same weights for every colour."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 32, 64, 64, 64)
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, clips: torch.Tensor, digits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (B, F, K, 10) and features (B, F, K, 64) of clips (B, 3, F, S, S)."""
        colour = (clips * _SPREAD + _MEAN).clamp(0, 1).movedim(2, 1)
        shown = [
            colour[:, :, own] - colour[:, :, [c for c in range(3) if c != own]].amax(dim=2) for own in range(digits)
        ]
        maps = torch.stack(shown, dim=2).clamp_min(0)
        found = self.features(maps.flatten(0, 2)[:, None]).amax(dim=(2, 3)).unflatten(0, maps.shape[:3])
        return self.head(found), found


def train_classifier(scenes: Scenes, steps: int, batch_size: int) -> ColourClassifier:
    """Train on frames drawn for it, one of a scene."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = ColourClassifier().to(scenes.device)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        clips = scenes.draw(10**6 + step, batch_size, frames=1)
        logits, _ = classifier(clips.pixels, scenes.digits)
        loss = cross_entropy(logits.flatten(0, 2), clips.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return classifier.eval()


@torch.no_grad()
def look(classifier: ColourClassifier, clips: Clips) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of each scene's digits that is recognised (B,), and features of digits and frames (n, 64).

    A digit that others hide for a while is recognised by the frames that show it, over which logits are averaged.
    """
    logits, features = classifier(clips.pixels.float(), clips.labels.shape[1])
    right = logits.mean(dim=1).argmax(dim=-1) == clips.labels
    return right.double().mean(dim=1).cpu(), features.flatten(0, 2).cpu()


def fine_detail(pixels: torch.Tensor) -> float:
    """Energy of the frames' spectrum above an eighth of a cycle per pixel, of clips (B, 3, F, S, S)."""
    spectrum = torch.fft.rfft2(pixels.float(), norm="ortho").abs().square()
    side = pixels.shape[-1]
    down, right = torch.fft.fftfreq(side), torch.fft.rfftfreq(side)
    radius = (down[:, None].square() + right.square()).sqrt().to(pixels.device)
    return float(spectrum[..., radius > _FINE].sum() / math.prod(pixels.shape))
