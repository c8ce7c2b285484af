"""What the ranks of a pool do about gradient compression."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cost_aware_trainer.contract import Compression
from cost_aware_trainer.distributed.compression.reduce_scatter import CompressedReduceScatter
from cost_aware_trainer.distributed.compression.sums import CompressedSum, ddp_hook


def gradient(rank, step, elements, repeated=False):
    chooser = torch.Generator().manual_seed(1000 * (0 if repeated else step) + rank)
    return torch.randn(elements, generator=chooser) * torch.linspace(0.1, 3.0, elements)


def compress(place, compression, elements, steps, repeated=False, forget=False):
    """Sums of `steps` gradients: compressed, fp32's, and what is left."""
    place.join("compress")
    compressed = CompressedSum(dist.group.WORLD, Compression(compression))
    layout = (("a", elements // 3), ("b", elements - elements // 3))
    sums, exact = [], []
    for step in range(steps):
        bucket = gradient(place.rank, step, elements, repeated)
        exact.append(bucket.clone())
        dist.all_reduce(exact[-1])
        compressed.start(layout, bucket).wait()
        sums.append(bucket)
        if forget:
            compressed.load_residuals({})
    sent_bytes = compressed.sent_bytes(elements)
    local = torch.cat([part for _, part in sorted(compressed.residuals().items())] or [torch.empty(0)])
    drained = torch.cat([part for _, part in sorted(compressed.drain().items())] or [torch.empty(0)])
    left = sum(float(part.abs().sum()) for part in compressed.residuals().values())
    compressed.close()
    return {"sums": sums, "exact": exact, "bytes": sent_bytes, "local": local, "drained": drained, "left": left}


def compress_buckets(place, compression, sizes, steps):
    """Many buckets at once, not waited for until all are started; and the same one at a time."""
    place.join("buckets")
    together = CompressedSum(dist.group.WORLD, Compression(compression))
    apart = CompressedSum(dist.group.WORLD, Compression(compression))
    equal = True
    for step in range(steps):
        buckets = [gradient(place.rank, step * 100 + i, size) for i, size in enumerate(sizes)]
        copies = [bucket.clone() for bucket in buckets]
        started = [together.start(((f"p{i}", len(b)),), b) for i, b in enumerate(buckets)]
        for sum_ in started:
            sum_.wait()
        for i, copy in enumerate(copies):
            apart.start(((f"p{i}", len(copy)),), copy).wait()
        equal &= all(torch.equal(a, b) for a, b in zip(buckets, copies, strict=True))
    together.close()
    apart.close()
    return equal


def compress_rebucketed(place, compression):
    """One bucket of two parameters becomes two buckets; returns what is lost on the way, which should be nothing."""
    place.join("rebucketed")
    compressed = CompressedSum(dist.group.WORLD, Compression(compression))
    compressed.start((("a", 700), ("b", 900)), gradient(place.rank, 0, 1600)).wait()
    before = compressed.residuals()
    told, exact = torch.zeros(1600), torch.zeros(1600)
    for name, part in before.items():
        at = slice(0, 700) if name == "a" else slice(700, 1600)
        exact[at] = part
    for name, at in (("b", slice(700, 1600)), ("a", slice(0, 700))):
        bucket = gradient(place.rank, 1, 1600)[at].clone()
        exact[at] += bucket
        compressed.start(((name, bucket.numel()),), bucket).wait()
        told[at] = bucket
    dist.all_reduce(exact)
    after = compressed.drain()
    return float((told + torch.cat([after["a"], after["b"]]) - exact).abs().max())


def handed_over(place, compression):
    """Residuals drained, and loaded on one rank: nothing of three gradients is lost."""
    place.join("handed-over")
    compressed = CompressedSum(dist.group.WORLD, Compression(compression))
    told, exact = torch.zeros(1000), torch.zeros(1000)
    for step in range(3):
        bucket = gradient(place.rank, step, 1000)
        exact += bucket
        compressed.start((("a", 1000),), bucket).wait()
        told += bucket
        drained = compressed.drain()
        compressed.load_residuals(drained if place.rank == 0 else {})
    dist.all_reduce(exact)
    return float((told + drained["a"] - exact).abs().max())


def compress_wrongly(place):
    place.join("wrongly")
    compressed = CompressedSum(dist.group.WORLD, Compression.INT8)
    problems = []
    compressed.load_residuals({"a": torch.ones(5)})
    for layout in ((("a", 6),), (("b", 7),)):
        try:
            compressed.start(layout, torch.ones(6))
        except ValueError as error:
            problems.append(str(error))
    try:
        CompressedSum(dist.group.WORLD, Compression.NONE)
    except ValueError as error:
        problems.append(str(error))
    return problems


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7))


def loss_of(model, rank, step):
    inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    targets = inputs[:, :7] * 2 - inputs[:, 7:14]
    return (model(inputs) - targets).square().mean()


def train_under_ddp(place, compression, steps):
    """Final weights and losses under DDP, with and without a hook."""
    place.join("ddp")
    results = {}
    for name in ("none", compression):
        plain = small_model()
        model = DistributedDataParallel(plain, bucket_cap_mb=0.02)
        if name != "none":
            names = {parameter: key for key, parameter in plain.named_parameters()}
            state = CompressedSum(dist.group.WORLD, Compression(name))
            model.register_comm_hook(state, ddp_hook(names))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, place.rank, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
        results[name] = losses, weights
    return results


def train_sharded(place, compression, steps):
    """Full weights under fully_shard, with torch's own reduce-scatter and with the compressed one."""
    ranks = place.join("sharded")
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    results = {}
    for name in ("none", compression):
        model = small_model()
        for module in (model[0], model[2], model):
            sharded = fully_shard(module, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if name != "none":
                sharded.set_custom_reduce_scatter(CompressedReduceScatter(Compression(name)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / ranks.size)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, place.rank, step).backward()
            optimizer.step()
        results[name] = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
    return results
