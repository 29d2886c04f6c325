"""Tries our modules with the tools around torch and writes the table of docs/tools.md.

    python tools/tool_table.py               # all tools, some ten minutes on two cores
    python tools/tool_table.py peft DDP      # these again, the others as they were

It runs on the CPU, and needs a C++ compiler and onnx, onnxscript, onnxruntime, peft and safetensors. Each
tool has a process of its own. A cell says "yes" if the tool's result equals that of the module as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import io
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim

import lltm_ext

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/tools.md"
BEGIN, END = "<!-- by tools/tool_table.py -->\n", "<!-- end -->\n"
SIZE, H, T, B = 8, 6, 5, 4
PEERS = ("onnx", "onnxscript", "onnxruntime", "peft", "safetensors")


class Unchanged(Exception):
    """The tool left the module as it is, and the result is right."""


class Column(NamedTuple):
    make: tuple[Callable[[], nn.Module], ...]
    products: int = 0  # in a call, for the operation counter
    tolerance: float = 1e-5
    steps: bool = True  # whether the input is [T, B, SIZE], else [B, SIZE]


COLUMNS = {
    "LSTM": Column((lambda: lltm_ext.LSTM(SIZE, H),), T * B * 4 * H * (SIZE + H)),
    "GRU": Column((lambda: lltm_ext.GRU(SIZE, H),), T * B * 3 * H * (SIZE + H)),
    "RNN": Column((lambda: lltm_ext.RNN(SIZE, H),), T * B * H * (SIZE + H)),
    "LLTM": Column((lambda: lltm_ext.LLTM(SIZE, H),), T * B * 3 * H * (SIZE + H)),
    "Recurrent": Column(
        (lambda: lltm_ext.Recurrent(lltm_ext.cells.ugrnn, SIZE, H),), T * B * 2 * H * (SIZE + H)
    ),
    "LLTMCell": Column((lambda: lltm_ext.LLTMCell(SIZE, H),), B * 3 * H * (SIZE + H), steps=False),
    "Linear": Column((lambda: lltm_ext.Linear(SIZE, H),), T * B * SIZE * H),
    "Linear with activation": Column(
        (lambda: lltm_ext.Linear(SIZE, H, activation="gelu"),), T * B * SIZE * H
    ),
    "ReLU, Sigmoid": Column((lltm_ext.ReLU, lltm_ext.Sigmoid)),
    "Round, Floor, Ceil, Trunc": Column((lltm_ext.Round, lltm_ext.Floor, lltm_ext.Ceil, lltm_ext.Trunc)),
    "Binarize": Column((lambda: lltm_ext.Binarize(0.1),)),
    "FakeQuantize": Column((lambda: lltm_ext.FakeQuantize(-8, 7, 0.1),)),
    "StochasticRound": Column((lambda: lltm_ext.StochasticRound(torch.bfloat16),), tolerance=2**-6),
}


class Model(nn.Module):
    """A module in a model, behind a layer of torch."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.layer = layer

    def forward(self, input: Tensor) -> Any:
        return self.layer(self.first(input))


class Case(NamedTuple):
    """A model to try a tool with."""

    column: Column
    model: nn.Module
    folder: Path

    def input(self, steps: int = T, batch: int = B) -> Tensor:
        return torch.randn(steps, batch, SIZE) if self.column.steps else torch.randn(batch, SIZE)

    def compare(self, function: Callable[[Tensor], Any], *inputs: Tensor, near: float | None = None) -> None:
        for input in inputs or (self.input(),):
            found, expected = (torch.utils._pytree.tree_leaves(f(input)) for f in (function, self.model))
            assert len(found) == len(expected)
            for x, y in zip(found, expected, strict=True):
                x = x if isinstance(x, Tensor) else torch.as_tensor(x)
                tolerance = near or self.column.tolerance
                torch.testing.assert_close(x.float(), y.float(), rtol=tolerance, atol=tolerance)

    def compare_training(
        self, function: nn.Module, parameters: Callable[[nn.Module], Any] | None = None
    ) -> None:
        """Compares results and the gradients of all parameters."""
        self.compare(function)
        input, gradients = self.input(), []
        for model in (function, self.model):
            model.zero_grad()
            output = torch.utils._pytree.tree_leaves(model(input))[0]
            output.float().square().sum().backward()
            gradients.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
        assert len(gradients[0]) == len(gradients[1]) > 0
        tolerance = 20 * self.column.tolerance
        torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


