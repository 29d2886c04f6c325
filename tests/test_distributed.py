"""Training by several processes, examples/distributed.py: over gloo on the CPU, over NCCL on two GPUs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist
from op_suite import needs_two_gpus
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lltm_ext

EXAMPLE = Path(__file__).parents[1] / "examples/distributed.py"
STEPS, SAVE_EVERY = 50, 10
DEVICE = {"gloo": "cpu", "nccl": "cuda"}
SMALL = ["--hidden-size", "32", "--length", "24", "--batch-size", "8", "--save-every", str(SAVE_EVERY)]


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=needs_two_gpus)])
def backend(request):
    return request.param


def options_of(out, backend, steps=STEPS):
    return ("--out", str(out), "--device", DEVICE[backend], "--steps", str(steps), *SMALL)


def start(processes, *options):
    """By torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*torchrun, "--nproc-per-node", str(processes), EXAMPLE, *options]
    return subprocess.Popen(command, env=env, **pipes)


def end_of(run):
    """What it printed. One that hangs fails the test."""
    try:
        return run.communicate(timeout=100)[0]
    except subprocess.TimeoutExpired:
        run.terminate()  # torchrun then ends its processes
        raise


def curve(processes, out, backend, *options):
    """The loss of each step of a whole run, of processes that torchrun need not start."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    of_all = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes)}
    of_all |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    env = [of_all | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    runs = forks.run(EXAMPLE, *options_of(out, backend), *options, cwd=out, env=env, timeout=100)
    assert [run.returncode for run in runs] == [0] * processes, runs
    return json.loads((out / "loss.json").read_text())


def assert_same_curve(found, expected, within=1e-5):
    assert len(found) == len(expected) == STEPS
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < within


@pytest.fixture(scope="module")
def of_one(backend, tmp_path_factory):
    """The curve of one process, which learns."""
    losses = curve(1, tmp_path_factory.mktemp("one"), backend)
    assert losses[-1] < losses[0] - 2
    return losses


@pytest.fixture
def distributed():
    """A function that makes DTensors on a mesh of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda *shape: distribute_tensor(torch.ones(shape), mesh, [Shard(0)])
    dist.destroy_process_group()


CALLS = {
    "sigmoid": lambda x: lltm_ext.sigmoid(x(4)),
    "relu_": lambda x: lltm_ext.relu_(x(4)),
    "round": lambda x: lltm_ext.round(x(4)),
    "binarize": lambda x: lltm_ext.binarize(x(4)),
    "gemm": lambda x: lltm_ext.gemm(x(2, 3), torch.ones(3, 4)),
    "lltm_cell": lambda x: lltm_ext.lltm_cell(x(2, 3), x(12, 7), x(12), x(2, 4), x(2, 4)),
    "lltm": lambda x: lltm_ext.LLTM(3, 4)(x(5, 2, 3)),
    "lstm": lambda x: lltm_ext.LSTM(3, 4)(x(5, 2, 3)),
    "gru": lambda x: lltm_ext.GRU(3, 4)(x(5, 2, 3)),
    "rnn_tanh": lambda x: lltm_ext.RNN(3, 4)(x(5, 2, 3)),
    "ugrnn": lambda x: lltm_ext.Recurrent(lltm_ext.cells.ugrnn, 3, 4)(x(5, 2, 3)),
}


@pytest.mark.parametrize("op", CALLS)
def test_a_dtensor_is_refused_by_the_name_of_the_op(op, distributed):
    with pytest.raises((NotImplementedError, RuntimeError), match=rf"\b{op}\b.*(DTensor|sharding strategy)"):
        CALLS[op](distributed)


def test_two_processes_that_recompute_follow_the_curve_of_one(backend, of_one, tmp_path):
    assert_same_curve(curve(2, tmp_path, backend, "--recompute"), of_one)


def test_bfloat16_with_sharded_parameters_stays_near_the_curve(backend, of_one, tmp_path):
    found = curve(2, tmp_path, backend, "--shard", "--bfloat16", "--recompute")
    assert_same_curve(found, of_one, within=0.1)
    assert found != of_one


def test_a_killed_process_ends_the_run_which_one_process_resumes_to_the_same_curve(backend, of_one, tmp_path):
    with start(2, *options_of(tmp_path, backend, steps=10_000), "--shard") as run:
        while not (tmp_path / f"step_{2 * SAVE_EVERY}/.metadata").exists():
            assert run.poll() is None, end_of(run)
            time.sleep(0.05)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[1]), signal.SIGKILL)
        output = end_of(run)
    assert run.returncode != 0
    assert re.search(r"exitcode\s*: -9", output), output
    steps = [int(path.parent.name.removeprefix("step_")) for path in tmp_path.glob("step_*/.metadata")]
    assert max(steps) < STEPS, "it was killed too late to say something"

    assert_same_curve(curve(1, tmp_path, backend, "--resume"), of_one)
