"""Train a character language model on several GPUs, machines or CPU processes, by torch's own means.

    torchrun --nproc-per-node 2 examples/distributed.py            # DistributedDataParallel
    torchrun --nproc-per-node 2 examples/distributed.py --shard    # FSDP2: each keeps a part of the model
    torchrun --nproc-per-node 2 examples/distributed.py --bfloat16 --recompute
    torchrun --nproc-per-node 4 examples/distributed.py --resume   # the checkpoint may be of 2 processes

The text and most options are those of examples/char_lm.py. --batch-size is that of all processes together:
their number changes the speed and not the loss. Processes exchange gradients through NCCL where there are
GPUs, otherwise through gloo. Every --save-every steps, and at the end, a checkpoint is written to --out; at
the end also loss.json, the loss of each step in bits per character. If a process fails, torchrun ends the
others and exits with an error.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from char_lm import BITS, Corpus, checked, name_of, read_text, split, training_options, windows
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import lltm_ext

# ---- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """An LSTM with a residual connection. With `recompute` it keeps only its input for the backward."""

    def __init__(self, size: int, recompute: bool):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.lstm = lltm_ext.LSTM(size, size)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


class Model(nn.Module):
    """Characters [T, B] in, logits of the next character [T, B, vocabulary] out."""

    def __init__(self, vocabulary_size: int, size: int, layers: int, recompute: bool):
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, size)
        self.blocks = nn.ModuleList(Block(size, recompute) for _ in range(layers))
        self.head = nn.Linear(size, vocabulary_size)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embed(characters)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def distribute(model: Model, args: Any) -> nn.Module:
    """The model whose backward leaves the mean gradient of all processes in the parameters."""
    if not args.shard:
        return DistributedDataParallel(model, [args.device] if args.device.type == "cuda" else None)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": init_device_mesh(args.device.type, (dist.get_world_size(),)),
        "mp_policy": low if args.bfloat16 else MixedPrecisionPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **options)  # gathered when it runs, and again in the backward
    return fully_shard(model, **options)


# ---- training ------------------------------------------------------------------------------------


def batch(corpus: Corpus, step: int, args: Any) -> tuple[Tensor, Tensor]:
    """This process's part of the batch of a step, which any number of processes draws alike."""
    generator = torch.Generator().manual_seed(args.seed + step)
    starts = torch.randint(len(corpus.train) - args.length, (args.batch_size,), generator=generator)
    return windows(corpus.train, starts.chunk(dist.get_world_size())[dist.get_rank()], args.length)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, step: int, args: Any
) -> float:
    """The loss of the whole batch, in bits per character."""
    characters, following = batch(corpus, step, args)
    # FSDP2 casts parameters by its policy; under DDP they stay float32 and autocast chooses.
    with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bfloat16 and not args.shard):
        logits = model(characters)
    loss = F.cross_entropy(logits.float().flatten(0, 1), following.flatten()) * BITS
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


# ---- checkpoints ---------------------------------------------------------------------------------


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> dict[str, Any]:
    """What a checkpoint holds. Names and shapes are those of the whole model, however it is distributed."""
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "losses": losses}


def newest_checkpoint(folder: Path) -> Path | None:
    """Only a whole one: its .metadata is written last."""
    found = [file.parent for file in folder.glob("step_*/.metadata")]
    return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    state = state_of(model, optimizer, [])
    dcp.load(state, checkpoint_id=path)  # each process reads what it needs
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["losses"]


# ---- the command ---------------------------------------------------------------------------------


def arguments() -> Any:
    parser = training_options(__doc__.split("\n")[0], "build/distributed")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16; parameters are float32")
    parser.add_argument(
        "--recompute", action="store_true", help="checkpoint activations: less memory, slower"
    )
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint, if there is one")
    args = checked(parser)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N")
    processes = int(os.environ["WORLD_SIZE"])
    if args.batch_size % processes:
        parser.error(f"--batch-size {args.batch_size} must be a multiple of the {processes} processes")
    if args.device.type == "cuda":
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
    return args


def train(args: Any) -> None:
    first = dist.get_rank() == 0
    text, source = read_text(args.text)
    corpus = split(text, args.length, args.device)

    torch.manual_seed(args.seed)  # the same parameters in each process
    model = Model(len(corpus.vocabulary), args.hidden_size, args.layers, args.recompute).to(args.device)
    model = distribute(model, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    start = newest_checkpoint(args.out) if args.resume else None
    losses = load(start, model, optimizer) if start else []
    if first:
        way, on = "FSDP2" if args.shard else "DDP", f"{dist.get_world_size()} x {name_of(args.device)}"
        print(f"{source}: {len(text):,} characters")
        print(f"{way} on {on}, {dist.get_backend()}; from {start or 'the start'}")
        if not start:  # checkpoints of an earlier run would be newer
            for old in args.out.glob("step_*"):
                shutil.rmtree(old)

    begin, resumed = time.perf_counter(), len(losses)
    for step in tqdm(range(resumed, args.steps), initial=resumed, total=args.steps, disable=not first):
        losses.append(train_step(model, optimizer, corpus, step, args))
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            dcp.save(state_of(model, optimizer, losses), checkpoint_id=args.out / f"step_{step + 1}")
    seconds = time.perf_counter() - begin

    if first:
        (args.out / "loss.json").write_text(json.dumps(losses))
        rate = (len(losses) - resumed) * args.length * args.batch_size / seconds
        print(f"step {len(losses)}: {losses[-1]:.3f} bits/char, {rate:,.0f} chars/s")
        print(f"checkpoint: {newest_checkpoint(args.out)}")


def main() -> None:
    args = arguments()
    torch.backends.cudnn.allow_tf32 = False  # float32 gives the same losses on any number of processes
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    train(args)
    # The model is freed by now: one in DDP that outlives the group may wait for gloo's threads for ever.
    dist.destroy_process_group()
    # Without Python's shutdown: FSDP2 keeps gloo's threads, and one that frees a tensor meanwhile ends the
    # process with SIGABRT (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
