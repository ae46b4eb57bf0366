"""Published sparse attentions beside ours: their errors on DINOv2-S at equal cost, without training.

    OMP_NUM_THREADS=1 python studies/real_weights/rivals.py attention --pixels 1036
    OMP_NUM_THREADS=1 python studies/real_weights/rivals.py features --pixels 518 1036

Every rival is written from its idea, not from its code, and gets blocks along our curve, which are more compact than
rows of a picture. The error is that of one attention on two photographs, or of the features on all twelve, with the
same attention in every layer. Rows go to rivals-<error>-<pixels>.csv beside this file; those that are there are kept,
so a command goes on where it was stopped.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from dinov2 import Photograph, attentions, features_error, fed, open_model, relative, see
from fetch import PATCH
from torch import nn

from mhla_diffusers import SparseConfig
from mhla_diffusers.attention import SparseCall, run
from mhla_diffusers.attention.blocks import list_length
from mhla_diffusers.attention.call import ContentRule
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.sparse import fitting_rows

HERE = Path(__file__).parent
CHANNELS, BLOCK = 64, 64
"""Channels of a head of DINOv2-S; tokens of a block of those that cut tokens evenly."""
DENSITIES = (0.05, 0.15, 0.025)
"""Densities of ours; the others list as many blocks as the same cost allows."""
SHARES = (0.5, 0.7, 0.3)
"""Shares of the estimated weight that SVG2 lists; they determine its cost."""
TOKENS_PER_CLUSTER = 252, 76
"""Queries and keys per cluster; SVG2 clusters 75,600 tokens of Wan into 300 and 1,000."""
ITERATIONS, LATER_ITERATIONS = 20, 2
"""Iterations of k-means, from scratch and from the clusters of the previous step."""
PARTS = 4
"""Parts of a block whose means SubBlock scores, of queries and of keys."""


class Head(NamedTuple):
    """One head of one call, patches along the curve: (N, D), queries divided by √D."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    class_key: torch.Tensor
    """(1, D), to which every query attends."""
    class_value: torch.Tensor


class Plan(NamedTuple):
    """Which queries attend to which keys."""

    queries: torch.Tensor
    """Block of every query, int64 (N,)."""
    keys: torch.Tensor
    listed: torch.Tensor
    """bool (blocks of queries, blocks of keys)."""
    pools: bool = False
    """Whether other blocks take part by their means; else they are dropped."""
    state: torch.Tensor | None = None
    """(D, D), read by every query, times the share of the means."""
    preparing: float = 0.0
    """What choosing takes, as a part of the multiplications of softmax attention."""

    @property
    def cost(self) -> float:
        """Keys per query, listed and pooled, over N; making and reading a state as the keys that cost as much."""
        rows, sizes = (x.bincount(minlength=n) for x, n in zip(self[:2], self.listed.shape, strict=True))
        keys = torch.where(self.listed, sizes, int(self.pools))
        states = 0.0 if self.state is None else len(self.state) / len(self.keys)
        return float((rows[:, None] * keys).sum()) / len(self.queries) / len(self.keys) + states


