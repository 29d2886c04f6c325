"""Layers, and cells with heads, norms and spikes, beside compiled loops and layers of other libraries.

    python -m pip install torchrl snntorch spikingjelly flashrnn einops
    MAKEFLAGS=GPU_ARCH_FLAGS=-arch=sm_90 python -m pip install --no-build-isolation haste_pytorch

torchrl's and FlashRNN's kernels are compiled at their first use, torchrl's in some minutes. Each is timed at
sizes of its own benchmarks, as far as it has some. A peer that fails is named at the end.

haste is of 2020: the architectures that its Makefile names are not those of CUDA 13. It takes cuBLAS and the
CUDA runtime from $CUDA_HOME/lib64, or from $LIBRARY_PATH by the names libcublas.so and libcudart.so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harness import Bench, Row, finish, parse
from libraries import is_installed
from pages import COMPILED_LOOP
from recurrence import COMPARED, MODES, Shape, claims_of, dtype_of, in_both_modes, random_input
from recurrence import draw as draw
from torch import Tensor, nn

import lltm_ext
from lltm_ext import cells

# ---- beside a compiled loop --------------------------------------------------------------------------------


class CompiledLoop(nn.Module):
    """A layer of an own cell as a Python loop over a step that torch.compile has compiled."""

    def __init__(self, like: lltm_ext.Recurrent):
        super().__init__()
        self.layer, self.cell, self.step = like, like.cell, torch.compile(self.one_step, dynamic=False)

    def one_step(
        self, planes: Tensor, blocks: Tensor, parameters: Tensor, h: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        heads, gates = blocks.shape[0], self.cell.gates
        product = torch.bmm(h.unflatten(1, (heads, -1)).transpose(0, 1), blocks)
        product = product.unflatten(2, (gates, -1)).permute(1, 2, 0, 3).flatten(1)
        x, r = (
            y.float().unflatten(1, (gates, -1)).unbind(1)
            for y in ((planes, product) if self.cell.separate else (planes + product, product))
        )
        new_h, new = self.cell.step(x, r, h.float(), states, parameters.float().unbind(0), ())
        return new_h.to(h.dtype), *new

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        layer, hidden = self.layer, self.layer.hidden_size
        planes = nn.functional.linear(input, layer.weight_ih_l0, layer.bias_l0)
        size = layer.weight_hh_l0.shape[1]
        blocks = layer.weight_hh_l0.view(self.cell.gates, -1, size, size).permute(1, 3, 0, 2).flatten(2)
        own = [getattr(layer, f"{name}_l0") for name in self.cell.parameters]
        parameters = torch.cat(own).view(-1, hidden) if own else input.new_empty(0, hidden)
        h = input.new_zeros(input.shape[1], hidden)
        states = [torch.zeros_like(h, dtype=torch.float32) for _ in self.cell.state_names[1:]]
        outputs = []
        for x in planes.unbind(0):
            h, *states = self.step(x, blocks, parameters, h, *states)
            outputs.append(h)
        return torch.stack(outputs), (h, *states)


class Looped(NamedTuple):
    """A cell beside the compiled loop, in bfloat16."""

    part: str
    cell: lltm_ext.RecurrentCell
    heads: int
    grid: tuple[Shape, ...]
    peer: str = COMPILED_LOOP

    @property
    def ours(self) -> str:
        heads = f", heads={self.heads}" if self.heads > 1 else ""
        return f"Recurrent({self.cell.__name__}{heads})"


LOOPED = (
    Looped("heads", cells.slstm, 4, ((16, 256, 256), (16, 256, 512), (16, 256, 1024), (64, 512, 512))),
    Looped("heads", cells.slstm, 3, ((8, 1024, 768),)),
    Looped("norms", cells.dreamer_gru, 1, ((16, 64, 512),)),
    Looped("norms", cells.layer_norm_lstm, 1, ((64, 512, 512), (16, 1000, 256))),
)


def measure_looped(bench: Bench, c: Looped, shape: Shape) -> Row:
    torch.compiler.reset()  # else the limit of recompilations leaves the peer uncompiled
    dtype, hidden = torch.bfloat16, shape[2]
    layer = lltm_ext.Recurrent(c.cell, hidden, hidden, heads=c.heads, device=bench.device, dtype=dtype)
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (layer, {}),
        "peer": (CompiledLoop(layer), {}),
    }
    row: Row = {"part": c.part, "ours": c.ours, "peer": c.peer, "precision": "bfloat16"}
    row |= dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input(shape, bench.device, dtype), "bfloat16")
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


# ---- beside layers of other libraries ----------------------------------------------------------------------

TORCHRL = "torchrl's DreamerV3BlockGRU"
SNNTORCH = "snntorch's RLeaky in a loop"
SPIKINGJELLY = "SpikingJelly's LIFNode"
FLASHRNN = {"slstm": "FlashRNN's sLSTM", "lstm": "FlashRNN's LSTM"}


def let_triton_compile_torchrl() -> None:
    """torchrl's kernels expect tl.cdiv of constants to be one. In torch 2.11's older Triton it is not."""
    from torchrl.modules.models import _dreamer_v3_block_gru_triton as module

    for kernel in (module._block_gru_fwd_kernel, module._block_gru_bwd_kernel):
        function = kernel.fn  # that the autotuner runs
        function._unsafe_update_src(function.src.replace("tl.cdiv(", "triton.cdiv("))


class OfTorchrl(nn.Module):
    """torchrl's, which takes [B, T, H], by its Triton kernels on CUDA. Its parameters are always float32."""

    def __init__(self, hidden: int, blocks: int, device: torch.device):
        super().__init__()
        from torchrl.modules import DreamerV3BlockGRU

        how = {"projection_size": hidden, "num_blocks": blocks, "device": device}
        backend = "triton" if device.type == "cuda" else "reference"
        if backend == "triton":
            let_triton_compile_torchrl()
        self.layer = DreamerV3BlockGRU(hidden, hidden, **how, recurrent_backend=backend)

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        output, h_n = self.layer(input.transpose(0, 1))
        return output.transpose(0, 1), h_n


