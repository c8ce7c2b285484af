"""Two ranks of torchrun add their numbers over gloo: the smallest run that needs torch, a rendezvous and a network."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
if value.item() != expected:
    raise SystemExit(f"all-reduce gave {value.item()}, not {expected}")
rank, node = f"rank {dist.get_rank()} of {dist.get_world_size()}", os.environ.get("NODE", "-")
print(f"{rank}: torch {torch.__version__}, node {node}, sum {value.item()}")
dist.destroy_process_group()