def means(rows: torch.Tensor, blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Mean row of every block, 0 of one without rows: (count, D)."""
    total = rows.new_zeros(count, rows.shape[1]).index_add_(0, blocks, rows)
    return total / blocks.bincount(minlength=count).clamp_min(1)[:, None]


def attend(head: Head, plan: Plan) -> torch.Tensor:
    """Attend to the keys of listed blocks and to the means of all others, in one softmax: (N, D)."""
    count, output = plan.listed.shape[1], torch.empty_like(head.query)
    mean_key, mean_value = (means(x, plan.keys, count) for x in (head.key, head.value))
    log_size = plan.keys.bincount(minlength=count).log()
    for block, listed in enumerate(plan.listed):
        rows, near = plan.queries == block, listed[plan.keys]
        far = ~listed & plan.pools
        query = head.query[rows]
        key = torch.cat([head.class_key, head.key[near], mean_key[far]])
        value = torch.cat([head.class_value, head.value[near], mean_value[far]])
        bias = torch.cat([log_size.new_zeros(len(key) - int(far.sum())), log_size[far]])
        weights = (query @ key.T + bias).softmax(dim=-1)
        output[rows] = weights @ value
        if plan.state is not None:
            share = weights[:, len(key) - int(far.sum()) :].sum(dim=-1, keepdim=True)
            output[rows] += share * (query @ plan.state)
    return output


def even_blocks(head: Head, size: int = BLOCK) -> tuple[torch.Tensor, int]:
    """Block of every token, cut evenly along the curve, and how many there are."""
    blocks = torch.arange(len(head.key)) // size
    return blocks, int(blocks[-1]) + 1


def best(score: torch.Tensor, budget: float, tokens: int, pools: bool = False) -> torch.Tensor:
    """Mark as many best blocks of every row as the budget pays for, at least one."""
    count = score.shape[1]
    length = round((budget * tokens - count * pools) / (BLOCK - pools))
    chosen = score.topk(min(max(length, 1), count), dim=-1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, value=True)


def block_sparse(head: Head, budget: float) -> Plan:
    """List by the score of mean query and mean key, drop the rest: what SVG and VSA build on, untrained."""
    blocks, count = even_blocks(head)
    score = means(head.query, blocks, count) @ means(head.key, blocks, count).T
    preparing = count**2 / 2 / len(head.key) ** 2
    return Plan(blocks, blocks, best(score, budget, len(head.key)), preparing=preparing)


def subblock(head: Head, budget: float) -> Plan:
    """SubBlock: list by the log of the summed exponentials of all pairs of parts of two blocks, drop the rest."""
    blocks, count = even_blocks(head)
    parts, _ = even_blocks(head, BLOCK // PARTS)
    part_query, part_key = (means(x, parts, count * PARTS) for x in (head.query, head.key))
    score = part_query @ part_key.T
    exists = parts.bincount(minlength=count * PARTS) > 0
    score = score.masked_fill(~(exists[:, None] & exists), -math.inf).view(count, PARTS, count, PARTS)
    listed = best(score.transpose(1, 2).flatten(2).logsumexp(dim=-1), budget, len(head.key))
    return Plan(blocks, blocks, listed, preparing=(count * PARTS) ** 2 / 2 / len(head.key) ** 2)


def pisa(head: Head, budget: float) -> Plan:
    """PISA: means for what is not listed, and one centred state; list by score and log norm of a block's own state."""
    blocks, count = even_blocks(head)
    mean_query, mean_key = (means(x, blocks, count) for x in (head.query, head.key))
    apart = head.key - mean_key[blocks]
    norms = torch.stack([(apart[blocks == c].T @ head.value[blocks == c]).norm() for c in range(count)])
    tokens, channels = head.key.shape
    listed = best(mean_query @ mean_key.T + norms.log(), budget - channels / tokens, tokens, pools=True)
    preparing = count**2 / 2 / tokens**2
    return Plan(blocks, blocks, listed, True, apart.T @ head.value / tokens, preparing)


def clusters(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Cluster of every row by k-means, from rows drawn at random."""
    centres = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]]
    for _ in range(ITERATIONS):
        nearest = (centres.square().sum(dim=1) / 2 - rows @ centres.T).argmin(dim=1)
        is_empty = nearest.bincount(minlength=count) == 0
        centres = torch.where(is_empty[:, None], centres, means(rows, nearest, count))
    return nearest


def svg2(head: Head, share: float, pools: bool) -> Plan:
    """SVG2: clusters by k-means; list those that by their centroids hold a share of a query cluster's weight.

    Args:
        head: of a call.
        share: of the weight.
        pools: take centroids for what is skipped, and do not drop it, as SVG-EAR does.
    """
    tokens = len(head.key)
    counts = [max(1, round(tokens / n)) for n in TOKENS_PER_CLUSTER]
    queries, keys = (clusters(x, n) for x, n in zip(head[:2], counts, strict=True))
    mean_query, mean_key = means(head.query, queries, counts[0]), means(head.key, keys, counts[1])
    weights = (mean_query @ mean_key.T + keys.bincount(minlength=counts[1]).log()).softmax(dim=-1)
    weights, order = weights.sort(dim=-1, descending=True)
    listed = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, weights.cumsum(-1) - weights <= share)
    preparing = (LATER_ITERATIONS * tokens * sum(counts) + math.prod(counts)) / 2 / tokens**2
    return Plan(queries, keys, listed, pools, None, preparing)


RIVALS: dict[str, Callable[[Head, float], Plan]] = {
    "block-sparse": block_sparse,
    "SubBlock": subblock,
    "PISA": pisa,
    "SVG2": partial(svg2, pools=False),
    "SVG2, centroids for the rest": partial(svg2, pools=True),
}
OURS, UNFITTED = "ours", "ours, nothing fitted"
"""With β and γ that are fitted within the call, as untrained.py measures it, and with 0 and 1."""


def cost_of_ours(density: float, tokens: int, channels: int) -> float:
    """Cost as :attr:`Plan.cost`."""
    rule = SparseConfig(density=density).rule_on((math.isqrt(tokens),) * 2)
    queries, keys = -(-tokens // rule.block_size), -(-tokens // rule.key_block_size)
    listed = list_length(density, keys)
    stretches = -(-tokens // 256)
    mixing = queries * stretches * channels**2 / (2 * channels * tokens**2)
    return (listed * rule.key_block_size + keys - listed) / tokens + channels / tokens + mixing


def preparing_of_ours(tokens: int, fits: bool) -> float:
    """Choosing, with the spread, and some queries of softmax attention if β and γ are fitted."""
    queries, keys = tokens / 64, tokens / 32
    fitting = len(fitting_rows(tokens, torch.device("cpu"))) if fits else 0
    return queries * keys / tokens**2 + fitting / tokens


class OtherAttention(nn.Module):
    """One of these in the place of transformers' attention, whose projections it has.

    Args:
        own: transformers' attention.
        name: of ``RIVALS``, or ``UNFITTED``.
        setting: budget, share or density.
    """

    def __init__(self, own: nn.Module, name: str, setting: float) -> None:
        super().__init__()
        self.own, self.name, self.setting, self.heads = own, name, setting, own.config.num_attention_heads
        self.costs: list[float] = []
        self.preparing: list[float] = []

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """(1, 1 + h w, C), before and after, and no weights."""
        projections = self.own.q_proj, self.own.k_proj, self.own.v_proj
        query, key, value = (to(hidden_states).unflatten(-1, (self.heads, -1)) for to in projections)
        output = (self._unfitted if self.name == UNFITTED else self._rival)(query, key, value)
        return self.own.o_proj(output.flatten(2)), None

    def _unfitted(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tokens = key.shape[1] - 1
        self.costs.append(cost_of_ours(self.setting, tokens, key.shape[3]))
        self.preparing.append(preparing_of_ours(tokens, fits=False))
        weights = {"pooled_bias": torch.zeros(self.heads), "state_weight": torch.ones(self.heads)}
        grid = (math.isqrt(tokens),) * 2
        rule = ContentRule.on(grid, self.setting)
        return run(SparseCall(query=query, key=key, value=value, grid=grid, sparse=rule, extra=(1, 0), **weights))

    def _rival(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The class token comes first and attends to everything."""
        tokens = key.shape[1] - 1
        curve = 1 + layout_of((math.isqrt(tokens),) * 2, BLOCK).order.long()[:tokens]
        output = torch.empty_like(query)
        rows = (x.transpose(1, 2) for x in (query[:, :1], key, value))
        output[:, :1] = nn.functional.scaled_dot_product_attention(*rows).transpose(1, 2)
        for index in range(self.heads):
            q, k, v = (x[0, :, index] for x in (query, key, value))
            head = Head(q[curve] * q.shape[1] ** -0.5, k[curve], v[curve], k[:1], v[:1])
            plan = RIVALS[self.name](head, self.setting)
            self.costs.append(plan.cost)
            self.preparing.append(plan.preparing)
            output[0, curve, index] = attend(head, plan)
        return output


def setting_of(name: str, index: int, tokens: int) -> float:
    """What the rows of an attention are made with: our density, a budget that is ours, or a share."""
    if name in (OURS, UNFITTED):
        return DENSITIES[index]
    return SHARES[index] if name.startswith("SVG2") else cost_of_ours(DENSITIES[index], tokens, CHANNELS)


def write_rows(error: str, pixels: int) -> None:
    """Write rivals-<error>-<pixels>.csv, with the rows of untrained.py as ours."""
    file, tokens = HERE / f"rivals-{error}-{pixels}.csv", (pixels // PATCH) ** 2
    seen = see(open_model(), pixels)
    header = ["self-attention", "setting", "cost", "preparing", error]
    done = {(row[header[0]], row[header[1]]) for row in csv.DictReader(file.open())} if file.is_file() else set()
    with file.open("a", newline="") as output:
        table = csv.writer(output)
        if not done:
            table.writerow(header)
        for index, name in product(range(len(DENSITIES)), (OURS, UNFITTED, *RIVALS)):
            setting = setting_of(name, index, tokens)
            if (name, f"{setting:.4f}") in done:
                continue
            measured = row_of_ours(setting, pixels, error) if name == OURS else row_of(name, setting, seen, error)
            table.writerow([name, *(f"{x:.4f}" for x in (setting, *measured))])
            output.flush()
            sys.stdout.write(f"{name} {setting:.3f}: cost {measured[0]:.3f}, error {measured[2]:.3f}\n")
            sys.stdout.flush()


def row_of_ours(density: float, pixels: int, error: str) -> list[float]:
    """Costs, as the others have them, and what untrained.py measured."""
    tokens = (pixels // PATCH) ** 2
    with (HERE / f"untrained-{pixels}.csv").open() as file:
        measured = {row["self-attention"]: row for row in csv.DictReader(file)}[f"sparse {density:.1%}"]
    return [cost_of_ours(density, tokens, CHANNELS), preparing_of_ours(tokens, fits=True), float(measured[error])]


@torch.no_grad()
def row_of(name: str, setting: float, seen: list[Photograph], error: str) -> list[float]:
    """Costs, and the relative error of the attentions or of the features."""
    model = open_model()
    for layer in model.encoder.layer:
        layer.attention = OtherAttention(layer.attention, name, setting)
    found = attention_error(model, seen) if error == "attention" else features_error(model, seen)
    others = [x for x in model.modules() if isinstance(x, OtherAttention)]
    costs = (fmean(chain.from_iterable(x)) for x in ([x.costs for x in others], [x.preparing for x in others]))
    return [*costs, found]


def attention_error(model: nn.Module, seen: list[Photograph]) -> float:
    """Mean over layers and photographs, given the unpatched model's inputs."""
    errors = []
    for photograph in (x for x in seen if x.inputs):
        outputs: dict[str, torch.Tensor] = {}
        with fed(attentions(model), photograph.inputs, outputs):
            model(photograph.pixels)
        errors += [relative(outputs[name], x) for name, x in photograph.outputs.items()]
    return fmean(errors)


def main() -> None:
    """Measure all rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("error", choices=("attention", "features"))
    parser.add_argument(
        "--pixels", type=int, nargs="+", default=[1036], help="sides in pixels that untrained.py has measured"
    )
    arguments = parser.parse_args()
    for pixels in arguments.pixels:
        write_rows(arguments.error, pixels)


if __name__ == "__main__":
    main()
