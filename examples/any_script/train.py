# SPDX-License-Identifier: Apache-2.0
"""A script for ``torchrun`` that knows nothing of DLRover RL: data parallel training that resumes from its checkpoint.

torchrun --nproc_per_node=2 examples/any_script/train.py --steps 40 --out build/any_script
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("build/any_script"))
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpoint, first = arguments.out / "checkpoint.pt", 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["step"]
    if rank == 0:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        print(f"{dist.get_world_size()} ranks from step {first}, restart {restarts}", flush=True)

    for step in range(first, arguments.steps):
        data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
            torch.save({"model": model.state_dict(), "step": step + 1}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
