"""Record what two ranks exchange in one step, for ui.perfetto.dev.

python examples/timeline.py            # writes timeline.json
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import ringstrategy
from ringstrategy import AllReduce, BlockInt, Ring
from ringstrategy.session import Session

RANKS = 2


def train(rank: int) -> None:
    """Train one rank for a few steps, and record the last."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29512")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)])
    session = Session(model, AllReduce(BlockInt(8), Ring(), bucket_mb=4))
    session.open(torch.device("cpu"))
    session.synchronize()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    session.bind([optimizer])

    def step(number: int) -> None:
        session.begin_batch(f"in step {number}", [optimizer], first=number == 0, later_epoch=False)
        optimizer.zero_grad()
        session.backward(model(torch.randn(64, 1024)).square().mean())
        optimizer.step()
        session.end_batch(1)

    for number in range(3):
        step(number)
    with ringstrategy.timeline("timeline.json"):
        step(3)
    print(f"rank {rank} of {RANKS} processes: {session.stats.steps} steps")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, nprocs=RANKS)
    ringstrategy.merge_timelines("timeline.json")