class OfSnntorch(nn.Module):
    """One product for the input of all steps, then snntorch's neuron in a loop over the steps."""

    def __init__(self, features: int, hidden: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        from snntorch import RLeaky

        self.linear = nn.Linear(features, hidden, device=device, dtype=dtype)
        self.neuron = RLeaky(0.9, linear_features=hidden).to(device, dtype)

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        steps, outputs = self.linear(input).unbind(0), []
        spikes = membrane = torch.zeros_like(steps[0])
        for x in steps:
            spikes, membrane = self.neuron(x, spikes, membrane)
            outputs.append(spikes)
        return torch.stack(outputs), membrane


class OfFlashRNN(nn.Module):
    """FlashRNN's fused kernel of a cell with heads, for projections [T, B, 4*H] in its own layout."""

    def __init__(
        self, function: str, batch: int, hidden: int, heads: int, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        module = importlib.import_module(
            "flashrnn.flashrnn.flashrnn"
        )  # the package has a function of this name
        module.get_gpu_info = gpu_info  # its own does not compile with CUDA 13
        size, name = hidden // heads, str(dtype).removeprefix("torch.")
        layout = {"input_shape": "TBHDG", "recurrent_shape": "HDGP", "bias_shape": "HDG"}
        types = dict.fromkeys(("dtype", "dtype_w", "dtype_r", "dtype_b"), name)
        self.config = module.FlashRNNConfig(
            head_dim=size,
            num_heads=heads,
            batch_size=batch,
            function=function,
            backend="cuda_fused",
            output_shape="STBHD",
            **layout,
            **types,
        )
        self.run, how = module.flashrnn, {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.randn(heads, size, 4, size, **how) * size**-0.5)  # type: ignore[call-overload]
        self.bias = nn.Parameter(torch.randn(heads, size, 4, **how))  # type: ignore[call-overload]

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        length, batch, _ = input.shape
        x = input.view(length, batch, self.config.num_heads, self.config.head_dim, 4)
        states, last = self.run(x, self.weight, self.bias, config=self.config)
        return states[0].flatten(2), last


def gpu_info(device_id: int) -> dict[str, int]:
    """What FlashRNN asks of the GPU before it divides the work."""
    found = torch.cuda.get_device_properties(device_id)
    return {
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": found.regs_per_multiprocessor,
        "multiProcessorCount": found.multi_processor_count,
        "sharedMemPerBlockOptin": found.shared_memory_per_block_optin,
    }


class BlockGRU(nn.Module):
    """torchrl's DreamerV3BlockGRU by ours: its projection of the input, then the cell."""

    def __init__(self, hidden: int, blocks: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.linear, self.scale = nn.Linear(hidden, hidden, **how), nn.Parameter(torch.ones(hidden, **how))
        heads = {"block": blocks, "gates": blocks}
        self.layer = lltm_ext.Recurrent(cells.dreamer_block_gru, hidden, hidden, heads=heads, **how)

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        y = nn.functional.rms_norm(self.linear(input), self.scale.shape, self.scale, 1e-4)
        output: tuple[Tensor, Any] = self.layer(nn.functional.silu(y))
        return output


def measure_blocks(bench: Bench, shape: Shape, precision: str) -> Row:
    dtype, hidden, blocks = dtype_of(precision), shape[2], 8
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (BlockGRU(hidden, blocks, bench.device, dtype), {}),
        "peer": (OfTorchrl(hidden, blocks, bench.device), {}),
    }
    row: Row = {"part": "norms", "ours": "Recurrent(dreamer_block_gru)", "peer": TORCHRL}
    row |= {"precision": precision} | dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input(shape, bench.device, dtype), precision)
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


@lltm_ext.recurrence(gates=1, states=("membrane",))
def leaky(x: Any, h: Any, s: Any) -> Any:
    """snntorch's RLeaky: a spike h lowers the membrane by the threshold 1 and passes no gradient there."""
    membrane = 0.9 * s.membrane + x[0] - h.detach()
    return lltm_ext.spike(membrane - 1), (membrane,)


def measure_spikes(bench: Bench, shape: Shape, features: int) -> Row:
    """Of the size of the Spiking Heidelberg Digits, which have 700 features."""
    hidden, how = shape[2], (bench.device, torch.float32)
    ours = lltm_ext.Recurrent(leaky, features, hidden, device=bench.device)
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (ours, {}),
        "peer": (OfSnntorch(features, hidden, *how), {}),
    }
    row: Row = {"part": "spikes", "ours": "Recurrent(leaky)", "peer": SNNTORCH}
    row |= {"precision": "float32", "I": features} | dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input((*shape[:2], features), *how), "float32", hidden)
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