# ---- the tools ---------------------------------------------------------------------------------------------


def fx(case: Case) -> None:
    traced = torch.fx.symbolic_trace(case.model)
    assert any(node.op == "call_module" and node.target == "layer" for node in traced.graph.nodes)
    case.compare(traced, case.input(3, 2))


def script(case: Case) -> None:
    torch.jit.script(copy.deepcopy(case.model)).save(case.folder / "model.pt")
    case.compare(torch.jit.load(case.folder / "model.pt"), case.input(3, 2))


def trace(case: Case) -> None:
    torch.jit.trace(case.model, case.input(), check_trace=False).save(case.folder / "model.pt")
    case.compare(torch.jit.load(case.folder / "model.pt"), case.input(), case.input(3, 2))


def onnx_by_trace(case: Case) -> None:
    run_onnx(case, dynamo=False)


def onnx_by_export(case: Case) -> None:
    run_onnx(case, dynamo=True)


def run_onnx(case: Case, dynamo: bool) -> None:
    import onnxruntime

    path, input = str(case.folder / "model.onnx"), case.input()
    torch.onnx.export(case.model, (input,), path, dynamo=dynamo, input_names=["input"])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    case.compare(lambda x: session.run(None, {"input": x.numpy()}), input)


def export(case: Case) -> None:
    run_export(case, None, case.input())


def export_dynamic(case: Case) -> None:
    sizes = {0: Dim("length"), 1: Dim("batch")} if case.column.steps else {0: Dim("batch")}
    run_export(case, {"input": sizes}, case.input(), case.input(3, 7))


def run_export(case: Case, sizes: Any, *inputs: Tensor) -> None:
    program = torch.export.export(case.model, inputs[:1], dynamic_shapes=sizes)
    torch.export.save(program, case.folder / "model.pt2")
    case.compare(torch.export.load(case.folder / "model.pt2").module(), *inputs)


def aot_inductor(case: Case) -> None:
    program, path = torch.export.export(case.model, (case.input(),)), str(case.folder / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    case.compare(torch._inductor.aoti_load_package(path))


def compiled(case: Case) -> None:
    torch._dynamo.reset()
    case.compare_training(torch.compile(copy.deepcopy(case.model), fullgraph=True))


def flop_counter(case: Case) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        case.model(case.input())
    rows = T * B if case.column.steps else B
    assert counter.get_total_flops() == 2 * (rows * SIZE * SIZE + case.column.products)


def quantize_dynamic(case: Case) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(case.model), {"layer"})
    check_quantized(case, quantized)


def quantize_fx(case: Case) -> None:
    from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    is_dynamic = isinstance(case.model.layer, nn.RNNBase)
    config = default_dynamic_qconfig if is_dynamic else get_default_qconfig("x86")
    mapping = QConfigMapping().set_module_name("layer", config)
    prepared = prepare_fx(copy.deepcopy(case.model), mapping, (case.input(),))
    prepared(torch.cat([case.input() for _ in range(20)]))
    check_quantized(case, convert_fx(prepared))


def check_quantized(case: Case, quantized: nn.Module) -> None:
    if any(type(m).__module__.startswith("torch.ao.nn.quantized") for m in quantized.modules()):
        return case.compare(quantized, near=0.1)
    case.compare(quantized, near=0.1)  # an input or output may be quantized
    raise Unchanged


def fsdp(case: Case) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(case):
        mesh, model = init_device_mesh("cpu", (1,)), copy.deepcopy(case.model)
        fully_shard(model.layer, mesh=mesh)
        case.compare_training(fully_shard(model, mesh=mesh))


def ddp(case: Case) -> None:
    with process_group(case):
        case.compare_training(nn.parallel.DistributedDataParallel(copy.deepcopy(case.model)))


def checkpoint(case: Case) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": case.model.state_dict()}, checkpoint_id=case.folder)
    other = perturbed(case.model)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=case.folder)
    other.load_state_dict(state["model"])
    case.compare(other)


