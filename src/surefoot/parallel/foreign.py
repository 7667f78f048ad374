"""The ranks of somebody else's process group."""

import torch
import torch.distributed as dist

from surefoot.parallel.mesh import World


def foreign_world() -> World:
    """The default process group as its owner made it, or this process alone; nothing is set up. The device is one that its backend reaches."""
    if not (dist.is_available() and dist.is_initialized()):
        return World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
    on_gpu = "nccl" in dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device, mesh=None)
