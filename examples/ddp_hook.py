"""A plain torch loop with its own DDP module: one line compresses its gradients, with error feedback.

python examples/ddp_hook.py
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ringstrategy

RANKS = 2


def train(rank: int) -> None:
    """Train one rank, and save what it needs to go on."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    state, hook = ringstrategy.ddp_hook(ringstrategy.BlockInt(8), error_feedback=True, module=model)
    model.register_comm_hook(state, hook)

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(rank)  # other data on each rank
    for _ in range(50):
        inputs = torch.randn(32, 64)
        loss = F.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    torch.save(state.state_dict(), f"residuals.{rank}.pt")  # of this rank; model and optimizer are equal on all
    print(f"rank {rank} of {RANKS} processes: loss {loss.item():.3f}, {state.stats.bytes_sent} bytes sent")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, nprocs=RANKS)