class OfProjections(nn.Module):
    """Our cell with heads, for projections of the input, as FlashRNN's takes them."""

    def __init__(self, function: str, hidden: int, heads: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.cell = getattr(cells, function)
        layer = lltm_ext.Recurrent(self.cell, 1, hidden, heads=heads, device=device, dtype=dtype)
        self.weight, self.bias = layer.weight_hh_l0, layer.bias_l0

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        zeros = input.new_zeros(input.shape[1], self.weight.shape[0] // 4)
        hx = (zeros,) * len(self.cell.state_names)
        output: tuple[Tensor, Any] = self.cell(input, hx, None, self.weight, self.bias)
        return output


def measure_heads(bench: Bench, function: str, shape: Shape, heads: int) -> Row:
    (batch, length, hidden), how = shape, (bench.device, torch.bfloat16)
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (OfProjections(function, hidden, heads, *how), {}),
        "peer": (OfFlashRNN(function, batch, hidden, heads, *how), {}),
    }
    row: Row = {"part": "heads", "ours": f"{function}, heads={heads}", "peer": FLASHRNN[function]}
    row |= {"precision": "bfloat16"} | dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input((batch, length, 4 * hidden), *how), "bfloat16", hidden)
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


class OfHaste(nn.Module):
    """A layer of haste, which computes float32 without TF32."""

    def __init__(self, name: str, features: int, hidden: int, device: torch.device):
        super().__init__()
        self.layer = getattr(importlib.import_module("haste_pytorch"), name)(features, hidden).to(device)

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        output: tuple[Tensor, Any] = self.layer.train(torch.is_grad_enabled())(input)
        return output


OUR_LAYERS: dict[str, tuple[str, Callable[..., nn.Module]]] = {
    "LSTM": ("LSTM", lltm_ext.LSTM),
    "GRU": ("GRU", lltm_ext.GRU),
    "LayerNormLSTM": (
        "Recurrent(layer_norm_lstm)",
        functools.partial(lltm_ext.Recurrent, cells.layer_norm_lstm),
    ),
}


def measure_haste(bench: Bench, name: str, shape: Shape, features: int) -> Row:
    (ours, layer), hidden = OUR_LAYERS[name], shape[2]
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (layer(features, hidden, device=bench.device), {}),
        "peer": (OfHaste(name, features, hidden, bench.device), {}),
    }
    part = "norms" if name.startswith("LayerNorm") else "layers"
    row: Row = {"part": part, "ours": ours, "peer": f"haste's {name}", "precision": "ieee", "I": features}
    row |= dict(zip("BTH", shape, strict=True))
    input = random_input((*shape[:2], features), bench.device, torch.float32)
    row |= in_both_modes(bench, layers, input, "ieee", hidden)
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


