"""Small models made by a seed, of the shapes that users' own models have and the bundled one has not."""

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 6


@dataclass(frozen=True)
class Moment:
    """Where a forward pass stands."""

    step: int
    rank: int


class Plain(nn.Module):
    def __init__(self, chooser):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, moment):
        return x + torch.tanh(self.linear(self.norm(x)))


class Shared(nn.Module):
    """One layer used several times."""

    def __init__(self, chooser):
        super().__init__()
        self.linear, self.times = nn.Linear(WIDTH, WIDTH), chooser.randint(2, 3)

    def forward(self, x, moment):
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class Checkpointed(nn.Module):
    """Layers whose activations are computed again, used once or several times."""

    def __init__(self, chooser, *, use_reentrant):
        super().__init__()
        self.block, self.times, self.use_reentrant = Plain(chooser), chooser.randint(1, 3), use_reentrant
        self.does_checkpoint = True

    def forward(self, x, moment):
        for _ in range(self.times):
            if self.does_checkpoint and torch.is_grad_enabled():
                x = checkpoint(self.block, x, moment, use_reentrant=self.use_reentrant)
            else:
                x = self.block(x, moment)
        return x


class Reentrant(Checkpointed):
    def __init__(self, chooser):
        super().__init__(chooser, use_reentrant=True)


class NotReentrant(Checkpointed):
    def __init__(self, chooser):
        super().__init__(chooser, use_reentrant=False)


class UnusedBranch(nn.Module):
    def __init__(self, chooser):
        super().__init__()
        self.used, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, moment):
        return self.used(x)


class ExpertsByStep(nn.Module):
    """One expert a step, the same on all ranks."""

    def __init__(self, chooser):
        super().__init__()
        sizes = [WIDTH] * 3 if chooser.random() < 0.5 else [2, WIDTH, 9]
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, size), nn.Tanh(), nn.Linear(size, WIDTH)) for size in sizes
        )

    def chosen(self, moment):
        return moment.step % len(self.experts)

    def forward(self, x, moment):
        return x + self.experts[self.chosen(moment)](x)


class ExpertsByRank(ExpertsByStep):
    """An expert of its own on each rank; some have none."""

    def chosen(self, moment):
        return (moment.step + 2 * moment.rank) % len(self.experts)


class DepthByStep(nn.Module):
    """A layer that some steps skip."""

    def __init__(self, chooser):
        super().__init__()
        self.linear, self.period = nn.Linear(WIDTH, WIDTH), chooser.randint(2, 3)

    def is_skipped(self, moment):
        return moment.step % self.period == 0

    def forward(self, x, moment):
        return x if self.is_skipped(moment) else x + self.linear(x)


class DepthByRank(DepthByStep):
    """A layer that some ranks skip."""

    def is_skipped(self, moment):
        return (moment.step + moment.rank) % self.period == 0


class Frozen(nn.Module):
    def __init__(self, chooser):
        super().__init__()
        self.frozen, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x, moment):
        return self.trained(torch.relu(self.frozen(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, chooser):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x, moment):
        return self.other(torch.tanh(self.one(x)))


class Constant(nn.Module):
    """A mask in a buffer, with infinities."""

    def __init__(self, chooser):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tensor([0.0] * (WIDTH - 1) + [-torch.inf]))

    def forward(self, x, moment):
        return x * torch.softmax(self.linear(x) + self.mask, -1)


class OfOtherType(nn.Module):
    """A parameter in double precision."""

    def __init__(self, chooser):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x, moment):
        return (x * self.scale).to(x.dtype)


class Statistics(nn.Module):
    """A batch norm: its gradients and its statistics depend on a rank's own samples."""

    def __init__(self, chooser):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, moment):
        return self.norm(x)


class Centred(nn.Module):
    """Statistics that change the output while training: replicas must have the same."""

    def __init__(self, chooser):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x, moment):
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.detach().float().mean(0))
        return self.linear(x - self.mean)


ANY_RANK = [
    *(Plain, Shared, Reentrant, NotReentrant, UnusedBranch, ExpertsByStep),
    *(DepthByStep, Frozen, Tied, Constant, OfOtherType),
]
BY_RANK = [ExpertsByRank, DepthByRank, Statistics, Centred]


class StrangeModel(nn.Module):
    def __init__(self, kinds, chooser):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind(chooser) for kind in kinds)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, moment):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, moment)
        return self.last(x)

    def without_checkpoints(self):
        """The same function: what checkpointing computes again it does not change."""
        for module in self.modules():
            if isinstance(module, Checkpointed):
                module.does_checkpoint = False
        return self


@dataclass(frozen=True)
class Recipe:
    """What a seed makes."""

    kinds: list
    micro_batches: int
    autocast: bool
    optimizer: str
    groups: int
    seed: int

    @property
    def names(self):
        return "-".join(kind.__name__ for kind in self.kinds)

    def model(self):
        torch.manual_seed(self.seed)
        return StrangeModel(self.kinds, random.Random(self.seed))

    def optimizer_of(self, model):
        parameters = list(model.parameters())
        groups = [{"params": parameters[number :: self.groups]} for number in range(self.groups)]
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.01)

    def loss_sum(self, model, x, y, moment):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            predicted = model(x, moment)
        return functional.mse_loss(predicted.float(), y, reduction="sum")


def recipe_of(seed, *, of_any_rank):
    """The model of a seed; with `of_any_rank` one whose result depends neither on the rank nor on a rank's samples."""
    chooser = random.Random(seed)
    kinds = [chooser.choice(ANY_RANK if of_any_rank else ANY_RANK + BY_RANK * 2) for _ in range(chooser.randint(2, 5))]
    # replicas' statistics are made equal after a step, and not between its micro-batches
    micro_batches = 1 if Centred in kinds else chooser.randint(1, 3)
    # a weight that is used again is cast once to bf16, and its gradients summed in it, but cast anew by each reentrant checkpoint
    autocast = not of_any_rank and chooser.random() < 0.3 and Reentrant not in kinds
    # AdamW's first steps are the signs of gradients: it would make a rounding of bf16 as large as a step
    optimizer = "sgd" if autocast else chooser.choice(["adamw", "sgd"])
    return Recipe(kinds, micro_batches, autocast, optimizer, chooser.randint(1, 3), seed)


def data_of(seed, samples):
    chooser = torch.Generator().manual_seed(seed)
    return torch.randn(samples, WIDTH, generator=chooser), torch.randn(samples, 1, generator=chooser)