@contextlib.contextmanager
def process_group(case: Case) -> Any:
    store = torch.distributed.FileStore(str(case.folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def lora(case: Case) -> None:
    import peft

    wrapped = peft.get_peft_model(copy.deepcopy(case.model), peft.LoraConfig(target_modules=["layer"]))
    case.compare(wrapped)  # the adapter is zero at first
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    input = case.input()
    expected = wrapped(input)
    assert not torch.equal(expected, case.model(input))
    torch.testing.assert_close(wrapped.merge_and_unload()(input), expected, rtol=1e-4, atol=1e-4)


def safetensors(case: Case) -> None:
    from safetensors.torch import load_model, save_model

    save_model(case.model, str(case.folder / "model.safetensors"))
    other = perturbed(case.model)
    load_model(other, str(case.folder / "model.safetensors"))
    case.compare(other)


def perturbed(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for x in other.state_dict().values():
            x.add_(1)
    return other


def copies(case: Case) -> None:
    file = io.BytesIO()
    torch.save(case.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (
        copy.copy(case.model),
        copy.deepcopy(case.model),
        pickle.loads(pickle.dumps(case.model)),
        loaded,
    ):
        case.compare_training(other)


def functions(case: Case) -> None:
    """functional_call, grad and vmap of torch.func, for two models at once."""
    models = [case.model, perturbed(case.model)]
    parameters, buffers = torch.func.stack_module_state(models)
    input = case.input()

    def loss(values: Any, others: Any) -> Tensor:
        output = torch.func.functional_call(case.model, (values, others), (input,))
        return torch.utils._pytree.tree_leaves(output)[0].float().square().sum()

    found = torch.vmap(torch.func.grad(loss), randomness="different")(parameters, buffers)
    for i, model in enumerate(models):
        expected = torch.func.grad(loss)(dict(model.named_parameters()), dict(model.named_buffers()))
        tolerance = 20 * case.column.tolerance
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name][i], gradient, rtol=tolerance, atol=tolerance)
    case.compare(lambda x: torch.func.functional_call(case.model, case.model.state_dict(), (x,)))


class Tool(NamedTuple):
    run: Callable[[Case], None]
    does: str
    compiles: bool = False  # whether a call takes seconds: of several modules in a column, the first is tried


TOOLS = {
    "torch.compile": Tool(compiled, "fullgraph=True; forward and gradients", True),
    "torch.export": Tool(export, "saved and loaded"),
    "torch.export, dynamic": Tool(export_dynamic, "the same, for any length and batch"),
    "AOTInductor": Tool(aot_inductor, "an exported program as a compiled package", True),
    "ONNX, dynamo=True": Tool(onnx_by_export, "torch.onnx.export, run by onnxruntime"),
    "ONNX, dynamo=False": Tool(onnx_by_trace, "the same by torch.jit.trace"),
    "torch.jit.script": Tool(script, "saved and loaded; called with other sizes"),
    "torch.jit.trace": Tool(trace, "saved and loaded; called with other sizes"),
    "torch.fx": Tool(fx, "symbolic_trace makes a node of the module"),
    "torch.func": Tool(functions, "functional_call, vmap and grad for an ensemble of two models"),
    "copy, pickle": Tool(copies, "copy, deepcopy, pickle, torch.save of the model"),
    "safetensors": Tool(safetensors, "save_model and load_model"),
    "checkpoint": Tool(checkpoint, "torch.distributed.checkpoint of the state_dict"),
    "DDP": Tool(ddp, "DistributedDataParallel with one process, on gloo; forward and gradients"),
    "FSDP2": Tool(fsdp, "fully_shard of the module and the model, likewise"),
    "FlopCounterMode": Tool(flop_counter, "counts the products of a call"),
    "peft": Tool(lora, "LoRA on the module; merged with its weights"),
    "quantize_dynamic": Tool(quantize_dynamic, "torch.ao.quantization, eager; int8 weights"),
    "FX quantization": Tool(quantize_fx, "prepare_fx, convert_fx; int8"),
}
ONNX = ("ONNX, dynamo=True", "ONNX, dynamo=False")
QUANTIZERS = ("quantize_dynamic", "FX quantization")
FLOATING = "The module stays in floating point, with the right results: "
# Why a tool does not take a module: (the tools, the modules or None for all, the reason).
REASONS = (
    (ONNX, ("StochasticRound",), "ONNX does not round at random."),
    (
        ("AOTInductor",),
        ("StochasticRound",),
        "AOTInductor of torch 2.11 gives the op another dtype than the program says. The op refuses it.",
    ),
    (
        ONNX[1:],
        ("Round, Floor, Ceil, Trunc",),
        "The older exporter has no rule for `Trunc`, nor for torch's.",
    ),
    (("peft",), None, "LoRA is for affine maps; peft knows them by their class and refuses others."),
    (
        QUANTIZERS,
        ("LSTM", "GRU"),
        f"{FLOATING}a quantizer finds torch's layers by their exact class. "
        "Call `lltm_ext.to_torch(model)` first ([drop-in page](dropin.md#tools-that-look-for-torchs-class)).",
    ),
    (
        QUANTIZERS,
        ("Linear",),
        f"{FLOATING}a quantizer finds nn.Linear by its exact class. Quantize a model with nn.Linear, "
        "which loads the same state_dict.",
    ),
    (QUANTIZERS, None, f"{FLOATING}there is no integer kernel for it, nor for torch's RNN."),
)


# ---- the page ----------------------------------------------------------------------------------------------


def attempt(tool: str, column: str) -> str:
    """ "yes", "unchanged" or the error."""
    of_column, of_tool = COLUMNS[column], TOOLS[tool]
    for make in of_column.make[: 1 if of_tool.compiles else None]:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            case = Case(of_column, Model(make()).eval(), Path(folder))
            try:
                of_tool.run(case)
            except Unchanged:
                return "unchanged"
            except Exception as error:
                return f"{type(error).__name__}: {str(error).strip()[:300]}"
    return "yes"


def in_process(tool: str) -> dict[str, str]:
    """Tries a tool with all modules, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-P", __file__, tool, "--write", str(results)]
        subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=False)
        found = json.loads(results.read_text()) if results.is_file() else {}
    return {column: found.get(column, "the process ended") for column in COLUMNS}


def reason_of(tool: str, column: str) -> str | None:
    for tools, columns, reason in REASONS:
        if tool in tools and (columns is None or column in columns):
            return reason
    return None


def on_page() -> dict[str, dict[str, str]]:
    """The results on the page. Of a reason this is all there is: that the result is not "yes"."""
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {
        tool: dict(zip(COLUMNS, cells, strict=True)) for tool, *cells in rows if tool in TOOLS and cells[1:]
    }


def table(results: dict[str, dict[str, str]]) -> str:
    """The table, and the reasons of the cells that have their numbers."""
    numbers: dict[str, int] = {}
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for tool in TOOLS:
        cells = []
        for column in COLUMNS:
            result, reason = results[tool][column], reason_of(tool, column)
            if result != "yes" and (reason is None or (tool in QUANTIZERS and "Error" in result)):
                raise SystemExit(f"REASONS has none for {tool} of {column}: {result}")
            cells.append(
                "yes" if result == "yes" else str(numbers.setdefault(reason or "", len(numbers) + 1))
            )
        lines.append(f"| {tool} | " + " | ".join(cells) + " |")
    reasons = [f"{number}. {reason}" for reason, number in numbers.items()]
    does = [f"| {name} | {tool.does} |" for name, tool in TOOLS.items()]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PEERS)
    return "\n".join(
        [
            *lines,
            "",
            *reasons,
            "",
            "| tool | what is tried |",
            "|---|---|",
            *does,
            "",
            f"With torch {torch.__version__}, {versions} and Python {platform.python_version()}, on the CPU.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tools", nargs="*", choices=[[], *TOOLS], help="which to try, by default all")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        warnings.simplefilter("ignore")
        found = {}
        for column in COLUMNS:
            found[column] = attempt(args.tools[0], column)
            args.write.write_text(json.dumps(found))
        return 0
    results = on_page() if args.tools else {}
    for tool in args.tools or TOOLS:
        results[tool] = in_process(tool)
        for column, result in results[tool].items():
            print(f"{tool}: {column}: {result}")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table(results) + END + rest.split(END)[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