@lltm_ext.recurrence(gates=1, states=("v",), recurrent=False)
def lif_node(x: Any, s: Any) -> Any:
    """SpikingJelly's LIFNode: the time constant is 2, and a spike takes the potential to 0."""
    charged = s.v + (x[0] - s.v) / 2
    spikes = lltm_ext.spike(charged - 1, "sigmoid", k=4)
    return spikes, ((1 - spikes) * charged,)


class OurNeurons(nn.Module):
    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        zeros = torch.zeros_like(input[0])
        output: tuple[Tensor, Any] = lif_node(input, (zeros, zeros), None)
        return output


class OfSpikingJelly(nn.Module):
    """All steps in one call, on CUDA by its Triton kernels."""

    def __init__(self) -> None:
        super().__init__()
        neurons = importlib.import_module("spikingjelly.activation_based.neuron")
        self.neurons = neurons.LIFNode(step_mode="m")

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        self.neurons.reset()
        return self.neurons(input), self.neurons.v


def measure_neurons(bench: Bench, shape: Shape) -> Row:
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (OurNeurons(), {}),
        "peer": (OfSpikingJelly(), {}),
    }
    row: Row = {"part": "spikes", "ours": "lif_node", "peer": SPIKINGJELLY, "precision": "float32"}
    row |= dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input(shape, bench.device, torch.float32), "float32")
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


# Of FlashRNN's README, of its paper, which divides 768 units among 1 to 48 heads, and one more.
OF_FLASHRNN: tuple[tuple[str, Shape, int], ...] = (
    ("slstm", (8, 1024, 768), 3),
    ("slstm", (64, 512, 512), 4),
    ("slstm", (16, 1024, 768), 12),
    ("lstm", (16, 1024, 768), 12),
    ("lstm", (16, 1024, 768), 3),
    ("lstm", (16, 1024, 768), 1),
)
# Batches, steps and input sizes of haste's charts, which have hidden sizes from 128 on.
OF_HASTE: tuple[tuple[Shape, int], ...] = (
    ((16, 50, 256), 128),
    ((32, 50, 512), 256),
    ((64, 50, 1024), 128),
    ((128, 50, 2048), 256),
)
SMALL: Shape = (4, 4, 16)


def comparisons(small: bool, cuda: bool) -> list[tuple[str, Callable[..., Row], tuple[Any, ...]]]:
    """A library, what measures it, and the arguments. Without a GPU, FlashRNN and haste have no kernels."""
    found: list[tuple[str, Callable[..., Row], tuple[Any, ...]]] = [
        ("torchrl", measure_blocks, (SMALL if small else (16, 64, 512), "bfloat16")),
        ("snntorch", measure_spikes, (SMALL if small else (256, 100, 128), 700)),
    ]
    of_neurons = [SMALL] if small else [(256, 100, 128), (64, 16, 16_384)]
    found += [("spikingjelly", measure_neurons, (shape,)) for shape in of_neurons]
    if cuda and not small:
        found += [("flashrnn", measure_heads, how) for how in OF_FLASHRNN]
        found += [("haste_pytorch", measure_haste, (name, *how)) for name in OUR_LAYERS for how in OF_HASTE]
    return found


def beside_other_libraries(bench: Bench, small: bool) -> tuple[list[Row], list[str]]:
    """The rows, and what was not measured."""
    rows, failures = list[Row](), list[str]()
    for library, measure, arguments in comparisons(small, bench.cuda):
        what = f"not measured: {library} {', '.join(map(str, arguments))}"
        if not is_installed(library):
            failures.append(f"{what}: it is not installed")
            continue
        try:
            rows.append(measure(bench, *arguments) | {"version": importlib.metadata.version(library)})
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    return rows, failures


def main() -> None:
    args = parse(__doc__ or "")
    bench = Bench(args.device, args.seconds)
    looped = [(c, shape) for c in LOOPED for shape in c.grid] if not args.small else []
    rows = [measure_looped(bench, *pair) for pair in looped]
    others, failures = beside_other_libraries(bench, args.small)
    rows += others
    columns = dict.fromkeys(("layers", "heads", "norms", "spikes"), COMPARED)
    finish("cells", args, rows, columns, claims_of(rows) + failures)


if __name__ == "__main__":
    main()
