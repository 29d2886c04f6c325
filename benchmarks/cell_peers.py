"""Other libraries' layers of cells that benchmarks/recurrence.py compares: torchrl's, snntorch's, FlashRNN's.

    python -m pip install torchrl snntorch flashrnn einops

torchrl's and FlashRNN's kernels are compiled at their first use, torchrl's in some minutes.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

TORCHRL = "torchrl's DreamerV3BlockGRU"
SNNTORCH = "snntorch's RLeaky in a loop"
FLASHRNN = "FlashRNN's sLSTM"


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
    """FlashRNN's fused kernel of an sLSTM with heads, for projections [T, B, 4*H] in its own layout."""

    def __init__(self, batch: int, hidden: int, heads: int, device: torch.device, dtype: torch.dtype):
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
            function="slstm",
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


def gpu_info(device: int) -> dict[str, int]:
    """What FlashRNN asks of the GPU before it divides the work."""
    found = torch.cuda.get_device_properties(device)
    return {
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": found.regs_per_multiprocessor,
        "multiProcessorCount": found.multi_processor_count,
        "sharedMemPerBlockOptin": found.shared_memory_per_block_optin,
    }
